"""No call waits past its deadline, on a clock that the test moves, whatever becomes of messages."""

from __future__ import annotations

import random

import pytest

from client.questions import (
    Query,
    assert_each_is_of_its_model,
    assert_equal,
    queries_to,
    random_queries,
)
from client.scripted import free
from client.simulated import EPSILON_S, Simulation, Timeline
from cluster import until
from dlm.errors import DeadlineExceeded

CALLS = 25
FATES = [*["answered"] * 6, "never", "nobody", "garbage", "raises", "busy", "silent"]


class Chances(Timeline):
    """Each message has a fate of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.seen: set[str] = set()

    def fate(self, address: str, timeout_s: float) -> tuple[str, float]:
        """At once, soon, too late, or at the deadline itself."""
        fate = self.rng.choice(FATES)
        self.seen.add(fate)
        return fate, self.rng.choice([0.0, 0.001, 0.02, 0.3, 2.0, timeout_s])


@pytest.mark.promise("deadline")
@pytest.mark.parametrize("seed", range(12))
def test_every_call_ends_by_its_deadline_with_scores_of_the_models_they_name(
    cluster, files, cache_dir, seed: int
) -> None:
    """Small windows, so that calls also wait for each other; what came at the deadline counts or
    does not, and no error takes its place. Afterwards nothing waits."""
    line = Chances(seed)
    settings = {"bigram_fallback": True, "window": 2, "max_queries": 32}
    one = Simulation(line, cluster.addresses, cache_dir, **settings)
    ended: list[tuple[float, float, list[Query], object]] = []

    def ask(number: int, limit_s: float) -> None:
        queries = random_queries(files.oracle, 100 * seed + number, line.rng.choice([1, 20, 90]))
        deadline = line.now + limit_s
        call = one.ask(queries, limit_s)
        call.when_ended(lambda: ended.append((line.now, deadline, queries, call.result())))

    for number in range(CALLS):
        begin, limit = line.rng.random(), line.rng.choice([0.01, 0.1, 0.5, 1.0])
        line.at(begin, lambda number=number, limit=limit: ask(number, limit))
    # Helper threads send some anew meanwhile.
    until(lambda: line.run_until() or (len(ended) == CALLS and free(one.client)))
    assert len(line.seen) >= 5
    for when, deadline, queries, answers in ended:
        assert when <= deadline + EPSILON_S
        if answers.source is None:
            assert_equal(answers, [files.oracle.score(c, w) for c, w in queries])
        else:
            assert_each_is_of_its_model(files, queries, answers)
    one.client.close()


def test_a_connection_that_never_tells_keeps_no_place_for_ever(cluster, files, cache_dir) -> None:
    """Its message ends soon after its deadline, and the lane, which has room for one, goes on."""
    line = Timeline()
    line.every = "silent"
    one = Simulation(line, cluster.addresses, cache_dir, window=1)
    query = queries_to(files, 1)[:1]
    lost = one.ask(query, 1.0)
    until(lambda: line.run_until(0.5) or bool(line.sent))  # its connection is made in a thread
    assert not free(one.client)
    line.run_until()
    assert isinstance(lost.exception(0), DeadlineExceeded)
    assert line.now <= 3.0 and free(one.client)
    assert one.client.stats.failed == 1
    line.every = "answered"
    again = one.ask(query, 1.0)
    line.run_until()
    assert_equal(again.result(0), [files.oracle.score(c, w) for c, w in query])
    one.client.close()
