"""Pretraining from a configuration: resolve it, hold the run folder, train, save the encoder."""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.schema import MAY_CHANGE, PretrainConfig, PretrainSettings, ResolvedPretrainConfig
from psm.config.stored import load_run_config, save_run_config
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.from_torch import from_torch
from psm.data.holdout import hold_out
from psm.data.location import absolute_data, absolute_images
from psm.data.same_images import image_difference
from psm.data.stats import channel_statistics
from psm.methods.build import build_networks, method_of
from psm.methods.plugins import load_plugins
from psm.models.encoder import unwrapped
from psm.models.factory import prefers_channels_last
from psm.models.init_weights import InitialWeights, describe, load_initial_weights
from psm.models.pretrained import EncoderInfo, checkpoint_encoder, read_encoder, save_encoder
from psm.models.resnet import ResNet
from psm.training.callbacks import CheckpointCallback, MetricsCallback, metric_names
from psm.training.distributed import is_rank_zero, join, shares_machine
from psm.training.exchange import Exchange, handed_down, inherited
from psm.training.initial import initial_settings, initial_weights
from psm.training.launch import Launch, find_launch
from psm.training.module import PretrainModule
from psm.training.preemption import PreemptionCallback
from psm.training.preset import choose_preset
from psm.training.progress_bar import ProgressBar
from psm.training.resolve import check_settings, resolve
from psm.training.trainer import make_trainer, quiet
from psm.training.user_callbacks import check_callbacks, load_callbacks, split_callbacks
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import LostProcess, Preempted, UserError
from psm.utils.files import read_lines, remove_temporary_files, write_atomically, write_text_atomically
from psm.utils.resources import resources_explained
from psm.utils.run_folder import RunFolder
from psm.utils.run_lock import clear_run, lock_run
from psm.views.transform import Views

log = logging.getLogger("psm")

WAIT = 1800  # seconds that processes wait for each other; Lightning's default for a process group

MEMORY_ADVICE = (
    "give a smaller batch_size, a grad_cache_chunk below it, a smaller images.size or bank.size, or, to keep the "
    "images on disk, a smaller images.memory"
)

# How the backends of torch.distributed say that a process is gone.
LOST = re.compile(r"onnection (closed|reset|refused)|Broken pipe|gloo.*Timed out|NCCL|peer", re.IGNORECASE)


@dataclass(frozen=True)
class PretrainResult:
    """A finished run: its folder, the encoder, a record for each epoch, the resolved configuration, the data."""

    out: Path
    encoder: nn.Module
    metrics: list[dict[str, Any]]
    config: ResolvedPretrainConfig
    data: ImageDataset


# What may be given as data from Python, beside a name or a path.
DataLike = ImageDataset | ImageStore | torch.Tensor | np.ndarray | Dataset


def pretrain(
    out: str | Path,
    data: str | Path | Sequence[str | Path] | DataLike | None = None,
    encoder: str | nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    callbacks: Sequence[lightning.Callback | str] | lightning.Callback | str = (),
    **keys: Any,
) -> PretrainResult:
    """Train an encoder on unlabeled images. The keys are those of `psm pretrain`, nested ones as dictionaries.

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
        given["data"] = _data_name(data)
    if encoder is not None:
        given["encoder"] = "custom" if isinstance(encoder, nn.Module) else encoder
    if names:
        given["callbacks"] = names
    return run_pretraining(
        *_stored(config),
        given,
        data=None if isinstance(data, (str, Path, list, tuple)) else data,  # type: ignore[arg-type]
        encoder=encoder if isinstance(encoder, nn.Module) else None,
        callbacks=instances,
    )


def _stored(config: str | Path | Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The content of ``config=``, as a list of at most one."""
    if isinstance(config, (str, Path)):
        return [settings.refuse_call_keys(settings.read_yaml(config), f"config={config}")]
    return [settings.refuse_call_keys(config, "config=")] if config else []


def _data_name(data: str | Path | Sequence[str | Path] | DataLike) -> str | list[str]:
    """What data given from Python is called in the configuration."""
    if isinstance(data, (str, Path)):
        return str(data)
    if isinstance(data, (list, tuple)):
        return [str(source) for source in data]
    if isinstance(data, ImageDataset):
        return data.name
    return type(data).__name__ if isinstance(data, Dataset) else "images"


