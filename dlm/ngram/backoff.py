"""Scores by plain back-off over a dictionary, as the oracle for all faster code: kernel, server,
client and gateway must return the same bits. No hot path uses this module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlm.errors import ArpaError
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB, UNK_ID, Vocabulary, as_bytes

Ngram = tuple[int, ...]

ZERO = np.float32(0.0)


@dataclass(frozen=True, slots=True)
class Score:
    """One answer: log10 P(word | context); the order of the longest n-gram found, 1 for an unknown
    word; KenLM's length, which also counts the blanks put where a suffix is missing; and how many
    of the most recent words of (context, word) can still affect later words."""

    log10_prob: np.float32
    matched_order: int
    ngram_length: int
    state_length: int


@dataclass(eq=False)
class DictModel:
    """An n-gram model as a dictionary.

    Args    order   N; contexts have at most N - 1 words
            ngrams  n-gram, oldest word first -> (log10 probability, log10 back-off weight),
                    both float32; a missing back-off weight is 0
    Raises  ArpaError  an n-gram's prefix is missing; suffixes may be missing
    """

    vocabulary: Vocabulary
    order: int
    ngrams: Mapping[Ngram, tuple[np.float32, np.float32]]
    closure: set[Ngram] = field(init=False, repr=False)
    extended: set[Ngram] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for ngram in self.ngrams:
            if len(ngram) > 1 and ngram[:-1] not in self.ngrams:
                raise ArpaError(
                    f"the {len(ngram)}-gram {self.spell(ngram)} is listed without its prefix "
                    f"{self.spell(ngram[:-1])}",
                    order=len(ngram),
                    advice="Add the prefix, or build the model again",
                )
        # Every suffix of an n-gram is a node of the tree, with a blank where the model lacks it.
        self.closure = {(UNK_ID,)}
        for ngram in self.ngrams:
            for start in range(len(ngram)):
                self.closure.add(ngram[start:])
        # A context affects later words if something follows it, including blanks as in KenLM, or
        # if its backoff weight is not 0.
        self.extended = {ngram[:-1] for ngram in self.closure if len(ngram) > 1}
        for ngram, (_, log10_backoff) in self.ngrams.items():
            if log10_backoff != 0 and len(ngram) < self.order:
                self.extended.add(ngram)
        # KenLM keeps the unknown word in its states if the model lacks it; so do we, to recombine
        # exactly as KenLM does.
        if not self.vocabulary.unk_in_model and self.order > 1:
            self.extended.add((UNK_ID,))

    @classmethod
    def from_arpa(cls, path: str | os.PathLike[str]) -> DictModel:
        """Reads a whole ARPA file; raises `ArpaError` if it is malformed."""
        from dlm.ngram.arpa import ArpaReader

        ngrams: dict[Ngram, tuple[np.float32, np.float32]] = {}
        with ArpaReader(path) as reader:
            for batch in reader.batches():
                rows = zip(
                    map(tuple, batch.ids.tolist()),
                    batch.log10_prob,
                    batch.log10_backoff,
                    strict=True,
                )
                for row, (ngram, log10_prob, log10_backoff) in enumerate(rows, batch.first_row):
                    if ngram in ngrams:
                        raise reader.error_at(
                            f"the {batch.order}-gram is listed twice",
                            order=batch.order,
                            row=row,
                            advice="Keep one of the two rows, or build the file again",
                        )
                    if batch.order > 1 and ngram[:-1] not in ngrams:
                        raise reader.error_at(
                            f"the prefix of this {batch.order}-gram is not among the "
                            f"{batch.order - 1}-grams",
                            order=batch.order,
                            row=row,
                            advice="Add the prefix, or build the file again",
                        )
                    ngrams[ngram] = (log10_prob, log10_backoff)
            return cls(reader.vocabulary, reader.order, ngrams)

    def spell(self, ngram: Ngram) -> str:
        return " ".join(repr(self.vocabulary.words[i].decode("utf-8", "replace")) for i in ngram)

    def score(self, context: Sequence[int], word: int) -> Score:
        """Scores `word` after `context`.

        Args   context  word ids, most recent last; words beyond the model's order are ignored
        Paper  DLM Algorithm 1, in log10 and float32: the back-off weights are added to 0 from
               the longest context to the shortest, then the probability of the longest n-gram
               found. The order is fixed so that every implementation gives the same bits.
        """
        return score(self.ngrams, self.closure, self.extended, self.order, context, word)

    def state(self, context: Sequence[int]) -> Ngram:
        """The most recent words of `context` that can affect later words (KenLM's state): the
        longest suffix of up to order - 1 words that an n-gram extends or whose back-off weight is
        not 0."""
        kept = tuple(context)[-(self.order - 1) :] if self.order > 1 else ()
        best = 0
        for length in range(1, len(kept) + 1):
            suffix = kept[len(kept) - length :]
            if suffix not in self.closure:
                break
            if suffix in self.extended:
                best = length
        return kept[len(kept) - best :]

    def score_sentence(
        self, words: Iterable[str | bytes], *, bos: bool = True, eos: bool = True
    ) -> list[Score]:
        """Scores `words` and, with `eos`, the sentence end, each after all words before it."""
        ids = [self.vocabulary.id_of(as_bytes(w)) for w in words]
        context = [self.vocabulary.begin_id] if bos else []
        out = []
        for word in ids + ([self.vocabulary.end_id] if eos else []):
            out.append(self.score(context, word))
            context.append(word)
        return out


def score(
    ngrams: Mapping[Ngram, tuple[np.float32, np.float32]],
    closure: set[Ngram],
    extended: set[Ngram],
    order: int,
    context: Sequence[int],
    word: int,
) -> Score:
    kept = tuple(context)[-(order - 1) :] if order > 1 else ()
    matched = 0
    log10_prob = MISSING_UNK_LOG10_PROB
    for length in range(len(kept), -1, -1):
        found = ngrams.get((*kept[len(kept) - length :], word))
        if found is not None:
            matched = length + 1
            log10_prob = found[0]
            break
    matched = max(matched, 1)  # in a model without <unk>, the unknown word still has order 1

    total = ZERO
    for length in range(len(kept), matched - 1, -1):
        context_entry = ngrams.get(kept[len(kept) - length :])
        if context_entry is not None:
            total = np.float32(total + context_entry[1])
    total = np.float32(total + log10_prob)

    ngram_length = 0
    state_length = 0
    for length in range(len(kept) + 1):
        ngram = (*kept[len(kept) - length :], word)
        if ngram not in closure:
            break
        ngram_length = length + 1
        if ngram in extended:
            state_length = length + 1
    return Score(total, matched, max(ngram_length, 1), state_length)
