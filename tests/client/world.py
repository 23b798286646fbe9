"""A cluster, its network and its clock, in one thread: what drives the pure machines in tests.

A `World` holds servers that answer heartbeats after their delay, or do not; a client that asks so
many messages a second of every shard; and the machines under test. A message fails where no replica
of its shard answers: what asking another replica costs is nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from dlm.client import health
from dlm.client.config import FailoverConfig, HeartbeatConfig

TICK_S = 0.05


@dataclass
class Server:
    """One server, as it is; `member` is what the client knows of it."""

    name: str
    delay_s: float = 0.001
    alive: bool = True
    instance: int = 1
    late: float = 0.0  # part of the answers that take up to half a second longer
    member: health.Member = field(default_factory=health.Member)
    # Answers on their way: (when they arrive, sequence, instance).
    coming: list[tuple[float, int, int]] = field(default_factory=list)


class World:
    """Replicas of shards, and one client of them.

    Args
        shards, replicas  server "0a" is the first replica of shard 0
        traffic           messages a second, of each shard
        lossy             the part of messages that is lost, whatever the servers do
    """

    def __init__(
        self,
        shards: int,
        replicas: int = 1,
        *,
        traffic: int = 1000,
        seed: int = 1,
        heartbeat_config: HeartbeatConfig | None = None,
        failover_config: FailoverConfig | None = None,
    ) -> None:
        self.heartbeat_config = heartbeat_config or HeartbeatConfig()
        self.failover_config = failover_config or FailoverConfig()
        self.shards = [
            [Server(f"{s}{chr(97 + r)}") for r in range(replicas)] for s in range(shards)
        ]
        self.traffic = traffic
        self.lossy = 0.0
        self.cascade = health.Cascade()
        self.now = 0.0
        self.said: list[tuple[float, str]] = []
        self.asked = dict.fromkeys(health.Mode, 0)  # messages, by the mode they were sent in
        self.probes: list[tuple[float, int, bool]] = []
        self._random = Random(seed)

    def server(self, name: str) -> Server:
        """The one of that name."""
        return next(s for shard in self.shards for s in shard if s.name == name)

    def run(self, seconds: float) -> None:
        """Time passes."""
        end = self.now + seconds - TICK_S / 2
        while self.now < end:
            self.now = round(self.now + TICK_S, 9)
            for shard in self.shards:
                for server in shard:
                    self._beat(server)
            self._messages()
            self._probes()
            reachable = all(any(s.member.usable for s in shard) for shard in self.shards)
            slow = any(
                all(s.member.is_slow(self.heartbeat_config) for s in usable)
                for shard in self.shards
                if (usable := [s for s in shard if s.member.usable])
            )
            self._switch(health.ReachabilityTick(reachable, slow))

    def _beat(self, server: Server) -> None:
        ready = [c for c in server.coming if c[0] <= self.now]
        server.coming = [c for c in server.coming if c[0] > self.now]
        for arrived, sequence, instance in ready:
            self._member(server, health.Beat(sequence, instance), arrived)
        self._member(server, health.Tick(self._random.random()), self.now)

    def _member(self, server: Server, event: health.MemberEvent, now: float) -> None:
        config = self.heartbeat_config
        server.member, actions = health.member_after(server.member, event, now, config)
        for action in actions:
            if isinstance(action, health.Ping):
                if server.alive and self._random.random() >= self.lossy:
                    arrives = self.now + server.delay_s
                    if server.late and self._random.random() < server.late:
                        arrives += self._random.random() / 2
                    server.coming.append((arrives, action.sequence, server.instance))
            elif isinstance(action, health.Changed):
                self.said.append((self.now, f"{server.name} is {action.after}"))
            elif isinstance(action, health.Restarted):
                self.said.append((self.now, f"{server.name} was restarted"))
            # A connection is made anew (`Renew`) without a word: here they are never what is wrong.

    def _answers(self, shard: list[Server]) -> bool:
        return any(s.alive for s in shard)

    def _messages(self) -> None:
        if self.cascade.mode is not health.Mode.FULL:
            return
        each = round(self.traffic * TICK_S)
        failed = 0
        for shard in self.shards:
            if not self._answers(shard):
                failed += each
            elif self.lossy:
                failed += sum(self._random.random() < self.lossy for _ in range(each))
        self.asked[health.Mode.FULL] += each * len(self.shards)
        self._switch(health.Messages(each * len(self.shards), failed))

    def _probes(self) -> None:
        done = [c for c in self.probes if c[0] <= self.now]
        self.probes = [c for c in self.probes if c[0] > self.now]
        for _, number, answered in done:
            self._switch(health.ProbeDone(number, answered))

    def _switch(self, event: health.ModeEvent) -> None:
        config = self.failover_config
        self.cascade, actions = health.mode_after(self.cascade, event, self.now, config)
        for action in actions:
            if isinstance(action, health.Switch):
                self.said.append((self.now, f"the {action.to} model, {action.reason}"))
                continue
            answered = all(
                self._answers(shard) and self._random.random() >= self.lossy
                for shard in self.shards
            )
            took = 0.01 if answered else self.failover_config.probe_timeout_s
            self.probes.append((self.now + took, action.number, answered))
            self.said.append((self.now, f"probe {action.number}"))
