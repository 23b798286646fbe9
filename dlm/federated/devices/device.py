"""One device in one round of secure aggregation: each step takes a state and a message, and returns
the next state and the message to send. Apart from random draws, the steps are pure functions.

A step taken twice, or out of order, is refused: a device that answered the last step for two sets
of survivors would open its neighbours' inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dlm.errors import PrivacyError
from dlm.federated.devices import shamir
from dlm.federated.devices.primitives import (
    SECRET_BYTES,
    Draw,
    KeyPair,
    Signer,
    Vector,
    is_signed,
    seal,
    unseal,
)
from dlm.federated.devices.protocol import (
    Advertisement,
    Consent,
    Consents,
    InputSegment,
    MaskedInput,
    OpenedShares,
    Roster,
    RoundTerms,
    Shares,
    SharesDelivery,
    Survivors,
    add_mask,
    commitment_of,
    least_threshold,
    mask_seed,
    places_of,
    sealed_about,
    survivors_content,
)
from dlm.federated.devices.settings import MOST_DEVICES

ADVERTISED, SHARED, MASKED, CONSENTED, ENDED = range(1, 6)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device's state after `step`: the roster (U1), the shares that other devices (U2) sealed for
    it, and the survivors (U3). The device's secrets leave it only as sealed shares."""

    terms: RoundTerms
    me: int
    signer: Signer | None = field(repr=False)
    sealing: KeyPair = field(repr=False)
    masking: KeyPair = field(repr=False)
    own_seed: bytes = field(repr=False)
    step: int = ADVERTISED
    roster: Mapping[int, Advertisement] = field(default_factory=dict)
    own_share: bytes = field(default=b"", repr=False)
    shares: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    survivors: tuple[int, ...] = ()

    def after(self, step: int) -> DeviceState:
        if self.step != step - 1:
            raise PrivacyError(
                f"the server asks device {self.me} for step {step} after step {self.step}; each "
                "step of a round happens once, in order"
            )
        return replace(self, step=step)


def advertise(
    terms: RoundTerms, me: int, signer: Signer | None, draw: Draw
) -> tuple[DeviceState, Advertisement]:
    state = DeviceState(
        terms, me, signer, KeyPair.drawn(draw), KeyPair.drawn(draw), draw(SECRET_BYTES)
    )
    found = Advertisement(state.sealing.public, state.masking.public)
    if signer is not None:
        found = replace(found, signature=signer.sign(found.signed_content(terms, me)))
    return state, found


def share(state: DeviceState, roster: Roster, draw: Draw) -> tuple[DeviceState, Shares]:
    """Round 1: splits both secrets into shares for the devices on the roster. PrivacyError if the
    devices are too few or too many, two have the same key, a signature is wrong, or the
    roster's keys for this device are not those that it sent."""
    state = state.after(SHARED)
    terms, me, found = state.terms, state.me, roster.advertisements
    if not terms.threshold <= len(found) <= MOST_DEVICES:
        raise PrivacyError(
            f"{len(found)} devices sent keys; expected {terms.threshold} to {MOST_DEVICES}"
        )
    least = least_threshold(len(found), active=terms.verifying is not None)
    if terms.threshold < least:
        raise PrivacyError(
            f"the threshold is {terms.threshold} for {len(found)} devices; expected {least} or "
            "more, since otherwise two groups of devices could each decrypt an input"
        )
    mine = found.get(me)
    if mine is None or (mine.sealing, mine.masking) != (state.sealing.public, state.masking.public):
        raise PrivacyError(
            f"the keys that the server lists for device {me} differ from those that the device sent"
        )
    keys = [key for one in found.values() for key in (one.sealing, one.masking)]
    if len(set(keys)) < len(keys):
        raise PrivacyError("two devices on the roster have the same key")
    if terms.verifying is not None:
        for device, one in found.items():
            known = terms.verifying.get(device)
            content = one.signed_content(terms, device)
            if known is None or not is_signed(known, one.signature, content):
                raise PrivacyError(
                    f"the keys of device {device} are not signed for the task received here: "
                    "the server gave devices of one round different tasks, or a signature is forged"
                )
    places, sealed, commitments = places_of(found), {}, {}
    of_mask = shamir.split(state.masking.secret, list(places.values()), terms.threshold, draw)
    of_own = shamir.split(state.own_seed, list(places.values()), terms.threshold, draw)
    for other, place in places.items():
        commitments[other] = commitment_of(of_mask[place]) + commitment_of(of_own[place])
        if other != me:
            key = state.sealing.agree(found[other].sealing, "seal")
            both = of_mask[place] + of_own[place]
            sealed[other] = seal(key, both, sealed_about(terms, me, other))
    state = replace(state, roster=dict(found), own_share=of_own[places[me]])
    return state, Shares(sealed, commitments)


