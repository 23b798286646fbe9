"""Runs a load test for a user, and writes a folder of results however the run ends."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from dlm.errors import ConfigError
from dlm.files import write_whole
from loadtest.report.page import page_of
from loadtest.report.provenance import provenance, read_document
from loadtest.report.report import FORMAT, VERSION, Report, build
from loadtest.report.table import csv_of
from loadtest.run.driver import Run, RunSettings, records_of
from loadtest.run.faults import Faults
from loadtest.run.replay import Record
from loadtest.traces.trace import describe, read_trace

JOURNAL = "records.jsonl"
RESULTS = Path("loadtest-results")
Tell = Callable[[str], None]


def results_folder(output: Path | None, prefix: str = "") -> Path:
    """Makes a new folder: `output`, or one in `RESULTS` named after `prefix` and the time.

    Raises  ConfigError  the folder is not empty, or cannot be created
    """
    named = RESULTS / datetime.now().strftime(f"{prefix}%Y-%m-%dT%H-%M-%S")
    folder = named if output is None else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as exc:
        raise ConfigError(f"results cannot be written to {folder}: {exc.strerror}") from exc
    if used:
        raise ConfigError(f"{folder} is not empty; remove it first, or choose another --output")
    return folder


@contextlib.contextmanager
def new_results(output: Path | None, prefix: str = "") -> Iterator[Path]:
    """A results folder that is removed after the block if nothing was written into it."""
    folder = results_folder(output, prefix)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def measure(
    settings: RunSettings, folder: Path, tell: Tell, faults: Faults | None = None
) -> Report:
    """Runs a load test and writes its records and report into `folder`.

    Raises  DlmError  nothing could be measured
    """
    trace = read_trace(settings.trace)
    records: list[Record] = []
    with (folder / JOURNAL).open("a", encoding="utf-8", buffering=1) as journal:

        def keep(record: Record) -> None:
            records.append(record)
            journal.write(json.dumps(record) + "\n")

        keep(
            {
                "type": "header",
                "at": time.time(),
                "provenance": provenance(settings.seed),
                "trace": describe(trace, settings.trace.name),
                "load": settings.load.facts(),
                "clients": {"processes": settings.processes, **asdict(settings.client)},
                "window_s": settings.window_s,
            }
        )
        Run(settings, keep, tell, faults).run()
    return build(records)


def write_report(report: Report, folder: Path) -> None:
    write_whole(folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    write_whole(folder / "report.csv", csv_of(report).encode())
    write_whole(folder / "report.html", page_of(report).encode())


def read_report(path: Path) -> dict[str, Any]:
    """Reads a report.json, or the one in a folder; for a killed run, makes it from the records.

    Raises  ConfigError  there is no report, or it has another format
    """
    if path.is_dir():
        if not (path / "report.json").exists() and (path / JOURNAL).exists():
            return build(records_of(path / JOURNAL))
        path = path / "report.json"
    return read_document(path, FORMAT, VERSION)
