"""Memory and disk: what is there, what a model needs, and how a limit is divided."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlm.errors import ConfigError
from dlm.extsort import MIN_MEMORY_BYTES, Plan, SortedRuns, Sorter
from dlm.ngram.arpa import ArpaReader

MIB = 1 << 20
PARSER_BYTES = 64 * MIB  # text and arrays of ArpaReader
WORD_BYTES = 300  # a word in the vocabulary of the reader, and the arrays of the 1-grams
LEAST_BYTES = 160 * MIB  # beside the vocabulary
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\Z", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size as a person writes it: 800M, 1.5G, 2GiB; units are powers of 1,024."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no size; write for example 800M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or that of its control group."""
    found = [
        int(line.split()[1]) << 10
        for line in _read("/proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            places = [("/sys/fs/cgroup", "memory.max", "memory.current")]
        elif "memory" in controllers.split(","):
            places = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")]
        else:
            continue
        for root, limit, usage in places:
            path = Path(root + group)
            while path.is_relative_to(root):
                most, used = _read(path / limit).strip(), _read(path / usage).strip()
                if most.isdigit() and used.isdigit():
                    # Pages of files count as used, though they are given back when asked for.
                    cached = 0
                    for row in _read(path / "memory.stat").splitlines():
                        name, _, number = row.partition(" ")
                        if name in ("total_inactive_file", "inactive_file"):
                            cached = max(cached, int(number))
                    found.append(max(int(most) - int(used) + cached, 0))
                path = path.parent
    return min(found, default=1 << 30)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Budget:
    """How a limit of memory is divided.

    durable        spill to disk, and keep a journal; else everything stays in memory
    sort_bytes     of a sorter; read_bytes  of runs that are read; of each at least 8 MiB
    block_rows     rows that a kernel gets or gives at once
    capacity_rows  sorted at once, if not what sort_bytes allows; for tests
    threads        1 or more
    """

    durable: bool
    sort_bytes: int
    read_bytes: int
    block_rows: int = 1 << 16
    capacity_rows: int | None = None
    threads: int = 2

    @classmethod
    def of(cls, memory_bytes: int, counts: Sequence[int], threads: int) -> Budget:
        """The budget of a model with these counts under a limit; `ConfigError` where too small."""
        fixed = WORD_BYTES * counts[0]
        least = least_bytes(counts)
        if memory_bytes < least:
            raise ConfigError(
                f"--memory of {memory_bytes:,} bytes is too little: {counts[0]:,} words need "
                f"{least:,} at least"
            )
        if PARSER_BYTES + fixed + in_memory_bytes(counts) <= memory_bytes:
            return cls(False, 8 * MIB, 8 * MIB, threads=threads)
        usable = memory_bytes - fixed - PARSER_BYTES
        read = max(usable // 10, MIN_MEMORY_BYTES)
        return cls(True, max(usable // 2, MIN_MEMORY_BYTES), read, threads=threads)

    def sorter(self, folder: Path, name: str, width: int, key: int, most: int) -> Sorter:
        """A sorter of at most `most` rows, whose runs can be read in read_bytes."""
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
        """The runs of a sorter, to be read in read_bytes."""
        runs = sorter.finish(durable=self.durable)
        if not self.durable or not runs.rows:
            return runs
        manifest = runs.manifest()
        runs.close()
        return SortedRuns.open(sorter.directory, manifest, self.read_bytes, self.threads)


def credible_counts(reader: ArpaReader) -> list[int]:
    """The counts of the header, but no more than the bytes of the file can hold."""
    counts = list(reader.counts)
    place = Path(reader.path)
    if reader.compression == "plain" and place.is_file():
        size = place.stat().st_size
        counts = [min(count, size // (2 * k + 2)) for k, count in enumerate(counts, 1)]
    return counts


def least_bytes(counts: Sequence[int]) -> int:
    """The lowest limit under which a model with these counts can be sharded."""
    return LEAST_BYTES + WORD_BYTES * counts[0]


def in_memory_bytes(counts: Sequence[int]) -> int:
    """Bytes that the n-grams of a model take if nothing is spilled, about."""
    return sum(count * (4 * (k + 2) + 8 + 44) for k, count in enumerate(counts, 1) if k > 1)


def spill_bytes(counts: Sequence[int]) -> int:
    """Bytes on disk that the n-grams of a model take at most while it is sharded, about.

    While they are sorted, those of one order stand twice; later, at most 60 bytes stand for each
    n-gram above order 2: the n-gram and its node, before and after they are put in shards. Blanks
    are not known beforehand.
    """
    once = [count * 4 * (k + 2) for k, count in enumerate(counts, 1) if k > 1]
    return max(int(1.2 * (sum(once) + max(once, default=0))), 60 * sum(counts[2:]))


def output_bytes(counts: Sequence[int]) -> int:
    """Bytes of a shard set, about."""
    return 12 * sum(counts) + 16 * counts[0]


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Raises `ConfigError` unless so much is free where `folder` is."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{what} needs about {needed:,} bytes in {os.fspath(folder)}, and {free:,} are free "
            "there; free room, or give another place with --output or --tmp"
        )
