"""The commands, as users type them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forked
from cluster import Cluster
from dlm.client import AsyncClient, ClientConfig
from dlm.errors import ConfigError, DlmError
from loadtest.cli.main import app
from loadtest.cli.run import DEMO_TRACE
from loadtest.traces.trace import Request, Spoken, read_trace, write_trace

ROOT = Path(__file__).parents[2]
README = (ROOT / "loadtest/README.md").read_text(encoding="utf-8")
Loadtest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def loadtest(tmp_path: Path) -> Loadtest:
    """Runs `python -m loadtest` in a folder of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DLM_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return forked.run(
            [sys.executable, "-m", "loadtest", *map(str, arguments)],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
        )

    return run


def test_every_command_is_on_the_page_and_shows_an_example() -> None:
    """And every option that the page uses exists."""
    shown = CliRunner().invoke(app, ["--help"]).output
    commands = re.findall(r"^  (\w+)  ", shown.split("Commands:")[1], re.M)
    assert commands
    assert "..." not in shown.split("Commands:")[1]  # no line is cut at 80 columns
    for command in commands:
        assert f"loadtest {command}" in README, command
        text = CliRunner().invoke(app, [command, "--help"], terminal_width=300).output
        assert f"Example: python -m loadtest {command}" in text
        for line in re.findall(rf"python -m loadtest {command} (.*)", README):
            for option in re.findall(r"--[a-z-]+", line.split("#")[0]):
                assert option in text, line


def test_a_trace_that_does_not_say_who_made_it_is_shown(tmp_path: Path) -> None:
    """A recorder of one's own need not say it."""
    request = Request(0.5, "frame", ((),), ((b"the",),))
    said = [Spoken("u", "ada", 1.0, (request,))]
    write_trace(tmp_path / "mine.parquet", said, {"decoder": "mine"})
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "mine.parquet")]).output
    assert re.search(r"^made by +not stated$", shown, re.M)


@pytest.mark.parametrize(("name", "kind"), [("rescoring", "lattice"), ("ctc", "frame")])
def test_the_traces_that_come_along_are_small_and_say_where_they_are_from(
    name: str, kind: str
) -> None:
    """Their audio may be used by anybody."""
    path = DEMO_TRACE.with_name(f"{name}.parquet")
    trace = read_trace(path)
    assert path.stat().st_size < 100_000
    assert "public domain" in trace.about["audio"]
    assert len(trace) > 300
    assert {request.kind for one in trace.utterances() for request in one.requests} == {kind}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--steps", "5,fast"], "--steps is 5,fast"),
        (["run", "--steps", "5", "--request-rate", "9"], "--request-rate and --steps "),
        (["run", "--request-rate", "9", "--concurrency", "5"], "--request-rate and --concurrency "),
        (
            ["run", "--arrival-pattern", "poisson", "--concurrency", "5"],
            "--arrival-pattern and ",
        ),
        (["run", "--arrival-pattern", "uniform"], "the arrival pattern is 'uniform'"),
        (["run", "--request-rate", "0"], "the load has 0 requests per second for 100 s"),
        (["run", "--cluster", "c.toml", "--shard-set", "d"], "--cluster and --shard-set "),
        (["run", "--window", "0"], "--window is 0 s; "),
        (["run", "--faults", "storm"], "--faults storm "),
        (["run", "--cluster", "c.toml", "--replicas", "2"], "--replicas "),
        (["run", "README.md"], "README.md "),
        (["capacity", "--first-rate", "0"], "--first-rate is 0"),
        (["capacity", "README.md"], "README.md "),
        (["capacity", "--resume", "a", "--output", "b"], "--resume and --output "),
        (["capacity", "--resume", "nothing"], "nothing "),
        (["compare", "a.json", "b.json"], "a.json does not exist"),
        (["report", "nothing"], "nothing "),
    ],
)
def test_mistakes_are_told_before_anything_is_started(arguments: list[str], message: str) -> None:
    """With what was found and what is expected."""
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, DlmError)
    assert str(done.exception).startswith(message)


@pytest.mark.parametrize("command", ["run", "capacity"])
def test_a_missing_package_is_told_before_anything_is_started(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled, and servers started, only for figures that can be had."""
    monkeypatch.setitem(sys.modules, "hdrh.histogram", None)
    monkeypatch.setattr("loadtest.run.local_cluster.local_servers", pytest.fail)
    done = CliRunner().invoke(app, [command])
    assert isinstance(done.exception, ConfigError)
    assert "hdrhistogram" in str(done.exception)


def test_an_error_is_one_line_and_status_one(loadtest: Loadtest) -> None:
    """On standard error; of files, too."""
    done = loadtest("show", "nothing.parquet")
    assert done.returncode == 1
    assert done.stderr == "loadtest: nothing.parquet: No such file or directory\n"
    assert not done.stdout


@pytest.mark.slow
def test_requests_go_through_a_gateway(
    loadtest: Loadtest, servers: Cluster, trace_file: Path, tmp_path: Path
) -> None:
    """Each of them, and the report is that of any run."""
    pytest.importorskip("hdrh")
    from gateway.gateways import ThreadGateway

    cluster = servers.write(tmp_path / "cluster.toml")
    config = ClientConfig(deadline_s=20.0, cache_dir=tmp_path / "cache")
    with ThreadGateway(lambda: AsyncClient.connect(cluster, config)) as gateway:
        address = f"127.0.0.1:{gateway.running.port}"
        more = (trace_file, "--duration", 3, "--warmup", 1, "--window", 1)
        done = loadtest("run", "--cluster", cluster, "--gateway", address, *more)
        answered = gateway.running.metrics.calls["Extend", "grpc", "ok"]
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "loadtest-results").iterdir()
    results = json.loads((folder / "report.json").read_text())["results"]
    assert results["failed"] == 0
    assert 0 < results["answered"] <= answered


@pytest.mark.slow
def test_one_command_measures_a_cluster_that_it_starts(loadtest: Loadtest, tmp_path: Path) -> None:
    """As on a fresh clone, only shorter; `report` prints the same again."""
    pytest.importorskip("hdrh")
    done = loadtest("run", "--duration", 4, "--warmup", 1, "--window", 1)
    assert done.returncode == 0, done.stderr
    assert "starting 2 servers on this machine" in done.stderr
    assert "requests/s, p50" in done.stderr
    assert "messages per second of audio" in done.stdout
    (folder,) = (tmp_path / "loadtest-results").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {"records.jsonl", "report.json", "report.csv", "report.html"}
    report = json.loads((folder / "report.json").read_text())
    assert report["results"]["failed"] == 0
    assert report["results"]["messages"] > 0
    assert len(report["servers"]) == 2
    (folder / "report.html").unlink()
    again = loadtest("report", folder)
    assert again.returncode == 0
    assert again.stdout.splitlines()[:15] == done.stdout.splitlines()[:15]
    assert (folder / "report.html").exists()
