"""Which replica is asked, and when another is: the choice, the budget, and messages that fail.

Above 600 lines: all tests share servers that hold each shard twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from time import sleep

import pytest

from client.questions import ask, assert_equal, queries_to, random_queries, submit
from client.scripted import Network, Scripted, free, settle
from client.test_deadlines import Fated, Inline, Timeline
from cluster import WAIT_S, Cluster, ModelFiles, until
from dlm.client import Client, ClientConfig, Utterance
from dlm.client.after import (
    EACH,
    FORGET_S,
    KEPT,
    LEAST_S,
    STALLED,
    STALLED_S,
    UNKNOWN_S,
    Heard,
    TokenBucket,
    Usual,
    choose,
    late_after,
    may_take_over,
)
from dlm.client.cluster_file import Endpoint, FixedEndpoints, Metadata
from dlm.client.core import Core
from dlm.client.delivery import LOST_S
from dlm.client.runtime import RETRIED, RETRY_BURST
from dlm.client.server import Reply
from dlm.errors import AuthenticationError, DeadlineExceeded, Overloaded, ProtocolError, ShardDown
from dlm.wire.status import Reason, error_from_refusal

NONE: frozenset[str] = frozenset()


def test_the_less_busy_of_two_is_asked_and_an_avoided_one_only_alone() -> None:
    """Whatever the draw."""
    chance, busy = Random(1), {"a": 5, "b": 1}
    assert {choose(["a", "b"], busy, NONE, chance) for _ in range(50)} == {"b"}
    assert {choose(["a", "b"], busy, frozenset("b"), chance) for _ in range(50)} == {"a"}
    assert choose(["b"], busy, frozenset("b"), chance) == "b"
    slow, stalling = frozenset("b"), frozenset("a")
    assert {choose(["a", "b"], busy, NONE, chance, slow) for _ in range(50)} == {"a"}
    assert {choose(["a", "b"], busy, NONE, chance, stalling=slow) for _ in range(50)} == {"a"}
    assert choose(["a", "b"], busy, NONE, chance, slow, stalling=stalling) == "a"
    assert choose(["a", "b"], busy, frozenset("a"), chance, slow) == "b"
    assert {choose(["b", "c"], busy, NONE, chance, frozenset("bc")) for _ in range(50)} == {"c"}
    assert choose([], busy, NONE, chance) is None


def test_two_choices_keep_queues_short() -> None:
    """A thousand messages that are never answered, to ten servers: within a few of each other."""
    chance, load = Random(2), Counter[str]()
    servers = [f"s{n}" for n in range(10)]
    for _ in range(1000):
        chosen = choose(servers, load, NONE, chance)
        assert chosen is not None
        load[chosen] += 1
    assert max(load.values()) - min(load.values()) <= 6
    at_random = Counter(chance.choice(servers) for _ in range(1000))
    assert max(at_random.values()) - min(at_random.values()) > 6


def test_retries_are_a_tenth_of_messages_at_most_and_a_few_at_first() -> None:
    """However many fail, no storm."""
    budget = TokenBucket(RETRIED, RETRY_BURST)
    assert sum(budget.spend() for _ in range(100)) == 20
    retried = 0
    for _ in range(10_000):
        budget.earn()
        retried += budget.spend()
    assert 999 <= retried <= 1000


def test_a_message_is_late_after_what_nearly_all_of_the_fastest_server_took() -> None:
    """99 of 100; of answers that came lately; and never within what a busy machine takes."""
    quick, slow, silent = Usual(), Usual(), Usual()
    assert late_after([quick, slow], 0.0) == UNKNOWN_S
    for number in range(100):
        quick.note(0.01 if number % 10 else 0.2, number / 100)
        slow.note(0.5, number / 100)
    assert quick.median_s == 0.01 and slow.median_s == 0.5
    assert late_after([quick, slow, silent], 1.0) == 0.2  # one in ten: the 99th percentile
    for _ in range(KEPT + EACH):
        quick.note(0.02, 1.0)
    assert late_after([slow, quick], 1.0) == 0.02
    for _ in range(KEPT + EACH):
        quick.note(1e-4, 1.0)
    assert late_after([slow, quick], 1.0) == LEAST_S
    for number in range(STALLED):
        quick.late(0.01, 1.0 + number / 10)
    assert late_after([slow, quick], 1.2) == 0.5  # those of one that stalls say nothing
    assert late_after([slow, quick], 1.3 + STALLED_S) == LEAST_S
    assert late_after([slow, quick], 1.1 + FORGET_S) == UNKNOWN_S
    quick.note(3.0, 20.0)  # the first after a while tells of nothing before it
    assert not quick.known(20.0)


def test_a_server_stalls_while_its_messages_are_late_in_a_row() -> None:
    """Until it answers about in time, or for a second: then it may be well again."""
    one = Usual()
    for number in range(STALLED):
        assert not one.stalls(1.0)
        for late in range(STALLED):  # of one pause
            one.late(0.01, 1.0 + number / 50 + late / 1000)
    assert one.stalls(1.1)
    one.note(0.1, 1.1)
    assert one.stalls(1.1)
    assert not one.stalls(1.1 + STALLED_S)
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


class Paced(Timeline):
    """A network on which each server answers after a time of its own; inf while it is stopped.

    gone  addresses where nobody is
    sent  when each message was sent, and where
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.after_s: dict[str, float] = {}
        self.gone: set[str] = set()
        self.sent: list[tuple[float, str]] = []

    def connect(self, address: str) -> Fated:
        """Such a connection."""
        return Answering(self, address)


