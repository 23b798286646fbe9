"""Carries out what `after` decides about messages that failed, are late or are lost.

Runs on the loop, except for fetching a fresh table, on the helper thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from dlm.client.config.settings import ClientConfig
from dlm.client.deliver.after import (
    Decision,
    Elsewhere,
    Failed,
    GiveUp,
    Late,
    Later,
    Look,
    Looked,
    Move,
    NotYet,
    after,
)
from dlm.client.deliver.inbox import Inbox
from dlm.client.deliver.lanes import Lanes
from dlm.client.deliver.message import Attempt, Ends, Message, as_dlm_error, naming_shard
from dlm.client.deliver.replicas import Heard
from dlm.client.deliver.runtime import LOOK_AGAIN_S, Links, Runtime, closed_error
from dlm.client.deliver.sender import Sender
from dlm.client.deliver.table import Table, other_model
from dlm.client.health.cascade import MOVING_S
from dlm.errors import DeadlineExceeded, DlmError, StaleShardSet

MAX_REROUTES = 2  # a table that is stale twice in one call will not settle within it
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

    # -- what happened ------------------------------------------------------------------------

    def failed(self, message: Message, error: DlmError) -> None:
        """A server did not answer a message, or none could be asked."""
        runtime, now = message.runtime, self._clock()
        outcome = Failed(
            error,
            retries=runtime.retrying.saved,
            moving=self._is_moving(message, now),
            due=self._may_look(runtime),
            closed=self._links.closed,
        )
        self._carry_out(after(outcome, message, now), message, error)

    def _is_moving(self, message: Message, now: float) -> bool:
        """Whether a server of its shard is draining or warming up, or was lately."""
        runtime = message.runtime
        moving = {a for a, at in runtime.moving.items() if now - at < MOVING_S}
        if runtime.watch is not None:
            moving |= runtime.watch.moving
        return not moving.isdisjoint(message.replicas)

    def _may_look(self, runtime: Runtime) -> bool:
        """Whether the last look for the servers is long enough ago."""
        return self._clock() - runtime.looked >= LOOK_AGAIN_S

    def _looked(self, message: Message, error: DlmError, stale: bool = False) -> None:
        """The servers were asked again, if they could be, or a pause is over."""
        fresh = self._table.of(message.snapshot.model)
        wanted = not (self._links.closed or all(part.call.done() for part in message.parts))
        same = fresh is not None and fresh.shard_set == message.snapshot.shard_set
        if fresh is not None and same and wanted and not (stale or message.ended):
            message.snapshot = fresh
        self._carry_out(after(Looked(stale, same, wanted), message, self._clock()), message, error)

    def _late(self, attempt: Attempt) -> None:
        """A server has had a message for long; the first answer counts."""
        message, now = attempt.message, self._clock()
        runtime, watch = message.runtime, message.runtime.watch
        _, avoided, slow = self._sender.unwell(message)
        outcome = Late(
            since=attempt.since,
            # A part whose time is over no longer waits.
            until=min([p.deadline for p in message.parts if p.deadline > now], default=now),
            hedges=runtime.hedging.saved if self._config.hedging else 0.0,
            avoided=avoided,
            slow=slow,
            all_slow=watch is not None and message.shard in watch.slow_shards,
            heard=lambda others: {one: self._heard(runtime, one, now) for one in others},
            closed=self._links.closed,
        )
        decision = after(outcome, message, now)
        if isinstance(decision, NotYet):
            attempt.late_at = decision.at
        elif isinstance(decision, Elsewhere):
            self._ask(decision, message)

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

    # -- what is done -------------------------------------------------------------------------

    def _carry_out(self, decision: Decision, message: Message, error: DlmError) -> None:
        """Does what was decided; `error` is why."""
        runtime = message.runtime
        if isinstance(decision, Elsewhere):
            self._ask(decision, message)
        elif isinstance(decision, Later):
            message.tried, message.rounds = [], message.rounds + 1
            self._inbox.later(decision.pause_s, self._ask_again, message, error)
        elif isinstance(decision, Move):
            self._move(message, error)
        elif isinstance(decision, Look):
            if not self._help(self._look_for, message, error):
                self._give_up(message, error)
        elif isinstance(decision, GiveUp):
            if decision.look:
                runtime.looked = self._clock()
                self._help(self._table.refresh_quietly, message.snapshot)
            self._give_up(message, error)

    def _help(self, step: Callable[..., None], *args: Any) -> bool:
        """Runs a step on the helper thread; False if no thread can be started, or it has ended."""
        try:
            self._links.runtime.helper.submit(step, *args)
        except RuntimeError:
            return False
        return True

    def _give_up(self, message: Message, error: DlmError) -> None:
        self._ends.fail(message, closed_error() if self._links.closed else error)

    def _ask(self, how: Elsewhere, message: Message) -> None:
        """Sends a message to another server. It keeps its place in the lane."""
        runtime = message.runtime
        if how.limited:
            (runtime.hedging if how.hedge else runtime.retrying).spend()
        if how.hedge:
            runtime.counts.stats.hedges += 1
        else:
            runtime.counts.stats.retries += 1
        message.taken_over = message.taken_over or how.among is not None
        self._sender.send(message, hedge=how.hedge, among=how.among)

    def _ask_again(self, message: Message, error: DlmError) -> None:
        """After a pause: sends a message again, by the current table."""
        if not message.ended and self._may_look(message.runtime):
            self._table.refresh_later()
        self._looked(message, error)

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
            self._inbox.tell(self._looked, message, error, stale)

    def _move(self, message: Message, error: DlmError) -> None:
        """Frees the place of a message, and sends its parts by the current table."""
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
