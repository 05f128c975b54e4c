"""SGD in one pass over memory: the same steps as torch's, also with momenta that come from another memory layout."""

from copy import deepcopy

import torch
from torch import nn

from psm.config import OptimConfig
from psm.optimiser import settle, sgd

CONFIG = OptimConfig(warmup_lr=0.1, weight_decay=1e-2)


def steps(layer, optimiser, of):
    for index in of:
        optimiser.zero_grad()
        maps = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(index))
        layer(maps).square().mean().backward()
        optimiser.step()


def test_it_is_fused_on_a_cpu_and_equals_the_plain_steps():
    layer = nn.Conv2d(3, 4, 3)
    plain = deepcopy(layer)
    optimiser = sgd(layer.parameters(), CONFIG)
    assert optimiser.defaults["fused"]
    steps(layer, optimiser, range(4))
    steps(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=1e-2, foreach=False), range(4))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


def test_a_checkpoint_does_not_decide_how_the_step_is_taken():
    layer = nn.Conv2d(3, 4, 3)
    elsewhere = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9, foreach=True)
    steps(layer, elsewhere, range(1))
    optimiser = sgd(layer.parameters(), CONFIG)
    optimiser.load_state_dict(elsewhere.state_dict())
    settle(optimiser)
    assert (optimiser.param_groups[0]["fused"], optimiser.param_groups[0]["foreach"]) == (True, None)
    steps(layer, optimiser, range(1))


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
