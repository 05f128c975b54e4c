"""Lightning's Trainer from a configuration: devices, strategy, precision, loggers."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException

from psm.config.schema import PretrainConfig
from psm.training.checkpoint import AtomicCheckpointIO
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder

LOGGERS = {
    "tensorboard": "lightning.pytorch.loggers.TensorBoardLogger",
    "csv": "lightning.pytorch.loggers.CSVLogger",
    "wandb": "lightning.pytorch.loggers.WandbLogger",
    "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
}


def _logger(name: str, run: RunFolder) -> Any:
    """One of Lightning's loggers by its short name, or any logger as module.Class, writing into the run folder."""
    module, _, attribute = LOGGERS.get(name, name).rpartition(".")
    if not module:
        raise UserError(f"loggers={name} is unknown: choose from {', '.join(LOGGERS)} or give module.Class.")
    try:
        return getattr(importlib.import_module(module), attribute)(save_dir=str(run.folder / "logs"))
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(f"loggers={name} cannot be used: {' '.join(str(error).split())}") from None


# Each would make the number of steps another one than the schedule, the order of images and a resume count on.
BREAKS_STEPS = (
    *("accumulate_grad_batches", "limit_train_batches", "overfit_batches", "fast_dev_run"),
    *("max_steps", "min_steps", "max_time", "min_epochs", "reload_dataloaders_every_n_epochs"),
)


def make_trainer(run: RunFolder, config: PretrainConfig, callbacks: list[lightning.Callback]) -> lightning.Trainer:
    """The trainer that the configuration asks for; what Lightning refuses is the user's to mend."""
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
        "plugins": [AtomicCheckpointIO()],
        "default_root_dir": run.folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    clash = options.keys() & config.trainer.keys()
    if clash:
        raise UserError(f"trainer.{sorted(clash)[0]} is set by psm itself: see `psm pretrain --help` for its own key.")
    for name in BREAKS_STEPS:
        if name in config.trainer:
            raise UserError(f"trainer.{name} does not go with training by steps: choose batch_size and epochs instead.")
    try:
        with quiet():
            return lightning.Trainer(**options, **config.trainer)
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise UserError(f"Lightning refuses these settings: {' '.join(str(error).split())}") from None


@contextmanager
def quiet() -> Iterator[None]:
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
