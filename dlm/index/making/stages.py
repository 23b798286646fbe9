"""Runs the stages of a streaming build; each uses what earlier stages left in a `Work`.

`read` sorts the n-grams of each order; `join_order`, from the highest order down, adds an order's
blanks and finds its nodes; `route_level` finds the shard of each node and n-gram. In the work,
`suffix-K` and `list-K` are order K in two sort orders, `needed-K` are n-grams that order K + 1
needs in order K, `entries-K` and `nodes-K` are order K's columns, and `shard-nodes-K` and
`shard-entries-K` are these by shard. The stages share these names, so this module is long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ArpaError
from dlm.index.coding import (
    Coding,
    Quantiser,
    ValueCode,
    ValueHistogram,
    WeightCode,
    weight_bits,
)
from dlm.index.layout import MAX_ORDER
from dlm.index.making import kernels
from dlm.index.making.budget import Budget
from dlm.index.making.pack import LevelValues
from dlm.index.making.work import BlockStream, Journal, Work
from dlm.index.packed import kernels as packed
from dlm.index.packed.low import key_bits_of, mirrored, order_of_words
from dlm.index.packed.tree import LevelCode
from dlm.kenlm.open import open_ngrams
from dlm.ngram.arpa import NgramBatch, is_reopenable
from dlm.ngram.partition import SLOTS
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB, Vocabulary
from dlm.progress import ProgressReporter
from dlm.spill.column import Column
from dlm.spill.sorter import SortedRuns, Sorter

if TYPE_CHECKING:
    from dlm.kenlm.reader import NgramReader

U32 = np.uint32
I64 = np.int64
F32 = np.float32
# Approximate bytes of a node, and of an n-gram, in a shard; used to balance the shards.
NODE_BYTES = 6
GRAM_BYTES = 6
MOST_NGRAMS = (1 << 32) - 1  # per order, since an n-gram's number has 32 bits
FAULTS_KEPT = 1 << 16  # limit of missing contexts, and of repeated n-grams, kept per order

Rows = NDArray[np.uint32]


@dataclass
class Context:
    work: Work
    budget: Budget
    coding: Coding
    progress: ProgressReporter
    folder: Path  # where sorters may write

    @property
    def order(self) -> int:
        return int(self.work.info["order"])

    @property
    def counts(self) -> list[int]:
        counts: list[int] = self.work.info["counts"]
        return counts

    @property
    def words(self) -> int:
        return int(self.work.info["words"])

    @property
    def key_bits(self) -> int:
        return key_bits_of(self.words)


def check_header(reader: NgramReader) -> None:
    if reader.order > MAX_ORDER:
        raise ArpaError(
            f"the model has order {reader.order}; shards hold at most order {MAX_ORDER}. "
            f"Lower the order first (dlm reduce --order {MAX_ORDER})",
            path=reader.path,
        )
    for k, count in enumerate(reader.counts, 1):
        if k > 1 and count > MOST_NGRAMS:
            raise ArpaError(
                f"{count} n-grams of one order are too many; expected at most {MOST_NGRAMS}. Prune "
                "the model, or lower its order",
                order=k,
            )


class NgramSource(Protocol):
    """A model to build from: an `NgramReader`, or the n-grams of a shard set."""

    @property
    def order(self) -> int:
        """The model's order, N."""

    @property
    def counts(self) -> Sequence[int]:
        """The number of n-grams of each order."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The words; complete only once the 1-grams have been read."""

    def batches(self) -> Iterable[NgramBatch]:
        """The n-grams, order by order from 1."""


