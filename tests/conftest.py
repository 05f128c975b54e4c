"""Small things that many tests share."""

import os
from typing import Any

import pytest
import torch
from hypothesis import settings

from helpers import SMALL
from psm.models.torchvision_ops import define_missing_operators

# The same examples every time: a red run can be repeated, and a green one stays green.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes run side by side
# Some virtual machines announce AMX but trap on it; bfloat16 tests would die there of an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
torch.set_num_threads(1)
define_missing_operators()  # before a test imports Lightning, which imports torchvision


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Large folders leave an index and decoded images in the user's cache folder: not in that of who runs the tests."""
    os.environ["PSM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def small() -> Any:
    """Settings of a very small run."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in SMALL.items()}


@pytest.fixture(scope="session")
def small_arguments() -> Any:
    """The same as command-line arguments, but for epochs."""
    arguments = []
    for name, value in SMALL.items():
        if name == "epochs":
            continue
        if isinstance(value, dict):
            arguments += [f"{name}.{inner}={v}" for inner, v in value.items()]
        else:
            arguments.append(f"{name}={str(value).lower()}")
    return arguments
