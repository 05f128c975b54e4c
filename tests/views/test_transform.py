"""Views against slow references: scalar crops, interpolation of the cut-out box, color changes one after another."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional

from psm import kernels
from psm.config.schema import ViewsConfig
from psm.ops import adjust_color, resized_crop
from psm.utils.errors import UserError
from psm.views.functional import LUMA, gaussian_blur
from psm.views.transform import AugmentParams, Views

ZERO, ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)  # a normalization that changes nothing
NEVER = {"flip": 0.0, "color_jitter": 0.0, "grayscale": 0.0, "blur": 0.0, "solarize": 0.0}
EVERYTHING = {"blur": 0.5, "solarize": 0.3}
WHOLE = {"crop_scale": [1.0, 1.0], "crop_ratio": [1.0, 1.0]}


@pytest.fixture(autouse=True, params=["kernel", "plain"])
def way(request: pytest.FixtureRequest) -> Any:
    """All tests with the kernel, where there is one, and with the plain definition."""
    if request.param == "kernel" and kernels.runtime.simd_width() is None:
        pytest.skip(f"kernels: {kernels.status()}")
    with kernels.disabled() if request.param == "plain" else nullcontext():
        yield


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(count: int, height: int = 32, width: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator(seed))


def plain_views(size: int = 32, **changes: Any) -> Views:
    return Views(ViewsConfig(**changes), size, ZERO, ONE)


def neutral(count: int) -> AugmentParams:
    """Parameters of one view that changes nothing."""
    return plain_views(**NEVER, **WHOLE).sample_params(count, generator(), views=1).views()[0]


def recolored(pixels: torch.Tensor, params: AugmentParams) -> torch.Tensor:
    return adjust_color(pixels, *params.colors(), torch.tensor(LUMA))


def luma(pixels: torch.Tensor) -> torch.Tensor:
    return torch.einsum("nchw,c->nhw", pixels, torch.tensor(LUMA, dtype=pixels.dtype))


def assert_rate(happened: torch.Tensor, probability: float) -> None:
    """Within five standard deviations of a binomial."""
    rate, tolerance = happened.float().mean().item(), 5 * math.sqrt(probability * (1 - probability) / happened.numel())
    assert abs(rate - probability) <= tolerance


# The crop


def reference_box(areas: Any, ratios: Any, place: Any, height: Any, width: Any, limits: Any) -> Any:
    """torchvision's rule, one image at a time; None where float32 and float64 could round differently."""
    for area, ratio in zip(areas, ratios, strict=True):
        exact_height = math.sqrt(area * height * width / ratio)
        exact_width = math.sqrt(area * height * width * ratio)
        if any(abs(exact % 1 - 0.5) < 1e-3 for exact in (exact_height, exact_width)):
            return None
        box_height, box_width = round(exact_height), round(exact_width)
        if 0 < box_height <= height and 0 < box_width <= width:
            top = math.floor(place[0] * (height - box_height + 1))
            left = math.floor(place[1] * (width - box_width + 1))
            return top, left, box_height, box_width
    if width / height < limits[0]:
        box_height, box_width = round(width / limits[0]), width
    elif width / height > limits[1]:
        box_height, box_width = height, round(height * limits[1])
    else:
        box_height, box_width = height, width
    return round((height - box_height) / 2), round((width - box_width) / 2), box_height, box_width


@pytest.mark.parametrize(
    ("height", "width", "changes"),
    [
        (32, 32, {}),
        (96, 96, {"crop_scale": [0.08, 1.0]}),
        (20, 50, {"crop_scale": [0.6, 1.0]}),
        (50, 20, {"crop_scale": [0.9, 1.0]}),
        (33, 32, {"crop_scale": [0.99, 1.0], "crop_ratio": [2.0, 3.0]}),
    ],
)
def test_boxes_equal_the_scalar_rule(height: Any, width: Any, changes: Any) -> None:
    views = plain_views(**changes)
    params = views.sample_params(1000, generator(), views=1).views()[0]
    limits = views.settings.crop_ratio
    found = torch.stack(params.boxes(height, width, limits), dim=1).tolist()
    compared = 0
    for index, box in enumerate(found):
        expected = reference_box(
            *(part[index].tolist() for part in (params.crop_scale, params.crop_ratio, params.crop_position)),
            height,
            width,
            limits,
        )
        if expected is not None:
            compared += 1
            assert tuple(box) == expected
    assert compared > 800


