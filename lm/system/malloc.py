"""glibc's allocator: retain freed memory, and occupy the fragments that a compilation leaves."""

import ctypes
import os

# from malloc.h
TRIM_THRESHOLD = -1
TOP_PAD = -2
MMAP_MAX = -4
ARENA_MAX = -8
# bytes of the fragments that are occupied; larger ones are few, and useful
SMALLEST = 2**13
LARGEST = 2**22


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(f"unused_{i}", ctypes.c_size_t) for i in range(8)] + [
        ("fordblks", ctypes.c_size_t),  # bytes in free blocks
        ("keepcost", ctypes.c_size_t),  # bytes in the free block at the end of the heap
    ]


def can_set_malloc() -> bool:
    """Return whether the C library is glibc and no environment variable configures its allocator."""
    configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    return not configured and hasattr(ctypes.CDLL(None), "mallopt")


def retain_freed_memory(*, single_arena: bool = True) -> None:
    """Make glibc malloc retain freed memory; set a MALLOC_* variable or GLIBC_TUNABLES to opt out.

    XLA allocates and frees blocks of many MiB in every step. By default glibc returns them to the
    kernel at once, and each new block is mapped page by page and filled with zeros. XLA allocates
    in threads of its own, whose arenas hold at most 64 MiB and map each larger block anew: hence a
    single arena, unless several programs run at once that allocate little, and would wait for one
    another. `benchmarks/NOTES.md` has the measurements.
    """
    if can_set_malloc():
        mallopt = ctypes.CDLL(None).mallopt
        if single_arena:
            mallopt(ARENA_MAX, 1)
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 2**26)


def occupy_fragments() -> None:
    """Give the pages of free blocks between used ones back, and allocate these blocks forever.

    A compilation leaves thousands of such blocks, of as many sizes. glibc sorts free blocks by size
    in linked lists, and each block that a step frees would have to pass hundreds of others: 5 to 10
    % of a step's time at 0.2 million parameters. Needs glibc 2.33; does nothing where
    `retain_freed_memory` does nothing.
    """
    c = ctypes.CDLL(None)
    if not (can_set_malloc() and hasattr(c, "mallinfo2")):
        return
    c.mallinfo2.restype = Heap
    c.malloc.restype = ctypes.c_void_p
    c.sbrk.restype = ctypes.c_void_p
    c.malloc.argtypes = [ctypes.c_size_t]
    c.free.argtypes = [ctypes.c_void_p]
    c.sbrk.argtypes = [ctypes.c_ssize_t]
    c.malloc_trim(0)
    # of the fragments; what follows is the free end of the heap
    end = c.sbrk(0) - c.mallinfo2().keepcost
    size = LARGEST
    while size >= SMALLEST:
        while (block := c.malloc(size) or end) < end:
            pass
        if block > end:
            c.free(block)
        size = size * 5 // 6
