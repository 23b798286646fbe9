"""The result of an experiment: rows that say how each was found, and the paper's own rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

MEASURED, SIMULATED, COMPUTED = "measured", "simulated", "computed"
BASES = (MEASURED, SIMULATED, COMPUTED)
LINES, BARS = "lines", "bars"

Row: TypeAlias = dict[str, Any]
Plot: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One table or figure of the paper, repeated; ValueError for a row, column or plot of nothing.

    name     as for `--only`: figure-7
    paper    the paper's rows; each with "where", its page or section, and the keys of `columns`
             that it has
    columns  (key, heading, unit) in the order of the table; "" for no unit
    rows     each with "basis", one of `BASES`, and the keys of `columns` that it has; a key that is
             missing or None is shown as a dash
    plot     None, one plot, or several:
               kind    `LINES` or `BARS`
               x, y    keys of `columns`: of lines numbers; the x of bars is their text
               series  key whose values name the lines, which are split by basis; None for one
                       line. For bars, a prefix of their text
               labels  {"x": text, "y": text} of the axes
               log     whether y has a logarithmic scale; by default not
               title   if there are several
    notes    assumptions, and what differs from the paper
    """

    name: str
    title: str
    paper: Sequence[Row]
    columns: Sequence[tuple[str, str, str]]
    rows: Sequence[Row]
    plot: Plot | Sequence[Plot] | None = None
    notes: Sequence[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = {key for key, _, _ in self.columns}
        for row in self.rows:
            if row.get("basis") not in BASES:
                raise ValueError(f"{self.name}: {row} lacks a basis; expected one of {BASES}")
        for row in self.paper:
            if "where" not in row:
                raise ValueError(f"{self.name}: the paper's row {row} needs a place ('where')")
        for one in self.plots():
            used = {one["x"], one["y"], one["series"]} - {None}
            if one["kind"] not in (LINES, BARS) or used - keys:
                raise ValueError(f"{self.name}: the plot {one} uses keys other than {keys}")

    def plots(self) -> Iterator[Plot]:
        if isinstance(self.plot, Mapping):
            yield self.plot
        elif self.plot is not None:
            yield from self.plot

    def facts(self) -> dict[str, Any]:
        found = asdict(self)
        found["columns"] = [list(one) for one in self.columns]
        found["plot"] = list(self.plots())
        return found


def result_of(facts: Mapping[str, Any]) -> Result:
    """The inverse of `Result.facts`; TypeError or ValueError for another form."""
    columns = [(key, heading, unit) for key, heading, unit in facts["columns"]]
    return Result(**{**facts, "columns": columns})
