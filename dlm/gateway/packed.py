"""The reply to a decoder's step, as bytes made from arrays: objects cost more than scoring; and
states with a checksum, by which damage is no other state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlm.client import Extension
from dlm.errors import QueryError
from dlm.wire._pb import lm_pb2 as pb

LENGTH_DELIMITED = 2  # the wire type of bytes, strings, messages and packed lists
SEAL_BYTES = 4
# Odd, so that a changed bit always changes the sum.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FIELDS = pb.ExtendReply.DESCRIPTOR.fields_by_name


def extend_reply(found: Extension, model: str, *, states: bool) -> bytes:
    """The bytes of an ExtendReply.

    Lists of floats are packed as their bytes, and those of small whole numbers as a byte each, so
    both are the arrays themselves.

    Args  states  whether it has them
    """
    parts = [
        _field("log10_probs", found.log10_prob.astype("<f4", copy=False).tobytes()),
        _field("matched_orders", found.matched_order.tobytes()),
        _states(found.states.packed()) if states else b"",
        _field("oov", found.oov.tobytes()),
        _field("sources", found.source.tobytes() if found.source.any() else b""),
        _field("model", model.encode()),
    ]
    if found.bonus is not None:
        parts.append(_field("bonuses", found.bonus.astype("<f4", copy=False).tobytes()))
        parts.append(_field("phrases_id", found.states.model_info.phrases.encode()))
    return b"".join(parts)


def sealed(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """States as callers get them: rows of `States.packed`, each followed by its checksum."""
    return np.concatenate([rows, _seals(rows, rows.shape[1])], axis=1)


def _seals(rows: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The checksum of the first `size` bytes of each row, read as numbers of which the last two may
    overlap: a padded copy of a large step's states takes as long as to score them."""
    count = len(rows)
    if not count:
        return np.zeros((0, SEAL_BYTES), np.uint8)
    sums = np.full(count, _FACTOR)
    for number, at in enumerate([*range(0, size - 8, 8), size - 8], 1):
        words = np.ndarray(count, "<u8", rows, at, rows.strides[:1])
        sums += words * np.uint64(int(_FACTOR) * (2 * number + 1) % (1 << 64))
    return (sums >> np.uint64(32)).astype("<u4").view(np.uint8).reshape(count, SEAL_BYTES)


def opened(states: Sequence[bytes]) -> list[bytes]:
    """What `sealed` was given, one of each; QueryError for bytes that it did not return."""
    size = max(map(len, states), default=0)
    wrong = np.array([len(one) != size or size < 8 + SEAL_BYTES for one in states], bool)
    if not wrong.any() and states:
        rows = np.frombuffer(b"".join(states), np.uint8).reshape(len(states), size)
        wrong = (_seals(rows, size - SEAL_BYTES) != rows[:, -SEAL_BYTES:]).any(axis=1)
    if wrong.any():
        raise QueryError(
            f"states[{int(wrong.argmax())}] is not a state, or was changed on its way; expected "
            "the bytes that a gateway returned"
        )
    return [one[:-SEAL_BYTES] for one in states]


def _head(name: str, size: int) -> bytes:
    return _varint(_FIELDS[name].number << 3 | LENGTH_DELIMITED) + _varint(size)


def _field(name: str, content: bytes) -> bytes:
    return _head(name, len(content)) + content if content else b""


def _states(rows: NDArray[np.uint8]) -> bytes:
    """The field `states`, of `sealed` rows."""
    count, size = rows.shape
    head = np.frombuffer(_head("states", size + SEAL_BYTES), np.uint8)
    end = len(head) + size
    whole = np.empty((count, end + SEAL_BYTES), np.uint8)
    whole[:, : len(head)] = head
    whole[:, len(head) : end] = rows
    whole[:, end:] = _seals(rows, size)
    return whole.tobytes()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
