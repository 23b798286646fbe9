"""Messages from a worker to its supervisor: lines of JSON over a pipe."""

from __future__ import annotations

import contextlib
import json
import os

import dlm.errors
from dlm.errors import ConfigError, DlmError


def say(pipe: int, content: object) -> bool:
    """Sends one line to the supervisor; if that has ended, this process will soon end too.

    Returns  false if it was not sent: the pipe is full, because the supervisor does not read
    """
    data = json.dumps(content).encode() + b"\n"
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(pipe, data) :]
    return not data


def as_error(kind: str, message: str) -> DlmError:
    found = getattr(dlm.errors, kind, None)
    if isinstance(found, type) and issubclass(found, DlmError):
        return found(message)
    return ConfigError(message)  # the operating system refused
