"""Which replica is asked, and when another is: the choice, the budget, and messages that fail."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from client.questions import (
    Query,
    ask,
    assert_each_is_of_its_model,
    assert_equal,
    queries_to,
    random_queries,
    submit,
)
from client.scripted import Network, free
from client.simulated import EPSILON_S, Simulation, Timeline
from cluster import WAIT_S, Cluster, ModelFiles, until
from dlm.client import Client
from dlm.client.rules import (
    EACH,
    FORGET_S,
    KEPT,
    LEAST_S,
    UNKNOWN_S,
    Heard,
    TokenBucket,
    Usual,
    choose,
    late_after,
    may_take_over,
)
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
)
from dlm.wire.status import Reason, error_from_refusal

NONE: frozenset[str] = frozenset()


def drawn(replicas: str, busy: dict[str, int], avoided: str = "", **known: str) -> str:
    """The servers that are chosen, whatever the draw."""
    chance, given = Random(1), {name: frozenset(servers) for name, servers in known.items()}
    some = {choose([*replicas], busy, frozenset(avoided), chance, **given) for _ in range(50)}
    return "".join(sorted(map(str, some)))


def test_the_less_busy_of_two_is_asked_and_an_avoided_one_only_alone() -> None:
    """Whatever the draw."""
    busy = {"a": 5, "b": 1}
    assert drawn("ab", busy) == drawn("b", busy, "b") == "b"
    assert drawn("ab", busy, "b") == drawn("ab", busy, slow="b") == "a"
    assert drawn("ab", busy, stalling="b") == drawn("ab", busy, slow="b", stalling="a") == "a"
    assert drawn("ab", busy, "a", slow="b") == "b"
    assert drawn("bc", busy, slow="bc") == "c"
    assert drawn("", busy) == "None"


@pytest.mark.parametrize(("avoided", "missed"), [("b", ""), ("ab", ""), ("ab", "b"), ("b", "b")])
def test_a_replica_that_was_tried_is_not_asked_again_before_one_that_was_not(
    avoided: str, missed: str
) -> None:
    """However little is thought of the other."""
    assert drawn("ab", {}, avoided, missed=missed, tried="a") == "b"
    assert drawn("ab", {}, "ab", missed="a") == "b"


def test_two_choices_keep_queues_short() -> None:
    """A thousand messages that are never answered, to ten servers: within a few of each other."""
    chance, load = Random(2), Counter[str]()
    servers = [f"s{n}" for n in range(10)]
    for _ in range(1000):
        chosen = choose(servers, load, NONE, chance)
        assert chosen is not None
        load[chosen] += 1
    assert max(load.values()) - min(load.values()) <= 6


@pytest.mark.parametrize(("share", "burst"), [(0.1, 20), (0.05, 100)], ids=["retried", "hedged"])
def test_few_messages_are_sent_twice_in_the_long_run_and_a_burst_at_first(
    share: float, burst: int
) -> None:
    """However many fail or are late, no storm."""
    budget = TokenBucket(share, burst)
    assert sum(budget.spend() for _ in range(500)) == burst
    sent = sum(budget.earn() or budget.spend() for _ in range(10_000))
    assert 10_000 * share - 1 <= sent <= 10_000 * share


def test_a_message_is_late_after_what_nearly_all_of_the_fastest_server_took() -> None:
    """99 of 100; of answers that came lately; and never within what a busy machine takes."""
    quick, slow, silent = Usual(), Usual(), Usual()
    assert late_after([quick, slow], 0.0) == UNKNOWN_S
    for number in range(100):
        quick.note(0.01 if number % 10 else 0.2, number / 100)
        slow.note(0.5, number / 100)
    assert quick.median_s == 0.01 and slow.median_s == 0.5
    assert late_after([quick, slow, silent], 1.0) == 0.2  # one in ten: the 99th percentile
    for took_s, late_s in ((0.02, 0.02), (1e-4, LEAST_S)):
        for _ in range(KEPT + EACH):
            quick.note(took_s, 1.0)
        assert late_after([slow, quick], 1.0) == late_s
    for number in range(3):
        quick.late(0.01, 1.0 + number / 10)
    assert late_after([slow, quick], 1.2) == 0.5  # those of one that stalls say nothing
    assert late_after([slow, quick], 2.3) == LEAST_S
    assert late_after([slow, quick], 1.1 + FORGET_S) == UNKNOWN_S
    quick.note(3.0, 20.0)  # the first after a while tells of nothing before it
    assert not quick.known(20.0)


def test_a_server_stalls_while_its_messages_are_late_in_a_row() -> None:
    """Until it answers about in time, or for a second: then it may be well again."""
    one = Usual()
    for number in range(3):
        assert not one.stalls(1.0)
        for late in range(3):  # of one pause
            one.late(0.01, 1.0 + number / 50 + late / 1000)
    assert one.stalls(1.1)
    one.note(0.1, 1.1)
    assert one.stalls(2.03) and not one.stalls(2.05)
    one.late(0.01, 3.0)
    assert one.stalls(3.0)
    one.note(0.015, 3.1)
    assert not one.stalls(3.1)


@pytest.mark.parametrize(
    ("heard", "may"),
    [
        (Heard(0.01), True),
        (Heard(0.01, silent_s=0.02), True),  # a busy machine
        (Heard(0.2), False),  # it would be too late, too
        (Heard(0.01, silent_s=0.1), False),
        (Heard(0.01, misses=True), False),
        (Heard(inf), False),  # nothing is known
    ],
)
def test_only_a_server_that_answers_in_time_takes_over(heard: Heard, may: bool) -> None:
    """Not one that is slow or silent itself."""
    assert may_take_over({"b": heard}, left_s=0.15) == ["b"] * may


@pytest.fixture(scope="module")
def twice(files: ModelFiles) -> Iterator[tuple[Cluster, Cluster]]:
    """Two servers of each shard."""
    with Cluster(files) as first, Cluster(files) as second:
        yield first, second


def all_of(twice: tuple[Cluster, Cluster]) -> list[str]:
    """The addresses of all servers."""
    return [address for cluster in twice for address in cluster.addresses]


class Paced(Timeline):
    """Each server answers after a time of its own; inf while it is stopped.

    gone  addresses where nobody is
    """

    def __init__(self) -> None:
        super().__init__()
        self.after_s: dict[str, float] = {}
        self.gone: set[str] = set()

    def fate(self, address: str, timeout_s: float) -> tuple[str, float]:
        """Its own."""
        if address in self.gone:
            return "nobody", 0.0
        return "answered", self.after_s.get(address, 0.001)


class Line:
    """A client on such a network that knows how fast the servers are: two of each shard, and
    `more`; `ask` asks for the second shard."""

    def __init__(
        self, files: ModelFiles, twice, cache_dir: Path, *, more: Sequence[str] = (), **config: Any
    ) -> None:
        self.network = line = Paced()
        self.pair = [cluster.addresses[1] for cluster in twice]
        self._query = queries_to(files, 1)[:1]
        self.expected = [files.oracle.score(c, w) for c, w in self._query]
        self._simulation = Simulation(line, [*all_of(twice), *more], cache_dir, **config)
        self.client = self._simulation.client
        while not {*self.pair, *more} <= {address for _, address in line.sent}:
            sent = len(line.sent)
            self.ask(1.0)  # time stands still while a connection is made, in a thread
            until(lambda sent=sent: line.run_until(line.now) or len(line.sent) > sent)
            line.run_until(line.now + 0.01)
        for _ in range(60):
            self.ask(1.0)
            line.run_until(line.now + 0.01)
        line.sent.clear()

    def ask(self, limit_s: float) -> Any:
        """A call, not waited for."""
        return self._simulation.ask(self._query, limit_s)


@pytest.mark.promise("deadline")
@pytest.mark.parametrize("limit_s", [0.3, 1.0])
def test_a_stopped_server_keeps_a_message_for_half_of_its_time(
    files, twice, cache_dir, limit_s: float
) -> None:
    """Then the other gets it, once, though no message may be hedged: no call fails."""
    one = Line(files, twice, cache_dir, hedging=False)
    line, stopped = one.network, one.pair[0]
    line.after_s[stopped] = inf
    calls, kept = [], 0
    for _ in range(20):
        line.sent.clear()
        begun = line.now
        calls.append(one.ask(limit_s))
        line.run_until(begun + 2 * limit_s)
        if line.sent[0][1] == stopped:
            kept += 1
            assert line.sent == [
                (begun, stopped),
                (pytest.approx(begun + limit_s / 2), one.pair[1]),
            ]
    for call in calls:
        assert_equal(call.result(0), one.expected)
    assert (one.client.stats.retries, one.client.stats.hedges) == (kept, 0) and kept
    one.client.close()


def test_a_message_that_a_server_keeps_goes_to_a_third_if_the_second_is_gone(
    files, twice, cache_dir
) -> None:
    """It was hedged in vain; so no call fails while one of three servers answers."""
    third = f"localhost:{twice[1].ports[1]}"  # the same server by another name
    one = Line(files, twice, cache_dir, more=(third,))
    line, (stopped, gone) = one.network, one.pair
    line.after_s[stopped], line.gone = inf, {gone}
    hedged = 0
    for _ in range(40):
        line.sent.clear()
        call = one.ask(1.0)
        line.run_until(line.now + 2.0)  # then the one that is gone may be asked again
        assert_equal(call.result(0), one.expected)
        hedged += [address for _, address in line.sent] == [stopped, gone, third]
    assert hedged
    one.client.close()


def test_a_server_that_is_late_again_and_again_is_asked_after_the_other(
    files, twice, cache_dir
) -> None:
    """Though it answers in the end, as a machine that pauses does."""
    one = Line(files, twice, cache_dir)
    line, slow = one.network, one.pair[0]
    line.after_s[slow], firsts = 0.2, []
    while len(firsts) < 200:
        line.sent.clear()
        call = one.ask(1.0)
        line.run_until(line.now + 0.02)
        assert_equal(call.result(0), one.expected)
        firsts.append(line.sent[0][1])
    assert firsts.count(slow) < 10
    one.client.close()


@pytest.mark.parametrize(("other_s", "short"), [(0.012, 0), (0.03, 0), (0.02, 20)])
def test_no_call_waits_for_a_stopped_server_though_the_other_is_slower_than_it_was(
    files, twice, cache_dir, other_s: float, short: int
) -> None:
    """It has the work of both, or its machine is busy; also after calls whose deadlines no server
    could keep, for which none counts as one that stalls."""
    one = Line(files, twice, cache_dir)
    line = one.network
    if short:
        line.after_s = dict.fromkeys(one.pair, other_s)
        for limit_s in [*[1.0] * 3 * KEPT, *[other_s / 2] * short]:
            one.ask(limit_s)
            line.run_until(line.now + other_s + 0.01)
    line.after_s = {one.pair[0]: inf, one.pair[1]: other_s}
    for _ in range(30):
        begun = line.now
        call = one.ask(1.0)
        line.run_until(begun + 0.1)
        assert_equal(call.result(0), one.expected)
        line.now = begun + 0.1
    one.client.close()


@pytest.mark.parametrize("after_s", [0.2, inf])
def test_servers_that_are_all_slow_or_silent_get_no_message_twice(
    files, twice, cache_dir, after_s: float
) -> None:
    """As when they have too much to do."""
    one = Line(files, twice, cache_dir, hedging=False)
    line = one.network
    line.after_s = dict.fromkeys(one.pair, after_s)
    for _ in range(200):
        one.ask(0.3)
        line.run_until(line.now + 0.02)
    line.run_until()
    assert one.client.stats.retries <= 2  # before any of them is known to be slow
    one.client.close()


class Failing(Network):
    """A network on which what is sent to some addresses fails with an error, or is held.

    failing    address -> the error
    held_back  address -> the replies that are due to it
    withdrawn  addresses of messages that the client withdrew
    given      time that each message was given
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, Exception] = {}
        self.held_back: dict[str, list[Callable[[bytes | None, DlmError | None], None]]] = {}
        self.withdrawn: list[str] = []
        self.given: list[float] = []

    def connect(self, address: str):
        """A connection that fails where its address does."""
        made = super().connect(address)
        real = made.score

        def score(request, timeout_s, reply, metadata=()):
            self.given.append(timeout_s)
            if (error := self.failing.get(address)) is not None:
                self.take(address, request, lambda: None)
                reply(None, error)
            elif address in self.held_back:
                self.held_back[address].append(reply)
            else:
                real(request, timeout_s, reply, metadata)
            return lambda: self.withdrawn.append(address)

        made.score = score  # type: ignore[method-assign]
        return made


