"""Decides what a roll-out does next: `step(state, event, rules, now) -> (state, actions)`.

These functions are pure. On disk, a roll-out's state is the two files that it writes: the servers'
list of shard sets, and cluster.toml, from which `resumed` finds where a killed roll-out was.

    stage    cluster.toml               servers     until
    LOAD     share 0                    old, new    every server holds the new set
    COMPARE  share 0                    old, new    both answered sampled queries
    SHARE    share as asked             old, new    the time is over; comparisons go on
    ALL      new the default, share 1   new, old    the old set is quiet, or the time is over
    UNLOAD   as in ALL                  new         no server holds the old set
    RELOAD   new the default, share 1   new, old    an undo: every server holds the old set again
    RETREAT  old the default, share 0   old, new    the new set is quiet, or the time is over
    CLEAR    as in RETREAT              old         no server holds the new set
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from dlm.client.cluster_file import Rollout
from dlm.config import check, setting

ADDRESSES_SHOWN = 4
SPARE_S = 10.0  # seconds within which a restarted server answers again
RARELY = 10_000  # one comparison in this many finds a model slow by chance


class Phase(Enum):
    LOAD = "load"
    COMPARE = "compare"
    SHARE = "share"
    ALL = "all"
    UNLOAD = "unload"
    RELOAD = "load the old set again"
    RETREAT = "undo"
    CLEAR = "unload the new set"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Rules:
    """When a roll-out continues, and when it is undone."""

    share: float = setting(
        0.05,
        "Share of new utterances that get the new model while it is watched, such as 5%.",
        low=0,
        high=1,
        metavar="SHARE",
        why="Enough to see errors of a busy cluster within a minute.",
    )
    watch_for: float = setting(
        60.0,
        "How long this share is watched before all new utterances get the new model.",
        unit="seconds",
        low=0,
        high=1e7,
    )
    load_within: float = setting(
        600.0,
        "Time in which every server must load, or unload, a set.",
        unit="seconds",
        low=1,
        high=1e6,
        why="Loading takes about 1 s per GiB from the page cache, and longer from a cold disk.",
    )
    idle: float = setting(
        30.0,
        "Time without a message after which a set is unloaded.",
        unit="seconds",
        low=1,
        high=1e6,
        why="Make it longer than the pauses inside an utterance.",
    )
    longest: float = setting(
        600.0,
        "Time after which a set is unloaded even if utterances still use it.",
        unit="seconds",
        low=1,
        high=1e7,
        why="Make it longer than the longest utterance: utterances that are still open then raise "
        "StaleShardSet.",
    )
    compare: float = setting(10.0, "Time between two comparisons.", unit="seconds", low=1, high=1e6)
    max_slowdown: float = setting(
        1.4,
        "The new model is slow if most calls take more than this many times as long as on the old "
        "model.",
        low=1,
        high=1000,
        why="A sign test on hundreds of alternating calls decides, and errs once in 10,000 times. "
        "The time is measured again before the roll-out is undone.",
    )

    def __post_init__(self) -> None:
        check("rollout", self)

    def broken(self, found: Comparison) -> str:
        """Says why the roll-out must not continue; "" if it may. If as many sentences fail on the
        old model, the cause is just that this machine or the servers are busy."""
        if found.failed > found.old_failed or found.failed == found.sentences:
            return (
                f"{found.failed} of {found.sentences} sampled sentences failed on the new model, "
                f"and {found.old_failed} on the old one"
            )
        if found.wrong:
            return (
                f"the servers' scores of {found.wrong} of {found.sentences} sampled sentences "
                "differ from those of the new model's files"
            )
        if self.is_slow(found):
            return (
                f"a sentence takes {found.new_ms:.2f} ms on the new model, {found.old_ms:.2f} ms "
                f"on the old one (medians of {len(found.ratios)} calls); expected at most "
                f"{self.max_slowdown:g} times the old time"
            )
        return ""

    def is_slow(self, found: Comparison) -> bool:
        """Whether more calls exceed `max_slowdown` than chance explains: see `most_by_chance`."""
        slower = sum(ratio > self.max_slowdown for ratio in found.ratios)
        return slower > most_by_chance(len(found.ratios))


def most_by_chance(calls: int) -> int:
    """Returns the most heads that `calls` tosses reach more often than once in `RARELY` trials."""
    tail, most = 0, 2**calls // RARELY
    for heads in range(calls, -1, -1):
        tail += math.comb(calls, heads)
        if tail > most:
            return heads
    raise AssertionError("probabilities do not sum to 1. This is a bug in dlm; report it")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of the same sentences on both models: `failed` of them failed on the new model,
    `old_failed` on the old; for `wrong` of them, servers' scores differ from the new model's files.

    old_ms, new_ms  median times of the calls
    ratios      for each pair of calls with one sentence, the new model's time over the old model's
    difference, largest  mean and largest difference of a word's log10 probability, new minus old
    """

    sentences: int
    failed: int
    old_failed: int
    wrong: int
    old_ms: float
    new_ms: float
    ratios: tuple[float, ...]
    difference: float
    largest: float


# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Seen:
    """What one poll of the servers found.

    lacking  shard set -> servers that should hold it but do not, or that do not answer
    holding  shard set -> servers that hold it
    busy     shard sets that may have got queries since the last poll
    spared   servers that do not answer while another server of their shard does
    processes  the highest number of processes of a server; a poll reaches only one of them
    """

    lacking: Mapping[str, tuple[str, ...]]
    holding: Mapping[str, tuple[str, ...]]
    busy: frozenset[str]
    silent: tuple[str, ...] = ()
    spared: frozenset[str] = frozenset()
    processes: int = 1

    def missing(self, state: Progress) -> tuple[str, ...]:
        """The servers that a stage waits for."""
        if state.stage in (Phase.LOAD, Phase.RELOAD):
            return self.lacking.get(state.new if state.stage is Phase.LOAD else state.old, ())
        if state.stage is Phase.UNLOAD:
            return self.holding.get(state.old, ())
        return self.holding.get(state.new, ()) if state.stage is Phase.CLEAR else ()


@dataclass(frozen=True, slots=True)
class Compared:
    """Sampled queries were sent to both models."""

    found: Comparison


@dataclass(frozen=True, slots=True)
class Undo:
    """The operator wants to go back."""


Event: TypeAlias = Seen | Compared | Undo


# ------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class TellServers:
    """Make the servers hold these sets, the default first."""

    sets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TellClients:
    """Make clients use this default model, and follow this roll-out."""

    model: str
    rollout: Rollout | None


@dataclass(frozen=True, slots=True)
class Compare:
    """Send sampled queries to both models."""


@dataclass(frozen=True, slots=True)
class End:
    """Stop the roll-out. `failure` says why it did not end as the operator wanted; the `silent`
    servers may still hold the set that was to be unloaded."""

    failure: str = ""
    undone: bool = False
    silent: tuple[str, ...] = ()


