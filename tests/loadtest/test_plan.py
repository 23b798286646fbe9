"""Plans of clusters: the fewest servers that fit, by figures that are said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("hdrh")

from cluster import ModelFiles
from dlm.errors import ConfigError
from dlm.index.describe import PROCESS_MIB, server_mib
from loadtest.capacity.capacity import Limits, Point, build_capacity, write_capacity
from loadtest.capacity.plan import (
    MOST_REPLICAS,
    Costs,
    Model,
    Traffic,
    Wishes,
    assumptions,
    costs_of,
    fitting,
    heaviest_share,
    model_of,
    model_of_counts,
    rows_of,
    traffic_of,
)
from loadtest.cli.main import app
from loadtest.report.report import Report
from loadtest.report.session import read_report
from loadtest.traces.routes import Slotted, routes
from loadtest.traces.trace import Trace

GIB = float(1 << 30)
PAGE, STREAMS = Path(__file__).parents[2] / "deploy/README.md", ("35", "350", "3500")
COSTS = Costs(500.0, 1.5, 30.0, 8.0, "t.parquet", "a machine")


def even(shards: int) -> Traffic:
    """Five messages per second of audio and one more per shard, in equal parts."""
    return Traffic(5.0 + shards, 1 / shards, 30.0)


@pytest.mark.parametrize("streams", [1, 60, 3000])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("memory", [2.0, 40.0])
def test_no_smaller_cluster_fits(streams: float, replicas: int, memory: float) -> None:
    """Of all numbers of shards and replicas."""
    wishes = Wishes(streams, memory * GIB, replicas=replicas)
    model = Model("m", 10**9, round(12 * GIB), round(0.5 * GIB), 1.01)
    found = fitting(wishes, model, COSTS, even, 7.0)

    def fits(shards: int, count: int) -> bool:
        busiest = streams * (5.0 + shards) / shards * 500e-6
        enough = busiest / count <= 0.75 and (count == 1 or busiest / (count - 1) <= 1)
        return enough and model.server_bytes(shards, 1) <= memory * GIB

    sizes = [
        (shards * count, shards)
        for shards in range(1, 33)
        for count in range(replicas, MOST_REPLICAS + 1)
        if fits(shards, count)
    ]
    assert (found.servers, found.shards) == min(sizes)
    assert found.server_bytes == model.server_bytes(found.shards, 1)
    assert found.messages_per_s == pytest.approx(streams * (5 + found.shards))
    assert found.server_cores == pytest.approx(found.messages_per_s * 500e-6)
    assert found.client_cores == pytest.approx(streams * 7.0 * 1.5e-3)


def test_a_small_plan_has_small_units_and_the_singular() -> None:
    """One shard of some kilobytes is not 0.0 GiB in 1 shards."""
    wishes, model = Wishes(10, GIB, replicas=1), Model("m", 1, 1_081_344, 2 << 30)
    rows = dict(rows_of(fitting(wishes, model, COSTS, even, 1.0), wishes, model))
    assert rows["servers"].startswith("1: 1 shard x 1 replica")
    assert rows["model"] == "m: 1.0 MiB in shards, 2.0 GiB of low orders on each client's host"


def test_what_fits_nowhere_is_told_why() -> None:
    """Memory for the smallest shard and the processes; traffic that one pair of words brings."""
    with pytest.raises(ConfigError, match=r"2\.5 GiB: 256 MiB per process.* 256.* 1\.0 GiB"):
        fitting(Wishes(10, GIB, processes=2), Model("m", 1, 512 << 30, 1), COSTS, even, 1.0)
    wishes = Wishes(1e6, GIB)
    with pytest.raises(ConfigError, match=r"256 shards .*32 replicas"):
        fitting(wishes, Model("m", 1, 1, 1), COSTS, lambda shards: Traffic(5.0, 0.5, 1.0), 1.0)
    with pytest.raises(ConfigError, match="--streams is 0"):
        Wishes(0, GIB)


def test_the_heaviest_slot_bounds_how_far_shards_help() -> None:
    """Half of the queries have one slot: the busiest shard has half of the messages for ever."""
    count = 1000
    slot = np.where(np.arange(count) % 2 == 0, 4000, np.arange(count))
    slotted = Slotted(
        np.arange(count), np.ones(count, np.int64), np.arange(count), slot,
        np.ones(count, np.int64),
    )  # fmt: skip
    assert heaviest_share(slotted) == 0.5
    traffic = traffic_of(slotted, 100.0)
    assert traffic(1) == Traffic(10.0, 1.0, 1.0)
    assert traffic(64).busiest_share == 0.5
    texts = assumptions(COSTS, traffic(64), 0.5, estimated=False, counted=True)
    assert "50 % of the queries" in " ".join(texts)
    assert "beyond 2 shards, only replicas help" in " ".join(texts)


def test_a_shard_set_says_its_own_sizes(files: ModelFiles) -> None:
    """As `dlm info --helm` sizes a server."""
    model = model_of(files.directory)
    shards = [one.bytes for one in files.manifest.files if one.kind == "shard"]
    assert model.shards == sum(shards)
    assert model.ngrams == sum(files.manifest.counts)
    assert model.server_bytes(2, 3) == pytest.approx(max(shards) + 3 * (PROCESS_MIB << 20))
    larger = tuple(replace(one, bytes=one.bytes << 20) for one in files.manifest.files)
    assert server_mib(replace(files.manifest, files=larger)) == max(shards) + PROCESS_MIB


def test_counts_become_bytes() -> None:
    """Every order, or all together; compact is smaller."""
    exact = model_of_counts("200k,2M,1.5M", "exact")
    assert exact.ngrams == 3_700_000
    assert exact.low_orders == pytest.approx(2.2e6 * 6.4)
    assert exact.shards == pytest.approx(1.5e6 * 6.3)
    assert model_of_counts("200k,2M,1.5M", "compact").shards < exact.shards
    assert model_of_counts("4G", "exact").ngrams == 4 * 10**9
    for text in ("", "many", "0", "5,-1", "5T"):
        with pytest.raises(ConfigError, match="--ngrams "):
            model_of_counts(text, "exact")
    with pytest.raises(ConfigError, match=r"zip; .*exact"):
        model_of_counts("5M", "zip")


def test_costs_are_those_of_a_capacity_report(results: Path, tmp_path: Path) -> None:
    """Of its knee; without one it says so."""
    report: Report = read_report(results)
    knee = Point(
        *(40.0, 40.0, 40.0, 8.0, 50.0, 6.0, 20.0, 1.0, 2.0, 0.1, 0.0, 0.1, 0.1, 0.2),
        *(0.15, 0.15, 450.0, 10.0, "", ""),
    )
    write_capacity(tmp_path, build_capacity({}, Limits(), [knee], "found", report))
    found = costs_of(tmp_path)
    assert found.server_us_per_message == 450.0
    assert found.client_ms_per_request == pytest.approx(2.0)  # 10 ms x 8 s of audio / 40 requests
    assert found.trace == report["trace"]["name"]
    assert "at 40 requests/s" in found.measured
    write_capacity(tmp_path, build_capacity({}, Limits(), [], "interrupted", None))
    with pytest.raises(ConfigError, match="--costs"):
        costs_of(tmp_path)
    assert costs_of(None).server_us_per_message > 0


def test_the_command_prints_a_plan_and_what_it_assumes(
    files: ModelFiles, trace_file: Path, trace: Trace
) -> None:
    """As text, and as JSON with the same figures."""
    line = ["plan", "--streams", "500", "--trace", str(trace_file)]
    model = ["--model", str(files.directory)]
    done = CliRunner().invoke(app, [*line, *model])
    assert done.exit_code == 0, done.output
    assert "memory of a server" in done.stdout
    assert "only replicas help" in " ".join(done.stdout.split())
    made = json.loads(CliRunner().invoke(app, [*line, *model, "--json"]).stdout)
    cluster = made["cluster"]
    counted = traffic_of(routes(trace, files.directory), trace.audio_s)(cluster["shards"])
    assert cluster["messages_per_s"] == pytest.approx(500 * counted.messages_per_audio_s)
    assert cluster["servers"] == cluster["shards"] * cluster["replicas"]
    assert made["assumptions"]


def test_the_sizes_on_the_page_are_those_of_plans() -> None:
    """By n-grams and queries per second, of which a stream has 285."""
    rows = re.findall(r"^\| (\d+[MG]) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 3
    costs = costs_of(None)
    assert round((costs.messages_per_audio_s or 0) * (costs.queries_per_message or 0)) == 285
    for ngrams, row in rows:
        line = ["plan", "--ngrams", ngrams, "--json", "--streams"]
        made = [json.loads(CliRunner().invoke(app, [*line, n]).stdout) for n in STREAMS]
        server, client, *sizes = row.split(" | ")
        clusters = [plan["cluster"] for plan in made]
        assert sizes == [f"{c['shards']}\u00d7{c['replicas']}" for c in clusters]
        assert {server} == {f"{c['server_bytes'] / GIB:.1f}" for c in clusters}
        assert float(client) == float(f"{made[0]['model']['low_orders'] / GIB:.1g}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model DIR or --ngrams COUNTS"),
        (["--model", "m", "--ngrams", "5M"], "--model DIR or --ngrams COUNTS"),
        (["--ngrams", "5M", "--costs", "none"], "none does not exist"),
        (["--ngrams", "5M", "--trace", "loadtest/traces/ctc.parquet"], "asks for context blocks"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], says: str) -> None:
    """Before anything is computed."""
    done = CliRunner().invoke(app, ["plan", "--streams", "5", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)
