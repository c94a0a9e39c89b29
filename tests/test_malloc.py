"""glibc malloc retains freed memory, and fragments are occupied, unless the environment configures
malloc.
"""

import ctypes
import os
import subprocess
import sys
import types

import pytest

from lm.system import malloc


@pytest.fixture
def mallopt_calls(monkeypatch):
    """The calls of a C library that has mallopt."""
    calls = {}
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=calls.__setitem__)
    )
    for name in os.environ:
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    return calls


MEASURED = """
import ctypes, random, resource, threading
import numpy as np
from lm.system import malloc

assert malloc.can_set_malloc()
malloc.retain_freed_memory()
c = ctypes.CDLL(None)
c.mallinfo2.restype, c.malloc.restype = malloc.Heap, ctypes.c_void_p
c.malloc.argtypes, c.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
sizes = random.Random(0).choices(range(2**10, 2**17), k=4000)
blocks = [c.malloc(size) for size in sizes]
for block in blocks[::2]:
    c.free(block)

def print_fragments():
    heap = c.mallinfo2()
    print(heap.fordblks - heap.keepcost)

print_fragments()
malloc.occupy_fragments()
print_fragments()

def print_faults():  # of 128 MiB, more than a thread's own arena can hold
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.empty(2**27, np.uint8).fill(1)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=print_faults)
thread.start()
thread.join()
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs mallinfo2 of glibc 2.33"
)
def test_free_blocks_between_others_are_occupied_and_freed_memory_is_kept_for_the_next_block_of_a_thread():
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"
    }
    environment["NUMPY_MADVISE_HUGEPAGE"] = "0"  # count pages of 4 KiB
    command = [sys.executable, "-c", MEASURED]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    bytes_before, bytes_after, first_faults, second_faults = map(int, output.split())
    assert bytes_before > 2000 * 2**15
    assert bytes_after < 0.05 * bytes_before  # what is left are blocks of less than 8 KiB
    assert first_faults > 1000
    assert second_faults < 100


def test_the_environment_takes_precedence(mallopt_calls, monkeypatch):
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert not malloc.can_set_malloc()
            malloc.retain_freed_memory()
            malloc.occupy_fragments()
        assert mallopt_calls == {}


def test_another_c_library_is_left_alone(mallopt_calls, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert not malloc.can_set_malloc()
    malloc.retain_freed_memory()
    malloc.occupy_fragments()