def _load_data(data: DataLike | None, config: PretrainSettings, progress: bool) -> ImageDataset:
    """The data given from Python, or what ``data=`` names."""
    if data is None:
        return load_dataset(config.data, config.images, progress, shares_machine(config.devices))
    if isinstance(data, Dataset):
        return from_torch(data, config.images, progress)
    if not isinstance(data, ImageDataset):
        data = ImageDataset("images", data if isinstance(data, ImageStore) else ImageStore(data), None, ())
    return hold_out(data, config.images.holdout)


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
    asked = settings.build(PretrainConfig, *overrides)
    if not asked.out:
        raise UserError("out= is missing: name a folder for the run, for example out=runs/a.")
    run = RunFolder(Path(asked.out).expanduser())
    with resources_explained(MEMORY_ADVICE, lambda: _how_to_continue(run)):
        return _pretrain(run, asked, overrides, data, encoder, callbacks, take_over)


def _how_to_continue(run: RunFolder) -> str:
    if not run.checkpoint.exists():
        return ""
    return f"The last checkpoint is intact: `psm pretrain out={run.folder} resume=true` continues from it."


def _pretrain(
    run: RunFolder,
    asked: PretrainConfig,
    overrides: Sequence[Mapping[str, Any]],
    data: DataLike | None,
    encoder: nn.Module | None,
    callbacks: Sequence[lightning.Callback],
    take_over: bool,
) -> PretrainResult:
    plugins = load_plugins(asked.plugins)
    handed = inherited()
    if handed is not None:  # Lightning has started this process from one that holds the folder
        join(int(os.environ["LOCAL_RANK"]) or 1)
        config, loaded, trainer, module = _follow(run, handed, Launch(), data, encoder, callbacks)
        return _fit(run, trainer, module, loaded, handed["resume"] is not None)
    launch = find_launch(asked)
    join(launch.rank)
    exchange = Exchange(launch, float(asked.ddp.get("timeout", WAIT)))
    if launch.rank > 0:
        decision = exchange.decision()
        with exchange.getting_ready():
            config, loaded, trainer, module = _follow(run, decision, launch, data, encoder, callbacks)
        with handed_down(decision):
            return _fit(run, trainer, module, loaded, decision["resume"] is not None)
    with ExitStack() as stack:
        deciding = stack.enter_context(ExitStack())
        deciding.enter_context(exchange.deciding())
        stack.enter_context(lock_run(run, asked.resume, asked.overwrite))
        resuming = asked.resume != "false" and run.used
        point = run.resume_point(asked.resume) if resuming else None
        begun = _begun_with(run, point) if point else None
        stored: PretrainSettings | None = begun
        if resuming and run.config.exists():
            stored = settings.build(PretrainConfig, settings.read_yaml(run.config))
        init = (stored or asked).init if point is None else None
        weights = initial_weights(init, run, encoder, take_over and stored is None) if init else None
        preset = None
        if stored is None:
            base = initial_settings(weights, overrides) if take_over else None
            preset = choose_preset(asked, overrides, data is not None and not isinstance(data, Dataset))
            preset = preset.beside(weights)
            user = settings.build(PretrainConfig, preset.settings, *overrides, {"preset": preset.name}, base=base)
        else:
            user = settings.build(PretrainConfig, *overrides, base=stored)
            user = user if user.preset != "auto" else replace(user, preset=stored.preset)
        user = replace(user, plugins=plugins or user.plugins)
        check_settings(user)
        loaded = _load_data(data, user, user.progress)
        if point is not None:
            _refuse_other_count(run, point, user.data, len(loaded.train))
        if data is None:
            user = replace(user, data=absolute_data(user.data), images=absolute_images(user.data, user.images))
        config = resolve(user, loaded)
        if stored:
            # The checkpoint has the configuration that the run began with, whatever config.yaml says by now.
            _refuse_changes(run, begun or stored, config)
        notes = preset.lines(len(loaded.train), loaded.size) if preset else []
        trainer, module = _prepare(run, config, loaded, encoder, callbacks, launch, weights, point, notes)
        del weights  # the networks have them
        decision = {
            "config": settings.to_dict(config),
            "resume": None if point is None else str(point),
            "images": len(loaded.train),
            "mean": list(module.info.mean),
        }
        exchange.decide(decision)
        if resuming:
            _continue_from(run, point, module)
        else:
            aside = stack.enter_context(clear_run(run, asked.overwrite))
        stack.enter_context(_logging(run, config))
        if not resuming and aside is not None:
            log.warning("the run that was in %s is now in %s", run.folder, aside)
        save_run_config(run, config)
        if module.info.init is not None and point is None:
            log.warning(describe(module.info.init, module.networks.heads))
        _report_unreadable(run, loaded)
        deciding.close()
        exchange.start()
        stack.enter_context(handed_down(decision))
        try:
            return _fit(run, trainer, module, loaded, point is not None)
        finally:  # images from shards are found to be unreadable when they are read
            if loaded.train.streamed is not None and loaded.train.streamed.unreadable:
                _report_unreadable(run, loaded)


