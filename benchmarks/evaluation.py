"""What an evaluation costs beside an epoch of pretraining.

    python benchmarks/evaluation.py [--encoder tiny] [--threads 2]

Features of 60,000 pictures of 32 pixels, nearest neighbours and the linear layer's 100 epochs, as `psm evaluate` runs
them, against an epoch of PSM on 50,000 pictures, extrapolated from a number of its steps.
"""

import argparse
import os
import time

import torch

from mining import Contender
from psm.augment import Views
from psm.config import KnnConfig, LinearConfig, ViewsConfig
from psm.data import Pictures
from psm.evaluation import knn, linear
from psm.features import extract
from psm.networks import prefers_channels_last
from turns import keep

TRAIN, TEST, CLASSES = 50_000, 10_000, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--stem", default="small")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contender = Contender("psm", options.encoder, options.stem, options.batch)
    contender.step()
    steps = [contender.step()[0] for _ in range(options.steps)]
    epoch = TRAIN / options.batch * sum(steps) / len(steps)
    encoder = contender.networks.encoder
    views = Views(ViewsConfig(), 32, (0.5,) * 3, (0.25,) * 3)
    labels = torch.randint(0, CLASSES, (TRAIN + TEST,))
    pictures = Pictures(torch.randint(0, 256, (TRAIN + TEST, 3, 32, 32), dtype=torch.uint8), labels)
    seconds, start = {}, time.perf_counter()
    features = extract(encoder, pictures, views)
    seconds["features"] = time.perf_counter() - start
    parts = (features[:TRAIN], labels[:TRAIN], features[TRAIN:], labels[TRAIN:])
    start = time.perf_counter()
    knn(*parts, classes=CLASSES, config=KnnConfig())
    seconds["knn"] = time.perf_counter() - start
    start = time.perf_counter()
    linear(lambda epoch: parts[0], *parts[1:], CLASSES, LinearConfig(), seed=0)
    seconds["linear"] = time.perf_counter() - start
    total = sum(seconds.values())
    layout = "channels-last" if prefers_channels_last("cpu") else "contiguous"
    print(f"{options.encoder}, {options.stem} stem, {options.threads} threads, {layout}")
    print("  ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    print(f"together {total:.1f} s, {total / epoch:.2f} of an epoch of PSM on {TRAIN:,} pictures ({epoch:.0f} s)")
    keep(f"evaluation-{options.encoder}", {**seconds, "epoch": epoch, "of an epoch": total / epoch})


if __name__ == "__main__":
    main()
