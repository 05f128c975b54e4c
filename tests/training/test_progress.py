"""The plan, the progress line and the time left, with clocks that the tests set."""

import gc
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import psm
from psm.config.schema import PretrainConfig
from psm.models.factory import create_encoder
from psm.training.module import PretrainModule
from psm.training.plan import RunPlan, activation_bytes, duration, forecast
from psm.training.progress_bar import LINE_EVERY, POLL, ProgressBar, Status, clock_text, progress_line
from psm.training.step_timer import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> Any:
        return self.now


@pytest.mark.parametrize("seconds", [0.001, 1.0, 85.0])
def test_time_left_is_right_from_the_second_step_on(seconds: Any) -> None:
    """Whatever a step takes, and however long the first one took."""
    clock = Clock()
    timer = StepTimer(total_steps=1000, steps_per_epoch=100, clock=clock)
    timer.start(0)
    timer.start_epoch()
    clock.now += 50 * seconds + 30
    timer.end_step(1)
    assert timer.left() is None
    for step in (2, 3, 4):
        clock.now += seconds
        timer.end_step(step)
        assert timer.left() == pytest.approx((1000 - step) * seconds)
    clock.now += seconds / 2  # within a step
    assert timer.left() == pytest.approx(995.5 * seconds)
    clock.now += 10 * seconds  # a step that hangs does not use up the time of those to come
    assert timer.left() == pytest.approx(995 * seconds)


def test_time_left_counts_what_happens_between_epochs_and_follows_a_change_of_pace() -> None:
    clock = Clock()
    timer = StepTimer(total_steps=400, steps_per_epoch=100, clock=clock)
    timer.start(0)
    for epoch in range(2):
        timer.start_epoch()
        for step in range(100):
            clock.now += 1.0
            timer.end_step(100 * epoch + step + 1)
        clock.now += 20.0  # kNN and checkpoint
    timer.start_epoch()
    assert timer.left() == pytest.approx(200 + 2 * 20)
    for step in range(60):
        clock.now += 3.0
        timer.end_step(201 + step)
    assert timer.left() == pytest.approx(3 * 140 + 2 * 20)


def test_a_resumed_run_counts_from_where_it_is() -> None:
    clock = Clock()
    timer = StepTimer(total_steps=10, steps_per_epoch=5, clock=clock)
    timer.start(6)
    for step in (7, 8):
        clock.now += 2.0
        timer.end_step(step)
    assert timer.left() == pytest.approx(4.0)


FULL = Status(epoch=3, epochs=200, step=120, steps=5000, left=3920.0, rate=310.4, loss=21.04, chance=24.9, knn=43.12)


def test_the_line_says_everything_where_there_is_room() -> None:
    assert progress_line(FULL) == (
        "epoch 3/200 · step 120/5,000 · 310 img/s · loss 21.040 (chance 24.900) · kNN 43.1 % · 1:05:20 left"
    )
    unknown = Status(epoch=1, epochs=2, step=0, steps=9, left=None)
    assert progress_line(unknown) == "epoch 1/2 · step 0/9 · -:-- left"


@pytest.mark.parametrize("width", range(12, 110))
def test_the_time_left_is_the_last_thing_to_go(width: Any) -> None:
    line = progress_line(FULL, width)
    assert len(line) <= width
    assert line.endswith("1:05:20 left")
    if width >= 40:
        assert "epoch 3/200" in line
        assert "loss 21.040" in line


def test_clock_and_duration() -> None:
    assert [clock_text(x) for x in (None, 0, 59.6, 3599, 3600, 205_200)] == [
        "-:--", "0:00", "1:00", "59:59", "1:00:00", "57:00:00",
    ]  # fmt: skip
    assert [duration(x) for x in (12, 600, 6 * 3600, 57 * 3600)] == ["12 s", "10 minutes", "6.0 hours", "2.4 days"]


def test_the_plan_names_what_a_run_costs() -> None:
    plan = RunPlan("photos", 3210, 224, "psm", "resnet18", 11_176_512, 200, 2400, 256, "cpu (2 threads)", 12.3e9)
    assert plan.lines() == [
        "3,210 images of 224 x 224 pixels from photos · psm with resnet18 (11.2 M parameters)",
        "200 epochs, 2,400 steps of 256 images on cpu (2 threads), about 12.3 GB of memory",
    ]
    assert len(replace(plan, free_bytes=16e9).lines()) == 2
    assert "only 8.0 GB of memory are free" in replace(plan, free_bytes=8e9).lines()[-1]


