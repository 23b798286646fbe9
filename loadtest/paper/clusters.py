"""Makes the shard sets, servers and loads that experiments share."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm import __version__
from dlm.client import States, Utterance
from dlm.files import write_whole
from dlm.index.layout import read_manifest
from dlm.index.making import build_shard_set
from loadtest.paper.result import Setup
from loadtest.report.report import Report
from loadtest.report.session import measure
from loadtest.run.driver import RunSettings
from loadtest.run.local_cluster import local_servers
from loadtest.run.worker import ClientSettings
from loadtest.traces.schedule import Load, Segment
from loadtest.traces.trace import CALLS, EXTEND, Trace

PROCESSES, DECODERS = 2, 8  # a closed loop's client processes, and decoders per process
DEADLINE_S = 30.0  # deadline of a request: long, so that a busy machine's late answers count


def cores_here() -> int:
    return len(os.sched_getaffinity(0))


def shard_set(setup: Setup, shards: int, encoding: str = "exact") -> Path:
    """Returns `setup.model` if it has `shards` shards in `encoding`; else a set built once."""
    manifest = read_manifest(setup.model)
    if manifest.shards == shards and manifest.encoding == encoding:
        return setup.model
    folder = setup.work / f"shards-{manifest.model[:12]}-{encoding}-{shards}"
    if not folder.exists():
        setup.progress.tell(f"sharding {setup.arpa.name}, shards: {shards}, {encoding}")
        build_shard_set(setup.arpa, folder, shards, encoding=encoding)
    return folder


@contextmanager
def serving(setup: Setup, shards: int) -> Iterator[Path]:
    with local_servers(shard_set(setup, shards), shards, setup.progress.tell) as servers:
        yield servers.cluster


def closed(concurrency: int, seconds: float, warmup_s: float = 1.0) -> Load:
    """A load of decoders that send the next request as soon as they have an answer."""
    return Load((Segment(seconds, 1.0),), concurrency, warmup_s=warmup_s)


def loaded(
    setup: Setup, name: str, cluster: Path, trace: Path, load: Load, processes: int = 1
) -> Report:
    """Runs a load on a cluster and returns the report; the run's records stay in `setup.work`."""
    folder = setup.work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    client = ClientSettings(DEADLINE_S, cache_dir=str((setup.work / "cache").absolute()))
    window_s = max(min(1.0, load.seconds / 2), 0.1)
    settings = RunSettings(cluster, trace, load, client, processes, window_s, setup.seed)
    return measure(settings, folder, lambda line: None)


def kept(setup: Setup, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `make` returns; keeps it as JSON by model, trace and version until `--again`."""
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
    """Returns the `results` of a closed loop on this machine, with `PROCESSES` clients of
    `DECODERS` decoders each, and `other_cores`, the cores that other work used meanwhile."""
    seconds = 1.0 if setup.quick else 6.0

    def make() -> dict[str, Any]:
        setup.progress.tell(f"a closed loop on {servers} servers")
        with serving(setup, servers) as cluster:
            load = closed(PROCESSES * DECODERS, seconds)
            name = f"closed-{servers}"
            found = dict(loaded(setup, name, cluster, setup.trace, load, PROCESSES)["results"])
        used = found["client_cores"] + found["server_cores"]
        busy = (found["machine_cpu_share"] or 0.0) * cores_here()
        return {**found, "other_cores": max(busy - used, 0.0)}

    return kept(setup, f"closed-{servers}", make)


def prepared(handle: Utterance, trace: Trace) -> list[tuple[int, States, Any]]:
    """Returns (number, states, ids of words) for each request that scores words after contexts."""
    found = []
    wanted = trace.asks & (trace.call == CALLS.index(EXTEND))
    for number in np.flatnonzero(wanted).tolist():
        one = trace.request(number)
        ids = np.array([[handle.vocabulary.id_of(w) for w in row] for row in one.words], np.uint32)
        found.append((number, handle.states_after(one.contexts), ids[0] if len(ids) == 1 else ids))
    return found


def fitted(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fits the cost (k,), at least 0, of each kind of work (n, k), by least squares of absolute
    errors. It tries all subsets of the kinds, so there must be only a handful of kinds."""
    best, least = np.zeros(work.shape[1]), np.inf
    for count in range(1, work.shape[1] + 1):
        for some in combinations(range(work.shape[1]), count):
            costs = np.linalg.lstsq(work[:, some], seconds, rcond=None)[0]
            error = float(np.square(work[:, some] @ costs - seconds).sum())
            if (costs >= 0).all() and error < least:
                best, least = np.zeros(work.shape[1]), error
                best[list(some)] = costs
    return best
