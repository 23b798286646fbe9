"""Shard sets, servers and loads that experiments share."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dlm import __version__
from dlm.client import States, Utterance
from dlm.files import write_whole
from dlm.index.layout import read_manifest
from dlm.index.making import build_shard_set
from loadtest.paper.setup import Setup
from loadtest.report.report import Report
from loadtest.report.session import JOURNAL, measure
from loadtest.run.driver import LEAD_S, RunSettings, machine_cpu, records_of
from loadtest.run.local_cluster import local_servers
from loadtest.run.worker import ClientSettings
from loadtest.traces.schedule import Load, Segment
from loadtest.traces.trace import CALLS, EXTEND, Trace

PROCESSES, DECODERS = 2, 8  # of a closed loop: client processes, and decoders per process
DEADLINE_S = 30.0  # of a request: on a shared machine, a late answer still counts
EVERY_S = 0.1


class BusyCores:
    """Samples /proc/stat several times per second, in a thread, until the end of the block."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loadtest-busy", daemon=True)

    def __enter__(self) -> BusyCores:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            if (now := machine_cpu()) is not None:
                self._looks.append((time.time(), now["busy_s"]))

    def between(self, begin: float, end: float) -> float:
        """Cores that were busy between two times of `time.time`, on average."""
        times, busy = np.array(self._looks).T
        first, last = np.interp([begin, end], times, busy)
        return float(last - first) / (end - begin)


def shard_set(setup: Setup, shards: int, encoding: str = "exact") -> Path:
    """The model in `shards` shards, built once; `setup.model` if it has that many."""
    manifest = read_manifest(setup.model)
    if manifest.shards == shards and manifest.encoding == encoding:
        return setup.model
    folder = setup.work / f"shards-{manifest.model[:12]}-{encoding}-{shards}"
    if not folder.exists():
        setup.progress.tell(f"sharding {setup.arpa.name} in {shards}, {encoding}")
        build_shard_set(setup.arpa, folder, shards, encoding=encoding)
    return folder


@contextmanager
def serving(setup: Setup, shards: int) -> Iterator[Path]:
    with local_servers(shard_set(setup, shards), shards, setup.progress.tell) as servers:
        yield servers.cluster


def closed(concurrency: int, seconds: float, warmup_s: float = 1.0) -> Load:
    """Decoders that send the next request as soon as they have an answer."""
    return Load((Segment(seconds, 1.0, 1.0),), concurrency, warmup_s=warmup_s)


def loaded(
    setup: Setup, name: str, cluster: Path, trace: Path, load: Load, processes: int = 1
) -> Report:
    """Runs a load on a cluster and returns its report; its records stay in `setup.work`."""
    folder = setup.work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    client = ClientSettings(DEADLINE_S, cache_dir=str((setup.work / "cache").absolute()))
    window_s = max(min(1.0, load.seconds / 2), 0.1)
    settings = RunSettings(cluster, trace, load, client, processes, window_s, setup.seed)
    return measure(settings, folder, lambda line: None)


def kept(setup: Setup, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `make`, as JSON, kept per model, trace and version; `--again` makes it anew."""
    of = {
        "model": read_manifest(setup.model).model,
        "trace": setup.trace.name,
        "dlm": __version__,
        "quick": setup.quick,
        "seed": setup.seed,
    }
    path = setup.kept / f"{name}.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["of"] == of:
            return dict(found["found"])
    made = make()
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps({"of": of, "found": made}, indent=1).encode())
    return made


def closed_loop(setup: Setup, servers: int) -> dict[str, Any]:
    """`results` of a closed loop's report, of `PROCESSES` clients with `DECODERS` each, on this
    machine, and `other_cores`, used by other work meanwhile."""
    seconds = 1.0 if setup.quick else 6.0

    def make() -> dict[str, Any]:
        setup.progress.tell(f"a closed loop on {servers} servers")
        with serving(setup, servers) as cluster:
            load = closed(PROCESSES * DECODERS, seconds)
            name = f"closed-{servers}"
            with BusyCores() as busy:
                report = loaded(setup, name, cluster, setup.trace, load, PROCESSES)
        found = dict(report["results"])
        records = records_of(setup.work / "runs" / name / JOURNAL)
        (began,) = [one["at"] for one in records if one["type"] == "started"]
        begin_s = began + LEAD_S + load.warmup_s
        all_cores = busy.between(begin_s, begin_s + load.seconds)
        return {**found, "other_cores": all_cores - found["client_cores"] - found["server_cores"]}

    return kept(setup, f"closed-{servers}", make)


def prepared(handle: Utterance, trace: Trace) -> list[tuple[int, States, Any]]:
    """Each request for words after contexts: its number, states and words, in ids."""
    found = []
    wanted = trace.asks & (trace.call == CALLS.index(EXTEND))
    for number in np.flatnonzero(wanted).tolist():
        one = trace.request(number)
        ids = np.array([[handle.vocabulary.id_of(w) for w in row] for row in one.words], np.uint32)
        found.append((number, handle.states_after(one.contexts), ids[0] if len(ids) == 1 else ids))
    return found
