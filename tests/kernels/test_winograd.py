"""Convolutions by tiles: equal to torch's, value and gradient, and taken only where they apply."""

import ctypes
import platform
import re
import shutil
import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import compiled, using
from psm.kernels import bn_relu as norms
from psm.kernels import crop as crops
from psm.kernels import runtime as processor
from psm.kernels import similarity as products
from psm.kernels import winograd as tiles
from psm.kernels.dispatch import Faster
from psm.models import factory, resnet

FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which("cc")), reason="no C compiler"
)
def test_it_is_compiled_where_it_can_be():
    assert processor._native is not None, "run pip install again: psm was installed without its compiled part"
    assert processor._parallel(), "torch's OpenMP library was not found, so that only one thread would run"


def passes(maps, layer, mode=nullcontext):
    """The value, and the gradients of maps and parameters for an uneven gradient of the value."""
    with mode():
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
    batch, height, width, inputs, outputs, biased, formats, threads, stride
):
    height, width = height * stride, width * stride
    draws = torch.Generator().manual_seed(batch)
    maps = torch.randn(batch, inputs, height, width, generator=draws).to(memory_format=formats[0]).requires_grad_()
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=biased).to(memory_format=formats[1])
    with pytest.MonkeyPatch.context() as changed, using(threads):
        changed.setattr(tiles, "LEAST_TILES", 1)
        assert tiles.apply_to(maps, layer.weight, stride)
        found = passes(maps, layer, Faster)
    exact = passes(maps.detach().double().requires_grad_(), deepcopy(layer).double())
    for fast, true in zip(found, exact, strict=True):
        assert (fast - true).abs().max() < 1e-5 * true.abs().max()
    assert found[2].stride() == layer.weight.stride()


@compiled
@pytest.mark.parametrize(("channels", "size", "batch"), [(32, 16, 128), (64, 32, 16), (256, 8, 64)])
def test_single_precision_errs_as_little_as_torch(channels, size, batch):
    draws = torch.Generator().manual_seed(size)
    maps = torch.randn(batch, channels, size, size, generator=draws).relu().requires_grad_()
    layer = resnet.convolution(channels, channels, 3)
    found, plain = (passes(maps, layer, mode) for mode in (Faster, nullcontext))
    exact = passes(maps.detach().double().requires_grad_(), deepcopy(layer).double())
    for fast, torchs, true in zip(found, plain, exact, strict=True):
        error, usual = ((x - true).abs().max() / true.abs().max() for x in (fast, torchs))
        assert error < max(3 * usual, 4e-6)


@compiled
def test_only_the_gradients_that_are_asked_for_are_computed():
    layer, maps = resnet.convolution(32, 32, 3), torch.randn(32, 32, 8, 8)
    wanted = passes(maps.clone().requires_grad_(), layer)
    with Faster():
        layer(maps).sum().backward()  # not of the maps
        assert maps.grad is None
        assert layer.weight.grad is not None
        layer.weight.requires_grad_(False)
        maps.requires_grad_()
        weights = torch.randn(maps.shape, generator=torch.Generator().manual_seed(7))
        (layer(maps) * weights).sum().backward()
    torch.testing.assert_close(maps.grad, wanted[1], atol=1e-5, rtol=1e-5)


@compiled
def test_it_is_the_same_each_time_whoever_comes_first():
    """Bit for bit, or no run could be resumed so; and values, without the sum over maps, for any number of threads."""
    layer, maps = resnet.convolution(64, 64, 3), torch.randn(48, 64, 8, 8, requires_grad=True)
    with using(2):
        found = [passes(maps, layer, Faster) for _ in range(8)]
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))
    for threads in (1, 3):
        with using(threads):
            again = passes(maps, layer, Faster)
        assert all(torch.equal(x, y) for x, y in zip(again[:2], found[0][:2], strict=True))