def test_boxes_have_the_distribution_of_areas_ratios_and_places() -> None:
    size = 1000  # rounding to pixels is negligible
    params = plain_views(crop_scale=[0.2, 0.7]).sample_params(20_000, generator(), views=1).views()[0]
    top, left, height, width = params.boxes(size, size, [3 / 4, 4 / 3])
    area, log_ratio = height * width / size**2, (width / height).log()
    assert 0.199 < area.min() < 0.201
    assert 0.699 < area.max() < 0.701
    # Up to 0.7 every box of an allowed ratio fits, so areas and log ratios are uniform.
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    torch.testing.assert_close(area.quantile(quantiles), 0.2 + 0.5 * quantiles, atol=0.01, rtol=0)
    expected = math.log(4 / 3) * (2 * quantiles - 1)
    torch.testing.assert_close(log_ratio.quantile(quantiles), expected, atol=0.01, rtol=0)
    torch.testing.assert_close((top / (size - height)).quantile(quantiles), quantiles, atol=0.02, rtol=0)
    torch.testing.assert_close((left / (size - width)).quantile(quantiles), quantiles, atol=0.02, rtol=0)
    assert (
        abs(
            torch.corrcoef(torch.stack([area, log_ratio, top / (size - height), left / (size - width)])) - torch.eye(4)
        ).max()
        < 0.05
    )


def test_a_place_just_below_one_stays_inside() -> None:
    params = neutral(1)
    params = replace(params, crop_scale=torch.full((1, 10), 0.25), crop_position=torch.full((1, 2), 1 - 2**-24))
    top, left, height, width = params.boxes(64, 64, [1.0, 1.0])
    assert (top, left, height, width) == (32, 32, 32, 32)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), height=st.integers(8, 96), width=st.integers(8, 96), size=st.sampled_from([8, 17, 32, 64, 96]))
def test_a_crop_is_the_interpolation_of_its_box(data: Any, height: Any, width: Any, size: Any) -> None:
    pixels = random_images(1, height, width).float() / 255
    box_height, box_width = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top, left = (
        data.draw(st.integers(0, height - box_height)),
        data.draw(st.integers(0, width - box_width)),
    )
    flip = data.draw(st.booleans())
    box = tuple(torch.tensor([float(number)]) for number in (top, left, box_height, box_width))
    view = resized_crop(pixels, box, torch.tensor([flip]), size)
    cut = pixels[:, :, top : top + box_height, left : left + box_width]
    expected = functional.interpolate(cut, (size, size), mode="bilinear", antialias=True, align_corners=False)
    torch.testing.assert_close(view, expected.flip(3) if flip else expected, atol=2e-5, rtol=0)


def test_a_whole_crop_of_the_same_size_is_the_image() -> None:
    images = random_images(5)
    views = plain_views(**NEVER, **WHOLE)
    result = views.apply(images, views.sample_params(5, generator()))
    torch.testing.assert_close(result, (images.float() / 255).expand(2, -1, -1, -1, -1))


def test_flips_happen_at_their_rate_and_mirror_columns() -> None:
    views = plain_views(**NEVER | {"flip": 0.3}, **WHOLE)
    params = views.sample_params(4000, generator())
    assert_rate(params.flip, 0.3)
    images = random_images(50)
    few = params[:50]
    result = views.apply(images, few)
    pixels = images.float() / 255
    expected = torch.where(few.flip[:, :, None, None, None], pixels.flip(3), pixels)
    torch.testing.assert_close(result, expected)
    assert few.flip.any()
    assert not few.flip.all()


# Color


def muted_pixels(count: int = 6, seed: int = 2) -> torch.Tensor:
    """Colors far enough from black and white for no change to be cut off."""
    return 0.35 + 0.2 * torch.rand(count, 3, 9, 7, generator=generator(seed))


def test_brightness_scales() -> None:
    pixels, factors = muted_pixels(), torch.linspace(0, 1.7, 6)
    result = recolored(pixels, replace(neutral(6), brightness=factors))
    torch.testing.assert_close(result, pixels * factors[:, None, None, None])


