"""What mining adds to a step: a method's whole step beside BYOL's, in turns.

    python benchmarks/mining.py [--encoder resnet18] [--stem imagenet] [--methods psm snclr] [--turns 7]

The paper's settings: batch 256, 32 pixels, bank of 16384 (full), k = 5. A step is views, networks, loss, gradient,
optimizer, target and bank. Each method has a process of its own, since two in one would share its memory, and ratios
are taken within a turn, so that a busy machine slows all alike.
"""

import argparse
import os
import sys

import torch
from torch.profiler import record_function

import turns
from psm.config.schema import OptimConfig, ViewsConfig
from psm.methods import get_method
from psm.mining.memory_bank import MemoryBank
from psm.models.factory import create_encoder, prefers_channels_last
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks
from psm.ops import keep_freed_memory
from psm.training.module import step_loss
from psm.training.optim import build_optimizer
from psm.views.transform import Views

SIZE, WIDTH = 32, 128


class Contender:
    """One method with its networks, bank and optimizer."""

    def __init__(self, method: str, name: str, stem: str, batch: int, chunk: int | None = None):
        keep_freed_memory()  # as `psm pretrain` does
        torch.manual_seed(0)
        self.method, self.batch, self.chunk = get_method(method), batch, chunk
        backbone = create_encoder(name, stem, SIZE)
        head = prediction_head(WIDTH) if self.method.predictor.enabled else None
        self.networks = SiameseNetworks(backbone, projection_head(backbone.width), head, self.method.target.enabled)
        if prefers_channels_last("cpu"):
            self.networks.to(memory_format=torch.channels_last)
        learned = [p for p in self.networks.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(learned, OptimConfig(weight_decay=1e-3))
        size = self.method.bank.size
        self.bank = MemoryBank(size, WIDTH)
        self.bank.enqueue(torch.randn(size, WIDTH), torch.arange(size))
        self.views = Views(ViewsConfig(), SIZE, (0.5,) * 3, (0.25,) * 3)
        self.images = torch.randint(0, 256, (batch, 3, SIZE, SIZE), dtype=torch.uint8)

    def step(self) -> None:
        """One whole step."""
        with record_function("views"):
            draws = self.views.sample_params(self.batch, torch.Generator().manual_seed(0))
            views = self.views.apply(self.images, draws, channels_last=prefers_channels_last("cpu"))
        ids = torch.arange(self.batch) + 10**6
        loss, _, latest = step_loss(self.networks, views, ids, self.method, self.bank, None, self.chunk)
        self.optimizer.zero_grad()
        loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()
        with record_function("target and bank"):
            self.networks.update_target(self.method.target.momentum)
            if self.method.needs_bank:
                self.bank.enqueue(latest.keys, latest.ids)


def start(method: str, options: argparse.Namespace) -> turns.Contender:
    work = ("--encoder", options.encoder, "--stem", options.stem, "--batch", str(options.batch))
    return turns.Contender([sys.executable, "-W", "ignore", __file__, "--alone", method, *work], dict(os.environ))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--stem", default="imagenet")
    parser.add_argument("--methods", nargs="+", default=["psm", "snclr", "simclr"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="in a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # take steps of this method when told to
    options = parser.parse_args()
    if options.alone:
        turns.answer(Contender(options.alone, options.encoder, options.stem, options.batch).step)
        return
    names = ["byol", *options.methods]
    contenders = {name: start(name, options) for name in names}
    work = {name: lambda c=c: c.seconds(options.steps) / options.steps for name, c in contenders.items()}
    steps = turns.in_turns(work, options.turns)
    for contender in contenders.values():
        contender.stop()
    print(f"{options.encoder}, {options.stem} stem, batch {options.batch}, {torch.get_num_threads()} threads")
    line = "{:8} {:>10} {:>26}".format
    print(line("method", "ms a step", "times BYOL"))
    rows = {}
    for name in names:
        ratios = turns.spread([own / byol for own, byol in zip(steps[name], steps["byol"], strict=True)])
        milliseconds = 1e3 * turns.spread(steps[name])["median"]
        rows[name] = {"ms": milliseconds, "times byol": ratios}
        print(line(name, f"{milliseconds:.0f}", turns.shown(ratios, 3)))
    turns.keep(f"mining-{options.encoder}-{options.stem}", rows)


if __name__ == "__main__":
    main()