@pytest.fixture
def failing(connect, twice) -> tuple[Failing, Client]:
    """A client of both clusters that has no heartbeats, and the network whose servers may fail."""
    network = Failing()
    return network, connect(all_of(twice), network, heartbeats=False)


def test_whoever_loses_is_withdrawn_and_its_late_reply_goes_nowhere(files, failing, twice) -> None:
    """The winner's message is not; the lane is free at once. No failure is counted."""
    network, client = failing
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    bad = twice[0].addresses[1]
    network.held_back[bad] = held = []
    while not held:
        ask(client.utterance(), files.oracle, query)
    until(lambda: free(client))
    assert network.withdrawn == [bad] and client.stats.hedges_won == 1
    before = client.stats
    network.held_back.clear()
    held.pop()(b"nonsense", None)
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 5, 20))
    until(lambda: free(client))
    assert (client.stats.failed, client.stats.retries, before.failed) == (0, 0, 0)


@pytest.mark.parametrize("gone_before", [False, True])
def test_both_replicas_share_the_work(files, connect, twice, gone_before: bool) -> None:
    """Messages of a shard go to either, and all answers are the oracle's; also where nobody was
    there for a while to take those of one: they were nobody's work."""
    network, seeds = Network(), count()
    real = network.take

    def take(address, request, send) -> None:
        if address in twice[0].addresses:
            raise ShardDown("nobody is there")
        real(address, request, send)

    client = connect(all_of(twice), network, hedging=False)

    def ask_some() -> bool:
        ask(client.utterance(), files.oracle, random_queries(files.oracle, next(seeds), 30))
        return {address for address, _ in network.requests} == set(all_of(twice))

    if gone_before:
        network.take = take  # type: ignore[method-assign]
        until(lambda: ask_some() or client.stats.failed > 2)
        network.take = real  # type: ignore[method-assign]
        network.requests.clear()
    until(ask_some)  # one that is still being connected is not asked