class Answering(Fated):
    """See `Paced`."""

    network: Paced

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> None:
        """An answer in its time, or none by the deadline."""
        line, late = self.network, DeadlineExceeded("no reply")
        line.sent.append((line.now, self.address))
        after_s = line.after_s.get(self.address, 0.001)
        if self.address in line.gone:
            line.at(line.now, lambda: reply(None, ShardDown("nobody is there")))
        elif after_s < timeout_s:
            line.at(line.now + after_s, lambda: self._answer(request, reply))
        else:
            line.at(line.now + timeout_s, lambda: reply(None, late))


class Line:
    """A client on such a network, without heartbeats, that knows how fast the servers are: two of
    each shard, and `more`."""

    def __init__(
        self, files: ModelFiles, twice, cache_dir: Path, *, hedging: bool, more: Sequence[str] = ()
    ) -> None:
        self.network = line = Paced()
        self.pair = [cluster.addresses[1] for cluster in twice]
        self.query = queries_to(files, 1)[:1]
        self.expected = [files.oracle.score(c, w) for c, w in self.query]
        config = ClientConfig(heartbeats=False, hedging=hedging, cache_dir=cache_dir)
        every = [*(a for c in twice for a in c.addresses), *more]
        places = FixedEndpoints([Endpoint(a) for a in every])
        home = Inline(line)
        self.core = Core(places, config, connect=line.connect, clock=line.clock, home=home)
        self.utterance = Utterance(self.core, self.core.snapshot(), None)
        for address in (*self.pair, *more):
            self.core.connection(address)
        for _ in range(60):
            self.ask(1.0)
            line.run_until(line.now + 0.01)
        self.core._runtime.hedging.saved = -1.0  # none, whatever a test's messages earn

    def ask(self, limit_s: float):
        """A call, not waited for."""
        return submit(self.utterance, self.query, limit_s)


@pytest.mark.promise("deadline")
@pytest.mark.parametrize("hedging", [True, False])
@pytest.mark.parametrize("limit_s", [0.3, 1.0])
def test_a_stopped_server_keeps_a_message_for_half_of_its_time(
    files, twice, cache_dir, limit_s: float, hedging: bool
) -> None:
    """Then the other gets it, once, also where no message may be hedged: no call fails."""
    one = Line(files, twice, cache_dir, hedging=hedging)
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
            assert [(at, a) for at, a in line.sent] == [
                (begun, stopped),
                (pytest.approx(begun + limit_s / 2), one.pair[1]),
            ]
    for call in calls:
        assert_equal(call.result(0), one.expected)
    stats = one.core.stats
    assert (stats.retries, stats.hedges) == (kept, 0) and kept
    one.core.close()


def test_a_message_that_a_server_keeps_goes_to_a_third_if_the_second_is_gone(
    files, twice, cache_dir
) -> None:
    """It was hedged in vain; so no call fails while one of three servers answers."""
    third = f"localhost:{twice[1].ports[1]}"  # the same server by another name
    one = Line(files, twice, cache_dir, hedging=True, more=(third,))
    line, (stopped, gone) = one.network, one.pair
    line.after_s[stopped], line.gone = inf, {gone}
    hedged = 0
    for _ in range(40):
        line.sent.clear()
        one.core._runtime.hedging.saved = 1.0
        call = one.ask(1.0)
        line.run_until(line.now + 2.0)  # then the one that is gone may be asked again
        assert_equal(call.result(0), one.expected)
        hedged += [address for _, address in line.sent] == [stopped, gone, third]
    assert hedged
    one.core.close()


