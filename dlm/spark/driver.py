"""The driver's work on the partitions' results: words and their counts, which it keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlm.errors import EstimationError
from dlm.estimate.adjust.kernels import (
    ALL,
    BOS,
    COUNT_BITS,
    EOS,
    KEPT,
    PRUNED,
    STATISTICS,
)
from dlm.estimate.adjust.trie import TOO_OFTEN
from dlm.estimate.settings import EstimationSettings
from dlm.estimate.text import LineFault, Totals, complaint
from dlm.ngram.wordtable import WordTable
from dlm.spark.text import pairs_of
from dlm.spark.tries import About

# Ids are `int` in Spark.
MAX_WORDS = (1 << 31) - 1


def take_facts(totals: Totals, rows: pa.Table, skip: bool) -> None:
    """Adds up the facts (of `text.words_of_text`, in the order of the text); EstimationError for a
    line with a fault, unless `skip`."""
    for facts, path, start in zip(
        *(rows.column(name).to_pylist() for name in ("facts", "path", "start")), strict=True
    ):
        own = json.loads(facts)
        if own["fault"] is not None and not skip:
            fault, line = own["fault"]
            where = f"{path}, line {line:,}"
            if start:
                where += f" of the part that begins at byte {start:,}"
            raise EstimationError(complaint(LineFault(fault), where))
        totals.bytes += own["bytes"]
        totals.lines += own["lines"] - (own["empty"] if skip else 0)
        totals.empty += own["empty"]
        totals.words += own["words"]
        for name, count in own["skipped"].items():
            totals.skipped[LineFault(name)] = totals.skipped.get(LineFault(name), 0) + count


def table_of(words: pa.ChunkedArray) -> WordTable:
    """The words of a text by id, from distinct words in the order in which they first occur;
    EstimationError for too many."""
    if len(words) + 3 > MAX_WORDS:
        raise EstimationError(
            f"{len(words):,} different words; expected at most {MAX_WORDS:,}. Give less text, or a "
            "tokenizer that has fewer"
        )
    lengths = pc.binary_length(words).to_numpy()
    begin = np.concatenate(([0, 5, 8, 12], 12 + np.cumsum(lengths, dtype=np.int64)))
    text = b"".join([b"<unk><s></s>", *map(_bytes_of, words.chunks)])
    return WordTable.from_arrays(np.frombuffer(text, np.uint8), begin)


def _bytes_of(column: pa.Array) -> bytes:
    if not len(column):
        return b""
    values = column.cast(pa.large_binary())
    ends = np.frombuffer(values.buffers()[1], np.int64)[
        values.offset : values.offset + len(values) + 1
    ]
    return bytes(values.buffers()[2].slice(int(ends[0]), int(ends[-1] - ends[0])).to_pybytes())


def bounds_of(counts: NDArray[np.int64], partitions: int) -> NDArray[np.uint64]:
    """Where partitions begin, as `text.pairs_of`, so that they have about as much text.

    Args  counts  (words,)  how often each occurs, `<s>` as often as `</s>`
    A word that is in several partitions is cut as if the words before it were those of all text.
    """
    last = np.cumsum(np.where(np.arange(len(counts)) == BOS, 0, counts))
    before = np.cumsum(np.where(np.arange(len(counts)) == EOS, 0, counts))
    wanted = np.arange(1, partitions) * (int(last[-1]) / partitions)
    word = np.searchsorted(last, wanted, "right")
    share = (wanted - (last[word] - counts[word])) / np.maximum(counts[word], 1)
    return pairs_of(word, np.searchsorted(before, np.clip(share, 0, 1) * int(before[-1])))


def statistics_of(
    settings: EstimationSettings,
    abouts: Sequence[About],
    words: int,
    known: NDArray[np.uint8] | None,
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """`statistics` of all orders and `counts[0]`, with PRUNED, as a Trie has them; from those of
    the partitions."""
    order = settings.order
    statistics = np.zeros((order, STATISTICS), np.int64)
    left, actual = np.zeros(words, np.int64), np.zeros(words, np.int64)
    for about in abouts:
        statistics[1:] += about.statistics[1:]
        left[about.left[0]] += about.left[1]
        np.add.at(actual, *about.actual)
    last = max(abouts, key=lambda about: about.key)
    counts = actual if order == 1 else left
    if int(counts.max()) > COUNT_BITS:
        raise EstimationError(TOO_OFTEN)
    pruned = actual <= settings.thresholds[0]
    if known is not None:
        pruned |= known == 0
    pruned[: EOS + 1] = False
    statistics[0, :4] = np.bincount(np.minimum(counts, 5), minlength=6)[1:5]
    statistics[0, ALL] = words
    statistics[0, KEPT] = words - int(pruned.sum())
    # The n-grams that end the last of all enter by how often they occur: see the local engine.
    nodes = [(int(counts[last.key[0]]), int(actual[last.key[0]])), *last.nodes[1:]]
    for n, (adjusted, often) in enumerate(nodes[: order - 1]):
        if 1 <= adjusted <= 4:
            statistics[n, adjusted - 1] -= 1
        if 1 <= often <= 4:
            statistics[n, often - 1] += 1
    return statistics, counts.astype(np.uint32) | np.where(pruned, PRUNED, 0).astype(np.uint32)
