"""A configuration key: type, default, meaning and bounds, all of it in the dataclass field."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from psm.utils.errors import did_you_mean

# `int | Unset` is a setting that a user may leave to the method or the data: `int | None` in a user's configuration
# (Unset = None), `int` in that of a run (Unset = Never). One line a field serves both types. Covariant: a group that
# a run has resolved may stand where one of a user's is asked for.
Unset = TypeVar("Unset", covariant=True)


@dataclass(frozen=True)
class Bounds:
    """What values a key takes; for lists each item, and how many of them."""

    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    length: int | None = None
    ascending: bool = False
    filled: bool = False  # neither empty text nor an empty list

    def __str__(self) -> str:
        """The bounds as a phrase: '1 or more', 'from 0 to 1', 'auto, small or large'."""
        if self.choices:
            return listed(self.choices)
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least:g} to {self.at_most:g}"
        low = f"{self.at_least:g} or more" if self.at_least is not None else ""
        low = f"above {self.above:g}" if self.above is not None else low
        high = f"at most {self.at_most:g}" if self.at_most is not None else ""
        high = f"below {self.below:g}" if self.below is not None else high
        each = " and ".join(word for word in (low, high) if word)
        if self.length is None:
            return each
        order = ", the smaller one first" if self.ascending else ""
        return f"{self.length} numbers{f', each {each}' if each else ''}{order}"

    def problem(self, value: Any) -> str:
        """What is wrong with a value, as the end of a sentence that begins with it; empty if nothing is."""
        if isinstance(value, (list, tuple)):
            return self._problem_of_list(value)
        if self.choices and value not in self.choices:
            return f"is unknown{did_you_mean(str(value), self.choices)}: choose one of {', '.join(self.choices)}"
        if self.filled and value == "":
            return "is empty"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low = (self.at_least is not None and not value >= self.at_least) or (
                self.above is not None and not value > self.above
            )
            high = (self.at_most is not None and value > self.at_most) or (
                self.below is not None and value >= self.below
            )
            if low or high:
                number = "" if str(self)[0].isdigit() else "a number "
                return f"is too {'small' if low else 'large'}: give {number}{self}"
        return ""

    def _problem_of_list(self, values: Sequence[Any]) -> str:
        if self.filled and not values:
            return "leaves nothing: name some, or leave it out"
        if self.length is not None and len(values) != self.length:
            return f"has {len(values)} of them: give {self}"
        if self.ascending and list(values) != sorted(values):
            return f"is not in order: give {self}"
        wrong = next((said for value in values if (said := self.problem(value))), "")
        return f"{wrong.partition(': ')[0]}: give {self}" if wrong and not self.choices else wrong


def key(
    default: Any,
    meaning: str,
    *,
    open: str = "",
    named: bool = False,
    neutral: bool = False,
    topic: str = "",
    **bounds: Any,
) -> Any:
    """A configuration key.

    Args:
        default: its value where the user says nothing; a dataclass for a group of keys.
        meaning: a line for ``--help``.
        open: of a ``dict[str, Any]``: the entry that a plain name stands for (with ``open="name"``, `group=NAME` is
            `group.name=NAME`); any other entry of the group may be set too.
        named: of a ``dict[str, Any]``: `group=[a,b]` stands for the entries a and b without settings.
        neutral: the default changes nothing, so that experiments leave it out of a run's name.
        topic: of a key of the top level: the group of ``--help`` that it is shown in; empty: among the common keys.
        bounds: the fields of `Bounds`, for example ``at_least=1`` or ``choices=("a", "b")``.
    """
    metadata = {"meaning": meaning, "bounds": Bounds(**bounds), "open": open, "named": named}
    metadata |= {"neutral": neutral, "topic": topic}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Row(NamedTuple):
    """One key of a command, nested ones dotted."""

    key: str
    type: str
    default: str
    meaning: str
    hint: Any
    bounds: Bounds = Bounds()
    open: str = ""
    named: bool = False
    neutral: bool = False
    topic: str = ""

    @property
    def optional(self) -> bool:
        return any(kind is types.NoneType or kind is Unset for kind in get_args(self.hint))

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that its values may have, but for none."""
        if get_origin(self.hint) not in (Union, types.UnionType):
            return (self.hint,)
        return tuple(kind for kind in get_args(self.hint) if kind is not types.NoneType and kind is not Unset)

    @property
    def resolvable(self) -> bool:
        """True if none means: as the method or the data say, so that a run always has a value."""
        return Unset in get_args(self.hint)


def rows(schema: Any, prefix: str = "") -> Iterator[Row]:
    """Every key of a configuration class (or instance), nested ones dotted."""
    for name, hint, default, metadata in _fields(schema):
        group = group_class(hint)
        if group is not None:
            yield from rows(group, f"{prefix}{name}.")
        else:
            yield make_row(f"{prefix}{name}", hint, default, metadata)


def make_row(dotted: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Row:
    """A field of a dataclass as a key; fields that `key` did not make have neither meaning nor bounds."""
    more = {name: metadata[name] for name in ("bounds", "open", "named", "neutral", "topic") if name in metadata}
    return Row(dotted, type_name(hint), show(default), metadata.get("meaning", ""), hint, **more)


def _fields(schema: Any) -> Iterator[tuple[str, Any, Any, Mapping[str, Any]]]:
    schema = schema if isinstance(schema, type) else type(schema)
    hints, blank = get_type_hints(schema), schema()
    for f in fields(schema):
        yield f.name, hints[f.name], getattr(blank, f.name), f.metadata


def group_class(hint: Any) -> type | None:
    """The dataclass of a group of keys, with or without its parameter; None for a plain key."""
    origin = get_origin(hint) or hint
    return origin if isinstance(origin, type) and is_dataclass(origin) else None


def value_at(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


def type_name(hint: Any) -> str:
    """A type as users read it: text, whole number, number, true/false, list of numbers; 'number or none'."""
    if get_origin(hint) in (Union, types.UnionType):
        none = [kind for kind in get_args(hint) if kind is types.NoneType or kind is Unset]
        kinds = [type_name(kind) for kind in get_args(hint) if kind not in none]
        return listed([*kinds, *(["none"] if none else [])])
    if get_origin(hint) is list:
        item = type_name(get_args(hint)[0])
        return f"list of {item}{'' if item == 'text' else 's'}"
    if get_origin(hint) is dict:
        return "keys and values"
    return {str: "text", int: "whole number", float: "number", bool: "true/false"}[hint]


def listed(words: Sequence[str]) -> str:
    """'a', 'a or b', 'a, b or c'."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def show(value: Any, empty: str = "-") -> str:
    """A value as users write it, cut short where it is long."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, dict)) and not value:
        return empty
    if isinstance(value, (list, tuple)):
        text = f"[{','.join(show(item) for item in value[:20])}{',...' if len(value) > 20 else ''}]"
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}..."
