"""The life of a server or gateway process: it starts, warms up, answers, drains and ends.

`health.step` decides what to do; this module does it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector

from dlm.errors import ConfigError
from dlm.logs import EventLog
from dlm.server.admission import Admission
from dlm.server.exposition import HttpServer, exposition, tcp_socket
from dlm.server.health import HEALTH_SERVICE, Action, Event, HealthService, ServingState, step
from dlm.server.metrics import CallCounts
from dlm.server.poller import grpc
from dlm.server.process import BEAT_S, Heap, Notice, Process, Ready
from dlm.server.security import Credentials, Guard, channel_options
from dlm.wire import pairs

if TYPE_CHECKING:
    from dlm.server.exchange import Models

logger = EventLog(__name__)

# For this many seconds after the last message has ended, messages still in transit are refused.
STOP_GRACE_S = 0.5
# A draining process ends once no message has come for this long. The time is longer than the time
# between a client's heartbeats (0.6 s), so a client that asks steadily has moved to another server.
QUIET_S = 1.0
LINGER_LOOK_S = 0.02


class Life(ABC):
    """One process's life, on the running event loop; `post` passes events to `run`.

    Attributes  port  0 until it is bound
    """

    def __init__(
        self,
        config: Any,
        process: Process,
        serving: Admission | Models,
        service: str,
        metrics: Callable[[], CallCounts],
        notice: Notice | None,
        credentials: Credentials | None,
    ) -> None:
        self.config, self.process, self.port = config, process, 0
        self.credentials = credentials or Credentials(config)
        if (certificates := self.credentials.certificates) is not None:
            process.certificate_days = certificates.days_left
        self.guard = Guard(config, metrics, serving.turns.call, self.credentials)
        self._serving, self._service = serving, service
        self._phase = serving.phase
        self._health = HealthService(serving.phase.state, service)
        self._notice = notice or Notice()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None  # the error that `run` raises
        self._drained = False  # whether every message accepted before the first refusal is answered
        self._heap = Heap(process.memory.bytes())
        self._server: Any = None

    # -------------------------------------------------------- what differs

    @abstractmethod
    async def _start(self) -> None:
        """Creates the server, which usually listens from then on."""

    @abstractmethod
    async def _warm_up(self) -> None:
        """Runs every code path once, before the server is ready; an error ends the process."""

    @abstractmethod
    async def _entered(self, before: ServingState, event: Event) -> None:
        """Logs a new state, after an event and before its actions."""

    @abstractmethod
    def _shown(self) -> tuple[Collector, Callable[[], bytes]]:
        """Returns the collector of metrics, and the function that makes the page /load."""

    @abstractmethod
    def _ready(self) -> Ready:
        """Returns the facts that the parent process gets."""

    @abstractmethod
    async def _close(self) -> None:
        """Closes the server once it can answer nothing more."""

    @abstractmethod
    def _ended(self, whole: bool) -> None:
        """Logs the end, and whether everything in flight was answered."""

    # ------------------------------------------------------------------- life

    def post(self, event: Event) -> None:
        """Passes `event` to `run`; from any thread. After the end it is ignored."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def run(self) -> int:
        """Runs until an event ends it; returns and raises what `app.serve` does."""
        async with AsyncExitStack() as held:
            held.push_async_callback(self._close)
            beating = asyncio.create_task(self._beat())
            held.callback(self.process.watchdog.close)
            held.callback(beating.cancel)
            held.push_async_callback(self._stop)
            await self._start()
            if (shown := self._show()) is not None:
                held.push_async_callback(asyncio.to_thread, shown.close)
            held.callback(self._notice.withdraw)
            warming = asyncio.create_task(self._warm())
            held.callback(warming.cancel)
            with pairs.few_wakes(self._loop):
                last = await self._live()
            # A message about to be refused counts as in flight too, but is not cut off.
            whole = self._drained or self._serving.in_flight == 0
            await self._health.close()
            if last is Event.DRAINED and whole:
                await self._server.stop(STOP_GRACE_S)
        self._ended(whole)
        if self._failure is not None:
            raise self._failure
        return 0 if whole else 1

    async def _warm(self) -> None:
        try:
            await self._warm_up()
        except Exception as exc:  # noqa: BLE001 - handed to `run`, which raises it
            self._failure = exc
            self.post(Event.FAILED)
        else:
            self.post(Event.WARMED)

    async def _stop(self) -> None:
        self.guard.close()
        if self._server is not None:
            await self._server.stop(None)

    def _make(self, *handlers: Any) -> None:
        from grpc_reflection.v1alpha import reflection  # imports gRPC, so `poller` must be first

        options = channel_options(
            max_message_bytes=self.config.max_message_bytes,
            max_in_flight=self.config.max_in_flight,
            shares_port=self.config.share_port,
        )
        with pairs.accepting_ahead():
            self._server = grpc.aio.server(options=options, interceptors=(self.guard,))
        self._server.add_generic_rpc_handlers((*handlers, self._health.handlers()))
        names = (self._service, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _bind(self) -> None:
        try:
            self.port = self.guard.bind(self._server, self.config.address)
        except RuntimeError as exc:
            if trouble := self.process.open_files.check():
                raise ConfigError(trouble) from exc
            raise ConfigError(
                f"{self.config.address} cannot be bound: another process listens there, or this "
                "machine has no such address. Stop that process, choose another port (0 picks a "
                "free one), or start both servers with --share-port"
            ) from exc

    async def _listen(self) -> None:
        await self._server.start()
        self.guard.start()

    def _show(self) -> HttpServer | None:
        config = self.config
        if not config.metrics_port:
            return None
        listening = tcp_socket(config.metrics_host, config.metrics_port)
        collector, load = self._shown()
        state = lambda: self._phase.state  # noqa: E731
        return exposition(listening, collector, state, self._loop, load=load, trouble=self._trouble)

    def _trouble(self) -> str:
        return self.process.open_files.trouble

    async def _beat(self) -> None:
        was_in_trouble = False
        while True:
            try:
                self.process.watchdog.beat()
                self.process.open_files.check()
                now = self._loop.time()
                if self._heap.is_due(self.process.memory.bytes(), now):
                    self._loop.run_in_executor(None, self._heap.trim, now)
                if bool(self._trouble()) != was_in_trouble:
                    was_in_trouble = not was_in_trouble
                    await self._announce()
            except Exception as exc:
                logger.error("server.beat.failed", exc_info=True, extra={"error": repr(exc)})
            await asyncio.sleep(BEAT_S)

    async def _announce(self) -> None:
        await self._health.announce(self._phase.state, in_trouble=bool(self._trouble()))

    async def _live(self) -> Event:
        drain: asyncio.Task[None] | None = None
        while True:
            event = await self._events.get()
            before = self._phase.state
            self._phase.state, actions = step(before, event)
            await self._entered(before, event)
            for action in actions:
                if action is Action.ANNOUNCE:
                    await self._announce()
                elif action is Action.PUBLISH:
                    self._notice.publish(self._ready())
                    self.process.watchdog.ready()
                elif action is Action.DRAIN:
                    self._notice.withdraw()
                    self._phase.refuses = before is ServingState.WARMING
                    drain = asyncio.create_task(self._drain())
                elif action is Action.CLOSE:
                    if drain is not None:
                        drain.cancel()
                    return event

    async def _drain(self) -> None:
        serving = self._serving
        end = self._loop.time() + self.config.drain_grace_s
        while not self._phase.refuses and serving.is_wanted(QUIET_S) and self._loop.time() < end:
            await asyncio.sleep(LINGER_LOOK_S)
        self._phase.refuses = True
        try:
            async with asyncio.timeout(self.config.shutdown_timeout_s):
                while self.guard.half_received:  # these messages are refused once they have arrived
                    await asyncio.sleep(LINGER_LOOK_S)
                await serving.idle()
            self._drained = True
        except TimeoutError:
            logger.warning("server.drain.timed_out", extra={"in_flight": serving.in_flight})
        self.post(Event.DRAINED)
