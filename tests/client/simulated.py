"""A client whose clock a test moves, and whose messages have the fates that the test gives them."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from client.questions import Query, submit
from client.scripted import Network, Scripted, client_of
from cluster import WAIT_S
from dlm.client import ClientConfig
from dlm.client.cluster_file import Metadata
from dlm.client.server import Reply
from dlm.errors import DeadlineExceeded, DlmError, Overloaded, ShardDown

EPSILON_S = 1e-9


class Timeline(Network):
    """The clock, what happens when, and the network.

    every          the fate of all messages
    sent           when each message was sent, and where
    last_deadline  no message may travel longer
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.every = "answered"
        self.sent: list[tuple[float, str]] = []
        self.last_deadline = inf
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def fate(self, address: str, timeout_s: float) -> tuple[str, float]:
        """What becomes of the next message there, and after how long: see `Fated`."""
        return self.every, 0.0

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

    def run_until(self, when: float = inf) -> None:
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
    """A message is "answered", by the server or with "garbage"; or there is "nobody", the server is
    "busy", or sending "raises". With "never" the connection says so at the deadline, and if it is
    "silent" it says nothing at all, which no connection may."""

    network: Timeline

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> None:
        """Nobody lets a message travel longer than somebody waits for it."""
        line = self.network
        assert line.now + timeout_s <= line.last_deadline + EPSILON_S
        fate, after_s = line.fate(self.address, timeout_s)
        line.sent.append((line.now, self.address))
        errors = {"nobody": ShardDown("nobody is there"), "busy": Overloaded("busy")}
        if fate == "raises":
            raise errors["nobody"]
        if fate == "silent":
            return
        if fate == "never" or after_s > timeout_s:
            line.at(line.now + timeout_s, lambda: reply(None, DeadlineExceeded("no reply")))
        elif fate in errors:
            line.at(line.now + after_s, lambda: reply(None, errors[fate]))
        elif fate == "garbage":
            line.at(line.now + after_s, lambda: reply(b"nonsense", None))
        else:
            line.at(line.now + after_s, lambda: self._answer(request, reply))

    def _answer(self, request: bytes, reply: Reply) -> None:
        came: list[tuple[bytes | None, DlmError | None]] = []
        done = threading.Event()

        def take(data: bytes | None, error: DlmError | None) -> None:
            came.append((data, error))
            done.set()

        self._target().score(request, WAIT_S, take)
        assert done.wait(WAIT_S)
        reply(*came[0])


class Simulation:
    """A client without heartbeats on a line, and one utterance."""

    def __init__(
        self, line: Timeline, addresses: list[str], cache_dir: Path, **config: Any
    ) -> None:
        self.line = line
        settings = ClientConfig(heartbeats=False, cache_dir=cache_dir, **config)
        seams = {"clock": line.clock, "home": Inline(line)}
        self.client = client_of(addresses, settings, line, **seams)
        self.utterance = self.client.utterance()

    def ask(self, queries: list[Query], limit_s: float) -> Any:
        """A call, not waited for; its caller gives it up at its deadline, as whoever waits does."""
        call = submit(self.utterance, queries, limit_s)

        def give_up() -> None:
            if not call.done():
                call.give_up(DeadlineExceeded(f"no answer within {limit_s:g} s"))
            assert call.done()

        self.line.at(self.line.now + limit_s, give_up)
        return call
