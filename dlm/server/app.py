"""A shard server process from start to end: open, bind, warm up, serve, drain.

`serve` is all of this; `ShardServer` is one process, without files and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from dlm.errors import ConfigError
from dlm.logs import EventLog
from dlm.memory_options import MemoryOptions
from dlm.server.admission import Clock
from dlm.server.answers import OpenShard
from dlm.server.compiling import compile_kernels
from dlm.server.config import ServerConfig
from dlm.server.downloads import open_files
from dlm.server.exposition import load_page, starting_exposition, worker_exposition
from dlm.server.health import (
    HEALTH_SERVICE,
    SHARD_SERVICE,
    Action,
    Event,
    HealthService,
    ServingState,
    step,
)
from dlm.server.http import HttpServer, tcp_socket
from dlm.server.metrics import Served, ServerCollector, process_labels
from dlm.server.opening import (
    Opened,
    check_files,
    of_list,
    open_listed,
    open_shard,
    warm_up_messages,
)
from dlm.server.poller import grpc
from dlm.server.port import cannot_be_bound
from dlm.server.process import Heap, Notice, OnReady, Process, Ready
from dlm.server.security import Credentials, Guard, allow_connections, channel_options
from dlm.server.service import Models, ShardService
from dlm.server.sets import Listed, ListedSets, Sets, ToldSets
from dlm.server.workers import BEAT_S, Supervisor
from dlm.signals import stop_signals
from dlm.wire import pairs

logger = EventLog(__name__)

# Messages still in transit when the last one finished get their refusal.
STOP_GRACE_S = 0.5
# A draining server ends once no message has come for this long. It is longer than the time between
# a client's heartbeats (0.6 s), so a client that asks steadily has moved to another server.
QUIET_S = 1.0
LINGER_LOOK_S = 0.02


def serve(
    config: ServerConfig,
    directories: Sequence[Path],
    index: int,
    *,
    on_ready: OnReady | None = None,
    ready_file: Path | None = None,
) -> int:
    """Serves shard `index` of the shard set in each of `directories` until one of `stop_signals`.

    Args     directories  one or more; a call that names no shard set means the first. None if
                          `config.sets` lists them
             on_ready     called once, when every worker can answer its first query
             ready_file   JSON of `Ready`; it exists from that moment until the server drains
    Returns  0 if everything in flight was answered, 1 if it was cut off
    Raises   ShardFormatError  a file is missing, damaged or contradicts the manifest
             ConfigError  the port cannot be bound, memory cannot be locked, a shard set is given
                 twice, a file of tokens or certificates is unusable, or a worker ended too early
    """
    allow_connections()
    credentials = Credentials(config)  # faults in them are reported before anything is opened
    memory_options = MemoryOptions(config.preload, config.mlock, config.huge_pages)
    sets = ListedSets(config, index, partial(check_files, config, index)) if config.sets else None
    with starting_exposition(config):
        compile_kernels()
        shards = [
            open_shard(directory, index, verify=config.verify, memory_options=memory_options)
            for directory in (sets.folders if sets else directories)
        ]
    notice = Notice(on_ready, ready_file)
    if config.workers == 1 and sets is None:
        return _run(lambda: ShardServer(config, shards, notice=notice, credentials=credentials))
    labels = process_labels(shards[0].manifest, index)
    # All workers share what is opened and compiled here, since they are forked from here.
    opened = [Opened(shard, open_files(shard)) for shard in shards]
    shards.clear()  # what `opened` no longer has is unmapped

    def warm() -> None:
        for one in opened:
            service = ShardService(one.shard, config, files=one.files)
            for data in warm_up_messages(one.shard):
                service.warm_up(data)
            service.close()

    def work(port: int, process: Process, tell: OnReady) -> int:
        def make() -> ShardServer:
            own = replace(config, port=port)
            mine = list(opened)
            if sets is not None:
                _, listed = sets.state.of(process.worker)
                mine = [of_list(one, index, opened, own, verify=process.doubts) for one in listed]
            if process.doubts:
                mine = [one.again(memory_options, process.checks) for one in mine]
            server = ShardServer(
                own,
                [one.shard for one in mine],
                notice=Notice(tell),
                process=process,
                files=[one.files for one in mine],
                credentials=credentials,
            )
            if sets is not None:  # nothing else may hold what is unloaded later
                release(opened)
            return server

        return _run(make, worker=True)

    def release(unused: list[Opened]) -> None:
        for one in list(unused):
            one.close()
            opened.remove(one)

    def look() -> None:
        credentials.reload_changed()
        if sets is not None:
            release([one for one in opened if not sets.holds(one.shard.manifest.shard_set)])

    follows = credentials.watches or sets is not None
    return Supervisor(
        config,
        warm=warm,
        work=work,
        notice=notice,
        look=look if follows else None,
        sets=sets,
        labels=labels,
    ).run()


def _run(make: Callable[[], ShardServer], *, worker: bool = False) -> int:
    """Runs a server on a loop of its own, until a signal; a `worker` ignores a second SIGTERM."""

    async def main() -> int:
        server = make()
        loop = asyncio.get_running_loop()
        if worker:
            loop.add_signal_handler(signal.SIGTERM, server.drain)
        else:
            for number in stop_signals():
                loop.add_signal_handler(number, server.post, Event.STOP)
        return await server.run()

    return int(uvloop.run(main()))


class ShardServer:
    """A gRPC server for the shards that one process holds, on the running event loop.

    `run` carries out what `health.step` says; `post` is how events reach it.

    Args    shards  one of each shard set, the default first
            files, credentials  opened and read before the process was forked
    Raises  ConfigError  a shard set is given twice
    """

    def __init__(
        self,
        config: ServerConfig,
        shards: Sequence[OpenShard],
        *,
        notice: Notice | None = None,
        process: Process | None = None,
        files: Sequence[Mapping[int, int]] | None = None,
        credentials: Credentials | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.config = config
        self.process = process or Process()
        opened: Sequence[Mapping[int, int] | None] = files or [None] * len(shards)
        self._clock = clock
        self.models = Models(
            [self._serve_shard(*one) for one in zip(shards, opened, strict=True)],
            changes=self.process.sets is not None,
        )
        self._changing: asyncio.Task[None] | None = None
        self.guard = Guard(config, self.service.metrics, credentials)
        self.port = 0
        self._health = HealthService(self.models.state)
        self._notice = notice or Notice()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None
        self._drained = False  # whether every message accepted before the first refusal is answered
        self._asked_to_drain = False
        self._heap = Heap(self.process.memory.bytes())

    def _serve_shard(
        self, shard: OpenShard, files: Mapping[int, int] | None = None
    ) -> ShardService:
        return ShardService(
            shard, self.config, clock=self._clock, process=self.process, files=files
        )

    @property
    def service(self) -> ShardService:
        return self.models.default

    def drain(self) -> None:
        if not self._asked_to_drain:
            self._asked_to_drain = True
            self.post(Event.STOP)

    def post(self, event: Event) -> None:
        """Passes `event` to `run`; from any thread. A server that has ended ignores it."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def run(self) -> int:
        """Serves until an event ends it; returns and raises as `serve` does."""
        beating = asyncio.create_task(self._beat())
        try:
            server = self._bind()
            shown = self._show()
            try:
                await server.start()
                self.guard.start()
                threading.Thread(target=self._warm_up, name="dlm-warm-up", daemon=True).start()
                with pairs.few_wakes(self._loop):
                    last = await self._serve()
                # A message about to be refused is in flight too, but nothing is cut off.
                whole = self._drained or self.models.in_flight == 0
                await self._health.close()
                if last is Event.DRAINED and whole:
                    await server.stop(STOP_GRACE_S)
            finally:
                self._notice.withdraw()
                self.guard.close()
                await server.stop(None)
                if shown is not None:
                    await asyncio.to_thread(shown.close)
        finally:
            if self._changing is not None:
                self._changing.cancel()
            self.models.close()
            beating.cancel()
        logger.info("server.stopped", extra={"shard": self.service.shard.index, "whole": whole})
        if self._failure is not None:
            raise self._failure
        return 0 if whole else 1

    async def _beat(self) -> None:
        """Reports that this loop runs, if anyone watches; and checks for trouble."""
        was_in_trouble = False
        while True:
            if self.process.beat is not None:
                self.process.beat()
            self.process.open_files.check()
            now = asyncio.get_running_loop().time()
            if self._heap.is_due(self.process.memory.bytes(), now):
                await asyncio.to_thread(self._heap.trim, now)
            self._follow_list()
            if bool(self._trouble()) != was_in_trouble:
                was_in_trouble = not was_in_trouble
                await self._announce()
            await asyncio.sleep(BEAT_S)

    # ------------------------------------------------------- the list of shard sets

    def _follow_list(self) -> None:
        sets = self.process.sets
        if sets is None or self.models.state is not ServingState.READY:
            return
        is_free = self._changing is None or self._changing.done()
        if is_free and (listed := sets.due()) is not None:
            self._changing = asyncio.create_task(self._change(sets, listed))

    async def _change(self, sets: ToldSets, listed: Sets) -> None:
        """Loads what is new, then serves exactly these; after an error, what it served before."""
        loaded: dict[str, ShardService] = {}
        try:
            held = {service.shard_set.hex(): service for service in self.models}
            for one in listed:
                if one.shard_set not in held:
                    loaded[one.shard_set] = await asyncio.to_thread(self._load, one)
            held |= loaded
            unused = self.models.change([held[one.shard_set] for one in listed])
        except Exception as exc:  # noqa: BLE001 - without a report the supervisor waits for ever
            for service in loaded.values():
                service.close()
            sets.report(str(exc) or repr(exc))
            return
        self.guard.count_in(self.service.metrics)
        names = [one.shard_set for one in listed]
        logger.info("server.sets.changed", extra={"shard_sets": names, "loaded": list(loaded)})
        sets.report()
        held.clear()
        while unused:
            await self._unload(unused.pop())
        gc.collect()  # a mapping ends with the last array over it, and some are in cycles

    def _load(self, listed: Listed) -> ShardService:
        service = self._serve_shard(open_listed(listed, self.service.shard.index, self.config))
        for data in warm_up_messages(service.shard):
            service.warm_up(data)
        return service

    async def _unload(self, service: ShardService) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.shutdown_timeout_s):
                await service.admission.idle()
                while service.metrics.downloads:
                    await asyncio.sleep(LINGER_LOOK_S)
        await asyncio.to_thread(service.close)

    async def _announce(self) -> None:
        await self._health.announce(self.models.state, in_trouble=bool(self._trouble()))

    def _trouble(self) -> str:
        return "; ".join(filter(None, self.process.trouble().values()))

    async def _serve(self) -> Event:
        drain: asyncio.Task[None] | None = None
        while True:
            event = await self._events.get()
            before = self.models.state
            self.models.state, actions = step(before, event)
            self._log_step(before, event)
            for action in actions:
                if action is Action.ANNOUNCE:
                    await self._announce()
                elif action is Action.PUBLISH:
                    self._publish()
                elif action is Action.DRAIN:
                    self._notice.withdraw()
                    self.models.refuses = before is ServingState.WARMING
                    drain = asyncio.create_task(self._drain())
                elif action is Action.CLOSE:
                    if drain is not None:
                        drain.cancel()
                    return event

    def _bind(self) -> Any:
        from grpc_reflection.v1alpha import reflection  # it imports gRPC, which `poller` must first

        config = self.config
        server = grpc.aio.server(
            options=channel_options(
                max_message_bytes=config.max_message_bytes,
                max_in_flight=config.max_in_flight,
                shares_port=self.process.shares_port,
            ),
            interceptors=(self.guard,),
        )
        handlers = (self.models.handlers(), self._health.handlers())
        server.add_generic_rpc_handlers(handlers)
        names = (SHARD_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            self.port = self.guard.bind(server, config.address)
        except RuntimeError as exc:
            if trouble := self.process.open_files.check():
                raise ConfigError(trouble) from exc
            raise cannot_be_bound(config.address) from exc
        return server

    def _show(self) -> HttpServer | None:
        config = self.config
        if self.process.metrics_socket is not None:
            listening = self.process.metrics_socket
        elif config.metrics_port:
            listening = tcp_socket(config.metrics_host, config.metrics_port)
        else:
            return None

        def served() -> list[Served]:
            return [
                Served(
                    service.shard.manifest.model,
                    service.shard.manifest.shard_set,
                    service.shard.index,
                    service.shard.order,
                    service.metrics,
                    lambda: self.models.state,
                    service.shard.manifest.shards,
                )
                for service in self.models
            ]

        collector = ServerCollector(served, self.process)
        return worker_exposition(
            listening,
            collector,
            lambda: self.models.state,
            self._loop,
            load=lambda: load_page(served()),
            trouble=self._trouble,
        )

    def _warm_up(self) -> None:
        begun = time.monotonic()
        try:
            messages = 0
            for service in self.models:
                for data in warm_up_messages(service.shard):
                    service.warm_up(data)
                    messages += 1
        except Exception as exc:  # noqa: BLE001 - handed to `run`, which raises it
            self._failure = exc
            self.post(Event.FAILED)
            return
        logger.info(
            "server.warmed",
            extra={"messages": messages, "duration_s": round(time.monotonic() - begun, 3)},
        )
        self.post(Event.WARMED)

    async def _drain(self) -> None:
        """Answers while clients move away, then refuses new messages and finishes the others."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.config.drain_grace_s
        while not self.models.refuses and self.models.is_wanted(QUIET_S) and loop.time() < end:
            await asyncio.sleep(LINGER_LOOK_S)
        self.models.refuses = True
        try:
            async with asyncio.timeout(self.config.shutdown_timeout_s):
                await self.models.idle()
            self._drained = True
        except TimeoutError:
            logger.warning("server.drain.timed_out", extra={"in_flight": self.models.in_flight})
        self.post(Event.DRAINED)

    def _log_step(self, before: ServingState, event: Event) -> None:
        after = self.models.state
        states = {"cause": event.name, "from_state": before.name, "to_state": after.name}
        name = "server.ready" if after is ServingState.READY else "server.state"
        if before is after:  # server.drained, or server.stop at a second signal
            name, states = f"server.{event.name.lower()}", {"state": after.name}
        logger.info(
            name,
            extra={
                **states,
                "address": replace(self.config, port=self.port or self.config.port).address,
                "port": self.port,
                "shard": self.service.shard.index,
                "shard_sets": [service.shard_set.hex() for service in self.models],
                "in_flight": self.models.in_flight,
            },
        )

    def _publish(self) -> None:
        sets = [service.shard_set.hex() for service in self.models]
        index, host = self.service.shard.index, self.config.host
        self._notice.publish(Ready(host, self.port, index, sets[0], os.getpid(), sets))