@compiled
def test_second_derivatives_are_refused():
    layer, maps = resnet.convolution(32, 32, 3), torch.randn(32, 32, 8, 8, requires_grad=True)
    with Faster():
        (gradient,) = torch.autograd.grad(layer(maps).square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


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
def test_anything_else_is_torch_s(monkeypatch, shape, layer):
    monkeypatch.setattr(tiles, "by_tiles", None)
    maps = torch.randn(shape).to(layer.weight.dtype)
    with Faster(), torch.no_grad():
        found = layer(maps)
    assert torch.equal(found, layer(maps))


def test_without_a_compiler_all_is_torch_s(monkeypatch):
    monkeypatch.setattr(processor, "_native", None)
    processor.lanes.cache_clear()
    try:
        network, images = factory.create_encoder("tiny", "cifar", 32), torch.randn(64, 3, 32, 32)
        with Faster():
            network(images).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    finally:
        processor.lanes.cache_clear()


def test_a_tensor_without_numbers_is_torch_s():
    with FakeTensorMode(), Faster():
        assert nn.Conv2d(32, 32, 3, padding=1)(torch.empty(32, 32, 8, 8)).shape == (32, 32, 8, 8)


@compiled
def test_a_resnet_takes_them(monkeypatch):
    """With the CIFAR stem at 32 pixels: three stages and the fourth's first, all but the shortcuts."""
    taken, plain = [], tiles.by_tiles
    monkeypatch.setattr(tiles, "by_tiles", lambda *given: taken.append(tuple(given[0].shape[1:3])) or plain(*given))
    monkeypatch.setattr(resnet, "in_one", lambda *given: False)  # convolution by convolution
    with Faster(), torch.no_grad():
        factory.create_encoder("resnet18", "cifar", 32)(torch.randn(64, 3, 32, 32))
    assert taken == [(64, 32)] * 5 + [(128, 16)] * 4 + [(256, 8)] * 4


@compiled
def test_many_threads_do_not_fill_memory_with_their_sums(monkeypatch):
    maps, weight = torch.empty(512, 64, 8, 8), torch.empty(64, 64, 3, 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 256)
    assert tiles._slots(maps.shape, tiles.TILINGS[1]) == 57  # nine maps at a time
    assert tiles.apply_to(maps, weight, 1)
    assert not tiles.apply_to(torch.empty(512, 512, 8, 8), torch.empty(512, 512, 3, 3), 1)


@compiled
def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="sides go in tiles"):
        processor.call("convolve", tiles.Pass, count=1, height=8, width=7, inputs=32, outputs=32, stride=1, block=36)
    with pytest.raises(ValueError, match="strides"):
        processor.call("convolve", tiles.Pass, count=1, height=9, width=9, inputs=32, outputs=32, stride=3, block=36)
    with pytest.raises(ValueError, match="channels go in 32s"):
        processor.call("moments", norms.Pass, rows=1, columns=48, rows_each=1)
    with pytest.raises(ValueError, match="queries go in pairs"):
        processor.call("search", products.Search, count=1, inner=8, columns=7, group=32, block=12, k=1)
    with pytest.raises(ValueError, match="queries go in pairs"):
        processor.call("sum", products.Sum, count=1, inner=32, columns=32, group=256)
    with pytest.raises(ValueError, match="rows go in pairs"):
        processor.call("sum", products.Sum, count=1, inner=33, columns=32, group=32)
    sizes = {"count": 1, "all": 1, "height": 8, "width": 8, "size": 8}
    with pytest.raises(ValueError, match="channels come first or last"):
        processor.call("views", crops.Pass, **sizes, most=5, pixel=2, channel=1)
    with pytest.raises(ValueError, match="room for what they see"):
        processor.call("views", crops.Pass, **sizes, most=4, pixel=3, channel=1)


@compiled
def test_only_what_a_pass_has_and_tensors_that_it_can_read_are_taken():
    sizes = {"rows": 4, "columns": 32, "rows_each": 4}
    maps = torch.zeros(4, 32)
    for wrong in (maps.double(), maps.to("meta"), maps.to_sparse()):
        with pytest.raises(TypeError, match="single precision"):
            processor.call("moments", norms.Pass, x=wrong, sums=torch.empty(1, 3, 32), **sizes)
    with pytest.raises(TypeError, match="moments has no count"):
        processor.call("moments", norms.Pass, x=maps, sums=torch.empty(1, 3, 32), count=1, **sizes)


@compiled
def test_a_part_compiled_from_another_version_is_told(monkeypatch):
    """As after an update of the sources without a new install."""
    grown = type("Pass", (norms.Pass,), {"_fields_": [("more", ctypes.c_void_p)]})
    with pytest.raises(RuntimeError, match="install it again"):
        processor.call("moments", grown, rows=1, columns=32, rows_each=1)
    with pytest.raises(RuntimeError, match="install it again"):
        processor.call("tomorrow", norms.Pass, rows=1, columns=32, rows_each=1)


def test_what_only_stands_for_numbers_is_torch_s():
    """Within torch.func, and tensors that are signs or zeros without memory."""
    assert processor.in_memory(torch.zeros(4))
    seen = []
    torch.func.vmap(lambda x: seen.append(processor.in_memory(x)) or x)(torch.zeros(2, 3))
    assert seen == [False]
    assert not processor.in_memory(torch._neg_view(torch.ones(4)))
    assert not processor.in_memory(torch._efficientzerotensor(4))


@pytest.mark.parametrize("stride", [1, 2])
def test_maps_of_other_channels_get_torch_s_own_words(stride):
    with Faster(), pytest.raises(RuntimeError, match="channels"):
        nn.Conv2d(64, 32, 3, stride, padding=1)(torch.randn(32, 32, 16, 16))


@compiled
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (tiles.Pass, "tiles"),
        (norms.Pass, "norm"),
        (products.Search, "search"),
        (products.Sum, "sum"),
        (crops.Pass, "views"),
    ],
)
def test_structures_are_those_of_the_compiled_part(ours, theirs):
    """Name by name: a field out of place would be read as another."""
    source = (Path(tiles.__file__).parent / "csrc" / "module.c").read_text()
    fields = source.split(f"struct {theirs} {{", 1)[1].split("};", 1)[0]
    fields = re.sub(r"/\*.*?\*/|\bconst\b|\bfloat\b|\bdouble\b|\bint\b|\bunsigned char\b|Py_ssize_t|\*", " ", fields)
    assert re.split(r"[\s,;]+", fields.strip(" \n;")) == [name for name, _ in ours._fields_]
