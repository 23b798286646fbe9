"""The loop's inbox: calls, replies and connections, handled one after another.

Callers, connections and helper threads leave steps here, and the loop carries them out. So no step
sees a message, a lane or a server half changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from dlm.client.deliver import fork, loop
from dlm.client.deliver.call import Call
from dlm.client.deliver.message import Attempt, Message, as_dlm_error
from dlm.client.deliver.runtime import Links, Runtime
from dlm.errors import DlmError

LOOK_S = 1.0  # between checks of lanes and messages, while there are any


@dataclass(eq=False)
class Inbox:
    """The way to the loop.

    Args
        home     where steps run: the loop of the process
        cut_off  ends a message whose step raised an error
        send     sends the next message of a lane that has one ready
        look     checks what may be late; returns when to check again
    """

    _links: Links
    _clock: Callable[[], float]
    _home: loop.Home
    _cut_off: Callable[[Message, DlmError], None]
    _send: Callable[[Runtime], None]
    _look: Callable[[], float]

    # -- in any thread ------------------------------------------------------------------------

    def tell(self, step: Callable[..., None], *args: Any) -> None:
        """Makes the loop carry out a step."""
        runtime = self._links.runtime
        runtime.inbox.append((step, args))
        now = time.monotonic()
        # A thread that should wake the loop may be interrupted by a signal handler: then the next
        # one does, in a moment.
        if now >= runtime.woken_until:
            runtime.woken_until = now + loop.WAKE_S
            if not self._home.post(self._open):
                fork.wake(self)

    def carry_out(self, step: Callable[..., None], *args: Any) -> None:
        """See `cascade.Steps`."""
        (self.step if self._home.is_here() else self.tell)(step, *args)

    # -- across forks -------------------------------------------------------------------------

    def suspend(self) -> None:
        """See `fork.Streams`: connections keep messages in flight, and the inbox its steps."""

    def resume(self) -> None:
        """See `fork.Streams`."""
        self._home.post(self._open)  # if False, the loop is ending for another fork

    def give_up(self, cause: Exception) -> None:
        """See `fork.Streams`: calls end; the rest waits for the next loop."""
        runtime = self._links.runtime
        runtime.woken_until = 0.0  # first: later steps wake the loop again
        inbox = runtime.inbox
        for _ in range(len(inbox)):
            try:
                step, args = inbox.popleft()
            except IndexError:  # another thread was quicker
                return
            if args and isinstance(args[0], Call):
                args[0].give_up(as_dlm_error(cause))
            else:
                inbox.append((step, args))

    # -- on the loop --------------------------------------------------------------------------

    def later(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        """See `cascade.Steps`."""
        fork.add(self)  # its loop is started again after a fork
        self._home.later(delay_s, self.step, step, *args)

    def look_by(self, at: float) -> None:
        """Schedules a check of lanes and messages by then, but within a second: a scheduled check
        keeps alive a client that nobody references."""
        alarms = self._links.runtime.alarms
        if at < (alarms[-1] if alarms else inf):
            now = self._clock()
            at = min(at, now + LOOK_S)
            alarms.append(at)
            self.later(at - now, self._ring)

    def _ring(self) -> None:
        self._links.runtime.alarms.pop()
        next_at = self._clock() + LOOK_S  # if it raises
        try:
            next_at = self._look()
        finally:
            self.look_by(next_at)

    def _open(self) -> None:
        runtime = self._links.runtime
        runtime.woken_until = 0.0  # first, as above
        if not runtime.busy:
            self._run(runtime)

    def step(self, step: Callable[..., None], *args: Any) -> None:
        """Carries out a step. If steps nest, the outermost then handles all new steps and sends
        what it can: so simultaneous parts are sent together, and immediate failures do not deepen
        the stack."""
        runtime = self._links.runtime
        if runtime.busy:
            self._try(step, args)
        else:
            runtime.inbox.appendleft((step, args))
            self._run(runtime)

    def _run(self, runtime: Runtime) -> None:
        inbox, ready = runtime.inbox, runtime.ready
        runtime.busy = True
        try:
            while inbox or ready:
                if inbox:
                    self._try(*inbox.popleft())
                else:
                    self._send(runtime)
        finally:
            runtime.busy = False

    def _try(self, step: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Runs one step; its failure does not affect others."""
        try:
            step(*args)
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            error, subject = as_dlm_error(exc), args[0] if args else None
            if isinstance(subject, Call):
                subject.give_up(error)
                subject.fail(error)  # unless the bigram fallback has ended it
            elif isinstance(subject, Attempt):
                self._cut_off(subject.message, error)
            elif isinstance(subject, Message):
                self._cut_off(subject, error)
