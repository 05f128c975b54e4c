"""Commands that run a network batch after batch keep the memory that they free."""

import pytest

from psm import ops
from psm.cli.main import main
from psm.utils.errors import UserError


@pytest.mark.parametrize(
    ("command", "work"),
    [
        ("embed", "psm.embedding.embed.run_embedding"),
        ("explore", "psm.reporting.explorer.run_exploration"),
        ("predict", "psm.finetuning.predict.run_prediction"),
    ],
)
def test_memory_is_kept_before_the_work_begins(command: str, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def begins(*overrides: object) -> None:
        assert kept == [True]
        raise UserError("as far as this test goes")

    monkeypatch.setattr(ops, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(work, begins)
    assert main([command]) == 2
    assert kept == [True]
