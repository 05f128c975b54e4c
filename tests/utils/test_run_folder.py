"""Run folders: where a run is resumed from, who may write, and what is left alone."""

from pathlib import Path

import pytest

from psm.utils.errors import UserError
from psm.utils.files import append_line, read_lines
from psm.utils.run_folder import RunFolder
from psm.utils.run_lock import clear_run, lock_run


def run_with(folder: Path, *names: str) -> RunFolder:
    """A run folder with these files, empty."""
    run = RunFolder(folder)
    for path in (run.marker, *(folder / name for name in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return run


def test_an_empty_run_is_neither_used_nor_trained(tmp_path: Path) -> None:
    assert not RunFolder(tmp_path / "none").used
    run = run_with(tmp_path)
    assert not run.used
    assert not run.trained
    assert run_with(tmp_path, "config.yaml").used
    assert not run.trained
    assert run_with(tmp_path, "checkpoints/epoch-0001.ckpt").trained


def test_snapshots_are_in_order_of_epochs(tmp_path: Path) -> None:
    names = ["epoch-9999.ckpt", "epoch-10000.ckpt", "epoch-0002.ckpt"]
    run = run_with(tmp_path, *(f"checkpoints/{name}" for name in names))
    assert [path.name for path in run.snapshots] == ["epoch-0002.ckpt", "epoch-9999.ckpt", "epoch-10000.ckpt"]
    assert run.snapshot(2) == run.snapshots[0]


def test_resume_point(tmp_path: Path) -> None:
    begun = run_with(tmp_path / "begun", "config.yaml")
    assert begun.resume_point("true") is None
    run = run_with(tmp_path / "a", "config.yaml", "checkpoints/last.ckpt", "checkpoints/epoch-0001.ckpt")
    assert run.resume_point("true") == run.resume_point("auto") == run.checkpoint
    assert run.resume_point("epoch-0001") == run.resume_point("epoch-0001.ckpt") == run.snapshot(1)
    with pytest.raises(UserError, match=r"resume=epoch-0007 is neither .*: it has epoch-0001\."):
        run.resume_point("epoch-0007")
    run.checkpoint.unlink()
    with pytest.raises(UserError, match=r"has lost checkpoints/last\.ckpt: give resume=epoch-0001"):
        run.resume_point("true")
    with pytest.raises(UserError, match=r"no checkpoint to continue from; it holds scores\.jsonl"):
        run_with(tmp_path / "scores", "scores.jsonl").resume_point("true")
    early = run_with(tmp_path / "early", "config.yaml", "metrics.jsonl", "log.txt", "unreadable.txt")
    assert early.resume_point("true") is None  # killed before its first checkpoint
    for late in ("encoder.json", "report.html", "inspect.html"):
        with pytest.raises(UserError, match=f"no checkpoint to continue from; it holds .*{late}"):
            run_with(tmp_path / late, "config.yaml", "metrics.jsonl", late).resume_point("true")


def test_a_run_killed_before_its_configuration_was_written_begins_anew(tmp_path: Path) -> None:
    """A job script's resume=auto would else be refused for ever; resume=true has nothing to continue."""
    run = run_with(tmp_path, "log.txt", ".writing-x")
    assert run.resume_point("auto") is None
    with pytest.raises(UserError, match="no checkpoint to continue from"):
        run.resume_point("true")
    with pytest.raises(UserError, match="no checkpoint to continue from"):
        run_with(tmp_path, "notes.txt").resume_point("auto")


def test_metrics_after_a_step_are_dropped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (3, 6, 9):
        append_line(run.metrics, {"step": step})
    run.truncate_metrics(6)
    assert read_lines(run.metrics) == [{"step": 3}, {"step": 6}]


def test_a_folder_made_for_nothing_is_removed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a" / "b")
    with lock_run(run, "false", "false"):
        assert run.marker.exists()
        with pytest.raises(UserError, match="being written by another process"), lock_run(run, "false", "false"):
            pass
        assert run.marker.exists()
    assert not (tmp_path / "a").exists()


def test_a_folder_that_another_run_shares_is_left(tmp_path: Path) -> None:
    """Two runs that make their parent together: the first one's refusal must not end in an error of rmdir."""
    with lock_run(RunFolder(tmp_path / "runs/a"), "false", "false"):
        (tmp_path / "runs/b").mkdir()
    assert not (tmp_path / "runs/a").exists()
    assert (tmp_path / "runs/b").exists()


@pytest.mark.parametrize(
    ("resume", "overwrite", "says"),
    [
        ("false", "false", "is not empty: give resume=true"),
        ("false", "yes", "overwrite=yes is unknown"),
        ("auto", "true", "contradict each other"),
    ],
)
def test_a_run_is_not_overwritten_unasked(tmp_path: Path, resume: str, overwrite: str, says: str) -> None:
    run = run_with(tmp_path, "config.yaml")
    with pytest.raises(UserError, match=says), lock_run(run, resume, overwrite):
        pass
    assert run.config.exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="holds no run of psm"), lock_run(RunFolder(tmp_path), "false", "true"):
        pass
    with pytest.raises(UserError, match="is a file"), lock_run(RunFolder(tmp_path / "config.yaml"), "false", "false"):
        pass
    with pytest.raises(UserError, match="does not exist"), lock_run(RunFolder(tmp_path / "b"), "true", "false"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_trained_run_is_moved_aside_and_its_folder_stays_locked(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", "config.yaml", "encoder.safetensors", "notes.txt")
    with lock_run(run, "false", "true"), clear_run(run, "true") as moved_to:
        assert moved_to == (tmp_path / "a.replaced-1").resolve()
        assert (moved_to / "notes.txt").exists()
        assert not run.used
        with pytest.raises(UserError, match="another process"), lock_run(run, "auto", "false"):
            pass


def test_delete_removes_a_runs_files_only(tmp_path: Path) -> None:
    run = run_with(tmp_path, "config.yaml", "checkpoints/last.ckpt", "logs/a/b.csv", "notes.txt", ".writing-x")
    with lock_run(run, "false", "delete"), clear_run(run, "delete") as moved_to:
        assert moved_to is None
        assert {path.name for path in tmp_path.iterdir()} == {".psm", "notes.txt"}
