"""Open parts: small registered classes that a method is composed of, each with settings of its own.

A part is a frozen dataclass: its fields are its settings, each with a default. A registry holds the parts of one kind
by name. Both are open: a user's file registers parts that are then known to the command line, the loss, the inspector
and every report.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from psm.config import values
from psm.config.keys import key, make_row
from psm.utils.errors import UserError, did_you_mean


def setting(default: Any, meaning: str, **bounds: Any) -> Any:
    """A setting of a part: its default, its line of meaning and, as for `psm.config.keys.key`, its bounds."""
    return key(default, meaning, **bounds)


@dataclasses.dataclass(frozen=True)
class Part:
    """Base of all parts. Subclasses are frozen dataclasses whose fields have defaults."""

    part_name: ClassVar[str] = ""  # set by the registry

    def validate(self, method: Any) -> Iterator[str]:
        """Sentences on what makes no sense in this method (a ``MethodSpec``); none if all is well."""
        return iter(())

    def describe(self) -> str:
        """The part in a few words, as tables and pages show it."""
        return self.part_name

    @property
    def builtin(self) -> bool:
        """True for the parts of this package."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


P = TypeVar("P", bound=Part)


class PartRegistry(Generic[P]):
    """The parts of one kind.

    Args:
        kind: the group of keys, for example ``positives``.
        selector: the key within the group that names the part, for example ``rule``.
        base: the class that every part of the kind extends.
    """

    def __init__(self, kind: str, selector: str, base: type[P]):
        self.kind, self.selector, self.base = kind, selector, base
        self._parts: dict[str, type[P]] = {}
        self._builtin: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def register(self, name: str, *, replace: bool = False) -> Callable[[type[P]], type[P]]:
        """Class decorator: make a part known under a name. A known name is refused unless ``replace`` is true."""

        def add(part: type[P]) -> type[P]:
            self._check(name, part, replace)
            part.part_name = name
            self._parts[name] = part
            if part.__module__.startswith("psm."):
                self._builtin.add(name)
            return part

        return add

    def unregister(self, name: str) -> None:
        """Forget a user's part."""
        if name in self._builtin:
            raise UserError(f"{self.kind} {name!r} is built in and stays.")
        self._parts.pop(name, None)

    def find(self, name: str) -> type[P]:
        """The part of a name, or of a dotted path such as ``mypackage.MyRule``."""
        if name in self._parts:
            return self._parts[name]
        if "." in name:
            return self._imported(name)
        hint = did_you_mean(name, self._parts)
        raise UserError(
            f"{self.kind}.{self.selector}={name} is unknown{hint}: choose one of {', '.join(self._parts)}, or give "
            "plugins=FILE.py with the file that registers it."
        )

    def build(self, given: "str | Mapping[str, Any] | P | None", base: P | None = None) -> P:
        """The part that ``given`` describes, on top of ``base``.

        Args:
            given: a name, a mapping of settings with or without the selector, a part, or None for ``base`` itself.
            base: the part whose settings hold where ``given`` names no other part.
        """
        if given is None and base is not None:
            return base
        if isinstance(given, self.base):
            return given
        if isinstance(given, str):
            given = {self.selector: given}
        if not isinstance(given, Mapping):
            raise UserError(f"{self.kind}={given!r} is neither a name, settings nor a part of that kind.")
        changes = {name: value for name, value in given.items() if name != self.selector and value is not None}
        name = given.get(self.selector)
        if base is None or (name is not None and name != base.part_name):
            if not isinstance(name, str):
                raise UserError(f"{self.kind}.{self.selector}= is missing: choose one of {', '.join(self._parts)}.")
            base = self.find(name)()
        return dataclasses.replace(base, **{key: self._value(base, key, value) for key, value in changes.items()})

    def to_dict(self, part: P) -> dict[str, Any]:
        """Selector and settings; ``build`` reads it back."""
        return {self.selector: part.part_name, **part.settings()}

    def _check(self, name: str, part: type[P], replace: bool) -> None:
        if not re.fullmatch(r"[A-Za-z][\w-]*", name):
            raise UserError(f"{self.kind} {name!r} is no name for a part: use letters, digits, - and _.")
        if not (isinstance(part, type) and issubclass(part, self.base)):
            raise UserError(f"{self.kind} {name!r} must be a subclass of {self.base.__name__}.")
        if name in self._parts and not replace:
            owner = "built in" if name in self._builtin else f"registered by {self._parts[name].__module__}"
            raise UserError(f"{self.kind} {name!r} is {owner}: choose another name, or give replace=True.")
        try:
            part()
        except TypeError as error:
            raise UserError(f"{self.kind} {name!r} cannot be made without arguments: {error}.") from None

    def _imported(self, path: str) -> type[P]:
        module, _, name = path.rpartition(".")
        try:
            part = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{self.kind}.{self.selector}={path} cannot be imported: {error}.") from None
        if not (isinstance(part, type) and issubclass(part, self.base)):
            raise UserError(f"{self.kind}.{self.selector}={path} is not a subclass of {self.base.__name__}.")
        if part not in self._parts.values():
            self._check("imported", part, replace=True)
            part.part_name = path
            self._parts[path] = part
        return part

    def _value(self, part: P, name: str, value: Any) -> Any:
        """A setting's value, checked against its type and what it allows."""
        fields = {field.name: field for field in dataclasses.fields(part)}
        dotted = f"{self.kind}.{name}"
        if name not in fields:
            others = [other for other in self if name in {f.name for f in dataclasses.fields(self._parts[other])}]
            hint = f"; {', '.join(others)} has it" if others else did_you_mean(name, fields)
            mine = ", ".join(fields) or "no settings"
            raise UserError(
                f"{dotted} is no setting of {self.kind}.{self.selector}={part.part_name}, which has {mine}{hint}."
            )
        field = fields[name]
        return check_value(dotted, value, get_type_hints(type(part))[name], field.metadata)


def check_value(dotted: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    """``value`` as the type ``hint`` (bool, int, float or str) and within its bounds, or a sentence on what is allowed.

    Settings of other types are the part's own to check.
    """
    if hint not in (bool, int, float, str):
        return value
    return values.check_value(value, make_row(dotted, hint, None, metadata))
