"""Top-k and log-sum-exp of similarities with a bank equal PyTorch's, and their kernels run only where supported."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from helpers import compiled, using
from psm import kernels, ops
from psm.kernels import runtime, similarity
from psm.mining.memory_bank import MemoryBank


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows too, which are quicker to test."""
    monkeypatch.setattr(similarity, "MIN_PAIRS", 0)


def unit(*shape: Any, seed: Any = 0) -> Any:
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=1)


def bank_of(rows: Any, ids: Any = None) -> Any:
    bank = MemoryBank(*rows.shape)
    bank.enqueue(rows, torch.arange(len(rows)) if ids is None else ids)
    return bank


def by_torch(bank: Any, *given: Any) -> Any:
    with kernels.disabled():
        return bank_of(*bank).search(*given)


@compiled
@settings(deadline=None)
@given(
    queries=st.integers(48, 90),
    rows=st.integers(32 * similarity.BLOCK, 1600),
    width=st.sampled_from([1, 6, 128]),
    k=st.integers(1, 4),
    images=st.integers(2, 300),
    own=st.booleans(),
    threads=st.integers(1, 3),
)
def test_it_finds_the_largest(queries: Any, rows: Any, width: Any, k: Any, images: Any, own: Any, threads: int) -> None:
    vectors, held = unit(queries, width, seed=1), unit(rows, width)
    ids, whose = torch.arange(rows) % images, torch.arange(queries) % images
    k = min(k, rows // similarity.BLOCK // 2 // runtime.simd_width())
    with using(threads):
        assert similarity.supports_topk(vectors, held, k, ids, whose)
        values, places = similarity.topk_similarity(vectors, held, k, ids, whose if own else None)
    exact = vectors.double() @ held.double().T
    if own:
        exact = exact.masked_fill(ids == whose[:, None], -torch.inf)
    torch.testing.assert_close(values.double(), exact.topk(k, dim=1).values, atol=1e-6, rtol=0)
    torch.testing.assert_close(exact.gather(1, places), values.double(), atol=1e-6, rtol=0)
    assert all(len(set(row)) == k for row in places.tolist())


@compiled
@pytest.mark.parametrize("count", [64, 100])  # in whole vectors, and not
def test_a_bank_mines_the_same_with_it(count: Any) -> None:
    rows, vectors = unit(3000, 32), unit(count, 32, seed=1)
    ids, own = torch.arange(3000) % 500, torch.arange(count)
    found = bank_of(rows, ids).search(vectors, 5, own)
    for fast, torchs in zip(found, by_torch((rows, ids), vectors, 5, own), strict=True):
        torch.testing.assert_close(fast, torchs, atol=1e-6, rtol=0)


@compiled
@pytest.mark.parametrize("broken", ["row", "query"])
def test_what_is_no_number_shows_as_in_torch(broken: Any) -> None:
    rows, vectors = unit(3000, 32), unit(40, 32, seed=1)
    (rows if broken == "row" else vectors)[7, 3] = torch.nan
    found = bank_of(rows).search(vectors, 2)
    assert torch.equal(found.found, by_torch((rows,), vectors, 2).found)
    assert found.found.any() == (broken == "query")


@compiled
def test_where_all_rows_are_one_s_own_nothing_is_found() -> None:
    found = bank_of(unit(3000, 32), torch.full((3000,), 5)).search(unit(40, 32), 2, torch.arange(40))
    assert found.found.tolist() == [place != 5 for place in range(40)]


@compiled
def test_too_few_rows_beside_a_last_block_that_is_not_full() -> None:
    """The places beyond it are as little as one's own rows."""
    ids = torch.full((1933,), 7)
    ids[-1] = 8
    found = bank_of(unit(1933, 32), ids).search(unit(80, 32, seed=1), 5, torch.full((80,), 7))
    assert not found.found.any()
    assert (found.ids == -1).all()


@compiled
@pytest.mark.parametrize("fill", [1933, 2000])
def test_a_bank_that_is_not_full_and_vectors_that_lie_apart(fill: Any) -> None:
    bank, rows = MemoryBank(3000, 32), unit(fill, 32)
    bank.enqueue(rows, torch.arange(fill))
    vectors = torch.randn(2, 32, 80, generator=torch.Generator().manual_seed(1))[0].T
    with torch.inference_mode():
        found = bank.search(vectors, 3)
    for fast, torchs in zip(found, by_torch((rows,), vectors, 3), strict=True):
        torch.testing.assert_close(fast, torchs, atol=1e-6, rtol=0)


@compiled
def test_the_default_device_does_not_matter() -> None:
    bank, vectors = bank_of(unit(3000, 32)), unit(40, 32, seed=1)
    expected = bank.search(vectors, 3).ids
    with torch.device("meta"):
        places = similarity.topk_similarity(vectors, bank.rows, 3, None, None)[1]
    assert torch.equal(bank.ids[places], expected)


@pytest.mark.parametrize("count", [16, 64])
def test_what_does_not_fit_is_refused(count: Any) -> None:
    bank = bank_of(unit(3000, 32))
    with pytest.raises(ValueError, match="rows the width 32"):
        bank.search(unit(count, 16), 1)
    with pytest.raises(ValueError, match="rows the width 32"):
        bank.search(unit(count, 64), 1)
    for wrong in (count - 1, count + 1):
        with pytest.raises(ValueError, match=f"{count} vectors need an id each, not {wrong}"):
            bank.search(unit(count, 32), 1, torch.arange(wrong))


@compiled
def test_a_bank_takes_it_at_the_paper_s_size_and_holds_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real least
    taken, supports = [], similarity.supports_topk

    def counted(*given: Any) -> Any:
        return supports(*given) and not taken.append(len(given[1]))

    monkeypatch.setitem(ops._kernels, "topk_similarity", ops.Kernel(counted, similarity.topk_similarity))
    bank = bank_of(unit(16384, 128))
    for count in (256, 1):
        bank.search(unit(count, 128, seed=1), 5)
    assert taken == [16384]  # not for a single query, which would leave most of a vector unused
    assert bank._similarity.numel() <= 16384  # no matrix for the first


@compiled
def test_slices_of_a_bank_join(monkeypatch: pytest.MonkeyPatch) -> None:
    import psm.mining.memory_bank

    rows, vectors = unit(5120, 32), unit(64, 32, seed=1)
    whole = bank_of(rows).search(vectors, 5)
    monkeypatch.setattr(psm.mining.memory_bank, "SEARCH_ELEMENTS", 2**17)
    for part, all_at_once in zip(bank_of(rows).search(vectors, 5), whole, strict=True):
        assert torch.equal(part, all_at_once)


@compiled
def test_it_is_the_same_each_time_and_for_any_number_of_threads() -> None:
    rows, vectors, found = unit(3000, 32), unit(64, 32, seed=1), []
    for threads in (1, 2, 2, 3):
        with using(threads):
            found.append(bank_of(rows).search(vectors, 5))
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))


