"""Encoders that are published with psm: found by name, fetched once, verified, kept in a folder of the user's."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from psm.utils.errors import UserError

PLACE = "PSM_ENCODERS"  # environment variable: a folder, or an address that files are fetched from
FOLDER = "release/encoders"  # of the repository: a folder for each encoder, as `psm export format=hf` writes it
HUB_WEIGHTS = "model.safetensors"  # in such a folder
TABLE = Path(__file__).with_name("published.json")  # written by release/publish.py


class PublishedEncoder(NamedTuple):
    """A published encoder: the checksum of its weights, and what it is."""

    name: str
    sha256: str
    about: str

    @property
    def file(self) -> str:
        return f"{self.name}/{HUB_WEIGHTS}"


def read_table(table: Path) -> list[PublishedEncoder]:
    """The rows of a JSON file."""
    return [PublishedEncoder(**row) for row in json.loads(table.read_text())]


PUBLISHED = tuple(read_table(TABLE))


def list_pretrained() -> list[PublishedEncoder]:
    """The encoders that `load_encoder` knows by name."""
    return list(PUBLISHED)


def cache_folder() -> Path:
    """Where fetched encoders are kept: in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "psm" / "encoders"


def find_published(name: str) -> Path | None:
    """The verified file of a published encoder; None if no encoder has that name.

    It is looked for in the folder that PSM_ENCODERS names, in the clone that psm runs from, and in the user's cache,
    where it is fetched to from the address that PSM_ENCODERS names.
    """
    encoder = next((row for row in PUBLISHED if row.name == name), None)
    if encoder is None:
        return None
    place = os.environ.get(PLACE, "")
    if place and "://" not in place:
        return _verified(Path(place).expanduser() / encoder.file, encoder)
    in_clone = TABLE.parents[3] / FOLDER / encoder.file
    if not place and in_clone.is_file():
        return _verified(in_clone, encoder)
    kept = cache_folder() / encoder.file
    if not kept.exists():
        by_hand = f"put {FOLDER}/{encoder.file} of psm's repository as {kept}"
        if not place:
            raise UserError(
                f"The encoder {name} is not in {kept.parent.parent}, and {PLACE} names no address to fetch it from: "
                f"{by_hand}, or set {PLACE} to a folder or an address that has it."
            )
        from psm.data.download import fetch
        from psm.utils.locking import locked

        kept.parent.mkdir(parents=True, exist_ok=True)
        with locked(kept.with_name(f".{kept.name}.lock")):
            if not kept.exists():  # another process may have been faster
                fetch(f"{place.rstrip('/')}/{encoder.file}", kept, f"sha256:{encoder.sha256}", otherwise=by_hand)
    return _verified(kept, encoder)


def _verified(file: Path, encoder: PublishedEncoder) -> Path:
    if not file.is_file():
        raise UserError(f"{PLACE} has no {encoder.file}, {file}: it is in {FOLDER} of psm's repository.")
    from psm.data.download import matches  # with locks and downloads, which an encoder from a path does not need

    if not matches(file, f"sha256:{encoder.sha256}"):
        raise UserError(f"{file} is not the published encoder {encoder.name}, its sha256 differs: remove it.")
    return file
