"""The search for the highest rate: it ends near the knee, says why, and goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("hdrh")

from cluster import WAIT_S, Cluster, until
from dlm.errors import ConfigError
from loadtest.capacity.capacity import (
    CPU,
    DRIVER,
    FAILURES,
    LEAST_RATE,
    MAX_POINTS,
    P99,
    Limits,
    Point,
    build_capacity,
    judged,
    knee,
    next_rate,
    others_share,
    points_to_go_on_with,
    read_capacity,
    search,
    verdict,
    write_capacity,
)
from loadtest.capacity.page import capacity_page
from loadtest.report.report import Report
from loadtest.report.session import read_report

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "loadtest/capacity/capacity.schema.json").read_text())


def point(rate: float, crossed: str = "", why: str = "") -> Point:
    """Of a run that nothing else is asked of."""
    return Point(
        *(rate, rate, rate, rate / 10, rate, 1.0, 10.0, 1.0, 2.0, 0.1, 0.0, 0.1, 0.1, 0.2),
        *(0.15, 0.15, 100.0, 5.0, crossed, why),
    )


@pytest.fixture(scope="module")
def report(results: Path) -> Report:
    """Of a finished run, with servers in this process and so without CPU of their own."""
    found = read_report(results)
    found["results"] |= {"server_cores": 0.2, "busiest_server_cores": 0.2, "client_cores": 0.3}
    found["driver"] |= {"is_bottleneck": False, "share_of_client_cpu": 0.01}
    found["results"]["latency"] |= {"p50_ms": 1.0, "p99_ms": 10.0}
    found["results"]["late"]["p99_ms"] = 0.1
    found["results"]["service"]["p50_ms"] = 1.0
    found["provenance"]["machine"]["cores"] = 2
    return found


def changed(report: Report, **parts: dict[str, Any]) -> Report:
    """The report with some values replaced; of `results.latency` as `latency`."""
    made: Report = json.loads(json.dumps(report))
    for name, values in parts.items():
        place = made["results"] if name in ("latency", "late") else made
        place[name] = {**place[name], **values}
    return made


def test_a_run_crosses_the_limit_that_it_meets_first(report: Report) -> None:
    """Errors before CPU, CPU before the driver, that before p99; each with its reason."""
    limits = Limits(50.0, 0.75)
    assert judged(5.0, report, limits).crossed == ""
    assert judged(5.0, report, limits).cpu_share == pytest.approx(0.25)  # 0.5 of two cores
    slow = changed(report, latency={"p99_ms": 51.0})
    assert judged(5.0, slow, limits).crossed == P99
    assert judged(5.0, slow, limits).why == "p99 is 51 ms; the limit is 50 ms"
    late = changed(slow, late={"p99_ms": 40.0})
    assert judged(5.0, late, limits).crossed == DRIVER
    assert "more --processes" in judged(5.0, late, limits).why
    driver = changed(slow, driver={"is_bottleneck": True, "share_of_client_cpu": 0.4})
    assert "took 40 % of the clients' CPU" in judged(5.0, driver, limits).why
    busy = changed(driver, results={"client_cores": 1.0, "server_cores": 0.6})
    assert judged(5.0, busy, limits).why == (
        "80 % of the machine, by clients and servers; the limit is 75 %"
    )
    failing = changed(busy, results={"failed_share": 0.02}, errors={"shard_down": "nobody at a:1"})
    assert judged(5.0, failing, limits).crossed == FAILURES
    assert judged(5.0, failing, limits).why == "2 % of the requests failed: nobody at a:1"


def test_servers_elsewhere_are_judged_by_the_busiest_of_them(report: Report) -> None:
    """The CPU of the clients' machine says nothing of them."""
    elsewhere = changed(report, results={"busiest_server_cores": 0.8, "client_cores": 2.0})
    elsewhere["servers"] = [{**one, "address": "10.0.0.1:8001"} for one in report["servers"]]
    found = judged(5.0, elsewhere, Limits())
    assert found.crossed == CPU
    assert found.why == "80 % of a core, by the busiest server process; the limit is 75 %"


@settings(max_examples=60, deadline=None)
@given(st.floats(1.0, 50_000.0), st.floats(1.0, 5000.0), st.sampled_from([0.02, 0.1, 0.5]))
def test_the_search_ends_beside_the_knee(takes: float, first: float, precision: float) -> None:
    """Of a cluster that takes so much and no more: within the precision, in few runs."""
    points: list[Point] = []
    while (rate := next_rate(points, first, precision, 1e6)) is not None:
        assert rate not in [one.rate for one in points]
        points.append(point(rate, P99 if rate > takes else ""))
    best, badly = knee(points)
    assert badly is not None
    assert badly.rate > takes
    if best is None:
        assert badly.rate / 2 < LEAST_RATE
    else:
        assert best.rate <= takes
        assert badly.rate / best.rate <= 1 + precision
    assert len(points) < MAX_POINTS


def test_a_cluster_that_takes_all_is_said_to(report: Report) -> None:
    """The search ends at the highest rate; where the driver was in the way, that is said."""
    points: list[Point] = []
    while (rate := next_rate(points, 10.0, 0.1, 100.0)) is not None:
        points.append(point(rate))
    assert [one.rate for one in points] == [10.0, 20.0, 40.0, 80.0, 100.0]
    assert verdict(points, "found").startswith("at least 100 requests/s, 10 streams at a time")
    points.append(point(200.0, DRIVER, "give more --processes"))
    assert "the driver was the bottleneck: give more --processes" in verdict(points, "found")
    assert verdict([], "interrupted").endswith(": interrupted")
    assert verdict([point(1.0, CPU, "80 %")], "found").startswith(
        "1 requests/s are already too many"
    )
    assert others_share([replace(point(1.0), machine_cpu_share=0.5)], 2) == pytest.approx(0.35)


