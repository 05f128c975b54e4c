"""The matrix product for small maps: equal to the convolution, value and gradient, and taken only where it applies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from psm import networks
from psm.small_maps import SmallMaps, small_maps, windows

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
    pictures = torch.randn(batch, 4, height, width, generator=draws, dtype=torch.double)
    layer = nn.Conv2d(4, 6, kernel, stride, padding, dilation, groups, biased, dtype=torch.double)
    layer = layer.to(memory_format=formats[1])
    results = []
    for mode in (False, True):
        layer.zero_grad()
        maps = pictures.clone(memory_format=formats[0]).requires_grad_()
        try:
            if mode:
                with SmallMaps():
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
        (2, 3, 1, 1, [1, 0]),  # layer 4 of the small stem at 32 pixels
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


@pytest.mark.parametrize("stem", ["small", "imagenet"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_network_learns_the_same_and_stays_what_it_was(stem, channels_last):
    torch.manual_seed(0)
    network = networks.encoder("tiny", stem, 32).double()
    pictures = torch.randn(6, 3, 32, 32, dtype=torch.double)
    if channels_last:
        network, pictures = (x.to(memory_format=torch.channels_last) for x in (network, pictures))
    before = {name: type(module) for name, module in network.named_modules()}
    gradients = []
    for device in ("meta", "cpu"):  # any device but a CPU keeps the plain convolution
        network.zero_grad()
        with small_maps(torch.device(device)):
            network(pictures).square().sum().backward()
        gradients.append([p.grad.clone() for p in network.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert {name: type(module) for name, module in network.named_modules()} == before


def test_the_product_is_really_taken(monkeypatch):
    """A ResNet at 32 pixels with the ImageNet stem has three layers at 1x1 and four that see a whole 2x2 map."""
    taken = []
    import psm.small_maps as room

    plain = room.product
    monkeypatch.setattr(room, "product", lambda *given: taken.append(given[0].shape[2]) or plain(*given))
    with small_maps(torch.device("cpu")), torch.no_grad():
        networks.encoder("resnet18", "imagenet", 32)(torch.randn(2, 3, 32, 32))
    assert sorted(taken) == [1, 1, 1, 2, 2, 2, 2]


def test_autocast_reaches_the_product():
    layer = nn.Conv2d(4, 6, 3, padding=1)
    with torch.autocast("cpu", torch.bfloat16), SmallMaps():
        out = layer(torch.randn(2, 4, 2, 2))
    assert out.dtype == torch.bfloat16
