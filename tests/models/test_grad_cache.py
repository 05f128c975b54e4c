"""Gradient caching: chunks of a batch, run twice, learn exactly what they would learn kept in memory."""

import shutil
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psm.methods import METHODS, get_method
from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from psm.models.outputs import Embeddings
from psm.models.siamese import SiameseNetworks
from psm.training.module import step_loss


def networks(method: str, norm: bool = True) -> SiameseNetworks:
    torch.manual_seed(0)
    spec = get_method(method)
    backbone = create_encoder("tiny", "cifar", 8)
    nets = SiameseNetworks(
        backbone,
        projection_head(256, 16, 8),
        prediction_head(8, 16, 8) if spec.predictor.enabled else None,
        spec.target.enabled,
    )
    if not norm:
        for parent in list(nets.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.modules.batchnorm._BatchNorm):
                    setattr(parent, name, nn.Identity())
    return nets.double()


def views() -> Tensor:
    return torch.randn(2, 10, 3, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def learned(nets: Any, given: Tensor, method: str, chunk: int | None) -> dict[str, Tensor]:
    torch.manual_seed(0)  # PNSM's draws
    loss, _, latest = step_loss(nets, given, torch.arange(10), get_method(method), None, None, chunk)
    loss.backward()
    gradients = {name: p.grad for name, p in nets.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **latest._asdict(), **gradients, **dict(nets.named_buffers())}


class InChunks(nn.Module):
    """The same chunks, plainly: nothing is run twice, everything is kept."""

    def __init__(self, nets: SiameseNetworks, chunk: int) -> None:
        super().__init__()
        self.nets, self.chunk = nets, chunk

    def forward(self, given: Tensor, *_: Any) -> tuple[Embeddings, Tensor]:
        parts = [self.nets(part) for part in given.split(self.chunk, dim=1)]
        embeddings = Embeddings(*(torch.cat([part[0][i] for part in parts], 1) for i in range(3)))
        return embeddings, torch.cat([part[1].view(2, -1, 256) for part in parts], 1).flatten(0, 1)


@pytest.mark.parametrize("method", [name for name in METHODS if not get_method(name).needs_bank])
@pytest.mark.parametrize("chunk", [2, 4, 5])
def test_chunks_run_twice_equal_chunks_that_are_kept(method: str, chunk: int) -> None:
    """Loss, gradients and the running statistics of batch norm, which count each chunk once."""
    nets = networks(method)
    plain = learned(InChunks(deepcopy(nets), chunk), views(), method, None)
    cached = learned(nets, views(), method, chunk)
    torch.testing.assert_close({name.removeprefix("nets."): value for name, value in plain.items()}, cached)


@pytest.mark.parametrize("method", ["simclr", "byol"])
def test_without_batch_norm_chunks_equal_the_whole_batch(method: str) -> None:
    nets = networks(method, norm=False)
    whole = learned(deepcopy(nets), views(), method, None)
    torch.testing.assert_close(learned(nets, views(), method, 3), whole)


def test_a_chunk_as_large_as_the_batch_is_the_batch() -> None:
    nets = networks("simclr")
    whole = learned(deepcopy(nets), views(), "simclr", None)
    torch.testing.assert_close(learned(nets, views(), "simclr", 10), whole)


def test_memory_holds_the_maps_of_one_chunk() -> None:
    """What is kept for the gradient does not grow with the number of chunks, but for views and embeddings."""
    kept = []
    for chunk in (None, 2):
        total = 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            step_loss(networks("simclr"), views(), torch.arange(10), get_method("simclr"), None, None, chunk)
        kept.append(total)
    assert kept[1] < kept[0] / 5


@pytest.mark.parametrize("method", ["byol", "simclr"])  # with and without predictor and target
@pytest.mark.parametrize("chunk", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_compiled_networks_learn_the_same(method: str, chunk: int | None) -> None:
    """Traced and differentiated ahead of time; what a backend then makes of the graph is the backend's."""
    nets = networks(method)
    plain = learned(deepcopy(nets), views(), method, chunk)
    names = list(nets.state_dict())
    nets.compile_parts("aot_eager")
    torch.testing.assert_close(learned(nets, views(), method, chunk), plain)
    assert list(nets.state_dict()) == names


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor_learns_the_same() -> None:
    nets = networks("simclr")
    plain = learned(deepcopy(nets), views(), "simclr", None)
    nets.compile_parts("inductor")
    torch.testing.assert_close(learned(nets, views(), "simclr", None), plain)
