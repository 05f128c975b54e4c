"""Tests of kernels need them switched on."""

import pytest

from psm import ops


@pytest.fixture(autouse=True)
def _kernels_enabled() -> None:
    if not ops.enabled():
        pytest.skip("kernels are switched off (PSM_KERNELS=0)")
