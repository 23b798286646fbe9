"""What commands leave behind that are ended while they write: nothing."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forked
from cluster import WAIT_S, command
from dlm.files import SUFFIX

# The command, on a disk that says when it is asked to sync, and then takes its time.
SLOW_DISK = """
import os
real = os.fsync
def fsync(descriptor):
    real(descriptor)
    os.write(1, b"syncing\\n")
    os.read(0, 1)
os.fsync = fsync
from dlm.cli.main import main
main()
"""
TRAINS = importlib.util.find_spec("sentencepiece") is not None
needs_training = pytest.mark.skipif(not TRAINS, reason="the training extra is not installed")

# Arguments, in a folder with what `inputs` makes; outputs go to out/.
COMMANDS = {
    "prune": ["prune", "model.arpa", "--threshold", "0.1", "-o", "out/x.arpa"],
    "merge": ["merge", "model.arpa", "other.arpa", "--weights", "0.5,0.5", "-o", "out/x.arpa.gz"],
    "reduce": ["reduce", "model.arpa", "--order", "2", "-o", "out/x.arpa.zst"],
    "export": ["export", "shards", "-o", "out/x.arpa"],
    "filter": ["filter", "model.arpa", "--vocab", "words", "-o", "out/x.arpa"],
    "estimate": ["estimate", "text", "-o", "out/x.arpa", "--order", "3", "--discount-fallback"],
    "token": ["token", "alice", "--token-file", "out/alice"],
    "tokens": ["token", "alice", "--tokens", "out/tokens"],
    "perplexity": ["perplexity", "model.arpa", "text", "--tmp", "out"],
    "pieces": [
        "pieces",
        "counts.tsv",
        "--size",
        "20",
        "-o",
        "out/x.model",
        "--public-attested-by",
        "X",
    ],
}
QUICK = ("prune", "estimate", "token")
KINDS = [
    pytest.param(
        kind,
        marks=[*[needs_training] * (kind == "pieces"), *[pytest.mark.slow] * (kind not in QUICK)],
    )
    for kind in COMMANDS
]


@pytest.fixture
def inputs(folder: Path, other: Path, tmp_path: Path) -> Path:
    """What the commands above read; out/ is empty."""
    for name in ("model.arpa", "other.arpa", "shards"):
        (tmp_path / name).symlink_to(folder / name)
    words = [
        line.split()[1] for line in (folder / "model.arpa").read_text().splitlines() if "\t" in line
    ]
    (tmp_path / "words").write_text("\n".join(words))
    plain = [word for word in words if not word.startswith("<")]
    (tmp_path / "text").write_text("".join(f"{a} {b} {a}\n" for a in plain for b in plain))
    stems = ("walk", "talk", "nation", "read")
    counts = [stem + end for stem in stems for end in ("", "s", "ed", "ing", "ness")]
    (tmp_path / "counts.tsv").write_text("".join(f"{w}\t{9.5 + len(w)}\n" for w in counts))
    (tmp_path / "out").mkdir()
    return tmp_path


@contextmanager
def writing(
    folder: Path, arguments: list[str], popen: type[subprocess.Popen[bytes]] = forked.Popen
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, once it syncs something that it wrote in out/."""
    there = left(folder)  # before it starts: it may be quick
    process = popen(
        [sys.executable, "-c", SLOW_DISK, *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None and process.stderr is not None
    with process:
        try:
            while True:
                while (line := process.stdout.readline()) != b"syncing\n":
                    assert line, process.stderr.read().decode()
                if left(folder) != there:
                    break
                process.stdin.write(b"\n")  # what is synced elsewhere goes on
                process.stdin.flush()
            yield process
        finally:
            process.kill()


def left(folder: Path) -> set[str]:
    """All names in out/ but of locks, which a killed process leaves, too."""
    names = {path.name for path in (folder / "out").iterdir()}
    return {name for name in names if not name.endswith(".edit")}


@pytest.mark.promise("no_half_files")
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_is_ended_leaves_nothing(kind: str, inputs: Path) -> None:
    """SIGKILL: the next run removes what lies there. SIGTERM: nothing lies there."""
    with writing(inputs, COMMANDS[kind]) as killed:
        before = left(inputs)
        assert before
        assert all(name.startswith(".") and name.endswith(SUFFIX) for name in before)
    assert killed.returncode == -signal.SIGKILL
    assert left(inputs) == before
    with writing(inputs, COMMANDS[kind]) as ended:
        assert left(inputs)
        assert not left(inputs) & before
        ended.terminate()
        _, errors = ended.communicate(timeout=WAIT_S)
    assert (ended.returncode, errors.decode().count("Traceback")) == (128 + signal.SIGTERM, 0)
    assert list((inputs / "out").iterdir()) == []


@pytest.mark.promise("exit_statuses")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_is_an_exit_status_and_the_second_does_not_stop_the_removal(
    number: signal.Signals, inputs: Path
) -> None:
    """What stood there before stays as it was."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests were started by nohup, and commands ignore what it has ignored")
    place = inputs / "out" / "x.arpa"
    place.write_bytes(b"what was there")
    with writing(inputs, [*COMMANDS["reduce"][:-1], "out/x.arpa"]) as ended:
        ended.send_signal(number)
        ended.send_signal(number)
        _, errors = ended.communicate(timeout=WAIT_S)
    assert ended.returncode == 128 + number, errors.decode()
    assert b"Traceback" not in errors
    assert left(inputs) == {"x.arpa"}
    assert place.read_bytes() == b"what was there"


def test_a_filter_that_is_ended_while_it_reads_removes_its_folder(inputs: Path) -> None:
    """Half of a model came through a pipe, and the rest will not."""
    os.mkfifo(inputs / "pipe")
    text = (inputs / "model.arpa").read_bytes()
    arguments = ("filter", "pipe", "--vocab", "words", "--output", "out/x.arpa")
    process = forked.Popen(command(*arguments), cwd=inputs, stderr=subprocess.PIPE)
    with process, (inputs / "pipe").open("wb") as pipe:
        pipe.write(text[: len(text) // 2])
        pipe.flush()
        (scratch,) = left(inputs)
        assert scratch.startswith(".dlm-filter.")
        process.terminate()
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert left(inputs) == set()


def test_a_command_that_nohup_started_survives_its_terminal(inputs: Path) -> None:
    """SIGHUP was ignored when it was started, and stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with writing(inputs, COMMANDS["reduce"], subprocess.Popen) as process:
            signal.signal(signal.SIGHUP, before)
            process.send_signal(signal.SIGHUP)
            process.communicate(b"\n" * 9, timeout=WAIT_S)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.returncode == 0
    assert left(inputs) == {"x.arpa.zst"}


# A command that gets a signal where Python drops exceptions: in a callback from C.
IN_CALLBACK = """
import ctypes, os, sys, time
from dlm.cli import main
def run(**_):
    callback = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), int(sys.argv[1])))
    callback()
    print("dropped", flush=True)
    time.sleep(300)
main.program = lambda *_, **__: run
main.main()
"""


def test_a_signal_that_a_callback_drops_still_ends_the_command() -> None:
    """It is raised again where Python can carry it, and nothing is printed."""
    number = signal.SIGTERM
    line = [sys.executable, "-c", IN_CALLBACK, str(int(number))]
    done = forked.run(line, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "dropped\n", "")


# A command that gets a signal while Python exits, which drops exceptions too. After that, C's exit
# calls sleep(status of the exit): longer than until a signal is raised again.
AT_EXIT = """
import atexit, ctypes, os, sys
from dlm.cli import main
def run(**_):
    libc = ctypes.CDLL(None)
    libc.on_exit(libc.sleep, None)
    atexit.register(os.kill, os.getpid(), int(sys.argv[1]))
    sys.exit(1)
main.program = lambda *_, **__: run
main.main()
"""


def test_a_signal_while_the_command_exits_leaves_its_exit_status() -> None:
    """Its work is done: no alarm kills what is left of the process."""
    line = [sys.executable, "-c", AT_EXIT, str(int(signal.SIGTERM))]
    done = forked.run(line, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


# A command that swallows the first signal; the clock is an hour later at the second.
DEAF = """
import os, signal, time
from pathlib import Path
from dlm import files, signals
from dlm.cli import main
def run(**_):
    with files.replacing(Path("x.arpa")) as file:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            pass
        signals.time.monotonic = lambda now=time.monotonic(): now + 3600.0
        os.kill(os.getpid(), signal.SIGINT)
    print("deaf")
main.program = lambda *_, **__: run
main.main()
"""


@pytest.mark.promise("exit_statuses")
def test_the_second_signal_always_ends_the_command(tmp_path: Path) -> None:
    """Where code swallowed the first; what was half written is removed all the same."""
    line = [sys.executable, "-c", DEAF]
    done = forked.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")
    assert list(tmp_path.iterdir()) == []


# `python -m dlm`, which gets Ctrl-C while it imports what it runs.
AT_START = """
import builtins, os, runpy, signal
real = builtins.__import__
def interrupted(name, *rest, **named):
    if name == os.environ["AT"]:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **named)
builtins.__import__ = interrupted
runpy.run_module("dlm", run_name="__main__")
"""


@pytest.mark.parametrize(("at", "status"), [("dlm.signals", -signal.SIGINT), ("typer", 130)])
def test_ctrl_c_while_the_command_starts_prints_no_traceback(at: str, status: int) -> None:
    """Its modules take longer to import than many commands to run."""
    line, environ = [sys.executable, "-c", AT_START], os.environ | {"AT": at}
    done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
