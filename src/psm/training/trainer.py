"""Lightning's Trainer from a configuration: devices, strategy, precision, loggers."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException

from psm.config.schema import ResolvedPretrainConfig
from psm.training.checkpoint import AtomicCheckpointIO
from psm.training.loggers import build_loggers
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder

# Options that would change the number of steps, on which schedule, image order and resume depend.
BREAKS_STEPS = (
    *("accumulate_grad_batches", "limit_train_batches", "overfit_batches", "fast_dev_run"),
    *("max_steps", "min_steps", "max_time", "min_epochs", "reload_dataloaders_every_n_epochs"),
)


def make_trainer(
    run: RunFolder, config: ResolvedPretrainConfig, callbacks: list[lightning.Callback]
) -> lightning.Trainer:
    """The trainer that the configuration describes.

    Args:
        callbacks: in the order in which they run; Lightning moves those that save checkpoints to the end. One of them
            is psm's own, so that Lightning adds none.
    """
    options: dict[str, Any] = {
        "max_epochs": config.epochs,
        "accelerator": config.accelerator,
        "devices": int(config.devices) if config.devices.lstrip("-").isdigit() else config.devices,
        "num_nodes": config.num_nodes,
        "strategy": config.strategy,
        "precision": config.precision,
        "gradient_clip_val": config.optim.clip,
        "logger": build_loggers(config.loggers, run.folder / "logs") or False,
        "callbacks": callbacks,
        "plugins": [AtomicCheckpointIO()],
        "default_root_dir": run.folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
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
            return lightning.Trainer(**options, **{"log_every_n_steps": config.monitor.log_every, **config.trainer})
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise UserError(f"Lightning refuses these settings: {' '.join(str(error).split())}") from None


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
