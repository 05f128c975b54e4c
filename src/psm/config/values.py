"""From what a user wrote to a value of a key's type; what cannot be read is answered in a sentence."""

import math
import os
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from psm.config.keys import Row, rows, show, value_at
from psm.config.yaml_text import Plain, read_number
from psm.utils.errors import UserError


class _Mismatch(Exception):
    """A value is not of the type."""


def convert(dotted: str, value: Any, row: Row) -> Any:
    """The value for a key: text from files and arguments is read by the key's type, numbers must be finite."""
    value = _plain_python(value)
    _refuse_unusable(dotted, value, row)
    if get_origin(row.hint) is dict:
        return read_freely(value)
    if row.optional and (value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", ""))):
        return None
    # Anything can be read as text, so that comes last; but a text for a key of text or lists is no list of one.
    whole = str in row.kinds and isinstance(value, str)
    for kind in sorted(row.kinds, key=lambda kind: kind is str):
        if whole and get_origin(kind) is list:
            continue
        try:
            return _as(kind, value)
        except _Mismatch:
            continue
    raise UserError(f"{dotted}={show(value, '')} is not {_article(row.type)}{_meaning(row)}.")


def check_value(value: Any, row: Row) -> Any:
    """The value for a key, of its type and within its bounds."""
    value = convert(row.key, value, row)
    if value is not None and (problem := row.bounds.problem(value)):
        advice = ", or none" if row.optional else ""
        raise UserError(f"{row.key}={show(value, '')} {problem}{advice}.")
    return value


def check_values(config: Any, prefix: str = "") -> None:
    """Refuse, in a sentence, any value of a configuration (or of a group of it) that its key does not take."""
    for row in rows(config, prefix):
        value = value_at(config, row.key.removeprefix(prefix))
        checked = check_value(value, row)
        if get_origin(row.hint) is not dict and _has_text(value) and not _has_text(checked):
            raise UserError(f"{row.key}={value!r} is not {_article(row.type)}{_meaning(row)}.")


def _has_text(value: Any) -> bool:
    return any(isinstance(item, str) for item in (value if isinstance(value, (list, tuple)) else [value]))


def read_freely(value: Any) -> Any:
    """A value for a key of any type: unquoted text is a number, true, false or nothing where it looks like one."""
    if isinstance(value, Plain):
        return value.resolve()
    if isinstance(value, (list, tuple)):
        return [read_freely(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): read_freely(item) for name, item in value.items()}
    return value


def _plain_python(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's own; paths as text."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _refuse_unusable(dotted: str, value: Any, row: Row) -> None:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        number = read_number(item) if isinstance(item, str) and str not in row.kinds else item
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{dotted}={show(value)} is not finite{_meaning(row)}.")
        if isinstance(number, int) and number.bit_length() > 63:
            raise UserError(f"{dotted} is given more than 63 bits{_meaning(row)}.")


def _as(kind: Any, value: Any) -> Any:
    if get_origin(kind) is list:
        (item_kind,) = get_args(kind)
        items = [value] if item_kind is str and isinstance(value, str) and value else value
        if not isinstance(items, (list, tuple)):
            raise _Mismatch
        return [_as(item_kind, item) for item in items]
    if kind is str:
        if isinstance(value, bool):
            return str(value).lower()
        if not isinstance(value, (str, int, float)):
            raise _Mismatch
        return str(value)
    read = Plain(value.strip()).resolve() if isinstance(value, str) else value
    if kind is bool:
        if not isinstance(read, bool):
            raise _Mismatch
        return read
    if isinstance(read, bool) or not isinstance(read, (int, float)):
        raise _Mismatch
    if kind is int:
        if read != int(read):
            raise _Mismatch
        return int(read)
    return float(read)


def _article(name: str) -> str:
    return name if name.startswith(("true", "keys", "text")) else f"a {name}"


def _meaning(row: Row) -> str:
    return f": {row.meaning}" if row.meaning else ""
