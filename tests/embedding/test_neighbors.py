"""Exact search in blocks against sorting all similarities."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psm.embedding import neighbors
from psm.embedding.neighbors import inverse_norms, nearest_rows


def by_sorting(rows: np.ndarray, queries: np.ndarray, k: int, exclude: list[int]) -> tuple[np.ndarray, np.ndarray]:
    rows, queries = rows.astype(np.float64), queries.astype(np.float64)
    cosine = (queries @ rows.T) / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(rows, axis=1)
    for place, row in enumerate(exclude):
        if row >= 0:
            cosine[place, row] = -np.inf
    order = np.argsort(-cosine, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(cosine, order, 1), order


@given(
    seed=st.integers(0, 1000),
    count=st.integers(2, 60),
    queries=st.integers(1, 9),
    block=st.integers(1, 200),
    held=st.integers(1, 300),
    excluded=st.booleans(),
)
def test_blocks_find_what_sorting_finds(
    seed: int, count: int, queries: int, block: int, held: int, excluded: bool
) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, 5)).astype(np.float32)
    asked = random.normal(size=(queries, 5)).astype(np.float32)
    exclude = random.integers(-1, count, queries) if excluded else np.full(queries, -1)
    k = min(4, count - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbors, "MAX_BLOCK", block)
        patch.setattr(neighbors, "MAX_SIMILARITIES", held)
        similarity, found = nearest_rows(
            rows, torch.from_numpy(asked), k, exclude=torch.from_numpy(exclude) if excluded else None
        )
    expected, order = by_sorting(rows, asked, k, exclude.tolist())
    np.testing.assert_allclose(similarity, expected, atol=1e-5)
    assert found.tolist() == order.tolist()


def test_half_precision_memory_mapped_rows_and_rows_of_zeros(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float16)
    rows[7] = 0
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="c")
    queries = torch.from_numpy(rows[:5].astype(np.float32)) * 3
    similarity, found = nearest_rows(mapped, queries, 3)
    assert found[:, 0].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(similarity[:, 0], 1, atol=1e-3)
    assert 7 not in nearest_rows(mapped, queries, 10)[1]
    assert inverse_norms(mapped)[7] == 0
    assert nearest_rows(mapped, queries[:0], 3)[1].shape == (0, 3)
