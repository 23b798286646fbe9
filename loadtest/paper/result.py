"""Defines an experiment's input, and its result: rows that were measured, simulated or computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dlm.progress import ProgressReporter

MEASURED, SIMULATED, COMPUTED = "measured", "simulated", "computed"
BASES = (MEASURED, SIMULATED, COMPUTED)
LINES, BARS = "lines", "bars"

Row: TypeAlias = dict[str, Any]
Plot: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One table or figure of the paper, reproduced; ValueError if a row or plot is malformed.

    name     the name for `--only`, such as figure-7
    paper    the paper's rows; each with "where", its page or section, and the keys of `columns`
             that it has
    columns  (key, heading, unit) in the order of the table; "" for no unit
    rows     each with "basis", one of `BASES`, and the keys of `columns` that it has; a key that is
             missing or None is shown as a dash
    plot     None, one plot, or several:
               kind    `LINES` or `BARS`
               x, y    keys of `columns`: numbers for lines; for bars, x is the text of each
               series  key whose values name the lines, which are split by basis, or begin the
                       texts of bars; None for one line, or for no prefix
               labels  {"x": text, "y": text} of the axes
               log     whether y has a logarithmic scale; default: no
               title   the plot's title, if there are several plots
    notes    assumptions, and differences from the paper
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
                raise ValueError(f"{self.name}: the basis of {row} is not one of {BASES}")
        for row in self.paper:
            if "where" not in row:
                raise ValueError(f"{self.name}: the paper's row {row} needs a place ('where')")
        for one in self.plots():
            used = {one["x"], one["y"], one["series"]} - {None}
            if one["kind"] not in (LINES, BARS) or used - keys:
                raise ValueError(
                    f"{self.name}: the plot {one} is neither lines nor bars, or uses keys other "
                    f"than {keys}"
                )

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


@dataclass
class Setup:
    """The settings of one evaluation.

    model      folder of a shard set with exact encoding and one shard
    arpa       the same model as an ARPA file, compressed or not
    work       folder for results, and for shard sets and caches between runs; an experiment's files
               begin with its name
    servers    sizes of real clusters on this machine, ascending
    quick      whether to use the smallest sensible sizes, for tests
    held_out   text for perplexities, a sentence per line, compressed or not; None leaves them out,
               with a note
    kenlm_bin  folder of KenLM's build_binary; None leaves out its rows, with a note
    """

    model: Path
    arpa: Path
    trace: Path
    work: Path
    servers: tuple[int, ...] = (1, 2, 3, 4)
    seed: int = 1
    quick: bool = False
    held_out: Path | None = None
    kenlm_bin: Path | None = None
    progress: ProgressReporter = field(default_factory=lambda: ProgressReporter(lambda line: None))

    @property
    def kept(self) -> Path:
        return self.work / "kept"
