"""Held-out training images: the same for everybody, evenly over classes, and never the test images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psm
from psm.config.schema import ImagesConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.holdout import hold_out
from psm.utils.errors import UserError


def numbered(count: int, classes: int = 4, start: int = 0) -> ImageStore:
    """Images that can be told apart by their first two pixels."""
    pixels = np.zeros((count, 3, 8, 8), dtype=np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 1, 0, 0] = np.divmod(np.arange(count) + start, 256)
    return ImageStore(pixels, torch.arange(count) % classes, [f"{index}.png" for index in range(count)])


def numbers(store: ImageStore) -> list[int]:
    pixels = store.take(torch.arange(len(store))).long()
    return (pixels[:, 0, 0, 0] * 256 + pixels[:, 1, 0, 0]).tolist()


def test_a_share_of_each_class_is_held_out_and_the_test_images_are_gone() -> None:
    data = ImageDataset("some", numbered(400), numbered(100, start=1000), ("a", "b", "c", "d"))
    held = hold_out(data, 0.1)
    assert held.test is not None
    assert sorted(numbers(held.train) + numbers(held.test)) == list(range(400))
    assert held.train.labels is not None
    assert held.test.labels is not None
    assert held.test.labels.bincount().tolist() == [10] * 4
    assert held.train.labels.bincount().tolist() == [90] * 4
    assert [n % 4 for n in numbers(held.test)] == held.test.labels.tolist()
    assert [held.test.name(i) for i in range(40)] == [f"{n}.png" for n in numbers(held.test)]
    again = hold_out(data, 0.1)
    assert again.test is not None
    assert numbers(again.test) == numbers(held.test)
    assert hold_out(data, None) is data


def test_without_labels_it_is_refused() -> None:
    blind = ImageDataset("some", ImageStore(np.zeros((9, 3, 8, 8), dtype=np.uint8)), None, ())
    with pytest.raises(UserError, match="data=some has no labels: leave it out"):
        hold_out(blind, 0.1)
    alone = ImageDataset("some", numbered(4), None, ("a", "b", "c", "d"))
    with pytest.raises(UserError, match="holds out none of the 4 training images"):
        hold_out(alone, 0.1)
    with pytest.raises(UserError, match=r"images\.holdout=1\.0 is too large"):
        load_dataset("shapes", ImagesConfig(limit=50, holdout=1.0), progress=False)


def test_a_run_trains_on_the_rest_and_is_scored_on_what_is_held_out(tmp_path: Path, small: dict[str, Any]) -> None:
    """By name and, from Python, with the data given: evaluation and inspector find the run's images again."""
    small |= {"images": {"limit": 100, "size": 16, "holdout": 0.2}, "epochs": 1}
    result = psm.pretrain(tmp_path / "a", **small)
    assert (len(result.data.train), len(result.data.test or ())) == (80, 20)
    score = psm.evaluate(result.out, linear={"epochs": 1}, progress=False)[0]
    assert (score.protocol["train_images"], score.protocol["test_images"]) == (80, 20)
    whole = load_dataset("shapes", ImagesConfig(limit=100, size=16), progress=False)
    given = psm.pretrain(tmp_path / "b", data=whole, **{k: v for k, v in small.items() if k != "data"})
    assert given.metrics[0]["loss"] == result.metrics[0]["loss"]
    again = psm.evaluate(given.out, whole, linear={"epochs": 1}, progress=False)[0]
    assert (again.top1, again.protocol["test_images"]) == (score.top1, 20)
    assert psm.inspect(given.out, whole, queries=6, others=12, progress=False).data.queries.max() < 80