def test_a_search_that_was_broken_off_goes_on(report: Report, tmp_path: Path) -> None:
    """With the points that it had; other settings, and files that are none, are refused."""
    limits, how = Limits(), {"trace": "t", "duration_s": 4.0}
    kept: list[tuple[list[float], str]] = []

    def keep(points: list[Point], ended: str, last: Report | None) -> None:
        kept.append(([one.rate for one in points], ended))
        write_capacity(tmp_path, build_capacity(how, limits, points, ended, last))

    def measure(rate: float) -> Report:
        if rate == 40.0:
            return {**report, "complete": False, "ended": "the cluster vanished"}
        return report

    points: list[Point] = []
    ended = search(measure, keep, points, limits, first=10.0, precision=0.1, most=80.0)
    assert ended == "the cluster vanished"
    assert kept == [([10.0], "running"), ([10.0, 20.0], "running"), ([10.0, 20.0], ended)]
    found = read_capacity(tmp_path)
    assert not found["complete"]
    assert found["knee"]["rate"] == 20.0
    again = points_to_go_on_with(found, how, limits)
    assert again == points
    asked: list[float] = []
    search(
        lambda rate: asked.append(rate) or report,  # type: ignore[func-returns-value]
        keep, again, limits, first=10.0, precision=0.1, most=80.0,
    )  # fmt: skip
    assert asked == [40.0, 80.0]
    assert read_capacity(tmp_path)["complete"]
    with pytest.raises(ConfigError, match=r"duration_s 4\.0, .* 5\.0"):
        points_to_go_on_with(found, {**how, "duration_s": 5.0}, limits)
    with pytest.raises(ConfigError, match=f"{tmp_path}/nothing"):
        read_capacity(tmp_path / "nothing")
    (tmp_path / "capacity.json").write_text('{"format": "x", "version": 1, "points": [{}]}')
    with pytest.raises(ConfigError, match=r"capacity\.json"):
        read_capacity(tmp_path)


def test_the_page_shows_every_rate_and_the_knee(
    report: Report, tmp_path: Path, drawn: Callable[[Path], str]
) -> None:
    """Also of a search that found nothing."""
    points = [point(10.0), point(40.0, CPU, "<80 %>"), point(20.0)]
    found = build_capacity({"trace": "t"}, Limits(), points, "found", report)
    assert [one["rate"] for one in found["points"]] == [10.0, 20.0, 40.0]
    assert found["knee"] == asdict(points[2])
    (tmp_path / "page.html").write_text(capacity_page(found))
    page = drawn(tmp_path / "page.html")
    assert page.count("<path") >= 8
    assert page.count('class="fault"') == 4
    assert "&lt;80 %&gt;" in page
    nothing = build_capacity({}, Limits(), [], "interrupted", None)
    assert ": interrupted" in capacity_page(nothing)


SETTINGS = {
    "trace": "t.parquet",
    "servers": "cluster.toml",
    "duration_s": 4.0,
    "warmup_s": 0.5,
    "arrival_pattern": "poisson",
    "processes": 1,
    "deadline_s": 2.0,
    "seed": 1,
}


def test_a_capacity_report_is_what_its_schema_says(report: Report) -> None:
    """Found, broken off before the first run, and with a limit crossed; no other field is
    allowed."""
    crossed = [judged(10.0, report, Limits()), judged(20.0, report, Limits(p99_ms=1e-6))]
    found = build_capacity(SETTINGS, Limits(), crossed, "found", report)
    assert found["beyond"] is not None
    nothing = build_capacity(SETTINGS, Limits(), [], "interrupted", None)
    for one in (found, nothing):
        jsonschema.validate(json.loads(json.dumps(one)), SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**nothing, "more": 1}, SCHEMA)


def started(cluster: Path, trace_file: Path, folder: Path, *more: object) -> Any:
    """`capacity` of a cluster, with short runs."""
    line = [sys.executable, "-m", "loadtest", "capacity", trace_file, "--cluster", cluster]
    line += ["--duration", 2, "--warmup", 0.5, "--first-rate", 20, "--max-rate", 80]
    return subprocess.Popen(
        [*map(str, line), *map(str, more)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DLM_CACHE_DIR": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_ctrl_c_keeps_the_rates_that_were_measured_and_resume_goes_on(
    servers: Cluster, trace_file: Path, tmp_path: Path
) -> None:
    """The command: interrupted in its second run, then to the end."""
    cluster = servers.write(tmp_path / "cluster.toml")
    limits = ("--p99", 60_000, "--cpu", 100, "--precision", 100, "--deadline", 60)
    process = started(cluster, trace_file, tmp_path, "--output", "out", *limits)
    second = tmp_path / "out/40/records.jsonl"
    until(lambda: second.exists() and '"started"' in second.read_text(), process)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert "resume the search with --resume out" in errors
    found = read_capacity(tmp_path / "out")
    assert found["ended"] == "interrupted"
    assert [one["rate"] for one in found["points"]] == [20.0]
    assert (tmp_path / "out/capacity.html").exists()
    process = started(cluster, trace_file, tmp_path, "--resume", "out", *limits)
    printed, errors = process.communicate(timeout=2 * WAIT_S)
    found = read_capacity(tmp_path / "out")
    jsonschema.validate(found, SCHEMA)
    assert found["points"][0]["rate"] == 20.0
    assert len(found["points"]) > 1
    assert process.returncode == (not found["complete"]), errors
    assert found["verdict"] in printed
