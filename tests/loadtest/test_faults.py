"""Load tests with faults: plans, what they do to servers, and how the report shows it."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

pytest.importorskip("hdrh")

from cluster import WAIT_S, Cluster, ModelFiles
from dlm.client.cluster_file import ClusterToml, Endpoint, write_cluster_file
from dlm.errors import ConfigError
from dlm.index.making import build_shard_set
from loadtest.report.session import measure, write_report
from loadtest.report.table import rows_of, tables_of
from loadtest.run.chaos import Chaos, Command
from loadtest.run.driver import RunSettings
from loadtest.run.faults import (
    MOVES,
    MOVING,
    REPLICA_KILLED,
    RESHARDING,
    ROLLOUT,
    SCENARIOS,
    SHARD_GONE,
    SLOW_NETWORK,
    STALLED_SERVER,
    Faults,
    Move,
    Moves,
    faults,
    moves,
    moving,
    read_plan,
    scenario,
)
from loadtest.run.local_cluster import local_servers
from loadtest.run.proxy import Proxies
from loadtest.run.worker import ClientSettings
from loadtest.traces.schedule import Load, Segment

SCHEMA = json.loads((Path(__file__).parents[2] / "loadtest/report/report.schema.json").read_text())
FOUR = [0, 1, 0, 1]  # two shards with two servers each


@pytest.mark.parametrize(
    ("name", "own", "commands"),
    [
        (REPLICA_KILLED, True, ["kill 0", "start 0"]),
        (REPLICA_KILLED, False, ["drop 0 1", "heal 0"]),
        (SHARD_GONE, True, ["kill 0", "kill 2", "start 0", "start 2"]),
        (SHARD_GONE, False, ["drop 0 1", "drop 2 1", "heal 0", "heal 2"]),
        (
            SLOW_NETWORK,
            False,
            [*(f"slow {n} 10" for n in range(4)), *(f"heal {n}" for n in range(4))],
        ),
        (STALLED_SERVER, True, ["stop 0", "continue 0"]),
        (STALLED_SERVER, False, ["partition 0", "heal 0"]),
    ],
)
def test_scenarios_break_the_first_shard_and_mend_it(
    name: str, own: bool, commands: list[str]
) -> None:
    """At the begin of windows, a third and two thirds into the run."""
    plan = scenario(name, FOUR, 100.0, 5.0, own=own)
    assert [str(command) for _, command in plan] == commands
    half = len(plan) // 2
    assert [at_s for at_s, _ in plan] == [35.0] * half + [65.0] * half
    short = scenario(name, FOUR, 3.0, 1.0, own=own)
    assert {at_s for at_s, _ in short} == {1.0, 2.0}


@pytest.mark.parametrize("name", [ROLLOUT, RESHARDING])
def test_moves_begin_at_each_further_quarter(name: str) -> None:
    """At the begin of windows, also of a short run."""
    assert [at_s for at_s, _ in moves(name, 100.0, 5.0)] == [25.0, 50.0, 75.0]
    assert [at_s for at_s, _ in moves(name, 4.0, 1.0)] == [1.0, 2.0, 3.0]


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """Ctrl-C is ignored, here and in what is started, as a shell does to `command &`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.promise("rollout")
@pytest.mark.slow
@pytest.mark.parametrize("name", [ROLLOUT, RESHARDING])
def test_no_request_fails_and_no_score_is_wrong_while_models_or_servers_change(
    files: ModelFiles, trace_file: Path, tmp_path: Path, name: str, in_the_background: None
) -> None:
    """Each move is carried out by the commands, and the report has the figures of each."""
    new = tmp_path / "new"
    if name == ROLLOUT:
        build_shard_set(
            files.directory.parent / "model.arpa", new, files.manifest.shards, encoding="compact"
        )
    load = Load((Segment(20.0, 20),), warmup_s=1.0)
    client = ClientSettings(60.0, cache_dir=str(tmp_path / "cache"))
    (tmp_path / "results").mkdir()
    with (
        local_servers(files.directory, 0, lambda line: None, replicas=2, follow=True) as own,
        moving(name, own, new, load.seconds, 1.0) as carried,
    ):
        oracles = (files.directory, *([new] if name == ROLLOUT else []))
        settings = RunSettings(own.cluster, trace_file, load, client, window_s=1.0, oracles=oracles)
        report = measure(settings, tmp_path / "results", lambda line: None, carried)
    jsonschema.validate(report, SCHEMA)
    assert report["complete"]
    done = [one["what"] for one in report["faults"][::2]]
    planned = [MOVES[move.verb] for _, move in moves(name, 20.0, 1.0)]
    assert [one.split(": ")[1].split(" (took")[0] for one in done] == planned
    assert report["results"]["failed"] == 0
    assert report["checked"]["wrong"] == 0 < report["checked"]["answers"]
    assert f"0 of {report['checked']['answers']:,} answers" in dict(rows_of(report)).values()