def read(source: NgramSource, expected: Sequence[int], c: Context) -> None:
    """Reads a model; sorts every order above 1 in suffix order. `expected` has counts by order."""
    work, info = c.work, c.work.info
    top = source.order
    sums = np.zeros((top, 2), np.uint64)
    wanted = c.coding.bits is not None
    histograms = [(ValueHistogram(), ValueHistogram()) for _ in range(top)] if wanted else []
    first: list[tuple[Rows, NDArray[np.float32], NDArray[np.float32]]] = []
    sorting: dict[int, Future[SortedRuns]] = {}
    ids_of = np.zeros(0, U32)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        sorter: Sorter | None = None
        at = 1

        def settle(until: int) -> Sorter | None:
            """Finishes the orders below `until`; returns the sorter of order `until`."""
            nonlocal at, sorter
            while at < until:
                if at == 1:
                    nonlocal ids_of
                    ids_of, sums[0] = _unigrams(c, source, first)
                elif sorter is not None:
                    ending = sorter
                    sorting[at] = pool.submit(c.budget.finish, ending)
                    if c.budget.durable:
                        sorting[at].result()  # waits, since the next order needs the memory
                at += 1
                sorter = None
                if at <= top:
                    sorter = stack.enter_context(
                        c.budget.sorter(c.folder, f"suffix.{at}", at + 2, at, expected[at - 1])
                    )
            return sorter

        for batch in source.batches():
            ids, prob, backoff = batch.ids, batch.log10_prob, batch.log10_backoff
            k = batch.order
            bits = prob.view(U32), backoff.view(U32)
            if wanted:
                histograms[k - 1][0].add(prob)
                histograms[k - 1][1].add(backoff)
            if k == 1:
                first.append((ids, prob, backoff))
            else:
                into = settle(k)
                assert into is not None
                ids = ids_of[ids]
                sums[k - 1] += packed.hash_ngrams(ids, *bits)
                rows = np.empty((len(ids), k + 2), U32)
                kernels.suffix_rows(ids, *bits, c.key_bits, rows)
                into.add(rows)
            c.progress.step(len(ids))
        settle(top + 1)
        for k, coming in sorting.items():
            work.runs[f"suffix-{k}"] = coming.result()
    info["sums"] = [[int(x) for x in row] for row in sums]
    info["blanks"] = [0] * top
    info["blanks"][0] = 0 if info["unk_in_model"] else 1
    info["faults"] = []
    work.keep(f"load-{top + 1}", np.zeros(SLOTS, I64))
    for k, pair in enumerate(histograms, 1):
        for what, histogram in zip(("prob", "backoff"), pair, strict=True):
            histogram.merge()
            work.keep(f"{what}-values-{k}", histogram.values)
            work.keep(f"{what}-counts-{k}", histogram.counts)


def _unigrams(
    c: Context,
    source: NgramSource,
    first: list[tuple[Rows, NDArray[np.float32], NDArray[np.float32]]],
) -> tuple[Rows, NDArray[np.uint64]]:
    """Numbers the words; returns the new id of each id in `source`, and the 1-grams' hash sums."""
    work, info = c.work, c.work.info
    vocabulary = source.vocabulary
    words = vocabulary.words
    info["order"], info["counts"] = source.order, list(source.counts)
    info["words"], info["unk_in_model"] = len(words), vocabulary.unk_in_model
    prob = np.full(len(words), MISSING_UNK_LOG10_PROB, F32)
    backoff = np.zeros(len(words), F32)
    for ids, p, b in first:
        prob[ids[:, 0]], backoff[ids[:, 0]] = p, b
    first.clear()
    order = order_of_words(prob, backoff)
    prob, backoff = prob[order], backoff[order]
    work.keep("word-prob", prob)
    work.keep("word-backoff", backoff)
    text = b"".join(words[i] + b"\n" for i in order.tolist())
    work.keep("words", np.frombuffer(text, np.uint8))
    ids = np.empty(len(words), U32)
    ids[order] = np.arange(len(words))
    work.keep("word-ids", ids)
    some = slice(0 if vocabulary.unk_in_model else 1, None)
    rows = np.arange(len(words), dtype=U32)[some, None]
    return ids, packed.hash_ngrams(rows, prob[some].view(U32), backoff[some].view(U32))


