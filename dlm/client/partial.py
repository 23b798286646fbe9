"""The partial model: what the low orders alone say, for queries that no shard answers in time.

It is the order-2 reduction of the same model, P(w | v): so it is normalised like any model, and a
sentence may hold scores of both. A score says which model it is of (`query.PARTIAL`). What matters
to the right is not known without the shard, so the state after the word is not minimised.

Paper: DLM 3.4 ("if the message times out, we estimate the probability locally using the cached
2-grams").
"""

from __future__ import annotations

import numpy as np

from dlm.client.lowgrams import LowGrams
from dlm.errors import DlmError, QueryError
from dlm.ngram.query import Answers, QueryGroups


def stands_in_for(error: DlmError) -> bool:
    """Whether the partial model may answer instead: where servers failed, not where the caller did.

    A server of another model, one that talks nonsense, or one that lets this client in no more, is
    one that failed; and so is whatever else keeps a message of this process from being answered.
    """
    return not isinstance(error, QueryError)


def score(grams: LowGrams, groups: QueryGroups) -> Answers:
    """Answers by the last word of each context alone.

    Args
        groups  contexts of one word or more
    Guarantees
        log10_prob is that of the model reduced to order 2, bit for bit; matched_order and
        ngram_length are at most 2; state_length is what a context and its word can reach
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
