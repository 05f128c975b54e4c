"""Gradient caching (Gao et al., 2021): large batches in the memory of a chunk, at the cost of a second forward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(function: Callable[[Tensor], Any], network: nn.Module, inputs: Tensor) -> Any:
    """``function(inputs)`` without keeping its activations: the backward pass computes them again.

    Args:
        function: A forward pass through ``network``.
        network: The modules whose buffers (batch-norm running statistics) are updated by the first pass only.
        inputs: The only argument of ``function``, (B, ...).

    Returns:
        What ``function`` returns.
    """
    return checkpoint(
        function, inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), unchanged_buffers(network))
    )


@contextmanager
def unchanged_buffers(network: nn.Module) -> Iterator[None]:
    """Restore the buffers of a network on exit. Batch norm in training mode still normalizes by the batch."""
    buffers = list(network.buffers())
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)
