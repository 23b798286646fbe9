"""Fills the hash tables of a KenLM file."""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import kernel
from dlm.kenlm.kernels import key_of, murmur


@kernel("uint32[:, :], int64, int64, out int64[:]")
def keys_of(ids, begin, end, keys):  # type: ignore[no-untyped-def]
    """The keys of the words from `begin` to `end` of each n-gram.

    Shapes
        ids   (n, k)  uint32  oldest word first
        keys  (n,)    int64   filled
    """
    for i in range(len(ids)):
        key = np.int64(ids[i, end - 1])
        for j in range(end - 2, begin - 1, -1):
            key = key_of(key, np.int64(ids[i, j]))
        keys[i] = key


@kernel("uint8[:], int64[:], out int64[:]")
def hash_words(text, begin, keys):  # type: ignore[no-untyped-def]
    """The hashes of words.

    Shapes
        text   (bytes,)  uint8  the words one after another; then eight more bytes
        begin  (n + 1,)  int64
        keys   (n,)      int64  filled
    """
    at = np.int64(text.ctypes.data)
    for i in range(len(keys)):
        keys[i] = murmur(at + begin[i], begin[i + 1] - begin[i])


@kernel("int64[:], uint32[:, :], out uint32[:, :]")
def fill_table(keys, values, table):  # type: ignore[no-untyped-def]
    """Enters keys in a table, one after another, as KenLM does.

    Shapes
        keys    (n,)          int64   none is 0; fewer than the buckets
        values  (n, w)        uint32
        table   (b, 2 + w)    uint32  zeros, filled: key, low half first, and values
    Returns     the first that is entered already, or n
    """
    buckets = np.uint64(len(table))
    for i in range(len(keys)):
        key = np.uint64(keys[i])
        low, high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
        at = np.int64(key % buckets)
        while table[at, 0] or table[at, 1]:
            if table[at, 0] == low and table[at, 1] == high:
                return i
            at = at + 1 if at + 1 < len(table) else 0
        table[at, 0], table[at, 1] = low, high
        for j in range(values.shape[1]):
            table[at, 2 + j] = values[i, j]
    return len(keys)
