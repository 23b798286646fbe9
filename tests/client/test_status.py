"""How the servers of a cluster are told to be."""

from __future__ import annotations

from itertools import cycle

import pytest

from client.questions import ask, queries_to
from client.scripted import Clients
from cluster import Cluster, ProcessServer, ThreadServer
from dlm.cli.status import problems
from dlm.client.cluster_file import Endpoint
from dlm.client.health import Mode
from dlm.client.server import Connection
from dlm.cluster.status import ClusterStatus
from dlm.errors import AuthenticationError, DlmError, ShardDown, StaleShardSet
from dlm.index.layout import MANIFEST
from dlm.wire._pb import shard_pb2 as pb


class Ticks:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def of(cluster: Cluster, **more) -> ClusterStatus:
    """The status of a cluster as its cluster.toml gives it."""
    endpoints = [Endpoint(address, shard) for shard, address in enumerate(cluster.addresses)]
    return ClusterStatus(endpoints, Connection, 20.0, **more)


def at(ports: dict[str, Port] | Port, clock=None, shards=None, **more) -> ClusterStatus:
    """The status of such ports, on a clock that heartbeats move, too; `shards` as cluster.toml says
    of them."""
    named = {"shared:1": ports} if isinstance(ports, Port) else ports
    clock = clock or Ticks()
    for port in named.values():
        port.clock = clock
    endpoints = [Endpoint(name, (shards or {}).get(name)) for name in named]
    return ClusterStatus(
        endpoints, lambda name: named[name].connect(name), 5.0, clock=clock, **more
    )


def test_rates_are_those_between_two_looks(cluster, client, files) -> None:
    """Two seconds by the clock, with five questions in between; before, there are none."""
    clock = Ticks()
    status = of(cluster, clock=clock)
    first = status.poll()
    assert [row.queries_per_s for row in first.rows] == [None] * 3
    queries = queries_to(files, 1)[:5]
    ask(client.utterance(), files.oracle, queries)
    clock.now = 2.0
    rows = status.poll().rows
    assert [row.shard for row in rows] == [0, 1, 2]
    assert [row.queries_per_s for row in rows] == [0, 2.5, 0]
    assert [row.messages_per_s for row in rows] == [0, 0.5, 0]
    assert {row.state for row in rows} == {"ready"}
    assert {row.model for row in rows} == {files.manifest.model[:12]}
    assert {row.shard_set for row in rows} == {files.manifest.shard_set[:12]}
    assert all(row.uptime_s is not None and row.uptime_s >= 0 for row in rows)
    assert [row.error for row in rows] == [None] * 3
    status.close()


def test_messages_that_a_server_refuses_are_a_part_of_those_that_it_was_sent() -> None:
    """Between two looks; without any there is no part."""
    port, clock = Port([0], 1), Ticks()
    status = at(port, clock)
    status.poll()
    clock.now = 1.0
    (row,) = status.poll().rows
    assert row.failing_percent is None
    port.messages, port.refused = 30, 10
    clock.now = 2.0
    (row,) = status.poll().rows
    assert row.failing_percent == 25.0
    status.close()


def test_a_way_that_becomes_slow_is_told_against_its_baseline_and_turns_the_mode() -> None:
    """As a client's heartbeats would: more than twice as long, for some beats; then well again."""
    port, clock = Port([0], 1), Ticks()
    port.trip_s = 0.01
    status = at(port, clock)
    first = status.poll()
    assert first.rows[0].delay_ratio is None and first.mode is Mode.FULL
    for _ in range(9):
        clock.now += 1.0
        snapshot = status.poll()
    assert (snapshot.rows[0].delay_ms, snapshot.rows[0].delay_ratio) == pytest.approx((10.0, 1.0))
    port.trip_s = 0.1
    for _ in range(9):
        clock.now += 1.0
        snapshot = status.poll()
    assert snapshot.rows[0].delay_ratio > 2 and snapshot.rows[0].slow
    assert (snapshot.slow, snapshot.mode) == ((4,), Mode.LOCAL_FALLBACK)
    port.trip_s = 0.01
    for _ in range(20):
        clock.now += 1.0
        snapshot = status.poll()
    assert (snapshot.slow, snapshot.mode) == ((), Mode.FULL)
    status.close()


