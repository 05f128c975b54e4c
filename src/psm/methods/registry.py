"""The table of methods, open to more rows, and the plugins that add them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psm.config.parts import Part
from psm.methods.spec import KINDS, MethodSpec
from psm.utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    name: str
    title: str
    reference: str
    spec: MethodSpec
    builtin: bool = False


METHODS: dict[str, Method] = {}


def register_method(
    name: str,
    title: str,
    reference: str = "",
    base: str | None = None,
    *,
    replace: bool = False,
    **parts: Any,
) -> Method:
    """Add a method: a base method with some of its parts changed. Checked before it is added.

    Examples:
        >>> register_method("psm2", "PSM with two neighbors", positives={"k": 2})  # doctest: +SKIP

    Args:
        name: what ``method=`` and ``get_method`` call it.
        title: a line for tables and pages.
        reference: where it is described.
        base: the method that it starts from; None: PSM.
        replace: replace a method of that name, a built-in one too.
        parts: by group: a part's name, settings or a part, as in ``MethodSpec.override``.
    """
    if name in METHODS and not replace:
        owner = "built in" if METHODS[name].builtin else "registered already"
        raise UserError(f"method {name!r} is {owner}: choose another name, or give replace=True.")
    spec = (find_method(base).spec if base else MethodSpec()).override(parts)
    METHODS[name] = Method(name, title, reference, spec)
    return METHODS[name]


def unregister_method(name: str) -> None:
    """Forget a user's method."""
    if name in METHODS and METHODS[name].builtin:
        raise UserError(f"method {name!r} is built in and stays.")
    METHODS.pop(name, None)


def register_part(kind: str, name: str, *, replace: bool = False) -> Callable[[type[Part]], type[Part]]:
    """Class decorator: add a part of a kind (positives, negatives, sampler, weighting, objective) under a name."""
    if kind not in KINDS:
        raise UserError(f"{kind!r} is no kind of part{did_you_mean(kind, KINDS)}: choose one of {', '.join(KINDS)}.")
    return KINDS[kind].register(name, replace=replace)


def find_method(name: str) -> Method:
    """The row of that name."""
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise UserError(
            f"method={name} is unknown{hint}: choose one of {', '.join(METHODS)}, or give plugins=FILE.py with the "
            "file that registers it; see `psm methods`."
        )
    return METHODS[name]


def get_method(name: str, **overrides: Any) -> MethodSpec:
    """A method's parts, with some of them changed: ``get_method("psm", positives={"k": 3})``."""
    return find_method(name).spec.override(overrides)


def list_methods() -> list[str]:
    """Names of all methods, the built-in ones first."""
    return list(METHODS)
