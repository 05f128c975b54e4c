"""The examples run as they stand, learn something, and stay short."""

import importlib.util
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def example(name: Any) -> Any:
    path = next(path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_they_are_short(path: Any) -> None:
    assert len(path.read_text().splitlines()) <= 80


def test_psm_in_plain_pytorch() -> None:
    losses = example("psm_in_plain_pytorch").main(images=256, epochs=2, batch_size=32)
    assert len(losses) == 16
    assert all(torch.isfinite(torch.tensor(losses)))


def test_pnsm_in_your_simclr() -> None:
    module = example("pnsm_in_your_simclr")
    losses = module.main(steps=60)
    assert statistics.mean(losses[-5:]) < statistics.mean(losses[:5]) - 0.3
    z1, z2 = torch.randn(2, 8, 5)
    assert module.simclr(z1, z2, pnsm=0.0) == module.simclr(z1, z2)
    assert module.simclr(z1, z2, pnsm=50.0) < module.simclr(z1, z2)


def test_a_method_of_your_own(tmp_path: Path, small: dict[str, Any]) -> None:
    from psm.methods.registry import METHODS

    try:
        result = example("a_method_of_your_own").main(tmp_path / "a", **small | {"positives": {"k": 2}})
        assert result.config.method == "mine"
        assert result.config.weighting["name"] == "hard"
        assert result.config.positives["k"] == 2
    finally:
        METHODS.pop("mine", None)


@pytest.mark.slow
def test_memory_at_batch_4096() -> None:
    """A batch of 4096 and a bank of a million rows within 4 GiB, measured in a process of its own."""
    script = Path(__file__).parent.parent / "benchmarks" / "memory.py"
    command = [sys.executable, str(script), "psm", "4096", "1000000"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.5 < float(result.stdout) < 4
