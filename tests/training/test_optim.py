"""Optimizers by name: the same steps as torch's or a plain loop's, in every memory layout, resumed exactly."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psm
from psm import kernels, ops
from psm.config.merge import build
from psm.config.schema import OptimConfig, PretrainConfig
from psm.models.factory import create_encoder
from psm.training.module import PretrainModule
from psm.training.optim import OPTIMIZERS, adapt_loaded_state, build_optimizer, check_optimizer
from psm.utils.errors import UserError

CONFIG = OptimConfig(warmup_lr=0.1, weight_decay=1e-2)


def steps(layer: Any, optimizer: Any, of: Any) -> None:
    for index in of:
        optimizer.zero_grad()
        maps = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(index))
        layer(maps).square().mean().backward()
        optimizer.step()


def test_it_is_fused_on_a_cpu_and_equals_the_plain_steps() -> None:
    layer = nn.Conv2d(3, 4, 3)
    plain = deepcopy(layer)
    optimizer = build_optimizer(layer.parameters(), CONFIG)
    assert optimizer.defaults["fused"]
    steps(layer, optimizer, range(4))
    steps(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=1e-2, foreach=False), range(4))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_parameters_are_in_groups_of_their_own(name: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    config = OptimConfig(name=name, weight_decay=1e-2, exclude_norm_bias=True)
    plain = build_optimizer(net.parameters(), config, dict.fromkeys(net[1].parameters(), 1.0))
    assert [len(group["params"]) for group in plain.param_groups] == [2, 2]
    assert not any("lr_factor" in group for group in plain.param_groups)
    groups = build_optimizer(net.parameters(), config, dict.fromkeys(net[1].parameters(), 10.0)).param_groups
    assert [group.get("lr_factor", 1.0) for group in groups] == [1.0, 1.0, 10.0, 10.0]
    assert [group["weight_decay"] for group in groups] == [1e-2, 0.0, 1e-2, 0.0]
    assert [p for group in groups for p in group["params"]] == [net[0].weight, net[0].bias, net[1].weight, net[1].bias]


@pytest.mark.parametrize("shape", [(4, 3, 1, 1), (4, 1, 3, 3), (1, 3, 3, 3), (4, 3)])
def test_weights_of_any_shape_move(shape: Any) -> None:
    """Sides of one, whose strides may be any, among them."""
    weights = nn.Parameter(torch.randn(shape))
    if len(shape) == 4:
        weights.data = weights.data.to(memory_format=torch.channels_last)
    weights.grad = torch.randn(shape)
    expected = weights.detach() - 0.1 * (weights.grad + 1e-2 * weights.detach())
    build_optimizer([weights], CONFIG).step()
    torch.testing.assert_close(weights.detach(), expected)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_channels_last_weights_take_the_same_steps(momentum: Any) -> None:
    layer, config = nn.Conv2d(3, 4, 3), replace(CONFIG, momentum=momentum)
    plain = deepcopy(layer)
    layer.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(layer.parameters(), config)
    steps(layer, optimizer, range(4))
    steps(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum, weight_decay=1e-2, foreach=False), range(4))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_training_have_the_strides_of_their_weights(layout: Any) -> None:
    """With the kernels' backward functions and PyTorch's: the fused step reads both in the order of memory."""
    network = create_encoder("tiny", "cifar", 32).to(memory_format=layout)
    images = torch.randn(64, 3, 32, 32).to(memory_format=layout)
    for mode in (nullcontext, kernels.disabled):
        network.zero_grad()
        with mode(), ops.accelerated(network, images.device):
            network(images).square().sum().backward()
        for weights in network.parameters():
            strides = zip(weights.shape, weights.grad.stride(), weights.stride(), strict=True)
            assert all(one == other for size, one, other in strides if size > 1)


def test_gradients_of_another_layout_meet_their_own_weights() -> None:
    weights = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    weights.grad = torch.randn(4, 3, 2, 2)
    expected = weights.detach() - 0.1 * (weights.grad + 1e-2 * weights.detach())
    build_optimizer([weights], CONFIG).step()
    torch.testing.assert_close(weights.detach(), expected)


def test_a_closure_gives_its_loss_and_weights_without_gradients_stay() -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = build_optimizer(weights, CONFIG)

    def closure() -> Any:
        loss = weights[0].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (weights[0] < 1).all()
    assert (weights[1] == 1).all()
    assert weights[1] not in optimizer.state


def test_a_checkpoint_does_not_decide_how_the_step_is_taken() -> None:
    layer = nn.Conv2d(3, 4, 3)
    elsewhere = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9, foreach=True)
    steps(layer, elsewhere, range(1))
    optimizer = build_optimizer(layer.parameters(), CONFIG)
    optimizer.load_state_dict(elsewhere.state_dict())
    adapt_loaded_state(optimizer)
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (True, None)
    steps(layer, optimizer, range(1))


def test_elsewhere_it_is_not() -> None:
    assert not build_optimizer(nn.Linear(2, 2, device="meta").parameters(), CONFIG).defaults["fused"]


def test_momenta_of_another_layout_are_laid_out_anew() -> None:
    """Half of the steps with plain weights, half with channels-last ones: the same as all with plain ones."""
    layer = nn.Conv2d(3, 4, 3)
    whole = deepcopy(layer)
    steps(whole, build_optimizer(whole.parameters(), CONFIG), range(6))

    first = build_optimizer(layer.parameters(), CONFIG)
    steps(layer, first, range(3))
    layer.to(memory_format=torch.channels_last)
    second = build_optimizer(layer.parameters(), CONFIG)
    second.load_state_dict(first.state_dict())
    adapt_loaded_state(second)
    steps(layer, second, range(3, 6))
    torch.testing.assert_close(layer.state_dict(), whole.state_dict())


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4 * 4, 5))


def lars_in_loops(weights: Any, gradients: Any, momenta: Any, lr: Any, momentum: Any, decay: Any, trust: Any) -> None:
    """One step of LARS, number by number (SimCLR, BYOL: norms and biases are neither decayed nor scaled)."""
    for w, g, m in zip(weights, gradients, momenta, strict=True):
        flat_w, flat_g, flat_m = w.view(-1), g.reshape(-1), m.view(-1)
        update = [float(x) for x in flat_g]
        if w.dim() > 1:
            update = [float(x) + decay * float(y) for x, y in zip(flat_g, flat_w, strict=True)]
            size = sum(float(y) ** 2 for y in flat_w) ** 0.5
            step = sum(x**2 for x in update) ** 0.5
            ratio = trust * size / step if size > 0 and step > 0 else 1.0
            update = [ratio * x for x in update]
        for i, x in enumerate(update):
            flat_m[i] = momentum * float(flat_m[i]) + x
            flat_w[i] = float(flat_w[i]) - lr * float(flat_m[i])


def test_lars_equals_a_loop_over_every_number() -> None:
    layers = network().double()
    with torch.no_grad():
        layers[3].weight.zero_()  # a norm of zero: no scaling
    plain = [p.detach().clone() for p in layers.parameters()]
    momenta = [torch.zeros_like(p) for p in plain]
    config = OptimConfig(name="lars", warmup_lr=0.3, momentum=0.8, weight_decay=0.01, trust_coefficient=0.02)
    optimizer = build_optimizer(layers.parameters(), config)
    for index in range(4):
        optimizer.zero_grad()
        maps = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        layers(maps).add(1).square().mean().backward()
        lars_in_loops(plain, [p.grad for p in layers.parameters()], momenta, 0.3, 0.8, 0.01, 0.02)
        optimizer.step()
        for ours, theirs in zip(layers.parameters(), plain, strict=True):
            torch.testing.assert_close(ours.detach(), theirs)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_norms_and_biases_are_not_decayed_when_excluded(name: str) -> None:
    """With gradients of zero only weight decay can move a weight."""
    moved = {}
    for exclude in (False, True):
        layers = network()
        before = [p.detach().clone() for p in layers.parameters()]
        with torch.no_grad():
            for p in layers.parameters():
                p.grad = torch.zeros_like(p)
        config = OptimConfig(name=name, warmup_lr=0.1, weight_decay=0.1, exclude_norm_bias=exclude)
        build_optimizer(layers.parameters(), config).step()
        moved[exclude] = [
            (p.ndim > 1, not torch.equal(p, b)) for p, b in zip(layers.parameters(), before, strict=True) if b.any()
        ]
    assert all(changed == matrix for matrix, changed in moved[True])
    assert all(changed == (matrix or name != "lars") for matrix, changed in moved[False])


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (
            OptimConfig(name="sgd", warmup_lr=0.1, weight_decay=1e-2, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2, nesterov=True, foreach=False),
        ),
        (
            OptimConfig(name="adamw", warmup_lr=0.01, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6),
            lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.95), 1e-6, weight_decay=0.1, foreach=False),
        ),
    ],
    ids=["sgd", "adamw"],
)
@pytest.mark.parametrize("clip", [None, 1.0])  # fused, and not
def test_settings_reach_torch(config: Any, reference: Any, clip: Any) -> None:
    layer = nn.Conv2d(3, 4, 3)
    plain = deepcopy(layer)
    layer.to(memory_format=torch.channels_last)
    steps(layer, build_optimizer(layer.parameters(), replace(config, clip=clip)), range(4))
    steps(plain, reference(plain.parameters()), range(4))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"name": "adam"}, r"optim\.name=adam is unknown \(did you mean 'adamw'\?\): choose one of sgd, adamw, lars"),
        ({"name": "adamw", "momentum": 0.5}, r"optim\.momentum is a setting of sgd and lars, and optim\.name=adamw"),
        ({"betas": [0.9, 0.99]}, r"optim\.betas is a setting of adamw, and optim\.name=sgd"),
        ({"name": "adamw", "betas": [0.9]}, r"optim\.betas=\[0\.9\] has 1 of them: give 2 numbers"),
        ({"name": "adamw", "eps": 0.0}, r"optim\.eps=0\.0 is too small"),
        ({"name": "lars", "trust_coefficient": -1.0}, r"optim\.trust_coefficient=-1\.0 is too small"),
        ({"momentum": 1.0}, r"optim\.momentum=1\.0 is too large"),
        ({"momentum": 0.0, "nesterov": True}, r"optim\.nesterov=true needs momentum"),
    ],
)
def test_settings_that_make_no_sense_are_refused(keys: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_optimizer(build(PretrainConfig, {"optim": keys}).optim)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "sgd" else ()) for name in OPTIMIZERS]
)
def test_a_run_resumes_exactly_with_every_optimizer(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    small |= {"optim": {"name": name, "exclude_norm_bias": True}, "save": {"every_steps": 1}}
    whole = psm.pretrain(tmp_path / "whole", **small)
    assert whole.config.optim.lr == OPTIMIZERS[name].lr
    step, stops = PretrainModule.training_step, [4]

    def training_step(self: Any, batch: Any, index: Any) -> Any:
        if batch.step in stops:
            raise KeyError("stopped")
        return step(self, batch, index)

    monkeypatch.setattr(PretrainModule, "training_step", training_step)
    with pytest.raises(KeyError):
        psm.pretrain(tmp_path / "parts", **small)
    stops.clear()
    parts = psm.pretrain(tmp_path / "parts", resume=True, progress=False)
    for key, value in whole.encoder.state_dict().items():
        assert torch.equal(value, parts.encoder.state_dict()[key]), key
