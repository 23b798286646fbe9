"""The figures of `wer.py` and `wer_faults.py` as SVG: no package draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor

WIDTH, HEIGHT, LEFT, TOP = 640, 200, 60, 30
NAMES, ROW = 230, 22
COLOURS = ("#3060b0", "#308040", "#b07020", "#803080", "#b03030", "#606060")


@dataclass(frozen=True, slots=True)
class Bar:
    """A value and the interval around it."""

    value: float
    low: float
    high: float


def intervals(title: str, groups: Mapping[str, Mapping[str, Bar]]) -> str:
    """A line for each name of each group: a dot and its interval, beside an axis through zero."""
    every = [bar for group in groups.values() for bar in group.values()]
    least = floor(min((bar.low for bar in every), default=0.0))
    most = ceil(max((bar.high for bar in every), default=1.0))
    scale = (WIDTH - NAMES) / max(most - least, 1)
    zero = LEFT + NAMES

    def at(value: float) -> float:
        return zero + scale * (value - least)

    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    parts, y = [_text(LEFT, TOP - 10, title)], TOP + 8.0
    for label, group in groups.items():
        parts.append(_text(LEFT, y + 4, label))
        for name, bar in group.items():
            colour = _colour(names, name)
            parts += [
                _text(zero - 10, y + 4, name, "end", colour),
                f'<path d="M{at(bar.low):.1f} {y:.1f}H{at(bar.high):.1f}" stroke="{colour}" '
                'stroke-width="3"/>',
                f'<circle cx="{at(bar.value):.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>',
            ]
            y += ROW
        y += ROW / 2
    for tick in range(least, most + 1):
        stroke = "black" if tick == 0 else "#cccccc"
        parts.insert(0, f'<path d="M{at(tick):.1f} {TOP}V{y:.1f}" stroke="{stroke}"/>')
        parts.append(_text(at(tick), y + 16, f"{tick:+d}" if tick else "0", "middle"))
    return _drawn(parts, y + 28)


def lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    shaded: tuple[float, float],
    unit: str,
) -> str:
    """A panel for each title, a line of points (x, y) for each name in it; all over one x axis.

    Args
        shaded  the part of the axis that is grey
        unit    of the axis
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    points = [point for panel in panels.values() for line in panel.values() for point in line]
    longest = max((x for x, _ in points), default=0.0) or 1.0
    parts = []
    for place, (title, panel) in enumerate(panels.items()):
        top = TOP + place * (HEIGHT + 50)
        most = max((y for line in panel.values() for _, y in line), default=0.0) or 1.0
        begin, end = (LEFT + WIDTH * x / longest for x in shaded)
        parts.append(
            f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{HEIGHT}" '
            'fill="#e4e4e4"/>'
        )
        parts += _frame(title, top, most)
        parts.append(_text(LEFT, top + HEIGHT + 14, "0"))
        parts.append(_text(LEFT + WIDTH, top + HEIGHT + 14, f"{longest:.0f} {unit}", "end"))
        for name, line in panel.items():
            drawn = " ".join(
                f"{LEFT + WIDTH * x / longest:.1f},{top + HEIGHT * (1 - y / most):.1f}"
                for x, y in line
            )
            parts.append(
                f'<polyline points="{drawn}" fill="none" stroke="{_colour(names, name)}" '
                'stroke-width="1.5"/>'
            )
    base = TOP + len(panels) * (HEIGHT + 50)
    return _drawn([*parts, *_legend(names, base)], base + 16)


def _frame(title: str, top: float, most: float) -> list[str]:
    return [
        _text(LEFT, top - 8, title),
        _text(LEFT - 8, top + 10, f"{most:.1f}", "end"),
        _text(LEFT - 8, top + HEIGHT, "0", "end"),
        f'<path d="M{LEFT} {top}V{top + HEIGHT}H{LEFT + WIDTH}" fill="none" stroke="black"/>',
    ]


def _legend(names: Sequence[str], y: float) -> list[str]:
    return [
        _text(LEFT + 105 * i, y, name, colour=_colour(names, name)) for i, name in enumerate(names)
    ]


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )


def _drawn(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" '
        f'height="{height:.0f}" font-model_info="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>"
    )
