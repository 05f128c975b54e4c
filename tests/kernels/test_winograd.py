"""Winograd convolutions equal PyTorch's in value and gradient, and run only where they are supported."""

import ctypes
import platform
import re
import shutil
import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import compiled, using
from psm.kernels import bn_relu, dispatch, runtime, winograd
from psm.kernels.crop import CropArgs
from psm.kernels.dispatch import optimize
from psm.kernels.similarity import LogSumExpArgs, TopkArgs
from psm.models import factory, resnet

FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which("cc")), reason="no C compiler"
)
def test_it_is_compiled_where_it_can_be() -> None:
    assert runtime._native is not None, "run pip install again: psm was installed without its compiled part"
    assert runtime.gomp_parallel(), "torch's OpenMP library was not found, so that only one thread would run"


def passes(maps: Any, layer: Any, mode: Any = nullcontext) -> Any:
    """The value, and the gradients of maps and parameters for an uneven gradient of the value."""
    with mode(layer):
        out = layer(maps)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), (maps, *layer.parameters()))


@compiled
@settings(deadline=None)
@given(
    batch=st.integers(1, 40),
    height=st.sampled_from([8, 12, 16]),
    width=st.sampled_from([8, 12, 16]),
    inputs=st.sampled_from([32, 64]),
    outputs=st.sampled_from([32, 96]),
    biased=st.booleans(),
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    threads=st.integers(1, 3),
    stride=st.sampled_from([1, 2]),
)
def test_value_and_gradient_equal_the_convolution(
    batch: Any, height: Any, width: Any, inputs: Any, outputs: Any, biased: Any, formats: Any, threads: int, stride: Any
) -> None:
    height, width = height * stride, width * stride
    draws = torch.Generator().manual_seed(batch)
    maps = torch.randn(batch, inputs, height, width, generator=draws).to(memory_format=formats[0]).requires_grad_()
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=biased).to(memory_format=formats[1])
    with pytest.MonkeyPatch.context() as changed, using(threads):
        changed.setattr(winograd, "MIN_TILES", 1)
        assert winograd.supports(maps, layer.weight, stride)
        found = passes(maps, layer, optimize)
    exact = passes(maps.detach().double().requires_grad_(), deepcopy(layer).double())
    for fast, true in zip(found, exact, strict=True):
        assert (fast - true).abs().max() < 1e-5 * true.abs().max()
    assert found[2].stride() == layer.weight.stride()


@compiled
@pytest.mark.parametrize(("channels", "size", "batch"), [(32, 16, 128), (64, 32, 16), (256, 8, 64)])
def test_single_precision_errs_as_little_as_torch(channels: Any, size: Any, batch: Any) -> None:
    draws = torch.Generator().manual_seed(size)
    maps = torch.randn(batch, channels, size, size, generator=draws).relu().requires_grad_()
    layer = resnet.convolution(channels, channels, 3)
    found, plain = (passes(maps, layer, mode) for mode in (optimize, nullcontext))
    exact = passes(maps.detach().double().requires_grad_(), deepcopy(layer).double())
    for fast, torchs, true in zip(found, plain, exact, strict=True):
        error, usual = ((x - true).abs().max() / true.abs().max() for x in (fast, torchs))
        assert error < max(3 * usual, 4e-6)


@compiled
def test_only_the_gradients_that_are_asked_for_are_computed() -> None:
    layer, maps = resnet.convolution(32, 32, 3), torch.randn(32, 32, 8, 8)
    wanted = passes(maps.clone().requires_grad_(), layer)
    with optimize(layer):
        layer(maps).sum().backward()  # not of the maps
        assert maps.grad is None
        assert layer.weight.grad is not None
        layer.weight.requires_grad_(False)
        maps.requires_grad_()
        weights = torch.randn(maps.shape, generator=torch.Generator().manual_seed(7))
        (layer(maps) * weights).sum().backward()
    torch.testing.assert_close(maps.grad, wanted[1], atol=1e-5, rtol=1e-5)


@compiled
def test_it_is_the_same_each_time_whoever_comes_first() -> None:
    """Bit for bit, or no run could be resumed so; and values, without the sum over maps, for any number of threads."""
    layer, maps = resnet.convolution(64, 64, 3), torch.randn(48, 64, 8, 8, requires_grad=True)
    with using(2):
        found = [passes(maps, layer, optimize) for _ in range(8)]
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))
    for threads in (1, 3):
        with using(threads):
            again = passes(maps, layer, optimize)
        assert all(torch.equal(x, y) for x, y in zip(again[:2], found[0][:2], strict=True))


