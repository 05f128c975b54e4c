"""Freed memory stays with the process: told by page faults, not by time."""

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest

FAULTS = """
import resource, sys, torch
from psm.ops import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    print(-1)
    sys.exit()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    maps = [torch.ones(10 * 2**20 + 2**18 * i) for i in range(3)]  # 40 MiB and more each, freed together
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(5):
    faults()
print(sum(faults() for _ in range(10)))
"""


def count(how: Any) -> Any:
    result = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tunes glibc")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer replaces malloc")
def test_what_is_freed_is_used_again() -> None:
    kept = count("kept")
    if kept < 0 and not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library cannot be told")
    assert kept >= 0
    assert kept * 10 < count("plain")
