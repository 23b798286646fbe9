"""How late calls end, and what they end with, while servers fail one at a time.

    python tests/benchmarks/fire.py [--minutes N --replicas N --seed N --deadlines S ...]

Two shards with several servers each, every server a process behind a proxy, fail in all the ways of
`python -m loadtest chaos`: at any time at most one server of each shard, so that the full model can
answer. Two clients decode meanwhile, four decoders each: one has a local fallback and
bigram-fallback scores, so no error may reach it; the other has neither, so it gets scores of the
full model or a documented error. Each score is checked against the oracle of the model that it
names. Prints how late calls ended.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import build
from dlm.client import Client
from dlm.client.config.settings import FailoverConfig, HeartbeatConfig
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, LOCAL_FALLBACK
from faults.decoders import Decoders
from faults.test_cascade_faults import World, carry_out
from loadtest.run.chaos import random_faults
from models import random_model

if TYPE_CHECKING:
    from loadtest.run.chaos import Command

SHARDS = 2
COLUMNS = (
    "client | calls | full | partial | small | errors | late: p99 | p99.9 | max "
    "| within 50 ms | within 250 ms"
)


def faults(seed: int, seconds: float, replicas: int) -> list[tuple[float, Command]]:
    """Those of `random_faults`, as if a shard had one server, which each time is another."""
    plan, turn, chosen = [], Counter[int](), dict[int, int]()
    for when, command in random_faults(seed, seconds, SHARDS, kill=True):
        shard = command.server
        if shard is None:
            plan.append((when, command))
            continue
        if command.verb not in ("continue", "heal"):
            chosen[shard] = shard + SHARDS * (turn[shard] % replicas)
            turn[shard] += 1
        plan.append((when, replace(command, server=chosen[shard])))
    return plan


def row(name: str, decoders: Decoders) -> str:
    """A line of the table."""
    late = np.array([call.late_s for call in decoders.calls])
    sources = decoders.since(0.0)
    errors = ", ".join(f"{count:,} {kind}" for kind, count in decoders.errors.most_common())
    cells = [name, f"{len(late):,}"]
    cells += [f"{sources[source]:,}" for source in (FULL, BIGRAM_FALLBACK, LOCAL_FALLBACK)]
    cells += [errors or "0"]
    cells += [f"{np.percentile(late, q) * 1e3:+.0f} ms" for q in (99, 99.9, 100)]
    cells += [f"{(late <= bound).mean():.4%}" for bound in (0.05, 0.25)]
    return "| " + " | ".join(cells) + " |"


def measure(minutes: float, replicas: int, seed: int, deadlines_s: list[float]) -> None:
    """The table."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        paths = [Path(scratch) / name for name in ("full", "local_fallback", "cache")]
        for path in paths:
            path.mkdir()
        files = build(random_model(23, order=4, words=50, per_order=400), paths[0], SHARDS)
        small = build(random_model(24, order=3, words=40, per_order=100), paths[1], 1)
        world = World(files, paths[2], replicas=replicas)
        stack.callback(world.end)
        settings = {
            "heartbeat_config": HeartbeatConfig(),
            "failover_config": FailoverConfig(stable_s=0.0),
        }
        fallback = world.connect(small, replicas, **settings)
        alone: Client = world.clients(world.proxies.addresses, heartbeat_config=HeartbeatConfig())
        groups = {
            "partial and small": Decoders(
                fallback, [files, small], count=4, deadline_s=deadlines_s
            ),
            "neither": Decoders(alone, [files], count=4, deadline_s=deadlines_s, may_fail=True),
        }
        for decoders in groups.values():
            stack.enter_context(decoders)
        begun = time.monotonic()
        for decoders in groups.values():
            decoders.wait(lambda decoders=decoders: decoders.each(begun, 2, full=True))
            decoders.calls.clear()
        begun = time.monotonic()
        plan = faults(seed, minutes * 60, replicas)
        for at, command in plan:
            for decoders in groups.values():
                decoders.for_s(max(begun + at - time.monotonic(), 0.0))
            carry_out(world, command)
            # What is kept here of each call and score: a full collection of it would hold up all
            # threads, for 0.3 s after four minutes.
            gc.freeze()
        world.heal()
        mended = time.monotonic()
        for decoders in groups.values():
            decoders.wait(lambda decoders=decoders: decoders.each(mended, 2, full=True))
        print(
            f"{len(plan)} actions in {minutes:g} minutes, {replicas} servers per shard, "
            f"seed {seed}; switches {fallback.cascade.switches}, "
            f"retries {fallback.stats.retries + alone.stats.retries}\n"
        )
        print(f"| {COLUMNS} |\n|---|" + "---:|" * COLUMNS.count("|"))
        for name, decoders in groups.items():
            print(row(name, decoders), flush=True)


def main() -> None:
    """As the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=3, help="servers per shard")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--deadlines", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    chosen = parser.parse_args()
    measure(chosen.minutes, chosen.replicas, chosen.seed, chosen.deadlines)


if __name__ == "__main__":
    main()