Action: TypeAlias = TellServers | TellClients | Compare | End
Actions: TypeAlias = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a roll-out. The stage began at `since`; the set that is to be unloaded was last
    busy at `quiet_since`. If `shared`, clients may have open utterances on the new model. `failure`
    says why the roll-out is being undone; it is empty if the operator undid it."""

    old: str
    new: str
    stage: Phase
    since: float
    quiet_since: float = 0.0
    compared_at: float = 0.0
    comparing: bool = False
    shared: bool = False
    failure: str = ""

    def rollout(self, share: float) -> Rollout:
        return Rollout(self.new, self.old, share)


def resumed(
    old: str, new: str, rollout: Rollout | None, rules: Rules, now: float
) -> tuple[Progress, Actions]:
    """Returns the state in which a roll-out begins or, if cluster.toml names one, resumes."""
    # It is not known whether clients got the new model in an earlier run.
    state = Progress(old, new, Phase.LOAD, now, shared=rollout is not None)
    if rollout is None or rollout.share == 0.0:
        return _enter(state, Phase.LOAD, rules, now)
    return _enter(state, Phase.ALL if rollout.share >= 1.0 else Phase.SHARE, rules, now)


def lasting(seen: Seen, since: Mapping[str, float], now: float) -> tuple[Seen, dict[str, float]]:
    """Returns `seen`, but spares only servers that have been silent for longer than a start takes;
    also returns when each server fell silent."""
    since = {one: since.get(one, now) for one in seen.spared}
    lost = frozenset(one for one, begun in since.items() if now - begun >= SPARE_S)
    return replace(seen, spared=lost), since


def step(state: Progress, event: Event, rules: Rules, now: float) -> tuple[Progress, Actions]:
    """Returns the next state, and what to do.

    Guarantees  clients are never sent to a set that an answering server may lack, and a set is
                unloaded only after clients were sent away from it
    """
    if isinstance(event, Undo):
        if state.stage in (
            Phase.RELOAD,
            Phase.RETREAT,
            Phase.CLEAR,
            Phase.ENDED,
        ):
            return state, ()
        if state.stage in (Phase.ALL, Phase.UNLOAD):
            return _enter(state, Phase.RELOAD, rules, now)
        return _retreat(state, "", rules, now)
    if isinstance(event, Compared):
        return _compared(state, event.found, rules, now)
    passed = now - state.since
    # Nothing needs to wait for a lost server: clients do not ask it, and it loads the whole list
    # when it starts.
    lacking = tuple(one for one in event.missing(state) if one not in event.spared)
    if state.stage is Phase.LOAD:
        if not lacking:
            return _enter(state, Phase.COMPARE, rules, now)
        if passed >= rules.load_within:
            late = shown(lacking)
            why = f"after {rules.load_within:g} s, {late} had not loaded the new set; see the logs"
            return _retreat(state, why, rules, now)
    elif state.stage is Phase.RELOAD:
        if not lacking:
            return _enter(state, Phase.RETREAT, rules, now)
        if passed >= rules.load_within:
            late = shown(lacking)
            why = f"after {rules.load_within:g} s, {late} had not loaded the old set; see the logs"
            return replace(state, stage=Phase.ENDED), (End(why),)
    elif state.stage is Phase.SHARE and not state.comparing:
        if passed >= rules.watch_for:
            return _enter(state, Phase.ALL, rules, now)
        if now - state.compared_at >= rules.compare:
            return replace(state, comparing=True), (Compare(),)
    elif state.stage in (Phase.ALL, Phase.RETREAT):
        leaving = state.old if state.stage is Phase.ALL else state.new
        if leaving in event.busy:
            state = replace(state, quiet_since=now)
        idle = rules.idle * event.processes  # a poll reaches only one process
        if now - state.quiet_since >= idle or passed >= rules.longest:
            following = Phase.UNLOAD if state.stage is Phase.ALL else Phase.CLEAR
            return _enter(state, following, rules, now)
    elif state.stage in (Phase.UNLOAD, Phase.CLEAR):
        is_undo = state.stage is Phase.CLEAR
        leaving, stays = (state.new, state.old) if is_undo else (state.old, state.new)
        holding = event.missing(state)
        ended = replace(state, stage=Phase.ENDED)
        if not holding:
            return ended, (TellClients(stays, None), End(state.failure, is_undo, event.silent))
        if passed >= rules.load_within:
            late = shown(holding)
            why = f"after {rules.load_within:g} s, {late} had not unloaded {leaving}; see the logs"
            return ended, (End(state.failure or why, is_undo),)
    return state, ()


def _compared(
    state: Progress, found: Comparison, rules: Rules, now: float
) -> tuple[Progress, Actions]:
    state = replace(state, comparing=False, compared_at=now)
    if state.stage not in (Phase.COMPARE, Phase.SHARE):
        return state, ()
    if why := rules.broken(found):
        return _retreat(state, why, rules, now)
    return _enter(state, Phase.SHARE, rules, now) if state.stage is Phase.COMPARE else (state, ())


def _retreat(state: Progress, why: str, rules: Rules, now: float) -> tuple[Progress, Actions]:
    """Undoes the roll-out; if no client was sent to the new set, unloads it at once."""
    state = replace(state, failure=why)
    if state.shared:
        return _enter(state, Phase.RETREAT, rules, now)
    after, actions = _enter(state, Phase.CLEAR, rules, now)
    return after, (TellClients(state.old, state.rollout(0.0)), *actions)


def _enter(state: Progress, stage: Phase, rules: Rules, now: float) -> tuple[Progress, Actions]:
    old, new = state.old, state.new
    state = replace(state, stage=stage, since=now, quiet_since=now, comparing=False)
    if stage is Phase.LOAD:
        return state, (TellClients(old, state.rollout(0.0)), TellServers((old, new)))
    if stage is Phase.COMPARE:
        return replace(state, comparing=True), (Compare(),)
    if stage is Phase.CLEAR:
        return state, (TellServers((old,)),)
    state = replace(state, shared=True)
    if stage is Phase.RELOAD:
        return state, (TellServers((new, old)),)
    if stage is Phase.SHARE:
        return state, (TellClients(old, state.rollout(rules.share)),)
    if stage is Phase.ALL:
        return state, (TellClients(new, state.rollout(1.0)), TellServers((new, old)))
    if stage is Phase.RETREAT:
        return state, (TellClients(old, state.rollout(0.0)), TellServers((old, new)))
    return state, (TellServers((new,)),)


def shown(addresses: Sequence[str]) -> str:
    more = len(addresses) - ADDRESSES_SHOWN
    first = ", ".join(addresses[:ADDRESSES_SHOWN])
    return f"{first} and {more} more" if more > 0 else first
