"""A device: it holds one user's text, which never leaves it, and answers a server's steps.

It keeps its own clock of participation (GDP 2.2), and refuses a server that asks too often,
whatever the server claims.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dlm.errors import ConfigError, DlmError, PrivacyError, ProtocolError
from dlm.federated.counting.settings import UnigramConfig
from dlm.federated.counting.unigrams import round_sum, step_bits, steps_per_count
from dlm.federated.devices import device
from dlm.federated.devices.clocks import Clock, Clocks
from dlm.federated.devices.encoding import Encoding, SecureAggregator
from dlm.federated.devices.messages import from_bytes, to_bytes
from dlm.federated.devices.primitives import Draw, Signer, Vector
from dlm.federated.devices.protocol import (
    Consents,
    InputSegment,
    Roster,
    RoundTerms,
    SharesDelivery,
    Survivors,
    answer_content,
)
from dlm.federated.devices.settings import OwnerLimits
from dlm.federated.keys import Key
from dlm.federated.tokens import FIRST_WORD_ID, Ids, check_ids
from dlm.federated.training import rnn
from dlm.federated.training.engine import LocalEngine
from dlm.federated.training.local import LocalConfig, UserWork, work_of
from dlm.federated.users import TOKENIZERS, tokens_of
from dlm.federated.words import RunVocabulary
from dlm.logs import EventLog
from dlm.record.provenance import Provenance

logger = EventLog(__name__)

# Two numbers are sent and added up beside the update: 1 if the update's norm was within the tracked
# norm, otherwise 0; and the user's weight in steps of 2^-30.
STATISTICS = InputSegment(2, 1 << 62)
WEIGHT_STEPS = 1 << 30
MOST_NAME = 200
MOST_STEPS = 1000  # maximum epochs, batch rows and unrolled tokens, so that every task ends
LEFT_OUT = "left-out"  # the step that tells a device that the round goes on without its input


@dataclass(frozen=True, slots=True)
class Task:
    """A server's request to a device in a round, the same for each device except for `me`.

    run, round     name the round; no two rounds share both
    me             the device's number in this round, from 1
    threshold, segments, verifying  see `RoundTerms`
    settings       JSON: `text` (how to read it), `model` (when counting, only `vocab_size`), the
                   least `gap`, the `most` participations promised; for training also `local`,
                   `aggregator` (C, s, m, alpha); for counting `counting` (`UnigramConfig`), `goal`
    parameters     float32, little-endian, one for each leaf of the network
    key            the key of the round's rotation
    """

    run: str
    round: int
    me: int
    threshold: int
    segments: tuple[InputSegment, ...]
    verifying: Mapping[int, bytes] | None
    settings: str
    vocabulary: bytes
    parameters: tuple[bytes, ...] = ()
    bound: float = 0.0
    tracked: float = 0.0
    key: bytes = b""

    @property
    def terms(self) -> RoundTerms:
        """The terms, named by the SHA-256 of everything that the round's devices share. Each device
        computes this name and signs only under it: devices with different tasks refuse each other's
        signatures.

        Raises  ConfigError  the threshold or a segment is out of range
        """
        common = hashlib.sha256(to_bytes(replace(self, me=0))).digest()
        return RoundTerms(common, self.threshold, self.segments, self.verifying)


@dataclass(frozen=True, slots=True)
class ReadinessRequest:
    """Asks a device whether it could take part in a round."""

    run: str
    round: int
    gap: int
    most: int


@dataclass(frozen=True, slots=True)
class Request:
    step: str
    content: bytes


@dataclass(frozen=True, slots=True)
class DeviceAnswer:
    """A device's answer to a request: `error` is why the device refuses, or "" if it does not;
    `signature` signs the content with the device's registered key; it is empty without a key.
    """

    error: str
    content: bytes
    signature: bytes = b""


def segments_of(encoding: Encoding) -> tuple[InputSegment, ...]:
    return InputSegment(encoding.padded, encoding.modulus), STATISTICS


def counts_segment(config: UnigramConfig, words: int, goal: int) -> InputSegment:
    """Returns the segment of word counts in steps. ConfigError unless lambda is finite, since it
    limits the sum of one device's counts to 2^step_bits steps."""
    if math.isinf(config.clip):
        raise ConfigError(
            f"lambda is {config.clip}; expected a finite value, since it bounds what devices send"
        )
    return InputSegment(words, (goal << step_bits(config)) + 1)


@dataclass(frozen=True)
class _InRound:
    task: Task
    state: device.DeviceState
    clock: Clock
    read: Callable[[], Sequence[Ids]]
    compute: Callable[[Sequence[Ids]], tuple[Vector, ...]]


class _Captured(SecureAggregator):
    """Aggregates one device's update, at the device's place in the round, and keeps the result.

    A device computes as `LocalEngine` does, but draws its own rounding: a server that knew the key
    of the rounding could undo it, and read one device's numbers from a sum.
    """

    place = 0
    rounding: Key
    encoded: Vector

    def _rounding(self, key: Key, place: int) -> Key:
        return self.rounding

    def zero(self, template: Any, bound: float | None = None) -> Any:
        return replace(super().zero(template, bound), place=self.place)

    def add(self, total: Any, updates: Any, key: Any) -> Any:
        found = super().add(total, updates, key)
        assert found.total is not None
        self.encoded = found.total
        return found

    def result(self, total: Any, reports: int) -> Any:
        del total, reports


