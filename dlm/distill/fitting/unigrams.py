"""Puts separately counted unigrams of a longer list of words into a model (FNG 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.distill.fitting import kernels
from dlm.distill.fitting.fit import as_log10
from dlm.distill.sources.capitalize import Spellings
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.columns.orders import OrderColumns
from dlm.ngram.vocab import MARKS, Vocabulary, is_mark
from dlm.record.counts_file import read_counts
from dlm.record.inputs import record_or_word
from dlm.record.provenance import Provenance, file_digest
from dlm.record.sidecar import sidecar

F32, U32 = np.float32, np.uint32


@dataclass(frozen=True, eq=False)
class Unigrams:
    """Words, without marks, and how often each is used. `shares` (words,) are above 0, in
    proportion to use, and need not sum to 1; `record` says how users are protected."""

    words: list[bytes]
    shares: NDArray[np.float64]
    record: Provenance | None

    @classmethod
    def of(
        cls, words: list[bytes], shares: NDArray[np.float64], record: Provenance | None
    ) -> Unigrams:
        """Leaves out marks, and words without a share."""
        there = [not is_mark(w) and n > 0 for w, n in zip(words, shares.tolist(), strict=True)]
        return cls(
            [w for w, stays in zip(words, there, strict=True) if stays], shares[there], record
        )

    def cased(self, model: ModelColumns) -> Unigrams:
        """Splits each word's share over the word's spellings by a model of cased text; raises the
        errors of `Spellings`."""
        vocabulary = Vocabulary([*MARKS, *self.words], unk_in_model=True)
        spellings = Spellings(vocabulary, model)
        shares = spellings.spread(np.concatenate([np.zeros(len(MARKS)), self.shares]))
        return Unigrams.of(spellings.vocabulary.words, shares, self.record)


def read_unigrams(path: Path, public: str = "") -> Unigrams:
    """Reads counts that `dlm unigrams` wrote, and their privacy record; without a record, `public`
    says who attests the counts. Raises FormatError; PrivacyError if the record does not match
    the counts, or if counts declared public come from users, as files beside them show."""
    counts = read_counts(path)
    record = counts.provenance if sidecar(path).exists() else None
    if record is None:
        record = record_or_word(
            path, "the unigrams", None, by=public, setting="--public-attested-by",
            sha256=file_digest(path), promises=False, simulated=False,
        )  # fmt: skip
    return Unigrams.of([word.encode() for word in counts.words], counts.probabilities(), record)


def check_weight(weight: float) -> None:
    if not 0 < weight <= 1:
        raise ConfigError(f"--unigram-weight is {weight}; expected a number above 0 and at most 1")


def with_unigrams(
    model: ModelColumns,
    unigrams: Unigrams,
    weight: float = 1.0,
    *,
    cased: ModelColumns | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelColumns:
    """Replaces the unigrams of a model; every context keeps its sum.

    Words that were not counted, including `</s>` and `<unk>`, keep their probability; the counted
    words share the rest. Counted words that the model lacks are added.

    Args
        model   closed under suffixes, as models fitted here are
        weight  of the counts, above 0 and at most 1; the model's own unigrams get the rest
    Raises      ConfigError  no counted word is in the model
    Paper       FNG 3.3 replaces the unigrams (weight 1); FNG 3 mentions interpolation
    """
    check_weight(weight)
    unigrams = unigrams if cased is None else unigrams.cased(cased)
    words, shares = unigrams.words, unigrams.shares
    known = model.vocabulary
    new = [word for word in words if word not in known]
    if len(new) == len(words):
        raise ConfigError(
            f"the model knows none of the {len(words):,} words of the unigram counts; give counts "
            "of the model's words, in the same spelling and case"
        )
    if progress is not None:
        progress(
            f"{len(words):,} words got the frequencies of the counts; {len(new):,} of them are new"
        )
    vocabulary = Vocabulary([*known.words, *new], unk_in_model=known.unk_in_model)
    ids = vocabulary.ids_of(words)
    prob = 10.0 ** model.orders[0].log10_prob.astype(np.float64)
    old = np.concatenate([prob, np.zeros(len(new))])
    old[known.begin_id] = 0.0
    if not known.unk_in_model:
        old[0] = 0.0
    listed = np.zeros(len(old), np.bool_)
    listed[ids] = True
    own = old[listed].sum()
    mixed = (1.0 - weight) * old + weight * np.where(listed, 0.0, old)
    mixed[ids] += weight * own * shares / shares.sum()
    orders = [_first_order(model, mixed), *model.orders[1:]]
    extended = replace(model, vocabulary=vocabulary, orders=orders)
    if model.order > 1:
        before, after = (_one_over_left(extended, prob) for prob in (old, mixed))
        # A context keeps its leftover mass, but spreads it over words whose unigram mass changes.
        moved = np.log10(np.where(before > 0, after / np.maximum(before, 1e-300), 1.0))
        backoff = orders[0].log10_backoff + moved
        orders[0] = replace(orders[0], log10_backoff=backoff.astype(F32))
    return extended


def _first_order(model: ModelColumns, prob: NDArray[np.float64]) -> OrderColumns:
    columns, size = model.orders[0], len(prob)
    log10_prob = as_log10([prob])[0].astype(F32)
    if not model.vocabulary.unk_in_model:
        log10_prob[0] = columns.log10_prob[0]
    backoff = np.zeros(size, F32)
    backoff[: len(columns)] = columns.log10_backoff
    first_child = np.full(size + 1, columns.first_child[-1], U32)
    first_child[: len(columns) + 1] = columns.first_child
    return OrderColumns(
        np.arange(size, dtype=U32)[:, None],
        log10_prob,
        backoff,
        np.zeros(size, U32),
        np.zeros(size, U32),
        first_child,
    )


def _one_over_left(model: ModelColumns, prob: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns 1 / (the unigram mass of the words that a context does not list), by context word."""
    contexts, longer = model.orders[0], model.orders[1]
    weight = np.empty(len(contexts))
    kernels.weigh(
        contexts.suffix,
        np.array([0, len(contexts)], U32),
        contexts.first_child,
        longer.suffix,
        prob,
        np.zeros(1),
        np.ones(len(longer)),
        np.ones(len(contexts)),
        weight,
    )
    return weight