def test_a_server_far_slower_than_another_of_its_shard_is_told() -> None:
    """At the first look; clients ask the other, and stay with the full model."""
    ports = {"near:1": Port([0], 1), "far:1": Port([0], 1)}
    ports["near:1"].trip_s, ports["far:1"].trip_s = 0.01, 0.2
    status = at(ports)
    snapshot = status.poll()
    assert {row.address: row.slow for row in snapshot.rows} == {"near:1": False, "far:1": True}
    assert (snapshot.slow, snapshot.mode) == ((), Mode.FULL)
    (problem,) = problems(snapshot)
    assert problem.startswith("far:1: slow, 200 ms") and "shard 4" in problem
    status.close()


@pytest.mark.parametrize("long", [1, 3, 5])
def test_a_look_whose_first_beats_were_long_calls_no_server_slow(long: int) -> None:
    """A handshake, or this process that had no processor for a moment, is not the server's delay:
    it is measured again on the open connection, alone, before anything is said."""
    ports = {"one:1": Port([0], 1), "two:1": Port([0], 1)}
    for port in ports.values():
        port.trip_s = 0.002
    ports["two:1"].first_s = [0.3] * long
    status = at(ports)
    snapshot = status.poll()
    assert [row.address for row in snapshot.rows] == ["one:1", "two:1"]
    assert [row.slow for row in snapshot.rows] == [False, False]
    assert snapshot.rows[1].delay_ms == snapshot.rows[1].round_trip_ms == pytest.approx(2.0)
    assert problems(snapshot) == []
    status.close()


def test_a_server_that_dies_is_a_row_and_its_shard_is_missing(files) -> None:
    """And it is found again, as another process, when it is back on its port. One that no line of
    the file names is missing, too: the manifest of one server says how many there should be."""
    with Cluster(files) as cluster:
        status = of(cluster)
        assert status.poll().missing == ()
        port = cluster.ports[1]
        cluster.servers[1].end()
        snapshot = status.poll()
        assert snapshot.missing == (1,)
        assert snapshot.shards == (0, 1, 2)
        row = snapshot.rows[1]
        assert (row.address, row.shard, row.state) == (cluster.addresses[1], 1, "silent")
        assert row.error
        assert "gave no answer" in row.error
        assert row.queries_per_s is None
        cluster.servers[1] = ThreadServer(cluster.servers[1].shard, port).ready()
        back = status.poll()
        assert back.missing == ()
        assert back.rows[1].queries_per_s is None  # another process, so nothing to subtract from
        status.close()
        status = ClusterStatus([Endpoint(cluster.addresses[2])], Connection, 20.0)
        snapshot = status.poll()
        assert (snapshot.shards, snapshot.missing) == ((0, 1, 2), (0, 1))
        status.close()


@pytest.mark.slow
def test_a_stopped_server_costs_its_timeout_and_is_silent(files, cache_dir) -> None:
    """A process that hangs answers no heartbeat; the others are told all the same."""
    with Cluster(files, kind=ProcessServer) as cluster, Clients(cache_dir):
        endpoints = [Endpoint(address) for address in cluster.addresses]
        status = ClusterStatus(endpoints, Connection, 1.0)
        status.poll()
        cluster.servers[0].pause()
        snapshot = status.poll()
        cluster.servers[0].resume()
        assert snapshot.rows[0].state == "silent"
        assert "DEADLINE_EXCEEDED" in (snapshot.rows[0].error or "")
        # A busy machine may make the others late too, but never wrong.
        assert {row.state for row in snapshot.rows[1:]} <= {"ready", "silent"}
        assert 0 in snapshot.missing
        status.close()


class Port:
    """Processes that share a port: each connection meets the next of `order`.

    Stands in for the system, which picks at random; `made` and `closed` count connections.
    """

    def __init__(
        self, order: list[int], processes: int, state: int = pb.SERVER_STATE_READY
    ) -> None:
        self.order = cycle(order)
        self.processes = self.alike = processes
        self.state = state
        self.made = 0
        self.closed = 0
        self.error: DlmError | None = None  # in place of an answer
        self.queries = dict.fromkeys(range(processes), 0)
        self.messages = self.refused = 0
        self.described: pb.DescribeReply | None = None
        self.clock, self.trip_s = Ticks(), 0.0
        self.first_s: list[float] = []  # what the first beats take in place of that

    def connect(self, address: str) -> OneOf:
        """A connection to one of them."""
        self.made += 1
        return OneOf(self, next(self.order))