# The segments of a task's input, and the function that computes the input from a text.
Work: TypeAlias = tuple[tuple[InputSegment, ...], Callable[[Sequence[Ids]], tuple[Vector, ...]]]
# Checks a task before any text is read, and returns a function that reads the utterances.
TextOf: TypeAlias = Callable[[Task], Callable[[], Sequence[Ids]]]


class DeviceText:
    """One user's utterances, one per line of a file; ConfigError if the file cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._utterances = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the text {path} cannot be read: {exc}") from exc

    def __call__(self, task: Task) -> Callable[[], list[Ids]]:
        """Returns a function that reads the text for a task; ProtocolError if the sizes of
        the vocabulary and the network differ."""
        given = json.loads(task.settings)
        vocabulary = RunVocabulary.from_bytes(task.vocabulary, Provenance.none("a server sent it"))
        if vocabulary.size != given["model"]["vocab_size"]:
            raise ProtocolError(
                f"the vocabulary has {vocabulary.size} ids, but the network has "
                f"{given['model']['vocab_size']}"
            )
        split, cap = TOKENIZERS[given["text"]["tokenizer"]], int(given["text"]["max_tokens"])
        return partial(tokens_of, self._utterances, vocabulary.encoder(), cap=cap, split=split)


class Participant:
    """A device that answers a server's requests.

    Args
        allowed  the limits that the device's owner sets, whatever a server promises
        registered  keys of the devices that may take part; if None, there are no keys, and a server
                that lies about who sent what can open a single input
        signer  the registered key of this device; None if the device has no key
        order, rounding  return the random source that orders the text, and a task's rounding key
    """

    def __init__(
        self,
        text: TextOf,
        clocks: Clocks,
        allowed: OwnerLimits,
        registered: frozenset[bytes] | None,
        signer: Signer | None,
        draw: Draw,
        order: Callable[[], np.random.Generator] = np.random.default_rng,
        rounding: Callable[[Task], Key] = lambda task: Key.from_system(),
    ) -> None:
        self._text, self._clocks, self._signer, self._draw = text, clocks, signer, draw
        self._allowed, self._registered, self._order = allowed, registered, order
        self._rounding = rounding
        self._in_round: _InRound | None = None
        self._engines: dict[str, tuple[LocalEngine, _Captured]] = {}

    def answer(self, data: bytes) -> bytes:
        """Answers the bytes of a `Request` with those of a `DeviceAnswer`."""
        try:
            request = from_bytes(Request, data)
            if request.step == "check-in":
                asked = from_bytes(ReadinessRequest, request.content)
                self._clock(asked.run, asked.round, asked.gap, asked.most)
                return to_bytes(DeviceAnswer("", b""))
            if request.step == "task":
                said = self._begin(from_bytes(Task, request.content))
            else:
                try:
                    said = self._go_on(request)
                except Exception:
                    # Otherwise a second try of the step could count as another participation.
                    self._in_round = None
                    raise
        except DlmError as exc:
            return to_bytes(DeviceAnswer(f"{type(exc).__name__}: {exc}", b""))
        except Exception as exc:  # noqa: BLE001 - the device outlives whatever a server sends
            return to_bytes(DeviceAnswer(f"the task is malformed: {exc!r}", b""))
        content = to_bytes(said)
        return to_bytes(DeviceAnswer("", content, self._signature(request.step, content)))

    def _signature(self, step: str, content: bytes) -> bytes:
        if self._in_round is None or self._signer is None:
            return b""
        state = self._in_round.state
        return self._signer.sign(answer_content(state.terms, state.me, step, content))

    def _begin(self, task: Task) -> Any:
        given = json.loads(task.settings)
        self._check(task)
        clock = self._clock(task.run, task.round, int(given["gap"]), int(given["most"]))
        begin = self._counting if "counting" in given else self._training
        segments, compute = begin(task, given)
        if task.segments != segments:
            raise ProtocolError(
                "the task does not have the segments that its settings need; run the same version "
                "of dlm on the server and the device"
            )
        read = self._text(task)
        state, said = device.advertise(task.terms, task.me, self._signer, self._draw)
        self._in_round = _InRound(task, state, clock, read, compute)
        return said

    def _clock(self, run: str, index: int, gap: int, most: int) -> Clock:
        return self._clocks.after(run, index, gap, most, self._allowed)

    def _check(self, task: Task) -> None:
        """Raises ProtocolError or PrivacyError if the task could come from a dishonest server."""
        verifying, registered = task.verifying, self._registered
        if not all(map(math.isfinite, (task.bound, task.tracked))):
            raise ProtocolError("a clip norm of the task is not finite")
        if len(task.run) > MOST_NAME:
            raise ProtocolError(
                f"the run's name has {len(task.run)} characters; expected at most {MOST_NAME}"
            )
        if (registered is None) != (verifying is None):
            raise PrivacyError(
                "either the task or this device lacks registered keys; give this device the "
                "server's list (--devices)"
            )
        if registered is not None and verifying is not None:
            own = None if self._signer is None else self._signer.public
            known = registered.intersection(verifying.values())
            if len(known) < len(verifying) or verifying.get(task.me) != own:
                raise PrivacyError(
                    f"the task has {len(known)} registered keys for {len(verifying)} devices; "
                    "expected a separate key for each device, and for this device its own. "
                    "Give this device the server's list (--devices)"
                )

    def _go_on(self, request: Request) -> Any:
        now = self._in_round
        if now is None:
            raise ProtocolError(
                f"the step {request.step!r} was requested before a task; a device that restarts "
                "during a round takes part again in the next round"
            )
        content = request.content
        if request.step == LEFT_OUT:
            self._in_round = None
            logger.info("federated.update.left_out", extra={"round": now.task.round})
            return None
        if request.step == "roster":
            roster = from_bytes(Roster, content)
            if len(roster.advertisements) < self._allowed.least_devices:
                raise PrivacyError(
                    f"{len(roster.advertisements)} devices take part; the owner of this device "
                    f"requires {self._allowed.least_devices} or more"
                )
            state, said = device.share(now.state, roster, self._draw)
        elif request.step == "delivery":
            delivery = from_bytes(SharesDelivery, content)
            now.state.after(device.MASKED)  # raises before anything is counted or computed
            state, said = device.mask(now.state, delivery, self._inputs(now))  # type: ignore[assignment]
            # The round counts even if the reply is lost, so record it before the input leaves.
            self._clocks.set(now.task.run, now.clock)
        elif request.step == "survivors":
            state, said = device.consent(now.state, from_bytes(Survivors, content))  # type: ignore[assignment]
        elif request.step == "consents":
            state, said = device.open_shares(now.state, from_bytes(Consents, content))  # type: ignore[assignment]
        else:
            raise ProtocolError(f"{request.step!r} is not a step of a round")
        self._in_round = replace(now, state=state)
        return said

    def _inputs(self, now: _InRound) -> tuple[Vector, ...]:
        """Returns the device's input. If the text causes an error, the input is that of an empty
        text, since the error would tell the server something about what the user wrote."""
        try:
            inputs = now.compute(now.read())
            device.check_inputs(now.task.segments, inputs)
            return inputs
        except Exception as exc:  # noqa: BLE001 - see above
            logger.warning("federated.update.emptied", extra={"error": type(exc).__name__})
            return now.compute([])

    def _training(self, task: Task, given: dict[str, Any]) -> Work:
        model, local = rnn.RnnConfig(**given["model"]), LocalConfig(**given["local"])
        if max(local.epochs, local.unroll, local.batch_size) > MOST_STEPS:
            raise PrivacyError(
                f"the task has {local.epochs} epochs, a batch size of {local.batch_size} and an "
                f"unroll of {local.unroll}; a device accepts at most {MOST_STEPS} for each of these"
            )
        params = params_of(model, task.parameters)
        if task.settings not in self._engines:  # keeps one engine, compiled once
            captured = _Captured(**given["aggregator"])
            engine = LocalEngine(model, local, aggregator=captured)
            self._engines = {task.settings: (engine, captured)}
        engine, captured = self._engines[task.settings]

        def update(text: Sequence[Ids]) -> tuple[Vector, ...]:
            check_ids(text, model.vocab_size)
            work: UserWork = work_of(text, local, self._order())
            captured.place, captured.rounding = task.me - 1, self._rounding(task)
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

        return segments_of(captured.encoding(rnn.parameter_count(params))), update

    def _counting(self, task: Task, given: dict[str, Any]) -> Work:
        """Returns the segment of word counts, and a function that counts as `dlm unigrams` does."""
        config, ids = UnigramConfig(**given["counting"]), given["model"]["vocab_size"]
        segment = counts_segment(config, ids - FIRST_WORD_ID, given["goal"])

        def counts(text: Sequence[Ids]) -> tuple[Vector, ...]:
            check_ids(text, ids)
            found = np.bincount(np.concatenate([[0], *text]), minlength=ids)[FIRST_WORD_ID:]
            places = np.flatnonzero(found)
            user = places, found[places].astype(np.float64)
            summed = round_sum([user], config.clip, segment.size, bits=step_bits(config))
            return ((summed * steps_per_count(config)).astype(np.int64),)

        return (segment,), counts


def params_of(model: rnn.RnnConfig, leaves: Sequence[bytes]) -> rnn.Params:
    """The network's parameters; ProtocolError if leaves do not fit `model`, or are not finite."""
    template = jax.eval_shape(lambda: rnn.init(jax.random.key(0), model))
    wanted, kind = jax.tree.flatten(template)
    if [len(one) for one in leaves] != [4 * int(np.prod(one.shape)) for one in wanted]:
        raise ProtocolError(
            "the shapes of the task's parameters differ from those of the network in its settings; "
            "run the same version of dlm on the server and the device"
        )
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
