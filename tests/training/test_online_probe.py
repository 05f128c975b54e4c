"""The online linear probe: it learns, it is recorded and resumed, and the encoder never notices it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import psm
from psm.data import ImageDataset, ImageStore
from psm.training.online_probe import EPS, MOMENTUM, OnlineProbe
from psm.utils.errors import UserError


def features_and_labels(count: Any = 64, seed: Any = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return 5 * torch.eye(8)[labels] + torch.randn(count, 8, generator=random) + 2, labels


def test_a_step_is_that_of_batch_norm_a_linear_layer_and_sgd() -> None:
    probe = OnlineProbe(8, 3)
    norm, layer = nn.BatchNorm1d(8, eps=EPS, affine=False), nn.Linear(8, 3)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=MOMENTUM)
    for seed in range(4):
        features, labels = features_and_labels(seed=seed)
        probe.update(features, labels, 0.1)
        optimizer.zero_grad()
        cross_entropy(layer(norm(features)), labels).backward()
        optimizer.step()
    assert torch.allclose(probe.weight, layer.weight, atol=1e-6)
    assert torch.allclose(probe.bias, layer.bias, atol=1e-6)
    assert torch.allclose(probe.mean, norm.running_mean, atol=1e-6)


def test_it_learns_and_leaves_features_gradients_and_random_state_alone() -> None:
    probe = OnlineProbe(8, 3)
    features, labels = features_and_labels()
    features.requires_grad_()
    before, state = features.detach().clone(), torch.get_rng_state()
    for _ in range(50):
        probe.update(features, labels, 0.03)
    assert features.grad is None
    assert torch.equal(features.detach(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not list(probe.parameters())  # no optimizer can find anything
    assert (probe(features).argmax(1) == labels).float().mean() > 0.95


def test_it_stays_in_float32() -> None:
    probe = OnlineProbe(8, 3).to(torch.bfloat16)
    assert {buffer.dtype for buffer in probe.buffers()} == {torch.float32}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run without and with the probe."""
    from helpers import SMALL

    out = tmp_path_factory.mktemp("runs")
    plain = psm.pretrain(out / "plain", **SMALL)
    probed = psm.pretrain(out / "probed", **SMALL | {"monitor": {"images": 60, "test_images": 40, "linear": True}})
    return plain, probed


def test_the_encoder_is_the_same_to_the_bit(pair: Any) -> None:
    plain, probed = pair
    states = [torch.load(run.out / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in pair]
    assert any(name.startswith("probe.") for name in states[1])
    assert states[0].keys() == {name for name in states[1] if not name.startswith("probe.")}
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert (plain.out / "encoder.safetensors").read_bytes() == (probed.out / "encoder.safetensors").read_bytes()
    for before, after in zip(plain.metrics, probed.metrics, strict=True):
        assert before["loss"] == after["loss"]
        assert before["knn"] == after["knn"]


def test_it_is_recorded_and_on_the_page(pair: Any) -> None:
    from psm.reporting.curves import draw_curves

    plain, probed = pair
    lines = [json.loads(line) for line in (probed.out / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["linear"] <= 100 for line in lines)
    assert not any("linear" in line for line in plain.metrics)
    assert any("linear probe" in svg for svg in draw_curves(probed.metrics))


def test_a_resumed_run_goes_on_with_it(pair: Any, tmp_path: Path, small: dict[str, Any]) -> None:
    _, whole = pair
    small["monitor"] = {**small["monitor"], "linear": True}

    class Stop(Exception):
        pass

    import lightning

    class StopAfterOne(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                raise Stop

    with pytest.raises(Stop):
        psm.pretrain(tmp_path / "a", **small, callbacks=[StopAfterOne()])
    resumed = psm.pretrain(tmp_path / "a", resume=True)
    assert [line["linear"] for line in resumed.metrics] == [line["linear"] for line in whole.metrics]


def test_it_needs_labels_and_may_stand_without_knn(tmp_path: Path, small: dict[str, Any]) -> None:
    pixels = torch.randint(0, 255, (40, 3, 16, 16), dtype=torch.uint8)
    blind = ImageDataset("blind", ImageStore(pixels), None, ())
    small |= {"epochs": 1, "monitor": {"linear": True, "knn": False, "test_images": 20}}
    with pytest.raises(UserError, match=r"monitor\.linear=true learns from labels, and data=blind has none"):
        psm.pretrain(tmp_path / "a", **small | {"data": blind})
    (line,) = psm.pretrain(tmp_path / "b", **small).metrics
    assert "linear" in line
    assert "knn" not in line
