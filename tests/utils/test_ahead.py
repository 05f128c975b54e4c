"""Results that threads compute ahead: in order, not too far, errors where they belong."""

import threading
from collections.abc import Iterator

import pytest

from psm.utils.ahead import ahead


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_results_come_in_the_order_of_their_tasks(threads: int) -> None:
    assert list(ahead(lambda x: x * x, range(20), threads, 4)) == [x * x for x in range(20)]


def test_threads_compute_before_a_result_is_taken_and_no_further_than_told() -> None:
    begun = threading.Semaphore(0)
    drawn = []

    def tasks() -> Iterator[int]:
        for task in range(10):
            drawn.append(task)
            yield task

    def work(task: int) -> threading.Thread:
        begun.release()
        return threading.current_thread()

    results = ahead(work, tasks(), 2, 3)
    assert next(results) is not threading.main_thread()
    assert drawn == [0, 1, 2, 3]
    for _ in range(4):
        assert begun.acquire(timeout=30)  # three of which nobody has taken
    results.close()


def test_an_error_is_raised_where_its_result_is_taken() -> None:
    def work(task: int) -> int:
        if task == 2:
            raise ValueError("the third")
        return task

    results = ahead(work, range(5), 2, 4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
