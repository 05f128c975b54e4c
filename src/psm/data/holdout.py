"""Training images held out for testing, so that settings are chosen without a look at the test images."""

from dataclasses import replace

import torch

from psm.data.dataset import ImageDataset
from psm.data.splits import held_out_mask
from psm.utils.errors import UserError


def hold_out(data: ImageDataset, share: float | None) -> ImageDataset:
    """The data set with a share of each class of its training images as its test images; its own ones are left out.

    Which images these are is a function of the labels alone: every run and every score finds the same.
    """
    if share is None:
        return data
    labels = data.train.labels
    if labels is None:
        raise UserError(
            f"images.holdout={share:g} holds out a share of each class, and data={data.name} has no labels: leave it "
            "out."
        )
    held = torch.from_numpy(held_out_mask(labels.numpy(), share, "holdout"))
    if not held.any():
        raise UserError(
            f"images.holdout={share:g} holds out none of the {len(labels)} training images: give a larger share."
        )
    train, test = (data.train.select(mask.nonzero()[:, 0]) for mask in (~held, held))
    return replace(data, train=train, test=test)
