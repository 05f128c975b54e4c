"""Strict YAML: plain data only, bounded in size and depth, scalars by YAML 1.2's core schema.

No anchors, tags or duplicate keys. A plain (unquoted) scalar stays a `Plain` text until the key that it is for says of
which type it is: `data: no` is the text "no", and `devices: 010` the text "010".
"""

import logging
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from psm.utils.checksums import is_intact
from psm.utils.errors import UserError

log = logging.getLogger("psm")

LARGEST = 256 * 1024  # bytes; the settings of a run are about 3 KB
DEEPEST = 16
DIGITS = 40  # of a number

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.?inf|\.?nan", re.IGNORECASE)

_ITEM = re.compile(r"""(?:\{[^{}]*\}|'[^']*'|"[^"]*"|[^,])+""")


class Plain(str):
    """An unquoted scalar, not yet read as text, number, boolean or nothing."""

    __slots__ = ()

    def resolve(self) -> Any:
        """The value by YAML 1.2's core schema; decimal numbers only, so that 010 is ten."""
        if self in _NULL:
            return None
        if self in _BOOLEANS:
            return _BOOLEANS[self]
        number = read_number(self)
        return str(self) if number is None else number


def read_number(text: str) -> int | float | None:
    """The number that a text is, or None. Too many digits for any use are infinity, as in 1e999."""
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= DIGITS else math.inf
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else None


def split_texts(text: str) -> list[str]:
    """The items of `[a, b-{0..9}.tar, 'c, d']`: commas within braces or quotes do not separate them."""
    items = [match.group().strip() for match in _ITEM.finditer(text.strip()[1:-1])]
    return [
        item[1:-1] if len(item) > 1 and item[0] == item[-1] and item[0] in "'\"" else item for item in items if item
    ]


def read_file(path: str | Path, key: str = "config") -> dict[str, Any]:
    """The keys and values of a YAML file, as nested dictionaries with plain scalars unread.

    Args:
        path: of the file.
        key: the one that named it, for errors.
    """
    source = f"{key}={path}"
    try:
        file = Path(path).expanduser()
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):
            raise UserError(f"{source} is not a regular file: give a YAML file such as a run's config.yaml.")
        if about.st_size > LARGEST:
            raise UserError(f"{source} has {about.st_size:,} bytes: settings take at most {LARGEST:,}; check the name.")
        text = file.read_bytes().decode()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name, bytes that are not UTF-8
        said = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UserError(f"{source} cannot be read: {said}.") from None
    if not is_intact(text):
        log.warning("%s differs from the checksum in its last line: if you did not edit it, it is damaged.", source)
    content = read_text(text, source)
    if not isinstance(content, dict) and content not in (None, Plain("")):
        raise UserError(f"{source} must hold keys and values, such as `epochs: 200`.")
    return content or {}


def resolved(content: Any) -> Any:
    """Nested dictionaries and lists with every plain scalar read by YAML's own rules, where no key says its type."""
    if isinstance(content, dict):
        return {name: resolved(value) for name, value in content.items()}
    if isinstance(content, list):
        return [resolved(item) for item in content]
    return content.resolve() if isinstance(content, Plain) else content


def read_text(text: str, source: str) -> Any:
    """One YAML document as dictionaries, lists, text and `Plain` scalars; ``source`` names it in errors."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = (event for event in yaml.parse(text, Loader=loader) if not isinstance(event, _FRAME))
        first = next(events, None)
        content = None if first is None else _node(first, events, source, DEEPEST)
        if next(events, None) is not None:
            raise UserError(f"{source} holds more than one document: keep one.")
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from None
    return content


_FRAME = (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)


def _node(event: yaml.Event, events: Iterator[yaml.Event], source: str, depth: int) -> Any:
    where = f"{source}, line {event.start_mark.line + 1}:"
    if isinstance(event, yaml.AliasEvent):
        raise UserError(f"{where} *{event.anchor} repeats another part of the file: write its values out.")
    if event.tag is not None:
        raise UserError(f"{where} the tag {event.tag} is not allowed: give plain values.")
    if isinstance(event, yaml.ScalarEvent):
        return event.value if event.style in ("'", '"', "|", ">") else Plain(event.value)
    if depth == 0:
        raise UserError(f"{where} nested more than {DEEPEST} levels deep: no setting is.")
    if isinstance(event, yaml.SequenceStartEvent):
        ends = yaml.SequenceEndEvent
        return [_node(item, events, source, depth - 1) for item in _until(ends, events)]
    return _mapping(events, source, depth)


def _mapping(events: Iterator[yaml.Event], source: str, depth: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for event in _until(yaml.MappingEndEvent, events):
        where = f"{source}, line {event.start_mark.line + 1}:"
        if not isinstance(event, yaml.ScalarEvent):
            raise UserError(f"{where} a key must be a name, such as `epochs`.")
        name = str(event.value)
        if name in content:
            raise UserError(f"{where} {name} is set twice: keep one of them.")
        content[name] = _node(next(events), events, source, depth - 1)
    return content


def _until(end: type[yaml.Event], events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    while not isinstance(event := next(events), end):
        yield event
