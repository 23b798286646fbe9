"""One shard server from start to end: open, bind, warm, serve, drain.

`serve` is the whole of it for a process; `ShardServer` is the same without files and signals.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop
from grpc_reflection.v1alpha import reflection

from dlm.errors import ConfigError
from dlm.index.layout import map_columns
from dlm.index.residence import MAPPED, Residence
from dlm.index.shard import Shard
from dlm.ngram.partition import slots_of
from dlm.ngram.query import QueryGroups
from dlm.server.collector import Served, ServerCollector
from dlm.server.config import ServerConfig
from dlm.server.exposition import worker_exposition
from dlm.server.health import HEALTH_SERVICE, SHARD_SERVICE, Action, Event, Health, State, step
from dlm.server.http import HttpServer, tcp_socket, unix_socket
from dlm.server.service import Clock, OpenShard, ShardService
from dlm.wire import codec

logger = logging.getLogger(__name__)

# Messages that were on their way when the last one finished still get their refusal.
STOP_GRACE_S = 0.5
WARM_UP_SEED = 20190812


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers: what a parent process wants to know of it."""

    host: str
    port: int
    shard: int
    shard_set: str
    pid: int


OnReady = Callable[[Ready], None]


def serve(
    config: ServerConfig,
    directory: Path,
    index: int,
    *,
    on_ready: OnReady | None = None,
    ready_file: Path | None = None,
) -> int:
    """Serves shard `index` of the shard set in `directory` until SIGTERM or SIGINT.

    Args
        on_ready    called once, when the first query can be answered
        ready_file  JSON of `Ready`, there from that moment until the server drains
    Returns
        0 where everything in flight was answered, 1 where the second signal or drain_s cut it off
    Raises
        ShardFormatError  a file is missing, damaged or contradicts the manifest
        ConfigError       the port cannot be bound, or memory cannot be locked
    """
    residence = Residence(config.preload, config.mlock, config.huge_pages)
    shard = open_shard(directory, index, verify=config.verify, residence=residence)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)

    async def main() -> int:
        server = ShardServer(config, shard, on_ready=on_ready, ready_file=ready_file)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.post, Event.STOP)
        return await server.run()

    return int(uvloop.run(main()))


def open_shard(
    directory: Path, index: int, *, verify: bool, residence: Residence = MAPPED
) -> Shard:
    """The shard, and proof that the vocabulary it hands out is whole too."""
    begun = time.monotonic()
    shard = Shard.open(directory, index, verify=verify, residence=residence)
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