def test_a_server_that_answers_as_usual_does_not_stall_for_calls_of_less_time(
    files, twice, cache_dir
) -> None:
    """Those fail; the other calls may still be hedged."""
    one = Line(files, twice, cache_dir, hedging=True)
    line, runtime = one.network, one.core._runtime
    line.after_s = dict.fromkeys(one.pair, 0.02)
    for limit_s in [*[1.0] * 3 * KEPT, *[0.01] * 20]:
        one.ask(limit_s)
        line.run_until(line.now + 0.03)
    assert not any(runtime.usual[address].stalls(line.now) for address in one.pair)
    one.core.close()


@pytest.mark.parametrize("other_s", [0.012, 0.03])
def test_no_call_waits_for_a_stopped_server_though_the_other_is_slower_than_it_was(
    files, twice, cache_dir, other_s: float
) -> None:
    """It has the work of both, or its machine is busy."""
    one = Line(files, twice, cache_dir, hedging=True)
    line, runtime = one.network, one.core._runtime
    line.after_s = {one.pair[0]: inf, one.pair[1]: other_s}
    runtime.hedging.saved, runtime.chance = 100.0, Random(1)
    for _ in range(30):
        begun = line.now
        call = one.ask(1.0)
        line.run_until(begun + 0.1)
        assert call.done()
        line.now = begun + 0.1
    one.core.close()


@pytest.mark.parametrize("hedging", [True, False])
@pytest.mark.parametrize("after_s", [0.2, inf])
def test_servers_that_are_all_slow_or_silent_get_no_message_twice(
    files, twice, cache_dir, after_s: float, hedging: bool
) -> None:
    """As when they have too much to do."""
    one = Line(files, twice, cache_dir, hedging=hedging)
    line = one.network
    line.after_s = dict.fromkeys(one.pair, after_s)
    for _ in range(200):
        one.ask(0.3)
        line.run_until(line.now + 0.02)
        one.core._runtime.hedging.saved = 0.0
    line.run()
    assert one.core.stats.retries <= 2  # before any of them is known to be slow
    one.core.close()


@pytest.mark.parametrize("hedging", [True, False])
def test_a_message_that_one_server_holds_is_answered_by_the_other_first(
    files, connect, twice, hedging: bool
) -> None:
    """Its late answer changes nothing; and with the knob off nobody else is asked."""
    network = Network()
    query = queries_to(files, 1)[:1]
    expected = [files.oracle.score(c, w) for c, w in query]
    held: list = []
    bad, real = twice[0].addresses[1], network.take

    def take(address, request, send) -> None:
        if address == bad:
            held.append(send)
        else:
            real(address, request, send)

    network.take = take  # type: ignore[method-assign]
    while True:
        # Were a first heartbeat slow, nobody else would be asked before half of the time is over.
        client = connect(
            [a for c in twice for a in c.addresses], network, hedging=hedging, heartbeats=False
        )
        calls = []
        while not held:
            calls.append(submit(client.utterance(), query, WAIT_S))
            until(lambda calls=calls: calls[-1].done() or held)
        if not hedging:
            assert not calls[-1].done() and client.stats.hedges == 0
            break
        until(lambda calls=calls: all(call.done() for call in calls))
        if client.stats.hedges_won:
            break
        while held:  # the other server was late itself, and this one asked in vain
            held.pop()()
    while held:
        held.pop()()
    for call in calls:
        assert_equal(call.result(WAIT_S), expected)
    until(lambda: free(client))
    until(lambda: not +client._core._runtime.outstanding)
    assert client.stats.retries == 0


def test_whoever_loses_is_withdrawn_and_its_late_reply_goes_nowhere(files, connect, twice) -> None:
    """The winner's message is not. The lane is free at once, the server only when it has told."""
    network = Network()
    client = connect([a for c in twice for a in c.addresses], network, heartbeats=False)
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    withdrawn: list[str] = []
    held: list = []
    bad = twice[0].addresses[1]

    def watched(address: str, real):
        def score(request, timeout_s, reply, metadata=()):
            if address == bad:
                held.append(reply)
            else:
                real(request, timeout_s, reply, metadata)
            return lambda: withdrawn.append(address)

        return score

    for connection in network.made:
        connection.score = watched(connection.address, connection.score)  # type: ignore[method-assign]
    while not held:
        ask(client.utterance(), files.oracle, query)
    until(lambda: free(client))
    runtime = client._core._runtime
    assert withdrawn == [bad] and runtime.outstanding[bad] == 1
    assert client.stats.hedges_won == 1
    before = client.stats
    held.pop()(b"nonsense", None)
    until(lambda: not +runtime.outstanding)
    until(lambda: not runtime.under_way)
    assert free(client) and client.stats.failed == before.failed == 0
    assert client.stats.messages == before.messages
    ask(client.utterance(), files.oracle, query)


