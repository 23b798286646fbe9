"""Turns a report into text: tables for the terminal, and CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from loadtest.report.report import Report

# A warning is given if p99 of the lateness is above this and above a median call's time.
LATE_MS = 5.0

# Columns of report.csv: name -> path of the column's value in a window.
COLUMNS = {
    **{
        name: (name,)
        for name in (
            *("begin_s", "seconds", "target_per_s", "requests", "answered", "failed", "audio_s"),
            *(
                "requests_per_s",
                "failed_share",
                "bigram_fallback_share",
                "local_fallback_share",
                "messages",
                "messages_per_audio_s",
                "queries",
            ),
            *("queries_per_message", "local_hits_share", "query_time_per_audio_s"),
            *("client_cores", "server_cores", "bytes_sent", "bytes_received", "mode"),
        )
    },
    **{
        f"{kind}_{place}_ms": (kind, f"{place}_ms")
        for kind in ("latency", "service", "late")
        for place in ("p50", "p95", "p99", "p99.9", "max")
    },
}


def csv_of(report: Report) -> str:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(COLUMNS)
    for window in report["windows"]:
        out.writerow([value_at(window, path) for path in COLUMNS.values()])
    return text.getvalue()


def value_at(window: dict[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = window
    for name in path:
        found = found[name]
    return found


def number(value: float | None, unit: str = "") -> str:
    """A number with about three digits; "-" if it is unknown."""
    if value is None:
        return "-"
    if value == 0:
        text = "0"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:.0f}"
    elif abs(value) >= 1:
        text = f"{value:.3g}"
    else:
        text = f"{value:.2g}"
    return f"{text} {unit}".strip()


def percent(value: float | None) -> str:
    return "-" if value is None else number(100 * value, "%")


def milliseconds(latency: dict[str, Any]) -> str:
    return " / ".join(number(latency[f"{place}_ms"]) for place in ("p50", "p95", "p99", "p99.9"))


def rows_of(report: Report) -> list[tuple[str, str]]:
    r, driver, balance = report["results"], report["driver"], report["balance"]
    rows = [
        ("messages per second of audio", number(r["messages_per_audio_s"])),
        ("queries per message", number(r["queries_per_message"])),
        ("queries that cost no message", percent(r["local_hits_share"])),
        ("query time per second of audio", number(r["query_time_per_audio_s"], "s")),
        ("latency, p50 / p95 / p99 / p99.9 ms", milliseconds(r["latency"])),
        ("without waiting for the driver, ms", milliseconds(r["service"])),
        ("requests", f"{r['requests']:,}, {number(r['requests_per_s'])} per second"),
        ("audio", f"{number(r['audio_s'], 's')}, {number(r['audio_s_per_s'])} streams at a time"),
        ("messages per minute", number(r["messages_per_minute"])),
        ("bytes per second of audio", number(r["bytes_per_audio_s"])),
        ("cores, clients + servers", f"{number(r['client_cores'])} + {number(r['server_cores'])}"),
        ("client CPU per request", number(r["client_cpu_us_per_request"], "us")),
        (
            "balance, (max - avg) / avg",
            f"bytes {percent(balance['bytes']['imbalance'])}, "
            f"messages {percent(balance['messages']['imbalance'])}",
        ),
        ("failed", f"{r['failed']:,} ({percent(r['failed_share'])})"),
        ("driver's share of the clients' CPU", percent(driver["share_of_client_cpu"])),
    ]  # fmt: skip
    if (checked := report.get("checked")) is not None:
        rows.append(("wrong scores", f"{checked['wrong']:,} of {checked['answers']:,} answers"))
    if report["modes"]:
        modes = ", ".join(f"{m['mode']} from {number(m['at_s'])} s" for m in report["modes"])
        rows.append(("mode of the cascade", modes))
    return rows


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def tables_of(report: Report) -> list[Table]:
    """Title, column names and rows, for steps and for stretches between faults."""
    found: list[Table] = []
    if report["steps"]:
        names: tuple[str, ...] = (
            *("requests/s", "answered/s", "p50 / p95 / p99 / p99.9 ms", "failed", "client cores"),
        )
        rows: list[tuple[str, ...]] = [
            (
                number(s["per_s"]),
                number(s["answered_per_s"]),
                milliseconds(s["latency"]),
                f"{s['failed']:,}",
                number(s["client_cores"]),
            )
            for s in report["steps"]
        ]
        found.append(("Steps", names, rows))
    if report.get("stretches"):
        names = (
            "from",
            "after",
            "p50 / p95 / p99 / p99.9 ms",
            "failed",
            "2-grams",
            "local fallback",
        )
        rows = [
            (
                number(s["begin_s"], "s"),
                s["after"] or "-",
                milliseconds(s["latency"]),
                percent(s["failed_share"]),
                percent(s["bigram_fallback_share"]),
                percent(s["local_fallback_share"]),
            )
            for s in report["stretches"]
        ]
        found.append(("From fault to fault", names, rows))
    return found


def warnings_of(report: Report) -> list[str]:
    found = []
    driver = report["driver"]
    if not report["complete"]:
        found.append(f"the run is not complete: {report['ended']}")
    if driver["is_bottleneck"]:
        found.append(
            f"the driver took {percent(driver['share_of_client_cpu'])} of the clients' CPU time, "
            "more than 10 %: it may be the bottleneck; give more --processes"
        )
    late, service = report["results"]["late"], report["results"]["service"]
    if (late["p99_ms"] or 0.0) > max(LATE_MS, service["p50_ms"] or 0.0):
        found.append(
            f"1 % of the requests were sent more than {number(late['p99_ms'], 'ms')} late, which "
            "their latency includes: the load generator did not get CPU in time; give more "
            "--processes, or use another machine"
        )
    for outcome, text in report["errors"].items():
        count = report["results"]["outcomes"][outcome]
        found.append(f"{count:,} requests ended with {outcome}: {text}")
    return found
