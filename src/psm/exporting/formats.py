"""The open table of formats: what each writes, how it is loaded where it will be used, and the lines that do so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from psm.exporting.source import Source
from psm.utils.errors import UserError, did_you_mean

Features = Callable[[Tensor], Tensor]  # images as the file takes them -> features (B, F)
Description = Mapping[str, Any]  # what a file says of itself, see `Source.description`


@dataclass(frozen=True)
class Format:
    """A format of `psm export`."""

    name: str
    suffixes: tuple[str, ...]  # of its files, the usual one first; empty: a folder
    write: Callable[[Source, Path, Description], None]  # writes the file, or into the folder, with its description
    load: Callable[[Source, Path], Features]  # as its users load it, not as psm does
    usage: Callable[[Source, str], list[str]]  # lines of Python that use the file of that name
    refuse: Callable[[Source], None] = lambda source: None  # raises UserError for an encoder that it cannot hold
    graph: bool = False  # holds the whole computation, not the weights alone
    needs: tuple[str, ...] = ()  # packages that write and load it
    extra: str = ""  # of psm that installs them


FORMATS: dict[str, Format] = {}


def register_format(entry: Format) -> Format:
    """Add a format to the table, or replace the one of its name."""
    FORMATS[entry.name] = entry
    return entry


def find_format(name: str | None, out: str | None) -> Format:
    """The format of that name or, without one, the only one whose files end as ``out`` does."""
    if name is not None:
        if name not in FORMATS:
            raise UserError(f"format={name} is unknown{did_you_mean(name, FORMATS)}: choose one of {_names()}.")
        return FORMATS[name]
    if out is None:
        raise UserError(f"format= is missing: give one of {_names()}.")
    suffix = Path(out).suffix
    fitting = [entry for entry in FORMATS.values() if entry.suffixes[:1] == (suffix,)]
    if len(fitting) != 1:
        raise UserError(f"format= is missing, and out={out} does not tell: give one of {_names()}.")
    return fitting[0]


def _names() -> str:
    return ", ".join(FORMATS)
