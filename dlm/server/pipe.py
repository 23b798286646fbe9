"""What a worker says to its supervisor: a line of JSON at a time, over a pipe."""

from __future__ import annotations

import contextlib
import json
import os

import dlm.errors
from dlm.errors import ConfigError, DlmError


def say(pipe: int, content: object) -> None:
    """One line to the supervisor; where that is gone, so is this process soon."""
    data = json.dumps(content).encode() + b"\n"
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(pipe, data) :]


def as_error(kind: str, message: str) -> DlmError:
    """What a worker raised, as the same class."""
    found = getattr(dlm.errors, kind, None)
    if isinstance(found, type) and issubclass(found, DlmError):
        return found(message)
    return ConfigError(message)  # the operating system said no
