"""Work in a forked child that gives way to all others, and that its parent polls: it has no thread
and no loop."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
from collections.abc import Callable
from typing import NoReturn

from dlm.errors import DlmError
from dlm.logs import EventLog
from dlm.resources import give_way
from dlm.server.parent import end_with_parent
from dlm.server.pipe import say

logger = EventLog(__name__)


class Child:
    """Runs `work` once, in a child that every other process goes before.

    Raises  OSError  the system has no process or no descriptor left
    """

    def __init__(self, work: Callable[[], None]) -> None:
        parent = os.getpid()
        ours, theirs = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
        if not self._pid:
            os.close(ours)
            _be(work, theirs, parent)
        os.close(theirs)
        self._pipe = ours

    def poll(self) -> str | None:
        """None while it runs; then "" if `work` returned, or why it did not. Ends its process."""
        if not select.select([self._pipe], [], [], 0)[0]:
            return None
        said = b""
        while part := os.read(self._pipe, 65_536):
            said += part
        status = self._reap()
        error = json.loads(said)["message"] if said else ""
        if error or status == 0:
            return str(error)
        return f"the process that read them ended with status {status}"

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        os.kill(self._pid, signal.SIGKILL)  # ours until we wait for it
        self._reap()

    def _reap(self) -> int:
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _be(work: Callable[[], None], pipe: int, parent: int) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(parent)
        give_way()
        work()
        status = 0
    except (DlmError, OSError) as exc:
        say(pipe, {"message": str(exc)})
    except BaseException as exc:
        logger.critical("server.child.failed", extra={"error": repr(exc)}, exc_info=exc)
    finally:
        try:
            logging.shutdown()
        finally:
            os._exit(status)