@compiled
def test_it_applies_where_it_can_read_and_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, rows, ids = unit(64, 32), unit(3000, 32), torch.arange(64)
    assert similarity.supports_topk(vectors, rows, 5, ids, ids)
    assert not similarity.supports_topk(vectors.double(), rows.double(), 5)
    assert not similarity.supports_topk(vectors[:, ::2], rows[:, ::2], 5)
    assert not similarity.supports_topk(vectors[:8], rows, 5)
    assert not similarity.supports_topk(vectors, rows, 16)  # many blocks
    assert not similarity.supports_topk(vectors, rows, 0)
    assert not similarity.supports_topk(vectors, rows, 5, ids, ids + 2**31)  # wider than what is compared
    assert not similarity.supports_topk(vectors, rows, 5, ids - 2**32, ids)
    with using(5 if runtime.simd_width() == 16 else 9):
        assert not similarity.supports_topk(vectors, rows, 5)  # most threads would have no queries
    monkeypatch.setattr(similarity, "MIN_PAIRS", 2**20)
    assert not similarity.supports_topk(vectors, rows, 5)


def test_wide_ids_are_told_apart() -> None:
    rows = unit(3000, 32)
    ids = torch.arange(3000) * 2**32 + 7
    assert bank_of(rows, ids).search(rows[:64], 1, ids[:64] + 2**32).ids[:, 0].tolist() == ids[:64].tolist()


