"""When a client switches to its small model, and when it switches back.

Pure: `step(state, event, now)` returns the next state and what to do.

=====  ==========================================  =============================================
mode   event                                       then
=====  ==========================================  =============================================
FULL   more than `failing` of the messages in the  SMALL
       window failed, and at least `min_failures`
FULL   the way to a shard is slow for `slow_s`     SMALL
SMALL  a tick once `wait_s` is over, every shard   Canary: one utterance's worth of queries goes
       is reachable and no way is slow             the whole way
SMALL  a canary is answered                        the next after `canary_s`
SMALL  `canaries` answered in a row                FULL, with an empty window
SMALL  a canary fails, or says nothing in time     counted anew; `wait_s` doubles
=====  ==========================================  =============================================

While SMALL, no other messages are sent. A stay in FULL shorter than `stable_s` doubles the next
wait, up to `max_wait_s`; a longer one resets it: so flapping servers are left alone, and every path
leads back to FULL once faults end.

Only *logical* messages are counted: one that a replica answered in the end has not failed.

Paper: DLM 3.4 ("more than 0.1% messages time out or the network delay doubles"). The window, the
least count, the canaries and the hysteresis are ours; the paper leaves them open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple, TypeAlias

from dlm.errors import ConfigError


class Mode(StrEnum):
    """Which model new utterances are scored with."""

    FULL = "full"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Switching:
    """When to switch to the small model and back."""

    # Seconds over which messages are counted, 1 to 3,600. 10: at a thousand messages per second,
    # 0.1 % are ten failures.
    window_s: float = 10.0

    # Share of the messages that may fail, 0 to 1. 0.001: the paper's.
    failing: float = 0.001

    # Least failures in the window for a switch, 1 to 1,000,000. 5: a lost packet, or one utterance
    # at a bad moment, is not a reason to leave the full model.
    min_failures: int = 5

    # Least time, in seconds, that a late message must have had to count, 0 to 3,600. 0.05: a
    # shorter deadline says nothing about the network or a busy server.
    fair_s: float = 0.05

    # Seconds that a way must be slow, 0 to 3,600. 2: a few heartbeats agree.
    slow_s: float = 2.0

    # Seconds between canaries, 0.01 to 3,600.
    canary_s: float = 0.5

    # Seconds that a canary may take, 0.01 to 3,600: the deadline of a call.
    canary_timeout_s: float = 2.0

    # Canaries that must be answered in a row, 1 to 1,000.
    canaries: int = 3

    # Seconds until the first canary, and the most to which this grows; 0.01 to 3,600.
    wait_s: float = 1.0
    max_wait_s: float = 30.0

    # Seconds in FULL after which the next wait is short again, 0 to 86,400.
    stable_s: float = 60.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("window_s", 1.0, 3600.0),
            ("failing", 0.0, 1.0),
            ("min_failures", 1, 1_000_000),
            ("fair_s", 0.0, 3600.0),
            ("slow_s", 0.0, 3600.0),
            ("canary_s", 0.01, 3600.0),
            ("canary_timeout_s", 0.01, 3600.0),
            ("canaries", 1, 1000),
            ("wait_s", 0.01, 3600.0),
            ("max_wait_s", 0.01, 3600.0),
            ("stable_s", 0.0, 86_400.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"switching.{name} is {value}; it must be from {low} to {high}")
        if self.max_wait_s < self.wait_s:
            raise ConfigError(
                f"switching.max_wait_s is {self.max_wait_s}; it must be at least wait_s, "
                f"{self.wait_s}"
            )


BUCKETS = 10  # per window: old counts are dropped a tenth of the window at a time


@dataclass(frozen=True, slots=True)
class Messages:
    """Logical messages that ended since the last such event.

    failed  those that failed
    """

    ended: int
    failed: int


@dataclass(frozen=True, slots=True)
class ReachabilityTick:
    """Time has passed.

    reachable  whether every shard has a server that can be asked
    slow       whether a shard has only slow ones
    """

    reachable: bool = True
    slow: bool = False


@dataclass(frozen=True, slots=True)
class CanaryDone:
    """A canary came back, or failed."""

    number: int
    answered: bool


@dataclass(frozen=True, slots=True)
class Canary:
    """Action: send queries to every shard, all the way, and report the result."""

    number: int


@dataclass(frozen=True, slots=True)
class Switch:
    """Action: new utterances use this model from now on.

    reason  "failures", "delay" or "recovered": a closed set, for logs and metrics
    messages, failed  in the window when FULL was left; the next one begins empty
    """

    to: Mode
    reason: str
    messages: int = 0
    failed: int = 0


Event: TypeAlias = Messages | ReachabilityTick | CanaryDone
Action: TypeAlias = Canary | Switch


class Cascade(NamedTuple):
    """State of one client.

    counts    (bucket, messages, failures), the oldest first; a bucket is a tenth of the window
    slow_from since when a way is slow; inf for none
    since     when the mode was entered
    wait_s    from entering SMALL, or from a failed canary, to the next canary
    due       when the next canary may be sent
    passed    canaries answered in a row
    canary    number of the last canary
    until     when the canary in flight counts as failed; -inf for none
    reason    why the mode was entered, as in `Switch`; "" for the initial mode
    Guarantees
        at most one canary is in flight, and only in SMALL; messages are counted only in FULL
    """

    mode: Mode = Mode.FULL
    counts: tuple[tuple[int, int, int], ...] = ()
    slow_from: float = inf
    since: float = -inf
    wait_s: float = 0.0
    due: float = inf
    passed: int = 0
    canary: int = 0
    until: float = -inf
    reason: str = ""

    def failing(self) -> tuple[int, int]:
        """Messages in the window, and how many of them failed."""
        return sum(c[1] for c in self.counts), sum(c[2] for c in self.counts)


def step(
    state: Cascade, event: Event, now: float, config: Switching
) -> tuple[Cascade, list[Action]]:
    """The next state and what to do; see the table above."""
    if state.mode is Mode.FULL:
        return _full(state, event, now, config)
    return _small(state, event, now, config)


def _full(
    state: Cascade, event: Event, now: float, config: Switching
) -> tuple[Cascade, list[Action]]:
    if isinstance(event, Messages):
        state = state._replace(counts=_counted(state.counts, event, now, config))
        ended, failed = state.failing()
        if failed >= config.min_failures and failed > config.failing * ended:
            return _go_small(state, "failures", now, config)
    elif isinstance(event, ReachabilityTick):
        slow_from = min(state.slow_from, now) if event.slow else inf
        state = state._replace(slow_from=slow_from)
        if now - slow_from >= config.slow_s:
            return _go_small(state, "delay", now, config)
    return state, []


def _counted(
    counts: tuple[tuple[int, int, int], ...], event: Messages, now: float, config: Switching
) -> tuple[tuple[int, int, int], ...]:
    bucket = int(now // (config.window_s / BUCKETS))
    kept = [c for c in counts if c[0] > bucket - BUCKETS]
    if kept and kept[-1][0] == bucket:
        _, ended, failed = kept.pop()
        return (*kept, (bucket, ended + event.ended, failed + event.failed))
    return (*kept, (bucket, event.ended, event.failed))


def _go_small(
    state: Cascade, reason: str, now: float, config: Switching
) -> tuple[Cascade, list[Action]]:
    stable = now - state.since >= config.stable_s
    wait = config.wait_s if stable else min(2.0 * state.wait_s, config.max_wait_s)
    small = Cascade(
        Mode.SMALL, since=now, wait_s=wait, due=now + wait, canary=state.canary, reason=reason
    )
    return small, [Switch(Mode.SMALL, reason, *state.failing())]


def _small(
    state: Cascade, event: Event, now: float, config: Switching
) -> tuple[Cascade, list[Action]]:
    if isinstance(event, CanaryDone):
        if event.number != state.canary or state.until == -inf:
            return state, []
        if not event.answered or now >= state.until:
            return _canary_failed(state, now, config), []
        passed = state.passed + 1
        if passed >= config.canaries:
            reason = "recovered"
            full = Cascade(since=now, wait_s=state.wait_s, canary=state.canary, reason=reason)
            return full, [Switch(Mode.FULL, reason)]
        return state._replace(passed=passed, due=now + config.canary_s, until=-inf), []
    if isinstance(event, ReachabilityTick):
        if state.until > -inf:
            if now < state.until:
                return state, []
            state = _canary_failed(state, now, config)
        if now >= state.due and event.reachable and not event.slow:
            number = state.canary + 1
            return state._replace(canary=number, until=now + config.canary_timeout_s), [
                Canary(number)
            ]
    return state, []


def _canary_failed(state: Cascade, now: float, config: Switching) -> Cascade:
    wait = min(2.0 * state.wait_s, config.max_wait_s)
    return state._replace(passed=0, wait_s=wait, due=now + wait, until=-inf)
