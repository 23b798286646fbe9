"""What the results of `fng.py` say: Markdown tables, and FNG Figure 5 as SVG. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Protocol

from dlm.errors import ConfigError

NGRAMS, SIZES = 40_000, (10_000, 40_000, 160_000)
ROUNDS = (25, 50, 100, 200)
TITLES = {"en": "English", "pt": "Portuguese"}
NETWORKS = {
    "words": "words",
    "words-dp": "words, noise",
    "pieces": "wordpieces",
    "pieces-dp": "wordpieces, noise",
    "words-small": "words, small",
    "words-large": "words, large",
    "central": "words, trained in one place",
}
KINDS = {
    "e": "A_e",
    "i": "A_i",
    "m": "A_m",
    "r": "A_r",
    "c": "on Kneser-Ney's n-grams",
    "t": "on them, contexts of the text",
}
BASELINES = {
    f"kn-{NGRAMS}": "Kneser-Ney of the users' text",
    f"wb-{NGRAMS}": "Witten-Bell of the users' text",
    f"public-{NGRAMS}": "Kneser-Ney of public text",
}
COLUMNS = (
    ("sll_without_oovs", 1, 2),
    ("top1", 100, 2),
    ("perplexity_without_oovs", 1, 1),
)
COLORS = ("#0b6e99", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#555555")


class Results(Protocol):
    """Results by the name of their item."""

    def read(self, name: str) -> dict[str, object] | None:
        """The result; None where there is none."""


def tables(results: Results) -> str:
    """All that is done, in Markdown."""
    parts = []
    for language in TITLES:
        parts += [*_comparison(results, language), *_by_round(results, language)]
    parts += [*_by_size(results), *_network_sizes(results)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _figures(results: Results, language: str, model: str) -> dict[str, dict[str, list[float]]]:
    found = results.read(f"{language}/judge/{model}")
    return {} if found is None else found["figures"]  # type: ignore[return-value]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*names: str) -> list[str]:
    return [_row(names), _row(["---", *["---:"] * (len(names) - 1)])]


def interval(figure: Sequence[float | None], scale: float, digits: int) -> str:
    """A value, and between what it lies; nothing where a model has none."""
    value, low, high = figure
    if value is None:
        return ""
    said = f"{scale * value:.{digits}f}"
    if low is None or high is None or low == high:
        return said
    return f"{said} ({scale * low:.{digits}f}, {scale * high:.{digits}f})"


def _cells(found: dict[str, list[float]], *, differ: bool) -> list[str]:
    cells = []
    for name, scale, digits in COLUMNS:
        cells.append(interval([found[name][0], None, None], scale, digits))
        cells.append(interval(found[f"{name}_difference"], scale, digits) if differ else "")
    return cells


def _comparison(results: Results, language: str) -> Iterable[list[str]]:
    """FNG Tables 3 and 4."""
    rows = []
    names = dict(BASELINES)
    for network, title in NETWORKS.items():
        names[network] = f"network, {title}"
        names |= {f"{network}-{kind}-{NGRAMS}": f"{title}, {said}" for kind, said in KINDS.items()}
    first = next(iter(BASELINES))
    for model, title in names.items():
        if found := _figures(results, language, model):
            rows.append(_row([title, *_cells(found[first], differ=model != first)[:-1]]))
    if rows:
        less = "less Kneser-Ney"
        yield [
            f"**{TITLES[language]}: n-gram models of {NGRAMS:,} n-grams, and the networks**",
            "",
            *_head("model", "SLL^e", less, "top-1, %", less, "perplexity"),
            *rows,
        ]


def series(results: Results, language: str) -> dict[str, list[tuple[int, float]]]:
    """SLL^e of each network by rounds."""
    found: dict[str, list[tuple[int, float]]] = {}
    for network, title in NETWORKS.items():
        points = []
        for rounds in ROUNDS:
            model = network if rounds == ROUNDS[-1] else f"{network}@{rounds}"
            figures = _figures(results, language, model)
            if figures and network != "central":
                points.append((rounds, next(iter(figures.values()))["sll_without_oovs"][0]))
        if len(points) > 1:
            found[title] = points
    return found


def _by_round(results: Results, language: str) -> Iterable[list[str]]:
    """FNG Figure 5."""
    lines = series(results, language)
    if lines:
        yield [
            f"**{TITLES[language]}: SLL^e of the networks by rounds**",
            "",
            *_head("network", *map(str, ROUNDS)),
            *(
                _row([title, *(f"{dict(line)[r]:.2f}" if r in dict(line) else "" for r in ROUNDS)])
                for title, line in lines.items()
            ),
        ]


def _by_size(results: Results) -> Iterable[list[str]]:
    """The claim of Suresh et al.: the same text, the same n-grams, one by way of a network."""
    rows = []
    whole = results.read("en/ngrams")
    for size in SIZES:
        for model, title in (
            (f"kn-{size}", "Kneser-Ney, pruned"),
            (f"wb-{size}", "Witten-Bell, pruned"),
            (f"central-c-{size}", "SampleApprox on Kneser-Ney's n-grams"),
        ):
            if found := _figures(results, "en", model):
                cells = _cells(next(iter(found.values())), differ=False)[::2]
                rows.append(_row([f"{size:,}", title, *cells]))
    for model, title in (("kn-all", "Kneser-Ney"), ("wb-all", "Witten-Bell")):
        if whole and (found := _figures(results, "en", model)):
            cells = _cells(next(iter(found.values())), differ=False)[::2]
            rows.append(_row([f"{whole['ngrams'][model]:,}", f"{title}, all", *cells]))  # type: ignore[index]
    if rows:
        yield [
            "**English: by number of n-grams, all from the same text**",
            "",
            *_head("n-grams", "model", "SLL^e", "top-1, %", "perplexity"),
            *rows,
        ]


def _network_sizes(results: Results) -> Iterable[list[str]]:
    """FNG Table 2."""
    rows = []
    for network, title in NETWORKS.items():
        trained = results.read(f"en/train/{network}")
        if not trained:
            continue
        cells = []
        for model in (network, f"{network}-r-{NGRAMS}", f"{network}-c-{NGRAMS}"):
            found = _figures(results, "en", model)
            of_model = _cells(next(iter(found.values())), differ=False) if found else [""] * 6
            cells += [of_model[4], of_model[2]]
        rows.append(_row([title, f"{trained['parameters']:,}", *cells]))
    if rows:
        yield [
            "**English: networks by size, and models of them**",
            "",
            *_head(
                "network",
                "parameters",
                *(
                    name
                    for what in ("network", KINDS["r"], KINDS["c"])
                    for name in (f"{what}: perplexity", "top-1, %")
                ),
            ),
            *rows,
        ]


def plot(results: Results) -> str:
    """SLL^e over rounds, a panel for each language.

    Raises
        ConfigError  nothing is done yet
    """
    panels = {TITLES[one]: lines for one in TITLES if (lines := series(results, one))}
    if not panels:
        raise ConfigError("no network was judged after two rounds or more: let the queue go on")
    width, height = 420, 300
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(panels)}" '
        f'height="{height + 20}" font-model_info="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, (title, lines) in enumerate(panels.items()):
        parts.append(f'<g transform="translate({place * width},0)">')
        parts += _panel(title, lines, width, height)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    title: str, lines: dict[str, list[tuple[int, float]]], width: int, height: int
) -> list[str]:
    left, right, top, bottom = 50, width - 10, 30, height - 30
    values = [value for line in lines.values() for _, value in line]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    last = max(rounds for line in lines.values() for rounds, _ in line)

    def x(rounds: float) -> float:
        return left + (right - left) * rounds / last

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / span

    parts = [
        f'<text x="{left}" y="18" font-size="13">{escape(title)}: SLL^e by round</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="black"/>',
    ]
    for step in range(5):
        value = low + span * step / 4
        parts.append(
            f'<text x="{left - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
        )
    for rounds in sorted({rounds for line in lines.values() for rounds, _ in line}):
        parts += [
            f'<text x="{x(rounds):.1f}" y="{bottom + 15}" text-anchor="middle">{rounds}</text>'
        ]
    for place, (name, line) in enumerate(lines.items()):
        color = COLORS[place % len(COLORS)]
        points = " ".join(f"{x(rounds):.1f},{y(value):.1f}" for rounds, value in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(
            f'<text x="{right - 150}" y="{bottom - 10 - 14 * place}" fill="{color}">'
            f"{escape(name)}</text>"
        )
    return parts
