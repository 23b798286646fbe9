"""The global index: a hash that is XXH64, and a slot table that balances."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from dlm.errors import ConfigError
from dlm.ngram.partition import (
    MAX_SHARDS,
    SLOTS,
    balanced_slot_table,
    check_shards,
    hash_pairs,
    slots_of,
)

U32 = st.integers(0, 2**32 - 1)

# DO NOT CHANGE: they decide the shard of a context (shards/FORMAT.md, "Slots").
VECTORS = [
    (0, 0, 0x34C96ACDCADB1BBB, 3003),
    (1, 2, 0xCD3D4C871EE4183A, 2106),
    (2, 1, 0x6872025B5D125163, 355),
    (297703, 12, 0x878EDF56A29F7810, 2064),
    (4294967295, 4294967295, 0x85D136ADB773C6C9, 1737),
]


@given(st.lists(st.tuples(U32, U32), min_size=1))
@settings(deadline=None, derandomize=True)
def test_hash_of_a_pair_is_xxh64_of_its_eight_bytes(pairs: list[tuple[int, int]]) -> None:
    """The vectorised hash and the xxhash package agree on any ids."""
    u, v = np.array(pairs, np.uint32).T
    expected = [xxhash.xxh64_intdigest(struct.pack("<II", a, b)) for a, b in pairs]
    assert hash_pairs(u, v).tolist() == expected
    assert slots_of(u, v).tolist() == [h % SLOTS for h in expected]
    assert slots_of(u, v).dtype == np.uint16


@pytest.mark.parametrize(("u", "v", "digest", "slot"), VECTORS)
def test_fixed_vectors_hash_as_the_format_says(u: int, v: int, digest: int, slot: int) -> None:
    """The order of the two words matters, and ids may fill 32 bits."""
    pair = np.array([u], np.uint32), np.array([v], np.uint32)
    assert hash_pairs(*pair).tolist() == [digest]
    assert slots_of(*pair).tolist() == [slot]


@given(
    seed=st.integers(0, 1000),
    shards=st.sampled_from([1, 2, 3, 64, 1000, SLOTS]),
    spread=st.sampled_from([0, 1, 10, 10**12]),
)
@settings(deadline=None, derandomize=True, max_examples=30)
def test_table_is_balanced_within_the_heaviest_slot(seed: int, shards: int, spread: int) -> None:
    """No shard lies above the mean by more than one slot; every shard has a slot."""
    load = np.random.default_rng(seed).integers(0, spread + 1, SLOTS)
    table = balanced_slot_table(load, shards)
    assert table.dtype == np.uint16
    loads = np.bincount(table, load, shards)
    assert len(np.unique(table)) == shards
    assert loads.max() <= load.sum() / shards + load.max()
    assert (balanced_slot_table(load, shards) == table).all()


def test_slots_without_load_are_spread_evenly() -> None:
    """An empty model can be filled later without moving slots."""
    counts = np.bincount(balanced_slot_table(np.zeros(SLOTS, np.int64), 3))
    assert counts.tolist() == [1366, 1365, 1365]


def test_a_heavy_slot_stands_alone() -> None:
    """The rest goes elsewhere."""
    load = np.ones(SLOTS, np.int64)
    load[77] = 10**6
    table = balanced_slot_table(load, 4)
    assert (table == table[77]).sum() == 1


@pytest.mark.parametrize("shards", [0, -3, MAX_SHARDS + 1])
def test_a_number_of_shards_out_of_range_is_refused(shards: int) -> None:
    """With the range."""
    with pytest.raises(ConfigError, match="1 to 4,096"):
        check_shards(shards)
    with pytest.raises(ConfigError):
        balanced_slot_table(np.zeros(SLOTS, np.int64), shards)


def test_a_load_of_another_length_is_refused() -> None:
    """One number a slot."""
    with pytest.raises(ConfigError, match="expected 4096"):
        balanced_slot_table(np.zeros(10, np.int64), 2)
