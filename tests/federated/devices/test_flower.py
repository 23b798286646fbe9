"""Rounds on devices behind Flower's own processes: a SuperLink and a SuperNode for each device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("flwr", reason="pip install -e '.[flower]'")

from certificates import Authority  # noqa: E402
from cluster import WAIT_S, free_ports, until  # noqa: E402
from dlm.federated.devices.engine import RoundOutcome  # noqa: E402
from dlm.federated.devices.flower import SILENT, FlowerNodes, flower_nodes  # noqa: E402
from dlm.federated.devices.messages import from_bytes  # noqa: E402
from dlm.federated.devices.participant import Request  # noqa: E402
from dlm.federated.devices.sockets import DeviceSocket, socket_of  # noqa: E402
from dlm.federated.training import rnn  # noqa: E402
from federated.devices.test_engine import (  # noqa: E402
    DEVICES,
    KEY,
    MODEL,
    Processes,
    asked,
    engine_of,
    jnp,
    plain_sum,
    processes,
    same,
)

__all__ = ["processes"]


class Flower:
    """A SuperLink with TLS, a SuperNode for each device, and a network through them; `stop` kills a
    node before its device gets that step.

    Two nodes lie: one says that it holds the first device; one, of none, answers unasked.
    """

    def __init__(self, folder: Path, sockets: Path, stack: ExitStack) -> None:
        self.stop: tuple[str, str] | None = None
        self.network: FlowerNodes | None = None
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder, self._stack, authority = folder, stack, Authority(folder / "tls")
        port, *ports = free_ports(1 + DEVICES + 2)
        tls = ["--ssl-certfile", authority.server.cert, "--ssl-keyfile", authority.server.key]
        tls += ["--ssl-ca-certfile", authority.ca, "--disable-runtime-dependency-installation"]
        self.link = self._start("superlink", "--port", port, *tls)
        self.where = f"127.0.0.1:{port}", authority.ca
        places = {f"d{number}": sockets for number in range(DEVICES)}
        nodes = [*places.items(), ("d0", folder / "none"), ("", folder / "liar")]
        liar = DeviceSocket(socket_of(folder / "liar", ""), lambda data: b"said to nobody")
        threading.Thread(target=liar.serve, daemon=True).start()
        for own, (name, place) in zip(ports, nodes, strict=True):
            told = f'device="{name}" sockets="{place}"'
            way = ["--superlink", self.where[0], "--root-certificates", authority.ca]
            node = self._start("supernode", "--port", own, *way, "--node-config", told)
            self.nodes.setdefault(name, node)

    def _start(self, kind: str, *words: object) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name(f"flower-{kind}")), *map(str, words)]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, **SILENT, "FLWR_HOME": str(self._folder), "PATH": path}
        with (self._folder / "log").open("ab") as log:
            found = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        self._stack.enter_context(found)
        self._stack.callback(found.terminate)
        return found

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        for name, data in requests.items():
            if self.stop == (name, from_bytes(Request, data).step):
                self.nodes[name].kill()
                self.nodes[name].wait()
        assert self.network is not None
        self.network.ask(requests, hear, timeout_s, most_bytes)


@pytest.fixture
def flower(tmp_path: Path, processes: Processes) -> Iterator[Flower]:
    home = tmp_path / "flower"
    home.mkdir()
    with ExitStack() as stack:
        found = Flower(home, processes.folder, stack)
        until(lambda: f"https://{found.where[0]}" in (home / "log").read_text(), found.link)
        found.network = stack.enter_context(flower_nodes(*found.where))
        yield found


@pytest.mark.slow
@pytest.mark.promise("devices_sum")
def test_rounds_through_flower_equal_rounds_through_sockets(flower: Flower) -> None:
    """Bit for bit, whatever other nodes say; a node that is killed in a round costs its device."""
    outcomes: list[RoundOutcome] = []
    engine = engine_of(flower, outcomes, step_s=WAIT_S)
    everybody = dict.fromkeys(asked(0).names, True)
    until(lambda: engine.ready("run", 0, everybody, WAIT_S) == everybody, flower.link)
    params = rnn.init(jax.random.key(1), MODEL)
    for index, survivors in ((0, [0, 1, 2, 3]), (2, [0, 1, 3])):
        if len(survivors) < DEVICES:
            flower.stop = ("d2", "delivery")
        key = KEY.fold("aggregation", index)
        found = engine.sums(params, asked(index), jnp.float32(1.0), jnp.float32(0.5), key)
        assert outcomes[-1].survivors == len(survivors), outcomes[-1]
        same(found, plain_sum(params, key, survivors))
