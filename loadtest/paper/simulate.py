"""A cluster in simulated time: clients, queues, a network, servers, and the cores they share.

Seeded, with nothing measured here: a trace and a slot table (`traces/routes.py`) say what a request
asks, `Costs` what work costs; the client's own queues are run, not modelled. A process does one
thing at a time; processes of one machine share its cores equally.
"""

from __future__ import annotations

import heapq
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

DEADLINE_S = 1e6  # of a simulated request: nobody gives up
Steps = Generator[simpy.Event, None, None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds of each kind of work, measured once.

    request_s         client, per request
    query_s           client, per query asked of it, those that cost no message included
    message_s         client, per message: sent, received, handed out
    server_message_s  server, per message
    server_query_s    server, per distinct query of it
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
    """What runs where.

    clients   client processes;  servers  as many as shards;  workers  processes per server
    cores     shared by all processes on one machine, less what other work takes; 0: every process
              has its own core
    balanced  a request's pieces go to the servers in turn, not to their owners (DLM 4.2.1)
    """

    clients: int
    servers: int
    workers: int = 1
    cores: float = 0.0
    round_trip_s: float = 0.0
    balanced: bool = False


@dataclass
class Outcome:
    """What happened after the warm-up.

    messages    answered, per server;  queries  in them
    busy_s      processor seconds of each server, all workers;  client_s  of all clients
    latency_s   of each request
    """

    seconds: float
    messages: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    requests: int = 0
    queries: int = 0
    client_s: float = 0.0
    latency_s: list[float] = field(default_factory=list)

    def utilisation(self, workers: int) -> float:
        """Of the busiest server's cores."""
        return float(self.busy_s.max()) / self.seconds / workers

    def percentile_ms(self, percent: float) -> float:
        return 1e3 * float(np.percentile(self.latency_s, percent)) if self.latency_s else math.nan


class Machine:
    """Cores shared equally by all jobs, each using at most one."""

    def __init__(self, env: simpy.Environment, cores: float) -> None:
        self._env, self._cores = env, cores
        self._done_s = 0.0  # work that each job in the heap has been given since the beginning
        self._since = 0.0
        self._jobs: list[tuple[float, int, simpy.Event]] = []
        self._number = itertools.count()
        self._changes = 0

    def work(self, seconds: float) -> simpy.Event:
        """A job of so many seconds of a whole core, which begins now: its end."""
        self._advance()
        end = self._env.event()
        heapq.heappush(self._jobs, (self._done_s + seconds, next(self._number), end))
        self._wait()
        return end

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._jobs)) if self._jobs else 1.0

    def _advance(self) -> None:
        self._done_s += (self._env.now - self._since) * self._rate()
        self._since = self._env.now

    def _wait(self) -> None:
        """For the end of the job that ends first, unless another begins or ends before."""
        self._changes += 1
        if self._jobs:
            left_s = max(self._jobs[0][0] - self._done_s, 0.0) / self._rate()
            self._env.process(self._end(left_s, self._changes))

    def _end(self, left_s: float, change: int) -> Steps:
        yield self._env.timeout(left_s)
        if change == self._changes:
            self._advance()
            heapq.heappop(self._jobs)[-1].succeed()
            self._wait()


class Process:
    """Does one thing after another; on a machine, or on its own core."""

    def __init__(self, env: simpy.Environment, machine: Machine | None = None) -> None:
        self._work = env.timeout if machine is None else machine.work
        self._turns = simpy.Resource(env)
        self.busy_s = 0.0

    def do(self, seconds: float) -> Steps:
        """Work of so many processor seconds, after all earlier work."""
        with self._turns.request() as turn:
            yield turn
            self.busy_s += seconds
            yield self._work(seconds)


@dataclass(eq=False, slots=True)
class _Piece:
    answered: simpy.Event
    queries: int
    deadline: float


@dataclass(eq=False, slots=True)
class _Way:
    """From a client to a server: what waits and is in flight, and how long answers take."""

    client: int
    server: int
    lane: Queue
    usual: Usual = field(default_factory=Usual)
    alarm: float = math.inf  # when the lane is looked at again by itself


