"""Reading in threads what is needed next while the encoder computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def read_ahead(read: Callable[[T], S], items: Iterable[T], ahead: int) -> Iterator[tuple[T, S]]:
    """Each item with what ``read`` makes of it, in order; some items ahead are read by other threads."""
    # Two readers: one begins a batch while the other waits for the last images of the batch before.
    readers = ThreadPoolExecutor(2)
    waiting: deque[tuple[T, Future[S]]] = deque()
    try:
        for item in items:
            waiting.append((item, readers.submit(read, item)))
            if len(waiting) > ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    finally:
        readers.shutdown(cancel_futures=True)
