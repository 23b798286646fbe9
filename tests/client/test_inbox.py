"""dlm.client.deliver.lanes: what other threads leave for the loop is taken, whatever else fails."""

from __future__ import annotations

import threading
from math import inf

from client.scripted import Network, Scripted, settle
from cluster import WAIT_S, until
from dlm.client.deliver import fork


def test_what_nobody_woke_the_loop_for_is_taken_with_its_next_step(cluster, connect) -> None:
    """Whoever was about to wake it was cut off; a heartbeat's timer comes next."""
    client, taken = connect(cluster, heartbeats=True), threading.Event()
    client.utterance()
    settle(client)
    runtime = client._core._runtime
    runtime.woken_until = inf
    runtime.inbox.append((taken.set, ()))
    assert taken.wait(WAIT_S)


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


class Resumed:
    """Streams that count how often they were resumed."""

    def __init__(self) -> None:
        self.times = 0

    def suspend(self) -> None:
        """See `fork.Streams`."""

    def resume(self) -> None:
        """See `fork.Streams`."""
        self.times += 1

    def give_up(self, cause: Exception) -> None:
        """See `fork.Streams`."""
        raise cause


def test_a_loop_that_many_wait_for_is_started_by_one_thread() -> None:
    """While a fork lasts, which none of them waits for; and again when it is needed again."""
    streams = Resumed()
    with fork.inside():
        before = threading.active_count()
        for _ in range(20):
            fork.wake(streams)
        assert threading.active_count() <= before + 1
    until(lambda: streams.times == 1)
    fork.wake(streams)
    until(lambda: streams.times == 2)
