"""Reading and writing beside the computation: order, errors, and that they do happen beside it."""

from collections.abc import Callable, Iterable, Iterator
from threading import Event

import pytest

from psm.embedding.overlap import read_ahead, write_behind


def test_items_are_read_before_they_are_asked_for_and_come_in_order() -> None:
    read: list[int] = []
    third = Event()

    def reads(item: int) -> int:
        read.append(item)
        if item == 2:
            third.set()
        return 10 * item

    items = read_ahead(reads, range(9), ahead=3)
    assert next(items) == (0, 0)
    assert third.wait(30)  # although nobody asked for it
    assert list(items) == [(item, 10 * item) for item in range(1, 9)]
    assert sorted(read) == list(range(9))


def test_the_caller_computes_while_a_batch_is_written() -> None:
    computed, order = Event(), []

    def write(batch: int) -> None:
        assert computed.wait(30), "nothing was computed while this was written"
        order.append(batch)

    with write_behind(write) as written:
        written(0)
        computed.set()
        for batch in (1, 2, 3):
            written(batch)
    assert order == [0, 1, 2, 3]


def write_all(write: Callable[[int], object], batches: Iterable[int]) -> None:
    with write_behind(write) as written:
        for batch in batches:
            written(batch)


def test_nothing_is_written_after_a_write_that_failed_and_its_error_is_raised() -> None:
    order = []

    def write(batch: int) -> None:
        order.append(batch)
        if batch == 1:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_all(write, range(4))
    assert order == [0, 1]
    with pytest.raises(OSError, match="disk full"):  # of the last one, too
        write_all(write, [1])


def test_what_was_given_is_written_when_the_caller_fails() -> None:
    def interrupted() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    order: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        write_all(order.append, interrupted())
    assert order == [0]
