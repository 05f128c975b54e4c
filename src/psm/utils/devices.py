"""What depends on the device: asynchronous copies, precision and free memory."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from psm.utils.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")


def find_device(accelerator: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``gpu``, ``cuda`` or ``mps`` names; auto: a GPU where there is one."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        return torch.device(next(name for name, there in present.items() if there))
    name = "cuda" if accelerator == "gpu" else accelerator
    if not present.get(name, False):
        known = ", ".join(["auto", *(name for name, there in present.items() if there)])
        raise UserError(f"accelerator={accelerator} cannot be used here: give one of {known}.")
    return torch.device(name)


def find_precision(accelerator: str) -> str:
    """The precision that ``auto`` stands for: bf16-mixed on CUDA GPUs that have it, else 32-true."""
    cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"


def resolve_precision(precision: str, accelerator: str) -> str:
    """The precision that a run has: what was given, ``auto`` by the accelerator."""
    return find_precision(accelerator) if precision == "auto" else precision


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to the device; on CUDA by way of pinned memory, so that the copy is asynchronous."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which operations run in the dtype of their tensors, also within autocast."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def prefers_few_kernels(device: torch.device) -> bool:
    """True on accelerators, where launching a kernel costs more than its work, and for compilers, which fuse."""
    return device.type != "cpu" or torch.compiler.is_compiling()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_PARALLEL = 2**17  # numbers that torch adds up with several threads


@contextmanager
def idle_threads_sleep() -> Iterator[None]:
    """Context in which threads of an operation that wait for each other leave their cores to other threads.

    For a network on a CPU beside threads that decode. libgomp, torch's OpenMP on Linux, lets a thread that waits turn
    in a loop unless there are more threads than cores. So a second team of threads is started, which does nothing.
    """
    with ThreadPoolExecutor(1) as idle:
        idle.submit(torch.ones(_PARALLEL).sum).result()
        yield


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable``, which imports the compiler, for seconds, only where something is compiled."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def cached_constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Make a function's tensor once for its arguments; for a compiler, which traces the function, in its graph."""
    cached: Callable[P, Tensor] = cache(make)  # type: ignore[assignment]

    @wraps(make)
    def constant(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return make(*args, **kwargs) if torch.compiler.is_compiling() else cached(*args, **kwargs)

    return constant


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device; 0 for others: a CPU has the images in memory anyway."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


ASSUMED_MEMORY = 40 * 2**30  # bytes of an accelerator that does not tell


def matrix_elements(device: torch.device, share: float) -> int:
    """Elements of a float32 matrix that takes at most this share of a device's memory, a power of two."""
    known = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if known else ASSUMED_MEMORY
    return 1 << max(0, int(share * memory / 4).bit_length() - 1)


def resident(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device where they take at most half of its free memory, else where they are."""
    if values.device == device or values.numel() * values.element_size() > free_bytes(device) / 2:
        return values
    return values.to(device)
