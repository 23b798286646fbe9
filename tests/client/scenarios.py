"""Transcripts of scenarios: commands and, after ``----``, what really happened; a blank line ends
it, and blocks that begin with ``#`` say what a scenario shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "scenarios"


def named(begin: str, *, at_least: int) -> list[Path]:
    """The files whose names begin so; fails if they are not where they are looked for."""
    found = sorted(FOLDER.glob(f"{begin}_*.txt"))
    assert len(found) >= at_least
    return found


def check(path: Path, outcome: Callable[[list[str]], list[str]]) -> None:
    """Compares a file with what happens; ``DLM_REWRITE_SCENARIOS=1`` writes it anew, to be
    committed only if you understand.

    Args
        outcome  runs the commands of a block; what is said then
    """
    out = []
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        commands = block.split("\n----")[0].split("\n")
        is_text = block.startswith("#")
        out.append(block if is_text else "\n".join([*commands, "----", *outcome(commands)]))
    found = "\n\n".join(out) + "\n"
    if os.environ.get("DLM_REWRITE_SCENARIOS"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
