"""Rounds on devices that are processes of their own, behind real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm.federated.devices.clocks import Clocks  # noqa: E402
from dlm.federated.devices.encoding import SecureAggregator  # noqa: E402
from dlm.federated.devices.engine import DeviceCohort, DevicesEngine, Network, RoundOutcome  # noqa: E402
from dlm.federated.devices.messages import from_bytes, to_bytes  # noqa: E402
from dlm.federated.devices.participant import (  # noqa: E402
    DeviceAnswer,
    Participant,
    Request,
    Task,
    leaves_of,
    segments_of,
)
from dlm.federated.devices.settings import OwnerLimits  # noqa: E402
from dlm.federated.devices.sockets import LocalSockets, socket_of  # noqa: E402
from dlm.federated.keys import Key  # noqa: E402
from dlm.federated.tokens import Ids  # noqa: E402
from dlm.federated.training import rnn  # noqa: E402
from dlm.federated.training.engine import LocalEngine, RoundSums  # noqa: E402
from dlm.federated.training.local import LocalConfig, work_of  # noqa: E402
from federated.devices.toy_device import (  # noqa: E402
    DEVICES,
    VOCABULARY,
    order,
    rounding,
    signer_of,
    text_of,
)

MODEL = rnn.RnnConfig(VOCABULARY, 4, 4)
LOCAL = LocalConfig(batch_size=2, unroll=4, shuffle=False)
KEY = Key.from_seed(3)


class Processes:
    """Devices by name, and a network to them; `stop` sends one a signal before it gets a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop: tuple[str, str] | None = None
        self.signal = signal.SIGKILL
        self.started: dict[str, subprocess.Popen[str]] = {}
        for seed in range(DEVICES):
            self.start(f"d{seed}")
        for one in self.started.values():
            assert one.stdout is not None and one.stdout.readline() == "ready\n"

    def start(self, name: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("toy_device.py"))]
        paths = [str(socket_of(self.folder, name)), str(self.folder / f"{name}.clocks"), name[1:]]
        self.started[name] = subprocess.Popen([*command, *paths], stdout=subprocess.PIPE, text=True)

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        for name, data in requests.items():
            if self.stop == (name, from_bytes(Request, data).step):
                self.started[name].send_signal(self.signal)
                if self.signal == signal.SIGKILL:
                    self.started[name].wait()
        LocalSockets(self.folder).ask(requests, hear, timeout_s, most_bytes)

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


def aggregator(goal: int = DEVICES) -> SecureAggregator:
    return SecureAggregator(1.0, 1000.0, goal)


def engine_of(
    network: Network,
    outcomes: list[RoundOutcome],
    *,
    registered: bool = True,
    goal: int = DEVICES,
    step_s: float = 60.0,
) -> DevicesEngine:
    keys = {f"d{seed}": signer_of(seed).public for seed in range(DEVICES)}
    return DevicesEngine(
        MODEL,
        LOCAL,
        aggregator(goal),
        network,
        vocabulary=b"",
        text={},
        keys=keys if registered else None,
        gap=2,
        most=3,
        step_s=step_s,
        on_outcome=outcomes.append,
    )


def asked(index: int) -> DeviceCohort:
    return DeviceCohort("run", index, [f"d{seed}" for seed in range(DEVICES)])


def plain_sum(params: rnn.Params, key: Key, places: list[int]) -> RoundSums:
    """Of the encodings of the devices at these places, added up in the clear."""
    adding = aggregator()

    class Placed(SecureAggregator):
        def add(self, total, updates, key):  # type: ignore[no-untyped-def]
            at = places[total.reports]
            one = adding.zero(params, 1.0)
            single = adding.add(replace(one, place=at), updates, key)
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
@pytest.mark.promise("devices_sum")
@pytest.mark.parametrize("step", ["task", "roster", "delivery", "survivors", "consents"])
def test_a_device_killed_in_a_step_leaves_the_sum_of_the_others(
    processes: Processes, step: str
) -> None:
    """Its own input counts if it had sent it before."""
    outcomes: list[RoundOutcome] = []
    engine = engine_of(processes, outcomes)
    params = rnn.init(jax.random.key(1), MODEL)
    processes.stop = ("d2", step)
    key = KEY.fold("aggregation", 0)
    found = engine.sums(params, asked(0), jnp.float32(1.0), jnp.float32(0.5), key)
    survived = [n for n in range(DEVICES) if n != 2 or step in ("survivors", "consents")]
    assert "60 s" not in outcomes[-1].faults["d2"]  # which have not passed
    assert outcomes[-1].survivors == len(survived)
    same(found, plain_sum(params, key, survived))


