"""Decides from heartbeats which servers can be asked, which are slow, and which model answers.

The code is pure. Heartbeats are separate calls, so they distinguish a dead host or a slow network
from a busy kernel; `mode_after` counts failed messages.

=======  =================================  ===================================================
health   event                              then
=======  =================================  ===================================================
UP       a beat is answered                 UP
UP       a beat is missed                   SUSPECT; the next beat goes out at once
UP       a message fails: `Unreachable`     SUSPECT; the next beat goes out at once
UP       a message is refused: `Refused`    UP, not ready; the next beat goes out at once
SUSPECT  a beat is answered                 UP
SUSPECT  `down_after` missed in a row       DOWN
DOWN     `up_after` answered in a row       UP
DOWN     a beat is missed                   DOWN; answers are counted anew. The next beat is due
                                            an interval after the missed beat was sent
any      `down_after` missed in a row, and  Renew: the connection is made anew
         every `RENEW_AFTER` after that
any      a beat is due, none is in flight   Ping
any      another process answers            Restarted, and as for an answered beat
=======  =================================  ===================================================

A server that reports that it is warming up or draining is UP but not `ready`: it is not asked, and
that does not count as a failure. Each change of this *condition* is reported, with its reason.

The connection of a server that is down is replaced: a connection that a firewall has dropped, or
whose framing was damaged, stays silent while the server answers on any other connection.

*Delay* is the shortest of the last five round trips: a lost packet, a new connection or a busy core
makes some trips a hundred times as long, but a slow network makes all trips long. The delay is
compared with a baseline that follows it with a time constant of minutes, so a network that stays
twice as slow counts as slow for some minutes, and then as normal: no state lasts forever.

Paper: DLM 3.4 ("the connection tester keeps sending heartbeats"; "the network delay doubles").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import expm1, inf
from typing import Literal, NamedTuple, TypeAlias

from dlm.client.config import FailoverConfig, HeartbeatConfig
from dlm.index.layout import Manifest


class Liveness(StrEnum):
    """Health of a server, by its heartbeats."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


TRIPS = 5  # round trips kept: the shortest is the delay, so a server is slow only if all are long
FIRST_BEATS = 8  # number of first heartbeats for which the baseline is the delay itself
# Missed beats between new connections: a busy server's handshake takes less time than this.
RENEW_AFTER = 10


Moving: TypeAlias = Literal["draining", "warming"]
# Reasons why a server is not asked, or is asked again.
Cause: TypeAlias = Literal["answered", "silent", "lost", "unauthenticated"] | Moving


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `chance`, drawn anew from 0 to 1, is the jitter of the next heartbeat."""

    chance: float = 0.5


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat was answered; only an answer to the latest heartbeat counts. `instance` is random
    for each process of a server; `refuses` is None if the server answers queries."""

    sequence: int
    instance: int
    refuses: Moving | None = None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message failed at once, not at its deadline: the server is gone, or rejects this client."""

    reason: Literal["lost", "unauthenticated"] = "lost"


@dataclass(frozen=True, slots=True)
class Refused:
    """A message was refused, because the server is stopping or starting."""

    reason: Moving


@dataclass(frozen=True, slots=True)
class Ping:
    """Action: send a heartbeat, and report its answer as a `Beat`."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Action: give up the connection, and make another for the next beat and all later messages."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Action: report the change of condition to the log and to the code that chooses replicas."""

    before: str
    after: str
    reason: Cause


@dataclass(frozen=True, slots=True)
class Restarted:
    """Action: another process answers at the address; find out which shard sets it holds."""


MemberEvent: TypeAlias = Tick | Beat | Unreachable | Refused
MemberAction: TypeAlias = Ping | Renew | Changed | Restarted


class Member(NamedTuple):
    """State of one server.

    ready      whether the server reported that it answers queries
    run        beats missed in a row, or answered in a row while DOWN
    silent     beats missed in a row, whatever the health
    sent       when the beat in flight was sent; -inf for none
    instance   the `instance` of the process that answered last; None before any answer
    delay_s    the shortest of the last round trips, `trips`; meaningless before the first trip
    baseline_s the long-term delay, with which `delay_s` is compared
    fault      why it is silent: the last `Unreachable` reason since an answer, or else "silent"
    Guarantees  at most one beat is in flight; an unanswered one ends after `timeout_s`
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
    fault: Cause = "silent"

    @property
    def condition(self) -> str:
        return "not_ready" if self.health is Liveness.UP and not self.ready else str(self.health)

    @property
    def usable(self) -> bool:
        """Whether the server is up and ready, and so preferred to servers that are not."""
        return self.ready and self.health is Liveness.UP

    @property
    def ratio(self) -> float:
        """The delay divided by its baseline; 1 while unknown."""
        return self.delay_s / self.baseline_s if self.beats >= FIRST_BEATS else 1.0

    def is_slow(self, config: HeartbeatConfig) -> bool:
        return self.beats >= FIRST_BEATS and behind(self.delay_s, self.baseline_s, config)


