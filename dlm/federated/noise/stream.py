"""Random 64-bit words from a cryptographic stream: ChaCha20 with one key per name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dlm.federated.keys import Key

GENERATOR = "ChaCha20"
_ZEROS = bytes(1 << 16)
Words = npt.NDArray[np.uint64]


class WordStream:
    """A stream of random words under one key; no part of the stream is returned twice.

    The same key gives the same words. Counter and nonce start at 0. Keys are derived from names, so
    streams with different names do not overlap.

    Paper  Bernstein 2008; RFC 7539 (its counter has 32 bits; OpenSSL's has 64)
    """

    def __init__(self, key: Key) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key.material(), bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> Words:
        out = np.empty(count, np.uint64)
        view = out.view(np.uint8).data
        for begin in range(0, len(view), len(_ZEROS)):
            end = min(begin + len(_ZEROS), len(view))
            self._cipher.update_into(_ZEROS[: end - begin], view[begin:end])
        return out.astype("<u8", copy=False)

    def __reduce__(self) -> str:
        raise TypeError("a stream of noise cannot be copied: two copies would give the same noise")
