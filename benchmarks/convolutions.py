"""Layers, residual blocks and whole encoders with `psm.kernels.optimize` and in plain PyTorch.

    python benchmarks/convolutions.py [--batch 512] [--threads 2]

Forward and backward, channels-last, in turns. `--batch` counts views: a step of 256 images has 512.
"""

import argparse
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from psm.kernels import dispatch, optimize
from psm.models.factory import create_encoder
from psm.models.resnet import BasicBlock
from psm.ops import keep_freed_memory
from turns import beside_torch, keep

LAYERS = (  # channels in and out, side of the maps, stride
    (32, 32, 16, 1),
    (64, 64, 8, 1),
    (64, 64, 32, 1),
    (128, 128, 16, 1),
    (256, 256, 8, 1),
    (512, 512, 1, 1),
    (256, 512, 2, 2),
    (256, 256, 2, 1),
    (512, 512, 2, 1),
    (128, 128, 4, 1),
    (256, 256, 4, 1),
    (32, 64, 16, 2),
    (64, 128, 8, 2),
    (128, 256, 4, 2),
)
BLOCKS = ((32, 32, 16, 1), (32, 64, 16, 2), (64, 128, 8, 2), (64, 64, 32, 1), (64, 128, 32, 2))  # likewise
NETWORKS = (("resnet18", "imagenet"), ("resnet18", "cifar"), ("tiny", "cifar"), ("tiny", "imagenet"))

NORMS = ((32, 16), (64, 32))  # channels, side of the maps
LARGE = 2**22  # floats of maps; larger ones are measured with fewer views


class BatchNormAddReLU(nn.Module):
    """Batch norm, a sum with its input if ``summed``, and ReLU."""

    def __init__(self, channels: int, summed: bool):
        super().__init__()
        self.norm, self.summed = nn.BatchNorm2d(channels), summed

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return dispatch.bn_add_relu(self.norm, maps, maps if self.summed else None)


def maps_of(views: int, channels: int, size: int) -> torch.Tensor:
    return torch.randn(min(views, max(64, LARGE // (channels * size**2))), channels, size, size, requires_grad=True)


def fewer(maps: torch.Tensor, views: int) -> str:
    return f", {len(maps)} views" if len(maps) < views else ""


def timed(network: nn.Module, inputs: torch.Tensor, mode: Callable[[nn.Module], AbstractContextManager]) -> float:
    """Seconds of forward and backward; a pass before counts for nothing, since memory is new to it."""
    for _ in range(2):
        network.zero_grad()
        start = time.perf_counter()
        with mode(network):
            out = network(inputs)
        out.backward(torch.ones_like(out))
    return time.perf_counter() - start


def compare(name: str, network: nn.Module, inputs: torch.Tensor, turns: int) -> dict:
    network, inputs = (x.to(memory_format=torch.channels_last) for x in (network, inputs))
    ways = (lambda mode=mode: timed(network, inputs, mode) for mode in (nullcontext, optimize))
    return beside_torch(name, *ways, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as `psm pretrain` does
    print(f"{options.batch} views, {options.threads} threads, torch {torch.__version__}")
    print(f"{'':58} {'torch, ms':>9} {'psm, ms':>9}  {'times as fast':>20}")
    rows = []
    for inputs, outputs, size, stride in LAYERS:
        layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        maps = maps_of(options.batch, inputs, size)
        name = f"{inputs} to {outputs} channels at {size}x{size}, stride {stride}{fewer(maps, options.batch)}"
        rows.append(compare(name, layer, maps, options.turns))
    for channels, size in NORMS:
        maps = maps_of(options.batch, channels, size)
        for summed in (False, True):
            name = f"batch norm{', sum' * summed} and ReLU of {channels} channels at {size}x{size}"
            layer = BatchNormAddReLU(channels, summed)
            rows.append(compare(name + fewer(maps, options.batch), layer, maps, options.turns))
    for inputs, outputs, size, stride in BLOCKS:
        maps = maps_of(options.batch, inputs, size)
        name = f"block of {inputs} to {outputs} channels at {size}x{size}, stride {stride}{fewer(maps, options.batch)}"
        rows.append(compare(name, BasicBlock(inputs, outputs, stride), maps, options.turns))
    for name, stem in NETWORKS:
        images = torch.randn(options.batch if (name, stem) != ("resnet18", "cifar") else 64, 3, 32, 32)
        rows.append(
            compare(f"{name}, {stem} stem, {len(images)} views", create_encoder(name, stem), images, options.turns)
        )
    keep("convolutions", rows)


if __name__ == "__main__":
    main()
