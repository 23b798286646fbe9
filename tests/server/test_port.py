"""dlm.server.port: shared by the processes of one server, and by nobody else."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import pytest

from dlm.errors import ConfigError
from dlm.server.port import reserved

HOST = "127.0.0.1"


def listener(port: int, *, shared: bool) -> socket.socket:
    """A socket that listens, as a server does."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    try:
        made.bind((HOST, port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def test_those_who_share_may_listen_and_others_may_not():
    """Port 0 takes a free one; several sockets that say so listen; one that does not is refused."""
    with reserved(HOST, 0, address="x") as port:
        assert port > 0
        with listener(port, shared=True), listener(port, shared=True):
            with pytest.raises(OSError, match="in use"):
                listener(port, shared=False)
            with socket.create_connection((HOST, port), 10):
                pass


def test_a_connection_is_dealt_to_listeners_alone():
    """The reservation itself never accepts: what nobody listens to is refused, not left waiting."""
    with reserved(HOST, 0, address="x") as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), 10)


def test_a_second_reservation_is_refused_before_and_after_anybody_listens():
    """Two servers of one user could share the port as far as the system is concerned."""
    with reserved(HOST, 0, address="x") as port:
        for _ in range(2):
            with (
                pytest.raises(ConfigError, match=f"127.0.0.1:{port} "),
                reserved(HOST, port, address=f"{HOST}:{port}"),
            ):
                raise AssertionError("never reached")
            with listener(port, shared=True):
                pass
    with reserved(HOST, port, address="x") as again:
        assert again == port


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_where_another_listens_is_refused(shared):
    """Whether or not that one would share it."""
    with listener(0, shared=shared) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"{HOST}:{port} .*another process"),
            reserved(HOST, port, address=f"{HOST}:{port}"),
        ):
            raise AssertionError("never reached")


def test_connections_that_a_server_left_behind_keep_no_port():
    """A server that ended a moment ago leaves ports in TIME_WAIT; the next one takes them."""
    with listener(0, shared=False) as other:
        port = other.getsockname()[1]
        with socket.create_connection((HOST, port), 10) as client:
            accepted, _ = other.accept()
            accepted.close()  # the side that closes first waits
            assert client.recv(1) == b""
    with reserved(HOST, port, address="x") as again:
        assert again == port


def test_a_process_that_was_killed_keeps_no_port():
    """The lock goes with the process, whatever ended it."""
    code = (
        "import sys\nfrom dlm.server.port import reserved\n"
        f"with reserved('{HOST}', 0, address='x') as port:\n"
        "    print(port, flush=True)\n    sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    port = int(holder.stdout.readline())
    with pytest.raises(ConfigError), reserved(HOST, port, address="x"):
        raise AssertionError("never reached")
    holder.kill()
    holder.communicate()
    with reserved(HOST, port, address="x") as again:
        assert again == port


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1"])
def test_every_address_of_a_host_is_reserved(host):
    """Those that this machine has: one without IPv6 still serves on localhost."""
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with reserved(host, 0, address="x") as port:
        with pytest.raises(ConfigError), reserved(host, port, address="x"):
            raise AssertionError("never reached")
        with listener(port, shared=True):
            pass


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_this_machine_has_not_is_refused(host):
    """With the message of a port that is taken, which says both."""
    with (
        pytest.raises(ConfigError, match=f"{host}:0 .*address"),
        reserved(host, 0, address=f"{host}:0"),
    ):
        raise AssertionError("never reached")


def test_a_process_without_descriptors_left_does_not_blame_the_port():
    """The port is free: who reads "another process listens there" looks in the wrong place."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"), reserved(HOST, 0, address="x"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
