"""Draws charts as SVG, with no script or network, readable in light and dark. Colours are CSS
variables of the page (`page.STYLE`): s1 to s6 for series, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, WIDE, HEIGHT = 520, 1070, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 34
MARK_ROWS = 4  # rows for the texts of marks, one below the other
MAX_MARKS = 150  # a series of more points is drawn without marks

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name, points in order of x (None: a gap), and whether it is drawn faintly."""

    name: str
    points: Sequence[Point]
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    least: float
    most: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            value, least, most = (math.log10(v) for v in (value, self.least, self.most))
        else:
            least, most = self.least, self.most
        part = (value - least) / (most - least) if most > least else 0.5
        return self.begin + part * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values inside the range."""
        if self.log:
            return [
                10.0**power * step
                for power in range(
                    math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1
                )
                for step in ((1,) if self.most / self.least > 300 else (1, 2, 5))
                if self.least * 0.999 <= 10.0**power * step <= self.most * 1.001
            ]
        step = _round_step((self.most - self.least) / 5)
        first = math.ceil(self.least / step - 1e-9)
        last = math.floor(self.most / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)


def y_axis(values: Sequence[float], *, log: bool) -> Axis:
    """An axis from 0 to above the largest value; on a log scale, from below the smallest value."""
    if log:
        known = [value for value in values if value > 0] or [1.0]
        least, most = min(known) / 1.3, max(known) * 1.3
        if most / least < 10:  # at least a decade, so that there are round values to show
            middle = math.sqrt(most * least)
            least, most = middle / math.sqrt(10), middle * math.sqrt(10)
        return Axis(least, most, HEIGHT - BOTTOM, TOP, log=True)
    return Axis(0.0, max([*values, 0.0]) * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)


def label(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def line_chart(
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    log: bool = False,
    shaded: Sequence[tuple[float, float, str]] = (),
    marks: Sequence[tuple[float, str]] = (),
    x_ticks: Sequence[tuple[float, str]] | None = None,
    width: int = WIDTH,
) -> str:
    """A chart of lines over one axis.

    Args  width    in pixels, about the displayed width, so that texts keep their size
          shaded   (from, to, what) of x: stretches with their own background
          marks    (at, what) of x: lines from top to bottom, with their texts
          x_ticks  places and their texts, if these are not the values themselves
    """
    points = [(x, y) for one in series for x, y in one.points if y is not None]
    xs = [x for one in series for x, _ in one.points] or [0.0, 1.0]
    across = Axis(min(xs), max(xs), LEFT, width - RIGHT)
    up = y_axis([y for _, y in points], log=log)
    parts = [
        f'<rect class="shade" x="{across.place(a):.1f}" y="{TOP}" '
        f'width="{max(across.place(b) - across.place(a), 1):.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(what)}</title></rect>'
        for a, b, what in shaded
    ]
    ticks = x_ticks or [(value, label(value)) for value in across.ticks()]
    parts += _grid(up, across, ticks, x_name, y_name)
    for number, one in enumerate(series, 1):
        parts += _line(one, number, across, up)
    for number, (at, what) in enumerate(marks):
        if across.least <= at <= across.most:
            parts.append(_mark(across, at, what, TOP + 10 + 13 * (number % MARK_ROWS), width))
    legend = "".join(
        f'<span class="key s{number}">{escape(one.name)}</span>'
        for number, one in enumerate(series, 1)
    )
    return (
        f'<div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(y_name)} by {escape(x_name)}">' + "".join(parts) + "</svg>"
    )


def _grid(
    up: Axis, across: Axis, ticks: Sequence[tuple[float, str]], x_name: str, y_name: str
) -> list[str]:
    parts = []
    for value in up.ticks():
        y = up.place(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{across.end}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text("tick", LEFT - 6, y + 4, label(value), "end"))
    for value, text in ticks:
        parts.append(_text("tick", across.place(value), HEIGHT - BOTTOM + 15, text, "middle"))
    parts.append(_text("axis", (LEFT + across.end) / 2, HEIGHT - 3, x_name, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = _text("axis", 0, 0, y_name, "middle")
    parts.append(f'<g transform="translate(12 {middle}) rotate(-90)">{turned}</g>')
    return parts


def _mark(across: Axis, at: float, what: str, y: float, width: int) -> str:
    """Draws a line with its text on the right, or on the left if the text would be cut off."""
    x = across.place(at)
    is_left = x > width / 2
    text = _text("tick", x - 4 if is_left else x + 4, y, what, "end" if is_left else "start")
    return (
        f'<g><title>{escape(what)} at {label(at)}</title><line class="fault" x1="{x:.1f}" '
        f'x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{text}</g>'
    )


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _line(one: Series, number: int, across: Axis, up: Axis) -> list[str]:
    """Draws a path, broken where a value is missing, and marks that show the values."""
    known = [(x, y) for x, y in one.points if y is not None and (y > 0 or not up.log)]
    if not known:
        return []
    path, drawing = [], False
    for x, y in one.points:
        if y is None or (up.log and y <= 0):
            drawing = False
            continue
        path.append(f"{'L' if drawing else 'M'}{across.place(x):.1f} {up.place(y):.1f}")
        drawing = True
    faint = " faint" * one.faint
    parts = [f'<path class="line s{number}{faint}" d="{"".join(path)}"/>']
    if len(known) <= MAX_MARKS:
        parts += [
            f'<circle class="mark s{number}" cx="{across.place(x):.1f}" cy="{up.place(y):.1f}" '
            f'r="3"><title>{escape(one.name)}: {label(y)} at {label(x)}</title></circle>'
            for x, y in known
        ]
    return parts


def bar_chart(bars: Sequence[tuple[str, float]], text_of: Callable[[float], str]) -> str:
    """Draws horizontal bars, one in each row of a table."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    rows = [
        f'<tr><th>{escape(name)}</th><td class="bars"><div class="bar" '
        f'style="width:{100 * value / most:.1f}%"></div></td><td>{escape(text_of(value))}</td></tr>'
        for name, value in bars
    ]
    return f"<table>{''.join(rows)}</table>"
