"""Estimation beside KenLM's lmplz: wall time, CPU time and memory, turn by turn.

    python -m benchmarks.estimate TEXT [--order 5] [--memory 2G] [--prune 0,0,1] [--rounds 3]

Needs DLM_KENLM_BIN, the folder of KenLM's programs. TEXT is plain and as it is to be counted; both
write plain ARPA files, and both are given the same memory: dlm for all of its process, lmplz for
what it calls sorting memory. Each round runs both, one after the other, so that a ratio is of
two neighbours; a first run of dlm, which may have to compile, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import Cost, cost
from benchmarks.settings import DLM, MissingError, kenlm_tool

MIB = 1 << 20


def commands(text: Path, folder: Path, order: int, memory: str, prune: str) -> dict[str, list[str]]:
    """What is run, by name."""
    ours = [*DLM, "estimate", str(text), "--order", str(order), "--memory", memory, "--quiet"]
    theirs = [str(kenlm_tool("lmplz")), "-o", str(order), "-S", memory, "--text", str(text)]
    if prune:
        ours += ["--prune", prune]
        theirs += ["--prune", *prune.split(",")]
    return {
        "dlm": [*ours, "--output", str(folder / "dlm.arpa")],
        "lmplz": [*theirs, "-T", f"{folder}/", "--arpa", str(folder / "lmplz.arpa")],
    }


def main() -> None:
    """Prints a line a run, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--memory", default="2G")
    parser.add_argument("--prune", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the models are written")
    given = parser.parse_args()
    wall, cpu = [], []
    try:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            small = Path(folder) / "small"
            with given.text.open("rb") as file:
                small.write_bytes(b"".join(file.readline() for _ in range(2000)))
            options = (given.order, given.memory, given.prune)
            warm = commands(small, Path(folder), *options)["dlm"]
            cost([*warm, "--discount-fallback"])
            for _ in range(given.rounds):
                found: dict[str, Cost] = {}
                for name, command in commands(given.text, Path(folder), *options).items():
                    used = found[name] = cost(command)
                    print(
                        f"{name:6} {used.wall_s:8.1f} s wall {used.cpu_s:8.1f} s CPU "
                        f"{used.peak_bytes / MIB:8.0f} MiB",
                        flush=True,
                    )
                wall.append(found["dlm"].wall_s / found["lmplz"].wall_s)
                cpu.append(found["dlm"].cpu_s / found["lmplz"].cpu_s)
    except MissingError as exc:
        sys.exit(str(exc))
    print(
        f"dlm / lmplz, median: wall {statistics.median(wall):.2f}, CPU {statistics.median(cpu):.2f}"
    )


if __name__ == "__main__":
    main()