class ShardServer:
    """A gRPC server for one shard, on the running event loop.

    `run` carries out what `health.step` says; `post` is how events reach it.

    Args
        worker        which of the processes on the port this is, from 0
        metrics_path  unix socket to show metrics on, for a supervisor to join; in place of
                      config.metrics_port
    """

    def __init__(
        self,
        config: ServerConfig,
        shard: OpenShard,
        *,
        on_ready: OnReady | None = None,
        ready_file: Path | None = None,
        clock: Clock = time.monotonic,
        worker: int = 0,
        metrics_path: Path | None = None,
    ) -> None:
        self.config = config
        self.service = ShardService(shard, config, clock=clock)
        self.port = 0
        self._health = Health(self.service.state)
        self._on_ready = on_ready
        self._ready_file = ready_file
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None
        self._worker = worker
        self._metrics_path = metrics_path

    def post(self, event: Event) -> None:
        """Hands `event` to `run`; from any thread. An event for a server that has ended is lost."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def run(self) -> int:
        """Serves until the events say that it is over; returns and raises as `serve`."""
        try:
            server = self._bind()
            shown = self._show()
            try:
                await server.start()
                threading.Thread(target=self._warm_up, name="dlm-warm-up", daemon=True).start()
                last = await self._serve()
                whole = self.service.metrics.in_flight == 0
                await self._health.close()
                if last is Event.DRAINED and whole:
                    await server.stop(STOP_GRACE_S)
            finally:
                self._unpublish()
                await server.stop(None)
                if shown is not None:
                    await asyncio.to_thread(shown.close)
        finally:
            self.service.close()
        logger.info("server.stopped", extra={"shard": self.service.shard.index, "whole": whole})
        if self._failure is not None:
            raise self._failure
        return 0 if whole else 1

    async def _serve(self) -> Event:
        """Carries out what follows from each event; returns the one that closed the server."""
        drain: asyncio.Task[None] | None = None
        while True:
            event = await self._events.get()
            before = self.service.state
            self.service.state, actions = step(before, event)
            self._log_step(before, event)
            for action in actions:
                if action is Action.ANNOUNCE:
                    await self._health.announce(self.service.state)
                elif action is Action.PUBLISH:
                    self._publish()
                elif action is Action.DRAIN:
                    self._unpublish()
                    drain = asyncio.create_task(self._drain())
                elif action is Action.CLOSE:
                    if drain is not None:
                        drain.cancel()
                    return event

    def _bind(self) -> Any:
        config = self.config
        server = grpc.aio.server(
            options=[
                # Otherwise a second server on the port shares it in silence.
                ("grpc.so_reuseport", 0),
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
            ],
            # A backstop over all connections, before a message is even read; it gives no reason.
            maximum_concurrent_rpcs=4 * config.max_in_flight + 256,
        )
        handlers = (self.service.handlers(), self._health.handlers())
        server.add_generic_rpc_handlers(handlers)
        names = (SHARD_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            self.port = int(server.add_insecure_port(config.address))
        except RuntimeError as exc:
            raise ConfigError(
                f"{config.address} cannot be bound: another process listens there, or this machine "
                "has no such address. Stop the other, or give another port (0 picks a free one)"
            ) from exc
        return server

    def _show(self) -> HttpServer | None:
        """The HTTP endpoint of metrics and probes, where one is wanted."""
        config = self.config
        if self._metrics_path is not None:
            listening = unix_socket(self._metrics_path)
        elif config.metrics_port:
            listening = tcp_socket(config.metrics_host, config.metrics_port)
        else:
            return None
        service, manifest = self.service, self.service.shard.manifest
        served = Served(
            manifest.model,
            manifest.shard_set,
            service.shard.index,
            service.shard.order,
            service.metrics,
            lambda: service.state,
        )
        collector = ServerCollector(lambda: [served], self._worker)
        return worker_exposition(listening, collector, lambda: service.state, self._loop)

    def _warm_up(self) -> None:
        """Compiles and runs the kernels before a client waits for them; in its own thread."""
        begun = time.monotonic()
        try:
            messages = warm_up_messages(self.service.shard)
            for data in messages:
                self.service.warm_up(data)
        except Exception as exc:  # noqa: BLE001 - handed to `run`, which raises it
            self._failure = exc
            self.post(Event.FAILED)
            return
        logger.info(
            "server.warmed",
            extra={"messages": len(messages), "duration_s": round(time.monotonic() - begun, 3)},
        )
        self.post(Event.WARMED)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.service.idle()
        except TimeoutError:
            logger.warning("server.drain.cut", extra={"in_flight": self.service.metrics.in_flight})
        self.post(Event.DRAINED)

    def _log_step(self, before: State, event: Event) -> None:
        after = self.service.state
        name = "server.ready" if (before, after) == (State.WARMING, State.READY) else "server.state"
        logger.info(
            name,
            extra={
                "event": event.name,
                "from_state": before.name,
                "to_state": after.name,
                "address": self.config.address,
                "port": self.port,
                "shard": self.service.shard.index,
                "shard_set": self.service.shard.manifest.shard_set,
                "in_flight": self.service.metrics.in_flight,
            },
        )

    def _publish(self) -> None:
        shard = self.service.shard
        ready = Ready(
            self.config.host, self.port, shard.index, shard.manifest.shard_set, os.getpid()
        )
        if self._ready_file is not None:
            partial = self._ready_file.with_name(f"{self._ready_file.name}.{ready.pid}")
            partial.write_text(json.dumps(asdict(ready)) + "\n", encoding="utf-8")
            partial.replace(self._ready_file)
        if self._on_ready is not None:
            self._on_ready(ready)

    def _unpublish(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)


def warm_up_messages(shard: OpenShard) -> list[bytes]:
    """Score requests that take every path through the kernels, as a client would send them.

    One context and many, one word and many, each context length; contexts of this shard where a
    search finds some. They pass through the codec so that the kernels meet arrays of the very kind
    that traffic brings (read-only, over the bytes received): another kind is another compilation.
    None for a model of order 2 or less, which answers nothing here.
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
