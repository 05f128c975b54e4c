"""Pretraining from a configuration: settle everything, hold the run folder, train, leave the encoder."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import nn

from psm.config import merge as settings
from psm.config.schema import MAY_CHANGE, PretrainConfig
from psm.data import DataSet, Pictures, load
from psm.methods.build import build_networks, composition_of
from psm.methods.registry import Composition
from psm.mining.purity import MINED
from psm.models import networks
from psm.models.pretrained import Loading, read_encoder, save_encoder
from psm.training.callbacks import Recorder
from psm.training.checkpoint import read_checkpoint
from psm.training.module import Pretraining
from psm.training.progress_bar import ProgressBar
from psm.training.trainer import make_trainer, quiet
from psm.utils.errors import UserError
from psm.utils.run_folder import Run, launched, read_lines, write_atomically
from psm.views.transform import Views, channel_statistics

log = logging.getLogger("psm")


@dataclass(frozen=True)
class PretrainResult:
    """A finished run: its folder, the encoder, a record for each epoch, the resolved configuration, the data."""

    out: Path
    encoder: nn.Module
    metrics: list[dict[str, Any]]
    config: PretrainConfig
    data: DataSet


def pretrain(
    out: str | Path,
    data: str | Path | DataSet | Pictures | torch.Tensor | np.ndarray | None = None,
    encoder: str | nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **keys: Any,
) -> PretrainResult:
    """Learn an encoder; the keys are those of `psm pretrain`, nested ones as dictionaries.

    >>> psm.pretrain("runs/a", data="cifar10", epochs=10, positives={"k": 3})  # doctest: +SKIP

    ``data`` may be a DataSet or uint8 pictures (N, 3, H, W), and ``encoder`` any module that turns (B, 3, H, W) into
    (B, F) or (B, F, h, w).
    """
    if not isinstance(out, (str, Path)):
        raise UserError(f"out={out!r} is not a path: name a folder for the run.")
    if encoder is not None and not isinstance(encoder, (str, nn.Module)):
        raise UserError(f"encoder={encoder!r} is neither a name nor a module: give for example 'resnet18'.")
    if isinstance(data, (torch.Tensor, np.ndarray, Pictures)):
        data = DataSet("pictures", data if isinstance(data, Pictures) else Pictures(data), None, ())
    given: dict[str, Any] = {**keys, "out": str(out)}
    if data is not None:
        given["data"] = data.name if isinstance(data, DataSet) else str(data)
    if encoder is not None:
        given["encoder"] = "custom" if isinstance(encoder, nn.Module) else encoder
    if isinstance(config, (str, Path)):
        stored = [settings.refuse_call_keys(settings.read_yaml(config), f"config={config}")]
    else:
        stored = [settings.refuse_call_keys(config, "config=")] if config else []
    return run_pretraining(
        *stored,
        given,
        data=data if isinstance(data, DataSet) else None,
        encoder=encoder if isinstance(encoder, nn.Module) else None,
    )


def run_pretraining(
    *wishes: Mapping[str, Any], data: DataSet | None = None, encoder: nn.Module | None = None
) -> PretrainResult:
    """Pretrain as the merged wishes say; ``data`` and ``encoder`` stand in for what their keys name."""
    asked = settings.build(PretrainConfig, *wishes)
    if not asked.out:
        raise UserError("out= is missing: name a folder for the run, for example out=runs/a.")
    run = Run(Path(asked.out).expanduser())
    if launched():  # the process that launched this one holds the folder and has settled what is in it
        stored = settings.build(PretrainConfig, settings.read_yaml(run.config))
        data = data or load(stored.data, stored.pictures, progress=False)
        trainer, module = _prepare(run, stored, data, encoder)
        return _fit(run, trainer, module, data, asked.resume != "false" and run.checkpoint.exists())
    with run.hold(asked.resume, asked.overwrite):
        resuming = asked.resume != "false" and run.used
        point = run.resume_point(asked.resume) if resuming else None
        begun = _begun_with(run, point) if point else None
        stored = None
        if resuming:
            stored = settings.build(PretrainConfig, settings.read_yaml(run.config) if run.config.exists() else begun)
        config = settings.build(PretrainConfig, *wishes, base=stored)
        _check(config)
        composition_of(config)
        data = data or load(config.data, config.pictures, config.progress)
        config = _settle(config, data)
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


def _begun_with(run: Run, point: Path) -> dict[str, Any]:
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


def _refuse_to_go_back(run: Run, point: Path, step: int) -> None:
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


def _continue_from(run: Run, point: Path | None, module: Pretraining) -> None:
    """Make the folder ready for a run that goes on; what was written after its checkpoint will be written again."""
    step = 0
    run.clear_leftovers()
    if point is not None:
        _refuse_other_data(run, point, module)
        step = read_checkpoint(point)["global_step"]
        if point != run.checkpoint:
            write_atomically(run.checkpoint, lambda file: file.write(point.read_bytes()))
    run.keep_metrics_until(step)


def _refuse_changes(run: Run, begun: dict[str, Any], config: PretrainConfig) -> None:
    """What is asked for now may not contradict the run that is resumed."""
    before, now = (dict(settings.flatten(x)) for x in (begun, settings.to_dict(config)))
    for dotted, value in now.items():
        if dotted not in MAY_CHANGE and before.get(dotted) != value:
            raise UserError(
                f"{dotted}={value} differs from {dotted}={before.get(dotted)} of the run in {run.folder}: resume it "
                f"without {dotted}= (and with config.yaml as it was), or start another run in another out."
            )


def _refuse_other_data(run: Run, point: Path, module: Pretraining) -> None:
    """A run goes on with the pictures it began with: their number and their statistics tell."""
    before = read_checkpoint(point)["psm"]
    now = module.description()
    if before["pictures"] != now["pictures"] or before["loading"]["mean"] != now["loading"]["mean"]:
        raise UserError(
            f"data={module.config.data} is not what the run in {run.folder} began with ({before['pictures']} pictures "
            f"then, {now['pictures']} now): restore it, or start another run in another out."
        )


def check_settings(config: PretrainConfig) -> None:
    """Refuse, in a sentence, what no data could make right."""
    _check(config)
    composition_of(config)
    networks.encoder(config.encoder, config.stem, config.views.size or config.pictures.size or 32)


def _check(config: PretrainConfig) -> None:
    at_least = (
        ("epochs", config.epochs, 1),
        ("batch_size", config.batch_size, 2),
        ("heads.hidden", config.heads.hidden, 1),
        ("heads.out", config.heads.out, 2),
        ("monitor.every", config.monitor.every, 1),
        ("monitor.pictures", config.monitor.pictures, 1),
        ("monitor.test_pictures", config.monitor.test_pictures, 1),
        ("monitor.log_every", config.monitor.log_every, 1),
        ("num_nodes", config.num_nodes, 1),
        ("chunk_size", 2 if config.chunk_size is None else config.chunk_size, 2),
        ("save.every_steps", 1 if config.save.every_steps is None else config.save.every_steps, 1),
        ("save.snapshots", 1 if config.save.snapshots is None else config.save.snapshots, 1),
        ("optim.lr", config.optim.lr, 0),
        ("optim.warmup_lr", config.optim.warmup_lr, 0),
        ("optim.momentum", config.optim.momentum, 0),
        ("optim.weight_decay", config.optim.weight_decay or 0, 0),
    )
    for name, value, least in at_least:
        if not value >= least:
            raise UserError(f"{name}={value} is too small: give {least} or more.")
    if config.optim.clip is not None and config.optim.clip <= 0:
        raise UserError(f"optim.clip={config.optim.clip} would stop all learning: give a number above 0, or none.")
    if config.compile is not None and config.compile not in torch.compiler.list_backends(None):
        known = ", ".join(torch.compiler.list_backends())
        raise UserError(f"compile={config.compile} is no backend of torch.compile: give one of {known}, or none.")
    if config.optim.momentum >= 1:
        raise UserError(f"optim.momentum={config.optim.momentum} never forgets: give a number below 1.")
    if not 0 <= config.optim.warmup <= 1:
        raise UserError(f"optim.warmup={config.optim.warmup} is a share of all steps: give a number from 0 to 1.")


def _settle(config: PretrainConfig, data: DataSet) -> PretrainConfig:
    """The resolved configuration: everything that depends on the data or the method filled in."""
    if len(data.train) < 2:
        raise UserError(f"data={config.data} has {len(data.train)} picture to train on: contrasting needs at least 2.")
    batch_size = config.batch_size
    if len(data.train) < batch_size:
        batch_size = len(data.train) // 2 * 2
        log.warning(
            "batch_size=%d is more than the %d pictures there are: training with batch_size=%d.",
            config.batch_size,
            len(data.train),
            batch_size,
        )
    optim = config.optim
    if optim.weight_decay is None:
        optim = replace(optim, weight_decay=1e-3 if data.size < 64 else 1e-4)
    composition = composition_of(config)
    if config.monitor.purity:
        _check_purity(config, data, composition)
    return replace(
        config,
        batch_size=batch_size,
        optim=optim,
        pictures=replace(config.pictures, size=data.size),
        **{f.name: getattr(composition, f.name) for f in fields(composition)},
    )


def _check_purity(config: PretrainConfig, data: DataSet, composition: Composition) -> None:
    if not data.labelled:
        raise UserError(f"monitor.purity=true compares labels, and data={config.data} has none: leave it at false.")
    if not composition.needs_bank:
        raise UserError(
            f"monitor.purity=true looks at what a bank holds, and method={config.method} as set has none: leave it at "
            "false."
        )
    if composition.bank.size < MINED:
        raise UserError(f"monitor.purity=true mines {MINED} rows: give bank.size={MINED} or more.")


def _prepare(
    run: Run, config: PretrainConfig, data: DataSet, encoder: nn.Module | None
) -> tuple[lightning.Trainer, Pretraining]:
    """The trainer and the module. Whatever the user got wrong shows here, before anything is written."""
    mean, std = channel_statistics(data.train)
    views = Views(config.views, data.size, mean, std)
    bar = ProgressBar(config.epochs, config.batch_size) if config.progress and not launched() else None
    trainer = make_trainer(run, config, [Recorder(run, data, bar), *([bar] if bar else [])])
    if config.batch_size % trainer.world_size:
        raise UserError(
            f"batch_size={config.batch_size} is shared by {trainer.world_size} devices: give a multiple of that number."
        )
    nets = build_networks(config, views.size, encoder)
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = networks.prefers_channels_last(trainer.strategy.root_device)
    if channels_last:
        nets = nets.to(memory_format=torch.channels_last)
    if config.compile is not None:
        nets.compile_parts(config.compile)
    loading = Loading(
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
        module = Pretraining(nets, composition_of(config), views, data.train, config, loading, channels_last)
    except (RuntimeError, MemoryError):
        need = config.bank.size * config.heads.out * 4 / 1e9
        raise UserError(f"bank.size={config.bank.size} needs {need:,.1f} GB of memory: give a smaller bank.") from None
    return trainer, module


def _fit(run: Run, trainer: lightning.Trainer, module: Pretraining, data: DataSet, resuming: bool) -> PretrainResult:
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            trainer.fit(module, ckpt_path=str(run.checkpoint) if resuming else None)
        except SystemExit:
            # Lightning turns an interrupt into an exit; whoever called decides what an interrupt means.
            raise KeyboardInterrupt from None
    # From the checkpoint, whatever strategy trained and wherever its weights are now.
    loading, state = read_encoder(run.checkpoint)
    encoder = module.networks.encoder
    networks.unwrapped(encoder).load_state_dict(state)
    if trainer.is_global_zero:
        save_encoder(run, encoder, loading)
        log.info("the encoder is in %s", run.encoder)
    return PretrainResult(run.folder, encoder, read_lines(run.metrics), module.config, data)


@contextmanager
def _logging(run: Run, config: PretrainConfig) -> Iterator[None]:
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
