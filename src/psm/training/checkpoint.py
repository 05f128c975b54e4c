"""Checkpoints as Lightning writes and reads them here: replaced atomically, read without unpickling code."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from psm.utils.checkpoint_file import load_file
from psm.utils.files import write_atomically


class AtomicCheckpointIO(CheckpointIO):
    """Writes beside the file that is replaced. Lightning's own plugin writes through a temporary folder that may be on
    another disk, where a move is not atomic."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        return load_file(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
