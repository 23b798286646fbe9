"""dlm.client.loop: steps are taken, whatever else fails; and what a forked child finds of locks."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from math import inf
from queue import SimpleQueue

import numpy as np
import pytest

from client.questions import events
from client.scripted import settle
from cluster import WAIT_S, until
from dlm.client import Phrases, kernels, loop
from dlm.ngram.vocab import Vocabulary


def test_what_nobody_woke_the_loop_for_is_taken_with_its_next_step(cluster, connect) -> None:
    """Whoever was about to wake it was cut off; a heartbeat's timer comes next."""
    client, taken = connect(cluster, heartbeats=True), threading.Event()
    client.utterance()
    settle()
    loop.running().mailbox.woken_until = inf
    loop._posted.append((taken.set, ()))
    assert taken.wait(WAIT_S)


def test_a_step_that_raises_is_logged_and_holds_up_no_later_step(caplog) -> None:
    """With the kind of its error, which nobody waits for; also where saying so fails."""

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left")

    def fail() -> None:
        raise ValueError

    loop.post(fail)
    until(lambda: events(caplog, "client.loop.failed"))
    assert caplog.records[-1].error == "ValueError"
    logger, full = logging.getLogger("dlm.client"), Full()
    logger.addHandler(full)
    try:
        loop.post(fail)
        settle()
    finally:
        logger.removeHandler(full)


def test_a_child_can_compile_though_another_thread_did_when_it_was_forked() -> None:
    """A first call of a kernel takes numba's lock, and a fork waits until nobody has it."""
    loop.register_forks()
    held, done = threading.Event(), threading.Event()

    def compile_something() -> None:
        with kernels.COMPILER:
            held.set()
            done.wait(WAIT_S)

    thread = threading.Thread(target=compile_something)
    thread.start()
    assert held.wait(WAIT_S)
    threading.Timer(0.3, done.set).start()  # while the fork waits
    child = os.fork()
    if not child:
        free = kernels.COMPILER._lock.acquire(timeout=1.0)
        os._exit(0 if free else 1)
    thread.join(WAIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not kernels.COMPILER.is_locked()  # by this thread, which gave it back


def test_a_child_can_open_utterances_though_another_thread_did_when_it_was_forked() -> None:
    """With phrases that another thread prepares for a model at that time."""
    phrases = Phrases({"the man": 1.0})
    held, done = threading.Event(), threading.Event()

    class Slow(Vocabulary):
        def ids_of(self, words):
            held.set()
            done.wait(WAIT_S)
            return np.zeros(len(words), np.uint32)

    slow, other = (kind([b"<unk>", b"the"], unk_in_model=True) for kind in (Slow, Vocabulary))
    thread = threading.Thread(target=phrases.bound, args=(slow,))
    thread.start()
    assert held.wait(WAIT_S)
    child = os.fork()
    if not child:
        asked = threading.Thread(target=phrases.bound, args=(other,), daemon=True)
        asked.start()
        asked.join(1.0)
        os._exit(asked.is_alive())
    done.set()
    thread.join(WAIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert phrases.bound(other) is phrases.bound(other) is not phrases.bound(slow)


def test_a_fork_does_not_wait_until_nothing_is_posted() -> None:
    """What threads post faster than it is run goes on after it."""
    taken, goes_on, ended = [0], [True], list[bool]()

    def again() -> None:
        taken[0] += 1
        if goes_on[0]:
            loop.post(again)

    def suspend() -> None:
        loop._suspend()
        ended.append(loop.is_here())  # elsewhere, after a while, if the loop does not get to it

    loop.post(again)
    until(lambda: taken[0] > 0)
    try:
        loop.suspend(suspend)  # what a fork does
        before = taken[0]
        loop.resume()
        until(lambda: taken[0] > before)
    finally:
        goes_on[0] = False
    assert ended[0]


def test_who_waits_for_work_on_the_loop_is_told_if_it_is_cut_off_before_its_first_step() -> None:
    """A fork begins just then."""
    told, begun = SimpleQueue[BaseException](), threading.Event()

    def wait() -> None:
        begun.wait(WAIT_S)
        try:
            loop.run(lambda: asyncio.sleep(WAIT_S))
        except BaseException as exc:  # noqa: BLE001 - whatever it is
            told.put(exc)

    def cut_off() -> None:
        begun.set()
        until(lambda: bool(loop._posted))
        loop.running().mailbox.run()  # its task is made
        for task in loop.running()._tasks:
            task.cancel()

    threading.Thread(target=wait, daemon=True).start()
    loop.post(cut_off)
    assert isinstance(told.get(timeout=WAIT_S), asyncio.CancelledError)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_work_that_would_end_the_program_leaves_the_loop_to_the_others(error: type) -> None:
    """It ends in the thread that waits for it."""

    async def work() -> None:
        raise error

    with pytest.raises(error):
        loop.run(work)
    settle()
