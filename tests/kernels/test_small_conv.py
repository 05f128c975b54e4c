"""Small convolutions as matrix products equal PyTorch's in value and gradient, and run only where supported."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from psm import ops
from psm.kernels import small_conv
from psm.kernels.dispatch import optimize
from psm.kernels.small_conv import TOOM_COOK, is_small_strided_1x1, kernel_windows
from psm.kernels.transforms import as_tensor, over_both_axes
from psm.models import factory

FORMATS = (torch.contiguous_format, torch.channels_last)


SIDES = st.integers(1, 4)
KERNELS = [(1, 1), (2, 2), (3, 3), (5, 5), (3, 5), (7, 7)]
STRIDES, PADDINGS = [1, 2, 3, (1,), (1, 2)], [0, 1, 2, (1,), (1, 2), "same", "valid"]


def fits(height: Any, width: Any, kernel: Any, padding: Any, dilation: Any) -> Any:
    """True if the kernel fits in the padded input, as PyTorch requires."""
    if padding == "same":
        return True
    pads = (0, 0) if padding == "valid" else padding if isinstance(padding, tuple) else (padding,)
    sides = zip((height, width), kernel, (pads[0], pads[-1]), strict=True)
    return all(side + 2 * pad >= dilation * (size - 1) + 1 for side, size, pad in sides)


CONVOLUTIONS = st.fixed_dictionaries(
    {
        "height": SIDES,
        "width": SIDES,
        "kernel": st.sampled_from(KERNELS),
        "stride": st.sampled_from(STRIDES),
        "padding": st.sampled_from(PADDINGS),
        "dilation": st.sampled_from([1, 2]),
        "groups": st.sampled_from([1, 2]),
        "biased": st.booleans(),
        "formats": st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
        "batch": st.integers(0, 3),
    }
).filter(lambda c: c["padding"] != "same" or c["stride"] in (1, (1,)))


def layer_and_images(c: Any) -> Any:
    draws = torch.Generator().manual_seed(c["height"] * 7 + c["width"])
    images = torch.randn(c["batch"], 4, c["height"], c["width"], generator=draws, dtype=torch.double)
    options = (c["stride"], c["padding"], c["dilation"], c["groups"], c["biased"])
    layer = nn.Conv2d(4, 6, c["kernel"], *options, dtype=torch.double)
    return layer.to(memory_format=c["formats"][1]), images.clone(memory_format=c["formats"][0])


@given(CONVOLUTIONS.filter(lambda c: fits(c["height"], c["width"], c["kernel"], c["padding"], c["dilation"])))
def test_value_and_gradient_equal_the_convolution(convolution: Any) -> None:
    """Over shapes, strides, paddings and memory formats, supported or not."""
    layer, images = layer_and_images(convolution)
    results = []
    for mode in (nullcontext, optimize):
        layer.zero_grad()
        maps = images.clone().requires_grad_()
        with mode(layer):
            out = layer(maps)
        out.square().sum().backward()
        results.append([out.detach(), maps.grad, *(p.grad for p in layer.parameters())])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)


@given(CONVOLUTIONS.filter(lambda c: not fits(c["height"], c["width"], c["kernel"], c["padding"], c["dilation"])))
def test_a_kernel_larger_than_the_input_is_refused_as_by_pytorch(convolution: Any) -> None:
    layer, images = layer_and_images(convolution)
    for mode in (nullcontext, optimize):
        with mode(layer), pytest.raises(RuntimeError, match=r"Kernel size|[Oo]utput size"):
            layer(images)


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
def test_it_applies_where_each_output_sees_the_whole_map(
    size: Any, kernel: Any, stride: Any, padding: Any, starts: Any
) -> None:
    found = kernel_windows(size, kernel, stride, padding)
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
def test_it_samples_places_where_the_kernel_has_one(
    size: Any, kernel: Any, stride: Any, padding: Any, applies: Any
) -> None:
    assert is_small_strided_1x1(size, kernel, stride, padding) == applies


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_network_learns_the_same_and_stays_what_it_was(stem: Any, channels_last: Any) -> None:
    torch.manual_seed(0)
    network = factory.create_encoder("tiny", stem, 32).double()
    images = torch.randn(6, 3, 32, 32, dtype=torch.double)
    if channels_last:
        network, images = (x.to(memory_format=torch.channels_last) for x in (network, images))
    before = {name: type(module) for name, module in network.named_modules()}
    gradients = []
    for device in ("meta", "cpu"):  # on any device but a CPU the layers are plain
        network.zero_grad()
        with ops.accelerated(network, torch.device(device)):
            network(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in network.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert {name: type(module) for name, module in network.named_modules()} == before


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), TOOM_COOK)
def test_the_products_are_the_convolution(size: Any, kernel: Any, stride: Any, padding: Any) -> None:
    """As a tensor: outputs x taps x map, a one wherever the tap of that output meets that place of the map."""
    maps, taps, out = (torch.tensor(matrix, dtype=torch.double) for matrix in TOOM_COOK[size, kernel, stride, padding])
    found = torch.einsum("op,pt,px->otx", out, taps, maps)
    for output in range(len(out)):
        for tap in range(kernel):
            wanted = torch.tensor([float(x == output * stride + tap - padding) for x in range(size)])
            torch.testing.assert_close(found[output, tap], wanted.double(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("size", "stride"), [(4, 1), (2, 1), (4, 2)])
def test_single_precision_errs_as_little_as_torch(size: Any, stride: Any) -> None:
    """Against double precision, at the widths of a ResNet; of the same size as what torch errs by."""
    draws = torch.Generator().manual_seed(size)
    maps = torch.randn(64, 128, size, size, generator=draws).relu().requires_grad_()
    layer = nn.Conv2d(128, 256, 3, stride, padding=1, bias=False)
    nn.init.normal_(layer.weight, std=0.03, generator=draws)

    def passes(maps: Any, layer: Any, mode: Any) -> Any:
        with mode(layer):
            out = layer(maps)
        weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
        return out.detach(), *torch.autograd.grad((out * weights).sum(), (maps, layer.weight))

    found, plain = (passes(maps, layer, mode) for mode in (optimize, nullcontext))
    exact = passes(maps.detach().double().requires_grad_(), deepcopy(layer).double(), nullcontext)
    for fast, torchs, true in zip(found, plain, exact, strict=True):
        error, usual = ((x - true).abs().max() / true.abs().max() for x in (fast, torchs))
        assert error < max(3 * usual, 4e-6)


def test_the_products_are_really_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a ResNet at 32 pixels with the ImageNet stem: layer 2 and on, but for its strided first and 1x1 shortcuts."""
    taken = {"conv_as_gemm": [], "toom_cook_conv": [], "strided_1x1_as_linear": []}
    for name, sizes in taken.items():
        plain = getattr(small_conv, name)
        monkeypatch.setattr(small_conv, name, lambda *given, s=sizes, p=plain: s.append(given[0].shape[2]) or p(*given))
    network = factory.create_encoder("resnet18", "imagenet", 32)
    with optimize(network), torch.no_grad():
        network(torch.randn(2, 3, 32, 32))
    assert taken["toom_cook_conv"] == [4, 4, 4, 4, 2, 2, 2]
    assert taken["conv_as_gemm"] == [2, 1, 1, 1]
    assert taken["strided_1x1_as_linear"] == [4, 2]


