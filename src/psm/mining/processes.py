"""How the anchors of a batch are split over processes: what losses and searches know of other processes."""

from typing import Protocol

from torch import Tensor


class Processes(Protocol):
    """The processes that compute the loss of one batch together. Every one of them has the whole batch.

    Each computes the anchors of its ``rows`` and searches for their keys. Values and gradients are those of one
    process: every process backpropagates the whole loss, and the gradients are averaged over processes.
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def rows(self, size: int) -> slice:
        """The rows of a batch of so many images that this process computes."""
        ...

    def gather(self, local: Tensor) -> Tensor:
        """The rows of all processes (N, ...) from those of this one; no gradient."""
        ...

    def sum(self, local: Tensor) -> Tensor:
        """The sum over processes. All of them must go on from it with the same operations."""
        ...


class OneProcess:
    """A process that has all rows."""

    rank = 0
    count = 1

    def rows(self, size: int) -> slice:
        return slice(0, size)

    def gather(self, local: Tensor) -> Tensor:
        return local

    def sum(self, local: Tensor) -> Tensor:
        return local


ONE_PROCESS = OneProcess()


def take_rows(values: Tensor, rows: slice, groups: int = 1) -> Tensor:
    """``values[rows]``, the tensor itself where that is all of it; of values in groups, these rows of each."""
    if rows == slice(0, len(values) // groups):
        return values
    return values[rows] if groups == 1 else values.unflatten(0, (groups, -1))[:, rows].flatten(0, 1)
