"""A child that ends with its parent process, however that ends, and what it says to it.

`python -P -m dlm.server.child PID MODULE ...` runs MODULE as a child of process PID. It asks
for its end itself: subprocess's `preexec_fn` runs Python between fork and exec, beside gRPC's
handlers of forks, and most children of a process with busy channels crash there.
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


class Child:
    """Runs `module` once, in a child that this process polls.

    Raises  OSError  the system has no process or no descriptor left
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            command_of_child(module, *arguments), stdout=subprocess.PIPE, text=True
        )

    def poll(self) -> str | None:
        """None while it runs; then "" if all went well, or what it printed."""
        if self._process.poll() is None:
            return None
        said, _ = self._process.communicate()
        status = self._process.returncode
        if status == 0:
            return ""
        return said.strip() or f"the process that read them ended with status {status}"

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