@compiled
def test_second_derivatives_are_refused() -> None:
    layer, maps = resnet.convolution(32, 32, 3), torch.randn(32, 32, 8, 8, requires_grad=True)
    with optimize(layer):
        (gradient,) = torch.autograd.grad(layer(maps).square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@compiled
@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((64, 32, 12, 12), nn.Conv2d(32, 32, 3, stride=2, padding=1)),  # not in eights
        ((64, 32, 9, 9), nn.Conv2d(32, 32, 3, stride=3, padding=1)),
        ((32, 32, 8, 8), nn.Conv2d(32, 32, 3)),
        ((32, 32, 8, 8), nn.Conv2d(32, 32, 3, padding=1, groups=2)),
        ((32, 32, 8, 8), nn.Conv2d(32, 32, 3, padding=2, dilation=2)),
        ((32, 32, 8, 8), nn.Conv2d(32, 32, 5, padding=2)),
        ((32, 16, 8, 8), nn.Conv2d(16, 32, 3, padding=1)),  # too few channels
        ((32, 32, 8, 8), nn.Conv2d(32, 36, 3, padding=1)),  # not in vectors
        ((32, 32, 8, 10), nn.Conv2d(32, 32, 3, padding=1)),  # not in fours
        ((4, 32, 8, 8), nn.Conv2d(32, 32, 3, padding=1)),  # too few maps
        ((32, 32, 8, 8), nn.Conv2d(32, 32, 3, padding=1).double()),
        ((32, 32, 8, 8), nn.Conv2d(32, 32, 3, padding=1).bfloat16()),
    ],
)
def test_anything_else_is_torch_s(monkeypatch: pytest.MonkeyPatch, shape: Any, layer: Any) -> None:
    monkeypatch.setattr(winograd, "winograd_conv", None)
    maps = torch.randn(shape).to(layer.weight.dtype)
    with optimize(layer), torch.no_grad():
        found = layer(maps)
    assert torch.equal(found, layer(maps))


def test_without_a_compiler_all_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_native", None)
    runtime.native_width.cache_clear()
    try:
        network, images = factory.create_encoder("tiny", "cifar", 32), torch.randn(64, 3, 32, 32)
        with optimize(network):
            network(images).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    finally:
        runtime.native_width.cache_clear()


@compiled
def test_a_tensor_without_numbers_is_torch_s() -> None:
    with FakeTensorMode(), optimize(layer := nn.Conv2d(32, 32, 3, padding=1)):
        assert layer(torch.empty(32, 32, 8, 8)).shape == (32, 32, 8, 8)


@compiled
def test_a_resnet_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CIFAR stem at 32 pixels: three stages and the fourth's first, all but the shortcuts."""
    taken, plain = [], winograd.winograd_conv
    monkeypatch.setattr(
        winograd, "winograd_conv", lambda *given: taken.append(tuple(given[0].shape[1:3])) or plain(*given)
    )
    monkeypatch.setattr(dispatch, "can_fuse_block", lambda *given: False)  # convolution by convolution
    network = factory.create_encoder("resnet18", "cifar", 32)
    with optimize(network), torch.no_grad():
        network(torch.randn(64, 3, 32, 32))
    assert taken == [(64, 32)] * 5 + [(128, 16)] * 4 + [(256, 8)] * 4


@compiled
def test_many_threads_do_not_fill_memory_with_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    maps, weight = torch.empty(512, 64, 8, 8), torch.empty(64, 64, 3, 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 256)
    assert winograd._slots(maps.shape, winograd.TILINGS[1]) == 57  # nine maps at a time
    assert winograd.supports(maps, weight, 1)
    assert not winograd.supports(torch.empty(512, 512, 8, 8), torch.empty(512, 512, 3, 3), 1)


WINOGRAD = {"batch": 1, "height": 8, "width": 8, "in_channels": 32, "out_channels": 32, "stride": 1, "tile_block": 36}
TOPK = {"num_rows": 1, "dim": 8, "num_queries": 32, "group": 32, "block": 12, "k": 1}
LOGSUMEXP = {"num_rows": 1, "dim": 32, "num_queries": 32, "group": 32}
CROP = {"num_images": 1, "num_views": 1, "height": 8, "width": 8, "size": 8, "max_taps": 5, "pixel_stride": 3}
CROP |= {"channel_stride": 1}


