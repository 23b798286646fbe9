"""The figure of `wer.py` as SVG: no package draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor

WIDTH, LEFT, TOP = 640, 60, 30
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
