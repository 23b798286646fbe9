"""Sorts more rows than fit in memory: writes sorted runs to disk, and merges them as they are read.

    with Sorter(folder, width=5, key=3, memory_bytes=1 << 30) as sorter:
        sorter.add(rows)
        with sorter.finish() as runs:
            for block in runs.blocks(100_000):
                ...

A row is `width` numbers of 32 bits, sorted by the first `key` of them as unsigned numbers. Other
values are passed as the bits of such a number (`float32_column.view(np.uint32)`).

Sorting in memory leaves rows in place: the leading bits of each key are packed into one number
above the row's place, numpy sorts the numbers, and groups that these bits do not distinguish are
sorted by the next bits (`kernels.refine`). That takes 8 bytes per row; rows move once, afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlm.errors import ConfigError, SpillError
from dlm.resources import Closeable
from dlm.spill.arrays import pages, row_pages
from dlm.spill.merge import Chunks, ahead, buffers_of_run, merged, smallest_neighbours
from dlm.spill.runs import (
    ADVICE,
    FORMAT_NAME,
    FORMAT_VERSION,
    RUN_NAME,
    Run,
    RunReader,
    discard,
    parse_manifest,
    publish,
    write_run,
)
from dlm.spill.sort import Packed, Rows, gathered, sort_order

__all__ = ["MIN_MEMORY_BYTES", "Plan", "Run", "SortedRuns", "Sorter", "discard"]

MIN_MEMORY_BYTES = 8 << 20
MAX_WIDTH = 1024
MAX_FAN_IN = 256  # runs merged at once: each is an open file
BLOCK_BYTES = 256 << 10  # bytes of rows under one checksum; no less is read at once
MAX_CHUNK_BYTES = 8 << 20  # bytes of merged rows that are passed on at once
MAX_READ_BLOCKS = 16  # blocks read ahead from each run, if memory allows
SLACK_BYTES = 512 << 10  # bytes for everything except arrays: threads, paths, file objects


@dataclass(frozen=True)
class Plan:
    """How many rows to sort at once, to put under one checksum, and to pass on at once (a multiple
    of `block_rows`); and how many runs to merge at once, at least 2. All fit in the memory."""

    capacity_rows: int
    block_rows: int
    chunk_rows: int
    fan_in: int

    @classmethod
    def of(cls, memory_bytes: int, width: int, threads: int) -> Plan:
        """Makes the plan for a memory limit; raises `ConfigError` if the limit is too low."""
        if memory_bytes < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"sorting needs at least {MIN_MEMORY_BYTES:,} bytes of memory, but the limit is "
                f"{memory_bytes:,}; raise the limit"
            )
        row_bytes = 4 * width
        block_rows = BLOCK_BYTES // row_bytes
        block_bytes = block_rows * row_bytes
        chunk_blocks = max(1, min(memory_bytes // 16, MAX_CHUNK_BYTES) // block_bytes)
        left = memory_bytes - SLACK_BYTES - 2 * chunk_blocks * block_bytes
        return cls(
            capacity_rows=min(left // (row_bytes + 8), 2**32 - 1),
            block_rows=block_rows,
            chunk_rows=chunk_blocks * block_rows,
            fan_in=min(left // (buffers_of_run(threads) * block_bytes), MAX_FAN_IN),
        )

    def read_blocks(self, runs: int) -> int:
        """Returns the blocks to read at once from each run; fewer runs have more memory each."""
        return max(1, min(self.fan_in // max(runs, 1), MAX_READ_BLOCKS))


def _check_shape(width: int, key: int, threads: int) -> None:
    if not 1 <= key <= width <= MAX_WIDTH:
        raise ConfigError(
            f"the rows have width {width} and a key of {key} columns; expected 1 <= key <= width "
            f"<= {MAX_WIDTH}"
        )
    if threads < 1:
        raise ConfigError(f"threads is {threads}; expected 1 or more")


class Sorter(Closeable):
    """Takes rows in any order and gives them back sorted, within a limit of memory.

    Args
        directory     where runs are written if the rows do not fit; created if missing. Only one
                      sorter of a `name` may write there at a time
        width, key    columns of a row, and how many of them, from the first, are its key
        memory_bytes  limit, at least 8 MiB; suggested: a quarter of free memory. Counted: the rows
                      held, the order they are sorted into, every buffer for writing, reading and
                      merging. Not counted: the interpreter, the arrays of the caller, the page
                      cache
        threads       1 or more; with 1, everything is done by the caller's thread
        name          beginning of the runs' names, to allow several sorts in one folder
    Raises
        ConfigError (also where the folder has runs of this name already), OSError
    Guarantees
        Rows with equal keys keep the order in which they were added.
        A file under the name of a run is whole and synced; a killed process leaves only
        whole runs and files named `.*.partial`, which the next sorter of the name removes.
    Edge cases
        leaving `with` by an error, or before finish   the runs are removed
        after finish                                   the runs belong to the SortedRuns
        an error in add or finish                      only `close` may follow
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        width: int,
        key: int,
        memory_bytes: int,
        threads: int = 2,
        *,
        name: str = "rows",
    ) -> None:
        _check_shape(width, key, threads)
        if not RUN_NAME.fullmatch(f"{name}-000000.run"):
            raise ConfigError(f"{name!r} is not a valid name; use A-Z a-z 0-9 . and _")
        self.directory = Path(directory)
        self.width = width
        self.key = key
        self.threads = threads
        self.name = name
        self.plan = Plan.of(memory_bytes, width, threads)
        self._runs: list[Run] = []
        self._written = 0
        self._used = 0
        self._rows: Rows | None = None
        self._packed: Packed | None = None
        self._finished = False
        self._handed_over = False
        self._publisher: ThreadPoolExecutor | None = None
        self._publishing: Future[None] | None = None
        self.directory.mkdir(parents=True, exist_ok=True)
        if any(self.directory.glob(f"{name}-*.run")):
            raise ConfigError(
                f"{self.directory} already has runs named {name}-*.run; open them by their "
                "manifest, or remove them with spill.runs.discard"
            )
        discard(self.directory, name)  # the files of a killed sorter

    def add(self, rows: Rows) -> None:
        """Copies rows, (n, width) uint32; writes a sorted run whenever the memory is full. OSError
        says how much space is needed if a disk is full."""
        if self._finished:
            raise ValueError("rows were added after finish() or close(); add them before")
        if rows.dtype != np.uint32 or rows.ndim != 2 or rows.shape[1] != self.width:
            raise ValueError(
                f"the rows are {rows.dtype} of shape {rows.shape}; expected uint32 of shape (n, "
                f"{self.width})"
            )
        done = 0
        while done < len(rows):
            if self._rows is None or self._packed is None:
                # Nothing is resident until it is written to, so a small sort stays small.
                self._rows = row_pages(self.plan.capacity_rows, self.width)
                self._packed = pages(self.plan.capacity_rows, np.uint64)
            if self._used == len(self._rows):
                self._spill()
            taken = min(len(self._rows) - self._used, len(rows) - done)
            self._rows[self._used : self._used + taken] = rows[done : done + taken]
            self._used += taken
            done += taken

    def finish(self, durable: bool = False) -> SortedRuns:
        """Sorts the remaining rows, and merges runs until all can be read at once. After this call,
        no rows may be added.

        Args  durable  write runs even if everything fits in memory, so that there is a manifest
        Cost  if the R runs exceed the plan's fan-in F, all rows are read and written about
              log_F R times, the smallest runs first
        """
        if self._finished:
            raise ValueError("finish() was called twice, or after close(); call it once")
        memory: tuple[Rows, Packed, int] | None = None
        if self._used and (self._runs or durable):
            self._spill()
        elif self._used and self._rows is not None and self._packed is not None:
            rows, packed = self._rows[: self._used], self._packed[: self._used]
            memory = (rows, packed, sort_order(rows, self.key, packed, self.threads))
        self._settle()
        self._rows = self._packed = None  # makes room for the merge buffers
        while len(self._runs) > self.plan.fan_in:
            self._merge_some()
        runs = SortedRuns(
            self.directory, self.width, self.key, self._runs, self.plan, self.threads, memory
        )
        self._handed_over = True
        self.close()
        return runs

    def close(self) -> None:
        """Frees the memory; removes the runs that no SortedRuns has taken over."""
        self._finished = True
        self._rows = self._packed = None
        if self._publisher is not None:
            self._publisher.shutdown(wait=True)
        self._publisher = self._publishing = None
        if not self._handed_over:
            discard(self.directory, self.name)
            self._handed_over = True

    def _spill(self) -> None:
        assert self._rows is not None
        assert self._packed is not None
        rows, packed = self._rows[: self._used], self._packed[: self._used]
        place_bits = sort_order(rows, self.key, packed, self.threads)
        chunks = gathered(rows, packed, place_bits, self.plan.chunk_rows)
        self._runs.append(self._write(len(rows), ahead(chunks, self.threads)))
        self._used = 0

    def _merge_some(self) -> None:
        """Merges the smallest neighbouring runs into one run, as `smallest_neighbours` chooses."""
        chosen = smallest_neighbours([run.rows for run in self._runs], self.plan.fan_in)
        old = SortedRuns(
            self.directory, self.width, self.key, self._runs[chosen], self.plan, self.threads
        )
        run = self._write(old.rows, old.blocks(self.plan.chunk_rows))
        self._settle()
        self._runs[chosen] = [run]
        old.remove()

    def _write(self, rows: int, chunks: Chunks) -> Run:
        path = self.directory / f"{self.name}-{self._written:06d}.run"
        self._written += 1
        with contextlib.closing(chunks):
            run, written = write_run(path, self.width, self.key, rows, self.plan.block_rows, chunks)
        try:
            self._settle()
        except BaseException:
            written.discard()
            raise
        if self.threads > 1:
            self._publisher = self._publisher or ThreadPoolExecutor(1)
            self._publishing = self._publisher.submit(publish, written)
        else:
            publish(written)
        return run

    def _settle(self) -> None:
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.result()


