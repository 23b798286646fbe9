"""Kernels that write the states of a call, each with a checksum, and that check the states that
callers return."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel

CHECKSUM_BYTES = 2
# The factor and its powers are odd, so a changed bit of a byte always changes the sum.
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
def _checksum(rows, i, begin, powers):  # type: ignore[no-untyped-def]
    total = _FACTOR
    for b in range(len(powers)):
        total = np.uint32(total + np.uint32(np.uint32(rows[i, begin + b]) * powers[b]))
    return total


@kernel("uint8[:], int64, uint8[:, :], uint8[:], uint8[:, :], out uint8[:, :]", nogil=False)
def write_states(start, begin, nodes, lengths, contexts, out):  # type: ignore[no-untyped-def]
    """Writes `start`, a state and its checksum to each row of `out`; the checksum does not cover
    the first `begin` bytes.

    Shapes  start (S,), nodes (N, 4) or (N, 0), lengths (N,), contexts (N, W),
            out (N, S + 4 or 0 + 1 + W + CHECKSUM_BYTES)
    """
    node_at, node_size, width = len(start), nodes.shape[1], contexts.shape[1]
    length_at = node_at + node_size
    end = length_at + 1 + width
    powers = _powers(end - begin)
    for i in range(len(out)):
        for b in range(node_at):
            out[i, b] = start[b]
        for b in range(node_size):
            out[i, node_at + b] = nodes[i, b]
        out[i, length_at] = lengths[i]
        for b in range(width):
            out[i, length_at + 1 + b] = contexts[i, b]
        total = _checksum(out, i, begin, powers)
        for b in range(CHECKSUM_BYTES):
            out[i, end + b] = np.uint8(total >> np.uint32(8 * b))


@kernel("uint8[:, :]", nogil=False)
def changed_state(rows):  # type: ignore[no-untyped-def]
    """Returns the index of the first row (S,) whose checksum does not match its other bytes, or -1.

    Trusts  S >= CHECKSUM_BYTES
    """
    size = rows.shape[1] - CHECKSUM_BYTES
    powers = _powers(size)
    for i in range(len(rows)):
        total = _checksum(rows, i, 0, powers)
        for b in range(CHECKSUM_BYTES):
            if rows[i, size + b] != np.uint8(total >> np.uint32(8 * b)):
                return i
    return -1