class OneOf:
    """A connection to one process of a `Port`."""

    address = "shared:1"

    def __init__(self, port: Port, worker: int) -> None:
        self.port, self.worker = port, worker

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """As a server on a shared port answers."""
        if request.shard_set not in (b"", bytes(16)):
            raise StaleShardSet("WRONG_SHARD_SET")
        if self.port.error is not None:
            raise self.port.error
        self.port.clock.now += self.port.first_s.pop() if self.port.first_s else self.port.trip_s
        return pb.HeartbeatReply(
            sequence=request.sequence,
            shard_set=bytes(16),
            shard=4,
            state=self.port.state,
            instance=1000 + self.worker,
            queries=self.port.queries[self.worker],
            messages=self.port.messages,
            refused=self.port.refused,
            processes=self.port.processes,
            alike=self.port.alike,
            cpu_ms=10 * self.port.queries[self.worker] or 1,
            memory_bytes=1 << 20,
        )

    def describe(self, timeout_s: float, shard_set: bytes = b"") -> pb.DescribeReply:
        """Nothing, as without a model; or as another process of the port, which has a set more."""
        if self.port.described is None:
            raise ShardDown("shared:1 gave no answer: UNAVAILABLE")
        return self.port.described

    def close(self) -> None:
        """Counts."""
        self.port.closed += 1


@pytest.mark.parametrize("fresh", [False, True])
def test_a_port_of_several_processes_is_one_row_of_whichever_answers(fresh) -> None:
    """A connection stays with one, whose rates are known; new ones meet now one, now another."""
    port, clock = Port([0, 1], 2), Ticks()
    status = at(port, clock, fresh=fresh)
    port.queries = {0: 100, 1: 700}
    found = []
    for _ in range(3):
        clock.now += 4.0
        (row,) = status.poll().rows
        assert (row.processes, row.alike, row.is_whole) == (2, 2, True)
        found.append(row)
    assert port.made == (3 if fresh else 1)
    assert [row.queries_per_s for row in found] == [None, *([None, None] if fresh else [0, 0])]
    port.alike = 1
    assert not status.poll().rows[0].is_whole
    status.close()
    assert port.closed == port.made


def test_a_set_that_one_process_of_a_port_lacks_does_not_hide_the_port(files) -> None:
    """Another has described itself: the port is ready, and not all of it is alike."""
    port = Port([0], 2)
    port.alike, name = 1, files.manifest.shard_set_bytes
    manifest = (files.directory / MANIFEST).read_bytes()
    port.described = pb.DescribeReply(
        shard_set=name, manifest=manifest, shard_sets=[bytes(16), name]
    )
    (row,) = at(port).poll().rows
    assert (row.state, row.is_whole) == ("ready", False)


@pytest.mark.parametrize(
    ("state", "name", "missing"),
    [
        (pb.SERVER_STATE_WARMING, "warming", (4,)),
        (pb.SERVER_STATE_READY, "ready", ()),
        (pb.SERVER_STATE_DRAINING, "draining", (4,)),
        (77, "unknown", (4,)),
    ],
)
def test_a_shard_is_answered_by_a_server_that_is_ready(state, name, missing) -> None:
    """Servers that warm up or drain are there, but do not answer."""
    port = Port([0], 1, state)
    snapshot = at(port).poll()
    assert snapshot.rows[0].state == name
    assert snapshot.missing == missing


@pytest.mark.parametrize(
    ("other", "hint", "missing"),
    [(AuthenticationError, 1, ()), (ShardDown, 1, (0,)), (ShardDown, None, ())],
)
def test_a_server_that_refuses_us_is_not_silent_and_its_shard_not_missing(
    other: type[DlmError], hint: int | None, missing: tuple[int, ...]
) -> None:
    """What it holds, and how that is, nobody can say; where even its number is not known, of no
    shard can be said that it is missing."""
    ports = {"h:1": Port([0], 1), "h:2": Port([0], 1)}
    ports["h:1"].error, ports["h:2"].error = (
        other("h:1 said no"),
        AuthenticationError("h:2 said no"),
    )
    snapshot = at(ports, shards={"h:1": 0, "h:2": hint}).poll()
    state = "silent" if other is ShardDown else "refused"
    assert [(row.state, row.shard) for row in snapshot.rows] == [(state, 0), ("refused", hint)]
    assert (snapshot.missing, snapshot.refused) == (missing, True)
    assert snapshot.rows[1].error
