"""A run of real servers and client processes, and the report that comes of it."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("hdrh")

from dlm.errors import ConfigError, FormatError
from loadtest.report.page import page_of
from loadtest.report.report import build, imbalance
from loadtest.report.session import JOURNAL, read_report, results_folder
from loadtest.report.svg import Axis, Series, line_chart
from loadtest.report.table import COLUMNS, csv_of, number, rows_of, warnings_of
from loadtest.run.driver import records_of
from loadtest.traces.schedule import Load, Segment, schedule
from loadtest.traces.trace import Trace

SCHEMAS = sorted((Path(__file__).parents[2] / "loadtest").rglob("*.schema.json"))
SCHEMA = json.loads((Path(__file__).parents[2] / "loadtest/report/report.schema.json").read_text())


@pytest.fixture(scope="module")
def report(results: Path) -> dict[str, Any]:
    """Of the finished run."""
    return read_report(results)


def test_the_report_is_what_its_schema_says(report: dict[str, Any]) -> None:
    """Whole, by window and by step."""
    jsonschema.validate(report, SCHEMA)
    known = SCHEMA["$defs"]["measured"]["properties"].keys()
    for part in (report["results"], *report["windows"], *report["steps"]):
        assert known <= part.keys()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda path: path.name)
def test_every_field_of_a_schema_is_described(schema: Path) -> None:
    """Of reports, capacities and results of the evaluation."""
    found = json.loads(schema.read_text())
    jsonschema.Draft202012Validator.check_schema(found)

    def described(part: Any) -> bool:
        fields = part.get("properties", {}).values()
        inside = [*fields, part["items"]] if "items" in part else fields
        return all("description" in one for one in fields) and all(map(described, inside))

    assert all(map(described, [found, *found.get("$defs", {}).values()]))


def test_every_planned_request_is_sent_once_and_answered(
    report: dict[str, Any], trace: Trace
) -> None:
    """By the schedule of the same seed; those of the warm-up are counted apart."""
    load = Load((Segment(2.0, 60), Segment(1.0, 80)), warmup_s=0.5)
    plan = schedule(trace, load, seed=1)
    measured = plan.due_s >= 0
    assert report["results"]["requests"] == int(measured.sum())
    assert report["warmup"]["requests"] == len(plan) - int(measured.sum())
    assert report["results"]["outcomes"] == {"ok": report["results"]["requests"]}
    assert report["results"]["latency"]["count"] == report["results"]["requests"]
    audio_s = float(trace.audio_share_s[plan.request[measured]].sum())
    assert report["results"]["audio_s"] == pytest.approx(audio_s)
    assert report["complete"]
    assert report["ended"] == "the load ended"
    windows = report["windows"]
    assert [w["begin_s"] for w in windows] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [round(w["target_per_s"]) for w in windows] == [60, 60, 60, 60, 80, 80]
    assert sum(w["requests"] for w in windows) == report["results"]["requests"]
    assert [step["requests"] for step in report["steps"]] == [
        sum(w["requests"] for w in windows[:4]),
        sum(w["requests"] for w in windows[4:]),
    ]


def test_clients_and_servers_count_the_same_messages(report: dict[str, Any], results: Path) -> None:
    """All of the run, warm-up included."""
    served = json.loads((results.parent / "served.json").read_text())
    records = [r for r in records_of(results / JOURNAL) if r["type"] == "window"]
    clients = {name: sum(r["counts"][name] for r in records) for name in records[0]["counts"]}
    assert clients["messages"] == clients["messages_ok"] == served["messages"] > 0
    assert clients["sent_queries"] == served["queries"]
    assert report["balance"]["bytes"]["per_shard"] == report["target"]["shard_bytes"]


def test_figures_follow_from_counts(report: dict[str, Any]) -> None:
    """Of the whole, and of each window."""
    for one in (report["results"], *report["windows"]):
        assert one["messages_per_audio_s"] == pytest.approx(one["messages"] / one["audio_s"])
        assert one["messages_per_minute"] == pytest.approx(60 * one["messages"] / one["seconds"])
        assert 0 < one["local_hits_share"] < 1
        assert one["latency"]["p50_ms"] >= one["service"]["p50_ms"] * 0.99
    assert imbalance([1, 2, 3]) == pytest.approx(0.5)
    assert imbalance([]) is None
    assert imbalance([0, 0]) is None


def test_csv_has_a_line_for_each_window(report: dict[str, Any], results: Path) -> None:
    """With the columns that are listed."""
    with (results / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == [*COLUMNS]
    assert [int(row["messages"]) for row in rows] == [w["messages"] for w in report["windows"]]
    assert csv_of(report) == (results / "report.csv").read_text()


def test_the_page_needs_nothing_else(results: Path) -> None:
    """No script, no link, no address; names from outside are escaped."""
    page = (results / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=|url\(|https?:", page)
    assert page.count("<svg") >= 5
    report = read_report(results)
    report["trace"]["name"] = "<b>&"
    assert "&lt;b&gt;&amp;" in page_of(report)


def test_chromium_draws_the_page(results: Path, drawn: Callable[[Path], str]) -> None:
    """Every chart has lines with lengths."""
    assert drawn(results / "report.html").count("<path") >= 8


@pytest.mark.promise("report_after_kill")
def test_a_killed_run_is_reported_from_its_records(
    report: dict[str, Any], results: Path, tmp_path: Path
) -> None:
    """As far as it came: the last line is cut, and there is no end."""
    lines = (results / JOURNAL).read_text().splitlines()
    last = [at for at, line in enumerate(lines) if '"window": 3' in line][-1]
    (tmp_path / JOURNAL).write_text("\n".join([*lines[: last + 1], '{"type": "wind']))
    found = read_report(tmp_path)
    jsonschema.validate(found, SCHEMA)
    assert found["ended"] == "the run was killed"
    assert not found["complete"]
    assert found["windows"][:3] == report["windows"][:3]
    assert "not complete" in warnings_of(found)[0]


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    """Nothing there, another file, another version, records without a client."""
    with pytest.raises(ConfigError, match=r"report\.json"):
        read_report(tmp_path / "report.json")
    path = tmp_path / "report.json"
    for text, message in (
        ("[]", "report.json"),
        ("{", "report.json"),
        ('{"format": "dlm load test report", "version": 2}', "version 2; "),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_report(path)
    with pytest.raises(FormatError, match="client"):
        build([{"type": "header"}])


def test_results_go_into_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds something, or a file, is refused before anything runs."""
    monkeypatch.chdir(tmp_path)
    assert results_folder(None).parent.name == "loadtest-results"
    assert results_folder(tmp_path / "a/b").is_dir()
    (tmp_path / "a/c").write_text("")
    with pytest.raises(ConfigError, match=f"{tmp_path}/a .*--output"):
        results_folder(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"{tmp_path}/a/c"):
        results_folder(tmp_path / "a/c")
    if os.geteuid():
        with pytest.raises(ConfigError, match="/proc/none"):
            results_folder(Path("/proc/none"))


