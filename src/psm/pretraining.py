"""Pretraining from a configuration: settle everything, hold the run folder, train, leave the encoder."""

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from psm import networks, settings
from psm.augment import Views, channel_statistics
from psm.checkpoints import AtomicCheckpoints, read_checkpoint
from psm.config import PretrainConfig
from psm.data import DataSet, load
from psm.errors import UserError
from psm.export import Loading, save_encoder
from psm.methods import Composition, compose
from psm.progress import ProgressBar
from psm.randomness import derived_seed
from psm.recording import Recorder
from psm.run import Run, launched, read_lines, write_atomically
from psm.topology import Topology
from psm.training import Pretraining

log = logging.getLogger("psm")

# What may differ when a run is resumed; anything else would make it another run.
MAY_CHANGE = {"out", "resume", "overwrite", "accelerator", "devices", "num_nodes", "strategy", "loggers", "progress"}


@dataclass(frozen=True)
class PretrainResult:
    """A finished run: its folder, the trained encoder, the record of each epoch and the resolved configuration."""

    out: Path
    encoder: nn.Module
    metrics: list[dict[str, Any]]
    config: PretrainConfig


def pretrain(
    out: str | Path,
    data: str | DataSet | None = None,
    encoder: str | nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **keys: Any,
) -> PretrainResult:
    """Learn an encoder; the keys are those of `psm pretrain`, nested ones as dictionaries.

    >>> psm.pretrain("runs/a", data="cifar10", epochs=10, positives={"k": 3})  # doctest: +SKIP

    ``data`` may be a DataSet and ``encoder`` any module that turns (B, 3, H, W) into (B, F) or (B, F, h, w).
    """
    given: dict[str, Any] = {**keys, "out": str(out)}
    if data is not None:
        given["data"] = data.name if isinstance(data, DataSet) else data
    if encoder is not None:
        given["encoder"] = "custom" if isinstance(encoder, nn.Module) else encoder
    return run_pretraining(
        *([settings.read_yaml(config)] if isinstance(config, (str, Path)) else [config] if config else []),
        given,
        data=data if isinstance(data, DataSet) else None,
        encoder=encoder if isinstance(encoder, nn.Module) else None,
    )


def run_pretraining(
    *wishes: Mapping[str, Any], data: DataSet | None = None, encoder: nn.Module | None = None
) -> PretrainResult:
    """Pretrain as the merged wishes say; ``data`` and ``encoder`` stand in for what their keys name."""
    config = settings.build(PretrainConfig, *wishes)
    if not config.out:
        raise UserError("out= is missing: name a folder for the run, for example out=runs/a.")
    run = Run(Path(config.out).expanduser())
    if not launched():
        run.check(config.resume, config.overwrite)
    resuming = config.resume and run.checkpoint.exists()
    if resuming:
        config = _resumed(run, wishes)
    composition = compose(config.method, {f.name: getattr(config, f.name) for f in fields(Composition)})
    _check(config)
    data = data or load(config.data, config.pictures, config.progress and not launched())
    config = _settle(config, composition, data)
    trainer, module = _prepare(run, config, composition, data, encoder)
    if launched():
        return _fit(run, trainer, module, resuming)
    with run.hold():
        if resuming:
            run.clear_leftovers()
            run.keep_metrics_until(read_checkpoint(run.checkpoint)["global_step"])
        else:
            run.empty()
        with _logging(run, config):
            write_atomically(run.config, lambda file: file.write(settings.to_yaml(module.config).encode()))
            if data.unreadable:
                log.warning("%d unreadable files are left out, see %s", len(data.unreadable), run.unreadable)
                lines = "".join(f"{file}\t{reason}\n" for file, reason in data.unreadable)
                write_atomically(run.unreadable, lambda file: file.write(lines.encode()))
            return _fit(run, trainer, module, resuming)


def _resumed(run: Run, wishes: tuple[Mapping[str, Any], ...]) -> PretrainConfig:
    """The configuration of the run to resume; what was asked for now may not contradict it."""
    stored = settings.build(PretrainConfig, settings.read_yaml(run.config))
    config = settings.build(PretrainConfig, *wishes, base=stored)
    before, now = (dict(settings.flatten(settings.to_dict(x))) for x in (stored, config))
    for dotted, value in now.items():
        if dotted not in MAY_CHANGE and before.get(dotted) != value:
            raise UserError(
                f"{dotted}={value} differs from {dotted}={before.get(dotted)} of the run in {run.folder}: resume it "
                f"without {dotted}=, or start another run in another out."
            )
    return config


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
        ("save.every_steps", config.save.every_steps or 1, 1),
        ("save.snapshots", config.save.snapshots or 1, 1),
        ("optim.lr", config.optim.lr, 0),
        ("optim.warmup_lr", config.optim.warmup_lr, 0),
        ("optim.momentum", config.optim.momentum, 0),
        ("optim.weight_decay", config.optim.weight_decay or 0, 0),
    )
    for name, value, least in at_least:
        if not value >= least:
            raise UserError(f"{name}={value} is too small: give {least} or more.")
    if not 0 <= config.optim.warmup <= 1:
        raise UserError(f"optim.warmup={config.optim.warmup} is a share of all steps: give a number from 0 to 1.")


