"""Caches optimised parameters on disk, so that minutes of optimisation are needed only once. A file
that is damaged or does not match its name is replaced."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dlm.files import write_whole
from dlm.logs import EventLog

LOG = EventLog(__name__)


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the cache's folder: ``mechanisms`` in $DLM_CACHE_DIR or, by default, ~/.cache/dlm."""
    environ = os.environ if environ is None else environ
    if explicit := environ.get("DLM_CACHE_DIR"):
        return Path(explicit) / "mechanisms"
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "dlm" / "mechanisms"


def cached(
    settings: Mapping[str, Any], version: int, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Returns the result of `make`, from disk if this version of the optimiser stored it for these
    settings. The result maps names, such as `loss`, to numbers, lists, strings and float64 arrays.
    If the folder is not writable, the result is not stored."""
    asked = json.loads(json.dumps({**settings, "version": version}))
    text = json.dumps(asked, sort_keys=True)
    path = folder() / f"{settings['mechanism']}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    path = path.with_suffix(".json")
    known = _read(path, asked)
    if known is not None:
        return known
    found = make()
    try:
        _write(path, asked, found)
    except OSError as exc:
        LOG.warning("noise.cache.not_written", extra={"path": str(path), "error": str(exc)})
    return found


def _digest(asked: Any, found: Any) -> str:
    return hashlib.sha256(json.dumps([asked, found], sort_keys=True).encode()).hexdigest()


def _write(path: Path, asked: dict[str, Any], found: dict[str, Any]) -> None:
    plain = {name: _plain(value) for name, value in found.items()}
    plain = json.loads(json.dumps(plain))
    document = {"settings": asked, "found": plain, "sha256": _digest(asked, plain)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document).encode(), mode=0o600)


def _read(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["settings"] != asked or document["sha256"] != _digest(asked, document["found"]):
            raise ValueError("the file has other settings, or its checksum is wrong")
        return {name: _rich(value) for name, value in document["found"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        LOG.warning("noise.cache.damaged", extra={"path": str(path), "error": str(exc)})
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        raw = np.ascontiguousarray(value, "<f8").tobytes()
        return {"shape": list(value.shape), "float64": base64.b64encode(raw).decode()}
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        flat = np.frombuffer(base64.b64decode(value["float64"]), "<f8")
        return flat.reshape(value["shape"]).astype(np.float64)
    return value
