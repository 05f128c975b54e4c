"""SGD in one pass over memory: the same steps as torch's, also with momenta that come from another memory layout."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import profile

from psm.config.schema import OptimConfig
from psm.training.optim import settle, sgd

CONFIG = OptimConfig(warmup_lr=0.1, weight_decay=1e-2)


def steps(layer, optimizer, of):
    for index in of:
        optimizer.zero_grad()
        maps = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(index))
        layer(maps).square().mean().backward()
        optimizer.step()


def test_it_is_fused_on_a_cpu_and_equals_the_plain_steps():
    layer = nn.Conv2d(3, 4, 3)
    plain = deepcopy(layer)
    optimizer = sgd(layer.parameters(), CONFIG)
    assert optimizer.defaults["fused"]
    steps(layer, optimizer, range(4))
    steps(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=1e-2, foreach=False), range(4))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("shape", [(4, 3, 1, 1), (4, 1, 3, 3), (1, 3, 3, 3), (4, 3)])
def test_weights_of_any_shape_move(shape):
    """Sides of one, whose strides may be any, among them."""
    weights = nn.Parameter(torch.randn(shape))
    if len(shape) == 4:
        weights.data = weights.data.to(memory_format=torch.channels_last)
    weights.grad = torch.randn(shape)
    expected = weights.detach() - 0.1 * (weights.grad + 1e-2 * weights.detach())
    sgd([weights], CONFIG).step()
    torch.testing.assert_close(weights.detach(), expected)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_channels_last_weights_take_the_same_steps_and_no_copies(momentum):
    layer, config = nn.Conv2d(3, 4, 3), replace(CONFIG, momentum=momentum)
    plain = deepcopy(layer)
    layer.to(memory_format=torch.channels_last)
    optimizer = sgd(layer.parameters(), config)
    steps(layer, optimizer, range(4))
    steps(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum, weight_decay=1e-2, foreach=False), range(4))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    with profile() as trace:
        optimizer.step()
    assert not {"aten::clone", "aten::copy_"} & {event.name for event in trace.events()}


def test_gradients_of_another_layout_meet_their_own_weights():
    weights = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    weights.grad = torch.randn(4, 3, 2, 2)
    expected = weights.detach() - 0.1 * (weights.grad + 1e-2 * weights.detach())
    sgd([weights], CONFIG).step()
    torch.testing.assert_close(weights.detach(), expected)


def test_a_closure_gives_its_loss_and_weights_without_gradients_stay():
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = sgd(weights, CONFIG)

    def closure():
        loss = weights[0].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (weights[0] < 1).all()
    assert (weights[1] == 1).all()
    assert weights[1] not in optimizer.state


def test_a_checkpoint_does_not_decide_how_the_step_is_taken():
    layer = nn.Conv2d(3, 4, 3)
    elsewhere = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9, foreach=True)
    steps(layer, elsewhere, range(1))
    optimizer = sgd(layer.parameters(), CONFIG)
    optimizer.load_state_dict(elsewhere.state_dict())
    settle(optimizer)
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (True, None)
    steps(layer, optimizer, range(1))


def test_elsewhere_it_is_not():
    assert not sgd(nn.Linear(2, 2, device="meta").parameters(), CONFIG).defaults["fused"]


def test_momenta_of_another_layout_are_laid_out_anew():
    """Half of the steps with plain weights, half with channels-last ones: the same as all with plain ones."""
    layer = nn.Conv2d(3, 4, 3)
    whole = deepcopy(layer)
    steps(whole, sgd(whole.parameters(), CONFIG), range(6))

    first = sgd(layer.parameters(), CONFIG)
    steps(layer, first, range(3))
    layer.to(memory_format=torch.channels_last)
    second = sgd(layer.parameters(), CONFIG)
    second.load_state_dict(first.state_dict())
    settle(second)
    steps(layer, second, range(3, 6))
    torch.testing.assert_close(layer.state_dict(), whole.state_dict())
