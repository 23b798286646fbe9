"""A shard server process from start to end: open, bind, warm up, serve, drain.

`serve` is all of this; `ShardServer` is one process, without files and signals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from dlm.errors import ConfigError
from dlm.index.layout import check_file, map_columns, read_manifest
from dlm.index.search.shard import Shard
from dlm.logs import EventLog
from dlm.memory_options import MAPPED, MemoryOptions
from dlm.ngram.partition import slots_of
from dlm.ngram.query import QueryGroups
from dlm.server.admission import Clock
from dlm.server.answers import OpenShard
from dlm.server.collector import Served, ServerCollector, process_labels
from dlm.server.compiling import compile_kernels
from dlm.server.config import ServerConfig
from dlm.server.downloads import open_files
from dlm.server.exposition import starting_exposition, worker_exposition
from dlm.server.health import (
    HEALTH_SERVICE,
    SHARD_SERVICE,
    Action,
    Event,
    HealthService,
    ServingState,
    step,
)
from dlm.server.heap import Heap
from dlm.server.http import HttpServer, tcp_socket
from dlm.server.models import Models
from dlm.server.poller import grpc
from dlm.server.port import cannot_be_bound
from dlm.server.process import Process
from dlm.server.ready import Notice, OnReady, Ready
from dlm.server.restarts import BEAT_S
from dlm.server.security import CHANNEL_OPTIONS, Credentials, Guard, allow_connections
from dlm.server.service import ShardService
from dlm.server.workers import Supervisor
from dlm.signals import stop_signals
from dlm.wire import codec

logger = EventLog(__name__)

# Messages still in transit when the last one finished get their refusal.
STOP_GRACE_S = 0.5
# A draining server ends once no message has come for this long. It is longer than the time between
# a client's heartbeats (0.6 s), so a client that asks steadily has moved to another server.
QUIET_S = 1.0
LINGER_LOOK_S = 0.02
WARM_UP_SEED = 20190812


def serve(
    config: ServerConfig,
    directories: Sequence[Path],
    index: int,
    *,
    on_ready: OnReady | None = None,
    ready_file: Path | None = None,
) -> int:
    """Serves shard `index` of the shard set in each of `directories` until one of `stop_signals`.

    Args     directories  one or more; a call that names no shard set means the first
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
    with starting_exposition(config):
        compile_kernels()
        shards = [
            open_shard(directory, index, verify=config.verify, memory_options=memory_options)
            for directory in directories
        ]
    notice = Notice(on_ready, ready_file)
    if config.workers == 1:
        return _run(lambda: ShardServer(config, shards, notice=notice, credentials=credentials))
    # All workers share what is opened and compiled here, since they are forked from here.
    files = [open_files(shard) for shard in shards]

    def warm() -> None:
        for shard, opened in zip(shards, files, strict=True):
            service = ShardService(shard, config, files=opened)
            for data in warm_up_messages(shard):
                service.warm_up(data)
            service.close()

    def work(port: int, process: Process, tell: OnReady) -> int:
        own = replace(config, port=port)
        mine, opened = shards, files
        if process.doubts:
            mine = [reopen_shard(shard, memory_options, process.checks) for shard in shards]
            opened = [open_files(shard) for shard in mine]
        return _run(
            lambda: ShardServer(
                own,
                mine,
                notice=Notice(tell),
                process=process,
                files=opened,
                credentials=credentials,
            ),
            worker=True,
        )

    look = credentials.reload_changed if credentials.watches else None
    labels = process_labels(shards[0].manifest, index)
    return Supervisor(config, warm=warm, work=work, notice=notice, look=look, labels=labels).run()


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


