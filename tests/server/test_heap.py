"""Memory that a flood left is given back."""

from __future__ import annotations

import ctypes

import pytest

from dlm.server.process import (
    GROWTH,
    LEAST_S,
    MOST_S,
    WORTH,
    Heap,
    TrimState,
    find_trim,
    private_memory,
)

BLOCK = 64 << 10  # below glibc's threshold for memory of its own from the system


def test_a_trim_is_due_once_the_process_has_grown_and_rarer_if_it_returns_little() -> None:
    """The pause doubles while trims are in vain, and is short again after one that was not."""
    state = TrimState(1000)
    assert not state.is_due(999 + GROWTH, 0.0)
    assert state.is_due(1000 + GROWTH, 0.0)
    pauses = []
    for _ in range(6):
        state = state.after(GROWTH, GROWTH - WORTH + 1, 100.0)
        pauses.append(state.pause_s)
        assert not state.is_due(10 * GROWTH, 100.0 + state.pause_s - 0.1)
        assert state.is_due(10 * GROWTH, 100.0 + state.pause_s)
    assert pauses == [10.0, 20.0, 40.0, 80.0, MOST_S, MOST_S]
    assert state.after(GROWTH, GROWTH - WORTH, 100.0).pause_s == LEAST_S


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
    assert not heap.is_due(private_memory(), MOST_S)
    libc.free(blocks[-1])