def _follow(
    run: RunFolder,
    decision: Mapping[str, Any],
    launch: Launch,
    data: DataLike | None,
    encoder: nn.Module | None,
    callbacks: Sequence[lightning.Callback],
) -> tuple[ResolvedPretrainConfig, ImageDataset, lightning.Trainer, PretrainModule]:
    """Prepare what rank 0 has decided. Nothing is written."""
    config = settings.resolved_config(settings.build(PretrainConfig, decision["config"]))
    loaded = _load_data(data, config, progress=False)
    point = None if decision["resume"] is None else Path(decision["resume"])
    weights = initial_weights(config.init, run, encoder) if config.init and point is None else None
    trainer, module = _prepare(run, config, loaded, encoder, callbacks, launch, weights, point)
    difference = image_difference(
        {"images": decision["images"], "encoder_info": {"mean": decision["mean"]}}, len(loaded.train), module.info.mean
    )
    if difference is not None:
        raise UserError(f"data={config.data} is not the same here as on rank 0: {difference}.")
    return config, loaded, trainer, module


def _report_unreadable(run: RunFolder, data: ImageDataset) -> None:
    if data.unreadable:
        log.warning("%d unreadable files are left out, see %s", len(data.unreadable), run.unreadable)
    found = (*data.unreadable, *(data.train.streamed.unreadable if data.train.streamed is not None else ()))
    if found:
        write_text_atomically(run.unreadable, "".join(f"{file}\t{reason}\n" for file, reason in found))


def _begun_with(run: RunFolder, point: Path) -> ResolvedPretrainConfig:
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
    return load_run_config(checkpoint)


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
    remove_temporary_files(run.folder)
    if point is not None:
        _refuse_other_data(run, point, module)
        step = read_checkpoint(point)["global_step"]
        if point != run.checkpoint:
            write_atomically(run.checkpoint, lambda file: file.write(point.read_bytes()))
    run.truncate_metrics(step)


def _refuse_changes(run: RunFolder, begun: PretrainSettings, config: ResolvedPretrainConfig) -> None:
    """Refuse settings that differ from those of the run that is resumed; those of its method are complete again where
    the run began before a setting existed."""
    complete = settings.to_dict(begun) | method_of(begun).to_dict()
    before, now = (dict(settings.flatten(x)) for x in (complete, settings.to_dict(config)))
    for dotted, value in now.items():
        # The images are compared themselves: they may lie elsewhere by now. A run from before presets has none.
        may_change = dotted in MAY_CHANGE or dotted.partition(".")[0] in MAY_CHANGE
        may_change |= dotted == "data" or (dotted == "preset" and before.get(dotted, "auto") == "auto")
        if dotted == "epochs" and before.get(dotted) != value and run.encoder.exists():
            raise UserError(
                f"epochs={value} does not continue the run in {run.folder}, which is finished: its learning rate fell "
                f"to zero over epochs={before.get(dotted)}. Pretrain further in another run, from its weights and with "
                f"a schedule of its own: psm pretrain out=... init={run.folder} epochs=..."
            )
        if not may_change and before.get(dotted) != value:
            raise UserError(
                f"{dotted}={value} differs from {dotted}={before.get(dotted)} of the run in {run.folder}: resume it "
                f"without {dotted}= (and with config.yaml as it was), or start another run in another out."
            )


def _refuse_other_count(run: RunFolder, point: Path, data: str | list[str], count: int) -> None:
    """Refuse another number of images before anything that follows from it differs too."""
    described = read_checkpoint(point)["psm"]
    _refuse_difference(run, data, image_difference(described, count, described["encoder_info"]["mean"]))


def _refuse_other_data(run: RunFolder, point: Path, module: PretrainModule) -> None:
    """A run goes on with the images it began with: their number and their statistics tell."""
    described, images = read_checkpoint(point)["psm"], module.images
    difference = image_difference(described, len(images), module.info.mean, images.names_checksum)
    _refuse_difference(run, module.config.data, difference)


