"""A shard server process from start to end: open, bind, warm up, serve, drain.

`serve` is all of this; `ShardServer` is one process, without files and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

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
from dlm.server.compiling import compile_kernels
from dlm.server.config import ServerConfig
from dlm.server.exchange import Models
from dlm.server.exposition import load_page, starting_exposition
from dlm.server.health import SHARD_SERVICE, Event, ServingState
from dlm.server.life import LINGER_LOOK_S, Life
from dlm.server.metrics import Served, ServerCollector, process_labels
from dlm.server.process import Heap, Notice, OnReady, Process, Ready, keep_objects
from dlm.server.security import Credentials, allow_connections
from dlm.server.service import ShardService, open_files
from dlm.server.sets import Listed, ListedSets, Sets, ToldSets
from dlm.server.workers import BEAT_S, Supervisor
from dlm.signals import stop_signals
from dlm.wire import codec

logger = EventLog(__name__)


WARM_UP_SEED = 20190812


@dataclass(slots=True, eq=False)
class Opened:
    """A mapped shard, and the descriptors of its files that clients download."""

    shard: Shard
    files: dict[int, int]

    def again(self, memory_options: MemoryOptions, tick: Callable[[], object] | None) -> Opened:
        shard = reopen_shard(self.shard, memory_options, tick)
        return Opened(shard, open_files(shard))

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)


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
                service.answerer.warm_up(data)
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
        keep_objects()
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
        shards: Sequence[Shard],
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
        super().__init__(
            config,
            self.process,
            self.models,
            SHARD_SERVICE,
            lambda: self.service.metrics,
            notice,
            credentials,
        )
        self._changing: asyncio.Task[None] | None = None
        self._asked_to_drain = False
        self._heap = Heap(self.process.memory.bytes())

    def _serve_shard(self, shard: Shard, files: Mapping[int, int] | None = None) -> ShardService:
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
        if sets is None or self._phase.state is not ServingState.READY:
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
        names = [one.shard_set for one in listed]
        logger.info("server.sets.changed", extra={"shard_sets": names, "loaded": list(loaded)})
        sets.report()
        held.clear()
        while unused:
            await self._unload(unused.pop())
        keep_objects()  # a mapping ends with the last array over it, and some are in cycles

    def _load(self, listed: Listed) -> ShardService:
        service = self._serve_shard(open_listed(listed, self.service.shard.index, self.config))
        for data in warm_up_messages(service.shard):
            service.answerer.warm_up(data)
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
                    lambda: self._phase.state,
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
                    service.answerer.warm_up(data)
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
        after = self._phase.state
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
    shard: Shard, memory_options: MemoryOptions, tick: Callable[[], object] | None = None
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


def check_files(config: ServerConfig, index: int, folders: Sequence[Path]) -> None:
    """Reads all files of the shard sets in `folders`, as `open_shard` does."""
    for folder in folders:
        open_shard(folder, index, verify=config.verify)


def of_list(
    listed: Listed, index: int, opened: Sequence[Opened], config: ServerConfig, *, verify: bool
) -> Opened:
    """A shard set of the list: opened before the fork, or here."""
    for one in opened:
        if one.shard.manifest.shard_set == listed.shard_set:
            return one
    shard = open_listed(listed, index, config, verify=verify)
    return Opened(shard, open_files(shard))


def open_listed(listed: Listed, index: int, config: ServerConfig, *, verify: bool = False) -> Shard:
    """Opens a shard set of the list, whose files were checked.

    Raises  ConfigError  its folder has another shard set by now;  ShardFormatError
    """
    folder = Path(listed.folder)
    memory_options = MemoryOptions(config.preload, config.mlock, config.huge_pages)
    shard = open_shard(folder, index, verify=verify, memory_options=memory_options)
    if shard.manifest.shard_set != listed.shard_set:
        raise ConfigError(
            f"{folder} now holds shard set {shard.manifest.shard_set}, but had {listed.shard_set} "
            "when the list was read; give each shard set a folder of its own, and write the list "
            "again"
        )
    return shard


def warm_up_messages(shard: Shard) -> list[bytes]:
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
