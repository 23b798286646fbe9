"""How a server tells its parent that it is ready, and at which address."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlm.files import write_whole


@dataclass(frozen=True, slots=True)
class Ready:
    """What a parent process needs to know about a ready server.

    shard_set   of the first folder, which a call that names none means
    shard_sets  of every folder
    pid         of the process that takes signals
    """

    host: str
    port: int
    shard: int
    shard_set: str
    pid: int
    shard_sets: Sequence[str] = ()
    workers: int = 1


OnReady = Callable[[Any], object]


class Notice:
    """The ready file and the callback: there from `publish` until `withdraw`."""

    def __init__(self, on_ready: OnReady | None = None, file: Path | None = None) -> None:
        self._on_ready = on_ready
        self._file = file
        self.withdraw()

    def publish(self, ready: Any) -> None:
        """Args  ready  a dataclass, such as `Ready`"""
        if self._file is not None:
            write_whole(self._file, json.dumps(asdict(ready)).encode() + b"\n")
        if self._on_ready is not None:
            self._on_ready(ready)

    def withdraw(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
