"""LARS (You et al. 2017) as used for SimCLR and BYOL."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose step is scaled per tensor by ``trust_coefficient * |weights| / |update|``.

    Norms and biases (tensors of one dimension) are neither scaled nor decayed. The learning rate is applied after the
    momentum, as in `torch.optim.SGD`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: factor of the momentum buffer.
        weight_decay: factor of the weights that is added to the gradient before scaling.
        trust_coefficient: eta of the paper.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
    ):
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            updates = self._updates(weights, group)
            buffers = [self._momentum(p) for p in weights]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_add_(weights, buffers, alpha=-group["lr"])
        return loss

    @staticmethod
    def _updates(weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Decayed and scaled gradients, without waiting for the device."""
        updates = [p.grad for p in weights if p.grad is not None]
        scaled = [i for i, p in enumerate(weights) if p.ndim > 1]
        if not scaled:
            return updates
        matrices = [weights[i] for i in scaled]
        decayed = torch._foreach_add([updates[i] for i in scaled], matrices, alpha=group["weight_decay"])
        norms = zip(torch._foreach_norm(matrices), torch._foreach_norm(decayed), strict=True)
        for i, update, (weight_norm, update_norm) in zip(scaled, decayed, norms, strict=True):
            ratio = group["trust_coefficient"] * weight_norm / update_norm
            updates[i] = update * torch.where((weight_norm > 0) & (update_norm > 0), ratio, 1.0)
        return updates

    def _momentum(self, weights: Tensor) -> Tensor:
        state = self.state[weights]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        return state["momentum_buffer"]
