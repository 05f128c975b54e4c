"""Parts of a step beside the networks that psm has its own way for, each beside torch's functions.

    python benchmarks/parts.py [--threads 2] [--turns 15]

The search in a bank, MoCo v2's sum over a whole bank with its gradient (`psm.kernels.similarity`) and views
(`psm.kernels.crop`) are compiled; SGD's step is torch's, given weights as they lie in memory (`psm.training.optim`).
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch.nn.functional import normalize

from psm.config.schema import OptimConfig, ViewsConfig
from psm.kernels import crop as crops
from psm.kernels import similarity as products
from psm.kernels.malloc import keep_freed_memory
from psm.losses import functional as objectives
from psm.mining.memory_bank import MemoryBank
from psm.models.factory import create_encoder
from psm.training import optim as optimizer
from psm.views.transform import Views
from turns import beside_torch, keep, timed

WIDTH, REPEATS = 128, 5
SEARCHES = ((256, 16384, 5), (256, 16384, 40), (64, 4096, 5), (32, 2048, 5))  # queries, rows, k
VIEWS = ((256, 32, 0.0), (256, 32, 0.5), (256, 64, 0.0), (256, 64, 0.5), (32, 32, 0.0))  # images, pixels, blur
SUMS = ((256, 16384), (64, 4096), (32, 2048))  # queries, rows
Case = tuple[str, ModuleType, str, Callable[[], object]]  # what it is, and the function that chooses psm's way
TORCHS = {"_flat": lambda tensor: tensor}  # what that function is for torch's way, if not one that always declines


def searches() -> Iterator[Case]:
    for count, size, k in SEARCHES:
        bank, queries, own = MemoryBank(size, WIDTH), torch.randn(count, WIDTH), torch.arange(count)
        bank.enqueue(torch.randn(size, WIDTH), torch.arange(size) % (size // 2))
        name = f"search of {k} for {count} queries in {size:,} rows"
        yield name, products, "searchable", lambda b=bank, q=queries, k=k, o=own: b.search(q, k, o)


def views() -> Iterator[Case]:
    for count, pixels, blur in VIEWS:
        recipe = Views(ViewsConfig(blur=blur), pixels, (0.5,) * 3, (0.25,) * 3)
        images = torch.randint(0, 256, (count, 3, pixels, pixels), dtype=torch.uint8)
        draws = recipe.sample_params(count, torch.Generator().manual_seed(0))
        name = f"two views of {count} images at {pixels} pixels{', blur' if blur else ''}"
        yield name, crops, "apply_to", lambda r=recipe, p=images, d=draws: r.apply(p, d, channels_last=True)


def sums() -> Iterator[Case]:
    for count, size in SUMS:
        queries = (normalize(torch.randn(count, WIDTH), dim=1) / 0.2).requires_grad_()
        rows = normalize(torch.randn(size, WIDTH), dim=1)

        def both_ways(queries: torch.Tensor = queries, rows: torch.Tensor = rows) -> None:
            queries.grad = None
            objectives.logsumexp_of_products(queries, rows).sum().backward()

        yield f"sum over {size:,} rows for {count} queries", products, "summable", both_ways


def optimizers() -> Iterator[Case]:
    weights = create_encoder("resnet18", "imagenet", 32).to(memory_format=torch.channels_last).parameters()
    sgd = optimizer.build_optimizer(weights, OptimConfig(weight_decay=1e-3))
    for parameter in sgd.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    yield "SGD's step of ResNet-18's weights", optimizer, "_flat", sgd.step


@contextmanager
def by_torch(module: ModuleType, name: str) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, TORCHS.get(name, lambda *given: False))
    try:
        yield
    finally:
        setattr(module, name, own)


def several(work: Callable[[], object]) -> float:
    """Seconds of one out of several."""
    return timed(lambda: [work() for _ in range(REPEATS)]) / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as `psm pretrain` does
    print(f"{'':58} {'torch, ms':>9} {'psm, ms':>9}  {'times as fast':>20}")
    rows = []
    for name, module, choice, work in (*searches(), *views(), *sums(), *optimizers()):

        def plain(module: ModuleType = module, choice: str = choice, work: Callable = work) -> float:
            with by_torch(module, choice):
                return several(work)

        rows.append(beside_torch(name, plain, lambda w=work: several(w), options.turns))
    keep("parts", rows)


if __name__ == "__main__":
    main()
