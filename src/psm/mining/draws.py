"""Uniform numbers for the anchors of a batch, the same however many processes share the anchors."""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

from psm.mining.processes import take_rows

SKIP = 2**20  # numbers drawn at a time to skip them
COLUMNS = 2**13  # that have a key of their own; further ones have products of two
STREAMS = 8  # of keys that a step draws; further streams are made of these
ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
MIX = 0xD6E8FEB86659FD93  # odd; spreads the bits of a product


class Draws(Protocol):
    """Source of the draws of one direction's anchors."""

    @property
    def generator(self) -> torch.Generator | None:
        """For parts that draw by themselves; what they draw may depend on the number of processes."""
        ...

    def start(self, size: int, chunk: int, numbers: int, groups: int = 1) -> None:
        """Begin a term of ``size`` anchors in chunks of ``chunk`` that takes ``numbers`` of each anchor.

        Of so many anchors in each of several groups: the same ones of each are sought.
        """
        ...

    def seek(self, rows: slice) -> None:
        """Go to these anchors, which lie in one chunk. Anchors come in ascending order."""
        ...

    def uniform(self, number: int, device: torch.device) -> Tensor:
        """(A, number) float32, uniform in [0, 1), for the anchors that were sought; group after group."""
        ...

    def finish(self) -> None:
        """End a term."""
        ...


class GeneratorDraws:
    """From a ``torch.Generator``, in the order in which one process draws: chunk by chunk, all anchors of a chunk.

    Numbers of other processes' anchors are drawn and dropped.
    """

    def __init__(self, generator: torch.Generator | None):
        self.generator: torch.Generator | None = generator
        self._size = self._chunk = self._numbers = self._done = 0
        self._groups = 1
        self._rows = self._block = slice(0, 0)

    def start(self, size: int, chunk: int, numbers: int, groups: int = 1) -> None:
        self._size, self._chunk, self._numbers, self._done = size, max(1, chunk), numbers, 0
        self._groups = groups

    def seek(self, rows: slice) -> None:
        first = rows.start // self._chunk * self._chunk
        self._skip(first - self._done)
        self._rows, self._block = rows, slice(first, min(first + self._chunk, self._size))
        self._done = self._block.stop

    def uniform(self, number: int, device: torch.device) -> Tensor:
        block, rows = self._block, self._rows
        count = self._groups * (block.stop - block.start)
        numbers = torch.rand((count, number), generator=self.generator, device=device, dtype=torch.float32)
        return take_rows(numbers, slice(rows.start - block.start, rows.stop - block.start), self._groups)

    def finish(self) -> None:
        self._skip(self._size - self._done)

    def _skip(self, anchors: int) -> None:
        count = anchors * self._numbers * self._groups
        if count <= 0 or self.generator is None:
            return
        numbers = torch.empty(min(count, SKIP), device=self.generator.device)
        for start in range(0, count, SKIP):
            numbers[: count - start].uniform_(generator=self.generator)


class KeyedDraws:
    """From a random key of each anchor, by hashing it with the column: no generator and nothing to skip.

    For accelerators, whose generators draw other numbers for another shape, and for CUDA graphs, which cannot seed one.

    Args:
        keys: (STREAMS, N) int64 on the device, any bits, drawn anew for every step by ``draw_keys``.
        generator: makes one for parts that draw by themselves.
    """

    def __init__(self, keys: Tensor, generator: Callable[[], torch.Generator | None] = lambda: None):
        self.keys, self._make_generator = keys, generator
        self._tables = _column_tables(keys.device)
        self._stream, self._first, self._groups = 0, 0, 1
        self._rows = slice(0, 0)

    @cached_property
    def generator(self) -> torch.Generator | None:
        return self._make_generator()

    def start(self, size: int, chunk: int, numbers: int, groups: int = 1) -> None:
        self._first, self._groups = self._stream, groups

    def seek(self, rows: slice) -> None:
        self._rows, self._stream = rows, self._first

    def uniform(self, number: int, device: torch.device) -> Tensor:
        streams = range(self._stream, self._stream + self._groups)
        self._stream = streams.stop
        if streams.stop <= len(self.keys):
            keys = self.keys[streams.start : streams.stop, self._rows]
        else:
            keys = torch.stack([self._further(stream) for stream in streams])
        bits = keys.flatten()[:, None] * self._column_keys(number)
        bits ^= bits >> 32
        bits *= _signed(MIX)
        bits >>= 40  # 24 bits with a sign
        return (bits * 2.0**-24).add_(0.5)

    def finish(self) -> None:
        pass

    def _column_keys(self, number: int) -> Tensor:
        """Keys (number,) of the columns."""
        low, high = self._tables
        if number <= COLUMNS:
            return low[:number]
        return (high[: -(-number // COLUMNS), None] * low).flatten()[:number]

    def _further(self, stream: int) -> Tensor:
        """Keys (A,) of a stream of any number, made of those that there are."""
        keys = self.keys[stream % len(self.keys), self._rows]
        return keys if stream < len(self.keys) else keys * _signed(ODD * (2 * stream + 1))


def draw_keys(size: int, generator: torch.Generator) -> Tensor:
    """Keys (STREAMS, size) of the anchors of a step, from a generator of the CPU."""
    return torch.empty(STREAMS, size, dtype=torch.long).random_(-(2**63), None, generator=generator) | 1


def as_draws(source: "torch.Generator | Draws | None") -> Draws:
    """Draws from a generator; draws as they are."""
    return GeneratorDraws(source) if source is None or isinstance(source, torch.Generator) else source


def _signed(value: int) -> int:
    """The signed 64-bit number with the same bits."""
    return (value + 2**63) % 2**64 - 2**63


@cache
def _column_tables(device: torch.device) -> Tensor:
    """Two rows (2, COLUMNS) of odd random numbers, always the same ones, copied to a device once.

    Numbers rather than hashes of a column's index: those overflow, which inductor's code for CPUs takes for impossible.
    """
    fixed = torch.Generator().manual_seed(ODD >> 1)
    return (torch.empty(2, COLUMNS, dtype=torch.long).random_(-(2**63), None, generator=fixed) | 1).to(device)