def mask(
    state: DeviceState, delivery: SharesDelivery, inputs: Sequence[Vector]
) -> tuple[DeviceState, MaskedInput]:
    """Round 2: masks `inputs`, a vector in 0..modulus-1 for each segment. PrivacyError if there are
    too few devices, one is not on the roster, or the input does not fit the segments."""
    state = state.after(MASKED)
    terms, me = state.terms, state.me
    others = sorted(delivery.sealed)
    if me in delivery.sealed or not set(others) < set(state.roster):
        raise PrivacyError("the server delivers shares of devices that are not on the roster")
    if len(others) + 1 < terms.threshold:
        raise PrivacyError(
            f"{len(others) + 1} devices shared their secrets; expected {terms.threshold} or more"
        )
    check_inputs(terms.segments, inputs)
    total = [np.array(one, np.int64) for one in inputs]
    add_mask(total, state.own_seed, terms.segments, 1)
    for other in others:
        seed = mask_seed(terms, state.masking, state.roster[other].masking)
        add_mask(total, seed, terms.segments, 1 if me > other else -1)
    parts = zip(terms.segments, total, strict=True)
    sent = MaskedInput(tuple(one.astype(segment.dtype).tobytes() for segment, one in parts))
    return replace(state, shares=dict(delivery.sealed)), sent


def consent(state: DeviceState, survivors: Survivors) -> tuple[DeviceState, Consent]:
    """Round 3: signs the list of devices that sent an input. PrivacyError if the list is too short,
    one of the devices shared no secrets, or this device is not on the list."""
    state = state.after(CONSENTED)
    devices = survivors.devices
    named, known = set(devices), {state.me, *state.shares}
    if list(devices) != sorted(named) or not named <= known or state.me not in named:
        raise PrivacyError(
            "the server's list of inputs includes devices that shared no secrets with this device, "
            "or omits this device"
        )
    if len(devices) < state.terms.threshold:
        raise PrivacyError(
            f"{len(devices)} devices sent an input; expected {state.terms.threshold} or more"
        )
    content = survivors_content(state.terms, devices)
    signature = b"" if state.signer is None else state.signer.sign(content)
    return replace(state, survivors=devices), Consent(signature)


def open_shares(state: DeviceState, consents: Consents) -> tuple[DeviceState, OpenedShares]:
    """Round 4: opens one share for each device: of its own mask if it survived, otherwise of its
    masking secret. PrivacyError if too few devices signed the same list of survivors."""
    state = state.after(ENDED)
    terms, me = state.terms, state.me
    if terms.verifying is not None:
        content = survivors_content(terms, state.survivors)
        signed = {
            device
            for device, signature in consents.signatures.items()
            if device in state.survivors
            and is_signed(terms.verifying.get(device, b""), signature, content)
        }
        if len(signed) < len(consents.signatures) or len(signed) < terms.threshold:
            raise PrivacyError(
                f"{len(signed)} of {len(consents.signatures)} devices signed the list of surviving "
                f"devices that device {me} received; expected all to sign, and at least "
                f"{terms.threshold}"
            )
    vanished, own = {}, {me: state.own_share}
    for other, sealed in state.shares.items():
        key = state.sealing.agree(state.roster[other].sealing, "seal")
        try:
            both = unseal(key, sealed, sealed_about(terms, other, me))
        except PrivacyError:
            continue  # otherwise one device could block all others with an invalid share
        if other in state.survivors:
            own[other] = both[shamir.SHARE_BYTES :]
        else:
            vanished[other] = both[: shamir.SHARE_BYTES]
    return state, OpenedShares(vanished, own)


def check_inputs(segments: Sequence[InputSegment], inputs: Sequence[Vector]) -> None:
    for segment, one in zip(segments, inputs, strict=True):
        if one.shape != (segment.size,) or one.min() < 0 or one.max() >= segment.modulus:
            raise PrivacyError(
                f"an input of shape {one.shape} does not fit its segment; expected {segment.size} "
                f"numbers from 0 to {segment.modulus - 1}"
            )
