"""Runs the stages of the streaming builder in order, and writes the files of a shard set."""

from __future__ import annotations

import functools
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.files import scratch_folder, sync_folder
from dlm.index import layout
from dlm.index.coding import ANY, Coding, ValueHistogram
from dlm.index.layout import FileEntry
from dlm.index.making import stages
from dlm.index.making.budget import Budget, credible_counts
from dlm.index.making.files import Columns, write_parts
from dlm.index.making.pack import BitStream, TreeColumns, TreePacker
from dlm.index.making.stages import Context
from dlm.index.making.work import Journal, RowReader, Work
from dlm.index.packed import kernels as packed
from dlm.index.packed.columns import (
    BACKOFF_BITS,
    bits_of,
    probs_of,
    room,
)
from dlm.index.packed.low import (
    ALL_FLAGS,
    LOW_SHAPE,
    NOT_EXTENDED,
    ONE_FLAG,
    mirrored,
    pack_words,
)
from dlm.index.packed.record_kernels import WIDTH_BITS
from dlm.index.packed.tree import LevelCode
from dlm.ngram.partition import balanced_slot_table
from dlm.ngram.vocab import UNK_ID
from dlm.progress import ProgressReporter
from dlm.spill.column import Column

if TYPE_CHECKING:
    from dlm.kenlm.reader import NgramReader

U32 = np.uint32
U64 = np.uint64
I64 = np.int64
F32 = np.float32


