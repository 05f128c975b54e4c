"""Crop and colors in one pass: the views that torch's functions make, and taken only where it applies."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import compiled, using
from psm.config.schema import ViewsConfig
from psm.kernels import crop as crops
from psm.kernels import runtime as processor
from psm.views.transform import LUMA, Views

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


def images_of(count, height, width):
    draws = torch.Generator().manual_seed(count + height)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=draws)


def slopes(count, height, width):
    """Images in which every pixel differs from those beside it, and ends differ most."""
    down, across = torch.arange(height)[:, None] / height, torch.arange(width) / width
    return (
        (torch.stack([down * across, across.expand(height, -1), 1 - down * across]) * 255).byte().repeat(count, 1, 1, 1)
    )


def made(views, images, way=None, channels_last=False, draws=None):
    """Views, by torch's functions if ``way`` is False."""
    draws = draws or views.sample_params(len(images), torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as changed:
        if way is False:
            changed.setattr(crops, "apply_to", lambda *given: False)
        return views.apply(images, draws, channels_last=channels_last)


@compiled
@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.integers(1, 40),
    later=st.sampled_from([{}, {"blur": 0.5}, {"solarize": 0.5}, {"blur": 0.5, "solarize": 0.5}]),
    crop=st.sampled_from([[0.05, 1.0], [0.2, 1.0], [1.0, 1.0]]),
    channels_last=st.booleans(),
    threads=st.integers(1, 3),
)
def test_views_are_those_of_torch(count, height, width, size, later, crop, channels_last, threads):
    views = Views(ViewsConfig(size=size, crop_scale=crop, **({"blur": 0.0} | later)), size, MEAN, STD)
    images = images_of(count, height, width)
    with using(threads):
        assert crops.apply_to(images, size)
        found = made(views, images, channels_last=channels_last)
    expected = made(views, images, False, channels_last)
    assert found.stride() == expected.stride()
    far = (found - expected).abs() >= 2e-4
    if "solarize" in later:  # a value in the middle may round to either side, and be inverted or not
        mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
        far &= (expected * std + mean - 0.5).abs() > 1e-3
    assert not far.any()


@compiled
def test_most_of_a_large_image_goes_into_a_small_view():
    """Every pixel counts: many of them for each place."""
    views = Views(ViewsConfig(size=3, crop_scale=[0.9, 1.0], crop_ratio=[0.5, 2.0], blur=0.0), 3, MEAN, STD)
    for images in (slopes(4, 700, 513), slopes(4, 1, 900), slopes(4, 900, 2), slopes(2, 4096, 4096)):
        torch.testing.assert_close(made(views, images), made(views, images, False), atol=5e-4, rtol=0)


@compiled
@pytest.mark.parametrize("blur", [0.0, 0.5])
def test_three_views_in_several_parts_of_images_that_lie_apart(blur):
    views = Views(ViewsConfig(size=64, blur=blur), 64, MEAN, STD)
    images = images_of(100, 64, 128)[..., ::2]
    draws = views.sample_params(100, torch.Generator().manual_seed(1), views=3)
    found, expected = (made(views, images, way, draws=draws) for way in (None, False))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@compiled
def test_draws_that_images_share_and_boxes_that_are_none():
    views, images = Views(ViewsConfig(), 32, MEAN, STD), images_of(4, 32, 32)
    draws = views.sample_params(4, torch.Generator().manual_seed(1))
    shared = replace(
        draws, brightness=torch.ones(2, 1), contrast=torch.full((2, 1), 0.5), crop_position=draws.crop_position[:, :1]
    )
    shared = replace(shared, crop_scale=draws.crop_scale[:, :1], crop_ratio=draws.crop_ratio[:, :1])
    found, expected = (made(views, images, way, draws=shared) for way in (None, False))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    for wrong in (-0.5, torch.nan):  # nothing outside the image is read
        place = draws.crop_position.clone()
        place[1, 2] = wrong
        area = draws.crop_scale.clone()
        area[1, 2] = 0.3
        found = made(views, images, draws=replace(draws, crop_position=place, crop_scale=area))
        assert found[1, 2].isnan().all()
        assert found.isnan().flatten(2).any(2).sum() == 1


@compiled
def test_a_image_s_view_does_not_depend_on_its_company_or_on_threads():
    """Bit for bit, whoever comes first: or processes that share a batch would not share its views."""
    views, images = Views(ViewsConfig(), 32, MEAN, STD), images_of(40, 32, 32)
    draws, found = views.sample_params(40, torch.Generator().manual_seed(1)), []
    for threads in (1, 2, 2, 3):
        with using(threads):
            found.append(made(views, images, draws=draws))
    assert all(torch.equal(again, found[0]) for again in found[1:])
    assert torch.equal(made(views, images[7:19], draws=draws[7:19]), found[0][:, 7:19])


@compiled
def test_neither_default_type_nor_device_changes_it():
    views, images = Views(ViewsConfig(), 32, MEAN, STD), images_of(4, 32, 32)
    draws = views.sample_params(4, torch.Generator().manual_seed(1))
    expected = made(views, images, draws=draws)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert torch.equal(made(views, images, draws=draws), expected)
        given = crops_of(views, images, draws)
        with torch.device("meta"):
            crops.make(*given)
        assert torch.equal(given[0], expected)
    finally:
        torch.set_default_dtype(torch.float32)


def crops_of(views, images, draws):
    """What ``crops.make`` is given."""
    box = draws.boxes(*images.shape[2:], views.settings.crop_ratio)
    empty = torch.empty(2, len(images), 3, 32, 32, dtype=torch.float32)
    return empty, images, box, draws.flip, draws.colors(), (LUMA, MEAN, STD)


def test_other_images_go_by_torch(monkeypatch):
    monkeypatch.setattr(crops, "make", None)
    views, images = Views(ViewsConfig(), 32, MEAN, STD), images_of(4, 32, 32)
    assert not crops.apply_to(images.to("meta"), 32)
    assert not crops.apply_to(images[:0], 32)
    assert not crops.apply_to(images[:, :, :0], 32)
    assert not crops.apply_to(torch.empty(1, 3, 1, 5000, dtype=torch.uint8), 32)
    assert not crops.apply_to(torch._efficientzerotensor((1, 3, 8, 8), dtype=torch.uint8), 32)
    assert not crops.apply_to(images, 32, torch.zeros(2, 4, dtype=torch.float64))
    assert not crops.apply_to(images, 5000)
    monkeypatch.setattr(processor, "_native", None)
    processor.lanes.cache_clear()
    try:
        assert made(views, images).shape == (2, 4, 3, 32, 32)
    finally:
        processor.lanes.cache_clear()


@compiled
def test_it_is_taken(monkeypatch):
    taken, whole = [], crops.make
    monkeypatch.setattr(crops, "make", lambda *given: taken.append(len(given[1])) or whole(*given))
    made(Views(ViewsConfig(), 32, MEAN, STD), images_of(300, 32, 32))
    made(Views(ViewsConfig(blur=0.5, size=64), 64, MEAN, STD), images_of(100, 64, 64))
    assert taken == [300, 64, 36]  # with a blur a part at a time
