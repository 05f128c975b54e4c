"""How many kernels a step launches on an accelerator, counted on the meta device by benchmarks/kernels.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
    spec = importlib.util.spec_from_file_location("kernel_counts", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_views_loss_and_update_stay_within_their_kernels(kernels: ModuleType) -> None:
    counts = kernels.count("psm", batch=16, bank_rows=4096, encoder="tiny").counts
    assert counts["views"] <= 65
    assert counts["loss"] <= 395
    assert counts["update"] <= 20


def test_a_large_batch_and_bank_cost_few_more(kernels: ModuleType) -> None:
    """Slices are sized for the device: the whole step with ResNet-18 stays below 1,000 kernels."""
    counts = kernels.count("psm", batch=4096, bank_rows=2**20, encoder="tiny").counts
    assert counts["views"] + counts["loss"] + counts["update"] <= 1000 - 240  # ResNet-18's networks have 234
