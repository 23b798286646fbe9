"""Flower as the way to devices on other machines. Its processes pass bytes on, and keep nothing.

A run's server and its devices are long processes, and Flower starts one per message. So the server
has Flower start a `ServerApp`, which calls back at a local socket and sends what it hears there to
nodes; on a node, a `ClientApp` hands each message to the socket of the device, and returns its
answer. Which node holds which device, a node says; that it does, the device's signatures show.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dlm.errors import ConfigError, ProtocolError, UnavailableError
from dlm.federated.devices.messages import from_bytes, to_bytes
from dlm.federated.devices.sockets import LINE_S, LONGEST, ask_one, receive, send, socket_of
from dlm.files import scratch_folder

START_S = 120.0  # for Flower to start the ServerApp
POLL_S = 0.3  # between two looks for replies
RUN_S = 1e6  # that a ServerApp waits for its server, at most
RECORD = "dlm"
ENOUGH = b"enough"  # what a server sends once it has the answers that it needs
# Of `flwr run`, and of whoever starts Flower's other processes: nothing is told to its makers.
SILENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
APP = """\
[project]
name = "devices"
version = "1.0.0"
description = "Carries messages of dlm devices"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "dlm"
[tool.flwr.app.components]
serverapp = "dlm.federated.devices.flower:server_app"
clientapp = "dlm.federated.devices.flower:client_app"
[tool.flwr.app.config]
socket = ""
"""

server_app = ServerApp()
client_app = ClientApp()


@dataclass(frozen=True, slots=True)
class Ask:
    """What a server begins with; so many `Parcel` follow, the requests."""

    count: int
    timeout_s: float
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """A request or an answer of a device; no name after the last answer."""

    name: str
    data: bytes


class FlowerNodes:
    """The `Network` of devices behind Flower's nodes; `line` leads to a `ServerApp`."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        """As of `Network`; ProtocolError if Flower has ended the `ServerApp`."""
        end_s = time.monotonic() + timeout_s + LINE_S
        try:
            send(self._line, to_bytes(Ask(len(requests), float(timeout_s), most_bytes)), end_s)
            for name, data in requests.items():
                send(self._line, to_bytes(Parcel(name, data)), end_s)
            while (one := self._next(end_s)).name:
                send(self._line, ENOUGH if hear(one.name, one.data) else b"", end_s)
        except (EOFError, OSError) as exc:
            raise ProtocolError(
                "Flower's ServerApp, which passes messages on, has ended or hangs. The SuperLink "
                "logs why; the same command goes on from here"
            ) from exc

    def _next(self, end_s: float) -> Parcel:
        return from_bytes(Parcel, receive(self._line, end_s, end_s, LONGEST))


