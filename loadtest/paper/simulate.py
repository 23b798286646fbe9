"""Simulates a cluster: clients, queues, a network, servers, and the cores that they share.

A run has a seed, and measures nothing: a trace and slots (`traces/routes.py`) give the requests,
and `Costs` the costs of work; the client's own queues are run, not modelled. A process does one
thing at a time, and processes of one machine take turns on its cores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import simpy
from numpy.typing import NDArray

from dlm.client import ClientConfig
from dlm.client.rules import Queue, Usual, late_after
from dlm.errors import ConfigError
from loadtest.traces.routes import Routed

DEADLINE_S = 1e6  # deadline of a simulated request: no client gives up
Steps = Generator[simpy.Event, None, None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds of each kind of work, measured once.

    request_s         client, per request
    query_s           client, per query, including those that need no message
    message_s         client, per message: sent, received, handed out
    server_message_s  server, per message
    server_query_s    server, per distinct query
    wait_s            per message: seconds in which nothing computes (wake-ups)
    """

    request_s: float
    query_s: float
    message_s: float
    server_message_s: float
    server_query_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of processes.

    clients, servers, workers  numbers of client processes, servers, and processes per server
    cores     cores that all processes share on one machine, without those for other work; 0: every
              process has its own core
    balanced  whether a request's pieces go to the servers in turn, not to their owners (DLM 4.2.1)
    """

    clients: int
    servers: int
    workers: int = 1
    cores: float = 0.0
    balanced: bool = False


@dataclass
class Outcome:
    """The results after the warm-up.

    messages    number that each server answered;  queries  number in all messages
    busy_s      processor seconds of each server;  client_s  processor seconds of all clients
    latency_s   latency of each request
    """

    seconds: float
    messages: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    requests: int = 0
    queries: int = 0
    client_s: float = 0.0
    latency_s: list[float] = field(default_factory=list)

    def utilisation(self, workers: int) -> float:
        """The utilisation of the busiest server's cores."""
        return float(self.busy_s.max()) / self.seconds / workers

    def percentile_ms(self, percent: float) -> float:
        return 1e3 * float(np.percentile(self.latency_s, percent)) if self.latency_s else math.nan


class Process:
    """Does one piece of work after another, on shared cores or on its own core.

    Args  slowness  factor by which work takes longer than its processor seconds
    """

    def __init__(
        self, env: simpy.Environment, cores: simpy.Resource | None = None, slowness: float = 1.0
    ) -> None:
        self._env, self._slowness = env, slowness
        self._cores = cores or simpy.Resource(env)
        self._turns = simpy.Resource(env)
        self.busy_s = 0.0

    def do(self, seconds: float) -> Steps:
        """Does `seconds` processor seconds of work, after all earlier work."""
        with self._turns.request() as turn:
            yield turn
            self.busy_s += seconds
            with self._cores.request() as core:
                yield core
                yield self._env.timeout(seconds * self._slowness)


@dataclass(eq=False, slots=True)
class _Piece:
    answered: simpy.Event
    queries: int
    deadline: float


@dataclass(eq=False, slots=True)
class _Way:
    """What a client knows about a server: the messages that wait or are in flight, and how long
    answers take.

    workers  the server process that each connection reached (SO_REUSEPORT)
    """

    client: Process
    server: int
    workers: list[Process]
    lane: Queue
    usual: Usual = field(default_factory=Usual)
    alarm: float = math.inf  # time of the next timed check of the lane


