"""Finds what a shard set stores under each slot: how many bytes, and where the records are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.index.layout import Manifest, check_file, read_manifest
from dlm.index.making.stages import GRAM_BYTES, NODE_BYTES
from dlm.index.packed import record_kernels as kernels
from dlm.index.packed.low import key_bits_of, pairs_of
from dlm.index.packed.tree import tree_shape
from dlm.index.search.shard import LowOrders, Shard, require_one_code
from dlm.index.search.view import KEY_BITS, LEVEL
from dlm.ngram.partition import SLOTS, slots_of

# The arrays of `Roots`.
COLUMNS = {"begins": np.int64, "ends": np.int64, "numbers": np.uint32, "slots": np.uint16}

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Roots:
    """Arrays (R,) about some roots: where the records begin and end, as bit addresses (8 * byte
    address), the numbers of the roots' 2-grams, and the roots' slots."""

    begins: Ints
    ends: Ints
    numbers: NDArray[np.uint32]
    slots: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.begins)

    def at(self, which: NDArray[np.bool_] | Ints) -> Roots:
        return Roots(*(getattr(self, name)[which] for name in COLUMNS))


@dataclass(frozen=True, eq=False)
class SourceSet:
    """A shard set whose files have all been checked and mapped."""

    directory: Path
    manifest: Manifest
    low: LowOrders
    shards: list[Shard]

    @classmethod
    def open(cls, directory: Path, say: Callable[[str], None] = lambda line: None) -> SourceSet:
        """Opens a set; raises ShardFormatError if files are missing, damaged or contradictory."""
        manifest = read_manifest(directory)
        say(f"checking {directory}")
        vocabulary = manifest.file("vocabulary")
        check_file(directory / vocabulary.name, vocabulary)
        low = LowOrders.open(directory, manifest)
        shards = [
            Shard.open(directory, index, manifest=manifest) for index in range(manifest.shards)
        ]
        require_one_code(shards)
        return cls(directory, manifest, low, shards)

    @property
    def levels(self) -> int:
        return max(self.manifest.order - 2, 0)

    def roots(self, shard: int) -> Roots:
        """Returns the roots of a shard, in stored order; each takes 22 bytes."""
        arrays = self.shards[shard].arrays
        shape = tree_shape(arrays["shape"])
        numbers = np.empty(shape.roots, np.uint32)
        begins, ends = np.empty((2, shape.roots), np.int64)
        kernels.list_roots(
            arrays["tree"].ctypes.data, shape.tree_bits, key_bits_of(shape.pairs), numbers,
            begins, ends,
        )  # fmt: skip
        return Roots(begins, ends, numbers, slots_of(*pairs_of(self.low.arrays, numbers)))

    def roots_in(self, slots: NDArray[np.bool_], shards: Sequence[int]) -> Roots:
        """Returns these shards' roots that are in the chosen slots, ordered as in one shard."""
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

    def count(self, roots: Roots) -> tuple[Ints, Ints]:
        """Counts what is below some roots: (levels, 3) the nodes, n-grams and blanks of every
        level, and (R,) the approximate bytes of each root."""
        counts = np.zeros((self.levels, 3), np.int64)
        found = np.zeros((len(roots), 2), np.int64)
        words = self.manifest.vocabulary_size
        view = self.shards[0].view
        kernels.count_records(
            view[LEVEL:].ctypes.data, roots.begins, int(view[KEY_BITS]), np.empty(words, np.uint32),
            np.empty(words, np.uint64), found, counts,
        )  # fmt: skip
        return counts, found @ np.array([NODE_BYTES, GRAM_BYTES])

    def slot_bytes(self, say: Callable[[str], None] = lambda line: None) -> Ints:
        """Returns (4096,) the approximate bytes under each slot, which a build balances."""
        total = np.zeros(SLOTS, np.int64)
        for shard in range(self.manifest.shards):
            say(f"measuring the slots of shard {shard}")
            roots = self.roots(shard)
            np.add.at(total, roots.slots, self.count(roots)[1])
        return total
