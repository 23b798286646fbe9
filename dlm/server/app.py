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

import uvloop

from dlm.logs import EventLog
from dlm.memory_options import MemoryOptions
from dlm.server.admission import Clock
from dlm.server.answers import OpenShard
from dlm.server.compiling import compile_kernels
from dlm.server.config import ServerConfig
from dlm.server.downloads import open_files
from dlm.server.exposition import load_page, starting_exposition
from dlm.server.health import SHARD_SERVICE, Event, ServingState
from dlm.server.life import LINGER_LOOK_S, Life
from dlm.server.metrics import Served, ServerCollector, process_labels
from dlm.server.opening import (
    Opened,
    check_files,
    of_list,
    open_listed,
    open_shard,
    warm_up_messages,
)
from dlm.server.process import Heap, Notice, OnReady, Process, Ready
from dlm.server.security import Credentials, allow_connections
from dlm.server.service import Models, ShardService
from dlm.server.sets import Listed, ListedSets, Sets, ToldSets
from dlm.server.workers import BEAT_S, Supervisor
from dlm.signals import stop_signals

logger = EventLog(__name__)


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


class ShardServer(Life):
    """A gRPC server for the shards that one process holds, on the running event loop.

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
        self.config, self.process, self._clock = config, process or Process(), clock
        opened: Sequence[Mapping[int, int] | None] = files or [None] * len(shards)
        self.models = Models(
            [self._serve_shard(*one) for one in zip(shards, opened, strict=True)],
            changes=self.process.sets is not None,
        )
        metrics = self.service.metrics
        super().__init__(
            config, self.process, self.models, SHARD_SERVICE, metrics, notice, credentials
        )
        self._changing: asyncio.Task[None] | None = None
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

    async def _start(self) -> None:
        self._make(self.models.handlers())
        self._bind()
        await self._listen()

    def _warm(self) -> None:
        threading.Thread(target=self._warm_up, name="dlm-warm-up", daemon=True).start()

    async def _close(self) -> None:
        if self._changing is not None:
            self._changing.cancel()
        self.models.close()

    def _ended(self, whole: bool) -> None:
        logger.info("server.stopped", extra={"shard": self.service.shard.index, "whole": whole})

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

    def _shown(self) -> tuple[ServerCollector, Callable[[], bytes]]:
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

        return ServerCollector(served, self.process), lambda: load_page(served())

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

    async def _entered(self, before: ServingState, event: Event) -> None:
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

    def _ready(self) -> Ready:
        sets = [service.shard_set.hex() for service in self.models]
        index, host = self.service.shard.index, self.config.host
        return Ready(host, self.port, index, sets[0], os.getpid(), sets)
