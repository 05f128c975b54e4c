"""Matrix products for small maps: equal to the convolution, value and gradient, and taken only where it applies."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from psm.kernels.dispatch import Faster, faster
from psm.kernels.small_conv import PRODUCTS, sampled, transforms, windows
from psm.models import factory

FORMATS = (torch.contiguous_format, torch.channels_last)


@given(
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    kernel=st.sampled_from([(1, 1), (2, 2), (3, 3), (5, 5), (3, 5), (7, 7)]),
    stride=st.sampled_from([1, 2, 3, (1,), (1, 2)]),
    padding=st.sampled_from([0, 1, 2, (1,), (1, 2), "same", "valid"]),
    dilation=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2]),
    biased=st.booleans(),
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    batch=st.integers(0, 3),
)
def test_value_and_gradient_equal_the_convolution(
    height, width, kernel, stride, padding, dilation, groups, biased, formats, batch
):
    """Over shapes, strides, paddings and memory formats; whatever does not apply goes through untouched."""
    if padding == "same" and stride not in (1, (1,)):
        return
    draws = torch.Generator().manual_seed(height * 7 + width)
    images = torch.randn(batch, 4, height, width, generator=draws, dtype=torch.double)
    layer = nn.Conv2d(4, 6, kernel, stride, padding, dilation, groups, biased, dtype=torch.double)
    layer = layer.to(memory_format=formats[1])
    results = []
    for mode in (False, True):
        layer.zero_grad()
        maps = images.clone(memory_format=formats[0]).requires_grad_()
        try:
            if mode:
                with Faster():
                    out = layer(maps)
            else:
                out = layer(maps)
        except RuntimeError as error:
            results.append([str(error)])
            continue
        out.square().sum().backward()
        results.append([out.detach(), maps.grad, *(p.grad for p in layer.parameters())])
    assert len(results[0]) == len(results[1])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain) if isinstance(plain, torch.Tensor) else None


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "starts"),
    [
        (2, 3, 1, 1, [1, 0]),  # layer 4 of the CIFAR stem at 32 pixels
        (2, 3, 2, 1, [1]),
        (1, 3, 1, 1, [1]),
        (1, 1, 1, 0, [0]),
        (3, 3, 1, 1, None),  # a corner sees four ninths: the product would multiply by zeros
        (4, 3, 2, 1, None),
        (2, 1, 1, 0, None),
    ],
)
def test_it_applies_where_each_output_sees_the_whole_map(size, kernel, stride, padding, starts):
    found = windows(size, kernel, stride, padding)
    assert (found and [window.start for window in found]) == starts


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "applies"),
    [
        ((4, 4), (1, 1), (2, 2), (0, 0), True),  # shortcuts of the last stages
        ((2, 2), (1, 1), (2, 2), (0, 0), True),
        ((8, 8), (1, 1), (2, 2), (0, 0), False),  # torch is as fast
        ((4, 4), (1, 1), (1, 1), (0, 0), False),
        ((4, 4), (1, 1), (2, 2), (1, 1), False),
        ((4, 4), (3, 3), (2, 2), (0, 0), False),
    ],
)
def test_it_samples_places_where_the_kernel_has_one(size, kernel, stride, padding, applies):
    assert sampled(size, kernel, stride, padding) == applies


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_network_learns_the_same_and_stays_what_it_was(stem, channels_last):
    torch.manual_seed(0)
    network = factory.create_encoder("tiny", stem, 32).double()
    images = torch.randn(6, 3, 32, 32, dtype=torch.double)
    if channels_last:
        network, images = (x.to(memory_format=torch.channels_last) for x in (network, images))
    before = {name: type(module) for name, module in network.named_modules()}
    gradients = []
    for device in ("meta", "cpu"):  # any device but a CPU keeps the plain convolution
        network.zero_grad()
        with faster(torch.device(device)):
            network(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in network.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert {name: type(module) for name, module in network.named_modules()} == before


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), PRODUCTS)
def test_the_products_are_the_convolution(size, kernel, stride, padding):
    """As a tensor: outputs x taps x map, a one wherever the tap of that output meets that place of the map."""
    maps, taps, out = (torch.tensor(matrix, dtype=torch.double) for matrix in PRODUCTS[size, kernel, stride, padding])
    found = torch.einsum("op,pt,px->otx", out, taps, maps)
    for output in range(len(out)):
        for tap in range(kernel):
            wanted = torch.tensor([float(x == output * stride + tap - padding) for x in range(size)])
            torch.testing.assert_close(found[output, tap], wanted.double(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("size", "stride"), [(4, 1), (2, 1), (4, 2)])
def test_single_precision_errs_as_little_as_torch(size, stride):
    """Against double precision, at the widths of a ResNet; of the same size as what torch errs by."""
    draws = torch.Generator().manual_seed(size)
    maps = torch.randn(64, 128, size, size, generator=draws).relu().requires_grad_()
    layer = nn.Conv2d(128, 256, 3, stride, padding=1, bias=False)
    nn.init.normal_(layer.weight, std=0.03, generator=draws)

    def passes(maps, layer, mode):
        with mode():
            out = layer(maps)
        weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
        return out.detach(), *torch.autograd.grad((out * weights).sum(), (maps, layer.weight))

    found, plain = (passes(maps, layer, mode) for mode in (Faster, nullcontext))
    exact = passes(maps.detach().double().requires_grad_(), deepcopy(layer).double(), nullcontext)
    for fast, torchs, true in zip(found, plain, exact, strict=True):
        error, usual = ((x - true).abs().max() / true.abs().max() for x in (fast, torchs))
        assert error < max(3 * usual, 4e-6)


def test_the_products_are_really_taken(monkeypatch):
    """By a ResNet at 32 pixels with the ImageNet stem: layer 2 and on, but for its strided first and 1x1 shortcuts."""
    import psm.kernels.dispatch as room

    taken = {"whole_map": [], "few_products": [], "every_other": []}
    for name, sizes in taken.items():
        plain = getattr(room, name)
        monkeypatch.setattr(room, name, lambda *given, s=sizes, p=plain: s.append(given[0].shape[2]) or p(*given))
    with faster(torch.device("cpu")), torch.no_grad():
        factory.create_encoder("resnet18", "imagenet", 32)(torch.randn(2, 3, 32, 32))
    assert taken == {"few_products": [4, 4, 4, 4, 2, 2, 2], "whole_map": [2, 1, 1, 1], "every_other": [4, 2]}


def test_half_precision_keeps_away_from_the_transforms():
    """Their rounding would be that of bfloat16, three times over."""
    layer = nn.Conv2d(4, 6, 3, padding=1).bfloat16()
    maps = torch.randn(2, 4, 4, 4).bfloat16()
    with Faster():
        out = layer(maps)
    assert torch.equal(out, layer(maps))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_autocast_is_torch_s(size):
    """The linear layer of a 1x1 map runs in half precision too, the transforms of larger ones give way."""
    layer, maps = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, size, size)
    with torch.autocast("cpu", torch.bfloat16):
        plain = layer(maps)
        with Faster():
            out = layer(maps)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)


def test_transforms_made_in_inference_mode_serve_training():
    layer, maps = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 4, 4)
    transforms.cache_clear()
    with Faster():
        with torch.inference_mode():
            layer(maps)
        layer(maps.requires_grad_()).sum().backward()
    assert maps.grad is not None


def test_transforms_stay_on_the_cpu_whatever_the_default_device():
    layer, maps = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 4, 4)
    transforms.cache_clear()
    with Faster(), torch.device("meta"):
        assert layer(maps).device.type == "cpu"
