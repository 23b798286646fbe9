"""What is done about a message after something has happened to it: decided here, and only here.

Pure; `lane` carries the decisions out. The first row that fits counts.

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
Looked   the table was stale, or its shard set is another  Move
Looked   a caller waits, and a server was not asked        Elsewhere
Looked   otherwise                                         GiveUp
Late     two servers have it                               Done
Late     another is well, and few messages are late        Elsewhere, as a hedge: if a token is left
Late     half of its time is not over                      NotYet
Late     another server would answer in time               Elsewhere, once per message
Late     otherwise                                         NotYet: one of them may answer again soon
=======  ================================================  ========================================

A message that failed or is late goes to no other server after its deadline, nor once the client is
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
# Which server of a shard is asked, when its answer is late, and how many messages are sent twice.
#
# Plain data, owned by the loop; time (in seconds) and randomness are passed in. Paper: Dean and
# Barroso, The Tail at Scale, CACM 2013: a second request after a high percentile removes the tail.


KEPT = 64  # answers that are remembered
EACH = 8  # answers after which the figures are recomputed
FORGET_S = 5.0  # the figures of a server that is silent for this long are forgotten
# The second largest of those kept: some 4 % of messages exceed that of the faster of two servers,
# however busy the machine. They earn more (`runtime.HEDGED`), so what is saved for a server that
# becomes slow is not spent before.
PERCENTILE = 0.99
# Under this no message is late: threads that compute keep the loop from its replies for as long.
LEAST_S = 0.005
# What a server is taken for until enough of its answers came.
UNKNOWN_S = 0.05
# A server stalls once so many of its messages in a row were late, until it answers one in less than
# twice that time or, as it may be well again, for so long: its median shows a delay only after half
# of `KEPT` answers. Were a single late message enough, any pause of a thread would move all load.
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
    """The server to ask, None if there is none: of two drawn at random, the one with fewer queries
    outstanding.

    Args
        avoided      asked only if there is no other
        slow         asked only if all others are avoided
        missed       avoided servers that were not reached lately: asked only after other avoided
                     ones, which may be draining and still answer
        tried        by this message: asked only after all others
        stalling     asked only if all others are, or are slow
    Paper  Mitzenmacher 2001, the power of two choices: the longest queue is doubly logarithmic
    """
    wanted = list(replicas)
    for worse in (tried, missed, avoided, slow, stalling):  # the strongest reason first
        wanted = [address for address in wanted if address not in worse] or wanted
    if len(wanted) <= 1:
        return wanted[0] if wanted else None
    first, second = chance.sample(wanted, 2)
    return second if outstanding.get(second, 0) < outstanding.get(first, 0) else first


class TokenBucket:
    """Limits how many messages are sent again, or to two servers: each earns a share of a token,
    and at most so many are saved; a client starts with all of them."""

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
    """What is known about a server that might take over a message: in which time it answered nearly
    all of its latest messages or, without any, heartbeats (inf if neither); how long it has
    answered none that it has; and whether it lately missed one and has answered none since."""

    within_s: float
    silent_s: float = 0.0
    misses: bool = False

    def would_answer(self, left_s: float) -> bool:
        in_time = self.within_s <= left_s and self.silent_s <= max(self.within_s, UNKNOWN_S)
        return in_time and not self.misses


def may_take_over(heard: Mapping[str, Heard], left_s: float) -> list[str]:
    """Which servers, up and not asked yet, may take over a message that one has kept for half of
    its time. Never one that is slow or silent itself: if all of a shard are, no message is sent
    twice."""
    return [address for address, one in heard.items() if one.would_answer(left_s)]


class Usual:
    """The latest answers of one server; `late_s`, the percentile after which an answer is late, and
    the median are inf while too few came, and `at` -inf before the first."""

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
        """A message was late: it had been there for `waited_s`. Of those that one pause of the
        server made late, one counts."""
        if now - waited_s >= self._late_at:
            self._lates += 1
            self._waited_s, self._late_at = waited_s, now

    def stalls(self, now: float) -> bool:
        return self._lates >= STALLED and now - self._late_at <= STALLED_S

    def miss(self, now: float) -> None:
        self._missed_at = now

    def misses(self, now: float) -> bool:
        """Whether it lately missed a message and has answered none since."""
        return self._missed_at > self.at and now - self._missed_at <= FORGET_S

    def within_s(self, now: float) -> float | None:
        """Seconds in which it answered nearly all of its latest messages, and the last one; None if
        it answered none lately."""
        if now - self.at > FORGET_S:
            return None
        return max(self.late_s, self._times[-1]) if self.late_s < inf else max(self._times)


def late_after(servers: Iterable[Usual], now: float) -> float:
    """Seconds after which a message to a shard is late: the percentile of its fastest server, but
    not of one that stalls, whose answers are from before; if all do, of the slowest."""
    known = [one for one in servers if one.known(now)]
    slowest_s = max((one.late_s for one in known), default=UNKNOWN_S)
    late_s = min((one.late_s for one in known if not one.stalls(now)), default=slowest_s)
    return max(late_s, LEAST_S)


# Between two rounds of a message that waits for a replica that is about to be ready.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4


class Failed(NamedTuple):
    """A server failed to answer, or none could be asked. `retries` are tokens left; `moving` is
    whether a server of the shard is stopping or starting, or lately was; `due`, whether the last
    look for the servers is long enough ago."""

    error: DlmError
    retries: float
    moving: bool
    due: bool
    closed: bool


class Looked(NamedTuple):
    """The servers were asked again what they hold, or it has waited for one. `stale` if its own
    table was, so its queries may be of other shards; `same` if its shard set is still in use."""

    stale: bool
    same: bool
    wanted: bool


class Late(NamedTuple):
    """A server has had it for longer than usual, or for half of its time.

    until     the earliest deadline of a caller that still waits
    hedges    tokens left for late messages; 0 if hedging is off
    avoided   servers that are not well;  slow  slower than another
    all_slow  all of the shard are, so more work will not help
    heard     what is known about some servers; looked up only if that matters
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
    """Nothing is to be done."""


