"""Programs of dlm in processes that share its imports, which take longer than most tests.

A process imports dlm once, and forks one for each program: with its own arguments, folder,
environment and streams, a child of this process, and ended as any other. It inherits modules and
the kernels that were kept, nothing else. That dlm starts and imports what it needs is for tests
that run it as `cluster.command`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

# What forks. A message has the program, its arguments, folder and environment, and its streams.
PARENT = """
import gc, importlib, json, os, socket, sys
os.environ["GRPC_VERBOSITY"] = "NONE"  # as `dlm` has it
from dlm import jit
from dlm.cli import main
for name in ("client", "cluster.processes", "index.build", "index.check.verify", "estimate.text",
             "server.app", "server.workers",
             *{f"cli.{module}" for module, _ in main.COMMANDS.values()}):
    try:
        importlib.import_module(f"dlm.{name}")
    except ImportError:  # the package of an extra
        pass
for name, module in list(sys.modules.items()):
    if name.startswith("dlm.") and name.endswith("kernels"):
        for kernel in list(vars(module).values()):
            declared = getattr(getattr(kernel, "_cache", None), "types", "")
            if declared and not jit._is_missing(kernel):
                kernel.compile()  # reads what is kept
gc.freeze()
asked = socket.socket(fileno=int(sys.argv[1]))
def read(size):  # a signal may cut a read short, MSG_WAITALL or not
    found = b""
    while len(found) < size:
        more = asked.recv(size - len(found))
        if not more:
            sys.exit()
        found += more
    return found
while True:
    size = int.from_bytes(read(8), "big")
    _, streams, _, _ = socket.recv_fds(asked, 1, 3)
    program, arguments, folder, environ = json.loads(read(size))
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            break
        asked.sendall(child.to_bytes(8, "big"))
        os._exit(0)
    for stream in streams:
        os.close(stream)
    os.waitpid(between, 0)
    asked.sendall(b"!")  # the child has become one of who asked
asked.close()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
os.chdir(folder)
os.environ.clear()
os.environ.update(environ)
sys.argv = arguments
exec(program)
"""
_PR_SET_CHILD_SUBREAPER = 36  # Linux: whose parent has ended becomes a child of this process
DLM = "main.main()"


class Process:
    """A child of this process, as `subprocess.Popen` has one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status, once it has ended."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.001)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    program: str,
    arguments: Sequence[str],
    *,
    streams: tuple[int, int, int],
    cwd: Path,
    env: Mapping[str, str],
) -> Process:
    """A process of this program.

    Args
        program    a text of Python; `DLM` runs the command
        arguments  its `sys.argv`
        streams    descriptors of its standard input, output and error
    """
    asked = json.dumps([program, list(arguments), os.fspath(cwd), dict(env)]).encode()
    parent = _parent()
    parent.sendall(len(asked).to_bytes(8, "big"))
    socket.send_fds(parent, [b"\0"], streams)
    parent.sendall(asked)
    answer = b""
    while len(answer) < 9:  # a signal may cut a read short
        more = parent.recv(9 - len(answer))
        assert more, "the process that forks has ended"
        answer += more
    return Process(int.from_bytes(answer[:8], "big"))


@cache
def _parent() -> socket.socket:
    """The connection to the process that forks; it ends with this process."""
    failed = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert not failed, os.strerror(ctypes.get_errno())
    ours, theirs = socket.socketpair()
    with theirs:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C reaches this process, whose end closes the connection
        )
    atexit.register(parent.wait)
    atexit.register(ours.close)  # first
    return ours
