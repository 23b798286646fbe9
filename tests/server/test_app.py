"""dlm.server.app: a server process from start to end, however it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

import forked
from cluster import WAIT_S, CommandServer, ThreadServer, until
from dlm.errors import ShardFormatError
from dlm.index.search.shard import Shard
from dlm.server.app import ShardServer, warm_up_messages
from dlm.server.config import ServerConfig
from dlm.server.health import Event
from dlm.server.opening import open_shard
from dlm.server.process import Notice, Process, Watchdog
from dlm.server.service import ShardService
from dlm.server.sets import FollowedSets, Sets, Turn, write_sets
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from server.calls import Asked, Caller, GatedShard, outcome, outcome_of

OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_a_server_shows_that_its_loop_runs_until_it_ends(sharded, monkeypatch, caplog):
    """Before it is ready, while it serves, and while it drains; a beat that fails is logged, and
    the next one comes."""
    monkeypatch.setattr("dlm.server.life.BEAT_S", 0.02)
    states: set[str] = set()

    class Watched(Watchdog):
        def beat(self) -> None:
            states.add(server.service.state.name)
            if states == {"WARMING"}:
                raise OSError("no memory")

    async def main() -> int:
        nonlocal server
        ready = asyncio.Event()
        server = ShardServer(
            ServerConfig(),
            [Shard.open(sharded.directory, 0)],
            notice=Notice(lambda _: ready.set()),
            process=Process(watchdog=Watched()),
        )
        running = asyncio.create_task(server.run())
        await asyncio.wait_for(ready.wait(), WAIT_S)
        while "READY" not in states:
            await asyncio.sleep(0.001)
        server.service.admission.enter()
        server.post(Event.STOP)
        while "DRAINING" not in states:
            await asyncio.sleep(0.001)
        server.service.admission.leave()
        return await running

    server: ShardServer
    assert asyncio.run(main()) == 0
    assert states == {"WARMING", "READY", "DRAINING"}
    assert "server.beat.failed" in caplog.text


def follows(kind: type[FollowedSets], old, new, path: Path, done: Callable[..., bool]) -> int:
    """A server of shard 0 whose list of sets grows; ends it when `done` says so."""
    write_sets(path, [old.directory])
    config = ServerConfig(sets=str(path), drain_grace_s=0.0)

    async def main() -> int:
        sets = kind(config, 0, turn=Turn(f"test-{path}"))
        server = ShardServer(config, [Shard.open(old.directory, 0)], sets=sets)
        running = asyncio.create_task(server.run())
        write_sets(path, [old.directory, new.directory])
        async with asyncio.timeout(WAIT_S):
            while not done(server):
                await asyncio.sleep(0.001)
        server.post(Event.STOP)
        return await running

    return asyncio.run(main())


def test_a_set_that_cannot_be_loaded_is_reported_whatever_the_reason(
    sharded, other, monkeypatch, tmp_path, caplog
):
    """And the server goes on with what it has."""

    def load(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ShardServer, "_load", load)

    def rejected(server: ShardServer) -> bool:
        assert len(server.models) == 1
        return bool(server.process.rejected)

    assert follows(FollowedSets, sharded, other, tmp_path / "sets", rejected) == 0
    assert "no room" in caplog.text


def test_a_look_at_the_list_that_fails_is_not_the_last(sharded, other, tmp_path):
    """As when the system has no room for a thread."""

    class Fails(FollowedSets):
        failed = False

        def look(self) -> Sets | None:
            if not self.failed:
                self.failed = True
                raise RuntimeError("can't start new thread")
            return super().look()

    def loaded(server: ShardServer) -> bool:
        return len(server.models) == 2

    assert follows(Fails, sharded, other, tmp_path / "sets", loaded) == 0


def test_ready_file_says_where_and_goes_when_it_drains(sharded, start, tmp_path):
    """Written whole when the first query can be answered; a stale one goes at the start."""
    ready_file = tmp_path / "ready.json"
    ready_file.write_text("stale")
    server = start(1, ready_file=ready_file, drain_grace_s=0.0).ready()
    content = json.loads(ready_file.read_text())
    assert content == server.notice
    assert content["shard"] == 1
    assert content["shard_set"] == sharded.manifest.shard_set
    assert content["pid"] == server.process.pid
    caller = Caller(f"127.0.0.1:{content['port']}")
    assert caller.beat().shard == 1
    caller.close()
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert list(tmp_path.iterdir()) == []
    assert "server.warmed" in server.errors


@pytest.mark.promise("sigterm")
def test_a_signal_while_it_ends_changes_no_exit_status(sharded, tmp_path):
    """It has drained already, and ends by itself."""
    line = ("serve", sharded.directory, "--shard", 0, "--ready-file", tmp_path / "ready")
    with CommandServer(*line, cwd=tmp_path, ready_file="ready", python=("-B",)) as server:
        server.ready().process.terminate()
        until(lambda: "server.stopped" in server.errors)
        while server.process.poll() is None:
            server.process.terminate()
        assert server.wait() == 0


def big(sharded, rng: np.random.Generator, shard: int) -> Asked:
    """A message that keeps the kernel busy for a while: few contexts, many words."""
    asked = sharded.questions.ask(rng, shard, 40)
    request = codec.decode_score_request(asked.data, max_queries=1000)
    groups = request.groups
    counts = np.full(len(groups.word_counts), 1600, np.uint32)
    words = rng.integers(0, sharded.questions.size, int(counts.sum()), dtype=np.uint32)
    more = replace(groups, word_counts=counts, words=words)
    data, checksum = codec.encode_score_request(request.shard_set, shard, more)
    return Asked([], data, checksum)


@pytest.mark.promise("sigterm")
def test_sigterm_drains_while_messages_are_in_flight(sharded, start):
    """Each message sent before and after is answered or refused as UNAVAILABLE; exit status 0."""
    server = start(0, threads=1, inline_queries=0, shutdown_timeout_s=60.0).ready()
    caller = Caller(server.address)
    asked = big(sharded, np.random.default_rng(1), 0)
    futures = [caller.score.future(asked.data, timeout=WAIT_S) for _ in range(30)]
    until(lambda: caller.beat().messages >= 2)
    server.process.terminate()
    futures += [caller.score.future(asked.data, timeout=WAIT_S) for _ in range(30)]
    outcomes = [outcome_of(f) for f in futures]
    assert {o.code for o in outcomes} <= {OK, UNAVAILABLE}
    assert sum(o.code is OK for o in outcomes) >= 2
    for o in outcomes:
        if o.code is OK:
            answers = codec.decode_score_reply(
                o.data,
                shard_set=sharded.manifest.shard_set_bytes,
                shard=0,
                queries=64_000,
                request_checksum=asked.checksum,
            )
            assert len(answers) == 64_000
    assert server.wait() == 0
    caller.close()


LOADS_FOR_LONG = """
import hashlib, sys
from dlm.server import app

