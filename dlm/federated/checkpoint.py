"""A run's state on disk: one file that is whole or absent, and reads back to the bit.

::

    dlm federated checkpoint 1\\n
    length of the header, 8 bytes, little-endian; SHA-256 of the header, 32 bytes
    header: JSON, what is described below
    arrays, one after another, little-endian, each from a multiple of 64 on

The header holds the run's settings, so that a run that goes on with others is refused, and a
checksum of all that follows it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm.errors import ConfigError, FormatError
from dlm.files import write_whole

MAGIC = b"dlm federated checkpoint 1\n"
ALIGNMENT = 64


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(leaf: Any) -> np.ndarray[Any, Any]:
    """A leaf as an array of numbers; a key as those that it is made of."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back, for comparison with those of a file."""
    result: dict[str, Any] = json.loads(json.dumps(settings, sort_keys=True, default=_jsonable))
    return result


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no setting")


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Settings that are not the same, each with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            place = f"{name}.{key}" if name else key
            found += differences(old.get(key), new.get(key), place)
        return found
    return [] if old == new else [f"{name} was {old!r} and is {new!r}"]


def save(
    path: Path,
    tree: Any,
    settings: Mapping[str, Any],
    *,
    facts: Mapping[str, Any] | None = None,
    attachments: Mapping[str, bytes] | None = None,
    mode: int = 0o644,
) -> None:
    """Writes a tree of arrays, with the settings that it belongs to.

    Args
        facts        more JSON for the header, which is not compared with anything
        attachments  bytes of any length, by name
    """
    arrays = [_plain(leaf) for leaf in jax.tree.leaves(tree)]
    body = bytearray()
    table = []
    for array in arrays:
        body += bytes(-len(body) % ALIGNMENT)
        little = array.astype(array.dtype.newbyteorder("<"))
        table.append([array.dtype.newbyteorder("<").str, list(array.shape), len(body)])
        body += little.tobytes()
    places = {}
    for name, content in (attachments or {}).items():
        places[name] = [len(body), len(content)]
        body += content
    header = {
        "settings": canonical(settings),
        "facts": canonical(facts or {}),
        "attachments": places,
        "arrays": table,
        "sha256": hashlib.sha256(body).hexdigest(),
        "bytes": len(body),
    }
    text = json.dumps(header, sort_keys=True).encode()
    seal = len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
    content = MAGIC + seal + text + bytes(body)
    write_whole(path, content, mode=mode)


def load(path: Path, template: Any, settings: Mapping[str, Any] | None) -> Any:
    """The tree that `save` wrote, in the shape of `template`.

    Args
        settings  of the run that goes on; None takes the file's as they are
    Raises
        FormatError  the file is cut off, damaged or of another kind
        ConfigError  it is of a run with other settings, each of which is named
    """
    header, body = _read(path)
    if settings is not None:
        found = differences(header["settings"], canonical(settings))
        if found:
            raise ConfigError(
                f"{path} is of a run with other settings: {'; '.join(found)}. Go on with the old "
                "settings, or start a new run in another folder"
            )
    leaves, shape = jax.tree.flatten(template)
    if len(leaves) != len(header["arrays"]):
        raise FormatError(
            f"{path} holds {len(header['arrays'])} arrays, and this run's state has {len(leaves)}: "
            "it was written by another version of dlm"
        )
    out: list[Any] = []
    for leaf, (kind, size, start) in zip(leaves, header["arrays"], strict=True):
        want = _plain(leaf)
        dtype = np.dtype(kind)
        if tuple(size) != want.shape or dtype != want.dtype.newbyteorder("<"):
            raise FormatError(
                f"{path}: an array is {dtype} {tuple(size)}, and this run's state has "
                f"{want.dtype} {want.shape} there"
            )
        count = int(np.prod(size, dtype=np.int64))
        array = np.frombuffer(body, dtype, count, start).reshape(size).astype(want.dtype)
        if isinstance(leaf, np.ndarray | np.generic):
            out.append(array)  # as it was given: a NumPy array
        elif _is_key(leaf):
            out.append(jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf)))
        else:
            out.append(jnp.asarray(array))
    return jax.tree.unflatten(shape, out)


def facts_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings, facts) of a checkpoint's header.

    Raises
        FormatError  the file is cut off, damaged or of another kind
    """
    header = _read(path)[0]
    return header["settings"], header["facts"]


def attachment(path: Path, name: str) -> bytes:
    """Bytes that were saved under a name.

    Raises
        FormatError  the file is cut off, damaged, of another kind, or has none of that name
    """
    header, body = _read(path)
    if name not in header["attachments"]:
        raise FormatError(f"{path} has no part named {name}")
    start, length = header["attachments"][name]
    return body[start : start + length]


def digest(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    start = len(MAGIC) + 8 + 32
    if content[: len(MAGIC)] != MAGIC:
        raise FormatError(
            f"{path} does not begin with {MAGIC!r}: it is no checkpoint, or one of another version"
        )
    length = int.from_bytes(content[len(MAGIC) : len(MAGIC) + 8], "little")
    text = content[start : start + length]
    if len(content) < start + length:
        raise FormatError(
            f"{path} is cut off: {len(content):,} bytes, not even its header is whole"
        )
    if hashlib.sha256(text).digest() != content[len(MAGIC) + 8 : start]:
        raise FormatError(f"{path} is damaged: its header does not have its checksum")
    try:
        header: dict[str, Any] = json.loads(text)
        body = content[start + length :]
        expected = int(header["bytes"])
        whole = hashlib.sha256(body).hexdigest() == header["sha256"]
        header["settings"], header["arrays"], header["facts"], header["attachments"]
    except (ValueError, KeyError, TypeError) as exc:
        raise FormatError(f"{path}: its header is damaged ({exc})") from exc
    if len(body) != expected:
        raise FormatError(f"{path} is cut off: {len(body):,} bytes of arrays, not {expected:,}")
    if not whole:
        raise FormatError(f"{path} is damaged: its arrays do not have the checksum of its header")
    return header, body