def behind(delay_s: float, least_s: float, config: HeartbeatConfig) -> bool:
    """Whether a connection with this delay is slow compared with `least_s`, which is the delay of
    the fastest server, or the connection's own baseline."""
    return delay_s > config.slow_ratio * least_s and delay_s - least_s > config.slow_floor_s


def member_after(
    state: Member, event: MemberEvent, now: float, config: HeartbeatConfig
) -> tuple[Member, list[MemberAction]]:
    actions: list[MemberAction] = []
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
        reason: Cause = event.refuses or "answered"
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
    # After the first miss, the next heartbeat is due at once.
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
        # Silence is not delay: after hours of it, the baseline moves by at most one beat's worth.
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
    """A shard set and the addresses of its shards' replicas, without shards that have no server.

    faults       address -> what is wrong with a server that is left out
    max_queries  the most queries in one message that all these servers accept
    """

    manifest: Manifest
    addresses: Mapping[int, tuple[str, ...]]
    faults: Mapping[str, str]
    max_queries: int = NO_LIMIT


# -------------------------------------------------------------------------------------------------
# When a client switches to its local fallback, and when it switches back.
#
# =====  ==========================================  =============================================
# mode   event                                       then
# =====  ==========================================  =============================================
# FULL   more than `failing` of the messages in the  LOCAL, which is short for LOCAL_FALLBACK
#        window failed, and at least `min_failures`
# FULL   a shard is slow for `slow_s`                LOCAL
# LOCAL  a tick once `wait_s` is over, every shard   Probe: queries like an utterance's are sent
#        is reachable and no shard is slow           to every shard
# LOCAL  a probe is answered                         the next probe after `probe_s`
# LOCAL  `probes` answered in a row                  FULL, with an empty window
# LOCAL  a probe fails, or is not answered in time   probes are counted anew; `wait_s` doubles
# =====  ==========================================  =============================================
#
# In LOCAL_FALLBACK, no messages but probes are sent; heartbeats go on. A stay in FULL shorter than
# `stable_s` doubles the next wait, up to `max_wait_s`; a longer stay resets the wait. So flapping
# servers are left alone, and every path leads back to FULL once faults end.
#
# Only *logical* messages are counted: one that a replica answered in the end has not failed.
#
# Paper: DLM 3.4 ("more than 0.1% messages time out or the network delay doubles"). The window, the
# `min_failures`, the probes and the hysteresis are ours; the paper leaves them open.


class Mode(StrEnum):
    """The model that scores new utterances."""

    FULL = "full"
    LOCAL_FALLBACK = "local_fallback"


BUCKETS = 10  # per window: old counts are dropped a tenth of the window at a time


@dataclass(frozen=True, slots=True)
class Messages:
    """Logical messages that ended since the last `Messages`, and how many of them failed."""

    ended: int
    failed: int


