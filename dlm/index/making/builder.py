"""The streaming builder: its stages in order, and the files they produce."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.files import scratch_folder, sync_folder
from dlm.index import layout
from dlm.index.coding import Coding, DistinctValues, ValueCode
from dlm.index.layout import FileEntry
from dlm.index.making import stages
from dlm.index.making.budget import Budget, credible_counts
from dlm.index.making.files import Columns, write_parts
from dlm.index.making.pack import (
    BitStream,
    LevelPacker,
    LevelParts,
    LevelShape,
    tree_columns,
)
from dlm.index.making.stages import Context
from dlm.index.making.work import Journal, RowReader, Work
from dlm.index.packed import kernels as packed
from dlm.index.packed.columns import (
    BACKOFF_BITS,
    bits_of,
    magnitudes_of,
    pack_fields,
    probs_of,
    room,
)
from dlm.index.packed.low import BLANK, LOW_SHAPE, PAIR_FLAG_BITS, STORED, ids_of
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

    Args  reader  of a model that `stages.check_header` passed, not begun
          folder  where the files are written, and the journal
          spill   for everything else; an empty folder, or what a killed build left
          key     `journal.build_key`, of a build that can resume; None keeps no journal
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
    """Restores what an earlier build has finished, or removes what it left; None: always that."""
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
    """The columns of every file of a model with these slots, in the manifest's order.

    The columns of one file are in memory until the next are requested; nothing is written.

    Trusts  no n-gram of `source` is repeated or lacks its prefix
    """
    with scratch_folder(None, "dlm-rebuild") as folder:  # for sorters; stays empty
        silent = ProgressReporter(lambda line: None)
        c = Context(Work(None), Budget.in_memory(), coding, silent, folder)
        journal = Journal(folder, None)
        try:
            stages.read(source, source.counts, c)
            stages.join(c, journal)
            finish_words(c)
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
    make: Callable[[], Columns]


def _files(c: Context, shards: int, journal: Journal) -> Iterator[_File]:
    """The files that are not done, in the manifest's order; each is made before the next."""
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
            make = functools.partial(levels.columns, index)
            yield _File("shard", index, (grams - blank, blank, nodes), make)


def _write_files(folder: Path, shards: int, c: Context, journal: Journal) -> None:
    work = c.work
    files = [FileEntry(**entry) for entry in work.info.get("files", [])]
    for file in _files(c, shards, journal):
        name = layout.file_name(file.kind, file.index)
        c.progress.tell(f"writing {name}")
        columns = file.make()
        size, digest = write_file(folder / name, file.kind, columns, work)
        files.append(FileEntry(file.kind, file.index, name, size, digest, *file.numbers))
        work.info["files"] = [asdict(entry) for entry in files]
        sync_folder(folder)
        journal.save(name, work)


def write_file(path: Path, kind: str, columns: Columns, work: Work) -> tuple[int, str]:
    """As `write_parts`; then removes the parts that are not columns of the work by name."""
    written = write_parts(path, kind, columns)
    for _, parts in columns.values():
        for part in parts:
            if isinstance(part, Column) and part not in work.columns.values():
                part.remove()
    return written


