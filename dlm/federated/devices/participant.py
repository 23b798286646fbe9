"""A device: it holds one user's text, which never leaves it, and answers a server's steps.

It keeps its own clock of participation (GDP 2.2): a server that asks too often is refused, whatever
it says of itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dlm.errors import DlmError, PrivacyError, ProtocolError
from dlm.federated import rnn
from dlm.federated.devices import device
from dlm.federated.devices.messages import from_bytes, to_bytes
from dlm.federated.devices.primitives import Draw, Signer, Vector
from dlm.federated.devices.protocol import (
    Consents,
    Delivery,
    Roster,
    RoundTerms,
    Segment,
    Survivors,
)
from dlm.federated.engine import LocalEngine
from dlm.federated.keys import Key
from dlm.federated.local import LocalConfig, UserWork, work_of
from dlm.federated.secagg import Encoding, SecureAggregator
from dlm.federated.tokens import Ids, check_ids
from dlm.files import write_whole

# Beside the update, added up in the same way: whether its norm was within the tracked one, and the
# user's weight in steps of 2^-30.
STATISTICS = Segment(2, 1 << 62)
WEIGHT_STEPS = 1 << 30


@dataclass(frozen=True, slots=True)
class Task:
    """What a server asks of a device in a round.

    run, round     name the round; with `name` of the terms, no two are alike
    me             the device's number in this round;  place  its place in the cohort
    settings       JSON: `model`, `local`, `aggregator` (C, s, m, alpha), and the least `gap` and the
                   `most` participations that the server promises
    parameters     float32, little-endian, one for each leaf of the network
    key            of the round's rotation and rounding
    """

    run: str
    round: int
    me: int
    place: int
    terms: RoundTerms
    settings: str
    parameters: tuple[bytes, ...]
    bound: float
    tracked: float
    key: bytes


@dataclass(frozen=True, slots=True)
class Request:
    step: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """error  why the device refuses; "" if it does not"""

    error: str
    content: bytes


def segments_of(encoding: Encoding) -> tuple[Segment, ...]:
    return Segment(encoding.padded, encoding.modulus), STATISTICS


@dataclass(frozen=True, slots=True)
class Clock:
    """When a device took part in a run: the last round (-1: never), and how often."""

    last: int = -1
    count: int = 0

    def after(self, round: int, gap: int, most: int) -> Clock:  # noqa: A002
        """The clock once it has taken part; PrivacyError if it may not."""
        if round <= self.last:
            raise PrivacyError(f"round {round} is asked for after round {self.last}")
        if self.last >= 0 and round - self.last < gap:
            raise PrivacyError(
                f"round {round} is asked for {round - self.last} rounds after the last one of this "
                f"device; expected {gap} or more"
            )
        if self.count >= most:
            raise PrivacyError(f"this device took part {self.count} times; expected at most {most}")
        return Clock(round, self.count + 1)


class Clocks:
    """The clocks of all runs, in a file that is written before an input leaves the device."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self._of = {run: Clock(**one) for run, one in found.items()}

    def of(self, run: str) -> Clock:
        return self._of.get(run, Clock())

    def set(self, run: str, clock: Clock) -> None:
        after = {**self._of, run: clock}
        content = {name: {"last": one.last, "count": one.count} for name, one in after.items()}
        write_whole(self._path, json.dumps(content, indent=1).encode(), mode=0o600)
        self._of = after


@dataclass(frozen=True)
class _InRound:
    task: Task
    state: device.DeviceState
    aggregator: SecureAggregator
    clock: Clock


class _Captured:
    """The aggregator of one device: its encoded update stays as it is.

    As `Aggregator`, so that a device computes as `LocalEngine` does, bit for bit.
    """

    def __init__(self, inner: SecureAggregator) -> None:
        self._inner, self.place = inner, 0
        self.encoded: Vector = np.zeros(0, np.int64)

    def zero(self, template: Any, bound: float | None = None) -> Any:
        return replace(self._inner.zero(template, bound), reports=self.place)

    def add(self, total: Any, updates: Any, key: Any) -> Any:
        found = self._inner.add(total, updates, key)
        self.encoded = found.total
        return found

    def result(self, total: Any, reports: int) -> Any:
        del total, reports

    def sensitivity_factor(self, dimension: int) -> float:
        return self._inner.sensitivity_factor(dimension)


Encode: TypeAlias = Callable[[int], Sequence[Ids]]


