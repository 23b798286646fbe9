"""The driver: it waits for no answer, a stall shows where it hit, and runs end by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.core import CounterMetricFamily

pytest.importorskip("hdrh")

import forked
from cluster import WAIT_S, Cluster, ModelFiles, ProcessServer, until
from dlm.client import AsyncClient, ClientConfig, ModelInfo
from dlm.client.metrics import Stats
from dlm.errors import ConfigError, DlmError
from loadtest.report.report import build
from loadtest.run.driver import Outcome, Run, RunSettings, is_gone, records_of
from loadtest.run.latency import Latencies
from loadtest.run.proxy import Proxies
from loadtest.run.replay import Replay
from loadtest.run.worker import ClientSettings, WorkerSettings, precise_loop
from loadtest.traces.schedule import CONSTANT, Load, Schedule, Segment
from loadtest.traces.trace import Trace

ROOT = Path(__file__).parents[2]
STALL_S = 0.6


def merged(records: list[dict[str, Any]], name: str) -> Latencies:
    """A histogram of all windows."""
    whole = Latencies()
    for record in records:
        whole.merge(Latencies.decode(record[name]))
    return whole


class Stall:
    """Servers behind proxies that let nothing pass for a while, from some request on."""

    def __init__(self, addresses: list[str]) -> None:
        self.proxies = Proxies(addresses)
        self.sent = 0

    def count(self, at: int) -> None:
        """One more request is sent; with the one of this number the stall begins."""
        self.sent += 1
        if self.sent == at:
            threading.Thread(target=self._stall).start()

    def _stall(self) -> None:
        for number in range(len(self.proxies.addresses)):
            self.proxies.set(number, partition=True)
        time.sleep(STALL_S)
        for number in range(len(self.proxies.addresses)):
            self.proxies.heal(number)


class Counting:
    """A client that tells of each request before it is sent."""

    def __init__(self, client: AsyncClient, tell: Callable[[], None]) -> None:
        self.client = client
        self.tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def utterance(self) -> Any:
        """An utterance that tells, too."""
        handle, tell = self.client.utterance(), self.tell

        async def extend(states: Any, words: Any) -> Any:
            tell()
            return await handle.extend(states, words)

        return SimpleNamespace(
            model_info=handle.model_info,
            vocabulary=handle.vocabulary,
            states_after=handle.states_after,
            extend=extend,
        )


def asking(trace: Trace) -> list[int]:
    """Requests of the trace that need a message: contexts of two words or more."""
    long = np.diff(trace.context_word_begin) >= 2
    counts = np.add.reduceat(long, trace.context_begin[:-1])
    return [int(at) for at in np.flatnonzero((counts > 0) & trace.asks)]


def run_replay(
    servers: Cluster,
    trace: Trace,
    cache: Path,
    drive: Callable[[Replay], Any],
    ends_after: int | None = None,
) -> tuple[list[dict[str, Any]], int]:
    """Records of a replay through a stall that begins with request 100, and requests sent. A closed
    loop ends after so many requests."""
    stall = Stall(servers.addresses)
    records: list[dict[str, Any]] = []

    async def go() -> None:
        config = ClientConfig(60.0, cache_dir=cache)
        async with AsyncClient.connect(stall.proxies.addresses, config) as client:
            replay: Replay

            def tell() -> None:
                stall.count(100)
                if stall.sent == ends_after:
                    replay.stop()

            replay = Replay(Counting(client, tell), trace, 1.0, records.append)
            replay.prepare(np.flatnonzero(trace.asks).tolist())
            await drive(replay)
            assert replay.fault is None

    try:
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            runner.run(go())
    finally:
        stall.proxies.close()
    return records, stall.sent


@pytest.mark.promise("planned_time")
def test_a_stall_is_in_p99_of_the_open_loop_and_a_closed_loop_hides_it(
    servers: Cluster, trace: Trace, tmp_path: Path
) -> None:
    """The same server, the same stall, the same requests. In the open loop all that were due in the
    stall waited for its end; in the closed loop one did, and the next was never due."""
    requests = asking(trace)
    count = 400
    due = np.arange(count) / 200
    some = np.array([requests[at % len(requests)] for at in range(count)], np.int32)
    plan = Schedule(due, some, np.arange(count, dtype=np.int32))

    async def open_loop(replay: Replay) -> None:
        await replay.open_loop(plan, time.monotonic(), 2.0)

    records, sent = run_replay(servers, trace, tmp_path, open_loop)
    latency = merged(records, "latency")
    assert latency.count == sent == count
    p99 = latency.at_ms(99.0)
    assert p99 is not None
    assert p99 > 500 * STALL_S

    async def closed_loop(replay: Replay) -> None:
        order = np.arange(len(trace.names), dtype=np.int64)
        await replay.closed_loop(1, time.monotonic(), 0.0, WAIT_S, order)

    records, sent = run_replay(servers, trace, tmp_path, closed_loop, ends_after=400)
    latency = merged(records, "latency")
    assert latency.count == sent >= 400
    longest = [1 for share, ms in latency.curve() if ms > 500 * STALL_S and share < 99.7]
    assert longest == []  # the stall is there, in one request of four hundred
    assert latency.facts()["max_ms"] > 500 * STALL_S  # type: ignore[operator]


class Fake:
    """A client without servers, whose answers hold nothing; `looks_left` until its metrics have the
    messages that it has sent."""

    cascade = SimpleNamespace(mode="full")

    def __init__(self, first_s: float = 0.0, looks_left: int = 0) -> None:
        self.stats = Stats()
        self._first_s, self._looks_left = first_s, looks_left

    @property
    def metrics(self) -> Any:
        """Its messages that have ended."""
        self._looks_left -= self.stats.messages > 0
        found = CounterMetricFamily("dlm_client_messages", "Ended.", labels=("result",))
        found.add_metric(("ok",), self.stats.messages if self._looks_left < 0 else 0)
        return SimpleNamespace(collect=lambda: [found])

    def utterance(self) -> Any:
        """Of one model."""
        return SimpleNamespace(
            model_info=ModelInfo("full", "m", "s"),
            vocabulary=SimpleNamespace(id_of=lambda word: 1),
            states_after=lambda contexts: None,
            extend=self.extend,
        )

    async def extend(self, states: Any, words: Any) -> Any:
        """The first one holds the process up."""
        time.sleep(self._first_s if not self.stats.messages else 0.0)
        self.stats.messages += 1
        return SimpleNamespace(source=np.zeros((1, 1), np.uint8))


def records_with(client: Fake, trace: Trace, due_s: list[float]) -> list[dict[str, Any]]:
    """Of a replay in windows of a tenth of a second, with a request at each of these times."""
    records: list[dict[str, Any]] = []
    count = len(due_s)

    async def go() -> None:
        replay = Replay(client, trace, 0.1, records.append)
        requests = np.array(asking(trace)[:count], np.int32)
        plan = Schedule(np.array(due_s), requests, np.arange(count, dtype=np.int32))
        await replay.open_loop(plan, time.monotonic(), due_s[-1] + 0.05)

    asyncio.run(go())
    return records


@pytest.mark.promise("planned_time")
def test_latency_counts_from_the_planned_time(trace: Trace) -> None:
    """Of a client whose first answer holds the process up, the later requests are late, and say
    so; windows are those of the planned times."""
    records = records_with(Fake(first_s=0.3), trace, [0.0, 0.05, 0.15])
    assert [record["requests"] for record in records] == [2, 1]
    second = Latencies.decode(records[1]["latency"])
    late = Latencies.decode(records[1]["late"]).facts()
    assert second.facts()["p50_ms"] >= 140  # type: ignore[operator]
    assert late["p50_ms"] >= 140  # type: ignore[operator]
    assert Latencies.decode(records[1]["service"]).count == 1


def test_a_message_that_is_counted_after_its_callers_are_told_is_in_the_last_window(
    trace: Trace,
) -> None:
    """A client's own thread counts it: on a busy machine, long after the request has ended."""
    (one,) = records_with(Fake(looks_left=3), trace, [0.0])
    assert one["counts"]["messages"] == one["counts"]["messages_ok"] == 1


