"""Evaluation from a configuration: freeze an encoder, extract features, store every score with its protocol."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from psm.config.keys import show
from psm.config.schema import EvaluateConfig, ImagesConfig, LinearConfig, ResolvedPretrainConfig, ViewsConfig
from psm.config.stored import load_run_config
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.from_torch import from_torch
from psm.data.holdout import hold_out
from psm.data.same_images import MEAN_TOLERANCE
from psm.data.stats import channel_statistics
from psm.evaluation.accuracy import Accuracy
from psm.evaluation.features import check_finite_features, check_finite_weights, extract
from psm.evaluation.knn import knn_accuracy
from psm.evaluation.linear import linear_accuracy
from psm.methods.plugins import load_plugins
from psm.models.factory import create_encoder
from psm.models.pretrained import EncoderInfo, find_encoder, load_encoder
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError
from psm.utils.files import append_line
from psm.utils.progress import StageBar, stages
from psm.utils.resources import resources_explained, write_error
from psm.utils.run_folder import RunFolder
from psm.utils.seeding import derived_seed, generator
from psm.views.transform import Views

log = logging.getLogger("psm")
# One rate does not suit raw pixels as it suits an encoder's features: baselines get the best of these.
BASELINE_LR_GRID = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
MEMORY_ADVICE = (
    "give a smaller batch_size or linear.batch_size, a smaller images.limit, or, to keep the images on disk, a smaller "
    "images.memory"
)


@dataclass(frozen=True)
class Score:
    """One accuracy with the protocol that it was measured by."""

    of: str  # the method of the encoder, "untrained encoder" or "raw pixels"
    score: str  # knn or linear
    top1: float
    top5: float
    protocol: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Scores of a checkpoint, its run folder (None for a lone file), and the training data if it was scored on that."""

    scores: list[Score]
    run: Path | None
    training_data: ImageDataset | None


@dataclass(frozen=True)
class Subject:
    """Something to score: an encoder or a baseline."""

    name: str
    module: nn.Module
    protocol: dict[str, Any]  # what the protocol says of it
    linear: LinearConfig


@dataclass(frozen=True)
class LabeledData:
    """Training and test images with their labels."""

    train: ImageStore
    test: ImageStore
    train_labels: Tensor
    test_labels: Tensor
    classes: int
    size: int


