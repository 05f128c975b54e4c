"""A full disk and memory that ran out are one sentence, however they are reported; other errors stay what they are."""

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import largest_file
from psm.utils.errors import ResourceError, UserError
from psm.utils.files import append_line, read_lines, write_atomically
from psm.utils.resources import explain, resources_explained, write_error

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB"


def numpy_error() -> MemoryError:
    try:
        np.empty((1 << 60,), dtype=np.uint8)
    except MemoryError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), r"^Memory ran out: give a smaller batch_size"),
        (numpy_error(), r"more were asked for\)"),
        (RuntimeError(CPU_ALLOCATOR), r"4.3 GB more were asked for"),
        (torch.OutOfMemoryError(CUDA), r"2.1 GB more were asked for"),
        (RuntimeError("CUDA error: out of memory"), "Memory ran out"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "Memory ran out"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), "Memory ran out"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Memory ran out"),
        (MemoryError("Caught MemoryError in DataLoader worker process 0."), "Memory ran out"),
        (RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. "), "Memory ran out"),
        (RuntimeError("DataLoader worker (pid(s) 7) is killed by signal: Bus error."), "Memory ran out"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b.png"), r"^a/b.png could not be written .* disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), r"Disk quota exceeded"),
        (OSError("Caught OSError in DataLoader worker process 0. [Errno 28] No space left on device"), "disk is full"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_each_kind_is_one_sentence(error: Exception, says: str) -> None:
    with pytest.raises(ResourceError, match=says), resources_explained():
        raise error


def test_the_cause_behind_another_error_counts_and_other_errors_do_not() -> None:
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    hidden.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert "disk is full" in str(explain(hidden))
    assert explain(RuntimeError("shape '[3]' is invalid")) is None
    assert explain(OSError(errno.EACCES, "Permission denied")) is None
    lost = explain(OSError(errno.EACCES, "Permission denied", "runs/a/checkpoints"))
    assert "runs/a/checkpoints can no longer be written or read (Permission denied)" in str(lost)
    assert explain(FileExistsError(errno.EEXIST, "File exists", "runs/a")) is None
    with pytest.raises(ZeroDivisionError), resources_explained():
        raise ZeroDivisionError
    with pytest.raises(UserError, match="epochs"), resources_explained():
        raise UserError("epochs=0 is too small")


def test_the_sentence_ends_with_how_to_continue() -> None:
    with pytest.raises(ResourceError, match=r"fewer queries\. The last checkpoint is intact\.$"):  # noqa: SIM117
        with resources_explained("give fewer queries", lambda: "The last checkpoint is intact."):
            raise MemoryError


def test_a_full_disk_is_no_mistake_and_a_forbidden_folder_is() -> None:
    assert isinstance(write_error("out=a", OSError(errno.ENOSPC, "No space left on device")), ResourceError)
    assert isinstance(write_error("out=a", OSError(errno.EACCES, "Permission denied")), UserError)


def test_a_checkpoint_that_does_not_fit_leaves_the_last_good_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_atomically(path, lambda file: torch.save({"step": 1}, file))
    too_large = {"step": 2, "weights": torch.zeros(100_000)}
    with largest_file(50_000), pytest.raises(ResourceError, match=r"last\.ckpt could not be written .* disk is full"):
        write_atomically(path, lambda file: torch.save(too_large, file))
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"epoch": 1})
    whole = path.read_bytes()
    with largest_file(1_000), pytest.raises(ResourceError, match=r"metrics\.jsonl could not be written"):
        append_line(path, {"epoch": 2, "text": "x" * 2_000})
    assert path.read_bytes() == whole
    append_line(path, {"epoch": 2})
    assert read_lines(path) == [{"epoch": 1}, {"epoch": 2}]
    with largest_file(10), pytest.raises(ResourceError):
        append_line(tmp_path / "scores.jsonl", {"top1": 50.0})
    assert list(tmp_path.iterdir()) == [path]