def test_activations_of_a_convolution_are_counted() -> None:
    """Of conv - ReLU autograd saves the input, and the ReLU's output, 4 bytes each."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    assert activation_bytes(network, 16) == pytest.approx((3 + 8) * 16 * 16 * 4)
    assert next(network.parameters()).device.type == "cpu"
    per_image = activation_bytes(create_encoder("resnet18", "imagenet", 224), 224)
    assert per_image is not None
    assert 15e6 < per_image < 60e6  # a batch of 256 with two views: 8 to 30 GB

    class Odd(nn.Module):
        def forward(self, images: Any) -> Any:
            return torch.zeros(int(images.sum()))

    assert activation_bytes(Odd(), 8) is None


def test_counting_activations_leaves_nothing_in_memory() -> None:
    encoder = create_encoder("tiny", "cifar", 16)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    before = tensors()
    activation_bytes(encoder, 16)
    assert tensors() == before


@pytest.mark.parametrize(
    ("encoder", "epochs", "device", "hours", "says"),
    [
        ("resnet18", 200, "cpu", 57, "preset=laptop is a small network"),
        ("resnet18", 100, "cpu", 57, "encoder=tiny"),
        ("tiny", 200, "cpu", 10, "epochs=20 would take an hour"),
        ("custom", 3, "cpu", 10, "epochs=1 would take"),
        ("resnet18", 200, "cpu", 0.9, None),
        ("resnet18", 200, "cuda", 57, None),
    ],
)
def test_a_long_run_on_a_cpu_names_the_key_that_shortens_it(
    encoder: Any, epochs: Any, device: Any, hours: Any, says: str
) -> None:
    module = object.__new__(PretrainModule)
    module.__dict__["config"] = PretrainConfig(encoder=encoder, epochs=epochs)
    lines = forecast(hours * 3600, 85.0, module, device)
    assert lines[0].startswith("about ")
    assert "85 s a step" in lines[0]
    assert (says is None and len(lines) == 1) or says in lines[1]


class Stage:
    """A progress bar without a terminal, on a run whose clock the test moves."""

    def __init__(self, monkeypatch: Any, steps_per_epoch: Any = 12, epochs: Any = 200, **config: Any) -> None:
        monkeypatch.setattr("psm.training.progress_bar._Heartbeat", lambda beat: SimpleNamespace(stop=lambda: None))
        monkeypatch.setattr(
            "psm.training.progress_bar.make_plan", lambda *_: SimpleNamespace(lines=lambda: ["the plan"])
        )
        monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
        self.clock, self.text = Clock(), io.StringIO()
        self.bar = ProgressBar(clock=self.clock, console=Console(file=self.text, width=200))
        self.trainer = SimpleNamespace(
            is_global_zero=True,
            global_step=0,
            current_epoch=0,
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )
        self.module = SimpleNamespace(
            config=PretrainConfig(epochs=epochs, **config),
            steps_per_epoch=steps_per_epoch,
            total_steps=epochs * steps_per_epoch,
            step_metrics={},
            shorter=lambda seconds: "encoder=tiny",
        )
        self.bar.on_train_start(self.trainer, self.module)
        self.bar.on_train_epoch_start(self.trainer, self.module)

    def wait(self, seconds: Any) -> None:
        """Let time pass as the thread sees it."""
        for _ in range(int(seconds / POLL)):
            self.clock.now += POLL
            self.bar.print_if_due()

    def step(self, seconds: Any, **metrics: Any) -> None:
        self.wait(seconds)
        self.module.step_metrics = {name: torch.tensor(value) for name, value in metrics.items()}
        self.trainer.global_step += 1
        self.bar.on_train_batch_end(self.trainer, self.module, None, None, 0)

    @property
    def lines(self) -> Any:
        return self.text.getvalue().splitlines()


def test_without_a_terminal_a_line_comes_within_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a step takes longer than that; what is printed then has no time left yet, and later has."""
    assert LINE_EVERY + POLL < 30
    stage = Stage(monkeypatch)
    stage.step(85)
    assert len(stage.lines) - 1 == 3  # within the first step, 28 seconds apart
    assert stage.lines[-1] == "epoch 1/200 · step 0/2,400 · -:-- left"
    stage.step(85, loss=11.8, chance=12.1)
    assert "about 2.4 days to go, 85 s a step" in stage.lines
    assert "that is long: encoder=tiny" in stage.lines
    stage.wait(30)
    assert stage.lines[-1].startswith("epoch 1/200 · step 2/2,400 · 3 img/s · loss 11.800 (chance 12.100) · ")
    assert stage.lines[-1].endswith("left")


def test_short_steps_print_no_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, epochs=10, encoder="tiny")
    for _ in range(11):
        stage.step(1, loss=3.0)
    assert stage.lines == ["the plan", "about 2 minutes to go, 1 s a step"]
    stage.bar.show_epoch({"epoch": 1, "step": 12, "loss": 2.5, "knn": 40.0, "images_per_second": 256.0})
    assert stage.lines[-1] == "epoch 1/10 · step 11/120 · 256 img/s · loss 2.500 · kNN 40.0 % · 1:49 left"


def test_the_plan_of_a_run_is_in_its_log_and_on_the_terminal(
    tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    psm.pretrain(tmp_path / "quiet", **small | {"epochs": 1})
    assert capsys.readouterr().err == ""
    log = (tmp_path / "quiet" / "log.txt").read_text()
    assert "100 images of 16 x 16 pixels from shapes · psm with tiny (1.2 M parameters)" in log
    psm.pretrain(tmp_path / "a", **small | {"progress": True})
    shown = capsys.readouterr().err
    assert "2 epochs, 6 steps of 32 images on cpu (1 thread)" in shown
    assert "to go" in shown
    assert "epoch 2/2 · step 6/6" in shown
    assert "(chance " in shown