def test_half_precision_keeps_away_from_the_transforms() -> None:
    """Their rounding would be that of bfloat16, three times over."""
    layer = nn.Conv2d(4, 6, 3, padding=1).bfloat16()
    maps = torch.randn(2, 4, 4, 4).bfloat16()
    with optimize(layer):
        out = layer(maps)
    assert torch.equal(out, layer(maps))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_autocast_is_torch_s(size: Any) -> None:
    """The linear layer of a 1x1 map runs in half precision too, the transforms of larger ones give way."""
    layer, maps = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, size, size)
    with torch.autocast("cpu", torch.bfloat16):
        plain = layer(maps)
        with optimize(layer):
            out = layer(maps)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)


def test_transforms_made_in_inference_mode_serve_training() -> None:
    layer, maps = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 4, 4)
    as_tensor.cache_clear()
    over_both_axes.cache_clear()
    with optimize(layer):
        with torch.inference_mode():
            layer(maps)
        layer(maps.requires_grad_()).sum().backward()
    assert maps.grad is not None


def test_transforms_stay_on_the_cpu_whatever_the_default_device() -> None:
    layer, maps = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 4, 4)
    as_tensor.cache_clear()
    over_both_axes.cache_clear()
    with optimize(layer), torch.device("meta"):
        assert layer(maps).device.type == "cpu"