@contextmanager
def flower_nodes(superlink: str, root_certificates: Path | None) -> Iterator[FlowerNodes]:
    """Nodes of the SuperLink at this address, which runs on this machine as this user.

    Args    root_certificates  that it is checked by; None: those of the system
    Raises  ConfigError  `flwr run` fails
            UnavailableError  no ServerApp calls back
    """
    with scratch_folder(None, "dlm-flower") as home, socket.socket(socket.AF_UNIX) as listener:
        path = socket_of(home, "server")
        given = f"address = {json.dumps(superlink)}\n"
        if root_certificates is not None:
            given += f"root-certificates = {json.dumps(str(root_certificates.absolute()))}\n"
        (home / "config.toml").write_text(f"[superlink.dlm]\n{given}")
        (home / "app").mkdir()
        (home / "app/pyproject.toml").write_text(APP)
        listener.bind(str(path))
        listener.listen()
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        command = [shutil.which("flwr", path=places) or "flwr", "run", f"{home}/app", "dlm"]
        done = subprocess.run(
            [*command, "--run-config", f'socket="{path}"'],
            env={**os.environ, **SILENT, "FLWR_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            said = " ".join(re.sub("[─│╭╮╰╯]", " ", done.stdout).split())
            raise ConfigError(
                f"no SuperLink answers at {superlink}, or {root_certificates or 'this system'} "
                f"(--root-certificates) does not vouch for its certificate; flwr run says: {said}"
            )
        listener.settimeout(START_S)
        try:
            line, _ = listener.accept()
        except TimeoutError as exc:
            raise UnavailableError(
                f"the SuperLink {superlink} started no ServerApp on this machine in {START_S:g} s; "
                "expected one of this user, in an environment with dlm, whose log tells why"
            ) from exc
        with line:
            yield FlowerNodes(line)


def _serve(grid: Grid, context: Context) -> None:
    """Passes on what a server asks until it hangs up."""
    held: dict[int, str] = {}
    with socket.socket(socket.AF_UNIX) as line, suppress(EOFError, OSError):
        line.connect(str(context.run_config["socket"]))
        while True:
            end_s = time.monotonic() + RUN_S
            asked = from_bytes(Ask, receive(line, end_s, end_s, LONGEST))
            parts = (receive(line, end_s, end_s, LONGEST) for _ in range(asked.count))
            requests = {one.name: one.data for one in (from_bytes(Parcel, part) for part in parts)}
            for answer in _answers(grid, held, requests, asked):
                send(line, to_bytes(answer), time.monotonic() + LINE_S)
                if receive(line, end_s, end_s, LONGEST) == ENOUGH:
                    break
            send(line, to_bytes(Parcel("", b"")), time.monotonic() + LINE_S)


def _answers(
    grid: Grid, held: dict[int, str], requests: Mapping[str, bytes], asked: Ask
) -> Iterator[Parcel]:
    """Of each node that says it holds a device, as they come: a node may lie, and which answer is
    the device's, the server sees. Ends with the last of them, or once the time is over.

    Args  held  node -> device, as nodes said; those that come are asked, those that went removed
    """
    end_s = time.monotonic() + asked.timeout_s
    waiting: dict[str, tuple[int, str]] = {}

    def pass_on(node: int, name: str) -> None:
        left_s = max(end_s - time.monotonic(), 1.0)
        record = {
            "device": name,
            "data": requests.get(name, b""),
            "timeout_s": left_s,
            "most_bytes": asked.most_bytes,
        }
        content = RecordDict({RECORD: ConfigRecord(record)})
        for said in grid.push_messages([Message(content, node, "query", ttl=left_s)]):
            waiting[said] = node, name

    online = set(grid.get_node_ids())
    for node in held.keys() - online:
        del held[node]
    for node in online:
        if (name := held.get(node, "")) in requests or not name:
            pass_on(node, name)
    missing = requests.keys() - set(held.values())
    while time.monotonic() < end_s and any(name or missing for _, name in waiting.values()):
        for reply in grid.pull_messages(list(waiting)):
            node, name = waiting.pop(reply.metadata.reply_to_message_id)
            device, data = _said(reply)
            if device != name:
                held[node] = device
                missing.discard(device)
                if not name and device in requests:
                    pass_on(node, device)
            elif name and data and len(data) <= asked.most_bytes:
                yield Parcel(name, data)
        time.sleep(POLL_S)


def _said(reply: Message) -> tuple[str, bytes]:
    """(device, answer); empty if the node says neither."""
    record = reply.content.config_records.get(RECORD, {}) if reply.has_content() else {}
    device, data = record.get("device"), record.get("data")
    return (device, data) if isinstance(device, str) and isinstance(data, bytes) else ("", b"")


def _hand_in(message: Message, context: Context) -> Message:
    """A node's reply: its device, and the device's answer if it is the one that was meant."""
    device, folder = str(context.node_config["device"]), Path(str(context.node_config["sockets"]))
    asked, data = message.content.config_records[RECORD], b""
    if asked["device"] == device:
        end_s = time.monotonic() + asked["timeout_s"]
        with suppress(EOFError, OSError, ProtocolError):
            path = socket_of(folder, device)
            data = ask_one(path, asked["data"], end_s, asked["most_bytes"])
    said = {"device": device, "data": data}
    return Message(RecordDict({RECORD: ConfigRecord(said)}), reply_to=message)


server_app.main()(_serve)
client_app.query()(_hand_in)
