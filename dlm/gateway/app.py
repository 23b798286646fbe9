"""Runs a gateway from start to end: bind, connect, warm up, answer, drain."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from dlm.client import AsyncClient, Phrases, loop
from dlm.client.table import KERNELS
from dlm.errors import ConfigError
from dlm.gateway import kernels
from dlm.gateway.answers import SERVICE
from dlm.gateway.calls import Dispatcher, RpcDoor
from dlm.gateway.config import GatewayConfig
from dlm.gateway.http import HttpDoor, pages
from dlm.gateway.metrics import GatewayCollector, GatewayMetrics
from dlm.jit import compile_ahead
from dlm.logs import EventLog
from dlm.server.exposition import load_page
from dlm.server.health import Event, ServingState
from dlm.server.life import Life
from dlm.server.process import Notice, Process, Ready, Watchdog, keep_objects
from dlm.server.security import Credentials, allow_connections
from dlm.signals import stopping

logger = EventLog(__name__)

# The loop waits this long to take the GIL from the thread that reads and writes JSON.
SWITCH_S = 0.0005

Opening = Callable[[], Awaitable[AsyncClient]]


def serve(
    config: GatewayConfig,
    opening: Opening,
    *,
    ready_file: Path | None = None,
) -> int:
    """Answers calls until a stop signal comes, with the client that `opening` opens on the event
    loop. Returns 0 if every call in flight was answered, 1 if not. Raises what `opening` raises;
    ConfigError if a port cannot be bound, or a file of tokens or certificates is unusable."""
    allow_connections()
    credentials = Credentials(config)
    compile_ahead((*KERNELS, kernels.write_states, kernels.changed_state))
    notice = Notice(file=ready_file)
    made: list[Gateway] = []
    signalled = False

    async def main() -> int:
        process = Process(watchdog=Watchdog(ends=True))
        made.append(Gateway(config, opening, notice, credentials, process))
        keep_objects()
        sys.setswitchinterval(SWITCH_S)
        if signalled:
            made[0].post(Event.STOP)
        return await made[0].run()

    def stop() -> None:
        nonlocal signalled
        signalled = True
        for gateway in made:
            gateway.post(Event.STOP)

    with stopping(stop):
        return loop.run(main)


class Gateway(Life):
    """Serves both protocols, gRPC and HTTP, on the running event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        opening: Opening,
        notice: Notice | None = None,
        credentials: Credentials | None = None,
        process: Process | None = None,
    ) -> None:
        self.metrics = GatewayMetrics()
        self.calls = Dispatcher(config, self.metrics)
        serving, process = self.calls.admission, process or Process()
        super().__init__(
            config, process, serving, SERVICE, lambda: self.metrics, notice, credentials
        )
        self.http_port = 0
        self._open_client = opening
        self._http = HttpDoor(self.calls, self.guard, self.metrics, pages())
        self._client: AsyncClient | None = None

    async def _start(self) -> None:
        self._make(RpcDoor(self.calls).handlers())
        # If several processes share a port, each listens only once it can answer, since it gets a
        # share of the connections.
        if not self.config.share_port:
            await self._listen()

    async def _close(self) -> None:
        await self._http.close()
        if self._client is not None:
            await self._client.close()

    def _ended(self, whole: bool) -> None:
        logger.info("gateway.stopped", extra={"whole": whole})

    # -------------------------------------------------------------------- start

    async def _listen(self) -> None:
        """Listens on both ports. Raises ConfigError if a port cannot be bound."""
        config = self.config
        self._bind()
        try:
            self.http_port = await self._http.start(
                config.host,
                config.http_port,
                self.credentials.certificates,
                shares_port=config.share_port,
            )
        except OSError as exc:
            raise ConfigError(
                f"{config.host}:{config.http_port} cannot be bound for HTTP: "
                f"{exc.strerror or exc}. Choose another http_port (--http-port)"
            ) from exc
        await super()._listen()

    def _shown(self) -> tuple[GatewayCollector, Callable[[], bytes]]:
        client = lambda: None if self._client is None else self._client.metrics  # noqa: E731
        collector = GatewayCollector(self.metrics, lambda: self._phase.state, client, self.process)
        return collector, lambda: load_page(())  # a gateway has no shards

    async def _warm_up(self) -> None:
        """Connects the client, and makes calls that run all its kernels, which may compile them."""
        self._client = client = await self._open_client()
        utterance = client.utterance()
        await utterance.score_sentences([b"<unk> <unk> <unk>"])
        found = await utterance.extend([utterance.begin(), utterance.null()], [0, 0])
        with_phrases = utterance.with_phrases(Phrases({"a phrase": 1.0}))
        await with_phrases.extend([with_phrases.begin()], [0])
        await with_phrases.score_sentences([b"<unk>"])
        await utterance.next_words(found.states[0, 0], 1)
        self.calls.open(client)

    # --------------------------------------------------------------------- life

    async def _entered(self, before: ServingState, event: Event) -> None:
        state = self._phase.state
        if state is ServingState.READY and not self.port:
            await self._listen()
        logger.info(
            "gateway.ready" if event is Event.WARMED else "gateway.state",
            extra={
                "cause": event.name,
                "to_state": state.name,
                "port": self.port,
                "http_port": self.http_port,
                "in_flight": self.metrics.in_flight,
            },
        )

    def _ready(self) -> Ready:
        ports = {"port": self.port, "http_port": self.http_port}
        return {"host": self.config.host, **ports, "pid": os.getpid()}
