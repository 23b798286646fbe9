"""Makes one HTML page of a report, which needs no script, no font and no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from loadtest.report.report import Report
from loadtest.report.svg import WIDE, Point, Series, bar_chart, line_chart
from loadtest.report.table import number, percent, rows_of, tables_of, value_at, warnings_of

STYLE = """
:root { color-scheme: light dark; --page: #f9f9f7; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e;
  --faint: #898781; --grid: #e1e0d9; --edge: #e4e3de; --shade: #fbe9c6;
  --s1: #2a78d6; --s2: #eb6834; --s3: #1baf7a; --s4: #4a3aa7; --s5: #b3267e; --s6: #8a6d0b; }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --card: #1a1a19; --ink: #fff;
  --soft: #c3c2b7; --faint: #898781; --grid: #2c2c2a; --edge: #2c2c2a; --shade: #4a3a12;
  --s1: #3987e5; --s2: #d95926; --s3: #199e70; --s4: #9085e9; --s5: #e05cab; --s6: #c9a227; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0; color: var(--soft); } .note { font-size: 13px; margin: 0 0 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(155px, 1fr)); gap: 12px;
  margin: 20px 0; }
.tile, section { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  padding: 14px 16px; }
.tile b { display: block; font-size: 28px; font-weight: 600; } .tile span { color: var(--soft);
  font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr));
  gap: 12px; }
section { margin-bottom: 0; min-width: 0; } .wide { grid-column: 1 / -1; }
.warning { border-left: 4px solid var(--s2); padding: 8px 12px; margin: 8px 0;
  background: var(--card); color: var(--ink); overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--grid); } .shade { fill: var(--shade); opacity: .6; }
.tick { fill: var(--faint); font-size: 11px; font-variant-numeric: tabular-nums; }
.axis { fill: var(--soft); font-size: 12px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .faint { stroke-dasharray: 5 4; }
.fault { stroke: var(--ink); stroke-dasharray: 4 3; opacity: .7; }
.mark { opacity: 0; } .mark:hover { opacity: 1; }
.bars { width: 60%; } .bar { height: 16px; border-radius: 3px; background: var(--s1); }
.line.s1 { stroke: var(--s1); } .line.s2 { stroke: var(--s2); } .line.s3 { stroke: var(--s3); }
.line.s4 { stroke: var(--s4); } .line.s5 { stroke: var(--s5); } .line.s6 { stroke: var(--s6); }
.mark.s5 { fill: var(--s5); } .mark.s6 { fill: var(--s6); }
.mark.s1 { fill: var(--s1); } .mark.s2 { fill: var(--s2); }
.mark.s3 { fill: var(--s3); } .mark.s4 { fill: var(--s4); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft);
  min-height: 20px; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  vertical-align: middle; margin-right: 6px; background: var(--s1); }
