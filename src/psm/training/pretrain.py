"""PretrainModule from a configuration: settle everything, hold the run folder, train, leave the encoder."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import nn

from psm.config import merge as settings
from psm.config.schema import MAY_CHANGE, PretrainConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.stats import channel_statistics
from psm.methods.build import build_networks, method_of
from psm.methods.plugins import load_plugins
from psm.models import networks
from psm.models.pretrained import EncoderInfo, read_encoder, save_encoder
from psm.training.callbacks import MetricsCallback
from psm.training.checkpoint import read_checkpoint
from psm.training.module import PretrainModule
from psm.training.progress_bar import ProgressBar
from psm.training.resolve import check, resolve
from psm.training.trainer import make_trainer, quiet
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder, launched, read_lines, write_atomically
from psm.views.transform import Views

log = logging.getLogger("psm")


@dataclass(frozen=True)
class PretrainResult:
    """A finished run: its folder, the encoder, a record for each epoch, the resolved configuration, the data."""

    out: Path
    encoder: nn.Module
    metrics: list[dict[str, Any]]
    config: PretrainConfig
    data: ImageDataset


def pretrain(
    out: str | Path,
    data: str | Path | ImageDataset | ImageStore | torch.Tensor | np.ndarray | None = None,
    encoder: str | nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **keys: Any,
) -> PretrainResult:
    """Learn an encoder; the keys are those of `psm pretrain`, nested ones as dictionaries.

    >>> psm.pretrain("runs/a", data="cifar10", epochs=10, positives={"k": 3})  # doctest: +SKIP

    ``data`` may be a ImageDataset or uint8 images (N, 3, H, W), and ``encoder`` any module that turns (B, 3, H, W) into
    (B, F) or (B, F, h, w).
    """
    if not isinstance(out, (str, Path)):
        raise UserError(f"out={out!r} is not a path: name a folder for the run.")
    if encoder is not None and not isinstance(encoder, (str, nn.Module)):
        raise UserError(f"encoder={encoder!r} is neither a name nor a module: give for example 'resnet18'.")
    if isinstance(data, (torch.Tensor, np.ndarray, ImageStore)):
        data = ImageDataset("images", data if isinstance(data, ImageStore) else ImageStore(data), None, ())
    given: dict[str, Any] = {**keys, "out": str(out)}
    if data is not None:
        given["data"] = data.name if isinstance(data, ImageDataset) else str(data)
    if encoder is not None:
        given["encoder"] = "custom" if isinstance(encoder, nn.Module) else encoder
    if isinstance(config, (str, Path)):
        stored = [settings.refuse_call_keys(settings.read_yaml(config), f"config={config}")]
    else:
        stored = [settings.refuse_call_keys(config, "config=")] if config else []
    return run_pretraining(
        *stored,
        given,
        data=data if isinstance(data, ImageDataset) else None,
        encoder=encoder if isinstance(encoder, nn.Module) else None,
    )


def run_pretraining(
    *overrides: Mapping[str, Any], data: ImageDataset | None = None, encoder: nn.Module | None = None
) -> PretrainResult:
    """Pretrain as the merged overrides say; ``data`` and ``encoder`` stand in for what their keys name."""
    asked = settings.build(PretrainConfig, *overrides)
    if not asked.out:
        raise UserError("out= is missing: name a folder for the run, for example out=runs/a.")
    run = RunFolder(Path(asked.out).expanduser())
    plugins = load_plugins(asked.plugins)
    if launched():  # the process that launched this one holds the folder and has settled what is in it
        stored = settings.build(PretrainConfig, settings.read_yaml(run.config))
        data = data or load_dataset(stored.data, stored.images, progress=False)
        trainer, module = _prepare(run, stored, data, encoder)
        return _fit(run, trainer, module, data, asked.resume != "false" and run.checkpoint.exists())
    with run.hold(asked.resume, asked.overwrite):
        resuming = asked.resume != "false" and run.used
        point = run.resume_point(asked.resume) if resuming else None
        begun = _begun_with(run, point) if point else None
        stored = None
        if resuming:
            stored = settings.build(PretrainConfig, settings.read_yaml(run.config) if run.config.exists() else begun)
        config = settings.build(PretrainConfig, *overrides, base=stored)
        config = replace(config, plugins=plugins or config.plugins)
        check(config)
        method_of(config)
        data = data or load_dataset(config.data, config.images, config.progress)
        config = resolve(config, data)
        if stored:
            # The checkpoint knows what the run was begun with, whatever was since written into config.yaml.
            _refuse_changes(run, settings.to_dict(settings.build(PretrainConfig, begun) if begun else stored), config)
        trainer, module = _prepare(run, config, data, encoder)
        with ExitStack() as stack:
            if resuming:
                _continue_from(run, point, module)
            else:
                aside = stack.enter_context(run.replace(asked.overwrite))
            stack.enter_context(_logging(run, config))
            if not resuming and aside is not None:
                log.warning("the run that was in %s is now in %s", run.folder, aside)
            write_atomically(run.config, lambda file: file.write(settings.to_yaml(config).encode()))
            if data.unreadable:
                log.warning("%d unreadable files are left out, see %s", len(data.unreadable), run.unreadable)
                lines = "".join(f"{file}\t{reason}\n" for file, reason in data.unreadable)
                write_atomically(run.unreadable, lambda file: file.write(lines.encode()))
            return _fit(run, trainer, module, data, point is not None)


def _begun_with(run: RunFolder, point: Path) -> dict[str, Any]:
    """The configuration in the checkpoint that a run is to continue from, or a sentence on what can be done."""
    try:
        checkpoint = read_checkpoint(point)
    except UserError as error:
        others = [snapshot.stem for snapshot in run.snapshots if snapshot != point]
        advice = (
            f"resume={others[-1]} continues from that snapshot (there are {', '.join(others)})."
            if others
            else "Nothing was changed: restore it, or name another out for a new run."
        )
        raise UserError(f"{error} {advice}") from None
    if point != run.checkpoint:
        _refuse_to_go_back(run, point, checkpoint["global_step"])
    return checkpoint["psm"]["config"]


def _refuse_to_go_back(run: RunFolder, point: Path, step: int) -> None:
    """A snapshot stands in for a checkpoint that is lost or damaged, not for one that is further on."""
    try:
        last = read_checkpoint(run.checkpoint)["global_step"] if run.checkpoint.exists() else 0
    except UserError:
        return
    if last > step:
        raise UserError(
            f"resume={point.stem} is step {step}, and checkpoints/{run.checkpoint.name} of the run in {run.folder} is "
            f"step {last}: resume=true continues from there; to go back all the same, move that file away first."
        )


def _continue_from(run: RunFolder, point: Path | None, module: PretrainModule) -> None:
    """Make the folder ready for a run that goes on; what was written after its checkpoint will be written again."""
    step = 0
    run.clear_leftovers()
    if point is not None:
        _refuse_other_data(run, point, module)
        step = read_checkpoint(point)["global_step"]
        if point != run.checkpoint:
            write_atomically(run.checkpoint, lambda file: file.write(point.read_bytes()))
    run.keep_metrics_until(step)


def _refuse_changes(run: RunFolder, begun: dict[str, Any], config: PretrainConfig) -> None:
    """What is asked for now may not contradict the run that is resumed."""
    before, now = (dict(settings.flatten(x)) for x in (begun, settings.to_dict(config)))
    for dotted, value in now.items():
        if dotted not in MAY_CHANGE and before.get(dotted) != value:
            raise UserError(
                f"{dotted}={value} differs from {dotted}={before.get(dotted)} of the run in {run.folder}: resume it "
                f"without {dotted}= (and with config.yaml as it was), or start another run in another out."
            )


def _refuse_other_data(run: RunFolder, point: Path, module: PretrainModule) -> None:
    """A run goes on with the images it began with: their number and their statistics tell."""
    before = read_checkpoint(point)["psm"]
    now = module.description()
    if before["images"] != now["images"] or before["encoder_info"]["mean"] != now["encoder_info"]["mean"]:
        raise UserError(
            f"data={module.config.data} is not what the run in {run.folder} began with ({before['images']} images "
            f"then, {now['images']} now): restore it, or start another run in another out."
        )


def _prepare(
    run: RunFolder, config: PretrainConfig, data: ImageDataset, encoder: nn.Module | None
) -> tuple[lightning.Trainer, PretrainModule]:
    """The trainer and the module. Whatever the user got wrong shows here, before anything is written."""
    mean, std = channel_statistics(data.train)
    views = Views(config.views, data.size, mean, std)
    bar = ProgressBar(config.epochs, config.batch_size) if config.progress and not launched() else None
    trainer = make_trainer(run, config, [MetricsCallback(run, data, bar), *([bar] if bar else [])])
    if config.batch_size % trainer.world_size:
        raise UserError(
            f"batch_size={config.batch_size} is shared by {trainer.world_size} devices: give a multiple of that number."
        )
    method = method_of(config)
    nets = build_networks(config, method, views.size, encoder)
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = networks.prefers_channels_last(trainer.strategy.root_device)
    if channels_last:
        nets = nets.to(memory_format=torch.channels_last)
    if config.compile is not None:
        nets.compile_parts(config.compile)
    info = EncoderInfo(
        encoder=config.encoder,
        stem=nets.encoder.stem if isinstance(nets.encoder, networks.ResNet) else "auto",
        width=nets.encoder.width,
        size=views.size,
        mean=list(mean),
        std=list(std),
        method=config.method,
        data=config.data,
        epoch=0,
    )
    try:
        module = PretrainModule(nets, method, views, data.train, config, info, channels_last)
    except (RuntimeError, MemoryError):
        need = method.bank.size * config.heads.out_dim * 4 / 1e9
        raise UserError(f"bank.size={method.bank.size} needs {need:,.1f} GB of memory: give a smaller bank.") from None
    return trainer, module


def _fit(
    run: RunFolder, trainer: lightning.Trainer, module: PretrainModule, data: ImageDataset, resuming: bool
) -> PretrainResult:
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            trainer.fit(module, ckpt_path=str(run.checkpoint) if resuming else None)
        except SystemExit:
            # Lightning turns an interrupt into an exit; whoever called decides what an interrupt means.
            raise KeyboardInterrupt from None
    # From the checkpoint, whatever strategy trained and wherever its weights are now.
    info, state = read_encoder(run.checkpoint)
    encoder = module.networks.encoder
    networks.unwrapped(encoder).load_state_dict(state)
    if trainer.is_global_zero:
        save_encoder(run, encoder, info)
        log.info("the encoder is in %s", run.encoder)
    return PretrainResult(run.folder, encoder, read_lines(run.metrics), module.config, data)


@contextmanager
def _logging(run: RunFolder, config: PretrainConfig) -> Iterator[None]:
    """Everything said during the run also goes to its log file."""
    handler = logging.FileHandler(run.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        log.info("psm pretrain, method %s on %s", config.method, config.data)
        yield
    except BaseException as error:
        log.info("stopped: %s: %s", type(error).__name__, error)  # whoever catches it tells the user
        raise
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
