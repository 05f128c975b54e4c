"""The optimiser of pretraining."""

from collections.abc import Iterable

import torch
from torch import nn

from psm.config import OptimConfig


def sgd(learned: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.SGD:
    """SGD, in one pass over the weights where they lie on a CPU (`fused`: 0.4 of the time of
    `foreach` there by itself, 0.8 within a step, where both wait for memory).

    Not where gradients are clipped: under mixed precision Lightning clips none for a fused step.
    """
    learned = list(learned)
    way = {"fused" if learned[0].device.type == "cpu" and config.clip is None else "foreach": True}
    return torch.optim.SGD(
        learned, lr=config.warmup_lr, momentum=config.momentum, weight_decay=config.weight_decay, **way
    )


def settle(optimiser: torch.optim.Optimizer) -> None:
    """After a checkpoint was loaded, which may come from another device: the step as it is taken on this one.

    Each momentum comes to lie in memory as its weights do, since the fused step does not look at strides.
    """
    for group in optimiser.param_groups:
        group.update({way: optimiser.defaults[way] for way in ("fused", "foreach")})
        for weights in group["params"]:
            state = optimiser.state.get(weights, {})
            momentum = state.get("momentum_buffer")
            if momentum is not None and momentum.stride() != weights.stride():
                state["momentum_buffer"] = torch.empty_like(weights).copy_(momentum)
