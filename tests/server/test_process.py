"""dlm.server.process: what a server process says of itself."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster import ROOT, WAIT_S, free_ports
from dlm.server.process import (
    MEMORY_AGE_S,
    MEMORY_SHARE,
    MemoryGauge,
    OpenFiles,
    PortMates,
    Process,
    Watchdog,
    private_memory,
)

MIB = 1 << 20


def python(program: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """What became of a program."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


# In a process of its own: threads of other tests take and free memory meanwhile.
MEASURE = """
import mmap, sys
from dlm.server.process import private_memory
before = private_memory()
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert mapped.find(b"x") == -1  # every page is touched
print(private_memory() - before)
own = mmap.mmap(-1, len(mapped))
own.write(b"x" * len(mapped))
print(private_memory() - before)
"""


def test_private_memory_counts_what_is_written_and_not_what_is_mapped(tmp_path: Path):
    """64 MiB of our own count; 64 MiB of a file do not."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(bytes(64 * MIB))
        os.fsync(file.fileno())  # as the builder does; until then the pages count as written here
    mapped, own = map(int, python(MEASURE, str(path)).stdout.split())
    assert mapped < 8 * MIB
    assert 60 * MIB < own < 80 * MIB


def test_without_the_summary_of_the_system_the_short_form_answers(tmp_path: Path):
    """An old kernel has statm: resident pages less those of files."""
    (tmp_path / "statm").write_text("1000 700 200 1 0 500 0\n")
    assert private_memory(tmp_path) == 500 * 4096
    (tmp_path / "smaps_rollup").write_text(
        "5603b85d6000-7fff8a8af000 ---p 00000000 00:00 0 [rollup]\n"
        "Rss: 900 kB\nPrivate_Clean: 7 kB\nPrivate_Dirty: 30 kB\nSwapPss: 2 kB\n"
    )
    assert private_memory(tmp_path) == 32 * 1024


def test_only_the_first_reading_is_waited_for():
    """Then the last number is given while a thread finds the next; no second thread meanwhile."""
    now = [0.0]
    gate, reading, calls = threading.Event(), threading.Event(), []

    def read() -> int:
        calls.append(threading.current_thread())
        if len(calls) > 1:
            reading.set()
            assert gate.wait(300)
            now[0] += 1.0  # the reading took a second
        return 100 * len(calls)

    gauge = MemoryGauge(read, lambda: now[0])
    assert gauge.bytes() == gauge.bytes() == 100
    assert calls == [threading.current_thread()]
    now[0] = MEMORY_AGE_S
    assert gauge.bytes() == 100
    assert reading.wait(300)
    assert gauge.bytes() == 100
    assert len(calls) == 2
    gate.set()
    calls[1].join(60)
    assert gauge.bytes() == 200
    # A reading that took a second is not repeated within a hundred.
    now[0] += MEMORY_SHARE - 1
    assert gauge.bytes() == 200
    assert len(calls) == 2


def test_processes_draw_different_numbers():
    """Never 0, which is what an absent field reads as."""
    numbers = {Process().instance for _ in range(50)}
    assert len(numbers) == 50
    assert all(0 < number < 1 << 64 for number in numbers)


def test_a_file_that_cannot_be_opened_for_another_reason_is_no_trouble_and_no_error():
    """Whoever looks, once a second, must go on: a process that does not ends."""
    fault = OSError(errno.ENOMEM, "Cannot allocate memory")

    def room() -> None:
        raise fault

    files = OpenFiles(room)
    assert files.check() == ""
    fault = OSError(errno.EMFILE, "Too many open files")
    assert "limit" in files.check()
    fault = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert "limit" in files.check()


HANGS = """
import sys, time
from dlm.server import process
process.HUNG_S = 0.5
watchdog = process.Watchdog(ends=True)
watchdog.beat()
if sys.argv[1] == "ends":
    watchdog.close()
time.sleep(1.5)
"""


@pytest.mark.parametrize(("ending", "says"), [("hangs", "Timeout"), ("ends", "")])
@pytest.mark.promise("hung_or_dead")
def test_a_process_whose_loop_does_not_run_ends_with_a_traceback(ending: str, says: str):
    """So that whatever supervises it starts another; one that ends by itself is left alone."""
    done = python(HANGS, ending)
    assert (done.returncode != 0) == bool(says)
    assert says in done.stderr


NO_ROOM = """
import os, resource, sys
from dlm.server.process import MEMORY_AGE_S, MemoryGauge, Watchdog
now, reads = [0.0], []
watchdog = Watchdog(ends=True)
gauge = MemoryGauge(lambda: reads.append(1) or len(reads), lambda: now[0])
assert gauge.bytes() == 1
kind = getattr(resource, sys.argv[1])
soft, hard = resource.getrlimit(kind)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * 4096
resource.setrlimit(kind, (0 if sys.argv[1] == "RLIMIT_NOFILE" else size + (2 << 20), hard))
now[0] += MEMORY_AGE_S
watchdog.beat()
gauge.bytes()
resource.setrlimit(kind, (soft, hard))
while gauge.bytes() == 1:
    now[0] += MEMORY_AGE_S
watchdog.close()
"""


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_AS"])
def test_without_a_descriptor_or_a_thread_a_process_lives_on(limit: str, tmp_path: Path):
    """It beats, and shows the memory that it knew; the next look finds it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        done = python(NO_ROOM, limit, NOTIFY_SOCKET=str(tmp_path / "notify"))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_is_told_that_it_is_ready_and_lives(tmp_path: Path, monkeypatch):
    """And its children are not asked to say so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        watchdog = Watchdog(ends=True)
        watchdog.ready()
        watchdog.beat()
        watchdog.close()
        assert [manager.recv(64) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]
    assert "NOTIFY_SOCKET" not in os.environ


def test_processes_on_a_port_know_of_each_other(tmp_path: Path):
    """By names of the system's, which go with them; who serves other sets is told apart."""
    port = f"127.0.0.1:{free_ports(1)[0]}"
    now = [0.0]
    one, two = (PortMates(port, clock=lambda: now[0]) for _ in range(2))
    others = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    others.bind(b"\0dlm \xff")  # whatever others name theirs
    one.show([b"a"])
    assert one.count() == (1, 1)
    program = (
        "import sys, time\nfrom dlm.server.process import PortMates\n"
        f"mate = PortMates({port!r})\nmate.show([sys.argv[1].encode()])\nprint(flush=True)\n"
        "time.sleep(600)"
    )
    alike, unlike = (
        subprocess.Popen(
            [sys.executable, "-c", program, served],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        for served in "ab"
    )
    for mate in (alike, unlike):
        assert mate.stdout is not None
        mate.stdout.readline()
    now[0] += 60
    assert one.count() == (3, 2)
    no_room = PortMates(port, tmp_path / "absent")  # as when no descriptor is left
    no_room.show([b"c"])
    assert no_room.count() == (1, 1)
    no_room.close()
    for mate in (alike, unlike):
        mate.kill()
        mate.wait()
        assert mate.stdout is not None
        mate.stdout.close()
    now[0] += 60
    one.show([b"b"])
    assert one.count() == (1, 1)
    one.close()
    others.close()
    assert two.count() == (1, 1)
