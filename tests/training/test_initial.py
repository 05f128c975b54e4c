"""``init=``: what a run takes from weights that there are, that resuming does not read them again, what is refused."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from helpers import SMALL
from psm.config.schema import PretrainConfig
from psm.models.factory import create_encoder
from psm.models.init_weights import read_initial_weights
from psm.models.pretrained import checksum, read_encoder
from psm.training.initial import initial_settings
from psm.training.module import PretrainModule
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    settings: dict[str, Any] = SMALL | {
        "epochs": 1,
        "optim": {"lr": 0.03},
        "positives": {"k": 2},
        "monitor": {"knn": False},
    }
    return psm.pretrain(tmp_path_factory.mktemp("runs") / "a", **settings).out


class Started(Exception):
    """Raised at the first step of a run that is not to be trained."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Starts a run in a new folder and returns its module as it is before the first step."""

    def begin(**keys: Any) -> PretrainModule:
        modules: list[PretrainModule] = []

        def stop(self: PretrainModule) -> None:
            modules.append(self)
            raise Started

        with monkeypatch.context() as patch:
            patch.setattr(PretrainModule, "on_train_start", stop)
            with pytest.raises(Started):
                psm.pretrain(tmp_path / "begun", **keys, progress=False, overwrite="delete")
        return modules[0]

    return begin


def weights_of(run: Path, name: str) -> dict[str, torch.Tensor]:
    state = read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
    prefix = f"networks.{name}."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_gives_encoder_heads_and_settings(first: Path, begun: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`psm pretrain out=b init=a epochs=3`: a's weights and settings, a schedule of its own, a target that is equal."""
    with caplog.at_level(logging.WARNING, "psm"):
        module = begun(init=str(first), epochs=3)
    networks = module.networks
    for name in ("encoder", "projector", "predictor"):
        assert same(getattr(networks, name).state_dict(), weights_of(first, name)), name
    online = torch.nn.Sequential(networks.encoder, networks.projector).state_dict()
    assert same(networks.target.state_dict(), online), "the EMA target starts equal"
    config = module.config
    assert (config.data, config.encoder, config.images.limit, config.optim.lr) == ("shapes", "tiny", 100, 0.03)
    assert config.positives["k"] == 2
    assert config.epochs == 3
    assert module.total_steps == 9
    assert module.learning_rate(9) == 0 < module.learning_rate(8), "a schedule of its own"
    assert module.info.init["from"] == str(first)
    assert module.info.init["crc32"] == checksum(read_encoder(first)[1])
    assert "took the encoder, projector and predictor" in caplog.text
    assert "those of that run" in caplog.text


@pytest.mark.parametrize("source", ["encoder.safetensors", "checkpoints/last.ckpt"])
def test_heads_are_taken_as_asked(first: Path, begun: Any, source: str) -> None:
    small = {name: value for name, value in SMALL.items() if name != "progress"} | {"monitor": {"knn": False}}
    has_heads = source.endswith(".ckpt")
    for wanted in (True, False) if has_heads else (True, None):
        keys = small | {"init": str(first / source), "init_heads": wanted}
        if wanted and not has_heads:
            with pytest.raises(UserError, match=r"init_heads=true cannot take the heads .* it holds no projector"):
                psm.pretrain(first.parent / "no", **keys)
            continue
        module = begun(**keys)
        taken = has_heads and wanted is not False
        assert same(module.networks.encoder.state_dict(), weights_of(first, "encoder"))
        assert same(module.networks.projector.state_dict(), weights_of(first, "projector")) == taken
        assert module.info.init["heads"] == (["projector", "predictor"] if taken else [])


def test_heads_of_other_widths_start_at_random(first: Path, begun: Any, tmp_path: Path) -> None:
    module = begun(init=str(first), heads={"out_dim": 16})
    assert module.info.init["heads"] == []
    with pytest.raises(UserError, match="its projector has other widths"):
        psm.pretrain(tmp_path / "b", init=str(first), heads={"out_dim": 16}, init_heads=True, progress=False)
    assert not (tmp_path / "b").exists()


def test_resuming_does_not_read_the_weights_again(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is gone by then; the resumed run ends like one that was not interrupted, and still says its origin."""
    source = tmp_path / "source.ckpt"
    shutil.copy(first / "checkpoints" / "last.ckpt", source)
    keys: dict[str, Any] = {"init": str(source), "epochs": 2, "progress": False}
    whole = psm.pretrain(tmp_path / "whole", **keys)
    step = PretrainModule.training_step

    def stop(self: Any, batch: Any, index: Any) -> Any:
        if batch.step == 4:
            raise Started
        return step(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainModule, "training_step", stop)
        with pytest.raises(Started):
            psm.pretrain(tmp_path / "parts", **keys)
    source.unlink()
    parts = psm.pretrain(tmp_path / "parts", resume=True, progress=False)
    assert same(whole.encoder.state_dict(), parts.encoder.state_dict())
    for run in (whole, parts):
        told = json.loads((run.out / "encoder.json").read_text())["init"]
        assert told["from"] == str(source)
        assert told["epoch"] == 1
        assert run.config.init == str(source)
        assert psm.load_encoder(run.out).info.init == told
    with pytest.raises(UserError, match="init=other differs from init="):
        psm.pretrain(tmp_path / "parts", resume=True, init="other", progress=False)


def test_more_epochs_of_a_finished_run_are_refused(first: Path) -> None:
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"which is finished.*psm pretrain out=\.\.\. init=.*runs.*/a epochs="):
        psm.pretrain(first, resume=True, epochs=400, progress=False)
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before


def test_a_run_cannot_start_from_itself(first: Path) -> None:
    with pytest.raises(UserError, match="name another out"):
        psm.pretrain(first, init=str(first / "encoder.safetensors"), overwrite=True, progress=False)


def test_another_stem_names_the_key(first: Path, tmp_path: Path) -> None:
    torch.save(create_encoder("tiny", "imagenet").state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"the imagenet stem, .* 7x7.*give stem=imagenet"):
        psm.pretrain(tmp_path / "b", **SMALL, init=str(tmp_path / "w.pth"))
    with pytest.raises(UserError, match="give stem=cifar"):
        psm.pretrain(tmp_path / "b", init=str(first), stem="imagenet", progress=False)
    assert not (tmp_path / "b").exists()


def test_what_depends_on_a_changed_key_is_left_open(first: Path) -> None:
    """Another method has its own parts, other data its own images, another optimizer its own rate."""
    weights = read_initial_weights(first)
    unchanged = initial_settings(weights, [{"data": "shapes", "method": "psm"}])
    assert (unchanged.positives["k"], unchanged.images.size, unchanged.stem) == (2, 16, "cifar")
    assert unchanged.optim.weight_decay is None, "the size of the images decides it again"
    assert initial_settings(weights, [{"method": "simclr"}]).positives == {}
    assert initial_settings(weights, [{"data": "cifar10"}]).images == PretrainConfig().images
    assert initial_settings(weights, [{"optim": {"name": "adamw"}}]).optim.lr is None
    assert initial_settings(weights, [{"encoder": "resnet18"}]).stem == "auto"
    assert initial_settings(None, [{"epochs": 3}]) == PretrainConfig()


def test_code_of_another_run_is_not_taken_over(first: Path) -> None:
    """A run that was downloaded may name callbacks; they are code, and run only if the user names them."""
    weights = read_initial_weights(first)
    weights.settings["callbacks"] = ["os.system"]
    weights.settings["trainer"] = {"profiler": "simple"}
    taken = initial_settings(weights, [])
    assert taken.callbacks == []
    assert taken.trainer == {}
