"""Runs experiments, and saves each result to one file as soon as it is complete."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlm.errors import ConfigError, DlmError
from dlm.files import write_whole
from dlm.index.layout import read_manifest
from loadtest.paper.page import page_of
from loadtest.paper.placement import figure_7, figure_8, figure_9, table_3
from loadtest.paper.result import Result, Setup, result_of
from loadtest.paper.scaling import figure_6, simulation
from loadtest.paper.storage import ladder, table_4, table_6
from loadtest.paper.timing import table_2, table_5
from loadtest.report.provenance import provenance, read_document

FORMAT, VERSION = "dlm paper evaluation", 1
RESULTS = "results.json"
# Experiments by name, in the order of the paper.
EXPERIMENTS: dict[str, Callable[[Setup], Result]] = {
    "table-2": table_2,
    "table-3": table_3,
    "table-4": table_4,
    "table-5": table_5,
    "table-6": table_6,
    "ladder": ladder,
    "figure-6": figure_6,
    "figure-7": figure_7,
    "figure-8": figure_8,
    "figure-9": figure_9,
    "simulation": simulation,
}
Tell = Callable[[str], None]


def chosen(only: Sequence[str]) -> list[str]:
    """The named experiments, or all, in the paper's order; ConfigError for an unknown name."""
    for name in only:
        if name not in EXPERIMENTS:
            raise ConfigError(
                f"there is no experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}"
            )
    return [name for name in EXPERIMENTS if not only or name in only]


class Evaluation:
    """Runs experiments on one model, and keeps their results in a folder.

    Args    again  repeats experiments that have results
            note   note saved with each result, such as what else ran on the machine
    Raises  ConfigError  the folder has results of another model, trace or size
    """

    def __init__(
        self, setup: Setup, folder: Path, tell: Tell, *, again: bool = False, note: str = ""
    ) -> None:
        self._setup, self._folder, self._tell = setup, folder, tell
        self._again, self._note = again, note
        manifest = read_manifest(setup.model)
        self.of = {
            "model": manifest.model,
            "arpa": setup.arpa.name,
            "order": manifest.order,
            "ngrams": sum(manifest.counts),
            "trace": setup.trace.name,
            "quick": setup.quick,
        }
        self.failed: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._entries = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        path = self._folder / RESULTS
        if not path.exists():
            return {}
        found = read_document(path, FORMAT, VERSION)
        if found["of"] != self.of:
            raise ConfigError(
                f"{path} has the results for {found['of']}, not for {self.of}. Use another "
                "--output, or remove the file first"
            )
        return {one["result"]["name"]: one for one in found["experiments"]}

    def run(self, names: Sequence[str]) -> list[Result]:
        """Runs those `names` that have no result yet; returns all results, in the paper's order."""
        wanted = [name for name in names if self._again or name not in self._entries]
        for number, name in enumerate(wanted, 1):
            self._tell(f"{name} ({number} of {len(wanted)})")
            began = time.monotonic()
            try:
                result = EXPERIMENTS[name](self._setup)
            except (DlmError, OSError) as exc:
                notes = getattr(exc, "__notes__", [])
                self.failed[name] = "; ".join([str(exc), *notes])
                self._tell(f"{name}: {self.failed[name]}")
                continue
            seconds = time.monotonic() - began
            self._tell(f"{name}: {seconds:.0f} s")
            self._entries[name] = {
                "result": result.facts(),
                "seconds": round(seconds, 1),
                "note": self._note,
                "provenance": _public(provenance(self._setup.seed)),
            }
            self._write()
        return self.results()

    def results(self) -> list[Result]:
        return [result_of(one["result"]) for one in self.facts()["experiments"]]

    def facts(self) -> dict[str, Any]:
        kept = [self._entries[name] for name in EXPERIMENTS if name in self._entries]
        return {"format": FORMAT, "version": VERSION, "of": self.of, "experiments": kept}

    def _write(self) -> None:
        facts = self.facts()
        text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        write_whole(self._folder / RESULTS, text.encode())
        write_whole(self._folder / "results.html", page_of(facts).encode())


def _public(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the provenance, with its command's paths cut to the names of files."""
    command = [Path(part).name if "/" in part else part for part in facts["command"]]
    return {**facts, "command": command}