def finish_words(c: Context) -> None:
    """Flags and values of the 1-grams, and the ids of the model: as it was, and quantised."""
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
    """Hashes every word, each after its length as eight bytes: the start of a model id."""
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
    """The columns of the low orders, the pairs a piece at a time."""
    work, rows = c.work, c.budget.block_rows
    values = work.array("word-values")
    extended = work.array("word-extended")
    prob_most, backoff_most = c.coding.prob_table, c.coding.backoff_table
    magnitude1 = magnitudes_of(values[:, 0])
    bits1 = np.ascontiguousarray(values[:, 1]).view(U32)
    word_prob = _code_of(magnitude1, prob_most)
    word_backoff = _code_of(bits1, backoff_most, BACKOFF_BITS)
    pairs = work.columns["pairs"] if c.order > 1 else Column(U32, 4)
    begin = np.zeros(c.words + 1, I64)
    if c.order > 1:
        np.cumsum(work.array("pair-sizes"), out=begin[1:])

    probs, backoffs = DistinctValues(prob_most), DistinctValues(backoff_most, BACKOFF_BITS)
    for chunk in pairs.chunks(rows):
        probs.add(chunk[chunk[:, 3] & U32(4) == 0, 1] & U32(0x7FFFFFFF))
        backoffs.add(np.ascontiguousarray(chunk[:, 2]))
    prob, backoff = probs.code(), backoffs.code()
    value_bits = PAIR_FLAG_BITS + prob.bits + backoff.bits
    place = np.empty(c.words + 1, I64)
    packed.key_list_bits(begin, c.key_bits, value_bits, place)
    lists = BitStream(Column(np.uint64, path=work.file("low-list.part")))
    first = 0
    while first < c.words:
        after = int(np.searchsorted(begin, begin[first] + rows, side="right")) - 1
        last = min(max(after, first + 1), c.words)
        chunk = pairs.read(int(begin[first]), int(begin[last]))
        key = np.ascontiguousarray(chunk[:, 0])
        near = prob.codes(chunk[:, 1] & U32(0x7FFFFFFF))
        near[chunk[:, 3] & U32(4) != 0] = 0
        near = (near << U64(PAIR_FLAG_BITS)) | _pair_flags(c, key, chunk[:, 3], extended)
        bits = int(place[last] - place[first])
        words, offset = lists.room(bits)
        packed.put_key_lists(
            words, place[first : last + 1] - place[first] + offset,
            begin[first : last + 1] - begin[first], c.key_bits, value_bits,
            PAIR_FLAG_BITS + prob.bits, key, near, backoff.codes(chunk[:, 2]),
        )  # fmt: skip
        lists.put(words, bits)
        first = last
    # Arrays by word are in memory.
    begin_bits, place_bits = bits_of(len(pairs)), bits_of(int(place[-1]))
    stride = begin_bits + place_bits + word_backoff.bits
    entries = room((c.words + 1) * stride)
    at = 0
    for column, bits in (
        (begin, begin_bits), (place, place_bits), (word_backoff.codes(bits1), word_backoff.bits),
    ):  # fmt: skip
        packed.put_all(entries, at, stride, bits, np.ascontiguousarray(column, U64))
        at += bits
    near1 = (word_prob.codes(magnitude1) << U64(1)) | extended.astype(U64)
    shape = {
        "words": c.words,
        "pairs": len(pairs),
        "key_bits": c.key_bits,
        "word_prob_bits": word_prob.bits,
        "word_backoff_bits": word_backoff.bits,
        "pair_prob_bits": prob.bits,
        "pair_backoff_bits": backoff.bits,
        "begin_bits": begin_bits,
        "place_bits": place_bits,
        "word_prob_base": word_prob.base,
        "pair_prob_base": prob.base,
    }
    columns: dict[str, NDArray[Any] | Column] = {
        "shape": np.array([shape[name] for name in LOW_SHAPE], np.uint64),
        "word_value": pack_fields(near1, word_prob.bits + 1),
        "word_entry": entries,
        "list": lists.close(),
        "word_prob_table": probs_of(word_prob.table),
        "word_backoff_table": word_backoff.table.view(F32),
        "pair_prob_table": probs_of(prob.table),
        "pair_backoff_table": backoff.table.view(F32),
    }
    return {name: (part.dtype, [part]) for name, part in columns.items()}


def _code_of(values: NDArray[np.uint32], most: int, raw_bits: int | None = None) -> ValueCode:
    found = DistinctValues(most, raw_bits)
    found.add(values)
    return found.code()


def _pair_flags(
    c: Context, key: NDArray[np.uint32], bits: NDArray[np.uint32], extended: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    second = extended[ids_of(key, c.key_bits)].astype(U64)
    flags = np.where(bits & U32(1), U64(2), second)
    flags |= np.where(bits & U32(2), U64(STORED), U64(0))
    flags |= np.where(bits & U32(4), U64(BLANK), U64(0))
    return flags


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

    def columns(self, index: int) -> dict[str, Any]:
        c = self._c
        own: list[Column] = []

        def taken(level: int, i: int) -> Column:
            what, width = (("nodes", 6), ("entries", 3))[i]
            if self._shards == 1:
                return c.work.columns[f"shard-{what}-{level + 2}"]
            column = Column(U32, width, path=c.work.file(f"one-{what}-{level}.part"))
            for piece in self._takers[level][i].take(int(self._counts[level][index, i])):
                column.append(piece)
            own.append(column)
            return column.finish(sync=False)

        rows = [(taken(level, 0), taken(level, 1)) for level in range(c.order - 2)]
        blanks = [bool(counts[index, 2]) for counts in self._counts]
        columns = pack_shard(c, rows, blanks, len(c.work.columns["pairs"]) if c.order > 1 else 0)
        for column in own:
            column.remove()
        return columns


def pack_shard(
    c: Context, rows: list[tuple[Column, Column]], blanks: list[bool], pairs: int
) -> dict[str, Any]:
    """The columns of a shard from its nodes and entries by level, rows of `kernels.route`.

    Args  blanks  whether a level has any;  pairs  2-grams, blanks included
    """

    def pack(level: int) -> LevelParts:
        shape = LevelShape(
            level == 0,
            level + 3 == c.order,
            blanks[level],
            pairs,
            c.key_bits,
            c.coding.prob_table,
            c.coding.backoff_table,
        )
        name, size = f"level-{level}", c.budget.block_rows
        return LevelPacker(*rows[level], shape, c.work, name, size).pack()

    with ThreadPoolExecutor(c.budget.threads) as pool:
        parts = list(pool.map(pack, range(len(rows))))
    return tree_columns(parts, pairs, c.key_bits)