.key.s2::before { background: var(--s2); } .key.s3::before { background: var(--s3); }
.key.s4::before { background: var(--s4); } .key.s5::before { background: var(--s5); }
.key.s6::before { background: var(--s6); } .shown .mark { opacity: 1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--edge);
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); }
"""


def page_of(report: Report) -> str:
    trace, target = report["trace"], report["target"]
    provenance = report["provenance"]
    title = f"dlm load test, {provenance['at'][:16].replace('T', ' ')}"
    windows = report["windows"]
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_load_text(report))} Trace {escape(trace['name'])}: "
        f"{trace['utterances']:,} utterances, {number(trace['audio_s'], 's')} of audio. "
        f"Model {target['model'][:12]}, order {target['order']}, {target['ngrams']:,} n-grams, "
        f"{len(target['shard_bytes'])} shards.</p>",
        *[f'<p class="warning">{escape(text)}</p>' for text in warnings_of(report)],
        tiles(_tiles(report)),
        '<div class="charts">',
        *(_charts(report) if windows else []),
        *_tables(report),
        *_servers(report),
        section("All figures", table(("", ""), rows_of(report))),
        section("Where this comes from", table(("", ""), _origin(report))),
        "</div>",
    ]
    return document(title, body)


def document(title: str, body: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def _load_text(report: Report) -> str:
    load = report["load"]
    if load["loop"] == "closed":
        return f"Closed loop, {load['concurrency']} decoders, {number(load['seconds'], 's')}."
    rates = [one["per_s"] for one in load["segments"]]
    span = (
        number(rates[0])
        if len(set(rates)) == 1
        else f"{number(min(rates))} to {number(max(rates))}"
    )
    return (
        f"Open loop, {span} requests per second planned, {load['arrival_pattern']} arrivals, "
        f"{number(load['seconds'], 's')}."
    )


def tiles(texts: Sequence[tuple[str, str]]) -> str:
    cells = [
        f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in texts
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _tiles(report: Report) -> list[tuple[str, str]]:
    r = report["results"]
    p50, p99 = r["latency"]["p50_ms"], r["latency"]["p99_ms"]
    return [
        (number(r["messages_per_audio_s"]), "messages per second of audio"),
        (number(p99, "ms"), f"p99 latency; p50 {number(p50, 'ms')}"),
        (number(r["query_time_per_audio_s"], "s"), "query time per second of audio"),
        (percent(r["local_hits_share"]), "of queries cost no message"),
        (number(r["messages_per_minute"]), "messages per minute"),
        (f"{r['failed']:,}", f"of {r['requests']:,} requests failed"),
    ]  # fmt: skip


def _charts(report: Report) -> list[str]:
    windows = report["windows"]

    def over_time(*path: str) -> list[Point]:
        return [(w["begin_s"] + w["seconds"] / 2, value_at(w, path)) for w in windows]

    places = ("p99.9", "p99", "p95", "p50")
    latency = [Series(place, over_time("latency", f"{place}_ms")) for place in places]
    rates = [
        Series("answered", over_time("answered_per_s")),
        Series("sent", over_time("requests_per_s")),
    ]
    if report["load"]["loop"] == "open":
        rates.append(Series("planned rate", over_time("target_per_s"), faint=True))
    cores = [
        Series("clients", over_time("client_cores")),
        Series("servers", over_time("server_cores")),
    ]
    shaded = _on_small(report)
    marks = _marks(report)
    seconds = "seconds"
    return [
        section(
            "Latency",
            line_chart(
                latency,
                x_name=seconds,
                y_name="ms",
                log=True,
                shaded=shaded,
                marks=marks,
                width=WIDE,
            ),
            "From the planned time of each request, per window."
            + " Shaded: a client is on its local fallback." * bool(shaded)
            + " Dashed: what was broken or restored." * bool(marks),
            wide=True,
        ),
        *_sources(report, over_time, shaded, marks),
        section(
            "Requests per second",
            line_chart(rates, x_name=seconds, y_name="per second", marks=marks),
        ),
        section(
            "Latency by percentile",
            _percentiles(report),
            "All windows; p99.9 means that one request in a thousand took longer.",
        ),
        section(
            "Messages per second of audio",
            line_chart(
                [Series("messages", over_time("messages_per_audio_s"))],
                x_name=seconds,
                y_name="per second of audio",
            ),
        ),
        section("CPU", line_chart(cores, x_name=seconds, y_name="cores", marks=marks)),
    ]


def _marks(report: Report) -> list[tuple[float, str]]:
    found: dict[float, list[str]] = {}
    for one in report.get("faults", []):
        found.setdefault(one["at_s"], []).append(one["command"])
    return [(at_s, ", ".join(commands)) for at_s, commands in found.items()]


def _sources(
    report: Report,
    over_time: Callable[..., list[Point]],
    shaded: Sequence[tuple[float, float, str]],
    marks: Sequence[tuple[float, str]],
) -> list[str]:
    """The sources of answers, unless only the full model answered."""
    results = report["results"]
    if not (marks or results.get("bigram_fallback_share") or results.get("local_fallback_share")):
        return []

    def share(name: str) -> list[Point]:
        return [(x, None if y is None else 100 * y) for x, y in over_time(name)]

    partial, small = share("bigram_fallback_share"), share("local_fallback_share")
    full = [
        (x, None if a is None or b is None else 100 - a - b)
        for (x, a), (_, b) in zip(partial, small, strict=True)
    ]
    series = [
        Series("scores of the full model", full),
        Series("of its 2-grams", partial),
        Series("of the local fallback", small),
        Series("requests that failed", share("failed_share")),
    ]
    chart = line_chart(series, x_name="seconds", y_name="%", shaded=shaded, marks=marks, width=WIDE)
    return [section("Who answered", chart, "Shares of the scores, and of the requests.", wide=True)]


def _on_small(report: Report) -> list[tuple[float, float, str]]:
    """Stretches in which a client was on its local fallback."""
    windows = report["windows"]
    return [
        (w["begin_s"], w["begin_s"] + w["seconds"], "local fallback")
        for w in windows
        if w["mode"] == "local_fallback"
    ]


def _percentiles(report: Report) -> str:
    """Latency over the log of the share of slower requests, as in HdrHistogram's plots."""
    ticks = [(50.0, "50"), (90.0, "90"), (99.0, "99"), (99.9, "99.9"), (99.99, "99.99")]
    most = 1 - 1 / max(report["results"]["latency"]["count"], 2)

    def place(share: float) -> float:
        return -math.log10(max(1 - min(share, most), 1e-9))

    series = [
        Series(name, [(place(p / 100), ms) for p, ms in report["results"][f"{kind}_curve"]])
        for kind, name in (("latency", "from the planned time"), ("service", "from sending"))
    ]
    shown = [(place(p / 100), text) for p, text in ticks if p / 100 <= most]
    return line_chart(series, x_name="percent", y_name="ms", log=True, x_ticks=shown)


