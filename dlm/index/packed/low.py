"""Packs the low orders: 1-grams by id, and for each word a list of the 2-grams that begin with the
word. A 2-gram's weight is in a shard's tree. Words with a weight come first, sorted by falling
probability, so that few words need an entry, many share a probability, and ids are short."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed import kernels
from dlm.index.packed.columns import decode_backoffs, decode_probs
from dlm.index.packed.record_kernels import WIDTH_BITS

Arrays = dict[str, NDArray[Any]]

# The values of the column `shape`, in this order.
LOW_SHAPE = (
    "words",
    "pairs",
    "entries",  # words that may have a weight or a list of pairs; they come before all others
    "word_backoff_bits",
    "pair_flag_bits",
    "pair_prob_bits",
    "begin_bits",
    "place_bits",
    "pair_prob_base",
)
# DO NOT CHANGE: on disk.
BLOCK_WORDS = 16  # words in one number of `word_value`
FIRST, EXTENDED = 32, 48  # bits where the flags begin: of words that begin a run; of extended words
# Flag bits of a pair: STORED alone, if all stored pairs and all words of `entries` are extended and
# no pair is a blank, since STORED then gives the state length. Otherwise two bits of the state
# length (NOT_EXTENDED: the pair is stored, and has the state length of its last word), and BLANK.
ONE_FLAG, ALL_FLAGS = 1, 3
NOT_EXTENDED = 3

PIECE = 1 << 20  # approximate number of pairs unpacked at a time
# The parts of `LowPlain.pair_flags`: two bits of the state length, then two flags.
STATE_LENGTH, STORED, BLANK = 3, 4, 8


@dataclass(frozen=True, eq=False)
class LowPlain:
    """1- and 2-grams in plain arrays: V words and P pairs, blanks included.

    Shapes  log10_prob, log10_backoff  (V,)
            extended                   (V,)  whether the word matters to words on its right
            begin                      (V + 1,)  where the pairs of each word begin, and the end
            key                        (P,)  key of the second word, rising in each list
            pair_log10_prob            (P,)
            pair_flags                 (P,)  state length, STORED, BLANK
    """

    log10_prob: NDArray[np.float32]
    log10_backoff: NDArray[np.float32]
    extended: NDArray[np.bool_]
    begin: NDArray[np.int64]
    key: NDArray[np.uint32]
    pair_log10_prob: NDArray[np.float32]
    pair_flags: NDArray[np.uint8]


def order_of_words(
    log10_prob: NDArray[np.float32], log10_backoff: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Returns the old ids (V,) in the new order: the unknown word, words with a weight, all others;
    the more probable first, equally probable words in the old order."""
    return np.lexsort((-log10_prob, log10_backoff == 0, np.arange(len(log10_prob)) > 0))


def key_bits_of(words: int) -> int:
    """Returns how many bits the largest of `words` word ids or 2-gram numbers has, at least 1."""
    return max((words - 1).bit_length(), 1)


_MIRRORED_BYTES = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint8)


def mirrored(numbers: NDArray[Any], bits: int) -> NDArray[np.uint32]:
    """Reverses the bits of numbers (n,) below 2**bits: turns ids into keys, and keys into ids. Keys
    of small ids are spread evenly (van der Corput 1935); `bits` does not change their order."""
    of_bytes = _MIRRORED_BYTES[np.ascontiguousarray(numbers, np.uint32).view(np.uint8)]
    whole: NDArray[np.uint32] = of_bytes.view(np.uint32).byteswap()
    return whole >> np.uint32(32 - bits)


