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


def test_psm_stays_within_its_kernels(kernels: ModuleType) -> None:
    step = kernels.count("psm")
    assert step.total <= 450
    assert step.counts["views"] <= 65
    assert step.counts["networks"] <= 230
    assert step.counts["loss"] <= 140
    assert step.counts["update"] <= 20


def test_a_large_batch_and_bank_cost_few_more(kernels: ModuleType) -> None:
    """Slices are sized for the device."""
    assert kernels.count("psm", batch=4096, bank_rows=2**20).total <= 1000


def test_compiled_each_part_is_one_graph(kernels: ModuleType) -> None:
    assert kernels.count_graphs("psm", batch=8, encoder="tiny") == {"views": 1, "networks": 1, "loss": 1}
