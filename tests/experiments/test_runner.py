"""`psm experiment run`: killed, repeated and resumed; its files, its messages, and its pages in a real browser."""

import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from helpers import needs_browser, page_widths, run_psm, start_psm
from psm.cli.main import main
from psm.experiments import runner, worker
from psm.experiments.executors import Ended, Started
from psm.utils.files import TEMPORARY_PREFIX, read_lines

SMOKE = ("preset=smoke", "epochs=4", "jobs=2", "monitor.every=4")


def command(*arguments: Any) -> Any:
    return [sys.executable, "-m", "psm", "experiment", *map(str, arguments)]


def psm(*arguments: Any) -> Any:
    return run_psm("experiment", *arguments)


def environment() -> Any:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def table(out: Any, name: Any) -> Any:
    with (out / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


class InProcess:
    """An executor that works on each run in the process of the test: importing torch anew takes longer than a run."""

    jobs = 1

    def __init__(self, *arguments: Any):
        self.events: list[Any] = []

    def describe(self) -> str:
        return "in the process of the test"

    def submit(self, job: Any) -> None:
        log = job.study.log(job.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file, redirect_stderr(file):
            code = worker.main([str(job.write())])
        self.events += [Started(job.name), Ended(job.name, code)]

    def poll(self) -> Any:
        events, self.events = self.events, []
        return events

    def stop(self) -> None:
        pass

    close = stop


@pytest.fixture(scope="module")
def in_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "make_executor", InProcess)
        patch.setattr(runner, "POLL_SECONDS", 0.0)
        yield


def scores(out: Any, title: Any) -> Any:
    return {
        (row["seed"], row["score"]): (row["top1"], row["top5"])
        for row in table(out, "results")
        if row["title"] == title
    }


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Any:
    """Figures 1 and 2 at the smallest scale, through the command line."""
    out = tmp_path_factory.mktemp("studies") / "study"
    assert main(["experiment", "run", "figure1", "figure2", f"out={out}", "methods=[psm,mocov2]", *SMOKE]) == 0
    return out


def test_results_are_plain_files(study: Any) -> None:
    results = table(study, "results")
    assert {row["title"] for row in results} == {"psm", "mocov2", "raw pixels", "untrained encoder"}
    for row in results:
        assert 0 <= float(row["top1"]) <= float(row["top5"]) <= 100
        assert row["score"] in ("knn", "linear")
        assert (row["data"], row["seed"], row["torch"] != "", row["hardware"] != "") == ("shapes", "0", True, True)
    curves = table(study, "curves")
    assert [row["epoch"] for row in curves if row["title"] == "psm"] == ["1", "2", "3", "4"]
    assert all(0 <= float(row["purity_top1"]) <= 1 for row in curves if row["title"] == "psm")
    ranks = [row for row in table(study, "gradients") if row["title"] == "mocov2"]
    assert [int(row["rank"]) for row in ranks] == list(range(1, 65))
    assert not (study / "failures.csv").exists()
    assert {path.name for path in (study / "report").glob("*.html")} == {"index.html", "figure1.html", "figure2.html"}


def test_finished_runs_are_not_repeated(study: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in (study / "runs").rglob("*")}
    records = {path: path.read_bytes() for path in (study / "records").iterdir()}
    again = psm("run", "figure2", "figure1", f"out={study}", "methods=[psm,mocov2]", *SMOKE)
    assert again.returncode == 0, again.stderr
    assert "2 finished before, 0 to do" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in (study / "runs").rglob("*")} == before
    assert {path: path.read_bytes() for path in (study / "records").iterdir()} == records


def test_what_a_killed_suite_was_writing_is_removed_by_the_next(study: Any) -> None:
    before = sorted(study.rglob("*"))
    left = [study / name / f"{TEMPORARY_PREFIX}abc" for name in ("", "jobs", "records", "report", "runs")]
    for file in left:
        file.touch()
    assert main(["experiment", "run", "figure1", f"out={study}", "methods=[psm,mocov2]", *SMOKE]) == 0
    left[-1].unlink()  # what is written to a run's folder is the business of whoever has its lock
    assert sorted(study.rglob("*")) == before


