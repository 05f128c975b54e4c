"""Builds the optional CPU kernels, on x86-64 Linux only; all else is in pyproject.toml.

Without a C compiler, with PSM_PURE=1, and on any other platform, psm installs as pure Python and runs in plain PyTorch.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/psm/kernels/csrc")
KERNELS = Extension(
    "psm.kernels._native",
    sources=[str(SOURCES / "module.c")],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    extra_compile_args=["-O3", "-fno-wrapv", "-Wall", "-Wextra"],
    py_limited_api=True,
    optional=True,
)
supported = sys.platform == "linux" and platform.machine() == "x86_64" and not os.environ.get("PSM_PURE")
options = {} if supported else {"bdist_wheel": {"py_limited_api": False}}  # a pure wheel is for any Python

setup(ext_modules=[KERNELS] if supported else [], options=options)
