"""dlm.client.loop: what other threads leave for the loop is taken, whatever else fails."""

from __future__ import annotations

import logging
import threading
from math import inf

from client.scripted import Network, Scripted, settle
from cluster import WAIT_S, until
from dlm.client import loop


def test_what_nobody_woke_the_loop_for_is_taken_with_its_next_step(cluster, connect) -> None:
    """Whoever was about to wake it was cut off; a heartbeat's timer comes next."""
    client, taken = connect(cluster, heartbeats=True), threading.Event()
    client.utterance()
    settle(client)
    loop.running().mailbox.woken_until = inf
    loop._posted.append((taken.set, ()))
    assert taken.wait(WAIT_S)


def test_a_log_handler_that_raises_holds_up_no_later_step() -> None:
    """A step fails, and so does saying so."""

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left")

    def fail() -> None:
        raise ValueError

    logger, full, taken = logging.getLogger("dlm.client"), Full(), threading.Event()
    logger.addHandler(full)
    try:
        loop.post(fail)
        loop.post(taken.set)
        assert taken.wait(WAIT_S)
    finally:
        logger.removeHandler(full)


def test_a_step_that_nobody_waits_for_and_raises_is_logged(cluster, connect, caplog) -> None:
    """With the kind of its error."""

    def fail() -> None:
        raise ValueError

    client = connect(cluster)
    client._core._delivery.tell(fail)
    until(lambda: [r for r in caplog.records if getattr(r, "event", "") == "client.loop.failed"])
    (logged,) = (r for r in caplog.records if getattr(r, "event", "") == "client.loop.failed")
    assert logged.error == "ValueError"


def test_one_who_waits_for_a_connection_and_raises_harms_no_other(cluster, connect) -> None:
    """A server is reached for a heartbeat and for messages at once."""
    network, both, heard = Network(), threading.Event(), threading.Event()
    client = connect(cluster.addresses, network, heartbeats=False)
    client.utterance()
    core, made = client._core, network.connect

    def slowly(address: str) -> Scripted:
        assert both.wait(WAIT_S)
        return made(address)

    core._links._connect = slowly

    def raises(made: object) -> None:
        raise MemoryError("no room")

    def begin() -> None:
        for then in (raises, lambda made: heard.set()):
            core._links.reach("elsewhere:1", core._delivery.tell, then)
        both.set()

    core._delivery.tell(begin)
    assert heard.wait(WAIT_S)


def test_what_is_posted_while_no_loop_may_run_is_done_by_the_next(request) -> None:
    """As during a fork, by many threads; one loop is started for all of it."""
    request.addfinalizer(loop.resume)
    loop.suspend(lambda: None)
    done = [threading.Event() for _ in range(20)]
    for one in done:
        loop.post(one.set)
    assert not any(one.is_set() for one in done) and not loop.leave(done[0].set)
    loop.resume()
    assert all(one.wait(WAIT_S) for one in done)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("dlm-client") == 1
