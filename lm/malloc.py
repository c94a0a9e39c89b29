"""glibc's allocator, told to keep what a step frees."""

import ctypes
import os

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # malloc.h


def keep_freed_memory() -> None:
    """Blocks of many MiB, as each step of XLA's takes and frees them, otherwise go back to the system at once, which
    hands them out anew page by page, filled with zeros. Nothing happens with another C library, or where the
    environment says how malloc should be.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    mallopt(TOP_PAD, 2**26)
