"""What an evaluation costs beside an epoch of pretraining.

    python benchmarks/evaluation.py [--encoder tiny] [--threads 2]

Features of 60,000 images of 32 pixels, nearest neighbors and the linear layer's 100 epochs, as `psm evaluate` runs
them, against an epoch of PSM on 50,000 images, extrapolated from a number of its steps.
"""

import argparse
import os

import torch

from mining import Contender
from psm.config.schema import KnnConfig, LinearConfig, ViewsConfig
from psm.data import ImageStore
from psm.evaluation.features import extract
from psm.evaluation.knn import knn_accuracy
from psm.evaluation.linear import linear_accuracy
from psm.views.transform import Views
from turns import in_turns, keep, shown, spread, timed

TRAIN, TEST, CLASSES = 50_000, 10_000, 10
STEPS = 10  # of pretraining in a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--stem", default="cifar")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contender = Contender("psm", options.encoder, options.stem, options.batch)
    views = Views(ViewsConfig(), 32, (0.5,) * 3, (0.25,) * 3)
    labels = torch.randint(0, CLASSES, (TRAIN + TEST,))
    images = ImageStore(torch.randint(0, 256, (TRAIN + TEST, 3, 32, 32), dtype=torch.uint8), labels)
    features = extract(contender.networks.encoder, images, views)
    parts = (features[:TRAIN], labels[:TRAIN], features[TRAIN:], labels[TRAIN:])
    seconds = in_turns(
        {
            "epoch": lambda: TRAIN / options.batch * timed(lambda: [contender.step() for _ in range(STEPS)]) / STEPS,
            "features": lambda: timed(lambda: extract(contender.networks.encoder, images, views)),
            "knn": lambda: timed(lambda: knn_accuracy(*parts, classes=CLASSES, config=KnnConfig())),
            "linear": lambda: timed(
                lambda: linear_accuracy(lambda epoch: parts[0], *parts[1:], CLASSES, LinearConfig(), seed=0)
            ),
        },
        options.turns,
    )
    shares = [sum(rest) / epoch for epoch, *rest in zip(*seconds.values(), strict=True)]
    found = {name: spread(values) for name, values in seconds.items()} | {"of an epoch": spread(shares)}
    print(f"{options.encoder}, {options.stem} stem, {options.threads} threads, seconds: median (least - most)")
    for name, values in found.items():
        print(f"{name:12} {shown(values)}")
    keep(f"evaluation-{options.encoder}", found)


if __name__ == "__main__":
    main()
