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
