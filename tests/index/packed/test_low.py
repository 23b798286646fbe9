"""The low orders are unpacked as they were packed, and keys are ids in another order."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlm.index.packed.low import BLANK, STORED, LowPlain, key_bits_of, mirrored, unpack_low
from index.oracle import pack_low


def values(rng: np.random.Generator, count: int, distinct: int) -> np.ndarray:
    """`count` values of so many, 0 among them."""
    book = -rng.random(distinct).astype(np.float32)
    book[0] = 0
    return book[rng.integers(0, distinct, count)]


def random_low(
    rng: np.random.Generator, words: int, most: int, distinct: int, plain: bool
) -> LowPlain:
    """Lists of up to `most` words, some empty, one of all words; plain ones need one flag."""
    sizes = rng.integers(0, min(most, words) + 1, words)
    sizes[rng.integers(words)] = words
    sizes[rng.integers(words)] = 0
    ids = [rng.choice(words, size, replace=False) for size in sizes]
    keys = [np.sort(mirrored(i, key_bits_of(words))) for i in ids]
    key = np.concatenate([*keys, np.zeros(0, np.uint32)]).astype(np.uint32)
    weights = -values(rng, words, distinct) * (np.arange(words) < rng.integers(0, words + 1))
    extended = rng.random(words) < 0.5
    if plain:
        extended[1:] = np.cumsum(((sizes > 0) | (weights != 0))[::-1])[-2::-1] > 0
    # A state has two words, or as many as that of the second word alone.
    own = extended[mirrored(key, key_bits_of(words))]
    kinds = np.array([[0, 1, 2 | STORED, 0], [0, 1, 2 | STORED, 1]]) | STORED * (np.arange(4) == 3)
    flags = kinds[own.astype(int), rng.integers(0, 4 - plain, len(key))].astype(np.uint8)
    flags[(flags < 2) & plain] = own[(flags < 2) & plain]
    flags |= (BLANK * rng.integers(0, 2 - plain, len(key))).astype(np.uint8)
    return LowPlain(
        values(rng, words, distinct),
        weights,
        extended,
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        key,
        np.where(flags & BLANK, np.float32(0), values(rng, len(key), distinct)),
        flags,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    words=st.integers(1, 130),
    most=st.sampled_from([0, 1, 8, 9, 130]),
    distinct=st.sampled_from([1, 2, 7, 5000]),
    prob_table=st.sampled_from([0, 5, 1 << 31]),
    plain=st.booleans(),
)
def test_low_orders_come_back(
    seed: int, words: int, most: int, distinct: int, prob_table: int, plain: bool
) -> None:
    """Lists short, long and whole; values by table and without; one word alone."""
    low = random_low(np.random.default_rng(seed), words, most, distinct, plain)
    packed = pack_low(low, prob_table)
    assert not plain or packed["shape"][4] == 1  # flag of a pair
    for name, column in packed.items():
        assert column.dtype == (np.float32 if name.endswith("table") else np.uint64), name
    again = unpack_low(packed)
    for field in fields(LowPlain):
        assert (getattr(again, field.name) + 0 == getattr(low, field.name)).all(), field.name
        assert len(getattr(again, field.name)) == len(getattr(low, field.name)), field.name


@pytest.mark.parametrize("key_bits", range(1, 33))
def test_keys_and_ids_are_inverse_at_every_width(key_bits: int) -> None:
    """And keys permute the ids: no two words share one."""
    top = 1 << key_bits
    ids = np.unique(
        np.concatenate(
            [
                np.arange(min(top, 300)),
                np.arange(max(top - 300, 0), top),
                np.random.default_rng(key_bits).integers(0, top, 300),
            ]
        )
    ).astype(np.uint32)
    keys = mirrored(ids, key_bits)
    assert len(np.unique(keys)) == len(ids)
    assert int(keys.max()) < top
    assert mirrored(keys, key_bits).tolist() == ids.tolist()