def quantisers(c: Context, k: int) -> tuple[Quantiser, Quantiser] | None:
    """The quantisers of order k's probabilities and weights; None if values stay as they are."""
    if c.coding.bits is None or k == 1:  # 1-grams are not quantised
        return None
    out = []
    for what, bits in (("prob", c.coding.bits), ("backoff", weight_bits(c.coding.bits))):
        values, counts = c.work.array(f"{what}-values-{k}"), c.work.array(f"{what}-counts-{k}")
        if what == "backoff" and not (values == 0).any():
            # 0 gets a code too: if there are blanks, it is their weight.
            place = int(np.searchsorted(values, F32(0)))
            values, counts = np.insert(values, place, F32(0)), np.insert(counts, place, 1)
        out.append(Quantiser(values, counts, bits))
    return out[0], out[1]


def join(c: Context, journal: Journal) -> None:
    for k in range(c.order, 1, -1):
        if f"join-{k}" not in journal.done:
            join_order(c, k)
            journal.save(f"join-{k}", c.work)


def join_order(c: Context, k: int) -> None:
    """Finds the blanks, flags and nodes of order k, in suffix order; if k > 2, also sorts it in
    list order."""
    work, info, budget = c.work, c.work.info, c.budget
    top, size = c.order, budget.block_rows
    count = c.counts[k - 1]
    c.progress.stage(f"linking n-grams of order {k}", count, "n-grams")
    load = work.array(f"load-{k + 1}").copy()
    at = np.zeros(kernels.JOIN_STATE, I64)
    at[[kernels.SLOT_U, kernels.SLOT_V, kernels.GROUP]] = -1
    current, held = np.zeros(k, U32), np.zeros(k, U32)
    width = {2: 4, 3: 5}.get(k, k + 1)
    out = np.empty((size, width), U32), np.empty((size, 5), U32), np.empty((size, k), U32)
    twice, missing = np.empty((FAULTS_KEPT, k), U32), np.empty((FAULTS_KEPT, k), U32)
    sizes = np.zeros(c.words, I64) if k == 2 else None
    nodes = work.column(f"nodes-{k}", U32, 5) if k < top else None
    needed = work.column(f"needed-{k - 1}", U32, k) if k > 2 else None
    below = len(work.columns[f"needed-{k}"]) if k < top else 0
    with ExitStack() as stack:
        feeds = [
            BlockStream(iter(()), 1),
            BlockStream(_raw(c, k, top, stack), k + 2),
            BlockStream(work.columns[f"needed-{k}"].chunks(size) if k < top else iter(()), k + 1),
            BlockStream(
                _listed(c, k + 1, stack) if k < top else iter(()),
                5 if k == 2 else k + 2,
            ),
            BlockStream(work.runs["suffix-2"].blocks(size) if k == 3 else iter(()), 4),
        ]
        for feed in feeds:
            stack.callback(feed.close)
        sorter = None
        pairs = None
        if k > 2:
            sorter = stack.enter_context(
                budget.sorter(c.folder, f"list.{k}", width, k, count + below)
            )
        else:
            pairs = work.column("pairs", U32, 3)
        ended = np.zeros(5, np.bool_)

        def flush() -> None:
            e, d, r = (int(at[i]) for i in (kernels.E, kernels.D, kernels.R))
            if sorter is not None:
                sorter.add(out[0][:e])
            elif pairs is not None and sizes is not None:
                found, many = np.unique(out[0][:e, 0], return_counts=True)
                sizes[found] += many
                pairs.append(out[0][:e, 1:])
            if nodes is not None:
                nodes.append(out[1][:d])
            if needed is not None:
                needed.append(out[2][:r])
            c.progress.step(e)
            at[[kernels.E, kernels.D, kernels.R]] = 0

        while True:
            asked = kernels.join(
                k, k == top, feeds[1].rows, feeds[2].rows, feeds[3].rows, feeds[4].rows, ended,
                at, current, held, *out, load, twice, missing, c.key_bits,
                NODE_BYTES, GRAM_BYTES,
            )  # fmt: skip
            if asked == kernels.DONE:
                break
            if asked == kernels.FULL:
                flush()
                continue
            feeds[asked].refill()
            ended[asked] = feeds[asked].ended
            at[asked - 1] = 0  # indices A, Q, X and P are in the order of the streams
        flush()
        if sorter is not None:
            work.runs[f"list-{k}"] = budget.finish(sorter)
    for column in (nodes, needed, pairs):
        if column is not None:
            column.finish()
    info["blanks"][k - 1] = int(at[kernels.BLANKS])
    if int(at[kernels.NUMBER]) > MOST_NGRAMS:
        raise ArpaError(
            f"{int(at[kernels.NUMBER])} n-grams of one order, {int(at[kernels.BLANKS])} of them "
            f"blanks, are too many; expected at most {MOST_NGRAMS}. Prune the model, or lower its "
            "order",
            order=k,
        )
    work.keep(f"load-{k}", load)
    work.drop(f"load-{k + 1}")
    if at[kernels.MISSING]:
        kept = missing[: at[kernels.MISSING_KEPT]]
        _fault(c, k + 1, "missing", int(at[kernels.MISSING]), _ids_of_rows(c, kept))
    if at[kernels.TWICE]:
        kept = twice[: at[kernels.TWICE_KEPT]]
        _fault(c, k, "twice", int(at[kernels.TWICE]), _ids_of_rows(c, kept))
    if sizes is not None:
        work.keep("pair-sizes", sizes)
    if k < top:
        work.drop(f"list-{k + 1}")
        work.drop(f"needed-{k}")
        work.columns[f"entries-{k + 1}"].finish()
    work.drop(f"suffix-{k}")


