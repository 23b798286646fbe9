"""A run as a user sees it: a folder of results, written whatever happens."""

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
from dlm.files import temporary_folder, write_whole
from loadtest.report.page import page_of
from loadtest.report.provenance import provenance, read_document
from loadtest.report.report import FORMAT, VERSION, Report, build
from loadtest.report.table import csv_of
from loadtest.run.driver import Run, RunSettings, records_of
from loadtest.run.faults import Faults
from loadtest.run.replay import Record
from loadtest.traces.statistics import describe
from loadtest.traces.trace import read_trace

JOURNAL = "records.jsonl"
RESULTS = Path("loadtest-results")
Tell = Callable[[str], None]


def results_folder(output: Path | None, prefix: str = "") -> Path:
    """A new folder: `output`, or one named after `prefix` and the time below `RESULTS`.

    Raises  ConfigError  it is not empty, or cannot be made
    """
    named = RESULTS / datetime.now().strftime(f"{prefix}%Y-%m-%dT%H-%M-%S")
    folder = named if output is None else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as exc:
        raise ConfigError(f"results cannot be written to {folder}: {exc.strerror}") from exc
    if used:
        raise ConfigError(f"{folder} is not empty; choose another --output, or remove it first")
    return folder


@contextlib.contextmanager
def new_results(output: Path | None, prefix: str = "") -> Iterator[Path]:
    """The same; it is gone after the block if nothing was written into it."""
    folder = results_folder(output, prefix)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


class Journal:
    """Keeps records, in memory and line by line in a file. Where the file cannot be written any
    more the run goes on, and `fault` says why."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.records: list[Record] = []
        self.fault: OSError | None = None
        self._path = path
        self._tell = tell
        self._file = path.open("a", encoding="utf-8")

    def keep(self, record: Record) -> None:
        self.records.append(record)
        if self.fault is not None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as exc:
            self.fault = exc
            self._tell(f"{self._path}: {exc.strerror}; the run continues, records in memory")

    def close(self) -> None:
        """What its buffer still holds has no room, if anything."""
        with contextlib.suppress(OSError):
            self._file.close()


def measure(
    settings: RunSettings, folder: Path, tell: Tell, faults: Faults | None = None
) -> Report:
    """Runs a load test and writes its records and report into `folder`.

    Raises  DlmError  nothing could be measured
    """
    trace = read_trace(settings.trace)
    journal = Journal(folder / JOURNAL, tell)
    journal.keep(
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
    try:
        Run(settings, journal.keep, tell, faults).run()
    finally:
        journal.close()
    report = build(journal.records)
    if journal.fault is not None:
        report["complete"] = False
    return report


def write_report(report: Report, folder: Path, tell: Tell) -> bool:
    files = {
        "report.json": json.dumps(report, indent=1) + "\n",
        "report.csv": csv_of(report),
        "report.html": page_of(report),
    }
    return write_files(files, folder, tell)


def write_files(files: dict[str, str], folder: Path, tell: Tell) -> bool:
    """Writes texts by their names; false where the folder had no room. What has no room there goes
    to the system's folder for temporary files, if that has."""
    whole = True
    for name, text in files.items():
        try:
            write_whole(folder / name, text.encode())
        except OSError as exc:
            whole = False
            tell(f"{folder / name}: {exc.strerror}")
            rescued = temporary_folder() / f"{folder.name}-{name}"
            with contextlib.suppress(OSError):
                write_whole(rescued, text.encode())
                tell(f"kept as {rescued} instead")
    return whole


def read_report(path: Path) -> dict[str, Any]:
    """A report.json, or the folder that it lies in; of a run that was killed, from its records.

    Raises  ConfigError  there is none, or it is of another format
    """
    if path.is_dir():
        if not (path / "report.json").exists() and (path / JOURNAL).exists():
            return build(records_of(path / JOURNAL))
        path = path / "report.json"
    return read_document(path, FORMAT, VERSION)
