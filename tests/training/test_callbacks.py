"""Lightning callbacks of the user: they find the metrics, can stop and save a run, and survive a resume."""

import csv
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

import psm
from psm.models.pretrained import load_encoder
from psm.training.callbacks import MetricsCallback
from psm.training.module import PretrainModule
from psm.training.user_callbacks import plain_states
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError


class Recording(lightning.Callback):
    """Keeps what a callback can see."""

    def __init__(self) -> None:
        self.step_losses, self.epochs, self.rates = [], [], []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: Any) -> None:
        self.rates.append((batch.step, trainer.optimizers[0].param_groups[0]["lr"], module.learning_rate(batch.step)))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: Any) -> None:
        self.step_losses.append((trainer.callback_metrics["loss"], outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append({name: value.item() for name, value in trainer.callback_metrics.items()})


class NeedsArguments(lightning.Callback):
    def __init__(self, needed: Any) -> None:
        pass


class StopAfterFirst(lightning.Callback):
    """Created by name: stops the run after its first epoch."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = True


def test_a_callback_sees_metrics_and_the_learning_rate_of_its_step(tmp_path: Path, small: dict[str, Any]) -> None:
    seen = Recording()
    run = psm.pretrain(tmp_path / "a", **small, callbacks=[seen])
    assert [rate for _, rate, _ in seen.rates] == [expected for _, _, expected in seen.rates]
    assert [step for step, _, _ in seen.rates] == list(range(6))
    assert all(torch.equal(shown, true) for shown, true in seen.step_losses)
    for record, metrics in zip(run.metrics, seen.epochs, strict=True):
        expected = {name: value for name, value in record.items() if name not in ("epoch", "step")}
        assert metrics == pytest.approx(expected, rel=1e-6)


def test_a_finished_run_does_not_stay_in_memory_beside_the_next(tmp_path: Path, small: dict[str, Any]) -> None:
    held = []

    class Watch(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            held.extend(weakref.ref(item) for item in (trainer, module, module.networks.projector, module.bank))

    gc.disable()  # Python collects what short runs leave behind only after dozens of them
    try:
        for name in ("first", "second"):
            psm.pretrain(tmp_path / name, **{**small, "epochs": 1}, callbacks=Watch())
        assert [item() for item in held[:4]] == [None] * 4
    finally:
        gc.enable()


def test_metrics_for_callbacks_cost_no_host_sync(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the epochs' ends no value is read back from the device."""
    reads, hook = [], MetricsCallback.on_train_batch_end

    def counting(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "__float__", "__bool__"):
                plain = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, lambda x, *a, f=plain, n=name, **k: reads.append(n) or f(x, *a, **k))
            hook(*arguments)

    monkeypatch.setattr(MetricsCallback, "on_train_batch_end", counting)
    psm.pretrain(tmp_path / "a", **small | {"epochs": 1})
    assert reads == []
    psm.pretrain(tmp_path / "b", **small | {"epochs": 1, "monitor": {"log_every": 3}})
    assert reads == ["tolist"]  # the mean loss that goes to the loggers


def test_early_stopping_ends_the_run_and_leaves_the_encoder_of_its_last_epoch(
    tmp_path: Path, small: dict[str, Any]
) -> None:
    stop = EarlyStopping(monitor="knn", mode="max", patience=1, min_delta=1000.0)  # nothing counts as better
    run = psm.pretrain(tmp_path / "a", **small | {"epochs": 20}, callbacks=[stop])
    assert [record["epoch"] for record in run.metrics] == [1, 2]
    checkpoint = read_checkpoint(run.out / "checkpoints" / "last.ckpt")
    assert checkpoint["psm"]["stopped_early"]
    assert load_encoder(run.out).info.epoch == 2
    whole = psm.pretrain(tmp_path / "b", **small | {"epochs": 20}, callbacks=[StopAfterFirst()])
    assert len(whole.metrics) == 1
    # Scoring takes it as any finished run, and resuming changes nothing but says why.
    assert psm.evaluate(run.out, linear={"enabled": False}, progress=False)[0].score == "knn"
    before = (run.out / "checkpoints" / "last.ckpt").read_bytes()
    for keys in ({}, {"callbacks": [EarlyStopping(monitor="knn", mode="max")]}):
        again = psm.pretrain(run.out, resume=True, progress=False, **keys)
        assert len(again.metrics) == 2
        assert (run.out / "checkpoints" / "last.ckpt").read_bytes() == before
    assert "was stopped early by a callback and counts as finished" in (run.out / "log.txt").read_text()


class Interruption(Exception):
    pass


def test_a_resumed_callback_continues_where_it_was(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the first epoch's checkpoint, EarlyStopping has counted that epoch; the weights are the same."""

    def callbacks() -> Any:
        return [EarlyStopping(monitor="loss", patience=2, min_delta=1000.0), ModelCheckpoint(monitor="loss")]

    small["epochs"] = 9
    whole = psm.pretrain(tmp_path / "whole", **small, callbacks=callbacks())
    step, stops = PretrainModule.training_step, [4]

    def training_step(self: Any, batch: Any, index: Any) -> Any:
        if batch.step in stops:
            raise Interruption
        return step(self, batch, index)

    monkeypatch.setattr(PretrainModule, "training_step", training_step)
    with pytest.raises(Interruption):
        psm.pretrain(tmp_path / "parts", **small, callbacks=callbacks())
    stops.clear()
    parts = psm.pretrain(tmp_path / "parts", resume=True, progress=False, callbacks=callbacks())
    assert len(whole.metrics) == len(parts.metrics) == 3
    for name, value in whole.encoder.state_dict().items():
        assert torch.equal(value, parts.encoder.state_dict()[name]), name


def test_model_checkpoint_writes_files_that_can_be_loaded(tmp_path: Path, small: dict[str, Any]) -> None:
    best = ModelCheckpoint(monitor="loss", save_top_k=2, save_last=True)
    run = psm.pretrain(tmp_path / "a", **small, callbacks=[best])
    written = {path.name for path in (run.out / "checkpoints").iterdir()}
    assert {"last.ckpt", "epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"} <= written
    assert best.best_model_score.item() == pytest.approx(min(record["loss"] for record in run.metrics), rel=1e-6)
    assert psm.load_encoder(best.best_model_path).info.epoch in (1, 2)
    assert read_checkpoint(run.out / "checkpoints" / "last.ckpt")["global_step"] == 6


def test_learning_rate_monitor_logs_the_schedule(tmp_path: Path, small: dict[str, Any]) -> None:
    run = psm.pretrain(
        tmp_path / "a",
        **small,
        callbacks=[LearningRateMonitor("step")],
        loggers=["csv"],
        trainer={"log_every_n_steps": 1},
    )
    with next((run.out / "logs").rglob("metrics.csv")).open() as file:
        table = csv.DictReader(file)
        (name,) = [name for name in table.fieldnames if name.startswith("lr-")]
        rates = {int(row["step"]): float(row[name]) for row in table if row[name]}
    optim, steps = run.config.optim, 6
    expected = {0: optim.warmup_lr, **{record["step"] - 1: record["lr"] for record in run.metrics}}
    assert len(rates) == steps
    assert {step: rates[step] for step in expected} == pytest.approx(expected, rel=1e-6)


def test_callbacks_by_name(tmp_path: Path, small: dict[str, Any]) -> None:
    run = psm.pretrain(tmp_path / "a", **small, callbacks=[f"{__name__}.StopAfterFirst"])
    assert len(run.metrics) == 1
    assert run.config.callbacks == [f"{__name__}.StopAfterFirst"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"callbacks": ["no.such.Callback"]}, r"callbacks=\[no\.such\.Callback\] cannot be imported: No module named"),
        ({"callbacks": ["json.Nothing"]}, "json has no Nothing"),
        ({"callbacks": ["EarlyStopping"]}, "is not of the form module.Class"),
        ({"callbacks": ["json.JSONDecoder"]}, "is not a Lightning callback"),
        ({"callbacks": [f"{__name__}.NeedsArguments"]}, "cannot be created without arguments"),
        ({"callbacks": [json.JSONDecoder()]}, "is not a callback: give instances of lightning.Callback"),
        (
            {"callbacks": EarlyStopping(monitor="val_loss")},
            "EarlyStopping monitors 'val_loss', which this run does not",
        ),
        ({"callbacks": ModelCheckpoint(monitor="kn")}, "did you mean 'knn'"),
        ({"callbacks": EarlyStopping("knn"), "monitor": {"knn": False}}, "monitors 'knn', which this run does not"),
        ({"callbacks": LearningRateMonitor()}, r"LearningRateMonitor writes to a logger, .* loggers=\[csv\]"),
    ],
)
def test_callbacks_that_cannot_work_are_refused_before_anything_is_written(
    tmp_path: Path, small: dict[str, Any], keys: Any, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        psm.pretrain(tmp_path / "a", **(small | keys))
    assert not (tmp_path / "a").exists()


def test_only_plain_states_are_saved(caplog: pytest.LogCaptureFixture) -> None:
    states = {"good": {"best": torch.ones(1), "paths": ["a", None], 3: (1.5, True)}, "bad": {"object": object()}}
    assert plain_states(states) == {"good": states["good"]}
    assert "The state of the callback bad is not saved" in caplog.text
