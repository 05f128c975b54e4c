"""What psm has compiled for this machine's processor (``native``), and how it is called.

It is compiled when psm is installed. Where there was no compiler, where torch's threads are not to be found, and on
processors on which it was not measured, there is nothing to call, and all goes by torch.
"""

import ctypes
import re
from functools import cache
from pathlib import Path

import torch

try:
    from psm import _native
except ImportError:  # not compiled
    _native = None

LANES = {"AVX2": 8, "AVX512": 16}  # floats in a vector, by what torch takes the processor for


@cache
def lanes() -> int | None:
    """Floats in a vector; None where nothing compiled can be called."""
    return LANES.get(torch.backends.cpu.get_cpu_capability()) if _native and _parallel() else None


def call(name: str, *numbers: float) -> None:
    """Call what is compiled, with addresses and sizes, on as many threads as torch has."""
    getattr(_native, name)(lanes(), torch.get_num_threads(), _parallel(), *numbers)


@cache
def _parallel() -> int:
    """The address by which torch's own OpenMP library starts its threads, so that no second set of them is needed."""
    try:
        loaded = re.findall(r"/\S*lib(?:gomp|iomp5|omp)\b\S*\.so\S*", Path("/proc/self/maps").read_text())
        library = min(set(loaded), key=lambda path: ("/torch/" not in path, path))
        return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, ValueError, AttributeError):
        return 0