class SortedRuns(Closeable):
    """Rows in order, in memory or in runs on disk that can be merged at once.

    Made by `Sorter.finish` or, from a manifest, by `SortedRuns.open`. Leaving `with` closes the
    runs; their files stay until `remove`.
    """

    def __init__(
        self,
        directory: Path,
        width: int,
        key: int,
        runs: Sequence[Run],
        plan: Plan,
        threads: int,
        memory: tuple[Rows, Packed, int] | None = None,
    ) -> None:
        self.directory = directory
        self.width = width
        self.key = key
        self.runs = tuple(runs)
        self.rows = sum(run.rows for run in runs) + (len(memory[0]) if memory else 0)
        self._plan = plan
        self._threads = threads
        self._memory = memory
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        memory_bytes: int,
        threads: int = 2,
    ) -> SortedRuns:
        """Opens the runs of a `manifest` that another process left; reads 8 bytes of every block.

        Raises  SpillError   a run is missing, damaged or not the one in the manifest. This call
                             checks the header and every checksum; reading checks the rows
                ConfigError  memory_bytes is too low to merge the runs
        """
        folder = Path(directory)
        width, key, runs = parse_manifest(folder, manifest)
        _check_shape(width, key, threads)
        plan = Plan.of(memory_bytes, width, threads)
        if len(runs) > plan.fan_in:
            raise ConfigError(
                f"{memory_bytes:,} bytes of memory are enough to merge {plan.fan_in} runs, but "
                f"{folder} has {len(runs)}; use the memory limit with which the runs were written"
            )
        for run in runs:
            reader = RunReader(folder, run, width, key, plan.block_rows)
            with contextlib.closing(reader):
                if (found := reader.digest()) != run.xxh3_64:
                    raise SpillError(
                        f"{folder / run.name}, a sorted run, has checksum {found}; expected "
                        f"{run.xxh3_64}: the file holds another run. {ADVICE}"
                    )
        return cls(folder, width, key, runs, plan, threads)

    def manifest(self) -> dict[str, Any]:
        """Returns what `open` needs to find runs, for JSON; ValueError if rows are in memory."""
        if self._memory is not None:
            raise ValueError("sorted rows in memory have no manifest; call finish(durable=True)")
        return {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "width": self.width,
            "key": self.key,
            "rows": self.rows,
            "runs": [asdict(run) for run in self.runs],
        }

    def blocks(self, max_rows: int) -> Chunks:
        """Yields all rows in order, a block at a time; each call begins at the first row.

        Args     max_rows  maximum rows of a block; memory_bytes may require smaller blocks, and the
                           last block may be smaller
        Returns  (n, width) uint32, n >= 1. A block is overwritten when the next is taken: copy rows
                 to keep them
        Raises   SpillError  when a damaged block is reached
        Cost     sequential reads; the next block is merged while the caller uses this one. Each
                 iterator that is not exhausted or closed holds its own memory_bytes
        """
        if self._closed:
            raise ValueError("the sorted runs are closed; read them before close()")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; expected 1 or more")
        chunk_rows = min(max_rows, self._plan.chunk_rows)
        if self._memory is not None:
            chunks = gathered(*self._memory, chunk_rows)
        else:
            block_rows = self._plan.block_rows
            readers = [
                partial(RunReader, self.directory, run, self.width, self.key, block_rows)
                for run in self.runs
            ]
            buffer_rows = self._plan.read_blocks(len(readers)) * block_rows
            chunks = merged(readers, self.width, self.key, chunk_rows, buffer_rows, self._threads)
        return ahead(chunks, self._threads)

    def close(self) -> None:
        self._closed = True
        self._memory = None

    def remove(self) -> None:
        self.close()
        for run in self.runs:
            (self.directory / run.name).unlink(missing_ok=True)
