"""Training: what a step does and in which order, resume bit for bit, health, NaN, odd sizes."""

import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psm
from helpers import run_psm, start_psm
from psm.config import merge as settings
from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.losses.contrastive import ContrastiveLoss
from psm.methods.build import build_networks, method_of
from psm.training.health import divergence, feature_health, health_warnings
from psm.training.module import PretrainModule
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import Diverged, UserError
from psm.utils.run_folder import RunFolder
from psm.utils.run_lock import clear_run, lock_run
from psm.utils.seeding import seed_networks
from psm.views.transform import Views


def state(out: Any, name: Any = "last.ckpt") -> Any:
    return read_checkpoint(out / "checkpoints" / name)


def same(a: Any, b: Any) -> Any:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_run_folder(tmp_path: Path, small: dict[str, Any]) -> None:
    result = psm.pretrain(tmp_path / "a", **small)
    assert [m["epoch"] for m in result.metrics] == [1, 2]
    assert {p.name for p in result.out.iterdir()} >= {
        "config.yaml", "metrics.jsonl", "checkpoints", "encoder.safetensors", "encoder.json", "log.txt",
    }  # fmt: skip
    for record in result.metrics:
        for name in ("loss", "chance", "feature_std", "effective_rank", "alignment", "uniformity", "negatives_kept"):
            assert math.isfinite(record[name])
        assert 0 < record["negatives_kept"] < 1
        assert 0 <= record["knn"] <= 100
    assert result.metrics[-1]["bank_fill"] == 1
    assert result.metrics[-1]["mined_share"] == 1
    loaded = psm.load_encoder(result.out)
    assert same(loaded.state_dict(), result.encoder.state_dict())
    assert json.loads((result.out / "encoder.json").read_text())["width"] == 256
    assert not list(result.out.rglob(".writing-*"))


