"""The bank: exact FIFO for any size, unit norm on entry, exact search in bounded memory."""

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import psm.mining.memory_bank
from psm.mining.memory_bank import MemoryBank
from psm.utils.errors import UserError


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 12), pushes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_exact_fifo(size: Any, pushes: Any) -> None:
    bank, expected, next_id = MemoryBank(size, 3), [], 0
    for count in pushes:
        ids = torch.arange(next_id, next_id + count)
        bank.enqueue(torch.nn.functional.one_hot(ids % 3, 3) * 5.0, ids)
        expected = (expected + ids.tolist())[-size:]
        next_id += count
    start = int(bank.pointer) if int(bank.fill) == size else 0
    held = [int(bank.ids[(start + i) % size]) for i in range(int(bank.fill))]
    assert held == expected
    for place in range(int(bank.fill)):
        row, identity = bank.rows[place], int(bank.ids[place])
        assert torch.equal(row, torch.nn.functional.one_hot(torch.tensor(identity % 3), 3).float())


@pytest.mark.parametrize("batch", [4, 25])
def test_bank_of_ten(batch: Any) -> None:
    bank = MemoryBank(10, 2)
    for step in range(7):
        bank.enqueue(torch.randn(batch, 2), torch.arange(step * batch, (step + 1) * batch))
    assert sorted(bank.ids.tolist()) == list(range(7 * batch - 10, 7 * batch))


def test_rows_have_unit_norm() -> None:
    bank = MemoryBank(8, 5)
    bank.enqueue(torch.randn(8, 5) * 100, torch.arange(8))
    assert torch.allclose(bank.rows.norm(dim=1), torch.ones(8))


