"""The low orders, packed: 1-grams by id, and for each word a list of the 2-grams it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed import kernels
from dlm.index.packed.columns import (
    decode_backoffs,
    decode_probs,
    unpack_fields,
)

Arrays = dict[str, NDArray[Any]]

# The values of the column `shape`, in this order.
LOW_SHAPE = (
    "words",
    "pairs",
    "key_bits",
    "word_prob_bits",
    "word_backoff_bits",
    "pair_prob_bits",
    "pair_backoff_bits",
    "begin_bits",
    "place_bits",
    "word_prob_base",
    "pair_prob_base",
)
# Bits beside the probability of a pair, the lowest first: two of the state length, then these.
STATE_LENGTH, STORED, BLANK = 3, 4, 8
PAIR_FLAG_BITS = 4


@dataclass(frozen=True, eq=False)
class LowPlain:
    """1- and 2-grams in plain arrays: V words and P pairs, blanks included.

    Shapes  log10_prob, log10_backoff  (V,)
            extended                   (V,)  whether the word matters to the right of itself
            begin                      (V + 1,)  pairs that begin with each word
            key                        (P,)  key of the second word, rising in each list
            pair_log10_prob, pair_log10_backoff  (P,)
            pair_flags                 (P,)  state length, STORED, BLANK
    """

    log10_prob: NDArray[np.float32]
    log10_backoff: NDArray[np.float32]
    extended: NDArray[np.bool_]
    begin: NDArray[np.int64]
    key: NDArray[np.uint32]
    pair_log10_prob: NDArray[np.float32]
    pair_log10_backoff: NDArray[np.float32]
    pair_flags: NDArray[np.uint8]


def key_bits_of(words: int) -> int:
    return max((words - 1).bit_length(), 1)


def multiplier_of(key_bits: int) -> int:
    """The factor that turns ids into keys: 2**key_bits over the golden ratio, made odd."""
    return (0x9E3779B97F4A7C15 >> (64 - key_bits)) | 1


def keys_of(ids: NDArray[Any], key_bits: int) -> NDArray[np.uint32]:
    """Keys of word ids: an odd multiple modulo 2**key_bits, which permutes them and spreads
    neighbouring ids evenly (Knuth, vol. 3, 6.4)."""
    product = np.asarray(ids).astype(np.uint64) * np.uint64(multiplier_of(key_bits))
    return (product & np.uint64((1 << key_bits) - 1)).astype(np.uint32)


def ids_of(keys: NDArray[Any], key_bits: int) -> NDArray[np.uint32]:
    """The inverse of `keys_of`."""
    inverse = pow(multiplier_of(key_bits), -1, 1 << key_bits)
    product = np.asarray(keys).astype(np.uint64) * np.uint64(inverse)
    return (product & np.uint64((1 << key_bits) - 1)).astype(np.uint32)


def word_lists(a: Arrays, s: dict[str, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(words + 1,) where the pairs of each word begin among all, and the bit of its list."""
    address = a["word_entry"].ctypes.data
    stride = s["begin_bits"] + s["place_bits"] + s["word_backoff_bits"]
    begin, place = (np.empty(s["words"] + 1, np.int64) for _ in range(2))
    kernels.get_all(address, 0, stride, s["begin_bits"], begin.view(np.uint64))
    kernels.get_all(address, s["begin_bits"], stride, s["place_bits"], place.view(np.uint64))
    return begin, place


@dataclass(frozen=True, eq=False)
class Pairs:
    """Some 2-grams, (n,): the ids of their words, and the entries of the list of the second."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    sizes: NDArray[np.int64]


def pairs_of(a: Arrays, numbers: NDArray[np.int64]) -> Pairs:
    """The 2-grams with these numbers, which rise.

    Trusts  `a` passed `check.check_low`; the 2-grams are there
    """
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    begin, place = word_lists(a, s)
    b = s["key_bits"]
    first, second = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
    kernels.words_of_pairs(
        a["list"].ctypes.data,
        place,
        begin,
        b,
        PAIR_FLAG_BITS + s["pair_prob_bits"] + s["pair_backoff_bits"],
        pow(multiplier_of(b), -1, 1 << b),
        numbers,
        first,
        second,
    )
    return Pairs(first, second, begin[second + 1] - begin[second])


def unpack_low(a: Arrays) -> LowPlain:
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    size, pairs = s["words"], s["pairs"]
    near1 = unpack_fields(a["word_value"], s["word_prob_bits"] + 1, size)
    begin, place = word_lists(a, s)
    far1 = np.empty(size, np.uint64)
    shift = s["begin_bits"] + s["place_bits"]
    kernels.get_all(
        a["word_entry"].ctypes.data, shift, shift + s["word_backoff_bits"],
        s["word_backoff_bits"], far1,
    )  # fmt: skip
    keys = np.empty(pairs, np.uint32)
    near, far = np.empty(pairs, np.uint64), np.empty(pairs, np.uint64)
    low_bits = PAIR_FLAG_BITS + s["pair_prob_bits"]
    value_bits = low_bits + s["pair_backoff_bits"]
    kernels.get_key_lists(
        a["list"].ctypes.data, place, begin, s["key_bits"], value_bits, low_bits, keys, near, far
    )
    codes = near >> np.uint64(PAIR_FLAG_BITS)
    pair_prob = decode_probs(codes, s["pair_prob_base"], a["pair_prob_table"])
    pair_prob[(near & np.uint64(BLANK) != 0) & (codes == 0)] = 0
    return LowPlain(
        decode_probs(near1 >> np.uint64(1), s["word_prob_base"], a["word_prob_table"]),
        decode_backoffs(far1, a["word_backoff_table"]),
        (near1 & np.uint64(1)).astype(np.bool_),
        begin,
        keys,
        pair_prob,
        decode_backoffs(far, a["pair_backoff_table"]),
        (near & np.uint64((1 << PAIR_FLAG_BITS) - 1)).astype(np.uint8),
    )
