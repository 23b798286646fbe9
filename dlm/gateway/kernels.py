"""Passes over the states of a call: to write each with its checksum, and to check those that come
back."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel

CHECKSUM_BYTES = 2
# Odd, and so are its powers: a changed bit of a byte always changes the sum.
_FACTOR = np.uint32(0x9E3779B1)


@inlined
def _powers(count):  # type: ignore[no-untyped-def]
    found = np.empty(count, np.uint32)
    power = _FACTOR
    for i in range(count):
        found[i] = power
        power = np.uint32(power * _FACTOR)
    return found


@inlined
def _checksum(rows, i, powers):  # type: ignore[no-untyped-def]
    """Of the first bytes of row `i`, as many as there are powers."""
    total = _FACTOR
    for b in range(len(powers)):
        total = np.uint32(total + np.uint32(np.uint32(rows[i, b]) * powers[b]))
    return total


@kernel("uint8[:], uint8[:, :], out uint8[:, :]", nogil=False)
def write_states(head, rows, out):  # type: ignore[no-untyped-def]
    """Writes each row between `head` and its checksum.

    Shapes  head (H,), rows (N, S), out (N, H + S + CHECKSUM_BYTES)
    """
    before, size = len(head), rows.shape[1]
    powers = _powers(size)
    for i in range(len(rows)):
        for b in range(before):
            out[i, b] = head[b]
        for b in range(size):
            out[i, before + b] = rows[i, b]
        total = _checksum(rows, i, powers)
        for b in range(CHECKSUM_BYTES):
            out[i, before + size + b] = np.uint8(total >> np.uint32(8 * b))


@kernel("uint8[:, :]", nogil=False)
def changed_state(rows):  # type: ignore[no-untyped-def]
    """The first row (S,) that does not end with the checksum of its other bytes; -1 if all do.

    Trusts  S >= CHECKSUM_BYTES
    """
    size = rows.shape[1] - CHECKSUM_BYTES
    powers = _powers(size)
    for i in range(len(rows)):
        total = _checksum(rows, i, powers)
        for b in range(CHECKSUM_BYTES):
            if rows[i, size + b] != np.uint8(total >> np.uint32(8 * b)):
                return i
    return -1