def test_contrast_scales_about_the_mean_luma() -> None:
    pixels, factors = muted_pixels(), torch.linspace(0, 1.6, 6)
    result = recolored(pixels, replace(neutral(6), contrast=factors))
    pivot = luma(pixels).mean((1, 2))
    torch.testing.assert_close(luma(result).mean((1, 2)), pivot)
    pivot, factors = pivot[:, None, None, None], factors[:, None, None, None]
    torch.testing.assert_close(result, pivot + factors * (pixels - pivot))


def test_saturation_keeps_luma() -> None:
    pixels, factors = muted_pixels(), torch.linspace(0, 1.6, 6)
    result = recolored(pixels, replace(neutral(6), saturation=factors))
    torch.testing.assert_close(luma(result), luma(pixels))
    gray, factors = luma(pixels)[:, None], factors[:, None, None, None]
    torch.testing.assert_close(result, gray + factors * (pixels - gray))


def test_hue_keeps_the_mean_of_channels_and_the_distance_from_gray() -> None:
    pixels = muted_pixels()
    result = recolored(pixels, replace(neutral(6), hue=torch.linspace(-0.5, 0.4, 6)))
    torch.testing.assert_close(result.mean(1), pixels.mean(1))
    torch.testing.assert_close(result.var(1), pixels.var(1))


def test_hue_of_no_turn_or_a_full_one_is_the_identity_and_a_third_passes_channels_on() -> None:
    pixels = muted_pixels(3)
    result = recolored(pixels, replace(neutral(3), hue=torch.tensor([0.0, 1.0, 1 / 3])))
    torch.testing.assert_close(result[:2], pixels[:2], atol=1e-6, rtol=0)
    red, green, blue = pixels[2]
    torch.testing.assert_close(result[2], torch.stack([blue, red, green]), atol=1e-6, rtol=0)


def test_grayscale_gives_luma_in_every_channel() -> None:
    pixels = muted_pixels(4)
    drawn = torch.tensor([True, False, True, False])
    result = recolored(pixels, replace(neutral(4), grayscale=drawn))
    expected = torch.where(drawn[:, None, None, None], luma(pixels)[:, None].expand_as(pixels), pixels)
    torch.testing.assert_close(result, expected)


def test_all_color_changes_equal_one_after_another_in_any_order() -> None:
    pixels = muted_pixels()
    numbers = torch.rand(4, 6, generator=generator(3)) * 0.4
    brightness, contrast, saturation, turn = numbers[0] + 0.8, numbers[1] + 0.8, numbers[2] + 0.8, numbers[3] - 0.2
    grayscale = torch.tensor([False, False, False, True, True, False])
    result = recolored(
        pixels,
        replace(
            neutral(6), brightness=brightness, contrast=contrast, saturation=saturation, hue=turn, grayscale=grayscale
        ),
    )
    axis = torch.ones(3, dtype=torch.float64) / math.sqrt(3)
    for index in range(6):
        factors = [float(part[index]) for part in (brightness, contrast, saturation)]

        def brighten(image: Any, factor: Any) -> Any:
            return image * factor

        def contrasted(image: Any, factor: Any) -> Any:
            return factor * image + (1 - factor) * luma(image[None]).mean()

        def saturate(image: Any, factor: Any) -> Any:
            return factor * image + (1 - factor) * luma(image[None])

        steps = list(zip((brighten, contrasted, saturate), factors, strict=True))
        for order in permutations(steps):
            image = pixels[index].double()
            for step, factor in order:
                image = step(image, factor)
            angle = 2 * math.pi * float(turn[index])
            along = (axis @ image.flatten(1)) * axis[:, None]  # Rodrigues' formula, color by color
            across = image.flatten(1) - along
            turned = torch.linalg.cross(axis[:, None].expand_as(across), across, dim=0)
            image = (along + math.cos(angle) * across + math.sin(angle) * turned).view_as(image)
            if grayscale[index]:
                image = luma(image[None]).expand_as(image)
            torch.testing.assert_close(result[index], image.float(), atol=1e-5, rtol=0)


def test_colors_are_cut_off_at_black_and_white() -> None:
    pixels = torch.rand(2, 3, 5, 5, generator=generator())
    result = recolored(
        pixels, replace(neutral(2), brightness=torch.tensor([3.0, 1.0]), contrast=torch.tensor([1.0, 5.0]))
    )
    torch.testing.assert_close(result[0], (3 * pixels[0]).clamp(max=1))
    assert result.min() == 0
    assert result.max() == 1


