"""Choices that are off by default: they train, resume to the bit, and change what they say."""

from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from psm.training.module import PretrainModule

CHOICES: dict[str, dict[str, Any]] = {
    "weak target": {"target": {"views": "weak"}},
}


def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break a run off before this step."""
    train = PretrainModule.training_step

    def stopping(self: Any, batch: Any, index: Any) -> Any:
        if batch.step == step:
            raise InterruptedError
        return train(self, batch, index)

    monkeypatch.setattr(PretrainModule, "training_step", stopping)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_trains_and_resumes_exactly(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given = small | {"save": {"every_steps": 1}, "monitor": {"knn": False}} | CHOICES[name]
    whole = psm.pretrain(tmp_path / "whole", **given)
    stopped_at(4, monkeypatch)
    with pytest.raises(InterruptedError):
        psm.pretrain(tmp_path / "parts", **given)
    monkeypatch.undo()
    parts = psm.pretrain(tmp_path / "parts", resume=True)
    for key, value in whole.encoder.state_dict().items():
        assert torch.equal(value, parts.encoder.state_dict()[key])
    assert torch.isfinite(torch.tensor([record["loss"] for record in whole.metrics])).all()
