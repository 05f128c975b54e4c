"""`psm worth` from a configuration: plan the cells, compute those that are missing, analyze, write the results."""

import csv
import io
import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.schema import ImagesConfig
from psm.config.stored import run_folder_of, training_config
from psm.config.worth import WorthConfig
from psm.data import ImageDataset, load_dataset
from psm.data.from_torch import from_torch
from psm.data.location import data_name
from psm.data.stats import channel_statistics
from psm.embedding.encoder import LoadedEncoder, open_encoder
from psm.evaluation.few_labels import parse_amounts
from psm.finetuning.worth.analysis import Worth, analyze
from psm.finetuning.worth.cells import Cell, CellResult, CellStore, make_cells
from psm.finetuning.worth.folder import WorthFolder, begin, held, move_aside
from psm.finetuning.worth.progress import WorthProgress
from psm.finetuning.worth.train import CellMaker, FrozenFeatures, Labeled, cost
from psm.models.pretrained import CUSTOM
from psm.utils.errors import UserError
from psm.utils.files import write_text_atomically
from psm.utils.run_folder import RunFolder


@dataclass(frozen=True)
class WorthResult:
    """A finished comparison."""

    folder: Path
    worth: Worth
    cells: list[CellResult]
    config: WorthConfig
    about: dict[str, Any]  # encoder and data, for the page


def run_worth(
    *overrides: Mapping[str, Any], data: ImageDataset | Dataset | None = None, encoder: nn.Module | None = None
) -> WorthResult:
    """Compare by the merged overrides; a given ``data`` replaces the one that its key names."""
    first = settings.build(WorthConfig, *overrides)
    amounts = parse_amounts(first.labels, "labels")
    loaded = open_encoder(first.checkpoint, encoder, first.accelerator, first.precision)
    if loaded.info.encoder == CUSTOM and "scratch" in first.arms:
        raise UserError(
            f"checkpoint={loaded.file} holds a network of its user's own, of which psm knows no untrained one: give "
            "arms=[knn,logistic,finetune]."
        )
    training = training_config(loaded.file)
    images = replace(training.images if training else ImagesConfig(), size=loaded.info.size)
    if training is not None and first.data not in (None, training.data):
        images = replace(images, limit=None)
    config = settings.build(WorthConfig, *overrides, base=WorthConfig(images=images))
    labeled = _load(data, config, loaded)
    folder = WorthFolder(_folder(config, loaded.file))
    if config.overwrite:
        move_aside(folder)
    with held(folder):
        begin(folder, config, {"encoder": loaded.checksum, "data": _fingerprint(labeled)})
        cells = make_cells(labeled.train_labels, amounts, config.arms, config.draws, config.seed)
        maker = CellMaker(
            config, loaded, labeled, FrozenFeatures(loaded, labeled), {str(x): x for x in amounts}, folder.runs
        )
        results = _compute(cells, maker, CellStore(folder.cells))
        shutil.rmtree(folder.runs, ignore_errors=True)
        worth = analyze(results, config.seed)
        _write_results(folder, results, worth)
    return WorthResult(folder.folder, worth, results, config, _about(loaded, labeled))


def _load(data: ImageDataset | Dataset | None, config: WorthConfig, encoder: LoadedEncoder) -> Labeled:
    name = config.data or encoder.info.data
    if isinstance(data, Dataset):
        data = from_torch(data, config.images, config.progress)
    loaded = data or load_dataset(name, config.images, config.progress)
    if loaded.test is None or loaded.train.labels is None or loaded.test.labels is None:
        raise UserError(f"data={show(name)} has no labels to learn from: give a labeled set, for example data=cifar10.")
    if len(loaded.train.labels.unique()) < 2:
        raise UserError(f"data={show(name)} has images of one class only: a classifier needs at least 2.")
    return Labeled(loaded.name, loaded.train, loaded.test, loaded.classes)