class Participant:
    """One device.

    Args
        text    (size of the vocabulary) -> the ids of each utterance
        clocks  of this device
        signer  its registered key; None without
        draw    random bytes
        order   of the text in a round; drawn if None
    """

    def __init__(
        self,
        text: Encode,
        clocks: Clocks,
        signer: Signer | None,
        draw: Draw,
        order: Callable[[], np.random.Generator] = np.random.default_rng,
    ) -> None:
        self._text, self._clocks, self._signer, self._draw = text, clocks, signer, draw
        self._order = order
        self._in_round: _InRound | None = None
        self._engines: dict[str, tuple[LocalEngine, _Captured]] = {}

    def answer(self, data: bytes) -> bytes:
        """To the bytes of a `Request`, those of an `Answer`."""
        try:
            request = from_bytes(Request, data)
            if request.step == "task":
                said = self._begin(from_bytes(Task, request.content))
            else:
                said = self._go_on(request)
        except DlmError as exc:
            return to_bytes(Answer(f"{type(exc).__name__}: {exc}", b""))
        return to_bytes(Answer("", to_bytes(said)))

    def _begin(self, task: Task) -> Any:
        given = json.loads(task.settings)
        gap, most = int(given["gap"]), int(given["most"])
        clock = self._clocks.of(task.run).after(task.round, gap, most)
        aggregator = SecureAggregator(**given["aggregator"])
        state, said = device.advertise(task.terms, task.me, self._signer, self._draw)
        self._in_round = _InRound(task, state, aggregator, clock)
        return said

    def _go_on(self, request: Request) -> Any:
        now = self._in_round
        if now is None:
            raise ProtocolError(f"the step {request.step!r} is asked for before a task")
        content = request.content
        if request.step == "roster":
            state, said = device.share(now.state, from_bytes(Roster, content), self._draw)
        elif request.step == "delivery":
            delivery = from_bytes(Delivery, content)
            # Before anything leaves: an input counts even if its reply is lost.
            self._clocks.set(now.task.run, now.clock)
            state, said = device.mask(now.state, delivery, self._inputs(now))  # type: ignore[assignment]
        elif request.step == "survivors":
            state, said = device.consent(now.state, from_bytes(Survivors, content))  # type: ignore[assignment]
        elif request.step == "consents":
            state, said = device.open_shares(now.state, from_bytes(Consents, content))  # type: ignore[assignment]
        else:
            raise ProtocolError(f"{request.step!r} is no step of a round")
        self._in_round = replace(now, state=state)
        return said

    def _inputs(self, now: _InRound) -> tuple[Vector, Vector]:
        task = now.task
        given = json.loads(task.settings)
        local = LocalConfig(**given["local"])
        model = rnn.RnnConfig(**given["model"])
        engine, captured = self._engine(task.settings, model, local, now.aggregator)
        captured.place = task.place
        params = params_of(model, task.parameters)
        text = self._text(model.vocab_size)
        check_ids(text, model.vocab_size)
        work: UserWork = work_of(text, local, self._order())
        sums = engine.sums(
            params,
            [work],
            jnp.float32(task.bound),
            jnp.float32(task.tracked),
            Key.given(task.key),
        )
        below = int(float(sums.below) > 0)
        statistics = np.array([below, round(work.weight * WEIGHT_STEPS)], np.int64)
        return captured.encoded, statistics

    def _engine(
        self,
        settings: str,
        model: rnn.RnnConfig,
        local: LocalConfig,
        aggregator: SecureAggregator,
    ) -> tuple[LocalEngine, _Captured]:
        """One per settings: its functions are compiled once."""
        if settings not in self._engines:
            captured = _Captured(aggregator)
            engine = LocalEngine(model, local, aggregator=captured)
            self._engines = {settings: (engine, captured)}
        return self._engines[settings]


def params_of(model: rnn.RnnConfig, leaves: Sequence[bytes]) -> rnn.Params:
    """The network of these leaves.

    Raises  ProtocolError  they are of another network, or not finite
    """
    template = jax.eval_shape(lambda: rnn.init(jax.random.key(0), model))
    wanted, kind = jax.tree.flatten(template)
    if [len(one) for one in leaves] != [4 * int(np.prod(one.shape)) for one in wanted]:
        raise ProtocolError("the parameters are not of the network of the task")
    found = [
        np.frombuffer(one, "<f4").reshape(want.shape).astype(np.float32)
        for one, want in zip(leaves, wanted, strict=True)
    ]
    if not all(np.isfinite(one).all() for one in found):
        raise ProtocolError("the parameters of the task are not finite")
    params: rnn.Params = jax.tree.unflatten(kind, found)
    return params


def leaves_of(params: rnn.Params) -> tuple[bytes, ...]:
    return tuple(np.asarray(one, "<f4").tobytes() for one in jax.tree.leaves(params))
