"""What noise costs a round.

    python tests/benchmarks/noise_cost.py [--runs 15] [--noise blt tree gaussian bandfhu]

A round of the learning benchmark (`learning.py`: 45 users of 400 words) with a network of 4,000
parameters, and one of four users of 1,600 tokens with 1.4 million, each
without noise and with it in turn, in one process; and the noise alone. CPU time: the median of the
ratios round by round holds on a busy machine, the seconds do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from dlm.federated.fixed_point import BITS, GRID_BITS
from dlm.federated.keys import Key
from dlm.federated.noise import make_mechanism
from dlm.federated.noise.discrete import DiscreteNoise, discrete
from dlm.federated.training import rnn
from dlm.federated.training.engine import LocalEngine
from dlm.federated.training.local import LocalConfig, work_of
from dlm.federated.training.presets import preset
from dlm.federated.training.rnn import RnnConfig
from dlm.federated.training.rounds import OptimizerConfig, ReleaseConfig, make_algorithm

ROUNDS, GAP, MOST = 256, 64, 4
CASES: dict[str, dict[str, Any]] = {
    "4,000": {
        "model": RnnConfig(200, 12, 16),
        "local": LocalConfig(learning_rate=2.0, packing="stream", batch_size=8, unroll=20),
        "users": 45,
        "tokens": 400,
    },
    "1.4 M": {
        "model": preset("gdp-tied-10k"),
        "local": LocalConfig(),
        "users": 4,
        "tokens": 1600,
    },
}


def ratios(first: Callable[[], None], second: Callable[[], None], runs: int) -> dict[str, Any]:
    """CPU seconds of both in turn, and of the second over the first."""
    found: tuple[list[float], list[float]] = ([], [])
    for run in range(runs + 1):
        for times, work in zip(found, (first, second), strict=True):
            began = time.process_time()
            work()
            if run:  # the first compiles
                times.append(time.process_time() - began)
    each = sorted(b / a for a, b in zip(*found, strict=True))
    return {
        "without_cpu_s": statistics.median(found[0]),
        "with_cpu_s": statistics.median(found[1]),
        "ratio": statistics.median(each),
        "quarters": [each[len(each) // 4], each[-1 - len(each) // 4]],
    }


def measured(case: dict[str, Any], name: str, runs: int) -> dict[str, Any]:
    """A round without noise and with it, and the noise alone."""
    model, config = case["model"], case["local"]
    rng = np.random.default_rng(0)
    length = config.unroll - 1
    users = [
        work_of(
            [
                rng.integers(3, model.vocab_size, length).astype(np.int32)
                for _ in range(case["tokens"] // config.unroll)
            ],
            config,
            rng,
        )
        for _ in range(case["users"])
    ]
    params = jax.jit(partial(rnn.init, config=model))(jax.random.key(0))
    noise = discrete(make_mechanism(name, rounds=ROUNDS, gap=GAP, max_participations=MOST))
    size = rnn.parameter_count(params)

    def rounds_with(mechanism: DiscreteNoise | None, bits: int) -> Callable[[], None]:
        engine = LocalEngine(model, config, block=min(case["users"], 32), bits=bits)
        release = ReleaseConfig(1.0, 0.0 if mechanism is None else 0.5, float(case["users"]))
        rounds = make_algorithm(release, OptimizerConfig(), engine, mechanism, simulation=False)
        state = [rounds.init(params, Key.from_seed(1))]

        def one() -> None:
            state[0], _ = rounds.apply(state[0], users)
            jax.block_until_ready(state[0].params)

        return one

    state = noise.init(Key.from_seed(1), size)
    alone = []
    for _ in range(runs + 1):
        began = time.process_time()
        _, state = noise.step(state, [(size, 0.5 * 2.0**GRID_BITS)])
        alone.append(time.process_time() - began)
    return {
        "parameters": size,
        "users": case["users"],
        "noise": name,
        "round": ratios(rounds_with(None, BITS), rounds_with(noise, GRID_BITS), runs),
        "noise_alone_cpu_s": statistics.median(alone[1:]),
    }


def main() -> None:
    """Prints a JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--noise", nargs="*", default=["blt", "tree", "gaussian", "bandfhu"])
    parser.add_argument("--only", choices=list(CASES))
    given = parser.parse_args()
    for size, case in CASES.items():
        for name in given.noise:
            if given.only in (None, size):
                print(json.dumps(measured(case, name, given.runs)), flush=True)


if __name__ == "__main__":
    main()
