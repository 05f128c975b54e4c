"""A callback that keeps the weights after some steps."""

import os
from pathlib import Path
from typing import Any

import lightning
import torch

from torture.weights import FOLDER, STEPS


class KeepWeights(lightning.Callback):
    """Writes the encoder's parameters after each of STEPS, as one vector in float64."""

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *rest: Any) -> None:
        if trainer.global_step in STEPS and trainer.is_global_zero:
            parameters = [x.detach().double().flatten().cpu() for x in module.networks.encoder.parameters()]
            torch.save(torch.cat(parameters), Path(os.environ[FOLDER]) / f"{trainer.global_step}.pt")
