"""Heartbeats: whether a server can be asked, and whether the way to it has become slow.

Pure. Heartbeats are separate calls, so they distinguish a dead host or a slow network from a busy
kernel; `modes.py` counts failed messages.

=======  =================================  ===================================================
health   event                              then
=======  =================================  ===================================================
UP       a beat is answered                 UP
UP       a beat is missed                   SUSPECT; the next beat goes out at once
UP       nobody is there: `Unreachable`     SUSPECT; likewise
UP       it refuses a message: `Refused`    UP, not ready; likewise
SUSPECT  a beat is answered                 UP
SUSPECT  `down_after` missed in a row       DOWN
DOWN     `up_after` answered in a row       UP
DOWN     a beat is missed                   DOWN; answers are counted anew; as any beat, the next
                                            is due an interval after this one began
any      `down_after` missed in a row, and  Renew: the connection is made anew
         each `RENEW_AFTER` after that
any      a beat is due, none is out         Ping
any      another process answers            Restarted, and as an answered beat
=======  =================================  ===================================================

A server that reports that it is warming up or draining is UP but not `ready`: it is not asked, and
that does not count as a failure. Each change of this *condition* is reported, with its reason.

The connection of a server that is down is replaced: one that a firewall has dropped, or whose
framing was damaged, stays silent while the server answers on any other.

*Delay* is the shortest of the last five round trips: a lost packet, a new connection or a busy core
makes some a hundred times as long, a slow way makes all of them long. It is compared with its own
baseline, which follows it with a time constant of minutes, so a way that has become twice as long
for good is slow for some minutes, and then normal: no state is a trap.

Paper: DLM 3.4 ("the connection tester keeps sending heartbeats"; "the network delay doubles").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import expm1, inf
from typing import Literal, NamedTuple, TypeAlias

from dlm.client.config import HeartbeatConfig
from dlm.index.layout import Manifest


class Liveness(StrEnum):
    """Health of a server, by its heartbeats."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


TRIPS = 5  # whose shortest is the delay: slow only if all agree, not slow if one is short
FIRST_BEATS = 8  # until which the baseline is the delay itself
# Beats missed before each further new connection: longer than a handshake with a busy server.
RENEW_AFTER = 10


