"""Drops a model's highest orders, to make the model that a cascade falls back to.

The n-grams up to order K, with their weights, are a model of order K: an n-gram's probability is
complete in itself. This is not the model that would be estimated with order K from the same text:
Kneser-Ney's lower orders count the contexts in which a word occurs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dlm.errors import ConfigError
from dlm.kenlm.open import open_ngrams
from dlm.ngram.arpa import NgramBatch, SectionColumns, by_order, joined, write_arpa
from dlm.progress import Tell

_PARSER_BYTES = 64 << 20
_WORD_BYTES = 300


@dataclass(frozen=True)
class ReduceResult:
    counts_before: tuple[int, ...]
    counts: tuple[int, ...]


def needed_bytes(counts: Iterable[int]) -> int:
    counts = tuple(counts)
    rows = [(4 * k + 8) * count for k, count in enumerate(counts, 1)]
    # Batches of one order are joined, and are in memory twice at that moment.
    return sum(rows) + max(rows) + _WORD_BYTES * counts[0] + _PARSER_BYTES


def reduce_arpa(
    path: str | os.PathLike[str],
    order: int,
    output: str | os.PathLike[str],
    *,
    memory_bytes: int | None = None,
    comment: str | None = None,
    progress: Tell = lambda line: None,
) -> ReduceResult:
    """Writes the n-grams of an ARPA or KenLM file up to `order` as a model of that order.

    Raises
        ConfigError  the model lacks the order, or the memory limit is too low
        ArpaError    the file is malformed at or below `order`; higher orders are not read
    Guarantees
        the n-grams, their sequence and their values stay, except the weights of the highest order;
        `output` has either its old content or all of the new
    """
    search = None if memory_bytes is None else memory_bytes // 4
    with open_ngrams(path, memory_bytes=search, progress=progress) as reader:
        if not 1 <= order <= reader.order:
            raise ConfigError(
                f"--order is {order}, but {reader.path} has orders 1 to {reader.order}"
            )
        counts = tuple(reader.counts[:order])
        needed = needed_bytes(counts)
        if memory_bytes is not None and needed > memory_bytes:
            raise ConfigError(
                f"{sum(counts):,} n-grams need {needed:,} bytes of memory, but the limit is "
                f"{memory_bytes:,}; raise --memory"
            )
        batches = _first(reader.batches(), sum(counts))
        sections: list[SectionColumns] = [
            joined(list(some), k) for k, some in enumerate(by_order(batches, order), 1)
        ]
        sections[-1] = *sections[-1][:2], None
        comments = [*reader.comments, *([] if comment is None else [comment])]
        vocabulary = reader.vocabulary
        before = tuple(reader.counts)
    write_arpa(output, vocabulary, _by_id(sections), comments=comments)
    return ReduceResult(before, counts)


def _first(batches: Iterator[NgramBatch], left: int) -> Iterator[NgramBatch]:
    for batch in batches:
        yield batch
        left -= len(batch)
        if left == 0:
            if batch.order == 1:  # the words are known once all 1-grams are read
                next(batches, None)
            return


def _by_id(sections: list[SectionColumns]) -> list[SectionColumns]:
    """Sorts words by their ids, for the writer; `<unk>` may be anywhere in the file."""
    ids, prob, weight = sections[0]
    place = np.argsort(ids[:, 0], kind="stable")
    return [(ids[place], prob[place], None if weight is None else weight[place]), *sections[1:]]