def test_jitter_and_grayscale_are_drawn_at_their_rates_within_their_ranges() -> None:
    params = plain_views().sample_params(5000, generator())
    jittered = params.brightness != 1
    assert_rate(jittered, 0.8)
    assert_rate(params.grayscale, 0.2)
    for values, low, high, idle in (
        (params.brightness, 0.6, 1.4, 1),
        (params.contrast, 0.6, 1.4, 1),
        (params.saturation, 0.6, 1.4, 1),
        (params.hue, -0.1, 0.1, 0),
    ):
        assert (values[~jittered] == idle).all()
        drawn = (values[jittered] - low) / (high - low)
        assert drawn.min() >= -1e-6
        assert drawn.max() <= 1 + 1e-6
        quantiles = torch.tensor([0.1, 0.5, 0.9])
        torch.testing.assert_close(drawn.quantile(quantiles), quantiles, atol=0.02, rtol=0)
    strong = plain_views(brightness=1.5).sample_params(5000, generator()).brightness
    assert 0 <= strong.min() < 0.01
    assert 2.49 < strong.max() <= 2.5


# Blur and solarization


def test_blur_equals_a_convolution_of_the_mirrored_image() -> None:
    radius, pixels = 6, torch.rand(4, 3, 20, 20, generator=generator())
    sigmas = [0.1, 0.7, 1.3, 2.0]
    result = gaussian_blur(pixels, torch.tensor(sigmas), radius)
    for index, sigma in enumerate(sigmas):
        weights = torch.tensor(
            [
                [math.exp(-(down**2 + across**2) / (2 * sigma**2)) for across in range(-radius, radius + 1)]
                for down in range(-radius, radius + 1)
            ]
        )
        kernel = (weights / weights.sum()).expand(3, 1, -1, -1)
        image = pixels[index]
        rows = torch.cat([image[:, :radius].flip(1), image, image[:, -radius:].flip(1)], dim=1)
        mirrored = torch.cat([rows[:, :, :radius].flip(2), rows, rows[:, :, -radius:].flip(2)], dim=2)
        expected = functional.conv2d(mirrored[None], kernel, groups=3)[0]
        torch.testing.assert_close(result[index], expected, atol=1e-5, rtol=0)
        inner = functional.conv2d(image[None], kernel, groups=3)[0]
        torch.testing.assert_close(result[index, :, radius:-radius, radius:-radius], inner, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 3, 8, 33])
def test_blur_keeps_constants_and_the_mean(size: Any) -> None:
    radius = min(6, size)
    sigma = torch.tensor([0.5, 2.0])
    flat = torch.full((2, 3, size, size), 0.3)
    torch.testing.assert_close(gaussian_blur(flat, sigma, radius), flat)
    pixels = torch.rand(2, 3, size, size, generator=generator())
    torch.testing.assert_close(gaussian_blur(pixels, sigma, radius).mean((2, 3)), pixels.mean((2, 3)))


def test_a_view_that_drew_no_blur_is_untouched() -> None:
    pixels = torch.rand(2, 3, 16, 16, generator=generator())
    result = gaussian_blur(pixels, torch.tensor([0.0, 1.0]), 6)
    assert torch.equal(result[0], pixels[0])
    assert (result[1] - pixels[1]).abs().mean() > 0.05


def test_blur_is_drawn_at_its_rate_within_its_range() -> None:
    sigma = plain_views(blur=0.5).sample_params(5000, generator()).blur_sigma
    assert_rate(sigma > 0, 0.5)
    drawn = sigma[sigma > 0]
    assert 0.1 <= drawn.min() < 0.12
    assert 1.98 < drawn.max() <= 2.0
    assert drawn.median().item() == pytest.approx(1.05, abs=0.05)


