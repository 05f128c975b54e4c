"""Help on the groups of keys that describe a method, from the registered parts themselves."""

from dataclasses import Field, fields
from typing import Any

from psm.config.help import entry, wrapped
from psm.methods.spec import KINDS, MethodSpec


def method_group_help(group: str) -> str:
    """The parts of a kind with their settings, or the settings of a typed group; PSM's values as defaults."""
    if group not in KINDS:
        settings = getattr(MethodSpec(), group)
        return "\n".join([*wrapped(f"{group}: {_doc(type(settings))}"), "", *_settings(group, settings)])
    kind = KINDS[group]
    lines = wrapped(f"{group}={'|'.join(kind)}, short for {group}.{kind.selector}=NAME; not given: as the method says.")
    for name in kind:
        part = kind.find(name)
        lines += ["", *entry(f"{group}={name}", _doc(part)), *_settings(group, part())]
    return "\n".join(lines)


def _settings(group: str, settings: Any) -> list[str]:
    lines = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        shown = str(value).lower() if isinstance(value, bool) else value
        lines += entry(f"{group}.{field.name}={shown}", field.metadata.get("meaning", "") + _bounds(field))
    return lines


def _bounds(field: "Field[Any]") -> str:
    bounds = str(field.metadata["bounds"]) if "bounds" in field.metadata else ""
    return f" ({bounds})" if bounds else ""


def _doc(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split())
