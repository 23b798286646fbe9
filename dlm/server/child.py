"""A child that ends with its parent process, however that ends, and what it says to it.

`python -P -m dlm.server.child PID MODULE ...` runs MODULE as a child of process PID. It asks
for its end itself: subprocess's `preexec_fn` runs Python between fork and exec, beside gRPC's
handlers of forks, and most children of a process with busy channels crash there.

Forked children send lines of JSON over a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import runpy
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import dlm.errors
from dlm.errors import ConfigError, DlmError
from dlm.logs import EventLog
from dlm.resources import give_way

logger = EventLog(__name__)

_PR_SET_PDEATHSIG = 1  # Linux: the signal a child gets when its parent dies


def end_with_parent(parent: int) -> None:
    """Called in the child of `parent`: SIGTERM comes when the thread that started it ends.

    Ends the process if the parent is already dead. Children do not inherit this.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def command_of_child(module: str, *arguments: str) -> list[str]:
    """The command line of a child that runs `module` and ends with this process.

    -P: a module in the current folder, such as a queue.py, is not part of the child.
    """
    line = [sys.executable, "-P", "-m", "dlm.server.child", str(os.getpid())]
    return [*line, module, *arguments]


def say(pipe: int, content: object) -> bool:
    """Sends one line to the parent; if that has ended, this process will soon end too.

    Returns  false if it was not sent: the pipe is full, because the parent does not read
    """
    data = json.dumps(content).encode() + b"\n"
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(pipe, data) :]
    return not data


def as_error(kind: str, message: str) -> DlmError:
    found = getattr(dlm.errors, kind, None)
    if isinstance(found, type) and issubclass(found, DlmError):
        return found(message)
    return ConfigError(message)  # the operating system refused


class Child:
    """Runs `work` once, in a forked child that gives way to every other process and that its parent
    polls: it has no thread and no loop.

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


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
