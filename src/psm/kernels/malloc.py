"""Tuning of glibc's malloc: memory that a process frees stays with it for the next step or batch.

By default glibc returns every large block to the system when it is freed and maps a new one, page by page, when it is
needed. A step of PSM with ``tiny`` and batch 64 has 12,000 page faults, a tenth of its time, and a batch of 256 in
`psm embed` 8,000, a quarter of its time; with this, a few. Only psm's own processes (command line, experiment workers)
ask for it.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
MAX_BYTES = 2**31 - 1  # an int


def supports() -> bool:
    """True on Linux; whether the C library has ``mallopt`` shows when it is called."""
    return sys.platform.startswith("linux")


def keep_freed_memory() -> bool:
    """Let malloc keep up to 2 GiB of freed memory; returns whether this C library supports it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Older versions of glibc allow no more than 32 MiB for the first.
    kept = mallopt(M_MMAP_THRESHOLD, MAX_BYTES) or mallopt(M_MMAP_THRESHOLD, 2**25)
    return bool(mallopt(M_TRIM_THRESHOLD, MAX_BYTES) and kept)