def test_apply_blurs_and_solarizes_what_drew_it() -> None:
    images = random_images(40)
    pixels = images.float() / 255
    views = plain_views(**NEVER | {"blur": 0.5}, **WHOLE)
    params = views.sample_params(40, generator(), views=1)
    torch.testing.assert_close(views.apply(images, params)[0], gaussian_blur(pixels, params.blur_sigma[0], 6))

    views = plain_views(**NEVER | {"solarize": 0.4}, **WHOLE)
    assert_rate(views.sample_params(4000, generator()).solarize, 0.4)
    params = views.sample_params(40, generator(), views=1)
    inverted = torch.where(pixels >= 0.5, 1 - pixels, pixels)
    expected = torch.where(params.solarize[0, :, None, None, None], inverted, pixels)
    torch.testing.assert_close(views.apply(images, params)[0], expected)


# The whole


def everything(size: int = 32, **changes: Any) -> Views:
    """Every step switched on, with a normalization that differs by channel."""
    config = ViewsConfig(size=size, **EVERYTHING, **changes)
    return Views(config, 32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [8, 24, 32, 48, 96])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 45), (96, 64)])
def test_views_have_their_shape_range_and_strides(size: Any, height: Any, width: Any, channels_last: Any) -> None:
    views = everything(size)
    result = views.apply(random_images(6, height, width), views.sample_params(6, generator(), views=3), channels_last)
    assert result.shape == (3, 6, 3, size, size)
    assert result.dtype == torch.float32
    flat = result.flatten(0, 1)
    assert flat.data_ptr() == result.data_ptr()
    assert flat.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.25, 0.3]])[:, :, None, None]
    values = flat * std + mean
    assert values.min() >= -1e-5
    assert values.max() <= 1 + 1e-5
    assert values.std() > 0.05


@pytest.mark.parametrize("channels_last", [False, True])
def test_weak_views_have_the_same_crops_and_flips_and_nothing_else(channels_last: Any) -> None:
    """As a set of views would give that draws the same numbers with every color change, blur and inversion off."""
    images = random_images(12)
    strong = everything()
    config = ViewsConfig(color_jitter=0.0, grayscale=0.0)
    plain = Views(config, 32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    params = strong.sample_params(12, generator())
    weak = strong.apply(images, params, channels_last, weak=True)
    assert torch.equal(weak, plain.apply(images, plain.sample_params(12, generator()), channels_last))
    assert not torch.allclose(weak, strong.apply(images, params, channels_last))
    assert params.weak().flip.any()


def test_channels_last_changes_no_value() -> None:
    views, images = everything(), random_images(6)
    params = views.sample_params(6, generator())
    assert torch.equal(views.apply(images, params), views.apply(images, params, channels_last=True))


def test_normalization_comes_last() -> None:
    images = random_images(8)
    normalized = everything()
    bare = plain_views(**EVERYTHING)
    params = bare.sample_params(8, generator())
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.25, 0.3]])[:, :, None, None]
    torch.testing.assert_close(normalized.apply(images, params), (bare.apply(images, params) - mean) / std)


def test_the_views_of_an_image_depend_on_its_own_params_alone() -> None:
    views, images = everything(), random_images(11)
    params = views.sample_params(11, generator())
    whole = views.apply(images, params)
    parts = [views.apply(images[part], params[part]) for part in (slice(0, 4), slice(4, 5), slice(5, 11))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)
    order = torch.tensor([3, 1, 10])
    torch.testing.assert_close(views.apply(images[order], params[order]), whole[:, order], atol=1e-5, rtol=0)


def test_params_repeat_with_their_generator_and_differ_between_images_and_views() -> None:
    views = everything()
    first, again, other = (views.sample_params(16, generator(seed)) for seed in (4, 4, 5))
    image = random_images(1).expand(16, -1, -1, -1)
    assert torch.equal(views.apply(image, first), views.apply(image, again))
    results = views.apply(image, first).flatten(0, 1).flatten(1)
    distances = torch.cdist(results, results) + torch.eye(32) * 1e6
    assert distances.min() > 0.1
    assert not torch.equal(views.apply(image, first), views.apply(image, other))


def test_one_probability_changed_leaves_the_other_params_alone() -> None:
    without, with_blur = (plain_views(blur=blur).sample_params(50, generator()) for blur in (0.0, 0.9))
    for field in fields(AugmentParams):
        same = torch.equal(getattr(without, field.name), getattr(with_blur, field.name))
        assert same == (field.name != "blur_sigma")


