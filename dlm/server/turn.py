"""Servers of one machine load new models one after another: what loading costs then falls on one
shard at a time, and replicas answer for it."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

TURN_S = 60.0  # that a server waits for the others; then it loads all the same


class Turn:
    """Held by one process of this machine at a time, and released whenever that ends.

    An abstract socket's name can be bound once, by any user and without a file system to write to;
    each container has names of its own.
    """

    def __init__(self, name: str = "load", clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = f"\0dlm.server.turn/{name}", clock
        self._socket: socket.socket | None = None
        self._since: float | None = None

    def take(self) -> bool:
        """Whether it is this process's turn, or it has waited long enough; ask again if not."""
        if self._socket is not None:
            return True
        now = self._clock()
        self._since = now if self._since is None else self._since
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left: loading says so
            return True
        try:
            found.bind(self._name)
        except OSError as exc:
            found.close()
            return exc.errno != errno.EADDRINUSE or now - self._since >= TURN_S
        self._socket = found
        return True

    def leave(self) -> None:
        """Also in a forked child, whose copy would keep it from the others."""
        self._since = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