def open_shard(
    directory: Path, index: int, *, verify: bool, memory_options: MemoryOptions = MAPPED
) -> Shard:
    """Opens the shard, and checks that the vocabulary it hands out is whole too."""
    begun = time.monotonic()
    shard = Shard.open(directory, index, verify=verify, memory_options=memory_options)
    vocabulary = shard.manifest.file("vocabulary")
    map_columns(shard.directory / vocabulary.name, vocabulary, verify=verify)
    logger.info(
        "server.opened",
        extra={
            "shard": index,
            "shard_set": shard.manifest.shard_set,
            "verified": verify,
            "duration_s": round(time.monotonic() - begun, 3),
        },
    )
    return shard


def reopen_shard(
    shard: Shard, memory_options: MemoryOptions, tick: Callable[[], None] | None = None
) -> Shard:
    """Maps the same shard again, after reading all of its files.

    For the worker that follows one that could not read a page of its map: by now the file may have
    been replaced or restored; otherwise the error says what is wrong.

    Args    tick  called every few megabytes
    Raises  ShardFormatError  a file is damaged;  ConfigError  the folder has another shard set
    """
    directory, index = shard.directory, shard.index
    manifest = read_manifest(directory)
    if manifest.shard_set != shard.manifest.shard_set:
        raise ConfigError(
            f"{directory} now holds shard set {manifest.shard_set}, but this server was started "
            f"with {shard.manifest.shard_set}; restart the server"
        )
    for entry in (
        manifest.file("shard", index),
        manifest.file("low_orders"),
        manifest.file("vocabulary"),
    ):
        check_file(directory / entry.name, entry, tick or (lambda: None))
    return open_shard(directory, index, verify=False, memory_options=memory_options)


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
        self.models = Models(
            [
                ShardService(shard, config, clock=clock, process=self.process, files=own)
                for shard, own in zip(shards, opened, strict=True)
            ]
        )
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
            if bool(self._trouble()) != was_in_trouble:
                was_in_trouble = not was_in_trouble
                await self._announce()
            await asyncio.sleep(BEAT_S)

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
            options=[
                # Workers share the port, which their supervisor guards. A single process must not:
                # a second server would silently share it.
                ("grpc.so_reuseport", int(self.process.workers > 1)),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # One connection may fill the server, but not queue far beyond it.
                ("grpc.max_concurrent_streams", 2 * config.max_in_flight + 64),
                # Clients may ping an idle connection every 5 s; a client that vanished is noticed
                # within 40 s.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                *CHANNEL_OPTIONS,
            ],
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
        served = [
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
        collector = ServerCollector(lambda: served, self.process)
        return worker_exposition(
            listening, collector, lambda: self.models.state, self._loop, trouble=self._trouble
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


def warm_up_messages(shard: OpenShard) -> list[bytes]:
    """Score requests that take every path through the kernels, as a client would send them: one
    context and many, one word and many, each context length. None for a model of order 2 or less.

    They pass through the codec, whose read-only arrays are what kernels compile for.
    """
    if shard.order <= 2:
        return []
    rng = np.random.default_rng(WARM_UP_SEED)
    pairs = rng.integers(0, shard.vocabulary_size, (1 << 14, 2), dtype=np.uint32)
    owned = shard.manifest.slots[slots_of(pairs[:, 0], pairs[:, 1])] == shard.index
    pairs = pairs[owned] if owned.any() else pairs
    messages = []
    for contexts in (1, 33, 256):
        lengths = (2 + np.arange(contexts) % (shard.order - 2)).astype(np.uint8)
        words = rng.integers(0, shard.vocabulary_size, int(lengths.sum()), dtype=np.uint32)
        ends = np.cumsum(lengths, dtype=np.int64)
        words[ends - 2], words[ends - 1] = pairs[rng.integers(0, len(pairs), contexts)].T
        counts = (1 + np.arange(contexts) % 5).astype(np.uint32)
        asked = rng.integers(0, shard.vocabulary_size, int(counts.sum()), dtype=np.uint32)
        groups = QueryGroups(lengths, words, counts, asked)
        messages.append(
            codec.encode_score_request(shard.manifest.shard_set_bytes, shard.index, groups)[0]
        )
    return messages
