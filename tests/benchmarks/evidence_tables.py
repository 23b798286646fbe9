"""What the rows of `evidence.py` say, beside the papers: Markdown, and a chart. Trains nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import product
from typing import Any, NamedTuple

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}
NETWORKS = ("words", "words, noise", "wordpieces")
KINDS = {"e": "A_e", "i": "A_i", "m": "A_m", "r": "A_r"}
LANGUAGES = {"en": "English", "pt": "Portuguese", "ru": "Russian"}
# Top-1 accuracies, %.
DPF_1 = {"sigma 0.003": 17.49, "sigma 0.006": 17.04, "sigma 0.012": 16.33}
BLT_3 = {  # epsilon 2 and 8
    "BandMF": (23.21, 24.86),
    "TreeAgg-Full": (22.54, 24.47),
    "BLT, 2 buffers, for 1 participation": (22.37, 24.64),
    "BLT*, 2 buffers": (23.09, 24.83),
    "BLT*, 3 buffers": (23.13, 24.87),
    "BLT*, 4 buffers": (23.13, 24.83),
}
FNG_3_4 = {
    ("en", "words"): {"e": 10.52, "i": 10.47, "m": 10.27, "r": 10.49},
    ("pt", "words"): {"e": 9.66, "i": 9.67, "m": 9.40, "r": 9.65},
    ("en", "wordpieces"): {"e": 10.49, "i": 10.46, "m": 10.48, "r": 10.53},
}
ROW, WIDTH, NAME, LEFT, RIGHT, TEXT, PAPER = 16, 860, 6, 270, 540, 560, 700  # pixels
STYLE = """<style>
  text { font: 12px system-ui, sans-serif; fill: #1c2733; }
  .bold { font-weight: 600; }
  path { stroke: #2f6fb0; stroke-width: 2; }
  .zero { stroke: #9fb1c1; stroke-width: 1; }
  circle { fill: #2f6fb0; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
</style>"""


class Line(NamedTuple):
    """A difference by seed, and the paper's, if it has one; `users` is half of its interval over
    held-out users."""

    name: str
    values: Sequence[float]
    paper: float | None = None
    users: float = 0.0

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def half(self) -> float:
        """Half of the 95 % interval over seeds (Student) and users; inf for one seed."""
        if len(self.values) < 2:
            return self.users or math.inf
        error = statistics.stdev(self.values) / math.sqrt(len(self.values))
        return math.hypot(STUDENT.get(len(self.values) - 1, 2.0) * error, self.users)

    @property
    def text(self) -> str:
        """In words."""
        half = f" ± {self.half:.2f}" if self.half < math.inf else ""
        return f"{self.mean:.2f}{half}"

    @property
    def told(self) -> str:
        """The paper's, and whether this agrees with its sign; or, where it found less than 0.1
        points, whether this is less than a point."""
        if self.paper is None:
            return ""
        differs, most = abs(self.paper) >= 0.1, abs(self.mean) + self.half
        if len(self.values) < 3:
            verdict = "runs left"
        elif abs(self.mean) > self.half:
            verdict = "agrees" if differs and self.mean * self.paper > 0 else "does not"
        else:
            verdict = "agrees" if most < 1 and not differs else "too small to tell"
        return f"{self.paper:.2f}: {verdict}"


class Figure(NamedTuple):
    """Lines that are compared."""

    title: str
    lines: list[Line]


Seeds = dict[int, Any]


class Found:
    """Results of an arm by seed."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows: dict[tuple[str, str], Seeds] = {}
        for row in rows:
            arm = self._rows.setdefault((row["experiment"], row["arm"]), {})
            arm[int(row["seed"])] = row["results"]

    def of(self, experiment: str, arm: str, *path: str | int, scale: float = 1.0) -> Seeds:
        """One number of each result."""
        found = {}
        for seed, value in self._rows.get((experiment, arm), {}).items():
            for step in path:
                value = value[step]
            if value is not None:
                found[seed] = value if scale == 1 else scale * value
        return found

    def learnt(self, arm: str, metric: str = "top1", place: int = -1) -> Seeds:
        """Of a network of `mixed`: after the last round, or at a place of `by_round`."""
        path = (metric,) if place == -1 else ("by_round", place, metric)
        return self.of("mixed", arm, *path, scale=100 if metric == "top1" else 1)


def less(one: Seeds, other: Seeds) -> list[float]:
    """Differences of runs with the same seed: they have the same first network and, but for other
    ways of sampling, the same cohorts, so that they vary less than either."""
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def figures(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """All, with the lines that have a row."""
    found = Found(rows)
    for title, lines in (*_dpf(found), *_blt(found), *_gdp(found), *_fng(found)):
        there = [line for line in lines if line.values]
        if there:
            yield Figure(title, there)


def _dpf(found: Found) -> Iterator[Figure]:
    few, many = (f"C {c}, sigma 0.012" for c in (45, 562))
    yield Figure(
        "DPF Figure 7: top-1 with 562 users less with 45, noise of the average equal, by round",
        [
            Line(f"{12 * n}", less(found.learnt(many, place=at), found.learnt(few, place=at)), 0)
            for n, at in zip(range(1, 9), (*range(7), -1), strict=True)
        ],
    )
    plain = found.learnt("C 45, S 1")
    yield Figure(
        "DPF Figure 1 and Table 2: top-1 with noise less that without",
        [
            Line(name, less(found.learnt(f"C 45, {name}"), plain), told - 17.62)
            for name, told in DPF_1.items()
        ],
    )
    lines = []
    for s, (n, at) in product((0.1, 0.3, 0.7, 1.4), ((2, 1), (8, -1))):
        with_s, with_1 = (found.learnt(f"C 45, S {one:g}", place=at) for one in (s, 1))
        lines.append(Line(f"S {s:g}, {12 * n} rounds", less(with_s, with_1)))
    yield Figure("DPF Figure 2: top-1 without noise less that with S 1, by clip norm S", lines)
    yield Figure(
        "DPF Figure 6: top-1 without noise less that of 45 users, S 1",
        [Line(f"C {c}", less(found.learnt(f"C {c}, S 1"), plain)) for c in (15, 135)],
    )
    arms = [f"C 45, {name}" for name in ("S 1", *DPF_1, "S 0.1")]
    yield Figure(
        "DPF Table 3: of the ten likeliest words, how many are among the 50 most frequent",
        [
            Line(arm, [_mean(counts) for counts in found.of("mixed", arm, "heads", "50").values()])
            for arm in (*arms, "C 15, S 1", "C 562, sigma 0.012")
        ],
    )


def _mean(counts: list[int]) -> float:
    return sum(n * count for n, count in enumerate(counts)) / sum(counts)


def _blt(found: Found) -> Iterator[Figure]:
    names = ["TreeAgg", *BLT_3, "BLT*, 1 buffers"]
    for column, epsilon in enumerate(("eps 2", "eps 8")):
        for metric, what in (("top1", "top-1"), ("perplexity", "perplexity")):
            best = found.learnt(f"BandMF, {epsilon}", metric)
            told = {name: one[column] - BLT_3["BandMF"][column] for name, one in BLT_3.items()}
            lines = [
                Line(
                    name,
                    less(found.learnt(f"{name}, {epsilon}", metric), best),
                    told.get(name) if metric == "top1" else None,
                )
                for name in names
                if name != "BandMF"
            ]
            free = Line("no noise", less(found.learnt("no noise", metric), best))
            yield Figure(f"BLT Table 3, {epsilon}: {what} less that of BandMF", [*lines, free])


def _gdp(found: Found) -> Iterator[Figure]:
    for n, at in ((2, 1), (8, -1)):
        fixed = found.learnt("TreeAgg, eps 8", "perplexity", at)
        yield Figure(
            f"GDP Figure 3, after {24 * n} rounds: perplexity less that of TreeAgg, eps 8",
            [
                Line(name, less(found.learnt(f"TreeAgg, eps 8, {name}", "perplexity", at), fixed))
                for name in ("S 0.1", "S adapts from 0.1", "books first")
            ],
        )


def _fng(found: Found) -> Iterator[Figure]:
    for language, title in LANGUAGES.items():
        for network in NETWORKS:
            told = FNG_3_4.get((language, network), {})
            first = found.of(language, network, "e", "top1", scale=100)
            yield Figure(
                f"FNG Tables 3 and 4, {title}, {network}: top-1 less that of A_e",
                [
                    Line(
                        said,
                        less(found.of(language, network, kind, "top1", scale=100), first),
                        told[kind] - told["e"] if told else None,
                    )
                    for kind, said in KINDS.items()
                    if kind != "e"
                ],
            )
        yield from _judged(found, language, title)


def _judged(found: Found, language: str, title: str) -> Iterator[Figure]:
    """Models beside that of the users' text, which has no seed; and networks with each other."""
    arms = [("text", "public", "Kneser-Ney of public text")]
    for network in NETWORKS[::2]:
        arms += [(network, kind, f"{network}, {said}") for kind, said in KINDS.items()]
    for name, scale, what in (("top1", 100, "top-1"), ("sll_without_oovs", 1, "SLL^e")):
        yield Figure(
            f"{title}: {what} less that of Kneser-Ney of the users' text",
            [
                Line(
                    said,
                    list(found.of(language, network, kind, "less", name, 0, scale=scale).values()),
                    users=_half(found, language, network, kind, name) * scale,
                )
                for network, kind, said in arms
            ],
        )
    for metric, what in (("sll", "SLL^e"), ("sll_with_ends", "log-likelihood with </s>")):
        yield Figure(
            f"{title}: {what} of models of words less that of A_e",
            [
                Line(
                    said,
                    less(
                        found.of(language, "words", kind, metric),
                        found.of(language, "words", "e", metric),
                    ),
                )
                for kind, said in KINDS.items()
                if kind != "e"
            ],
        )
    yield Figure(
        f"FNG Figure 5, {title}: SLL^e of networks, wordpieces less words, by round",
        [
            Line(f"{n}", less(*(found.of(language, one, f"{n}", "sll") for one in NETWORKS[::-2])))
            for n in (15, 30, 60, 120)
        ],
    )
    yield Figure(
        f"{title}: perplexity with noise (rho 1) less that without",
        [
            Line(
                said,
                less(*(found.of(language, one, kind, "perplexity") for one in NETWORKS[1::-1])),
            )
            for kind, said in {"120": "network", **KINDS}.items()
        ],
    )


def _half(found: Found, language: str, network: str, kind: str, name: str) -> float:
    """Half of the interval over users, mean over seeds."""
    low, high = (found.of(language, network, kind, "less", name, at) for at in (1, 2))
    return statistics.mean(less(high, low)) / 2 if low else 0.0


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    """All figures."""
    parts = []
    for title, lines in figures(rows):
        parts += [f"**{title}**", "", "| run | seeds | dlm | paper |", "| --- | --- | --- | --- |"]
        parts += [f"| {a.name} | {len(a.values)} | {a.text} | {a.told} |" for a in lines]
        parts.append("")
    return "\n".join(parts)


def drawn(rows: Iterable[dict[str, Any]]) -> str:
    """All figures as SVG: a point and its interval for each line, and the paper's figure."""
    parts: list[str] = []
    y = 0
    for title, lines in figures(rows):
        ends = [line.mean + sign * line.half for line in lines for sign in (-1, 1)]
        known = [0.0, *(line.mean for line in lines), *(end for end in ends if abs(end) < math.inf)]
        low, scale = min(known), (RIGHT - LEFT) / ((max(known) - min(known)) or 1.0)
        zero = LEFT - low * scale
        y += 2 * ROW
        parts.append(_text(NAME, y, title, "bold"))
        parts.append(f'<path d="M{zero:.1f} {y + 4}v{ROW * len(lines)}" class="zero"/>')
        for line in lines:
            y += ROW
            x, half = zero + line.mean * scale, min(line.half * scale, WIDTH)
            parts.append(_text(NAME, y, line.name))
            if line.half < math.inf:
                parts.append(f'<path d="M{x - half:.1f} {y - 4}h{2 * half:.1f}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y - 4}" r="3"/>')
            parts.append(_text(TEXT, y, f"{line.text} ({len(line.values)})"))
            parts.append(_text(PAPER, y, line.told))
    said = "Figures of networks over seeds with 95 % intervals, beside those of the papers"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + ROW}" role="img"'
    names = _text(TEXT, ROW, "dlm ± 95 % (seeds)") + _text(PAPER, ROW, "paper")
    return "\n".join([f'{head} aria-label="{said}">', STYLE, names, *parts, "</svg>\n"])


def _text(x: int, y: int, said: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(said)}</text>' if said else ""
