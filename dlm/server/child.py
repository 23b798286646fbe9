"""Runs a child process that ends with its parent, however the parent ends, and reads its output.

`python -P -m dlm.server.child PID MODULE ...` runs MODULE as a child of process PID. The child
sees to that itself: with subprocess's `preexec_fn`, Python and gRPC's fork handlers would run
between fork and exec, and most children of a process with busy channels would crash there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1  # Linux: the signal a child gets when its parent dies


def end_with_parent(parent: int) -> None:
    """Arranges that this child of `parent` gets SIGTERM when the thread that started it ends.

    Ends this process if `parent` is already dead. Its own children do not inherit the arrangement.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def command_of_child(module: str, *arguments: str) -> list[str]:
    """The command line of a child that runs `module` and ends with this process.

    With -P, the child imports no module of the current folder, such as a queue.py.
    """
    line = [sys.executable, "-P", "-m", "dlm.server.child", str(os.getpid())]
    return [*line, module, *arguments]


class Child:
    """Runs `module` once, in a child that this process polls.

    Raises  OSError  the system has no process or no descriptor left
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            command_of_child(module, *arguments), stdout=subprocess.PIPE, text=True
        )

    def poll(self) -> str | None:
        """Returns None while the child runs; then "" if all went well, or what it printed."""
        if self._process.poll() is None:
            return None
        said, _ = self._process.communicate()
        status = self._process.returncode
        if status == 0:
            return ""
        return said.strip() or f"the child process that read the files ended with status {status}"

    def end(self) -> None:
        """Ends the child, whatever it is doing."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