def _tables(report: Report) -> list[str]:
    note = "Each row has only the windows that lie entirely in it."
    return [
        section(title, table(names, rows), note, wide=True)
        for title, names, rows in tables_of(report)
    ]


def _servers(report: Report) -> list[str]:
    balance = report["balance"]
    charts = [
        section(
            f"{what} per shard",
            bar_chart([(f"shard {n}", float(v)) for n, v in enumerate(one["per_shard"])], number),
            f"(max - avg) / avg = {percent(one['imbalance'])}.",
        )
        for what, one in (("Messages", balance["messages"]), ("Bytes", balance["bytes"]))
        if any(one["per_shard"])
    ]
    names = ("server", "shard", "state", "messages", "CPU s", "memory MB")
    rows = [
        (
            s["address"],
            str(s["shard"]),
            s["state"],
            number(s["messages"]),
            number(s["cpu_s"]),
            number(None if s["memory_bytes"] is None else s["memory_bytes"] / 1e6),
        )
        for s in report["servers"]
    ]
    return [*charts, *([section("Servers", table(names, rows), wide=True)] if rows else [])]


def _origin(report: Report) -> list[tuple[str, str]]:
    p, trace = report["provenance"], report["trace"]
    machine = p["machine"]
    return [
        ("ended", report["ended"]),
        *[(f"at {number(one['at_s'], 's')}", one["what"]) for one in report.get("faults", [])],
        ("command", " ".join(p["command"])),
        ("commit", str(p["commit"])),
        ("dlm, Python, seed", f"{p['dlm']}, {p['python']}, {p['seed']}"),
        ("machine", f"{machine['cores']} cores of {machine['cpu']}, {machine['system']}, "
                    f"{number(machine['memory_bytes'] / 1e9)} GB"),
        ("client processes", str(report["clients"]["processes"])),
        ("warm-up, not measured", f"{number(report['warmup']['seconds'], 's')}, "
                                  f"{report['warmup']['requests']:,} requests"),
        ("trace made by", trace["made_by"] or "not stated"),
        ("trace asks", f"{number(trace['requests_per_audio_s'])} requests per second of audio, "
                       f"{number(trace['contexts_per_request'])} contexts x "
                       f"{number(trace['words_per_context'])} words"),
        ("shard set", f"{report['target']['shard_set']}, {report['target']['encoding']}"),
    ]  # fmt: skip


def section(title: str, content: str, note: str = "", *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    says = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{says}{content}</section>"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names) if any(names) else ""
    lines = "".join(
        "<tr>"
        + "".join(
            f"<th>{escape(cell)}</th>" if at == 0 else f"<td>{escape(cell)}</td>"
            for at, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" if head else ""}{lines}</table></div>'
