"""From the settings that a user gave to those that a run has: checked, and filled in from the method and the data."""

import logging
from dataclasses import replace

import torch

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.schema import PretrainConfig, ResolvedPretrainConfig
from psm.data import ImageDataset
from psm.methods.build import method_of
from psm.methods.spec import MethodSpec
from psm.mining.purity import MINED
from psm.models.factory import create_encoder
from psm.training.optim import check_optimizer, default_lr, default_weight_decay
from psm.utils.devices import resolve_precision
from psm.utils.errors import UserError

log = logging.getLogger("psm")


def check_settings(config: PretrainConfig) -> None:
    """Refuse, in a sentence, what no data could make right; the bounds of each key were checked when it was built."""
    if config.compile is not None and config.compile not in torch.compiler.list_backends(()):
        known = ", ".join(torch.compiler.list_backends())
        raise UserError(f"compile={config.compile} is no backend of torch.compile: give one of {known}, or none.")
    if config.compile_mode is not None and (
        config.compile != "inductor" or config.compile_mode not in torch._inductor.list_mode_options()
    ):
        known = ", ".join(torch._inductor.list_mode_options())
        raise UserError(
            f"compile_mode={config.compile_mode} is a mode of compile=inductor: give that, and one of {known}."
        )
    check_optimizer(config.optim)
    method_of(config)


def check_encoder(config: PretrainConfig) -> None:
    """Refuse an encoder that cannot be built, by building it."""
    create_encoder(config.encoder, config.stem, config.views.size or config.images.size or 32)


def resolve(config: PretrainConfig, data: ImageDataset) -> ResolvedPretrainConfig:
    """The settings of a run on this data: what the user gave, the rest from the method and the data."""
    if len(data.train) < 2:
        raise UserError(
            f"data={show(config.data)} has {len(data.train)} image to train on: contrasting needs at least 2."
        )
    optim = config.optim
    method = method_of(config)
    if config.monitor.purity:
        _check_purity(config, data, method)
    if config.monitor.linear and not data.labeled:
        raise UserError(f"monitor.linear=true learns from labels, and data={config.data} has none: leave it at false.")
    return settings.resolved_config(
        config,
        batch_size=_batch_size(config.batch_size, len(data.train)),
        optim=replace(optim, lr=default_lr(optim), weight_decay=default_weight_decay(optim, data.size)),
        images=replace(config.images, size=data.size),
        precision=resolve_precision(config.precision, config.accelerator),
        **method.to_dict(),
    )


def _batch_size(batch_size: int, images: int) -> int:
    """The batch size, an even number within the images there are."""
    if images >= batch_size:
        return batch_size
    largest = images // 2 * 2
    log.warning(
        "batch_size=%d is more than the %d images there are: training with batch_size=%d.", batch_size, images, largest
    )
    return largest


def _check_purity(config: PretrainConfig, data: ImageDataset, method: MethodSpec) -> None:
    if not data.labeled:
        raise UserError(
            f"monitor.purity=true compares labels, and data={show(config.data)} has none: leave it at false."
        )
    if not method.needs_bank:
        raise UserError(
            f"monitor.purity=true looks at what a bank holds, and method={config.method} as set has none: leave it at "
            "false."
        )
    if method.bank.size < MINED:
        raise UserError(f"monitor.purity=true mines {MINED} rows: give bank.size={MINED} or more.")