def pack_words(
    log10_prob: NDArray[np.float32], extended: NDArray[np.bool_]
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Returns `word_value`, and `word_prob_table` with an entry per run of equal probabilities."""
    bits = log10_prob.view(np.uint32)
    first = np.append(True, bits[1:] != bits[:-1])
    rows = np.zeros((2, -(-len(bits) // BLOCK_WORDS), BLOCK_WORDS), np.bool_)
    rows.reshape(2, -1)[:, : len(bits)] = first, extended
    begun = np.cumsum(rows[0].sum(axis=1, dtype=np.uint64))
    packed = np.packbits(rows, axis=2, bitorder="little").view(np.uint16)[..., 0].astype(np.uint64)
    before = np.append(np.uint64(0), begun[:-1])
    words = before | packed[0] << np.uint64(FIRST) | packed[1] << np.uint64(EXTENDED)
    return words, log10_prob[first]


def unpack_words(
    blocks: NDArray[np.uint64], words: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the run of each word, and whether the word is extended."""
    both = blocks.view(np.uint16).reshape(-1, 4)[:, 2:]
    rows = np.unpackbits(np.ascontiguousarray(both.T).view(np.uint8), axis=1, bitorder="little")
    first, extended = rows[:, :words].astype(np.bool_)
    return np.cumsum(first) - 1, extended


def extended_from(a: Arrays) -> int:
    """Returns the first extended word, 0 or 1, if words 1 .. `entries` - 1 are extended."""
    return 1 - (int(a["word_value"][0]) >> EXTENDED & 1)


def word_lists(
    a: Arrays, s: dict[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns, for words with an entry, the first pair and the list's first bit, both (E + 1,) with
    the end; and the width of the list's keys in bits, (E,)."""
    address, count = a["word_entry"].ctypes.data, s["entries"]
    stride, at = entry_bits_of(s), 0
    found = []
    for width in (s["begin_bits"], s["place_bits"], WIDTH_BITS):
        found.append(np.empty(count + 1, np.int64))
        kernels.get_all(address, at, stride, width, found[-1].view(np.uint64))
        at += width
    begin, place, widths = found
    return begin, place, widths[:-1] + 1


def entry_bits_of(s: dict[str, int]) -> int:
    return s["begin_bits"] + s["place_bits"] + WIDTH_BITS + s["word_backoff_bits"]


def pairs_of(
    a: Arrays, numbers: NDArray[np.integer]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Returns the ids of both words of the 2-grams with these ascending numbers. Trusts that these
    2-grams exist, and that `a` was checked."""
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    begin, place, widths = word_lists(a, s)
    first, b = np.searchsorted(begin, numbers, "right") - 1, key_bits_of(s["words"])
    second = np.empty(len(numbers), np.uint32)
    # The lists of the words between two cuts are unpacked together.
    cuts = np.unique(np.searchsorted(begin, np.arange(0, s["pairs"], PIECE)))
    for low, high in pairwise([*cuts.tolist(), s["entries"]]):
        keys = _keys_and_values(a, s, place, begin, widths, low, high)[0]
        some = slice(*np.searchsorted(numbers, begin[[low, high]]))
        second[some] = mirrored(keys[numbers[some] - begin[low]], b)
    return first.astype(np.uint32), second


def _keys_and_values(
    a: Arrays,
    s: dict[str, int],
    place: NDArray[np.int64],
    begin: NDArray[np.int64],
    widths: NDArray[np.int64],
    low: int,
    high: int,
) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Unpacks the lists of the words low .. high - 1: keys of the model's width, and values."""
    begin, widths = begin[low : high + 1] - begin[low], widths[low:high]
    keys, values = np.empty(begin[-1], np.uint32), np.empty(begin[-1], np.uint64)
    kernels.get_key_lists(
        a["list"].ctypes.data, place[low : high + 1], begin, widths,
        s["pair_flag_bits"] + s["pair_prob_bits"], keys, values,
    )  # fmt: skip
    keys <<= np.repeat(key_bits_of(s["words"]) - widths, np.diff(begin)).astype(np.uint32)
    return keys, values


def unpack_low(a: Arrays) -> LowPlain:
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    size, pairs, flag_bits = s["words"], s["pairs"], s["pair_flag_bits"]
    runs, extended = unpack_words(a["word_value"], size)
    begin, place, widths = word_lists(a, s)
    weight = np.empty(s["entries"], np.uint64)
    stride = entry_bits_of(s)
    kernels.get_all(
        a["word_entry"].ctypes.data, stride - s["word_backoff_bits"], stride,
        s["word_backoff_bits"], weight,
    )  # fmt: skip
    keys, values = _keys_and_values(a, s, place, begin, widths, 0, s["entries"])
    codes = values >> np.uint64(flag_bits)
    pair_prob = decode_probs(codes, s["pair_prob_base"], a["pair_prob_table"])
    blank = (values & np.uint64(4) != 0) & (flag_bits == ALL_FLAGS)
    pair_prob[blank & (codes == 0)] = 0
    state, second = (values & np.uint64(3)).astype(np.uint8), mirrored(keys, key_bits_of(size))
    of_word = extended[second]
    if flag_bits == ONE_FLAG:
        of_word = (second >= extended_from(a)) & (second < s["entries"])
        state = np.where(state & 1, np.uint8(2), of_word)
    flags = np.where(state > 1, STORED, 0) | np.where(blank, BLANK, 0)
    state = np.where(state == NOT_EXTENDED, of_word, state)
    return LowPlain(
        a["word_prob_table"][runs],
        np.append(
            decode_backoffs(weight, a["word_backoff_table"]),
            np.zeros(size - len(weight), np.float32),
        ),
        extended,
        np.append(begin, np.full(size - len(weight), pairs)),
        keys,
        pair_prob,
        (flags | state).astype(np.uint8),
    )
