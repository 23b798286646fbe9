"""A cluster in simulated time: clients, lanes, a network, servers, and the cores they share.

Discrete events, seeded, with nothing measured here: a trace and a slot table (`traces/routes.py`)
say what a request asks, `Costs` what work costs; the client's own lanes are run, not modelled. A
process does one thing at a time; processes of one machine share its cores equally.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlm.client import ClientConfig
from dlm.client.deliver.lane import Lane
from dlm.client.deliver.replicas import Usual, late_after
from dlm.errors import ConfigError
from loadtest.traces.routes import Routed

DEADLINE_S = 1e6  # of a simulated request: nobody gives up
Then = Callable[[], None]


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


class Events:
    """Events in order of time; events of the same time in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Then]] = []
        self._number = 0

    def at(self, time_s: float, then: Then) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time_s, self._number, then))

    def after(self, seconds: float, then: Then) -> None:
        self.at(self.now + seconds, then)

    def run(self, until_s: float) -> None:
        heap = self._heap
        while heap and heap[0][0] < until_s:
            self.now, _, then = heapq.heappop(heap)
            then()
        self.now = until_s


class Machine:
    """Cores shared equally by all jobs, each using at most one."""

    def __init__(self, events: Events, cores: float) -> None:
        self._events = events
        self._cores = cores
        self._done_s = 0.0  # work that each job in the heap has been given since the beginning
        self._since = 0.0
        self._jobs: list[tuple[float, int, Then]] = []
        self._number = 0
        self._plan = 0

    def work(self, seconds: float, then: Then) -> None:
        """Starts a job that needs a number of seconds of a whole core."""
        self._advance()
        self._number += 1
        heapq.heappush(self._jobs, (self._done_s + seconds, self._number, then))
        self._next()

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._jobs)) if self._jobs else 1.0

    def _advance(self) -> None:
        self._done_s += (self._events.now - self._since) * self._rate()
        self._since = self._events.now

    def _next(self) -> None:
        """Plans the end of the job that ends first; an older plan is void."""
        self._plan += 1
        if self._jobs:
            plan = self._plan
            left_s = max(self._jobs[0][0] - self._done_s, 0.0) / self._rate()
            self._events.after(left_s, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        _, _, then = heapq.heappop(self._jobs)
        self._next()
        then()


class Process:
    """Does one thing after another; on a machine, or on its own core."""

    def __init__(self, events: Events, machine: Machine | None = None) -> None:
        self._events = events
        self._begin = events.after if machine is None else machine.work
        self._waiting: deque[tuple[float, Then]] = deque()
        self._is_busy = False
        self.busy_s = 0.0

    def do(self, seconds: float, then: Then) -> None:
        """Does work of a number of processor seconds, after all earlier work."""
        self._waiting.append((seconds, then))
        if not self._is_busy:
            self._start()

    def _start(self) -> None:
        self._is_busy = True
        seconds, then = self._waiting.popleft()
        self.busy_s += seconds

        def end() -> None:
            if self._waiting:
                self._start()
            else:
                self._is_busy = False
            then()

        self._begin(seconds, end)


class _Ask:
    """A request under way: how many of its pieces are still out, and what follows the last."""

    __slots__ = ("left", "then")

    def __init__(self, left: int, then: Then) -> None:
        self.left = left
        self.then = then


@dataclass(eq=False, slots=True)
class _Piece:
    ask: _Ask
    queries: int
    deadline: float


@dataclass(eq=False, slots=True)
class _Way:
    """From a client to a server: what waits and is in flight, and how long answers take."""

    client: int
    server: int
    lane: Lane[_Piece]
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
        self.events = Events()
        self._layout, self._costs, self._routed = layout, costs, routed
        config = ClientConfig()
        self._window, self._max_queries = config.window, config.max_queries
        self._connections = config.connections
        self._rng = np.random.default_rng(seed)
        machine = Machine(self.events, layout.cores) if layout.cores else None
        self._clients = [Process(self.events, machine) for _ in range(layout.clients)]
        self._servers = [
            [Process(self.events, machine) for _ in range(layout.workers)]
            for _ in range(layout.servers)
        ]
        self._ways: dict[tuple[int, int], _Way] = {}
        self._reached: dict[tuple[int, int], list[int]] = {}
        self._turn = 0
        self._warmup_s = warmup_s
        self.outcome = self._counts(0.0)

    def _counts(self, seconds: float) -> Outcome:
        servers = self._layout.servers
        return Outcome(seconds, np.zeros(servers, np.int64), np.zeros(servers))

    # -- requests ------------------------------------------------------------------------------

    def ask(self, client: int, request: int, then: Then) -> None:
        began = self.events.now
        costs, routed = self._costs, self._routed

        def ended() -> None:
            if began >= self._warmup_s:
                self.outcome.requests += 1
                self.outcome.latency_s.append(self.events.now - began)
            then()

        first, last = routed.first[request : request + 2].tolist()
        ask = _Ask(last - first, ended)
        self._turn += 1
        turn = self._turn

        def planned() -> None:
            if first == last:
                ended()
            for at in range(first, last):
                server = int(routed.server[at])
                if self._layout.balanced:
                    server = (server + turn) % self._layout.servers
                way = self._way(client, server)
                now = self.events.now
                way.lane.submit(_Piece(ask, int(routed.queries[at]), now + DEADLINE_S))
                self._advance(way)

        plan_s = costs.request_s + costs.query_s * float(routed.asked[request])
        self._clients[client].do(plan_s, planned)

    def _way(self, client: int, server: int) -> _Way:
        way = self._ways.get((client, server))
        if way is None:
            lane: Lane[_Piece] = Lane(self._window, self._max_queries, late_after((), 0.0))
            way = self._ways[client, server] = _Way(client, server, lane)
        return way

    def _advance(self, way: _Way) -> None:
        """Sends what may leave, and looks again when the next message may."""
        events, lane = self.events, way.lane
        while (taken := lane.take(events.now)) is not None:
            self._send(way, *taken)
        at = lane.ready_at()
        if at < way.alarm:
            way.alarm = at
            events.at(at, lambda: self._look(way))

    def _look(self, way: _Way) -> None:
        way.alarm = math.inf
        self._advance(way)

    def _send(self, way: _Way, number: int, pieces: list[_Piece]) -> None:
        events, costs = self.events, self._costs
        client, server, left = way.client, way.server, events.now
        way_s = self._layout.round_trip_s / 2 + costs.wait_s / 2
        queries = sum(piece.queries for piece in pieces)
        process = self._worker(client, server, number)
        service_s = costs.server_message_s + costs.server_query_s * queries

        def sent() -> None:
            events.after(way_s, lambda: process.do(service_s, served))

        def served() -> None:
            if events.now >= self._warmup_s:
                self.outcome.messages[server] += 1
                self.outcome.queries += queries
                self.outcome.busy_s[server] += service_s
            events.after(way_s, lambda: self._clients[client].do(costs.message_s / 2, received))

        def received() -> None:
            way.usual.note(events.now - left, events.now)
            way.lane.usual_s = late_after((way.usual,), events.now)
            way.lane.done(number, events.now)
            self._advance(way)
            for piece in pieces:
                piece.ask.left -= 1
                if not piece.ask.left:
                    piece.ask.then()

        self._clients[client].do(costs.message_s / 2, sent)

    def _worker(self, client: int, server: int, message: int) -> Process:
        """A connection reaches whichever worker accepts it (SO_REUSEPORT)."""
        workers = self._servers[server]
        if len(workers) == 1:
            return workers[0]
        reached = self._reached.get((client, server))
        if reached is None:
            reached = self._rng.integers(len(workers), size=self._connections).tolist()
            self._reached[client, server] = reached
        return workers[reached[message % len(reached)]]

    # -- loads ---------------------------------------------------------------------------------

    def _measure(self, until_s: float) -> Outcome:
        self.events.run(self._warmup_s)
        before = sum(process.busy_s for process in self._clients)
        self.outcome.seconds = until_s - self._warmup_s
        self.events.run(until_s)
        self.outcome.client_s = sum(process.busy_s for process in self._clients) - before
        return self.outcome

    def closed_loop(self, orders: Sequence[Sequence[NDArray[np.int64]]], until_s: float) -> Outcome:
        """Decoders that ask again as soon as they are answered; `orders`: for each client and
        each of its decoders the requests, in turn, repeatedly."""
        for client, decoders in enumerate(orders):
            for requests in decoders:
                self._decode(client, requests.tolist())
        return self._measure(until_s)

    def _decode(self, client: int, requests: list[int]) -> None:
        at = 0

        def again() -> None:
            nonlocal at
            request = requests[at % len(requests)]
            at += 1
            self.ask(client, request, again)

        self.events.after(0.0, again)

    def open_loop(
        self,
        due_s: NDArray[np.float64],
        client: NDArray[np.int64],
        request: NDArray[np.int64],
        until_s: float,
    ) -> Outcome:
        """Requests (N,) that come when they are due, in order of time."""
        rows = zip(due_s.tolist(), client.tolist(), request.tolist(), strict=True)

        def come(row: tuple[float, int, int]) -> None:
            _, at, number = row
            following = next(rows, None)
            if following is not None:
                self.events.at(following[0], lambda: come(following))
            self.ask(at, number, lambda: None)

        first = next(rows, None)
        if first is not None:
            self.events.at(first[0], lambda: come(first))
        return self._measure(until_s)


def poisson_load(
    requests: NDArray[np.int64], per_s: float, clients: int, seconds: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """(due_s, client, request) of requests drawn individually from some of a trace."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(per_s * seconds)
    due = np.sort(rng.uniform(0.0, seconds, count))
    return due, rng.integers(clients, size=count), rng.choice(requests, count)
