"""The chart of speed on the front page, from `results/speed.csv`.

python tests/benchmarks/chart.py .github/speed.svg
"""

from __future__ import annotations

import csv
import sys
from html import escape
from pathlib import Path

RESULTS = Path(__file__).parent / "results/speed.csv"
ROW, LEFT, SCALE, WIDTH = 26, 260, 55, 760  # pixels; SCALE of them are dlm's time

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1c2733; }
  .small { font-size: 12px; fill: #4a5b6b; }
  .other { fill: #9fb1c1; }
  .dlm { fill: #2f6fb0; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #a9b8c5; }
    .other { fill: #55697a; }
    .dlm { fill: #6fb1f0; }
  }
"""


def drawn() -> str:
    """Bars of CPU time, a group for each kind of queries; dlm's is 1 in each."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    parts, y = [], 22
    parts.append(f'<text x="8" y="{y}" class="small">CPU time, dlm = 1; shorter is faster</text>')
    for kind in dict.fromkeys(row["queries"] for row in rows):
        y += 14
        others = [(r["system"], r["CPU time / dlm's"]) for r in rows if r["queries"] == kind]
        for place, (system, ratio) in enumerate([("dlm", "1"), *others]):
            if not place:
                parts.append(f'<text x="8" y="{y + 14}" font-weight="600">{escape(kind)}</text>')
            long = float(ratio) * SCALE
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(system)}</text>'
                f'<rect class="{"other" if place else "dlm"}" x="{LEFT}" y="{y}" '
                f'width="{long:.1f}" height="{ROW - 7}" rx="3"/>'
                f'<text x="{LEFT + long + 6:.1f}" y="{y + 14}">{ratio}</text>'
            )
            y += ROW
    said = "CPU time of KenLM over that of dlm: more for batches, less for single words"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 6}" role="img"'
    return "\n".join(
        [f'{head} aria-label="{said}">', f"<style>{STYLE}</style>", *parts, "</svg>\n"]
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn(), encoding="utf-8")