def _raw(c: Context, k: int, top: int, stack: ExitStack) -> Iterator[Rows]:
    blocks = stack.enter_context(closing(c.work.runs[f"suffix-{k}"].blocks(c.budget.block_rows)))
    return _quantised(c, k, blocks) if c.coding.bits is not None else blocks


def _quantised(c: Context, k: int, blocks: Iterator[Rows]) -> Iterator[Rows]:
    both = quantisers(c, k)
    assert both is not None
    sums = np.zeros(2, np.uint64)
    for rows in blocks:
        prob = both[0](np.ascontiguousarray(rows[:, k]).view(F32)).view(U32)
        backoff = both[1](np.ascontiguousarray(rows[:, k + 1]).view(F32)).view(U32)
        out = np.empty_like(rows)
        out[:, :k], out[:, k], out[:, k + 1] = rows[:, :k], prob, backoff
        sums += packed.hash_ngrams(_ids_of_rows(c, rows[:, :k]), prob, backoff)
        yield out
    c.work.info.setdefault("quantised_sums", {})[str(k)] = [int(x) for x in sums]


def _ids_of_rows(c: Context, rows: Rows) -> Rows:
    k = rows.shape[1]
    out = np.empty((len(rows), k), U32)
    out[:, k - 2] = rows[:, 0]
    out[:, k - 1] = mirrored(rows[:, 1], c.key_bits)
    for j in range(2, k):
        out[:, k - 1 - j] = mirrored(rows[:, j], c.key_bits)
    return out


def _listed(c: Context, k: int, stack: ExitStack) -> Iterator[Rows]:
    column = c.work.column(f"entries-{k}", U32, 3 if k == 3 else 2)
    blocks = stack.enter_context(closing(c.work.runs[f"list-{k}"].blocks(c.budget.block_rows)))
    for rows in blocks:
        column.append(rows[:, k - 1 :])
        yield rows


def _fault(c: Context, order: int, kind: str, count: int, ids: Rows) -> None:
    name = f"{kind}-{order}"
    c.work.keep(name, ids)
    c.work.info["faults"].append([order, kind, count])


