"""The state of a cluster's servers: heartbeats of each process behind a port, for each model.

Several worker processes may share a port, and the system picks which of them a connection reaches.
So further connections are made until every worker was reached, or a limit of tries.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from dlm.client.config.cluster_file import Endpoint
from dlm.client.config.rollout import Rollout
from dlm.client.config.settings import HeartbeatConfig
from dlm.client.deliver.table import MAX_ASKED
from dlm.client.deliver.transport import Connect, Connection
from dlm.client.health.membership import FIRST_BEATS, Member, behind, measured
from dlm.client.health.modes import Mode
from dlm.client.plan.census import read_description
from dlm.errors import AuthenticationError, DlmError
from dlm.index.layout import Manifest
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.ids import MAX_SHARD_SETS

Clock = Callable[[], float]

HEARTBEATS = HeartbeatConfig()  # the clients' default
ID_DIGITS = 12
MAX_TRIES = 256
# Heartbeats of which the shortest counts: the first on a connection includes the handshake, and a
# delay of this machine must not count as the server's.
BEATS = 3
ROUNDS = 3  # one after another, before a server counts as slow compared with another


def tries_for(workers: int) -> int:
    """Connections to make before giving up on a worker that none of them reached.

    Each reaches one of n workers at random; 8 n + 8 of them miss one with a probability of
    n (1 - 1/n)^(8 n + 8): below 1 % for 30 workers, below 0.1 % for 8.
    """
    return min(8 * workers + 8, MAX_TRIES)


@dataclass(frozen=True, slots=True)
class Row:
    """A model that a server process holds, or a server that does not answer; None: not known (yet).

    shard          the shard it reports; the hint of cluster.toml while it is silent
    state          "warming", "ready", "draining"; "silent" if it does not answer, "refused" if it
                   does not let us ask
    worker, workers  number of the process on the port, from 0, and how many there are
    model, shard_set  their first 12 hex digits
    queries_per_s, messages_per_s  answered, between the last two beats
    refused        messages refused since it started
    failing_percent  share of the messages between the last two beats that it refused
    cpu_percent    of one core, between the last two beats;  memory_bytes  private memory
    round_trip_ms  of the last poll: the shortest of up to three beats, on an open connection
    delay_ms       the shortest of the last five round trips, as clients measure it
    delay_ratio    delay over its baseline, after eight beats; above 2, and 20 ms more, is slow
    slow           compared with its baseline, or with another server of its shard
    error          why the row has no data, or incomplete data
    """

    address: str
    shard: int | None
    state: str = "silent"
    worker: int | None = None
    workers: int | None = None
    model: str | None = None
    shard_set: str | None = None
    queries_per_s: float | None = None
    messages_per_s: float | None = None
    refused: int | None = None
    in_flight: int | None = None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    uptime_s: float | None = None
    round_trip_ms: float | None = None
    delay_ms: float | None = None
    delay_ratio: float | None = None
    failing_percent: float | None = None
    slow: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All rows of one poll, and what follows from them.

    shards   shards that there should be, as far as is known
    missing  of these, the shards without a ready server; not those that a server that refuses us
             may hold
    refused  whether a server does not let us ask
    unserved  the default model that cluster.toml names, if no server that answers holds it
    rollout  that cluster.toml describes
    """

    rows: tuple[Row, ...]
    shards: tuple[int, ...]
    missing: tuple[int, ...]
    refused: bool = False
    unserved: str | None = None
    rollout: Rollout | None = None

    @property
    def down(self) -> bool:
        """Whether no server is ready, so that it is not known which shards there should be."""
        return not self.refused and not any(row.state == "ready" for row in self.rows)

    @property
    def whole(self) -> bool:
        """Whether every server is ready, with all its workers, and so is every shard."""
        ready = all(row.state == "ready" and row.error is None for row in self.rows)
        return ready and not (self.missing or self.refused or self.down)

    @property
    def slow(self) -> tuple[int, ...]:
        """Shards that only slow servers answer for."""
        ready = [row for row in self.rows if row.state == "ready"]
        quick = {row.shard for row in ready if not row.slow}
        return tuple(sorted({row.shard for row in ready if row.shard is not None} - quick))

    @property
    def mode(self) -> Mode | None:
        """Which model clients with a local fallback use for new utterances, as far as heartbeats
        show (only clients know which of their messages fail); otherwise None if a server refuses
        us, or if none has the model that clients should use."""
        if self.missing or self.slow or self.down:
            return Mode.LOCAL_FALLBACK
        return None if self.refused or self.unserved else Mode.FULL

    def facts(self) -> dict[str, Any]:
        """As JSON: `servers` (rows, field by field), and the rest by its names here."""
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
    """The last two beats of one process for one shard set that it holds."""

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
            reply.worker if reply.workers else None,
            reply.workers or None,
            model,
            reply.shard_set.hex()[:ID_DIGITS],
            refused=reply.refused,
            in_flight=reply.in_flight,
            memory_bytes=reply.memory_bytes or None,
            uptime_s=reply.uptime_ms / 1000,
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


