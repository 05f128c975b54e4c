"""Optimizers by name: SGD, AdamW and LARS, with their defaults, groups and settings."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from psm.config.schema import OptimConfig
from psm.training.lars import LARS
from psm.utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class OptimizerSpec:
    """How an optimizer is built, which keys of ``optim`` it reads, and the values of those that were left open."""

    build: Callable[[list[dict[str, Any]], OptimConfig, bool], torch.optim.Optimizer]
    settings: tuple[str, ...]
    lr: float
    weight_decay: Callable[[int], float]  # from the side of the images in pixels
    state_tensors: int  # tensors of a weight's size that it keeps for each weight


def _sgd(groups: list[dict[str, Any]], config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    given: dict[str, Any] = {"lr": config.warmup_lr, "momentum": config.momentum, "nesterov": config.nesterov}
    return torch.optim.SGD(groups, **given, fused=True if fused else None, foreach=None if fused else True)


def _adamw(groups: list[dict[str, Any]], config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    given: dict[str, Any] = {"lr": config.warmup_lr, "betas": tuple(config.betas), "eps": config.eps}
    return torch.optim.AdamW(groups, **given, fused=True if fused else None, foreach=None if fused else True)


def _lars(groups: list[dict[str, Any]], config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    return LARS(groups, config.warmup_lr, config.momentum, trust_coefficient=config.trust_coefficient)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "sgd": OptimizerSpec(_sgd, ("momentum", "nesterov"), 0.1, lambda size: 1e-3 if size < 64 else 1e-4, 1),
    "adamw": OptimizerSpec(_adamw, ("betas", "eps"), 1e-3, lambda size: 1e-2, 2),
    "lars": OptimizerSpec(_lars, ("momentum", "trust_coefficient"), 1.0, lambda size: 1e-6, 1),
}


def find_optimizer(name: str) -> OptimizerSpec:
    """An optimizer by name."""
    if name not in OPTIMIZERS:
        hint = did_you_mean(name, OPTIMIZERS)
        raise UserError(f"optim.name={name} is unknown{hint}: choose one of {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[name]


def check_optimizer(config: OptimConfig) -> None:
    """Refuse settings of another optimizer, which would do nothing."""
    spec = find_optimizer(config.name)
    defaults: OptimConfig[None] = OptimConfig()
    special = {name for other in OPTIMIZERS.values() for name in other.settings}
    for name in sorted(special - set(spec.settings)):
        if getattr(config, name) != getattr(defaults, name):
            users = " and ".join(other for other, row in OPTIMIZERS.items() if name in row.settings)
            raise UserError(
                f"optim.{name} is a setting of {users}, and optim.name={config.name} does not use it: leave it out."
            )
    if config.nesterov and config.momentum == 0:
        raise UserError("optim.nesterov=true needs momentum: give optim.momentum above 0.")


def default_lr(config: OptimConfig) -> float:
    """``optim.lr``, or the optimizer's usual one."""
    return find_optimizer(config.name).lr if config.lr is None else config.lr


def default_weight_decay(config: OptimConfig, size: int) -> float:
    """``optim.weight_decay``, or the optimizer's usual one for images of this side in pixels."""
    return find_optimizer(config.name).weight_decay(size) if config.weight_decay is None else config.weight_decay


def state_tensors(config: OptimConfig) -> int:
    """Tensors of a weight's size that the optimizer keeps for each weight."""
    return find_optimizer(config.name).state_tensors


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimConfig,
    lr_factors: Mapping[nn.Parameter, float] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """The optimizer that the configuration names.

    Fused on a CPU and on CUDA, unless gradients are clipped: with mixed precision Lightning does not clip for a fused
    step. On a CPU torch's fused SGD copies each channels-last gradient once: 6 ms for ResNet-18's weights, 0.8 % of a
    step.

    Args:
        parameters: all that are trained.
        config: of the optimizer.
        lr_factors: learning rates of some of them over that of the others; whoever sets the rates reads the factor,
            ``lr_factor``, from the group.
    """
    parameters = list(parameters)
    factors = dict.fromkeys([1.0, *(lr_factors.get(p, 1.0) for p in parameters)])
    groups: list[dict[str, Any]] = []
    for factor in factors:
        members = [p for p in parameters if lr_factors.get(p, 1.0) == factor]
        own = {} if factor == 1 else {"lr_factor": factor}
        groups += [group | own for group in _groups(members, config)]
    fused = parameters[0].device.type in ("cpu", "cuda") and config.clip is None
    optimizer = find_optimizer(config.name).build(groups, config, fused)
    if optimizer.defaults.get("fused"):
        optimizer.register_step_pre_hook(match_gradient_strides)
    return optimizer


def _groups(parameters: list[nn.Parameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups: one, or a second for norms and biases (tensors of one dimension), which are not decayed."""
    decayed = {"params": parameters, "weight_decay": config.weight_decay}
    if not config.exclude_norm_bias:
        return [decayed] if parameters else []
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [decayed | {"params": matrices}, decayed | {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def match_gradient_strides(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Step pre-hook: copy gradients whose memory format is not that of their weights.

    torch's fused step on a CPU reads weights, gradients and state in the order of memory, whatever their strides.
    Autograd gives gradients the strides of their weights (also within a closure, which runs after this hook), so that
    only gradients set by hand are copied.
    """
    for group in optimizer.param_groups:
        for weights in group["params"]:
            if weights.grad is not None:
                weights.grad = _like(weights.grad, weights)


def adapt_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Fit a state from a checkpoint, perhaps of another device or memory format, to this process.

    Choose this device's implementation (fused or foreach), and lay out each state tensor in memory as its weights are:
    the fused step does not look at strides.
    """
    for group in optimizer.param_groups:
        group.update({name: optimizer.defaults[name] for name in ("fused", "foreach") if name in optimizer.defaults})
        for weights in group["params"]:
            state = optimizer.state.get(weights, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == weights.shape:
                    state[name] = _like(value, weights)


def _like(tensor: Tensor, weights: Tensor) -> Tensor:
    """A tensor that lies in memory as weights do."""
    return tensor if tensor.stride() == weights.stride() else torch.empty_like(weights).copy_(tensor)
