"""Converts values to and from the fields of packed columns, directly or by a table.

All widths and tables depend on the data alone, so that one model has one packed form.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# A log10 probability is never above 0, so its sign is not stored; a weight has either sign.
PROB_BITS = 31
BACKOFF_BITS = 32


def room(bits: int) -> Words:
    """Returns zeroed 64-bit words for `bits` bits, with the spare word that ends a column."""
    return np.zeros((bits + 63) // 64 + 1, np.uint64)


def bits_of(largest: int) -> int:
    """Returns how many bits `largest` needs, which is 0 for 0."""
    return int(largest).bit_length()


def magnitudes_of(log10_prob: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Returns the bits of log10 probabilities as numbers, without the sign bit."""
    bits: NDArray[np.uint32] = np.ascontiguousarray(log10_prob).view(np.uint32)
    return bits & np.uint32((1 << PROB_BITS) - 1)


def probs_of(magnitudes: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The inverse of `magnitudes_of`."""
    sign = np.where(magnitudes != 0, np.uint32(1 << PROB_BITS), np.uint32(0))
    return (magnitudes | sign).view(np.float32)


def decode_probs(
    codes: NDArray[np.uint64], base: int, table: NDArray[np.float32]
) -> NDArray[np.float32]:
    return table[codes] if len(table) else probs_of((codes + np.uint64(base)).astype(np.uint32))


def decode_backoffs(codes: NDArray[np.uint64], table: NDArray[np.float32]) -> NDArray[np.float32]:
    return table[codes] if len(table) else codes.astype(np.uint32).view(np.float32)