def test_the_end_of_a_run_waits_for_moves_longer_than_for_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a roll-out may take minutes."""
    monkeypatch.setattr("loadtest.run.faults.LATE_S", 0.0)
    load_ended = threading.Event()

    class Slow:
        def do(self, move: Move) -> str:
            assert load_ended.wait(WAIT_S)
            return f"{move}: done"

        def close(self) -> None:
            pass

    records: list[dict[str, Any]] = []
    plan = [(0.0, Move(verb)) for verb in MOVING[RESHARDING]]
    with contextlib.closing(Faults(plan, tmp_path, cast(Moves, Slow()))) as carried:
        carried.start(time.monotonic(), records.append)
        load_ended.set()
        carried.wait()
        assert [one["command"] for one in records[1::2]] == [f"{one} ended" for _, one in plan]


def test_a_replica_that_is_not_there_cannot_be_killed() -> None:
    """What to do is said."""
    with pytest.raises(ConfigError, match=r"shard 0, found 1; .*--replicas 2"):
        scenario(REPLICA_KILLED, [0, 1], 100.0, 5.0, own=True)


def test_a_plan_that_cannot_be_carried_out_is_refused_before_the_run(tmp_path: Path) -> None:
    """Neither scenario nor file, nothing in it, too late, servers that are not ours."""
    cluster, plan = tmp_path / "cluster.toml", tmp_path / "plan"
    write_cluster_file(cluster, [Endpoint("127.0.0.1:9", 0)])
    with pytest.raises(ConfigError, match=f"scenarios: {', '.join(SCENARIOS)}"):
        read_plan("storm", cluster, 10.0, 1.0, own=False)
    for text, says in [
        ("# nothing", "at SECONDS"),
        ("at 10 slow 0 5", "`slow 0 5` at 10 s.*--duration"),
        ("at 1 slow 1 5", "servers are 0 to 0"),
        ("at 1 start 0", "`start 0`.*dlm cluster --restart"),
        ("at 1 kill 0", "no process .*127.0.0.1:9"),
    ]:
        plan.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_plan(str(plan), cluster, 10.0, 1.0, own=False)
    plan.write_text("at 2 heal all\nat 1 slow 0 5")
    found = read_plan(str(plan), cluster, 10.0, 1.0, own=False)
    assert found == [(1.0, Command("slow", 0, 5.0)), (2.0, Command("heal"))]


def test_only_who_started_servers_starts_them_again(servers: Cluster, tmp_path: Path) -> None:
    """`chaos` says who does."""
    cluster = servers.write(tmp_path / "cluster.toml")
    endpoints = ClusterToml(cluster).servers()
    with Proxies([e.address for e in endpoints]) as proxies:
        chaos = Chaos(cluster, endpoints, proxies)
        with pytest.raises(ConfigError, match="`dlm cluster --restart`"):
            chaos.do(Command("start", 0))


@pytest.fixture(scope="module")
def broken(
    files: ModelFiles, trace_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Report of a run in which a shard is killed and started again, and its folder."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "results").mkdir()
    (folder / "plan").write_text("at 1 kill 0\nat 1 slow 1 1\nat 2 start 0\nat 2 heal 1\n")
    load = Load((Segment(3.0, 50),), warmup_s=0.5)
    client = ClientSettings(60.0, bigram_fallback=True, cache_dir=str(folder / "cache"))
    said: list[str] = []
    with local_servers(files.directory, 0, said.append) as own:
        first = [server.process.pid for server in own.servers]
        plan = read_plan(str(folder / "plan"), own.cluster, load.seconds, 0.5, own=True)
        with faults(plan, own.cluster, 1, own.start) as breaking:
            settings = RunSettings(own.cluster, trace_file, load, client, window_s=0.5)
            report = measure(settings, folder / "results", said.append, breaking)
            again = own.servers[0]
            assert again.process.poll() is None
            assert [again.process.pid != first[0], own.servers[1].process.pid] == [True, first[1]]
            assert ClusterToml(own.cluster).servers()[0].pid == again.process.pid
            with pytest.raises(ConfigError, match="server 1 "):
                own.start(1)
    assert any("kill 0: shard 0 at" in line for line in said)
    write_report(report, folder / "results")
    return report, folder / "results"


@pytest.mark.slow
def test_the_report_says_what_broke_and_who_answered_then(
    broken: tuple[dict[str, Any], Path],
) -> None:
    """The run goes on; until the first fault, what is not in flight comes from the full model."""
    report, _ = broken
    jsonschema.validate(report, SCHEMA)
    assert report["complete"]
    done = [(one["at_s"], one["command"]) for one in report["faults"]]
    assert done == [(1.0, "kill 0"), (1.0, "slow 1 1"), (2.0, "start 0"), (2.0, "heal 1")]
    assert "pid" in report["faults"][0]["what"]
    before, down, _ = report["stretches"]
    assert [one["after"] for one in report["stretches"]] == [
        "",
        "kill 0, slow 1 1",
        "start 0, heal 1",
    ]
    assert max(before["sources"], key=before["sources"].get) == "full"
    assert down["sources"]["bigram_fallback"] > 0
    assert 0 < down["bigram_fallback_share"] < 1
    assert sum(w["requests"] for w in report["windows"]) == report["results"]["requests"]
    (_, names, rows) = next(one for one in tables_of(report) if one[0] == "From fault to fault")
    assert len(rows) == 3
    assert {len(row) for row in rows} == {len(names)}


@pytest.mark.slow
def test_faults_are_marked_on_the_plots(
    broken: tuple[dict[str, Any], Path], drawn: Callable[[Path], str]
) -> None:
    """As lines with their commands, on latency, on who answered, on requests and on CPU."""
    page = drawn(broken[1] / "report.html")
    assert page.count('class="fault"') == 8
    assert "kill 0, slow 1 1" in page
    assert "Who answered" in page
