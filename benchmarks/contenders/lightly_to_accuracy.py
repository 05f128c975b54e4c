"""lightly's training on real images with a schedule, scored between turns.

python lightly_to_accuracy.py METHOD ENCODER BATCH THREADS WORKERS STEPS LR SEED IMAGES
"""

import sys
import time

import torch
from accuracy import images, tell
from lightly_training import Decoded, Networks, update_momentum
from PIL import Image
from torch.utils.data import DataLoader

from psm.utils.schedule import learning_rate


class Pictures(Decoded):
    """The given images instead of random ones, with the views that psm has."""

    def __init__(self, pixels: torch.Tensor) -> None:
        super().__init__()
        self.images = [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).numpy()]


def main() -> None:
    method, name, batch, threads, workers, steps, lr, seed, path = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(int(seed))
    data = images(path)
    networks = Networks(method, name, "cifar").to(memory_format=torch.channels_last)
    trained = [p for p in networks.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9, weight_decay=1e-3)
    loader = DataLoader(
        Pictures(data["train"]),
        int(batch),
        shuffle=True,
        drop_last=True,
        num_workers=int(workers),
        persistent_workers=True,
    )
    batches, total, done = iter(loader), int(steps), 0
    while True:
        try:
            wanted = int(input())
        except EOFError:
            return
        if done + wanted > total:  # the end of the schedule
            return
        start = time.perf_counter()
        for _ in range(wanted):
            views = next(batches, None)
            if views is None:
                batches = iter(loader)
                views = next(batches)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(done, total, round(0.1 * total), float(lr), 1e-4)
            loss = networks.loss(*(view.contiguous(memory_format=torch.channels_last) for view in views))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if networks.target is not None:
                update_momentum(networks.online, networks.target, m=0.99)
            done += 1
        tell(time.perf_counter() - start, networks.online[0], data)


if __name__ == "__main__":
    main()