def test_tables_say_what_to_know_first(report: dict[str, Any]) -> None:
    """A driver in the way, requests that were sent late, failures, the mode of the cascade."""
    assert next(name for name, _ in rows_of(report)) == "messages per second of audio"
    changed = json.loads(json.dumps(report))
    changed["driver"] |= {"is_bottleneck": True, "share_of_client_cpu": 0.31}
    changed["results"]["late"]["p99_ms"] = 99.0 + changed["results"]["service"]["p50_ms"]
    changed["results"]["outcomes"]["shard_down"] = 7
    changed["errors"] = {"shard_down": "nobody at a:1"}
    changed["modes"] = [{"at_s": 0.5, "mode": "full"}, {"at_s": 2.0, "mode": "local_fallback"}]
    changed["windows"][3]["mode"] = "local_fallback"
    told = "\n".join(warnings_of(changed))
    assert "the driver took 31 %" in told
    assert "sent more than" in told
    assert "7 requests ended with shard_down: nobody at a:1" in told
    assert (
        dict(rows_of(changed))["mode of the cascade"] == "full from 0.5 s, local_fallback from 2 s"
    )
    page = page_of(changed)
    assert 'class="shade"' in page
    assert "nobody at a:1" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.01234, "0.012"), (1.236, "1.24"), (123.4, "123"), (12345, "12,345")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    """Or so."""
    assert number(value) == text


def test_axes_have_round_ticks_and_gaps_break_lines() -> None:
    """On linear and logarithmic scales; of one value, of none."""
    assert Axis(0, 10, 0, 100).ticks() == [0, 2, 4, 6, 8, 10]
    assert Axis(0, 10, 0, 100).place(5) == 50
    assert Axis(1, 100, 0, 100, log=True).place(10) == pytest.approx(50)
    assert Axis(0.5, 60, 0, 1, log=True).ticks() == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])
    drawn = line_chart(
        [Series("a", [(0, 1), (1, None), (2, 3), (3, 0)])], x_name="x", y_name="y", log=True
    )
    assert drawn.count("M") == 2
    assert "<svg" in line_chart([Series("a", [])], x_name="x", y_name="y")
