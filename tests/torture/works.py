"""Commands that are killed, starved and robbed of their folders, with what must be the same afterwards.

A work is prepared in a folder; `first` starts it there, `again` continues it. `outcome` is what an uninterrupted run
would have left, without times and dates, and `partial` names files that have their final name and are not whole.
"""

import csv
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers import SMALL, save_images
from psm.embedding.formats import read_table
from psm.experiments.results import read_csv
from psm.models.pretrained import read_encoder
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.checksums import Damaged, unseal
from psm.utils.errors import UserError
from torture.case import Shared
from torture.processes import Running

TIMES = {"seconds", "images_per_second", "at", "date", "commit", "crc32"}
PASSING = (".part", ".lock")  # ends of names that are not final
STARTS = (".writing-", ".psm")


def small_arguments(**changes: Any) -> list[str]:
    """A run that takes about a second, as arguments of `psm pretrain`."""
    keys = {**SMALL, **changes}
    keys.pop("epochs")
    return [
        f"{name}={str(value).lower()}" if not isinstance(value, dict) else ""
        for name, value in keys.items()
        if not isinstance(value, dict)
    ] + [f"{name}.{inner}={x}" for name, value in keys.items() if isinstance(value, dict) for inner, x in value.items()]


@dataclass(frozen=True)
class Work:
    """A command of psm that takes a few seconds."""

    name: str
    prepare: Callable[[Path, Shared], None]
    first: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    outcome: Callable[[Path], Mapping[str, Any]]
    writes: str  # the folder or file below its own that it writes
    reads: str = ""  # the data that it reads


@dataclass(frozen=True)
class Reference:
    """The uninterrupted work."""

    outcome: Mapping[str, Any]
    seconds: float
    cpu: float
    writes: int
    bytes: int  # that its folder holds at the end


def reference(work: Work, shared: Shared) -> Reference:
    """The work without any harm, done once."""

    def make(folder: Path) -> Reference:
        work.prepare(folder, shared)
        before = _bytes(folder)
        running = Running(work.first(folder), folder / "process")
        ended = running.end()
        if ended.code:
            raise RuntimeError(f"{work.name} fails without any harm, code {ended.code}: {ended.stderr[-800:]}")
        size = _bytes(folder) - before
        return Reference(work.outcome(folder), ended.seconds, ended.cpu, running.writes, size)

    return shared.get(f"reference-{work.name}", make)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def photos(shared: Shared) -> Path:
    """A folder of PNG files in two classes."""
    names = [f"{kind}/{number:03d}.png" for kind in ("cats", "dogs") for number in range(60)]
    return shared.get("photos", lambda folder: save_images(folder / "photos", names, side=20))


def trained(shared: Shared) -> Path:
    """A finished run on the photos."""

    def make(folder: Path) -> Path:
        out = folder / "run"
        keys = [*small_arguments(data=photos(shared)), "epochs=1", f"out={out}"]
        ended = Running(["pretrain", *keys], folder / "process").end()
        if ended.code:
            raise RuntimeError(ended.stderr[-800:])
        return out

    return shared.get("trained", make)


