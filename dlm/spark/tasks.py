"""The work on one partition: Arrow batches in, Arrow batches out, by the local engine's code.

Nothing here depends on Spark; a stage's output is a function of its sorted rows, however they are
cut into partitions. N-grams are in columns w0, w1, ...: word ids, the most recent first, and NONE
beyond the beginning of a shorter one, so that an n-gram stands before those that it ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm.errors import EstimationError
from dlm.estimate.adjust.kernels import COUNT_BITS, PRUNED
from dlm.estimate.adjust.trie import TrieBuilder
from dlm.estimate.counts import block, kernels
from dlm.estimate.interpolate import kernels as interpolation
from dlm.estimate.interpolate.rows import log10_rows, ngram_blocks
from dlm.estimate.text import DELIMITERS, LineFault, fault_of, lines_of, may_have_fault
from dlm.ngram.arpa.writer import WordBytes, rows_text
from dlm.ngram.wordtable import PADDING, WordTable
from dlm.spill.column import Memory

NONE = -1

# Ids that are counted at once: with their places and the sorted keys, about 30 bytes each.
BLOCK_TOKENS = 1 << 21

# Rows processed at once, if they are not all of one group: about 100 bytes each.
GROUP_ROWS = 1 << 20

# Rows of text that are one value of the output.
TEXT_ROWS = 1 << 14

# The two kinds of rows of weighed n-grams.
NGRAM, CONTEXT = 0, 1

U32, I64, F32, F64 = np.uint32, np.int64, np.float32, np.float64


def names(order: int) -> list[str]:
    return [f"w{k}" for k in range(order)]


# ------------------------------------------------------------------------------------- text


def clean(column: Any) -> tuple[bytes, bytes, dict[LineFault, int], tuple[LineFault, int] | None]:
    """(clean text, all text, faulty lines by fault, the first fault and its line from 0 on)."""
    found: dict[LineFault, int] = {}
    first: tuple[LineFault, int] | None = None
    if column.null_count:
        found[LineFault.NULL_ROW] = column.null_count
        first = LineFault.NULL_ROW, column.is_null().index(True).as_py()
        column = column.drop_null()
    text = lines_of(column)
    if not text or not may_have_fault(text):
        return text, text, found, first
    kept = []
    for number, line in enumerate(text[:-1].split(b"\n")):
        fault = fault_of(line)
        if fault is None:
            kept.append(line)
            continue
        found[fault] = found.get(fault, 0) + 1
        first = first or (fault, number)
    return b"\n".join([*kept, b""]), text, found, first


class _Encoder:
    """Text to ids, by a table that knows all words or learns them."""

    def __init__(self, table: WordTable, skip: bool, capacity: int) -> None:
        self.table = table
        self.tokens = np.empty(capacity, U32)
        self.used = 0
        self.state = np.zeros(kernels.STATE, I64)
        self.state[[kernels.WORDS, kernels.WORD_BYTES]] = table.state(None)[:2]
        self._skip = skip

    def encode(self, text: bytes, learn: bool) -> Iterator[None]:
        """Adds the ids of whole lines; yields when full, to a caller that sets used to 0."""
        chars, at = np.frombuffer(text + PADDING, np.uint8), 0
        while at < len(text):
            # More than the longest word: a word is seen to be new where there is room for it.
            self.table.reserve(1 << 10, 1 << 17)
            before, words = at, int(self.state[kernels.WORDS])
            at, self.used = kernels.encode(
                chars, at, len(text), DELIMITERS, int(not self._skip), self.table.slots,
                self.table.word_begin, self.table.word_bytes, self.state, self.tokens, self.used,
            )  # fmt: skip
            if learn:
                self.table.settle(np.append(self.state[:2], -1))
            elif int(self.state[kernels.WORDS]) != words:
                raise EstimationError("the text changed while it was read; estimate again")
            if self.used:
                if at < len(text):
                    yield
            elif at == before and int(self.state[kernels.WORDS]) == words:
                # A line of more words than are counted at once: it has 1 MiB at most.
                self.tokens = np.empty(2 * len(self.tokens), U32)


WORDS_SCHEMA = "word binary, facts binary, path string, start bigint, place bigint"


def words_of_text(batches: Iterable[pa.RecordBatch], skip: bool) -> Iterator[pa.RecordBatch]:
    """The words of each part of a file, in the order in which they first occur, and its facts.

    Args
        batches  value binary, path string, start bigint: a line, its file, and the byte at
                 which its part of the file begins
    Returns
        word, path, start, and its number in that part; then one row without word whose facts are
        JSON: bytes, lines, empty, words, skipped (by fault), fault (the first, and its line from 1
        on) or null
    """
    part: tuple[str, int] | None = None
    encoder = _Encoder(_fresh_table(), skip, 1 << 20)
    size, before, skipped = 0, 0, dict[str, int]()
    fault: list[Any] | None = None

    def finished() -> Iterator[pa.RecordBatch]:
        assert part is not None
        words = encoder.table.words()[3:]
        n = len(words)
        facts = {
            "bytes": size,
            "lines": int(encoder.state[kernels.LINES]),
            "empty": int(encoder.state[kernels.EMPTY]),
            "words": int(encoder.state[kernels.TOKENS]),
            "skipped": skipped,
            "fault": fault,
        }
        yield pa.record_batch(
            {
                "word": pa.array([*words, None], pa.binary()),
                "facts": pa.array([None] * n + [json.dumps(facts).encode()], pa.binary()),
                "path": pa.array([part[0]] * (n + 1), pa.string()),
                "start": pa.array(np.full(n + 1, part[1], I64)),
                "place": pa.array(np.arange(n + 1)),
            }
        )

    for batch in batches:
        at = 0
        while at < batch.num_rows:
            here = batch.column("path")[at].as_py(), batch.column("start")[at].as_py()
            if here != part:
                if part is not None:
                    yield from finished()
                part, encoder = here, _Encoder(_fresh_table(), skip, 1 << 20)
                size, before, skipped, fault = 0, 0, {}, None
            end = _end_of_part(batch, at, here)
            column = batch.column("value").slice(at, end - at)
            text, read, found, first = clean(column)
            if first is not None and fault is None:
                fault = [str(first[0]), before + first[1] + 1]
            for name, count in found.items():
                skipped[str(name)] = skipped.get(str(name), 0) + count
            size += len(read)
            before += read.count(b"\n")
            for _ in encoder.encode(text, learn=True):
                encoder.used = 0
            encoder.used = 0
            at = end
    if part is not None:
        yield from finished()


def _fresh_table() -> WordTable:
    return WordTable([b"<unk>", b"<s>", b"</s>"])


def _end_of_part(batch: pa.RecordBatch, at: int, here: tuple[str, int]) -> int:
    end: int = batch.num_rows
    if (batch.column("path")[end - 1].as_py(), batch.column("start")[end - 1].as_py()) == here:
        return end
    low, high = at, end - 1  # rows of a part follow one another
    while high - low > 1:
        middle = (low + high) // 2
        if (
            batch.column("path")[middle].as_py(), batch.column("start")[middle].as_py()
        ) == here:  # fmt: skip
            low = middle
        else:
            high = middle
    return high


# ------------------------------------------------------------------------------------ counts


def counts_schema(order: int) -> str:
    return ", ".join([*(f"{name} int" for name in names(order)), "count bigint"])


def counted(
    batches: Iterable[pa.RecordBatch],
    order: int,
    skip: bool,
    table: WordTable,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[pa.RecordBatch]:
    """N-grams of the highest order in batches of lines (`value`), counted as far as memory goes."""
    encoder = _Encoder(table, skip, block_tokens)

    def gathered() -> Iterator[pa.RecordBatch]:
        tokens, encoder.used = encoder.tokens[: encoder.used], 0
        if not len(tokens):
            return
        for rows in block.counted_keys(tokens, len(table), order, pool, 1, block.BUCKET):
            columns = {name: rows[:, k].astype(np.int32) for k, name in enumerate(names(order))}
            yield pa.record_batch({**columns, "count": rows[:, order].astype(I64)})

    with ThreadPoolExecutor(1) as pool:
        for batch in batches:
            text = clean(batch.column("value"))[0]
            for _ in encoder.encode(text, learn=False):
                yield from gathered()
        yield from gathered()


# ---------------------------------------------------------------------------------- adjusting


def adjusted_schema(order: int) -> str:
    words = [f"{name} int" for name in names(order)]
    return ", ".join(["order int", *words, "count bigint", "actual bigint", "about binary"])


def adjusted(
    batches: Iterable[pa.RecordBatch],
    order: int,
    words: int,
    thresholds: Sequence[int],
    known: NDArray[np.uint8] | None,
    group_rows: int = GROUP_ROWS,
) -> Iterator[pa.RecordBatch]:
    """The n-grams of all orders with their adjusted counts.

    Args  batches  of `counted`, sorted; all keys with the same two last words are in one partition
    Returns
        of orders 2 and above: an n-gram, its adjusted count and PRUNED; of order 1: a word, how
        many words come before it here, and how often it occurs here; and one row of order 0, whose
        `about` is JSON: statistics (order, STATISTICS) of orders 2 and above, the last key, and of
        the n-grams that end it adjusted count and occurrences
    """
    statistics: NDArray[np.int64] | None = None
    last: dict[str, Any] = {}
    keys = names(order)
    for table in whole_groups(batches, keys[:2], group_rows):
        n = table.num_rows
        rows = np.empty((n, order + 1), U32)
        for k, name in enumerate([*keys, "count"]):
            rows[:, k] = table.column(name).to_numpy()
        memory = Memory(1 << 62, Path())  # as much as the rows themselves, at most
        builder = TrieBuilder(order, n, words, thresholds, known, memory, n + 8)
        builder.add(rows)
        actual = builder.open_actual
        trie = builder.finish(at_end=False)
        statistics = trie.statistics if statistics is None else statistics + trie.statistics
        ends = [
            int(column.read(len(column) - 1, len(column))[0]) & COUNT_BITS
            for column in trie.counts[: len(actual)]
        ]
        last = {
            "key": rows[-1, :order].tolist(),
            "nodes": list(zip(ends, actual, strict=True)),
        }
        own = trie.words[0].read(2, len(trie.words[0]))
        begins = np.flatnonzero(np.diff(rows[:, 0].astype(I64), prepend=-1))
        yield _adjusted_batch(
            order,
            own.reshape(-1, 1),
            trie.counts[0].read(2, len(trie.words[0])) & U32(COUNT_BITS),
            np.add.reduceat(rows[:, order].astype(I64), begins),
        )
        for k in range(2, order + 1):
            for begin, ids in ngram_blocks(trie, k):
                counts = trie.counts[k - 1].read(begin, begin + len(ids))
                yield _adjusted_batch(order, ids[:, ::-1], counts, np.zeros(len(ids), I64))
        trie.close()
    if statistics is not None:
        last["statistics"] = statistics.tolist()
        nothing = np.zeros((1, 0), U32)
        zero = np.zeros(1, I64)
        yield _adjusted_batch(order, nothing, zero, zero, json.dumps(last).encode())


def _adjusted_batch(
    order: int, words: NDArray[Any], counts: Any, actual: Any, about: bytes | None = None
) -> pa.RecordBatch:
    n = len(words)
    return pa.record_batch(
        {
            "order": np.full(n, words.shape[1], np.int32),
            **word_columns(words, order),
            "count": counts.astype(I64),
            "actual": actual,
            "about": pa.array([about] * n, pa.binary()),
        }
    )


def word_columns(words: NDArray[Any], order: int) -> dict[str, NDArray[np.int32]]:
    """Columns of n-grams, most recent word first, filled up to the highest order."""
    given = words.shape[1]
    return {
        name: words[:, k].astype(np.int32) if k < given else np.full(len(words), NONE, np.int32)
        for k, name in enumerate(names(order))
    }


def whole_groups(
    batches: Iterable[pa.RecordBatch], keys: Sequence[str], rows: int
) -> Iterator[pa.Table]:
    """Sorted rows in tables of about so many, but rows with equal keys always in one."""
    held: list[pa.RecordBatch] = []
    count, wanted = 0, rows
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        count += batch.num_rows
        if count < wanted:
            continue
        table = pa.Table.from_batches(held).combine_chunks()
        cut = int(group_begins(table, keys)[-1])
        if cut:
            yield table.slice(0, cut)
        held = table.slice(cut).to_batches()
        count -= cut
        wanted = max(rows, 2 * count)  # so that a large group is not looked at again and again
    if count:
        yield pa.Table.from_batches(held).combine_chunks()


def group_begins(table: pa.Table, keys: Sequence[str]) -> NDArray[np.intp]:
    begins = np.zeros(table.num_rows, np.bool_)
    begins[0] = True
    for key in keys:
        column = table.column(key).to_numpy()
        begins[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(begins)


# ------------------------------------------------------------------------------ interpolating


def weighed_schema(order: int) -> str:
    words = [f"{name} int" for name in names(order)]
    return ", ".join(
        ["order int", *words, "kind int", "count bigint", "gamma double", "total double"]
    )


def weighed(
    batches: Iterable[pa.RecordBatch],
    order: int,
    discounts: Sequence[NDArray[np.float32]],
    group_rows: int = GROUP_ROWS,
) -> Iterator[pa.RecordBatch]:
    """What follows each context, added up.

    Args
        batches  of `adjusted`, of orders 2 and above; all n-grams with one context are in one
                 partition, sorted by order, context, and last word
    Returns
        each n-gram that is kept (NGRAM), with the weight and the total of its context; and each
        context (CONTEXT), with its weight
    """
    keys = names(order)
    for piece in whole_groups(batches, ["order", *keys[1:]], group_rows):
        orders = piece.column("order").to_numpy()
        cuts = [*np.flatnonzero(np.diff(orders, prepend=-1)).tolist(), len(orders)]
        for low, high in pairwise(cuts):
            n, table = int(orders[low]), piece.slice(low, high - low)
            words = np.column_stack([table.column(key).to_numpy() for key in keys[:n]])
            counts = table.column("count").to_numpy().astype(U32)
            begins = group_begins(table, keys[1:n])
            links = np.zeros(len(counts), U32)
            links[begins[1:]] = 1
            links = np.cumsum(links, dtype=U32)
            sums = np.zeros((len(begins), 2))
            interpolation.add_up_bigrams(
                links, counts, 0, len(begins), discounts[n - 1].astype(F64), sums
            )
            interpolation.weights(sums, np.empty(len(begins), F32))
            kept = counts < PRUNED
            mine = sums[links[kept]]
            yield _weighed_batch(
                order, words[kept], NGRAM, counts[kept].astype(I64), mine[:, 0], mine[:, 1]
            )
            zeros = np.zeros(len(begins))
            yield _weighed_batch(
                order, words[begins, 1:], CONTEXT, zeros.astype(I64), sums[:, 0], zeros
            )


def _weighed_batch(
    order: int,
    words: NDArray[Any],
    kind: int,
    counts: NDArray[np.int64],
    gamma: NDArray[np.float64],
    total: NDArray[np.float64],
) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "order": np.full(len(words), words.shape[1], np.int32),
            **word_columns(words, order),
            "kind": np.full(len(words), kind, np.int32),
            "count": counts,
            "gamma": np.ascontiguousarray(gamma),
            "total": np.ascontiguousarray(total),
        }
    )


TEXT_SCHEMA = "order int, place bigint, value string"


def interpolated(
    batches: Iterable[pa.RecordBatch],
    order: int,
    discounts: Sequence[NDArray[np.float32]],
    unigrams: NDArray[np.float32],
    table: WordTable,
    group_rows: int = GROUP_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Blocks of rows of ARPA sections of orders 2 and above, and their places among the n-grams.

    Args
        batches   of `weighed`; all n-grams with the same two last words are in one partition,
                  sorted by their words and by kind
        unigrams  (words,)  probabilities
    """
    keys = names(order)
    spelling = WordBytes.of(table)
    place = 0
    for piece in whole_groups(batches, keys[:2], group_rows):
        words = np.column_stack([piece.column(key).to_numpy() for key in keys])
        orders, kinds, counts, gamma, total = (
            piece.column(name).to_numpy() for name in ("order", "kind", "count", "gamma", "total")
        )
        # The weight of a context stands right after its n-gram, if that is in the model.
        follows = np.zeros(len(words), np.bool_)
        follows[:-1] = (kinds[1:] == CONTEXT) & (words[1:] == words[:-1]).all(axis=1)
        shorter = np.zeros(0, np.intp)
        lower = unigrams
        for n in range(2, order + 1):
            at = np.flatnonzero((orders == n) & (kinds == NGRAM))
            if n == 2:
                parents, parent = np.unique(words[at, 0], return_inverse=True)
                below = lower[parents]
            else:
                # The n-gram that ends it is the last of its order before it.
                parent = np.searchsorted(shorter, at) - 1
                below = lower
                if len(at) and (
                    parent.min() < 0
                    or not np.array_equal(words[shorter[parent], : n - 1], words[at, : n - 1])
                ):
                    raise EstimationError(
                        f"a {n}-gram is kept in the model, but its suffix is not: the rows of a "
                        "partition are incomplete. This is a bug in dlm; report it"
                    )
            children = np.searchsorted(parent, np.arange(len(below) + 1)).astype(U32)
            probs = np.zeros(len(at), F32)
            interpolation.probabilities(
                children, 0, counts[at].astype(U32), np.arange(len(at), dtype=U32), below, 0,
                len(at), np.column_stack((gamma[at], total[at])), discounts[n - 1].astype(F64),
                probs,
            )  # fmt: skip
            backoffs = None
            if n < order:
                backoffs = np.ones(len(at), F32)
                with_weight = follows[at]
                backoffs[with_weight] = gamma[at[with_weight] + 1].astype(F32)
            ids = np.ascontiguousarray(words[at, :n][:, ::-1], U32)
            for text in section_text(ids, probs, backoffs, spelling):
                yield pa.record_batch(
                    {
                        "order": pa.array([n], pa.int32()),
                        "place": pa.array([place], pa.int64()),
                        "value": pa.array([text], pa.string()),
                    }
                )
                place += 1
            shorter, lower = at, probs


def section_text(
    ids: NDArray[np.uint32],
    probs: NDArray[np.float32],
    backoffs: NDArray[np.float32] | None,
    words: WordBytes,
) -> Iterator[str]:
    """Blocks of rows of a section, without their last line ends.

    Args
        ids              (n, order)  oldest word first
        probs, backoffs  (n,)        not logarithms
    """
    for begin in range(0, len(ids), TEXT_ROWS):
        some = slice(begin, begin + TEXT_ROWS)
        rows = log10_rows(ids[some], probs[some], None if backoffs is None else backoffs[some])
        for text in rows_text(words, rows):
            yield str(text[:-1], "utf-8")
