"""A fused residual block equals its layers in value, gradients and running statistics; fused only where supported."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import compiled, using
from psm.kernels import basic_block, winograd
from psm.kernels.dispatch import can_fuse_block, optimize
from psm.models import factory, resnet
from psm.training.distributed import SyncBatchNormCPU

FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few maps too, which are quicker to test."""
    monkeypatch.setattr(winograd, "MIN_TILES", 1)


def maps_of(*shape: Any, layout: Any = torch.channels_last) -> Any:
    draws = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draws).to(memory_format=layout).requires_grad_()


def block_of(inputs: Any, outputs: Any, stride: Any, maps: Any) -> Any:
    """A block whose ReLUs see no value near zero, which rounding might put on either side, and its gradient with it."""
    torch.manual_seed(inputs + outputs + stride)
    block = resnet.BasicBlock(inputs, outputs, stride)
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


def _between(values: Any) -> Any:
    """What to add to each channel so that zero lies in the widest gap between its middle values."""
    ordered = values.transpose(0, 1).flatten(1).sort(1).values
    count = ordered.shape[1]
    ordered = ordered[:, count // 4 : max(count // 4 + 2, count * 3 // 4)]
    widest = ordered.diff(dim=1).argmax(1, keepdim=True)
    return -(ordered.gather(1, widest) + ordered.gather(1, widest + 1))[:, 0] / 2


def passes(block: Any, maps: Any, mode: Any = nullcontext) -> Any:
    """Value, gradients for an uneven gradient of the value, running moments."""
    with mode(block):
        out = block(maps)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), (maps, *block.parameters())), *block.buffers()


@compiled
@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 40),
    sides=st.tuples(st.sampled_from([8, 16]), st.sampled_from([8, 24])),
    inputs=st.sampled_from([32, 64]),
    stride=st.sampled_from([1, 2]),
    layout=st.sampled_from(FORMATS),
    threads=st.integers(1, 3),
)
def test_value_gradients_and_running_moments_equal_the_layers(
    batch: Any, sides: Any, inputs: Any, stride: Any, layout: Any, threads: int
) -> None:
    maps = maps_of(batch, inputs, *sides, layout=layout)
    block = block_of(inputs, inputs * stride, stride, maps).to(memory_format=layout)
    doubles, single = deepcopy(block).double(), deepcopy(block)
    with using(threads):
        with optimize(block):
            assert can_fuse_block(block, maps)
        found = passes(block, maps, optimize)
    exact = passes(doubles, maps.detach().double().requires_grad_())
    plain = passes(single, maps)
    for fast, torchs, true in zip(found, plain, exact, strict=True):
        error, usual = ((x - true).abs().max() / true.abs().max() for x in (fast, torchs))
        assert error < max(4 * usual, 2e-5)
    for parameter, gradient in zip(block.parameters(), found[2:], strict=False):
        assert gradient.stride() == parameter.stride()