@pytest.mark.slow
@pytest.mark.promise("devices_sum")
def test_a_round_goes_on_with_the_first_inputs_up_to_its_goal(processes: Processes) -> None:
    """One device more is asked, which does not answer: it is not waited for, and no fault. It is
    told, and takes part in the next round."""
    outcomes: list[RoundOutcome] = []
    engine = engine_of(processes, outcomes, goal=DEVICES - 1)
    params = rnn.init(jax.random.key(1), MODEL)
    processes.stop, processes.signal = ("d2", "delivery"), signal.SIGSTOP
    bounds = jnp.float32(1.0), jnp.float32(0.5)
    found = engine.sums(params, asked(0), *bounds, KEY)
    assert outcomes == [RoundOutcome(DEVICES, DEVICES - 1, {})]
    same(found, plain_sum(params, KEY, [n for n in range(DEVICES) if n != 2]))
    processes.started["d2"].send_signal(signal.SIGCONT)
    processes.stop = ("d0", "delivery")
    found = engine.sums(params, asked(2), *bounds, KEY)
    assert outcomes[1:] == [RoundOutcome(DEVICES, DEVICES - 1, {})]
    same(found, plain_sum(params, KEY, list(range(1, DEVICES))))


class InMemory:
    """Devices of this process."""

    def __init__(self, devices: Mapping[str, Participant]) -> None:
        self.devices = devices

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        for name, data in requests.items():
            hear(name, self.devices[name].answer(data))


def unreadable() -> list[Ids]:
    raise ValueError("the words of a user")


@pytest.mark.slow
@pytest.mark.promise("devices_refuse")
def test_a_server_cannot_tell_what_a_user_wrote_by_what_fails(tmp_path: Path) -> None:
    """A device whose text has an id beyond the model's, and one whose text cannot be encoded, hand
    in what one without text does."""
    beyond = [np.array([VOCABULARY], np.int32)]

    def sum_with(*last: Callable[[], list[Ids]]) -> RoundSums:
        texts = [lambda: text_of(0), lambda: text_of(1), *last]
        devices = {
            f"d{place}": Participant(
                lambda task, read=read: read,  # type: ignore[misc]
                Clocks(tmp_path / f"{len(list(tmp_path.iterdir()))}"),
                OwnerLimits(),
                None,
                None,
                os.urandom,
                order,
                rounding,
            )
            for place, read in enumerate(texts)
        }
        outcomes: list[RoundOutcome] = []
        engine = engine_of(InMemory(devices), outcomes, registered=False)
        params, bound = rnn.init(jax.random.key(1), MODEL), jnp.float32(1.0)
        found = engine.sums(params, asked(0), bound, jnp.float32(0.5), KEY)
        assert outcomes == [RoundOutcome(DEVICES, DEVICES, {})]
        return found

    same(sum_with(lambda: beyond, unreadable), sum_with(list, list))


def task(**changes: object) -> Task:
    """A task for the first device, as an honest server asks it."""
    settings = json.dumps(
        {
            "model": asdict(MODEL),
            "local": asdict(LOCAL),
            "aggregator": {"clip_norm": 1.0, "scale": 1000.0, "report_goal": DEVICES},
            "gap": 1,
            "most": 100,
        }
    )
    leaves = leaves_of(rnn.init(jax.random.key(1), MODEL))
    honest = Task("run", 5, 1, 3, SEGMENTS, KEYS, settings, b"", leaves, 1.0, 0.5, bytes(32))
    return replace(honest, **changes)  # type: ignore[arg-type]


SEGMENTS = segments_of(aggregator().encoding(rnn.network_size(MODEL)))
KEYS = {number: signer_of(number - 1).public for number in range(1, DEVICES + 1)}
ONE_KEY = {1: signer_of(0).public, **dict.fromkeys((2, 3, 4), signer_of(1).public)}


@pytest.mark.promise("devices_refuse")
@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 2},
        {"verifying": None},
        {"verifying": {1: bytes(32)}},
        {"verifying": ONE_KEY},
        {"segments": (SEGMENTS[0],)},
        {"parameters": ()},
        {"me": 2},
        {"bound": float("nan")},
        {"settings": "{}"},
        {"settings": "["},
        {"settings": '{"gap": Infinity, "most": 1}'},
        {"settings": "[" * 100_000},
    ],
    ids=[
        "a low threshold",
        "no keys",
        "unknown key",
        "one key for all",
        "other segments",
        "other parameters",
        "another's number",
        "nan",
        "empty",
        "no JSON",
        "infinite",
        "deep",
    ],
)
def test_a_device_refuses_what_a_lying_server_asks(tmp_path: Path, changes: object) -> None:
    """It says why, and an honest task is taken afterwards."""
    registered = frozenset(signer_of(one).public for one in range(DEVICES))
    device = Participant(
        lambda task: lambda: text_of(0),
        Clocks(tmp_path / "clocks"),
        OwnerLimits(),
        registered,
        signer_of(0),
        os.urandom,
        order,
    )
    for wanted, error in ((task(**changes), True), (task(), False)):  # type: ignore[arg-type]
        answer = from_bytes(
            DeviceAnswer, device.answer(to_bytes(Request("task", to_bytes(wanted))))
        )
        assert bool(answer.error) == error, answer.error
