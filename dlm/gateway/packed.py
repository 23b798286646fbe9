"""The reply to a decoder's step, as bytes made from arrays: objects cost more than scoring; and
states with a checksum, by which damage is no other state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlm.client import Extension, States
from dlm.errors import QueryError
from dlm.gateway import kernels
from dlm.gateway.kernels import CHECKSUM_BYTES
from dlm.wire._pb import lm_pb2 as pb

LENGTH_DELIMITED = 2  # the wire type of bytes, strings, messages and packed lists
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
        _states(found.states) if states else b"",
        _field("oov", found.oov.tobytes()),
        _field("sources", found.source.tobytes() if found.source.any() else b""),
        _field("model", model.encode()),
    ]
    if found.bonus is not None:
        parts.append(_field("bonuses", found.bonus.astype("<f4", copy=False).tobytes()))
        parts.append(_field("phrases_id", found.states.model_info.phrases.encode()))
    return b"".join(parts)


def sealed(rows: NDArray[np.uint8], head: bytes = b"") -> NDArray[np.uint8]:
    """States as callers get them: rows of `States.packed`, each between `head` and its checksum."""
    count, size = rows.shape
    out = np.empty((count, len(head) + size + CHECKSUM_BYTES), np.uint8)
    kernels.write_states(np.frombuffer(head, np.uint8), rows, out)
    return out


def opened(states: Sequence[bytes]) -> list[bytes]:
    """What `sealed` was given, one of each; QueryError for bytes that it did not return."""
    if not states:
        return []
    size = max(*map(len, states), CHECKSUM_BYTES + 1)
    wrong = next((at for at, one in enumerate(states) if len(one) < size), -1)
    if wrong < 0:
        rows = np.frombuffer(b"".join(states), np.uint8).reshape(len(states), size)
        wrong = kernels.changed_state(rows)
    if wrong >= 0:
        raise QueryError(
            f"states[{wrong}] is not a state, or was changed on its way; expected the bytes that a "
            "gateway returned"
        )
    return [one[:-CHECKSUM_BYTES] for one in states]


def _head(name: str, size: int) -> bytes:
    return _varint(_FIELDS[name].number << 3 | LENGTH_DELIMITED) + _varint(size)


def _field(name: str, content: bytes) -> bytes:
    return _head(name, len(content)) + content if content else b""


def _states(states: States) -> bytes:
    """The field `states`, each with its checksum."""
    rows = states.packed()
    return sealed(rows, _head("states", rows.shape[1] + CHECKSUM_BYTES)).tobytes()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
