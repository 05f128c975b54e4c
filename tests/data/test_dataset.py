"""The store, and the choice of images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psm.data import ImageDataset, ImageStore, splits


@pytest.fixture(params=["memory", "mapped"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (23, 3, 6, 6), dtype=np.uint8)
    if request.param == "mapped":
        pixels.tofile(tmp_path / "pixels")
        mapped = np.memmap(tmp_path / "pixels", dtype=np.uint8, mode="r", shape=pixels.shape)
        return ImageStore(mapped, torch.arange(23)), pixels
    return ImageStore(pixels, torch.arange(23)), pixels


def test_take_returns_the_rows_asked_for_in_their_order(store: Any) -> None:
    images, pixels = store
    indices = torch.tensor([22, 0, 7, 7, 3])
    taken = images.take(indices)
    assert taken.dtype == torch.uint8
    assert taken.is_contiguous()
    assert taken.shape == (5, 3, 6, 6)
    assert np.array_equal(taken.numpy(), pixels[[22, 0, 7, 7, 3]])
    assert len(images) == 23
    assert images.shape == (3, 6, 6)


def test_take_is_a_copy(store: Any) -> None:
    images, pixels = store
    before = pixels.copy()
    images.take(torch.tensor([4])).zero_()
    assert np.array_equal(images.take(torch.tensor([4])).numpy(), before[[4]])


@pytest.mark.parametrize("index", [-1, 23])
def test_take_refuses_ids_that_do_not_exist(store: Any, index: Any) -> None:
    with pytest.raises(IndexError):
        store[0].take(torch.tensor([0, index]))


def test_take_of_nothing_is_empty(store: Any) -> None:
    assert store[0].take(torch.tensor([], dtype=torch.int64)).shape == (0, 3, 6, 6)


def test_labels_must_match() -> None:
    with pytest.raises(ValueError, match="2 labels for 3 images"):
        ImageStore(np.zeros((3, 3, 8, 8), dtype=np.uint8), torch.zeros(2, dtype=torch.int64))


def test_data_set_says_its_size_and_whether_it_is_labeled() -> None:
    pixels = np.zeros((2, 3, 8, 8), dtype=np.uint8)
    assert ImageDataset("x", ImageStore(pixels), None, ()).labeled is False
    labeled = ImageDataset("x", ImageStore(pixels, torch.tensor([0, 1])), None, ("a", "b"))
    assert (labeled.size, labeled.labeled, labeled.unreadable) == (8, True, ())


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(2, 90))
def test_a_limit_is_even_over_classes(labels: Any, limit: Any) -> None:
    labels = np.array(labels)
    kept = splits.limit_indices(labels, len(labels), limit)
    assert len(kept) == min(limit, len(labels))
    assert np.array_equal(kept, np.unique(kept))
    have, got = np.bincount(labels, minlength=5), np.bincount(labels[kept], minlength=5)
    # No class may be two behind another unless it has given all it has.
    assert all(got[a] == have[a] or got[a] + 1 >= got.max() for a in range(5))


@given(st.integers(2, 60), st.integers(2, 60))
def test_a_smaller_limit_picks_a_subset(first: Any, second: Any) -> None:
    labels = np.arange(60) % 7
    small, large = (set(splits.limit_indices(labels, 60, limit)) for limit in sorted((first, second)))
    assert small <= large
    unlabeled = [set(splits.limit_indices(None, 60, limit)) for limit in sorted((first, second))]
    assert unlabeled[0] <= unlabeled[1]
    assert len(unlabeled[0]) == min(first, second)


def test_a_limit_does_not_just_take_the_first() -> None:
    assert splits.limit_indices(None, 1000, 100).max() > 500


@given(st.lists(st.integers(0, 3), min_size=2, max_size=90), st.floats(0.05, 0.95))
def test_the_held_out_share_of_every_class(labels: Any, share: Any) -> None:
    labels = np.array(labels)
    mask = splits.held_out_mask(labels, share)
    for number in set(labels):
        size, held = (labels == number).sum(), mask[labels == number].sum()
        assert held == min(max(round(size * share), 1), size - 1)
    assert np.array_equal(mask, splits.held_out_mask(labels, share))


def test_the_paper_split_of_a_class_of_500_holds_out_50() -> None:
    labels = np.repeat(np.arange(4), 500)
    mask = splits.held_out_mask(labels, 0.1)
    assert [mask[labels == number].sum() for number in range(4)] == [50] * 4
    assert len({tuple(np.flatnonzero(mask[labels == number])) for number in range(4)}) == 4
