"""Shares secrets among devices: any `threshold` of them recover a secret, but fewer learn nothing.

Shamir, How to share a secret (1979): the secret is a polynomial's value at 0, and a share is its
value at another place, over the integers modulo a prime just above 2^256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlm.errors import PrivacyError
from dlm.federated.devices.primitives import SECRET_BYTES, Draw

PRIME = (1 << 256) + 297
SHARE_BYTES = 33


def split(secret: bytes, places: Sequence[int], threshold: int, draw: Draw) -> dict[int, bytes]:
    """Returns shares of 33 bytes by place (distinct, from 1); any `threshold` recover `secret`."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes; expected {SECRET_BYTES}")
    if not 1 <= threshold <= len(places) or len(set(places)) < len(places) or min(places) < 1:
        raise ValueError(
            f"the places are {places} and the threshold is {threshold}; expected distinct places "
            "of 1 or more, at least as many as the threshold"
        )
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [_uniform(draw) for _ in range(threshold - 1)]
    return {place: _at(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Recovers the secret from `shares`, which are given by place; PrivacyError if fewer than
    `threshold` are given, or the shares belong to no secret."""
    if len(shares) < threshold:
        raise PrivacyError(
            f"found {len(shares)} valid shares of a secret; expected at least {threshold}"
        )
    used = list(shares.items())[:threshold]
    secret = _value_at_zero({place: int.from_bytes(share, "big") for place, share in used})
    if secret >> (8 * SECRET_BYTES):
        raise PrivacyError(
            f"{len(shares)} shares do not yield a secret: the device that made them does not "
            "follow the protocol"
        )
    return secret.to_bytes(SECRET_BYTES, "big")


def _value_at_zero(values: Mapping[int, int]) -> int:
    places, total = list(values), 0
    for place, value in values.items():
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        total += value * above * pow(below, -1, PRIME)
    return total % PRIME


def _at(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


def _uniform(draw: Draw) -> int:
    while True:
        # A number that is too large is drawn again: its remainder would be biased.
        found = int.from_bytes(draw(SHARE_BYTES), "big") & ((1 << 257) - 1)
        if found < PRIME:
            return found
