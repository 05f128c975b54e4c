"""Publish the encoder of a finished run, so that `psm.load_encoder("NAME")` and `init=NAME` know it.

    python release/publish.py RUN NAME "what it is, in a line"

Writes release/encoders/NAME (weights, model card, configuration, the run's settings) by `psm export format=hf`, and the
checksum of the weights into src/psm/models/published.json; then loads the encoder by its name and compares it with that
of the run. Publishing a name again replaces it. Score the run first (`psm evaluate RUN`): the card shows the scores.
"""

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import psm
from psm.models.published import FOLDER, HUB_WEIGHTS, TABLE, PublishedEncoder, read_table
from psm.utils.errors import UserError
from psm.utils.files import write_text_atomically
from psm.utils.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def publish(run: Path, name: str, about: str, shelf: Path = ROOT / FOLDER, table: Path = TABLE) -> PublishedEncoder:
    """Export the encoder, enter it into the table, and check that the file is the run's encoder.

    Args:
        run: folder of a finished run with scores.
        name: what users write; small letters, digits and hyphens.
        about: a line for lists.
        shelf: folder that receives a folder of that name.
        table: JSON file with all published encoders.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"NAME={name} must be small letters and digits, in words joined by hyphens.")
    folder = RunFolder(run)
    if not folder.encoder.exists():
        raise UserError(f"{run} has no encoder: give the folder of a finished run.")
    if not folder.scores.exists():
        raise UserError(f"{run} has no scores for the model card: run `psm evaluate {run}` first.")
    exported = psm.export(folder.encoder, format="hf", out=shelf / name, name=name, pages=False, overwrite=True)
    weights = exported.path / HUB_WEIGHTS
    check_same(psm.load_encoder(folder.encoder), psm.load_encoder(weights))
    entry = PublishedEncoder(name, hashlib.sha256(weights.read_bytes()).hexdigest(), about)
    entries = sorted([*(row for row in read_table(table) if row.name != name), entry])
    write_text_atomically(table, json.dumps([row._asdict() for row in entries], indent=2) + "\n")
    return entry


def check_same(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Refuse two encoders whose weights differ in a bit."""
    one, other = first.state_dict(), second.state_dict()
    if one.keys() != other.keys() or not all(torch.equal(one[key], other[key]) for key in one):
        raise UserError("the exported weights are not those of the run.")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 3:
        print(__doc__)
        return 2
    run, name, about = arguments
    try:
        entry = publish(Path(run), name, about)
    except UserError as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    print(f"{FOLDER}/{entry.file}, sha256 {entry.sha256}: commit {FOLDER}/{name} and {TABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
