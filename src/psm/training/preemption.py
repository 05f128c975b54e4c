"""Ending a run in order when a scheduler asks for it."""

import signal
import threading
import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint

from psm.training.callbacks import CheckpointCallback
from psm.training.distributed import LargestOfRanks
from psm.training.run_module import RunModule
from psm.utils.errors import Preempted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


PATIENCE = 30.0  # seconds after which another signal is no repetition


class PreemptionCallback(Checkpoint):
    """After SIGTERM or SIGUSR1: finish the step, save the checkpoint and end, on all processes after the same step.

    Launchers may send a signal twice; one that comes later ends the process at once. It is a `Checkpoint` to stand at
    the end of the list, behind the callback that saves.
    """

    def __init__(self, checkpoint: CheckpointCallback):
        self.checkpoint = checkpoint
        self.received: int | None = None
        self.received_at = 0.0
        self.any_rank = LargestOfRanks()

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        # Here, because Lightning has set its own handlers by now; it restores those of before when it ends.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if self.received is None:
            self.received, self.received_at = number, time.monotonic()
        elif time.monotonic() - self.received_at > PATIENCE:
            raise Preempted(number)

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, module: RunModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = self.any_rank(self.received or 0, module.device)
        if not number:
            return
        if self.received is None:  # the signal reached another process, and may still come here
            self.received_at = time.monotonic()
        self.received = number  # all end with one code
        if trainer.global_step % module.steps_per_epoch:  # the epoch's end saves anyway, with its metrics
            self.checkpoint.save(trainer, module)
            raise Preempted(self.received)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        if self.received is not None and trainer.global_step < module.total_steps and trainer.world_size == 1:
            raise Preempted(self.received)
