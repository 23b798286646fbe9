"""A gateway from start to end: bind, connect, warm up, answer, drain."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlm.client import AsyncClient, Phrases
from dlm.client.deliver import loop
from dlm.client.deliver.warm import KERNELS
from dlm.errors import ConfigError
from dlm.gateway import kernels
from dlm.gateway.answers import SERVICE
from dlm.gateway.calls import Dispatcher
from dlm.gateway.config import GatewayConfig
from dlm.gateway.http import HttpDoor, pages
from dlm.gateway.metrics import GatewayCollector, GatewayMetrics
from dlm.gateway.rpc import RpcDoor
from dlm.gateway.traffic import Traffic
from dlm.jit import compile_ahead
from dlm.logs import EventLog
from dlm.server.config import address_of
from dlm.server.exposition import load_page, worker_exposition
from dlm.server.health import (
    HEALTH_SERVICE,
    Action,
    Event,
    HealthService,
    ServingState,
    step,
)
from dlm.server.http import HttpServer, tcp_socket
from dlm.server.poller import grpc
from dlm.server.port import cannot_be_bound, reserved
from dlm.server.process import Notice, OnReady, Process
from dlm.server.security import Credentials, Guard, allow_connections, channel_options
from dlm.server.workers import BEAT_S, Supervisor
from dlm.signals import stop_signals
from dlm.wire import pairs
from dlm.wire.certificates import read_certificates

logger = EventLog(__name__)

STOP_GRACE_S = 0.5
# A draining gateway ends once no call has come for this long, but not before balancers have seen
# that it is no longer ready.
QUIET_S = 1.0
LOOK_S = 0.02
Opening = Callable[[], Awaitable[AsyncClient]]


@dataclass(frozen=True, slots=True)
class GatewayReady:
    """What a parent process needs to know about a ready gateway."""

    host: str
    port: int
    http_port: int
    pid: int
    workers: int = 1


def serve(
    config: GatewayConfig,
    opening: Opening,
    *,
    on_ready: OnReady | None = None,
    ready_file: Path | None = None,
) -> int:
    """Answers until one of `stop_signals`.

    Args     opening   opens the client on the event loop; the gateway closes it
    Returns  0 if every call in flight was answered, 1 if one was cut off
    Raises   ConfigError  a port cannot be bound, a file of tokens or certificates is unusable
             what `opening` raises
    """
    allow_connections()
    credentials = Credentials(config)
    compile_ahead((*KERNELS, kernels.write_states, kernels.changed_state))
    notice = Notice(on_ready, ready_file)
    if config.workers == 1:
        return _run(lambda: Gateway(config, opening, notice, credentials), stop_signals())
    traffic = Traffic(config.workers)
    address = address_of(config.host, config.http_port)
    with reserved(config.host, config.http_port, address=address) as http_port:

        def work(port: int, process: Process, tell: OnReady) -> int:
            own = replace(config, port=port, http_port=http_port)
            # A terminal's signals reach every process; its supervisor sends a worker this one.
            ends = (signal.SIGTERM,)
            return _run(
                lambda: Gateway(own, opening, Notice(tell), credentials, process, traffic), ends
            )

        return Supervisor(
            config,
            warm=lambda: None,
            work=work,
            notice=notice,
            look=credentials.reload_changed if credentials.watches else None,
            ready=GatewayReady,
        ).run()


def _run(make: Callable[[], Gateway], ends: Sequence[signal.Signals]) -> int:
    """Runs a gateway on the loop of its client, until one of these signals."""
    made: list[Gateway] = []

    async def main() -> int:
        made.append(make())
        if signalled:
            made[0].post(Event.STOP)
        return await made[0].run()

    signalled: list[int] = []

    def stop(number: int, _: object) -> None:
        signalled.append(number)
        for gateway in made:
            gateway.post(Event.STOP)

    for number in ends:
        signal.signal(number, stop)
    return loop.run(main)


class Gateway:
    """Both doors on the running event loop; `run` carries out what `health.step` says."""

    def __init__(
        self,
        config: GatewayConfig,
        opening: Opening,
        notice: Notice | None = None,
        credentials: Credentials | None = None,
        process: Process | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.config = config
        self.process = process or Process()
        self._traffic = (traffic or Traffic()).writer(self.process.worker)
        self.metrics = GatewayMetrics()
        self.calls = Dispatcher(config, self.metrics)
        self.port = self.http_port = self.metrics_port = 0
        self._opening = opening
        self._notice = notice or Notice()
        self._credentials = credentials or Credentials(config)
        self._guard = Guard(config, self.metrics, self._credentials)
        self._http = HttpDoor(self.calls, self._guard, self.metrics, pages())
        self._health = HealthService(ServingState.WARMING, SERVICE)
        self._client: AsyncClient | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None
        self._drained = False
        self._tls: ssl.SSLContext | None = None
        self._server: Any = None

    @property
    def state(self) -> ServingState:
        return self.calls.admission.state

    def post(self, event: Event) -> None:
        """Passes `event` to `run`; from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def run(self) -> int:
        """Serves until an event ends it; returns and raises as `serve` does."""
        server = self._server = self._make()
        beating = asyncio.create_task(self._beat())
        try:
            if not self.process.shares_port:
                await self._listen()
            shown = self._show()
            opening = asyncio.create_task(self._open())
            try:
                with pairs.few_wakes(self._loop):
                    last = await self._serve()
                await self._health.close()
                if last is Event.DRAINED:
                    await server.stop(STOP_GRACE_S)
            finally:
                self._notice.withdraw()
                opening.cancel()
                if shown is not None:
                    await asyncio.to_thread(shown.close)
        finally:
            beating.cancel()
            self._guard.close()
            await self._http.close()
            await server.stop(None)
            if self._client is not None:
                await self._client.close()
        whole = self._drained or not self.metrics.in_flight
        logger.info("gateway.stopped", extra={"whole": whole})
        if self._failure is not None:
            raise self._failure
        return 0 if whole else 1

    async def _beat(self) -> None:
        """Reports that this loop runs, if anyone watches, and what it has answered."""
        while True:
            if self.process.beat is not None:
                self.process.beat()
            if self._client is not None and self.state is not ServingState.WARMING:
                self._traffic.write(self.metrics, self._client)
            await asyncio.sleep(BEAT_S)

    # -------------------------------------------------------------------- start

    async def _listen(self) -> None:
        """Binds both ports. A worker does so once it can answer: it would get its share of new
        connections before.

        Raises  ConfigError  one cannot be bound
        """
        config = self.config
        try:
            self.port = self._guard.bind(self._server, config.address)
        except RuntimeError as exc:
            raise cannot_be_bound(config.address) from exc
        self._tls = self._context()
        try:
            self.http_port = await self._http.start(
                config.host, config.http_port, self._tls, shares_port=self.process.shares_port
            )
        except OSError as exc:
            raise ConfigError(
                f"{config.host}:{config.http_port} cannot be bound for HTTP: "
                f"{exc.strerror or exc}. Choose another http_port (--http-port)"
            ) from exc
        await self._server.start()
        self._guard.start()

    def _make(self) -> Any:
        from grpc_reflection.v1alpha import reflection  # it imports gRPC, which `poller` must first

        config = self.config
        server = grpc.aio.server(
            options=channel_options(
                max_message_bytes=config.max_message_bytes,
                max_in_flight=config.max_in_flight,
                shares_port=self.process.shares_port,
            ),
            interceptors=(self._guard,),
        )
        server.add_generic_rpc_handlers((RpcDoor(self.calls).handlers(), self._health.handlers()))
        names = (SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    def _context(self) -> ssl.SSLContext | None:
        """TLS of the door by HTTP, from the files of the other; read again when they change."""
        if not self.config.tls_cert:
            return None
        first = self._load()
        newest = [first]

        # A context forgets no authority, so each change makes a new one, for the next handshakes.
        def choose(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = newest[0]

        def change() -> None:
            newest[0] = self._load()

        first.sni_callback = choose
        self._credentials.on_certificates = change
        return first

    def _load(self) -> ssl.SSLContext:
        config = self.config
        read_certificates(ca=config.tls_client_ca, cert=config.tls_cert, key=config.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(config.tls_client_ca)
        return context

    def _show(self) -> HttpServer | None:
        config = self.config
        if self.process.metrics_socket is not None:
            listening = self.process.metrics_socket
        elif config.metrics_port:
            listening = tcp_socket(config.metrics_host, config.metrics_port)
        else:
            return None
        collector = GatewayCollector(
            self.metrics,
            lambda: self.state,
            lambda: None if self._client is None else self._client.metrics,
        )
        return worker_exposition(
            listening,
            collector,
            lambda: self.state,
            self._loop,
            load=lambda: load_page(()),  # it has no shards
        )

    async def _open(self) -> None:
        """Connects the client and takes every path through its kernels, which may compile them."""
        try:
            self._client = client = await self._opening()
            utterance = client.utterance()
            await utterance.score_sentences([b"<unk> <unk> <unk>"])
            found = await utterance.extend([utterance.begin(), utterance.null()], [0, 0])
            with_phrases = utterance.with_phrases(Phrases({"a phrase": 1.0}))
            await with_phrases.extend([with_phrases.begin()], [0])
            await with_phrases.score_sentences([b"<unk>"])
            await utterance.next_words(found.states[0, 0], 1)
            self.calls.open(client, self._traffic)
        except Exception as exc:  # noqa: BLE001 - handed to `run`, which raises it
            self._failure = exc
            self.post(Event.FAILED)
            return
        self.post(Event.WARMED)

    # --------------------------------------------------------------------- life

    async def _serve(self) -> Event:
        drain: asyncio.Task[None] | None = None
        admission = self.calls.admission
        while True:
            event = await self._events.get()
            before = admission.state
            admission.state, actions = step(before, event)
            if event is Event.WARMED and Action.PUBLISH in actions and not self.port:
                await self._listen()
            logger.info(
                "gateway.ready" if event is Event.WARMED else "gateway.state",
                extra={
                    "cause": event.name,
                    "to_state": admission.state.name,
                    "port": self.port,
                    "http_port": self.http_port,
                    "in_flight": self.metrics.in_flight,
                },
            )
            for action in actions:
                if action is Action.ANNOUNCE:
                    await self._health.announce(admission.state)
                elif action is Action.PUBLISH:
                    config = self.config
                    self._notice.publish(
                        GatewayReady(config.host, self.port, self.http_port, os.getpid())
                    )
                elif action is Action.DRAIN:
                    self._notice.withdraw()
                    admission.refuses = before is ServingState.WARMING
                    drain = asyncio.create_task(self._drain())
                elif action is Action.CLOSE:
                    if drain is not None:
                        drain.cancel()
                    return event

    async def _drain(self) -> None:
        """Answers while callers move away, then refuses new calls and finishes the others."""
        admission = self.calls.admission
        end = self._loop.time() + self.config.drain_grace_s
        while not admission.refuses and self._loop.time() < end and admission.asked_within(QUIET_S):
            await asyncio.sleep(LOOK_S)
        admission.refuses = True
        try:
            async with asyncio.timeout(self.config.shutdown_timeout_s):
                await admission.idle()
            self._drained = True
        except TimeoutError:
            logger.warning("gateway.drain.timed_out", extra={"in_flight": self.metrics.in_flight})
        self.post(Event.DRAINED)
