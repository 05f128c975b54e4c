"""The optimizer of pretraining."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd as sgd_step

from psm.config.schema import OptimConfig


def sgd(learned: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.SGD:
    """SGD, in one pass over the weights where they lie on a CPU.

    Not where gradients are clipped: under mixed precision Lightning clips none for a fused step.
    """
    learned = list(learned)
    given = {"lr": config.warmup_lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
    if learned[0].device.type == "cpu" and config.clip is None:
        return OnePass(learned, **given, fused=True)
    return torch.optim.SGD(learned, **given, foreach=True)


class OnePass(torch.optim.SGD):
    """torch's fused step on a CPU, for weights of either memory format.

    Of channels-last weights torch first copies each gradient, for nothing; here it is given weights, gradients and
    momenta as they lie in memory. `benchmarks/parts.py` measures both: half the time for ResNet-18's weights.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learned = [weights for weights in group["params"] if weights.grad is not None]
            momenta = [self._momentum(weights) for weights in learned] if group["momentum"] else []
            gradients = [_like(weights.grad, weights) for weights in learned]
            sgd_step(
                *([_flat(x) for x in tensors] for tensors in (learned, gradients, momenta)),
                **{key: group[key] for key in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")},
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
        return loss

    def _momentum(self, weights: nn.Parameter) -> Tensor:
        """Zero before the first step, which then is as any other."""
        state = self.state[weights]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(weights)
        return state["momentum_buffer"]


def settle(optimizer: torch.optim.Optimizer) -> None:
    """After a checkpoint was loaded, which may come from another device: the step as it is taken on this one.

    Each momentum comes to lie in memory as its weights do, since the fused step does not look at strides.
    """
    for group in optimizer.param_groups:
        group.update({way: optimizer.defaults[way] for way in ("fused", "foreach")})
        for weights in group["params"]:
            state = optimizer.state.get(weights, {})
            momentum = state.get("momentum_buffer")
            if momentum is not None:
                state["momentum_buffer"] = _like(momentum, weights)


def _like(tensor: Tensor, weights: Tensor) -> Tensor:
    """A tensor that lies in memory as weights do."""
    return tensor if tensor.stride() == weights.stride() else torch.empty_like(weights).copy_(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """All of a tensor in the order of its memory."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).view(-1)  # never a copy
    return tensor
