"""Searches and lists in packed bits give what plain Python gives."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
from numba import njit

from dlm.index.packed import check_kernels, kernels, record_kernels
from dlm.index.packed.columns import room

SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200]


@njit
def places(address, width, low, high, targets, out):  # type: ignore[no-untyped-def]
    """`find_key` for each target."""
    for i in range(len(targets)):
        out[i] = kernels.find_key(address << np.int64(3), width, low, high, targets[i])


@pytest.mark.parametrize("width", range(33))
def test_a_key_is_found_where_bisection_finds_it(width: int) -> None:
    """Present and absent, in whole lists and in parts; keys after the end are not looked at."""
    rng = np.random.default_rng(width)
    for size in SIZES:
        top = 1 << width
        # More keys than fit repeat: the first of those that are equal is found.
        keys = np.sort(rng.integers(0, top, size + 3))
        if size + 3 <= top:
            keys = np.sort(rng.choice(min(top, 1 << 16), size + 3, replace=size + 3 > 1 << 16))
            keys += (top - 1 - int(keys[-1])) * int(rng.integers(2))
        words = room(len(keys) * width)
        kernels.put_all(words, 0, width, width, keys.astype(np.uint64))
        near = np.concatenate([keys, keys + 1, keys - 1, [0, top - 1]])
        targets = np.unique(np.clip(near, 0, top - 1)).astype(np.int64)
        for low, high in ((0, size), (1, size), (0, size + 3), (size // 2, size), (size, size)):
            if low > high:
                continue
            found = np.empty(len(targets), np.int64)
            places(words.ctypes.data, width, low, high, targets, found)
            part = keys[low:high].tolist()
            for target, place in zip(targets.tolist(), found.tolist(), strict=True):
                at = bisect_left(part, target)
                there = at < len(part) and part[at] == target
                assert place == (low + at if there else -1), (size, low, high, target)


HEADS = sorted(
    {0, 1, 2, 3, 7, 8, 100}
    | {(1 << bits) + more for bits in (4, 8, 16, 25) for more in (-3, -2, -1, 0)}
)


@njit
def head_of(address, bit, parent_size):  # type: ignore[no-untyped-def]
    """`read_head` at a bit of a column."""
    return record_kernels.read_head((address << np.int64(3)) + bit, parent_size, False)


@pytest.mark.parametrize("skipped", [0, 1, 5, 7, 8, 63])
@pytest.mark.parametrize("entries", HEADS)
def test_the_head_of_a_record_says_how_many_words_follow(entries: int, skipped: int) -> None:
    """By one bit where they are all of the parent's, by a code of their number else."""
    for parent in (entries, entries + 1):
        number = entries or parent
        length = number.bit_length()
        code, bits = 1, 1
        if parent != entries:
            code = (1 << length) | (number & ((1 << length - 1) - 1)) << (length + 1)
            bits = 2 * length
        words = room(skipped + bits + 64)
        words.view(np.uint8)[:] = 0xFF  # what follows is not read
        whole = int.from_bytes(words.tobytes(), "little")
        whole &= ~(((1 << bits) - 1) << skipped)
        whole |= code << skipped
        words = np.frombuffer(whole.to_bytes(words.nbytes, "little"), np.uint64).copy()
        assert head_of(words.ctypes.data, skipped, parent) == (entries, bits)


@pytest.mark.parametrize("entries", [*range(20), 63, 64, 65, 255, 256, 1000])
@pytest.mark.parametrize("spread", ["even", "crowded", "low", "high"])
def test_a_list_of_any_size_comes_back(entries: int, spread: str) -> None:
    """With and without a directory, its buckets full, empty or all keys in one."""
    key_bits, value_bits = 14, 9
    rng = np.random.default_rng(entries)
    top = 1 << key_bits
    pool = {
        "even": np.arange(top),
        "crowded": np.concatenate([np.arange(700), np.arange(top - 700, top)]),
        "low": np.arange(entries),
        "high": np.arange(top - entries, top),
    }[spread]
    key = np.sort(rng.choice(pool, entries, replace=False)).astype(np.uint32)
    values = rng.integers(0, 1 << value_bits, entries).astype(np.uint64)
    begin = np.array([0, 0, entries, entries], np.int64)
    bits, widths = np.empty(4, np.int64), np.full(3, key_bits)
    kernels.key_list_bits(begin, widths, value_bits, bits)
    words = room(int(bits[-1]))
    kernels.put_key_lists(words, bits, begin, widths, value_bits, key, values)
    assert words[-1] == 0
    again = np.empty(entries, np.uint32), np.empty_like(values)
    kernels.get_key_lists(words.ctypes.data, bits, begin, widths, value_bits, *again)
    assert [a.tolist() for a in again] == [key.tolist(), values.tolist()]
    fault = check_kernels.check_key_lists(
        words.ctypes.data, bits, begin, widths, 1 << key_bits, value_bits, 2, 1 << 9
    )
    assert fault == (-1, 0)


def test_the_hash_of_ngrams_depends_on_every_word_and_value_and_not_on_their_order() -> None:
    """It names the model."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 1 << 32, (50, 3)).astype(np.uint32)
    prob, backoff = rng.integers(0, 1 << 32, (2, 50)).astype(np.uint32)
    found = kernels.hash_ngrams(rows, prob, backoff).tolist()
    place = rng.permutation(50)
    assert kernels.hash_ngrams(rows[place], prob[place], backoff[place]).tolist() == found
    seen = {tuple(found)}
    for array in (rows[:, 0], rows[:, 2], prob, backoff):
        array[7] ^= 1
        seen.add(tuple(kernels.hash_ngrams(rows, prob, backoff).tolist()))
        array[7] ^= 1
    rows[:, [0, 1]] = rows[:, [1, 0]]
    seen.add(tuple(kernels.hash_ngrams(rows, prob, backoff).tolist()))
    assert len(seen) == 6
