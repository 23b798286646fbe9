"""What the watch makes of the clock and of its host: ticks on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import WAIT_S, ModelFiles, build, until
from dlm.client import cascade
from dlm.client.cascade import CALM_S, TICK_S, CascadeMonitor
from dlm.client.membership import Beating, Liveness
from dlm.client.modes import Mode, Switching
from dlm.client.topology import Topology
from dlm.client.transport import BeatReply
from dlm.wire._pb import shard_pb2 as pb
from models import random_model


class Wired:
    """A host with servers of one shard, whose heartbeats take `trip_s` and more; and the clock."""

    def __init__(
        self, files: ModelFiles, trip_s: float = 0.001, servers: tuple[str, ...] = ("server:1",)
    ) -> None:
        self.now = 0.0
        self.trip_s = trip_s
        self.more_s: dict[str, float] = {}  # by the server
        self._address = ""
        self._topology = Topology(files.manifest, {0: servers}, {})
        self._coming: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def known(self) -> Topology:
        """See `cascade.Host`."""
        return self._topology

    def connection(self, address: str) -> Any:
        """To the server, which a heartbeat asks at once."""
        self._address = address
        return self

    def heartbeat_later(
        self, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        """See `Connection.heartbeat_later`."""
        answer = pb.HeartbeatReply(instance=1, state=pb.SERVER_STATE_READY)
        trip_s = self.trip_s + self.more_s.get(self._address, 0.0)
        self._coming.append((self.now + trip_s, lambda: reply(answer, None)))

    def renew(self, address: str) -> None:
        """See `cascade.Host`."""

    def refresh_later(self) -> None:
        """See `cascade.Host`."""

    def follow(self) -> None:
        """See `cascade.Host`."""

    def ask_canary(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        """See `cascade.Host`: answered at once."""
        done(True)

    def run(
        self, watch: CascadeMonitor, seconds: float, each: Callable[[], None] = lambda: None
    ) -> None:
        """Ticks in their time, replies in theirs."""
        end = self.now + seconds
        while self.now < end:
            then = self.now + watch.pause_s
            for when, reply in sorted(
                (c for c in self._coming if c[0] <= then), key=lambda c: c[0]
            ):
                self.now = max(self.now, when)
                reply()
            self._coming = [c for c in self._coming if c[0] > then]
            self.now = then
            each()
            watch.tick(self)


def watching(host: Wired) -> CascadeMonitor:
    """A watch whose thread is not begun."""
    return CascadeMonitor(host, Beating(), Switching(), may_switch=True, clock=host.clock)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model in one shard."""
    model = random_model(1, order=3, words=10, per_order=20)
    return build(model, tmp_path_factory.mktemp("watched"), 1)


def test_what_fails_while_the_client_itself_stood_still_sends_nobody_to_the_small_model(
    files,
) -> None:
    """It was stopped for four seconds, so that all that was under way came too late."""
    host = Wired(files)
    watch = watching(host)
    host.run(watch, 20.0, lambda: watch.count(False))
    host.now += 4.0
    for _ in range(50):
        watch.count(True)
    host.run(watch, 3.5, lambda: watch.count(True))
    host.run(watch, 20.0, lambda: watch.count(False))
    assert watch.mode is Mode.FULL and not watch.switches
    host.run(watch, 1.0, lambda: watch.count(True))
    assert watch.mode is Mode.SMALL


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_model_that_asks_nobody_is_not_left_for_a_slow_network(
    tmp_path: Path, order: int, caplog
) -> None:
    """Of order 2 and less the client has all; of order 3 the same delay is reason enough, and told
    with the shard."""
    model = random_model(2, order=order, words=10, per_order=20)
    host = Wired(build(model, tmp_path, 1))
    watch = watching(host)
    host.run(watch, 20.0)
    host.trip_s = 0.2
    host.run(watch, 20.0)
    assert watch.status().servers[0].delay_s == pytest.approx(0.2, abs=0.06)
    assert watch.mode is (Mode.SMALL if order > 2 else Mode.FULL)
    assert watch.status().reason == ("delay" if order > 2 else "")
    told = [r for r in caplog.records if getattr(r, "event", "") == "client.mode.changed"]
    assert [(r.reason, r.slow_shards, r.failed) for r in told] == [("delay", [0], 0)] * (order > 2)


def test_a_server_that_is_far_slower_than_another_of_its_shard_is_known_for_it(files) -> None:
    """Though it was never quicker; and no longer once it is as quick. The mode stays."""
    host = Wired(files, servers=("near:1", "far:1", "farther:1"))
    host.more_s = {"far:1": 0.1, "farther:1": 0.3}
    watch = watching(host)
    host.run(watch, 10.0)
    assert watch.slow == {"far:1", "farther:1"}
    host.more_s = {"far:1": 0.01, "farther:1": 0.3}  # ten times as long, and hardly longer
    host.run(watch, 10.0)
    assert watch.slow == {"farther:1"}
    host.more_s = {"near:1": 1e9}
    host.run(watch, 10.0)
    assert (watch.avoided, watch.slow, watch.mode) == ({"near:1"}, frozenset(), Mode.FULL)


def test_how_long_a_mode_lasts_counts_from_the_start_of_the_client(files) -> None:
    """Then from the switch."""
    host = Wired(files)
    watch = watching(host)
    host.run(watch, 3.0)
    assert watch.status().for_s == pytest.approx(3.0, abs=2 * CALM_S)
    host.run(watch, 1.0, lambda: watch.count(True))
    assert watch.mode is Mode.SMALL
    assert watch.status().for_s < 1.1


def test_ticks_are_few_while_all_is_well_and_many_while_something_is_not(files) -> None:
    """While servers come up, while one is silent, and for a window after a failure."""
    host = Wired(files)
    watch = watching(host)
    assert watch.pause_s == TICK_S
    host.run(watch, 20.0)
    assert watch.pause_s == CALM_S
    watch.count(True)
    host.run(watch, 5.0)
    assert watch.pause_s == TICK_S
    host.run(watch, 20.0, lambda: watch.count(False))
    assert watch.pause_s == CALM_S
    host.trip_s = 1e9
    silent = host.now
    while watch.status().servers[0].health is not Liveness.DOWN:
        host.run(watch, watch.pause_s)
    assert watch.pause_s == TICK_S
    config = Beating()
    most = config.interval_s * (1 + config.jitter) + config.down_after * config.timeout_s
    assert host.now - silent < most + CALM_S + config.down_after * 2 * TICK_S


def test_bad_news_and_the_end_are_not_waited_for(files, monkeypatch) -> None:
    """The thread sleeps long, but wakes for them."""
    monkeypatch.setattr(cascade, "CALM_S", 3 * WAIT_S)
    host = Wired(files, trip_s=0.0)

    def answered(request, timeout_s: float, reply: BeatReply) -> None:
        reply(pb.HeartbeatReply(instance=1, state=pb.SERVER_STATE_READY), None)

    host.heartbeat_later = answered  # type: ignore[method-assign]
    watch = CascadeMonitor(host, Beating(), Switching(), may_switch=True).start()
    until(lambda: watch.pause_s == 3 * WAIT_S)
    for _ in range(Switching().min_failures):
        watch.count(True)
    until(lambda: watch.mode is Mode.SMALL)
    until(lambda: watch.mode is Mode.FULL and watch.pause_s == 3 * WAIT_S)
    beats = watch._members["server:1"].beats
    watch.lost("server:1")
    until(lambda: watch._members["server:1"].beats > beats)
    watch.stop()
    watch._thread.join(WAIT_S)
    assert not watch._thread.is_alive()