Moving: TypeAlias = Literal["draining", "warming"]
# Why a server is not asked, or is asked again.
Reason: TypeAlias = Literal["answered", "silent", "lost", "unauthenticated"] | Moving


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `chance`, drawn anew for each from 0 to 1, is the jitter."""

    chance: float = 0.5


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat was answered; answers to any but the current one are ignored. The server process
    drew `instance` at its start; `refuses` is None if it answers queries."""

    sequence: int
    instance: int
    refuses: Moving | None = None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message failed at once, not after a deadline: nobody is there, or it lets nobody in."""

    reason: Literal["lost", "unauthenticated"] = "lost"


@dataclass(frozen=True, slots=True)
class Refused:
    """A message was refused, because the server is stopping or starting."""

    reason: Moving


@dataclass(frozen=True, slots=True)
class Ping:
    """Action: send a heartbeat, and report its answer by `Beat`."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Action: give up the connection, and make another for the next beat and all later messages."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Action: report the change of condition to the log and to the choice among replicas."""

    before: str
    after: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Restarted:
    """Action: another process answers at the address: ask what it holds."""


Event: TypeAlias = Tick | Beat | Unreachable | Refused
Action: TypeAlias = Ping | Renew | Changed | Restarted


class Member(NamedTuple):
    """State of one server.

    ready      whether it reported that it answers queries
    run        beats missed in a row, or answered in a row while DOWN
    silent     beats missed in a row, whatever the health
    sent       when the beat in flight was sent; -inf for none
    instance   of the process that answered last; None before any did
    delay_s    the shortest of the last round trips, `trips`; meaningless before the first
    baseline_s the long-term delay, for comparison
    fault      why it gives no answer; of the last message that failed at once since it gave one
    Guarantees  at most one beat is in flight; an unanswered one ends in `timeout_s`
    """

    health: Liveness = Liveness.SUSPECT
    ready: bool = False
    run: int = 0
    due: float = -inf
    sequence: int = 0
    sent: float = -inf
    instance: int | None = None
    beats: int = 0
    trips: tuple[float, ...] = ()
    delay_s: float = 0.0
    baseline_s: float = 0.0
    measured: float = -inf
    silent: int = 0
    fault: Reason = "silent"

    @property
    def condition(self) -> str:
        return "not_ready" if self.health is Liveness.UP and not self.ready else str(self.health)

    @property
    def usable(self) -> bool:
        """Whether it is asked before servers that are not usable."""
        return self.ready and self.health is Liveness.UP

    @property
    def ratio(self) -> float:
        """Delay over its baseline; 1 while unknown."""
        return self.delay_s / self.baseline_s if self.beats >= FIRST_BEATS else 1.0

    def is_slow(self, config: HeartbeatConfig) -> bool:
        return self.beats >= FIRST_BEATS and behind(self.delay_s, self.baseline_s, config)


def behind(delay_s: float, least_s: float, config: HeartbeatConfig) -> bool:
    """Whether a way with this delay is slow, compared with one of `least_s` (or its own
    baseline)."""
    return delay_s > config.slow_ratio * least_s and delay_s - least_s > config.slow_floor_s


def step(
    state: Member, event: Event, now: float, config: HeartbeatConfig
) -> tuple[Member, list[Action]]:
    actions: list[Action] = []
    before = state.condition
    if isinstance(event, Beat):
        if event.sequence != state.sequence or state.sent == -inf:
            return state, []
        if state.instance not in (None, event.instance):
            actions.append(Restarted())
        state = measured(state, now - state.sent, now, config)
        run = state.run + 1 if state.health is Liveness.DOWN else 0
        back = state.health is not Liveness.DOWN or run >= config.up_after
        state = state._replace(
            health=Liveness.UP if back else Liveness.DOWN,
            ready=event.refuses is None,
            run=0 if back else run,
            sent=-inf,
            instance=event.instance,
            silent=0,
            fault="silent",
        )
        reason: Reason = event.refuses or "answered"
    elif isinstance(event, Unreachable):
        reason = event.reason
        if state.health is Liveness.UP:
            state = state._replace(health=Liveness.SUSPECT, run=0, due=now)
        state = state._replace(fault=reason)
    elif isinstance(event, Refused):
        reason = event.reason
        state = state._replace(ready=False, due=now if state.usable else state.due)
    else:
        reason = state.fault
        if now - state.sent >= config.timeout_s and state.sent > -inf:
            state = _missed(state, now, config)._replace(silent=state.silent + 1)
            over = state.silent - config.down_after
            if over >= 0 and over % RENEW_AFTER == 0:
                actions.append(Renew())
        if state.sent == -inf and now >= state.due:
            spread = 1.0 + config.jitter * (2.0 * event.chance - 1.0)
            state = state._replace(
                sequence=state.sequence + 1, sent=now, due=now + config.interval_s * spread
            )
            actions.append(Ping(state.sequence))
    if state.condition != before:
        actions.append(Changed(before, state.condition, reason))
    return state, actions


def _missed(state: Member, now: float, config: HeartbeatConfig) -> Member:
    if state.health is Liveness.DOWN:
        return state._replace(run=0, sent=-inf)
    # The first one only shows that more should be known soon.
    due = now if state.health is Liveness.UP else state.due
    run = state.run + 1
    health = Liveness.DOWN if run >= config.down_after else Liveness.SUSPECT
    return state._replace(
        health=health, run=0 if health is Liveness.DOWN else run, due=due, sent=-inf
    )


def measured(state: Member, trip_s: float, now: float, config: HeartbeatConfig) -> Member:
    beats = state.beats + 1
    trips = (*state.trips, trip_s)[-TRIPS:]
    delay = min(trips)
    if beats <= FIRST_BEATS:
        baseline = delay
    else:
        # Unanswered beats are not delays: hours of silence move the baseline by one beat's worth.
        passed = min(now - state.measured, config.interval_s + config.timeout_s)
        baseline = state.baseline_s - expm1(-passed / config.baseline_s) * (
            delay - state.baseline_s
        )
    return state._replace(
        beats=beats, trips=trips, delay_s=delay, baseline_s=baseline, measured=now
    )


NO_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class Topology:
    """A shard set and the addresses of its shards' replicas, without shards that have no known
    server.

    faults       address -> what is wrong with a server that is not in it
    max_queries  queries that each of its servers accepts in one message
    """

    manifest: Manifest
    addresses: Mapping[int, tuple[str, ...]]
    faults: Mapping[str, str]
    max_queries: int = NO_LIMIT
