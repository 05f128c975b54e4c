"""Reading what is needed next, and writing what is done, in threads while the encoder computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
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


@contextmanager
def write_behind(write: Callable[P, object]) -> Iterator[Callable[P, None]]:
    """Context with a function that has another thread call ``write``, in order, one call at a time.

    A call waits for the one before and raises its error, so at most one is under way, and none follows one that failed.
    The last has ended when the context ends, after an error too.
    """
    last: Future[object] | None = None

    def submit(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal last
        if last is not None:
            last.result()
        last = writer.submit(write, *args, **kwargs)

    with ThreadPoolExecutor(1) as writer:
        yield submit
        if last is not None:
            last.result()
