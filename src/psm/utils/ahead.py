"""Results in order that threads compute ahead of who takes them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(function: Callable[[T], R], tasks: Iterable[T], threads: int, most: int) -> Iterator[R]:
    """``map(function, tasks)`` with up to ``most`` results computed ahead by threads; 0 threads: when they are taken.

    Tasks are drawn in the thread of who takes the results. An error of a task is raised where its result is taken.
    """
    if not threads:
        yield from map(function, tasks)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ahead")
    waiting: deque[Future[R]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(function, task))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