class Elsewhere(NamedTuple):
    """Another server (or stream) is asked, too or instead: among some, or all of the shard if None.
    If it is a `hedge`, the first answer counts; if `limited`, it takes a token."""

    among: Sequence[str] | None = None
    hedge: bool = False
    limited: bool = False


class Later(NamedTuple):
    """All servers are asked once more, after a pause."""

    pause_s: float


class NotYet(NamedTuple):
    """At this time it is asked whether the server that has it is late."""

    at: float


class Look(NamedTuple):
    """The servers are asked what they hold; then it goes on, as `Looked`."""


class Move(NamedTuple):
    """Its parts are routed anew, by the current table."""


class Again(NamedTuple):
    """The same server is asked once more."""


class Alone(NamedTuple):
    """It is sent once more as a separate call, which will show what is wrong."""


class GiveUp(NamedTuple):
    """It ends with its error; `look`, if the next messages need to know where the servers are."""

    look: bool = False


Outcome: TypeAlias = Failed | Looked | Late
Decision: TypeAlias = Done | Elsewhere | Later | NotYet | Look | Move | GiveUp


def after(outcome: Outcome, message: Any, now: float) -> Decision:
    """What is done about a message, a `lane.Message`."""
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
    """Another server is asked once, within the budget. While servers drain or warm up, one after
    another is, outside the budget: that is not a failure, and there are only so many.

    A damaged reply and rejected credentials count, too: the host or its tokens may be at fault. A
    server that has just become ready in a rolling restart may not be known yet, so the message
    waits. If servers are silent, callers get the error at once.
    """
    error = outcome.error
    if message.out:  # another server still has it: if it keeps it, the third may get it
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
    # It may have returned elsewhere; the next calls will know.
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
    """What is done with a message whose stream the server has ended: `wanted` if anybody waits for
    its answer, `changed` if the token has since then, `lost` if gRPC lost the reason."""
    if wanted and changed:
        return Elsewhere()
    return Alone() if wanted and lost and left_s > 0 else GiveUp()


def after_call(settled: bool, calls: int, left_s: float) -> Move | GiveUp:
    """What is done with a call of an utterance whose model no server holds any longer: `settled` if
    its caller has states, ids or scores of that model; `calls` of the utterance are in progress."""
    return GiveUp() if settled or calls > 1 or left_s <= 0.0 else Move()


def after_file(tries: int, *, wrong: bool, resumed: bool) -> Again | Elsewhere:
    """What is done after a server sent a file wrong, or not all of it: a broken download is
    resumed, and one that was begun elsewhere and turns out wrong is fetched whole."""
    return Elsewhere() if tries > 1 or (wrong and not resumed) else Again()


def after_files(error: UnavailableError, pause_s: float, left_s: float) -> Later | GiveUp:
    """What is done after all servers failed to send a file: some may have been too busy."""
    return Later(pause_s) if error.retryable and pause_s < left_s else GiveUp()


def is_moving(error: DlmError) -> bool:
    """Whether a server refused because it is stopping or starting."""
    return getattr(error, "reason", None) in MOVING_REASONS
