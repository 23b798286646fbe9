"""Decides when a message to a shard is sent, to which server, and what to do after its events.

These rules are pure; `lane` carries out the decisions. In the table, "it" is the message, and the
first matching row applies. The module has over 600 lines, since rules and tables belong together.

=======  ================================================  ========================================
outcome  while                                             then
=======  ================================================  ========================================
any      it has ended                                      Done
Failed   another server still has it                       Done; NotYet, if a third was not asked
Failed   one server failed, another was not asked          Elsewhere, if a token is left
Failed   a server stops or starts, another was not asked   Elsewhere
Failed   nobody was reached, and a server of its shard     Later
         stops or starts, or lately did
Failed   its slot table is stale; or no server is left to  Look
         ask, and the last look was long enough ago
Failed   otherwise                                         GiveUp
Looked   the table was stale, or its shard set changed     Move
Looked   a caller waits, and a server was not asked        Elsewhere
Looked   otherwise                                         GiveUp
Late     two servers have it                               Done
Late     another is well, some are fast, a token is left   Elsewhere, as a hedge
Late     half of its time is not over                      NotYet
Late     another server would answer in time               Elsewhere, once per message
Late     otherwise                                         NotYet: a server may answer again soon
=======  ================================================  ========================================

A message that failed or is late goes to no other server after its deadline, or once the client is
closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import inf
from random import Random
from typing import Any, NamedTuple, TypeAlias

from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    ProtocolError,
    ShardDown,
    StaleShardSet,
    UnavailableError,
)
from dlm.wire.status import MOVING_REASONS

# -------------------------------------------------------------------------------------------------
# These rules say which server of a shard is asked, when an answer is late, and what is sent twice.
#
# The loop owns their plain data, and passes in time (in seconds) and randomness. Paper: Dean and
# Barroso, The Tail at Scale, CACM 2013: a second request past a high percentile cuts the tail.


KEPT = 64  # number of answers that are remembered for each server
EACH = 8  # number of new answers after which the figures are recomputed
FORGET_S = 5.0  # the figures of a server that is silent for this long are forgotten
# Of `KEPT` times, this quantile is the second largest. With two servers, some 4 % of messages take
# longer than the lower of their quantiles, however busy the machine is. Messages earn tokens faster
# than that (`runtime.HEDGED`), so the tokens saved for a slow server are not spent earlier.
PERCENTILE = 0.99
# No message is late sooner than this: threads that compute can delay the loop's work on replies for
# this long.
LEAST_S = 0.005
# This time is assumed for a server's answers until the server has given enough answers.
UNKNOWN_S = 0.05
# A server counts as stalled once messages were late in STALLED consecutive pauses. It stops being
# stalled when it answers a message in less than twice the time that the last late one waited, or
# after STALLED_S, since it may have recovered. Its median would show a delay only after half of
# `KEPT` answers. If one pause were enough, any pause of a thread would move all load.
STALLED, STALLED_S = 3, 1.0


def choose(
    replicas: Sequence[str],
    outstanding: Mapping[str, int],
    avoided: frozenset[str],
    chance: Random,
    slow: frozenset[str] = frozenset(),
    *,
    missed: frozenset[str] = frozenset(),
    tried: frozenset[str] = frozenset(),
    stalling: frozenset[str] = frozenset(),
) -> str | None:
    """Returns a server or None: of two drawn at random, the one with fewer queries in flight.

    Args
        avoided      servers that are asked only if there is no other server
        slow         servers that are asked only if all others are avoided
        missed       avoided servers that were not reached lately; they are asked only after other
                     avoided servers, which may be draining and still answer
        tried        servers that had this message; they are asked only after all others
        stalling     servers that are asked only if all others stall or are slow
    Paper  Mitzenmacher 2001, the power of two choices: the longest of n queues grows as log log n
    """
    wanted = list(replicas)
    for worse in (tried, missed, avoided, slow, stalling):  # the strongest reason first
        wanted = [address for address in wanted if address not in worse] or wanted
    if len(wanted) <= 1:
        return wanted[0] if wanted else None
    first, second = chance.sample(wanted, 2)
    return second if outstanding.get(second, 0) < outstanding.get(first, 0) else first


class TokenBucket:
    """Limits how many messages are sent again, or to two servers: each message earns a share of a
    token, and at most `most` tokens are saved; a client starts with that many."""

    __slots__ = ("_most", "_share", "saved")

    def __init__(self, share: float, most: float) -> None:
        self._share = share
        self._most = self.saved = most

    def earn(self) -> None:
        self.saved = min(self.saved + self._share, self._most)

    def spend(self) -> bool:
        """Takes a token; False if none is left."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True