@settings(deadline=None)
@given(
    count=st.integers(1, 100),
    rows=st.integers(1, 1100),
    width=st.sampled_from([1, 6, 32, 128]),
    temperature=st.sampled_from([1.0, 0.2, 0.01]),
    threads=st.integers(1, 3),
)
def test_the_sum_of_exponentials_and_its_gradient_equal_those_of_the_matrix(
    count: Any, rows: Any, width: Any, temperature: Any, threads: int
) -> None:
    queries, rows = (unit(count, width, seed=1) / temperature).requires_grad_(), unit(rows, width)
    with using(threads):
        found = ops.logsumexp_similarity(queries, rows)
    exact = torch.logsumexp(queries.double() @ rows.double().T, 1)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad((x * weights.to(x.dtype)).sum(), queries)[0] for x in (found, exact)]
    torch.testing.assert_close(found.double(), exact, atol=2e-6 / temperature, rtol=0)
    torch.testing.assert_close(*gradients, atol=1e-6 + 1e-6 / temperature, rtol=4e-6)


@compiled
def test_a_sum_over_many_rows_loses_nothing() -> None:
    queries, rows = unit(64, 128, seed=1) / 0.2, unit(50_000, 128)
    found, mean = similarity.logsumexp_and_mean(queries, rows)
    exact = queries.double() @ rows.double().T
    torch.testing.assert_close(found.double(), exact.logsumexp(1), atol=2e-6, rtol=0)
    torch.testing.assert_close(mean.double(), exact.softmax(1) @ rows.double(), atol=1e-7, rtol=0)


@compiled
@pytest.mark.parametrize("largest", ["first", "last"])
def test_a_sum_of_far_apart_exponentials(largest: Any) -> None:
    """Far beyond what a float can hold, whichever comes first."""
    rows = unit(1000, 32)
    queries = 500 * rows[: 1 if largest == "first" else None][-1:].expand(64, -1)
    found, mean = similarity.logsumexp_and_mean(queries, rows)
    torch.testing.assert_close(found, torch.full((64,), 500.0))
    torch.testing.assert_close(mean, queries / 500)


@pytest.mark.parametrize("rows", [40, 3000])
def test_a_sum_hides_no_damage_and_none_are_nothing(rows: Any) -> None:
    queries, rows = unit(40, 32, seed=1), unit(rows, 32)
    queries[3, 5] = torch.nan
    queries.requires_grad_()
    assert ops.logsumexp_similarity(queries, rows).isnan().nonzero().tolist() == [[3]]
    nothing = ops.logsumexp_similarity(queries, rows[:0])
    assert (nothing == -torch.inf).all()
    nothing.sum().backward()
    assert (queries.grad == 0).all()
    assert ops.logsumexp_similarity(queries[:0], rows).shape == (0,)
    rows[7, 3] = torch.nan
    assert ops.logsumexp_similarity(queries, rows).isnan().all()


def test_a_sum_takes_vectors_that_do_not_lie_in_a_row() -> None:
    draws = torch.Generator().manual_seed(0)
    queries, rows = (torch.randn(128, n, generator=draws).T for n in (40, 300))
    torch.testing.assert_close(ops.logsumexp_similarity(queries, rows), torch.logsumexp(queries @ rows.T, 1))
    queries, rows = (torch.randn(n, 2, 64, generator=draws)[:, 0] for n in (40, 300))
    torch.testing.assert_close(ops.logsumexp_similarity(queries, rows), torch.logsumexp(queries @ rows.T, 1))
    torch.testing.assert_close(
        ops.logsumexp_similarity(queries, rows.contiguous()), torch.logsumexp(queries @ rows.T, 1)
    )


@compiled
def test_a_sum_is_taken_where_it_can_be_read_and_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, rows = unit(64, 32), unit(3000, 32)
    assert similarity.supports_logsumexp(queries, rows)
    assert not similarity.supports_logsumexp(queries.double(), rows.double())
    assert not similarity.supports_logsumexp(queries.bfloat16(), rows)
    assert not similarity.supports_logsumexp(queries[:, :20], rows[:, :20].contiguous())  # not in whole vectors
    assert not similarity.supports_logsumexp(queries[:8], rows)
    monkeypatch.setattr(similarity, "MIN_PAIRS", 2**20)
    assert not similarity.supports_logsumexp(queries, rows)


@compiled
def test_a_sum_is_the_same_for_any_number_of_threads() -> None:
    queries, rows, found = unit(100, 32) / 0.2, unit(3000, 32), []
    for threads in (1, 2, 3):
        with using(threads):
            found.append(similarity.logsumexp_and_mean(queries, rows))
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))