def _settle(config: PretrainConfig, composition: Composition, data: DataSet) -> PretrainConfig:
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
    return replace(
        config,
        batch_size=batch_size,
        optim=optim,
        pictures=replace(config.pictures, size=data.size),
        **{f.name: getattr(composition, f.name) for f in fields(Composition)},
    )


def _prepare(
    run: Run, config: PretrainConfig, composition: Composition, data: DataSet, encoder: nn.Module | None
) -> tuple[lightning.Trainer, Pretraining]:
    """The trainer and the module. Whatever the user got wrong shows here, before anything is written."""
    mean, std = channel_statistics(data.train)
    views = Views(config.views, data.size, mean, std)
    trainer = _trainer(run, config, data)
    if config.batch_size % trainer.world_size:
        raise UserError(
            f"batch_size={config.batch_size} is shared by {trainer.world_size} devices: give a multiple of that number."
        )
    if config.channels_last is None:
        config = replace(config, channels_last=networks.prefers_channels_last(trainer.strategy.root_device))
    nets = build_networks(config, views.size, encoder)
    if config.channels_last:
        nets = nets.to(memory_format=torch.channels_last)
    loading = Loading(
        encoder=config.encoder,
        stem=getattr(nets.encoder, "stem", "auto"),
        width=nets.encoder.width,
        size=views.size,
        mean=list(mean),
        std=list(std),
        method=config.method,
        data=config.data,
        epoch=0,
    )
    return trainer, Pretraining(nets, composition, views, data.train, config, loading)


def _fit(run: Run, trainer: lightning.Trainer, module: Pretraining, resuming: bool) -> PretrainResult:
    with _quiet():
        trainer.fit(module, ckpt_path=str(run.checkpoint) if resuming else None)
    encoder = module.networks.encoder
    if trainer.is_global_zero:
        save_encoder(run, encoder, module.loading_now())
        log.info("the encoder is in %s", run.encoder)
    return PretrainResult(run.folder, encoder, read_lines(run.metrics), module.config)


def build_networks(config: PretrainConfig, size: int, encoder: nn.Module | None = None) -> Topology:
    """The networks that the configuration names, with weights drawn from its seed, for views of ``size`` pixels."""
    heads, topology = config.heads, config.topology
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "weights"))
        backbone = (
            networks.encoder(config.encoder, config.stem, size)
            if encoder is None
            else networks.as_encoder(encoder, size)
        )
        projector = networks.projector(backbone.width, heads.hidden, heads.out)
        predictor = networks.predictor(heads.out, heads.hidden, heads.out) if topology.predictor else None
        return Topology(backbone, projector, predictor, topology.target)


def _trainer(run: Run, config: PretrainConfig, data: DataSet) -> lightning.Trainer:
    bar = ProgressBar(config.epochs, config.batch_size) if config.progress else None
    callbacks = [Recorder(run, data, bar), *([bar] if bar else [])]
    options = {
        "max_epochs": config.epochs,
        "accelerator": config.accelerator,
        "devices": int(config.devices) if config.devices.lstrip("-").isdigit() else config.devices,
        "num_nodes": config.num_nodes,
        "strategy": config.strategy,
        "precision": config.precision,
        "gradient_clip_val": config.optim.clip,
        "logger": [_logger(name, run) for name in config.loggers] or False,
        "callbacks": callbacks,
        "plugins": [AtomicCheckpoints()],
        "default_root_dir": run.folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    clash = options.keys() & config.trainer.keys()
    if clash:
        raise UserError(f"trainer.{sorted(clash)[0]} is set by psm itself: see `psm pretrain --help` for its own key.")
    try:
        with _quiet():
            return lightning.Trainer(**options, **config.trainer)
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise UserError(f"Lightning refuses these settings: {' '.join(str(error).split())}") from None


LOGGERS = {
    "tensorboard": "lightning.pytorch.loggers.TensorBoardLogger",
    "csv": "lightning.pytorch.loggers.CSVLogger",
    "wandb": "lightning.pytorch.loggers.WandbLogger",
    "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
}


def _logger(name: str, run: Run) -> Any:
    """One of Lightning's loggers by its short name, or any logger as module.Class, writing into the run folder."""
    module, _, attribute = LOGGERS.get(name, name).rpartition(".")
    if not module:
        raise UserError(f"loggers={name} is unknown: choose from {', '.join(LOGGERS)} or give module.Class.")
    try:
        return getattr(importlib.import_module(module), attribute)(save_dir=str(run.folder / "logs"))
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(f"loggers={name} cannot be used: {' '.join(str(error).split())}") from None


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
        log.error("stopped: %s: %s", type(error).__name__, error)
        raise
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's advice on loaders, loggers and hardware says nothing that a user of psm could act on."""
    loud = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    for name in loud:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            yield
    finally:
        for name, level in loud.items():
            logging.getLogger(name).setLevel(level)