def worker_of(suite: Any) -> Any:
    """The worker process that a suite has started."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = (map(int, line.split()) for line in listed.splitlines())
    return next((pid for pid, parent in pairs if parent == suite.pid), None)


def is_running(suite: Any) -> bool:
    return suite.poll() is None if isinstance(suite, subprocess.Popen) else suite.is_alive()


def until_an_epoch_is_done(suite: Any, out: Any) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and is_running(suite):
        if any(read_lines(path) for path in (out / "runs").glob("*/metrics.jsonl")):
            return
        time.sleep(0.01)
    pytest.fail("the suite ended or stood still before an epoch was done")


@pytest.mark.slow
def test_a_killed_run_is_reported_and_continued_to_the_same_results(study: Any, tmp_path: Path) -> None:
    out = tmp_path / "study"
    arguments = ("run", "figure2", f"out={out}", *SMOKE)
    suite = start_psm("experiment", *arguments, output=tmp_path)
    until_an_epoch_is_done(suite, out)
    os.kill(worker_of(suite), signal.SIGKILL)
    suite.join(300)
    output = (tmp_path / "stderr").read_text()
    assert suite.exitcode == 1, output
    assert "ended by SIGKILL" in output
    (failure,) = table(out, "failures")
    assert (out / failure["log"]).exists()
    assert "ended by SIGKILL" in (out / "report" / "figure2.html").read_text()
    again = psm(*arguments)
    assert again.returncode == 0, again.stderr
    assert re.search(r"from epoch [123]", again.stderr)
    assert scores(out, "mocov2") == scores(study, "mocov2")
    assert scores(out, "raw pixels") == scores(study, "raw pixels")
    assert table(out, "gradients") == table(study, "gradients")
    assert table(out, "failures") == []


def test_one_failure_does_not_stop_the_rest(
    in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    data = f"data=[{tmp_path}/nowhere,shapes]"
    assert main(["experiment", "run", "table1", f"out={out}", "preset=smoke", "methods=simclr", data]) == 1
    output = capsys.readouterr().err
    assert "FAILED simclr · nowhere" in output
    assert "1 of 2 runs failed" in output
    (failure,) = table(out, "failures")
    assert "nowhere" in failure["reason"]
    assert len(scores(out, "simclr")) == 2
    assert "SimCLR, seed 0 failed" in (out / "report" / "table1.html").read_text()


def test_results_of_a_folder_do_not_say_where_it_lies(in_process: None, tmp_path: Path) -> None:
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for label, index in itertools.product(("cats", "dogs"), range(48)):
        (tmp_path / "pets" / label).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (16, 16, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(tmp_path / "pets" / label / f"{index}.png")
    out = tmp_path / "study"
    keys = [f"out={out}", "preset=smoke", "methods=byol", f"data={tmp_path / 'pets'}"]
    assert main(["experiment", "run", "table1", *keys]) == 0
    assert {row["data"] for row in table(out, "results")} == {"pets"}
    kept = [path for path in (*out.glob("*.csv"), *out.glob("records/*"), *out.glob("report/*")) if path.is_file()]
    assert [path.name for path in kept if str(tmp_path).encode() in path.read_bytes()] == []


def test_two_suites_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from psm.utils.locking import locked

    (tmp_path / ".psm-study").touch()
    with locked(tmp_path / ".psm-study") as taken:
        assert taken
        assert main(["experiment", "run", "figure2", f"out={tmp_path}", "preset=smoke"]) == 2
    assert "another suite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [".psm-study"]


@pytest.mark.slow
def test_a_killed_suite_leaves_nothing_that_breaks_the_next(study: Any, tmp_path: Path) -> None:
    out = tmp_path / "study"
    arguments = ("run", "figure2", f"out={out}", *SMOKE)
    suite = subprocess.Popen(command(*arguments), stderr=subprocess.DEVNULL, env=environment())
    until_an_epoch_is_done(suite, out)
    suite.kill()
    suite.wait()
    again = psm(*arguments)  # at once: the worker of the suite that was killed may still be there
    assert again.returncode == 0, again.stderr
    assert scores(out, "mocov2") == scores(study, "mocov2")


@pytest.mark.slow
def test_a_run_with_two_devices_works_inside_a_suite(tmp_path: Path) -> None:
    """The second process reads the same job, trains along and leaves before the run is scored."""
    out = tmp_path / "study"
    result = psm("run", "table1", f"out={out}", "preset=smoke", "methods=simclr", "devices=2", "accelerator=cpu")
    assert result.returncode == 0, result.stderr
    assert len(scores(out, "simclr")) == 2
    assert "2 x cpu" in next((out / "runs").glob("*/log.txt")).read_text()


@pytest.mark.slow
def test_an_interrupt_stops_the_runs_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "study"
    arguments = ("run", "figure2", f"out={out}", "preset=smoke", "epochs=2000")
    suite = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True, env=environment())
    until_an_epoch_is_done(suite, out)
    worker = worker_of(suite)
    suite.send_signal(signal.SIGINT)
    _, output = suite.communicate(timeout=60)
    assert suite.returncode == 130
    assert "the same command continues" in output
    assert "Traceback" not in output
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.slow
def test_what_a_record_lacks_is_measured_without_training_again(study: Any, tmp_path: Path) -> None:
    out = tmp_path / "study"
    shutil.copytree(study, out)
    whole = table(out, "gradients")
    (path,) = (out / "records").glob("*-mocov2-*")
    record = json.loads(path.read_text())
    record["gradients"] = [{"rank": 1}]  # as a version would leave it that measured less
    path.write_text(json.dumps(record))
    (checkpoint,) = (out / "runs").glob("*-mocov2-*/checkpoints/last.ckpt")
    before = checkpoint.stat().st_mtime_ns
    result = psm("run", "figure2", f"out={out}", *SMOKE)
    assert result.returncode == 0, result.stderr
    assert "0 finished before, 1 to do" in result.stderr
    assert table(out, "gradients") == whole
    assert checkpoint.stat().st_mtime_ns == before


@pytest.mark.slow
def test_all_experiments_at_the_smallest_scale(tmp_path: Path) -> None:
    out = tmp_path / "study"
    result = psm("run", "all", f"out={out}", "preset=smoke", "jobs=2")
    assert result.returncode == 0, result.stderr
    pages = {path.stem for path in (out / "report").glob("*.html")}
    assert pages == {"index", "table1", "table2", "table3", *(f"figure{n}" for n in (1, 2, 5, 6, 7, 8))}
    for page in pages:
        assert "are missing" not in (out / "report" / f"{page}.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "tabel1"], "did you mean 'table1'?"),
        (["run", "table1", "preset=labtop"], "did you mean 'laptop'?"),
        (["run", "table1", "epoch=3"], "did you mean 'epochs'?"),
        (["run", "table1", "seed=3"], "give seeds=[...] instead"),
        (["run", "table1", "seeds=[a]"], "is not a list of whole numbers"),
        (["run", "table1", "methods=[pms]"], "did you mean 'psm'?"),
        (["run", "table2", "methods=[byol]"], "has no row in table2"),
        (["run", "table2", "methods=[psm]", "rows=[PSMM]"], "is no row of table2"),
        (["run", "table3", "methods=[hcl]", "rows=[SimCLR]"], "methods=[hcl] with rows=[SimCLR] has no row in table3"),
        (["run", "table2", "rows=[PSMM]"], "is no row of table2 (did you mean 'PSM'?)"),
        (["run", "figure6", "bank.size=10"], "bank.size=10 is smaller"),
        (["run", "table1", "jobs=0"], "jobs=0"),
        (["run", "table1", "encoder=resnet19"], "did you mean 'resnet18'?"),
        (["run", "table1", "epochs=0"], "epochs=0 is too small"),
        (["run", "table1", "linear.epochs=0"], "linear.epochs=0 is too small"),
        (["run"], "name what to run"),
        (["rum", "table1"], "did you mean 'run'?"),
        ([], "needs a word"),
        (["report"], "holds no results"),
    ],
)
def test_mistakes_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Any, expected: Any
) -> None:
    out = tmp_path / "study"
    assert main(["experiment", *arguments, *([f"out={out}"] if arguments else [])]) == 2
    output = capsys.readouterr().err
    assert expected in output
    assert len(output.strip().splitlines()) == 1
    assert not out.exists()


def test_a_folder_that_is_no_study_is_never_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["experiment", "run", "figure2", "preset=smoke", f"out={tmp_path}"]) == 2
    assert "holds no study" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_help_lists_every_key_and_list_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    from psm.config import merge as settings
    from psm.config.schema import ExperimentConfig, PretrainConfig
    from psm.experiments import EXPERIMENTS, PRESETS
    from psm.experiments.plan import RESERVED

    assert main(["experiment", "run", "--help", "all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    passed_on = [row for row in settings.rows(PretrainConfig) if row.key not in RESERVED]
    for row in (*settings.rows(ExperimentConfig), *passed_on):
        assert f"{row.key}=" in text or f"{row.key}.KEY=" in text
        assert row.meaning in text
    assert main(["experiment", "list", "preset=smoke"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*EXPERIMENTS, *PRESETS))


def test_help_and_catalog_do_not_import_torch() -> None:
    script = (
        "import sys; from psm.cli.main import main; code = main(['experiment', '--help']); import psm.experiments;"
        "heavy = {'torch', 'lightning', 'numpy', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if heavy or code else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["index", "figure1"])
def test_pages_fit_a_phone_and_a_screen(study: Any, tmp_path: Path, name: str, width: Any) -> None:
    """Nothing is wider than the window, and charts are wide enough to read."""
    inner, scrolled, smallest, largest = page_widths(study / "report" / f"{name}.html", tmp_path, width)
    assert scrolled <= inner
    assert 250 <= smallest <= largest <= inner
