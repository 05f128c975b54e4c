"""A run's configuration is the same from its folder and from its checkpoint."""

from pathlib import Path

import pytest

from psm.config import merge as settings
from psm.config.schema import PretrainConfig
from psm.config.stored import load_run_config
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder


def test_folder_and_checkpoint_give_the_same(tmp_path: Path) -> None:
    config = settings.build(PretrainConfig, {"epochs": 7, "views": {"size": 24}, "trainer": {"limit_train_batches": 2}})
    run = RunFolder(tmp_path)
    run.config.write_text(settings.to_yaml(config))
    checkpoint = {"psm": {"config": settings.to_dict(config)}}
    assert load_run_config(run) == load_run_config(checkpoint) == config


def test_a_key_that_is_not_stored_has_its_default() -> None:
    assert load_run_config({"psm": {"config": {"epochs": 7}}}) == settings.build(PretrainConfig, {"epochs": 7})


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        load_run_config(RunFolder(tmp_path))
