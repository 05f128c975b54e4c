"""From the settings that a user gave for fine-tuning to those that a run has."""

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from psm.config import merge as settings
from psm.config.finetune import FinetuneConfig, ResolvedFinetuneConfig
from psm.config.keys import show
from psm.data import ImageDataset, ImageStore
from psm.data.splits import held_out_mask
from psm.models.pretrained import EncoderInfo
from psm.training.optim import check_optimizer
from psm.utils.devices import resolve_precision
from psm.utils.errors import UserError

log = logging.getLogger("psm")

# Optimizer -> learning rate and weight decay where the user leaves them open; with a frozen encoder as "head".
DEFAULT_LR = {"sgd": 0.03, "adamw": 1e-3, "lars": 1.0}
DEFAULT_HEAD_LR = {"sgd": 0.1, "adamw": 1e-3, "lars": 1.0}
DEFAULT_WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 1e-2, "lars": 1e-6}


class Parts(NamedTuple):
    """The training images of a data set, without and with those held out for validation."""

    train: ImageStore
    validation: ImageStore | None


def check_settings(config: FinetuneConfig, info: EncoderInfo | None) -> None:
    """Refuse, in a sentence, what no data could make right.

    Args:
        config: the user's settings.
        info: of the encoder to start from; None from scratch.
    """
    if not config.data:
        raise UserError("data= is missing: give labeled images, for example a folder with a subfolder for each class.")
    if info is None:
        if config.encoder is None:
            raise UserError("checkpoint=none trains from scratch: give encoder= too, for example encoder=resnet18.")
        if config.head_only:
            raise UserError("head_only=true leaves the encoder as it is: give the checkpoint of a trained one.")
    elif config.encoder not in (None, info.encoder):
        raise UserError(
            f"encoder={config.encoder} is not the encoder of checkpoint={config.checkpoint}, {info.encoder}: leave "
            "encoder= out, or give checkpoint=none to train from scratch."
        )
    elif config.stem not in ("auto", info.stem):
        raise UserError(
            f"stem={config.stem} is not the stem of checkpoint={config.checkpoint}, {info.stem}: leave stem= out."
        )
    if config.head_only and config.layer_decay != 1:
        raise UserError("layer_decay= is about the encoder's layers, and head_only=true trains none: leave one out.")
    check_optimizer(config.optim)


def resolve(config: FinetuneConfig, data: ImageDataset, info: EncoderInfo | None) -> ResolvedFinetuneConfig:
    """The settings of a run on this data: what the user gave, the rest from the checkpoint and the data."""
    if data.train.labels is None:
        raise UserError(
            f"data={show(config.data)} has no labels to learn: sort its images into a subfolder for each class, or "
            "give a labeled set, for example data=cifar10."
        )
    if len(data.train.labels.unique()) < 2:
        raise UserError(f"data={show(config.data)} has images of one class only: a classifier needs at least 2.")
    train = split_validation(data.train, config.validation).train
    optim, name = config.optim, config.optim.name
    lr = (DEFAULT_HEAD_LR if config.head_only else DEFAULT_LR)[name]
    decay = 0.0 if config.head_only else DEFAULT_WEIGHT_DECAY[name]
    return settings.resolve_as(
        ResolvedFinetuneConfig,
        config,
        encoder=config.encoder if info is None else info.encoder,
        stem=config.stem if info is None else info.stem,
        batch_size=_batch_size(config.batch_size, len(train)),
        precision=resolve_precision(config.precision, config.accelerator),
        images=replace(config.images, size=data.size),
        optim=replace(
            optim,
            lr=lr if optim.lr is None else optim.lr,
            weight_decay=decay if optim.weight_decay is None else optim.weight_decay,
        ),
    )


def split_validation(images: ImageStore, share: float) -> Parts:
    """The training images without a share of each class, and that share; a class with one image keeps it."""
    assert images.labels is not None
    held = torch.zeros(len(images), dtype=torch.bool)
    if share > 0:
        held = torch.from_numpy(held_out_mask(images.labels.numpy(), share, "validation"))
    if not held.any():
        return Parts(images.select(torch.arange(len(images))), None)
    return Parts(images.select((~held).nonzero().flatten()), images.select(held.nonzero().flatten()))


def _batch_size(batch_size: int, images: int) -> int:
    """The batch size within the images there are."""
    if images < 2:
        raise UserError(f"there is {images} image to train on: fine-tuning needs at least 2.")
    if images < batch_size:
        log.warning("batch_size=%d is more than the %d training images: a step takes all of them.", batch_size, images)
    return min(batch_size, images)
