"""Turns a range of a model's n-grams into rows of its shards, by the stages of the local builder.

A partition has the n-grams whose second-to-last word is in a range of ids. It joins an order with
the one above, as `index.making.stages` does; the entries of an order's lists then go to the
partition of their contexts. A partition's data for later stages is carried along. Nothing here
depends on Spark: values are as in `tries`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm.errors import ArpaError
from dlm.estimate.text import lines_of
from dlm.files import move, scratch_folder
from dlm.index import layout
from dlm.index.coding import Coding
from dlm.index.layout import FileEntry
from dlm.index.making import kernels, stages
from dlm.index.making.budget import Budget
from dlm.index.making.builder import pack_shard, write_file
from dlm.index.making.pack import LevelValues
from dlm.index.making.stages import Context
from dlm.index.making.work import Journal, RowReader, Work
from dlm.index.packed import kernels as packed
from dlm.index.packed.tree import LevelCode
from dlm.ngram.arpa.rows import RowBlock, RowFault, split_row
from dlm.ngram.partition import SLOTS
from dlm.ngram.wordtable import PADDING, WordTable
from dlm.progress import ProgressReporter
from dlm.spill.column import Column

Rows = NDArray[np.uint32]
U32, U64, I64 = np.uint32, np.uint64, np.int64

BLOCK_ROWS = 1 << 18  # rows sent at once
_READ_ROWS = 1 << 16


class ModelFacts(NamedTuple):
    """The facts about a model that every task gets. `words` is the number of words; `bounds` has
    the first id of each partition except the first."""

    order: int
    words: int
    unk_in_model: bool
    coding: Coding
    bounds: NDArray[np.int64]

    def context(self, counts: list[int]) -> Context:
        """Makes the context of a partition that has `counts` n-grams, by order."""
        silent = ProgressReporter(lambda _: None)
        c = Context(Work(None), Budget.in_memory(1), self.coding, silent, Path())
        c.work.info |= {
            "order": self.order,
            "words": self.words,
            "counts": counts,
            "blanks": [0] * self.order,
            "faults": [],
        }
        return c


class SuffixRows(NamedTuple):
    """N-grams of an order, as rows of `making.kernels.suffix_rows`."""

    order: int
    rows: Rows


class ListRows(NamedTuple):
    """Entries of an order, in list order, as `stages.join_order` makes them."""

    order: int
    rows: Rows


class Carried(NamedTuple):
    """Columns of a partition's own work that later stages need."""

    columns: dict[str, NDArray[Any]]


class OrderSums(NamedTuple):
    """For the driver: two sums over some of an order's n-grams; the sums go into the model id."""

    order: int
    sums: NDArray[np.uint64]


class Linked(NamedTuple):
    """For the driver: how many blanks a partition has, and the faults of `stages.join_order`."""

    order: int
    blanks: int
    faults: list[Any]


class ValuesFound(NamedTuple):
    """For the driver: the weights of contexts of a length, and the values of n-grams after them."""

    length: int
    values: LevelValues


class PairRows(NamedTuple):
    """For the driver: a partition's 2-grams (`pairs`), as rows of the low orders; the `words` that
    begin 2-grams, and how many each begins (`sizes`); the bytes under each slot (`load`)."""

    part: int
    pairs: Rows
    words: NDArray[np.int64]
    sizes: NDArray[np.int64]
    load: NDArray[np.int64]


class ShardRows(NamedTuple):
    """A level of a shard, from one partition: rows of nodes and of entries."""

    part: int
    level: int
    nodes: Rows
    entries: Rows


# --------------------------------------------------------------------------------------- rows


def read_rows(
    batches: Iterable[pa.RecordBatch],
    order: int,
    top: bool,
    table: WordTable,
    unk: bool,
) -> Iterator[tuple[Rows, NDArray[np.float32], NDArray[np.float32]]]:
    """Reads n-grams from the lines (`value`) of a section; yields ids, oldest first, and values."""
    for batch in batches:
        text = lines_of(batch.column("value"))
        block = RowBlock(text + PADDING, 0, len(text), 0)
        block.start(order, batch.num_rows)
        while block.position < len(text):
            block.read_ngrams(table, top, unk)
            if block.position < len(text):
                _read_row(block, order, top, table)
        yield block.ids, block.log10_prob, block.log10_backoff


