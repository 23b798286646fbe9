"""Makes one HTML page: a card per table and figure, with the paper's rows below ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from loadtest.paper.result import BARS, MEASURED, Plot, Result, result_of
from loadtest.report.page import document, section, table
from loadtest.report.svg import WIDE, Point, Series, bar_chart, line_chart
from loadtest.report.table import number

PAPER = "the paper"


def page_of(facts: Mapping[str, Any]) -> str:
    of = facts["of"]
    entries = facts["experiments"]
    cards = [card for one in entries for card in _cards(result_of(one["result"]))]
    body = [
        "<h1>dlm: the paper's evaluation</h1>",
        "<p>Section 4 of Long et al., A Distributed System for Large-scale n-gram Language Models "
        f"at Tencent (PVLDB 2019), repeated. Model {escape(of['arpa'])}, order {of['order']}, "
        f"{of['ngrams']:,} n-grams; trace {escape(of['trace'])}. Every row says whether it was "
        "measured, simulated or computed; rows of the paper name their section.</p>",
        '<div class="charts shown">',
        *cards,
        section("Where this comes from", table(ORIGIN, [_origin(o) for o in entries]), wide=True),
        "</div>",
    ]
    return document("dlm: the paper's evaluation", body)


ORIGIN = ("experiment", "when", "took", "commit", "machine", "note", "command")


def _origin(entry: Mapping[str, Any]) -> list[str]:
    p = entry["provenance"]
    machine = p["machine"]
    return [
        entry["result"]["name"],
        p["at"][:16].replace("T", " "),
        number(entry["seconds"], "s"),
        str(p["commit"])[:12] + "+" * str(p["commit"]).endswith("+"),
        f"{machine['cores']} cores of {machine['cpu']}, {number(machine['memory_bytes'] / 1e9)} GB",
        entry["note"] or "-",
        " ".join(p["command"]),
    ]


def _cards(result: Result) -> Iterator[str]:
    for at, plot in enumerate(result.plots()):
        title = result.title if at == 0 else f"{result.title}, {plot['labels']['y']}"
        yield section(plot.get("title", title), _drawn(result, plot), wide=plot["kind"] != BARS)
    names, rows = cells_of(result)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in result.notes)
    yield section(result.title, table(names, rows) + notes, wide=True)


def cells_of(result: Result) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a result's table: ours first, the paper's last."""
    names = [f"{heading}, {unit}" if unit else heading for _, heading, unit in result.columns]
    keys = [key for key, _, _ in result.columns]
    rows = [[row["basis"], *(_cell(row.get(key)) for key in keys)] for row in result.rows]
    rows += [
        [f"{PAPER}, {row['where']}", *(_cell(row.get(key)) for key in keys)] for row in result.paper
    ]
    return ["", *names], rows


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _drawn(result: Result, plot: Plot) -> str:
    x, y, series = plot["x"], plot["y"], plot["series"]
    rows = [row for row in result.rows if isinstance(row.get(y), (int, float))]
    if plot["kind"] == BARS:
        bars = [(_bar_name(row, x, series), float(row[y])) for row in rows]
        return bar_chart(bars, number)
    return line_chart(
        _lines(rows, x, y, series),
        x_name=plot["labels"]["x"],
        y_name=plot["labels"]["y"],
        log=bool(plot.get("log")),
        width=WIDE,
    )


def _bar_name(row: Mapping[str, Any], x: str, series: str | None) -> str:
    return str(row[x]) if series is None else f"{row.get(series)}, {row[x]}"


def _lines(rows: Sequence[Mapping[str, Any]], x: str, y: str, series: str | None) -> list[Series]:
    """A line per series and basis, drawn faintly unless its values were measured."""
    points: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        name = "" if series is None else str(row.get(series))
        points.setdefault((name, row["basis"]), []).append((float(row[x]), float(row[y])))
    return [
        Series(f"{name}, {basis}".removeprefix(", "), sorted(found), faint=basis != MEASURED)
        for (name, basis), found in points.items()
    ]
