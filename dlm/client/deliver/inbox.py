"""What others have for the loop: calls, replies and connections, taken one after another.

Callers, connections and helper threads leave steps here, and the loop carries them out. So no step
finds a message, a lane or a server half changed.
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

LOOK_S = 1.0  # between looks at lanes and messages, while there are any


@dataclass(eq=False)
class Inbox:
    """The way to the loop.

    Args
        home     where steps run: the loop of the process
        cut_off  ends a message of which a step raised
        send     sends what one of the lanes that may has ready
        look     looks at all that may be late; says when to look again
    """

    _links: Links
    _clock: Callable[[], float]
    _home: loop.Home
    _cut_off: Callable[[Message, DlmError], None]
    _send: Callable[[Runtime], None]
    _look: Callable[[], float]

    # -- in any thread ------------------------------------------------------------------------

    def tell(self, step: Callable[..., None], *args: Any) -> None:
        """Has the loop carry out a step."""
        runtime = self._links.runtime
        runtime.inbox.append((step, args))
        now = time.monotonic()
        # Whoever was to wake the loop may have been cut off by a signal's handler: then the next
        # does, in a moment.
        if now >= runtime.woken_until:
            runtime.woken_until = now + loop.WAKE_S
            if not self._home.post(self._open):
                fork.wake(self)

    def carry_out(self, step: Callable[..., None], *args: Any) -> None:
        """See `loop.Steps`."""
        (self.step if self._home.is_here() else self.tell)(step, *args)

    # -- across forks -------------------------------------------------------------------------

    def suspend(self) -> None:
        """See `fork.Streams`: connections keep what is in flight, and the inbox what has come."""

    def resume(self) -> None:
        """See `fork.Streams`."""
        self._home.post(self._open)  # else the loop ends already for another fork

    def give_up(self, cause: Exception) -> None:
        """See `fork.Streams`: calls end; the rest waits for the next loop."""
        runtime = self._links.runtime
        runtime.woken_until = 0.0  # first: what comes from here on wakes the loop again
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
        """See `loop.Steps`."""
        fork.add(self)  # its loop is started again after a fork
        self._home.later(delay_s, self.step, step, *args)

    def look_by(self, at: float) -> None:
        """Has lanes and messages looked at by then, and in a second at the latest: what is planned
        holds a client that nobody has any more."""
        alarms = self._links.runtime.alarms
        if at < (alarms[-1] if alarms else inf):
            now = self._clock()
            at = min(at, now + LOOK_S)
            alarms.append(at)
            self.later(at - now, self._ring)

    def _ring(self) -> None:
        self._links.runtime.alarms.pop()
        next_at = self._clock() + LOOK_S  # where it raises
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
        """Carries out a step; the outermost, where one leads to another, then all that came and
        what can be sent: so what comes at once leaves together, and what fails at once takes no
        stack."""
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
        """One step, whose failure harms no other."""
        try:
            step(*args)
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            error, subject = as_dlm_error(exc), args[0] if args else None
            if isinstance(subject, Call):
                subject.give_up(error)
                subject.fail(error)  # unless the partial model has ended it
            elif isinstance(subject, Attempt):
                self._cut_off(subject.message, error)
            elif isinstance(subject, Message):
                self._cut_off(subject, error)
