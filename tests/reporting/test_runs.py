"""`psm runs`: what is read from run folders, the list, the comparison, and the live page."""

import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from helpers import browser_dom, needs_browser
from psm.cli import runs as command
from psm.config.finetune import FinetuneConfig
from psm.config.schema import PretrainConfig
from psm.config.stored import save_run_config
from psm.reporting.runs.serve import POINTS, describe, make_server
from psm.reporting.runs.summary import find_runs, summarize
from psm.reporting.runs.table import age, best_run, sorted_runs
from psm.utils.errors import UserError
from psm.utils.files import append_line
from psm.utils.locking import is_held, locked
from psm.utils.run_folder import RunFolder


def make_run(folder: Path, finished: bool = True, epochs: int = 3, **keys: Any) -> RunFolder:
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.marker.touch()
    save_run_config(run, PretrainConfig(out=str(folder), data="shapes", epochs=3, **keys))
    for epoch in range(1, epochs + 1):
        append_line(run.metrics, {"epoch": epoch, "step": epoch, "loss": 3.0 - epoch, "knn": 10.0 * epoch})
    if finished:
        run.encoder.touch()
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first = make_run(tmp_path / "runs" / "first")
    append_line(first.scores, {"of": "raw pixels", "score": "linear", "top1": 99.0})
    append_line(first.scores, {"of": "psm", "score": "linear", "top1": 40.0})
    append_line(first.scores, {"of": "psm", "score": "linear", "top1": 41.0})
    make_run(tmp_path / "runs" / "deep" / "second", finished=False, epochs=2, method="simclr", seed=7)
    return tmp_path / "runs"


def test_runs_are_found_with_state_scores_and_epochs(folder: Path) -> None:
    runs = {run.name: run for run in find_runs(folder)}
    assert set(runs) == {"first", "deep/second"}
    assert (runs["first"].state, runs["first"].epoch) == ("finished", 3)
    assert (runs["deep/second"].state, runs["deep/second"].epoch) == ("stopped", 2)
    assert runs["first"].score("linear") == 41.0  # the newest of the encoder, not of a baseline
    assert runs["first"].score("knn") == 30.0  # measured while training
    assert runs["deep/second"].score("linear") is None


def test_a_run_whose_lock_is_held_is_running_and_stays_free_for_its_process(folder: Path) -> None:
    marker = RunFolder(folder / "first").marker
    assert not is_held(marker)
    with locked(marker, wait=False) as mine:
        assert mine
        assert is_held(marker)
        assert summarize(folder / "first", folder).state == "running"
    assert not is_held(marker)


def test_a_damaged_configuration_is_a_row_with_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "first" / "config.yaml").write_text("epochs: [")
    command.run([str(folder)])
    printed = capsys.readouterr().out
    assert "unreadable" in printed
    assert "config.yaml" in printed


def test_the_list_fits_80_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command.run([str(folder)])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "finished" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_list_best_and_compare(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command.run([str(folder), "sort=name"])
    printed = capsys.readouterr().out
    assert printed.index("deep/second") < printed.index("first")
    assert "~20.00" in printed
    assert "41.00" in printed
    command.run(["best", str(folder)])
    assert capsys.readouterr().out.strip() == str(folder / "first")
    command.run(["compare", str(folder / "first"), str(folder / "deep" / "second")])
    lines = [[word.strip() for word in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: line[1:] for line in lines if len(line) == 4}
    assert table["knn"] == ["30.00", "20.00", "-10.00"]
    assert table["method"][:2] == ["psm", "simclr"]
    assert table["seed"][:2] == ["0", "7"]
    assert "epochs" not in table


def test_order_by_score_puts_runs_without_one_last(folder: Path) -> None:
    runs = find_runs(folder)
    assert [run.name for run in sorted_runs(runs, "score", "linear")] == ["first", "deep/second"]
    assert [run.name for run in sorted_runs(runs, "score", "knn")] == ["first", "deep/second"]
    with pytest.raises(UserError, match=r"no run has a score by=lidar: `psm evaluate RUN scores=\[lidar\]`"):
        best_run(runs, "lidar")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing"], "folder=missing does not exist"),
        (["compare", "one"], "takes two run folders, not 1"),
        (["compare", ".", "."], "is no run folder"),
        (["list", "a", "b"], "takes one folder, not 2"),
        (["."], "holds no run"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        command.run(arguments)


def test_runs_of_finetune_are_listed_and_compared_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(folder / "third")
    run.folder.mkdir()
    run.marker.touch()
    save_run_config(run, FinetuneConfig(out=str(run.folder), data="shapes", encoder="tiny", epochs=5))
    append_line(run.metrics, {"epoch": 1, "loss": 2.0, "validation": 55.0})
    found = summarize(run.folder, folder)
    assert (found.method, found.state, found.epoch, found.problem) == ("finetune", "stopped", 1, "")
    assert describe(found)["curves"]["validation"] == [[1, 55.0]]
    run.finetuned.write_text('{"best": {"test": {"top1": 61.5}}}')
    assert summarize(run.folder, folder).score("accuracy") == 61.5
    command.run(["compare", str(run.folder), str(folder / "first")])
    assert "head_only" in capsys.readouterr().out


def test_ages_are_in_the_largest_unit() -> None:
    now = time.time()
    assert [age(now - seconds) for seconds in (5, 125, 7300, 200_000)] == ["5 s", "2 min", "2 h", "2 d"]


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", epochs=1)
    run.metrics.write_text("".join(json.dumps({"epoch": n, "loss": float(n)}) + "\n" for n in range(1, 1802)))
    (curve,) = describe(summarize(tmp_path / "a", tmp_path))["curves"].values()
    assert len(curve) <= POINTS + 1
    assert (curve[0], curve[-1]) == ([1, 1.0], [1801, 1801.0])


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with make_server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def get(address: str, path: str, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection(address, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_answers_this_machine_alone_and_only_about_its_runs(address: str, folder: Path) -> None:
    status, text = get(address, "/runs.json")
    assert status == 200
    assert {run["name"]: run["epoch"] for run in json.loads(text)} == {"first": 3, "deep/second": 2}
    assert get(address, "/runs.json", Host="attacker.example")[0] == 403
    (folder.parent / "secret.html").write_text("secret")
    for path in ("/../secret.html", "/run?name=..", "/run?name=../secret.html", "/run", "/nothing"):
        status, text = get(address, path)
        assert status == 404, path
        assert "secret<" not in text
    run = RunFolder(folder / "first")
    run.page.write_text("the page of the run")
    assert get(address, "/run?name=first") == (200, "the page of the run")
    with pytest.raises(UserError, match=r"port=\d+ cannot be used \(Address already in use\)"):
        make_server(folder, int(address.rpartition(":")[2]))


@needs_browser
def test_the_page_shows_runs_and_curves_in_a_browser(address: str, tmp_path: Path) -> None:
    shown = browser_dom(f"http://{address}/", tmp_path / "profile", 1000)
    assert "2 runs, 0 running" in shown
    assert "deep/second" in shown
    assert shown.count("<svg") == 2  # loss and nearest neighbors
    assert shown.count("<path") == 4
