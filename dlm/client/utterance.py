"""Handles on one utterance, which decoders call: synchronous, and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.client.base_utterance import Asking, BaseUtterance, Steps
from dlm.client.blocks import ContextBlocks
from dlm.client.core import Scorer
from dlm.client.inputs import Sentence, Word
from dlm.client.phrases import Phrases
from dlm.client.router import Snapshot
from dlm.client.states import Extension, SentenceScore, State, States
from dlm.errors import ConfigError, DeadlineExceeded, DlmError
from dlm.ngram.query import Answers

T = TypeVar("T")
P = ParamSpec("P")
Query: TypeAlias = Callable[Concatenate[Asking, P], Steps[T]]
# The arguments of an utterance, see `BaseUtterance`.
Opened: TypeAlias = tuple[Scorer, Snapshot, float | None, str, str, Phrases | None, bool]


def _no_memory(cause: MemoryError) -> DlmError:
    return DlmError(f"out of memory for this call ({cause!r}); make smaller calls")


def waited(steps: Steps[T]) -> T:
    """What a call returns; waits in the caller's thread for whatever it waits for."""
    try:
        try:
            while True:
                wait = next(steps)
                if isinstance(wait, tuple):
                    with suppress(TimeoutError):
                        wait[0].exception(wait[1])
                elif wait is not None:
                    wait()
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            steps.close()
    except MemoryError as exc:
        raise _no_memory(exc) from exc


async def awaited(steps: Steps[T]) -> T:
    """The same on an event loop, which goes on meanwhile."""
    try:
        try:
            while True:
                wait = next(steps)
                if isinstance(wait, tuple):
                    await wait[0].wait(wait[1])
                elif wait is not None:
                    await asyncio.to_thread(wait)
                else:
                    await asyncio.sleep(0)
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            steps.close()
    except MemoryError as exc:
        raise _no_memory(exc) from exc


