"""Finds the state of a cluster's servers from heartbeats for each model that a server holds. If
several processes share a port, each reports how many they are, and how many of them hold the models
that it holds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from dlm.client.census import read_description
from dlm.client.cluster_file import Endpoint, Rollout
from dlm.client.config import HeartbeatConfig
from dlm.client.health import FIRST_BEATS, Member, Mode, behind, measured
from dlm.client.server import Connect, Connection
from dlm.client.table import MAX_ASKED
from dlm.errors import AuthenticationError, DlmError, StaleShardSet
from dlm.index.layout import Manifest
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.ids import MAX_SHARD_SETS

Clock = Callable[[], float]

HEARTBEATS = HeartbeatConfig()  # the default settings of clients
ID_DIGITS = 12
# A poll first takes the shortest of up to this many round trips: the first one on a connection
# includes the handshake, and a delay of this machine must not count as a delay of the server.
BEATS = 3
ROUNDS = 3  # number of measurements before a server counts as slower than another server


@dataclass(frozen=True, slots=True)
class Row:
    """A model that a server process holds, or a server that does not answer; None means unknown.

    shard          the shard that the server reports or, while it is silent, that of cluster.toml
    state          "warming", "ready", "draining"; "silent" if it does not answer, "refused" if it
                   rejects this client
    processes, alike  number of processes on the port, and of those that hold the same models
    model, shard_set  the first 12 hex digits of their ids
    refused        number of messages that the process has refused since its start
    failing_percent  share of messages refused between the last two beats; rates use the same two
    cpu_percent, memory_bytes, idle_s  share of a core, private memory, time since the last message
    round_trip_ms  of the last poll: the shortest of up to three beats, on an open connection
    delay_ms       the shortest of the last five round trips, as clients measure it
    delay_ratio    the delay divided by its baseline, after eight beats
    slow           if the delay is over twice, and 20 ms above, its baseline or another server's
    error          why data are missing from the row
    """

    address: str
    shard: int | None
    state: str = "silent"
    processes: int | None = None
    alike: int | None = None
    model: str | None = None
    shard_set: str | None = None
    queries_per_s: float | None = None
    messages_per_s: float | None = None
    refused: int | None = None
    in_flight: int | None = None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    uptime_s: float | None = None
    idle_s: float | None = None
    round_trip_ms: float | None = None
    delay_ms: float | None = None
    delay_ratio: float | None = None
    failing_percent: float | None = None
    slow: bool = False
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all processes on the row's port hold this model."""
        return self.error is None and self.alike == self.processes


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All rows of one poll, and what follows from them: the expected `shards`, as far as known; the
    `missing` shards, which no ready server has and no server that refuses this client can have; and
    `unserved`, the default model of cluster.toml, if no server holds that model."""

    rows: tuple[Row, ...]
    shards: tuple[int, ...]
    missing: tuple[int, ...]
    refused: bool = False
    unserved: str | None = None
    rollout: Rollout | None = None

    @property
    def down(self) -> bool:
        """Whether no server is ready, so that the expected shards are unknown."""
        return not self.refused and not any(row.state == "ready" for row in self.rows)

    @property
    def whole(self) -> bool:
        """Whether every server and every shard is ready."""
        ready = all(row.state == "ready" and row.is_whole for row in self.rows)
        return ready and not (self.missing or self.refused or self.down)

    @property
    def slow(self) -> tuple[int, ...]:
        """Shards for which only slow servers answer."""
        ready = [row for row in self.rows if row.state == "ready"]
        quick = {row.shard for row in ready if not row.slow}
        return tuple(sorted({row.shard for row in ready if row.shard is not None} - quick))

    @property
    def mode(self) -> Mode | None:
        """The model that clients with a local fallback use for new utterances, as far as heartbeats
        show (only clients know which of their messages fail); None if a server refuses this client,
        or if none has the model that clients should use."""
        if self.missing or self.slow or self.down:
            return Mode.LOCAL_FALLBACK
        return None if self.refused or self.unserved else Mode.FULL

    def facts(self) -> dict[str, Any]:
        """Returns the facts for JSON: `servers` has the rows' fields; other keys are attributes."""
        return {
            "servers": [asdict(row) for row in self.rows],
            "shards": list(self.shards),
            "missing": list(self.missing),
            "slow": list(self.slow),
            "unserved": self.unserved,
            "mode": self.mode,
            "rollout": None if self.rollout is None else asdict(self.rollout),
        }


@dataclass(frozen=True, slots=True)
class _Beat:
    at: float
    reply: pb.HeartbeatReply
    round_trip_s: float


