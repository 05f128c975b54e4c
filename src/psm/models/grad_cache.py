"""Gradient caching: run now without keeping anything, and again when the gradient is asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def rerun(function: Callable[[Tensor], Any], network: nn.Module, inputs: Tensor) -> Any:
    """``function(inputs)``, whose maps are computed anew for its gradient; the network's buffers count it once."""
    return checkpoint(
        function, inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), kept_statistics(network))
    )


@contextmanager
def kept_statistics(network: nn.Module) -> Iterator[None]:
    """Batch norm normalizes by the batch's statistics as ever, but running ones, and any buffer, stay what they are."""
    running = list(network.buffers())
    before = [buffer.clone() for buffer in running]
    try:
        yield
    finally:
        with torch.no_grad():
            for now, then in zip(running, before, strict=True):
                now.copy_(then)
