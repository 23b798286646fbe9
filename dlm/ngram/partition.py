"""Determines which shard owns a context: the global index.

A context of two words or more belongs to the shard of its two most recent words (u, v). XXH64 of
the two ids gives one of 4,096 slots, and a table in the manifest gives each slot a shard, so that
the builder can balance shards and an operator can move slots.

Paper: DLM Algorithm 2, which uses ``hash % B`` itself as the shard.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError

SLOTS = 4096  # DO NOT CHANGE: on disk and on the wire
MAX_SHARDS = SLOTS

U64 = np.uint64
_PRIME_1 = U64(0x9E3779B185EBCA87)
_PRIME_2 = U64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = U64(0x165667B19E3779F9)
_PRIME_4 = U64(0x85EBCA77C2B2AE63)
_PRIME_5 = U64(0x27D4EB2F165667C5)


def _rotate_left(x: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return (x << U64(bits)) | (x >> U64(64 - bits))


def hash_pairs(u: NDArray[np.uint32], v: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """XXH64 (n,), seed 0, of each pair of ids as two little-endian uint32, v the more recent."""
    lane = np.asarray(u).astype(U64) | (np.asarray(v).astype(U64) << U64(32))
    with np.errstate(over="ignore"):
        h = (_rotate_left(lane * _PRIME_2, 31) * _PRIME_1) ^ (_PRIME_5 + U64(8))
        h = _rotate_left(h, 27) * _PRIME_1 + _PRIME_4
        h = (h ^ (h >> U64(33))) * _PRIME_2
        h = (h ^ (h >> U64(29))) * _PRIME_3
        return h ^ (h >> U64(32))


def slots_of(u: NDArray[np.uint32], v: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The slot of each pair, (n,) in 0..4095: its hash modulo `SLOTS`."""
    return (hash_pairs(u, v) % U64(SLOTS)).astype(np.uint16)


def check_shards(shards: int) -> None:
    if not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(
            f"{shards} shards were requested; expected 1 to {MAX_SHARDS:,}, the number of hash "
            "slots that are divided among the shards"
        )


def balanced_slot_table(load: NDArray[np.int64], shards: int) -> NDArray[np.uint16]:
    """Assigns slots to shards, the heaviest slot first, each to the lightest shard so far.

    Shapes      load (4096,)  bytes stored under each slot, or queries recorded for it
    Returns     (4096,)  shard of each slot; every shard has a slot
    Guarantees  the same table for the same load, on every machine
    Paper       DLM 3.2.1 spreads by hash alone; the table is ours (Graham 1969, longest first)
    """
    check_shards(shards)
    if len(load) != SLOTS:
        raise ConfigError(f"the load has {len(load)} slots; expected {SLOTS}")
    table = np.zeros(SLOTS, np.uint16)
    # (load, slots, shard): empty slots spread evenly, and ties fall to the lower shard.
    heap = [(0, 0, shard) for shard in range(shards)]
    for slot in np.argsort(-np.asarray(load, dtype=np.int64), kind="stable"):
        total, count, shard = heap[0]
        table[slot] = shard
        heapq.heapreplace(heap, (total + int(load[slot]), count + 1, shard))
    return table