def test_a_late_message_waits_for_a_second_server_that_is_being_connected(
    files, connect, twice
) -> None:
    """Its first server fails meanwhile: no caller sees it."""
    network = Network()
    query = queries_to(files, 1)[:1]
    replicas = {cluster.addresses[1] for cluster in twice}
    gates = {address: threading.Event() for address in replicas}
    client = connect([a for c in twice for a in c.addresses], network, heartbeats=False)
    utterance = client.utterance()
    client._core._runtime.connections.clear()  # those that found the servers
    made, replies = network.connect, list[Reply]()
    network.made.clear()

    def slowly(address: str) -> Scripted:
        connection = made(address)
        if address in replicas and len(gates) == 2:  # the first at once, and it does not answer
            del gates[address]
            connection.score = lambda request, timeout_s, reply, metadata=(): replies.append(reply)  # type: ignore[method-assign]
        elif address in gates:
            assert gates[address].wait(WAIT_S)
        return connection

    client._core._links._connect = slowly
    call = submit(utterance, query, WAIT_S)
    until(lambda: client.stats.hedges == 1)
    replies.pop()(None, ShardDown("gone"))
    settle(client)
    assert not call.done()
    for gate in gates.values():
        gate.set()
    assert_equal(call.result(WAIT_S), [files.oracle.score(c, w) for c, w in query])
    assert client.stats.hedges_won == 1 and client.stats.retries == 0
    until(lambda: free(client))
    assert not +client._core._runtime.outstanding


@pytest.fixture(scope="module")
def twice(files: ModelFiles) -> Iterator[tuple[Cluster, Cluster]]:
    """Two servers of each shard."""
    first, second = Cluster(files), Cluster(files)
    yield first, second
    first.end()
    second.end()


class Failing(Network):
    """A network on which what is sent to some addresses fails with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, Exception] = {}

    def connect(self, address: str):
        """A connection that fails where its address does."""
        made = super().connect(address)
        real = made.score

        def score(request, timeout_s, reply, metadata=()):
            if (error := self.failing.get(address)) is not None:
                self.take(address, request, lambda: None)
                reply(None, error)
            else:
                real(request, timeout_s, reply, metadata)

        made.score = score  # type: ignore[method-assign]
        return made


def test_both_replicas_share_the_work(files, connect, twice) -> None:
    """Messages of a shard go to either, and all answers are the oracle's."""
    network = Network()
    client = connect([a for c in twice for a in c.addresses], network)
    seeds, servers = count(), {a for c in twice for a in c.addresses}

    def all_were_asked() -> bool:
        ask(client.utterance(), files.oracle, random_queries(files.oracle, next(seeds), 30))
        return {address for address, _ in network.requests} == servers

    until(all_were_asked)  # one that is still being connected is not asked


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
    client = connect([a for c in twice for a in c.addresses], network, hedging=False)
    bad = twice[0].addresses[0]
    network.failing[bad] = error
    seeds = count()

    def has_failed() -> bool:
        ask(client.utterance(), files.oracle, random_queries(files.oracle, next(seeds), 20))
        return client.stats.failed > 0

    until(has_failed)  # a server whose first heartbeats were slow is asked last for a while
    for _ in range(30):
        has_failed()
    assert client.stats.retries == client.stats.failed
    if isinstance(error, (ShardDown, AuthenticationError)):
        assert sum(address == bad for address, _ in network.requests) < 10
    network.failing.clear()
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 99, 20))


@pytest.fixture
def failing(connect, twice) -> tuple[Failing, Client]:
    """A client of both clusters, and the network whose servers may fail."""
    network = Failing()
    return network, connect([a for c in twice for a in c.addresses], network)


