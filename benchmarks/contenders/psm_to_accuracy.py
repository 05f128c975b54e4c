"""psm's own training on real images, scored between turns.

python psm_to_accuracy.py METHOD VIEWS ENCODER BATCH THREADS EPOCHS LR SEED IMAGES
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from accuracy import images, tell
from psm_training import Turns

import psm
from psm.ops import keep_freed_memory


class ScoredTurns(Turns):
    """Lets the loop run for as many steps as are asked for at a time, and scores the encoder after them."""

    def __init__(self, data: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.data = data

    def on_train_start(self, trainer: object, module: object) -> None:
        self.wait()

    def on_train_batch_end(self, trainer: object, module: object, *_: object) -> None:
        self.left -= 1
        if not self.left:
            tell(time.perf_counter() - self.started, module.networks.encoder, self.data)
            self.wait()


def main() -> None:
    method, views, encoder, batch, threads, epochs, lr, seed, path = sys.argv[1:]
    torch.set_num_threads(int(threads))
    keep_freed_memory()  # as `psm pretrain` does
    data = images(path)
    keys = {"method": method, "encoder": encoder, "batch_size": int(batch), "epochs": int(epochs), "seed": int(seed)}
    keys |= {
        "optim": {"lr": float(lr)},
        "bank": {"size": 4096},
        "monitor": {"knn": False},
        "views": {"count": int(views)},
    }
    with tempfile.TemporaryDirectory() as folder:
        psm.pretrain(Path(folder) / "run", data["train"], **keys, progress=False, callbacks=[ScoredTurns(data)])


if __name__ == "__main__":
    main()
