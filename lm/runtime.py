"""glibc's allocator, told to keep what a step frees."""

import ctypes
import os

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # malloc.h
NOTICE = "memory: malloc keeps what is freed (with MALLOC_... or GLIBC_TUNABLES in the environment it is left alone)"


def keeps_freed_memory() -> bool:
    """Whether malloc is ours to set: glibc's, of which the environment says nothing."""
    told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    return not told and hasattr(ctypes.CDLL(None), "mallopt")


def keep_freed_memory() -> None:
    """Blocks of many MiB, as each step of XLA's takes and frees them, otherwise go back to the system at once, which
    hands them out anew page by page, filled with zeros.
    """
    if keeps_freed_memory():
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 2**26)
