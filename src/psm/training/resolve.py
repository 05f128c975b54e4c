"""From the settings that a user gave to those that a run has: checked, and filled in from the method and the data."""

import logging
from dataclasses import replace

import torch

from psm.config.schema import PretrainConfig
from psm.data import ImageDataset
from psm.methods.build import method_of
from psm.methods.spec import MethodSpec
from psm.mining.purity import MINED
from psm.models.factory import create_encoder
from psm.training.optim import check_optimizer, default_lr, default_weight_decay
from psm.utils.errors import UserError

log = logging.getLogger("psm")


def check_settings(config: PretrainConfig) -> None:
    """Refuse, in a sentence, what no data could make right."""
    check(config)
    method_of(config)
    create_encoder(config.encoder, config.stem, config.views.size or config.images.size or 32)


def check(config: PretrainConfig) -> None:
    at_least = (
        ("epochs", config.epochs, 1),
        ("batch_size", config.batch_size, 2),
        ("heads.hidden_dim", config.heads.hidden_dim, 1),
        ("heads.out_dim", config.heads.out_dim, 2),
        ("monitor.every", config.monitor.every, 1),
        ("monitor.images", config.monitor.images, 1),
        ("monitor.test_images", config.monitor.test_images, 1),
        ("monitor.log_every", config.monitor.log_every, 1),
        ("num_nodes", config.num_nodes, 1),
        ("grad_cache_chunk", 2 if config.grad_cache_chunk is None else config.grad_cache_chunk, 2),
        ("save.every_steps", 1 if config.save.every_steps is None else config.save.every_steps, 1),
        ("save.snapshots", 1 if config.save.snapshots is None else config.save.snapshots, 1),
        ("optim.lr", config.optim.lr or 0, 0),
        ("optim.warmup_lr", config.optim.warmup_lr, 0),
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
    check_optimizer(config.optim)
    if not 0 <= config.optim.warmup <= 1:
        raise UserError(f"optim.warmup={config.optim.warmup} is a share of all steps: give a number from 0 to 1.")


def resolve(config: PretrainConfig, data: ImageDataset) -> PretrainConfig:
    """The resolved configuration: everything that depends on the data or the method filled in."""
    if len(data.train) < 2:
        raise UserError(f"data={config.data} has {len(data.train)} image to train on: contrasting needs at least 2.")
    batch_size = config.batch_size
    if len(data.train) < batch_size:
        batch_size = len(data.train) // 2 * 2
        log.warning(
            "batch_size=%d is more than the %d images there are: training with batch_size=%d.",
            config.batch_size,
            len(data.train),
            batch_size,
        )
    optim = config.optim
    optim = replace(optim, lr=default_lr(optim), weight_decay=default_weight_decay(optim, data.size))
    method = method_of(config)
    if config.monitor.purity:
        _check_purity(config, data, method)
    return replace(
        config,
        batch_size=batch_size,
        optim=optim,
        images=replace(config.images, size=data.size),
        **method.to_dict(),
    )


def _check_purity(config: PretrainConfig, data: ImageDataset, method: MethodSpec) -> None:
    if not data.labeled:
        raise UserError(f"monitor.purity=true compares labels, and data={config.data} has none: leave it at false.")
    if not method.needs_bank:
        raise UserError(
            f"monitor.purity=true looks at what a bank holds, and method={config.method} as set has none: leave it at "
            "false."
        )
    if method.bank.size < MINED:
        raise UserError(f"monitor.purity=true mines {MINED} rows: give bank.size={MINED} or more.")
