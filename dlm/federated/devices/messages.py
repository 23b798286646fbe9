"""Encodes the messages between devices and the server as bytes, and decodes them.

A message is a JSON header followed by the message's binary parts:

    length of the header, 4 bytes, little-endian; header; parts

The header has the fields of the message. `{"part": n}` stands for the next part, of n bytes; a list
of pairs stands for a mapping by device. Data from a network is refused unless its types are those
that the message's class declares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dlm.errors import ProtocolError

T = TypeVar("T")

LONGEST_HEADER = 1 << 20
_LENGTH = 4


def to_bytes(message: Any) -> bytes:
    parts: list[bytes] = []
    text = json.dumps(_plain(message, parts)).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *parts])


def from_bytes(kind: type[T], data: bytes) -> T:
    """Decodes a message of the class `kind`; ProtocolError if `data` is not such a message."""
    size = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or not size <= min(len(data) - _LENGTH, LONGEST_HEADER):
        raise ProtocolError(
            f"a {kind.__name__} has {len(data)} bytes and declares a header of {size}; expected a "
            f"complete header of at most {LONGEST_HEADER} bytes"
        )
    parts = _Parts(data, _LENGTH + size)
    try:
        content = json.loads(data[_LENGTH : _LENGTH + size])
        found: T = _typed(kind, content, parts)
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ProtocolError(f"a {kind.__name__} is malformed: {exc}") from exc
    if parts.at != len(data):
        raise ProtocolError(
            f"a {kind.__name__} has {len(data) - parts.at} bytes more than it declares"
        )
    return found


class _Parts:
    """The parts of a message, each of which is taken once, in order."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def take(self, size: object) -> bytes:
        if type(size) is not int or not 0 <= size <= len(self._data) - self.at:
            raise ValueError(
                f"a part declares {size} bytes; expected at most the remaining size of the message"
            )
        self.at += size
        return self._data[self.at - size : self.at]


def _plain(value: Any, parts: list[bytes]) -> Any:
    if isinstance(value, bytes):
        parts.append(value)
        return {"part": len(value)}
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name), parts) for one in fields(value)}
    if isinstance(value, Mapping):
        return [[key, _plain(one, parts)] for key, one in value.items()]
    if isinstance(value, tuple):
        return [_plain(one, parts) for one in value]
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _typed(kind: Any, value: Any, parts: _Parts) -> Any:
    if kind is bytes:
        (name,) = value
        if name != "part":
            raise ValueError(f"a bytes field has the key {name!r}; expected 'part'")
        return parts.take(value["part"])
    if is_dataclass(kind):
        if set(value) != set(_hints(kind)):  # type: ignore[arg-type]
            raise ValueError(
                f"the fields of {kind.__name__} are {sorted(value)}; expected "  # type: ignore[union-attr]
                f"{sorted(_hints(kind))}"  # type: ignore[arg-type]
            )
        return kind(**{n: _typed(t, value[n], parts) for n, t in _hints(kind).items()})  # type: ignore[operator, arg-type]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Mapping:
        found = {_typed(inner[0], k, parts): _typed(inner[1], one, parts) for k, one in value}
        if len(found) < len(value):
            raise ValueError("a device is named twice")
        return found
    if origin is tuple:
        if type(value) is not list:
            raise ValueError(f"found {type(value).__name__}; expected a list")
        return tuple(_typed(inner[0], one, parts) for one in value)
    if type(None) in inner:
        return None if value is None else _typed(inner[0], value, parts)
    if type(value) is not kind:
        raise ValueError(f"found {type(value).__name__}; expected {kind.__name__}")
    return value
