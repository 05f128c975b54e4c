"""Settings for each data set and method: published ones, and choices of the grid `settle`. Imports nothing heavy."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from psm.config.yaml_text import read_file, resolved
from psm.utils.errors import UserError
from psm.utils.files import write_text_atomically

FROM = "from"  # where an entry comes from; not a setting
PACKAGED = Path(__file__).with_name("tuned.yaml")

Entries = Mapping[str, Mapping[str, Mapping[str, Any]]]  # data -> method -> keys of `psm pretrain`


@cache
def read_tuned(path: str | None = None) -> Entries:
    """The entries of a file; None: of the one that comes with the package."""
    file = PACKAGED if path is None else Path(path).expanduser()
    content = resolved(read_file(file, "tuned"))
    if not _is_nested(content, depth=2):
        raise UserError(f"tuned={file} is not of the form data: method: key: value; `settle` writes such a file.")
    return content


def tuned_settings(entries: Entries, data: str, method: str) -> dict[str, Any]:
    """Keys of `psm pretrain` for a method on a data set, by the name that results have for it; empty without entry."""
    entry = entries.get(data, {}).get(method, {})
    return {key: value for key, value in entry.items() if key != FROM}


def write_tuned(path: Path, entries: Entries, about: str) -> None:
    """Write entries; ``about`` is a comment at the top."""
    text = "".join(f"# {line}\n" for line in about.splitlines())
    plain = {data: {method: dict(entry) for method, entry in methods.items()} for data, methods in entries.items()}
    write_text_atomically(path, text + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120))


def _is_nested(content: Any, depth: int) -> bool:
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        return False
    return depth == 0 or all(_is_nested(inner, depth - 1) for inner in content.values())
