"""Rounds on devices that a network reaches, behind the seam `Engine`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from dlm.errors import DlmError, ProtocolError
from dlm.federated import rnn
from dlm.federated.clip import Array
from dlm.federated.devices import summing
from dlm.federated.devices.messages import from_bytes, to_bytes
from dlm.federated.devices.participant import (
    WEIGHT_STEPS,
    Answer,
    Request,
    Task,
    leaves_of,
    segments_of,
)
from dlm.federated.devices.protocol import (
    Advertisement,
    Consent,
    MaskedInput,
    Opened,
    RoundTerms,
    Shares,
    least_threshold,
)
from dlm.federated.devices.summing import RoundAbandoned, Step, SummingState
from dlm.federated.engine import RoundSums
from dlm.federated.keys import Key
from dlm.federated.local import LocalConfig
from dlm.federated.secagg import SecureAggregator

# What devices are sent after each step, and the class of what they answer.
_STEPS: Mapping[Step, tuple[str, type[summing.Message]]] = {
    Step.KEYS: ("task", Advertisement),
    Step.SHARES: ("roster", Shares),
    Step.INPUTS: ("delivery", MaskedInput),
    Step.CONSENTS: ("survivors", Consent),
    Step.OPENED: ("consents", Opened),
}


class Network(Protocol):
    """Reaches devices by their pseudonyms."""

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], None],
        timeout_s: float,
    ) -> None:
        """Sends each device its request, and tells `hear` each answer as it comes, on the caller's
        thread, until all have answered or the time is over."""
        ...


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round came to: devices asked, survivors, what each refused device was told or said,
    and why the round was abandoned ("" if not)."""

    asked: int
    survivors: int
    faults: Mapping[str, str]
    abandoned: str = ""


class DevicesEngine:
    """Computes a round's sums on devices, by secure aggregation.

    Args
        network     reaches the devices
        keys        pseudonym -> registered key for signatures; None: no keys were registered
        gap, most   participations that devices enforce, too
        step_s      seconds that devices have for each step
        on_outcome  is told how each round ended
    """

    def __init__(
        self,
        model: rnn.RnnConfig,
        local: LocalConfig,
        aggregator: SecureAggregator,
        network: Network,
        *,
        run: str,
        keys: Mapping[str, bytes] | None,
        gap: int,
        most: int,
        step_s: float,
        on_outcome: Callable[[RoundOutcome], None] = lambda outcome: None,
    ) -> None:
        self._model, self._aggregator, self._network = model, aggregator, network
        self._run, self._keys, self._step_s = run, keys, step_s
        self._on_outcome = on_outcome
        self._settings = json.dumps(
            {
                "model": asdict(model),
                "local": asdict(local),
                "aggregator": {
                    "clip_norm": aggregator.clip_norm,
                    "scale": aggregator.scale,
                    "report_goal": aggregator.report_goal,
                    "alpha": aggregator.alpha,
                },
                "gap": gap,
                "most": most,
            }
        )

    @property
    def aggregator(self) -> SecureAggregator:
        return self._aggregator

    def sensitivity_factor(self, dimension: int) -> float:
        return self._aggregator.sensitivity_factor(dimension)

    def sums(
        self,
        params: rnn.Params,
        cohort: Sequence[str],
        bound: Array,
        tracked: Array,
        key: Key,
        round_index: int = 0,
    ) -> RoundSums:
        """As of `Engine`, of pseudonyms. If a round is abandoned, its sums are of nobody: the noise
        of its release hides nothing then, and whoever took part is in the ledger."""
        total = self._aggregator.zero(params, float(bound))
        encoding = total.encoding
        numbers = {name: number for number, name in enumerate(cohort, 1)}
        names = {number: name for name, number in numbers.items()}
        signed = self._keys is not None
        terms = RoundTerms(
            f"{self._run}/{round_index}".encode(),
            least_threshold(len(cohort), active=signed),
            segments_of(encoding),
            None if self._keys is None else {numbers[n]: self._keys[n] for n in cohort},
        )
        state = SummingState(terms)
        leaves = leaves_of(params)
        said: dict[int, Any] = {
            number: Task(
                self._run,
                round_index,
                number,
                number - 1,
                terms,
                self._settings,
                leaves,
                float(bound),
                float(tracked),
                key.shared(),
            )
            for number in numbers.values()
        }
        faults: dict[str, str] = {}
        try:
            while state.step is not Step.ENDED:
                state = self._heard(state, said, names, faults)
                state, replies = summing.go_on(state)
                said = dict(replies)
            vectors, survivors = summing.summed(state)
        except RoundAbandoned as exc:
            self._on_outcome(RoundOutcome(len(cohort), 0, faults, str(exc)))
            return self._result(params, total, None, (), key)
        self._on_outcome(RoundOutcome(len(cohort), len(survivors), faults))
        return self._result(params, total, vectors, survivors, key)

    def _heard(
        self,
        state: SummingState,
        said: Mapping[int, Any],
        names: Mapping[int, str],
        faults: dict[str, str],
    ) -> SummingState:
        """The state after the answers to one step."""
        step, kind = _STEPS[state.step]
        numbers = {names[number]: number for number in said}
        now = state

        def hear(name: str, data: bytes) -> None:
            nonlocal now
            if name not in numbers:
                return
            try:
                answer = from_bytes(Answer, data)
                if answer.error:
                    raise ProtocolError(f"it refuses: {answer.error[:500]}")
                now = summing.hear(now, numbers[name], from_bytes(kind, answer.content))
            except DlmError as exc:
                faults[name] = str(exc)

        requests = {
            names[number]: to_bytes(Request(step, to_bytes(one))) for number, one in said.items()
        }
        self._network.ask(requests, hear, self._step_s)
        return now

    def _result(
        self,
        params: rnn.Params,
        total: Any,
        vectors: Sequence[Any] | None,
        survivors: Sequence[int],
        key: Key,
    ) -> RoundSums:
        reports, zero = len(survivors), jnp.float32(0.0)
        below, weight = 0.0, 0.0
        if vectors is not None:
            total = self._aggregator.summed(total, vectors[0], reports, key)
            counted = np.asarray(vectors[1])
            # A device that lies may say anything here; more than all devices together it may not.
            below = float(min(counted[0], reports)) - reports / 2
            weight = float(min(counted[1], reports * WEIGHT_STEPS)) / WEIGHT_STEPS
        update = self._aggregator.result(total, reports)
        return RoundSums(
            update, jnp.float32(below), weight, jnp.float32(reports), zero, zero, zero, zero
        )