def evaluate(
    checkpoint: str | Path,
    data: str | Path | Sequence[str | Path] | ImageDataset | Dataset | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> list[Score]:
    """Score a frozen encoder by kNN and the linear protocol.

    Args:
        checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
        data: name or folder of a data set, a loaded one, or a map-style `torch.utils.data.Dataset` of (image, label)
            pairs; by default the data of the run.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: those of `psm evaluate`, nested ones as dictionaries.

    Returns:
        One score per subject (the encoder, and the baselines if asked for) and kind of score.
    """
    given = {**keys, "checkpoint": str(checkpoint)}
    if isinstance(data, Dataset):
        given["data"] = type(data).__name__
    elif isinstance(data, (str, Path)):
        given["data"] = str(data)
    elif isinstance(data, (list, tuple)):
        given["data"] = [str(source) for source in data]
    loaded = data if isinstance(data, (ImageDataset, Dataset)) else None
    return run_evaluation(given, data=loaded, encoder=encoder).scores


@resources_explained(MEMORY_ADVICE)
def run_evaluation(
    *overrides: Mapping[str, Any], data: ImageDataset | Dataset | None = None, encoder: nn.Module | None = None
) -> Evaluation:
    """Evaluate by the merged overrides; a given ``data`` replaces the one that its key names."""
    first = settings.build(EvaluateConfig, *overrides)
    load_plugins(first.plugins)
    if not first.checkpoint:
        raise UserError("checkpoint= is missing: give a run folder, for example checkpoint=runs/a.")
    check_settings(first)
    device = _device(first.accelerator)
    file = find_encoder(first.checkpoint)
    out = _check_writable(Path(first.out).expanduser() if first.out else _run_folder(file))
    trained = load_encoder(file, encoder)
    check_finite_weights(trained, f"checkpoint={file}")
    info: EncoderInfo = trained.info
    training = _training_config(file)
    images = replace(training.images if training else ImagesConfig(), size=info.size)
    config = settings.build(EvaluateConfig, *overrides, base=EvaluateConfig(images=images))
    name = config.data or (training.data if training else info.data)
    given = data is not None
    if isinstance(data, Dataset):
        data = from_torch(data, config.images, config.progress)
    elif data is not None:
        data = hold_out(data, config.images.holdout)
    data = data or load_dataset(name, config.images, config.progress)
    labeled = _labeled(data, show(name))
    views = Views(ViewsConfig(size=info.size), data.size, info.mean, info.std)
    subject = Subject(info.method, trained.to(device), _origin(file, info, training), config.linear)
    subjects = [*(_baselines(info, device, config) if config.baselines else ()), subject]
    protocol = _protocol(name, config, labeled, info)
    scores = []
    with stages(config.progress) as bars:
        for subject in subjects:
            for kind, accuracy, used in _scores(subject, labeled, views, config, bars):
                whole = {**protocol, **subject.protocol, **used, "seed": config.seed}
                score = Score(subject.name, kind, accuracy.top1, accuracy.top5, whole)
                when = datetime.now(UTC).isoformat(timespec="seconds")
                append_line(out / "scores.jsonl", asdict(score) | {"at": when})
                scores.append(score)
    run = RunFolder(_run_folder(file))
    as_trained = (
        not given
        and config.images == images
        and training is not None
        and (name == training.data or _same_means(data, info))
    )
    return Evaluation(scores, run.folder if run.metrics.exists() else None, data if as_trained else None)


def _same_means(data: ImageDataset, info: EncoderInfo) -> bool:
    """True if the training images are, by their channel means, those of the run: they may lie elsewhere by now."""
    mean, _ = channel_statistics(data.train)
    return max(abs(a - b) for a, b in zip(mean, info.mean, strict=True)) <= MEAN_TOLERANCE


def _labeled(data: ImageDataset, name: str) -> LabeledData:
    if data.test is None or data.train.labels is None or data.test.labels is None:
        raise UserError(f"data={name} has no labels to score with: give a labeled set, for example data=cifar10.")
    return LabeledData(data.train, data.test, data.train.labels, data.test.labels, len(data.classes), data.size)


def _protocol(name: str | list[str], config: EvaluateConfig, data: LabeledData, info: EncoderInfo) -> dict[str, Any]:
    """What all scores of an evaluation have in common."""
    return {
        "data": name,
        "images": asdict(config.images),
        "train_images": len(data.train),
        "test_images": len(data.test),
        "classes": data.classes,
        "size": info.size,
        "encoder": info.encoder,
        "stem": info.stem,
        "precision": config.precision,
        "psm": version("psm"),
        "torch": torch.__version__,
    }


def _origin(file: Path, info: EncoderInfo, training: ResolvedPretrainConfig | None) -> dict[str, Any]:
    """Which weights of which run are scored."""
    return {
        "checkpoint": str(file),
        "which": "last" if file.name in ("encoder.safetensors", "last.ckpt") else file.stem,
        "epoch": info.epoch,
        "pretraining_seed": training.seed if training else None,
        "method": info.method,
    }


def _check_writable(folder: Path) -> Path:
    """The folder; refused before anything is computed if scores cannot be written there. Leaves no files behind."""
    scores = folder / "scores.jsonl"
    made = [path for path in (scores, folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scores.open("a"):
            pass
    except OSError as error:
        raise write_error(f"out={folder}", error) from None
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
    subject: Subject, data: LabeledData, views: Views, config: EvaluateConfig, bars: StageBar
) -> Iterator[tuple[str, Accuracy, dict[str, Any]]]:
    """The scores of a subject: kind, accuracy, and the settings that the kind adds to the protocol."""

    def features(images: ImageStore, prepare: Any = views) -> Tensor:
        with bars(f"{subject.name}: features", len(images)) as advance:
            found = extract(
                subject.module,
                images,
                prepare,
                batch_size=config.batch_size,
                precision=config.precision,
                advance=advance,
            )
        return check_finite_features(found, subject.name)

    train, test = features(data.train), features(data.test)
    if config.knn.enabled:
        used = {"k": min(config.knn.k, len(train)), "temperature": config.knn.temperature}
        accuracy = knn_accuracy(train, data.train_labels, test, data.test_labels, data.classes, config.knn)
        yield "knn", accuracy, used
    if config.linear.enabled:
        augmented = _augmented(features, data, views, config.seed)
        linear, trainings = subject.linear, 2 if len(subject.linear.lr_grid or ()) > 1 else 1
        with bars(f"{subject.name}: linear", trainings * linear.epochs) as advance:
            result = linear_accuracy(
                augmented if linear.augment else lambda epoch: train,
                data.train_labels,
                test,
                data.test_labels,
                data.classes,
                linear,
                config.seed,
                advance=lambda epoch: advance(1),
            )
        used = {name: value for name, value in asdict(linear).items() if name != "enabled"}
        yield "linear", result.accuracy, used | {"lr": result.lr}


def _augmented(
    features: Callable[[ImageStore, Any], Tensor], data: LabeledData, views: Views, seed: int
) -> Callable[[int], Tensor]:
    """Training features (N, F) of an epoch, from random crops and flips."""
    no_color = ViewsConfig(preset="small", size=views.size, color_jitter=0.0, grayscale=0.0)
    crops = Views(no_color, data.size, views.mean, views.std)

    def of_epoch(epoch: int) -> Tensor:
        draws = generator(seed, "linear views", epoch)

        def prepare(images: Tensor) -> Tensor:
            return crops.apply(images, crops.sample_params(len(images), draws, views=1, device=images.device))[0]

        return features(data.train, prepare)

    return of_epoch


def _baselines(info: EncoderInfo, device: torch.device, config: EvaluateConfig) -> list[Subject]:
    """Raw pixels and, where it can be rebuilt, the encoder before any training."""
    grid = config.linear.lr_grid or list(BASELINE_LR_GRID)
    linear = replace(config.linear, lr_grid=grid)
    no_training = {"checkpoint": None, "which": None, "epoch": 0, "pretraining_seed": None, "method": None}
    no_encoder = {"encoder": None, "stem": None}
    pixels = Subject("raw pixels", nn.Flatten(), no_training | no_encoder, linear)
    if info.encoder == "custom":
        log.warning("no untrained encoder is scored: an encoder given as a module cannot be rebuilt.")
        return [pixels]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "weights"))
        untrained = create_encoder(info.encoder, info.stem, info.size)
    return [pixels, Subject("untrained encoder", untrained.to(device), no_training, linear)]


def _run_folder(file: Path) -> Path:
    """The run folder that a file belongs to, else the folder that it is in."""
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent


def _training_config(file: Path) -> ResolvedPretrainConfig | None:
    """The configuration that the encoder was trained with, or None where it is unknown."""
    if file.suffix == ".ckpt":
        return load_run_config(read_checkpoint(file))
    run = RunFolder(_run_folder(file))
    is_run = run.marker.exists() and run.config.exists()
    return load_run_config(run) if is_run else None


def check_settings(config: EvaluateConfig) -> None:
    """Refuse keys that contradict each other."""
    if not (config.knn.enabled or config.linear.enabled):
        raise UserError("knn.enabled=false and linear.enabled=false leave nothing to score: keep one of them.")
