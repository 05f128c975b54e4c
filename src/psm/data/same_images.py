"""Recognizing the images that a run was trained on, by their number, their channel means and their files' names."""

from collections.abc import Mapping, Sequence
from typing import Any

MEAN_TOLERANCE = 1e-4  # other images differ by more, rounding on another machine or thread count by less


def image_difference(
    described: Mapping[str, Any], count: int, mean: Sequence[float], names: int | None = None
) -> str | None:
    """How a data set differs from the one that a run was trained on, as part of a sentence; None if it does not.

    Args:
        described: What a checkpoint says of its run, ``checkpoint["psm"]``.
        count: Number of training images now.
        mean: Their channel means (3,), on a scale of 0 to 1.
        names: The checksum of their files' names, ``ImageStore.names_checksum``.
    """
    if described["images"] != count:
        return f"it holds {count} training images instead of {described['images']}"
    before = described["encoder_info"]["mean"]
    if max(abs(a - b) for a, b in zip(mean, before, strict=True)) > MEAN_TOLERANCE:
        now, then = (", ".join(f"{value:.4f}" for value in values) for values in (mean, before))
        return f"the channel means of its images are {now} instead of {then}"
    if names is not None and described.get("names") not in (None, names):
        return "its files have other names, and so perhaps another order"
    return None
