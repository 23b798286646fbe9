"""Makes one HTML page of a capacity report: p99, CPU and answers against the rate."""

from __future__ import annotations

from html import escape
from typing import Any

from loadtest.report.page import document, section, table, tiles
from loadtest.report.svg import WIDE, WIDTH, Point, Series, line_chart
from loadtest.report.table import number, percent

Rows = list[tuple[str, ...]]
NAMES = (
    *("rate", "streams", "p50 ms", "p99 ms", "failed", "CPU", "clients", "servers", "messages"),
    "crossed",
)
NOTE = "Rate: requests per second. Clients, servers: cores. Messages: per second."


def rows_of(found: dict[str, Any]) -> Rows:
    return [
        (
            number(p["rate"]),
            number(p["audio_s_per_s"]),
            number(p["p50_ms"]),
            number(p["p99_ms"]),
            percent(p["failed_share"]),
            percent(p["cpu_share"]),
            number(p["client_cores"]),
            number(p["server_cores"]),
            number(p["messages_per_s"]),
            p["crossed"] or "-",
        )
        for p in found["points"]
    ]


def capacity_page(found: dict[str, Any]) -> str:
    title = "dlm capacity"
    knee = found["knee"]
    body = [f"<h1>{title}</h1>", f"<p>{escape(found['verdict'])}</p>"]
    if not found["complete"]:
        body.append(f'<p class="warning">The search is not complete: {escape(found["ended"])}</p>')
    body += [f'<p class="warning">{escape(text)}</p>' for text in found["warnings"]]
    if knee is not None:
        large = [
            (number(knee["rate"]), "requests per second"),
            (number(knee["audio_s_per_s"]), "audio streams at a time"),
            (number(knee["p99_ms"], "ms"), "p99 latency at that rate"),
            (number(60 * knee["messages_per_s"]), "messages per minute"),
            (percent(knee["cpu_share"]), "CPU, " + _whose(found)),
        ]
        body.append(tiles(large))
    body.append('<div class="charts">')
    if found["points"]:
        body += _charts(found)
    body.append(section("Rates", table(NAMES, rows_of(found)), NOTE, wide=True))
    body.append(section("Where this comes from", table(("", ""), _origin(found)), wide=True))
    return document(title, [*body, "</div>"])


def _whose(found: dict[str, Any]) -> str:
    return (
        "of the machine, clients and servers"
        if found["is_shared"]
        else "of a core of the busiest server"
    )


def _charts(found: dict[str, Any]) -> list[str]:
    def by_rate(name: str, times: float = 1.0) -> list[Point]:
        return [(p["rate"], None if p[name] is None else times * p[name]) for p in found["points"]]

    rates = [p["rate"] for p in found["points"]]
    marks = [] if found["knee"] is None else [(found["knee"]["rate"], "knee")]

    def limit(value: float) -> Series:
        return Series("limit", [(min(rates), value), (max(rates), value)], faint=True)

    across = "requests per second"
    limits = found["limits"]
    latency = [
        Series("p99", by_rate("p99_ms")),
        Series("p50", by_rate("p50_ms")),
        limit(limits["p99_ms"]),
    ]
    cpu = [
        Series(_whose(found), by_rate("cpu_share", 100)),
        limit(100 * limits["cpu_share"]),
    ]
    answers = [
        Series("answered", by_rate("answered_per_s")),
        Series("sent", by_rate("sent_per_s"), faint=True),
    ]
    cores = [Series("clients", by_rate("client_cores")), Series("servers", by_rate("server_cores"))]
    charts = [
        ("Latency", latency, "ms", True, True),
        ("CPU", cpu, "%", False, False),
        ("Answers per second", answers, "per second", False, False),
        ("Cores", cores, "cores", False, False),
    ]
    return [
        section(
            title,
            line_chart(
                series,
                x_name=across,
                y_name=unit,
                log=log,
                marks=marks,
                width=WIDE if wide else WIDTH,
            ),
            wide=wide,
        )
        for title, series, unit, log, wide in charts
    ]


def _origin(found: dict[str, Any]) -> Rows:
    rows: Rows = [("ended", found["ended"])]
    rows += [(name.replace("_", " "), str(value)) for name, value in found["settings"].items()]
    provenance = found["provenance"]
    if provenance is not None:
        machine = provenance["machine"]
        rows += [
            ("command", " ".join(provenance["command"])),
            ("commit", str(provenance["commit"])),
            ("machine", f"{machine['cores']} cores of {machine['cpu']}"),
            ("server processes", str(found["servers"])),
        ]
    return rows
