"""Pretraining from a configuration: resolve it, hold the run folder, train, save the encoder."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
from torch import nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.schema import PretrainConfig, PretrainSettings, ResolvedPretrainConfig
from psm.config.stored import load_run_config
from psm.data import ImageDataset
from psm.data.stats import channel_statistics
from psm.methods.build import build_networks, method_of
from psm.methods.plugins import load_plugins
from psm.models.encoder import unwrapped
from psm.models.init_weights import InitialWeights, describe, load_initial_weights
from psm.models.pretrained import EncoderInfo, checkpoint_encoder, read_encoder, save_encoder
from psm.models.resnet import ResNet
from psm.training.given_data import DataLike, data_name, load_data
from psm.training.initial import initial_settings, initial_weights
from psm.training.launch import Launch
from psm.training.measures import PretrainMeasures
from psm.training.module import PretrainModule
from psm.training.preset import PresetChoice, choose_preset
from psm.training.resolve import check_settings, resolve
from psm.training.run import assemble, run_training, use_channels_last
from psm.training.user_callbacks import split_callbacks
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError
from psm.utils.files import read_lines
from psm.utils.run_folder import RunFolder
from psm.views.transform import Views

log = logging.getLogger("psm")

MEMORY_ADVICE = (
    "give a smaller batch_size, a grad_cache_chunk below it, a smaller images.size or bank.size, or, to keep the "
    "images on disk, a smaller images.memory"
)


@dataclass(frozen=True)
class PretrainResult:
    """A finished run: its folder, the encoder, a record for each epoch, the resolved configuration, the data."""

    out: Path
    encoder: nn.Module
    metrics: list[dict[str, Any]]
    config: ResolvedPretrainConfig
    data: ImageDataset


def pretrain(
    out: str | Path,
    data: str | Path | Sequence[str | Path] | DataLike | None = None,
    encoder: str | nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    callbacks: Sequence[lightning.Callback | str] | lightning.Callback | str = (),
    **keys: Any,
) -> PretrainResult:
    """Train an encoder on unlabeled images. The keys are those of `psm pretrain`, nested ones as dictionaries.

    Examples:
        >>> psm.pretrain("runs/a", data="cifar10", epochs=10, positives={"k": 3})  # doctest: +SKIP

    Args:
        out: run folder to write.
        data: a name, a path (see docs/data.md) or several paths, an `ImageDataset`, uint8 images (N, 3, H, W), or a
            map-style `torch.utils.data.Dataset` of images or (image, label) pairs.
        encoder: a name, or a module from (B, 3, H, W) to (B, F) or (B, F, h, w).
        config: a YAML file or a mapping that comes before the keys.
        callbacks: Lightning callbacks, or module.Class as text.

    Returns:
        The run folder, the trained encoder, a record for each epoch, the resolved configuration and the data.
    """
    if not isinstance(out, (str, Path)):
        raise UserError(f"out={out!r} is not a path: name a folder for the run.")
    if encoder is not None and not isinstance(encoder, (str, nn.Module)):
        raise UserError(f"encoder={encoder!r} is neither a name nor a module: give for example 'resnet18'.")
    names, instances = split_callbacks(callbacks)
    given: dict[str, Any] = {**keys, "out": str(out)}
    if data is not None:
        given["data"] = data_name(data)
    if encoder is not None:
        given["encoder"] = "custom" if isinstance(encoder, nn.Module) else encoder
    if names:
        given["callbacks"] = names
    return run_pretraining(
        *settings.stored_overrides(config),
        given,
        data=None if isinstance(data, (str, Path, list, tuple)) else data,  # type: ignore[arg-type]
        encoder=encoder if isinstance(encoder, nn.Module) else None,
        callbacks=instances,
    )


def run_pretraining(
    *overrides: Mapping[str, Any],
    data: DataLike | None = None,
    encoder: nn.Module | None = None,
    callbacks: Sequence[lightning.Callback] = (),
    take_over: bool = True,
) -> PretrainResult:
    """Pretrain by the merged overrides.

    Args:
        overrides: nested keys, the later ones winning.
        data, encoder: used instead of what the keys of that name say.
        callbacks: used beside those that the key names; not stored with the run.
        take_over: with ``init=`` of a run, take its settings where none are given.
    """
    return run_training(_Pretraining(data, encoder, callbacks, take_over), *overrides)


class _Pretraining:
    """What `psm pretrain` trains, with what was given from Python; see `psm.training.run.Training`."""

    command, schema, memory_advice = "psm pretrain", PretrainConfig, MEMORY_ADVICE

    def __init__(
        self,
        data: DataLike | None,
        encoder: nn.Module | None,
        callbacks: Sequence[lightning.Callback],
        take_over: bool,
    ) -> None:
        self.given, self.encoder, self.callbacks, self.take_over = data, encoder, callbacks, take_over
        self.plugins: list[str] = []
        self.weights: InitialWeights | None = None  # to start from, until the networks have them
        self.preset: PresetChoice | None = None  # of a new run

    @property
    def given_data(self) -> bool:
        return self.given is not None

    def begin(self, asked: PretrainConfig) -> None:
        self.plugins = load_plugins(asked.plugins)

    def stored(self, source: RunFolder | Mapping[str, Any]) -> ResolvedPretrainConfig:
        return load_run_config(source)

    def configure(
        self,
        run: RunFolder,
        asked: PretrainConfig,
        overrides: Sequence[Mapping[str, Any]],
        stored: PretrainSettings | None,
        point: Path | None,
    ) -> PretrainConfig:
        init = (stored or asked).init if point is None else None
        if init:
            self.weights = initial_weights(init, run, self.encoder, self.take_over and stored is None)
        if stored is None:
            base = initial_settings(self.weights, overrides) if self.take_over else None
            in_memory = self.given is not None and not isinstance(self.given, Dataset)
            self.preset = choose_preset(asked, overrides, in_memory).beside(self.weights)
            last = {"preset": self.preset.name}
            user = settings.build(PretrainConfig, self.preset.settings, *overrides, last, base=base)
        else:
            user = settings.build(PretrainConfig, *overrides, base=stored)
            user = user if user.preset != "auto" else replace(user, preset=stored.preset)
        user = replace(user, plugins=self.plugins or user.plugins)
        check_settings(user)
        return user

    def load(self, config: PretrainSettings, progress: bool) -> ImageDataset:
        return load_data(self.given, config, progress)

    def trained_images(self, config: PretrainConfig, data: ImageDataset) -> int:
        return len(data.train)

    def resolve(self, config: PretrainConfig, data: ImageDataset) -> ResolvedPretrainConfig:
        return resolve(config, data)

    def follow(self, run: RunFolder, config: ResolvedPretrainConfig, point: Path | None) -> None:
        if config.init and point is None:
            self.weights = initial_weights(config.init, run, self.encoder)

    def prepare(
        self, run: RunFolder, config: ResolvedPretrainConfig, data: ImageDataset, launch: Launch, point: Path | None
    ) -> tuple[lightning.Trainer, PretrainModule]:
        notes = self.preset.lines(len(data.train), data.size) if self.preset else []
        weights, self.weights = self.weights, None  # the networks will have them
        return _prepare(run, config, data, self.encoder, self.callbacks, launch, weights, point, notes)

    def complete(self, begun: PretrainSettings) -> dict[str, Any]:
        return settings.to_dict(begun) | method_of(begun).to_dict()

    def train_further(self, run: RunFolder) -> str:
        return (
            "Pretrain further in another run, from its weights and with a schedule of its own: psm pretrain out=... "
            f"init={run.folder} epochs=..."
        )

    def describe(self, config: ResolvedPretrainConfig) -> str:
        return f"psm pretrain, method {config.method} on {show(config.data)}"

    def announce(self, module: PretrainModule) -> None:
        if module.info.init is not None:
            log.warning(describe(module.info.init, module.networks.heads))

    def finish(
        self, run: RunFolder, trainer: lightning.Trainer, module: PretrainModule, data: ImageDataset
    ) -> PretrainResult:
        # From the checkpoint, whatever strategy trained and wherever its weights are now.
        info, state = read_encoder(run.checkpoint)
        encoder = module.networks.encoder
        unwrapped(encoder).load_state_dict(state)
        if trainer.is_global_zero:
            save_encoder(run, encoder, info)
            log.info("the encoder is in %s", run.encoder)
        return PretrainResult(run.folder, encoder, read_lines(run.metrics), module.config, data)


def _prepare(
    run: RunFolder,
    config: ResolvedPretrainConfig,
    data: ImageDataset,
    encoder: nn.Module | None,
    callbacks: Sequence[lightning.Callback],
    launch: Launch,
    weights: InitialWeights | None,
    point: Path | None,
    notes: Sequence[str] = (),
) -> tuple[lightning.Trainer, PretrainModule]:
    """The trainer and the module. A user's mistake is found here, before anything is written.

    Args:
        encoder: used instead of the one that the configuration names.
        callbacks: used beside those that it names.
        launch: how the processes of the run were started.
        weights: to start from, or None.
        point: the checkpoint that the run goes on from, or None.
        notes: lines for the plan that is shown before the first step.
    """
    mean, std = channel_statistics(data.train)
    views = Views(config.views, data.size, mean, std)
    method = method_of(config)

    def module(trainer: lightning.Trainer) -> PretrainModule:
        nets = build_networks(config, method, views.size, encoder)
        init = None if weights is None else load_initial_weights(nets, weights, config.init_heads)
        if point is not None:
            init = checkpoint_encoder(read_checkpoint(point), point)[0].init
        channels_last = use_channels_last(nets, config.channels_last, trainer)
        if config.compile is not None:
            nets.compile_parts(config.compile, config.compile_mode)
        info = EncoderInfo(
            encoder=config.encoder,
            stem=nets.encoder.stem if isinstance(nets.encoder, ResNet) else "auto",
            width=int(nets.encoder.width),  # type: ignore[arg-type]
            size=views.size,
            mean=list(mean),
            std=list(std),
            method=config.method,
            data=config.data,
            epoch=0,
            init=init,
        )
        try:
            return PretrainModule(nets, method, views, data.train, config, info, channels_last)
        except (RuntimeError, MemoryError):
            need = method.bank.size * config.heads.out_dim * 4 / 1e9
            raise UserError(
                f"bank.size={method.bank.size} needs {need:,.1f} GB of memory: give a smaller bank."
            ) from None

    measures = PretrainMeasures(data)
    return assemble(run, config, measures, launch, module, callbacks, progress=config.progress, notes=notes)