def load(*_, **__):
    print("loads", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour in C, as a page fault

setattr(app, sys.argv.pop(1), load)
from dlm.__main__ import main
main()
"""


@pytest.mark.promise("sigterm")
@pytest.mark.parametrize(("work", "status"), [("open_shard", 143), ("open_listed", 0)])
def test_sigterm_ends_a_server_that_loads(sharded, other, tmp_path, work, status):
    """At its start, and while it serves: a read of a large file cannot be interrupted."""
    path, ready = tmp_path / "sets", tmp_path / "ready"
    write_sets(path, [sharded.directory])
    line = ("serve", "--sets", path, "--shard", "0", "--ready-file", ready)
    line = (sys.executable, "-c", LOADS_FOR_LONG, work, *line)
    with forked.Popen(line, stdout=subprocess.PIPE) as server:
        if work == "open_listed":
            until(ready.exists)
            write_sets(path, [sharded.directory, other.directory])
        assert server.stdout.readline() == b"loads\n"
        server.terminate()
        try:
            assert server.wait(WAIT_S) == status
        finally:
            server.kill()


@pytest.mark.parametrize("how", ["second signal", "shutdown_timeout_s"])
def test_what_does_not_finish_is_cut_off_with_status_1(sharded, gated, how, asked):
    """By a second signal at once, or when shutdown_timeout_s is over; the caller learns it."""
    shutdown_timeout_s = 0.0 if how == "shutdown_timeout_s" else 3600.0
    shard, server, caller = gated(
        inline_queries=0, drain_grace_s=0.0, shutdown_timeout_s=shutdown_timeout_s
    )
    shard.hold()
    first = caller.score.future(asked.data, timeout=WAIT_S)
    assert shard.entered.acquire(timeout=WAIT_S)
    server.post(Event.STOP)
    if how == "second signal":
        server.post(Event.STOP)
    assert server.status.result(WAIT_S) == 1
    assert outcome_of(first).code in (UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_a_message_that_is_about_to_be_refused_is_not_cut_off(gated, monkeypatch):
    """It came after the last answer, and was never taken: exit status 0."""
    _, server, _ = gated(drain_grace_s=0.0, shutdown_timeout_s=WAIT_S)
    app, post = server.server, server.server.post

    def post_once_another_came(event):
        app.service.metrics.in_flight += event is Event.DRAINED
        post(event)

    monkeypatch.setattr(app, "post", post_once_another_came)
    server.post(Event.STOP)
    assert server.status.result(WAIT_S) == 0


def test_signal_during_the_warm_up_stops_the_server(gated):
    """It need not be ready to be stopped."""
    shard, server, _ = gated(open_gate=False, wait=False)
    server.post(Event.STOP)
    assert server.status.result(WAIT_S) == 0
    shard.gate.set()


def test_failed_warm_up_ends_the_server(sharded):
    """A server that cannot answer does not become ready."""
    shard = GatedShard(Shard.open(sharded.directory, 0))
    shard.fault = RuntimeError("no such instruction")
    server = ThreadServer(shard, own_loop=True)
    with pytest.raises(RuntimeError, match="no such instruction"):
        server.status.result(WAIT_S)


def test_killed_server_is_unavailable_to_its_clients(sharded, start):
    """kill -9: calls in flight and later ones fail as UNAVAILABLE, without a reason."""
    server = start(0, threads=1, inline_queries=0).ready()
    caller = Caller(server.address)
    asked = big(sharded, np.random.default_rng(4), 0)
    futures = [caller.score.future(asked.data, timeout=WAIT_S) for _ in range(100)]
    until(lambda: caller.beat().messages >= 1)
    server.process.kill()
    assert server.wait() == -signal.SIGKILL
    codes = {outcome_of(f).code for f in futures}
    assert UNAVAILABLE in codes
    assert codes <= {OK, UNAVAILABLE}
    later = outcome(caller.score, asked.data)
    assert (later.code, later.reason) == (UNAVAILABLE, None)
    caller.close()


def test_ready_file_that_cannot_be_written_ends_the_server(start, tmp_path):
    """A parent that waits for it would wait for ever."""
    server = start(ready_file=tmp_path / "nowhere" / "ready.json")
    assert server.wait() == 1
    assert "FileNotFoundError" in server.errors


@pytest.mark.parametrize("name", ["manifest.json", "vocabulary.arrow", "shard-0000.arrow"])
def test_damaged_or_missing_file_is_found_before_the_start(sharded, tmp_path, name):
    """No server starts on files that are not what the manifest says."""
    folder = tmp_path / "shards"
    shutil.copytree(sharded.directory, folder)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ShardFormatError):
        open_shard(folder, 0, verify=True)
    (folder / name).unlink()
    with pytest.raises(ShardFormatError):
        open_shard(folder, 0, verify=True)


def test_shard_beyond_the_set_is_refused(sharded):
    """The error says how many there are."""
    with pytest.raises(ShardFormatError, match="3 shards"):
        open_shard(sharded.directory, 3, verify=True)


def test_warm_up_meets_the_kernels_with_the_arrays_of_traffic(sharded, asked):
    """No signature is compiled after the warm-up: the first client waits for no compiler."""
    from dlm.index.search import owned_kernels as search
    from dlm.server import kernels as checks

    shard = Shard.open(sharded.directory, 0)
    service = ShardService(shard, ServerConfig())
    for data in warm_up_messages(shard):
        service.answerer.warm_up(data)
    ours = (*(search.score_owned, checks.first_fault), *(checks.count_orders, checks.count_slots))
    before = [len(k.signatures) for k in ours]
    request = codec.decode_score_request(asked.data, max_queries=1000)
    service.answerer.check(request.groups)
    message = codec.parse(pb.ScoreRequest(), asked.data)
    sharded.questions.verify(0, asked, service.answerer.score(message, None).data)
    assert [len(k.signatures) for k in ours] == before == [1, 1, 1, 1]
    service.close()
