"""Recorded results of the benchmarks, as tables in Markdown.

::

    python tests/benchmarks/results.py               # names and titles
    python tests/benchmarks/results.py serving estimate

`results/runs.csv` has one row per table: machine and command, when and at which commit recorded.
`results/NAME.csv` has the figures. Columns `X low` and `X high` are the interval of column X, and
`X +-` is half of one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


def runs() -> dict[str, dict[str, str]]:
    """Rows of runs.csv by name."""
    with (FOLDER / "runs.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; an interval stands in the cell of its value.

    Raises
        ValueError  a row has more or fewer cells than the head
    """
    places = {name: place for place, name in enumerate(head)}
    bounds = {f"{name} {bound}" for name in head for bound in ("low", "high", "+-")}
    shown = [name for name in head if name not in bounds]
    yield f"| {' | '.join(shown)} |"
    yield "|" + " --- |" * len(shown)
    for row in rows:
        cells = dict(zip(places, row, strict=True))
        line = []
        for name in shown:
            cell = cells[name]
            if low := cells.get(f"{name} low"):
                cell += f" ({low} to {cells[f'{name} high']})"
            if half := cells.get(f"{name} +-"):
                cell += f" ± {half}"
            line.append(cell)
        yield f"| {' | '.join(line)} |"


def rendered(name: str) -> str:
    """A table with its title, and where and how its figures were measured."""
    run = runs()[name]
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return "\n".join(
        [
            f"**{run['title']}.**",
            f"`{run['command']}`, {run['machine']}; "
            f"recorded {run['date']} at commit {run['commit']}.",
            "",
            *markdown(head, rows),
        ]
    )


def main() -> None:
    """Prints the tables, or their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    if unknown := set(names) - set(runs()):
        sys.exit(f"no results {', '.join(sorted(unknown))}; there are {', '.join(runs())}")
    for name in names:
        print(rendered(name), end="\n\n")
    if not names:
        for name, run in runs().items():
            print(f"{name:20}{run['title']}")


if __name__ == "__main__":
    main()
