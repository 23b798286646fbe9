"""Packed columns: fixed-width fields, offsets, and values by table.

Everything is chosen from the data alone, so that one model has one packed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed import kernels

Words = NDArray[np.uint64]

# A probability is never above 0, so its sign is not stored; a weight has both.
PROB_BITS = 31
BACKOFF_BITS = 32


def room(bits: int) -> Words:
    """Zeroed words for `bits` bits and the spare word after them."""
    return np.zeros((bits + 63) // 64 + 1, np.uint64)


def bits_of(largest: int) -> int:
    """Bits that `largest` needs; 0 for 0."""
    return int(largest).bit_length()


def pack_fields(values: NDArray[Any], width: int) -> Words:
    words = room(len(values) * width)
    kernels.put_all(words, 0, width, width, np.ascontiguousarray(values, np.uint64))
    return words


def unpack_fields(words: Words, width: int, count: int) -> NDArray[np.uint64]:
    out = np.empty(count, np.uint64)
    kernels.get_all(words.ctypes.data, 0, width, width, out)
    return out


@dataclass(frozen=True, eq=False)
class Offsets:
    """A sequence that never falls, in blocks of 16: a base and 15 distances from it.

    A block is the base, in `base_bits`, above one bit that is 0, then the distances of the other 15
    from it, in `delta_bits` each. If a distance needs more, the bit is 1, and in place of
    the base is the block's number in `exceptions`, which stores its 16 offsets in full.
    """

    words: Words
    exceptions: Words
    base_bits: int
    delta_bits: int


def unpack_offsets(packed: Offsets, count: int) -> NDArray[np.int64]:
    out = np.empty(count, np.int64)
    kernels.get_offsets(
        packed.words.ctypes.data,
        packed.base_bits,
        packed.delta_bits,
        packed.exceptions.ctypes.data,
        out,
    )
    return out


def magnitudes_of(log10_prob: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The bits of probabilities, without their sign."""
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
