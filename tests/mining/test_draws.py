"""Draws of anchors do not depend on chunks or on which process asks for them."""

from typing import Any

import pytest
import torch

from psm.mining.draws import COLUMNS, GeneratorDraws, KeyedDraws, draw_keys

SIZE, NUMBER = 10, 7
CPU = torch.device("cpu")


def drawn(draws: Any, chunk: int, rows: slice) -> torch.Tensor:
    """The numbers of some anchors, and of one more for the next term."""
    parts = []
    draws.start(SIZE, chunk, NUMBER)
    for start in range(0, SIZE, chunk):
        first, last = max(start, rows.start), min(start + chunk, rows.stop, SIZE)
        if first < last:
            draws.seek(slice(first, last))
            parts.append(draws.uniform(NUMBER, CPU))
    draws.finish()
    draws.start(1, 1, 1)
    draws.seek(slice(0, 1))
    return torch.cat([*(part.flatten() for part in parts), draws.uniform(1, CPU).flatten()])


def from_generator() -> GeneratorDraws:
    return GeneratorDraws(torch.Generator().manual_seed(3))


def from_keys() -> KeyedDraws:
    return KeyedDraws(draw_keys(SIZE, torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("make", [from_generator, from_keys])
@pytest.mark.parametrize("chunk", [3, 10])
def test_a_process_draws_what_one_process_draws_for_its_anchors(make: Any, chunk: int) -> None:
    whole = drawn(make(), SIZE, slice(0, SIZE))
    for rows in (slice(0, 4), slice(4, 8), slice(9, 10), slice(0, SIZE)):
        own = drawn(make(), chunk, rows)
        assert torch.equal(own[:-1], whole[rows.start * NUMBER : rows.stop * NUMBER])
        assert own[-1] == whole[-1], "the next term goes on from another place"


def test_one_process_draws_the_generators_numbers() -> None:
    plain = torch.rand(SIZE, NUMBER, generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn(from_generator(), 3, slice(0, SIZE))[:-1], plain.flatten())


def test_keyed_numbers_are_uniform_and_independent() -> None:
    draws = KeyedDraws(draw_keys(400, torch.Generator().manual_seed(0)))
    terms = []
    for _ in range(10):  # beyond the streams that have keys of their own
        draws.start(400, 400, 500)
        draws.seek(slice(0, 400))
        terms.append(draws.uniform(500, CPU).double())
    for numbers in terms:
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = torch.histc(numbers, 64, 0, 1)
        expected = numbers.numel() / 64
        assert ((counts - expected).square() / expected).sum() < 120, "63 degrees of freedom"
        centered = (numbers - 0.5) * 12**0.5
        for other in (centered.roll(1, 0), centered.roll(1, 1), centered.roll((1, 1), (0, 1))):
            assert (centered * other).mean().abs() < 5 / numbers.numel() ** 0.5
        # Four corners of a rectangle: a plain product of keys would be dependent here.
        corners = centered[:-1, :-1] * centered[1:, 1:] * centered[1:, :-1] * centered[:-1, 1:]
        assert corners.mean().abs() < 5 / corners.numel() ** 0.5
    assert len({round(float(numbers[0, 0]), 6) for numbers in terms}) == len(terms)
    first, last = ((x - 0.5) * 12**0.5 for x in (terms[0], terms[8]))
    assert (first * last).mean().abs() < 5 / first.numel() ** 0.5


def test_numbers_of_many_columns_are_uniform_too() -> None:
    number = COLUMNS + 1000
    draws = KeyedDraws(draw_keys(50, torch.Generator().manual_seed(0)))
    draws.start(50, 50, number)
    draws.seek(slice(0, 50))
    centered = (draws.uniform(number, CPU).double() - 0.5) * 12**0.5
    first, last = centered[:, :1000], centered[:, COLUMNS:]
    assert last.square().mean() == pytest.approx(1, abs=0.02)
    for other in (first, first.roll(1, 0), last.roll(1, 1)):
        assert (last * other).mean().abs() < 5 / last.numel() ** 0.5
