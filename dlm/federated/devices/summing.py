"""The server's part in one round of secure aggregation, as pure functions. The server sees masked
inputs and, at the end, the inputs' sum. The caller decides how long a step waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeAlias, TypeVar

import numpy as np

from dlm.errors import PrivacyError
from dlm.federated.devices import shamir
from dlm.federated.devices.primitives import KeyPair, Vector, is_signed
from dlm.federated.devices.protocol import (
    Advertisement,
    Consent,
    Consents,
    MaskedInput,
    OpenedShares,
    Roster,
    RoundTerms,
    Shares,
    SharesDelivery,
    Survivors,
    add_mask,
    commitment_of,
    mask_seed,
    places_of,
    survivors_content,
)
from dlm.federated.devices.settings import MOST_DEVICES

Message: TypeAlias = Advertisement | Shares | MaskedInput | Consent | OpenedShares
T = TypeVar("T", bound=Message)
Reply: TypeAlias = Roster | SharesDelivery | Survivors | Consents


class Step(IntEnum):
    """The steps of a round, in order."""

    KEYS = 0
    SHARES = 1
    INPUTS = 2
    CONSENTS = 3
    OPENED = 4
    ENDED = 5


# For each step: the name of the message to devices, and the class of the devices' answer.
ASKED: Mapping[Step, tuple[str, type[Message]]] = {
    Step.KEYS: ("task", Advertisement),
    Step.SHARES: ("roster", Shares),
    Step.INPUTS: ("delivery", MaskedInput),
    Step.CONSENTS: ("survivors", Consent),
    Step.OPENED: ("consents", OpenedShares),
}


_ANY_KEY = KeyPair.of(bytes(32))
_OF_MASKING, _OF_OWN = slice(32), slice(32, None)  # where a commitment has each share's hash


class RoundAbandoned(PrivacyError):
    """A round ended without a sum: too few devices stayed, or a secret could not be recovered."""


@dataclass(frozen=True, slots=True)
class SummingState:
    """The server's state in a step: `heard`, the messages of this step; the roster, shares and
    survivors (U1, U2 and U3); and the total of masked inputs. `goal` inputs are enough."""

    terms: RoundTerms
    goal: int = MOST_DEVICES
    step: Step = Step.KEYS
    heard: Mapping[int, Message] = field(default_factory=dict)
    roster: Mapping[int, Advertisement] = field(default_factory=dict)
    shares: Mapping[int, Shares] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()
    total: tuple[Vector, ...] = ()

    @property
    def expected(self) -> frozenset[int] | None:
        """Devices that may answer in this step; None in the first step, where all may."""
        if self.step is Step.KEYS:
            return None
        of_step = {Step.SHARES: self.roster, Step.INPUTS: self.shares}
        return frozenset(of_step.get(self.step, self.survivors))


def is_enough(state: SummingState) -> bool:
    """Whether a step can end at once: all expected devices answered, or the goal is reached."""
    expected = state.expected
    most = MOST_DEVICES if expected is None else len(expected)
    return len(state.heard) >= (min(most, state.goal) if state.step is Step.INPUTS else most)


def hear(state: SummingState, device: int, message: Message) -> SummingState:
    """Returns the state with one more message; PrivacyError if the message is late, repeated, from
    an unexpected device, or not allowed by the protocol."""
    if state.step is Step.ENDED or not isinstance(message, ASKED[state.step][1]):
        raise PrivacyError(
            f"device {device} sent {type(message).__name__}, which is not expected in step "
            f"{state.step.name.lower()}"
        )
    if device in state.heard:
        raise PrivacyError(f"device {device} sent {type(message).__name__} twice")
    expected = state.expected
    if (expected is not None and device not in expected) or is_enough(state):
        raise PrivacyError(f"device {device} does not take part in this step of the round")
    wrong = _fault(state, device, message)
    if wrong:
        raise PrivacyError(f"device {device}: {wrong}")
    if isinstance(message, MaskedInput):
        state = replace(state, total=_added(state, message))
        message = MaskedInput(())  # the numbers are already in `total`
    return replace(state, heard={**state.heard, device: message})


def go_on(state: SummingState) -> tuple[SummingState, dict[int, Reply]]:
    """Returns the next state and the messages to devices; RoundAbandoned if too few answer."""
    heard, terms = state.heard, state.terms
    if len(heard) < terms.threshold:
        raise RoundAbandoned(
            f"{len(heard)} devices completed the step {state.step.name.lower()}; {terms.threshold} "
            "are needed to continue"
        )
    after = replace(state, step=Step(state.step + 1))
    if state.step is Step.OPENED:
        return after, {}
    after = replace(after, heard={})
    told: dict[int, Reply]
    if state.step is Step.KEYS:
        roster = {device: _of(Advertisement, one) for device, one in heard.items()}
        return replace(after, roster=roster), dict.fromkeys(roster, Roster(roster))
    if state.step is Step.SHARES:
        shares = {device: _of(Shares, one) for device, one in heard.items()}
        told = {
            device: SharesDelivery(
                {u: one.sealed[device] for u, one in shares.items() if u != device}
            )
            for device in shares
        }
        return replace(after, shares=shares), told
    if state.step is Step.INPUTS:
        devices = tuple(sorted(heard))
        return replace(after, survivors=devices), dict.fromkeys(devices, Survivors(devices))
    signatures = {device: _of(Consent, one).signature for device, one in heard.items()}
    return after, dict.fromkeys(signatures, Consents(signatures))


def summed(state: SummingState) -> tuple[tuple[Vector, ...], tuple[int, ...]]:
    """Returns the sum of the survivors' inputs, modulo each segment's modulus, and the survivors;
    RoundAbandoned if too many devices sent wrong shares."""
    assert state.step is Step.ENDED, state.step
    terms, places = state.terms, places_of(state.roster)
    opened = {device: _of(OpenedShares, one) for device, one in state.heard.items()}
    total = [one.copy() for one in state.total]

    def found(device: int, which: slice) -> bytes:
        """Recovers a device's secret from the shares that match the device's commitments."""
        shares, right = {}, state.shares[device].commitments
        for one, sent in opened.items():
            share = {**sent.own, **sent.vanished}.get(device, b"")
            if commitment_of(share) == right[one][which]:
                shares[places[one]] = share
        try:
            return shamir.join(shares, terms.threshold)
        except PrivacyError as exc:
            raise RoundAbandoned(f"device {device}: {exc}") from exc

    for device in state.survivors:
        add_mask(total, found(device, _OF_OWN), terms.segments, -1)
    for device in sorted(set(state.shares) - set(state.survivors)):
        pair = KeyPair.of(found(device, _OF_MASKING))
        if pair.public != state.roster[device].masking:
            raise RoundAbandoned(
                f"device {device} left, and the secret that it had shared does not match its key, "
                "so it does not follow the protocol"
            )
        for other in state.survivors:
            seed = mask_seed(terms, pair, state.roster[other].masking)
            add_mask(total, seed, terms.segments, -1 if other > device else 1)
    return tuple(total), state.survivors


# ------------------------------------------------------------------------------------- checks


def _of(kind: type[T], message: Message) -> T:
    assert isinstance(message, kind)
    return message


def _fault(state: SummingState, device: int, message: Message) -> str:
    terms = state.terms
    if isinstance(message, Advertisement):
        for key in _keys(message):
            _ANY_KEY.agree(key, "check")  # raises for a bad key, which would stop the other devices
        known = None if terms.verifying is None else terms.verifying.get(device, b"")
        content = message.signed_content(terms, device)
        if known is not None and not is_signed(known, message.signature, content):
            return "the keys are not signed with the device's registered key"
        taken = {key for one in state.heard.values() for key in _keys(one)}
        if len({*_keys(message), *taken}) < len(taken) + 2:
            return "the two keys are equal, or another device has one of them"
    elif isinstance(message, Shares):
        if set(message.sealed) != set(state.roster) - {device}:
            return "the message does not have one sealed share for each of the other devices"
        if set(message.commitments) != set(state.roster):
            return "the message does not have one commitment for each device"
        if any(len(s) > 200 for s in (*message.sealed.values(), *message.commitments.values())):
            return "one of the shares or commitments has more than 200 bytes"
    elif isinstance(message, MaskedInput):
        if [len(one) for one in message.segments] != [one.wire_bytes for one in terms.segments]:
            return "the input has the wrong length"
        for segment, one in zip(terms.segments, message.segments, strict=True):
            if np.frombuffer(one, segment.dtype).max() >= segment.modulus:
                return f"the input has numbers outside 0..{segment.modulus - 1}"
    elif isinstance(message, Consent):
        if terms.verifying is not None and not is_signed(
            terms.verifying[device],
            message.signature,
            survivors_content(terms, state.survivors),
        ):
            return "the signature on the list of survivors is not valid"
    elif device not in message.own or not (
        message.own.keys() <= set(state.survivors)
        and message.vanished.keys() <= set(state.shares) - set(state.survivors)
    ):
        return "the message has shares that the server did not ask for"
    return ""


def _keys(message: Message) -> tuple[bytes, ...]:
    return (message.sealing, message.masking) if isinstance(message, Advertisement) else ()


def _added(state: SummingState, message: MaskedInput) -> tuple[Vector, ...]:
    parts = zip(state.terms.segments, message.segments, strict=True)
    sent = [np.frombuffer(one, segment.dtype).astype(np.int64) for segment, one in parts]
    if not state.total:
        return tuple(sent)
    both = zip(state.total, sent, state.terms.segments, strict=True)
    return tuple(np.mod(held + one, segment.modulus) for held, one, segment in both)
