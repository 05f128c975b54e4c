"""Where the time of a step goes: the shares of convolutions, batch norm, mining, views and the rest.

    python benchmarks/profile_step.py [--method psm] [--encoder resnet18] [--stem imagenet] [--plain]

`--plain` leaves convolutions of small maps to torch, as they were before.
"""

import argparse
import os
from contextlib import nullcontext

import torch
from torch.profiler import profile, record_function

import psm.topology
from mining import Contender

GROUPS = (
    ("convolution, backward", ("convolution_backward",)),
    ("convolution, forward", ("mkldnn_convolution", "_slow_conv", "thnn_conv")),
    ("batch norm", ("batch_norm",)),
    ("matrix products", ("addmm", "aten::mm", "aten::bmm", "linear")),
    ("ReLU, sums, pooling", ("threshold", "clamp_min", "aten::add", "max_pool", "mean", "relu")),
    ("copies", ("copy_", "cat", "contiguous", "clone")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="psm")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--stem", default="imagenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.plain:
        psm.topology.small_maps = lambda device: nullcontext()
    contender = Contender(options.method, options.encoder, options.stem, options.batch)
    contender.step()
    with profile() as trace:
        for _ in range(options.steps):
            with record_function("whole step"):
                contender.step()
    events = trace.key_averages()
    whole = next(event.cpu_time_total for event in events if event.key == "whole step")
    print(f"{options.method}, {options.encoder}, {options.stem} stem: {whole / options.steps / 1e3:.0f} ms a step")
    left = whole
    for title, names in GROUPS:
        own = sum(
            e.self_cpu_time_total for e in events if any(name in e.key for name in names) and e.key != "whole step"
        )
        left -= own
        print(f"{title:24} {own / whole:>7.1%} {own / options.steps / 1e3:>8.1f} ms")
    print(f"{'all else':24} {left / whole:>7.1%} {left / options.steps / 1e3:>8.1f} ms")


if __name__ == "__main__":
    main()
