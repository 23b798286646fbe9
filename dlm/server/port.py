"""One port for several processes of one server only: with SO_REUSEPORT alone, others could join."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

from dlm.errors import ConfigError
from dlm.files import NO_DESCRIPTOR

_TRIES = 16  # ports to try if the system picks one that is free for only one address family


def cannot_be_bound(address: str) -> ConfigError:
    return ConfigError(
        f"{address} cannot be bound: another process listens there, or this machine "
        "has no such address. Stop that process, or choose another port (0 picks a free one)"
    )


@contextlib.contextmanager
def reserved(host: str, port: int, *, address: str) -> Iterator[int]:
    """Reserves a port for this process, on which its children may listen with SO_REUSEPORT.

    Args    port  0 takes a free one, which is returned;  address  shown in errors
    Raises  ConfigError  another process listens there or has reserved it, or there is no such
            address
            OSError  no file descriptor is left
    """
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        if exc.errno in NO_DESCRIPTOR:
            raise
        raise cannot_be_bound(address) from exc
    for last in range(_TRIES - 1, -1, -1):
        with contextlib.ExitStack() as stack:
            try:
                found = _reserve(places, port, stack)
            except OSError as exc:
                if exc.errno in NO_DESCRIPTOR:
                    raise
                if port or not last or exc.errno != errno.EADDRINUSE:
                    raise cannot_be_bound(address) from exc
                continue
            yield found
            return


def _reserve(places: list[Any], port: int, stack: contextlib.ExitStack) -> int:
    """Binds every address of the host that this machine has; returns the port."""
    failure: OSError | None = None
    bound = 0
    for family, kind, protocol, _, (host, _, *more) in dict.fromkeys(places):
        try:
            if port:
                # Before the port is shared: a name that only one process can have, released
                # whenever it ends. The port itself cannot say "shared, but not with you".
                lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                lock.bind(f"\0dlm.server.port/{host}/{port}")
                _probe(family, kind, protocol, (host, port, *more))
            taken = stack.enter_context(socket.socket(family, kind, protocol))
            _only_own_family(taken)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind((host, port, *more))  # it never listens, so it gets no connections
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise
            failure = exc  # such as an IPv6 address on a machine without IPv6
            continue
        bound += 1
        if not port:
            port = int(taken.getsockname()[1])
            lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            lock.bind(f"\0dlm.server.port/{host}/{port}")
    if not bound:
        raise failure or OSError(errno.EADDRNOTAVAIL, "no address")
    return port


def _probe(family: int, kind: int, protocol: int, place: tuple[Any, ...]) -> None:
    """Raises OSError where any process listens there, whatever its options."""
    with socket.socket(family, kind, protocol) as probe:
        _only_own_family(probe)
        # Connections of a server that has ended do not keep a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        probe.listen(1)


def _only_own_family(bound: socket.socket) -> None:
    if bound.family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
