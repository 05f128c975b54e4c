"""A run's configuration is the same from its folder and from its checkpoint."""

from pathlib import Path

import pytest

from psm.config import merge as settings
from psm.config.schema import PretrainConfig
from psm.config.stored import load_run_config, save_run_config
from psm.methods import METHODS, get_method
from psm.methods.build import method_of
from psm.methods.spec import neutral_settings
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder

# What a run's method and data decide, so that a stored configuration always has it.
DECIDED = {"images": {"size": 32}, "optim": {"lr": 0.1, "weight_decay": 1e-3}}


def test_folder_and_checkpoint_give_the_same(tmp_path: Path) -> None:
    given = {**DECIDED, "epochs": 7, "views": {"size": 24}, "trainer": {"limit_train_batches": 2}}
    config = settings.resolved_config(settings.build(PretrainConfig, given))
    run = RunFolder(tmp_path)
    run.config.write_text(settings.to_yaml(config))
    checkpoint = {"psm": {"config": settings.to_dict(config)}}
    assert load_run_config(run) == load_run_config(checkpoint) == config


def test_a_key_that_is_not_stored_has_its_default() -> None:
    stored = {**DECIDED, "epochs": 7}
    config = load_run_config({"psm": {"config": stored}})
    assert config == settings.resolved_config(settings.build(PretrainConfig, stored))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_row_may_change_without_changing_what_was_stored(name: str) -> None:
    """Settings that did not exist when a run was stored have the values that change nothing, not those of the row."""
    groups, neutral = get_method(name).to_dict(), neutral_settings()
    older = {
        group: {key: value for key, value in given.items() if f"{group}.{key}" not in neutral}
        for group, given in groups.items()
    }
    stored = load_run_config({"psm": {"config": {**DECIDED, "method": name, **older}}})
    expected = {
        group: {key: neutral.get(f"{group}.{key}", value) for key, value in given.items()}
        for group, given in groups.items()
    }
    assert method_of(stored).to_dict() == expected
    partly = settings.build(PretrainConfig, {"method": name, "loss": {"temperature": 0.3}})
    assert method_of(partly) == get_method(name, loss={"temperature": 0.3})


def test_what_the_data_decides_must_be_stored() -> None:
    with pytest.raises(UserError, match=r"images\.size is missing in the settings of a run"):
        load_run_config({"psm": {"config": {"epochs": 7}}})


def test_a_damaged_or_edited_file_is_refused_as_a_run_and_warned_of_as_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An edited copy may start another run; the settings of a run that was trained do not change."""
    run = RunFolder(tmp_path)
    config = settings.resolved_config(settings.build(PretrainConfig, DECIDED))
    save_run_config(run, config)
    assert load_run_config(run) == config
    assert not caplog.text
    edited = run.config.read_text().replace("epochs: 200", "epochs: 300")
    run.config.write_text(edited)
    with pytest.raises(UserError, match="differs from the checksum in its last line: it was damaged or edited"):
        load_run_config(run)
    assert settings.build(PretrainConfig, settings.read_yaml(run.config)).epochs == 300
    assert "if you did not edit it, it is damaged" in caplog.text
    run.config.write_text(edited[: edited.rindex("# crc32")])
    assert load_run_config(run).epochs == 300


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        load_run_config(RunFolder(tmp_path))