def test_params_are_sliced_and_moved() -> None:
    params = everything().sample_params(7, generator(), views=3)
    assert len(params) == 7
    assert len(params[2:5]) == 3
    assert torch.equal(params[2:5].crop_scale, params.crop_scale[:, 2:5])
    mine = everything().sample_params(7, generator(), views=3, rows=slice(2, 5))
    assert torch.equal(mine.crop_scale, params.crop_scale[:, 2:5])
    moved = everything().sample_params(7, generator(), views=3, device="meta")
    assert {getattr(moved, field.name).device.type for field in fields(moved)} == {"meta"}
    assert [torch.equal(part.hue, params.hue[index]) for index, part in enumerate(params.views())] == [True] * 3


def test_threads_under_another_default_dtype_sample_float32_and_never_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default dtype is global: changing it around a draw would change it for every other thread too."""
    views, images = everything(48), random_images(6)

    def sample(seed: int) -> tuple[AugmentParams, torch.Tensor, torch.Tensor]:
        params = views.sample_params(6, generator(seed))
        return params, views.apply(images, params), views.plain(images)

    with ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(sample, range(20)))
        torch.set_default_dtype(torch.float64)
        set_default, calls = torch.set_default_dtype, []
        monkeypatch.setattr(torch, "set_default_dtype", calls.append)
        try:
            found = list(pool.map(sample, range(20)))
        finally:
            set_default(torch.float32)
    assert calls == []
    for (params, *batches), (expected_params, *expected_batches) in zip(found, expected, strict=True):
        values = [getattr(params, field.name) for field in fields(params)]
        assert {x.dtype for x in values} == {torch.float32, torch.bool}
        assert all(map(torch.equal, values, (getattr(expected_params, field.name) for field in fields(params))))
        assert [x.dtype for x in batches] == [torch.float32] * 2
        assert all(map(torch.equal, batches, expected_batches))


def test_autocast_changes_nothing() -> None:
    views, images = everything(48), random_images(6)
    params = views.sample_params(6, generator())
    outside, plain = views.apply(images, params), views.plain(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, plain_inside = views.apply(images, params), views.plain(images)
    assert inside.dtype == plain_inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    assert torch.equal(plain_inside, plain)


def test_nothing_waits_for_a_value() -> None:
    """With fake tensors, which have shapes and no values, whatever would need a value on the host raises."""
    views, images = everything(), random_images(6)
    params = views.sample_params(6, generator())
    views.apply(images, params)  # constants are made once, before
    with FakeTensorMode() as mode:
        fake = AugmentParams(*(mode.from_tensor(getattr(params, field.name)) for field in fields(params)))
        with pytest.raises(DataDependentOutputException):
            fake.crop_scale.max().item()
        mode.allow_non_fake_inputs = True
        assert views.apply(mode.from_tensor(images), fake).shape == (2, 6, 3, 32, 32)


def test_the_number_of_images_and_their_strides_do_not_matter() -> None:
    views = everything(200)  # large enough to be made in several parts
    images = random_images(13)
    params = views.sample_params(13, generator())
    result = views.apply(images, params)
    assert torch.equal(views.apply(images.contiguous(memory_format=torch.channels_last), params), result)
    torch.testing.assert_close(views.apply(images[12:], params[12:]), result[:, 12:], atol=1e-5, rtol=0)
    assert views.apply(images[:0], params[:0]).shape == (2, 0, 3, 200, 200)


def test_the_images_are_left_as_they_are() -> None:
    views, images = everything(), random_images(4)
    before = images.clone()
    views.apply(images, views.sample_params(4, generator()))
    views.plain(images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("size", [16, 32, 40])
def test_plain_only_resizes_and_normalizes(size: Any) -> None:
    images = random_images(3, 32, 32)
    pixels = images.float() / 255
    if size != 32:
        pixels = functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.25, 0.3]])[:, :, None, None]
    torch.testing.assert_close(everything(size).plain(images), (pixels - mean) / std)


# Configuration


@pytest.mark.parametrize(
    ("size", "held", "preset", "blur"),
    [
        (None, 32, "small", 0),
        (None, 63, "small", 0),
        (None, 64, "large", 0.5),
        (32, 96, "small", 0),
        (96, 32, "large", 0.5),
    ],
)
def test_auto_goes_by_the_size_of_a_view(size: Any, held: Any, preset: Any, blur: Any) -> None:
    config = Views(ViewsConfig(size=size), held, ZERO, ONE).settings
    assert (config.preset, config.blur) == (preset, blur)
    assert config.size == (size or held)


def test_the_preset_of_simclr_takes_smaller_crops() -> None:
    small, simclr = (plain_views(preset=name).settings for name in ("small", "simclr"))
    assert simclr == replace(small, preset="simclr", crop_scale=[0.08, 1.0])
    assert plain_views(preset="simclr").sample_params(200, generator()).crop_scale.min() < 0.1


def test_a_set_value_overrides_the_preset_and_the_given_configuration_stays() -> None:
    given_config = ViewsConfig(preset="large", blur=0.0, crop_scale=[0.5, 0.9])
    config = Views(given_config, 32, ZERO, ONE).settings
    assert (config.blur, config.crop_scale, config.color_jitter, config.brightness, config.hue) == (
        0.0,
        [0.5, 0.9],
        0.8,
        0.4,
        0.1,
    )
    assert given_config == ViewsConfig(preset="large", blur=0.0, crop_scale=[0.5, 0.9])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"preset": "huge"}, "views.preset=huge is unknown: choose one of auto, small, large"),
        ({"size": 0}, "views.size=0 is too small"),
        ({"crop_scale": [0.0, 1.0]}, r"views.crop_scale=\[0.0,1.0\] is too small: give 2 numbers"),
        ({"crop_scale": [0.2, 1.1]}, "views.crop_scale"),
        ({"crop_scale": [0.8, 0.3]}, "views.crop_scale"),
        ({"crop_scale": [0.3]}, "views.crop_scale"),
        ({"crop_scale": 0.3}, "views.crop_scale"),
        ({"crop_scale": ["0.2", "1"]}, "views.crop_scale"),
        ({"crop_ratio": [0.0, 1.0]}, "views.crop_ratio"),
        ({"crop_ratio": [1.0, math.inf]}, "views.crop_ratio"),
        ({"flip": -0.1}, "views.flip=-0.1 is too small: give a number from 0 to 1"),
        ({"color_jitter": 1.5}, "views.color_jitter"),
        ({"grayscale": math.nan}, "views.grayscale"),
        ({"blur": "often"}, "views.blur=often is not a number"),
        ({"solarize": True}, "views.solarize"),
        ({"brightness": -1.0}, "views.brightness"),
        ({"contrast": math.inf}, "views.contrast"),
        ({"saturation": -0.4}, "views.saturation"),
        ({"hue": 0.6}, "views.hue=0.6 is too large: give a number from 0 to 0.5"),
        ({"blur_sigma": [0.0, 2.0]}, "views.blur_sigma"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(changes: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plain_views(**changes)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5,)), (ZERO, ZERO), (ZERO, (1.0, math.nan, 1.0))])
def test_a_normalization_that_cannot_be_is_refused(mean: Any, std: Any) -> None:
    with pytest.raises(UserError, match="cannot normalize"):
        Views(ViewsConfig(), 32, mean, std)


def test_images_of_another_kind_or_number_are_refused() -> None:
    views = plain_views()
    params = views.sample_params(4, generator())
    with pytest.raises(UserError, match=r"float32 of shape \(4, 3, 32, 32\)"):
        views.apply(torch.rand(4, 3, 32, 32), params)
    with pytest.raises(UserError, match=r"uint8 of shape \(4, 1, 32, 32\)"):
        views.plain(random_images(4)[:, :1])
    with pytest.raises(UserError, match="3 images were given with the parameters of 4"):
        views.apply(random_images(3), params)


@pytest.mark.parametrize("weak", [False, True])
def test_views_at_once_are_those_of_the_cpu(weak: bool) -> None:
    """What an accelerator computes for all views together, from parameters that were packed on the CPU."""
    images = torch.randint(0, 256, (6, 3, 20, 16), dtype=torch.uint8, generator=generator(1))
    views = Views(ViewsConfig(size=12, **EVERYTHING), 16, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    params = views.sample_params(6, generator(2), views=3)
    packed = views.pack(params.weak() if weak else params, images)
    fast = views.apply_at_once(images, packed, channels_last=True, filters=not weak)
    assert fast.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(fast, views.apply(images, params, weak=weak), rtol=0, atol=2e-5)
