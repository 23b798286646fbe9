"""Runs rounds on devices that a network reaches, behind the interface `Engine`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from dlm.errors import DlmError, ProtocolError
from dlm.federated.devices import summing
from dlm.federated.devices.encoding import SecureAggregator
from dlm.federated.devices.messages import from_bytes, to_bytes
from dlm.federated.devices.participant import (
    LEFT_OUT,
    WEIGHT_STEPS,
    DeviceAnswer,
    ReadinessRequest,
    Request,
    Task,
    leaves_of,
    segments_of,
)
from dlm.federated.devices.primitives import Vector, is_signed
from dlm.federated.devices.protocol import InputSegment, answer_content, least_threshold
from dlm.federated.devices.summing import RoundAbandoned, Step, SummingState
from dlm.federated.keys import Key
from dlm.federated.report.checklist import REGISTERED, UNREGISTERED
from dlm.federated.training import rnn
from dlm.federated.training.clip import Array
from dlm.federated.training.engine import RoundSums
from dlm.federated.training.local import LocalConfig

_TOLD = to_bytes(Request(LEFT_OUT, b""))  # the round continues without the device's input
# An answer without an input has at most `_HEADER` bytes, and `_PER_DEVICE` more for each device.
_HEADER = 1 << 16
_PER_DEVICE = 1024


class Network(Protocol):
    """Reaches devices by their pseudonyms."""

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        """Sends each device its request, and passes each answer of up to `most_bytes` to `hear` on
        the caller's thread as the answer arrives. Ends when all devices have answered, `timeout_s`
        has passed, or `hear` returns true."""
        ...


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The outcome of a round: the numbers of devices asked and of survivors, the fault of each
    device that failed, and why the round was abandoned ("" if it was not)."""

    asked: int
    survivors: int
    faults: Mapping[str, str]
    abandoned: str = ""


@dataclass(frozen=True, slots=True)
class DeviceCohort:
    """The devices asked to join a round of a run."""

    run: str
    index: int
    names: Sequence[str]


class DeviceRounds:
    """Adds up what devices compute in a round, by secure aggregation.

    Args
        keys        pseudonym -> registered key for signatures; None if no keys were registered
        gap, most   limits of participation that devices also enforce
        step_s      seconds that devices have for each step
        on_outcome  function that is called with each round's outcome
    """

    def __init__(
        self,
        network: Network,
        *,
        keys: Mapping[str, bytes] | None,
        gap: int,
        most: int,
        step_s: float,
        on_outcome: Callable[[RoundOutcome], None] = lambda outcome: None,
    ) -> None:
        self._network, self._keys, self._step_s = network, keys, step_s
        self._gap, self._most, self._on_outcome = gap, most, on_outcome

    @property
    def protocol(self) -> str:
        return UNREGISTERED if self._keys is None else REGISTERED

    def ready(
        self, run: str, index: int, names: Iterable[str], timeout_s: float
    ) -> dict[str, bool]:
        """Returns, for each device that answers, whether its clock lets it take part in a round."""
        asked = to_bytes(
            Request("check-in", to_bytes(ReadinessRequest(run, index, self._gap, self._most)))
        )
        found: dict[str, bool] = {}

        def hear(name: str, data: bytes) -> bool:
            with suppress(DlmError):
                found[name] = not from_bytes(DeviceAnswer, data).error
            return False

        self._network.ask(dict.fromkeys(names, asked), hear, timeout_s, _HEADER)
        return found

    def summed(
        self,
        cohort: DeviceCohort,
        segments: tuple[InputSegment, ...],
        goal: int,
        settings: Mapping[str, Any],
        vocabulary: bytes,
        *asked: Any,
    ) -> tuple[Sequence[Vector], Sequence[int]]:
        """Returns the sum of each segment over at most `goal` inputs, and the devices that sent
        these inputs; both are empty if the round is abandoned."""
        said_of_all = json.dumps({**settings, "gap": self._gap, "most": self._most})
        numbers = {name: number for number, name in enumerate(cohort.names, 1)}
        names = {number: name for name, number in numbers.items()}
        signed = self._keys is not None
        task = Task(
            cohort.run,
            cohort.index,
            0,
            least_threshold(len(numbers), active=signed),
            segments,
            None if self._keys is None else {numbers[n]: self._keys[n] for n in numbers},
            said_of_all,
            vocabulary,
            *asked,
        )
        state = SummingState(task.terms, goal)
        said: dict[int, Any] = {number: replace(task, me=number) for number in numbers.values()}
        faults: dict[str, str] = {}
        try:
            while state.step is not Step.ENDED:
                state = self._heard(state, said, names, faults)
                state, replies = summing.go_on(state)
                said = dict(replies)
            vectors, survivors = summing.summed(state)
        except RoundAbandoned as exc:
            self._on_outcome(RoundOutcome(len(numbers), 0, faults, str(exc)))
            return (), ()
        self._on_outcome(RoundOutcome(len(numbers), len(survivors), faults))
        return vectors, survivors

    def _heard(
        self,
        state: SummingState,
        said: Mapping[int, Any],
        names: Mapping[int, str],
        faults: dict[str, str],
    ) -> SummingState:
        step, kind = summing.ASKED[state.step]
        numbers = {names[number]: number for number in said}
        terms, keys = state.terms, state.terms.verifying
        now = state

        def hear(name: str, data: bytes) -> bool:
            nonlocal now
            if name not in numbers or summing.is_enough(now):
                return summing.is_enough(now)
            try:
                answer = from_bytes(DeviceAnswer, data)
                if answer.error:
                    raise ProtocolError(f"the device refused the request: {answer.error[:500]!r}")
                number = numbers[name]
                signed = answer_content(terms, number, step, answer.content)
                if keys is not None and not is_signed(keys[number], answer.signature, signed):
                    raise ProtocolError(
                        f"the answer to {step} is not signed for this task with the registered key"
                    )
                now = summing.hear(now, number, from_bytes(kind, answer.content))
            except DlmError as exc:
                faults[name] = str(exc)
            return summing.is_enough(now)

        requests = {
            names[number]: to_bytes(Request(step, to_bytes(one))) for number, one in said.items()
        }
        if state.step is Step.CONSENTS:
            left_out = set(state.shares) - set(state.survivors)
            requests |= dict.fromkeys(map(names.__getitem__, left_out), _TOLD)
        most = _HEADER + _PER_DEVICE * len(numbers)
        if state.step is Step.INPUTS:
            most += sum(one.wire_bytes for one in state.terms.segments)
        begun_s = time.monotonic()
        self._network.ask(requests, hear, self._step_s, most)
        is_over = time.monotonic() - begun_s >= self._step_s
        why = f" in {self._step_s:g} s" if is_over else ": the device stopped, or cannot be reached"
        for number in said:
            if number not in now.heard and not summing.is_enough(now):
                faults.setdefault(names[number], f"no answer to {step}{why}")
        return now


