"""The bank: exact FIFO for any size, unit norm on entry, exact search in bounded memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import psm.bank
from psm.bank import Bank


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 12), pushes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_exact_fifo(size, pushes):
    bank, expected, next_id = Bank(size, 3), [], 0
    for count in pushes:
        ids = torch.arange(next_id, next_id + count)
        bank.push(torch.nn.functional.one_hot(ids % 3, 3) * 5.0, ids)
        expected = (expected + ids.tolist())[-size:]
        next_id += count
    start = int(bank.pointer) if int(bank.fill) == size else 0
    held = [int(bank.ids[(start + i) % size]) for i in range(int(bank.fill))]
    assert held == expected
    for place in range(int(bank.fill)):
        row, identity = bank.rows[place], int(bank.ids[place])
        assert torch.equal(row, torch.nn.functional.one_hot(torch.tensor(identity % 3), 3).float())


@pytest.mark.parametrize("batch", [4, 25])
def test_bank_of_ten(batch):
    bank = Bank(10, 2)
    for step in range(7):
        bank.push(torch.randn(batch, 2), torch.arange(step * batch, (step + 1) * batch))
    assert sorted(bank.ids.tolist()) == list(range(7 * batch - 10, 7 * batch))


def test_rows_have_unit_norm():
    bank = Bank(8, 5)
    bank.push(torch.randn(8, 5) * 100, torch.arange(8))
    assert torch.allclose(bank.rows.norm(dim=1), torch.ones(8))


@pytest.mark.parametrize("limit", [2**25, 300])
@pytest.mark.parametrize("size", [7, 128, 1000, 4096])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_nearest_is_exact(monkeypatch, limit, size, k):
    """Against a full sort, whole or in slices, with own pictures passed over and a part of the bank unfilled."""
    monkeypatch.setattr(psm.bank, "SEARCH_ELEMENTS", limit)
    torch.manual_seed(size + k)
    bank = Bank(size, 6)
    count = size * 3 // 4
    ids = torch.arange(count) % max(2, count // 3)
    bank.push(torch.randn(count, 6), ids)
    queries, own = torch.randn(9, 6), torch.arange(9)
    mined = bank.nearest(queries, k, own)
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


def test_own_picture_is_never_a_candidate():
    bank = Bank(10, 4)
    rows = torch.randn(10, 4)
    bank.push(rows, torch.arange(10))
    assert (bank.nearest(rows, 1).ids[:, 0] == torch.arange(10)).all()
    assert (bank.nearest(rows, 3, own=torch.arange(10)).ids != torch.arange(10)[:, None]).all()


def test_state_dict_holds_everything():
    bank, other = Bank(5, 3), Bank(5, 3)
    bank.push(torch.randn(7, 3), torch.arange(7))
    other.load_state_dict(bank.state_dict())
    for b in (bank, other):
        b.push(torch.ones(2, 3), torch.tensor([70, 71]))
    assert torch.equal(bank.rows, other.rows)
    assert torch.equal(bank.ids, other.ids)
    assert bank.fill == other.fill == 5


def test_search_leaves_the_bank_alone():
    bank = Bank(6, 3)
    bank.push(torch.randn(4, 3), torch.arange(4))
    before = {k: v.clone() for k, v in bank.state_dict().items()}
    bank.nearest(torch.randn(2, 3), 2)
    assert all(torch.equal(v, before[k]) for k, v in bank.state_dict().items())


def test_a_network_of_half_precision_leaves_the_rows_alone():
    """Lightning converts after it has restored a checkpoint: rows must not be rounded on the way."""
    bank = Bank(4, 3)
    bank.push(torch.randn(4, 3), torch.arange(4))
    rows = bank.rows.clone()
    assert torch.equal(bank.to(torch.bfloat16).rows, rows)
    assert bank.double().rows.dtype == torch.double
