"""A residual block in one: equal to its layers, value, gradients and running moments; only where it applies."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from psm import blocks, networks, processor, tiles
from psm.distributed import JoinedBatchNorm
from psm.faster import Faster, in_one

FORMATS = (torch.contiguous_format, torch.channels_last)
compiled = pytest.mark.skipif(processor.lanes() is None, reason="nothing is compiled for this processor")


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Few maps too, which are quicker to test."""
    monkeypatch.setattr(tiles, "LEAST_TILES", 1)


def maps_of(*shape, layout=torch.channels_last):
    draws = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draws).to(memory_format=layout).requires_grad_()


def block_of(inputs, outputs, stride, maps):
    """A block whose ReLUs see no value near zero, which rounding might put on either side, and its gradient with it."""
    torch.manual_seed(inputs + outputs + stride)
    block = networks.BasicBlock(inputs, outputs, stride)
    for norm in (x for x in block.modules() if isinstance(x, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    exact, seen = deepcopy(block).double(), {}
    with torch.no_grad():
        exact.bn1.register_forward_hook(lambda *given: seen.update(inner=given[2]))
        exact(maps.detach().double())
        block.bn1.bias.copy_(_between(seen["inner"]))
        exact.bn1.bias.copy_(block.bn1.bias)
        inner = exact.bn1(exact.conv1(maps.detach().double())).relu()
        outer = exact.bn2(exact.conv2(inner)) + exact.downsample(maps.detach().double())
        block.bn2.bias.copy_(_between(outer))
    return block


def _between(values):
    """What to add to each channel so that zero lies in the widest gap between its middle values."""
    ordered = values.transpose(0, 1).flatten(1).sort(1).values
    count = ordered.shape[1]
    ordered = ordered[:, count // 4 : max(count // 4 + 2, count * 3 // 4)]
    widest = ordered.diff(dim=1).argmax(1, keepdim=True)
    return -(ordered.gather(1, widest) + ordered.gather(1, widest + 1))[:, 0] / 2


def passes(block, maps, mode=nullcontext):
    """Value, gradients for an uneven gradient of the value, running moments."""
    with mode():
        out = block(maps)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), (maps, *block.parameters())), *block.buffers()


@compiled
@settings(deadline=None)
@given(
    batch=st.integers(1, 40),
    sides=st.tuples(st.sampled_from([8, 16]), st.sampled_from([8, 24])),
    inputs=st.sampled_from([32, 64]),
    stride=st.sampled_from([1, 2]),
    layout=st.sampled_from(FORMATS),
    threads=st.integers(1, 3),
)
def test_value_gradients_and_running_moments_equal_the_layers(batch, sides, inputs, stride, layout, threads):
    maps = maps_of(batch, inputs, *sides, layout=layout)
    block = block_of(inputs, inputs * stride, stride, maps).to(memory_format=layout)
    doubles, single, before = deepcopy(block).double(), deepcopy(block), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Faster():
            assert in_one(block, maps)
        found = passes(block, maps, Faster)
    finally:
        torch.set_num_threads(before)
    exact = passes(doubles, maps.detach().double().requires_grad_())
    plain = passes(single, maps)
    for fast, torchs, true in zip(found, plain, exact, strict=True):
        error, usual = ((x - true).abs().max() / true.abs().max() for x in (fast, torchs))
        assert error < max(4 * usual, 2e-5)
    for parameter, gradient in zip(block.parameters(), found[2:], strict=False):
        assert gradient.stride() == parameter.stride()


@compiled
@pytest.mark.parametrize("stride", [1, 2])
def test_it_is_the_same_each_time_and_changes_nothing_that_was_kept(stride):
    maps = maps_of(40, 64, 8, 8)
    block = block_of(64, 64 * stride, stride, maps)
    torch.set_num_threads(2)
    found = [passes(deepcopy(block), maps, Faster) for _ in range(5)]
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))
    with Faster():
        out = block(maps)
    first, second = (torch.autograd.grad(out.sum(), (maps, *block.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@compiled
def test_second_derivatives_are_refused():
    maps = maps_of(8, 32, 8, 8)
    with Faster():
        (gradient,) = torch.autograd.grad(networks.BasicBlock(32, 32, 1)(maps).square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def changed(change):
    block = networks.BasicBlock(32, 32, 1)
    change(block)
    return block


@pytest.mark.parametrize(
    "block",
    [
        networks.BasicBlock(32, 32, 1).eval(),
        networks.BasicBlock(32, 32, 1).double(),
        networks.BasicBlock(32, 48, 2),
        networks.BasicBlock(32, 64, 1),  # a shortcut that keeps the sides
        networks.BasicBlock(32, 64, 3),
        changed(lambda block: setattr(block, "conv2", nn.Conv2d(32, 32, 3, padding=1))),  # a bias
        changed(lambda block: setattr(block, "conv1", nn.Conv2d(32, 32, 3, padding=2, dilation=2, bias=False))),
        changed(lambda block: setattr(block, "conv1", nn.Conv2d(32, 32, 3, padding=1, groups=2, bias=False))),
        changed(lambda block: setattr(block, "bn2", nn.BatchNorm2d(32, track_running_stats=False))),
        changed(lambda block: setattr(block, "bn1", JoinedBatchNorm(32))),
        changed(lambda block: setattr(block, "bn1", nn.Identity())),
        changed(lambda block: block.conv2.register_forward_hook(lambda *given: None)),
        changed(lambda block: block.bn1.register_forward_pre_hook(lambda *given: None)),
    ],
)
def test_anything_else_goes_by_its_layers(monkeypatch, block):
    monkeypatch.setattr(networks, "residual", None)
    with Faster(), torch.no_grad():
        block(torch.randn(8, 32, 12, 12).to(block.conv1.weight.dtype))


def test_mixed_precision_and_compilers_go_by_the_layers(monkeypatch):
    monkeypatch.setattr(networks, "residual", None)
    block, maps = networks.BasicBlock(32, 32, 1), torch.randn(8, 32, 8, 8)
    with Faster(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        block(maps)
    with Faster(), torch.no_grad():
        torch.compile(block, backend="eager")(maps)
    block(maps)  # out of the mode


@compiled
@pytest.mark.parametrize(
    ("encoder", "stem", "taken"),
    [
        ("tiny", "small", [(32, 16), (32, 16), (64, 8)]),
        ("resnet18", "imagenet", [(64, 8)] * 3 + [(128, 4)]),
        ("resnet18", "small", [(64, 32)] * 3 + [(128, 16)] * 2 + [(256, 8)]),
    ],
)
def test_encoders_take_it(monkeypatch, encoder, stem, taken):
    found, whole = [], blocks.residual
    monkeypatch.setattr(
        networks, "residual", lambda block, maps: found.append(tuple(maps.shape[1:3])) or whole(block, maps)
    )
    with Faster(), torch.no_grad():
        networks.encoder(encoder, stem, 32)(torch.randn(64, 3, 32, 32))
    assert found == taken
