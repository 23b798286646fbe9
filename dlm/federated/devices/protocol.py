"""The messages between devices and the server in one round of secure aggregation.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning",
Figure 4 with the consistency round of its active adversary; the graph is complete.

    round  a device sends       the server returns when enough sent it
    0      Advertisement        Roster: all advertisements, U1
    1      Shares               SharesDelivery: the shares sealed for this device, U2
    2      MaskedInput          Survivors: who sent one, U3
    3      Consent              Consents: signatures of U3, by U4
    4      OpenedShares               nothing: the sum of U3's inputs is known

Difference: a device commits to its shares (SHA-256), so that the server detects wrongly opened
shares, and uses the right ones; the paper's servers cannot.
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
    """Numbers of an input that are added up modulo `modulus`."""

    size: int
    modulus: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers on the wire: unsigned little-endian of 2, 4 or 8 bytes."""
        size = next(size for size in (2, 4, 8) if self.modulus <= 1 << 8 * size)
        return np.dtype(f"<u{size}")

    @property
    def wire_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What both sides know about a round before it begins.

    name       name of the round and its task, never used twice; everything signed or sealed
               includes it, and so do all masks between two devices
    threshold  number of devices that must stay to the end; fewer cannot recover any secret
    segments   the segments of each input, in order
    verifying  device -> its registered key for signatures; None if no keys were registered: then a
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
                "a segment has no numbers, or its modulus is not from 1 to 2^62; if the modulus "
                "is too large, lower the report goal"
            )


def least_threshold(devices: int, *, active: bool) -> int:
    """The smallest safe threshold for that many devices: above a half if the server follows the
    protocol, above two thirds if it may lie and a third of the devices may help it (paper, section
    6)."""
    return max(LEAST_DEVICES, (2 * devices // 3 if active else devices // 2) + 1)


# ------------------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Advertisement:
    """Public keys of one round: to seal shares with, and to agree on masks with; signed by the
    device's registered key, if it has one."""

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
    """For each other device, its shares of the two secrets, sealed together; and for every device,
    including this one, the commitments to its two shares, concatenated."""

    sealed: Mapping[int, bytes]
    commitments: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class SharesDelivery:
    """The shares that each other device sealed for this one."""

    sealed: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """The input of each segment plus all masks, modulo the segment's modulus, in its dtype."""

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
    """Shares of the masking secrets of devices that vanished, and of the survivors' own masks.
    Never both for one device: together they reveal its input."""

    vanished: Mapping[int, bytes]
    own: Mapping[int, bytes]


def survivors_content(terms: RoundTerms, devices: Sequence[int]) -> bytes:
    return _content("survivors", terms, devices)


def answer_content(terms: RoundTerms, device: int, step: str, answer: bytes) -> bytes:
    """The content that a device signs with each answer, so that nobody can replace it."""
    return _content("answer", terms, [device], step.encode(), answer)


def commitment_of(share: bytes) -> bytes:
    """32 bytes, which hide a share: nobody can guess its 256 bits."""
    return hashlib.sha256(b"dlm share " + share).digest()


def sealed_about(terms: RoundTerms, sender: int, receiver: int) -> bytes:
    return _content("share", terms, [sender, receiver])


def mask_seed(terms: RoundTerms, mine: KeyPair, other: bytes) -> bytes:
    """The seed of the mask between two devices; PrivacyError if the key `other` is invalid."""
    return mine.agree(other, "mask", terms.name)


def places_of(devices: Iterable[int]) -> dict[int, int]:
    """The place of each device's share of a secret: from 1, in the order of their numbers."""
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
