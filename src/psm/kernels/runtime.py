"""The native runtime: finds the compiled extension (``csrc``) and launches its kernels on torch's threads.

The extension is compiled when psm is installed, on x86-64 Linux. Without it, without torch's OpenMP library, on a CPU
without AVX2 and while kernels are disabled ``simd_width`` is None, and nothing native runs.
"""

import ctypes
import importlib
import logging
import platform
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from psm import ops

_native: ModuleType | None
try:
    _native = importlib.import_module("psm.kernels._native")
except ImportError:  # not compiled
    _native = None

log = logging.getLogger("psm")

SIMD_WIDTHS = {"AVX2": 8, "AVX512": 16}  # floats in a vector, by torch's name of the CPU's capability


def simd_width() -> int | None:
    """Floats in a vector; None where no native kernel may run."""
    return native_width() if ops.enabled() else None


@cache
def native_width() -> int | None:
    """Floats in a vector; None where the extension cannot run."""
    return SIMD_WIDTHS.get(cpu_capability()) if _native and gomp_parallel() else None


def cpu_capability() -> str:
    """The instruction set that torch uses on this CPU: "AVX2", "AVX512" or another."""
    return torch.backends.cpu.get_cpu_capability()


def status() -> str:
    """Which kernels run: "avx2" or "avx512", or why none of the compiled ones does."""
    if not ops.enabled():
        return "off, PSM_KERNELS=0" if ops.disabled_by_environment() else "off, psm.kernels.disabled()"
    if native_width():
        return cpu_capability().lower()
    if not _native:
        return "PyTorch only, no compiled extension"
    if not gomp_parallel():
        return "PyTorch only, torch's OpenMP library was not found"
    return f"PyTorch only, the CPU has no AVX2 ({cpu_capability().lower()})"


@cache
def warn_if_not_built() -> None:
    """Once in a process: say that the kernels are missing where installing with a C compiler would have built them.

    Silent where they cannot run anyway (another platform, a CPU without AVX2) or are switched off.
    """
    buildable = sys.platform == "linux" and platform.machine() == "x86_64" and cpu_capability() in SIMD_WIDTHS
    if buildable and not _native and ops.enabled():
        log.warning(
            "the CPU kernels were not built when psm was installed, so this CPU trains more slowly than it could: "
            "install a C compiler (gcc or clang), then psm once more (pip install --force-reinstall --no-deps); "
            "PSM_KERNELS=0 silences this."
        )


def make_struct(name: str, tensors: str, sizes: str, numbers: str = "") -> type[ctypes.Structure]:
    """The arguments of a native kernel: pointers to tensors, sizes and numbers, in the order of its C struct."""
    types = {ctypes.c_void_p: tensors, ctypes.c_ssize_t: sizes, ctypes.c_double: numbers}
    fields = [(field, ctype) for ctype, names in types.items() for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def launch(kernel: str, struct: type[ctypes.Structure], **given: Tensor | float | None) -> None:
    """Run a native kernel on torch's threads.

    Args:
        kernel: its name in the extension.
        struct: the type of its arguments, by ``make_struct``.
        given: fields of the struct; those not given are NULL or 0.
    """
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    if not is_plain_float(*tensors.values()):
        other = ", ".join(key for key, value in tensors.items() if not is_plain_float(value))
        raise TypeError(f"{kernel} takes float32 tensors in CPU memory, which {other} is not")
    fields = struct(**given | {key: value.data_ptr() for key, value in tensors.items()})
    if vars(fields):  # what is no field becomes an attribute
        raise TypeError(f"{kernel} has no {', '.join(vars(fields))}")
    address, size = ctypes.addressof(fields), ctypes.sizeof(fields)
    try:
        getattr(_native, kernel)(native_width(), torch.get_num_threads(), gomp_parallel(), address, size)
    except (AttributeError, TypeError) as error:
        raise RuntimeError("psm was compiled from another version: install it again (pip install)") from error


def is_plain_float(*tensors: Tensor | None) -> bool:
    """True if all are float32 tensors with data in CPU memory (no subclass, sparse layout or functorch wrapper)."""
    if torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:  # a plain loop: this is asked hundreds of times a step
        if x is None:
            continue
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return False
        if not x.is_cpu or x.dtype is not torch.float32 or x.layout is not torch.strided:
            return False
        if x.is_neg() or x._is_zerotensor():
            return False
    return True


def empty(*shape: int) -> Tensor:
    """Uninitialized float32 memory on the CPU, whatever torch's default dtype and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def channels_last(x: Tensor) -> Tensor:
    """Feature maps (N, C, H, W) in the memory format that native kernels read."""
    return x.contiguous(memory_format=torch.channels_last)


@cache
def gomp_parallel() -> int:
    """Address of ``GOMP_parallel`` in the OpenMP library that torch uses, so that kernels share its threads; else 0."""
    try:
        loaded = re.findall(r"/\S*lib(?:gomp|iomp5|omp)\b\S*\.so\S*", Path("/proc/self/maps").read_text())
        library = min(set(loaded), key=lambda path: ("/torch/" not in path, path))
        return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, ValueError, AttributeError):
        return 0
