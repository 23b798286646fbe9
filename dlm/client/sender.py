"""The parts of calls on their way: into the window of their shard, out in a message, and back.

One file past 500 lines: every path here ends each part of a call exactly once and gives its
place in a window back exactly once, and that is seen only with all of them in one place.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client import batcher, router
from dlm.client.asks import SCORES, Asks
from dlm.client.call import Call, Item, deliver
from dlm.client.cascade import MOVING_S
from dlm.client.config import ClientConfig
from dlm.client.metrics import result_of
from dlm.client.pace import PATIENCE
from dlm.client.partial import Outage, allows_fallback
from dlm.client.replicas import choose
from dlm.client.runtime import LOOK_AGAIN_S, Links, Place, Snapshot, closed_error
from dlm.client.security import Metadata
from dlm.client.table import Table
from dlm.client.topology import dedupe_faults
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
    UnavailableError,
)
from dlm.logs import EventLog
from dlm.ngram.query import QueryGroups
from dlm.tracing import Tracer
from dlm.wire.status import MOVING_REASONS

log = EventLog(__name__)

MAX_REROUTES = 2  # a table that is stale twice in one call is not going to settle within it
# What may wait for a shard: a few messages' worth, and however small these are, some queries.
MAX_WAITING_MESSAGES = 4
MIN_WAITING = 4096
FIRST_TRY = 0.5  # part of the time left that one replica gets where another could be asked
# Between two rounds of a message that waits for a replica which is about to be there.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4
AVOID_S = 1.0  # for so long, a server where a message found nobody is asked after all others


@dataclass(frozen=True, slots=True)
class _Message:
    """Items that share message `number` of a window.

    tried    addresses that it was sent to; the last is the one that has it now
    rounds   times that all of them were tried in vain, and were waited for
    """

    snapshot: Snapshot
    shard: int
    items: list[Item]
    merged: router.Grouped
    number: int
    tried: tuple[str, ...] = ()
    rounds: int = 0

    @property
    def place(self) -> Place:
        """The window that it has a place of."""
        return Place(self.snapshot.shard_set, self.shard, self.asks.name)

    @property
    def asks(self) -> Asks:
        """What its items ask, all the same."""
        return self.items[0].call.asks


_Event: TypeAlias = "batcher.Submit[Item] | batcher.Done"


class _Turn(threading.local):
    """Events that this thread has still to feed to windows; None while it feeds none."""

    events: deque[tuple[Sender, Place, _Event]] | None = None


_turn = _Turn()


def begin_turn() -> None:
    """A call begins outside of any turn: an exception from a signal handler may have cut off the
    last one of this thread just where nothing could clear it."""
    _turn.events = None


os.register_at_fork(after_in_child=begin_turn)


class Sender:
    """Sends what is asked of shards, and ends it.

    Args
        table   what says who has which shard
        tracer  None where calls are no spans
    """

    def __init__(
        self,
        config: ClientConfig,
        links: Links,
        table: Table,
        clock: Callable[[], float],
        tracer: Tracer | None,
    ) -> None:
        self._config = config
        self._links = links
        self._table = table
        self._clock = clock
        self._tracer = tracer

    def overload(
        self, snapshot: Snapshot, asked: Mapping[int, int], deadline: float, asks: Asks = SCORES
    ) -> Overloaded | None:
        """What a call is told at once where a shard that it asks has too much to do already.

        Before any work, or before any of it is sent: whoever refuses many calls must have time left
        for those it answers, and what one shard answers is of no use where another refuses.

        Args
            asked  queries of each shard of `snapshot`
        """
        runtime = self._links.runtime
        now = self._clock()
        with runtime.lock:
            for shard, queries in asked.items():
                window = runtime.windows.get(Place(snapshot.shard_set, shard, asks.name))
                if (
                    window is not None
                    and window.refuses(queries, deadline, now)
                    # What ran out meanwhile makes room; the next event of the window finds it.
                    and window.earliest > now
                    and all(lease.until > now for lease in window.leases)
                ):
                    return _too_much(shard, window, queries, deadline - now)
        return None

    def dispatch(
        self,
        snapshot: Snapshot,
        call: Call,
        groups: QueryGroups,
        remote: NDArray[np.bool_],
        at: NDArray[np.int64] | None,
        reroutes: int,
        let_in: bool = False,
    ) -> None:
        """Queues the remote part of `groups`, whose words stand at `at` in the call (None: at
        their own places).

        What has a place of its own in a call was let in before, and is not refused any more.

        Args
            let_in  this is not refused either
        """
        try:
            self._dispatch(snapshot, call, groups, remote, at, reroutes, let_in)
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            error = _as_dlm_error(exc)
            try:
                self.give_up(call, error)
            finally:
                call.fail(error)  # unless the partial model has ended it

    def _dispatch(
        self,
        snapshot: Snapshot,
        call: Call,
        groups: QueryGroups,
        remote: NDArray[np.bool_],
        at: NDArray[np.int64] | None,
        reroutes: int,
        let_in: bool,
    ) -> None:
        limit, now = self._max_queries(snapshot), time.perf_counter()
        manifest = snapshot.topology.manifest
        pieces = list(router.route(groups, remote, manifest.slots, manifest.shards, limit))
        asked: Counter[int] = Counter()
        for piece in pieces:
            asked[piece.shard] += len(piece.groups.words)
        refused: dict[int, Overloaded] = {}
        let_in = let_in or at is not None
        if not let_in:
            for shard, queries in asked.items():
                refusal = self.overload(snapshot, {shard: queries}, call.deadline, call.asks)
                if refusal is not None and not self._config.partial:
                    call.fail(refusal)
                    return
                if refusal is not None:
                    refused[shard] = refusal
        begun = set()
        for piece in pieces:
            if piece.shard in refused:
                # What the other shards answer is of use all the same.
                refusal = refused[piece.shard]
                self.count_partial(call.model, call.miss(piece, refusal), refusal, piece.shard)
                continue
            if at is not None:
                piece = router.Piece(piece.shard, piece.groups, at[piece.at])
            item = Item(call, piece, snapshot.shard_set, reroutes, now)
            more = let_in or piece.shard in begun
            begun.add(piece.shard)
            work = batcher.QueuedItem(item, len(piece.groups.words), call.deadline, more)
            place = Place(snapshot.shard_set, piece.shard, call.asks.name)
            self._step(place, batcher.Submit(work))

    def _dispatch_again(self, snapshot: Snapshot, item: Item, reroutes: int) -> None:
        """Queues an item where it belongs by the table of `snapshot`."""
        groups = item.piece.groups
        remote = np.ones(len(groups.word_counts), np.bool_)
        self.dispatch(snapshot, item.call, groups, remote, item.piece.at, reroutes)

    def _max_queries(self, snapshot: Snapshot) -> int:
        return min(self._config.max_queries, snapshot.topology.max_queries)

    def _step(self, place: Place, event: _Event) -> None:
        """Feeds an event to the window of a shard and does what follows.

        Events that follow at once (a message that fails while it is sent) wait until this one is
        through: however many there are, they take no stack.
        """
        if _turn.events is not None:
            _turn.events.append((self, place, event))
            return
        events = _turn.events = deque([(self, place, event)])
        try:
            while events:
                sender, place, event = events.popleft()
                try:
                    sender._step_one(place, event)
                except Exception as exc:  # noqa: BLE001 - the other events must not be lost
                    sender._step_failed(place, event, _as_dlm_error(exc, place.shard))
        finally:
            _turn.events = None

    def _step_failed(self, place: Place, event: _Event, error: DlmError) -> None:
        """The window could not take an event, and is as it was: what the event and those that wait
        stand for ends, and a message gives its place back."""
        if isinstance(event, batcher.Submit):
            self._miss(event.work.item, error)
            return
        runtime = self._links.runtime
        waiting: tuple[batcher.QueuedItem[Item], ...] = ()
        with runtime.lock:
            window = runtime.windows.get(place)
            if window is not None:
                waiting = window.waiting
                runtime.windows[place] = window.without(event.message)
        for work in waiting:
            self._miss(work.item, error)

    def _step_one(self, place: Place, event: _Event) -> None:
        runtime, shard = self._links.runtime, place.shard
        snapshot = self._table.of_set(place.shard_set) or self._table.snapshot()
        with runtime.lock:
            limit = self._max_queries(snapshot)
            window = runtime.windows.get(place) or batcher.Window(self._config.window, 0)
            if window.max_queries != limit:
                most = max(MAX_WAITING_MESSAGES * limit, MIN_WAITING)
                window = window._replace(max_queries=limit, max_waiting=most)
            if self._links.closed:
                actions: list[batcher.Action[Item]] = []
            else:
                runtime.windows[place], actions = batcher.step(window, event, self._clock())
        if self._links.closed and isinstance(event, batcher.Submit):
            event.work.item.call.fail(closed_error())
        for action in actions:
            try:
                self._act(place, window, action)
            except Exception as exc:  # noqa: BLE001 - the other actions must be carried out
                error = _as_dlm_error(exc, shard)
                if isinstance(action, batcher.Send):
                    for work in action.works:
                        self._miss(work.item, error)
                    self._step(place, batcher.Done(action.message, answered=False))
                elif not isinstance(action, batcher.Unanswered):
                    self._miss(action.work.item, error)

    def _act(
        self, place: Place, window: batcher.Window[Item], action: batcher.Action[Item]
    ) -> None:
        shard = place.shard
        if isinstance(action, batcher.Expire):
            self._count_failed(DeadlineExceeded(), [action.work.item])
            self._miss(
                action.work.item,
                DeadlineExceeded(f"shard {shard}: the deadline passed before the message left"),
            )
        elif isinstance(action, batcher.Unanswered):
            runtime = self._links.runtime
            with runtime.lock:
                address = runtime.release((place, action.message))
            self._links.abandon(address)
        elif isinstance(action, batcher.Refuse):
            self._miss(
                action.work.item,
                _too_much(shard, window, action.work.queries, action.work.deadline - self._clock()),
            )
        else:
            self._send(place, [work.item for work in action.works], action.message)

    def _send(self, place: Place, items: list[Item], number: int) -> None:
        """One message for all of `items` that still want it; all of one shard set, so of one
        model."""
        shard_set, shard, _ = place
        snapshot = self._table.of(items[0].call.model)
        wanted = []
        for item in items:
            if item.call.future.done():
                continue  # its caller gave up, or another part of it failed
            # Ids of one model must never reach the servers of another, which would answer
            # plausibly.
            if snapshot is None:
                self._miss(item, other_model(self._table.snapshot().model, item.call.model))
            elif shard_set != snapshot.shard_set:
                self._dispatch_again(snapshot, item, item.reroutes)  # the table changed meanwhile
            else:
                wanted.append(item)
        if not wanted or snapshot is None:
            self._step(place, batcher.Done(number, answered=False))
            return
        message = _Message(
            snapshot,
            shard,
            wanted,
            router.merge([item.piece.groups for item in wanted]),
            number,
        )
        self._links.runtime.budget.earn()
        watch = self._links.runtime.watch
        watched = watch is not None and self._table.known is snapshot
        if watch is not None and watched and shard in watch.gone and self._config.partial:
            # Their deadlines are better spent on what comes next.
            self._end(message, ShardDown(f"no server of shard {shard} answers heartbeats"))
            return
        try:
            self._transmit(message)
        except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
            self._settle(message, _as_dlm_error(exc, shard))

    def _transmit(self, message: _Message) -> None:
        snapshot, shard, merged = message.snapshot, message.shard, message.merged
        manifest, runtime = snapshot.topology.manifest, self._links.runtime
        queries = len(merged.groups.words)
        # The latest deadline among them: an earlier caller stops waiting by itself.
        deadline = max(item.call.deadline for item in message.items)
        now = self._clock()
        with runtime.lock:
            replicas = snapshot.topology.addresses.get(shard, ())
            missed = frozenset(a for a, at in runtime.missed.items() if now - at < AVOID_S)
            avoided, slow = missed, frozenset[str]()
            if runtime.watch is not None:
                avoided, slow = avoided | runtime.watch.avoided, runtime.watch.slow
            address = choose(
                replicas,
                runtime.outstanding,
                avoided,
                runtime.chance,
                slow,
                missed=missed,
                tried=frozenset(message.tried),
            )
            others = set(replicas).difference(avoided, message.tried, (address,))
            again = bool(others) and not message.tried and runtime.budget.allows
        if address is None:
            known = "; ".join(dedupe_faults(snapshot.topology.faults.items()))
            raise ShardDown(
                f"no server is known to hold shard {shard} of shard set {manifest.shard_set}"
                + (f" ({known})" if known else "")
            )
        message = replace(message, tried=(*message.tried, address))
        # Where another could still be asked, it gets its share of the time.
        timeout_s = max(deadline - now, 0.0) * (FIRST_TRY if again else 1.0)
        connection = self._links.connection(address)
        begun = time.perf_counter()
        asks = message.asks
        request, checksum = asks.encode(manifest, shard, merged.groups)
        with runtime.lock:
            runtime.stats.messages += 1
            runtime.stats.sent_queries += queries
            runtime.stats.duplicates += len(merged.place) - queries
            runtime.stats.bytes_sent += len(request)
            runtime.outstanding[address] += queries
            runtime.at[message.place, message.number] = address, queries

        replies = count()

        def reply(data: bytes | None, error: DlmError | None) -> None:
            if next(replies):
                return  # an error that was raised after a reply was given
            try:
                take(data, error)
            except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
                with runtime.lock:
                    runtime.release((message.place, message.number))
                self._end(message, _as_dlm_error(exc, shard))

        def take(data: bytes | None, error: DlmError | None) -> None:
            came = time.perf_counter()
            try:
                if error is None:
                    answers = asks.decode(data or b"", manifest, shard, merged.groups, checksum)
                    deliver(message.items, message.merged, answers)
            except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
                error = _as_dlm_error(exc, shard)
                error.add_note(f"from {address}")
            with runtime.lock:
                runtime.stats.bytes_received += len(data or b"")
                runtime.stats.failed += error is not None
                runtime.release((message.place, message.number))
                if isinstance(error, ShardDown):
                    runtime.missed[address] = self._clock()
                    if is_moving(error):
                        runtime.moving[address] = self._clock()
                elif error is None:
                    runtime.missed.pop(address, None)
                outage = runtime.outage
                over = error is None and outage is not None and outage.is_over(self._clock())
                if over:
                    runtime.outage = None
            runtime.counts.message(
                result_of(error),
                queries,
                len({id(item.call) for item in message.items}),
                begun - min(item.queued for item in message.items),
                sent_at - begun,
                came - sent_at,
                time.perf_counter() - came if data is not None else 0.0,
            )
            if over and outage is not None:
                fields = {"seconds": round(outage.seconds, 3), "queries": outage.queries}
                log.info("client.partial.ended", extra=fields)
            watch = runtime.watch
            if watch is not None and isinstance(error, ShardDown):
                watch.lost(address)
            if error is None:
                if watch is not None:
                    watch.count(failed=False)
                self._step(message.place, batcher.Done(message.number))
            else:
                self._settle(message, error)

        sent_at = time.perf_counter()
        try:
            traced = () if self._tracer is None else (self._trace(message),)
            sent_at = time.perf_counter()
            asks.post(connection)(request, timeout_s, reply, *traced)
        except Exception as exc:  # noqa: BLE001 - as a reply, which ends what was counted above
            reply(None, _as_dlm_error(exc, shard))

    def _trace(self, message: _Message) -> Metadata:
        """The context of the first call in the message that is sampled: a server's span has one
        parent, so of calls that share a message one shows it."""
        spans = []
        for item in message.items:
            item.call.messages += 1
            spans.append(item.call.span)
        sampled = next((span for span in spans if span is not None and span.sampled), None)
        return () if sampled is None or self._tracer is None else self._tracer.metadata(sampled)

    def _settle(self, message: _Message, error: DlmError) -> None:
        """Ends a message that failed: by a fresh table and another try where that can help."""
        runtime, now = self._links.runtime, self._clock()
        due = now - runtime.looked >= LOOK_AGAIN_S
        if self._ask_another(message, error, now) or self._ask_later(message, error, now):
            return
        try:
            self._links.check_open()
            if isinstance(error, StaleShardSet) or (not message.tried and due):
                runtime.helper.submit(self._reroute, message, error)
                return
            if due and isinstance(error, (ShardDown, DeadlineExceeded)):
                # It may have come back elsewhere; the next calls will know.
                runtime.looked = now
                runtime.helper.submit(self._table.refresh_quietly, message.snapshot)
        except (RuntimeError, ShardDown):
            pass  # closed meanwhile
        self._end(message, error)

    def _ask_another(self, message: _Message, error: DlmError, now: float) -> bool:
        """Sends a message that failed to another replica, once; whether it did.

        Where the server said that it drains or warms up, to one after the other, and at no cost of
        the budget: that is no failure, and there are only so many.
        Also where what came was damaged: its host, or the way to it, may be what is wrong. Its
        place in the window stays its own. A Score changes nothing, so that it does no harm where
        the first is answered after all.
        """
        replicas = message.snapshot.topology.addresses.get(message.shard, ())
        deadline = max(item.call.deadline for item in message.items)
        runtime = self._links.runtime
        if (
            not isinstance(error, (UnavailableError, ProtocolError))
            or (len(message.tried) != 1 and not is_moving(error))
            or not set(replicas).difference(message.tried)
            or now >= deadline
            or self._links.closed
        ):
            return False
        with runtime.lock:
            if not is_moving(error) and not runtime.budget.spend():
                return False
            runtime.stats.retries += 1
        try:
            self._transmit(message)
        except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
            self._end(message, _as_dlm_error(exc, message.shard))
        return True

    def _ask_later(self, message: _Message, error: DlmError, now: float) -> bool:
        """Has a message that no server takes asked again in a moment, while there is time; whether
        it does.

        Only where a server of the shard drains or warms up, or did so lately: somebody rolls them,
        and one that has just become ready is not known to be so yet. Where servers are gone without
        a word, callers learn it at once.
        """
        runtime = self._links.runtime
        pause = min(FIRST_PAUSE_S * 2.0**message.rounds, MAX_PAUSE_S)
        deadline = max(item.call.deadline for item in message.items)
        if not isinstance(error, ShardDown) or now + pause >= deadline or self._links.closed:
            return False
        with runtime.lock:
            moving = {a for a, at in runtime.moving.items() if now - at < MOVING_S}
        if runtime.watch is not None:
            moving |= runtime.watch.moving
        if moving.isdisjoint(message.snapshot.topology.addresses.get(message.shard, ())):
            return False
        later = replace(message, tried=(), rounds=message.rounds + 1)
        # A thread of its own: the loop, and what was to happen on it, ends with every fork.
        timer = threading.Timer(pause, self._ask_now, (later, error))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no thread can be started
            return False
        return True

    def _ask_now(self, message: _Message, error: DlmError) -> None:
        """After a pause: sends a message again, by the table of now."""
        try:
            runtime = self._links.runtime
            if self._clock() - runtime.looked >= LOOK_AGAIN_S:
                self._table.refresh_later()
            if self._links.closed or all(item.call.future.done() for item in message.items):
                self._end(message, error)
                return
            fresh = self._table.of(message.snapshot.model)
            if fresh is None or fresh.shard_set != message.snapshot.shard_set:
                self._move(message, error)
            else:
                with runtime.lock:
                    runtime.stats.retries += 1
                self._transmit(replace(message, snapshot=fresh))
        except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
            self._end(message, _as_dlm_error(exc, message.shard))

    def _end(self, message: _Message, error: DlmError) -> None:
        self._count_failed(error, message.items)
        for item in message.items:
            self._miss(item, error)
        self._step(message.place, _failed(message, error))

    def _count_failed(self, error: DlmError, items: list[Item]) -> None:
        """Tells the cascade of a message that nobody answered; not of one that had no time."""
        watch = self._links.runtime.watch
        if watch is None:
            return
        had_s = time.perf_counter() - min(item.queued for item in items)
        if not isinstance(error, DeadlineExceeded) or had_s >= self._config.switching.fair_s:
            watch.count(failed=allows_fallback(error))

    def _reroute(self, message: _Message, error: DlmError) -> None:
        """On the helper thread: fetches the table and sends the items where they belong now."""
        try:
            if self._table.of(message.snapshot.model) is message.snapshot:
                # Half of the time that is left, so that the other half is there for asking again.
                deadline = max(item.call.deadline for item in message.items)
                allowed = max((deadline - self._clock()) / 2, 0.05)
                self._table.refresh(message.snapshot, min(allowed, self._config.connect_s))
        except Exception as exc:  # noqa: BLE001 - a helper thread must never leave a caller waiting
            error.add_note(f"and no fresh table could be had: {exc}")
            self._end(message, error)
            return
        self._move(message, error)

    def _move(self, message: _Message, error: DlmError) -> None:
        """Gives the place of a message back, and sends its items where they belong by the table of
        now."""
        self._step(message.place, _failed(message, error))
        fresh = self._table.of(message.snapshot.model)
        for item in message.items:
            try:
                if fresh is None:
                    self._miss(item, other_model(self._table.snapshot().model, item.call.model))
                elif item.reroutes >= MAX_REROUTES:
                    self._miss(item, error)
                else:
                    self._dispatch_again(fresh, item, item.reroutes + 1)
            except Exception as exc:  # noqa: BLE001 - the other items must end, too
                self._miss(item, _as_dlm_error(exc, message.shard))

    def _miss(self, item: Item, error: DlmError) -> None:
        """An item that is not answered: by the partial model where there is one, else its error."""
        try:
            call, piece = item.call, item.piece
            self.count_partial(call.model, call.miss(piece, error), error, piece.shard)
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            error.add_note(f"and the partial model failed: {exc!r}")
            item.call.fail(error)

    def give_up(self, call: Call, error: DlmError) -> None:
        """A call's time is over: the partial model answers what is missing, or it fails."""
        shards = call.missing_shards() if self._links.runtime.outage is None else []
        shard = shards[0] if shards else None
        self.count_partial(call.model, call.give_up(error), error, shard)

    def count_partial(self, model: str, queries: int, error: DlmError, shard: int | None) -> None:
        """So many were answered by the partial model; told once, when that begins, and once more
        where it turns out that it will not end.

        Args
            shard  that did not answer; None where none was asked
        """
        if not queries:
            return
        runtime, now = self._links.runtime, self._clock()
        now_known = self._table.known
        if now_known is not None and self._table.of(model) is None:
            # Whatever became of the message: to ask again would not help.
            error = other_model(now_known.model, model)
            self._table.note_gone(model, error)
        kind = type(error).__name__
        with runtime.lock:
            runtime.stats.partial += queries
            known = runtime.outage
            lasts = known is not None and known.lasts(error)
            if known is None:
                runtime.outage = Outage(now, now, queries, kind)
            else:
                extended = known.extended(queries, now)
                runtime.outage = extended._replace(error=kind) if lasts else extended
        if known is None:
            log.warning("client.partial.began", extra={"shard": shard, "error": kind})
        elif lasts:
            fields = {"shard": shard, "before": known.error, "error": kind}
            log.warning("client.partial.changed", extra=fields)


