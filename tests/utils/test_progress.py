"""Progress bars: one style, silent where nobody looks."""

import io
from typing import Any

import pytest
from rich.console import Console

from psm.utils import progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A terminal whose output can be read."""
    output = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=output, force_terminal=True, width=100))
    return output


def test_nothing_is_shown_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.counting("reading", 5_000, shown=True) as done:
        done(5_000)
    with progress.stages(shown=True) as stage, stage("features", 5_000) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_counts_and_stages_are_shown_on_a_terminal(terminal: Any) -> None:
    with progress.counting("reading", 5_000, shown=True) as done:
        done(1_234)
    assert "reading" in terminal.getvalue()
    assert "1234/5000" in terminal.getvalue()
    with progress.stages(shown=True) as stage:
        for title in ("features", "linear"):
            with stage(title, 20) as advance:
                advance(3)
                advance(4)
    assert "linear" in terminal.getvalue()


def test_what_is_over_at_once_and_what_is_switched_off_stay_silent(terminal: Any) -> None:
    with progress.counting("reading", 10, shown=True) as done:
        done(10)
    with progress.transferring("x", 10**9, shown=False) as done:
        done(10)
    with progress.stages(shown=False) as stage, stage("features", 5) as advance:
        advance(5)
    assert terminal.getvalue() == ""


def test_images_have_a_rate_and_off_a_terminal_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    with progress.counting_images("embedding", 50_000, shown=True, done=10_000) as done:
        for seconds, count in ((10, 11_000), (30, 13_000), (40, 14_000), (60, 16_000)):
            now = 100.0 + seconds
            done(count)
    assert capsys.readouterr().err.splitlines() == [
        "embedding: 13,000 of 50,000 images · 100 img/s · 6:10 left",
        "embedding: 16,000 of 50,000 images · 100 img/s · 5:40 left",
    ]
    with progress.counting_images("embedding", 50_000, shown=False) as done:
        now = 1000.0
        done(4_000)
    assert capsys.readouterr().err == ""


def test_images_have_a_rate_on_a_terminal(terminal: Any) -> None:
    with progress.counting_images("embedding", 500, shown=True, done=100) as done:
        done(300)
        done(500)
    assert "500/500" in terminal.getvalue()
    assert "img/s" in terminal.getvalue()