class Utterance(BaseUtterance):
    """A synchronous handle; made by `Client.utterance`. Any thread may use it.

    It is pinned to a model, and its states carry that model: a state given to an utterance of
    another model is a type error, never a wrong score.
    """

    def _run(
        self, query: Query[P, T], deadline_s: float | None, *args: P.args, **more: P.kwargs
    ) -> T:
        return waited(query(Asking(self, deadline_s), *args, **more))

    def score(
        self,
        contexts: Sequence[Sequence[Word]],
        words: Sequence[Word],
        *,
        deadline_s: float | None = None,
    ) -> Answers:
        """Scores each word after its context.

        Args
            contexts    Q contexts, most recent word last, of any length; ids or strings
            words       Q words
            deadline_s  seconds; by default the utterance's own
        Raises  QueryError, UnavailableError, ProtocolError
        """
        return self._run(self._score, deadline_s, contexts, words)

    def extend(
        self, states: States | Sequence[State], words: Any, *, deadline_s: float | None = None
    ) -> Extension:
        """Extends each of K states by W words, as on-the-fly rescoring needs.

        Source: Long et al., "A Distributed System for Large-scale n-gram Language Models at
        Tencent", PVLDB 12(12), 2019, section 3.3.

        Args
            words  W words for all states, or K rows of W words: strings, bytes or ids. A string is
                   one word, even with spaces in it; `oov` marks those that the model lacks
        Raises  ModelMismatch (a TypeError), QueryError, UnavailableError, ProtocolError
        """
        return self._run(self._extend, deadline_s, states, words)

    def score_sentences(
        self,
        sentences: Sequence[Sentence],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """Scores whole sentences; all their queries travel together.

        Args
            sentences  each a string, split at spaces, tabs and line ends, or a sequence of words,
                       ids or strings
            bos, eos   whether a sentence begins after <s>, and whether its end is scored
        Raises  QueryError (one string instead of several), UnavailableError, ProtocolError
        """
        return self._run(self._score_sentences, deadline_s, sentences, bos, eos)

    def next_words(
        self, state: State, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[int, np.float32]]:
        """The `k` likeliest next words: (id, log10 P), best first, ties by id.

        They may include the sentence end and id 0, the unknown word, which stands for every word
        that the vocabulary lacks; never <s>. `vocabulary.words[id]` is the word of an id, in bytes.

        Cost  that of `next_distribution`
        """
        return self._run(self._next_words, deadline_s, state, k)

    def next_distribution(
        self, state: State, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """(V,) float32: log10 P of every word of the vocabulary after `state`, by id. <s> has the
        probability that the model gives it, although it follows nothing.

        Cost  at most one message, and one pass over the local vocabulary
        """
        return self._run(self._next_distribution, deadline_s, state)

    def context_blocks(
        self, states: States | Sequence[State], *, deadline_s: float | None = None
    ) -> ContextBlocks:
        """Everything stored after each of K states, to score any word without a message.

        For decoders that ask for many words after few states. Takes one message per shard, or
        several if much is stored. If the servers do not know the call, it asks for every word of
        the vocabulary.

        Raises  ModelMismatch (a TypeError), QueryError, UnavailableError, ProtocolError
        """
        return self._run(self._context_blocks, deadline_s, states)


class AsyncUtterance(BaseUtterance):
    """An asynchronous handle; made by `AsyncClient.utterance`. It has the methods of `Utterance`.

    Awaiting the utterance returns it; if its client has not connected yet, it connects first.
    """

    _open_later: Callable[[], Opened] | None = None
    _opening: asyncio.Task[None] | None = None

    @classmethod
    def later(
        cls, opened: Callable[[], Opened], core: Scorer, deadline_s: float | None
    ) -> AsyncUtterance:
        """An utterance of `core` whose first call gets, in a thread, what `opened` returns."""
        handle = cls.__new__(cls)
        handle._core, handle._deadline_s = core, deadline_s
        handle._open_later = opened
        return handle

    def __repr__(self) -> str:
        return super().__repr__() if self._open_later is None else "AsyncUtterance(not connected)"

    def __await__(self) -> Generator[Any, None, AsyncUtterance]:
        return self._connected(None).__await__()

    async def _connected(self, asking: Asking | None) -> AsyncUtterance:
        if self._open_later is not None:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._connect(self._open_later))
                # Nobody may be waiting any longer when it fails.
                self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())
            opening = self._opening
            # Not cancelled at the deadline: others may wait for it, and the next call will.
            await asyncio.wait([opening], timeout=None if asking is None else asking.left_s)
            if not opening.done():
                raise DeadlineExceeded(
                    "the client had not connected by the deadline of this call; retry, or raise "
                    "the deadline"
                )
            opening.result()
        return self

    async def _connect(self, opened: Callable[[], Opened]) -> None:
        self.__init__(*await asyncio.to_thread(opened))  # type: ignore[misc]
        self._open_later = None

    def __getattr__(self, name: str) -> Any:
        if self._open_later is None or name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            "the client has not connected yet, so this utterance has no model; open it with "
            "`await client.utterance()`"
        )

    async def _run(
        self, query: Query[P, T], deadline_s: float | None, *args: P.args, **more: P.kwargs
    ) -> T:
        asking = Asking(self, deadline_s)
        await self._connected(asking)
        return await awaited(query(asking, *args, **more))

    async def score(
        self,
        contexts: Sequence[Sequence[Word]],
        words: Sequence[Word],
        *,
        deadline_s: float | None = None,
    ) -> Answers:
        """See `Utterance.score`."""
        return await self._run(self._score, deadline_s, contexts, words)

    async def extend(
        self, states: States | Sequence[State], words: Any, *, deadline_s: float | None = None
    ) -> Extension:
        """See `Utterance.extend`."""
        return await self._run(self._extend, deadline_s, states, words)

    async def score_sentences(
        self,
        sentences: Sequence[Sentence],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """See `Utterance.score_sentences`."""
        return await self._run(self._score_sentences, deadline_s, sentences, bos, eos)

    async def next_words(
        self, state: State, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[int, np.float32]]:
        """See `Utterance.next_words`."""
        return await self._run(self._next_words, deadline_s, state, k)

    async def next_distribution(
        self, state: State, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """See `Utterance.next_distribution`."""
        return await self._run(self._next_distribution, deadline_s, state)

    async def context_blocks(
        self, states: States | Sequence[State], *, deadline_s: float | None = None
    ) -> ContextBlocks:
        """See `Utterance.context_blocks`."""
        return await self._run(self._context_blocks, deadline_s, states)
