"""The images that a run was trained on are recognized by their number and, within 1e-4, their channel means."""

import pytest

from psm.data.same_images import image_difference

DESCRIBED = {"images": 100, "encoder_info": {"mean": [0.4, 0.5, 0.6]}}


@pytest.mark.parametrize("rounding", [0.0, 1e-12, 0.9e-4, -0.9e-4])
def test_the_same_images_may_differ_by_rounding(rounding: float) -> None:
    assert image_difference(DESCRIBED, 100, [0.4, 0.5 + rounding, 0.6]) is None


def test_another_number_of_images_is_named() -> None:
    assert image_difference(DESCRIBED, 80, [0.4, 0.5, 0.6]) == "it holds 80 training images instead of 100"


@pytest.mark.parametrize("channel", [0, 1, 2])
def test_other_images_of_the_same_number_are_told_by_any_channel(channel: int) -> None:
    mean = [0.4, 0.5, 0.6]
    mean[channel] -= 2e-4
    difference = image_difference(DESCRIBED, 100, mean)
    assert difference is not None
    assert "instead of 0.4000, 0.5000, 0.6000" in difference
