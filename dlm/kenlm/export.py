"""Writes the n-grams that a reader gives as an ARPA file, as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from dlm.kenlm.reader import NgramReader
from dlm.ngram.arpa import NgramBatch
from dlm.ngram.arpa.writer import ArpaWriter, RowColumns, WordBytes
from dlm.progress import ProgressReporter, Tell


def export_ngrams(
    reader: NgramReader, target: Path | IO[bytes], *, progress: Tell = lambda line: None
) -> int:
    """Writes a model as an ARPA file, whole or not at all.

    Args
        reader  not begun
        target  a path, compressed by its suffix, or an open file
    Returns     n-grams written
    Raises
        ArpaError, KenlmFormatError, ConfigError, OSError
    Cost
        memory: the reader's, and some blocks of text
    """
    counts = tuple(reader.counts)
    batches = _Batches(reader.batches(), ProgressReporter(progress), counts)
    words = WordBytes.of(reader.vocabulary)
    with ArpaWriter(target, words, counts, comments=reader.comments) as writer:
        for order in range(1, len(counts) + 1):
            writer.section(batches.of(order))
    return sum(counts)


class _Batches:
    """The batches of each order, as a writer takes them; the first of the next is held."""

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