class _BeatHistory:
    def __init__(self, beat: _Beat) -> None:
        self.before: _Beat | None = None
        self.last = beat
        self._member = measured(Member(), beat.round_trip_s, beat.at, HEARTBEATS)

    def add(self, beat: _Beat) -> None:
        self.before, self.last = self.last, beat
        self._member = measured(self._member, beat.round_trip_s, beat.at, HEARTBEATS)

    def shorter(self, round_trip_s: float) -> None:
        if round_trip_s < self.last.round_trip_s:
            self.last = replace(self.last, round_trip_s=round_trip_s)
            trips = (*self._member.trips[:-1], round_trip_s)
            self._member = self._member._replace(trips=trips, delay_s=min(trips))

    def row(self, endpoint: Endpoint, model: str | None) -> Row:
        reply, before, member = self.last.reply, self.before, self._member
        row = Row(
            endpoint.address,
            reply.shard,
            _state(reply.state),
            reply.processes,
            reply.alike,
            model,
            reply.shard_set.hex()[:ID_DIGITS],
            refused=reply.refused,
            in_flight=reply.in_flight,
            memory_bytes=reply.memory_bytes or None,
            uptime_s=reply.uptime_ms / 1000,
            idle_s=reply.idle_ms / 1000,
            round_trip_ms=1000 * self.last.round_trip_s,
            delay_ms=1000 * member.delay_s,
            delay_ratio=member.ratio if member.beats >= FIRST_BEATS else None,
            slow=member.is_slow(HEARTBEATS),
        )
        passed_s = self.last.at - before.at if before else 0.0
        if before is None or passed_s <= 0:
            return row
        old = before.reply
        cpu_ms = reply.cpu_ms - old.cpu_ms if reply.cpu_ms else None
        failed = reply.refused - old.refused
        ended = reply.messages - old.messages + failed
        return replace(
            row,
            queries_per_s=(reply.queries - old.queries) / passed_s,
            messages_per_s=(reply.messages - old.messages) / passed_s,
            cpu_percent=None if cpu_ms is None else cpu_ms / (10 * passed_s),
            failing_percent=100 * failed / ended if ended else None,
        )


def _state(state: int) -> str:
    try:
        name: str = pb.ServerState.Name(state)
    except ValueError:
        return "unknown"
    return name.removeprefix("SERVER_STATE_").lower()


class _Server:
    """One address, and the process that a connection to it reached, with the beats of each shard
    set that it holds. The default set, whose beats also report on the process, comes first."""

    def __init__(
        self, endpoint: Endpoint, connect: Connect, timeout_s: float, clock: Clock
    ) -> None:
        self.endpoint = endpoint
        self.held: dict[bytes, _BeatHistory] = {}
        self.manifests: dict[bytes, Manifest] = {}
        self._connection: Connection | None = None
        self._connect = connect
        self._timeout_s = timeout_s
        self._clock = clock
        self._sequence = 0

    def _beat(self, shard_set: bytes = b"", shard: int = 0) -> _Beat:
        """Measures the shortest of up to `BEATS` round trips; one short trip is enough."""
        beat = self._beat_once(shard_set, shard)
        for _ in range(1, BEATS):
            if beat.round_trip_s <= HEARTBEATS.slow_floor_s:
                break
            with contextlib.suppress(DlmError):  # the server has already answered
                again = self._beat_once(shard_set, shard)
                least = min(beat.round_trip_s, again.round_trip_s)
                beat = replace(again, round_trip_s=least)
        return beat

    def measure_again(self) -> None:
        for shard_set, held in self.held.items():
            with contextlib.suppress(DlmError):
                beat = self._beat_once(shard_set, held.last.reply.shard)
                held.shorter(beat.round_trip_s)

    def _beat_once(self, shard_set: bytes = b"", shard: int = 0) -> _Beat:
        if self._connection is None:
            self._connection = self._connect(self.endpoint.address)
        self._sequence += 1
        begun = self._clock()
        request = pb.HeartbeatRequest(sequence=self._sequence, shard_set=shard_set, shard=shard)
        reply = self._connection.heartbeat(request, self._timeout_s)
        now = self._clock()
        return _Beat(now, reply, now - begun)

    def poll(self) -> list[Row]:
        try:
            beat = self._beat()
            self._take(beat)
            default = bytes(beat.reply.shard_set)
            described = None
            with contextlib.suppress(DlmError):  # heartbeats report what is wrong
                described = self._describe()
            if described is not None:
                others = [bytes(one) for one in described.shard_sets if bytes(one) != default]
                held = [default, *others[:MAX_SHARD_SETS]]
                self.held = {one: self.held[one] for one in held if one in self.held}
                for one in held[1:]:
                    # Another process of the port may hold other sets than the process that
                    # answered.
                    with contextlib.suppress(StaleShardSet):
                        self._take(self._beat(one, described.shard))
        except DlmError as exc:
            self.close()
            state = "refused" if isinstance(exc, AuthenticationError) else "silent"
            return [Row(self.endpoint.address, self.endpoint.shard, state, error=_text_of(exc))]
        return self.rows()

    def _take(self, beat: _Beat) -> None:
        """Notes a heartbeat; it counts as the first if a different process answered this time."""
        shard_set = bytes(beat.reply.shard_set)
        known = self.held.get(shard_set)
        if known is None or known.last.reply.instance != beat.reply.instance:
            self.held[shard_set] = _BeatHistory(beat)
        else:
            known.add(beat)

    def rows(self) -> list[Row]:
        """One row per shard set; figures of the whole process are only in the default set's row."""
        rows = [held.row(self.endpoint, self._model(one)) for one, held in self.held.items()]
        return rows[:1] + [replace(row, cpu_percent=None, memory_bytes=None) for row in rows[1:]]

    def _describe(self, shard_set: bytes = b"") -> pb.DescribeReply:
        assert self._connection is not None
        reply = self._connection.describe(self._timeout_s, shard_set)
        manifest = read_description(self.endpoint.address, reply)
        self.manifests[manifest.shard_set_bytes] = manifest
        return reply

    def _model(self, shard_set: bytes) -> str | None:
        if shard_set not in self.manifests:
            with contextlib.suppress(DlmError):
                self._describe(shard_set)
        found = self.manifests.get(shard_set)
        return found.model[:ID_DIGITS] if found else None

    def close(self) -> None:
        """Closes the connection, so that the next poll may reach another process of the port."""
        if self._connection is not None:
            self._connection.close()
            self._connection, self.held = None, {}


