"""A client of a baseline, with the interface `replay.Asked`.

All messages of a round are sent together, over dlm's own connections and Exchange streams. A state
is an unchanged context; `extend` returns no next states, since baselines have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from dlm.client import ModelInfo
from dlm.client.metrics import Stats
from dlm.client.server import Connection
from dlm.errors import ConfigError, DlmError
from dlm.ngram.query import Answers
from dlm.ngram.vocab import Vocabulary
from dlm.wire import codec
from loadtest.baselines.server import SHARD_SET
from loadtest.baselines.systems import Cache, Call, Caller, Messages, Placed


@dataclass(frozen=True, eq=False)
class Contexts:
    """K contexts: (K, order - 1) ids, most recent last; the last `lengths` of them count."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Scores:
    """(K, W) log10 probabilities of W words after K contexts; `source` is 0 (the full model)."""

    log10_prob: NDArray[np.float32]
    source: NDArray[np.uint8]


class BaselineClient:
    """Queries a system's servers; server N is at `addresses[N]`. `deadline_s` is per round."""

    def __init__(
        self,
        addresses: Sequence[str],
        placed: Placed,
        cache: Cache,
        vocabulary: Vocabulary,
        order: int,
        deadline_s: float = 10.0,
    ) -> None:
        self.stats = Stats()
        self.metrics = CollectorRegistry()
        self._connections = [Connection(address) for address in addresses]
        self._caller = Caller(placed, cache, order)
        self._deadline_s = deadline_s
        self._handle = BaselineHandle(self, vocabulary, order, placed.system.name)

    @property
    def cascade(self) -> Any:
        raise ConfigError("a baseline does not support a cascade")

    def utterance(self) -> BaselineHandle:
        return self._handle

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._connections:
            connection.close()

    async def score(self, call: Call) -> NDArray[np.float32]:
        """log10 P of each requested pair; after a DlmError, nothing is requested again."""
        self.stats.queries += len(call.place)
        self.stats.duplicates += len(call.place) - len(call.words)
        self.stats.local_hits += int((~self._caller.remote(call)[call.row]).sum())
        rounds = self._caller.rounds(call)
        try:
            messages = next(rounds)
            while True:
                messages = rounds.send(await self._ask(messages))
        except StopIteration as done:
            found: NDArray[np.float32] = done.value[call.place]
            return found

    async def _ask(self, messages: Messages) -> list[Answers]:
        loop = asyncio.get_running_loop()
        whole: asyncio.Future[None] = loop.create_future()
        replies: list[bytes | DlmError | None] = [None] * len(messages.groups)
        missing = len(replies)

        def end() -> None:
            if not whole.done():
                whole.set_result(None)

        def take(at: int, data: bytes | None, error: DlmError | None) -> None:
            nonlocal missing  # connections call this in a single thread
            replies[at] = data if error is None else error
            missing -= 1
            if not missing:
                loop.call_soon_threadsafe(end)

        sums = []
        encoded = []
        for server, groups in zip(messages.servers.tolist(), messages.groups, strict=True):
            data, checksum = codec.encode_score_request(SHARD_SET, server, groups)
            encoded.append((server, data))
            sums.append(checksum)
        for at, (server, data) in enumerate(encoded):
            self.stats.messages += 1
            self.stats.bytes_sent += len(data)
            self._connections[server].score(
                data, self._deadline_s, lambda data, error, at=at: take(at, data, error)
            )
        await whole
        answers = []
        for at, reply in enumerate(replies):
            if isinstance(reply, DlmError):
                self.stats.failed += 1
                raise reply
            assert reply is not None
            groups = messages.groups[at]
            self.stats.bytes_received += len(reply)
            self.stats.sent_queries += len(groups.words)
            answers.append(
                codec.decode_score_reply(
                    reply,
                    shard_set=SHARD_SET,
                    shard=int(messages.servers[at]),
                    queries=len(groups.words),
                    request_checksum=sums[at],
                )
            )
        return answers


class BaselineHandle:
    def __init__(
        self, client: BaselineClient, vocabulary: Vocabulary, order: int, name: str
    ) -> None:
        self.model_info = ModelInfo("full", name, "")
        self.vocabulary = vocabulary
        self._client = client
        self._order = order

    def states_after(self, contexts: Sequence[Sequence[bytes]]) -> Contexts:
        width = self._order - 1
        ids = np.zeros((len(contexts), width), np.uint32)
        lengths = np.zeros(len(contexts), np.uint8)
        for row, context in enumerate(contexts):
            kept = [self.vocabulary.id_of(word) for word in context][-width:]
            lengths[row] = len(kept)
            ids[row, width - len(kept) :] = kept
        return Contexts(ids, lengths)

    async def extend(self, states: Contexts, words: NDArray[np.uint32]) -> Scores:
        """Scores words (W,) after every context, or words (K, W); the result is (K, W)."""
        shape = len(states.lengths), words.shape[-1]
        found = await self._client.score(Call.of(states.ids, states.lengths, words))
        return Scores(found.reshape(shape), np.zeros(shape, np.uint8))

    async def context_blocks(self, states: Any) -> Any:
        raise ConfigError(
            "a baseline does not support context blocks; replay a rescoring trace, whose requests "
            "are `extend`"
        )
