"""Rescores many utterances, several at once, so that their queries share messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from dlm.asr.rescoring.lattice import Lattice
from dlm.asr.rescoring.nbest import Hypotheses
from dlm.asr.rescoring.paths import best_paths
from dlm.asr.rescoring.rescore import Search, rescore, rescore_nbest
from dlm.client import Client, Phrases
from dlm.client.api.phrases import Weights, prepared
from dlm.errors import DlmError


@dataclass(frozen=True, slots=True)
class RescoredUtterance:
    """An utterance with a model's scores: a lattice, or an n-best list; counts as of `Rescored`.

    audio_s  seconds of audio; 0 if the file does not say
    """

    found: Hypotheses
    audio_s: float
    positions: int
    queries: int
    bigram_fallback: int
    local_fallback: int


def rescore_one(
    client: Client,
    given: Hypotheses,
    search: Search,
    nbest: int | None = None,
    phrases: Phrases | None = None,
) -> RescoredUtterance:
    """Rescores one utterance on its own; with `nbest`, a lattice becomes a list of so many."""
    utterance = client.utterance(phrases=phrases)
    if not isinstance(given, Lattice):
        listed, queries = rescore_nbest(given, utterance, search)
        if nbest is not None:
            listed = replace(listed, hypotheses=listed.hypotheses[:nbest])
        return RescoredUtterance(
            listed, 0.0, 1, queries, listed.bigram_fallback, listed.local_fallback
        )
    done = rescore(given, utterance, search)
    found: Hypotheses = done.lattice
    if nbest is not None:
        found = replace(
            best_paths(done.lattice, nbest),
            bigram_fallback=done.bigram_fallback,
            local_fallback=done.local_fallback,
        )
    counts = (done.positions, done.queries, done.bigram_fallback, done.local_fallback)
    return RescoredUtterance(found, given.duration_s, *counts)


def rescore_many(
    client: Client,
    given: Iterable[Hypotheses],
    search: Search,
    *,
    nbest: int | None = None,
    jobs: int = 8,
    phrases: Phrases | Weights | None = None,
) -> Iterator[RescoredUtterance]:
    """Rescores all utterances, in order; those before an error are still returned.

    Args    nbest  see `rescore_one`;  jobs  utterances in progress at once; each read when needed
            phrases  of every utterance
    Raises  what reading `given` raises; UnavailableError, ProtocolError; QueryError, see `Phrases`
    """
    listed = prepared(phrases)
    waiting: deque[Future[RescoredUtterance]] = deque()
    with ThreadPoolExecutor(jobs, thread_name_prefix="dlm-rescore") as pool:
        try:
            try:
                for one in given:
                    waiting.append(pool.submit(rescore_one, client, one, search, nbest, listed))
                    if len(waiting) > jobs:
                        yield waiting.popleft().result()
            except DlmError:
                while waiting:
                    yield waiting.popleft().result()
                raise
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
