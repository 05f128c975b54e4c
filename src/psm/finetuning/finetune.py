"""Fine-tuning from a configuration: a classifier from an encoder and labeled images, in a run folder of its own."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.finetune import FinetuneConfig, FinetuneSettings, ResolvedFinetuneConfig
from psm.config.keys import show
from psm.config.schema import ImagesConfig, ViewsConfig
from psm.config.stored import load_finetune_config, training_config
from psm.data import ImageDataset
from psm.data.stats import channel_statistics
from psm.finetuning.measures import BestCheckpoint, FinetuneMeasures
from psm.finetuning.module import SCRATCH, FinetuneModule
from psm.finetuning.resolve import check_settings, resolve, split_validation
from psm.finetuning.scores import ClassifierScores, score_classifier
from psm.models.classifier import (
    Classifier,
    ClassifierInfo,
    LinearHead,
    load_weights,
    read_classifier,
    save_classifier,
)
from psm.models.encoder import Encoder, as_encoder, unwrapped
from psm.models.factory import create_encoder
from psm.models.pretrained import CUSTOM, EncoderInfo, find_encoder, read_encoder, save_encoder
from psm.models.resnet import ResNet
from psm.training.given_data import data_name, load_data
from psm.training.launch import Launch
from psm.training.run import assemble, run_training, use_channels_last
from psm.training.user_callbacks import split_callbacks
from psm.utils.errors import UserError
from psm.utils.files import read_lines, write_text_atomically
from psm.utils.run_folder import RunFolder
from psm.utils.seeding import derived_seed
from psm.views.transform import Views

log = logging.getLogger("psm")

INHERITED = ("root", "download", "memory", "cache")  # of a run's settings of images: where they are


@dataclass(frozen=True)
class FinetuneResult:
    """A finished run of fine-tuning."""

    out: Path
    classifier: Classifier  # the best by validation; the last without validation images
    views: Views  # prepares images for it: views.plain(images)
    best: ClassifierScores | None  # None on ranks other than 0
    last: ClassifierScores | None
    metrics: list[dict[str, Any]]  # a record for each epoch
    config: ResolvedFinetuneConfig
    data: ImageDataset


class Start(NamedTuple):
    """The encoder that fine-tuning starts from."""

    info: EncoderInfo
    state: dict[str, Tensor]


def finetune(
    checkpoint: str | Path | None,
    data: str | Path | Sequence[str | Path] | ImageDataset | Dataset,
    out: str | Path,
    encoder: str | nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    callbacks: Sequence[lightning.Callback | str] | lightning.Callback | str = (),
    **keys: Any,
) -> FinetuneResult:
    """Train a classifier from a pretrained encoder. The keys are those of `psm finetune`, nested ones as dictionaries.

    Examples:
        >>> psm.finetune("runs/a", "photos", "runs/clf", epochs=20, head_only=True)  # doctest: +SKIP

    Args:
        checkpoint: run folder, checkpoint or encoder.safetensors to start from; None: from scratch.
        data: a name, a folder, an `ImageDataset` with labels, or a map-style `torch.utils.data.Dataset` of
            (image, label) pairs.
        out: run folder to write.
        encoder: from scratch a name or a module; for a checkpoint of a module of your own that module.
        config: a YAML file or a mapping that comes before the keys.
        callbacks: Lightning callbacks, or module.Class as text.

    Returns:
        The run folder, the classifier, its scores, a record for each epoch, the resolved configuration and the data.
    """
    names, instances = split_callbacks(callbacks)
    given: dict[str, Any] = {**keys, "out": str(out), "checkpoint": SCRATCH if checkpoint is None else str(checkpoint)}
    given["data"] = data_name(data)
    if isinstance(encoder, str):
        given["encoder"] = encoder
    elif encoder is not None:
        given["encoder"] = CUSTOM
    if names:
        given["callbacks"] = names
    return run_finetuning(
        *settings.stored_overrides(config),
        given,
        data=None if isinstance(data, (str, Path, list, tuple)) else data,  # type: ignore[arg-type]
        encoder=encoder if isinstance(encoder, nn.Module) else None,
        callbacks=instances,
    )


def run_finetuning(
    *overrides: Mapping[str, Any],
    data: ImageDataset | Dataset | None = None,
    encoder: nn.Module | None = None,
    callbacks: Sequence[lightning.Callback] = (),
) -> FinetuneResult:
    """Fine-tune by the merged overrides.

    Args:
        overrides: nested keys, the later ones winning.
        data, encoder: used instead of what the keys of that name say.
        callbacks: used beside those that the key names; not stored with the run.
    """
    return run_training(_Finetuning(data, encoder, callbacks), *overrides)


class _Finetuning:
    """What `psm finetune` trains, with what was given from Python; see `psm.training.run.Training`."""

    command, schema = "psm finetune", FinetuneConfig
    memory_advice = "give a smaller batch_size or images.size, or, to keep the images on disk, a smaller images.memory"

    def __init__(
        self,
        data: ImageDataset | Dataset | None,
        encoder: nn.Module | None,
        callbacks: Sequence[lightning.Callback],
    ) -> None:
        self.given, self.encoder, self.callbacks = data, encoder, callbacks
        self.start: Start | None = None  # None from scratch

    @property
    def given_data(self) -> bool:
        return self.given is not None

    def begin(self, asked: FinetuneConfig) -> None:
        pass

    def stored(self, source: RunFolder | Mapping[str, Any]) -> ResolvedFinetuneConfig:
        return load_finetune_config(source)

    def configure(
        self,
        run: RunFolder,
        asked: FinetuneConfig,
        overrides: Sequence[Mapping[str, Any]],
        stored: FinetuneSettings | None,
        point: Path | None,
    ) -> FinetuneConfig:
        config = settings.build(FinetuneConfig, *overrides, base=stored or _base(asked))
        if not config.checkpoint:
            raise UserError(
                "checkpoint= is missing: give a run folder of `psm pretrain`, for example checkpoint=runs/a, or "
                "checkpoint=none to train from scratch."
            )
        if point is None and stored is None:
            _refuse_own_folder(config.checkpoint, run)
        self.start = _read_start(config, point)
        info = self.start.info if self.start else None
        check_settings(config, info)
        if info is not None and config.images.size is None:
            return replace(config, images=replace(config.images, size=info.size))
        return config

    def load(self, config: FinetuneSettings, progress: bool) -> ImageDataset:
        return load_data(self.given, config, progress)

    def trained_images(self, config: FinetuneConfig, data: ImageDataset) -> int:
        return len(split_validation(data.train, config.validation).train) if data.labeled else len(data.train)

    def resolve(self, config: FinetuneConfig, data: ImageDataset) -> ResolvedFinetuneConfig:
        return resolve(config, data, self.start.info if self.start else None)

    def follow(self, run: RunFolder, config: ResolvedFinetuneConfig, point: Path | None) -> None:
        self.start = _read_start(config, point)

    def prepare(
        self, run: RunFolder, config: ResolvedFinetuneConfig, data: ImageDataset, launch: Launch, point: Path | None
    ) -> tuple[lightning.Trainer, FinetuneModule]:
        start = self.start
        parts = split_validation(data.train, config.validation)
        if parts.validation is None and config.validation > 0:
            log.warning("no class has an image to hold out: the last epoch is kept, and it is not calibrated.")
        mean, std = (start.info.mean, start.info.std) if start else channel_statistics(parts.train)
        views = Views(_views_config(config), data.size, mean, std)

        def module(trainer: lightning.Trainer) -> FinetuneModule:
            encoder = _build_encoder(config, views.size, start, self.encoder)
            head = LinearHead(int(encoder.width), len(data.classes), config.seed)
            networks = Classifier(encoder, head, frozen=config.head_only)
            channels_last = use_channels_last(networks, config.channels_last, trainer)
            info = EncoderInfo(
                encoder=config.encoder,
                stem=encoder.stem if isinstance(encoder, ResNet) else "auto",
                width=int(encoder.width),
                size=views.size,
                mean=list(mean),
                std=list(std),
                method=_method(start, point),
                data=config.data,
                epoch=0,
            )
            return FinetuneModule(
                networks, views, parts.train, parts.validation, data.classes, config, info, channels_last
            )

        best = [] if parts.validation is None else [BestCheckpoint(run)]
        return assemble(
            run,
            config,
            FinetuneMeasures(),
            launch,
            module,
            self.callbacks,
            best,
            config.progress,
            command=self.command,
        )

    def complete(self, begun: FinetuneSettings) -> dict[str, Any]:
        return settings.to_dict(begun)

    def train_further(self, run: RunFolder) -> str:
        return (
            "Train on in another run, from its weights and with a schedule of its own: psm finetune "
            f"checkpoint={run.folder} data=... out=... epochs=..."
        )

    def announce(self, module: FinetuneModule) -> None:
        pass

    def describe(self, config: ResolvedFinetuneConfig) -> str:
        return f"psm finetune, {config.checkpoint} on {show(config.data)}"

    def finish(
        self, run: RunFolder, trainer: lightning.Trainer, module: FinetuneModule, data: ImageDataset
    ) -> FinetuneResult:
        networks = Classifier(module.networks.encoder, nn.Linear(module.info.width, len(module.classes)))
        networks.to(trainer.strategy.root_device)
        best: ClassifierScores | None = None
        last: ClassifierScores | None = None
        if trainer.is_global_zero:
            last, info = _score_checkpoint(run.checkpoint, networks, module, data)
            best = last
            if module.validation is not None:
                save_classifier(run.last_classifier, networks, _about(info, module, last))
                if not run.best.exists():
                    raise UserError(
                        f"{run.best}, the weights of the best epoch, is gone: restore it from a copy. Those of the "
                        f"last epoch are in {run.last_classifier}."
                    )
                best, info = _score_checkpoint(run.best, networks, module, data)
            save_classifier(run.classifier, networks, _about(info, module, best))
            save_encoder(run, networks.encoder, info)
            write_text_atomically(run.finetuned, json.dumps(_summary(module, data, best, last)) + "\n")
            log.info("the classifier is in %s", run.classifier)
        return FinetuneResult(
            run.folder, networks.eval(), module.views, best, last, read_lines(run.metrics), module.config, data
        )


def _base(asked: FinetuneConfig) -> FinetuneConfig | None:
    """The defaults of a new run: images are looked for where the run that trained the encoder found them."""
    if asked.checkpoint in ("", SCRATCH):
        return None
    training = training_config(find_encoder(asked.checkpoint))
    known = {name: getattr(training.images, name) for name in INHERITED} if training else {}
    return FinetuneConfig(images=ImagesConfig(**known))


def _refuse_own_folder(checkpoint: str, run: RunFolder) -> None:
    """Refuse to start from weights in the folder that is to be written: overwrite= would move or delete them."""
    path = Path(checkpoint).expanduser().resolve()
    if checkpoint != SCRATCH and run.folder.resolve() in (path, *path.parents):
        raise UserError(
            f"checkpoint={checkpoint} lies in out={run.folder}, the run that is to be written: name another out."
        )


def _read_start(config: FinetuneSettings, point: Path | None) -> Start | None:
    """The encoder to start from; of a run that is resumed its own, so that the first one may be gone by now."""
    if config.checkpoint == SCRATCH:
        return None
    return Start(*read_encoder(config.checkpoint if point is None else point))


def _views_config(config: ResolvedFinetuneConfig) -> ViewsConfig:
    given = asdict(config.views)
    del given["enabled"]
    return ViewsConfig(**given)


def _build_encoder(config: ResolvedFinetuneConfig, size: int, start: Start | None, module: nn.Module | None) -> Encoder:
    """The encoder with the weights to start from, random ones from scratch."""
    if module is None and config.encoder == CUSTOM:
        raise UserError(f"checkpoint={config.checkpoint} holds a network of its user's own: give encoder= from Python.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "weights"))
        encoder: Encoder = (
            create_encoder(config.encoder, config.stem, size) if module is None else as_encoder(module, size)
        )
    if start is not None:
        try:
            unwrapped(encoder).load_state_dict(start.state, strict=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"checkpoint={config.checkpoint} does not fit the encoder {config.encoder} at {size} pixels: {reason}."
            ) from None
    return encoder


def _method(start: Start | None, point: Path | None) -> str:
    """How the weights came about, for tables of scores."""
    if start is None:
        return "from scratch"
    return start.info.method if point is not None else f"{start.info.method}, fine-tuned"


def _score_checkpoint(
    file: Path, networks: Classifier, module: FinetuneModule, data: ImageDataset
) -> tuple[ClassifierScores, EncoderInfo]:
    """Load the weights of a checkpoint into a classifier and score it."""
    info, state = read_classifier(file)
    load_weights(networks, state)
    epoch = info.encoder.epoch
    return score_classifier(networks, module.views, epoch, module.validation, data.test), info.encoder


def _about(info: EncoderInfo, module: FinetuneModule, scores: ClassifierScores) -> ClassifierInfo:
    """What is stored with a classifier: its scores without single images and classes."""
    parts = {name: part for name in ("validation", "test") if (part := getattr(scores, name)) is not None}
    kept = {
        name: {
            "images": part.images,
            "top1": part.top1,
            "top5": part.top5,
            "interval": part.interval,
            "uncalibrated": asdict(part.uncalibrated),
            "calibrated": part.calibrated and asdict(part.calibrated),
        }
        for name, part in parts.items()
    }
    temperature = 1.0 if scores.temperature is None else scores.temperature
    return ClassifierInfo(info, module.classes, temperature, kept)


def _summary(
    module: FinetuneModule, data: ImageDataset, best: ClassifierScores, last: ClassifierScores
) -> dict[str, Any]:
    """What finetune.json says."""
    return {
        "classes": module.classes,
        "images": {
            "train": len(module.images),
            "validation": len(module.validation) if module.validation is not None else 0,
            "test": len(data.test) if data.test is not None else 0,
        },
        "best": asdict(best),
        "last": asdict(last),
    }
