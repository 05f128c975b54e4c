"""Lightning's Trainer from a configuration: devices, strategy, precision, loggers."""

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from psm.config.run_settings import RunSettings
from psm.training.checkpoint import AtomicCheckpointIO
from psm.training.launch import Launch
from psm.training.loggers import build_loggers
from psm.utils.errors import UserError, did_you_mean
from psm.utils.run_folder import RunFolder

# Options that would change the number of steps, on which schedule, image order and resume depend.
BREAKS_STEPS = (
    *("accumulate_grad_batches", "limit_train_batches", "overfit_batches", "fast_dev_run"),
    *("max_steps", "min_steps", "max_time", "min_epochs", "reload_dataloaders_every_n_epochs"),
)


def make_trainer(
    run: RunFolder,
    config: RunSettings,
    callbacks: list[lightning.Callback],
    launch: Launch,
    command: str = "psm pretrain",
) -> lightning.Trainer:
    """The trainer that the configuration describes.

    Args:
        launch: how its processes were started, which decides devices and nodes.
        callbacks: in the order in which they run; Lightning moves those that save checkpoints to the end. One of them
            is psm's own, so that Lightning adds none.
        command: whose help is named where an option has a key of psm.
    """
    options: dict[str, Any] = {
        "max_epochs": config.epochs,
        "accelerator": config.accelerator,
        "devices": launch.devices or _number(config.devices),
        "num_nodes": launch.num_nodes or config.num_nodes,
        "strategy": _strategy(config, launch),
        "precision": config.precision,
        "gradient_clip_val": config.optim.clip,
        "logger": build_loggers(config.loggers, run.logs) or False,
        "callbacks": callbacks,
        "plugins": [AtomicCheckpointIO(), *filter(None, [launch.environment()])],
        "default_root_dir": run.folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    clash = options.keys() & config.trainer.keys()
    if clash:
        raise UserError(f"trainer.{sorted(clash)[0]} is set by psm itself: see `{command} --help` for its own key.")
    for name in BREAKS_STEPS:
        if name in config.trainer:
            raise UserError(f"trainer.{name} does not go with training by steps: choose batch_size and epochs instead.")
    try:
        with quiet():
            return lightning.Trainer(**options, **_defaults(config), **config.trainer)
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise UserError(f"Lightning refuses these settings: {' '.join(str(error).split())}") from None


def _defaults(config: RunSettings) -> dict[str, Any]:
    """Options that ``trainer.*`` may change. Shapes never change within a run, so that cudnn can look for the fastest
    convolutions once; not where a run is to be deterministic."""
    defaults = {
        "log_every_n_steps": config.monitor.log_every,
        "benchmark": True if torch.cuda.is_available() and not config.trainer.get("deterministic") else None,
    }
    return {name: value for name, value in defaults.items() if name not in config.trainer}


def _number(devices: str) -> int | str:
    return int(devices) if devices.lstrip("-").isdigit() else devices


def _strategy(config: RunSettings, launch: Launch) -> str | DDPStrategy:
    """Lightning's strategy; an instance where DDP has arguments or several processes were started by a launcher."""
    one = launch.world == 1 and config.num_nodes == 1 and config.devices in ("auto", "1")
    if not config.ddp or (config.strategy == "auto" and one):
        return config.strategy
    methods: dict[str, Any] = {"auto": "popen", "ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork"}
    if config.strategy not in methods:
        raise UserError(f"ddp.* is for strategy=ddp, not strategy={config.strategy}: leave one of them out.")
    options = dict(config.ddp)
    timeout = options.pop("timeout", None)
    if timeout is not None:
        options["timeout"] = timedelta(seconds=float(timeout))
    known = {*inspect.signature(DDPStrategy).parameters, *inspect.signature(DistributedDataParallel).parameters}
    if wrong := next((name for name in options if name not in known), None):
        raise UserError(f"ddp.{wrong} is no argument of Lightning's DDPStrategy{did_you_mean(wrong, known)}.")
    return DDPStrategy(start_method=methods[config.strategy], **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's advice on loaders, loggers and hardware, which a user of psm cannot act on."""
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
