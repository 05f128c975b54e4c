"""Evaluation from a configuration: freeze an encoder, extract features, store every score with its protocol."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.schema import EvaluateConfig, ImagesConfig, PretrainConfig, ViewsConfig
from psm.config.stored import load_run_config
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.from_torch import from_torch
from psm.evaluation.features import extract
from psm.evaluation.scores import Accuracy, knn, linear
from psm.methods.plugins import load_plugins
from psm.models.factory import create_encoder
from psm.models.pretrained import EncoderInfo, find_encoder, load_encoder
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError
from psm.utils.files import append_line
from psm.utils.progress import StageBar, stages
from psm.utils.run_folder import RunFolder
from psm.utils.seeding import derived_seed, generator
from psm.views.transform import Views

log = logging.getLogger("psm")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Score:
    """One number that was measured, with all that it takes to measure it again."""

    of: str  # the method of the encoder, "untrained encoder" or "raw pixels"
    score: str  # knn or linear
    top1: float
    top5: float
    protocol: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The scores, the run folder they belong to (None for a lone file), and its data if those were scored on."""

    scores: list[Score]
    run: Path | None
    training_data: ImageDataset | None


def evaluate(
    checkpoint: str | Path,
    data: str | Path | ImageDataset | Dataset | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> list[Score]:
    """Score a frozen encoder; the keys are those of `psm evaluate`, nested ones as dictionaries.

    ``encoder`` receives the weights where the run was given a network of the user's own. ``data`` may also be a
    map-style `torch.utils.data.Dataset` of (image, label) pairs.
    """
    given = {**keys, "checkpoint": str(checkpoint)}
    if isinstance(data, Dataset):
        given["data"] = type(data).__name__
    elif isinstance(data, (str, Path)):
        given["data"] = str(data)
    return run_evaluation(given, data=None if isinstance(data, (str, Path)) else data, encoder=encoder).scores


def run_evaluation(
    *overrides: Mapping[str, Any], data: ImageDataset | Dataset | None = None, encoder: nn.Module | None = None
) -> Evaluation:
    """Evaluate as the merged overrides say; ``data`` stands in for what its key names."""
    asked = settings.build(EvaluateConfig, *overrides)
    load_plugins(asked.plugins)
    if not asked.checkpoint:
        raise UserError("checkpoint= is missing: give a run folder, for example checkpoint=runs/a.")
    check_settings(asked)
    device = _device(asked.accelerator)
    file = find_encoder(asked.checkpoint)
    out = _writable(Path(asked.out).expanduser() if asked.out else _home(file))
    trained = load_encoder(file, encoder)
    info: EncoderInfo = trained.info
    before = _trained_with(file)
    images = replace(before.images if before else ImagesConfig(), size=info.size)
    config = settings.build(EvaluateConfig, *overrides, base=EvaluateConfig(images=images))
    name = config.data or info.data
    as_trained = data is None and before is not None and name == before.data and config.images == images
    if isinstance(data, Dataset):
        data = from_torch(data, config.images, config.progress)
    data = data or load_dataset(name, config.images, config.progress)
    if data.test is None:
        raise UserError(f"data={name} has no labels to score with: give a labeled set, for example data=cifar10.")
    views = Views(ViewsConfig(size=info.size), data.size, info.mean, info.std)
    protocol = {
        "data": name,
        "images": asdict(config.images),
        "train_images": len(data.train),
        "test_images": len(data.test),
        "classes": len(data.classes),
        "size": info.size,
        "encoder": info.encoder,
        "stem": info.stem,
        "precision": config.precision,
        "psm": version("psm"),
        "torch": torch.__version__,
    }
    origin = {
        "checkpoint": str(file),
        "which": "last" if file.name in ("encoder.safetensors", "last.ckpt") else file.stem,
        "epoch": info.epoch,
        "pretraining_seed": before.seed if before else None,
        "method": info.method,
    }
    subjects = [(info.method, trained.to(device), origin)]
    if config.baselines:
        subjects = [*_baselines(info, device, config.seed), *subjects]
    scores = []
    with stages(config.progress) as bars:
        for of, module, about in subjects:
            for kind, accuracy, used in _scores(of, module, data, views, config, bars):
                facts = {**protocol, **about, **used, "seed": config.seed}
                score = Score(of, kind, accuracy.top1, accuracy.top5, facts)
                when = datetime.now(UTC).isoformat(timespec="seconds")
                append_line(out / "scores.jsonl", asdict(score) | {"at": when})
                scores.append(score)
    home = RunFolder(_home(file))
    return Evaluation(scores, home.folder if home.metrics.exists() else None, data if as_trained else None)


def _writable(folder: Path) -> Path:
    """The folder; refused before anything is computed if scores cannot be stored there. Nothing is left behind."""
    scores = folder / "scores.jsonl"
    made = [path for path in (scores, folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scores.open("a"):
            pass
    except OSError as error:
        raise UserError(f"out={folder} cannot be written: {error.strerror}.") from None
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
    return folder


def _device(accelerator: str) -> torch.device:
    try:
        return lightning.Fabric(accelerator=accelerator, devices=1).device
    except (RuntimeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"accelerator={accelerator} cannot be used: {' '.join(str(error).split())}") from None


def _scores(
    of: str, module: nn.Module, data: ImageDataset, views: Views, config: EvaluateConfig, bars: StageBar
) -> Iterator[tuple[str, Accuracy, dict[str, Any]]]:
    classes = len(data.classes)

    def features(images: ImageStore, prepare: Any = views) -> Tensor:
        with bars(f"{of}: features", len(images)) as advance:
            return extract(
                module, images, prepare, batch_size=config.batch_size, precision=config.precision, advance=advance
            )

    train, test = features(data.train), features(data.test)
    labels = data.train.labels, data.test.labels
    if config.knn.enabled:
        used = {"k": min(config.knn.k, len(train)), "temperature": config.knn.temperature}
        yield "knn", knn(train, labels[0], test, labels[1], classes, config.knn), used
    if config.linear.enabled:
        crops = Views(
            ViewsConfig(preset="small", size=views.size, color_jitter=0.0, grayscale=0.0),
            data.size,
            views.mean,
            views.std,
        )

        def augmented(epoch: int) -> Tensor:
            draws = generator(config.seed, "linear views", epoch)
            return features(
                data.train, lambda x: crops.apply(x, crops.sample_params(len(x), draws, views=1, device=x.device))[0]
            )

        with bars(f"{of}: linear", config.linear.epochs) as advance:
            accuracy = linear(
                augmented if config.linear.augment else lambda epoch: train,
                labels[0],
                test,
                labels[1],
                classes,
                config.linear,
                config.seed,
                advance=lambda epoch: advance(1),
            )
        yield "linear", accuracy, {k: v for k, v in asdict(config.linear).items() if k != "enabled"}


def _baselines(info: EncoderInfo, device: torch.device, seed: int) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    untrained_facts = {"checkpoint": None, "which": None, "epoch": 0, "pretraining_seed": None, "method": None}
    no_encoder = {"encoder": None, "stem": None}
    rows: list[tuple[str, nn.Module, dict[str, Any]]] = [("raw pixels", nn.Flatten(), untrained_facts | no_encoder)]
    if info.encoder == "custom":
        log.warning("an untrained encoder cannot be made for a network of the user's own: that row is left out.")
        return rows
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        untrained = create_encoder(info.encoder, info.stem, info.size)
    return [*rows, ("untrained encoder", untrained.to(device), untrained_facts)]


def _home(file: Path) -> Path:
    """The run folder of a file within one, else the file's own folder."""
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent


def _trained_with(file: Path) -> PretrainConfig | None:
    """The configuration that the encoder was trained with, where it is known."""
    if file.suffix == ".ckpt":
        return load_run_config(read_checkpoint(file))
    run = RunFolder(_home(file))
    is_run = run.marker.exists() and run.config.exists()
    return load_run_config(run) if is_run else None


def check_settings(config: EvaluateConfig) -> None:
    """Refuse, in a sentence, what makes no sense."""
    at_least = (
        ("knn.k", config.knn.k, 1),
        ("linear.epochs", config.linear.epochs, 1),
        ("linear.batch_size", config.linear.batch_size, 1),
        ("batch_size", config.batch_size, 1),
        ("linear.lr", config.linear.lr, 0),
        ("linear.momentum", config.linear.momentum, 0),
        ("linear.weight_decay", config.linear.weight_decay, 0),
    )
    for name, value, least in at_least:
        if not value >= least:
            raise UserError(f"{name}={value} is too small: give {least} or more.")
    if config.precision not in PRECISIONS:
        raise UserError(f"precision={config.precision} is unknown: choose one of {', '.join(PRECISIONS)}.")
    if not config.knn.temperature > 0:
        raise UserError(f"knn.temperature={config.knn.temperature} must be above 0; 0.1 is usual.")
    if not (config.knn.enabled or config.linear.enabled):
        raise UserError("knn.enabled=false and linear.enabled=false leave nothing to score: keep one of them.")
