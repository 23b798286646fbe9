"""Draws random numbers from named keys, never from a global generator; no name is used twice. A key
is 32 bytes. `fold` derives a named key with BLAKE2b; SHAKE-256 expands a key to more bytes."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import numpy.typing as npt

from dlm.errors import PrivacyError

KEY_BYTES = 32
_TWO_53 = float(1 << 53)


class Key:
    """A source of random numbers that is identified by its name.

    The same key and name give the same numbers on every machine; without the key, numbers of
    different names cannot be told from independent ones; `repr` leaves out the 32 bytes, and
    pickling is refused.
    """

    __slots__ = ("_material", "path", "simulated")

    def __init__(self, material: bytes, *, simulated: bool, path: tuple[str | int, ...] = ()):
        if len(material) != KEY_BYTES:
            raise ValueError(f"the key has {len(material)} bytes; expected {KEY_BYTES}")
        self._material = material
        self.simulated = simulated
        self.path = path

    @classmethod
    def from_system(cls) -> Key:
        """A key that the operating system draws; it exists only in memory."""
        return cls(os.urandom(KEY_BYTES), simulated=False)

    @classmethod
    def from_seed(cls, seed: int) -> Key:
        """A key for simulations: anyone with `seed` can reproduce it; reported as not private."""
        if seed < 0:
            raise ValueError(f"the seed is {seed}; expected 0 or more")
        return cls(
            hashlib.blake2b(b"dlm seed %d" % seed, digest_size=KEY_BYTES).digest(), simulated=True
        )

    def fold(self, *names: str | int) -> Key:
        material = self._material
        for name in names:
            # The type is part of the name: 1 and "1" are different names.
            text = (b"i%d" % name) if isinstance(name, int) else b"s" + name.encode()
            material = hashlib.blake2b(text, key=material, digest_size=KEY_BYTES).digest()
        return Key(material, simulated=self.simulated, path=(*self.path, *names))

    def material(self) -> bytes:
        """Returns 32 bytes for a cipher, derived from this key but revealing nothing about it."""
        return self.fold("cipher")._material

    def shared(self) -> bytes:
        """Returns this key's bytes, for devices that must draw the same numbers as this process."""
        return self._material

    @classmethod
    def given(cls, material: bytes) -> Key:
        """The key whose `shared` returned these bytes."""
        return cls(material, simulated=False)

    def words(self, count: int) -> npt.NDArray[np.uint32]:
        """`count` random 32-bit numbers, such as the two that a JAX threefry key is made of."""
        return np.frombuffer(self._stream(4 * count), "<u4").astype(np.uint32)

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """`count` numbers, multiples of 2^-53, uniform in [0, 1)."""
        raw = np.frombuffer(self._stream(8 * count), "<u8")
        return (raw >> np.uint64(11)).astype(np.float64) / _TWO_53

    def signs(self, count: int) -> npt.NDArray[np.int8]:
        raw = np.frombuffer(self._stream((count + 7) // 8), np.uint8)
        return (1 - 2 * np.unpackbits(raw, count=count).astype(np.int8)).astype(np.int8)

    def _stream(self, count: int) -> bytes:
        # The count is not part of the input, so a longer draw begins with the shorter draw, and a
        # name stands for one sequence of numbers.
        return hashlib.shake_256(b"dlm stream" + self._material).digest(count)

    def __repr__(self) -> str:
        name = "/".join(str(part) for part in self.path) or "root"
        return f"Key({name}, {'simulated' if self.simulated else 'from the system'})"

    def __reduce__(self) -> str:
        raise PrivacyError(f"{self!r} must not be copied into a file: a new run draws a new key")
