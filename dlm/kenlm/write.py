"""Writes a reader's n-grams as an ARPA file, and a model as a KenLM probing file, which KenLM opens
and scores like one that `build_binary` made.

KenLM needs the suffix of every n-gram. A missing suffix is added as a *blank*, with the score of
backing off, computed in KenLM's order. Signs are flags: the sign of a probability is clear if a
longer n-gram ends in this one, and a weight of 0 is -0.0 if no word follows.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.files import replacing
from dlm.kenlm import kernels
from dlm.kenlm.layout import FIXED, REFERENCE, ModelType, buckets_of
from dlm.ngram.arpa import NgramBatch, SectionColumns
from dlm.ngram.arpa.writer import ArpaWriter, RowColumns, WordBytes
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB, Vocabulary
from dlm.progress import ProgressReporter, Tell
from dlm.units import size_text

if TYPE_CHECKING:
    from dlm.kenlm.reader import NgramReader

F32, U32, I64 = np.float32, np.uint32, np.int64

MULTIPLIER = 1.5  # buckets per n-gram: KenLM's default
NEEDED_BYTES = 130  # bytes per n-gram, mostly for reading and writing
_SIGN = U32(1 << 31)
_SPARE = 1.1  # minimum number of buckets per entry


@dataclass(eq=False)
class _Order:
    """The n-grams of one order: first the model's, then blanks.

    Shapes  ids (n, k) uint32, keys (n,) int64, prob (n,) float32, backoff (n,) float32
            is_suffix (n,) bool   whether a longer n-gram ends in each n-gram
    """

    ids: NDArray[np.uint32]
    keys: NDArray[np.int64]
    prob: NDArray[np.float32]
    backoff: NDArray[np.float32]
    listed: int
    is_suffix: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        ids: NDArray[np.uint32],
        prob: NDArray[np.float32],
        backoff: NDArray[np.float32] | None,
        listed: int,
    ) -> _Order:
        keys = _keys(ids, 0, ids.shape[1])
        weight = np.zeros(len(ids), F32) if backoff is None else backoff.copy()
        weight[weight == 0] = F32(-0.0)
        suffix = np.zeros(len(ids), np.bool_)
        return cls(ids, keys, prob.copy(), weight, listed, suffix)

    @cached_property
    def by_key(self) -> NDArray[np.int64]:
        """Rows by ascending key, for searches; the longest n-grams are never searched."""
        return np.argsort(self.keys)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self.keys):
            return np.full(len(keys), -1, I64)
        asked = np.argsort(keys)  # successive searches then read neighbouring rows
        at = np.searchsorted(self.keys[self.by_key], keys[asked])
        rows = np.empty(len(keys), I64)
        rows[asked] = self.by_key[np.minimum(at, len(self.keys) - 1)]
        return np.where(self.keys[rows] == keys, rows, -1)


def check_memory(model: Path, counts: Sequence[int], memory_bytes: int) -> None:
    """Raises `ConfigError` if reading a model of `counts` n-grams and writing it as a probing file
    takes more than `memory_bytes`."""
    needed = NEEDED_BYTES * sum(counts)
    if needed > memory_bytes:
        raise ConfigError(
            f"{model} has {sum(counts):,} n-grams; writing them as a probing file takes about "
            f"{size_text(needed)} of memory, but the limit is {size_text(memory_bytes)}. Raise "
            "--memory on a larger machine, or give the model's ARPA file to KenLM's build_binary"
        )


def write_probing(
    path: Path,
    vocabulary: Vocabulary,
    sections: Sequence[SectionColumns],
    *,
    multiplier: float = MULTIPLIER,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[int, ...]:
    """Writes a complete probing file of a model, or nothing.

    Args    sections    n-grams of order 1, 2, ..., as `write_arpa` takes them
            multiplier  buckets per n-gram; more if blanks need it
    Returns       the number of blanks added, by order
    Raises
        ConfigError  order 1; an n-gram without its context, or two words or n-grams with one hash;
                     blanks in an order without n-grams; a word with a zero byte
        OSError
    Cost    memory: about 100 bytes per n-gram; see `check_memory`
    """
    if len(sections) < 2:
        raise ConfigError(
            "the model has order 1; a KenLM file needs order 2 or more. Write an ARPA file instead"
        )
    text = WordBytes.of(vocabulary)
    if bool((text.text[: text.begin[-1]] == 0).any()):
        word = next(word for word in vocabulary.words if 0 in word)
        raise ConfigError(
            f"the model has the word {word!r}, but in a KenLM file a zero byte ends a word. Remove "
            "the word, with `dlm filter`"
        )
    ids, prob, backoff = sections[0]
    words = len(vocabulary)
    unigrams = np.full(words, MISSING_UNK_LOG10_PROB, F32), np.zeros(words, F32)
    unigrams[0][ids[:, 0]] = prob
    if backoff is not None:
        unigrams[1][ids[:, 0]] = backoff
    orders = [_Order.of(np.arange(words, dtype=U32)[:, None], *unigrams, words)]
    orders += [_Order.of(*section, len(section[0])) for section in sections[1:]]
    for k in range(len(orders) - 1, 1, -1):
        progress(f"looking for the suffixes of {len(orders[k].keys):,} {k + 1}-grams")
        orders[k - 1] = _closed(orders[k - 1], orders[k])
    for shorter, order in itertools.pairwise(orders):
        progress(f"linking {len(order.keys):,} {order.ids.shape[1]}-grams")
        _link(shorter, order)
    if not vocabulary.unk_in_model:
        orders[0].backoff[0] = 0.0
    counts = [words - (not vocabulary.unk_in_model), *(order.listed for order in orders[1:])]
    blanks = tuple(len(order.keys) - order.listed for order in orders)
    for k, order in enumerate(orders[1:], 2):
        if len(order.keys) > order.listed == 0:  # its table has one bucket, whatever the multiplier
            raise ConfigError(
                f"the model lists no {k}-grams, but longer n-grams end in {len(order.keys):,} "
                "unlisted ones, for which a KenLM file has no room; add the missing n-grams with "
                "`dlm shard --repair`, and export the repaired shard set"
            )
        if order.listed and buckets_of(order.listed, multiplier) < _SPARE * len(order.keys):
            multiplier = 1.01 * _SPARE * len(order.keys) / order.listed
    progress(
        f"writing {path}: {sum(map(len, (o.keys for o in orders))):,} n-grams, "
        f"{sum(blanks):,} of them blanks"
    )
    header = REFERENCE + FIXED.pack(len(orders), multiplier, ModelType.PROBING, 1, 0)
    header += struct.pack(f"<{len(counts)}Q", *counts)
    with replacing(path) as file:
        file.write(header + bytes(-len(header) % 8))
        hashes = np.empty(words, I64)
        kernels.hash_words(text.text, text.begin, hashes)
        file.write(struct.pack("<2I", 0, words))
        number = np.arange(1, words, dtype=U32)[:, None]
        file.write(_table(hashes[1:], number, buckets_of(counts[0], multiplier), "words").data)
        first = orders[0]
        pairs = np.zeros((counts[0] + 1, 2), U32)
        # As in KenLM, the probability of a word that is no suffix keeps its sign, which a 0 lacks.
        pairs[:words, 0] = np.where(first.is_suffix, np.abs(first.prob), first.prob).view(U32)
        pairs[:words, 1] = first.backoff.view(U32)
        file.write(pairs.data)
        for k, order in enumerate(orders[1:], 2):
            bits = np.abs(order.prob).view(U32) | np.where(order.is_suffix, U32(0), _SIGN)
            values = [bits] if k == len(orders) else [bits, order.backoff.view(U32)]
            buckets = buckets_of(order.listed, multiplier)
            progress(f"writing {len(order.keys):,} {k}-grams")
            file.write(_table(order.keys, np.stack(values, 1), buckets, f"{k}-word n-grams").data)
        file.write(b"\0".join([b"<unk>", *vocabulary.words[1:], b""]))
    return blanks


def _keys(ids: NDArray[np.uint32], begin: int, end: int) -> NDArray[np.int64]:
    keys = np.empty(len(ids), I64)
    kernels.keys_of(np.ascontiguousarray(ids), begin, end, keys)
    return keys


def _closed(order: _Order, longer: _Order) -> _Order:
    """Returns the order with a blank (no values yet) for each suffix in `longer` that it lacks."""
    keys = _keys(longer.ids, 1, longer.ids.shape[1])
    lost = np.flatnonzero(order.rows_of(keys) < 0)
    _, places = np.unique(keys[lost], return_index=True)
    new = longer.ids[lost[np.sort(places)], 1:]
    if not len(new):
        return order
    zeros = np.zeros(len(new), F32)
    return _Order.of(
        np.concatenate([order.ids, new]),
        np.concatenate([order.prob, zeros]),
        np.concatenate([order.backoff, zeros]),
        order.listed,
    )


def _link(shorter: _Order, order: _Order) -> None:
    """Sets the flags of contexts and suffixes in `shorter`, and the scores of blanks in `order`."""
    k = order.ids.shape[1]
    if k == 2:
        context, suffix = (order.ids[:, j].astype(I64) for j in range(2))
    else:
        context = shorter.rows_of(_keys(order.ids, 0, k - 1))
        suffix = shorter.rows_of(_keys(order.ids, 1, k))
    if bool((context < 0).any()):
        lost = int(np.count_nonzero(context < 0))
        raise ConfigError(
            f"{lost:,} n-grams of {k} words have a context that is not in the model, so KenLM "
            "refuses them; `dlm shard --repair` adds the contexts"
        )
    blank = slice(order.listed, None)
    order.prob[blank] = -np.abs(shorter.prob[suffix[blank]]) + shorter.backoff[context[blank]]
    shorter.is_suffix[suffix] = True
    followed = np.zeros(len(shorter.keys), np.bool_)
    followed[context] = True
    shorter.backoff[followed & (shorter.backoff == 0)] = 0.0


def _table(
    keys: NDArray[np.int64], values: NDArray[np.uint32], buckets: int, what: str
) -> NDArray[np.uint32]:
    table = np.zeros((buckets, 2 + values.shape[1]), U32)
    if bool((keys == 0).any()) or kernels.fill_table(keys, values, table) != len(keys):
        raise ConfigError(
            f"two of the {what} have the same hash, so KenLM cannot tell them apart; remove one of "
            "them, or write an ARPA file"
        )
    return table


# --------------------------------------------------------------------------- as an ARPA file


def export_ngrams(
    reader: NgramReader, target: Path | IO[bytes], *, progress: Tell = lambda line: None
) -> int:
    """Writes a complete ARPA file of a model, or nothing; returns the number of n-grams. The reader
    must be unused. Raises ArpaError, KenlmFormatError, ConfigError, OSError."""
    counts = tuple(reader.counts)
    batches = _Batches(reader.batches(), ProgressReporter(progress), counts)
    words = WordBytes.of(reader.vocabulary)
    with ArpaWriter(target, words, counts, comments=reader.comments) as writer:
        for order in range(1, len(counts) + 1):
            writer.section(batches.of(order))
    return sum(counts)


class _Batches:
    """Gives a writer one order's batches; holds back the first batch of the next order."""

    def __init__(
        self, batches: Iterator[NgramBatch], reporter: ProgressReporter, counts: tuple[int, ...]
    ) -> None:
        self._batches, self._reporter, self._counts = batches, reporter, counts
        self._held = next(batches, None)

    def of(self, order: int) -> Iterator[Callable[[], RowColumns]]:
        count = self._counts[order - 1]
        if self._held is not None and self._held.order == order:
            self._reporter.stage(f"writing {count:,} {order}-grams", count, "n-grams")
        while self._held is not None and self._held.order == order:
            batch, self._held = self._held, None
            yield partial(_columns, batch, order == len(self._counts))
            self._reporter.step(len(batch))
            self._held = next(self._batches, None)


def _columns(batch: NgramBatch, top: bool) -> RowColumns:
    return RowColumns(batch.ids, batch.log10_prob, None if top else batch.log10_backoff)
