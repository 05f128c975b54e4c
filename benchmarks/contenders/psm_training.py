"""psm's own training, as `psm pretrain` runs it: images from memory, Lightning's loop, metrics off the step.

python psm_training.py METHOD ENCODER STEM BATCH THREADS
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

import psm
from psm.ops import keep_freed_memory

pretrain = psm.pretrain  # loads Lightning through psm, which also works where torchvision is a build for another torch

import lightning  # noqa: E402

IMAGES = 10240


class Turns(lightning.Callback):
    """Lets the loop run for as many steps as are asked for at a time."""

    def __init__(self) -> None:
        self.left, self.started = 0, 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if module.bank is not None:  # full from the start: a search in an empty one would flatter
            size, width = module.bank.rows.shape
            module.bank.enqueue(torch.randn(size, width), torch.arange(size) % IMAGES)
        self.wait()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self.left -= 1
        if not self.left:
            print(f"seconds {time.perf_counter() - self.started}", flush=True)
            self.wait()

    def wait(self) -> None:
        try:
            self.left = int(input())
        except EOFError:
            sys.exit()
        self.started = time.perf_counter()


def main() -> None:
    method, encoder, stem, batch, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    keep_freed_memory()  # as `psm pretrain` does
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8)
    keys = {"method": method, "encoder": encoder, "stem": stem, "batch_size": int(batch), "epochs": 1000}
    keys["preset"] = "paper"  # its bank, on a CPU too
    with tempfile.TemporaryDirectory() as folder:
        pretrain(Path(folder) / "run", images, **keys, progress=False, callbacks=[Turns()])


if __name__ == "__main__":
    main()