def test_a_message_is_asked_again_once_and_not_at_all_where_that_is_in_vain(
    files, failing, twice
) -> None:
    """Both replicas fail, send what is damaged, or let nobody in: two tries."""
    network, client = failing
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    for error, tries in (
        (ShardDown("gone"), 2),
        (ProtocolError("nonsense"), 2),
        (AuthenticationError("who are you?"), 2),
    ):
        network.requests.clear()
        for cluster in twice:
            network.failing[cluster.addresses[1]] = error
        assert isinstance(submit(client.utterance(), query).exception(WAIT_S), type(error))
        assert len(network.requests) == tries


def refusing(reason: Reason) -> ShardDown:
    """What a server that is being stopped or started answers."""
    return error_from_refusal(reason, "ask a replica", where="here")  # type: ignore[return-value]


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.NOT_READY])
def test_a_message_that_all_replicas_refuse_during_a_roll_is_asked_until_one_answers(
    files, failing, twice, reason: Reason
) -> None:
    """Within its deadline, and at no cost of the budget for failures."""
    network, client = failing
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    saved = client._core._runtime.retrying.saved
    first, second = (cluster.addresses[1] for cluster in twice)
    network.failing[first] = refusing(reason)
    network.failing[second] = refusing(reason)
    network.requests.clear()
    future = submit(client.utterance(), query, WAIT_S)
    until(lambda: len(network.requests) >= 6)
    assert {address for address, _ in network.requests} == {first, second}
    assert not future.done()
    del network.failing[second]
    expected = [files.oracle.score(c, w) for c, w in query]
    assert_equal(future.result(WAIT_S), expected)
    assert client._core._runtime.retrying.saved >= saved
    network.failing[second] = refusing(reason)
    network.requests.clear()
    late = submit(client.utterance(), query, 0.3)
    until(lambda: len(network.requests) >= 2)
    client._core._delivery.tell(sleep, 0.4 + LOST_S)  # a machine that is busy until it is too late
    assert isinstance(late.exception(WAIT_S), ShardDown)


def test_a_replica_that_was_tried_is_not_asked_again_before_one_that_was_not() -> None:
    """However little is thought of the other."""
    chance = Random(3)
    for avoided, missed in (("b", ""), ("ab", ""), ("ab", "b"), ("b", "b")):
        given = {
            choose(
                *(["a", "b"], {}, frozenset(avoided), chance),
                missed=frozenset(missed),
                tried=frozenset("a"),
            )
            for _ in range(50)
        }
        assert given == {"b"}
    lives = {
        choose(["a", "b"], {}, frozenset("ab"), chance, missed=frozenset("a")) for _ in range(50)
    }
    assert lives == {"b"}


def test_a_storm_of_failures_is_not_answered_by_a_storm_of_retries(files, failing, twice) -> None:
    """Every server refuses: of 400 messages few more than a tenth are asked again."""
    network, client = failing
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    for cluster in twice:
        network.failing[cluster.addresses[1]] = Overloaded("busy")
    network.requests.clear()
    for _ in range(400):
        assert isinstance(submit(client.utterance(), query).exception(WAIT_S), Overloaded)
    assert len(network.requests) <= 400 + 20 + 40 + 1


def test_a_replica_that_comes_back_gets_its_share_of_the_work_again(files, connect, twice) -> None:
    """Messages that nobody was there to take are nobody's work."""
    network = Network()
    addresses = [cluster.addresses[1] for cluster in twice]
    client = connect([a for c in twice for a in c.addresses], network, bigram_fallback=True)
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)

    def raises(address, request, send) -> None:
        raise ShardDown("nobody is there")

    taken, network.take = network.take, raises  # type: ignore[method-assign]
    for _ in range(50):
        submit(client.utterance(), query).result(WAIT_S)
    network.take = taken  # type: ignore[method-assign]
    until(lambda: free(client))
    assert not any(client._core._runtime.outstanding[address] for address in addresses)


def test_a_replica_has_all_of_the_time(files, connect, twice) -> None:
    """That of the first too: whoever is late is overtaken, not cut short."""
    network = Network()
    client = connect([a for c in twice for a in c.addresses], network, heartbeats=False)
    given: list[float] = []
    query = queries_to(files, 1)[:1]
    ask(client.utterance(), files.oracle, query)
    for connection in network.made:
        connection.score = lambda request, timeout_s, reply, metadata=(): (  # type: ignore[method-assign]
            given.append(timeout_s),
            reply(None, ShardDown("gone")),
        )
    call = submit(client.utterance(), query, 20.0)
    assert isinstance(call.exception(WAIT_S), ShardDown)
    assert len(given) == 2 and min(given) > 15.0