@dataclass(frozen=True, slots=True)
class ReachabilityTick:
    """Time has passed. If `reachable`, every shard has a server that can be asked; if `slow`, some
    shard has only slow servers."""

    reachable: bool = True
    slow: bool = False


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """A probe was answered, or failed."""

    number: int
    answered: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Action: send queries to every shard, and report the result."""

    number: int


@dataclass(frozen=True, slots=True)
class Switch:
    """Action: new utterances use this model from now on. The reason is "failures", "delay" or
    "recovered"; `messages` and `failed` count the last window in FULL; the next starts empty."""

    to: Mode
    reason: str
    messages: int = 0
    failed: int = 0


ModeEvent: TypeAlias = Messages | ReachabilityTick | ProbeDone
ModeAction: TypeAlias = Probe | Switch


class Cascade(NamedTuple):
    """State of one client.

    counts    (bucket, messages, failures), the oldest first; a bucket is a tenth of the window
    slow_from when a shard began to be slow; inf if no shard is slow
    since     when the mode was entered; `reason` is that of `Switch`, "" for the initial mode
    wait_s    seconds from entering LOCAL_FALLBACK, or a failed probe, to the next probe, at `due`
    passed    probes answered in a row
    until     when the probe in flight counts as failed; -inf if none is in flight
    Guarantees
        at most one probe is in flight, only in LOCAL_FALLBACK; messages are counted only in FULL
    """

    mode: Mode = Mode.FULL
    counts: tuple[tuple[int, int, int], ...] = ()
    slow_from: float = inf
    since: float = -inf
    wait_s: float = 0.0
    due: float = inf
    passed: int = 0
    probe: int = 0
    until: float = -inf
    reason: str = ""

    def failing(self) -> tuple[int, int]:
        """Returns how many messages are in the window, and how many of them failed."""
        return sum(c[1] for c in self.counts), sum(c[2] for c in self.counts)


def mode_after(
    state: Cascade, event: ModeEvent, now: float, config: FailoverConfig
) -> tuple[Cascade, list[ModeAction]]:
    if state.mode is Mode.FULL:
        return _full(state, event, now, config)
    return _local(state, event, now, config)


def _full(
    state: Cascade, event: ModeEvent, now: float, config: FailoverConfig
) -> tuple[Cascade, list[ModeAction]]:
    if isinstance(event, Messages):
        state = state._replace(counts=_counted(state.counts, event, now, config))
        ended, failed = state.failing()
        if failed >= config.min_failures and failed > config.failing * ended:
            return _go_local(state, "failures", now, config)
    elif isinstance(event, ReachabilityTick):
        slow_from = min(state.slow_from, now) if event.slow else inf
        state = state._replace(slow_from=slow_from)
        if now - slow_from >= config.slow_s:
            return _go_local(state, "delay", now, config)
    return state, []


def _counted(
    counts: tuple[tuple[int, int, int], ...], event: Messages, now: float, config: FailoverConfig
) -> tuple[tuple[int, int, int], ...]:
    bucket = int(now // (config.window_s / BUCKETS))
    kept = [c for c in counts if c[0] > bucket - BUCKETS]
    if kept and kept[-1][0] == bucket:
        _, ended, failed = kept.pop()
        return (*kept, (bucket, ended + event.ended, failed + event.failed))
    return (*kept, (bucket, event.ended, event.failed))


def _go_local(
    state: Cascade, reason: str, now: float, config: FailoverConfig
) -> tuple[Cascade, list[ModeAction]]:
    stable = now - state.since >= config.stable_s
    wait = config.wait_s if stable else min(2.0 * state.wait_s, config.max_wait_s)
    fallback = Cascade(
        Mode.LOCAL_FALLBACK,
        since=now,
        wait_s=wait,
        due=now + wait,
        probe=state.probe,
        reason=reason,
    )
    return fallback, [Switch(Mode.LOCAL_FALLBACK, reason, *state.failing())]


def _local(
    state: Cascade, event: ModeEvent, now: float, config: FailoverConfig
) -> tuple[Cascade, list[ModeAction]]:
    if isinstance(event, ProbeDone):
        if event.number != state.probe or state.until == -inf:
            return state, []
        if not event.answered or now >= state.until:
            return _probe_failed(state, now, config), []
        passed = state.passed + 1
        if passed >= config.probes:
            reason = "recovered"
            full = Cascade(since=now, wait_s=state.wait_s, probe=state.probe, reason=reason)
            return full, [Switch(Mode.FULL, reason)]
        return state._replace(passed=passed, due=now + config.probe_s, until=-inf), []
    if isinstance(event, ReachabilityTick):
        if state.until > -inf:
            if now < state.until:
                return state, []
            state = _probe_failed(state, now, config)
        if now >= state.due and event.reachable and not event.slow:
            number = state.probe + 1
            return state._replace(probe=number, until=now + config.probe_timeout_s), [Probe(number)]
    return state, []


def _probe_failed(state: Cascade, now: float, config: FailoverConfig) -> Cascade:
    wait = min(2.0 * state.wait_s, config.max_wait_s)
    return state._replace(passed=0, wait_s=wait, due=now + wait, until=-inf)
