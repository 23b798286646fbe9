"""Carries out what `health` decides: heartbeats, probes, and the mode of a client.

The steps run on the loop, one after another, and never wait: work that may resolve a name, read a
file or query a server runs in a thread that the host starts. Values for other threads
(`mode`, `avoided`, `gone`, `slow`) are replaced as a whole.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from dlm.client.config import FailoverConfig, HeartbeatConfig
from dlm.client.health import (
    Beat,
    Cascade,
    Changed,
    Liveness,
    Member,
    MemberEvent,
    Messages,
    Mode,
    ModeEvent,
    Moving,
    Ping,
    ProbeDone,
    ReachabilityTick,
    Refused,
    Renew,
    Restarted,
    Switch,
    Tick,
    Topology,
    Unreachable,
    behind,
    member_after,
    mode_after,
)
from dlm.errors import AuthenticationError, DlmError
from dlm.logs import EventLog
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason

log = EventLog(__name__)

TICK_S = 0.05
# Seconds between ticks while all is well and nothing is awaited; more than TICK_S, since each tick
# interrupts working threads.
CALM_S = 0.2
# A tick that comes this many seconds late shows that this process was paused: it was stopped, or
# its machine slept or was busy. Replies that are late in the pause, or in an equally
# long time after it, are not the servers' fault.
STOOD_STILL_S = 0.25
# For this many seconds, a server that reported draining or warming up is expected back. A start
# with compiled kernels takes less.
MOVING_S = 30.0
LOOK_AGAIN_S = 1.0  # seconds between searches for servers while a shard has none to ask
BeatReply = Callable[[pb.HeartbeatReply | None, DlmError | None], None]
_MOVING: dict[object, Moving] = {
    Reason.DRAINING: "draining",
    Reason.NOT_READY: "warming",
    pb.SERVER_STATE_DRAINING: "draining",
    pb.SERVER_STATE_WARMING: "warming",
}


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """What a client knows about a server: `ready` if it last reported READY and is not down. The
    shortest recent round trip and its baseline are None until a heartbeat is answered."""

    address: str
    shard: int
    health: Liveness
    ready: bool
    delay_s: float | None
    baseline_s: float | None


@dataclass(frozen=True, slots=True)
class CascadeStatus:
    """The state of a client's servers, and the model that the client uses.

    mode      which model new utterances are scored with; always `full` without a local fallback,
              even while every server is down
    reason    why the mode was entered: "failures", "delay" or "recovered"; "" if the client, or the
              parent it was forked from, started in it
    local_fallback  whether there is a local fallback to switch to
    messages  logical messages in the window of the failure rate; `failed`: how many of them failed
    switches  (mode, reason) -> how often the mode was entered for this reason
    """

    mode: Mode
    for_s: float
    messages: int
    failed: int
    switches: dict[tuple[Mode, str], int]
    servers: tuple[ServerHealth, ...]
    reason: str = ""
    local_fallback: bool = False


class CascadeMonitor:
    """The cascade of one client in one process.

    Args
        host       the client's `core.Lanes`, which carries out the decisions without waiting
        may_switch whether there is a local fallback to switch to
        before     after a fork, the monitor of the parent process, whose mode is kept
        mode       the initial mode if `before` is None
    """

    def __init__(
        self,
        host: Any,
        heartbeat_config: HeartbeatConfig,
        failover_config: FailoverConfig,
        *,
        may_switch: bool,
        before: CascadeMonitor | None = None,
        mode: Mode = Mode.FULL,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._host = host
        self._beating = heartbeat_config
        # Without a local fallback, failures are counted but have no effect.
        self._failover_config = (
            failover_config if may_switch else replace(failover_config, failing=1.0)
        )
        self._may_switch = may_switch
        self._clock, self._chance = clock, chance
        now = clock()
        if before is not None:
            # Only the state of the mode is kept: a probe in flight belonged to the parent.
            old: Cascade = before._cascade
            due = now + old.wait_s if old.mode is Mode.LOCAL_FALLBACK else old.due
            first = old._replace(until=float("-inf"), due=due, passed=0)
        elif mode is Mode.LOCAL_FALLBACK:
            wait = failover_config.wait_s
            first = Cascade(Mode.LOCAL_FALLBACK, since=now, wait_s=wait, due=now + wait)
        else:
            first = Cascade(since=now - failover_config.stable_s)
        self._cascade: Cascade = first
        # The true time; `since` above is set earlier, so that the first stay counts as stable.
        self._entered: float = now if before is None else before._entered
        self._topology: Topology | None = None  # the topology at the last tick
        self._members: dict[str, Member] = {}
        self._lost: set[str] = set()  # servers whose loss was logged as a warning
        self._shards: dict[str, int] = {}
        self._ended = self._failed = 0  # messages since the last tick
        self.slow_shards: frozenset[int] = frozenset()  # shards with only slow servers
        self._looked = self._ticked = now
        self._next = inf  # when the next tick is planned
        self._outdated: Topology | None = None  # the topology as it was when a server restarted
        self._blameless_until = now
        self._listens = False  # whether a late tick was put off to handle delayed events
        self.mode = self._cascade.mode
        self.avoided: frozenset[str] = frozenset()
        self.slow: frozenset[str] = frozenset()  # servers far slower than their shard's fastest
        self.gone: frozenset[int] = frozenset()
        self.moving: frozenset[str] = frozenset()  # servers that last reported draining or warming
        self.switches: Counter[tuple[Mode, str]] = Counter()
        self.probes: Counter[bool] = Counter()
        self.pause_s = TICK_S
        self._stopped = False

    # -- in any thread ------------------------------------------------------------------------

    def stop(self) -> None:
        self._stopped = True

    def status(self) -> CascadeStatus:
        cascade, members = self._cascade, dict(self._members)
        messages, failed = cascade.failing()
        servers = [
            ServerHealth(
                address,
                self._shards.get(address, -1),
                member.health,
                member.ready and member.health is not Liveness.DOWN,
                member.delay_s if member.beats else None,
                member.baseline_s if member.beats else None,
            )
            for address, member in members.items()
        ]
        return CascadeStatus(
            cascade.mode,
            self._clock() - self._entered,
            messages,
            failed,
            dict(self.switches),
            tuple(sorted(servers, key=lambda one: (one.shard, one.address))),
            cascade.reason,
            self._may_switch,
        )

    # -- on the loop --------------------------------------------------------------------------

    def delay_s(self, address: str) -> float:
        """The shortest recent round trip to a server; inf unless the server can be asked."""
        member = self._members.get(address)
        return member.delay_s if member is not None and member.usable else inf

    def begin(self) -> None:
        self._plan(self._clock())

    def count(self, failed: bool) -> None:
        self._ended += 1
        self._failed += failed
        if failed:
            self._soon()

    def lost(self, address: str, error: DlmError) -> None:
        """Records that a message did not reach the server, or was refused."""
        event: MemberEvent = Unreachable()
        if isinstance(error, AuthenticationError):
            event = Unreachable("unauthenticated")
        elif moving := _MOVING.get(getattr(error, "reason", None)):
            event = Refused(moving)
        self._member(address, event, self._clock())
        self._soon()

    def _soon(self) -> None:
        self._plan(self._ticked + TICK_S)

    def _plan(self, at: float) -> None:
        if at < self._next:
            self._next = at
            self._host.later(max(at - self._clock(), 0.0), self._alarm, at)

    def _alarm(self, planned: float) -> None:
        now = self._clock()
        if planned != self._next or self._stopped:
            return  # an earlier tick replaced this one, or none is wanted
        self._next = inf
        late_s = now - planned
        if late_s > STOOD_STILL_S:
            self._blameless_until = max(self._blameless_until, now + late_s)
            if not self._listens:  # lets the loop handle events that the pause delayed
                self._listens = True
                self._plan(now + TICK_S)
                return
        self._listens = False
        try:
            self.tick()
        except Exception as exc:  # noqa: BLE001 - the monitor must keep running
            log.error("client.cascade.failed", extra={"error": type(exc).__name__})
        finally:  # runs even if a log handler of the program raises
            self._plan(self._clock() + self.pause_s)

    def tick(self) -> None:
        now = self._ticked = self._clock()
        topology = self._topology = self._host.known()
        replicas = {} if topology is None else topology.addresses
        self._shards = {a: shard for shard, addresses in replicas.items() for a in addresses}
        self._members = {a: self._members.get(a, Member()) for a in self._shards}
        for address in self._shards:
            self._member(address, Tick(self._chance()), now)
        self.slow_shards = frozenset(
            shard
            for shard, addresses in replicas.items()
            if (usable := [a for a in addresses if self._members[a].usable])
            and all(self._members[a].is_slow(self._beating) for a in usable)
        )
        ended, failed, self._ended, self._failed = self._ended, self._failed, 0, 0
        if ended and now >= self._blameless_until:
            self._switch(Messages(ended, failed), now)
        reachable = topology is not None and all(
            any(self._members[a].usable for a in replicas.get(shard, ()))
            for shard in range(topology.manifest.shards)
        )
        # A client holds all of a model of order 1 or 2, and asks no server.
        asks = topology is not None and topology.manifest.order > 2
        slow = bool(asks and self._may_switch and self.slow_shards)
        self._switch(ReachabilityTick(reachable, slow), now)
        self._publish()
        self.moving = frozenset(
            a
            for a, m in self._members.items()
            if m.beats and not m.ready and now - m.measured < MOVING_S
        )
        well = reachable and not slow and self.mode is Mode.FULL
        self.pause_s = CALM_S if well and self._is_calm(now) else TICK_S
        outdated = topology is not None and topology is self._outdated
        if (outdated or not reachable) and now - self._looked >= LOOK_AGAIN_S:
            # The servers may be back at new addresses; while the local fallback answers, no message
            # would show this.
            self._looked = now
            self._host.refresh_later()
        self._host.follow()

    def _is_calm(self, now: float) -> bool:
        return not self._cascade.failing()[1] and all(
            member.usable and (member.sent == float("-inf") or now - member.sent < TICK_S)
            for member in self._members.values()
        )

    def _publish(self) -> None:
        replicas = {} if self._topology is None else self._topology.addresses
        self.avoided = frozenset(a for a, m in self._members.items() if m.beats and not m.usable)
        slow: set[str] = set()
        for addresses in replicas.values():
            delays = {a: m.delay_s for a in addresses if (m := self._members[a]).usable}
            least = min(delays.values(), default=0.0)
            slow.update(a for a, delay in delays.items() if behind(delay, least, self._beating))
        self.slow = frozenset(slow)
        self.gone = frozenset(
            shard
            for shard, addresses in replicas.items()
            if all(self._members[a].health is Liveness.DOWN for a in addresses)
        )

    def _member(self, address: str, event: MemberEvent, now: float) -> None:
        member = self._members.get(address)
        if member is None:
            return
        self._members[address], actions = member_after(member, event, now, self._beating)
        if any(isinstance(action, Changed) for action in actions):
            self._publish()
        for action in actions:
            if isinstance(action, Ping):
                self._beat(address, action.sequence)
            elif isinstance(action, Renew):
                log.info("client.connection.renewed", extra={"address": address})
                self._host.renew(address)
            elif isinstance(action, Restarted):
                log.info("client.server.restarted", extra={"address": address})
                # The new process may hold other models, or have another default. `tick` repeats
                # the search for servers until it succeeds.
                self._outdated, self._looked = self._topology, now
                self._host.refresh_later()
            else:
                fields = {
                    "address": address,
                    "shard": self._shards.get(address),
                    "before": action.before,
                    "after": action.after,
                    "reason": action.reason,
                }
                # One missed heartbeat is no reason for a warning, as busy machines miss many. A
                # recovery is logged as a warning, like the loss, so that a program without log
                # handlers shows both.
                if action.after == Liveness.UP:
                    is_news = address in self._lost
                    self._lost.discard(address)
                elif is_news := action.after != Liveness.SUSPECT or action.reason != "silent":
                    self._lost.add(address)
                if is_news:
                    log.warning("client.server.changed", extra=fields)
                else:
                    log.info("client.server.changed", extra=fields)

    def _beat(self, address: str, sequence: int) -> None:
        assert self._topology is not None
        request = pb.HeartbeatRequest(
            sequence=sequence,
            shard_set=self._topology.manifest.shard_set_bytes,
            shard=self._shards[address],
        )
        reply = partial(self._beaten, address, sequence)
        self._host.beat(address, request, self._beating.timeout_s, reply)

    def _beaten(
        self,
        address: str,
        sequence: int,
        found: pb.HeartbeatReply | None,
        error: DlmError | None,
    ) -> None:
        """Records the answer to a heartbeat, from any thread; a refused or garbled answer counts as
        a missed heartbeat when the heartbeat's time is over."""
        event: MemberEvent
        if found is not None and error is None:
            ready = found.state == pb.SERVER_STATE_READY
            refuses = None if ready else _MOVING.get(found.state, "warming")
            event = Beat(sequence, found.instance, refuses)
        elif isinstance(error, AuthenticationError):
            event = Unreachable("unauthenticated")
        else:
            return
        self._here(self._member, address, event)

    def _switch(self, event: ModeEvent, now: float) -> None:
        self._cascade, actions = mode_after(self._cascade, event, now, self._failover_config)
        for action in actions:
            if isinstance(action, Switch):
                self.mode = action.to
                self._entered = now
                self.switches[action.to, action.reason] += 1
                fields = {
                    "to": str(action.to),
                    "reason": action.reason,
                    "messages": action.messages,
                    "failed": action.failed,
                    "slow_shards": sorted(self.slow_shards),
                }
                if action.to is Mode.FULL:
                    log.info("client.mode.changed", extra=fields)
                else:
                    log.warning("client.mode.changed", extra=fields)
            else:
                self._probe(action.number)

    def _probe(self, number: int) -> None:
        try:
            timeout_s = self._failover_config.probe_timeout_s
            self._host.ask_probe(timeout_s, partial(self._probe_done, number))
        except DlmError:
            self._probe_done(number, False)

    def _probe_done(self, number: int, answered: bool) -> None:
        self._here(self._probe_ended, ProbeDone(number, answered))

    def _probe_ended(self, event: ProbeDone, now: float) -> None:
        self.probes[event.answered] += 1
        self._switch(event, now)

    def _here(self, step: Callable[..., None], *args: Any) -> None:
        if not self._stopped:
            self._host.carry_out(step, *args, self._clock())