def raise_faults(c: Context, path: str) -> None:
    """If there are faults, raises the `ArpaError` that `ngrams.sorted_tables` would raise, after
    reading the file again to find the line."""
    faults = sorted(c.work.info["faults"])  # by order; "missing" before "twice"
    if not faults:
        return
    order, kind, count = faults[0]
    rows = c.work.array(f"{kind}-{order}")
    wanted = {tuple(row): 0 for row in rows.tolist()}
    if not is_reopenable(path):
        raise ArpaError(fault_message(order, kind, count), path=path, order=order)
    words = c.work.array("words").tobytes().split(b"\n")
    ids_of = c.work.array("word-ids")
    with open_ngrams(path) as reader:
        for batch in reader.batches():
            if batch.order < order:
                continue
            if batch.order > order:
                break
            for i, ids in enumerate(ids_of[batch.ids].tolist()):
                ngram = tuple(ids[:-1]) if kind == "missing" else tuple(ids)
                if ngram not in wanted:
                    continue
                wanted[ngram] += 1
                if kind == "twice" and wanted[ngram] < 2:
                    continue

                if kind == "missing":
                    message = (
                        f"the prefix {_spell(words, ids[:-1])} of the {order}-gram "
                        f"{_spell(words, ids)} is not among the {order - 1}-grams ({count} such "
                        "n-grams)"
                    )
                    advice = (
                        "Add the missing n-grams with --repair, which changes no score beyond "
                        "its last bit"
                    )
                else:
                    message = (
                        f"the {order}-gram {_spell(words, ids)} is listed twice ({count} such "
                        "n-grams)"
                    )
                    advice = "Remove one of the two lines"
                raise reader.error_at(message, order=order, row=batch.first_row + i, advice=advice)
    raise ArpaError(fault_message(order, kind, count), path=path, order=order)


def _spell(words: list[bytes], ids: list[int]) -> str:
    return repr(b" ".join(words[i] for i in ids).decode("utf-8", "replace"))


def fault_message(order: int, kind: str, count: int) -> str:
    what = f"have a prefix that is not among the {order - 1}-grams"
    return f"{count} {order}-grams " + (what if kind == "missing" else "are listed twice")


def code_levels(c: Context) -> None:
    """Determines how the values of each level of all trees are stored; see `level_codes`."""

    # The distinct weights of a level take about 80 MB at most.
    with ThreadPoolExecutor(1 if c.budget.durable else c.budget.threads) as pool:
        found = list(pool.map(lambda k: level_values(c, k), range(2, c.order)))
    c.work.info["codes"] = []
    for depth, (flag_bits, prob, weight) in enumerate(codes_of_model(c, found)):
        c.work.info["codes"].append([flag_bits, prob.bits, prob.base, weight.escape])
        c.work.keep(f"prob-table-{depth}", prob.table)
        c.work.keep(f"weight-table-{depth}", weight.table)


def level_values(c: Context, k: int) -> LevelValues:
    """Collects the weights of contexts of k words, and the values of the n-grams after them."""
    found = LevelValues(c.coding.prob_table)
    for nodes in c.work.columns[f"nodes-{k}"].chunks(c.budget.block_rows):
        found.add_nodes(nodes[:, 1])
    for entries in c.work.columns[f"entries-{k + 1}"].chunks(c.budget.block_rows):
        found.add_entries(entries[:, -1])
    return found


def codes_of_model(c: Context, found: Sequence[LevelValues]) -> list[LevelCode]:
    """Chooses the code for each level from the level's values."""
    blanks = c.work.info["blanks"][2:]
    return [values.code(values is found[-1], blanks[i]) for i, values in enumerate(found)]


def level_codes(c: Context) -> list[LevelCode]:
    """The codes that `code_levels` kept."""
    found = []
    for depth, (flag_bits, bits, base, escape) in enumerate(c.work.info["codes"]):
        tables = [c.work.array(f"{name}-table-{depth}") for name in ("prob", "weight")]
        prob = ValueCode(bits, base, tables[0])
        found.append(LevelCode(flag_bits, prob, WeightCode(escape, tables[1])))
    return found


