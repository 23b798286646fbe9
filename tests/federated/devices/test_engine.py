"""Rounds on devices that are processes of their own, behind real sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm.federated import rnn
from dlm.federated.devices.engine import DevicesEngine, RoundOutcome
from dlm.federated.devices.messages import from_bytes
from dlm.federated.devices.participant import Request
from dlm.federated.devices.sockets import ask_device
from dlm.federated.engine import LocalEngine, RoundSums
from dlm.federated.keys import Key
from dlm.federated.local import LocalConfig, work_of
from dlm.federated.secagg import SecureAggregator
from federated.devices.toy_device import VOCABULARY, order, signer_of, text_of

DEVICES = 4
MODEL = rnn.RnnConfig(VOCABULARY, 4, 4)
LOCAL = LocalConfig(batch_size=2, unroll=4, shuffle=False)
KEY = Key.from_seed(3)


class Processes:
    """Devices by name, and a network to them; `stop` ends one before it gets that step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop: tuple[str, str] | None = None
        self.started: dict[str, subprocess.Popen[str]] = {}
        for seed in range(DEVICES):
            self.start(f"d{seed}")
        for one in self.started.values():
            assert one.stdout is not None and one.stdout.readline() == "ready\n"

    def start(self, name: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("toy_device.py"))]
        paths = [str(self.folder / name), str(self.folder / f"{name}.clocks"), name[1:]]
        self.started[name] = subprocess.Popen([*command, *paths], stdout=subprocess.PIPE, text=True)

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], None],
        timeout_s: float,
    ) -> None:
        for name, data in requests.items():
            if self.stop == (name, from_bytes(Request, data).step):
                self.started[name].kill()
                self.started[name].wait()
        with ThreadPoolExecutor(DEVICES) as pool:
            asked = {
                pool.submit(ask_device, self.folder / name, data, timeout_s): name
                for name, data in requests.items()
            }
            for one in as_completed(asked):
                if not one.exception():
                    hear(asked[one], one.result())

    def close(self) -> None:
        for one in self.started.values():
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.close()


def aggregator() -> SecureAggregator:
    return SecureAggregator(1.0, 1000.0, DEVICES)


def engine_of(processes: Processes, outcomes: list[RoundOutcome]) -> DevicesEngine:
    return DevicesEngine(
        MODEL,
        LOCAL,
        aggregator(),
        processes,
        run="run",
        keys={f"d{seed}": signer_of(seed).public for seed in range(DEVICES)},
        gap=2,
        most=3,
        step_s=60.0,
        on_outcome=outcomes.append,
    )


def plain_sum(params: rnn.Params, key: Key, places: list[int]) -> RoundSums:
    """Of the encodings of the devices at these places, added up in the clear."""
    adding = aggregator()

    class Placed(SecureAggregator):
        def add(self, total, updates, key):  # type: ignore[no-untyped-def]
            at = places[total.reports]
            one = adding.zero(params, 1.0)
            single = adding.add(one.__class__(**{**vars(one), "reports": at}), updates, key)
            held = single.total if total.total is None else total.total + single.total
            return total.__class__(
                **{**vars(single), "total": held % single.encoding.modulus,
                   "reports": total.reports + 1}
            )  # fmt: skip

    engine = LocalEngine(MODEL, LOCAL, aggregator=Placed(1.0, 1000.0, DEVICES))
    cohort = [work_of(text_of(place), LOCAL, order()) for place in places]
    return engine.sums(params, cohort, jnp.float32(1.0), jnp.float32(0.5), key)


def same(one: RoundSums, two: RoundSums) -> None:
    for a, b in zip(jax.tree.leaves(one.update), jax.tree.leaves(two.update), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (one.below, one.weight, one.users) == (two.below, two.weight, two.users)


@pytest.mark.slow
def test_rounds_on_devices_equal_rounds_on_this_machine(processes: Processes) -> None:
    """Bit for bit; and a device that is asked too soon refuses."""
    outcomes: list[RoundOutcome] = []
    engine = engine_of(processes, outcomes)
    params = rnn.init(jax.random.key(1), MODEL)
    cohort = [f"d{seed}" for seed in range(DEVICES)]
    for index in (0, 2):
        key = KEY.fold("aggregation", index)
        found = engine.sums(
            params, cohort, jnp.float32(1.0), jnp.float32(0.5), key, round_index=index
        )
        assert outcomes[-1] == RoundOutcome(DEVICES, DEVICES, {})
        same(found, plain_sum(params, key, [0, 1, 2, 3]))
        params = jax.tree.map(lambda p, u: p + np.float32(u / 4), params, found.update)
    engine.sums(params, cohort, jnp.float32(1.0), jnp.float32(0.5), KEY.fold(3), round_index=3)
    assert outcomes[-1].survivors == 0 and len(outcomes[-1].faults) == DEVICES


@pytest.mark.slow
@pytest.mark.parametrize("step", ["task", "roster", "delivery", "survivors", "consents"])
def test_a_device_killed_in_a_step_leaves_the_sum_of_the_others(
    processes: Processes, step: str
) -> None:
    """Its own input counts if it had sent it before."""
    outcomes: list[RoundOutcome] = []
    engine = engine_of(processes, outcomes)
    params = rnn.init(jax.random.key(1), MODEL)
    processes.stop = ("d2", step)
    cohort = [f"d{seed}" for seed in range(DEVICES)]
    key = KEY.fold("aggregation", 0)
    found = engine.sums(params, cohort, jnp.float32(1.0), jnp.float32(0.5), key)
    survived = [0, 1, 2, 3] if step in ("survivors", "consents") else [0, 1, 3]
    assert outcomes[-1].survivors == len(survived)
    same(found, plain_sum(params, key, survived))
