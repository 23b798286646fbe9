"""The memory and disk that a build needs, and how a memory limit is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dlm.errors import ConfigError
from dlm.spill.sorter import MIN_MEMORY_BYTES, Plan, SortedRuns, Sorter

if TYPE_CHECKING:
    from dlm.kenlm.reader import NgramReader

MIB = 1 << 20
PARSER_BYTES = 64 * MIB  # for the text and arrays of ArpaReader
WORD_BYTES = 300  # per word, for the reader's vocabulary and the arrays of the 1-grams
ROOT_BYTES = 30  # per root of a shard, for its number, and the size and place of its record
LEAST_BYTES = 160 * MIB  # for everything else


@dataclass(frozen=True)
class Budget:
    """How a memory limit is divided.

    durable        spill to disk, and keep a journal; else everything stays in memory
    sort_bytes     memory of each sorter, at least 8 MiB
    read_bytes     memory for the runs that are being read, at least 8 MiB
    block_rows     rows that a kernel takes or returns at once
    capacity_rows  rows sorted at a time, instead of what sort_bytes allows; for tests
    """

    durable: bool
    sort_bytes: int
    read_bytes: int
    block_rows: int = 1 << 16
    capacity_rows: int | None = None
    threads: int = 2

    @classmethod
    def in_memory(cls, threads: int = 2) -> Budget:
        return cls(False, 8 * MIB, 8 * MIB, threads=threads)

    @classmethod
    def of(cls, memory_bytes: int, counts: Sequence[int], threads: int, shards: int = 1) -> Budget:
        """Divides the limit for a model with these counts; raises ConfigError if it is too low."""
        least = least_bytes(counts, shards, threads)
        fixed = least - LEAST_BYTES
        if memory_bytes < least:
            raise ConfigError(
                f"--memory is {memory_bytes:,} bytes; expected at least {least:,}, for "
                f"{counts[0]:,} words and the word pairs in {min(threads, shards)} of {shards} "
                "shards at once"
            )
        if PARSER_BYTES + fixed + in_memory_bytes(counts) <= memory_bytes:
            return cls.in_memory(threads)
        usable = memory_bytes - fixed - PARSER_BYTES
        read = max(usable // 10, MIN_MEMORY_BYTES)
        return cls(True, max(usable // 2, MIN_MEMORY_BYTES), read, threads=threads)

    def sorter(self, folder: Path, name: str, width: int, key: int, most: int) -> Sorter:
        sorter = Sorter(folder, width, key, self.sort_bytes, self.threads, name=name)
        capacity, fan_in = sorter.plan.capacity_rows, sorter.plan.fan_in
        if self.durable:
            capacity = min(self.capacity_rows or capacity, capacity, max(most, 1))
            fan_in = min(fan_in, Plan.of(self.read_bytes, width, self.threads).fan_in)
            if self.capacity_rows is not None:
                fan_in = min(fan_in, 3)
        else:
            capacity = min(max(most, 1), 2**32 - 1)
        sorter.plan = replace(sorter.plan, capacity_rows=capacity, fan_in=fan_in)
        return sorter

    def finish(self, sorter: Sorter) -> SortedRuns:
        runs = sorter.finish(durable=self.durable)
        if not self.durable or not runs.rows:
            return runs
        manifest = runs.manifest()
        runs.close()
        return SortedRuns.open(sorter.directory, manifest, self.read_bytes, self.threads)


def credible_counts(reader: NgramReader) -> list[int]:
    """The counts of the header, limited to what the file's bytes can hold."""
    counts = list(reader.counts)
    place = Path(reader.path)
    if reader.compression == "plain" and place.is_file():
        size = place.stat().st_size
        counts = [min(count, size // (2 * k + 2)) for k, count in enumerate(counts, 1)]
    return counts


def least_bytes(counts: Sequence[int], shards: int = 1, threads: int = 1) -> int:
    """Minimum memory of a build: for all words and, per thread, for one shard's roots (2-grams)."""
    roots = sum(counts[1:2]) * min(threads, shards) // shards
    return LEAST_BYTES + WORD_BYTES * counts[0] + ROOT_BYTES * roots


def in_memory_bytes(counts: Sequence[int]) -> int:
    """The approximate bytes of a model's n-grams if nothing is spilled."""
    rows = sum(count * (4 * (k + 2) + 8 + 44) for k, count in enumerate(counts, 1) if k > 1)
    return rows + ROOT_BYTES * sum(counts[1:2])


def spill_bytes(counts: Sequence[int]) -> int:
    """Returns the approximate maximum bytes that a build spills to disk; blanks are not counted.

    N-grams are first stored in two sort orders; later, n-grams and nodes are stored twice.
    """
    twice = sum(2 * count * 4 * (k + 2) for k, count in enumerate(counts, 1) if k > 1)
    return int(
        1.05 * max(twice, sum(48 * min(pair) + 24 * pair[1] for pair in pairwise(counts[1:])))
    )


def output_bytes(counts: Sequence[int]) -> int:
    return 10 * sum(counts) + 16 * counts[0]