@compiled
@pytest.mark.parametrize("stride", [1, 2])
def test_it_is_the_same_each_time_and_changes_nothing_that_was_kept(stride: Any) -> None:
    maps = maps_of(40, 64, 8, 8)
    block = block_of(64, 64 * stride, stride, maps)
    with using(2):
        found = [passes(deepcopy(block), maps, optimize) for _ in range(5)]
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))
    with optimize(block):
        out = block(maps)
    first, second = (torch.autograd.grad(out.sum(), (maps, *block.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@compiled
def test_second_derivatives_are_refused() -> None:
    maps, block = maps_of(8, 32, 8, 8), resnet.BasicBlock(32, 32, 1)
    with optimize(block):
        (gradient,) = torch.autograd.grad(block(maps).square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@compiled
@pytest.mark.parametrize("stride", [1, 2])
def test_neither_default_type_nor_autocast_nor_hooks_of_what_is_saved_change_it(stride: Any) -> None:
    maps = maps_of(8, 32, 16, 16)
    block = block_of(32, 32 * stride, stride, maps)
    usual = passes(deepcopy(block), maps, optimize)
    elsewhere = deepcopy(block)
    weights = torch.randn(usual[0].shape, generator=torch.Generator().manual_seed(7))
    saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().contiguous().clone(), lambda x: x)
    torch.set_default_dtype(torch.float64)
    try:
        with optimize(elsewhere), saved:
            out = elsewhere(maps)
        with torch.autocast("cpu", torch.bfloat16):
            gradients = torch.autograd.grad(out, (maps, *elsewhere.parameters()), weights)
    finally:
        torch.set_default_dtype(torch.float32)
    found = (out.detach(), *gradients, *elsewhere.buffers())
    assert all(torch.equal(x, y) for x, y in zip(found, usual, strict=True))


@compiled
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_go_to_their_own_parameters_and_to_none_that_is_frozen(stride: Any) -> None:
    """Whatever the order in which parameters were registered."""
    maps = maps_of(8, 32, 16, 16)
    block = block_of(32, 32 * stride, stride, maps)
    turned = deepcopy(block)
    for norm in (turned.bn1, turned.bn2):
        norm._parameters = dict(reversed(norm._parameters.items()))
    frozen = deepcopy(block)
    frozen.bn1.requires_grad_(False)
    frozen.conv2.requires_grad_(False)
    for each in (block, turned, frozen):
        with optimize(each):
            each(maps).square().sum().backward()
    gradients = dict(block.named_parameters())
    for name, parameter in turned.named_parameters():
        assert torch.equal(parameter.grad, gradients[name].grad)
    for name, parameter in frozen.named_parameters():
        if name.startswith(("bn1", "conv2")):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, gradients[name].grad)


@compiled
@pytest.mark.parametrize("stride", [1, 2])
def test_what_is_no_number_shows_and_inference_is_the_same(stride: Any) -> None:
    maps = maps_of(8, 32, 16, 16).detach()
    block = block_of(32, 32 * stride, stride, maps)
    with optimize(block), torch.no_grad():  # copies within the context are fast too
        usual = deepcopy(block)(maps)
        with torch.inference_mode():
            assert torch.equal(deepcopy(block)(maps), usual)
        maps[0, 0, 0, 0] = torch.nan
        assert deepcopy(block)(maps).isnan().all()  # of batch statistics, as in torch


def changed(change: Any, stride: Any = 1) -> Any:
    block = resnet.BasicBlock(32, 32 * stride, stride)
    change(block)
    return block


def put(name: Any, layer: Any, stride: Any = 1) -> Any:
    return changed(lambda block: setattr(block, name, layer), stride)


def convolution(inputs: Any, outputs: Any, size: Any = 3, padding: Any = 1, bias: Any = False, **more: Any) -> Any:
    return nn.Conv2d(inputs, outputs, size, padding=padding, bias=bias, **more)


class OwnConvolution(nn.Conv2d):
    pass


@compiled
@pytest.mark.parametrize("stride", [1, 2])
def test_what_the_others_differ_from_goes_in_one(stride: Any) -> None:
    block = resnet.BasicBlock(32, 32 * stride, stride)
    with optimize(block):
        assert can_fuse_block(block, maps_of(8, 32, 16, 16))


OTHERS = {
    "evaluated": resnet.BasicBlock(32, 32, 1).eval(),
    "double": resnet.BasicBlock(32, 32, 1).double(),
    "channels not in 32s": resnet.BasicBlock(32, 48, 2),
    "a shortcut that keeps the sides": resnet.BasicBlock(32, 64, 1),
    "stride 4": resnet.BasicBlock(32, 64, 4),
    "a bias": put("conv2", convolution(32, 32, bias=True)),
    "dilated": put("conv1", convolution(32, 32, padding=2, dilation=2)),
    "groups": put("conv1", convolution(32, 32, groups=2)),
    "another padding": put("conv1", convolution(32, 32, padding_mode="circular")),
    "no padding named": put("conv2", convolution(32, 32, padding="same")),
    "a larger kernel": put("conv2", convolution(32, 32, 5, padding=2)),
    "a convolution of one's own": put("conv1", OwnConvolution(32, 32, 3, padding=1, bias=False)),
    "no convolution": put("conv1", nn.Sequential(convolution(32, 32))),
    "no running moments": put("bn2", nn.BatchNorm2d(32, track_running_stats=False)),
    "moments over processes": put("bn1", SyncBatchNormCPU(32)),
    "running moments taken out": changed(lambda block: vars(block.bn1)["_buffers"].update(running_mean=None,
                                                                                          running_var=None)),
    "moments not followed": changed(lambda block: setattr(block.bn1, "track_running_stats", False)),
    "a norm without a bias": changed(lambda block: setattr(block.bn1, "bias", None)),
    "no norm": put("bn1", nn.Identity()),
    "norm evaluated": put("bn1", nn.BatchNorm2d(32).eval()),
    "shortcut's norm evaluated": put("downsample", nn.Sequential(convolution(32, 64, 1, 0, stride=2),
                                                                  nn.BatchNorm2d(64).eval()), 2),
    "shortcut of three": put("downsample", nn.Sequential(convolution(32, 64, 1, 0, stride=2), nn.BatchNorm2d(64),
                                                          nn.Tanh()), 2),
    "shortcut by pooling": put("downsample", nn.Sequential(nn.AvgPool2d(2), convolution(32, 64, 1, 0)), 2),
    "shortcut of 3x3": put("downsample", nn.Sequential(convolution(32, 64, stride=2), nn.BatchNorm2d(64)), 2),
    "a gate for a shortcut": put("downsample", nn.Sigmoid()),
    "a convolution's hook": changed(lambda block: block.conv2.register_forward_hook(lambda *given: None)),
    "a norm's hook": changed(lambda block: block.bn1.register_forward_pre_hook(lambda *given: None)),
    "a shortcut's hook": changed(lambda block: block.downsample.register_forward_hook(lambda *given: None), 2),
    "forward replaced": changed(lambda block: setattr(block.bn1, "forward", lambda maps: maps)),
}  # fmt: skip


@compiled
@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_goes_by_its_layers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    block = OTHERS[name]
    monkeypatch.setattr(basic_block, "fused_block", None)
    with optimize(block), torch.no_grad():
        block(torch.randn(8, 32, 16, 16).to(next(block.parameters()).dtype))


@compiled
def test_global_hooks_see_every_layer() -> None:
    heard, block = [], resnet.BasicBlock(32, 32, 1)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *given: heard.append(type(module).__name__))
    try:
        with optimize(block), torch.no_grad():
            block(torch.randn(8, 32, 16, 16))
    finally:
        handle.remove()
    assert heard.count("Conv2d") == heard.count("BatchNorm2d") == 2


@pytest.mark.parametrize("stride", [1, 2])
def test_maps_of_other_channels_get_torch_s_own_words(stride: Any) -> None:
    block = resnet.BasicBlock(32, 32 * stride, stride)
    with optimize(block), pytest.raises(RuntimeError, match="channels"):
        block(torch.randn(8, 64, 16, 16))


def with_another_kernel() -> Any:
    block = resnet.BasicBlock(32, 64, 2)
    block.downsample[0].weight = nn.Parameter(torch.randn(64, 32, 3, 3))
    return block


@compiled
@pytest.mark.parametrize(
    "block",
    [
        with_another_kernel(),
        put("bn1", nn.BatchNorm2d(64)),
        put("conv2", convolution(64, 64)),
        put("downsample", nn.Sequential(convolution(32, 32, 1, 0, stride=2), nn.BatchNorm2d(32)), 2),
    ],
)
def test_layers_that_do_not_fit_each_other_get_torch_s_own_words(monkeypatch: pytest.MonkeyPatch, block: Any) -> None:
    monkeypatch.setattr(basic_block, "fused_block", None)
    with optimize(block), pytest.raises(RuntimeError):
        block(torch.randn(8, 32, 16, 16))


@compiled
def test_mixed_precision_and_compilers_go_by_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basic_block, "fused_block", None)
    block, maps = resnet.BasicBlock(32, 32, 1), torch.randn(8, 32, 8, 8)
    with optimize(block), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        block(maps)
    with optimize(block), torch.no_grad():
        torch.compile(block, backend="eager")(maps)
    block(maps)  # outside of the context


@compiled
@pytest.mark.parametrize(
    ("encoder", "stem", "taken"),
    [
        ("tiny", "cifar", [(32, 16), (32, 16), (64, 8)]),
        ("resnet18", "imagenet", [(64, 8)] * 3 + [(128, 4)]),
        ("resnet18", "cifar", [(64, 32)] * 3 + [(128, 16)] * 2 + [(256, 8)]),
    ],
)
def test_encoders_take_it(monkeypatch: pytest.MonkeyPatch, encoder: Any, stem: Any, taken: Any) -> None:
    found, fused = [], basic_block.fused_block
    monkeypatch.setattr(
        basic_block, "fused_block", lambda block, maps: found.append(tuple(maps.shape[1:3])) or fused(block, maps)
    )
    network = factory.create_encoder(encoder, stem, 32)
    with optimize(network), torch.no_grad():
        network(torch.randn(64, 3, 32, 32))
    assert found == taken
