"""Measures accuracy, sentence likelihood and perplexity of a model on unseen text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dlm.federated.tokens import BOS_ID, EOS_ID, OOV_ID, PAD, Ids, sequence
from dlm.federated.training import rnn
from dlm.federated.training.clip import Array


@dataclass(frozen=True)
class Metrics:
    """Counts over some text, which can be added, and figures derived from them. `words` counts
    targets except the ends of utterances; `known`, words in the vocabulary; `correct`, known words
    that the model ranks first. The `ln_` fields sum ln P over words, known words, and ends."""

    sentences: int
    words: int
    known: int
    correct: int
    ln_words: float
    ln_known: float
    ln_ends: float

    @property
    def top1_in_vocabulary(self) -> float:
        """Share of known words that the model ranks first; ends do not count (GDP 1, BLT 4.1)."""
        return self.correct / self.known if self.known else math.nan

    @property
    def top1(self) -> float:
        """Share of words that the model ranks first; unknown words are errors (DPF appendix B)."""
        return self.correct / self.words if self.words else math.nan

    @property
    def sll_excluding_oov(self) -> float:
        """SLL^e of FNG 7.1: the mean per sentence of the sum of ln P over known words."""
        return self.ln_known / self.sentences if self.sentences else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the mean of -ln P over words and ends."""
        count = self.words + self.sentences
        return math.exp(min(-(self.ln_words + self.ln_ends) / count, 700)) if count else math.nan

    @property
    def perplexity_excluding_oov(self) -> float:
        count = self.known + self.sentences
        return math.exp(min(-(self.ln_known + self.ln_ends) / count, 700)) if count else math.nan

    def __add__(self, other: Metrics) -> Metrics:
        mine, theirs = vars(self), vars(other)
        return Metrics(**{name: mine[name] + theirs[name] for name in mine})


NOTHING = Metrics(0, 0, 0, 0, 0.0, 0.0, 0.0)


@partial(jax.jit, static_argnums=(1, 4))
def _counts(
    params: rnn.Params, config: rnn.RnnConfig, rows: Array, oov: Array, says_begin: bool
) -> tuple[Array, ...]:
    inputs, targets = rows[:, :-1], rows[:, 1:]
    logits = rnn.apply(params, config, jnp.maximum(inputs, 0))
    if not says_begin:
        logits = logits.at[..., BOS_ID].set(-jnp.inf)
    chosen = jnp.maximum(targets, 0)[..., None]
    ln_prob = jnp.take_along_axis(rnn.ln_probabilities(logits), chosen, axis=-1)[..., 0]
    ends = targets == EOS_ID
    words = (targets >= 0) & ~ends
    known = words & ~oov
    right = known & (logits.argmax(-1) == targets)
    # Return sums per row, since the caller adds up rows in float64.
    return (
        words.sum(1),
        known.sum(1),
        right.sum(1),
        (ln_prob * words).sum(1),
        (ln_prob * known).sum(1),
        (ln_prob * ends).sum(1),
    )


def evaluate(
    params: rnn.Params,
    config: rnn.RnnConfig,
    utterances: Iterable[Ids],
    *,
    oov: Iterable[NDArray[np.bool_]] | None = None,
    batch_size: int = 64,
    max_tokens: int = 4096,
) -> Metrics:
    """Returns the model's metrics summed over utterances, each read from its beginning."""
    found = each(params, config, utterances, oov=oov, batch_size=batch_size, max_tokens=max_tokens)
    return sum(found, NOTHING)


def each(
    params: rnn.Params,
    config: rnn.RnnConfig,
    utterances: Iterable[Ids],
    *,
    oov: Iterable[NDArray[np.bool_]] | None = None,
    batch_size: int = 64,
    max_tokens: int = 4096,
    says_begin: bool = True,
) -> Iterator[Metrics]:
    """Yields the model's metrics on each utterance, in order.

    Args
        utterances  ids without marks
        oov         whether each id counts as out of vocabulary, as do the pieces of a word outside
                    the vocabulary (FNG 7.1); by default, only id 0 does
        max_tokens  tokens to use of an utterance; longer utterances are cut
        says_begin  whether `<s>`, which never follows a word, keeps its probability; otherwise the
                    other ids share it, as in sampling
    Cost   batches in the given order, padded to their longest utterance (rounded up to a power of
           two); sort by length to save time
    """
    marks = iter(oov) if oov is not None else None
    batch: list[tuple[Ids, NDArray[np.bool_]]] = []

    def flush() -> Iterator[Metrics]:
        longest = max(len(ids) for ids, _ in batch) + 2
        width = 1 << (longest - 2).bit_length()
        rows = np.full((batch_size, width + 1), PAD, np.int32)
        unknown = np.zeros((batch_size, width), bool)
        for row, (ids, mark) in enumerate(batch):
            rows[row, : len(ids) + 2] = sequence(ids)
            unknown[row, : len(ids)] = mark
        sums = _counts(params, config, rows, unknown, says_begin)
        found = [np.asarray(part).tolist() for part in sums]
        for words, known, right, *ln in list(zip(*found, strict=True))[: len(batch)]:
            yield Metrics(1, words, known, right, *ln)
        batch.clear()

    for ids in utterances:
        mark = ids == OOV_ID if marks is None else next(marks)
        batch.append((ids[:max_tokens], mark[:max_tokens]))
        if len(batch) == batch_size:
            yield from flush()
    if batch:
        yield from flush()