def digest(value: Any) -> str:
    """A hash of nested containers, tensors and plain values."""
    hashed = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Mapping):
            for key in sorted(item, key=str):
                hashed.update(repr(key).encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            hashed.update(f"[{len(item)}".encode())
            for inner in item:
                add(inner)
        elif isinstance(item, torch.Tensor):
            add(item.detach().cpu().numpy())
        elif isinstance(item, np.ndarray):
            hashed.update(f"{item.dtype}{item.shape}".encode() + np.ascontiguousarray(item).tobytes())
        else:
            hashed.update(repr(item).encode())

    add(value)
    return hashed.hexdigest()[:20]


def timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what differs from one repetition to the next."""
    return {name: value for name, value in record.items() if name not in TIMES}


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; ValueError if one is not whole."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        raise ValueError("its last line is cut off")
    return [unseal(json.loads(line)) for line in text.splitlines()]


def run_outcome(run: Path) -> dict[str, Any]:
    """Everything that a training run learned and measured."""
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    info, state = read_encoder(run / "encoder.safetensors")
    return {
        "networks, bank": digest(checkpoint["state_dict"]),
        "optimizer": digest([checkpoint["optimizer_states"], checkpoint["lr_schedulers"]]),
        "step": checkpoint["global_step"],
        "encoder": digest([state, info.epoch, info.mean, info.std]),
        "metrics": digest([timeless(record) for record in lines(run / "metrics.jsonl")]),
        "leftovers": sorted(path.name for path in run.rglob(".writing-*")),
        "files": sorted(path.name for path in run.iterdir()),
    }


def cache_outcome(folder: Path) -> dict[str, Any]:
    entries = sorted(
        (file.name, digest(np.fromfile(file, np.uint8)))
        for file in (folder / "cache").rglob("*")
        if file.name in ("pixels.bin", "checksums.bin", "manifest.json")
    )
    return run_outcome(folder / "out") | {"cache": entries, "parts": len(list((folder / "cache").glob("*.part")))}


def scores_outcome(folder: Path) -> dict[str, Any]:
    """The last scores: those that a killed evaluation had written stand before them."""
    last = [timeless(record) for record in lines(folder / "out" / "scores.jsonl")][-2:]
    for record in last:
        record["protocol"] = {k: v for k, v in record["protocol"].items() if k not in ("checkpoint", "data", "images")}
    return {"scores": last}


def embedding_outcome(folder: Path) -> dict[str, Any]:
    table = read_table(folder / "out" / "features.safetensors")
    return {
        "rows": digest(table.embeddings),
        "paths": list(table.paths),
        "labels": digest(table.labels),
        "files": sorted(path.name for path in (folder / "out").iterdir()),
    }


def study_outcome(folder: Path) -> dict[str, Any]:
    study = folder / "out"
    tables = {}
    for name in ("plan", "results", "curves", "failures"):
        rows = [timeless(row) for row in read_csv(study / f"{name}.csv")]
        tables[name] = digest(sorted(json.dumps(row, sort_keys=True) for row in rows))
    pages = sorted(path.name for path in (study / "report").iterdir())
    return tables | {"pages": pages, "leftovers": sorted(path.name for path in study.rglob(".writing-*"))}


def partial(folder: Path) -> list[str]:
    """Files below a folder that have their final name and are not whole."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if not path.is_file() or any(part.endswith(PASSING) or part.startswith(STARTS) for part in parts):
            continue
        if "process" in parts or path.name in ("log.txt", "lock") or parts[0] in ("locks", "logs"):
            continue
        try:
            _check_whole(path)
        except (UserError, ValueError, Damaged, OSError, csv.Error, KeyError) as error:
            found.append(f"{path.relative_to(folder)} is not whole: {type(error).__name__} {error}"[:300])
    return found


def _check_whole(path: Path) -> None:
    """Raise for a file that is not what psm writes under such a name."""
    if path.suffix == ".ckpt":
        read_checkpoint(path)
    elif path.suffix == ".safetensors":
        read_table(path) if path.name.startswith("features") else read_encoder(path)
    elif path.suffix == ".jsonl":
        lines(path)
    elif path.name == "manifest.json":
        _check_entry(path.parent)
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".csv":
        read_csv(path)
    elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
        raise ValueError("it has no end")
    elif path.suffix == ".yaml" and "# crc32 of the lines above" not in path.read_text():
        raise ValueError("it has no checksum")
    elif path.name in ("pixels.bin", "checksums.bin") and not (path.parent / "manifest.json").exists():
        raise ValueError("its manifest is missing")


def _check_entry(entry: Path) -> None:
    """An entry of the cache: every image as its checksum says."""
    count = json.loads((entry / "manifest.json").read_text())["count"]
    checksums = np.fromfile(entry / "checksums.bin", "<u4")
    pixels = np.fromfile(entry / "pixels.bin", np.uint8).reshape(count, -1)
    if [zlib.crc32(image.data) for image in pixels] != checksums.tolist():
        raise ValueError("its images differ from their checksums")


def _nothing(folder: Path, shared: Shared) -> None:
    (folder / "out").mkdir(parents=True, exist_ok=True)


def _own_photos(folder: Path, shared: Shared) -> None:
    _nothing(folder, shared)
    shutil.copytree(photos(shared), folder / "photos")


def _own_run(folder: Path, shared: Shared) -> None:
    _own_photos(folder, shared)
    shutil.copytree(trained(shared), folder / "run", ignore=shutil.ignore_patterns("checkpoints"))


def _pretrain(folder: Path) -> list[str]:
    keys = ["epochs=3", "save.every_steps=2", "save.snapshots=2", "resume=auto"]
    return ["pretrain", *small_arguments(), *keys, f"out={folder / 'out'}"]


def _pretrain_cached(folder: Path) -> list[str]:
    keys = [
        "epochs=1",
        "images.memory=0.00001",
        f"images.cache={folder / 'cache'}",
        "resume=auto",
        f"out={folder / 'out'}",
    ]
    return ["pretrain", *small_arguments(data=folder / "photos"), *keys]


def _evaluate(folder: Path) -> list[str]:
    keys = ["linear.epochs=4", "progress=false", f"data={folder / 'photos'}", f"out={folder / 'out'}"]
    return ["evaluate", str(folder / "run"), *keys]


def _embed(folder: Path) -> list[str]:
    keys = ["batch_size=4", "progress=false", f"data={folder / 'photos'}", f"out={folder / 'out/features.safetensors'}"]
    return ["embed", str(folder / "run"), *keys]


def _suite(folder: Path) -> list[str]:
    keys = ["preset=smoke", "methods=[simclr]", "jobs=1", "monitor.knn=false", "progress=false"]
    return ["experiment", "run", "table1", *keys, f"out={folder / 'out'}"]


WORKS = {
    work.name: work
    for work in (
        Work("pretrain", _nothing, _pretrain, _pretrain, lambda folder: run_outcome(folder / "out"), "out"),
        Work("cache", _own_photos, _pretrain_cached, _pretrain_cached, cache_outcome, "out", "photos"),
        Work("evaluate", _own_run, _evaluate, _evaluate, scores_outcome, "out", "photos"),
        Work("embed", _own_run, _embed, _embed, embedding_outcome, "out", "photos"),
        Work("suite", _nothing, _suite, _suite, study_outcome, "out"),
    )
}
