"""When a client switches to its local fallback, and when it switches back. Pure.

=====  ==========================================  =============================================
mode   event                                       then
=====  ==========================================  =============================================
FULL   more than `failing` of the messages in the  LOCAL, which is short for LOCAL_FALLBACK
       window failed, and at least `min_failures`
FULL   the way to a shard is slow for `slow_s`     LOCAL
LOCAL  a tick once `wait_s` is over, every shard   Probe: one utterance's worth of queries goes
       is reachable and no way is slow             the whole way
LOCAL  a probe is answered                         the next after `probe_s`
LOCAL  `probes` answered in a row                  FULL, with an empty window
LOCAL  a probe fails, or says nothing in time      counted anew; `wait_s` doubles
=====  ==========================================  =============================================

While LOCAL_FALLBACK, no other messages are sent. A stay in FULL shorter than `stable_s` doubles the
next wait, up to `max_wait_s`; a longer one resets it: so flapping servers are left alone, and every
path leads back to FULL once faults end.

Only *logical* messages are counted: one that a replica answered in the end has not failed.

Paper: DLM 3.4 ("more than 0.1% messages time out or the network delay doubles"). The window, the
least count, the probes and the hysteresis are ours; the paper leaves them open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple, TypeAlias

from dlm.client.config import FailoverConfig


class Mode(StrEnum):
    """Which model new utterances are scored with."""

    FULL = "full"
    LOCAL_FALLBACK = "local_fallback"


BUCKETS = 10  # per window: old counts are dropped a tenth of the window at a time


@dataclass(frozen=True, slots=True)
class Messages:
    """Logical messages that ended since the last such event, and those of them that failed."""

    ended: int
    failed: int


@dataclass(frozen=True, slots=True)
class ReachabilityTick:
    """Time has passed. Every shard has a server that can be asked if `reachable`; a shard has only
    slow ones if `slow`."""

    reachable: bool = True
    slow: bool = False


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """A probe came back, or failed."""

    number: int
    answered: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Action: send queries to every shard, all the way, and report the result."""

    number: int


@dataclass(frozen=True, slots=True)
class Switch:
    """Action: new utterances use this model from now on. The reason is "failures", "delay" or
    "recovered"; messages are those in the window when FULL was left; the next one begins empty."""

    to: Mode
    reason: str
    messages: int = 0
    failed: int = 0


Event: TypeAlias = Messages | ReachabilityTick | ProbeDone
Action: TypeAlias = Probe | Switch


class Cascade(NamedTuple):
    """State of one client.

    counts    (bucket, messages, failures), the oldest first; a bucket is a tenth of the window
    slow_from since when a way is slow; inf for none
    since     when the mode was entered; reason: why, as in `Switch`, "" for the initial mode
    wait_s    from entering LOCAL_FALLBACK, or from a failed probe, to the next probe, `due`
    passed    probes answered in a row
    until     when the probe in flight counts as failed; -inf for none
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
        """Messages in the window, and how many of them failed."""
        return sum(c[1] for c in self.counts), sum(c[2] for c in self.counts)


def step(
    state: Cascade, event: Event, now: float, config: FailoverConfig
) -> tuple[Cascade, list[Action]]:
    if state.mode is Mode.FULL:
        return _full(state, event, now, config)
    return _small(state, event, now, config)


def _full(
    state: Cascade, event: Event, now: float, config: FailoverConfig
) -> tuple[Cascade, list[Action]]:
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
) -> tuple[Cascade, list[Action]]:
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


def _small(
    state: Cascade, event: Event, now: float, config: FailoverConfig
) -> tuple[Cascade, list[Action]]:
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
