"""Handles messages that failed, are late or lost: sends them again, moves them, or ends them.

Runs on the loop, except for fetching a fresh table, on the helper thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from dlm.client.api.config import ClientConfig
from dlm.client.deliver.inbox import Inbox
from dlm.client.deliver.lanes import Lanes
from dlm.client.deliver.message import Attempt, Ends, Message, as_dlm_error, naming_shard
from dlm.client.deliver.pace import LEAST_S
from dlm.client.deliver.replicas import Heard, may_hedge, may_take_over
from dlm.client.deliver.runtime import LOOK_AGAIN_S, Links, Runtime, closed_error
from dlm.client.deliver.sender import Sender
from dlm.client.health.cascade import MOVING_S
from dlm.client.plan.table import Table, other_model
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

MAX_REROUTES = 2  # a table that is stale twice in one call will not settle within it
# Between two rounds of a message that waits for a replica that is about to be ready.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4
# A message is lost this long after its deadline: connections end messages by their deadline, plus
# the time that a busy machine needs.
LOST_S = 1.0


@dataclass(eq=False)
class Retries:
    """Handles messages that failed or are late."""

    _config: ClientConfig
    _links: Links
    _table: Table
    _clock: Callable[[], float]
    _inbox: Inbox
    _lanes: Lanes
    _sender: Sender
    _ends: Ends

    def failed(self, message: Message, error: DlmError) -> None:
        """Tries another server or a fresh table for a failed message if that helps, or ends it."""
        if message.ended or message.out:
            return  # another server still has it
        runtime, now = message.runtime, self._clock()
        if self._ask_another(message, error, now) or self._ask_later(message, error, now):
            return
        due, gone = self._may_look(runtime), isinstance(error, ShardDown)
        try:
            self._links.check_open()
            if isinstance(error, StaleShardSet) or (due and gone and not message.untried):
                runtime.helper.submit(self._look_for, message, error)
                return
            if due and (gone or isinstance(error, DeadlineExceeded)):
                # It may have returned elsewhere; the next calls will know.
                runtime.looked = now
                runtime.helper.submit(self._table.refresh_quietly, message.snapshot)
        except (RuntimeError, ShardDown):
            if self._links.closed:
                error = closed_error()
        self._ends.fail(message, error)

    def _ask_another(self, message: Message, error: DlmError, now: float) -> bool:
        """Sends a failed message to another replica, once; whether it did.

        If the server is draining or warming up, it tries one replica after another, outside the
        budget: that is not a failure, and there are only so many.
        It also retries after a damaged reply: the server's host, or the way to it, may be at fault;
        and if it is refused: that server may have old tokens.
        The message keeps its place in the lane. A Score changes nothing, so it does no harm if the
        first is answered after all.
        """
        runtime = message.runtime
        if (
            not isinstance(error, (UnavailableError, ProtocolError, AuthenticationError))
            or (len(message.tried) != 1 and not is_moving(error))
            or not message.untried
            or now >= message.deadline
            or self._links.closed
            or not (is_moving(error) or runtime.retrying.spend())
        ):
            return False
        runtime.counts.stats.retries += 1
        self._sender.send(message)
        return True

    def _ask_later(self, message: Message, error: DlmError, now: float) -> bool:
        """Sends a message that no server takes again soon, if there is time; whether it does.

        Only if a server of the shard is draining or warming up, or was lately: they are being
        rolled, and one that has just become ready may not be known yet. If servers are silent,
        callers get the error at once.
        """
        runtime = message.runtime
        pause = min(FIRST_PAUSE_S * 2.0**message.rounds, MAX_PAUSE_S)
        if not isinstance(error, ShardDown) or now + pause >= message.deadline:
            return False
        moving = {a for a, at in runtime.moving.items() if now - at < MOVING_S}
        if runtime.watch is not None:
            moving |= runtime.watch.moving
        if self._links.closed or moving.isdisjoint(message.replicas):
            return False
        message.tried, message.rounds = [], message.rounds + 1
        self._inbox.later(pause, self._ask_now, message, error)
        return True

    def _ask_now(self, message: Message, error: DlmError) -> None:
        """After a pause: sends a message again, by the current table."""
        if not message.ended and self._may_look(message.runtime):
            self._table.refresh_later()
        self._ask_untried(message, error)

    def _may_look(self, runtime: Runtime) -> bool:
        """Whether the last look for the servers is long enough ago."""
        return self._clock() - runtime.looked >= LOOK_AGAIN_S

    def _look_for(self, message: Message, error: DlmError) -> None:
        """On the helper thread: fetches the table, and sends the parts by it."""
        stale = isinstance(error, StaleShardSet)
        try:
            if self._table.of(message.snapshot.model) is message.snapshot and (
                stale or self._may_look(message.runtime)
            ):
                # Half of the time left, so that the other half remains for asking again.
                allowed = max((message.deadline - self._clock()) / 2, 0.05)
                self._table.refresh(message.snapshot, min(allowed, self._config.connect_s))
        except Exception as exc:  # noqa: BLE001 - a helper thread must never leave a caller waiting
            if type(exc) is not type(error):  # otherwise it says the same
                error.add_note(f"looking for the servers again failed too: {exc}")
            self._inbox.tell(self._ends.fail, message, error)
        else:
            self._inbox.tell(self._move if stale else self._ask_untried, message, error)

    def _ask_untried(self, message: Message, error: DlmError) -> None:
        """Sends a message to a server that it was not sent to, if the current table has one."""
        if message.ended:
            return
        if self._links.closed or all(part.call.done() for part in message.parts):
            self._ends.fail(message, error)
            return
        fresh = self._table.of(message.snapshot.model)
        if fresh is None or fresh.shard_set != message.snapshot.shard_set:
            self._move(message, error)
            return
        message.snapshot = fresh
        if message.untried:
            message.runtime.counts.stats.retries += 1
            self._sender.send(message)
        else:
            self._ends.fail(message, error)

    def _move(self, message: Message, error: DlmError) -> None:
        """Frees the place of a message, and sends its parts by the current table."""
        if message.ended:
            return
        fresh = self._table.of(message.snapshot.model)
        for part in message.parts:
            try:
                if fresh is None:
                    found = self._table.snapshot().model
                    part.call.miss(part, other_model(found, part.call.model))
                elif part.reroutes >= MAX_REROUTES:
                    part.call.miss(part, naming_shard(error, message))
                elif not part.ended:
                    part.reroutes += 1
                    self._lanes.route(fresh, part)
            except Exception as exc:  # noqa: BLE001 - the other parts must end, too
                part.call.miss(part, as_dlm_error(exc, message.shard))
        self._ends.fail(message, error, counts=False)

    def look(self, runtime: Runtime, now: float) -> float:
        """Finds the messages that are late or lost by now; returns the next time."""
        next_at = inf
        for message in list(runtime.under_way):
            for attempt in list(message.out):
                if attempt.late_at <= now:
                    attempt.late_at = inf
                    self._inbox.step(self._late, attempt)
                next_at = min(next_at, attempt.late_at)
            lost_at = message.deadline + LOST_S
            if lost_at <= now:
                self._inbox.step(self._lose, message)
            else:
                next_at = min(next_at, lost_at)
        return next_at

    def _lose(self, message: Message) -> None:
        """Ends a message whose deadline is long past: a connection was silent, or took too long."""
        lost = DeadlineExceeded(f"shard {message.shard}: a message got no reply and no error")
        for attempt in list(message.out):
            if attempt.withdraw is not None:
                attempt.withdraw()
            self._sender.outcomes.replied(attempt, None, lost)
        self._ends.fail(message, lost)

    def _late(self, attempt: Attempt) -> None:
        """Sends a late message to another server as well: at once if few are late, otherwise after
        half of its time. The first answer counts."""
        message, now = attempt.message, self._clock()
        if message.ended or len(message.out) != 1 or self._links.closed or now >= message.deadline:
            return
        runtime, watch = message.runtime, message.runtime.watch
        _, avoided, slow = self._sender.unwell(message)
        all_slow = watch is not None and message.shard in watch.slow_shards
        unwell, bucket = avoided | slow, runtime.hedging
        if self._config.hedging and may_hedge(
            message.replicas, message.tried, unwell, bucket, all_slow=all_slow
        ):
            runtime.counts.stats.hedges += 1
            self._sender.send(message, hedge=True)
            return
        if message.taken_over:
            return  # once per message
        # A part whose time is over no longer waits.
        deadline = min([p.deadline for p in message.parts if p.deadline > now])
        attempt.late_at = (attempt.since + deadline) / 2
        if now < attempt.late_at:
            return
        unasked = message.untried.difference(avoided)
        heard = {address: self._heard(runtime, address, now) for address in unasked}
        others = may_take_over(heard, deadline - now)
        if others:
            attempt.late_at, message.taken_over = inf, True
            runtime.counts.stats.retries += 1
            self._sender.send(message, among=others)
        else:  # one of them may answer again soon
            attempt.late_at = now + max((deadline - now) / 2, LEAST_S)

    def _heard(self, runtime: Runtime, address: str, now: float) -> Heard:
        """What is known about the answers of a server."""
        usual, watch = runtime.usual[address], runtime.watch
        within_s = usual.within_s(now)
        if within_s is None:
            within_s = inf if watch is None else watch.delay_s(address)
        oldest = min(
            (a.since for m in runtime.under_way for a in m.out if a.sent and a.address == address),
            default=now,
        )
        return Heard(within_s, now - max(oldest, usual.at), usual.misses(now))


def is_moving(error: DlmError) -> bool:
    """Whether a server refused because it is stopping or starting."""
    return getattr(error, "reason", None) in MOVING_REASONS
