"""Many utterances rescored, several at once, so that their queries share messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from dlm.asr.lattice import Lattice
from dlm.asr.nbest import Hypotheses
from dlm.asr.paths import best_paths
from dlm.asr.rescore import Search, rescore, rescore_nbest
from dlm.client import Client
from dlm.errors import DlmError


@dataclass(frozen=True, slots=True)
class RescoredUtterance:
    """An utterance with a model's scores.

    found      as a lattice, or an n-best list
    audio_s    seconds of audio; 0 where the file does not say
    positions  calls that were made
    queries    scores that were asked for
    partial    of these, answered from shorter n-grams since no shard answered in time
    small      of these, answered by the small model since the servers failed
    """

    found: Hypotheses
    audio_s: float
    positions: int
    queries: int
    partial: int
    small: int


def rescore_one(
    client: Client, given: Hypotheses, search: Search, nbest: int | None = None
) -> RescoredUtterance:
    """One utterance, on a handle of its own.

    Args
        nbest  of a lattice, the list of so many sentences is wanted; None: the lattice
    Raises
        UnavailableError, ProtocolError  see `Utterance.extend`
    """
    utterance = client.utterance()
    if not isinstance(given, Lattice):
        listed, queries = rescore_nbest(given, utterance, search)
        if nbest is not None:
            listed = replace(listed, hypotheses=listed.hypotheses[:nbest])
        return RescoredUtterance(listed, 0.0, 1, queries, listed.partial, listed.small)
    done = rescore(given, utterance, search)
    found: Hypotheses = done.lattice
    if nbest is not None:
        found = replace(best_paths(done.lattice, nbest), partial=done.partial, small=done.small)
    counts = (done.positions, done.queries, done.partial, done.small)
    return RescoredUtterance(found, given.duration_s, *counts)


def rescore_many(
    client: Client,
    given: Iterable[Hypotheses],
    search: Search,
    *,
    nbest: int | None = None,
    jobs: int = 8,
) -> Iterator[RescoredUtterance]:
    """All utterances, in their order; those that come before an error are handed on first.

    Args
        nbest  see `rescore_one`
        jobs   utterances under way at once, >= 1; they are not read before they are needed
    Raises
        what reading `given` raises; UnavailableError, ProtocolError
    """
    waiting: deque[Future[RescoredUtterance]] = deque()
    with ThreadPoolExecutor(jobs, thread_name_prefix="dlm-rescore") as pool:
        try:
            try:
                for one in given:
                    waiting.append(pool.submit(rescore_one, client, one, search, nbest))
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