class Heard(NamedTuple):
    """What is known about a server that might take over a message: `within_s`, the time in which it
    answered nearly all recent messages or, failing that, heartbeats (inf if unknown); `silent_s`,
    how long its messages went unanswered; `misses`, if it missed one and answered none since."""

    within_s: float
    silent_s: float = 0.0
    misses: bool = False

    def would_answer(self, left_s: float) -> bool:
        in_time = self.within_s <= left_s and self.silent_s <= max(self.within_s, UNKNOWN_S)
        return in_time and not self.misses


def may_take_over(heard: Mapping[str, Heard], left_s: float) -> list[str]:
    """Returns the servers in `heard` that may take over a message which another server has had for
    half of the message's time. A slow or silent server may not: if all servers of a shard are slow,
    no message is sent twice."""
    return [address for address, one in heard.items() if one.would_answer(left_s)]


class Usual:
    """The latest answers of one server. `median_s`, and `late_s`, after which an answer is late,
    are inf until there are enough answers. `at`, the time of the last answer, begins as -inf."""

    __slots__ = (
        *("_late_at", "_lates", "_missed_at", "_new", "_times", "_waited_s"),
        *("at", "late_s", "median_s"),
    )

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)
        self._new = self._lates = 0
        self._waited_s = 0.0
        self.at = self._missed_at = self._late_at = -inf
        self.median_s = self.late_s = inf

    def note(self, took_s: float, now: float) -> None:
        if now - self.at > FORGET_S:
            self._times.clear()
            self._new = 0
            self.median_s = self.late_s = inf
        self.at = now
        if took_s < 2 * self._waited_s:
            self._lates = 0
        self._times.append(took_s)
        self._new += 1
        if self._new >= EACH:
            self._new = 0
            rising = sorted(self._times)
            self.median_s = rising[len(rising) // 2]
            self.late_s = rising[int(PERCENTILE * (len(rising) - 1))]

    def known(self, now: float) -> bool:
        return self.late_s < inf and now - self.at <= FORGET_S

    def late(self, waited_s: float, now: float) -> None:
        """Notes a message that was late after `waited_s`. Messages that the same pause of the
        server delayed count once."""
        if now - waited_s >= self._late_at:
            self._lates += 1
            self._waited_s, self._late_at = waited_s, now

    def stalls(self, now: float) -> bool:
        return self._lates >= STALLED and now - self._late_at <= STALLED_S

    def miss(self, now: float) -> None:
        self._missed_at = now

    def misses(self, now: float) -> bool:
        """Whether the server recently missed a message and has answered none since."""
        return self._missed_at > self.at and now - self._missed_at <= FORGET_S

    def within_s(self, now: float) -> float | None:
        """Returns the time in seconds that covers the server's last answer and nearly all of its
        recent ones; None if it answered no message lately."""
        if now - self.at > FORGET_S:
            return None
        return max(self.late_s, self._times[-1]) if self.late_s < inf else max(self._times)


def late_after(servers: Iterable[Usual], now: float) -> float:
    """Returns the seconds after which a message to a shard is late: `late_s` of the fastest server
    that does not stall (a stalled server has old figures) or, if all stall, of the slowest."""
    known = [one for one in servers if one.known(now)]
    slowest_s = max((one.late_s for one in known), default=UNKNOWN_S)
    late_s = min((one.late_s for one in known if not one.stalls(now)), default=slowest_s)
    return max(late_s, LEAST_S)


# Shortest and longest pause, in seconds, of a message that waits for a replica to become ready.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4


class Failed(NamedTuple):
    """A server failed to answer, or none could be asked. `retries` is the number of tokens left;
    `moving` is whether a server of the shard is stopping or starting, or recently was; `due` is
    whether the last look for the servers was long enough ago."""

    error: DlmError
    retries: float
    moving: bool
    due: bool
    closed: bool


class Looked(NamedTuple):
    """The servers were asked again what they hold, or the message waited for a server. If `stale`,
    the message's queries may be for other shards now; if `same`, its shard set is still in use."""

    stale: bool
    same: bool
    wanted: bool


class Late(NamedTuple):
    """A server has had the message for longer than usual, or for half of the message's time.

    until     the earliest deadline of a caller that still waits
    hedges    number of tokens left for late messages; 0 if hedging is off
    avoided, slow  servers that are not well, and servers that are slower than another server
    all_slow  whether all servers of the shard are slow, so that more work will not help
    heard     looks up what is known about some servers; called only if needed
    """

    since: float
    until: float
    hedges: float
    avoided: Set[str]
    slow: Set[str]
    all_slow: bool
    heard: Callable[[Set[str]], Mapping[str, Heard]]
    closed: bool


class Done(NamedTuple):
    """Do nothing."""


class Elsewhere(NamedTuple):
    """Ask another server (or stream), additionally or instead: one of `among`, or any server of the
    shard if that is None. For a `hedge`, the first answer counts. `limited` costs a token."""

    among: Sequence[str] | None = None
    hedge: bool = False
    limited: bool = False


class Later(NamedTuple):
    """Ask all servers once more, after a pause."""

    pause_s: float


class NotYet(NamedTuple):
    """Check at the time `at` whether the server that has the message is late."""

    at: float


class Look(NamedTuple):
    """Ask the servers what they hold; then continue with `Looked`."""


class Move(NamedTuple):
    """Route the message's parts again, by the current table."""


class Again(NamedTuple):
    """Ask the same server once more."""


class Alone(NamedTuple):
    """Send the message once more as a separate call, which will show what is wrong."""


class GiveUp(NamedTuple):
    """End the message with its error; if `look`, look for the servers, for later messages."""

    look: bool = False


Outcome: TypeAlias = Failed | Looked | Late
Decision: TypeAlias = Done | Elsewhere | Later | NotYet | Look | Move | GiveUp


def after(outcome: Outcome, message: Any, now: float) -> Decision:
    """Decides what to do with a message (a `lane.Message`) after an outcome."""
    if message.ended:
        return Done()
    if isinstance(outcome, Failed):
        return _after_failure(outcome, message, now)
    if isinstance(outcome, Late):
        return _after_delay(outcome, message, now)
    if outcome.stale:
        return Move()
    if not outcome.wanted:
        return GiveUp()
    if not outcome.same:
        return Move()
    return Elsewhere() if message.untried else GiveUp()


def _after_failure(outcome: Failed, message: Any, now: float) -> Decision:
    """Another server is asked once, within the budget. While servers drain or warm up, they are
    asked one after another, outside the budget, since that is not a failure.

    A damaged reply and rejected credentials are failures: the host or its tokens may be at fault. A
    server that has just become ready in a rolling restart may not be known yet, so the message
    waits. If servers are silent, callers get the error at once.
    """
    error = outcome.error
    if message.out:  # another server has the message; if that is slow, a third may get it
        return NotYet((now + message.deadline) / 2) if message.untried else Done()
    if outcome.closed:
        return GiveUp()
    moves = is_moving(error)
    if (
        isinstance(error, (UnavailableError, ProtocolError, AuthenticationError))
        and (moves or len(message.tried) == 1)
        and message.untried
        and now < message.deadline
        and (moves or outcome.retries >= 1.0)
    ):
        return Elsewhere(limited=not moves)
    gone = isinstance(error, ShardDown)
    pause_s = min(FIRST_PAUSE_S * 2.0**message.rounds, MAX_PAUSE_S)
    if gone and outcome.moving and now + pause_s < message.deadline:
        return Later(pause_s)
    if isinstance(error, StaleShardSet) or (outcome.due and gone and not message.untried):
        return Look()
    # The server may have moved: search for it, so that later calls reach it.
    return GiveUp(look=outcome.due and (gone or isinstance(error, DeadlineExceeded)))


def _after_delay(outcome: Late, message: Any, now: float) -> Decision:
    if len(message.out) != 1 or outcome.closed or now >= message.deadline:
        return Done()
    well = message.untried - outcome.avoided - outcome.slow
    if well and not outcome.all_slow and outcome.hedges >= 1.0:
        return Elsewhere(hedge=True, limited=True)
    if message.taken_over:
        return Done()
    half, left_s = (outcome.since + outcome.until) / 2, outcome.until - now
    if now < half:
        return NotYet(half)
    others = may_take_over(outcome.heard(message.untried - outcome.avoided), left_s)
    return Elsewhere(others) if others else NotYet(now + max(left_s / 2, LEAST_S))


def after_stream(
    wanted: bool, left_s: float, *, changed: bool, lost: bool
) -> Elsewhere | Alone | GiveUp:
    """Decides what to do with a message whose stream the server ended. `wanted` is whether a caller
    still waits; `changed`, whether the token has changed; `lost`, whether gRPC lost the reason."""
    if wanted and changed:
        return Elsewhere()
    return Alone() if wanted and lost and left_s > 0 else GiveUp()


def after_call(settled: bool, calls: int, left_s: float) -> Move | GiveUp:
    """Decides what to do with a call of an utterance whose model no server holds any longer.
    `settled` is whether the caller has states, ids or scores of that model; `calls` is the number
    of the utterance's calls that are running."""
    return GiveUp() if settled or calls > 1 or left_s <= 0.0 else Move()


def after_file(tries: int, *, wrong: bool, resumed: bool) -> Again | Elsewhere:
    """Decides what to do after a server sent a wrong or incomplete file. A broken download is
    resumed. If a wrong file was begun by another server, this one is asked for all of it."""
    return Elsewhere() if tries > 1 or (wrong and not resumed) else Again()


def after_files(error: UnavailableError, pause_s: float, left_s: float) -> Later | GiveUp:
    """Decides what to do after all servers failed to send a file: some may have been too busy."""
    return Later(pause_s) if error.retryable and pause_s < left_s else GiveUp()


def is_moving(error: DlmError) -> bool:
    """Whether a server refused because it is stopping or starting."""
    return getattr(error, "reason", None) in MOVING_REASONS


# -------------------------------------------------------------------------------------------------
# Queues decide when a message is sent: each has a shard's waiting parts and messages in flight.
# No queue waits or knows the time: the loop, which alone uses queues, passes the time in.
#
# Idle shards are asked at once. While a message is in flight to any shard of the set, parts of
# other calls gather. They are sent together when the last message comes back, since a call waits
# for its slowest shard, so batching needs no timer. If the last message takes twice the median time
# (`holds_s`), or if a shard's own message takes longer than usual, the shard's next message is
# sent, up to `limit`, so that neither a slow shard nor a stall holds up the others.
#
# =========  ======================================  =============================================
# event      while                                   then
# =========  ======================================  =============================================
# submit     nothing is in flight                    `take` gives it at once
# submit     something is in flight, to any shard    it waits
# submit     too much waits already                  refused, unless a part of its call was let in
# done       nothing is in flight; something waits   `take` gives it, as much as a message holds
# time       what is in flight is older than usual   `take` gives what waits, up to `limit` messages
# time       what waits is past its deadline         `expire` gives it
# =========  ======================================  =============================================
#
# The queue is bounded: in queries, by the size of a few messages; in time, by how fast the shard
# has answered lately (`Pace`). If the queries ahead would take half of the time that a new call
# has left, the call is refused at once, while its caller still has time for a fallback. Pace is
# ignored while nothing is in flight, so that a shard that was slow can prove fast again.
#
# Paper: DLM 3.3 merges the messages for one position of an utterance; merging them across
# utterances is our own addition.

MAX_QUEUED_ITEMS = 4096  # limit on waiting parts, even small ones: a caller waits for each part
# Limit on queries that wait for a shard: a few messages' worth, or MIN_WAITING if that is more.
MAX_WAITING_MESSAGES = 4
MIN_WAITING = 4096
# Busy seconds after which an observation counts half: much longer than one message, and much
# shorter than the minute that an operator needs to react.
HORIZON_S = 1.0
# The first answers are ignored: their times include connecting and waking up.
FIRST_ANSWERS = 8
# In a shard's pace, a message counts as at least this number of queries, since waiting queries are
# sent in larger messages.
LEAST_QUERIES = 256
# The estimated wait may take this share of the time left; the rest covers errors of the estimate.
PATIENCE = 0.5


class Pace(NamedTuple):
    """How fast a shard answers. `answers` is the number of messages answered since the start.
    `queries`, and the seconds `busy_s` in which anything was in flight, are sums in which older
    values count less. `at` is when the sums were last updated."""

    answers: int = 0
    queries: float = 0.0
    busy_s: float = 0.0
    at: float = 0.0

    def passed(self, now: float, busy: bool) -> Pace:
        answers, queries, busy_s, at = self
        if not busy:
            return Pace(answers, queries, busy_s, now)
        busy_s += now - at
        if busy_s > HORIZON_S:
            # However long the silence, keep half a horizon of busy time, and queries in proportion.
            keep = 0.5 * HORIZON_S / busy_s
            return Pace(answers, queries * keep, busy_s * keep, now)
        return Pace(answers, queries, busy_s, now)

    def answered(self, queries: int) -> Pace:
        answers = self.answers + 1
        if answers <= FIRST_ANSWERS:
            return Pace(answers, 0.0, 0.0, self.at)
        return Pace(answers, self.queries + max(queries, LEAST_QUERIES), self.busy_s, self.at)

    def seconds(self, queries: int, since_s: float = 0.0) -> float:
        """Estimates the seconds that `queries` queries will take, if the shard was also busy for
        `since_s` after `at`; 0 while too little is known."""
        return queries * (self.busy_s + since_s) / self.queries if self.queries > 0.0 else 0.0


# After an answer, the next parts of its callers are sent together if all arrive within `LEAST_S`,
# and within this many times the answer's duration; a later part waits for the others' messages.
AGAIN = 3.0


class Round:
    """Decides when all shards of a set are asked together: not while a message is in flight to any
    of them (the first was sent at `began`); and, if all answered callers asked again in time in the
    previous round, not before all have asked again."""

    __slots__ = ("_answered_at", "_came", "_expected", "_waits", "began", "under_way")

    def __init__(self) -> None:
        self.under_way = self._expected = self._came = 0
        self.began = self._answered_at = -inf
        self._waits = False

    def sent(self, now: float) -> None:
        if not self.under_way:
            self._waits = self._came >= self._expected
            self._came = self._expected = 0
            self.began = now
        self.under_way += 1

    def answered(self, callers: int, now: float) -> None:
        self._expected += callers
        self._answered_at = now

    def asked(self, now: float) -> None:
        self._came += now <= self._again_by

    @property
    def _again_by(self) -> float:
        return self._answered_at + min(AGAIN * (self._answered_at - self.began), LEAST_S)

    def free_at(self, usual_s: float) -> float:
        """Returns the time from which a waiting message may go to a shard with none in flight."""
        if self.under_way:
            return self.began + usual_s
        return self._again_by if self._waits and self._came < self._expected else -inf


class Queue:
    """One shard's queue of parts of calls, or of anything that has `queries` and a `deadline`.

    Args
        round        the round of all shards of its set
        limit        maximum number of messages in flight
        max_queries  maximum number of queries in a message; a larger part is sent alone
        usual_s      how long a message to this shard usually takes
    Attributes
        in_flight  maps a message's number to its count of queries; `asked` is the sum of the counts
        earliest   a time; no waiting part has an earlier deadline
    """

    __slots__ = (
        *("asked", "earliest", "holds_s", "in_flight", "limit", "max_queries", "max_waiting"),
        *("pace", "queued", "round", "usual_s", "waiting", "_last", "_next"),
    )

    def __init__(
        self, limit: int, max_queries: int, usual_s: float = inf, round_: Round | None = None
    ) -> None:
        self.round = round_ or Round()
        self.limit = limit
        self.usual_s = self.holds_s = usual_s
        self.max_queries = max_queries
        self.max_waiting = max(MAX_WAITING_MESSAGES * max_queries, MIN_WAITING)
        self.waiting: deque[Any] = deque()
        self.queued = self.asked = 0
        self.in_flight: dict[int, int] = {}
        self.earliest = inf
        self.pace = Pace()
        self._last = -inf  # when a message was last sent
        self._next = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.in_flight

    @property
    def ahead(self) -> int:
        return self.queued + self.asked

    def refuses(self, queries: int, deadline: float, now: float) -> bool:
        """Whether new work would be refused; any thread may ask."""
        full = self.queued >= self.max_waiting or len(self.waiting) >= MAX_QUEUED_ITEMS
        if full and (self.in_flight or self.round.under_way):
            return self.earliest > now  # work past its deadline makes room
        if not self.in_flight:
            return False
        ahead, pace = self.queued + self.asked + queries, self.pace
        return pace.seconds(ahead, now - pace.at) > PATIENCE * (deadline - now)

    def submit(self, work: Any) -> float:
        """Queues `work`, after the caller has asked `refuses`; returns when it is `due`."""
        self.waiting.append(work)
        self.queued += work.queries
        if work.deadline < self.earliest:
            self.earliest = work.deadline
        return self.due()

    def expire(self, now: float) -> list[Any]:
        if self.earliest > now:
            return []
        late = [work for work in self.waiting if work.deadline <= now]
        self.waiting = deque(work for work in self.waiting if work.deadline > now)
        self.queued = sum(work.queries for work in self.waiting)
        self.earliest = min((work.deadline for work in self.waiting), default=inf)
        return late

    def ready_at(self) -> float:
        """The time when a message may be sent; inf if nothing waits or too many are in flight."""
        if not self.waiting or len(self.in_flight) >= self.limit:
            return inf
        return self._last + self.usual_s if self.in_flight else -inf

    def due(self) -> float:
        """Returns when to check the queue next; inf if nothing waits."""
        at = self.ready_at()
        if at == -inf:
            # The message waits for other callers, but leaves early enough for the first deadline.
            at = min(self.round.free_at(self.holds_s), self.earliest - self.usual_s)
        return min(at, self.earliest)

    def take(self, now: float) -> tuple[int, list[Any]] | None:
        """Returns the number (for `done`) and the parts of the next message, if one may be sent."""
        if self.ready_at() > now:
            return None
        self.pace = self.pace.passed(now, busy=bool(self.in_flight))
        waiting, works, queries = self.waiting, list[Any](), 0
        while waiting and (not works or queries + waiting[0].queries <= self.max_queries):
            work = waiting.popleft()
            works.append(work)
            queries += work.queries
        self.queued -= queries
        self.asked += queries
        if not waiting:
            self.earliest = inf
        number = self._next
        self._next += 1
        self._last = now
        self.in_flight[number] = queries
        self.round.sent(now)
        return number, works

    def done(self, number: int, now: float, *, answered: bool = True, gone: bool = False) -> bool:
        """Notes that a message came back; returns False if it already had. The message shows the
        shard's pace only if `answered`. If `gone` (no server accepted the message or this client),
        the known pace is forgotten."""
        queries = self.in_flight.pop(number, None)
        if queries is None:
            return False
        self.round.under_way -= 1
        self.pace = self.pace.passed(now, busy=True)
        self.asked -= queries
        if gone:
            self.pace = Pace(at=now)
        elif answered:
            self.pace = self.pace.answered(queries)
        return True

    def drop(self, number: int) -> None:
        """Ends a message that shows nothing about the pace; it may have ended already."""
        if number in self.in_flight:
            self.asked -= self.in_flight.pop(number)
            self.round.under_way -= 1

    def clear(self) -> list[Any]:
        works = list(self.waiting)
        self.waiting.clear()
        self.queued, self.earliest = 0, inf
        return works
