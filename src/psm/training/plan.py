"""The plan of a run, shown before its first step, and a forecast of its duration, shown after a few."""

import copy
import logging
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor, nn

from psm.config.keys import show
from psm.data import ImageStore
from psm.training.optim import state_tensors
from psm.training.run_module import HOUR, RunModule
from psm.utils.resources import available_memory

log = logging.getLogger("psm")

_BASE_BYTES = 0.4e9  # the interpreter with torch and Lightning loaded


@dataclass(frozen=True)
class RunPlan:
    """Size and cost of a run."""

    data: str
    images: int
    size: int
    task: str
    encoder: str
    parameters: int
    epochs: int
    steps: int
    batch_size: int
    device: str
    memory_bytes: float | None
    free_bytes: float | None = None  # that this process may take in all, where that is known
    memory_advice: str = "a smaller batch_size"

    def lines(self) -> list[str]:
        """The plan as it is printed before the first step."""
        memory = "" if self.memory_bytes is None else f", about {self.memory_bytes / 1e9:,.1f} GB of memory"
        lines = [
            f"{self.images:,} images of {self.size} x {self.size} pixels from {self.data} · {self.task} with "
            f"{self.encoder} ({_count(self.parameters)} parameters)",
            f"{self.epochs:,} epoch{'s' * (self.epochs > 1)}, {self.steps:,} step{'s' * (self.steps > 1)} of "
            f"{self.batch_size:,} images on {self.device}{memory}",
        ]
        if self.memory_bytes is not None and self.free_bytes is not None and self.memory_bytes > self.free_bytes:
            lines.append(
                f"only {self.free_bytes / 1e9:,.1f} GB of memory are free, and the system may end a run that takes "
                f"more: {self.memory_advice} needs less"
            )
        return lines


def make_plan(trainer: lightning.Trainer, module: RunModule) -> RunPlan:
    """The plan of a run that is about to start."""
    config, device = module.config, trainer.strategy.root_device
    threads = torch.get_num_threads()
    where = f"cpu ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else str(device.type)
    return RunPlan(
        data=show(config.data),
        images=len(module.images),
        size=module.views.size,
        task=module.task,
        encoder=config.encoder,
        parameters=sum(p.numel() for p in module.encoder.parameters()),
        epochs=config.epochs,
        steps=module.total_steps,
        batch_size=config.batch_size,
        device=where if trainer.world_size == 1 else f"{trainer.world_size} x {where}",
        memory_bytes=estimate_memory(module, trainer.world_size),
        free_bytes=available_memory() if device.type == "cpu" else None,
        memory_advice=module.memory_advice,
    )


def forecast(seconds: float, seconds_per_step: float, module: RunModule, device_type: str) -> list[str]:
    """How long the run will take from now on; above an hour on a CPU also the key that shortens it."""
    lines = [f"about {duration(seconds)} to go, {seconds_per_step:.2g} s a step"]
    if device_type == "cpu" and seconds > HOUR:
        lines.append(f"that is long: {module.shorter(seconds)}")
    return lines


def duration(seconds: float) -> str:
    """Seconds as minutes, hours or days, to be read at a glance."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{round(seconds)} s"
    if minutes < 90:
        return f"{minutes} minutes"
    hours = seconds / HOUR
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"


def estimate_memory(module: RunModule, world_size: int) -> float | None:
    """Bytes that a process will need at its peak, to within some tens of percent; None if it cannot be estimated."""
    nets, config = module.networks, module.config
    encoder_learns = any(p.requires_grad for p in module.encoder.parameters())
    per_image = activation_bytes(module.encoder, module.views.size) if encoder_learns else 0.0
    if per_image is None:
        return None
    local = config.batch_size // world_size
    chunk = min(module.forward_chunk or local, local)
    weights = sum(_bytes(p) for p in nets.parameters())
    learned = sum(_bytes(p) for p in nets.parameters() if p.requires_grad)
    views = module.view_count * local * 3 * module.views.size**2 * 4
    of_networks = {id(b) for b in nets.buffers()}
    bank = sum(_bytes(b) for b in module.buffers() if id(b) not in of_networks)
    images = _store_bytes(module.images)
    optimizer = state_tensors(config.optim) * learned
    activations = module.view_count * chunk * per_image
    return _BASE_BYTES + weights + learned + optimizer + 2 * views + bank + images + activations


def activation_bytes(encoder: nn.Module, size: int) -> float | None:
    """Bytes that autograd saves per image, counted on a copy of the encoder without data (device ``meta``)."""
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice while we count

    def count(tensor: Tensor) -> None:
        if not isinstance(tensor, nn.Parameter) and id(tensor) not in saved:
            saved[id(tensor)] = _bytes(tensor)
            kept.append(tensor)

    try:
        shadow = copy.deepcopy(encoder).to("meta")
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
            shadow(torch.empty(2, 3, size, size, device="meta"))
    except Exception as error:  # a network that cannot be copied or has no meaning without data
        log.debug("no estimate of memory: %s", error)
        return None
    finally:
        kept.clear()  # the graph holds `count`, which would hold the graph: nothing frees such a circle
    return sum(saved.values()) / 2


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _store_bytes(images: ImageStore) -> int:
    channels, height, width = images.shape
    return 0 if images.mapped else len(images) * channels * height * width


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.0f} k" if number >= 1e3 else str(number)
