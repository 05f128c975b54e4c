"""The catalog, the presets, and the runs planned for them."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from psm.config import merge as settings
from psm.config.schema import EvaluateConfig, PretrainConfig
from psm.experiments.catalog import EXPERIMENTS, PSM_WEIGHTS
from psm.experiments.plan import BASELINES, absolute_data, data_name, make_plan, read_request, resolved
from psm.experiments.presets import PRESETS
from psm.methods.build import method_of
from psm.methods.registry import METHODS


def plan(*names: Any, **keys: Any) -> Any:
    return make_plan(read_request(names or ("all",), {"preset": "laptop"}, keys))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_configuration_of_every_preset_builds_and_composes(preset: Any) -> None:
    for run in {run.title: run for run in plan(preset=preset).runs}.values():
        config = settings.build(PretrainConfig, run.settings)
        assert method_of(config).needs_bank or not config.monitor.purity
        settings.build(EvaluateConfig, run.evaluation)


def test_the_paper_preset_has_the_papers_settings() -> None:
    runs = plan(preset="paper").runs
    assert {run.data for run in runs} == {"cifar10", "cifar100", "tiny-imagenet"}
    rows = EXPERIMENTS["figure8"].configurations
    assert all(row.settings.get("loss.weight_sum", PSM_WEIGHTS) == PSM_WEIGHTS for row in rows)
    for run in runs:
        full = resolved(run.settings)
        expected = {
            "encoder": "resnet18", "batch_size": 256, "epochs": 200, "bank.size": 16384, "loss.temperature": 0.5,
            "optim.lr": 0.1, "optim.warmup_lr": 1e-4, "optim.warmup": 0.1, "optim.momentum": 0.9,
            "heads.hidden_dim": 512, "heads.out_dim": 128, "target.momentum": 0.99, "optim.weight_decay": None,
            "images.limit": None,
        }  # fmt: skip
        assert {key: full[key] for key in expected} == expected
        assert run.evaluation["linear.epochs"] == 100
    psm_run = next(run for run in runs if run.title == "psm")
    full = resolved(psm_run.settings)
    assert (full["positives.k"], full["sampler.a"], full["loss.hard_weight"], full["loss.soft_weight"]) == (
        5,
        0.5,
        1.0,
        1.0,
    )


def test_the_stored_study_is_finished() -> None:
    """A setting that is new in this version, or decided by the device, renames no run."""
    records = {path.name for path in (Path(__file__).parents[2] / "study" / "records").iterdir()}
    for run in (*plan("table1", preset="overnight", seeds=[0]).runs, *plan("table3").runs):
        assert f"{run.name}.{run.evaluation_hash}.json" in records
        assert "preset" not in resolved(run.settings)


def test_the_catalog_is_the_papers() -> None:
    tables = {name: [row.title for row in EXPERIMENTS[name].configurations] for name in EXPERIMENTS}
    assert {row.settings["method"] for row in EXPERIMENTS["table1"].configurations} == set(METHODS) - {"psmv2"}
    assert len(tables["table2"]) == 4
    assert len(tables["table3"]) == 6
    assert tables["figure5"] == ["V0", "V1", "V2", "V3", "V4"]
    assert [row.value for row in EXPERIMENTS["figure6"].configurations] == [1, 5, 10, 20]
    for experiment in EXPERIMENTS.values():
        titles = [row.title for row in experiment.configurations]
        assert all(row.reference in (None, *titles) for row in experiment.configurations)
        for printed in experiment.paper.values():
            assert list(printed) == titles
    paper = EXPERIMENTS["table1"].paper
    assert [paper[data]["PSM"][0] for data in paper] == [88.57, 61.10, 36.69]  # of the abstract
    assert all(max(rows, key=lambda row: rows[row][0]) == "PSM" for rows in paper.values())


def test_runs_are_shared_and_every_entry_has_its_run() -> None:
    whole = plan()
    assert len({run.name for run in whole.runs}) == len(whole.runs)
    alone = [len(plan(name).runs) for name in EXPERIMENTS]
    assert len(whole.runs) < sum(alone)
    runs = {(entry.experiment, entry.title, entry.seed): entry.run for entry in whole.entries}
    psm_run = runs["table1", "PSM", 0]
    for name, title in (
        ("table2", "PSM"), ("figure1", "PSM"), ("figure5", "V0"), ("figure6", "k = 5"), ("figure7", "a = 0.5"),
        ("figure8", "λ = 1"),
    ):  # fmt: skip
        assert runs[name, title, 0] == psm_run
    assert runs["figure8", "λ = 0", 0] == runs["table2", "without L_hard", 0]
    assert runs["table3", "MoCo v2", 1] == runs["figure2", "MoCo v2", 1] == runs["table1", "MoCo v2", 1]
    assert runs["figure6", "k = 5", 2] == runs["table1", "PSM", 2]  # the yardstick has all seeds
    assert ("figure6", "k = 10", 1) not in runs
    known = {run.name for run in whole.runs} | {
        f"{run.baselines}/{of}" for run in whole.runs for of in ("raw pixels", "untrained encoder")
    }
    assert {entry.run for entry in whole.entries} <= known


def test_a_run_is_known_by_every_setting_that_matters() -> None:
    def name(**keys: Any) -> Any:
        (run,) = plan("figure2", preset="smoke", **keys).runs
        return run.name

    plain = name()
    different = [
        ("epochs", 2), ("batch_size", 16), ("encoder", "resnet18"), ("optim.lr", 0.2), ("bank.size", 32),
        ("data", ["cifar10"]),
        ("images.limit", 96), ("views.blur", 0.5), ("loss.temperature", 0.2), ("heads.out_dim", 8), ("seeds", [1]),
        ("precision", "bf16-mixed"), ("channels_last", False), ("sampler.name", "pnsm"), ("images.split", "official"),
        ("trainer.deterministic", True), ("target.momentum", 0.9), ("optim.clip", 1.0), ("stem", "imagenet"),
        ("init", "runs/a"),
    ]  # fmt: skip
    names = [name(**{key: value}) for key, value in different]
    assert len({plain, *names}) == len(different) + 1
    for key, value in (
        ("images.root", "elsewhere"), ("progress", False), ("jobs", 2), ("accelerator", "cpu"), ("out", "other"),
        ("linear.epochs", 3),
    ):  # fmt: skip
        assert name(**{key: value}) == plain
    (scored,) = plan("figure2", preset="smoke", **{"linear.epochs": 3}).runs
    (before,) = plan("figure2", preset="smoke").runs
    assert scored.evaluation_hash != before.evaluation_hash


def test_a_setting_that_changes_nothing_is_no_part_of_a_name() -> None:
    """A version that adds a choice, off by default, finds the runs of the version before."""
    plain = plan("figure1", preset="smoke")
    off = plan("figure1", preset="smoke", **{"target.views": "same", "views.count": 2, "heads.norm_last": "batch"})
    assert [run.name for run in off.runs] == [run.name for run in plain.runs]
    assert [entry.protocol for entry in off.entries] == [entry.protocol for entry in plain.entries]
    on = plan("figure1", preset="smoke", **{"target.views": "weak"})
    assert not {run.name for run in on.runs} & {run.name for run in plain.runs}


def test_rows_win_over_keys_and_methods_filter_rows() -> None:
    ks = {resolved(run.settings)["positives.k"] for run in plan("figure6", **{"positives.k": 3}).runs}
    assert ks == {1, 3, 10, 20}  # the row of the paper's choice does not set k, so the key does
    titles = {entry.title for entry in plan("table1", methods=["psm", "byol"]).entries}
    assert titles == {"PSM", "BYOL", "Raw pixels", "Untrained encoder"}


def test_rows_by_their_titles() -> None:
    titles = ["HCL", "PSM v2, 4 views"]
    entries = plan("successor", rows=titles).entries
    assert {entry.title for entry in entries} == {*titles, *BASELINES.values()}
    *_, typed = shlex.split(entries[0].command)
    assert yaml.safe_load(typed.removeprefix("rows=")) == titles


def test_a_folder_is_named_without_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    found = plan("table1", data=str(tmp_path / "birds"), methods="psm", seeds=0)
    assert {entry.data for entry in found.entries} == {"birds"}
    assert str(tmp_path) not in "".join(entry.command + entry.run for entry in found.entries)
    assert found.runs[0].settings["data"] == str(tmp_path / "birds")
    assert data_name("cifar10") == "cifar10"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("cifar10", "cifar10"),
        ("some/photos/", "photos"),
        ("some/list.csv", "list.csv"),
        ("some/imagenet/train-{000000..000146}.tar", "imagenet"),
        ("s3://bucket/laion/{0..9}.tar", "laion"),
        ("hf:timm/imagenet-1k-wds:train", "imagenet-1k-wds"),
    ],
)
def test_the_name_of_a_data_set_in_results(data: str, name: str) -> None:
    assert data_name(data) == name
    address = data == "cifar10" or data.startswith(("s3:", "hf:"))
    assert (absolute_data(data) == data) == address


def test_the_linear_rate_may_be_chosen_from_a_grid() -> None:
    """By key, for all rows alike: under a protocol of its own, with the same runs."""
    usual, chosen = plan("table2"), plan("table2", linear={"lr_grid": [0.1, 0.01]})
    assert chosen.runs[0].evaluation["linear.lr_grid"] == [0.1, 0.01]
    assert [run.name for run in usual.runs] == [run.name for run in chosen.runs]
    assert {entry.protocol for entry in usual.entries}.isdisjoint(entry.protocol for entry in chosen.entries)
    assert "linear.lr_grid=[0.1,0.01]" in chosen.entries[0].command
    config = settings.build(EvaluateConfig, chosen.runs[0].evaluation)
    assert config.linear.lr_grid == [0.1, 0.01]


def test_one_k_stays_a_number_and_several_are_a_list() -> None:
    """As text too: the names of evaluations that were made before lists of k stay as they were."""
    (usual, *_), (same, *_), (several, *_) = (
        plan("table2", **keys).runs for keys in ({}, {"knn": {"k": 20}}, {"knn": {"k": [5, 20]}})
    )
    assert usual.evaluation["knn.k"] == same.evaluation["knn.k"] == 20
    assert usual.evaluation_hash == same.evaluation_hash
    assert several.evaluation["knn.k"] == [5, 20]
