"""psm's own training, as `psm pretrain` runs it: images from memory, Lightning's loop, metrics off the step.

python psm_training.py METHOD ENCODER STEM BATCH THREADS
"""

import sys
import tempfile
import time
from pathlib import Path

import lightning
import torch

from psm.config import merge as settings
from psm.config.schema import PretrainConfig
from psm.data import ImageDataset, ImageStore
from psm.ops import keep_freed_memory
from psm.training.pretrain import _prepare
from psm.training.resolve import resolve
from psm.utils.run_folder import RunFolder

IMAGES = 10240


class Turns(lightning.Callback):
    """Lets the loop run for as many steps as are asked for at a time."""

    def __init__(self) -> None:
        self.left, self.started = 0, 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
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
    data = ImageDataset("images", ImageStore(images), None, ())
    overrides = {
        "out": "x",
        "method": method,
        "encoder": encoder,
        "stem": stem,
        "batch_size": int(batch),
        "epochs": 1000,
    }
    config = resolve(settings.build(PretrainConfig, overrides, {"progress": False}), data)
    with tempfile.TemporaryDirectory() as folder:
        trainer, module = _prepare(RunFolder(Path(folder)), config, data, None)
        # The bank starts full: a search in an empty one would flatter.
        if module.bank is not None:
            size = module.bank.size
            module.bank.enqueue(torch.randn(size, config.heads.out_dim), torch.arange(size) % IMAGES)
        trainer.callbacks.append(Turns())
        trainer.fit(module)


if __name__ == "__main__":
    main()