@pytest.mark.parametrize("limit", [2**25, 300])
@pytest.mark.parametrize("size", [7, 128, 1000, 4096])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_nearest_is_exact(monkeypatch: pytest.MonkeyPatch, limit: Any, size: Any, k: Any) -> None:
    """Against a full sort, whole or in slices, with own images passed over and a part of the bank unfilled."""
    monkeypatch.setattr(psm.mining.memory_bank, "SEARCH_ELEMENTS", limit)
    torch.manual_seed(size + k)
    bank = MemoryBank(size, 6)
    count = size * 3 // 4
    ids = torch.arange(count) % max(2, count // 3)
    bank.enqueue(torch.randn(count, 6), ids)
    queries, own = torch.randn(9, 6), torch.arange(9)
    mined = bank.search(queries, k, own)
    for row in range(9):
        similarity = normalize(queries[row], dim=0) @ bank.rows[:count].T
        usable = [(float(s), int(i)) for s, i in zip(similarity, ids, strict=True) if int(i) != row]
        best = sorted(usable, reverse=True)[:k]
        assert bool(mined.found[row]) == (len(usable) >= k)
        if len(usable) >= k:
            assert torch.allclose(mined.similarity[row], torch.tensor([s for s, _ in best]), atol=1e-6)
            assert row not in mined.ids[row].tolist()
            assert torch.allclose(
                (mined.vectors[row] @ normalize(queries[row], dim=0)), mined.similarity[row], atol=1e-6
            )
        else:
            assert (mined.ids[row] == -1).all()
            assert (mined.vectors[row] == 0).all()


def test_own_image_is_never_a_candidate() -> None:
    bank = MemoryBank(10, 4)
    rows = torch.randn(10, 4)
    bank.enqueue(rows, torch.arange(10))
    assert (bank.search(rows, 1).ids[:, 0] == torch.arange(10)).all()
    assert (bank.search(rows, 3, exclude_ids=torch.arange(10)).ids != torch.arange(10)[:, None]).all()


def test_state_dict_holds_everything() -> None:
    bank, other = MemoryBank(5, 3), MemoryBank(5, 3)
    bank.enqueue(torch.randn(7, 3), torch.arange(7))
    other.load_state_dict(bank.state_dict())
    for b in (bank, other):
        b.enqueue(torch.ones(2, 3), torch.tensor([70, 71]))
    assert torch.equal(bank.rows, other.rows)
    assert torch.equal(bank.ids, other.ids)
    assert bank.fill == other.fill == 5


def test_other_widths_and_missing_ids_are_refused() -> None:
    bank = MemoryBank(8, 4)
    with pytest.raises(ValueError, match=r"shape \(3, 5\), and the bank's rows the width 4"):
        bank.enqueue(torch.ones(3, 5), torch.arange(3))
    with pytest.raises(ValueError, match="3 rows need an id each"):
        bank.enqueue(torch.ones(3, 4), torch.arange(2))
    with pytest.raises(ValueError, match=r"shape \(3, 5\), and the bank's rows the width 4"):
        bank.search(torch.ones(3, 5), 1)
    assert bank.fill == 0


def test_search_leaves_the_bank_alone() -> None:
    bank = MemoryBank(6, 3)
    bank.enqueue(torch.randn(4, 3), torch.arange(4))
    before = {k: v.clone() for k, v in bank.state_dict().items()}
    bank.search(torch.randn(2, 3), 2)
    assert all(torch.equal(v, before[k]) for k, v in bank.state_dict().items())


def test_a_network_of_half_precision_leaves_the_rows_alone() -> None:
    """Lightning converts after it has restored a checkpoint: rows must not be rounded on the way."""
    bank = MemoryBank(4, 3)
    bank.enqueue(torch.randn(4, 3), torch.arange(4))
    rows = bank.rows.clone()
    assert torch.equal(bank.to(torch.bfloat16).rows, rows)
    assert bank.double().rows.dtype == torch.double


def clumps(count: Any, seed: Any) -> Any:
    """Unit vectors in 40 clumps."""
    draws = torch.Generator().manual_seed(seed)
    centers = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    where = torch.randint(0, 40, (count,), generator=draws)
    return normalize(centers[where] + 0.3 * torch.randn(count, 16, generator=draws), dim=1)


def pushed(bank: Any, pushes: Any, first: Any = 0) -> Any:
    """So many batches, with a search after each, as in training."""
    for step in range(first, first + pushes):
        bank.enqueue(clumps(96, step), torch.arange(96) + 96 * step)
        bank.search(clumps(4, step), 3)
    return bank


def test_an_index_finds_nearly_what_the_exact_search_finds() -> None:
    """After many rounds through the bank, so that rows come and go and centroids are found anew."""
    pytest.importorskip("faiss")
    fast, exact = pushed(MemoryBank(1000, 16, "faiss"), 37), pushed(MemoryBank(1000, 16), 37)
    assert torch.equal(fast.rows, exact.rows)
    assert fast.index._index.ntotal == 1000
    queries = clumps(64, 99)
    found, true = (bank.search(queries, 5) for bank in (fast, exact))
    shared = (found.ids[:, :, None] == true.ids[:, None, :]).any(2).float().mean()
    assert shared > 0.95
    assert found.found.all()
    assert torch.allclose(found.similarity, (queries[:, None] * found.vectors).sum(2), atol=1e-6)
    assert (found.similarity.diff(dim=1) <= 0).all()
    held = set(fast.ids.tolist())
    assert set(found.ids.flatten().tolist()) <= held, "a row that has left the bank was found"
    newest = bank_rows(fast, 96)
    assert torch.equal(fast.search(newest, 1).similarity.round(decimals=5), torch.ones(96, 1)), (
        "a new row was not found"
    )


def bank_rows(bank: Any, count: Any) -> Any:
    """The rows pushed last."""
    return bank.rows[(torch.arange(count) + bank.pointer - count) % bank.size]


def test_an_index_is_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks into few lists: with one alone it misses much on rows without clumps."""
    pytest.importorskip("faiss")
    monkeypatch.setattr("psm.mining.faiss_index.PROBES", 1)
    rows, queries = torch.randn(2000, 16), torch.randn(100, 16)
    found = []
    for index in ("faiss", "exact"):
        bank = MemoryBank(2000, 16, index)
        bank.enqueue(rows, torch.arange(2000))
        found.append(bank.search(queries, 5).ids)
    shared = (found[0][:, :, None] == found[1][:, None, :]).any(2).float().mean()
    assert 0.05 < shared < 0.9


@pytest.mark.parametrize("copies", [3, 8])
def test_an_index_serves_a_bank_with_many_copies_of_each_image(monkeypatch: pytest.MonkeyPatch, copies: Any) -> None:
    pytest.importorskip("faiss")
    rows = clumps(250, 3).repeat(copies, 1) + 0.01 * torch.randn(250 * copies, 16)
    bank = MemoryBank(250 * copies, 16, "faiss")
    bank.enqueue(rows, torch.arange(250 * copies) % 250)
    asked = []
    exact = MemoryBank._exact
    monkeypatch.setattr(
        MemoryBank, "_exact", lambda self, vectors, *rest: asked.append(len(vectors)) or exact(self, vectors, *rest)
    )
    mined = bank.search(rows[:100], 5, exclude_ids=torch.arange(100))
    assert mined.found.all()
    assert (mined.ids != torch.arange(100)[:, None]).all()
    assert sum(asked) < 10


def test_an_index_of_a_diverged_run_stands_back() -> None:
    pytest.importorskip("faiss")
    bank = pushed(MemoryBank(200, 16, "faiss"), 3)
    bank.enqueue(torch.full((200, 16), torch.nan), torch.arange(200))
    assert not bank.index.ready
    bank.search(clumps(4, 0), 3)
    pushed(bank, 6)
    assert bank.index.ready


def test_an_index_passes_over_own_images_and_is_exact_where_it_finds_too_few() -> None:
    pytest.importorskip("faiss")
    bank = MemoryBank(64, 16, "faiss")
    rows = clumps(64, 1)
    bank.enqueue(rows, torch.zeros(64, dtype=torch.long))  # one image alone
    bank.enqueue(rows[:6], torch.arange(6) + 1)
    mined = bank.search(rows[:3], 4, exclude_ids=torch.zeros(3, dtype=torch.long))
    assert mined.found.all()
    assert (mined.ids > 0).all()
    assert not bank.search(rows[:3], 7, exclude_ids=torch.zeros(3, dtype=torch.long)).found.any()


def test_an_index_is_exact_until_the_bank_is_full() -> None:
    pytest.importorskip("faiss")
    fast, exact = pushed(MemoryBank(1000, 16, "faiss"), 5), pushed(MemoryBank(1000, 16), 5)
    assert not fast.index.ready
    assert torch.equal(fast.search(clumps(9, 7), 5).ids, exact.search(clumps(9, 7), 5).ids)


def test_an_index_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr("psm.mining.faiss_index.PROBES", 1)  # so that other centroids would find other rows
    whole = pushed(MemoryBank(1000, 16, "faiss"), 23)
    resumed = MemoryBank(1000, 16, "faiss")
    resumed.load_state_dict(deepcopy(whole.state_dict()))
    queries = torch.randn(200, 16)
    for pushes in (0, 5, 9):  # before and after the centroids are found anew
        for bank in (whole, resumed):
            pushed(bank, pushes, first=23 + pushes)
        assert torch.equal(whole.index.centroids, resumed.index.centroids)
        assert torch.equal(*(bank.search(queries, 5).ids for bank in (whole, resumed)))
    MemoryBank(1000, 16).load_state_dict(whole.state_dict())  # looked at without an index


def test_an_index_survives_other_precisions() -> None:
    pytest.importorskip("faiss")
    bank = pushed(MemoryBank(200, 16, "faiss"), 4)
    for dtype in (torch.bfloat16, torch.double):
        assert bank.to(dtype).search(clumps(4, 3), 3).found.all()


def test_without_faiss_one_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match="pip install"):
        MemoryBank(8, 3, "faiss")
    with pytest.raises(ValueError, match="choose one of exact, faiss"):
        MemoryBank(8, 3, "hnsw")
