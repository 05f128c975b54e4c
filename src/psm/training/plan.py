"""The plan of a run, shown before its first step, and a forecast of its duration, shown after a few."""

import copy
import logging
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor, nn

from psm.config.keys import show
from psm.config.presets import LAPTOP
from psm.config.schema import ResolvedPretrainConfig
from psm.data import ImageStore
from psm.training.module import PretrainModule
from psm.training.optim import state_tensors
from psm.utils.resources import available_memory

log = logging.getLogger("psm")

HOUR = 3600.0
_BASE_BYTES = 0.4e9  # the interpreter with torch and Lightning loaded


@dataclass(frozen=True)
class RunPlan:
    """Size and cost of a run."""

    data: str
    images: int
    size: int
    method: str
    encoder: str
    parameters: int
    epochs: int
    steps: int
    batch_size: int
    device: str
    memory_bytes: float | None
    free_bytes: float | None = None  # that this process may take in all, where that is known

    def lines(self) -> list[str]:
        """The plan as it is printed before the first step."""
        memory = "" if self.memory_bytes is None else f", about {self.memory_bytes / 1e9:,.1f} GB of memory"
        lines = [
            f"{self.images:,} images of {self.size} x {self.size} pixels from {self.data} · {self.method} with "
            f"{self.encoder} ({_count(self.parameters)} parameters)",
            f"{self.epochs:,} epochs, {self.steps:,} steps of {self.batch_size:,} images on {self.device}{memory}",
        ]
        if self.memory_bytes is not None and self.free_bytes is not None and self.memory_bytes > self.free_bytes:
            lines.append(
                f"only {self.free_bytes / 1e9:,.1f} GB of memory are free, and the system may end a run that takes "
                "more: a smaller batch_size, a grad_cache_chunk below it or a smaller images.size needs less"
            )
        return lines


def make_plan(trainer: lightning.Trainer, module: PretrainModule) -> RunPlan:
    """The plan of a run that is about to start."""
    config, device = module.config, trainer.strategy.root_device
    threads = torch.get_num_threads()
    where = f"cpu ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else str(device.type)
    return RunPlan(
        data=show(config.data),
        images=len(module.images),
        size=module.views.size,
        method=config.method,
        encoder=config.encoder,
        parameters=sum(p.numel() for p in module.networks.encoder.parameters()),
        epochs=config.epochs,
        steps=module.total_steps,
        batch_size=config.batch_size,
        device=where if trainer.world_size == 1 else f"{trainer.world_size} x {where}",
        memory_bytes=estimate_memory(module, trainer.world_size),
        free_bytes=available_memory() if device.type == "cpu" else None,
    )


def forecast(seconds: float, seconds_per_step: float, config: ResolvedPretrainConfig, device_type: str) -> list[str]:
    """How long the run will take from now on; above an hour on a CPU also the key that shortens it."""
    lines = [f"about {duration(seconds)} to go, {seconds_per_step:.2g} s a step"]
    if device_type == "cpu" and seconds > HOUR:
        lines.append(f"that is long: {_shorter(config, seconds)}")
    return lines


def _shorter(config: ResolvedPretrainConfig, seconds: float) -> str:
    if config.preset != LAPTOP.name and (config.encoder, config.epochs) == ("resnet18", 200):
        return f"preset={LAPTOP.name} is {LAPTOP.about}"
    if config.encoder not in ("tiny", "custom"):
        return "encoder=tiny trains a small network that suits a CPU"
    return f"epochs={max(1, int(config.epochs * HOUR / seconds))} would take an hour"


def duration(seconds: float) -> str:
    """Seconds as minutes, hours or days, to be read at a glance."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{round(seconds)} s"
    if minutes < 90:
        return f"{minutes} minutes"
    hours = seconds / HOUR
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"


def estimate_memory(module: PretrainModule, world_size: int) -> float | None:
    """Bytes that a process will need at its peak, to within some tens of percent; None if it cannot be estimated."""
    nets, config = module.networks, module.config
    per_image = activation_bytes(nets.encoder, module.views.size)
    if per_image is None:
        return None
    local = config.batch_size // world_size
    chunk = min(config.grad_cache_chunk or local, local)
    weights = sum(_bytes(p) for p in nets.parameters())
    learned = sum(_bytes(p) for p in nets.parameters() if p.requires_grad)
    views = config.views.count * local * 3 * module.views.size**2 * 4
    bank = sum(_bytes(b) for b in module.bank.buffers()) if module.bank is not None else 0
    images = _store_bytes(module.images)
    optimizer = state_tensors(config.optim) * learned
    return (
        _BASE_BYTES + weights + learned + optimizer + 2 * views + bank + images + config.views.count * chunk * per_image
    )


def activation_bytes(encoder: nn.Module, size: int) -> float | None:
    """Bytes that autograd saves per image, counted on a copy of the encoder without data (device ``meta``)."""
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice while we count

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and id(tensor) not in saved:
            saved[id(tensor)] = _bytes(tensor)
            kept.append(tensor)
        return tensor

    try:
        shadow = copy.deepcopy(encoder).to("meta")
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            shadow(torch.empty(2, 3, size, size, device="meta"))
    except Exception as error:  # a network that cannot be copied or has no meaning without data
        log.debug("no estimate of memory: %s", error)
        return None
    return sum(saved.values()) / 2


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _store_bytes(images: ImageStore) -> int:
    channels, height, width = images.shape
    return 0 if images.mapped else len(images) * channels * height * width


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.0f} k" if number >= 1e3 else str(number)
