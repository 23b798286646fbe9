"""What the watch makes of the clock and of its host: ticks on a clock that the test moves."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from cluster import ModelFiles, build
from dlm.client import cascade
from dlm.client.cascade import CALM_S, TICK_S, BeatReply, CascadeMonitor
from dlm.client.config import FailoverConfig, HeartbeatConfig
from dlm.client.health import Liveness, Mode, Topology
from dlm.errors import AuthenticationError, DlmError, ShardDown
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason, error_from_refusal
from models import random_model


class Wired:
    """A host with servers of one shard, whose heartbeats take `trip_s` and more; and the clock, and
    the loop, which does one thing after another.

    Attributes
        ticks  so far
        out    heartbeats that were not answered yet
    """

    def __init__(
        self, files: ModelFiles, trip_s: float = 0.001, servers: tuple[str, ...] = ("server:1",)
    ) -> None:
        self.now = 0.0
        self.trip_s = trip_s
        self.more_s: dict[str, float] = {}  # by the server
        self.state: pb.ServerState = pb.SERVER_STATE_READY
        self.error: DlmError | None = None  # instead of an answer
        self.ticks = self.out = 0
        self._topology = Topology(files.manifest, {0: servers}, {})
        self.steps = self  # or another's
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.renew = self.refresh_later = self.follow = lambda *_: None

    def carry_out(self, step: Callable[..., None], *args: Any) -> None:
        """See `core.Lanes`."""
        step(*args)

    def later(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        """See `core.Lanes`."""
        self._number += 1
        heapq.heappush(self._planned, (self.now + delay_s, self._number, step, args))

    def known(self) -> Topology:
        """See `core.Lanes`; each tick asks it once."""
        self.ticks += 1
        return self._topology

    def beat(
        self, address: str, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        """See `core.Lanes`."""
        self.out += 1
        self.later(self.trip_s + self.more_s.get(address, 0.0), self._answer, reply)

    def _answer(self, reply: BeatReply) -> None:
        self.out -= 1
        found = pb.HeartbeatReply(instance=1, state=self.state)
        reply(None if self.error else found, self.error)

    def ask_probe(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        """See `core.Lanes`: answered at once."""
        done(True)

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """All that is planned in its time; `each` every fifth of a second."""
        end = self.now + seconds
        while self.now < end:
            each()
            then = min(self.now + 0.2, end)
            while self._planned and self._planned[0][0] <= then:
                at, _, call, args = heapq.heappop(self._planned)
                self.now = max(self.now, at)
                call(*args)
            self.now = max(self.now, then)


def watching(host: Wired, failover_config: FailoverConfig | None = None) -> CascadeMonitor:
    """A watch that has begun."""
    watch = CascadeMonitor(
        host,
        HeartbeatConfig(),
        failover_config or FailoverConfig(),
        may_switch=True,
        clock=lambda: host.now,
    )
    watch.begin()
    return watch


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
    host.run(20.0, lambda: watch.count(False))
    host.now += 4.0
    for _ in range(50):
        watch.count(True)
    host.run(3.5, lambda: watch.count(True))
    host.run(20.0, lambda: watch.count(False))
    assert watch.mode is Mode.FULL and not watch.switches
    host.run(1.0, lambda: watch.count(True))
    assert watch.mode is Mode.LOCAL_FALLBACK


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_model_that_asks_nobody_is_not_left_for_a_slow_network(
    tmp_path: Path, order: int, caplog
) -> None:
    """Of order 2 and less the client has all; of order 3 the same delay is reason enough, and told
    with the shard."""
    model = random_model(2, order=order, words=10, per_order=20)
    host = Wired(build(model, tmp_path, 1))
    watch = watching(host)
    host.run(20.0)
    host.trip_s = 0.2
    host.run(20.0)
    assert watch.status().servers[0].delay_s == pytest.approx(0.2, abs=0.06)
    assert watch.mode is (Mode.LOCAL_FALLBACK if order > 2 else Mode.FULL)
    assert watch.status().reason == ("delay" if order > 2 else "")
    told = [r for r in caplog.records if getattr(r, "event", "") == "client.mode.changed"]
    assert [(r.reason, r.slow_shards, r.failed) for r in told] == [("delay", [0], 0)] * (order > 2)


def test_a_server_that_is_far_slower_than_another_of_its_shard_is_known_for_it(files) -> None:
    """Though it was never quicker; and no longer once it is as quick. The mode stays."""
    host = Wired(files, servers=("near:1", "far:1", "farther:1"))
    host.more_s = {"far:1": 0.1, "farther:1": 0.3}
    watch = watching(host)
    host.run(10.0)
    assert watch.slow == {"far:1", "farther:1"}
    host.more_s = {"far:1": 0.01, "farther:1": 0.3}  # ten times as long, and hardly longer
    host.run(10.0)
    assert watch.slow == {"farther:1"}
    host.more_s = {"near:1": 1e9}
    host.run(10.0)
    assert (watch.avoided, watch.slow, watch.mode) == ({"near:1"}, frozenset(), Mode.FULL)


def test_ticks_are_few_while_all_is_well_and_many_while_something_is_not(files) -> None:
    """While servers come up, while one is silent, and for a window after a failure."""
    host = Wired(files)
    watch = watching(host)

    def a_second() -> int:
        before = host.ticks
        host.run(1.0)
        return host.ticks - before

    few, many = round(1 / CALM_S), round(1 / TICK_S)
    assert watch.pause_s == TICK_S
    host.run(20.0)
    assert abs(a_second() - few) <= 1
    watch.count(True)
    assert abs(a_second() - many) <= 1
    host.run(20.0, lambda: watch.count(False))
    assert abs(a_second() - few) <= 1
    host.trip_s = 1e9
    host.run(5.0)
    assert watch.status().servers[0].health is Liveness.DOWN
    assert abs(a_second() - many) <= 1


def test_bad_news_is_not_waited_for_and_much_of_it_makes_no_more_ticks(files) -> None:
    """The next tick comes at once, and after that one in its time."""
    host = Wired(files)
    watch = watching(host)
    host.run(20.0 + TICK_S)  # a little after a tick, long before the next
    assert watch.status().for_s == pytest.approx(20.0, abs=2 * CALM_S)  # since it began
    for _ in range(FailoverConfig().min_failures):
        watch.count(True)
    host.run(TICK_S)
    assert watch.mode is Mode.LOCAL_FALLBACK
    assert watch.status().for_s < 1.1  # since the switch
    host.run(20.0)
    assert watch.mode is Mode.FULL
    beats = watch.status().servers[0]
    assert beats.health is Liveness.UP
    watch.lost("server:1", ShardDown("gone"))
    assert watch.status().servers[0].health is Liveness.SUSPECT
    host.run(2 * TICK_S)
    assert watch.status().servers[0].health is Liveness.UP  # it was asked, and answered
    before = host.ticks
    for _ in range(100):
        watch.count(True)
        watch.lost("server:1", ShardDown("gone"))
        host.run(TICK_S / 100)
    assert host.ticks - before <= 2


def test_a_server_is_not_blamed_for_answers_that_this_process_did_not_hear(files, caplog) -> None:
    """It stood still for two seconds while a heartbeat was out; the answer was there by then."""
    host = Wired(files, trip_s=0.1)
    watch = watching(host)
    host.run(20.0)
    while not host.out:
        host.run(0.01)
    host.now += 2.0
    caplog.clear()
    host.run(20.0)
    assert watch.status().servers[0].health is Liveness.UP
    assert not caplog.records


def test_the_log_says_why_a_server_is_not_asked_and_when_it_is_up_again(files, caplog) -> None:
    """As warnings, which a program without handlers shows; a server that was never away is none."""
    caplog.set_level(logging.INFO, "dlm.client")
    host = Wired(files)
    watch = watching(host)
    host.run(2.0)

    def told() -> list[tuple[str, ...]]:
        """What was logged since the last time."""
        records = [r for r in caplog.records if getattr(r, "event", "") == "client.server.changed"]
        caplog.clear()
        return [(r.levelname, r.before, r.after, r.reason) for r in records]

    assert told() == [("INFO", "suspect", "up", "answered")]
    for reason, why, state in (
        (Reason.DRAINING, "draining", pb.SERVER_STATE_DRAINING),
        (Reason.NOT_READY, "warming", pb.SERVER_STATE_WARMING),
    ):
        host.state = state
        watch.lost("server:1", error_from_refusal(reason, "ask a replica", where="here"))
        host.run(5.0)
        host.state = pb.SERVER_STATE_READY
        host.run(2.0)
        assert told() == [
            ("WARNING", "up", "not_ready", why),
            ("WARNING", "not_ready", "up", "answered"),
        ]
    host.error = AuthenticationError("an old tokens file")
    host.run(10.0)
    host.error = None
    host.run(2.0)
    assert told() == [
        ("WARNING", "up", "suspect", "unauthenticated"),
        ("WARNING", "suspect", "down", "unauthenticated"),
        ("WARNING", "down", "up", "answered"),
    ]
    watch.lost("server:1", ShardDown("connection refused"))
    host.run(2.0)
    assert told() == [
        ("WARNING", "up", "suspect", "lost"),
        ("WARNING", "suspect", "up", "answered"),
    ]
    # Beats that are late are warnings only once the server counts as down.
    for silent_s, lost in ((1.2, ()), (10.0, (("WARNING", "suspect", "down", "silent"),))):
        host.more_s["server:1"] = inf
        host.run(silent_s)
        host.more_s.clear()
        host.run(5.0)
        back = ("WARNING", "down", "up") if lost else ("INFO", "suspect", "up")
        assert told() == [("INFO", "up", "suspect", "silent"), *lost, (*back, "answered")]


def test_a_tick_and_a_log_handler_that_raise_do_not_end_the_watch(files, monkeypatch) -> None:
    """It must find that the servers are well again."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    host = Wired(files)
    watch = watching(host)
    with monkeypatch.context() as broken:
        broken.setattr(cascade.log, "error", full)
        broken.setattr(host, "follow", full)
        with pytest.raises(OSError, match="space"):
            host.run(1.0)
    before = host.ticks
    host.run(5.0)
    assert host.ticks > before
    watch.stop()