def _text_of(error: DlmError) -> str:
    return " ".join(str(error).split())


def mark_slow(rows: list[Row]) -> list[Row]:
    """Marks as slow the rows whose delay is far above that of another server of their shard."""
    least: dict[tuple[str | None, int | None], float] = {}
    for row in rows:
        if row.state == "ready" and row.delay_ms is not None:
            key = row.shard_set, row.shard
            least[key] = min(least.get(key, row.delay_ms), row.delay_ms)

    def is_behind(row: Row) -> bool:
        quickest = least.get((row.shard_set, row.shard))
        return (
            row.state == "ready"
            and row.delay_ms is not None
            and quickest is not None
            and behind(row.delay_ms / 1e3, quickest / 1e3, HEARTBEATS)
        )

    return [replace(row, slow=True) if is_behind(row) else row for row in rows]


class ClusterStatus:
    """Polls every server repeatedly; rates are known from the second poll on. With `fresh`, each
    poll makes new connections, to reach different processes of a port, and rates stay unknown."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        connect: Connect,
        timeout_s: float,
        *,
        model: str | None = None,
        rollout: Callable[[], Rollout | None] = lambda: None,
        fresh: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._model, self._rollout, self._fresh = model, rollout, fresh
        self._servers = [_Server(e, connect, timeout_s, clock) for e in endpoints]

    def poll(self) -> ClusterSnapshot:
        """Polls all servers at once; the failure of a server raises no error."""
        if self._fresh:
            self.close()
        with ThreadPoolExecutor(max_workers=min(len(self._servers), MAX_ASKED) or 1) as pool:
            rows = mark_slow([r for part in pool.map(_Server.poll, self._servers) for r in part])
        rows = self._remeasure_slow(rows)
        shards = {row.shard for row in rows if row.shard is not None}
        for server in self._servers:
            for manifest in server.manifests.values():
                shards |= set(range(manifest.shards))
        ready = {row.shard for row in rows if row.state == "ready"}
        refused = {row.shard for row in rows if row.state == "refused"}
        missing = set() if None in refused else shards - ready - refused
        return ClusterSnapshot(
            tuple(rows),
            tuple(sorted(shards)),
            tuple(sorted(missing)),
            bool(refused),
            self._unserved(rows),
            self._rollout(),
        )

    def _unserved(self, rows: Sequence[Row]) -> str | None:
        held = {name for row in rows for name in (row.model, row.shard_set) if name}
        if self._model is None or not held:
            return None
        beginning = self._model[:ID_DIGITS]
        return None if any(name.startswith(beginning) for name in held) else self._model

    def _remeasure_slow(self, rows: list[Row]) -> list[Row]:
        """Remeasures shards with rows that seem slow, one server at a time, and returns all rows.
        Measured all at once, the servers' delays would include waits for this process."""
        for _ in range(ROUNDS):
            shards = {(row.shard_set, row.shard) for row in rows if row.slow}
            if not shards:
                break
            asked = {row.address for row in rows if (row.shard_set, row.shard) in shards}
            again: dict[str, list[Row]] = {}
            for server in self._servers:
                if server.endpoint.address in asked and server.held:
                    server.measure_again()
                    again[server.endpoint.address] = server.rows()
            fresh = [row for part in again.values() for row in part]
            rest = [row for row in rows if row.address not in again]
            order = {server.endpoint.address: n for n, server in enumerate(self._servers)}
            rows = mark_slow(sorted([*rest, *fresh], key=lambda row: order[row.address]))
        return rows

    def close(self) -> None:
        for server in self._servers:
            server.close()
