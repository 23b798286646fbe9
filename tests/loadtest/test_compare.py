"""Two reports compared: ratios with intervals, and what counts as worse."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from loadtest.cli.main import app
from loadtest.report.compare import FIGURES, compare, differences

NAMES = ("messages_per_audio_s", "bytes_per_audio_s", "query_time_per_audio_s")


def made(times: float, seed: int, windows: int = 12, failed: float = 0.0) -> dict[str, Any]:
    """A report whose figures are around `times`."""
    rng = np.random.default_rng(seed)

    def one(value: float) -> dict[str, Any]:
        latency = {f"{p}_ms": value for p in ("p50", "p95", "p99", "p99.9")}
        rest = dict.fromkeys((*NAMES, "client_cpu_us_per_request"), value)
        return {**rest, "latency": latency, "failed_share": failed}

    return {
        "format": "dlm load test report",
        "version": 1,
        "complete": True,
        "ended": "the load ended",
        "trace": {"name": "t", "requests": 5},
        "load": {"segments": [{"per_s": 50.0}]},
        "target": {"model": "m", "shard_set": "s"},
        "clients": {},
        "provenance": {"machine": {"cores": 2, "cpu": "a"}},
        "results": one(times),
        "windows": [one(times * math.exp(rng.normal(0, 0.05))) for _ in range(windows)],
    }


def test_a_report_is_not_worse_than_itself_or_a_little_worse() -> None:
    """A ratio within the threshold, however sure; and one beyond it that is not sure."""
    same = made(1.0, 1)
    found = compare(same, same, 0.1)
    assert [one.name for one in found] == [*FIGURES]
    assert {one.ratio for one in found} == {1.0, None}
    assert not any(one.is_worse for one in found)
    assert not any(one.is_worse for one in compare(made(1.0, 1), made(1.05, 2), 0.1))
    noisy = made(1.3, 3)
    for number, window in enumerate(noisy["windows"]):
        window["latency"]["p99_ms"] = 10.0 ** (number % 3)
    (p99,) = [one for one in compare(made(1.0, 1), noisy, 0.1) if one.name == "latency p99, ms"]
    assert p99.ratio == pytest.approx(1.3)
    assert p99.low is not None
    assert p99.low < 1
    assert not p99.is_worse


@pytest.mark.promise("compare")
def test_what_is_surely_beyond_the_threshold_is_worse() -> None:
    """Each figure; less is better, and never worse."""
    worse = compare(made(1.0, 1), made(1.3, 2), 0.1)
    assert {one.name for one in worse if one.is_worse} == {*FIGURES} - {"failed share"}
    assert not any(one.is_worse for one in compare(made(1.3, 1), made(1.0, 2), 0.1))


def test_failures_where_there_were_none_are_worse() -> None:
    """Whatever the threshold."""
    found = compare(made(1.0, 1), made(1.0, 2, failed=0.001), 100.0)
    assert [one.name for one in found if one.is_worse] == ["failed share"]


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of a ratio of 1.1, in 400 pairs of runs: 95 %, within three standard errors."""
    inside = 0
    for seed in range(400):
        first, second = made(1.0, 2 * seed), made(1.1, 2 * seed + 1)
        for report in (first, second):
            logs = [math.log(w["latency"]["p50_ms"]) for w in report["windows"]]
            report["results"]["latency"]["p50_ms"] = math.exp(sum(logs) / len(logs))
        (p50,) = [one for one in compare(first, second, 0.1) if one.name == "latency p50, ms"]
        assert p50.low is not None
        assert p50.high is not None
        inside += p50.low <= 1.1 <= p50.high
    assert abs(inside / 400 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 400)


def test_runs_too_short_for_an_interval_have_none() -> None:
    """One window; the ratio alone decides."""
    found = compare(made(1.0, 1, windows=1), made(1.3, 2, windows=1), 0.1)
    assert {one.low for one in found} == {None}
    assert sum(one.is_worse for one in found) == len(FIGURES) - 1


def test_what_else_differs_is_said() -> None:
    """The trace, the machine; a run that broke off."""
    other = copy.deepcopy(made(1.0, 1))
    other["trace"]["name"] = "u"
    other["provenance"]["machine"] = {"cores": 4, "cpu": "b"}
    other["load"]["segments"] = [{"per_s": 50.0}, {"per_s": 100.0}]
    other |= {"complete": False, "ended": "interrupted"}
    told = differences(made(1.0, 1), other)
    assert told[0] == "the runs differ in their trace: t and u"
    assert told[1:4] == [
        "the runs differ in their load, segments: [{'per_s': 50.0}] and "
        "[{'per_s': 50.0}, {'per_s': 100.0}]",
        "the runs differ in their machine, cores: 2 and 4",
        "the runs differ in their machine, cpu: a and b",
    ]
    assert told[-1] == "the run 'after' is not complete: interrupted"
    assert "'before' is not complete: inter" in differences(other, made(1.0, 1))[-1]
    assert len(told) == 5


@pytest.mark.promise("compare")
def test_the_command_ends_with_one_where_something_got_worse(tmp_path: Path) -> None:
    """And prints every figure."""
    pytest.importorskip("hdrh")
    for name, times in (("a", 1.0), ("b", 1.3)):
        (tmp_path / f"{name}.json").write_text(json.dumps(made(times, 1)))
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    done = CliRunner().invoke(app, ["compare", *paths])
    assert done.exit_code == 1
    assert done.output.count("worse") == len(FIGURES) - 1
    assert CliRunner().invoke(app, ["compare", *paths, "--threshold", "50"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", *reversed(paths)]).exit_code == 0
