"""No call waits past its deadline, on a clock that the test moves, whatever becomes of messages."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from math import inf
from typing import Any

import pytest

from client.questions import Query, queries_to, random_queries
from client.scripted import Network, Scripted
from client.test_bigram_fallback import assert_each_is_of_its_model
from cluster import WAIT_S
from dlm.client import ClientConfig, Utterance
from dlm.client.call import Call, EndedCall
from dlm.client.cluster_file import Endpoint, FixedEndpoints, Metadata
from dlm.client.core import Core
from dlm.client.delivery import LOST_S
from dlm.client.server import Reply
from dlm.errors import DeadlineExceeded, DlmError, Overloaded, ShardDown

CALLS = 25
EPSILON_S = 1e-9


class Timeline(Network):
    """The clock, what happens when, and the network: each message has a fate of its own, unless
    `fate` is set."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.now = 0.0
        self.fates: list[str] = []
        self.fate = ""  # of every message, where set
        self.last_deadline = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Has something happen."""
        with self._lock:  # the client's helper thread sends messages too
            heapq.heappush(self._events, (when, next(self._order), what))

    def _next(self, by: float) -> tuple[float, int, Callable[[], None]] | None:
        with self._lock:
            due = bool(self._events) and self._events[0][0] <= by
            return heapq.heappop(self._events) if due else None

    def idle(self) -> bool:
        """Whether nothing is to happen."""
        return not self._events

    def run(self) -> None:
        """Until nothing is to happen any more."""
        self.run_until(inf)

    def run_until(self, when: float) -> None:
        """What is to happen by then."""
        while (found := self._next(when)) is not None:
            self.now = max(self.now, found[0])
            found[2]()

    def connect(self, address: str) -> Fated:
        """A connection whose messages have fates."""
        return Fated(self, address)


class Inline:
    """A home whose steps run in the thread that drives the line; see `loop.Home`."""

    def __init__(self, line: Timeline) -> None:
        self._line = line
        self._thread = threading.get_ident()

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """As soon as the line comes to it."""
        self._line.at(self._line.now, partial(call, *args))

    def is_here(self) -> bool:
        """Whether this is that thread."""
        return threading.get_ident() == self._thread

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """On the clock of the line."""
        self._line.at(self._line.now + delay_s, partial(call, *args))


class Fated(Scripted):
    """Answers late, never, wrongly, or says that nobody is there; or says nothing at all, which no
    connection may."""

    network: Timeline

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> None:
        """Nobody lets a message travel longer than somebody waits for it."""
        line = self.network
        assert line.now + timeout_s <= line.last_deadline + EPSILON_S
        fates = ["answered"] * 6 + ["never", "nobody", "garbage", "raises", "busy", "silent"]
        fate = line.fate or line.rng.choice(fates)
        line.fates.append(fate)
        after_s = line.rng.choice([0.0, 0.001, 0.02, 0.3, 2.0])
        ends = line.now + min(after_s, timeout_s)
        errors: dict[str, DlmError] = {
            "nobody": ShardDown("nobody is there"),
            "busy": Overloaded("busy"),
        }
        if fate == "raises":
            raise ShardDown("nobody is there")
        if fate == "silent":
            return
        if fate == "never" or after_s > timeout_s:
            late = DeadlineExceeded("no reply")
            line.at(line.now + timeout_s, lambda: reply(None, late))
        elif fate in errors:
            line.at(ends, lambda: reply(None, errors[fate]))
        elif fate == "garbage":
            line.at(ends, lambda: reply(b"nonsense", None))
        else:
            line.at(ends, lambda: self._answer(request, reply))

    def _answer(self, request: bytes, reply: Reply) -> None:
        came: list[tuple[bytes | None, DlmError | None]] = []
        done = threading.Event()

        def take(data: bytes | None, error: DlmError | None) -> None:
            came.append((data, error))
            done.set()

        self._target().score(request, WAIT_S, take)
        assert done.wait(WAIT_S)
        reply(*came[0])


@pytest.mark.promise("deadline")
@pytest.mark.parametrize("seed", range(12))
def test_every_call_ends_by_its_deadline_with_scores_of_the_models_they_name(
    cluster, files, cache_dir, seed: int
) -> None:
    """Two servers a shard, small windows, so that calls also wait for each other."""
    line = Timeline(seed)
    addresses = cluster.addresses
    config = ClientConfig(
        bigram_fallback=True, heartbeats=False, window=2, max_queries=32, cache_dir=cache_dir
    )
    endpoints = FixedEndpoints([Endpoint(address) for address in addresses])
    core = Core(endpoints, config, connect=line.connect, clock=line.clock, home=Inline(line))
    utterance = Utterance(core, core.snapshot(), None)
    ended: list[tuple[float, float, list[Query], object]] = []

    def ask(number: int, limit_s: float) -> None:
        queries = random_queries(files.oracle, 100 * seed + number, line.rng.choice([1, 20, 90]))
        ((asked, _),) = utterance._inputs.score([c for c, _ in queries], [w for _, w in queries])
        deadline = line.now + limit_s
        line.last_deadline = max(line.last_deadline, deadline)
        call = utterance._submit(asked, limit_s)
        call.add_done_callback(lambda _: ended.append((line.now, deadline, queries, call.result())))

        def give_up() -> None:
            if not call.done():
                call.give_up(DeadlineExceeded(f"no answer within {limit_s:g} s"))
            assert call.done()

        line.at(deadline, give_up)  # as whoever waits does

    for number in range(CALLS):
        begin, limit = line.rng.random(), line.rng.choice([0.01, 0.1, 0.5, 1.0])
        line.at(begin, lambda number=number, limit=limit: ask(number, limit))
    line.run()
    while core._runtime.helper.submit(lambda: None).result(WAIT_S) or not line.idle():
        line.run()  # what was sent anew meanwhile
    assert len(ended) == CALLS and len(set(line.fates)) >= 5
    for when, deadline, queries, answers in ended:
        assert when <= deadline + EPSILON_S
        if answers.source is None:
            expected = [files.oracle.score(c, w).log10_prob for c, w in queries]
            assert answers.log10_prob.tolist() == expected
        else:
            assert_each_is_of_its_model(files, queries, answers)
    runtime = core._runtime
    assert not any(lane.in_flight for lane in runtime.lanes.values()), "a place was lost"
    assert not +runtime.outstanding
    core.close()


def test_a_connection_that_never_tells_keeps_no_place_for_ever(cluster, files, cache_dir) -> None:
    """Its message ends soon after its deadline, and the lane, which has room for one, goes on."""
    line = Timeline(0)
    config = ClientConfig(heartbeats=False, window=1, cache_dir=cache_dir)
    endpoints = FixedEndpoints([Endpoint(address) for address in cluster.addresses])
    core = Core(endpoints, config, connect=line.connect, clock=line.clock, home=Inline(line))
    utterance = Utterance(core, core.snapshot(), None)
    query = queries_to(files, 1)[:1]
    line.last_deadline = 100.0

    def ask(fate: str) -> Call | EndedCall:
        line.fate = fate
        ((asked, _),) = utterance._inputs.score([c for c, _ in query], [w for _, w in query])
        return utterance._submit(asked, 1.0)

    lost = ask("silent")
    while not line.fates:  # its connection is made in a thread
        line.run_until(0.5)
    assert [lane.ahead for lane in core._runtime.lanes.values()] == [1]
    line.run()
    assert isinstance(lost.exception(0), DeadlineExceeded)
    assert line.now <= 1.0 + 2 * LOST_S
    assert core.stats.failed == 1
    assert all(lane.idle for lane in core._runtime.lanes.values())
    assert not core._runtime.under_way and not +core._runtime.outstanding
    again = ask("answered")
    line.run()
    expected = [files.oracle.score(c, w).log10_prob for c, w in query]
    assert again.result(0).log10_prob.tolist() == expected
    core.close()
