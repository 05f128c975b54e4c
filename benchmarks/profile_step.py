"""Where the time of a step goes: convolutions, batch norm, mining, views and the rest.

    python benchmarks/profile_step.py [--method psm] [--encoder resnet18] [--stem imagenet] [--plain]

`--plain` takes the step as torch alone would have it: its convolutions, norms, products with the bank and
views, its SGD a tensor at a time, and freed memory handed back to the system.
"""

import argparse
import os

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile, record_function

import mining
import psm.training.module
from turns import keep

# Parts that the step names itself; what is in none of them goes by its operator.
NAMED = ("views", "loss and mining, forward", "optimizer", "target and bank")
OPERATORS = {
    "fused residual blocks, backward": ("FusedBlockBackward",),
    "fused residual blocks, forward": ("FusedBlock",),
    "convolutions, backward": ("convolution_backward", "WinogradConvBackward"),
    "convolutions, forward": ("mkldnn_convolution", "_slow_conv", "thnn_conv", "WinogradConv"),
    "matrix products": ("addmm", "aten::mm", "aten::bmm", "linear"),
    "batch norm": ("batch_norm", "BatchNormAddReLU"),
    "ReLU, sums, pooling": ("threshold", "clamp_min", "aten::add", "max_pool", "mean", "relu"),
}
ELSE = "all else"


def part_of(event: FunctionEvent) -> str:
    """The part of a step that an event belongs to."""
    outer = event
    while outer is not None:
        if outer.name in NAMED:
            return outer.name
        outer = outer.cpu_parent
    found = (part for part, names in OPERATORS.items() if any(name in event.name for name in names))
    return next(found, ELSE)


def name_the_loss() -> None:
    """Let the profiler know the forward pass of the loss, the searches in the bank among it."""
    plain = psm.training.module.method_loss

    def named(*given: object) -> object:
        with record_function("loss and mining, forward"):
            return plain(*given)

    psm.training.module.method_loss = named


def in_plain_pytorch() -> None:
    os.environ["PSM_KERNELS"] = "0"
    mining.build_optimizer = lambda learned, _: torch.optim.SGD(
        learned, 0.01, momentum=0.9, weight_decay=1e-3, foreach=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="psm")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--stem", default="imagenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.plain:
        in_plain_pytorch()
    name_the_loss()
    contender = mining.Contender(options.method, options.encoder, options.stem, options.batch)
    for _ in range(2):
        contender.step()
    with profile() as trace:
        for _ in range(options.steps):
            contender.step()
    found = dict.fromkeys((*OPERATORS, *NAMED, ELSE), 0.0)
    for event in trace.events():
        found[part_of(event)] += event.self_cpu_time_total / options.steps / 1e3
    found["sum of the parts"] = sum(found.values())
    print(f"{options.method}, {options.encoder}, {options.stem} stem, batch {options.batch}, milliseconds a step")
    for part, milliseconds in found.items():
        print(f"{part:34} {milliseconds:8.1f} {milliseconds / found['sum of the parts']:>7.1%}")
    keep("profile-before" if options.plain else "profile", found)


if __name__ == "__main__":
    main()