class _WorkerConnection:
    """A connection to one process.

    held  a shard set -> its beats; the default, which also reports on the process, first
    """

    def __init__(self, connection: Connection, beat: _Beat) -> None:
        self.connection = connection
        self.instance = beat.reply.instance
        self.shard = beat.reply.shard
        self.workers = beat.reply.workers
        self.held = {bytes(beat.reply.shard_set): _BeatHistory(beat)}

    def keep(self, shard_sets: Sequence[bytes]) -> None:
        """Forgets the beats of all other shard sets."""
        self.held = {one: self.held[one] for one in shard_sets if one in self.held}

    def record(self, shard_set: bytes, beat: _Beat) -> bool:
        """Takes a beat; false if another process answered it, or for another shard set."""
        reply = beat.reply
        if reply.instance != self.instance or bytes(reply.shard_set) != shard_set:
            return False
        found = self.held.get(shard_set)
        if found is None:
            self.held[shard_set] = _BeatHistory(beat)
        else:
            found.add(beat)
            self.workers = reply.workers
        return True


def _state(state: int) -> str:
    """The name of a `ServerState`; "unknown" if this version does not know it."""
    try:
        name: str = pb.ServerState.Name(state)
    except ValueError:
        return "unknown"
    return name.removeprefix("SERVER_STATE_").lower()


class _Server:
    """One address: the workers reached there, by their instance."""

    def __init__(
        self, endpoint: Endpoint, connect: Connect, timeout_s: float, clock: Clock
    ) -> None:
        self.endpoint = endpoint
        self.workers: dict[int, _WorkerConnection] = {}
        self.manifests: dict[bytes, Manifest] = {}
        self._connect = connect
        self._timeout_s = timeout_s
        self._clock = clock
        self._sequence = 0

    def _beat(self, connection: Connection, shard_set: bytes = b"", shard: int = 0) -> _Beat:
        """The shortest of up to `BEATS` round trips; one short beat is enough."""
        beat = self._beat_once(connection, shard_set, shard)
        for _ in range(1, BEATS):
            if beat.round_trip_s <= HEARTBEATS.slow_floor_s:
                break
            with contextlib.suppress(DlmError):  # it has already answered this poll
                again = self._beat_once(connection, shard_set, shard)
                least = min(beat.round_trip_s, again.round_trip_s)
                beat = replace(again, round_trip_s=least)
        return beat

    def measure_again(self) -> None:
        for worker in self.workers.values():
            for shard_set, held in worker.held.items():
                with contextlib.suppress(DlmError):
                    beat = self._beat_once(worker.connection, shard_set, worker.shard)
                    held.shorter(beat.round_trip_s)

    def _beat_once(self, connection: Connection, shard_set: bytes = b"", shard: int = 0) -> _Beat:
        self._sequence += 1
        begun = self._clock()
        request = pb.HeartbeatRequest(sequence=self._sequence, shard_set=shard_set, shard=shard)
        reply = connection.heartbeat(request, self._timeout_s)
        now = self._clock()
        return _Beat(now, reply, now - begun)

    def poll(self) -> list[Row]:
        """A beat of each known worker, and of others that can be found."""
        error: DlmError | None = None
        for instance, worker in list(self.workers.items()):
            try:
                if self._beat_all(worker):
                    continue
            except DlmError as exc:
                error = exc
            worker.connection.close()
            del self.workers[instance]
        expected = self._expected()
        end = self._clock() + self._timeout_s
        tries = 0
        while len(self.workers) < expected and tries < tries_for(expected):
            if tries and self._clock() >= end:
                break
            tries += 1
            try:
                self._meet()
            except DlmError as exc:
                error = exc
                break
            expected = self._expected()
        if not self.workers:
            state = "refused" if isinstance(error, AuthenticationError) else "silent"
            return [Row(self.endpoint.address, self.endpoint.shard, state, error=_text_of(error))]
        rows = self.rows()
        if len(self.workers) < expected:
            why = _text_of(error) if error else "no connection reached the others"
            note = f"{len(self.workers)} of {expected} workers answered: {why}"
            rows = [replace(row, error=note) for row in rows]
        return rows

    def rows(self) -> list[Row]:
        rows = [row for worker in self.workers.values() for row in self._rows(worker)]
        return sorted(rows, key=lambda row: row.worker or 0)

    def _expected(self) -> int:
        return max((w.workers for w in self.workers.values()), default=1) or 1

    def _beat_all(self, worker: _WorkerConnection) -> bool:
        """A beat of each shard set that a worker holds now; false if another process answers."""
        default, *others = worker.held
        with contextlib.suppress(DlmError):  # a beat says what is wrong
            reply = worker.connection.describe(self._timeout_s)
            self._learn(reply)
            default = bytes(reply.shard_set)
            others = [bytes(one) for one in reply.shard_sets if bytes(one) != default]
            worker.keep([default, *others[:MAX_SHARD_SETS]])
        return worker.record(default, self._beat(worker.connection)) and all(
            worker.record(one, self._beat(worker.connection, one, worker.shard))
            for one in others[:MAX_SHARD_SETS]
        )

    def _rows(self, worker: _WorkerConnection) -> list[Row]:
        """One per shard set; figures of the whole process appear only with the default."""
        rows = [
            held.row(self.endpoint, self._model(worker, shard_set))
            for shard_set, held in worker.held.items()
        ]
        return rows[:1] + [replace(row, cpu_percent=None, memory_bytes=None) for row in rows[1:]]

    def _meet(self) -> None:
        """Makes a connection; keeps it if it reached a new worker."""
        connection = self._connect(self.endpoint.address)
        kept = False
        try:
            beat = self._beat(connection)
            if beat.reply.instance not in self.workers:
                worker = _WorkerConnection(connection, beat)
                self._find_others(worker)
                self.workers[worker.instance] = worker
                kept = True
        finally:
            if not kept:
                connection.close()

    def _find_others(self, worker: _WorkerConnection) -> None:
        """The shard sets that a process holds besides its default; none if it does not say."""
        try:
            reply = worker.connection.describe(self._timeout_s)
            self._learn(reply)
            others = [bytes(one) for one in reply.shard_sets if bytes(one) not in worker.held]
            for one in others[:MAX_SHARD_SETS]:
                worker.record(one, self._beat(worker.connection, one, worker.shard))
        except DlmError:
            return

    def _learn(self, reply: pb.DescribeReply) -> None:
        manifest = read_description(self.endpoint.address, reply)
        self.manifests[manifest.shard_set_bytes] = manifest

    def _model(self, worker: _WorkerConnection, shard_set: bytes) -> str | None:
        if shard_set not in self.manifests:
            try:
                self._learn(worker.connection.describe(self._timeout_s, shard_set))
            except DlmError:
                return None
        found = self.manifests.get(shard_set)
        return found.model[:ID_DIGITS] if found else None

    def close(self) -> None:
        for worker in self.workers.values():
            worker.connection.close()


