"""What psm has compiled for this machine's processor (``csrc``), and how it is called.

It is compiled when psm is installed. Where there was no compiler, where torch's threads are not to be found, and on
processors on which it was not measured, there is nothing to call, and all goes by torch.
"""

import ctypes
import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

try:
    from psm.kernels import _native
except ImportError:  # not compiled
    _native = None

LANES = {"AVX2": 8, "AVX512": 16}  # floats in a vector, by what torch takes the processor for


@cache
def lanes() -> int | None:
    """Floats in a vector; None where nothing compiled can be called."""
    return LANES.get(torch.backends.cpu.get_cpu_capability()) if _native and _parallel() else None


def structure(name: str, tensors: str, sizes: str, numbers: str = "") -> type[ctypes.Structure]:
    """What a compiled function is given: addresses of tensors, sizes, and numbers, in the order of its C struct."""
    kinds = {ctypes.c_void_p: tensors, ctypes.c_ssize_t: sizes, ctypes.c_double: numbers}
    return type(
        name, (ctypes.Structure,), {"_fields_": [(x, kind) for kind, names in kinds.items() for x in names.split()]}
    )


def call(name: str, kind: type[ctypes.Structure], **given: Tensor | float | None) -> None:
    """Call what is compiled, with what its structure names, on as many threads as torch has."""
    fields = kind()
    for key, value in given.items():
        if not hasattr(kind, key):
            raise TypeError(f"{name} has no {key}")
        if isinstance(value, Tensor) and not in_memory(value):
            raise TypeError(f"{name} takes tensors of single precision in a CPU's memory, not {key} as it is")
        setattr(fields, key, value.data_ptr() if isinstance(value, Tensor) else value)
    address, size = ctypes.addressof(fields), ctypes.sizeof(fields)
    try:
        getattr(_native, name)(lanes(), torch.get_num_threads(), _parallel(), address, size)
    except (AttributeError, TypeError) as error:
        raise RuntimeError("psm was compiled from another version: install it again (pip install)") from error


def in_memory(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of single precision with numbers in a CPU's memory, nothing that stands for one."""
    return not torch._C._are_functorch_transforms_active() and all(
        x is None
        or (
            type(x) in (Tensor, torch.nn.Parameter)
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and x.layout == torch.strided
            and not x.is_neg()
            and not x._is_zerotensor()
        )
        for x in tensors
    )


def room(*shape: int) -> Tensor:
    """Memory that something compiled writes, whatever torch's default type and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def channels_last(maps: Tensor) -> Tensor:
    """Maps (N, C, H, W) as all that is compiled reads them."""
    return maps.contiguous(memory_format=torch.channels_last)


@cache
def _parallel() -> int:
    """The address by which torch's own OpenMP library starts its threads, so that no second set of them is needed."""
    try:
        loaded = re.findall(r"/\S*lib(?:gomp|iomp5|omp)\b\S*\.so\S*", Path("/proc/self/maps").read_text())
        library = min(set(loaded), key=lambda path: ("/torch/" not in path, path))
        return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, ValueError, AttributeError):
        return 0
