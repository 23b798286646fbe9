"""How soon decoders go over to the local fallback when a server fails, and back once it is well
again.

    python tests/benchmarks/failover.py [--trials N --faults NAME ...]

Two shards, a server process each behind a proxy, one client with its settings as they come (but
`stable_s` 0, or each trial would wait longer than the one before), and eight decoders, whose every
score is checked against the oracle of the model that it names. In each trial a shard loses its only
server in one of several ways. Seconds are counted from the fault to the first utterance begun on
the local fallback and, once the server is well, to the first on the full model, and until each
decoder has decoded one whole on it. Prints a Markdown table, with the quantiles over the trials.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import WAIT_S, build
from dlm.client.config.settings import FailoverConfig, HeartbeatConfig
from faults.decoders import Decoders
from faults.test_cascade_faults import DEADLINE_S, World, faulty, kill, stop
from models import random_model

FAULTS: dict[str, Callable[[World], Callable[[], object]]] = {
    "kill -9": kill,
    "SIGSTOP": stop,
    "blackhole": faulty(blackhole=True),
}
COLUMNS = (
    "fault | trials | small: p50 | p90 | max | full again: p50 | p90 | max "
    "| every decoder: p50 | p90 | max | latest end of a call | scores checked"
)
PLACES = (50, 90, 100)


def first(decoders: Decoders, since: float, kind: str) -> float:
    """Seconds until an utterance was begun on such a model."""
    decoders.wait(lambda: decoders.first(since, kind) is not None, 2 * WAIT_S)
    begun = decoders.first(since, kind)
    assert begun is not None
    return begun - since


def trial(
    world: World, decoders: Decoders, begin: Callable[[World], Callable[[], object]]
) -> tuple[float, float, float]:
    """Seconds to the local fallback, back to the full one, and until every decoder was there."""
    since = time.monotonic()
    decoders.wait(lambda: decoders.each(since, 2, full=True), 2 * WAIT_S)
    broken = time.monotonic()
    mend = begin(world)
    small = first(decoders, broken, "local_fallback")
    entered = time.monotonic()
    decoders.wait(lambda: decoders.each(entered, 2))
    mend()
    mended = time.monotonic()
    full = first(decoders, mended, "full")
    decoders.wait(lambda: decoders.each(mended, 1, full=True), 2 * WAIT_S)
    return small, full, time.monotonic() - mended


def measure(trials: int, names: list[str]) -> None:
    """The table."""
    print(f"| {COLUMNS} |\n|---|" + "---:|" * COLUMNS.count("|"), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch) / name for name in ("full", "local_fallback", "cache")]
        for path in paths:
            path.mkdir()
        files = build(random_model(23, order=4, words=50, per_order=400), paths[0], 2)
        small = build(random_model(24, order=3, words=40, per_order=100), paths[1], 1)
        world = World(files, paths[2])
        try:
            client = world.connect(
                small,
                heartbeat_config=HeartbeatConfig(),
                failover_config=FailoverConfig(stable_s=0.0),
            )
            for name in names:
                with Decoders(client, [files, small], deadline_s=DEADLINE_S) as decoders:
                    took = np.array([trial(world, decoders, FAULTS[name]) for _ in range(trials)])
                cells = [name, f"{trials}"]
                for column in took.T:
                    cells += [f"{x:.2f} s" for x in np.percentile(column, PLACES)]
                cells.append(f"{max(one.late_s for one in decoders.calls) * 1e3:+.0f} ms")
                cells.append(f"{sum(decoders.since(0.0).values()):,}")
                print("| " + " | ".join(cells) + " |", flush=True)
        finally:
            world.end()


def main() -> None:
    """As the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    chosen = parser.parse_args()
    measure(chosen.trials, chosen.faults)


if __name__ == "__main__":
    main()
