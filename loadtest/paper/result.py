"""What an experiment hands back: rows that say how each was found, and the paper's own beside."""

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
    """One table or figure of the paper, found again.

    name     as `--only` takes it: figure-7
    title    of the table or figure
    paper    rows of what the paper says; each with "where", its page or section, and the keys of
             `columns` that it has
    columns  (key, heading, unit) in the order of the table; "" for no unit
    rows     each with "basis", one of `BASES`, and the keys of `columns` that it has; a key that is
             missing or None is shown as a dash
    plot     None, one plot, or several:
               kind    `LINES` or `BARS`
               x, y    keys of `columns`: of lines numbers; the x of bars is their text
               series  key whose values name the lines, and whose rows are drawn apart by basis;
                       None for one line. Of bars, it stands before their text
               labels  {"x": text, "y": text} of the axes
               log     whether y is on a logarithmic scale; left out, it is not
               title   where there are several
    notes    assumptions, and what differs from the paper

    Raises
        ValueError  a row without a basis, a column or plot that no row can fill
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
                raise ValueError(f"{self.name}: the row {row} has no basis of {BASES}")
        for row in self.paper:
            if "where" not in row:
                raise ValueError(f"{self.name}: the paper's row {row} does not say where it stands")
        for one in self.plots():
            used = {one["x"], one["y"], one["series"]} - {None}
            if one["kind"] not in (LINES, BARS) or used - keys:
                raise ValueError(f"{self.name}: the plot {one} names other keys than {keys}")

    def plots(self) -> Iterator[Plot]:
        """Each plot."""
        if isinstance(self.plot, Mapping):
            yield self.plot
        elif self.plot is not None:
            yield from self.plot

    def facts(self) -> dict[str, Any]:
        """For JSON; `result_of` reads it."""
        found = asdict(self)
        found["columns"] = [list(one) for one in self.columns]
        found["plot"] = list(self.plots())
        return found


def result_of(facts: Mapping[str, Any]) -> Result:
    """What `Result.facts` gave.

    Raises
        TypeError, ValueError  it is of another form
    """
    columns = [(key, heading, unit) for key, heading, unit in facts["columns"]]
    return Result(**{**facts, "columns": columns})