def test_same_seed_same_weights_other_seed_other_weights(tmp_path: Path, small: dict[str, Any]) -> None:
    states = [
        psm.pretrain(tmp_path / name, **small, seed=seed).encoder.state_dict()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert same(states[0], states[1])
    assert not same(states[0], states[2])


def test_labels_change_nothing(tmp_path: Path, small: dict[str, Any]) -> None:
    small["images"] = ImagesConfig(limit=100, size=16)
    data = load_dataset("shapes", small.pop("images"), progress=False)
    blind = ImageDataset("shapes", ImageStore(data.train.take(torch.arange(len(data.train)))), None, ())
    del small["data"]
    seeing = psm.pretrain(tmp_path / "a", data=data, **small)
    unseeing = psm.pretrain(tmp_path / "b", data=blind, **small)
    assert same(seeing.encoder.state_dict(), unseeing.encoder.state_dict())
    assert "knn" in seeing.metrics[0]
    assert "knn" not in unseeing.metrics[0]


class Interruption(Exception):
    pass


@pytest.mark.parametrize("index", ["exact", pytest.param("faiss", marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, index: Any
) -> None:
    """Stopped within and between epochs; no step is repeated and each loss is the same to the bit."""
    if index != "exact":
        pytest.importorskip(index)
    small["save"] = {"every_steps": 1}
    small["bank"] |= {"index": index}
    whole = psm.pretrain(tmp_path / "whole", **small)
    step, losses, stops = PretrainModule.training_step, {}, [1, 3, 4, 5]

    def training_step(self: Any, batch: Any, index: Any) -> Any:
        if stops and batch.step == stops[0]:
            stops.pop(0)
            raise Interruption
        loss = step(self, batch, index)
        losses.setdefault(batch.step, []).append(loss.item())
        return loss

    monkeypatch.setattr(PretrainModule, "training_step", training_step)
    for _ in range(4):
        with pytest.raises(Interruption):
            psm.pretrain(tmp_path / "parts", **small, resume="auto")
    parts = psm.pretrain(tmp_path / "parts", resume=True, progress=False)
    assert sorted(losses) == list(range(6))
    assert all(len(values) == 1 for values in losses.values())
    assert same(whole.encoder.state_dict(), parts.encoder.state_dict())
    a, b = state(whole.out), state(parts.out)
    assert same(a["state_dict"], b["state_dict"])
    for one, other in zip(whole.metrics, parts.metrics, strict=True):
        assert {k: v for k, v in one.items() if k not in ("seconds", "images_per_second")} == {
            k: v for k, v in other.items() if k not in ("seconds", "images_per_second")
        }


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_gradients_are_clipped_at_every_precision(tmp_path: Path, small: dict[str, Any], precision: Any) -> None:
    """So hard that nothing but weight decay, which is off, could move the weights far."""
    free = psm.pretrain(tmp_path / "free", **small, precision=precision, optim={"weight_decay": 0.0})
    held = psm.pretrain(tmp_path / "held", **small, precision=precision, optim={"weight_decay": 0.0, "clip": 1e-6})
    start = build_networks(free.config, method_of(free.config), 16).encoder
    moved = [
        max((a - b).abs().max().item() for a, b in zip(start.parameters(), run.encoder.parameters(), strict=True))
        for run in (free, held)
    ]
    assert moved[1] < 1e-5 < moved[0]


def test_divergence_with_an_index_is_told_as_without(tmp_path: Path, small: dict[str, Any]) -> None:
    pytest.importorskip("faiss")
    small["bank"] |= {"index": "faiss"}
    with pytest.raises(Diverged, match="lower optim"):
        psm.pretrain(tmp_path / "run", **small, optim={"lr": 1e30})


def test_an_index_is_refused_where_it_would_do_nothing(tmp_path: Path, small: dict[str, Any]) -> None:
    for changes, says in (({"method": "mocov2"}, "none are mined"), ({"method": "psm"}, "choose one of exact, faiss")):
        small |= changes
        small["bank"] |= {"index": "faiss" if changes["method"] == "mocov2" else "hnsw"}
        with pytest.raises(UserError, match=says):
            psm.pretrain(tmp_path / "run", **small)
        assert not (tmp_path / "run").exists()


def test_killed_and_resumed_ends_with_the_same_weights(tmp_path: Path, small_arguments: list[str]) -> None:
    """A real process, killed with SIGKILL several times at whatever it was doing."""
    command = ("pretrain", *small_arguments, "epochs=6", "save.every_steps=1")
    assert run_psm(*command, f"out={tmp_path / 'whole'}").returncode == 0
    out, kills = tmp_path / "parts", 0
    for goal in (1, 5, 8, 13):
        process = start_psm(*command, f"out={out}", "resume=auto")
        while process.exitcode is None:
            if (out / "checkpoints" / "last.ckpt").exists() and _steps(out) >= goal:
                time.sleep(0.003 * goal)  # lands within a step, a write or between two
                process.kill()
                process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 3
    assert run_psm("pretrain", f"out={out}", "resume=true", "progress=false").returncode == 0
    assert same(load_file(tmp_path / "whole" / "encoder.safetensors"), load_file(out / "encoder.safetensors"))
    assert same(state(tmp_path / "whole")["state_dict"], state(out)["state_dict"])
    assert not list(out.rglob(".writing-*"))
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 6


def _steps(out: Any) -> Any:
    try:
        return read_checkpoint(out / "checkpoints" / "last.ckpt")["global_step"]
    except (UserError, OSError):
        return -1


def test_resume_refuses_other_settings_and_says_that_a_run_is_finished(
    tmp_path: Path, small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    psm.pretrain(tmp_path / "a", **small)
    with pytest.raises(UserError, match="epochs=9 does not continue the run"):
        psm.pretrain(tmp_path / "a", resume=True, epochs=9)
    assert "is finished" not in caplog.text
    done = psm.pretrain(tmp_path / "a", resume=True, progress=False)
    assert len(done.metrics) == 2
    assert f"the run in {tmp_path / 'a'} is finished (2 of 2 epochs): nothing is left to train" in caplog.text


def contents(folder: Any) -> Any:
    """Every file of a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_resume_continues_or_refuses(tmp_path: Path, small: dict[str, Any]) -> None:
    """A typo in out is no new run; resume=auto starts where nothing is."""
    with pytest.raises(UserError, match="does not exist"):
        psm.pretrain(tmp_path / "typo", **small, resume=True)
    assert not (tmp_path / "typo").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is empty, so there is no run"):
        psm.pretrain(tmp_path / "empty", **small, resume=True)
    for name in ("new", "empty"):
        assert len(psm.pretrain(tmp_path / name, **small, resume="auto").metrics) == 2
    before = contents(tmp_path / "new")[Path("checkpoints/last.ckpt")]
    assert len(psm.pretrain(tmp_path / "new", **small, resume="auto").metrics) == 2
    assert contents(tmp_path / "new")[Path("checkpoints/last.ckpt")] == before
    with pytest.raises(UserError, match="resume=maybe is neither true, false, auto nor a snapshot"):
        psm.pretrain(tmp_path / "new", resume="maybe")


@pytest.mark.parametrize("resume", [True, "auto"])
@pytest.mark.parametrize("lost", [("checkpoints/last.ckpt",), ("checkpoints/last.ckpt", "config.yaml")])
def test_a_finished_run_without_its_checkpoint_is_left_alone(
    tmp_path: Path, small: dict[str, Any], lost: Any, resume: Any
) -> None:
    psm.pretrain(tmp_path / "a", **small)
    for name in lost:
        (tmp_path / "a" / name).unlink()
    before = contents(tmp_path / "a")
    with pytest.raises(UserError, match=r"has no checkpoint to continue from; it holds .*encoder\.safetensors"):
        psm.pretrain(tmp_path / "a", **small, resume=resume)
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"damaged")])
def test_a_lost_checkpoint_is_replaced_by_a_snapshot_when_asked(
    tmp_path: Path, small: dict[str, Any], damage: Any
) -> None:
    whole = psm.pretrain(tmp_path / "a", **small, save={"snapshots": 1})
    with pytest.raises(UserError, match=r"resume=epoch-0001 is step 3, and .* is step 6"):
        psm.pretrain(tmp_path / "a", resume="epoch-0001")
    damage(tmp_path / "a" / "checkpoints" / "last.ckpt")
    (tmp_path / "a" / "checkpoints" / "epoch-0002.ckpt").unlink()
    before = contents(tmp_path / "a")
    with pytest.raises(UserError, match="resume=epoch-0001"):
        psm.pretrain(tmp_path / "a", resume=True)
    assert contents(tmp_path / "a") == before
    again = psm.pretrain(tmp_path / "a", resume="epoch-0001")
    assert same(again.encoder.state_dict(), whole.encoder.state_dict())
    assert [line["epoch"] for line in again.metrics] == [1, 2]


def test_a_run_without_its_configuration_continues_with_that_of_its_checkpoint(
    tmp_path: Path, small: dict[str, Any]
) -> None:
    psm.pretrain(tmp_path / "a", **small)
    config = tmp_path / "a" / "config.yaml"
    written = config.read_text()
    config.unlink()
    assert len(psm.pretrain(tmp_path / "a", resume=True).metrics) == 2
    assert config.read_text() == written


def test_what_is_about_a_call_is_not_stored(tmp_path: Path, small: dict[str, Any]) -> None:
    """Or a stored configuration would replace a finished run."""
    psm.pretrain(tmp_path / "a", **small)
    psm.pretrain(tmp_path / "a", **small, overwrite=True)
    stored = tmp_path / "a" / "config.yaml"
    content = settings.read_yaml(stored)
    in_checkpoint = state(tmp_path / "a")["psm"]["config"]
    for name in ("out", "overwrite", "resume", "progress"):
        assert name not in content
        assert name not in in_checkpoint
    psm.pretrain(tmp_path / "b", config=stored, progress=False)
    with pytest.raises(UserError, match="is not empty"):
        psm.pretrain(tmp_path / "b", config=stored)
    stored.write_text(stored.read_text() + "overwrite: true\n")
    with pytest.raises(UserError, match=r"config=.* sets overwrite, which is about one call"):
        psm.pretrain(tmp_path / "b", config=stored)
    with pytest.raises(UserError, match="config= sets resume, which is about one call"):
        psm.pretrain(tmp_path / "b", config={"resume": True})


def test_overwrite_moves_a_run_aside(tmp_path: Path, small: dict[str, Any]) -> None:
    psm.pretrain(tmp_path / "a", **small)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        psm.pretrain(tmp_path / "a", **small)
    first = contents(tmp_path / "a")
    with pytest.raises(UserError, match="batch_size=1 is too small"):  # a mistake moves nothing
        psm.pretrain(tmp_path / "a", **small | {"batch_size": 1}, overwrite=True)
    assert contents(tmp_path / "a") == first
    for number in (1, 2):
        psm.pretrain(tmp_path / "a", **small, overwrite=True)
        assert (tmp_path / f"a.replaced-{number}" / "encoder.safetensors").exists()
    assert contents(tmp_path / "a.replaced-1") == first
    assert not (tmp_path / "a" / "notes.txt").exists()
    for resume in (True, "auto"):
        with pytest.raises(UserError, match="contradict"):
            psm.pretrain(tmp_path / "a", **small, overwrite=True, resume=resume)


def test_overwrite_delete_removes_what_the_run_wrote_and_nothing_else(tmp_path: Path, small: dict[str, Any]) -> None:
    psm.pretrain(tmp_path / "a", **small)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    psm.pretrain(tmp_path / "a", **small | {"epochs": 1}, overwrite="delete")
    assert (tmp_path / "a" / "notes.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 1
    with pytest.raises(UserError, match="overwrite=yes is unknown"):
        psm.pretrain(tmp_path / "a", **small, overwrite="yes")


def test_a_moved_run_is_not_written_by_two(tmp_path: Path, small: dict[str, Any]) -> None:
    """The folder that takes its place is locked as well."""
    psm.pretrain(tmp_path / "a", **small)
    run = RunFolder(tmp_path / "a")
    with (
        lock_run(run, "false", "true"),
        clear_run(run, "true"),
        pytest.raises(UserError, match="another process"),
        lock_run(run, "auto", "false"),
    ):
        pass


@pytest.mark.parametrize("key", ["overwrite", "resume"])
def test_nobody_else_s_files_are_touched(tmp_path: Path, small: dict[str, Any], key: Any) -> None:
    """Not even in a folder that has a config.yaml."""
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in ("thesis.txt", "config.yaml"):
        (precious / name).write_text("x")
    with pytest.raises(UserError, match="holds no run"):
        psm.pretrain(precious, **small, **{key: True})
    assert {path.name for path in precious.iterdir()} == {"thesis.txt", "config.yaml"}


def test_killed_before_the_first_checkpoint_resumes_the_same_run(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = psm.pretrain(tmp_path / "whole", **small)
    step = PretrainModule.training_step
    monkeypatch.setattr(PretrainModule, "training_step", lambda *_: (_ for _ in ()).throw(Interruption))
    with pytest.raises(Interruption):
        psm.pretrain(tmp_path / "a", **small)
    monkeypatch.setattr(PretrainModule, "training_step", step)
    assert not (tmp_path / "a" / "checkpoints").exists()
    again = psm.pretrain(tmp_path / "a", resume=True)
    assert same(again.encoder.state_dict(), whole.encoder.state_dict())


def test_killed_while_deleting_leaves_a_folder_that_can_be_used(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    psm.pretrain(tmp_path / "a", **small)
    monkeypatch.setattr("shutil.rmtree", lambda *_: (_ for _ in ()).throw(Interruption))
    with pytest.raises(Interruption):
        psm.pretrain(tmp_path / "a", **small, overwrite="delete")
    monkeypatch.undo()
    assert not (tmp_path / "a" / "config.yaml").exists()
    assert len(psm.pretrain(tmp_path / "a", **small | {"epochs": 1}, overwrite="delete").metrics) == 1


def test_the_same_command_resumes_where_the_batch_was_clamped(tmp_path: Path, small: dict[str, Any]) -> None:
    small["batch_size"] = 512
    assert psm.pretrain(tmp_path / "a", **small).config.batch_size == 100
    assert len(psm.pretrain(tmp_path / "a", **small, resume=True).metrics) == 2


def test_resume_refuses_other_images(tmp_path: Path, small: dict[str, Any]) -> None:
    del small["data"]
    pixels = torch.randint(0, 255, (100, 3, 16, 16), dtype=torch.uint8)

    def data(count: Any) -> Any:
        return ImageDataset("mine", ImageStore(pixels[:count]), None, ())

    psm.pretrain(tmp_path / "a", data=data(100), **small)
    with pytest.raises(UserError, match="80 training images instead of 100"):
        psm.pretrain(tmp_path / "a", data=data(80), resume=True)
    other = ImageDataset("mine", ImageStore(255 - pixels), None, ())
    with pytest.raises(UserError, match="channel means of its images are"):
        psm.pretrain(tmp_path / "a", data=other, resume=True)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda out: (out / "checkpoints" / "last.ckpt").write_bytes(b""), "empty, cut off"),
        (lambda out: (out / "checkpoints" / "last.ckpt").write_text("hello world"), "checkpoint"),
        (lambda out: torch.save({"a": 1}, out / "checkpoints" / "last.ckpt"), "not a checkpoint written by psm"),
        (lambda out: (out / "config.yaml").write_text("epochs: 9\n"), "began with: it holds 5000 training"),
        (
            lambda out: (out / "config.yaml").write_text(
                (out / "config.yaml").read_text().replace("  out_dim: 12", "  out_dim: 24")
            ),
            "heads.out_dim=24 differs from heads.out_dim=12",
        ),
    ],
)
def test_damage_is_named_on_resume(tmp_path: Path, small: dict[str, Any], damage: Any, says: str) -> None:
    psm.pretrain(tmp_path / "a", **small)
    damage(tmp_path / "a")
    with pytest.raises(UserError, match=says):
        psm.pretrain(tmp_path / "a", resume=True)


def test_damaged_metrics_do_not_keep_a_run_from_resuming(tmp_path: Path, small: dict[str, Any]) -> None:
    psm.pretrain(tmp_path / "a", **small)
    with (tmp_path / "a" / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\n3\n{")
    assert [m["epoch"] for m in psm.pretrain(tmp_path / "a", resume=True).metrics] == [1, 2]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"optim": {"clip": 0.0}}, r"optim\.clip=0\.0 is too small: give a number above 0"),
        ({"optim": {"lr": math.inf}}, r"optim\.lr=inf is not finite"),
        ({"optim": {"lr": -1.0}}, r"optim\.lr=-1\.0 is too small"),
        ({"optim": {"momentum": 2.0}}, r"optim\.momentum=2\.0 is too large: give 0 or more and below 1"),
        ({"loss": {"temperature": math.nan}}, r"loss\.temperature=nan is not finite"),
        ({"save": {"every_steps": 0}}, r"save\.every_steps=0 is too small"),
        ({"bank": {"size": 10**13}}, r"bank\.size=10000000000000 needs .* GB of memory"),
        ({"grad_cache_chunk": 1}, "grad_cache_chunk=1 is too small"),
        ({"compile": "nonsense"}, "compile=nonsense is no backend"),
        ({"trainer": {"max_steps": 0}}, r"trainer\.max_steps does not go with training by steps"),
        ({"encoder": nn.Linear}, "encoder=.* is neither a name nor a module"),
        ({"out": None}, "out=None is not a path"),
    ],
)
def test_values_that_make_no_sense(tmp_path: Path, small: dict[str, Any], keys: Any, says: str) -> None:
    """Each is refused by its own sentence, and leaves nothing behind."""
    with pytest.raises(UserError, match=says):
        psm.pretrain(**{"out": tmp_path / "a", **small, **keys})
    assert not (tmp_path / "a").exists()


def test_plain_tensors_train(tmp_path: Path, small: dict[str, Any]) -> None:
    del small["data"]
    pixels = torch.randint(0, 255, (64, 3, 16, 16), dtype=torch.uint8)
    for name, data in (("tensor", pixels), ("array", pixels.numpy()), ("images", ImageStore(pixels))):
        assert len(psm.pretrain(tmp_path / name, data=data, **small).metrics) == 2


def test_tied_weights_are_exported(tmp_path: Path, small: dict[str, Any]) -> None:
    del small["encoder"]
    shared = nn.Linear(8, 8)
    tied = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), shared, shared)
    result = psm.pretrain(tmp_path / "a", encoder=tied, **small)
    assert same(load_file(result.out / "encoder.safetensors"), tied.state_dict())


class Noisy(nn.Module):
    """An encoder with draws of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Dropout(0.5))

    def forward(self, images: Any) -> Any:
        return self.layers(images)


def test_dropout_repeats_too(tmp_path: Path, small: dict[str, Any]) -> None:
    del small["encoder"]
    torch.manual_seed(1)
    first = Noisy()
    again = Noisy()
    again.load_state_dict(first.state_dict())
    a = psm.pretrain(tmp_path / "a", encoder=first, **small)
    torch.rand(7)
    b = psm.pretrain(tmp_path / "b", encoder=again, **small)
    assert same(a.encoder.state_dict(), b.encoder.state_dict())


def test_networks_draw_as_after_torch_s_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2**62 + 1)
    expected = torch.rand(5)
    seed_networks(2**62 + 1, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    seed_networks(3, torch.device("cuda", 0))
    assert seeded == [3]


class Exploding(nn.Module):
    """An encoder whose gradient becomes NaN at some step while its loss is still a number."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(3, 8), step

    def forward(self, images: Any) -> Any:
        features = self.linear(images.mean((2, 3)))
        if self.training and features.requires_grad:
            self.left -= 1
            if self.left == 0:
                features.register_hook(lambda gradient: gradient * torch.nan)
        return features


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path, small: dict[str, Any]) -> None:
    del small["encoder"]
    with pytest.raises(Diverged):
        psm.pretrain(tmp_path / "a", encoder=Exploding(6), **small)  # the last step of the second epoch
    checkpoint = state(tmp_path / "a")
    assert checkpoint["global_step"] == 3
    assert all(torch.isfinite(v).all() for v in checkpoint["state_dict"].values())


@pytest.mark.parametrize("option", ["accumulate_grad_batches", "limit_train_batches", "max_epochs"])
def test_options_that_break_the_count_of_steps_are_refused(tmp_path: Path, small: dict[str, Any], option: Any) -> None:
    with pytest.raises(UserError, match=f"trainer.{option}"):
        psm.pretrain(tmp_path / "a", **small, trainer={option: 2})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ({"method": "pms"}, "method=pms"),
        ({"encoder": "resnet"}, "encoder.*resnet.*(known|unknown)"),
        ({"data": "cifar11"}, "data=cifar11 is neither a folder nor one of"),
        ({"views": {"flip": 2.0}}, "flip.*2"),
        ({"precision": "17"}, "Lightning refuses these settings: .*17"),
        ({"loggers": ["nope"]}, r"loggers=\[nope\] is unknown"),
        ({"epochs": 0}, "epochs=0 is too small"),
        ({"stem": "large"}, "stem.*large"),
    ],
)
def test_a_mistake_leaves_nothing_behind(tmp_path: Path, small: dict[str, Any], mistake: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        psm.pretrain(tmp_path / "a", **(small | mistake))
    assert not (tmp_path / "a").exists()


def test_two_processes_cannot_share_a_folder(tmp_path: Path, small: dict[str, Any]) -> None:
    with lock_run(RunFolder(tmp_path / "a"), "false", "false"), pytest.raises(UserError, match="another process"):
        psm.pretrain(tmp_path / "a", **small)
    assert not (tmp_path / "a").exists()


class Poison(nn.Module):
    """An encoder that works for some passes and then gives NaN."""

    def __init__(self, passes: Any) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(3, 8), passes

    def forward(self, images: Any) -> Any:
        features = self.linear(images.mean((2, 3)))
        if self.training:
            self.passes -= 1
            if self.passes < 0:
                features = features * torch.nan
        return features


def test_nan_stops_the_run_and_leaves_the_last_good_checkpoint(tmp_path: Path, small: dict[str, Any]) -> None:
    del small["encoder"]
    with pytest.raises(Diverged, match="loss became nan in epoch 2"):
        psm.pretrain(tmp_path / "a", encoder=Poison(4), **small)
    checkpoint = state(tmp_path / "a")
    assert checkpoint["global_step"] == 3
    assert all(torch.isfinite(v).all() for v in checkpoint["state_dict"].values())
    assert "nan" in (tmp_path / "a" / "log.txt").read_text()


def test_short_sets(tmp_path: Path, small: dict[str, Any]) -> None:
    """Fewer images than a batch train as one batch; one image is refused."""
    del small["data"]

    def data(count: Any) -> Any:
        return ImageDataset("few", ImageStore(torch.randint(0, 255, (count, 3, 16, 16), dtype=torch.uint8)), None, ())

    result = psm.pretrain(tmp_path / "a", data=data(9), **small)
    assert result.config.batch_size == 8
    assert result.metrics[-1]["step"] == 2
    with pytest.raises(UserError, match="at least 2"):
        psm.pretrain(tmp_path / "b", data=data(1), **small)
    assert not (tmp_path / "b").exists()


def test_bank_is_filled_once_after_both_directions(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, on_batch = [], ContrastiveLoss.on_batch

    def spying(self: Any, batch: Any) -> Any:
        bank = batch.bank
        seen.append((bank.pointer, bank.fill, bool(torch.isin(batch.ids, bank.ids).any()), len(batch.ids)))
        return on_batch(self, batch)

    monkeypatch.setattr(ContrastiveLoss, "on_batch", spying)
    small["images"]["limit"] = 96
    psm.pretrain(tmp_path / "a", **small | {"epochs": 1})
    first, second = seen[:2], seen[2:4]
    assert first[0] == first[1] == (0, 0, False, 32)
    assert second[0] == second[1] == (32, 32, False, 32)  # another batch of the same epoch: no own id among candidates


def test_health_of_spread_and_collapsed_features() -> None:
    torch.manual_seed(0)
    spread = feature_health(torch.randn(400, 20), torch.randn(2, 200, 20))
    assert spread["feature_std"] == pytest.approx(1, abs=0.05)
    assert 18 < spread["effective_rank"] <= 20
    same_views = torch.randn(1, 50, 8).expand(2, -1, -1)
    assert feature_health(torch.randn(100, 8), same_views)["alignment"] == pytest.approx(0, abs=1e-9)
    collapsed = feature_health(torch.ones(10, 4), torch.ones(2, 5, 4))
    assert collapsed["feature_std"] == pytest.approx(0, abs=1e-6)
    assert collapsed["effective_rank"] == 1
    assert collapsed["uniformity"] == pytest.approx(0, abs=1e-9)
    line = torch.outer(torch.linspace(-1, 1, 30), torch.randn(6))
    assert feature_health(line, torch.randn(2, 15, 6))["effective_rank"] == pytest.approx(1, abs=1e-6)


def test_words() -> None:
    well = {"epoch": 3, "loss": 10.0, "chance": 14.0, "feature_std": 0.8, "effective_rank": 30.0, "bank_fill": 1.0}
    assert health_warnings([well, well]) == []
    (collapse,) = health_warnings([well, well | {"feature_std": 0.001}])
    assert collapse.startswith("Collapse")
    pinned = well | {"loss": 13.99}
    (sentence,) = health_warnings([pinned, pinned])
    assert "pinned at chance" in sentence
    assert "learning rate" in sentence
    assert health_warnings([well, pinned]) == []  # not yet two epochs
    filling = pinned | {"bank_fill": 0.7}
    assert health_warnings([filling, filling]) == []
    assert "collapsed" in health_warnings([pinned | {"feature_std": 0.0}] * 2)[1]
    assert "became nan in epoch 1" in divergence(math.nan, 1)


def test_collapse_is_said(tmp_path: Path, small: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(8))

        def forward(self, images: Any) -> Any:
            return self.bias.expand(len(images), -1)

    del small["encoder"]
    psm.pretrain(tmp_path / "a", encoder=Constant(), **small)
    assert "Collapse" in caplog.text


def test_own_encoder_comes_back(tmp_path: Path, small: dict[str, Any]) -> None:
    def own() -> Any:
        return nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU())

    del small["encoder"]
    result = psm.pretrain(tmp_path / "a", encoder=own(), **small)
    with pytest.raises(UserError, match="beside the path"):
        psm.load_encoder(result.out)
    loaded = psm.load_encoder(result.out, module=own())
    assert same(loaded.state_dict(), result.encoder.state_dict())
    assert "0.weight" in load_file(result.out / "encoder.safetensors")
    assert same(psm.load_encoder(result.out / "checkpoints" / "last.ckpt", own()).state_dict(), loaded.state_dict())


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.3), ("bf16-true", 0.5), ("64-true", 2e-3)])
def test_precisions(tmp_path: Path, small: dict[str, Any], precision: Any, tolerance: Any) -> None:
    """The first epoch's loss is that of single precision, but for rounding."""
    small |= {"epochs": 1, "optim": {"lr": 1e-3}}
    single = psm.pretrain(tmp_path / "a", **small).metrics[0]
    other = psm.pretrain(tmp_path / "b", **small, precision=precision).metrics[0]
    assert other["loss"] == pytest.approx(single["loss"], abs=tolerance)
    measured = ("loss", "alignment", "uniformity", "effective_rank")  # any one of them may agree to the last digit
    assert [other[name] for name in measured] != [single[name] for name in measured]
    assert other["bank_fill"] == single["bank_fill"]


def test_loggers_and_snapshots(tmp_path: Path, small: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard")
    loggers = ["csv", "lightning.pytorch.loggers.TensorBoardLogger"]
    result = psm.pretrain(tmp_path / "a", **small, loggers=loggers, save={"snapshots": 1})
    assert list((result.out / "logs").rglob("events.*"))
    assert "effective_rank" in next((result.out / "logs").rglob("metrics.csv")).read_text()
    assert state(result.out, "epoch-0001.ckpt")["global_step"] == 3


def test_without_soft_nothing_is_mined(tmp_path: Path, small: dict[str, Any]) -> None:
    result = psm.pretrain(tmp_path / "a", **small, loss={"soft_weight": 0.0})
    assert "bank_fill" not in result.metrics[0]
    assert not any(name.startswith("bank.") for name in state(result.out)["state_dict"])


def test_views_do_not_depend_on_how_the_batch_is_shared() -> None:
    views = Views(ViewsConfig(), 16, (0.5,) * 3, (0.2,) * 3)
    images = torch.randint(0, 255, (8, 3, 16, 16), dtype=torch.uint8)
    draws = views.sample_params(8, torch.Generator().manual_seed(0))
    whole = views.apply(images, draws)
    parts = [views.apply(images[s], draws[s]) for s in (slice(0, 4), slice(4, 8))]
    assert torch.allclose(whole, torch.cat(parts, 1), atol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {"grad_cache_chunk": 8},
        pytest.param({"compile": "aot_eager"}, marks=pytest.mark.slow),
        {"grad_cache_chunk": 12, "compile": "eager"},
    ],
)
def test_chunks_and_compilers_train_and_leave_plain_weights(tmp_path: Path, small: dict[str, Any], keys: Any) -> None:
    """A run in chunks or compiled ends with weights of the same names, near those of a plain run where it should.

    Without PNSM: a compiled loss draws other numbers.
    """
    plain = psm.pretrain(tmp_path / "plain", **small, sampler="none")
    other = psm.pretrain(tmp_path / "other", **small, **keys, sampler="none")
    assert other.config.grad_cache_chunk == keys.get("grad_cache_chunk")
    left, right = (run.encoder.state_dict() for run in (plain, other))
    assert left.keys() == right.keys()
    assert psm.load_encoder(tmp_path / "other").state_dict().keys() == left.keys()
    if "grad_cache_chunk" not in keys:  # batch norm over a chunk is another batch norm
        assert other.metrics[0]["loss"] == pytest.approx(plain.metrics[0]["loss"], rel=1e-3)


def test_a_run_begun_before_a_key_existed_can_be_resumed(tmp_path: Path, small: dict[str, Any]) -> None:
    out = tmp_path / "a"
    psm.pretrain(out, **small)
    content = state(out)
    del content["psm"]["config"]["monitor"]["purity"]  # as an earlier version wrote it
    del content["psm"]["config"]["target"]["views"]
    torch.save(content, out / "checkpoints" / "last.ckpt")
    psm.pretrain(out, resume=True)
    with pytest.raises(UserError, match=r"monitor\.purity=True differs"):
        psm.pretrain(out, resume=True, monitor={"purity": True})
    with pytest.raises(UserError, match=r"target\.views=weak differs from target\.views=same"):
        psm.pretrain(out, resume=True, target={"views": "weak"})
