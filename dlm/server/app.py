"""Runs a shard server process from start to end: open, bind, warm up, serve, drain.

`serve` does all of this; `ShardServer` is one process, without files and signals.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from dlm.index.search.shard import Shard
from dlm.logs import EventLog
from dlm.memory_options import MemoryOptions
from dlm.ngram.partition import slots_of
from dlm.ngram.query import QueryGroups
from dlm.server.admission import Clock
from dlm.server.compiling import compile_kernels
from dlm.server.config import ServerConfig
from dlm.server.exchange import Models
from dlm.server.exposition import load_page, starting_exposition
from dlm.server.health import SHARD_SERVICE, Event, ServingState
from dlm.server.life import LINGER_LOOK_S, Life
from dlm.server.metrics import Served, ServerCollector
from dlm.server.opening import fetched, open_listed, open_shard
from dlm.server.process import (
    Notice,
    OnReady,
    PortMates,
    Process,
    Ready,
    Watchdog,
    in_thread,
    keep_objects,
)
from dlm.server.security import Credentials, allow_connections
from dlm.server.service import ShardService
from dlm.server.sets import POLL_S, FollowedSets, Listed, Sets
from dlm.signals import stopping
from dlm.stores.fetching import let_go
from dlm.stores.remote import AnyPath
from dlm.wire import codec

logger = EventLog(__name__)


WARM_UP_SEED = 20190812


def serve(
    config: ServerConfig,
    directories: Sequence[AnyPath],
    index: int,
    *,
    on_ready: OnReady | None = None,
    ready_file: Path | None = None,
) -> int:
    """Serves shard `index` of the sets in `directories` until one of `stop_signals` comes.

    Args     directories  one or more, or their URLs; the first answers calls that name no shard
                          set. Ignored if `config.sets` lists them
             on_ready     called once, when the server can answer its first query
             ready_file   gets `Ready` as JSON; exists from readiness until the server drains
    Returns  0 if everything in flight was answered, 1 if something was cut off
    Raises   ShardFormatError  a file is missing, damaged or contradicts the manifest
             ConfigError  the port cannot be bound, memory cannot be locked, a shard set is given
                 twice, or a file of tokens or certificates is unusable
    """
    allow_connections()
    credentials = Credentials(config)  # reports faulty files before anything is opened
    memory_options = MemoryOptions(config.preload, config.mlock, config.huge_pages)
    sets = FollowedSets(config, index) if config.sets else None
    with starting_exposition(config):
        compile_kernels()
        opening = in_thread(
            lambda: [
                open_shard(
                    fetched(directory, index, config.public_key),
                    index,
                    verify=config.verify,
                    memory_options=memory_options,
                )
                for directory in (sets.folders if sets else directories)
            ]
        )
        shards = opening.result()
    notice, process = Notice(on_ready, ready_file), Process(watchdog=Watchdog(ends=True))

    async def main() -> int:
        server = ShardServer(
            config, shards, notice=notice, process=process, credentials=credentials, sets=sets
        )
        shards.clear()  # so that a set is unmapped once it is no longer served
        keep_objects()
        with stopping(lambda: server.post(Event.STOP)):
            return await server.run()

    return int(uvloop.run(main()))


class ShardServer(Life):
    """A gRPC server for the shards that one process holds, on the running event loop.

    Args    shards  one shard of each set, the default first
            sets    the list that the server follows, if there is one
    Raises  ConfigError  a shard set is given twice
    """

    def __init__(
        self,
        config: ServerConfig,
        shards: Sequence[Shard],
        *,
        notice: Notice | None = None,
        process: Process | None = None,
        credentials: Credentials | None = None,
        sets: FollowedSets | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.config, self.process, self._clock = config, process or Process(), clock
        self._sets = sets
        self.models = Models([self._serve_shard(one) for one in shards], changes=sets is not None)
        super().__init__(
            config,
            self.process,
            self.models,
            SHARD_SERVICE,
            lambda: self.service.metrics,
            notice,
            credentials,
        )
        self._following: asyncio.Task[None] | None = None

    def _serve_shard(self, shard: Shard) -> ShardService:
        return ShardService(shard, self.config, clock=self._clock, process=self.process)

    @property
    def service(self) -> ShardService:
        return self.models.default

    async def _start(self) -> None:
        self._make(self.models.handlers())
        self._bind()
        if self.config.share_port:
            self.process.mates = PortMates(self.config.address)
        self._tell_mates()
        await self._listen()
        if self._sets is not None:
            self._following = asyncio.create_task(self._follow_list(self._sets))

    def _tell_mates(self) -> None:
        if self.process.mates is not None:
            index = self.service.shard.index.to_bytes(4, "big")
            self.process.mates.show([index, *(service.shard_set for service in self.models)])

    async def _close(self) -> None:
        if self._following is not None and self._sets is not None:
            self._following.cancel()
            self._sets.close()
        if self.process.mates is not None:
            self.process.mates.close()
        self.models.close()

    def _ended(self, whole: bool) -> None:
        logger.info("server.stopped", extra={"shard": self.service.shard.index, "whole": whole})

    # ------------------------------------------------------- the list of shard sets

    async def _follow_list(self, sets: FollowedSets) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self._phase.state is ServingState.READY:
                try:
                    listed = await asyncio.to_thread(sets.look)
                    self.process.rejected = bool(sets.rejected)
                    if listed is not None:
                        sets.loaded(await self._change(listed))
                except Exception as exc:  # noqa: BLE001 - e.g. no thread is left: try again
                    sets.loaded(str(exc) or repr(exc))

    async def _change(self, listed: Sets) -> str:
        """Loads new sets, then serves exactly the listed sets; returns "". If that fails, keeps the
        old sets and returns the error."""
        loaded: dict[str, ShardService] = {}
        try:
            held = {service.shard_set.hex(): service for service in self.models}
            for one in listed:
                if one.shard_set not in held:
                    loaded[one.shard_set] = await asyncio.wrap_future(
                        in_thread(partial(self._load, one))
                    )
            held |= loaded
            unused = self.models.change([held[one.shard_set] for one in listed])
        except Exception as exc:  # noqa: BLE001 - whatever the error, the old sets stay
            for service in loaded.values():
                service.close()
            return str(exc) or repr(exc)
        names = [one.shard_set for one in listed]
        logger.info("server.sets.changed", extra={"shard_sets": names, "loaded": list(loaded)})
        self._tell_mates()
        held.clear()
        while unused:
            await self._unload(unused.pop())
        return ""

    def _load(self, listed: Listed) -> ShardService:
        service = self._serve_shard(open_listed(listed, self.service.shard.index, self.config))
        warm_up(service)
        return service

    async def _unload(self, service: ShardService) -> None:
        unused = asyncio.create_task(_unused(service))
        await asyncio.wait([unused], timeout=self.config.shutdown_timeout_s)
        service.close()
        let_go(service.shard.directory)
        await unused  # downloads end at their next chunk, or when a chunk stays unread

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

    async def _warm_up(self) -> None:
        begun = time.monotonic()
        messages = await asyncio.wrap_future(in_thread(lambda: sum(map(warm_up, self.models))))
        logger.info(
            "server.warmed",
            extra={"messages": messages, "duration_s": round(time.monotonic() - begun, 3)},
        )

    async def _entered(self, before: ServingState, event: Event) -> None:
        after = self._phase.state
        states = {"cause": event.name, "from_state": before.name, "to_state": after.name}
        name = "server.ready" if after is ServingState.READY else "server.state"
        if before is after:  # logs server.drained, or server.stop for a second signal
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
        return {
            "host": self.config.host,
            "port": self.port,
            "shard": self.service.shard.index,
            "shard_set": sets[0],  # the default, for calls that name no set
            "shard_sets": sets,
            "pid": os.getpid(),
        }


async def _unused(service: ShardService) -> None:
    await service.admission.idle()
    while service.metrics.downloads:
        await asyncio.sleep(LINGER_LOOK_S)


def warm_up(service: ShardService) -> int:
    """Makes the server answer `warm_up_messages`; returns their number."""
    messages = warm_up_messages(service.shard)
    for data in messages:
        service.answerer.warm_up(data)
    return len(messages)


def warm_up_messages(shard: Shard) -> list[bytes]:
    """Score requests that take every path through the kernels, as a client would send them: one
    context and many, one word and many, each context length. Empty if the model's order is below 3.

    The requests are encoded, since kernels compile for the codec's read-only arrays.
    """
    if shard.order <= 2 or not shard.manifest.pairs:
        return []
    rng = np.random.default_rng(WARM_UP_SEED)
    pairs = rng.integers(0, shard.vocabulary_size, (1 << 16, 2), dtype=np.uint32)
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
        numbers = rng.integers(0, shard.manifest.pairs, contexts, dtype=np.uint32)
        groups = QueryGroups(lengths, words, counts, asked, numbers)
        messages.append(
            codec.encode_score_request(shard.manifest.shard_set_bytes, shard.index, groups)[0]
        )
    return messages