def _folder(config: WorthConfig, file: Path) -> Path:
    return Path(config.out).expanduser() if config.out else RunFolder(run_folder_of(file)).worth


def _fingerprint(data: Labeled) -> str:
    """What tells whether results are of the same images and labels."""
    digest = 0
    for images, labels in ((data.train, data.train_labels), (data.test, data.test_labels)):
        digest = zlib.crc32(labels.numpy().tobytes(), digest)
        digest = zlib.crc32(json.dumps([round(x, 4) for x in channel_statistics(images)[0]]).encode(), digest)
    return f"{len(data.train)}-{len(data.test)}-{digest:08x}"


def _compute(cells: Sequence[Cell], maker: CellMaker, store: CellStore) -> list[CellResult]:
    """The results of all cells; those on disk are read, the others computed and written one by one."""
    found = {cell: store.read(cell) for cell in cells}
    missing = [cell for cell in cells if found[cell] is None]
    test_images = len(maker.data.test)
    frozen = maker.features.passes if any(cell.arm in ("knn", "logistic") for cell in missing) else 0
    passes = frozen + sum(cost(cell, maker.config, test_images) for cell in missing)
    progress = WorthProgress(len(cells), len(cells) - len(missing), passes, maker.config.progress)
    if missing:
        progress.plan(cells, _device(maker.encoder))
    with progress.running():
        for cell in missing:
            progress.start(cell)
            result = maker(cell, progress.advance)
            store.write(result)
            found[cell] = result
            progress.finish(result)
    return [result for result in found.values() if result is not None]


def _device(encoder: LoadedEncoder) -> str:
    device = next(encoder.module.parameters()).device.type
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads > 1)})" if device == "cpu" else device


def _write_results(folder: WorthFolder, results: Sequence[CellResult], worth: Worth) -> None:
    """Write results.csv, a row for each cell, and summary.json."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["arm", "amount", "labels", "draw", "top1", "seconds", "settings"])
    for result in results:
        cell = result.cell
        row = [cell.arm, cell.amount, cell.labels, cell.draw + 1, round(result.top1, 4), round(result.seconds, 2)]
        writer.writerow([*row, json.dumps(result.settings)])
    write_text_atomically(folder.results, text.getvalue())
    summary = {**asdict(worth), "gains": [asdict(gain) | {"saved": gain.saved} for gain in worth.gains]}
    write_text_atomically(folder.summary, json.dumps(summary, indent=2) + "\n")


def _about(encoder: LoadedEncoder, data: Labeled) -> dict[str, Any]:
    info = encoder.info
    return {
        "checkpoint": str(encoder.file),
        "encoder": info.encoder,
        "method": info.method,
        "epoch": info.epoch,
        "pretrained_on": data_name(info.data),
        "data": data.name,
        "train_images": len(data.train),
        "test_images": len(data.test),
        "classes": len(data.classes),
        "size": info.size,
    }


def worth(
    checkpoint: str | Path,
    data: str | Path | ImageDataset | Dataset | None = None,
    out: str | Path | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> WorthResult:
    """Was pretraining worth it? Compare classifiers from scratch, on frozen features and fine-tuned, by labels.

    Examples:
        >>> psm.worth("runs/a", "photos", labels=["1%", "10%", "100%"]).worth.sentence  # doctest: +SKIP

    Args:
        checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
        data: name or folder of a labeled data set, a loaded one, or a map-style `torch.utils.data.Dataset` of
            (image, label) pairs; by default the data of the run.
        out: folder for the results; by default ``worth`` in the run folder.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: those of `psm worth`, nested ones as dictionaries.
    """
    given = {**keys, "checkpoint": str(checkpoint)}
    if out is not None:
        given["out"] = str(out)
    if isinstance(data, (str, Path)):
        given["data"] = str(data)
    return run_worth(given, data=None if isinstance(data, (str, Path)) else data, encoder=encoder)
