"""Builds the optional CPU kernels, on x86-64 Linux only; all else is in pyproject.toml.

Without a C compiler, and on any other platform, psm installs as pure Python and runs in plain PyTorch.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/psm/kernels/csrc")
KERNELS = Extension(
    "psm.kernels._native",
    sources=[str(SOURCES / "module.c")],
    depends=[str(SOURCES / f"{name}.h") for name in ("simd", "bn_relu", "winograd", "similarity", "crop")],
    extra_compile_args=["-O3", "-fno-wrapv", "-Wall", "-Wextra"],
    py_limited_api=True,
    optional=True,
)
supported = sys.platform == "linux" and platform.machine() == "x86_64"

setup(ext_modules=[KERNELS] if supported else [])
