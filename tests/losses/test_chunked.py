"""A loss taken a slice of anchors at a time is the same loss."""

from functools import wraps
from typing import Any

import pytest
import torch

from helpers import batch_loss, compiled
from psm import ops
from psm.kernels import similarity
from psm.losses import chunked as slices
from psm.methods import METHODS, get_method
from psm.mining.memory_bank import MemoryBank
from psm.models.outputs import Embeddings
from psm.ops import mask_same_image_

CONTRASTIVE = [name for name in METHODS if get_method(name).objective.uses_negatives]


def outcome(method: Any, pairs: Any, monkeypatch: Any, parts: Any = None) -> Any:
    """Loss, metrics and gradients with at most so many (anchor, candidate) pairs at once."""
    monkeypatch.setattr(slices, "PAIRS", pairs)
    torch.manual_seed(0)
    embeddings = Embeddings(*(torch.randn(2, 11, 6, dtype=torch.double, requires_grad=True) for _ in range(3)))
    spec = get_method(method, **parts or {})
    if not (spec.target.enabled or spec.predictor.enabled):
        embeddings = Embeddings(*[embeddings.projection] * 3)
    bank = MemoryBank(40, 6).double()
    bank.enqueue(torch.randn(33, 6, dtype=torch.double), torch.arange(33))
    found = batch_loss(embeddings, spec, bank, torch.arange(11), torch.Generator().manual_seed(3))
    (3 * found.loss).backward()
    return [found.loss.detach(), *found.metrics.values(), *(x.grad for x in embeddings if x.grad is not None)]


@pytest.mark.parametrize("method", [name for name in CONTRASTIVE if name != "mochi"])
@pytest.mark.parametrize("pairs", [1, 100, 300])
def test_slices_change_nothing(method: str, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, metrics and gradient of every contrastive method, PNSM's draws included."""
    parts = {"sampler": "pnsm"}
    whole = outcome(method, 2**24, monkeypatch, parts)
    assert len(whole) > 3
    torch.testing.assert_close(outcome(method, pairs, monkeypatch, parts), whole)


def test_mixing_draws_anew_for_each_slice_but_pushes_as_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    """MoCHi's draws come in another order; what is not drawn stays the same."""
    whole, sliced = (outcome("mochi", pairs, monkeypatch) for pairs in (2**24, 100))
    assert whole[0] != sliced[0]
    torch.testing.assert_close(sliced[0], whole[0], rtol=0.05, atol=0)
    torch.testing.assert_close(sliced[1:4], whole[1:4])


def test_no_slice_is_kept_for_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond one slice nothing of the size of all pairs is saved."""
    monkeypatch.setattr(slices, "PAIRS", 256)
    embeddings = Embeddings(*(torch.randn(2, 64, 4, requires_grad=True) for _ in range(3)))
    largest = 0

    def note(tensor: Any) -> Any:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        batch_loss(embeddings, get_method("simclr"), None, torch.arange(64))
    assert 0 < largest <= 64 * 2 * 4


def test_without_gradient_slices_only_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        embeddings = Embeddings(*(torch.randn(2, 9, 4) for _ in range(3)))
        whole = batch_loss(embeddings, get_method("simclr")).loss
        monkeypatch.setattr(slices, "PAIRS", 20)
        torch.testing.assert_close(batch_loss(embeddings, get_method("simclr")).loss, whole)


@compiled
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 64), (torch.float64, 2)])
def test_a_whole_bank_is_taken_at_once_only_where_that_holds_no_matrix(
    dtype: torch.dtype, most: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, whole = [], ops.logsumexp_similarity
    counted = wraps(whole)(lambda *x: taken.append(len(x[0])) or whole(*x))
    monkeypatch.setattr(ops, "logsumexp_similarity", counted)
    monkeypatch.setattr(slices, "PAIRS", 100)
    monkeypatch.setattr(similarity, "MIN_PAIRS", 0)
    bank = MemoryBank(50, 32).to(dtype)
    bank.enqueue(torch.randn(50, 32, dtype=dtype), torch.arange(50))
    embeddings = Embeddings(*(torch.randn(2, 64, 32, dtype=dtype) for _ in range(3)))
    batch_loss(embeddings, get_method("mocov2"), bank, torch.arange(64))
    assert max(taken) == most


@pytest.mark.parametrize("own", [[], [3], [5, 5, 9], [7, 1, 1, 7]])
def test_own_pairs_are_marked_alike_on_every_device(own: Any) -> None:
    """The CPU's way through the columns, with queries that share an image too, against comparing all pairs."""
    ids, own = torch.tensor([1, 5, 5, -1, 7, 8, 1]), torch.tensor(own, dtype=torch.long)
    pairs = torch.zeros(len(own), len(ids))
    assert mask_same_image_(pairs, ids, own, 2.0) is pairs
    assert torch.equal(pairs == 2.0, ids == own[:, None])


@pytest.mark.parametrize("pairs", [20, 2**24])
def test_a_second_derivative_is_refused_rather_than_wrong(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "PAIRS", pairs)
    embeddings = Embeddings(*[torch.randn(2, 9, 4, requires_grad=True)] * 3)
    loss = batch_loss(embeddings, get_method("simclr")).loss
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(loss, embeddings.projection, create_graph=True)[0].square().sum().backward()


def test_slices_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "PAIRS", 20)
    rows = torch.randn(9, 4, requires_grad=True)
    with torch.inference_mode():
        total, told = slices.sum_over_anchors(lambda part, x: (x.sum(), x.detach().sum()), 10, (rows,), ())
    torch.testing.assert_close(total, rows.detach().sum())
    torch.testing.assert_close(told, total)
