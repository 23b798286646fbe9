"""Estimates an ARPA model from text: runs the stages, and divides the memory among them.
counts -> adjust -> discount -> interpolate -> arpa"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, EstimationError
from dlm.estimate.adjust.kernels import ALL, KEPT
from dlm.estimate.adjust.trie import Trie, TrieBuilder
from dlm.estimate.counts import block, kernels
from dlm.estimate.interpolate.contexts import CONTEXT_BYTES, Interpolation
from dlm.estimate.interpolate.rows import section_rows
from dlm.estimate.provenance import provenance
from dlm.estimate.settings import DEFAULT_FALLBACK, EstimationSettings, EstimationSummary, Fallback
from dlm.estimate.text import DELIMITERS, Reader
from dlm.files import NO_ROOM, scratch_folder, temporary_folder
from dlm.ngram.arpa.writer import ArpaWriter, RowColumns, WordBytes
from dlm.ngram.wordtable import WordTable
from dlm.progress import ProgressReporter
from dlm.spill.column import Column, Memory
from dlm.spill.merge import ahead, merge_to_fan_in, merged_sums
from dlm.units import counted


def discounts(
    counts_of_counts: NDArray[np.integer], order: int, fallback: Fallback | None
) -> tuple[NDArray[np.float32], bool]:
    """Computes one order's discounts for adjusted counts of 1, 2, and 3 or more.

    Args        counts_of_counts  (4,)  how many n-grams have the adjusted count 1, 2, 3, 4
    Returns     (discounts (4,) float32, the first 0; whether they are the fallback)
    Raises      EstimationError  the closed form fails and there is no fallback
    Guarantees  0 <= discounts[j] <= j
    Paper       Chen and Goodman 1998, equation 26, in the float32 arithmetic of lmplz
    """
    n = [np.float32(0), *(np.float32(int(count)) for count in counts_of_counts)]
    fault = ""
    found = np.zeros(4, np.float32)
    for j in (1, 2, 3):
        if n[j] == 0:
            fault = f"no {order}-gram has the adjusted count {j}"
            break
    else:
        n1, n2 = (int(count) for count in counts_of_counts[:2])
        y = n[1] / np.float32(n1 + 2.0 * n2)
        for j in (1, 2, 3):
            found[j] = np.float32(j) - np.float32(j + 1) * y * n[j + 1] / n[j]
            if not 0 <= found[j] <= j:
                fault = f"the discount of {order}-grams with adjusted count {j} would be {found[j]}"
                break
    if not fault:
        return found, False
    if fallback is None:
        raise EstimationError(
            f"order {order}: {fault}, so Kneser-Ney discounts cannot be computed from these counts "
            f"(n-grams with counts 1, 2, 3, 4: {', '.join(str(int(c)) for c in counts_of_counts)}; "
            "expected at least one of each, and fewer of each higher count). The text is small or "
            "repeats itself: remove repeated lines, or pass --discount-fallback"
        )
    return np.array([0.0, *fallback], np.float32), True


MIB = 1 << 20

# The minimum memory besides the interpreter and the compiled code.
MIN_WORKSPACE_BYTES = 24 * MIB

# Compression level of .xz models. They are a tenth smaller than with the fastest level, and take
# two to eight times as long to write.
XZ_PRESET = 6

# Memory not counted elsewhere: text blocks, thread stacks, and what an allocator keeps.
RESERVE_BYTES = 40 * MIB

_M_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in malloc.h


def estimate(
    sources: Sequence[str],
    output: str | os.PathLike[str],
    settings: EstimationSettings,
    *,
    tmp: Path | None = None,
    progress: ProgressReporter | None = None,
) -> EstimationSummary:
    """Estimates an ARPA model from text by interpolated modified Kneser-Ney.

    Args
        sources    text, one sentence per line: plain, .gz, .zst, .xz, .bz2 or parquet files;
                   `-` for standard input
        output     ARPA file, compressed by its suffix; `-` for standard output
        tmp        folder for data beyond the memory limit; by default that of the output
    Raises
        ConfigError      invalid settings
        EstimationError  text with a fault, or too little of it; no space on the disk
    Guarantees
        the same n-grams as KenLM's lmplz, and its values within rounding; see README.md
        the output is written whole and synced, or stays as it was; temporary files have no name
    """
    place = Path(output)
    folder = tmp or (temporary_folder() if str(place) == "-" else place.parent)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; create it, or name another folder with --tmp")
    progress = progress or ProgressReporter(lambda _: None)
    try:
        with ThreadPoolExecutor(settings.threads, thread_name_prefix="dlm-estimate") as pool:
            return _Estimation(sources, place, settings, folder, progress, pool).run()
    except OSError as exc:
        if exc.errno in NO_ROOM:
            what = exc.filename or f"{folder} or {place.parent}"
            raise EstimationError(
                f"no space left for {what} ({exc.strerror}); free some space, or name another "
                "folder with --tmp or --output. The model was not written, and nothing partial is "
                "left"
            ) from exc
        raise


class _Estimation:
    def __init__(
        self,
        sources: Sequence[str],
        output: Path,
        settings: EstimationSettings,
        folder: Path,
        progress: ProgressReporter,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._settings = settings
        self._output = output
        self._folder = folder
        self._progress = progress
        self._pool = pool
        self._reader = Reader(
            sources, skip=settings.skip, column=settings.column, pieces=settings.pieces
        )
        self._sources = sources
        self._table = WordTable([b"<unk>", b"<s>", b"</s>"])
        self._summary = EstimationSummary(self._reader.totals, output=str(output))
        self._workspace = _workspace(settings)
        self._memory = Memory(0, folder)
        self._bucket = max(min(block.BUCKET, self._workspace // 1024), 1 << 10)

    def run(self) -> EstimationSummary:
        settings, progress = self._settings, self._progress
        trie = self._count()
        all_discounts = estimate_discounts(trie.statistics, settings, self._summary, progress)
        work_bytes, chunk, rows = self._divide(trie)
        total = sum(trie.kept)
        done = 0
        comments = provenance(settings, self._summary, self._sources)
        with (
            _target(self._output) as target,
            ArpaWriter(
                target, WordBytes.of(self._table), trie.kept, comments=comments,
                threads=settings.threads, xz_preset=XZ_PRESET,
            ) as writer,
        ):  # fmt: skip
            interpolation = Interpolation(
                trie, all_discounts, self._memory, work_bytes, self._pool, settings.threads, chunk
            )
            for n in range(1, settings.order + 1):
                backoffs: Column | None = None
                probs = interpolation.probs
                if n < settings.order:
                    progress.stage(f"computing probabilities of order {n + 1}")
                    probs = interpolation.step()
                    backoffs = interpolation.backoffs
                else:
                    interpolation.close()
                progress.stage(f"writing order {n}")
                writer.section(self._reported(writer, section_rows(trie, n, probs, backoffs, rows)))
                done += trie.kept[n - 1]
                progress.tell(f"{done:,} of {counted(total, 'n-gram')} written")
                probs.remove()
                trie.counts[n - 1].remove()
                if backoffs is not None:
                    backoffs.remove()
            self._summary.context_ranges = interpolation.ranges
            progress.stage("syncing the file")
        trie.close()
        self._summary.arpa_bytes = writer.file_bytes
        self._summary.spilled_bytes = self._memory.spilled_bytes
        return self._summary

    def _reported(
        self, writer: ArpaWriter, blocks: Iterator[Callable[[], RowColumns]]
    ) -> Iterator[Callable[[], RowColumns]]:
        before = writer.text_bytes
        for read_rows in blocks:
            yield read_rows
            self._progress.at(0, 0, writer.text_bytes - before, "bytes")

    # -------------------------------------------------------------------------- counting

    def _count(self) -> Trie:
        settings = self._settings
        order, threads = settings.order, settings.threads
        self._progress.stage("counting")
        found: list[Column] = []
        # Unused room for ids costs nothing.
        capacity = max(self._workspace // block.bytes_per_token(), 1 << 12)
        tokens = np.empty(capacity, np.uint32)
        n = 0
        state = np.zeros(kernels.STATE, np.int64)
        state[kernels.WORDS], state[kernels.WORD_BYTES] = 3, 5 + 3 + 4
        for text, size in ahead(self._reader.blocks(), 2):
            chars = np.frombuffer(text, np.uint8)
            at = 0
            new_words, new_bytes = 1 << 12, 1 << 17  # 1 << 17 bytes hold the longest word
            while at < size:
                self._table.reserve(new_words, new_bytes)
                room = min(self._tokens_that_fit(), capacity)
                before = at
                at, n = kernels.encode(
                    chars, at, size, DELIMITERS, int(not settings.skip), self._table.slots,
                    self._table.word_begin, self._table.word_bytes, state, tokens[:room], n,
                )  # fmt: skip
                self._table.settle(np.append(state[:2], -1))
                if at == before:
                    # Lines are read whole, so a line may have more new words than there is room
                    # for.
                    end = text.find(b"\n", at, size)
                    line_bytes = (size if end < 0 else end) - at
                    if new_words <= line_bytes // 2:
                        new_words, new_bytes = line_bytes // 2 + 1, new_bytes + line_bytes
                        continue
                    if n == 0:
                        self._too_little("one line of the text")
                    found.append(self._run(tokens[:n]))
                    n = 0
            self._progress.at(*self._reader.progress(), int(state[kernels.TOKENS]), "words")
        totals = self._reader.totals
        totals.lines = int(state[kernels.LINES])
        totals.empty = int(state[kernels.EMPTY])
        totals.words = int(state[kernels.TOKENS])
        if settings.skip:
            totals.lines -= totals.empty
        self._progress.tell(
            f"read {totals.summary(settings.skip)}; "
            f"{counted(len(self._table) - 3, 'different word')}"
        )
        if not found and n == 0:
            raise EstimationError("the text is empty, or all lines were skipped; give other text")
        words = len(self._table)
        known = known_words(settings, self._table)
        room = max(min(1 << 18, self._workspace // (64 * order)), 1 << 10)
        if not found:
            self._progress.stage("sorting n-grams and adjusting counts")
            self._memory.limit_bytes = max(
                self._workspace - self._fixed_bytes() - 8 * n - 12 * order * room, 0
            )
            builder = TrieBuilder(order, n, words, settings.thresholds, known, self._memory, room)
            tokens = tokens[:n]
            for rows in block.counted_keys(tokens, words, order, self._pool, threads, self._bucket):
                builder.add(rows)
            return builder.finish()
        if n:
            found.append(self._run(tokens[:n]))
        del tokens
        self._summary.runs = len(found)
        self._progress.stage(f"merging {len(found)} runs and adjusting counts")
        merging = self._workspace // 3
        found = merge_to_fan_in(found, merging, self._memory)
        most = sum(map(len, found))
        self._memory.limit_bytes = max(
            self._workspace - merging - 12 * order * room - _table_bytes(self._table), 0
        )
        builder = TrieBuilder(order, most, words, settings.thresholds, known, self._memory, room)
        done = 0
        for rows in ahead(merged_sums(found, merging), threads):
            builder.add(rows)
            done += len(rows)
            self._progress.at(done, most, done, "n-grams")
        for run in found:
            run.remove()
        return builder.finish()

    def _fixed_bytes(self) -> int:
        sorting = block.bytes_of_sorting(
            self._bucket, self._settings.order, self._settings.threads, len(self._table)
        )
        return sorting + 2 * _table_bytes(self._table)

    def _tokens_that_fit(self) -> int:
        remaining = self._workspace - self._fixed_bytes()
        if remaining < self._workspace // 8:
            self._too_little(f"a vocabulary of {len(self._table):,} words")
        fit = remaining // block.bytes_per_token()
        return fit if self._settings.block_tokens is None else self._settings.block_tokens

    def _too_little(self, what: str) -> None:
        raise EstimationError(
            f"{what} does not fit in the memory limit, which leaves {self._workspace // MIB:,} MiB "
            "for it; raise --memory"
        )

    def _run(self, tokens: NDArray[np.uint32]) -> Column:
        self._progress.tell(f"sorting {counted(len(tokens), 'n-gram')} to disk")
        run = Column(np.uint32, self._settings.order + 1, memory=self._memory)
        for rows in block.counted_keys(
            tokens, len(self._table), self._settings.order, self._pool, self._settings.threads,
            self._bucket,
        ):  # fmt: skip
            run.append(rows)
        return run

    # --------------------------------------------------------------------- interpolating

    def _divide(self, trie: Trie) -> tuple[int, int, int]:
        """Returns bytes for sums, n-grams per chunk and rows per write; columns get the rest."""
        order = self._settings.order
        sizes = [len(column) for column in trie.words]
        chunk = max(min(1 << 18, self._workspace // 1024), 1 << 10)
        rows = max(min(1 << 15, self._workspace // 4096), 1 << 9)
        threads = self._settings.threads
        buffers = _table_bytes(self._table) + chunk * 4 * 8 * (threads + 1)
        buffers += rows * (24 * (1 + order // 2) + 4 * (order + 4)) * (2 * threads + 8)
        remaining = max(self._workspace - buffers - 16 * sizes[0], self._workspace // 4)
        # The most bytes that an order needs for its sums, and for the ranks that are searched.
        most = max([0, *(CONTEXT_BYTES * s + 4 * q for q, s in pairwise(sizes[:-1]))])
        work = min(most, remaining // 2)
        self._memory.limit_bytes = remaining - work
        # Data that is read sequentially may as well be on disk.
        for column in [*reversed(trie.counts), *reversed(trie.words), *reversed(trie.children)]:
            if self._memory.used_bytes <= self._memory.limit_bytes:
                break
            column.spill()
        return work, chunk, rows


def known_words(settings: EstimationSettings, table: WordTable) -> NDArray[np.uint8] | None:
    if settings.vocabulary is None:
        return None
    known = np.zeros(len(table), np.uint8)
    known[:3] = 1
    known[table.ids_of(sorted(settings.vocabulary))] = 1
    return known


def estimate_discounts(
    statistics: NDArray[np.int64],
    settings: EstimationSettings,
    summary: EstimationSummary,
    progress: ProgressReporter,
) -> list[NDArray[np.float32]]:
    """Computes and reports each order's discounts, and notes them with the counts in the summary;
    EstimationError if an order has none."""
    summary.counts = statistics[:, KEPT].tolist()
    summary.counts_before_pruning = statistics[:, ALL].tolist()
    out = []
    for n, (whole, kept) in enumerate(
        zip(summary.counts_before_pruning, summary.counts, strict=True), 1
    ):
        own, fell_back = discounts(statistics[n - 1, :4], n, settings.fallback)
        out.append(own)
        summary.discounts.append([float(d) for d in own[1:]])
        if fell_back:
            summary.fallback_orders.append(n)
        progress.tell(
            f"order {n}: {counted(kept, 'n-gram')}"
            + (f" of {whole:,}" if whole != kept else "")
            + f", discounts {own[1]:.6f} {own[2]:.6f} {own[3]:.6f}"
            + (" (fallback)" if fell_back else "")
        )
    return out


def _target(output: Path) -> AbstractContextManager[Path | IO[bytes]]:
    if str(output) != "-":
        return contextlib.nullcontext(output)
    return os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)


def _table_bytes(table: WordTable) -> int:
    return table.slots.nbytes + table.word_begin.nbytes + table.word_bytes.nbytes


def _workspace(settings: EstimationSettings) -> int:
    if settings.workspace_bytes is not None:
        return settings.workspace_bytes
    _give_memory_back()
    _load_code(settings.threads)
    resident = resident_bytes()
    workspace = settings.memory_bytes - resident - RESERVE_BYTES
    if workspace < MIN_WORKSPACE_BYTES:
        least = resident + RESERVE_BYTES + MIN_WORKSPACE_BYTES
        given = settings.memory_bytes
        unit = f" (no unit means bytes; did you mean {given}G?)" if given < 1024 else ""
        raise ConfigError(
            f"--memory is {given:,} bytes{unit}; expected at least {-(-least >> 20)}M, of which "
            f"the interpreter and the compiled code take {resident >> 20}M"
        )
    return workspace


def _load_code(threads: int) -> None:
    with scratch_folder(None, "dlm-first-run") as folder:
        text = folder / "text"
        text.write_bytes(b"a b\n" * 30 + b"b a c\n" * 30)
        # Small blocks make several runs, so the code that merges runs is loaded, too.
        settings = EstimationSettings(
            order=3, fallback=DEFAULT_FALLBACK, workspace_bytes=8 * MIB, block_tokens=100,
            threads=threads,
        )  # fmt: skip
        estimate([str(text)], Path(folder) / "model.arpa", settings)


def _give_memory_back() -> None:
    """Makes the C library return large arrays to the system as soon as they are freed; otherwise it
    keeps freed arrays of up to 32 MiB, which no limit accounts for."""
    with contextlib.suppress(OSError, AttributeError):  # no mallopt in this library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 * MIB)


def resident_bytes() -> int:
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