def _refuse_difference(run: RunFolder, data: str | list[str], difference: str | None) -> None:
    if difference is not None:
        raise UserError(
            f"data={show(data)} is not what the run in {run.folder} began with: {difference}; restore it, give with "
            "data= where those images are, or start another run in another out."
        )


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
    bar = ProgressBar(config.progress, notes=notes) if is_rank_zero() else None
    callbacks = [*load_callbacks(config.callbacks), *callbacks]
    own = [MetricsCallback(run, data, bar), *([bar] if bar else [])]
    # psm's metrics come before the user's callbacks, its checkpoint after them.
    checkpoint = CheckpointCallback(run)
    last = [checkpoint, PreemptionCallback(checkpoint)]
    trainer = make_trainer(run, config, [*own, *callbacks, *last], launch)
    if config.batch_size % trainer.world_size:
        raise UserError(
            f"batch_size={config.batch_size} is shared by {trainer.world_size} devices: give a multiple of that number."
        )
    method = method_of(config)
    nets = build_networks(config, method, views.size, encoder)
    init = None if weights is None else load_initial_weights(nets, weights, config.init_heads)
    if point is not None:
        init = checkpoint_encoder(read_checkpoint(point), point)[0].init
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = prefers_channels_last(trainer.strategy.root_device)
    if channels_last:
        nets.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.compile is not None:
        nets.compile_parts(config.compile)
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
        module = PretrainModule(nets, method, views, data.train, config, info, channels_last)
    except (RuntimeError, MemoryError):
        need = method.bank.size * config.heads.out_dim * 4 / 1e9
        raise UserError(f"bank.size={method.bank.size} needs {need:,.1f} GB of memory: give a smaller bank.") from None
    check_callbacks(callbacks, metric_names(module, data), bool(trainer.loggers))
    return trainer, module


def _fit(
    run: RunFolder, trainer: lightning.Trainer, module: PretrainModule, data: ImageDataset, resuming: bool
) -> PretrainResult:
    finished = _why_finished(run, module) if resuming else ""
    if finished:
        log.warning("the run in %s %s: nothing is left to train.", run.folder, finished)
    else:
        _train(trainer, module, run.checkpoint if resuming else None)
    # From the checkpoint, whatever strategy trained and wherever its weights are now.
    info, state = read_encoder(run.checkpoint)
    encoder = module.networks.encoder
    unwrapped(encoder).load_state_dict(state)
    if trainer.is_global_zero:
        save_encoder(run, encoder, info)
        log.info("the encoder is in %s", run.encoder)
    return PretrainResult(run.folder, encoder, read_lines(run.metrics), module.config, data)


def _why_finished(run: RunFolder, module: PretrainModule) -> str:
    """Why a run has nothing left to train, as the end of a sentence; empty for one that goes on."""
    checkpoint = read_checkpoint(run.checkpoint)
    if checkpoint["psm"].get("stopped_early"):
        return "was stopped early by a callback and counts as finished"
    epochs = module.config.epochs
    return f"is finished ({epochs} of {epochs} epochs)" if checkpoint["global_step"] >= module.total_steps else ""


def _train(trainer: lightning.Trainer, module: PretrainModule, checkpoint: Path | None) -> None:
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            trainer.fit(module, ckpt_path=None if checkpoint is None else str(checkpoint))
        except SystemExit:
            # Lightning turns an interrupt into an exit; the caller decides what an interrupt means.
            ended = [x for x in trainer.checkpoint_callbacks if isinstance(x, PreemptionCallback)]
            received = ended[0].received
            raise (KeyboardInterrupt if received is None else Preempted(received)) from None
        except MisconfigurationException as error:
            raise UserError(f"Lightning refuses these settings: {' '.join(str(error).split())}") from None
        except RuntimeError as error:
            if trainer.world_size > 1 and LOST.search(str(error)):
                raise LostProcess(
                    "another process of this run has ended or cannot be reached: start all of them again."
                ) from error
            raise


class _LogFile(logging.FileHandler):
    """A log that cannot be written, because the disk is full, neither ends a run nor prints a stack trace."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _logging(run: RunFolder, config: ResolvedPretrainConfig) -> Iterator[None]:
    """Copy log messages of the run to its log file."""
    handler = _LogFile(run.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        log.info("psm pretrain, method %s on %s", config.method, show(config.data))
        yield
    except BaseException as error:
        log.info("stopped: %s: %s", type(error).__name__, error)  # the caller tells the user
        raise
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
