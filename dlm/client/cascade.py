"""Carries out what `membership` and `modes` decide: heartbeats, canaries, and the mode of a client.

One thread a process and client. It alone steps the machines, so that they need no lock; what other
threads have to tell it (a beat that came back, a message that found nobody) waits in a queue until
its next tick, with the time at which it happened. What others read of it (`mode`, `avoided`,
`gone`, `slow`) are single values, replaced whole.

It is a thread and no task on the client's event loop: a loop ends for every fork, and what is to
notice that things hang must not hang with them.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from dlm.client import membership, modes
from dlm.client.membership import Beating, Liveness, Member, behind
from dlm.client.modes import Cascade, Mode, Switching
from dlm.client.topology import Topology
from dlm.client.transport import Connection
from dlm.errors import DlmError
from dlm.logs import EventLog
from dlm.wire._pb import shard_pb2 as pb

log = EventLog(__name__)

TICK_S = 0.05
# Between ticks while all is well and nothing is awaited: each takes the interpreter from threads
# that work, a quarter of a millisecond of theirs, and 20 a second cost a busy client one percent.
CALM_S = 0.2
# A tick that comes so late tells that this process stood still (it was stopped, its machine slept,
# or gave its cores to others): what is late then, and for as long after it, is not the servers'
# fault. Seconds.
STOOD_STILL_S = 0.25
# A server that said so long ago that it drains or warms up is still on its way back: longer than a
# start takes whose kernels are compiled already. Seconds.
MOVING_S = 30.0
LOOK_AGAIN_S = 1.0  # while a shard has nobody to ask, the servers are looked for this often


# Why a server's health changed, as the log has it: a closed set.
_REASONS = {membership.Beat: "answered", membership.Tick: "silent", membership.Unreachable: "lost"}


class Host(Protocol):
    """What a client lets its cascade do."""

    def known(self) -> Topology | None:
        """The shard set in use and where its shards are; None before any was found."""

    def connection(self, address: str) -> Connection:
        """See `Core.connection`."""

    def renew(self, address: str) -> None:
        """Gives up the connection; what follows goes over another."""

    def refresh_later(self) -> None:
        """Has the servers asked anew what they hold, in the background."""

    def follow(self) -> None:
        """Has them asked where the operator may have named another default; cheap to call."""

    def ask_canary(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        """Asks every shard something, the whole way; tells whether all of them answered."""


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """What a client knows of a server.

    ready    whether it can be asked, by its last heartbeat; not while it is down
    delay_s, baseline_s  shortest round trip of the last heartbeats, and what it is compared with;
                         None before any was answered
    """

    address: str
    shard: int
    health: Liveness
    ready: bool
    delay_s: float | None
    baseline_s: float | None


@dataclass(frozen=True, slots=True)
class CascadeStatus:
    """How a client stands.

    mode      which model new utterances are scored with
    reason    why it was entered: "failures", "delay" or "recovered"; "" where the client, or the
              parent it was forked from, began in it
    small     whether there is a small model to go over to
    for_s     seconds since it was entered
    messages  logical messages in the window of the failure rate; failed: those of them that did
    switches  times that each mode was entered, and why: (mode, reason) -> times
    servers   by shard and address
    """

    mode: Mode
    for_s: float
    messages: int
    failed: int
    switches: dict[tuple[Mode, str], int]
    servers: tuple[ServerHealth, ...]
    reason: str = ""
    small: bool = False


class CascadeMonitor:
    """The cascade of one client in one process, and the thread that runs it.

    `pause_s` is the time to the next tick, if no bad news comes.

    Args
        host       held weakly: a client that nobody closed is collected all the same
        may_switch whether there is a small model to go over to
        before     of the parent process, after a fork: its mode goes on
        mode       what a client without one begins in
    """

    def __init__(
        self,
        host: Host,
        beating: Beating,
        switching: Switching,
        *,
        may_switch: bool,
        before: CascadeMonitor | None = None,
        mode: Mode = Mode.FULL,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._host = weakref.ref(host)
        self._beating = beating
        # Without a small model failures are counted, and however many they are, nothing follows.
        self._switching = switching if may_switch else replace(switching, failing=1.0)
        self._may_switch = may_switch
        self._clock, self._chance = clock, chance
        now = clock()
        if before is not None:
            # Only what concerns the mode: a canary that is out was the parent's.
            old: Cascade = before._cascade
            due = now + old.wait_s if old.mode is Mode.SMALL else old.due
            first = old._replace(until=float("-inf"), due=due, passed=0)
        elif mode is Mode.SMALL:
            wait = switching.wait_s
            first = Cascade(Mode.SMALL, since=now, wait_s=wait, due=now + wait)
        else:
            first = Cascade(since=now - switching.stable_s)
        self._cascade: Cascade = first
        # Not `since`, by which the first stay counts as a stable one.
        self._entered: float = now if before is None else before._entered
        self._members: dict[str, Member] = {}
        self._shards: dict[str, int] = {}
        self._came: deque[tuple[str, membership.Event, float]] = deque()
        self._canaries: deque[tuple[int, bool, float]] = deque()
        self._lock = threading.Lock()
        self._ended = self._failed = 0
        self._slow: list[int] = []  # shards that only slow servers answer for
        self._looked = self._ticked = now
        self._outdated: Topology | None = None  # of before a server was started anew
        self._blameless_until = now
        self.mode = self._cascade.mode
        self.avoided: frozenset[str] = frozenset()
        self.slow: frozenset[str] = frozenset()  # beside another server of their shard
        self.gone: frozenset[int] = frozenset()
        self.moving: frozenset[str] = frozenset()  # drained or warmed up when last heard of
        self.switches: Counter[tuple[Mode, str]] = Counter()
        self.canaries: Counter[bool] = Counter()
        self.pause_s = TICK_S
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlm-cascade", daemon=True)

    def start(self) -> CascadeMonitor:
        """Begins to beat."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread, soon; does not wait for it."""
        self._stopped = True
        self._wake.set()

    def count(self, failed: bool) -> None:
        """A logical message has ended."""
        with self._lock:
            self._ended += 1
            self._failed += failed
        if failed:
            self._wake.set()

    def lost(self, address: str) -> None:
        """A message found nobody there."""
        self._came.append((address, membership.Unreachable(), self._clock()))
        self._wake.set()

    def status(self) -> CascadeStatus:
        """How things stand."""
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

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            begun = time.monotonic()
            if self._wake.wait(self.pause_s):  # bad news, of which there may be much
                time.sleep(max(begun + TICK_S - time.monotonic(), 0.0))
            self._wake.clear()
            host = self._host()
            if host is None or self._stopped:
                return
            try:
                self.tick(host)
            except Exception as exc:  # noqa: BLE001 - it must go on watching
                if not self._stopped:
                    log.error("client.cascade.failed", extra={"error": type(exc).__name__})
            del host

    def tick(self, host: Host) -> None:
        """Steps every machine to now."""
        now = self._clock()
        late_s = now - self._ticked - self.pause_s
        if late_s > STOOD_STILL_S:
            self._blameless_until = now + late_s
        topology = host.known()
        replicas = {} if topology is None else topology.addresses
        self._shards = {a: shard for shard, addresses in replicas.items() for a in addresses}
        self._members = {a: self._members.get(a, Member()) for a in self._shards}
        while self._came:
            address, event, at = self._came.popleft()
            self._member(host, topology, address, event, at)
        for address in self._shards:
            self._member(host, topology, address, membership.Tick(self._chance()), now)
        self._slow = [
            shard
            for shard, addresses in sorted(replicas.items())
            if (usable := [a for a in addresses if self._members[a].usable])
            and all(self._members[a].is_slow(self._beating) for a in usable)
        ]
        with self._lock:
            ended, failed, self._ended, self._failed = self._ended, self._failed, 0, 0
        if ended and now >= self._blameless_until:
            self._switch(host, modes.Messages(ended, failed), now)
        while self._canaries:
            number, answered, at = self._canaries.popleft()
            self.canaries[answered] += 1
            self._switch(host, modes.CanaryDone(number, answered), at)
        reachable = topology is not None and all(
            any(self._members[a].usable for a in replicas.get(shard, ()))
            for shard in range(topology.manifest.shards)
        )
        # Of a model of order 2 or less the client has all, and asks nobody.
        asks = topology is not None and topology.manifest.order > 2
        slow = bool(asks and self._may_switch and self._slow)
        self._switch(host, modes.ReachabilityTick(reachable, slow), now)
        self._publish(topology)
        moving = frozenset(
            a
            for a, m in self._members.items()
            if m.beats and not m.ready and now - m.measured < MOVING_S
        )
        if moving != self.moving:
            self.moving = moving
        well = reachable and not slow and self.mode is Mode.FULL
        self.pause_s = CALM_S if well and self._is_calm(now) else TICK_S
        self._ticked = self._clock()  # what a tick itself takes is no standing still
        outdated = topology is not None and topology is self._outdated
        if (outdated or not reachable) and now - self._looked >= LOOK_AGAIN_S:
            # They may have come back elsewhere, and while the small model answers no message asks.
            self._looked = now
            host.refresh_later()
        host.follow()

    def _is_calm(self, now: float) -> bool:
        """Whether nothing failed lately, every server is well, and no heartbeat is awaited."""
        return not self._cascade.failing()[1] and all(
            member.usable and (member.sent == float("-inf") or now - member.sent < TICK_S)
            for member in self._members.values()
        )

    def _publish(self, topology: Topology | None) -> None:
        avoided = frozenset(a for a, m in self._members.items() if m.beats and not m.usable)
        if avoided != self.avoided:
            self.avoided = avoided
        slow: set[str] = set()
        for addresses in () if topology is None else topology.addresses.values():
            delays = {a: m.delay_s for a in addresses if (m := self._members[a]).usable}
            least = min(delays.values(), default=0.0)
            slow.update(a for a, delay in delays.items() if behind(delay, least, self._beating))
        if slow != self.slow:
            self.slow = frozenset(slow)
        gone = frozenset(
            shard
            for shard, addresses in ({} if topology is None else topology.addresses).items()
            if all(self._members[a].health is Liveness.DOWN for a in addresses)
        )
        if gone != self.gone:
            self.gone = gone

    def _member(
        self,
        host: Host,
        topology: Topology | None,
        address: str,
        event: membership.Event,
        now: float,
    ) -> None:
        member = self._members.get(address)
        if member is None or topology is None:
            return
        self._members[address], actions = membership.step(member, event, now, self._beating)
        if any(isinstance(action, membership.Changed) for action in actions):
            self._publish(topology)  # before what takes time: nobody should ask it meanwhile
        for action in actions:
            if isinstance(action, membership.Probe):
                self._beat(host, topology, address, action.sequence)
            elif isinstance(action, membership.Renew):
                log.info("client.connection.renewed", extra={"address": address})
                host.renew(address)
            elif isinstance(action, membership.Restarted):
                log.info("client.server.restarted", extra={"address": address})
                # It may hold other models, or name another default; until the look succeeds.
                self._outdated, self._looked = topology, now
                host.refresh_later()
            else:
                fields = {
                    "address": address,
                    "shard": self._shards.get(address),
                    "before": str(action.before),
                    "after": str(action.after),
                    "reason": _REASONS[type(event)],
                }
                if action.after is Liveness.UP:
                    log.info("client.server.changed", extra=fields)
                else:
                    log.warning("client.server.changed", extra=fields)

    def _beat(self, host: Host, topology: Topology, address: str, sequence: int) -> None:
        came, clock = self._came, self._clock

        def reply(found: pb.HeartbeatReply | None, error: DlmError | None) -> None:
            # A beat that is refused or garbled counts as one that was missed, in its time.
            if found is not None and error is None:
                ready = found.state == pb.SERVER_STATE_READY
                came.append((address, membership.Beat(sequence, found.instance, ready), clock()))

        request = pb.HeartbeatRequest(
            sequence=sequence,
            shard_set=topology.manifest.shard_set_bytes,
            shard=self._shards[address],
        )
        with contextlib.suppress(DlmError):  # likewise
            host.connection(address).heartbeat_later(request, self._beating.timeout_s, reply)

    def _switch(self, host: Host, event: modes.Event, now: float) -> None:
        self._cascade, actions = modes.step(self._cascade, event, now, self._switching)
        for action in actions:
            if isinstance(action, modes.Switch):
                self.mode = action.to
                self._entered = now
                self.switches[action.to, action.reason] += 1
                fields = {
                    "to": str(action.to),
                    "reason": action.reason,
                    "messages": action.messages,
                    "failed": action.failed,
                    "slow_shards": self._slow,
                }
                if action.to is Mode.FULL:
                    log.info("client.mode.changed", extra=fields)
                else:
                    log.warning("client.mode.changed", extra=fields)
            else:
                self._canary(host, action.number)

    def _canary(self, host: Host, number: int) -> None:
        canaries, clock = self._canaries, self._clock

        def done(answered: bool) -> None:
            canaries.append((number, answered, clock()))

        try:
            host.ask_canary(self._switching.canary_timeout_s, done)
        except DlmError:
            done(False)
