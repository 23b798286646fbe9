"""Devices that send what no device should, behind real sockets: the round goes on without them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm.errors import ProtocolError  # noqa: E402
from dlm.federated.devices.clocks import Clocks  # noqa: E402
from dlm.federated.devices.engine import DeviceCohort, DevicesEngine, RoundOutcome  # noqa: E402
from dlm.federated.devices.messages import from_bytes, to_bytes  # noqa: E402
from dlm.federated.devices.participant import DeviceAnswer, Participant, Request  # noqa: E402
from dlm.federated.devices.protocol import MaskedInput, Shares  # noqa: E402
from dlm.federated.devices.settings import OwnerLimits  # noqa: E402
from dlm.federated.devices.sockets import DeviceSocket, LocalSockets, socket_of  # noqa: E402
from dlm.federated.training import rnn  # noqa: E402
from federated.compiling import quickly  # noqa: E402
from federated.devices.test_engine import KEY, LOCAL, MODEL, aggregator, plain_sum, same  # noqa: E402
from federated.devices.toy_device import DEVICES, order, rounding, signer_of, text_of  # noqa: E402

pytestmark = pytest.mark.slow
HOSTILE = DEVICES - 1
NAMES = tuple(f"d{seed}" for seed in range(DEVICES))
ROUNDS = count()
Lie = Callable[[str, bytes], bytes]  # (step, the honest answer) -> what is sent


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Lie]]]:
    """The folder of their sockets, and how the last one lies."""
    folder, lies = tmp_path_factory.mktemp("d"), {"now": lambda step, said: said}
    registered = frozenset(signer_of(seed).public for seed in range(DEVICES))
    served = []
    for seed, name in enumerate(NAMES):
        device = Participant(
            lambda task, seed=seed: lambda: text_of(seed),  # type: ignore[misc]
            Clocks(folder / f"{name}.clocks"),
            OwnerLimits(0.0, max_participations=100),
            registered,
            signer_of(seed),
            os.urandom,
            order,
            rounding,
        )

        def lying(data: bytes, device: Participant = device) -> bytes:
            step = from_bytes(Request, data).step
            return signed(device, step, lies["now"](step, device.answer(data)))

        answer = lying if seed == HOSTILE else device.answer
        served.append(DeviceSocket(socket_of(folder / "s", name), answer))
    with quickly():
        for one in served:
            threading.Thread(target=one.serve, daemon=True).start()
        yield folder / "s", lies


def engine_of(folder: Path, outcomes: list[RoundOutcome], names: int = DEVICES) -> DevicesEngine:
    keys = {f"d{seed}": signer_of(seed).public for seed in range(names)}
    return DevicesEngine(
        MODEL,
        LOCAL,
        aggregator(),
        LocalSockets(folder),
        keys=keys,
        vocabulary=b"",
        text={},
        gap=1,
        most=100,
        step_s=60.0,
        on_outcome=outcomes.append,
    )


def signed(device: Participant, step: str, answer: bytes) -> bytes:
    """The answer, as the device itself would send it."""
    with suppress(ProtocolError):
        found = from_bytes(DeviceAnswer, answer)
        if not found.error:
            return to_bytes(replace(found, signature=device._signature(step, found.content)))
    return answer


def said(message: object) -> bytes:
    return to_bytes(DeviceAnswer("", to_bytes(message)))


def of_input(change: Callable[[np.ndarray], np.ndarray]) -> Lie:  # type: ignore[type-arg]
    def lie(step: str, honest: bytes) -> bytes:
        if step != "delivery":
            return honest
        sent = from_bytes(MaskedInput, from_bytes(DeviceAnswer, honest).content)
        first = change(np.frombuffer(sent.segments[0], SENT)).astype(SENT).tobytes()
        return said(MaskedInput((first, *sent.segments[1:])))

    return lie


def replayed() -> Lie:
    first: list[bytes] = []

    def lie(step: str, honest: bytes) -> bytes:
        first.append(honest)
        return first[0]

    return lie


def garbled(step: str, honest: bytes) -> bytes:
    if step != "roster":
        return honest
    sent = from_bytes(Shares, from_bytes(DeviceAnswer, honest).content)
    return said(replace(sent, sealed={one: bytes(len(x)) for one, x in sent.sealed.items()}))


SENT = np.dtype("<u2")  # of a modulus below 2^16
LIES: dict[str, Lie] = {
    "no message": lambda step, honest: b"\xff" * 100,
    "nothing": lambda step, honest: b"",
    "too long": lambda step, honest: honest + bytes(1 << 21),
    "more than declared": lambda step, honest: honest + b"x",
    "short": of_input(lambda numbers: numbers[1:]),
    "long": of_input(lambda numbers: np.append(numbers, 0)),
    "out of range": of_input(lambda numbers: np.full_like(numbers, np.iinfo(SENT).max)),
    "nan": of_input(lambda numbers: np.full(len(numbers) // 4, np.nan).view(SENT)),
    "replays": replayed(),
    "a refusal of a megabyte": lambda step, honest: to_bytes(DeviceAnswer("x" * (1 << 20), b"")),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_round_goes_on_without_a_device_that_lies(
    fleet: tuple[Path, dict[str, Lie]], lie: Lie
) -> None:
    """The sum is that of the others, bit for bit, and the outcome names the device."""
    folder, lies = fleet
    outcomes: list[RoundOutcome] = []
    engine, index = engine_of(folder, outcomes), next(ROUNDS)
    lies["now"] = lie
    params = rnn.init(jax.random.key(1), MODEL)
    key = KEY.fold("aggregation", index)
    cohort = DeviceCohort("run", index, NAMES)
    found = engine.sums(params, cohort, jnp.float32(1.0), jnp.float32(0.5), key)
    (outcome,) = outcomes
    assert (outcome.asked, outcome.survivors) == (DEVICES, HOSTILE)
    assert set(outcome.faults) == {NAMES[HOSTILE]}
    assert max(map(len, outcome.faults.values())) < 1000
    same(found, plain_sum(params, key, list(range(HOSTILE))))


def test_shares_that_nobody_can_open_end_a_round_and_reveal_nothing(
    fleet: tuple[Path, dict[str, Lie]],
) -> None:
    """What one device can do at most: the next round is whole."""
    folder, lies = fleet
    outcomes: list[RoundOutcome] = []
    engine = engine_of(folder, outcomes)
    params = rnn.init(jax.random.key(1), MODEL)
    for lie in (garbled, lambda step, honest: honest):
        lies["now"], index = lie, next(ROUNDS)
        cohort = DeviceCohort("run", index, NAMES)
        found = engine.sums(params, cohort, jnp.float32(1.0), jnp.float32(0.5), KEY.fold(index))
        if lie is garbled:
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.update))
    assert [one.survivors for one in outcomes] == [0, DEVICES]
    assert outcomes[0].abandoned and not outcomes[1].abandoned


def test_a_thousand_names_check_in_as_those_that_are_here(
    fleet: tuple[Path, dict[str, Lie]],
) -> None:
    folder, lies = fleet
    lies["now"] = lambda step, honest: honest
    engine = engine_of(folder, [])
    names = [f"d{number}" for number in range(1000)]
    assert engine.ready("another run", 0, names, 60.0) == dict.fromkeys(NAMES, True)
