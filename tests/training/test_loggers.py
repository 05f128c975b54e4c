"""Loggers by key: short names, module.Class, and their arguments."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

import psm
from psm.config import merge
from psm.config.schema import PretrainConfig
from psm.training.loggers import build_loggers
from psm.utils.errors import UserError


class MyLogger(CSVLogger):
    """A logger of the user's own, with an argument of its own and no folder to choose."""

    def __init__(self, color: Any, size: Any = 1) -> None:
        super().__init__("unused")
        self.color, self.size = color, size


def loggers(*arguments: Any) -> Any:
    return merge.build(PretrainConfig, *merge.parse(arguments, PretrainConfig)).loggers


def test_names_and_arguments_merge() -> None:
    assert loggers("loggers=[csv,wandb]") == {"csv": {}, "wandb": {}}
    assert loggers("loggers=csv") == {"csv": {}}
    assert loggers("loggers=none") == {}
    assert loggers("loggers.wandb.project=x") == {"wandb": {"project": "x"}}
    assert loggers("loggers.wandb.project=x", "loggers=[csv,wandb]") == {"csv": {}, "wandb": {"project": "x"}}
    assert loggers("loggers=[csv,wandb]", "loggers.wandb.project=x") == {"csv": {}, "wandb": {"project": "x"}}
    with pytest.raises(UserError, match="loggers=3 is not keys and values"):
        loggers("loggers=3")


def test_a_configuration_with_loggers_reads_back(tmp_path: Path) -> None:
    given = {"csv": {"flush_logs_every_n_steps": 1}, f"{__name__}.MyLogger": {"color": "red"}}
    (tmp_path / "config.yaml").write_text(merge.to_yaml(merge.build(PretrainConfig, {"loggers": given})))
    again = merge.build(PretrainConfig, merge.read_yaml(tmp_path / "config.yaml"))
    assert [type(x).__name__ for x in build_loggers(again.loggers, tmp_path)] == ["CSVLogger", "MyLogger"]


def test_arguments_reach_the_logger(tmp_path: Path) -> None:
    (made,) = build_loggers(loggers("loggers.csv.name=mine", "loggers.csv.flush_logs_every_n_steps=7"), tmp_path)
    assert isinstance(made, CSVLogger)
    assert (made.name, made._flush_logs_every_n_steps) == ("mine", 7)
    assert made.save_dir == str(tmp_path)


def test_a_class_of_the_user_takes_arguments_by_key(tmp_path: Path) -> None:
    name = f"{__name__}.MyLogger"
    (made,) = build_loggers(loggers(f"loggers.{name}.color=red", f"loggers.{name}.size=2"), tmp_path)
    assert (type(made).__name__, made.color, made.size) == ("MyLogger", "red", 2)
    for given in ({name: {"color": "blue"}}, {f"{name}.color": "blue"}, {name: {}, f"{name}.color": "blue"}):
        (made,) = build_loggers(given, tmp_path)
        assert (made.color, made.size) == ("blue", 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cvs": {}}, r"loggers=\[cvs\] is unknown \(did you mean 'csv'\?\)"),
        ({"csv": {"colour": 1}}, r"loggers=\[csv\] cannot be used: .*colour"),
        ({"no.such.Logger": {}}, r"loggers=\[no\.such\.Logger\] cannot be used: No module named"),
        ({"csv": 3}, r"loggers\.csv=3 is not an argument of a logger"),
    ],
)
def test_what_is_wrong_with_a_logger_is_said(tmp_path: Path, given: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build_loggers(given, tmp_path)


def test_a_run_writes_to_its_loggers_and_may_change_them_on_resume(tmp_path: Path, small: dict[str, Any]) -> None:
    run = psm.pretrain(tmp_path / "a", **small | {"epochs": 1}, loggers={"csv": {"name": "mine"}})
    assert "effective_rank" in next((run.out / "logs" / "mine").rglob("metrics.csv")).read_text()
    assert len(psm.pretrain(run.out, resume=True, progress=False, loggers=["csv"]).metrics) == 1