def route(c: Context, slots: NDArray[np.uint16], shards: int, journal: Journal) -> None:
    work, owners = c.work, slots.astype(U32)

    def drop(k: int) -> None:
        work.drop(f"nodes-{k}")
        work.drop(f"entries-{k + 1}")

    if not c.budget.durable:
        # No disk space is needed, so nothing is dropped early, and the levels run in parallel.
        with ThreadPoolExecutor(c.budget.threads) as pool:
            for coming in [
                pool.submit(route_level, c, k, owners, shards) for k in range(2, c.order)
            ]:
                coming.result()
        for k in range(2, c.order):
            drop(k)
        return
    for k in range(2, c.order):
        if f"route-{k}" not in journal.done:
            route_level(c, k, owners, shards)
            if k > 2:
                drop(k - 1)
            if k + 1 == c.order:
                drop(k)
            journal.save(f"route-{k}", work)


def route_level(c: Context, k: int, shard_of_slot: Rows, shards: int) -> None:
    """Sorts the nodes of k words, and the n-grams of k + 1 words that follow them, by shard."""
    work, budget, size = c.work, c.budget, c.budget.block_rows
    nodes, entries = work.columns[f"nodes-{k}"], work.columns[f"entries-{k + 1}"]
    c.progress.stage(f"assigning n-grams of order {k + 1} to shards", len(entries), "n-grams")
    direct = k == 2
    feeds = [
        BlockStream(iter(()), 1),
        BlockStream(iter(()) if direct else work.columns[f"nodes-{k - 1}"].chunks(size), 5),
        BlockStream(iter(()) if direct else work.columns[f"entries-{k}"].chunks(size), 2),
        BlockStream(nodes.chunks(size), 5),
        BlockStream(entries.chunks(size), 3 if direct else 2),
    ]
    at = np.zeros(kernels.ROUTE_STATE, I64)
    ended = np.zeros(5, np.bool_)
    listed = np.empty(c.words, U32)
    counts = np.zeros((shards, 3), I64)
    out: list[Rows] = [np.empty((size, 6), U32), np.empty((size, 3), U32)]
    with ExitStack() as stack:
        sinks: list[Sorter | Column] = []
        for name, width, most in (("nodes", 6, len(nodes)), ("entries", 3, len(entries))):
            if shards == 1:
                sinks.append(work.column(f"shard-{name}-{k}", U32, width))
            else:
                sorter = budget.sorter(c.folder, f"shard.{name}.{k}", width, 1, most)
                sinks.append(stack.enter_context(sorter))

        def flush(i: int) -> None:
            done = int(at[(kernels.R_NODE, kernels.R_ENTRY)[i]])
            sink = sinks[i]
            if isinstance(sink, Column):
                sink.append(out[i][:done])
            else:
                sink.add(out[i][:done])
            if i:
                c.progress.step(done)

        while True:
            asked = kernels.route(
                direct, feeds[1].rows, feeds[2].rows, feeds[3].rows, feeds[4].rows, ended, at,
                listed, shard_of_slot, out[0], out[1], counts,
            )  # fmt: skip
            if asked == kernels.DONE:
                break
            if asked == kernels.NODES:
                flush(0)
            elif asked == kernels.LIST:
                flush(1)
            feeds[asked].refill()
            ended[asked] = feeds[asked].ended
            at[kernels.R_PARENT + asked - 1] = 0
        flush(0)
        flush(1)
        for i, sink in enumerate(sinks):
            name = f"shard-{('nodes', 'entries')[i]}-{k}"
            if isinstance(sink, Column):
                sink.finish()
            else:
                work.runs[name] = budget.finish(sink)
    work.keep(f"shard-counts-{k}", counts)
