"""The bigram fallback: scores from only the low orders, for queries that no shard answers in time.

It is the order-2 reduction of the same model, P(w | v): so it is normalised like any model, and a
sentence may mix scores of both. A score names its model (`query.BIGRAM_FALLBACK`). Without the
shard it is not known how much context still matters, so the state after the word is not minimised.

Paper: DLM 3.4 ("if the message times out, we estimate the probability locally using the cached
2-grams").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlm.client.plan.lowgrams import LowGrams
from dlm.errors import DlmError, QueryError, StaleShardSet
from dlm.ngram.query import Answers, QueryGroups

QUIET_S = (
    10.0  # after this long without a bigram-fallback score, an answered message ends an outage
)


class Outage(NamedTuple):
    """A period in which bigram-fallback scores were given; pure, with the caller's times.

    began, last  times of the first and the latest
    queries      that the bigram fallback answered
    error        kind of the error in its log line
    """

    began: float
    last: float
    queries: int
    error: str = ""

    @property
    def seconds(self) -> float:
        """Seconds from the first to the latest."""
        return self.last - self.began

    def extended(self, queries: int, now: float) -> Outage:
        """The outage with further queries."""
        return self._replace(last=now, queries=self.queries + queries)

    def lasts(self, error: DlmError) -> bool:
        """Whether this error shows that the outage will not end by itself: servers are back, but
        none holds the utterance's model."""
        return isinstance(error, StaleShardSet) and self.error != StaleShardSet.__name__

    def is_over(self, now: float) -> bool:
        """Whether an answered message ends it. While only some are answered it continues, so that
        the log has one line at its beginning and one at its end."""
        return now - self.last >= QUIET_S


def allows_fallback(error: DlmError) -> bool:
    """Whether the bigram fallback may answer instead: if servers failed, not if the caller did.

    A server counts as failed if it has another model, sends nonsense or no longer lets this client
    in. So does anything else that keeps a message of this process from being answered.
    """
    return not isinstance(error, QueryError)


def score(grams: LowGrams, groups: QueryGroups) -> Answers:
    """Answers by only the last word of each context.

    Args
        groups  contexts of one word or more
    Guarantees
        log10_prob is that of the model reduced to order 2, bit for bit; matched_order and
        ngram_length are at most 2; state_length is the longest that a context and its word allow
    """
    lengths = groups.context_lengths
    ends = np.cumsum(lengths, dtype=np.int64)
    last = QueryGroups(
        np.minimum(lengths, 1).astype(np.uint8),
        groups.context_words[ends - 1],
        groups.word_counts,
        groups.words,
    )
    answers, _ = grams.score(last)
    reach = np.minimum(lengths.astype(np.int64) + 1, grams.manifest.order - 1).astype(np.uint8)
    return Answers(
        answers.log10_prob,
        answers.matched_order,
        answers.ngram_length,
        np.repeat(reach, groups.word_counts),
    )
