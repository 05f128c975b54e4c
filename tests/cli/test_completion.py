"""Completion of command lines: the tables of `--help`, and the shells that ask for them."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
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
        ("psm pretrain --help mac", ["machine"]),
        ("psm runs ", ["list", "best", "compare", "serve"]),
        ("psm completion f", ["fish"]),
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


def test_words_of_commands_are_those_that_they_take() -> None:
    from psm.cli.runs import WORDS

    assert candidates("psm runs ", COMMANDS)[: len(WORDS)] == list(WORDS)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with the program psm."""
    (tmp_path / "psm").write_text(f'#!/bin/sh\nexec {sys.executable} -m psm "$@"\n')
    (tmp_path / "psm").chmod(0o755)
    return tmp_path


def test_bash_completes_keys_and_values(program: Path) -> None:
    """The script in a real bash, which cuts words at "="."""
    script = (
        SCRIPTS["bash"]
        + """
try() { COMP_LINE="$1"; COMP_POINT=${#1}; _psm; echo "${COMPREPLY[*]}"; }
compopt() { echo nospace; }
try "psm pretrain batch_"
try "psm pretrain method=simc"
"""
    )
    path = f"{program}:/usr/bin:/bin"
    result = subprocess.run(["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["nospace", "batch_size=", "simclr"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_keys_and_values(program: Path) -> None:
    (program / "psm.fish").write_text(SCRIPTS["fish"])
    script = f"set PATH {program} $PATH; source {program}/psm.fish; complete -C 'psm pretrain {{}}'"
    for word, expected in (("batch_", "batch_size="), ("method=simc", "method=simclr")):
        command = ["fish", "--no-config", "-c", script.format(word)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stdout.split() == [expected]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("how", ["fpath", "source"])
def test_zsh_completes_keys_and_values_at_the_first_key_press(how: str, program: Path) -> None:
    """In an interactive zsh, with the script in a folder of fpath, where it is loaded when first asked, or sourced."""
    (program / "_psm").write_text(SCRIPTS["zsh"])
    setup = f"path=({program} $path) fpath=({program} $fpath); autoload -Uz compinit; compinit -u -D"
    if how == "source":
        setup = f"path=({program} $path); autoload -Uz compinit; compinit -u -D; source {program}/_psm"
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "> "})
    try:
        type_until(terminal, f"{setup}; echo rea''dy\n", "ready")
        type_until(terminal, "psm pretrain batch_\t", "batch_size=")
        type_until(terminal, "\x15psm pretrain method=simc\t", "method=simclr")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def type_until(terminal: int, keys: str, expected: str, seconds: float = 60) -> None:
    """Type into a terminal and read until a text was printed."""
    os.write(terminal, keys.encode())
    printed, deadline = "", time.monotonic() + seconds
    while expected not in printed and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            printed += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
    assert expected in printed, printed