@compiled
@pytest.mark.parametrize(
    ("kernel", "struct", "sizes", "message"),
    [
        ("winograd_forward", winograd.WinogradArgs, WINOGRAD | {"width": 7}, "height and width must be multiples"),
        ("winograd_forward", winograd.WinogradArgs, WINOGRAD | {"stride": 3}, "the stride must be 1 or 2"),
        ("winograd_forward", winograd.WinogradArgs, WINOGRAD | {"in_channels": 20}, "channels must be multiples"),
        ("bn_partial_stats", bn_relu.BatchNormArgs, {"rows": 1, "channels": 48, "chunk_rows": 1}, "multiple of 32"),
        ("topk_similarity", TopkArgs, TOPK | {"num_queries": 7}, "multiples of two vectors"),
        ("logsumexp_similarity", LogSumExpArgs, LOGSUMEXP | {"group": 256}, "group at most 128"),
        ("logsumexp_similarity", LogSumExpArgs, LOGSUMEXP | {"dim": 33}, "dim must be a multiple"),
        ("crop_color", CropArgs, CROP | {"pixel_stride": 2}, "contiguous or channels-last"),
        ("crop_color", CropArgs, CROP | {"max_taps": 4}, "max_taps is too small"),
        ("crop_color", CropArgs, CROP | {"num_images": 0}, "must not be empty"),
    ],
)
def test_wrong_sizes_are_refused(kernel: Any, struct: Any, sizes: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        runtime.launch(kernel, struct, **sizes)


@compiled
def test_only_what_a_pass_has_and_tensors_that_it_can_read_are_taken() -> None:
    sizes = {"rows": 4, "channels": 32, "chunk_rows": 4}
    maps = torch.zeros(4, 32)
    for wrong in (maps.double(), maps.to("meta"), maps.to_sparse()):
        with pytest.raises(TypeError, match="float32 tensors in CPU memory"):
            runtime.launch("bn_partial_stats", bn_relu.BatchNormArgs, x=wrong, partials=torch.empty(1, 3, 32), **sizes)
    with pytest.raises(TypeError, match="bn_partial_stats has no count"):
        runtime.launch(
            "bn_partial_stats", bn_relu.BatchNormArgs, x=maps, partials=torch.empty(1, 3, 32), count=1, **sizes
        )


@compiled
def test_a_part_compiled_from_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of the sources without a new install."""
    grown = type("Pass", (bn_relu.BatchNormArgs,), {"_fields_": [("more", ctypes.c_void_p)]})
    with pytest.raises(RuntimeError, match="install it again"):
        runtime.launch("bn_partial_stats", grown, rows=1, channels=32, chunk_rows=1)
    with pytest.raises(RuntimeError, match="install it again"):
        runtime.launch("tomorrow", bn_relu.BatchNormArgs, rows=1, channels=32, chunk_rows=1)


def test_what_only_stands_for_numbers_is_torch_s() -> None:
    """Within torch.func, and tensors that are signs or zeros without memory."""
    assert runtime.is_plain_float(torch.zeros(4))
    seen = []
    torch.func.vmap(lambda x: seen.append(runtime.is_plain_float(x)) or x)(torch.zeros(2, 3))
    assert seen == [False]
    assert not runtime.is_plain_float(torch._neg_view(torch.ones(4)))
    assert not runtime.is_plain_float(torch._efficientzerotensor(4))


@pytest.mark.parametrize("stride", [1, 2])
def test_maps_of_other_channels_get_torch_s_own_words(stride: Any) -> None:
    layer = nn.Conv2d(64, 32, 3, stride, padding=1)
    with optimize(layer), pytest.raises(RuntimeError, match="channels"):
        layer(torch.randn(32, 32, 16, 16))


@compiled
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (winograd.WinogradArgs, "winograd"),
        (bn_relu.BatchNormArgs, "bn_relu"),
        (TopkArgs, "topk"),
        (LogSumExpArgs, "logsumexp"),
        (CropArgs, "crop"),
    ],
)
def test_structures_are_those_of_the_compiled_part(ours: Any, theirs: Any) -> None:
    """Name by name: a field out of place would be read as another."""
    source = (Path(winograd.__file__).parent / "csrc" / "module.c").read_text()
    fields = source.split(f"struct {theirs} {{", 1)[1].split("};", 1)[0]
    fields = re.sub(r"/\*.*?\*/|\bconst\b|\bfloat\b|\bdouble\b|\bint\b|\bunsigned char\b|Py_ssize_t|\*", " ", fields)
    assert re.split(r"[\s,;]+", fields.strip(" \n;")) == [name for name, _ in ours._fields_]