def _failed(message: _Message, error: DlmError) -> batcher.Done:
    """How a message ended that nobody answered."""
    gone = isinstance(error, (ShardDown, AuthenticationError))
    return batcher.Done(message.number, answered=False, gone=gone)


def is_moving(error: DlmError) -> bool:
    """Whether a server refused because it is being stopped or started."""
    return getattr(error, "reason", None) in MOVING_REASONS


def _too_much(shard: int, window: batcher.Window[Item], queries: int, left_s: float) -> Overloaded:
    work_s = window.pace.seconds(window.ahead)
    asked_s = window.pace.seconds(window.ahead + queries)
    left_s = max(left_s, 0.0)
    error = Overloaded(
        f"shard {shard}: {window.in_flight} messages are in flight and {len(window.waiting)} wait, "
        f"with {window.ahead} queries; with the {queries} of this call that is {asked_s:.3g} s of "
        f"work at the present pace, and a call with {left_s:.3g} s left may find "
        f"{PATIENCE * left_s:.3g} s. Ask less at once, or later"
    )
    error.retry_after_s = work_s or None
    return error


def _as_dlm_error(error: Exception, shard: int | None = None) -> DlmError:
    if isinstance(error, DlmError):
        return error
    # Where a partial model answers instead, nobody else is told.
    log.error("client.message.failed", extra={"shard": shard, "error": type(error).__name__})
    where = "" if shard is None else f"shard {shard}: "
    wrapped = DlmError(f"{where}a message could not be made or read: {error!r}")
    wrapped.__cause__ = error
    return wrapped


def other_model(found: str, expected: str) -> StaleShardSet:
    """What a handle on a model that the servers do not hold any more gets."""
    now = "no server holds it any more" if found == expected else f"the servers hold {found} now"
    return StaleShardSet(f"this handle was opened on model {expected}; {now}. Open a new utterance")
