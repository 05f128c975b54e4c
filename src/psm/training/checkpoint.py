"""Checkpoints: written atomically, read without unpickling anything but tensors and plain containers."""

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from psm.utils.errors import UserError
from psm.utils.run_folder import write_atomically


class AtomicCheckpoints(CheckpointIO):
    """Lightning's own writes through a temporary folder that may lie on another disk, where a move is not atomic."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> dict:
        return _load(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint that psm wrote, or a sentence saying why it cannot be read."""
    checkpoint = _load(path, "cpu")
    told = checkpoint.get("psm") if isinstance(checkpoint, dict) else None
    if not isinstance(told, dict) or not {"config", "encoder_info", "images"} <= told.keys():
        raise UserError(f"{path} is not a checkpoint written by psm: give a run folder, its checkpoint or its encoder.")
    return checkpoint


def _load(path: str | Path, map_location: Any) -> Any:
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} is no checkpoint, or holds more than tensors and plain values: not loaded.") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError):
        raise UserError(f"{path} is empty, cut off or no checkpoint: give another file.") from None
