"""Evenly spaced indices: distinct, ascending, from the first to the last."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from psm.utils.indices import evenly_spaced


@given(st.integers(0, 3_000), st.integers(1, 400))
def test_indices_are_distinct_ascending_and_evenly_spaced(count: Any, most: Any) -> None:
    indices = evenly_spaced(count, most)
    assert indices.dtype == torch.int64
    assert len(indices) == min(count, most)
    steps = indices.diff()
    if len(indices) > 1:
        assert (indices[0], indices[-1]) == (0, count - 1)
        assert steps.min() >= 1
        assert steps.max() - steps.min() <= 1


def test_all_indices_where_there_are_few() -> None:
    assert evenly_spaced(5, 5).tolist() == evenly_spaced(5, 100).tolist() == [0, 1, 2, 3, 4]
    assert evenly_spaced(5, 1).tolist() == [0]


def test_large_counts_are_exact() -> None:
    """In float32 neighboring indices above 2**24 are not told apart."""
    assert evenly_spaced(2**25, 2**25)[-4:].tolist() == [2**25 - 4, 2**25 - 3, 2**25 - 2, 2**25 - 1]
