"""Gateways for tests, and calls by each of their doors. No test starts one in another way."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import uvloop
from google.protobuf import json_format

from cluster import WAIT_S, CommandServer, until
from dlm.gateway.answers import SERVICE
from dlm.gateway.app import Gateway, Opening
from dlm.gateway.calls import CALLS
from dlm.gateway.config import GatewayConfig
from dlm.server.health import Event
from dlm.server.process import Notice
from dlm.wire._pb import lm_pb2 as pb
from dlm.wire.status import REASON_KEY, reason_of

DOORS = ("grpc", "json", "proto")


class ThreadGateway:
    """A `Gateway`, the class that the command runs, in a thread of this process."""

    def __init__(self, opening: Opening, **config: Any) -> None:
        self.gateway: Gateway | None = None
        self.status: Future[int] = Future()
        self._ready: Future[Any] = Future()
        self._config = GatewayConfig(**{"port": 0, "http_port": 0, "drain_grace_s": 0.0, **config})
        self._opening = opening
        self._callers: list[Caller] = []
        threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True).start()

    async def _run(self) -> None:
        try:
            self.gateway = Gateway(self._config, self._opening, Notice(self._ready.set_result))
            self.status.set_result(await self.gateway.run())
        except BaseException as exc:  # noqa: BLE001 - the test that waits gets it
            self.status.set_exception(exc)
            if not self._ready.done():
                self._ready.set_exception(exc)

    def ready(self) -> ThreadGateway:
        """Returns once the first call can be answered."""
        self._ready.result(WAIT_S)
        return self

    @property
    def running(self) -> Gateway:
        """The gateway itself; waits until its ports are bound."""
        until(lambda: self.status.done() or bool(self.gateway and self.gateway.http_port))
        assert self.gateway is not None
        return self.gateway

    def caller(self, door: str, token: str = "") -> Caller:
        """A caller, whose connection is closed at the end of `with`."""
        self._callers.append(Caller(self, door, token))
        return self._callers[-1]

    def end(self) -> int:
        """Drains it; returns its status."""
        if not self.status.done():
            self.running.post(Event.STOP)
        return self.status.result(WAIT_S)

    def __enter__(self) -> ThreadGateway:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        for caller in self._callers:
            caller.close()
        self.end()


class CommandGateway(CommandServer):
    """`dlm gateway` on free ports, which drains for 0.2 s; with `with` its status must be 0."""

    def __init__(self, *arguments: object, cwd: Path, name: str = "gateway") -> None:
        self.file, config = cwd / f"{name}.json", cwd / f"{name}.toml"
        config.write_text("[gateway]\ndrain_grace_s = 0.2\n")
        line = ("--port", 0, "--http-port", 0, "--ready-file", self.file, "--config", config)
        super().__init__("gateway", *line, *arguments, cwd=cwd, ready_file=self.file)

    @property
    def running(self) -> SimpleNamespace:
        """Its ports, as `ThreadGateway.running` has them; waits until it is ready."""
        return SimpleNamespace(**json.loads(self.ready().file.read_text()))


@dataclass
class Refused(Exception):
    """What a caller gets instead of a reply, by either door."""

    reason: str | None
    status: Any
    message: str = field(repr=False)


class Caller:
    """Calls by one door; the connection is kept between calls."""

    def __init__(self, gateway: ThreadGateway | CommandGateway, door: str, token: str = "") -> None:
        self.door = door
        self._token = token
        if door == "grpc":
            self._channel = grpc.insecure_channel(
                f"127.0.0.1:{gateway.running.port}",
                options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)],
            )
        else:
            self._http = http.client.HTTPConnection(
                "127.0.0.1", gateway.running.http_port, timeout=WAIT_S
            )

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What carries the token."""
        return [("authorization", f"Bearer {self._token}")] if self._token else []

    def __call__(self, call: str, /, timeout_s: float = WAIT_S, **request: Any) -> Any:
        """The reply's message; raises `Refused`."""
        message = CALLS[call][0](**request)
        if self.door == "grpc":
            method = self._channel.unary_unary(f"/{SERVICE}/{call}")
            try:
                data = method(
                    message.SerializeToString(), timeout=timeout_s, metadata=self.metadata
                )
            except grpc.RpcError as exc:
                raise Refused(reason_of(exc), exc.code(), exc.details()) from None
            return CALLS[call][1].FromString(data)
        if self.door == "proto":
            status, headers, body = self.post(
                call, message.SerializeToString(), "application/proto", timeout_s
            )
        else:
            text = json_format.MessageToJson(message)
            status, headers, body = self.post(call, text.encode(), "application/json", timeout_s)
        if status != 200:
            raise Refused(headers.get(REASON_KEY), status, body.decode())
        if self.door == "proto":
            return CALLS[call][1].FromString(body)
        return json_format.Parse(body, CALLS[call][1]())

    def post(
        self, call: str, body: bytes, kind: str = "application/json", timeout_s: float = WAIT_S
    ) -> tuple[int, Any, bytes]:
        """Status, headers and body of what HTTP answers."""
        headers = {"Content-Type": kind, "Connect-Timeout-Ms": str(int(1000 * timeout_s))}
        self._http.request("POST", f"/{SERVICE}/{call}", body, headers | dict(self.metadata))
        answer = self._http.getresponse()
        return answer.status, answer.headers, answer.read()

    def stream(self, requests: Any) -> Any:
        """The replies of ExtendStream."""
        method = self._channel.stream_stream(
            f"/{SERVICE}/ExtendStream",
            request_serializer=pb.ExtendRequest.SerializeToString,
            response_deserializer=pb.ExtendReply.FromString,
        )
        return method(requests, timeout=WAIT_S, metadata=self.metadata)

    def close(self) -> None:
        """Closes the connection."""
        (self._channel if self.door == "grpc" else self._http).close()
