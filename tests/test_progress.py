"""How far a job is, on a clock that the test moves."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlm.cli import output as waiting
from dlm.cli.output import stage_printer
from dlm.progress import COMPILING, CompilingNotice, ProgressReporter, compiling_notice

WAIT_S = 60.0


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Reported = tuple[list[str], Clock, ProgressReporter]


@pytest.fixture
def reported() -> Reported:
    """What is said, the clock, and what reports."""
    said: list[str] = []
    clock = Clock()
    return said, clock, ProgressReporter(said.append, interval_s=5, clock=clock)


def test_a_stage_tells_rate_share_and_time_left_every_few_seconds(reported: Reported) -> None:
    """Of the stage that is under way: the next begins from nothing."""
    said, clock, progress = reported
    progress.stage("sorting", 200, "n-grams")
    clock.now += 4
    progress.step(20)
    assert said == ["sorting"]
    clock.now += 1
    progress.step(30)
    assert said[1:] == ["sorting: 50 n-grams, 10 n-grams/s, 25 %, 15 s left"]
    progress.stage("joining", 10, "n-grams")
    clock.now += 10
    progress.step(20)  # more than was expected
    assert said[2:] == ["joining", "joining: 20 n-grams, 2 n-grams/s, 100 %, 0 s left"]


def test_slow_units_have_a_rate(reported: Reported) -> None:
    """As rounds of training, which take seconds or minutes."""
    said, clock, progress = reported
    progress.stage("training", 10, "rounds")
    clock.now += 8
    progress.step(2)
    assert said[1:] == ["training: 2 rounds, 0.25 rounds/s, 20 %, 32 s left"]


def test_without_a_total_no_share_is_told(reported: Reported) -> None:
    """As for text from a pipe; the measure of the share need not be the unit."""
    said, clock, progress = reported
    progress.stage("counting")
    clock.now += 8
    progress.at(0, 0, 4_000, "words")
    clock.now += 8
    progress.at(512, 1024, 8_000, "words")
    assert said[1:] == [
        "counting: 4,000 words, 500 words/s",
        "counting: 8,000 words, 500 words/s, 50 %, 16 s left",
    ]


# -- kernels that compile at their first call --------------------------------------------------


def test_the_notice_is_given_once_and_only_where_compiling_takes_long() -> None:
    """Seconds between two kernels do not count, and a kernel within another is no second one."""
    said: list[str] = []
    clock = Clock()
    notice = CompilingNotice(said.append, clock=clock)
    for _ in range(3):
        notice.begin()
        notice.begin()
        clock.now += 0.3
        notice.end()
        notice.end()
        clock.now += 3600
    assert said == []
    assert notice.spent_s == pytest.approx(0.9)
    for _ in range(2):
        notice.begin()
        clock.now += 0.3
        notice.end()
    assert said == [COMPILING]


def test_a_command_s_notice_counts_the_kernels_compiled_so_far() -> None:
    """At most every `every_s`; their number is not known ahead."""
    said: list[str] = []
    clock = Clock()
    notice = CompilingNotice(said.append, every_s=5, clock=clock)
    notice.use(said.append, every_s=5)
    for _ in range(5):
        notice.begin()
        clock.now += 2
        notice.end()
    assert said == [COMPILING, f"{COMPILING}: 3 so far"]


def test_the_notice_is_given_while_one_kernel_takes_long() -> None:
    """No second one need begin."""
    told = threading.Event()
    notice = CompilingNotice(lambda line: told.set(), silent_s=0.01)
    notice.begin()
    assert told.wait(WAIT_S)


def test_kernels_that_are_counted_ahead_give_no_notice() -> None:
    """Something else reported them; what is compiled soon after is no news."""
    said: list[str] = []
    clock = Clock()
    notice = CompilingNotice(said.append, clock=clock)
    with notice.hidden():
        notice.begin()
        clock.now += 60
        notice.end()
    with notice.compiling(3):
        clock.now += 4
    assert said == []


def test_kernels_that_are_compiled_ahead_are_counted_by_the_notice() -> None:
    """In its first line and in every later one: a gateway's and a client's, too."""
    said: list[str] = []
    clock = Clock()
    notice = CompilingNotice(said.append, every_s=5, clock=clock)
    with notice.compiling(9) as count:
        for done in range(1, 4):
            clock.now += 4
            count(done, 9)
    notice.begin()
    clock.now += 60
    notice.end()
    assert said == [f"{COMPILING}: 1 of 9", f"{COMPILING}: 3 of 9", f"{COMPILING}: 9 so far"]


def test_a_quiet_command_gives_no_notice(capsys: pytest.CaptureFixture[str]) -> None:
    """And one that is not quiet gives it on standard error."""
    tell, every_s = compiling_notice.tell, compiling_notice._every_s
    try:
        for quiet in (True, False):
            stage_printer(quiet=quiet, timed=False)
            compiling_notice.tell("compiling")
            assert capsys.readouterr().err == ("" if quiet else "compiling\n")
    finally:
        compiling_notice.use(tell, every_s=every_s)


def test_a_command_says_at_once_on_a_terminal_that_it_works(tmp_path: Path) -> None:
    """Here one that waits for its input, and tells no stage."""
    said, heard = tmp_path / "said", tmp_path / "heard"
    os.mkfifo(said)
    heard.write_text("one two\n")
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "dlm.cli.main", "wer", str(said), str(heard)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal) as process:
        try:
            shown = b""
            while b"working ...\r\n" not in shown:
                shown += os.read(ours, 100)
            said.write_text("one two\n")
            out, _ = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            os.close(terminal)
            os.close(ours)
    assert process.returncode == 0
    assert out.startswith(b"WER\t0.00 %")


def test_a_line_and_its_end_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else lines of threads that report at the same time are joined."""
    written: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", written.append)
    stage_printer(timed=False)("counting")
    assert written == ["counting\n"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_first_stage_or_a_pipe_makes_it_say_nothing(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """No timer is left."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    waiting.begin_waiting(WAIT_S)
    begun = list(waiting._waiting)
    assert len(begun) == is_terminal
    stage_printer()("counting")
    assert waiting._waiting == []
    for timer in begun:
        timer.join(WAIT_S)
        assert timer.finished.is_set()
