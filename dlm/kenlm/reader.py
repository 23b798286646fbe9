"""Reads the n-grams of a KenLM binary file, as `ArpaReader` reads those of an ARPA file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.errors import KenlmFormatError
from dlm.kenlm import read_kernels as kernels
from dlm.kenlm.invert import Effort, Inversion
from dlm.kenlm.layout import DAMAGED, Data, ModelType, open_file
from dlm.kenlm.view import make_view, words_of
from dlm.ngram.arpa import ArpaReader, NgramBatch, provenance_line
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, MISSING_UNK_LOG10_PROB, Vocabulary
from dlm.progress import ProgressReporter, Tell
from dlm.resources import Closeable

F32, I64, U32 = np.float32, np.int64, np.uint32

KENLM = "kenlm"  # the value of `compression` for these files


class KenlmReader(Closeable):
    """The n-grams of a KenLM binary file of any type, in one pass.

    Values are the file's float32, without the signs that KenLM uses as flags. An n-gram that
    KenLM inserted because a longer one ends in it (a *blank*) is read like other n-grams; its
    probability is the score of backing off, and its weight is 0.

    Args    vocab     path of a list of words, one per line, for a file that stores none
            effort    limits for finding the words of n-grams in a file of hash tables
    Raises  KenlmFormatError  the file is damaged, or a key belongs to no n-gram
            ConfigError       the words are missing, or finding the n-grams exceeds the limits
    Guarantees
        each n-gram comes once, after its context; n-grams are sorted: from a trie, by their
        last words first; from hash tables, by their first words first
    Cost    memory: of a trie, the words and a batch; of hash tables, see invert.py
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab: str | os.PathLike[str] | None = None,
        effort: Effort,
        progress: Tell,
        batch_ngrams: int = 65536,
    ) -> None:
        self.path = os.fspath(path)
        self._data: Data
        self._data, self.layout = open_file(path)
        self._view = make_view(self._data, self.layout)
        self._list = vocab
        self._effort, self._progress = effort, progress
        self._batch_ngrams = batch_ngrams
        self._started = False

    def close(self) -> None:
        """Does nothing: the map is released with the reader."""

    @property
    def order(self) -> int:
        return self.layout.order

    @property
    def compression(self) -> str:
        return KENLM

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """N-grams by order, including blanks; a file of hash tables is read to count them."""
        words = self.layout.words - (not self._has_unk)
        if self.layout.model_type.is_trie:
            return (words, *self.layout.counts[1:])
        base = self._data.ctypes.data
        tables = [(base + t.at, t.entries, t.entry_size) for t in self.layout.levels]
        return (words, *(int(kernels.count_keys(*table)) for table in tables))

    @property
    def blanks(self) -> tuple[int, ...] | None:
        """The number of blanks by order; None for a trie, which does not show them."""
        if self.layout.model_type.is_trie:
            return None
        pairs = zip(self.counts[1:], self.layout.counts[1:], strict=True)
        return (0, *(found - listed for found, listed in pairs))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The words of the model, with KenLM's ids."""
        table = words_of(self._data, self.layout, self._view, self._list)
        vocabulary = table.vocabulary(unk_in_model=self._has_unk)
        missing = [w for w in (BEGIN_SENTENCE, END_SENTENCE) if w not in vocabulary]
        if missing:
            raise KenlmFormatError(
                f"the vocabulary lacks {' and '.join(word.decode() for word in missing)}",
                path=self.path,
                section="words",
                advice="A model of sentences needs both <s> and </s>; this one can be used only "
                "for scoring",
            )
        return vocabulary

    @cached_property
    def comments(self) -> list[str]:
        return [provenance_line("export", **self.facts)]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts for the provenance: the file, its blanks, and what it does not hold."""
        kind = self.layout.model_type
        lost = ["the exact decimals of the ARPA file"]
        if kind.is_quantised:
            lost.append("the values before quantisation")
        if kind is ModelType.REST_PROBING:
            lost.append("the rest costs")
        if self.blanks is None or any(self.blanks):
            lost.append("which n-grams are blanks")
        return {
            "method": "the n-grams of a KenLM binary file",
            "from": Path(self.path).name,
            "type": kind.name.lower(),
            "blanks": None if self.blanks is None else list(self.blanks),
            "lost": lost,
        }

    @property
    def source_facts(self) -> dict[str, Any]:
        digest = xxhash.xxh3_128_hexdigest(self._data.data)
        return {"file_bytes": self.layout.size, "file_xxh3_128": digest}

    def error_at(
        self, message: str, *, order: int, row: int, advice: str | None = None
    ) -> KenlmFormatError:
        return self._error(message, order, DAMAGED if advice is None else advice)

    def batches(self) -> Iterator[NgramBatch]:
        """Like `ArpaReader.batches`; finds the n-grams of hash tables while it runs."""
        if self._started:
            raise RuntimeError("a KenlmReader reads its file once; open another for a second pass")
        self._started = True
        return self._batches()

    def _batches(self) -> Iterator[NgramBatch]:
        blanks = "" if self.blanks is None else f"; {sum(self.blanks):,} of its n-grams are blanks"
        self._progress(f"{self.path} does not hold {'; '.join(self.facts['lost'])}{blanks}")
        first = not self.vocabulary.unk_in_model
        unigrams = self._unigrams
        for at in range(int(first), len(unigrams), self._batch_ngrams):
            values = unigrams[at : at + self._batch_ngrams]
            ids = np.arange(at, at + len(values), dtype=U32)[:, None]
            yield self._clean(
                NgramBatch(1, at - first, ids, -np.abs(values[:, 0]), values[:, 1].copy())
            )
        if self.layout.model_type.is_trie:
            found = self._of_trie()
        else:
            base, reporter = self._data.ctypes.data, ProgressReporter(self._progress)
            inversion = Inversion(self.layout, base, unigrams, self._effort, reporter)
            found = inversion.batches(self._batch_ngrams)
        yield from map(self._clean, found)

    @property
    def _unigrams(self) -> NDArray[np.float32]:
        layout = self.layout
        end = layout.unigrams_at + layout.words * layout.unigram_bytes
        rows = self._data[layout.unigrams_at : end].reshape(layout.words, layout.unigram_bytes)
        return np.ascontiguousarray(rows[:, :8]).view(F32)

    @cached_property
    def _has_unk(self) -> bool:
        """Whether the model listed `<unk>`, so that KenLM did not add it with its own value."""
        if not self.layout.model_type.is_trie:
            return self.layout.words == self.layout.counts[0]
        prob, weight = self._unigrams[0]
        if prob != MISSING_UNK_LOG10_PROB or weight.view(U32) != 0:
            return True
        return bool(kernels.has_unk(self._view.ctypes.data))

    def _of_trie(self) -> Iterator[NgramBatch]:
        for order in range(2, self.order + 1):
            cursors = np.zeros((order, kernels.CURSOR_FIELDS), I64)
            cursors[:, kernels.NODE] = -1
            count = self.counts[order - 1]
            for first in range(0, count, self._batch_ngrams):
                rows = min(self._batch_ngrams, count - first)
                ids = np.empty((rows, order), U32)
                prob, backoff = np.empty(rows, F32), np.empty(rows, F32)
                status = kernels.read_trie(
                    self._view.ctypes.data, order, first, cursors, ids, prob, backoff
                )
                if status < 0:
                    what = "a pointer" if status == kernels.BAD_POINTER else "a word"
                    raise self._error(f"{what} has a value that KenLM never writes", order, DAMAGED)
                yield NgramBatch(order, first, ids, prob, backoff)

    def _clean(self, batch: NgramBatch) -> NgramBatch:
        """Returns the batch without -0.0; raises KenlmFormatError for a value no model can have."""
        with np.errstate(invalid="ignore"):  # a NaN may warn; it is refused below
            prob, backoff = batch.log10_prob + F32(0), batch.log10_backoff + F32(0)
        if not bool((prob < np.inf).all()) or not bool(np.isfinite(backoff).all()):
            raise self._error("a value is infinite or NaN", batch.order, DAMAGED)
        if prob.max(initial=F32(0)) > 0:
            raise self._error(
                f"an n-gram has a log10 probability of {prob.max():g}, above 0, which ARPA does "
                "not allow; quantisation can cause this in a blank if a back-off weight exceeds 0",
                batch.order,
                "You can still score text with this file",
            )
        return NgramBatch(batch.order, batch.first_row, batch.ids, prob, backoff)

    def _error(self, message: str, order: int, advice: str) -> KenlmFormatError:
        return KenlmFormatError(message, path=self.path, section=f"{order}-grams", advice=advice)


# Reads the n-grams of a model's file once, in order.
NgramReader: TypeAlias = ArpaReader | KenlmReader
