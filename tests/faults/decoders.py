"""Decoders at work while servers fail, and the check of every score that they get."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cluster import WAIT_S, ModelFiles
from dlm.client import Client, Utterance
from dlm.errors import ModelMismatch
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, LOCAL_FALLBACK

MEANT = {"full": {FULL, BIGRAM_FALLBACK}, "local_fallback": {LOCAL_FALLBACK}}
POSITIONS, HYPOTHESES, WORDS = 4, 3, 5
FRAME_S = 0.02  # a decoder has audio to look at, between two positions


@dataclass(frozen=True, slots=True)
class Call:
    """What one call came to.

    sources  scores by what they say they are of; none where it raised
    late_s   seconds after its deadline that it ended; below 0, before
    """

    ended: float
    took_s: float
    late_s: float
    kind: str
    sources: Counter[int]


@dataclass(frozen=True, slots=True)
class Spoken:
    """An utterance that was decoded: when, by whom, on which family, and the scores in it."""

    begun: float
    ended: float
    decoder: int
    kind: str
    sources: Counter[int]

    @property
    def full(self) -> bool:
        """Whether every score in it is the full model's."""
        return self.sources.keys() == {FULL}


class Decoders:
    """Threads that decode with one client until they are stopped, each score checked.

    Args
        models      all that any family may name
        deadline_s  of each call
    Guarantees
        at the end, an error that reached a decoder or a score that is not the oracle's of the model
        that it names fails the test
    """

    def __init__(
        self,
        client: Client,
        models: list[ModelFiles],
        *,
        count: int = 8,
        deadline_s: float = 1.0,
    ) -> None:
        self.client = client
        self._deadline_s = deadline_s
        self.calls: list[Call] = []
        self.spoken: list[Spoken] = []
        self.faults: list[BaseException] = []
        self._count = count
        self._models = {files.manifest.model: files for files in models}
        self._ngrams = {
            model: sorted(n for n in files.oracle.ngrams if len(n) == files.manifest.order)
            for model, files in self._models.items()
        }
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]
        self._expected = lru_cache(1 << 20)(self._score)

    def __enter__(self) -> Decoders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        self.check()
        assert not any(thread.is_alive() for thread in self._threads), "a decoder hangs"

    def check(self) -> None:
        """Raises what a decoder met, if any did."""
        if self.faults:
            raise AssertionError(f"{len(self.faults)} decoders failed") from self.faults[0]

    def wait(self, holds: Callable[[], bool], seconds: float = WAIT_S) -> float:
        """Returns once `holds()`, after how many seconds; fails after `seconds`."""
        begun = time.monotonic()
        while not holds():
            self.check()
            assert time.monotonic() < begun + seconds, f"{self.said(begun)}; {self.client.cascade}"
            self._stopped.wait(0.01)
        return time.monotonic() - begun

    def for_s(self, seconds: float) -> None:
        """Goes on for so long."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end, WAIT_S + seconds)

    def each(self, since: float, utterances: int = 1, *, full: bool = False) -> bool:
        """Whether each decoder has decoded so many that were begun after `since`."""
        done = Counter(
            one.decoder
            for one in list(self.spoken)
            if one.begun >= since and (one.full or not full)
        )
        return all(done[number] >= utterances for number in range(self._count))

    def first(self, since: float, kind: str) -> float | None:
        """When the first utterance on such a family was begun."""
        found = [one.begun for one in list(self.spoken) if one.begun >= since and one.kind == kind]
        return min(found, default=None)

    def since(self, when: float) -> Counter[int]:
        """Scores by source, of calls that ended since."""
        return sum((one.sources for one in list(self.calls) if one.ended >= when), Counter())

    def said(self, since: float) -> str:
        """Figures of what happened since, in a line."""
        calls = [one for one in list(self.calls) if one.ended >= since]
        if not calls:
            return "no calls"
        sources = self.since(since)
        took = np.array([one.took_s for one in calls]) * 1e3
        late = max(one.late_s for one in calls)
        quantiles = ", ".join(f"p{q:g} {np.percentile(took, q):.1f}" for q in (50, 99, 99.9))
        counted = ", ".join(
            f"{sources[source]} {name}"
            for source, name in (
                (FULL, "full"),
                (BIGRAM_FALLBACK, "bigram_fallback"),
                (LOCAL_FALLBACK, "local_fallback"),
            )
        )
        return (
            f"{len(calls)} calls ({quantiles}, max {took.max():.1f} ms; the latest ended "
            f"{late * 1e3:+.0f} ms of its deadline), {counted}"
        )

    # -- a decoder ----------------------------------------------------------------------------

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        last: Utterance | None = None
        try:
            while not self._stopped.is_set():
                last = self._utterance(number, rng, last)
        except BaseException as exc:  # noqa: BLE001 - raised again by the test's own thread
            self.faults.append(exc)

    def _utterance(self, number: int, rng: random.Random, last: Utterance | None) -> Utterance:
        begun = time.monotonic()
        utterance = self.client.utterance(deadline_s=self._deadline_s)
        model_info = utterance.model_info
        files = self._models[model_info.model]
        total: Counter[int] = Counter()
        if last is not None and last.model_info != model_info:
            try:
                utterance.extend([last.begin()], [1])
            except ModelMismatch:
                pass
            else:
                raise AssertionError(f"a state of {last.model_info} was taken for {model_info}")
        ngrams = self._ngrams[model_info.model]
        size = len(files.oracle.vocabulary)
        spoken = ngrams[rng.randrange(len(ngrams))]
        states, histories = [utterance.null()], [()]
        for position in range(POSITIONS):
            words = [rng.randrange(size) for _ in range(WORDS)]
            if position < len(spoken):
                words[0] = spoken[position]
            with self._call(model_info.kind) as sources:
                found = utterance.extend(states, words)
                sources.update(found.source.reshape(-1).tolist())
            total += sources
            assert found.states.model_info == model_info
            for k, history in enumerate(histories):
                for w, word in enumerate(words):
                    self._check(
                        files,
                        history,
                        word,
                        int(found.source[k, w]),
                        float(found.log10_prob[k, w]),
                        int(found.matched_order[k, w]),
                    )
            # The path of the n-gram, and others.
            kept = [(0, 0)] + [
                (rng.randrange(len(histories)), rng.randrange(WORDS)) for _ in range(HYPOTHESES - 1)
            ]
            states = [found.states[k, w] for k, w in kept]
            histories = [(*histories[k], words[w]) for k, w in kept]
            self._stopped.wait(FRAME_S)
        asked_ids = [*spoken, rng.randrange(size), *spoken]
        total += self._sentence(utterance, files, asked_ids)
        ended = time.monotonic()
        self.spoken.append(Spoken(begun, ended, number, model_info.kind, total))
        return utterance

    def _sentence(self, utterance: Utterance, files: ModelFiles, ids: list[int]) -> Counter[int]:
        vocabulary = files.oracle.vocabulary
        begin, end = vocabulary.begin_id, vocabulary.end_id
        ids = [one for one in ids if one not in (begin, end)]
        with self._call(utterance.model_info.kind) as sources:
            (score,) = utterance.score_sentences([[vocabulary.words[one] for one in ids]])
            sources.update(score.token_source.tolist())
        history: tuple[int, ...] = (begin,)
        for at, word in enumerate([*ids, end]):
            self._check(
                files,
                history,
                word,
                int(score.token_source[at]),
                float(score.token_log10_prob[at]),
                int(score.token_matched_order[at]),
            )
            history = (*history, word)
        assert score.log10_prob == float(score.token_log10_prob.sum(dtype=np.float64))
        return sources

    @contextmanager
    def _call(self, kind: str) -> Iterator[Counter[int]]:
        """Times what is within, which counts the scores that it got by their sources."""
        asked = time.monotonic()
        sources: Counter[int] = Counter()
        try:
            yield sources
        finally:
            now = time.monotonic()
            self.calls.append(Call(now, now - asked, now - asked - self._deadline_s, kind, sources))
        assert sources.keys() <= MEANT[kind], f"a {kind} utterance has scores of {sources}"

    def _score(self, model: str, context: tuple[int, ...], word: int) -> tuple[float, int]:
        found = self._models[model].oracle.score(context, word)
        return float(found.log10_prob), found.matched_order

    def _check(
        self,
        files: ModelFiles,
        history: tuple[int, ...],
        word: int,
        source: int,
        log10_prob: float,
        matched_order: int,
    ) -> None:
        known = history[-1:] if source == BIGRAM_FALLBACK else history[-files.manifest.order :]
        expected = self._expected(files.manifest.model, known, word)
        assert (log10_prob, matched_order) == expected, (
            f"P({word} | {history}) of source {source}: {log10_prob}, order {matched_order}; "
            f"the oracle says {expected}"
        )
