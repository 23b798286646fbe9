"""Which shard a sentence's queries go to, for those who want to see it; scoring plans them anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.inputs import PART, Queries, Sentence
from dlm.client.plan import router


def shards_of(
    utterance: Any, sentences: Sequence[Sentence], *, bos: bool = True, eos: bool = True
) -> list[NDArray[np.int32]]:
    """The shard that is asked for each token of each sentence, as `score_sentences` has them; -1
    where the low orders have the answer, or the model is in this process.

    Args  utterance  a `BaseUtterance`
    """
    counts: list[int] = []
    inputs = utterance._inputs

    def routes(queries: Queries) -> NDArray[np.int32]:
        if utterance.local_model is not None:
            return np.full(len(queries.words), -1, np.int32)
        given = queries.contexts, queries.lengths, queries.counts, queries.words
        snapshot = inputs.snapshot
        plan = router.plan(snapshot.grams, snapshot.topology.manifest, *given, PART)
        distinct = np.full(len(plan.log10_prob), -1, np.int32)
        for piece in plan.pieces:
            distinct[piece.at] = piece.shard
        return distinct[plan.place]

    found = [routes(queries) for queries, _ in inputs.sentences(sentences, bos, eos, counts)]
    return np.split(np.concatenate(found), np.cumsum(counts)[:-1])