def settings_for(
    folder: Path, cluster: Path, trace_file: Path, load: Load, **changed: Any
) -> RunSettings:
    """Of a run with small windows."""
    client = changed.pop("client", ClientSettings(60.0, cache_dir=str(folder / "cache")))
    return RunSettings(cluster, trace_file, load, client, **{"window_s": 0.5, **changed})


def header(settings: RunSettings, trace: Trace) -> dict[str, Any]:
    """The first record of a run."""
    return {
        "type": "header",
        "provenance": {},
        "trace": {},
        "load": settings.load.facts(),
        "clients": {},
        "window_s": settings.window_s,
    }


def test_a_cluster_that_vanishes_ends_the_run_and_keeps_what_was_measured(
    files: ModelFiles, trace: Trace, trace_file: Path, tmp_path: Path
) -> None:
    """Servers are killed in the middle of an hour; the report has the windows before, the error and
    the reason."""
    with Cluster(files, kind=ProcessServer) as servers:
        cluster = servers.write(tmp_path / "cluster.toml")
        client = ClientSettings(0.4, cache_dir=str(tmp_path / "cache"))
        load = Load((Segment(3600, 40),), pattern=CONSTANT, warmup_s=0.5)
        settings = settings_for(tmp_path, cluster, trace_file, load, client=client)
        records: list[dict[str, Any]] = [header(settings, trace)]

        def keep(record: dict[str, Any]) -> None:
            records.append(record)
            if record.get("window") == 1:
                for server in servers.servers:
                    server.process.kill()

        Run(settings, keep, lambda line: None).run()
    report = build(records)
    assert report["ended"] == "the cluster vanished: no server answered for 1 s"
    assert not report["complete"]
    assert report["windows"][0]["answered"] > 0
    assert report["windows"][-1]["failed"] > 0
    assert {*report["results"]["outcomes"]} & {"shard_down", "deadline_exceeded"}
    assert any(report["errors"].values())


