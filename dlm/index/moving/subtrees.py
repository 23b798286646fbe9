"""What a shard set stores under each slot: its weight, and its rows for `making`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.index.layout import Manifest, check_file, read_manifest
from dlm.index.making.stages import GRAM_BYTES, NODE_BYTES
from dlm.index.moving import subtree_kernels as kernels
from dlm.index.packed.low import pairs_of
from dlm.index.packed.tree import root_numbers, tree_shape
from dlm.index.search.shard import LowOrders, Shard
from dlm.ngram.partition import SLOTS, slots_of

ROOTS = 1 << 13  # whose nodes are in memory at once

# The arrays of `Roots`.
COLUMNS = {**dict.fromkeys(("shards", "places", "numbers", "sizes"), np.int64), "slots": np.uint16}

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Roots:
    """Some roots, (R,): their shards, their places in them, the numbers of their 2-grams, the
    entries of the list of each 2-gram's second word, and their slots."""

    shards: Ints
    places: Ints
    numbers: Ints
    sizes: Ints
    slots: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, which: slice | NDArray[np.bool_] | Ints) -> Roots:
        return Roots(
            self.shards[which],
            self.places[which],
            self.numbers[which],
            self.sizes[which],
            self.slots[which],
        )


@dataclass(frozen=True, eq=False)
class SubtreeLevel:
    """Nodes of one level below some roots, and what is needed to read their lists."""

    depth: int
    nodes: NDArray[np.uint32]
    lists: Ints
    owners: Ints


@dataclass(frozen=True, eq=False)
class SourceSet:
    """A shard set of which every file has been checked, and is mapped."""

    directory: Path
    manifest: Manifest
    low: LowOrders
    shards: list[Shard]

    @classmethod
    def open(cls, directory: Path, say: Callable[[str], None] = lambda line: None) -> SourceSet:
        """Raises ShardFormatError if a file is missing or damaged, or contradicts the manifest."""
        manifest = read_manifest(directory)
        say(f"checking {directory}")
        vocabulary = manifest.file("vocabulary")
        check_file(directory / vocabulary.name, vocabulary)
        low = LowOrders.open(directory, manifest)
        shards = [
            Shard.open(directory, index, manifest=manifest, low=low)
            for index in range(manifest.shards)
        ]
        return cls(directory, manifest, low, shards)

    @cached_property
    def _views(self) -> NDArray[np.int64]:
        return np.stack([shard.view for shard in self.shards])

    @property
    def levels(self) -> int:
        return max(self.manifest.order - 2, 0)

    def roots(self, shard: int) -> Roots:
        """The roots of a shard, in their order: 34 bytes each."""
        arrays = self.shards[shard].arrays
        numbers = root_numbers(arrays, tree_shape(arrays["shape"]))
        pairs = pairs_of(self.low.arrays, numbers)
        slots = slots_of(pairs.first.astype(np.uint32), pairs.second.astype(np.uint32))
        places = np.arange(len(numbers))
        return Roots(np.full(len(numbers), shard), places, numbers, pairs.sizes, slots)

    def roots_in(self, slots: NDArray[np.bool_], shards: Sequence[int]) -> Roots:
        """The roots whose slots are chosen, of these shards, by the numbers of their 2-grams."""
        found = []
        for shard in shards:
            roots = self.roots(shard)
            found.append(roots.at(slots[roots.slots]))
        every = Roots(
            *(
                np.concatenate([np.zeros(0, dtype), *(getattr(one, name) for one in found)])
                for name, dtype in COLUMNS.items()
            )
        )
        return every.at(np.argsort(every.numbers, kind="stable"))

    def levels_below(self, roots: Roots, weight: Ints) -> Iterator[SubtreeLevel]:
        """The levels below some roots, from the roots themselves on; adds to `weight` (R,) the
        bytes of each root."""
        begin, count = roots.places.copy(), np.ones(len(roots), np.int64)
        parents = np.empty((0, 6), np.uint32)
        for depth in range(self.levels):
            size = int(count.sum())
            level = SubtreeLevel(
                depth,
                np.empty((size, 6), np.uint32),
                np.empty(size, np.int64),
                np.empty(size, np.int64),
            )
            kernels.take_nodes(
                self._views, depth, roots.shards, roots.numbers, roots.sizes, begin, count,
                parents, level.nodes, level.lists, level.owners, weight, NODE_BYTES, GRAM_BYTES,
            )  # fmt: skip
            parents = level.nodes
            yield level

    def entries_of(
        self, level: SubtreeLevel, most: int
    ) -> Iterator[tuple[NDArray[np.uint32], int]]:
        """The n-grams that follow the nodes of a level, some `most` at a time, and how many of
        these are blanks."""
        ends = np.cumsum(level.nodes[:, 4], dtype=np.int64)
        first = 0
        while first < len(level.nodes):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + most, side="right")), first + 1)
            some = slice(first, last)
            count = int(ends[last - 1]) - before
            rows = np.empty((count, 3), np.uint32)
            blanks = kernels.take_entries(
                self._views, level.depth, level.lists[some], level.owners[some],
                level.nodes[some], np.empty(count, np.uint32), np.empty(count, np.uint64),
                np.empty(count, np.uint64), rows,
            )  # fmt: skip
            yield rows, int(blanks)
            first = last

    def slot_bytes(self, say: Callable[[str], None] = lambda line: None) -> Ints:
        """(4096,) about how many bytes are stored under each slot: what a build balances by."""
        total = np.zeros(SLOTS, np.int64)
        for shard in range(self.manifest.shards):
            say(f"measuring the slots of shard {shard}")
            roots = self.roots(shard)
            for first in range(0, len(roots), ROOTS):
                some = roots.at(slice(first, first + ROOTS))
                weight = np.zeros(len(some), np.int64)
                for _ in self.levels_below(some, weight):
                    pass
                np.add.at(total, some.slots, weight)
        return total
