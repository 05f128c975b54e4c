"""Choices that are off by default: they train, resume to the bit, and change what they say."""

from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from psm.models.siamese import SiameseNetworks
from psm.training.module import PretrainModule
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.schedule import target_momentum

CHOICES: dict[str, dict[str, Any]] = {
    "one by one with two views": {
        "positives": {"k": 2, "mix": True, "agree": True, "temperature": 0.1, "min_similarity": -0.5, "start": 0.4},
        "target": {"views": "weak", "momentum": 0.9, "schedule": "cosine"},
        "predictor": {"hidden_dim": 16, "lr_factor": 10.0},
    },
    "three views": {
        "views": {"count": 3},
        "batch_size": 20,
        "objective": "decoupled",
        "weighting": "hard",
        "positives": {"k": 2, "mix": True, "share": 0.5, "start": 0.3},
        "bank": {"size": 48, "keys": "mean"},
        "loss": {"redundancy_weight": 5.0, "reduction": "sum", "weight_sum": 1.0},
        "heads": {"hidden_dim": 24, "out_dim": 12, "layers": 3, "norm_last": "none"},
    },
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


def test_the_momentum_of_each_step_is_that_of_its_schedule(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    update = SiameseNetworks.update_target

    def spying(self: SiameseNetworks, momentum: float) -> None:
        used.append(momentum)
        update(self, momentum)

    monkeypatch.setattr(SiameseNetworks, "update_target", spying)
    psm.pretrain(tmp_path / "a", **small, target={"momentum": 0.9, "schedule": "cosine"})
    assert used == [target_momentum(step, 6, 0.9, "cosine") for step in range(6)]


def test_the_predictor_has_its_own_width_and_rate(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a factor that is nearly 0 the predictor stays where it was; its hidden layer is as wide as asked for."""
    before = {}
    begin = PretrainModule.on_train_start

    def spying(self: PretrainModule) -> None:
        begin(self)
        before.update({name: x.detach().clone() for name, x in self.networks.named_parameters()})
        rates = [(group["lr"], group.get("lr_factor")) for group in self.trainer.optimizers[0].param_groups]
        assert rates == [(self.learning_rate(0), None), (self.learning_rate(0) * 1e-9, 1e-9)]

    monkeypatch.setattr(PretrainModule, "on_train_start", spying)
    result = psm.pretrain(tmp_path / "a", **small, predictor={"hidden_dim": 7, "lr_factor": 1e-9})
    after = read_checkpoint(result.out / "checkpoints" / "last.ckpt")["state_dict"]
    for name, value in before.items():
        if not name.startswith("target.") and value.ndim > 1:
            still = torch.allclose(after[f"networks.{name}"], value, 0, 1e-6)
            assert still == name.startswith("predictor."), name
    assert before["predictor.0.weight"].shape == (7, 12)
