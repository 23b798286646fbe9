"""The n-grams of one partition as a suffix trie, from counts to text, by the local engine's code.

A partition has all n-grams whose last two words are in a range of pairs (`text.pairs_of`). Their
contexts lack the last word, so they are elsewhere: a partition sends each n-gram to the one that
has its context, its *home*, and gets back the sums after that context in the whole text. N-grams
are sent as parts of the trie, in its order, and the answers have the same order, so neither needs
keys.

Nothing here depends on Spark. A stage takes values in any order and yields (partition, value);
values for the driver go to an additional partition, the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.errors import EstimationError
from dlm.estimate.adjust.kernels import COUNT_BITS, PRUNED
from dlm.estimate.adjust.trie import ROOM, Trie, TrieBuilder
from dlm.estimate.interpolate import kernels
from dlm.estimate.interpolate.rows import ROWS, log10_rows, section_rows
from dlm.ngram.arpa.writer import WordBytes, rows_text
from dlm.ngram.wordtable import WordTable
from dlm.spark.text import pairs_of
from dlm.spill.column import Column, Memory
from dlm.spill.merge import merge_to_fan_in, merged_sums

# Memory for pieces of runs while they are merged.
MERGE_BYTES = 64 << 20

# Rows of text in one value: about 300 kB, which stay in cache on the way to a file.
TEXT_ROWS = 1 << 13

U32, I64, F32, F64 = np.uint32, np.int64, np.float32, np.float64
Ids = NDArray[np.uint32]
_LARGEST = 0xFFFFFFFF


class Levels(NamedTuple):
    """A trie, or a part of one, in the form in which it is sent: by order, in as few bytes as its
    numbers need.

    words   the leftmost word of each n-gram
    counts  twice the adjusted count of each n-gram, plus 1 if the n-gram is left out
    sizes   for orders below the highest: how many n-grams are one word longer to the left
    """

    words: list[Ids]
    counts: list[NDArray[Any]]
    sizes: list[NDArray[Any]]

    @classmethod
    def of(cls, words: list[Ids], counts: list[Ids], sizes: list[NDArray[Any]]) -> Levels:
        """Makes levels from counts with the PRUNED bit, as in a Trie."""
        once = U32(1)
        turned = [_small(own << once | own >> U32(31)) for own in counts]
        return cls(words, turned, [_small(own) for own in sizes])


def _small(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _counts(sent: Sequence[NDArray[Any]]) -> Ids:
    turned = np.concatenate(sent, dtype=U32, casting="unsafe")
    return turned >> U32(1) | turned << U32(31)


def _children(sent: Sequence[NDArray[Any]]) -> Ids:
    out = np.zeros(sum(map(len, sent)) + 1, U32)
    np.cumsum(np.concatenate(sent), out=out[1:])
    return out


class About(NamedTuple):
    """The facts that the driver gets about a partition.

    statistics  (order, STATISTICS) of orders 2 and above
    key, nodes  the last key; adjusted count and occurrences of each n-gram that ends the key
    left        words, and how many words come before each
    actual      words, and the count of each; a word may occur twice
    """

    statistics: NDArray[np.int64]
    key: list[int]
    nodes: list[tuple[int, int]]
    left: tuple[Ids, Ids]
    actual: tuple[Ids, NDArray[np.int64]]


class Weights(NamedTuple):
    """The backoff weights of some words, for the driver."""

    words: Ids
    backoffs: NDArray[np.float32]


class HomeTrie(NamedTuple):
    """The trie that a partition keeps; `backoffs` are those of orders 2 and above, once known."""

    levels: Levels
    backoffs: list[NDArray[np.float32]]


class Grams(NamedTuple):
    """The n-grams that partition `sender` sends to the partition of their contexts."""

    sender: int
    levels: Levels


# For the contexts of some n-grams: the total count of what follows each context, in any integer
# type; and the weights, but only for totals other than 1 (for 1: the discount of a count of 1).
Answer = tuple[NDArray[Any], NDArray[np.float64]]


class Sums(NamedTuple):
    """The answers of partition `sender` for the kept n-grams, by order from 2 on."""

    sender: int
    sums: list[Answer]


# ---------------------------------------------------------------------------------- adjusting


def adjusted(
    part: int,
    blocks: Iterable[bytes],
    order: int,
    words: int,
    thresholds: Sequence[int],
    known: NDArray[np.uint8] | None,
    bounds: NDArray[np.uint64],
) -> Iterator[tuple[int, Any]]:
    """Turns counted n-grams (blocks of `text.counted`) into n-grams of all orders with adjusted
    counts. Yields a HomeTrie, Grams and, if there are any n-grams, an About."""
    memory = Memory(1 << 62, Path())
    runs = []
    for block in blocks:
        rows = np.frombuffer(block, U32).reshape(order + 1, -1).T
        runs.append(Column(U32, order + 1, memory=memory, most=len(rows)))
        runs[-1].append(rows)
    most = sum(map(len, runs))
    room = min(most, ROOM) + 8
    builder = TrieBuilder(order, most, words, thresholds, known, memory, room)
    ids, often, key = [], [], []
    for rows in merged_sums(merge_to_fan_in(runs, MERGE_BYTES, memory), MERGE_BYTES):
        builder.add(rows)
        begins = np.flatnonzero(np.diff(rows[:, 0].astype(I64), prepend=-1))
        ids.append(rows[begins, 0])
        often.append(np.add.reduceat(rows[:, order].astype(I64), begins))
        key = rows[-1, :order].tolist()
    actual = builder.open_actual
    trie = builder.finish(at_end=False)
    del runs
    all_ids, counts = (
        [own.read(0, len(own)) for own in each] for each in (trie.words, trie.counts)
    )
    levels = Levels.of(all_ids, counts, [np.diff(own.read(0, len(own))) for own in trie.children])
    if key:
        ends = [int(own[-1]) & COUNT_BITS for own in counts[: len(actual)]]
        left = all_ids[0][2:], counts[0][2:] & U32(COUNT_BITS)
        yield (
            len(bounds) + 1,
            About(
                trie.statistics,
                key,
                list(zip(ends, actual, strict=True)),
                left,
                (np.concatenate(ids), np.concatenate(often)),
            ),
        )
    yield part, HomeTrie(levels, [])
    for home, grams in _by_home(levels, bounds):
        yield home, Grams(part, grams)


def _homes(levels: Levels, bounds: NDArray[np.uint64]) -> list[NDArray[Any]]:
    """Finds the partition that has the context of each n-gram, by order from 2 on; if the context
    is a word, the first partition that may have this word."""
    small = np.uint16 if len(bounds) < 1 << 16 else U32
    homes = [np.searchsorted(bounds, pairs_of(levels.words[1], 0), "right").astype(small)]
    for n in range(3, len(levels.words) + 1):
        sizes = levels.sizes[n - 2]
        if n == 3:
            pairs = pairs_of(np.repeat(levels.words[1], sizes), levels.words[2])
            homes.append(np.searchsorted(bounds, pairs, "right").astype(small))
        else:
            homes.append(np.repeat(homes[-1], sizes))
    return homes


def _by_home(levels: Levels, bounds: NDArray[np.uint64]) -> Iterator[tuple[int, Levels]]:
    """Splits the n-grams of orders 2 and above by the home of their contexts. A 2-gram goes to each
    home that may have its first word, since the 3-grams that it ends are in several partitions."""
    top = len(levels.words)
    if top < 2:
        return
    homes = _homes(levels, bounds)
    last = np.searchsorted(bounds, pairs_of(levels.words[1], _LARGEST), "right")
    several = np.flatnonzero(last > homes[0])
    several_first, several_last = homes[0][several], last[several]
    places = [np.argsort(own, kind="stable") for own in homes]
    parts = np.arange(len(bounds) + 2)
    cuts = [np.searchsorted(own[place], parts) for own, place in zip(homes, places, strict=True)]
    parents = above = np.zeros(0, I64)
    if top > 2:
        parents = np.repeat(np.arange(len(levels.words[1])), levels.sizes[1])
    for home in range(len(bounds) + 1):
        sent = Levels([], [], [])
        for n in range(2, top + 1):
            own = places[n - 2][cuts[n - 2][home] : cuts[n - 2][home + 1]]
            if n == 2:
                more = several[(several_first < home) & (home <= several_last)]
                own = np.sort(np.concatenate((own, more))) if len(more) else own
                if not len(own):
                    break
            elif n == 3:
                places_of = np.searchsorted(parents[own], np.append(above, len(levels.words[1])))
                sent.sizes.append(_small(np.diff(places_of)))
            else:
                sent.sizes.append(levels.sizes[n - 2][above])
            sent.words.append(levels.words[n - 1][own])
            sent.counts.append(levels.counts[n - 1][own])
            above = own
        if sent.words:
            yield home, sent


# ------------------------------------------------------------------------------ interpolating


def weighed(
    part: int,
    values: Iterable[Any],
    order: int,
    discounts: Sequence[NDArray[np.float32]],
    bounds: NDArray[np.uint64],
) -> Iterator[tuple[int, Any]]:
    """Adds up what follows a partition's contexts (its HomeTrie) in the n-grams sent to it (Grams);
    yields Sums for their senders, the HomeTrie with weights, and Weights of words."""
    levels = Levels([], [], [])
    sent: dict[int, Levels] = {}
    for value in values:
        if isinstance(value, Grams):
            sent[value.sender] = value.levels
        else:
            levels = value.levels
    # Senders are sorted, not taken as they arrive, since sums of floats depend on the order.
    senders = sorted(sent)
    answers: list[list[Answer]] = [[] for _ in senders]
    backoffs: list[NDArray[np.float32]] = []
    above = np.zeros(0, U32)
    for n in range(2, order + 1) if senders else ():
        words = np.concatenate([sent[sender].words[n - 2] for sender in senders])
        counts = _counts([sent[sender].counts[n - 2] for sender in senders])
        own = discounts[n - 1].astype(F64)
        if n == 2:
            contexts, places = np.unique(words, return_inverse=True)
            links = places.astype(U32)
            sums = np.zeros((len(contexts), 2))
            kernels.add_up_bigrams(links, counts, 0, len(contexts), own, sums)
        else:
            children = _children([sent[sender].sizes[n - 3] for sender in senders])
            links, sums = np.zeros(len(words), U32), np.zeros((len(levels.words[n - 2]), 2))
            kernels.add_up(
                above, children, 0, words, counts, 0, len(levels.words[n - 3]),
                _children([levels.sizes[n - 3]]), 0, 0, levels.words[n - 2], own, sums, links,
            )  # fmt: skip
        weight = np.empty(len(sums), F32)
        kernels.weights(sums, weight)
        answered = counts < PRUNED
        above = links
        if n == 2:
            mine = np.searchsorted(bounds, pairs_of(contexts, 0), "right") == part
            yield len(bounds) + 1, Weights(contexts[mine], weight[mine])
            answered &= mine[links]
            # Words that are not in this partition have no children here.
            ranks = np.searchsorted(levels.words[0], contexts)
            above = np.minimum(ranks, len(levels.words[0]) - 1).astype(U32)[links]
        else:
            backoffs.append(weight)
        ends = np.cumsum([len(sent[sender].words[n - 2]) for sender in senders])
        for answer, begin, end in zip(answers, [0, *ends], ends, strict=False):
            found = links[begin:end][answered[begin:end]]
            totals = sums[found, 1]
            answer.append((_small(totals), sums[found[totals != 1], 0]))
    if not senders:
        backoffs = [np.ones(len(own), F32) for own in levels.words[1 : order - 1]]
    for sender, answer in zip(senders, answers, strict=True):
        yield sender, Sums(part, answer)
    yield part, HomeTrie(levels, backoffs)


def interpolated(
    values: Iterable[Any],
    order: int,
    discounts: Sequence[NDArray[np.float32]],
    unigrams: NDArray[np.float32],
    words: WordBytes,
    bounds: NDArray[np.uint64],
) -> Iterator[tuple[int, bytes]]:
    """Yields rows of ARPA sections, from order 2 on: the order, and text without its last line end.

    Args  values    the HomeTrie of the partition, and the Sums for it
          unigrams  (words,)  probabilities
    """
    answers: dict[int, list[Answer]] = {}
    home = HomeTrie(Levels([], [], []), [])
    for value in values:
        if isinstance(value, Sums):
            answers[value.sender] = value.sums
        else:
            home = value
    levels = home.levels
    homes = _homes(levels, bounds)
    all_counts = [_counts([own]) for own in levels.counts]
    children = [_children([own]) for own in levels.sizes]
    ids, numbers, ranks = (
        [_column(own) for own in each] for each in (levels.words, all_counts, children)
    )
    trie = Trie(ids, numbers, ranks, np.zeros((0, 0), I64))
    lower = unigrams[levels.words[0]]
    for n in range(2, order + 1):
        counts = all_counts[n - 1]
        own_discounts = discounts[n - 1].astype(F64)
        kept = np.flatnonzero(counts < PRUNED)
        given = [answers[sender][n - 2] for sender in sorted(answers)]
        if (found := sum(len(totals) for totals, _ in given)) != len(kept):
            raise EstimationError(
                f"received the sums of {found:,} contexts for {len(kept):,} {n}-grams of a "
                "partition; expected one each. This is a bug in dlm; report it"
            )
        sums = np.empty((len(kept), 2))
        if len(kept):
            places = np.argsort(homes[n - 2][kept], kind="stable")
            totals = np.concatenate([own for own, _ in given])
            weights = np.full(len(kept), own_discounts[1])
            weights[totals != 1] = np.concatenate([own for _, own in given])
            sums[places, 0], sums[places, 1] = weights, totals
        links = np.zeros(len(counts), U32)
        links[kept] = np.arange(len(kept), dtype=U32)
        probs = np.zeros(len(counts), F32)
        kernels.probabilities(
            children[n - 2], 0, counts, links, lower, 0, len(kept), sums, own_discounts, probs,
        )  # fmt: skip
        backoffs = _column(home.backoffs[n - 2]) if n < order else None
        for read in section_rows(trie, n, _column(probs), backoffs, TEXT_ROWS):
            for text in rows_text(words, read()):
                yield n, bytes(text[:-1])
        lower = probs


def unigram_text(
    table: WordTable,
    counts: NDArray[np.uint32],
    probs: NDArray[np.float32],
    backoffs: NDArray[np.float32] | None,
) -> Iterator[memoryview]:
    """Yields the rows of order 1 in blocks; arrays are (words,), `counts` with the PRUNED bit."""
    words = WordBytes.of(table)
    for begin in range(0, len(counts), ROWS):
        ids = np.arange(begin, min(begin + ROWS, len(counts)), dtype=U32)
        some = slice(begin, begin + ROWS)
        weights = None if backoffs is None else backoffs[some]
        yield from rows_text(
            words, log10_rows(ids.reshape(-1, 1), probs[some], weights, counts[some])
        )


def _column(array: NDArray[Any]) -> Column:
    column = Column(array.dtype, most=len(array))
    column.append(array)
    return column
