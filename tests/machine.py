"""What tests of the compiled part share."""

from contextlib import contextmanager

import pytest
import torch

from psm import processor

compiled = pytest.mark.skipif(processor.lanes() is None, reason="nothing is compiled for this processor")


@contextmanager
def using(threads):
    """So many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
