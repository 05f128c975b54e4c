"""Any module as an encoder: its feature width, its pooling, what is refused."""

import pytest
import torch
from torch import nn

from psm.models.encoder import as_encoder, unwrapped
from psm.utils.errors import UserError


def test_any_module_becomes_an_encoder_untouched() -> None:
    module = nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.Dropout(0.5))
    module[2].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    network = as_encoder(module, image_size=12)
    assert network.width == 10
    assert [part.training for part in module.modules()] == [True, True, True, False]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    images = torch.randn(4, 3, 12, 12)
    network.eval()
    torch.testing.assert_close(network(images), module(images).mean((2, 3)))


def test_a_module_that_gives_vectors_is_left_as_it_is() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 17))
    network = as_encoder(module, image_size=8)
    images = torch.randn(5, 3, 8, 8)
    assert network.width == 17
    torch.testing.assert_close(network(images), module(images))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Linear(5, 5), "does not take images of 16 pixels"),
        (nn.Flatten(2), r"shape \(2, 3, 256\)"),
        (nn.Flatten(0), r"shape \(1536,\)"),
        (nn.AdaptiveMaxPool2d(2, return_indices=True), "type tuple"),
    ],
)
def test_a_module_that_is_no_encoder_is_refused(module: nn.Module, says: str) -> None:
    with pytest.raises(UserError, match=says):
        as_encoder(module, image_size=16)


def test_the_wrapped_module_is_given_back() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 17))
    assert unwrapped(as_encoder(module, image_size=8)) is module
    assert unwrapped(module) is module
