"""What a round costs beside the bare gradients of the same users, and what memory it takes.

    python tests/benchmarks/federated_cost.py [--users 4] [--runs 7] [--model gdp-tied-10k]

Both are run in turn in one process, and CPU time is what is compared: the ratio holds on a busy
machine, the seconds do not. `bare` is one compiled loop over the same batches that adds up
gradients at the model the round begins with: no steps, no clipping, no noise, nothing kept apart.
Memory is the peak of a process of its own for each number of users.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm.federated.fixed_point import BITS, GRID_BITS
from dlm.federated.keys import Key
from dlm.federated.noise import make_mechanism
from dlm.federated.noise.discrete import discrete
from dlm.federated.training import rnn
from dlm.federated.training.engine import LocalEngine
from dlm.federated.training.local import LocalConfig, UserWork, work_of
from dlm.federated.training.presets import preset
from dlm.federated.training.rounds import OptimizerConfig, ReleaseConfig, make_algorithm

TOKENS = 1600  # of a user (DPF)


def users_of(count: int, config: LocalConfig, vocab_size: int) -> list[UserWork]:
    """Users of 1,600 tokens in utterances of about a batch's row."""
    rng = np.random.default_rng(0)
    length = config.unroll - 1  # with both marks: exactly one row
    return [
        work_of(
            [
                rng.integers(3, vocab_size, length).astype(np.int32)
                for _ in range(TOKENS // config.unroll)
            ],
            config,
            rng,
        )
        for _ in range(count)
    ]


def bare_gradients(model: rnn.RnnConfig, config: LocalConfig) -> Callable[..., Any]:
    """(parameters, users' batches) -> sum of the gradients of all batches."""

    def total(params: Any, batches: Any) -> Any:
        state = rnn.initial_state(model, config.batch_size)
        slope = jax.grad(lambda p, batch: rnn.batch_loss(p, model, state, batch)[0])

        def add(sums: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, sums, slope(params, batch)), None

        flat = batches.reshape(-1, *batches.shape[2:])
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), flat)[0]

    compiled: Callable[..., Any] = jax.jit(total)
    return compiled


def measured(model_name: str, count: int, runs: int, clip_after: Any, noise: str) -> dict[str, Any]:
    """CPU seconds of each, and the ratio of their medians."""
    model = preset(model_name)
    config = LocalConfig(clip_after=clip_after)
    users = users_of(count, config, model.vocab_size)
    params = jax.jit(partial(rnn.init, config=model))(jax.random.key(0))
    mechanism = None
    if noise != "none":
        mechanism = discrete(make_mechanism(noise, rounds=2 * runs + 4))
    release = ReleaseConfig(1.0, 0.0 if mechanism is None else 0.5, float(count))
    bits = BITS if mechanism is None else GRID_BITS
    engine = LocalEngine(model, config, block=min(count, 32), bits=bits)
    rounds = make_algorithm(release, OptimizerConfig(), engine, mechanism, simulation=False)
    state = rounds.init(params, Key.from_seed(1))
    bare = bare_gradients(model, config)
    batches = np.stack([user.batches for user in users])

    def one_round() -> None:
        nonlocal state
        state, _ = rounds.apply(state, users)
        jax.block_until_ready(state.params)

    def one_bare() -> None:
        jax.block_until_ready(bare(params, jnp.asarray(batches)))

    found: dict[str, list[float]] = {"bare": [], "round": []}
    for run in range(runs + 1):
        for name, work in (("bare", one_bare), ("round", one_round)):
            began = time.process_time()
            work()
            if run:  # the first compiles
                found[name].append(time.process_time() - began)
    ratios = [a / b for a, b in zip(found["round"], found["bare"], strict=True)]
    return {
        "model": model_name,
        "parameters": rnn.parameter_count(params),
        "users": count,
        "tokens_per_user": TOKENS,
        "clip_after": clip_after,
        "noise": noise,
        **{f"{name}_cpu_s": statistics.median(times) for name, times in found.items()},
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }


def peak_mib(model_name: str, count: int) -> float:
    """Peak memory of this process after a round of so many users, beside which nothing runs."""
    model, config = preset(model_name), LocalConfig()
    params = jax.jit(partial(rnn.init, config=model))(jax.random.key(0))
    engine = LocalEngine(model, config, block=min(count, 32))
    release = ReleaseConfig(1.0, 0.0, float(count))
    rounds = make_algorithm(release, OptimizerConfig(), engine, None, simulation=False)
    state = rounds.init(params, jax.random.key(1))
    state, _ = rounds.apply(state, users_of(count, config, model.vocab_size))
    jax.block_until_ready(state.params)
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def main() -> None:
    """Prints a JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gdp-tied-10k")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--noise", default="tree")
    parser.add_argument("--memory", type=int, nargs="*", default=[4, 64], help="users")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak_of:
        print(
            json.dumps({"users": given.peak_of, "peak_mib": peak_mib(given.model, given.peak_of)})
        )
        return
    for clip_after in ("user", "batch"):
        print(
            json.dumps(measured(given.model, given.users, given.runs, clip_after, given.noise)),
            flush=True,
        )
    for count in given.memory:
        command = [sys.executable, __file__, "--model", given.model, "--peak-of", str(count)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    main()