class Simulation:
    """One cluster and its clients.

    Args  routed  what each request of a trace asks of each server
          seed    of the random choice of the worker that a connection reaches
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
        machine = Machine(self.env, layout.cores) if layout.cores else None
        self._clients = [Process(self.env, machine) for _ in range(layout.clients)]
        self._servers = [
            [Process(self.env, machine) for _ in range(layout.workers)]
            for _ in range(layout.servers)
        ]
        self._ways: dict[tuple[int, int], _Way] = {}
        self._reached: dict[tuple[int, int], list[int]] = {}
        self._turn = 0
        self._warmup_s = warmup_s
        servers = layout.servers
        self.outcome = Outcome(0.0, np.zeros(servers, np.int64), np.zeros(servers))

    def ask(self, client: int, request: int) -> Steps:
        """One request, until it is answered."""
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
            lane: Queue = Queue(self._config.window, self._config.max_queries, late_after((), 0.0))
            way = self._ways[client, server] = _Way(client, server, lane)
        return way

    def _advance(self, way: _Way) -> None:
        """Sends what may leave, and looks again when the next message may."""
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
        """One message to a server and back."""
        env, costs, outcome = self.env, self._costs, self.outcome
        client, left = self._clients[way.client], env.now
        way_s = self._layout.round_trip_s / 2 + costs.wait_s / 2
        queries = sum(piece.queries for piece in pieces)
        server = self._worker(way.client, way.server, number)
        service_s = costs.server_message_s + costs.server_query_s * queries
        yield from client.do(costs.message_s / 2)
        yield env.timeout(way_s)
        yield from server.do(service_s)
        if env.now >= self._warmup_s:
            outcome.messages[way.server] += 1
            outcome.queries += queries
            outcome.busy_s[way.server] += service_s
        yield env.timeout(way_s)
        yield from client.do(costs.message_s / 2)
        way.usual.note(env.now - left, env.now)
        way.lane.usual_s = late_after((way.usual,), env.now)
        way.lane.done(number, env.now)
        self._advance(way)
        for piece in pieces:
            piece.answered.succeed()

    def _worker(self, client: int, server: int, message: int) -> Process:
        """A connection reaches whichever worker accepts it (SO_REUSEPORT)."""
        workers = self._servers[server]
        if len(workers) == 1:
            return workers[0]
        reached = self._reached.get((client, server))
        if reached is None:
            reached = self._rng.integers(len(workers), size=self._config.connections).tolist()
            self._reached[client, server] = reached
        return workers[reached[message % len(reached)]]

    def _measure(self, until_s: float) -> Outcome:
        if self._warmup_s:
            self.env.run(self._warmup_s)
        before = sum(process.busy_s for process in self._clients)
        self.outcome.seconds = until_s - self._warmup_s
        self.env.run(until_s)
        self.outcome.client_s = sum(process.busy_s for process in self._clients) - before
        return self.outcome

    def closed_loop(self, orders: Sequence[Sequence[NDArray[np.int64]]], until_s: float) -> Outcome:
        """Decoders that ask again as soon as they are answered; `orders`: for each client and
        each of its decoders the requests, in turn, repeatedly."""
        for client, decoders in enumerate(orders):
            for requests in decoders:
                self.env.process(self._decode(client, requests.tolist()))
        return self._measure(until_s)

    def _decode(self, client: int, requests: list[int]) -> Steps:
        for request in itertools.cycle(requests):
            yield from self.ask(client, request)

    def open_loop(
        self,
        due_s: NDArray[np.float64],
        client: NDArray[np.int64],
        request: NDArray[np.int64],
        until_s: float,
    ) -> Outcome:
        """Requests (N,) that come when they are due, in order of time."""

        def come() -> Steps:
            rows = zip(due_s.tolist(), client.tolist(), request.tolist(), strict=True)
            for due, at, number in rows:
                yield self.env.timeout(due - self.env.now)
                self.env.process(self.ask(at, number))

        self.env.process(come())
        return self._measure(until_s)


def poisson_load(
    requests: NDArray[np.int64], per_s: float, clients: int, seconds: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """(due_s, client, request) of requests drawn individually from some of a trace."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(per_s * seconds)
    due = np.sort(rng.uniform(0.0, seconds, count))
    return due, rng.integers(clients, size=count), rng.choice(requests, count)