class DevicesEngine(DeviceRounds):
    """Computes a round's sums on devices, which receive the vocabulary and the settings for
    reading their text."""

    def __init__(
        self,
        model: rnn.RnnConfig,
        local: LocalConfig,
        aggregator: SecureAggregator,
        network: Network,
        *,
        vocabulary: bytes,
        text: Mapping[str, Any],
        **given: Any,
    ) -> None:
        super().__init__(network, **given)
        self._aggregator, self._vocabulary = aggregator, vocabulary
        self._settings = {
            "model": asdict(model),
            "local": asdict(local),
            "aggregator": {
                "clip_norm": aggregator.clip_norm,
                "scale": aggregator.scale,
                "report_goal": aggregator.report_goal,
                "alpha": aggregator.alpha,
            },
            "text": dict(text),
        }

    @property
    def aggregator(self) -> SecureAggregator:
        return self._aggregator

    def sensitivity_factor(self, dimension: int) -> float:
        return self._aggregator.sensitivity_factor(dimension)

    def sums(
        self,
        params: rnn.Params,
        cohort: DeviceCohort,
        bound: Array,
        tracked: Array,
        key: Key,
    ) -> RoundSums:
        """Computes the same as `Engine.sums`. If a round is abandoned, its sums are 0, so the
        release is only noise; the ledger still lists the devices that took part."""
        total = self._aggregator.zero(params, float(bound))
        vectors, survivors = self.summed(
            cohort,
            segments_of(total.encoding),
            self._aggregator.report_goal,
            self._settings,
            self._vocabulary,
            leaves_of(params),
            float(bound),
            float(tracked),
            key.shared(),
        )
        reports, zero = len(survivors), jnp.float32(0.0)
        below, weight = 0.0, 0.0
        if vectors:
            total = self._aggregator.summed(total, vectors[0], reports, key)
            counted = np.asarray(vectors[1])
            # A dishonest device may report any number here, so each sum is limited to the largest
            # that honest devices could reach together.
            below = float(min(counted[0], reports)) - reports / 2
            weight = float(min(counted[1], reports * WEIGHT_STEPS)) / WEIGHT_STEPS
        update = self._aggregator.result(total, reports)
        return RoundSums(
            update, jnp.float32(below), weight, jnp.float32(reports), zero, zero, zero, zero
        )