def build(
    reader: NgramReader,
    folder: Path,
    spill: Path,
    shards: int,
    coding: Coding,
    budget: Budget,
    *,
    key: dict[str, Any] | None = None,
    slot_load: NDArray[np.int64] | None = None,
    slots: NDArray[np.uint16] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Writes the files of a shard set except the manifest; returns the manifest's content.

    Args  reader  a fresh reader of a model that passed `stages.check_header`
          folder  folder for the files and the journal
          spill   folder for everything else: empty, or as a killed build left it
          key     identifies a build that can resume; if None, no journal is kept
          slots   (4096,) the shard of each slot; None balances them
    """
    journal = Journal(folder, key if budget.durable else None)
    work = Work(spill if budget.durable else None)
    resumable = budget.durable and key is not None
    resume(journal if resumable else None, work, folder, spill, budget, say)
    c = Context(work, budget, coding, ProgressReporter(say), spill)
    try:
        if "read" not in journal.done:
            c.progress.stage(f"reading {reader.path}", sum(reader.counts), "n-grams")
            stages.read(reader, credible_counts(reader), c)
            work.info["source"] = source_of(reader)
            journal.save("read", work)
        reader.close()
        stages.join(c, journal)
        stages.raise_faults(c, reader.path)
        if "words" not in journal.done:
            finish_words(c)
            journal.save("words", work)
        if slots is None:
            load = work.array("load-2") if slot_load is None else slot_load
            slots = balanced_slot_table(load, shards)
        if "codes" not in journal.done:
            stages.code_levels(c)
            journal.save("codes", work)
        stages.route(c, slots, shards, journal)
        _write_files(folder, shards, c, journal)
    finally:
        work.close_runs()
    info = work.info
    return {
        "model": info["model"],
        "order": c.order,
        "counts": list(c.counts),
        "blanks": list(info["blanks"]),
        "unk_in_model": info["unk_in_model"],
        "encoding": coding.name,
        "slots": slots.tolist(),
        "files": info["files"],
        "quantised_from": info["quantised_from"],
        "source": info["source"],
    }


def resume(
    journal: Journal | None,
    work: Work,
    folder: Path,
    spill: Path,
    budget: Budget,
    say: Callable[[str], None],
) -> None:
    """Restores what an earlier build finished, or, if `journal` is None or unusable, removes it."""
    problem = None
    if journal is not None:
        problem = journal.load(work, budget) or _files_problem(folder, work)
        if problem is not None:
            journal.forget(work)
            say(f"cannot resume the earlier build: {problem}; starting over")
        elif journal.done:
            say(f"resuming an earlier build after {journal.done[-1]}")
            return
    for path in [*spill.iterdir(), *folder.iterdir()]:
        if path.is_dir() and path != spill:
            shutil.rmtree(path)
        elif path != spill:
            path.unlink()


def rebuild(
    source: stages.NgramSource, slots: NDArray[np.uint16], shards: int, coding: Coding
) -> Iterator[tuple[str, Columns]]:
    """Yields the columns of every file of a model with these slots, in the manifest's order.

    One file's columns stay in memory until the next file is requested; nothing is written.

    Trusts  no n-gram of `source` is repeated or lacks its prefix
    """
    with scratch_folder(None, "dlm-rebuild") as folder:  # a folder for sorters, which stays empty
        silent = ProgressReporter(lambda line: None)
        c = Context(Work(None), Budget.in_memory(), coding, silent, folder)
        journal = Journal(folder, None)
        try:
            stages.read(source, source.counts, c)
            stages.join(c, journal)
            finish_words(c)
            stages.code_levels(c)
            stages.route(c, slots, shards, journal)
            for file in _files(c, shards, journal):
                yield layout.file_name(file.kind, file.index), file.make()
        finally:
            c.work.close_runs()


def source_of(reader: NgramReader) -> dict[str, Any]:
    """The manifest's fields about a model's source file, known once it is read."""
    return {**reader.source_facts, "comments": list(reader.comments)}


def _files_problem(folder: Path, work: Work) -> str | None:
    for entry in work.info.get("files", []):
        path = folder / Path(entry["name"]).name
        if not path.is_file() or layout.file_checksum(path) != entry["xxh3_128"]:
            return f"{path} has changed since it was written"
    return None


@dataclass(frozen=True)
class _File:
    kind: str
    index: int | None
    numbers: tuple[int, int, int]  # n-grams, blanks, nodes
    make: Callable[[], Columns]  # may run in any thread


def _files(c: Context, shards: int, journal: Journal) -> Iterator[_File]:
    counts, blanks = c.counts, c.work.info["blanks"]

    def missing(kind: str, index: int | None = None) -> bool:
        return layout.file_name(kind, index) not in journal.done

    if missing("vocabulary"):
        yield _File("vocabulary", None, (0, 0, 0), lambda: vocabulary_columns(c))
    if missing("low_orders"):
        numbers = sum(counts[:2]), sum(blanks[:2]), 0
        yield _File("low_orders", None, numbers, lambda: low_columns(c))
    each = [c.work.array(f"shard-counts-{k}") for k in range(2, c.order)]
    with ShardLevels(c, shards, each) as levels:
        for index in range(shards):
            if not missing("shard", index):
                levels.skip(index)
                continue
            nodes, grams, blank = (int(sum(x[index, i] for x in each)) for i in range(3))
            make = functools.partial(levels.columns, index, levels.rows(index))
            yield _File("shard", index, (grams - blank, blank, nodes), make)


def _write_files(folder: Path, shards: int, c: Context, journal: Journal) -> None:
    work = c.work
    files = [FileEntry(**entry) for entry in work.info.get("files", [])]

    def write(file: _File, coming: Future[Columns]) -> None:
        name = layout.file_name(file.kind, file.index)
        c.progress.tell(f"writing {name}")
        size, digest = write_file(folder / name, file.kind, coming.result(), work)
        files.append(FileEntry(file.kind, file.index, name, size, digest, *file.numbers))
        work.info["files"] = [asdict(entry) for entry in files]
        sync_folder(folder)
        journal.save(name, work)

    # Some files are made while the previous one is written.
    with ThreadPoolExecutor(c.budget.threads) as pool:
        coming: deque[tuple[_File, Future[Columns]]] = deque()
        for file in _files(c, shards, journal):
            coming.append((file, pool.submit(file.make)))
            if len(coming) > c.budget.threads:
                write(*coming.popleft())
        while coming:
            write(*coming.popleft())


def write_file(path: Path, kind: str, columns: Columns, work: Work) -> tuple[int, str]:
    """Calls `write_parts`, then removes the columns that are not in `work.columns`."""
    written = write_parts(path, kind, columns)
    for _, parts in columns.values():
        for part in parts:
            if isinstance(part, Column) and part not in work.columns.values():
                part.remove()
    return written


def finish_words(c: Context) -> None:
    """Makes flags and values of the 1-grams, and the model's id before and after quantisation."""
    work, info = c.work, c.work.info
    prob, backoff = work.array("word-prob"), work.array("word-backoff")
    extended = np.zeros(c.words, np.bool_)
    if c.order > 1:
        extended = (backoff != 0) | (work.array("pair-sizes") > 0)
        if not info["unk_in_model"]:
            extended[UNK_ID] = True
    work.drop("word-prob")
    work.drop("word-backoff")
    work.keep("word-values", np.stack([prob, backoff]).T)
    work.keep("word-extended", extended)

    digest = _words_digest(c)
    sums: list[list[int]] = info["sums"]
    own = digest.copy()
    for count, pair in zip(c.counts, sums, strict=True):
        for number in (count, *pair):
            own.update(int(number).to_bytes(8, "little"))
    info["model"], info["quantised_from"] = str(own.hexdigest()), None
    if c.coding.bits is not None:
        quantised = info.get("quantised_sums", {})
        for k, count in enumerate(c.counts, 1):
            for number in (count, *(sums[0] if k == 1 else quantised[str(k)])):
                digest.update(int(number).to_bytes(8, "little"))
        info["quantised_from"], info["model"] = info["model"], str(digest.hexdigest())
    for k in range(1, c.order + 1):
        for what in ("prob", "backoff"):
            work.drop(f"{what}-values-{k}")
            work.drop(f"{what}-counts-{k}")


def _words_digest(c: Context) -> Any:
    """Begins the hash of a model id: every word, preceded by its length in eight bytes."""
    text = c.work.array("words")
    begin = np.append(0, np.flatnonzero(text == ord("\n")) + 1)
    digest = xxhash.xxh3_128()
    for first in range(0, c.words, c.budget.block_rows):
        ends = begin[first : first + c.budget.block_rows + 1]
        lengths = np.diff(ends) - 1
        count = len(lengths)
        out = np.empty(7 * count + int(ends[-1] - ends[0]), np.uint8)
        heads = ends[:-1] - ends[0] + 7 * np.arange(count)
        out[heads[:, None] + np.arange(8)] = lengths.astype("<i8").view(np.uint8).reshape(-1, 8)
        words = text[ends[0] : ends[-1]]
        words = words[words != ord("\n")]
        out[np.arange(len(words)) + 8 * np.repeat(np.arange(1, count + 1), lengths)] = words
        digest.update(out.data)
    digest.update(bytes([c.order, c.work.info["unk_in_model"]]))
    return digest


def vocabulary_columns(c: Context) -> dict[str, Any]:
    return {"words": (np.uint8, [c.work.columns["words"]])}


def low_columns(c: Context) -> dict[str, Any]:
    """The columns of the low orders; the pairs are read in pieces."""
    work = c.work
    values, extended = work.array("word-values"), work.array("word-extended")
    sizes = work.array("pair-sizes") if c.order > 1 else np.zeros(c.words, I64)
    # `count` words may have a weight or a list; one more entry stands for all other words.
    count = int(np.flatnonzero((sizes > 0) | (values[:, 1] != 0)).max(initial=-1)) + 1
    weights = np.zeros(count + 1, F32)
    weights[:count] = values[:count, 1]
    begin = np.zeros(count + 1, I64)
    np.cumsum(sizes[:count], out=begin[1:])
    found = ValueHistogram(ANY, np.uint32)
    found.add(weights.view(U32))
    backoff = found.code(BACKOFF_BITS)

    probs = ValueHistogram(c.coding.prob_table, np.uint32)
    widths, plain = np.ones(count, I64), bool(extended[1:count].all())
    for first, last, chunk in _pairs_of_words(c, begin):
        plain &= bool((chunk[:, 2] & U32(6) == (chunk[:, 2] & U32(1)) << U32(1)).all())
        probs.add(chunk[chunk[:, 2] & U32(4) == 0, 1] & U32(0x7FFFFFFF))
        widths[first:last] = _key_widths(chunk[:, 0], begin[first : last + 1], c.key_bits)
    prob = probs.code()
    flag_bits = ONE_FLAG if plain else ALL_FLAGS
    value_bits = flag_bits + prob.bits
    place = np.empty(count + 1, I64)
    packed.key_list_bits(begin, widths, value_bits, place)
    lists = BitStream(Column(np.uint64, path=work.file("low-list.part")))
    for first, last, chunk in _pairs_of_words(c, begin):
        of_pairs = prob.codes(chunk[:, 1] & U32(0x7FFFFFFF))
        of_pairs[chunk[:, 2] & U32(4) != 0] = 0
        of_pairs = (of_pairs << U64(flag_bits)) | _pair_flags(c, chunk, extended, flag_bits)
        some = begin[first : last + 1] - begin[first]
        shift = np.repeat(c.key_bits - widths[first:last], np.diff(some)).astype(U32)
        bits = int(place[last] - place[first])
        words, offset = lists.room(bits)
        packed.put_key_lists(
            words, place[first : last + 1] - place[first] + offset, some, widths[first:last],
            value_bits, chunk[:, 0] >> shift, of_pairs,
        )  # fmt: skip
        lists.put(words, bits)
    # The columns of words are made whole: unlike those of 2-grams, they fit in memory.
    begin_bits, place_bits = bits_of(int(begin[-1])), bits_of(int(place[-1]))
    stride = begin_bits + place_bits + WIDTH_BITS + backoff.bits
    entries = room((count + 2) * stride)
    at = 0
    for column, bits in (
        (np.append(begin, begin[-1]), begin_bits), (place, place_bits), (widths - 1, WIDTH_BITS),
        (backoff.codes(weights.view(U32)), backoff.bits),
    ):  # fmt: skip
        packed.put_all(entries, at, stride, bits, np.ascontiguousarray(column, U64))
        at += bits
    word_value, word_prob_table = pack_words(np.ascontiguousarray(values[:, 0]), extended)
    shape = {
        "words": c.words,
        "pairs": int(begin[-1]),
        "entries": count,
        "word_backoff_bits": backoff.bits,
        "pair_flag_bits": flag_bits,
        "pair_prob_bits": prob.bits,
        "begin_bits": begin_bits,
        "place_bits": place_bits,
        "pair_prob_base": prob.base,
    }
    columns: dict[str, NDArray[Any] | Column] = {
        "shape": np.array([shape[name] for name in LOW_SHAPE], np.uint64),
        "word_value": word_value,
        "word_entry": entries,
        "list": lists.close(),
        "word_prob_table": word_prob_table,
        "word_backoff_table": backoff.table.view(F32),
        "pair_prob_table": probs_of(prob.table),
    }
    return {name: (part.dtype, [part]) for name, part in columns.items()}


def _pairs_of_words(
    c: Context, begin: NDArray[np.int64]
) -> Iterator[tuple[int, int, NDArray[np.uint32]]]:
    """Yields (first word, the word after the last, the words' pairs as rows of `join`) for ranges
    of words."""
    first, count = 0, len(begin) - 1
    while first < count:
        after = int(np.searchsorted(begin, begin[first] + c.budget.block_rows, side="right")) - 1
        last = min(max(after, first + 1), count)
        if begin[last] > begin[first]:
            yield first, last, c.work.columns["pairs"].read(int(begin[first]), int(begin[last]))
        first = last


def _key_widths(
    keys: NDArray[np.uint32], begin: NDArray[np.int64], key_bits: int
) -> NDArray[np.int64]:
    """Returns the bits of each list's largest id, at least 1; the keys have `key_bits` bits."""
    widths, some = np.ones(len(begin) - 1, I64), np.diff(begin) > 0
    # Keys are ids with reversed bits: the OR of a list's ids has as many bits as the largest id.
    joined = np.bitwise_or.reduceat(keys, begin[:-1][some] - begin[0])
    widths[some] = np.maximum(np.frexp(mirrored(joined, key_bits).astype(np.float64))[1], 1)
    return widths


def _pair_flags(
    c: Context, rows: NDArray[np.uint32], extended: NDArray[np.bool_], flag_bits: int
) -> NDArray[np.uint64]:
    bits = rows[:, 2]
    if flag_bits == ONE_FLAG:
        return (bits & U32(1)).astype(U64)
    state = extended[mirrored(rows[:, 0], c.key_bits)].astype(U64)
    state[bits & U32(2) != 0] = NOT_EXTENDED
    state[bits & U32(1) != 0] = 2
    return state | (bits & U32(4)).astype(U64)


class ShardLevels:
    def __init__(self, c: Context, shards: int, counts: list[NDArray[np.int64]]) -> None:
        self._c = c
        self._shards = shards
        self._counts = counts
        self._stack = ExitStack()
        self._takers: list[tuple[RowReader, RowReader]] = []
        if shards > 1:
            rows = c.budget.block_rows
            for k in range(2, c.order):
                pair = [
                    RowReader(c.work.runs[f"shard-{what}-{k}"].blocks(rows))
                    for what in ("nodes", "entries")
                ]
                for taker in pair:
                    self._stack.callback(taker.close)
                self._takers.append((pair[0], pair[1]))

    def __enter__(self) -> ShardLevels:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def skip(self, index: int) -> None:
        for level, takers in enumerate(self._takers):
            for i, taker in enumerate(takers):
                for _ in taker.take(int(self._counts[level][index, i])):
                    pass

    def rows(self, index: int) -> list[tuple[Column, Column]]:
        """Returns a shard's nodes and entries by level; shards must be requested in order."""
        return [
            (self._taken(index, k, 0), self._taken(index, k, 1)) for k in range(self._c.order - 2)
        ]

    def _taken(self, index: int, level: int, i: int) -> Column:
        what, width = (("nodes", 6), ("entries", 3))[i]
        if self._shards == 1:
            return self._c.work.columns[f"shard-{what}-{level + 2}"]
        path = self._c.work.file(f"shard-{index}-{what}-{level}.part")
        column = Column(U32, width, path=path)
        for piece in self._takers[level][i].take(int(self._counts[level][index, i])):
            column.append(piece)
        return column.finish(sync=False)

    def columns(self, index: int, rows: list[tuple[Column, Column]]) -> dict[str, Any]:
        """The columns of a shard; may run in any thread."""
        c = self._c
        pairs = len(c.work.columns["pairs"]) if c.order > 1 else 0
        columns = pack_shard(c, rows, stages.level_codes(c), pairs, f"shard-{index}")
        if self._shards > 1:
            for column in chain.from_iterable(rows):
                column.remove()
        return columns


def pack_shard(
    c: Context, rows: Sequence[tuple[Column, Column]], codes: Sequence[LevelCode], pairs: int,
    name: str,
) -> TreeColumns:  # fmt: skip
    """Packs a shard's columns from its nodes and entries by level, which are rows of
    `kernels.route`; `pairs` counts 2-grams, including blanks; `name` is as in `TreePacker`."""
    return TreePacker(rows, codes, pairs, c.key_bits, c.work, c.budget.block_rows, name).pack()
