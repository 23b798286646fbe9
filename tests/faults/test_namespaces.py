"""A server in a network namespace of its own: a host whose cable is pulled, or that is replaced.

What a proxy cannot show: no reset, no end of a stream, nothing at all comes from a host that is
gone. It needs root and the `ip` command, and skips without.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.scripted import Clients
from cluster import ModelFiles, ProcessServer, build
from dlm.client.health.modes import Mode
from faults.decoders import Decoders
from faults.test_cascade_faults import DEADLINE_S, FAILOVER, GRACE_S, HEARTBEATS, NOISE_S
from models import random_model


def ip(*words: object) -> None:
    """`ip`, which must succeed."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, timeout=30)


class Elsewhere:
    """A namespace with one address, and a cable to it from here.

    Its network is one of four addresses that goes by the process, of those that are set aside for
    tests (198.18.0.0/15, RFC 2544): a process that was killed leaves its own behind, and two that
    run at once have two.
    """

    def __init__(self) -> None:
        self.name = f"dlm-{os.getpid()}"
        self.cable = f"dlm{os.getpid()}"[:15]
        network = ipaddress.IPv4Address("198.18.0.0") + 4 * (os.getpid() % 2**15)
        self.here, self.host = (str(network + i) for i in (1, 2))

    def build(self) -> None:
        """The namespace, and both ends of the cable."""
        ip("netns", "add", self.name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "far", "netns", self.name)
        ip("address", "add", f"{self.here}/30", "dev", self.cable)
        ip("link", "set", self.cable, "up")
        for words in (
            ("address", "add", f"{self.host}/30", "dev", "far"),
            ("link", "set", "far", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", self.name, *words)

    def pull(self) -> None:
        """Nothing passes, and nobody is told."""
        ip("-n", self.name, "link", "set", "far", "down")

    def plug(self) -> None:
        """As before."""
        ip("-n", self.name, "link", "set", "far", "up")

    def start(self, files: ModelFiles, port: int = 0) -> ProcessServer:
        """Shard 0, there."""
        within = ["ip", "netns", "exec", self.name]
        return ProcessServer(
            files.directory, 0, port, within, host=self.host, insecure=True
        ).ready()

    def remove(self) -> None:
        """The cable and the namespace."""
        for words in (("link", "del", self.cable), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], capture_output=True, timeout=30, check=False)


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    """A host of its own, if this machine lets us make one."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    made = Elsewhere()
    try:
        try:
            made.build()
        except (subprocess.SubprocessError, OSError) as exc:
            pytest.skip(f"no network namespace can be made here: {exc}")
        yield made
    finally:
        made.remove()


@pytest.mark.slow
def test_a_host_whose_cable_is_pulled_and_one_that_is_replaced(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    """Decoding goes on, on the local fallback; full service comes back by itself, both times."""
    files = build(random_model(23, order=4, words=50, per_order=400), tmp_path / "full", 2)
    small = build(
        random_model(24, order=3, words=40, per_order=100), tmp_path / "local_fallback", 1
    )
    servers = [elsewhere.start(files), ProcessServer(files.directory, 1).ready()]
    with Clients(tmp_path / "cache") as clients:
        try:
            client = clients(
                [server.address for server in servers],
                local_fallback=small.directory,
                heartbeat_config=HEARTBEATS,
                failover_config=FAILOVER,
            )
            with Decoders(client, [files, small], deadline_s=DEADLINE_S) as decoders:
                for replaced in (False, True):
                    begun = time.monotonic()
                    decoders.wait(lambda begun=begun: decoders.each(begun, 2, full=True))
                    broken = time.monotonic()
                    elsewhere.pull()
                    decoders.wait(lambda: client.cascade.mode is Mode.LOCAL_FALLBACK)
                    gone = time.monotonic()
                    decoders.wait(lambda gone=gone: decoders.each(gone, 2))
                    if replaced:  # its connections end while nobody hears of it
                        port = servers[0].port
                        servers[0].end()
                        servers[0] = elsewhere.start(files, port)
                    elsewhere.plug()
                    back = time.monotonic()
                    decoders.wait(lambda back=back: decoders.each(back, 2, full=True))
                    assert client.cascade.mode is Mode.FULL
                    print(
                        f"\nreplaced: {replaced}: small after {gone - broken:.2f} s, every decoder "
                        f"full {time.monotonic() - back:.2f} s after it was there again: "
                        f"{decoders.said(broken)}"
                    )
            assert max(one.late_s for one in decoders.calls) < GRACE_S + NOISE_S
        finally:
            for server in servers:
                server.end()
