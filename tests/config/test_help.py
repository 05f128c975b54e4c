"""Help comes from the table of keys, fits the terminal, and goes from common keys to groups to everything."""

import pytest

from psm.config import merge as settings
from psm.config.finetune import FinetuneConfig
from psm.config.help import TOPICS, help_text
from psm.config.schema import EvaluateConfig, PretrainConfig
from psm.utils.errors import UserError


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("topic", ["", "all", "views"])
def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, topic: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_text("psm pretrain", [PretrainConfig], topic).splitlines()
    assert max(map(len, lines)) <= columns


def test_common_keys_then_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = help_text("psm pretrain", [PretrainConfig])
    assert "\n  epochs=200 " in text
    assert "\n  optim.lr" not in text
    assert text.index("  epochs=200") < text.index("Groups of keys:") < text.index("\n  optim ")
    assert "`psm pretrain --help GROUP`" in text


@pytest.mark.parametrize("schema", [PretrainConfig, FinetuneConfig])
def test_the_first_page_fits_a_screen_and_leaves_rare_keys_to_groups(
    monkeypatch: pytest.MonkeyPatch, schema: type
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = help_text("psm x", [schema])
    assert len(text.splitlines()) <= 55
    assert "\n  sync_batchnorm=" not in text
    assert "sync_batchnorm=true" in help_text("psm x", [schema], "machine")


def test_every_topic_is_described() -> None:
    assert {row.topic for row in settings.rows(PretrainConfig)} == {"", *TOPICS}


def test_one_group_and_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    group = help_text("psm pretrain", [PretrainConfig], "optim")
    assert "optim.lr=none" in group
    assert "epochs=" not in group
    assert "(number or none, 0 or more)" in group
    one = " ".join(help_text("psm pretrain", [PretrainConfig], "stem").split())
    assert "(auto, cifar or imagenet)" in one
    with pytest.raises(UserError, match="did you mean 'optim'"):
        help_text("psm pretrain", [PretrainConfig], "optm")


@pytest.mark.parametrize("schema", [PretrainConfig, EvaluateConfig])
def test_all_lists_every_key_with_its_bounds(monkeypatch: pytest.MonkeyPatch, schema: type) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = " ".join(help_text("psm x", [schema], "all").split())
    for row in settings.rows(schema):
        assert row.key in text
        assert row.meaning in text
        assert str(row.bounds) in text