def _read_row(block: RowBlock, order: int, top: bool, table: WordTable) -> None:
    line = block.next_line()
    try:
        prob, words, backoff = split_row(line, order, top)
        ids = [table.find(word) for word in words]
        if None in ids:
            raise RowFault(
                f"an unknown word: {words[ids.index(None)]!r} is not among the 1-grams",
                "Add the word to the 1-grams, or build the file again",
            )
    except RowFault as fault:
        raise ArpaError(fault.message, order=order, advice=fault.advice) from fault
    block.put([int(one or 0) for one in ids], prob, backoff, len(line) + 1)


def suffix_rows(
    batches: Iterable[pa.RecordBatch], order: int, model: ModelFacts, table: WordTable
) -> Iterator[tuple[int, Any]]:
    """Turns a section's lines into SuffixRows by partition, and OrderSums for the driver."""
    key_bits = model.context([]).key_bits
    sums = np.zeros(2, U64)
    held: list[Rows] = []
    for ids, prob, backoff in read_rows(
        batches, order, order == model.order, table, model.unk_in_model
    ):
        bits = prob.view(U32), backoff.view(U32)
        sums += packed.hash_ngrams(ids, *bits)
        rows = np.empty((len(ids), order + 2), U32)
        kernels.suffix_rows(ids, *bits, key_bits, rows)
        held.append(rows)
        if sum(map(len, held)) >= BLOCK_ROWS:
            yield from _by_part(held, SuffixRows, order, model.bounds)
            held = []
    yield from _by_part(held, SuffixRows, order, model.bounds)
    yield len(model.bounds) + 1, OrderSums(order, sums)


def _by_part(
    held: list[Rows], kind: Any, order: int, bounds: NDArray[np.int64]
) -> Iterator[tuple[int, Any]]:
    if not held:
        return
    rows = np.concatenate(held)
    parts = np.searchsorted(bounds, rows[:, 0], "right")
    place = np.argsort(parts, kind="stable")
    cuts = np.searchsorted(parts[place], np.arange(len(bounds) + 2))
    for part in np.flatnonzero(np.diff(cuts)).tolist():
        yield part, kind(order, rows[place[cuts[part] : cuts[part + 1]]])


# ------------------------------------------------------------------------------------ joining


def joined(
    part: int, values: Iterable[Any], k: int, model: ModelFacts
) -> Iterator[tuple[int, Any]]:
    """Joins order k of a partition with the order above, as `stages.join_order` does."""
    rows: dict[int, list[Rows]] = {2: [], k: []}
    listed: list[Rows] = []
    carried: dict[str, NDArray[Any]] = {}
    for value in values:
        if isinstance(value, SuffixRows):
            rows[value.order].append(value.rows)
        elif isinstance(value, ListRows):
            listed.append(value.rows)
        else:
            carried |= value.columns
    counts = [sum(map(len, rows.get(n, []))) for n in range(1, model.order + 1)]
    c = model.context(counts)
    work, top = c.work, model.order
    # Sort rows into runs. Order 3 also needs the 2-grams, to know where they are in their lists.
    for n in sorted({k, *([2] if k == 3 else [])}):
        _sorted(c, f"suffix-{n}", rows[n], n + 2, n)
    if k < top:
        _sorted(c, f"list-{k + 1}", listed, 5 if k == 2 else k + 2, k + 1)
        work.keep(f"needed-{k}", carried.pop(f"needed-{k}", np.empty((0, k + 1), U32)))
    work.keep(f"load-{k + 1}", carried.pop("load", np.zeros(SLOTS, I64)))
    stages.join_order(c, k)
    info = work.info
    yield len(model.bounds) + 1, Linked(k, info["blanks"][k - 1], info["faults"])
    if k == 3:
        for some in rows[2]:
            yield part, SuffixRows(2, some)
    if k < top:
        yield len(model.bounds) + 1, ValuesFound(k, stages.level_values(c, k))
        carried[f"nodes-{k}"] = work.array(f"nodes-{k}")
        carried[f"entries-{k + 1}"] = work.array(f"entries-{k + 1}")
    if k == 2:
        sizes = work.array("pair-sizes")
        begun = np.flatnonzero(sizes)
        pairs = (
            np.array(work.array("pairs")),
            begun,
            sizes[begun],
            np.array(work.array("load-2")),
        )
        yield len(model.bounds) + 1, PairRows(part, *pairs)
    else:
        carried["load"] = work.array(f"load-{k}")
        carried[f"needed-{k - 1}"] = work.array(f"needed-{k - 1}")
        for block in work.runs[f"list-{k}"].blocks(BLOCK_ROWS):
            yield from _by_part([block], ListRows, k, model.bounds)
    yield part, Carried({name: np.array(column) for name, column in carried.items()})


