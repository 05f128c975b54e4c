"""Completion of command lines: the tables of `--help`, and the shells that ask for them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psm.cli.completing import NAMED, PARTS, candidates
from psm.cli.completion import SCRIPTS
from psm.cli.main import COMMANDS


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("psm pre", ["pretrain"]),
        ("psm pretrain optim.lr=0.1 optim.w", ["optim.warmup_lr=", "optim.warmup=", "optim.weight_decay="]),
        ("psm pretrain optim.warmup=3 optim.w", ["optim.warmup_lr=", "optim.weight_decay="]),
        ("psm pretrain method=mo", ["method=mocov2", "method=mochi"]),
        ("psm pretrain overwrite=", ["overwrite=false", "overwrite=true", "overwrite=delete"]),
        ("psm pretrain sync_batchnorm=f", ["sync_batchnorm=false"]),
        ("psm experiment ru", ["run"]),
        ("psm experiment run table1 ta", ["table2", "table3", "target="]),
        ("psm experiment run methods=[psm,s", ["methods=[psm,simclr", "methods=[psm,snclr"]),
        ("psm pretrain --help opt", ["optim", "optim.name"]),
        ("psm nonsense ", []),
        ("psm pretrain nonsense=", []),
    ],
)
def test_candidates_come_from_the_tables(line: str, expected: list[str]) -> None:
    assert candidates(line, COMMANDS)[: len(expected)] == expected
    assert bool(expected) == bool(candidates(line, COMMANDS))


def test_paths_complete_where_a_path_may_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert candidates("psm evaluate ru", COMMANDS) == ["runs/", "runs.txt"]
    assert candidates("psm pretrain out=runs/", COMMANDS) == ["out=runs/a/"]
    assert candidates(f"psm pretrain data={tmp_path}/ru", COMMANDS) == [
        f"data={tmp_path}/runs/",
        f"data={tmp_path}/runs.txt",
    ]
    assert candidates("psm pretrain method=ru", COMMANDS) == []


def test_named_values_are_those_that_are_registered() -> None:
    from psm.data.registry import NAMES
    from psm.exporting.export import FORMATS
    from psm.methods import KINDS, list_methods
    from psm.models.factory import ENCODERS

    assert sorted(NAMED["method"]) == sorted(list_methods())
    assert {kind: list(KINDS[kind]) for kind in KINDS} == PARTS
    assert sorted(NAMED["data"]) == sorted(NAMES)
    assert sorted(NAMED["format"]) == sorted(FORMATS)
    assert sorted(NAMED["encoder"]) == sorted([*ENCODERS, "torchvision/", "timm/"])


def test_bash_completes_keys_and_values(tmp_path: Path) -> None:
    """The script in a real bash, which cuts words at "="."""
    (tmp_path / "psm").write_text(f'#!/bin/sh\nexec {sys.executable} -m psm "$@"\n')
    (tmp_path / "psm").chmod(0o755)
    script = (
        SCRIPTS["bash"]
        + """
try() { COMP_LINE="$1"; COMP_POINT=${#1}; _psm; echo "${COMPREPLY[*]}"; }
compopt() { echo nospace; }
try "psm pretrain batch_"
try "psm pretrain method=simc"
"""
    )
    path = f"{tmp_path}:/usr/bin:/bin"
    result = subprocess.run(["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["nospace", "batch_size=", "simclr"]


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_other_shells_parse_their_scripts(shell: str, check: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / f"psm.{shell}"
    script.write_text(SCRIPTS[shell])
    subprocess.run([shell, check, script], check=True)