@pytest.mark.parametrize(
    "error",
    [
        ShardDown("gone"),
        Overloaded("busy"),
        ProtocolError("damaged"),
        AuthenticationError("an old tokens file"),
    ],
)
def test_a_message_that_fails_is_answered_by_the_other_replica(
    files, connect, twice, error: Exception
) -> None:
    """No caller sees it, as long as there is budget; the first is not asked first again at once."""
    network = Failing()
    # A hedge that fails is asked of nobody else: the first server has the message still.
    client = connect(all_of(twice), network, hedging=False)
    bad = twice[0].addresses[0]
    network.failing[bad] = error
    seeds = count()

    def has_failed() -> bool:
        ask(client.utterance(), files.oracle, random_queries(files.oracle, next(seeds), 20))
        return client.stats.failed > 0

    until(has_failed)  # a server whose first heartbeats were slow is asked last for a while
    for _ in range(20):  # within the budget, also if that server gets all of them
        has_failed()
    assert client.stats.retries == client.stats.failed
    if isinstance(error, (ShardDown, AuthenticationError)):
        assert sum(address == bad for address, _ in network.requests) < 10
    network.failing.clear()
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 99, 20))


@pytest.mark.parametrize(
    "error", [ShardDown("gone"), ProtocolError("nonsense"), AuthenticationError("who are you?")]
)
def test_a_message_is_asked_again_once_and_not_at_all_where_that_is_in_vain(
    files, failing, twice, error: Exception
) -> None:
    """Both replicas fail, send what is damaged, or let nobody in: two tries, and each has all of
    the time."""
    network, client = failing
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    network.requests.clear()
    network.given.clear()
    network.failing = {cluster.addresses[1]: error for cluster in twice}
    call = submit(client.utterance(), query, 20.0)
    assert isinstance(call.exception(WAIT_S), type(error))
    assert len(network.requests) == 2 and min(network.given) > 15.0


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.NOT_READY])
def test_a_message_that_all_replicas_refuse_during_a_roll_is_asked_until_one_answers(
    files, failing, twice, reason: Reason
) -> None:
    """Within its deadline."""
    network, client = failing
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    first, second = (cluster.addresses[1] for cluster in twice)
    refusal = error_from_refusal(reason, "ask a replica", where="here")
    network.failing = {first: refusal, second: refusal}
    network.requests.clear()
    future = submit(client.utterance(), query, WAIT_S)
    until(lambda: len(network.requests) >= 6)
    assert {address for address, _ in network.requests} == {first, second}
    assert not future.done()
    del network.failing[second]
    assert_equal(future.result(WAIT_S), [files.oracle.score(c, w) for c, w in query])


def test_a_storm_of_failures_is_not_answered_by_a_storm_of_retries(files, failing, twice) -> None:
    """Every server refuses: of 400 messages few more than a tenth are asked again."""
    network, client = failing
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    network.failing = {cluster.addresses[1]: Overloaded("busy") for cluster in twice}
    network.requests.clear()
    for _ in range(400):
        assert isinstance(submit(client.utterance(), query).exception(WAIT_S), Overloaded)
    assert len(network.requests) <= 400 + 20 + 40 + 1


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