def test_a_client_process_that_dies_ends_the_run(
    servers: Cluster, trace: Trace, trace_file: Path, tmp_path: Path
) -> None:
    """What all clients measured before is kept."""
    load = Load((Segment(3600, 1),), 4, warmup_s=0.0)
    cluster = servers.write(tmp_path / "cluster.toml")
    settings = settings_for(tmp_path, cluster, trace_file, load, processes=2, window_s=0.2)
    records: list[dict[str, Any]] = [header(settings, trace)]
    pids: dict[int, int] = {}

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        if record["type"] == "ready":
            pids[record["client"]] = record["pid"]
        if record.get("window") == 1 and 1 in pids:
            os.kill(pids.pop(1), signal.SIGKILL)  # each client reports this window; kill once

    Run(settings, keep, lambda line: None).run()
    report = build(records)
    assert re.search(r"process 1 .*-9", report["ended"])
    assert not report["complete"]
    assert report["results"]["answered"] > 0
    assert report["load"]["loop"] == "closed"


def test_what_cannot_start_is_told_with_its_reason(
    servers: Cluster, trace_file: Path, tmp_path: Path
) -> None:
    """A trace that is none, no servers, more processes than decoders."""
    cluster = servers.write(tmp_path / "cluster.toml")
    load = Load((Segment(1, 1),))
    (tmp_path / "bad.parquet").write_text("no trace")
    settings = settings_for(tmp_path, cluster, tmp_path / "bad.parquet", load)
    with pytest.raises(DlmError, match=r"process 0: .*bad\.parquet"):
        Run(settings, lambda record: None, lambda line: None).run()
    with pytest.raises(ConfigError, match="fewer --processes"):
        settings_for(tmp_path, cluster, trace_file, Load(load.segments, 2), processes=3)


def test_settings_reach_a_client_process_as_they_are() -> None:
    """Through JSON."""
    load = Load((Segment(1, 2), Segment(4, 5)), 0, "constant", 7.0)
    settings = WorkerSettings("c", "t", load, ClientSettings(1.0, True, "s"), 0.5, 6, 1, 2)
    assert WorkerSettings.from_json(json.dumps(asdict(settings))) == settings


def test_a_cluster_is_gone_after_two_silent_windows() -> None:
    """Silence needs requests that failed, and no message answered."""
    good, idle, silent = Outcome(10, 10, 9), Outcome(0, 0, 0), Outcome(10, 3, 0)
    assert not is_gone([Outcome(10, 10, 0)] * 2)  # answered by the clients alone
    assert is_gone([good, silent, silent])
    for windows in ([silent], [silent, good], [silent, idle]):
        assert not is_gone(windows)


@pytest.mark.promise("report_after_kill")
def test_ctrl_c_makes_a_report_of_what_was_measured(
    servers: Cluster, trace_file: Path, tmp_path: Path
) -> None:
    """Of the command, as SIGTERM does."""
    cluster = servers.write(tmp_path / "cluster.toml")
    output = tmp_path / "out"
    environ = {**os.environ, "DLM_CACHE_DIR": str(tmp_path / "cache")}
    process = forked.Popen(
        [
            *(sys.executable, "-m", "loadtest", "run", trace_file, "--cluster", cluster),
            *("--duration", "3600", "--window", "0.2", "--warmup", "0", "--output", output),
        ],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    journal = output / "records.jsonl"
    until(lambda: journal.exists() and '"window": 1' in journal.read_text(), process)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert "messages per second of audio" in printed
    assert "the run is not complete: interrupted" in printed
    assert (output / "report.html").exists()
    kinds = Counter(record["type"] for record in records_of(journal))
    assert kinds["header"] == kinds["ready"] == kinds["started"] == 1


def test_percentiles_are_those_of_the_values() -> None:
    """Within the three digits, merged or not, encoded or not."""
    seconds = np.random.default_rng(3).lognormal(-6, 1, 5000)
    found = Latencies(seconds[:2000].tolist())
    found.merge(Latencies.decode(Latencies(seconds[2000:].tolist()).encode()))
    facts = found.facts()
    assert facts["count"] == 5000
    for name, rank in (("p50_ms", 2500), ("p95_ms", 4750), ("p99_ms", 4950), ("p99.9_ms", 4995)):
        assert facts[name] == pytest.approx(np.sort(seconds)[rank - 1] * 1e3, rel=2e-3), name
    assert facts["max_ms"] == pytest.approx(seconds.max() * 1e3, rel=2e-3)
    curve = found.curve()
    assert curve[-1][0] == 100.0
    assert [value for _, value in curve] == sorted(value for _, value in curve)


def test_nothing_and_what_is_out_of_range() -> None:
    """Nothing has no percentile; what is longer than an hour counts as one."""
    assert Latencies().facts()["p99_ms"] is None
    assert Latencies([0.0, 1e9]).facts()["max_ms"] == pytest.approx(3.6e6, rel=1e-3)
