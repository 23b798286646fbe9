"""Callers that ask again and again while a test rolls servers, and what became of their calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from client.questions import assert_equal, random_queries
from cluster import until
from dlm.client import Client
from dlm.ngram.backoff import DictModel

THREADS = 8
SEEDS = 50  # lists of queries, asked again and again


class Load:
    """Threads that each open an utterance, score with it, and compare with its model's oracle.

    answered  calls, by the shard set of their utterance
    failed    what went wrong, a text per call
    """

    def __init__(self, client: Client, oracles: Mapping[str, DictModel]) -> None:
        self.client = client
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self._asked: dict[str, list[list[tuple[list[str], str]]]] = {}
        self._oracles: dict[str, DictModel] = {}
        for model, oracle in oracles.items():
            self.knows(model, oracle)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(THREADS)
        ]

    def knows(self, model: str, oracle: DictModel) -> None:
        """Another model may answer from now on, and what it must say is known."""
        words = [w.decode() for w in oracle.vocabulary.words]
        self._oracles[model] = oracle
        self._asked[model] = [
            [
                ([words[i] for i in context], words[word])
                for context, word in random_queries(oracle, seed, 8)
            ]
            for seed in range(SEEDS)
        ]

    def _run(self, number: int) -> None:
        while not self._ending.wait(0.02):  # servers start beside them
            number += 1
            utterance = None
            try:
                utterance = self.client.utterance()
                queries = self._asked[utterance.model_info.model][number % SEEDS]
                answers = utterance.score([c for c, _ in queries], [w for _, w in queries])
                oracle = self._oracles[utterance.model_info.model]
                ids = oracle.vocabulary.id_of
                expected = [oracle.score([ids(w) for w in c], ids(word)) for c, word in queries]
                assert_equal(answers, expected)
            except Exception as exc:  # noqa: BLE001 - whatever it is, a caller saw it
                with self._lock:
                    self.failed.append(f"{type(exc).__name__} on {utterance}: {exc}")
                continue
            with self._lock:
                self.answered[utterance.model_info.shard_set] += 1

    def goes_on(self, calls: int = 30, shard_set: str | None = None) -> None:
        """Returns once so many more calls were answered, by this shard set if one is given."""

        def count() -> int:
            return self.answered.total() if shard_set is None else self.answered[shard_set]

        enough = count() + calls
        until(lambda: count() >= enough or bool(self.failed))
        assert self.failed == []

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Within, they ask; afterwards no call may have failed."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            for thread in self._threads:
                thread.join()
        if self.failed:
            pytest.fail(f"{len(self.failed)} of {self.answered.total()} calls: {self.failed[:5]}")
