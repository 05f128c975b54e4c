"""A run whose disk is full or whose memory ran out ends in a sentence, and continues to the same weights."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from helpers import largest_file
from psm.reporting.run_page import write_page
from psm.training.module import PretrainModule
from psm.utils.errors import ResourceError
from psm.utils.files import TEMPORARY_PREFIX, read_lines

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


def weights(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    from helpers import SMALL

    return psm.pretrain(tmp_path_factory.mktemp("runs") / "whole", **SMALL).out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds one checkpoint (15 MB) and no second one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)]
    try:
        mounted = os.name == "posix" and subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_during_training(small_disk: Path, whole: Path, small: dict[str, Any]) -> None:
    out = small_disk / "a"
    with pytest.raises(ResourceError, match=r"last.ckpt could not be written because the disk is full .* resume=true"):
        psm.pretrain(out, **small)
    first = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    assert first["global_step"] == 3  # the first epoch's, whole
    assert not list(out.rglob(f"{TEMPORARY_PREFIX}*"))
    assert not (out / "encoder.safetensors").exists()
    subprocess.run(["mount", "-o", "remount,size=60m", str(small_disk)], check=True)
    psm.pretrain(out, resume=True, progress=False)
    assert same(weights(out), weights(whole))
    assert [record["epoch"] for record in read_lines(out / "metrics.jsonl")] == [1, 2]


def test_memory_that_runs_out_during_training(
    tmp_path: Path, whole: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PretrainModule.training_step

    def exhausted(self: PretrainModule, batch: Any, batch_idx: int) -> Any:
        if batch.step == 4:
            raise RuntimeError(ALLOCATOR)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(PretrainModule, "training_step", exhausted)
        with pytest.raises(ResourceError) as caught:
            psm.pretrain(tmp_path / "a", **small)
    for key in ("batch_size", "grad_cache_chunk", "images.size", "images.memory"):
        assert key in str(caught.value)
    assert str(caught.value).endswith(f"`psm pretrain out={tmp_path / 'a'} resume=true` continues from it.")
    psm.pretrain(tmp_path / "a", resume=True, progress=False)
    assert same(weights(tmp_path / "a"), weights(whole))


def test_scores_and_pages_that_do_not_fit(whole: Path) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with largest_file(100), pytest.raises(ResourceError, match=r"scores\.jsonl could not be written"):
        psm.evaluate(whole, linear={"enabled": False}, progress=False)
    for write in (write_page, lambda run: psm.inspect(run, queries=4, progress=False)):
        with largest_file(100), pytest.raises(ResourceError, match=r"(report|inspect)\.html could not be written"):
            write(whole)
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or torch.version.cuda is not None, reason="needs a limit on memory")
def test_the_command_line_without_memory(tmp_path: Path) -> None:
    """3 GB of addresses hold torch and the images, and not what this batch needs."""
    keys = "data=shapes encoder=resnet18 preset=paper batch_size=512 images.limit=512 images.size=64 bank.size=64"
    command = f"ulimit -v 3000000; exec {sys.executable} -m psm pretrain out={tmp_path / 'a'} {keys} monitor.knn=false"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "psm: Memory ran out (" in result.stderr
    assert "Traceback" not in result.stderr
