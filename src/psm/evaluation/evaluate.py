"""Evaluation from a configuration: freeze an encoder, extract features, store every score with its protocol."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.schema import SCORES, EvaluateConfig, ImagesConfig, ResolvedPretrainConfig, ViewsConfig
from psm.config.stored import run_folder_of, training_config
from psm.data import ImageDataset, load_dataset
from psm.data.from_torch import from_torch
from psm.data.holdout import hold_out
from psm.data.same_images import MEAN_TOLERANCE
from psm.data.stats import channel_statistics
from psm.evaluation.features import check_finite_weights
from psm.evaluation.few_labels import parse_amounts
from psm.evaluation.mining_analysis import load_snapshot
from psm.evaluation.protocols import LABEL_FREE, PROTOCOLS
from psm.evaluation.scores import Score
from psm.evaluation.subject import EvaluationData, Part, Subject, SubjectFeatures
from psm.methods.plugins import load_plugins
from psm.models.factory import create_encoder
from psm.models.pretrained import EncoderInfo, find_encoder, load_encoder
from psm.utils.errors import UserError
from psm.utils.files import append_line
from psm.utils.progress import stages
from psm.utils.resources import resources_explained, write_error
from psm.utils.run_folder import RunFolder
from psm.utils.seeding import derived_seed
from psm.views.transform import Views

log = logging.getLogger("psm")
# One rate does not suit raw pixels as it suits an encoder's features: baselines get the best of these.
BASELINE_LR_GRID = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
MEMORY_ADVICE = (
    "give a smaller batch_size or linear.batch_size, a smaller images.limit, or, to keep the images on disk, a smaller "
    "images.memory"
)


@dataclass(frozen=True)
class Evaluation:
    """Scores of a checkpoint, its run folder (None for a lone file), and the training data if it was scored on that."""

    scores: list[Score]
    run: Path | None
    training_data: ImageDataset | None


def evaluate(
    checkpoint: str | Path,
    data: str | Path | Sequence[str | Path] | ImageDataset | Dataset | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> list[Score]:
    """Score a frozen encoder: by default by kNN and the paper's linear protocol, with 95 % intervals.

    Args:
        checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
        data: name or folder of a data set, a loaded one, or a map-style `torch.utils.data.Dataset` of (image, label)
            pairs; by default the data of the run.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: those of `psm evaluate`, nested ones as dictionaries.

    Returns:
        The scores of each subject (the baselines if asked for, then the encoder), each with its protocol.
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
    kinds = chosen_scores(first)
    device = _device(first.accelerator)
    file = find_encoder(first.checkpoint)
    out = _check_writable(Path(first.out).expanduser() if first.out else run_folder_of(file))
    trained = load_encoder(file, encoder)
    check_finite_weights(trained, f"checkpoint={file}")
    info: EncoderInfo = trained.info
    training = training_config(file)
    images = replace(training.images if training else ImagesConfig(), size=info.size)
    config = settings.build(EvaluateConfig, *overrides, base=EvaluateConfig(images=images))
    name = config.data or (training.data if training else info.data)
    given = data is not None
    projector = _projector(file, config, kinds, encoder)
    if isinstance(data, Dataset):
        data = from_torch(data, config.images, config.progress)
    elif data is not None:
        data = hold_out(data, config.images.holdout)
    data = data or load_dataset(name, config.images, config.progress)
    scored = _evaluation_data(data, show(name), kinds)
    views = Views(ViewsConfig(size=info.size), data.size, info.mean, info.std)
    as_in_training = replace(training.views if training else ViewsConfig(), size=info.size)
    training_views = Views(as_in_training, data.size, info.mean, info.std)
    origin = _origin(file, info, training)
    projector = None if projector is None else projector.to(device)
    baselines = _baselines(info, device, config) if config.baselines else []
    subjects = [*baselines, Subject(info.method, trained.to(device), origin, config.linear, projector)]
    protocol = _protocol(name, config, scored, info)
    scores = []
    with stages(config.progress) as bars:
        for subject in subjects:
            features = SubjectFeatures(subject, scored, views, training_views, config, bars, device)
            for kind in kinds:
                for estimates, used in PROTOCOLS[kind](features):
                    whole = {**protocol, **subject.protocol, **used, "seed": config.seed}
                    scores.append(Score(subject.name, kind, estimates, whole))
                    when = datetime.now(UTC).isoformat(timespec="seconds")
                    append_line(out / "scores.jsonl", scores[-1].record() | {"at": when})
    run = RunFolder(run_folder_of(file))
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


def chosen_scores(config: EvaluateConfig) -> list[str]:
    """The kinds of scores that are asked for, in the order of the table; refused if there are none."""
    given = config.scores
    if given is not None:
        chosen = [name for name in SCORES if "all" in given or name in given]
    else:
        chosen = [name for name in SCORES if getattr(config, name).enabled]
    if not chosen:
        raise UserError("knn.enabled=false and linear.enabled=false leave nothing to score: keep one of them.")
    if "few_labels" in chosen:
        parse_amounts(config.few_labels.amounts)
    return chosen


def _evaluation_data(data: ImageDataset, name: str, kinds: Sequence[str]) -> EvaluationData:
    """The images to train classifiers on and to score; refused without labels if a score needs them."""
    train = Part.whole(data.train)
    if all(kind in LABEL_FREE for kind in kinds):
        return EvaluationData(train, None, len(data.classes))
    if data.test is None or data.train.labels is None or data.test.labels is None:
        raise UserError(
            f"data={name} has no labels to score with: give a labeled set, for example data=cifar10, or "
            "scores=[rankme,lidar], which need none."
        )
    return EvaluationData(train, Part.whole(data.test), len(data.classes))


def _projector(file: Path, config: EvaluateConfig, kinds: Sequence[str], encoder: nn.Module | None) -> nn.Module | None:
    """The projector of a checkpoint, where a measure of projections is asked for."""
    measured = {"rankme": config.rankme.space, "lidar": config.lidar.space}
    asked = [kind for kind, space in measured.items() if kind in kinds and space == "projections"]
    if not asked:
        return None
    checkpoint = file if file.suffix == ".ckpt" else RunFolder(run_folder_of(file)).checkpoint
    if not checkpoint.exists():
        raise UserError(
            f"{asked[0]}.space=projections needs the projector, and {file} has none: give a run folder or a checkpoint."
        )
    return load_snapshot(checkpoint, encoder).networks.projector


def _protocol(name: str | list[str], config: EvaluateConfig, data: EvaluationData, info: EncoderInfo) -> dict[str, Any]:
    """What all scores of an evaluation have in common."""
    return {
        "data": name,
        "images": asdict(config.images),
        "train_images": len(data.train),
        "test_images": 0 if data.test is None else len(data.test),
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


def _baselines(info: EncoderInfo, device: torch.device, config: EvaluateConfig) -> list[Subject]:
    """Raw pixels and, where it can be rebuilt, the encoder before any training."""
    grid = config.linear.lr_grid or list(BASELINE_LR_GRID)
    linear = replace(config.linear, lr_grid=grid)
    no_training = {"checkpoint": None, "which": None, "epoch": 0, "pretraining_seed": None, "method": None}
    no_encoder = {"encoder": None, "stem": None}
    pixels = Subject("raw pixels", nn.Flatten(), no_training | no_encoder, linear, has_rank=False)
    if info.encoder == "custom":
        log.warning("no untrained encoder is scored: an encoder given as a module cannot be rebuilt.")
        return [pixels]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "weights"))
        untrained = create_encoder(info.encoder, info.stem, info.size)
    return [pixels, Subject("untrained encoder", untrained.to(device), no_training, linear)]