def _sorted(c: Context, name: str, rows: list[Rows], width: int, key: int) -> None:
    most = sum(map(len, rows))
    with c.budget.sorter(c.folder, name.replace("-", "."), width, key, most) as sorter:
        for some in rows:
            sorter.add(some)
        c.work.runs[name] = c.budget.finish(sorter)


# ------------------------------------------------------------------------------------ shards


def routed(
    part: int,
    values: Iterable[Any],
    model: ModelFacts,
    first_pair: NDArray[np.int64],
    slots: NDArray[np.uint16],
    shards: int,
) -> Iterator[tuple[int, ShardRows]]:
    """Yields the rows of each shard, as `stages.route` makes them. `first_pair` has the number
    of the first 2-gram of each partition."""
    c = model.context([])
    for value in values:
        for name, column in value.columns.items():
            c.work.keep(name, column)
    stages.route(c, slots, shards, Journal(Path(), None))
    for k in range(2, model.order):
        counts = c.work.array(f"shard-counts-{k}")
        takers = []
        for what in ("nodes", "entries"):
            name = f"shard-{what}-{k}"
            blocks = (
                c.work.columns[name].chunks(_READ_ROWS)
                if shards == 1
                else c.work.runs[name].blocks(_READ_ROWS)
            )
            takers.append(RowReader(blocks))
        for shard in range(shards):
            nodes, entries = (
                np.concatenate(
                    [np.empty((0, width), U32)]
                    + [np.array(rows) for rows in takers[i].take(int(counts[shard, i]))]
                )
                for i, width in ((0, 6), (1, 3))
            )
            if k == 2:
                nodes[:, 1] += U32(first_pair[part])
            if len(nodes):
                yield shard, ShardRows(part, k - 2, nodes, entries)
        for taker in takers:
            taker.close()


def packed_shard(
    shard: int,
    values: Iterable[ShardRows],
    model: ModelFacts,
    codes: list[LevelCode],
    pairs: int,
    folder: str,
) -> dict[str, Any]:
    """Writes the file of a shard into a folder; returns its entry in the manifest."""
    found = sorted(values, key=lambda rows: (rows.level, rows.part))
    c = model.context([])
    levels, blanks = [], []
    for level in range(model.order - 2):
        nodes, entries = Column(U32, 6), Column(U32, 3)
        for rows in found:
            if rows.level == level:
                nodes.append(rows.nodes)
                entries.append(rows.entries)
        levels.append((nodes, entries))
        values_ = entries.read(0, len(entries))[:, 2]
        blanks.append(int((values_ >> U32(1) == kernels.BLANK_CODE).sum()))
    numbers = (
        sum(len(entries) for _, entries in levels),
        sum(len(nodes) for nodes, _ in levels),
    )
    columns = pack_shard(c, levels, codes, pairs, "shard")
    name = layout.file_name("shard", shard)
    # Another attempt at the same task may write the same bytes at the same time.
    with scratch_folder(Path(folder), f".{name}") as own:
        size, digest = write_file(own / name, "shard", columns, c.work)
        move(own / name, Path(folder) / name)
    blank = sum(blanks)
    return asdict(
        FileEntry("shard", shard, name, size, digest, numbers[0] - blank, blank, numbers[1])
    )
