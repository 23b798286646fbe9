"""dlm.server.process: what a server process says of itself."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

from dlm.server.process import (
    MEMORY_AGE_S,
    MEMORY_SHARE,
    MemoryGauge,
    OpenFiles,
    Process,
    private_memory,
)

MIB = 1 << 20


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
    command = [sys.executable, "-c", MEASURE, str(path)]
    mapped, own = map(int, subprocess.check_output(command).split())
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
    """Whoever looks, once a second, must go on: a worker that does not is taken for stuck."""
    fault = OSError(errno.ENOMEM, "Cannot allocate memory")

    def room() -> None:
        raise fault

    files = OpenFiles(room)
    assert files.check() == ""
    fault = OSError(errno.EMFILE, "Too many open files")
    assert "limit" in files.check()
    fault = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert "limit" in files.check()
