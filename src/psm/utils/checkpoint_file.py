"""Reading checkpoints without unpickling anything but tensors and plain containers."""

import pickle
import zipfile
from pathlib import Path
from typing import Any, TypeGuard

import torch

from psm.utils.errors import UserError
from psm.utils.resources import is_out_of_memory

DESCRIPTION_KEYS = {"config", "encoder_info", "images"}  # what psm adds to a Lightning checkpoint, below "psm"


def load_file(path: str | Path, map_location: Any = "cpu") -> Any:
    """``torch.load`` with ``weights_only=True``; a file that is damaged or cannot be read is a UserError."""
    _check_crc(path)
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} is no checkpoint, or holds more than tensors and plain values: not loaded.") from None
    except Exception as error:  # on bytes that are not its own, torch may fail anywhere
        if is_out_of_memory(error):
            raise
        raise UserError(f"{path} is empty, cut off or no checkpoint: give another file.") from None


def _check_crc(path: str | Path) -> None:
    """Compare every part of the file with the CRC-32 that ``torch.save`` stored with it, which torch does not do.

    1.6 to 2.0 GB/s from memory on one core (five reads of a file of 200 MB).
    """
    if not zipfile.is_zipfile(path):
        return  # torch.load says what it is
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError):
        damaged = "its structure"
    if damaged is not None:
        raise UserError(f"{path} is damaged: the checksum of {damaged} does not match. Restore it from a copy.")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint written by psm; any other file is a UserError."""
    checkpoint = load_file(path)
    if not is_checkpoint(checkpoint):
        raise UserError(f"{path} is not a checkpoint written by psm: give a run folder, its checkpoint or its encoder.")
    return checkpoint


def is_checkpoint(content: Any) -> TypeGuard[dict[str, Any]]:
    """True for the contents of a checkpoint written by psm, with all that psm reads of it."""
    description = content.get("psm") if isinstance(content, dict) else None
    return isinstance(description, dict) and description.keys() >= DESCRIPTION_KEYS and _has_weights(content)


def _has_weights(checkpoint: dict[str, Any]) -> bool:
    """True if the parts that psm reads are there, each of its type."""
    described, state = checkpoint["psm"], checkpoint.get("state_dict")
    return (
        isinstance(described["config"], dict)
        and isinstance(described["encoder_info"], dict)
        and type(described["images"]) is int
        and type(checkpoint.get("global_step")) is int
        and isinstance(state, dict)
        and all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items())
    )
