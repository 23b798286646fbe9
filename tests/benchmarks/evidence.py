"""Evidence for the papers' figures of accuracy: networks trained over three seeds.

    python tests/benchmarks/evidence.py --work runs/evidence          # goes on if called again
    python tests/benchmarks/evidence.py --work runs/evidence --cost   # CPU hours that are left
    python tests/benchmarks/evidence.py --table                       # from the rows, Markdown
    python tests/benchmarks/evidence.py --draw tests/benchmarks/evidence.svg

A run is a row of `results/evidence.csv`, and what has a row is not run again. A run that is killed
goes on from its last checkpoint. Several processes may work in one folder: each takes runs that no
other has. With `JAX_COMPILATION_CACHE_DIR` set, what is compiled is compiled once.
`evidence_plan.py` says what is run, `evidence_tables.py` what the rows are compared with.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.evidence_plan import Item, plan, prepared, result
from benchmarks.fng_data import LanguageFiles
from dlm.errors import DlmError
from dlm.files import editing, lock_file, unlock, write_whole

ROWS = Path(__file__).parent / "results/evidence.csv"
KEY = ("experiment", "arm", "seed", "settings", "rounds")
HEAD = (*KEY, "data", "cpu_seconds", "results")
# CPU seconds of a user in a round, where no row has any.
GUESS = {"mixed": 0.012, "en": 0.04, "pt": 0.04, "ru": 0.04}
AGAIN_S = 20.0  # until what other processes had is looked at again

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The rows of a table; none without a file."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return [row | {"results": json.loads(row["results"])} for row in csv.DictReader(lines)]


def add(file: Path, row: Row) -> None:
    """Adds a row to a table, which other processes may do at the same time."""
    with editing(file):
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, HEAD, lineterminator="\n")
        writer.writeheader()
        for one in sorted([*read(file), row], key=itemgetter(*KEY)):
            writer.writerow(one | {"results": json.dumps(one["results"])})
        write_whole(file, out.getvalue().encode())


def is_done(item: Item, rows: Iterable[Row]) -> bool:
    """Whether there is a row of an item, with the same settings."""
    return item.key in {tuple(row[name] for name in KEY) for row in rows}


class Clock:
    """CPU seconds of an item over all processes that worked at it, kept at each `tick`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = float(file.read_text()) if file.exists() else 0.0
        self._began = time.process_time()

    def tick(self) -> float:
        """Keeps and returns what was spent."""
        spent = self._before + time.process_time() - self._began
        write_whole(self._file, f"{spent:.1f}".encode())
        return spent


Do = Callable[[Item, LanguageFiles, Callable[[], Any]], dict[str, Any]]


def do(item: Item, work: Path, file: Path, make: Do = result) -> bool:
    """Does an item, or what is left of it, and adds its row; False if another process has it."""
    files = prepared(work, item.experiment)
    run = files.run(item.name, item.seed)
    run.parent.mkdir(exist_ok=True)
    if (handle := lock_file(run.with_name(f"{run.name}.lock"))) is None:
        return False
    try:
        if is_done(item, read(file)):
            return True
        clock = Clock(run.with_name(f"{run.name}.cpu"))
        found = make(item, files, clock.tick)
        row = dict(zip(KEY, item.key, strict=True)) | {"results": found}
        data = json.loads(files.facts.read_text(encoding="utf-8"))["digest"]
        add(file, {**row, "data": data, "cpu_seconds": f"{clock.tick():.0f}"})
        print(f"{item.experiment}, {item.name}, seed {item.seed}: {clock.tick():.0f} s", flush=True)
        return True
    finally:
        unlock(handle)


def work_through(items: list[Item], work: Path, file: Path, make: Do = result) -> list[Item]:
    """Does all items without a row, in order, until none is left; returns those that failed."""
    failed: list[Item] = []
    while left := [one for one in items if one not in failed and not is_done(one, read(file))]:
        free = False
        for item in left:
            try:
                free |= do(item, work, file, make)
            except DlmError as exc:
                failed.append(item)
                print(f"{item.experiment}, {item.name}, seed {item.seed}: {exc}", flush=True)
        if not free:
            time.sleep(AGAIN_S)
    return failed


def cost(items: Iterable[Item], rows: list[Row]) -> float:
    """CPU seconds of items: the mean of their arms' rows, or a guess from users and rounds."""
    seconds = 0.0
    for item in items:
        arm = [
            float(row["cpu_seconds"])
            for row in rows
            if (row["experiment"], row["arm"]) == (item.experiment, item.name)
        ]
        guess = GUESS[item.experiment] * item.arm.users * item.arm.rounds
        seconds += statistics.mean(arm) if arm else guess
    return seconds


def main() -> None:
    """Does what is left, or draws what is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, help="folder of networks and models")
    parser.add_argument("--rows", type=Path, default=ROWS, help="table that runs are added to")
    parser.add_argument("--only", default="", help="items whose 'experiment, arm' hold this")
    parser.add_argument("--cost", action="store_true", help="print what is left, and end")
    parser.add_argument("--table", action="store_true", help="print the figures, and end")
    parser.add_argument("--draw", type=Path, help="draw the figures as SVG, and end")
    given = parser.parse_args()
    rows = read(given.rows)
    if given.draw or given.table:
        from benchmarks.evidence_tables import drawn, markdown

        if given.draw:
            given.draw.write_text(drawn(rows), encoding="utf-8")
        else:
            print(markdown(rows))
    else:
        items = [one for one in plan() if given.only in f"{one.experiment}, {one.name}"]
        left = [one for one in items if not is_done(one, rows)]
        print(f"{len(left)} of {len(items)} runs left: {cost(left, rows) / 3600:.1f} CPU hours")
        if not given.cost:
            sys.exit(1 if work_through(items, given.work, given.rows) else 0)


if __name__ == "__main__":
    main()
