"""A message and its attempts at servers; used only on the loop."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from dlm.client.deliver.call import Part, Place, own_copy
from dlm.client.deliver.lane import Lane
from dlm.client.deliver.runtime import Runtime, Snapshot
from dlm.client.deliver.transport import Withdraw
from dlm.client.plan import router
from dlm.errors import DlmError, ShardDown
from dlm.logs import EventLog

log = EventLog(__name__)

NAMED = 8  # most servers listed in an error


class Message:
    """Parts that travel together, from their lane to their end.

    Attributes
        place_of the places of its parts' queries in `groups`, if they share any
        tried    addresses that it was sent to since the last wait for servers
        soonest  the earliest deadline of its parts
        rounds   times that all servers were tried in vain, and waited for
        out      servers that have it now: one, or two if it was late
        failure  the last of a server
        taken_over  another server was asked after half of its time, which happens once
    """

    __slots__ = (
        *("asks", "checksum", "deadline", "encode_s", "ended", "failure", "groups", "lane"),
        *("number", "out", "parts", "place", "place_of", "queued", "replicas", "request"),
        *("rounds", "runtime", "shard", "snapshot", "soonest", "taken_over", "tried"),
    )

    def __init__(
        self,
        runtime: Runtime,
        place: Place,
        lane: Lane[Part],
        number: int,
        snapshot: Snapshot,
        parts: list[Part],
    ) -> None:
        self.runtime, self.place, self.lane, self.number = runtime, place, lane, number
        self.parts = parts
        self.shard, self.asks = place.shard, parts[0].call.asks
        # The latest deadline among them: an earlier caller stops waiting by itself.
        deadlines = [part.deadline for part in parts]
        self.deadline, self.soonest = max(deadlines), min(deadlines)
        self.queued = min([part.queued for part in parts])
        self.groups, self.place_of = router.gather([part.groups for part in parts])
        self.request, self.checksum = b"", 0
        self.encode_s = 0.0
        self.use(snapshot)
        self.tried: list[str] = []
        self.rounds = 0
        self.out: list[Attempt] = []
        self.failure: DlmError | None = None
        self.ended = self.taken_over = False

    def use(self, snapshot: Snapshot) -> None:
        """Sends it by this table, which has the same shards."""
        self.snapshot = snapshot
        self.replicas: Sequence[str] = snapshot.topology.addresses.get(self.shard, ())

    @property
    def untried(self) -> set[str]:
        return set(self.replicas).difference(self.tried)


class Attempt:
    """A message at one server, or on its way to it; `hedge` if it is the second server. `since` is
    when it was sent or, until there is a connection, started; `late_at`, when to decide whether
    another server is asked as well, inf for never."""

    __slots__ = (
        *("address", "hedge", "late", "late_at", "message", "queue_s", "replied", "sent", "since"),
        *("since_s", "withdraw"),
    )

    def __init__(self, message: Message, address: str, since: float, *, hedge: bool) -> None:
        self.message, self.address, self.since, self.hedge = message, address, since, hedge
        self.since_s = self.queue_s = 0.0
        self.late_at = inf
        self.sent = self.replied = self.late = False
        self.withdraw: Withdraw | None = None


def naming_shard(error: DlmError, message: Message) -> DlmError:
    """A `ShardDown` with its shard, the shard's servers, what was found, and what to do."""
    if type(error) is not ShardDown:
        return error  # also if the client was closed
    topology, found = message.snapshot.topology, str(error).rstrip(".")
    servers = message.replicas
    if servers:
        more = f" and {len(servers) - NAMED} more" if len(servers) > NAMED else ""
        found = f"none of its servers ({', '.join(servers[:NAMED])}{more}) answers: {found}"
    said = own_copy(error)
    said.args = (
        f"shard {message.shard} of shard set {topology.manifest.shard_set}: {found}. Run `dlm "
        "status` to see their state, and start one",
    )
    return said


def as_dlm_error(error: Exception, shard: int | None = None) -> DlmError:
    """The error for a message if something was raised; logs it unless it is a `DlmError`."""
    if isinstance(error, DlmError):
        return error
    # If a bigram fallback answers instead, this is the only report.
    log.error("client.message.failed", extra={"shard": shard, "error": type(error).__name__})
    where = "" if shard is None else f"shard {shard}: "
    wrapped = DlmError(
        f"{where}a message could not be encoded or decoded: {error!r}; retry, and report it if it "
        "stays"
    )
    wrapped.__cause__ = error
    return wrapped