def _text_of(error: DlmError | None) -> str:
    return " ".join(str(error).split()) if error else "no answer"


def mark_slow(rows: list[Row]) -> list[Row]:
    """The rows, marked slow if their delay is far above that of another server of their shard."""
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
    """Polls every server repeatedly; rates are known from the second poll on.

    Args  endpoints  the servers, each once
          connect    makes a separate connection at every call
          timeout_s  for one heartbeat, and for reaching all workers of a server
          model      the default that cluster.toml names, if any
          rollout    returns the roll-out that it describes now, if any
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        connect: Connect,
        timeout_s: float,
        *,
        model: str | None = None,
        rollout: Callable[[], Rollout | None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._model, self._rollout = model, rollout
        self._servers = [_Server(e, connect, timeout_s, clock) for e in endpoints]

    def poll(self) -> ClusterSnapshot:
        """Polls all servers at once; a server's failure raises nothing."""
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
        """The rows, after measuring again what seems slow, one server after another.

        All at once, they also wait for this process: a delay of all, or of the last to get its
        turn, is not the servers' delay.
        """
        for _ in range(ROUNDS):
            shards = {(row.shard_set, row.shard) for row in rows if row.slow}
            if not shards:
                break
            asked = {row.address for row in rows if (row.shard_set, row.shard) in shards}
            again: dict[str, list[Row]] = {}
            for server in self._servers:
                if server.endpoint.address in asked and server.workers:
                    server.measure_again()
                    again[server.endpoint.address] = server.rows()
            notes = {row.address: row.error for row in rows}
            fresh = [
                replace(row, error=notes[row.address]) for part in again.values() for row in part
            ]
            rest = [row for row in rows if row.address not in again]
            order = {server.endpoint.address: n for n, server in enumerate(self._servers)}
            rows = mark_slow(sorted([*rest, *fresh], key=lambda row: order[row.address]))
        return rows

    def close(self) -> None:
        for server in self._servers:
            server.close()
