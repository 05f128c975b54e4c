"""The crop and color kernel makes the views of the plain definition, and runs only where it is supported."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import compiled, using
from psm import kernels, ops
from psm.config.schema import ViewsConfig
from psm.kernels import crop, runtime
from psm.views.functional import LUMA, constant
from psm.views.transform import Views

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


def images_of(count: Any, height: Any, width: Any) -> Any:
    draws = torch.Generator().manual_seed(count + height)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=draws)


def slopes(count: Any, height: Any, width: Any) -> Any:
    """Images in which every pixel differs from those beside it, and ends differ most."""
    down, across = torch.arange(height)[:, None] / height, torch.arange(width) / width
    return (
        (torch.stack([down * across, across.expand(height, -1), 1 - down * across]) * 255).byte().repeat(count, 1, 1, 1)
    )


def made(views: Any, images: Any, kernel: Any = True, channels_last: Any = False, draws: Any = None) -> Any:
    """Views, by the plain definition if ``kernel`` is False."""
    draws = draws or views.sample_params(len(images), torch.Generator().manual_seed(1))
    with nullcontext() if kernel else kernels.disabled():
        return views.apply(images, draws, channels_last=channels_last)


def op_arguments(images: Any, size: Any = 32, views: Any = None, draws: Any = None) -> Any:
    """Arguments of ``ops.crop_color`` for two views of images."""
    views = views or Views(ViewsConfig(), size, MEAN, STD)
    draws = draws or views.sample_params(len(images), torch.Generator().manual_seed(1))
    boxes = draws.boxes(*images.shape[2:], views.settings.crop_ratio)
    out = torch.empty(2, len(images), 3, size, size, dtype=torch.float32)
    fixed = constant((LUMA, MEAN, STD), torch.device("cpu"))
    return images, boxes, draws.flip, *draws.colors(), *fixed, out


@compiled
@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.integers(1, 40),
    later=st.sampled_from([{}, {"blur": 0.5}, {"solarize": 0.5}, {"blur": 0.5, "solarize": 0.5}]),
    crop_scale=st.sampled_from([[0.05, 1.0], [0.2, 1.0], [1.0, 1.0]]),
    channels_last=st.booleans(),
    threads=st.integers(1, 3),
)
def test_views_are_those_of_torch(
    count: Any, height: Any, width: Any, size: Any, later: Any, crop_scale: Any, channels_last: Any, threads: int
) -> None:
    views = Views(ViewsConfig(size=size, crop_scale=crop_scale, **({"blur": 0.0} | later)), size, MEAN, STD)
    images = images_of(count, height, width)
    with using(threads):
        assert crop.supports(*op_arguments(images, size))
        found = made(views, images, channels_last=channels_last)
    expected = made(views, images, False, channels_last)
    assert found.stride() == expected.stride()
    far = (found - expected).abs() >= 2e-4
    if "solarize" in later:  # a value in the middle may round to either side, and be inverted or not
        mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
        far &= (expected * std + mean - 0.5).abs() > 1e-3
    assert not far.any()


@compiled
def test_most_of_a_large_image_goes_into_a_small_view() -> None:
    """Every pixel counts: many of them for each place."""
    views = Views(ViewsConfig(size=3, crop_scale=[0.9, 1.0], crop_ratio=[0.5, 2.0], blur=0.0), 3, MEAN, STD)
    for images in (slopes(4, 700, 513), slopes(4, 1, 900), slopes(4, 900, 2), slopes(2, 4096, 4096)):
        torch.testing.assert_close(made(views, images), made(views, images, False), atol=5e-4, rtol=0)


@compiled
@pytest.mark.parametrize("blur", [0.0, 0.5])
def test_three_views_in_several_parts_of_images_that_lie_apart(blur: Any) -> None:
    views = Views(ViewsConfig(size=64, blur=blur), 64, MEAN, STD)
    images = images_of(100, 64, 128)[..., ::2]
    draws = views.sample_params(100, torch.Generator().manual_seed(1), views=3)
    found, expected = (made(views, images, kernel, draws=draws) for kernel in (True, False))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@compiled
def test_draws_that_images_share_and_boxes_that_are_none() -> None:
    views, images = Views(ViewsConfig(), 32, MEAN, STD), images_of(4, 32, 32)
    draws = views.sample_params(4, torch.Generator().manual_seed(1))
    shared = replace(
        draws, brightness=torch.ones(2, 1), contrast=torch.full((2, 1), 0.5), crop_position=draws.crop_position[:, :1]
    )
    shared = replace(shared, crop_scale=draws.crop_scale[:, :1], crop_ratio=draws.crop_ratio[:, :1])
    found, expected = (made(views, images, kernel, draws=shared) for kernel in (True, False))
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
def test_a_image_s_view_does_not_depend_on_its_company_or_on_threads() -> None:
    """Bit for bit, whoever comes first: or processes that share a batch would not share its views."""
    views, images = Views(ViewsConfig(), 32, MEAN, STD), images_of(40, 32, 32)
    draws, found = views.sample_params(40, torch.Generator().manual_seed(1)), []
    for threads in (1, 2, 2, 3):
        with using(threads):
            found.append(made(views, images, draws=draws))
    assert all(torch.equal(again, found[0]) for again in found[1:])
    assert torch.equal(made(views, images[7:19], draws=draws[7:19]), found[0][:, 7:19])


@compiled
def test_neither_default_type_nor_device_changes_it() -> None:
    views, images = Views(ViewsConfig(), 32, MEAN, STD), images_of(4, 32, 32)
    draws = views.sample_params(4, torch.Generator().manual_seed(1))
    expected = made(views, images, draws=draws)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert torch.equal(made(views, images, draws=draws), expected)
        given = op_arguments(images, 32, views, draws)
        with torch.device("meta"):
            crop.crop_color(*given)
        assert torch.equal(given[-1], expected)
    finally:
        torch.set_default_dtype(torch.float32)


@compiled
def test_what_it_does_not_support() -> None:
    images = images_of(4, 32, 32)
    assert crop.supports(*op_arguments(images))
    assert not crop.supports(images.to("meta"), *op_arguments(images)[1:])
    assert not crop.supports(*op_arguments(images[:0]))
    assert not crop.supports(images[:, :, :0], *op_arguments(images)[1:])
    assert not crop.supports(*op_arguments(torch.empty(1, 3, 1, 5000, dtype=torch.uint8)))
    zeros = torch._efficientzerotensor((1, 3, 8, 8), dtype=torch.uint8)
    assert not crop.supports(zeros, *op_arguments(images[:1])[1:])
    assert not crop.supports(*op_arguments(images[:1], 5000))
    *given, out = op_arguments(images)
    assert not crop.supports(*given, out.double())
    assert not crop.supports(*given, torch.empty(2, 8, 3, 32, 32)[:, :4])  # views that do not lie side by side
    given[4] = given[4].double()
    assert not crop.supports(*given, out)


@pytest.mark.parametrize("strided", [False, True])
def test_other_views_are_made_by_the_definition(monkeypatch: pytest.MonkeyPatch, strided: Any) -> None:
    monkeypatch.setitem(ops._kernels, "crop_color", ops.Kernel(crop.supports, None))
    images = images_of(4, 32, 32)
    *given, out = op_arguments(images)
    out = torch.empty(2, 8, 3, 32, 32)[:, :4] if strided else out
    if not strided:
        monkeypatch.setattr(runtime, "_native", None)
        runtime.native_width.cache_clear()
    try:
        ops.crop_color(*given, out)
    finally:
        runtime.native_width.cache_clear()
    expected = made(Views(ViewsConfig(), 32, MEAN, STD), images, kernel=False)
    assert torch.equal(out, expected)


@compiled
def test_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def counted(*given: Any) -> Any:
        return crop.supports(*given) and not taken.append(len(given[0]))

    monkeypatch.setitem(ops._kernels, "crop_color", ops.Kernel(counted, crop.crop_color))
    made(Views(ViewsConfig(), 32, MEAN, STD), images_of(300, 32, 32))
    made(Views(ViewsConfig(blur=0.5, size=64), 64, MEAN, STD), images_of(100, 64, 64))
    assert taken == [300, 64, 36]  # with a blur a chunk at a time
