"""The messages between devices and the server in one round of secure aggregation.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning",
Figure 4, with a complete graph, and with the consistency round against an active adversary.

    round  a device sends       the server returns once enough devices sent it
    0      Advertisement        Roster: all advertisements, U1
    1      Shares               SharesDelivery: the shares sealed for this device, U2
    2      MaskedInput          Survivors: the devices that sent an input, U3
    3      Consent              Consents: the signatures of the devices U4 on the list U3
    4      OpenedShares         nothing: the server now knows the sum of U3's inputs

Unlike in the paper, a device commits to its shares (SHA-256), so that the server detects wrongly
opened shares and uses only the right ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dlm.errors import ConfigError
from dlm.federated.devices.primitives import KeyPair, MaskStream, Vector
from dlm.federated.devices.settings import LEAST_DEVICES


@dataclass(frozen=True, slots=True)
class InputSegment:
    """A part of an input: `size` numbers that are added up modulo `modulus`."""

    size: int
    modulus: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a number on the wire: unsigned, little-endian, of 2, 4 or 8 bytes."""
        size = next(size for size in (2, 4, 8) if self.modulus <= 1 << 8 * size)
        return np.dtype(f"<u{size}")

    @property
    def wire_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """The facts that the devices and the server know about a round before it begins.

    name       a name of the round and its task, never used twice; it is part of everything signed
               or sealed, and of the seed of each mask between two devices
    threshold  number of devices that must stay to the end; fewer cannot recover any secret
    segments   the segments of each input, in order
    verifying  device -> its registered key for signatures; if None, no keys were registered, and a
               server that lies about who sent what can open a single device's input
    """

    name: bytes
    threshold: int
    segments: tuple[InputSegment, ...]
    verifying: Mapping[int, bytes] | None = None

    def __post_init__(self) -> None:
        if self.threshold < LEAST_DEVICES:
            raise ConfigError(
                f"the threshold is {self.threshold}; expected {LEAST_DEVICES} or more"
            )
        if not all(0 < one.modulus <= 1 << 62 and one.size > 0 for one in self.segments):
            raise ConfigError(
                "a segment has no numbers, or its modulus is outside 1..2^62; if the modulus is "
                "too large, lower the report goal"
            )


def least_threshold(devices: int, *, active: bool) -> int:
    """Returns the smallest safe threshold: more than half of the devices if the server follows the
    protocol, more than two thirds if the server is `active`: it may lie, and a third of the devices
    may help it (paper, section 6)."""
    return max(LEAST_DEVICES, (2 * devices // 3 if active else devices // 2) + 1)


# ------------------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Advertisement:
    """A device's public keys for one round: one to seal shares, one to agree on masks. `signature`
    is by the device's registered key, and empty if the device has none."""

    sealing: bytes
    masking: bytes
    signature: bytes = b""

    def signed_content(self, terms: RoundTerms, device: int) -> bytes:
        return _content("keys", terms, [device], self.sealing, self.masking)


@dataclass(frozen=True, slots=True)
class Roster:
    advertisements: Mapping[int, Advertisement]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the sender's two secrets: `sealed` has two for each other device, sealed together;
    `commitments` has the concatenated hashes of both for every device, sender included."""

    sealed: Mapping[int, bytes]
    commitments: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class SharesDelivery:
    """The shares that the other devices sealed for this one."""

    sealed: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """Each segment's input plus all masks, modulo the segment's modulus, in the segment's dtype."""

    segments: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Survivors:
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Consent:
    """A signature on the list of survivors that this device saw; empty without a registered key."""

    signature: bytes


@dataclass(frozen=True, slots=True)
class Consents:
    signatures: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class OpenedShares:
    """`vanished` has shares of the masking secrets of devices that vanished; `own` has shares of
    the survivors' own masks. No device is in both, since both shares together reveal its input."""

    vanished: Mapping[int, bytes]
    own: Mapping[int, bytes]


def survivors_content(terms: RoundTerms, devices: Sequence[int]) -> bytes:
    return _content("survivors", terms, devices)


def answer_content(terms: RoundTerms, device: int, step: str, answer: bytes) -> bytes:
    """The content that a device signs with each answer, so that nobody can replace it."""
    return _content("answer", terms, [device], step.encode(), answer)


def commitment_of(share: bytes) -> bytes:
    """Returns 32 bytes that hide the share, since nobody can guess its 256 bits."""
    return hashlib.sha256(b"dlm share " + share).digest()


def sealed_about(terms: RoundTerms, sender: int, receiver: int) -> bytes:
    return _content("share", terms, [sender, receiver])


def mask_seed(terms: RoundTerms, mine: KeyPair, other: bytes) -> bytes:
    """The seed of the mask between two devices; PrivacyError if the key `other` is invalid."""
    return mine.agree(other, "mask", terms.name)


def places_of(devices: Iterable[int]) -> dict[int, int]:
    """Returns each device's place in Shamir's scheme: 1, 2, ... in the order of device numbers."""
    return {device: place for place, device in enumerate(sorted(devices), 1)}


def add_mask(
    total: Sequence[Vector], seed: bytes, segments: Sequence[InputSegment], sign: Literal[1, -1]
) -> None:
    """Adds a mask to the vectors in place, or subtracts it if `sign` is -1."""
    stream = MaskStream(seed)
    for one, segment in zip(total, segments, strict=True):
        one += sign * stream.take(segment.size, segment.modulus)
        np.mod(one, segment.modulus, out=one)


def _content(kind: str, terms: RoundTerms, devices: Sequence[int], *rest: bytes) -> bytes:
    """Prefixes each part with its length, so that no two contents give the same bytes."""
    parts = [kind.encode(), terms.name, *(b"%d" % one for one in devices), *rest]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
