"""Secrets shared among devices, so that any `threshold` of them find one, and fewer learn nothing.

Shamir, How to share a secret (1979): the secret is a polynomial's value at 0, a share its value at
another place, over the integers modulo a prime just above 2^256.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from dlm.errors import PrivacyError
from dlm.federated.devices.primitives import SECRET_BYTES, Draw

PRIME = (1 << 256) + 297
SHARE_BYTES = 33
MOST_TRIES = 1000  # of other shares, where some are wrong


def split(secret: bytes, places: Sequence[int], threshold: int, draw: Draw) -> dict[int, bytes]:
    """A share of 33 bytes for each place.

    Args  places     distinct, from 1
          threshold  shares that find the secret again: 1 to the number of places
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(places) or len(set(places)) < len(places) or min(places) < 1:
        raise ValueError(f"a secret cannot be shared at places {places}, threshold {threshold}")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [_uniform(draw) for _ in range(threshold - 1)]
    return {place: _at(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]) -> bytes:
    """The secret, from at least `threshold` shares by their places; some may be wrong.

    Args    is_right  tells the secret from others
    Raises  PrivacyError  too few, or too many are wrong
    """
    if len(shares) < threshold:
        raise PrivacyError(f"found {len(shares)} shares of a secret; expected at least {threshold}")
    sound = {
        place: number
        for place, share in sorted(shares.items())
        if len(share) == SHARE_BYTES and (number := int.from_bytes(share, "big")) < PRIME
    }
    if len(sound) < threshold:
        raise PrivacyError(
            f"{len(sound)} of {len(shares)} shares of a secret are valid; expected {threshold}"
        )
    # At random: in any order, the first many subsets would all have the one wrong share.
    chance = random.SystemRandom()
    for _ in range(MOST_TRIES if len(sound) > threshold else 1):
        places = chance.sample(list(sound), threshold)
        secret = _value_at_zero({place: sound[place] for place in places})
        if not secret >> (8 * SECRET_BYTES):
            found = secret.to_bytes(SECRET_BYTES, "big")
            if is_right(found):
                return found
    raise PrivacyError(
        f"no {threshold} of {len(shares)} shares gave the secret; too many devices sent wrong ones"
    )


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
        # Drawn again where it is over: a remainder would be biased.
        found = int.from_bytes(draw(SHARE_BYTES), "big") & ((1 << 257) - 1)
        if found < PRIME:
            return found
