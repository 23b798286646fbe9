"""Programs of dlm in processes that share its imports, which take longer than most tests.

A process imports dlm once, and forks one for each program: with its own arguments, folder,
environment and streams, a child of this process, and ended as any other. It inherits modules and
the kernels that were kept, nothing else. That dlm starts and imports what it needs is for tests
that run it as `cluster.command`.

| function | what it is |
| --- | --- |
| `start` | a program with streams of its own, which runs on |
| `script` | a Python text with arguments |
| `run`, `Popen` | a command line of this interpreter, as those of `subprocess` have it |
| `serve` | in place of what starts a server for `dlm.cluster.processes` |
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
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]

# What forks. A message has the program, its arguments, folder and environment, and its streams.
PARENT = """
import faulthandler, gc, importlib, json, os, signal, socket, sys
sys.path += sys.argv[2:]
import forked
faulthandler.register(signal.SIGUSR1)  # prints the stacks of a program that does not end
from dlm import jit
from dlm.cli import main
for name in ("client", "cluster.processes", "index.making", "index.check.verify", "estimate.text",
             "server.app", "asr.kenlm",
             *{f"cli.{module}" for module, _ in main.COMMANDS.values()}, "loadtest.cli.main"):
    try:
        importlib.import_module(name if name.startswith("loadtest") else f"dlm.{name}")
    except ImportError:  # the package of an extra
        pass
for name, module in list(sys.modules.items()):
    if name.startswith("dlm.") and name.endswith("kernels"):
        for kernel in list(vars(module).values()):
            declared = getattr(getattr(kernel, "_cache", None), "types", "")
            if declared and not jit._is_missing(kernel):
                kernel.compile()  # reads what is kept
forked.fork_servers()
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
for number, name in enumerate(("stdin", "stdout", "stderr")):  # what they knew of others' is gone
    how = {"buffering": 1, "errors": "backslashreplace"} if name == "stderr" else {}
    stream = open(number, "w" if number else "r", closefd=False, encoding="utf-8", **how)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
os.chdir(folder)
os.environ.clear()
os.environ.update(environ)
sys.argv = arguments
forked.run_to_end(program, globals())
"""
_PR_SET_CHILD_SUBREAPER = 36  # Linux: whose parent has ended becomes a child of this process
DLM = "main.main()"
MODULES = {
    "dlm": DLM,
    "dlm.cli.main": DLM,
    # Its parent is who asked for it once the process between them has ended.
    "dlm.server.child": "import runpy, time\n"
    "while os.getppid() != int(sys.argv[1]): time.sleep(0.001)\n"
    "runpy.run_module('dlm.server.child', run_name='__main__', alter_sys=True)",
    "loadtest": "from loadtest.cli.main import main; main()",
}
_FOREVER_S = 1e6


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

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended."""
        end = time.monotonic() + (_FOREVER_S if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or _FOREVER_S)
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


def program(line: Sequence[str]) -> tuple[str, list[str]]:
    """The program of a command line of this interpreter, and its arguments: `-c TEXT`, or `-m` and
    one of `MODULES`."""
    assert line[0] == sys.executable, line
    rest = list(line[2:] if line[1] == "-P" else line[1:])
    if rest[0] == "-c":
        return rest[1], ["-c", *rest[2:]]
    assert rest[0] == "-m", line
    return MODULES[rest[1]], [rest[1].split(".")[0], *rest[2:]]


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of such a command line."""

    def _execute_child(  # where its base class starts the process
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        *_: Any,
    ) -> None:  # fmt: skip
        assert preexec_fn is None and not shell and not pass_fds
        code, arguments = program([os.fspath(word) for word in args])
        given = (p2cread, c2pwrite, errwrite)
        self.pid = start(
            code,
            arguments,
            streams=tuple(own if own >= 0 else at for at, own in enumerate(given)),  # type: ignore
            cwd=cwd or Path.cwd(),
            env=os.environ if env is None else env,
        ).pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore


def run(
    line: Sequence[str],
    *,
    input: str | bytes | None = None,  # noqa: A002 - as subprocess has it
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of such a command line."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(line, **options) as process:
        try:
            said = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(line, process.returncode, *said)
    if check:
        done.check_returncode()
    return done


def script(
    code: str, *arguments: object, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a Python text with these arguments to its end; what it said is text."""
    line = [sys.executable, "-c", code, *map(str, arguments)]
    return run(line, capture_output=True, text=True, timeout=timeout, **options)


def serve(command: Sequence[str]) -> Process:
    """A server as `dlm cluster` starts it, in a process that is forked for it."""
    with Path(os.devnull).open("r+b") as null:
        streams = (null.fileno(), 1, 2)
        return start(DLM, ["dlm", *command], streams=streams, cwd=Path.cwd(), env=os.environ)


def fork_servers() -> None:
    """From here on `dlm cluster`, in this process and its children, forks its servers."""
    from dlm.cli import main
    from dlm.cluster import processes
    from dlm.server.child import end_with_parent

    exec_one = processes._start

    def fork_one(command: Sequence[str]) -> Any:
        if len(list(Path("/proc/self/task").iterdir())) > 1:  # a fork would lack the others
            return exec_one(command)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if pid := os.fork():
            return Process(pid)
        status = 1
        try:
            os.setsid()
            end_with_parent(parent)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            with Path(os.devnull).open("rb") as null:
                os.dup2(null.fileno(), 0)
            os.closerange(3, 1 << 12)  # as `exec` does: the lock on cluster.toml is among them
            sys.argv = ["dlm", *command]
            status = _status_of(DLM, {"main": main})
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # what the parent has open is the parent's to close

    processes._start = fork_one


def run_to_end(program: str, names: dict[str, Any]) -> NoReturn:
    """Runs a text of Python with these names, and ends the process as the interpreter does, which
    only does not take itself apart: that would copy the memory shared with the parent, a tenth of a
    second of CPU time."""
    status = _status_of(program, names)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    os._exit(status)


def _status_of(program: str, names: dict[str, Any]) -> int:
    try:
        exec(program, names)
    except SystemExit as exc:
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


@cache
def _parent() -> socket.socket:
    """The connection to the process that forks; it ends with this process."""
    failed = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert not failed, os.strerror(ctypes.get_errno())
    ours, theirs = socket.socketpair()
    with theirs:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(theirs.fileno()), str(ROOT), str(ROOT / "tests")],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C reaches this process, whose end closes the connection
        )
    atexit.register(parent.wait)
    atexit.register(ours.close)  # first
    return ours