class Simulation:
    """One cluster and its clients.

    Args  routed  the queries that each request of a trace sends to each server
          seed    seed of all random choices
    """

    def __init__(
        self, layout: Layout, costs: Costs, routed: Routed, seed: int, warmup_s: float
    ) -> None:
        if layout.servers != routed.servers:
            raise ConfigError(
                f"the requests are routed to {routed.servers} servers; expected {layout.servers}"
            )
        self.env = simpy.Environment()
        self._layout, self._costs, self._routed = layout, costs, routed
        self._config = ClientConfig()
        self._rng = np.random.default_rng(seed)
        cores, slowness = None, 1.0
        if layout.cores:
            cores = simpy.Resource(self.env, math.ceil(layout.cores))
            slowness = cores.capacity / layout.cores
        self._clients = [Process(self.env, cores, slowness) for _ in range(layout.clients)]
        self._servers = [
            [Process(self.env, cores, slowness) for _ in range(layout.workers)]
            for _ in range(layout.servers)
        ]
        self._ways: dict[tuple[int, int], _Way] = {}
        self._turn = 0
        self._warmup_s = warmup_s
        servers = layout.servers
        self.outcome = Outcome(0.0, np.zeros(servers, np.int64), np.zeros(servers))

    def ask(self, client: int, request: int) -> Steps:
        """Sends one request, and waits for its answer."""
        env, costs, routed = self.env, self._costs, self._routed
        began = env.now
        first, last = routed.first[request : request + 2].tolist()
        self._turn += 1
        turn = self._turn
        plan_s = costs.request_s + costs.query_s * float(routed.asked[request])
        yield from self._clients[client].do(plan_s)
        pieces = [
            _Piece(env.event(), int(queries), env.now + DEADLINE_S)
            for queries in routed.queries[first:last]
        ]
        for piece, server in zip(pieces, routed.server[first:last].tolist(), strict=True):
            if self._layout.balanced:
                server = (server + turn) % self._layout.servers
            way = self._way(client, server)
            way.lane.submit(piece)
            self._advance(way)
        for piece in pieces:
            yield piece.answered
        if began >= self._warmup_s:
            self.outcome.requests += 1
            self.outcome.latency_s.append(env.now - began)

    def _way(self, client: int, server: int) -> _Way:
        way = self._ways.get((client, server))
        if way is None:
            config = self._config
            lane: Queue = Queue(config.window, config.max_queries, late_after((), 0.0))
            reached = self._rng.integers(self._layout.workers, size=config.connections)
            workers = [self._servers[server][at] for at in reached.tolist()]
            way = self._ways[client, server] = _Way(self._clients[client], server, workers, lane)
        return way

    def _advance(self, way: _Way) -> None:
        """Sends messages that are due, and checks again when the next one will be due."""
        env, lane = self.env, way.lane
        while (taken := lane.take(env.now)) is not None:
            env.process(self._send(way, *taken))
        at = lane.ready_at()
        if at < way.alarm:
            way.alarm = at
            env.process(self._look(way, at))

    def _look(self, way: _Way, at: float) -> Steps:
        yield self.env.timeout(at - self.env.now)
        way.alarm = math.inf
        self._advance(way)

    def _send(self, way: _Way, number: int, pieces: list[_Piece]) -> Steps:
        """Sends one message to a server and receives its reply."""
        env, costs, outcome = self.env, self._costs, self.outcome
        left = env.now
        queries = sum(piece.queries for piece in pieces)
        service_s = costs.server_message_s + costs.server_query_s * queries
        yield from way.client.do(costs.message_s / 2)
        yield env.timeout(costs.wait_s / 2)
        yield from way.workers[number % len(way.workers)].do(service_s)
        if env.now >= self._warmup_s:
            outcome.messages[way.server] += 1
            outcome.queries += queries
            outcome.busy_s[way.server] += service_s
        yield env.timeout(costs.wait_s / 2)
        yield from way.client.do(costs.message_s / 2)
        way.usual.note(env.now - left, env.now)
        way.lane.usual_s = late_after((way.usual,), env.now)
        way.lane.done(number, env.now)
        self._advance(way)
        for piece in pieces:
            piece.answered.succeed()

    def _measure(self, until_s: float) -> Outcome:
        if self._warmup_s:
            self.env.run(self._warmup_s)
        before = sum(process.busy_s for process in self._clients)
        self.outcome.seconds = until_s - self._warmup_s
        self.env.run(until_s)
        self.outcome.client_s = sum(process.busy_s for process in self._clients) - before
        return self.outcome

    def closed_loop(self, orders: Sequence[Sequence[NDArray[np.int64]]], until_s: float) -> Outcome:
        """Runs decoders that send the next request as soon as they have an answer; `orders` has the
        requests of each client's decoders, which the decoders repeat."""
        for client, decoders in enumerate(orders):
            for requests in decoders:
                self.env.process(self._decode(client, requests.tolist()))
        return self._measure(until_s)

    def _decode(self, client: int, requests: list[int]) -> Steps:
        for request in itertools.cycle(requests):
            yield from self.ask(client, request)

    def open_loop(self, requests: NDArray[np.int64], per_s: float, until_s: float) -> Outcome:
        """Sends random ones of these requests from random clients at random times."""
        count = self._rng.poisson(per_s * until_s)
        due = np.sort(self._rng.uniform(0.0, until_s, count)).tolist()
        clients = self._rng.integers(len(self._clients), size=count).tolist()
        drawn = self._rng.choice(requests, count).tolist()

        def come() -> Steps:
            for due_s, client, request in zip(due, clients, drawn, strict=True):
                yield self.env.timeout(due_s - self.env.now)
                self.env.process(self.ask(client, request))

        self.env.process(come())
        return self._measure(until_s)
