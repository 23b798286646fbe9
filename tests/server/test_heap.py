"""Memory that a flood left is given back."""

from __future__ import annotations

import ctypes

import pytest

from dlm.server.process import GROWTH, TRIM_S, Heap, find_trim, private_memory

BLOCK = 64 << 10  # below glibc's threshold for memory of its own from the system


@pytest.mark.skipif(find_trim() is None, reason="this C library has no malloc_trim")
def test_free_memory_below_memory_in_use_goes_back_to_the_system() -> None:
    """Blocks of the heap were freed, but the last one is in use: glibc alone keeps them all."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    heap = Heap(private_memory())
    assert not heap.is_due(private_memory(), 0.0)
    blocks = [libc.malloc(BLOCK) for _ in range(2 * GROWTH // BLOCK)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        libc.free(block)
    assert heap.is_due(private_memory(), 0.0)
    grown = private_memory()
    heap.trim(0.0)
    assert private_memory() < grown - GROWTH
    assert not heap.is_due(private_memory(), TRIM_S)
    assert not heap.is_due(grown, TRIM_S / 2) and heap.is_due(grown, TRIM_S)
    libc.free(blocks[-1])
