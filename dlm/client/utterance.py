"""The utterances that decoders use: synchronous, and for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.client.base_utterance import Asking, BaseUtterance, Steps, joined, source_of
from dlm.client.call import UNKNOWN
from dlm.client.core import Scorer
from dlm.client.inputs import Inputs, Parts, Sentence, Word, every_word_after, stored_after
from dlm.client.phrases import BoundPhrases, Phrases
from dlm.client.router import Snapshot
from dlm.client.server import BLOCKS, BlockPart
from dlm.client.states import LOCAL_MODEL, Extension, PhraseState, SentenceScore, State, States
from dlm.errors import ConfigError, DeadlineExceeded, DlmError, ProtocolError, QueryError
from dlm.index.search.blocks import ContextBlock
from dlm.index.search.shard import LowOrders
from dlm.kenlm.model import KenlmBlock, KenlmFile
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, LOCAL_FALLBACK, Answers
from dlm.ngram.vocab import UNK_ID

T = TypeVar("T")
P = ParamSpec("P")
Query: TypeAlias = Callable[Concatenate[Asking, P], Steps[T]]
UNKNOWN_S = 60.0  # servers that do not know ContextBlock are asked again after this many seconds
# The arguments of an utterance, see `BaseUtterance`.
Opened: TypeAlias = tuple[Scorer, Snapshot, float | None, str, str, Phrases | None, bool]


# -------------------------------------------------------------------------------------------------
# A context block is everything the model stores after a state, to score any word without a message.
#
# A decoder asks for many words after few states, one after another. It fetches a block for each
# state once; from then on the block and the low orders answer, bit for bit as the servers would.


@dataclass(frozen=True, eq=False)
class ContextBlocks:
    """K states with everything the model stores after them; scoring a word needs no message.

    `Utterance.context_blocks` makes these objects, which any thread may use. The answers are those
    of `Utterance.extend`, bit for bit.

    Shapes  states (K,)
    """

    states: States
    _inputs: Inputs
    _blocks: tuple[ContextBlock | KenlmBlock, ...]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def source(self) -> NDArray[np.uint8]:
        """(K,) the source of the answers, as in `Extension`."""
        return np.array([block.source for block in self._blocks], np.uint8)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(K,) number of words stored for each state; a word takes 11 bytes."""
        return np.array([len(block.words) for block in self._blocks], np.int64)

    def extend(self, words: Any = None) -> Extension:
        """Like `Utterance.extend`, for these states.

        Args  words  W words for all states, or K rows of W words; by default all of the vocabulary
        Raises  QueryError
        """
        inputs = self._inputs
        if words is None:
            width, asked = inputs.vocabulary_size, None
        else:
            _, width, nested = inputs.extend_shape(self.states, words)
            rows = words if nested else [words]
            asked = [inputs.ids(row, f"words[{at}]") for at, row in enumerate(rows)]
        shape = (len(self), width)
        oov = np.zeros(shape, bool)
        each, after, bonuses = list[Answers](), list[States](), list[NDArray[np.float32]]()
        for row, block in enumerate(self._blocks):
            every = np.arange(width, dtype=np.uint32)
            ids = every if asked is None else asked[row % len(asked)]
            count = np.array([width], np.uint32)
            queries = inputs.queries(self.states[row : row + 1], count, ids)
            answers = block.score_all() if asked is None else block.score(queries.words)
            each.append(answers)
            oov[row] = queries.words == UNK_ID
            states_after, bonus = inputs.after(queries, answers)
            after.append(states_after)
            if bonus is not None:
                bonuses.append(bonus)
        some = joined(each or [Answers.empty(0)])
        return Extension(
            some.log10_prob.reshape(shape),
            some.matched_order.reshape(shape),
            some.ngram_length.reshape(shape),
            States.joined(after or [self.states[:0]]).reshape(*shape),
            np.broadcast_to(self.source.reshape(-1, 1), shape).copy(),
            oov,
            np.concatenate(bonuses).reshape(shape) if bonuses else None,
        )

    def answers(self, row: int, words: NDArray[np.uint32]) -> Answers:
        """Scores words, given by id, after the state in `row`.

        Trusts  the ids are below the vocabulary's size
        """
        return self._blocks[row].score(words)

    def score(self, row: int, word: Word) -> tuple[float, State]:
        """Returns log10 P of one word after one of the states, and the state after the word.
        `Utterance.bonus` of these two states says what phrases add."""
        block, inputs = self._blocks[row], self._inputs
        known = type(word) is int and 0 <= word < inputs.vocabulary_size
        number: int = word if known else inputs.id_of(word)  # type: ignore[assignment]
        if inputs.phrases is not None:
            return self._score_biased(inputs.phrases, row, number)
        log10_prob, length = block.score_word(number)
        words = (*block.words_before, number)
        return log10_prob, State(self.states.model_info, words[len(words) - length :])

    def _score_biased(self, phrases: BoundPhrases, row: int, spoken: int) -> tuple[float, State]:
        block, number = self._blocks[row], spoken if spoken < phrases.size else UNK_ID
        log10_prob, length = block.score_word(number)
        words = (*block.words_before, number)
        node, _ = phrases.step(self.states[row]._node, spoken)
        kept = words[len(words) - length :]
        return log10_prob, PhraseState(self.states.model_info, kept, node)

    def distribution(self) -> NDArray[np.float32]:
        """(K, V) log10 P of every word of the vocabulary, by id."""
        out = np.empty((len(self), self._inputs.vocabulary_size), np.float32)
        for row, block in enumerate(self._blocks):
            out[row] = block.score_all().log10_prob
        return out


@dataclass(slots=True)
class _Fetched:
    parts: list[BlockPart]
    source: int
    total: int | None = None

    @property
    def words(self) -> int:
        return sum(len(part.ranks) for part in self.parts)


class BlockFetch:
    """Collects the blocks of some states, and says what to request until all blocks are complete.

    Args
        states  (K,)
        source  the source of the low orders' answers
    Attributes
        wanted  (n,) int64: rows to request, without the first `skips` words of each. At first,
                these are the states after which shards may store words that low orders lack
    """

    def __init__(self, states: States, source: int) -> None:
        self.states = states
        self._fetched = [_Fetched([], source) for _ in range(len(states))]
        self.wanted: NDArray[np.int64] = np.flatnonzero(states._lengths >= 2)

    @property
    def skips(self) -> NDArray[np.uint32]:
        """(n,) number of words already fetched for each wanted row."""
        return np.array([self._fetched[row].words for row in self.wanted], np.uint32)

    def take(self, answered: list[tuple[list[BlockPart | None], NDArray[np.uint8]]]) -> None:
        """Adds the answers for the wanted rows; raises `ProtocolError` if the answers for a row do
        not continue the answers that came earlier."""
        left = []
        parts = [part for some, _ in answered for part in some]
        sources = [source for _, some in answered for source in some.tolist()]
        for row, part, source in zip(self.wanted.tolist(), parts, sources, strict=True):
            fetched = self._fetched[row]
            if part is None:
                fetched.parts, fetched.source = [], source
                continue
            before = fetched.parts[-1].ranks[-1:] if fetched.parts else part.ranks[:0]
            if fetched.total not in (None, part.total) or (
                len(before) and len(part.ranks) and part.ranks[0] <= before[0]
            ):
                raise ProtocolError(
                    "two replies disagree on the words stored after a context. The server is "
                    "faulty; use another server"
                )
            fetched.total, fetched.source = part.total, source
            fetched.parts.append(part)
            if fetched.words < part.total:
                left.append(row)
        self.wanted = np.array(left, np.int64)

    def skip_all(self) -> None:
        """Gives up the remaining requests, since the servers do not know ContextBlock."""
        for row in self.wanted.tolist():
            self._fetched[row].source = UNKNOWN
        self.wanted = self.wanted[:0]

    def unknown(self) -> list[int]:
        return [row for row, f in enumerate(self._fetched) if f.source == UNKNOWN]

    def blocks(self, low: LowOrders, instead: dict[int, Answers]) -> tuple[ContextBlock, ...]:
        """Makes each row's block; for `unknown` rows, `instead` has the answers for all words."""
        return tuple(
            _block(low, context, fetched, instead.get(row))
            for row, (context, fetched) in enumerate(
                zip(self.states.each(), self._fetched, strict=True)
            )
        )


def _block(
    low: LowOrders, context: NDArray[np.uint32], fetched: _Fetched, whole: Answers | None
) -> ContextBlock:
    if whole is not None:
        if source_of(whole).any():  # some answers did not come in time
            return ContextBlock.low_only(low, context, BIGRAM_FALLBACK)
        every = np.arange(low.manifest.vocabulary_size, dtype=np.uint32)
        return ContextBlock(low, context, ContextBlock.low_only(low, context).sums, every, whole)
    parts, source = fetched.parts, fetched.source
    if not parts:
        return ContextBlock.low_only(low, context, source)
    ranks = parts[0].ranks if len(parts) == 1 else np.concatenate([part.ranks for part in parts])
    answers = joined([part.answers for part in parts])
    block = ContextBlock.make(low, context, parts[0].log10_backoffs, ranks, answers)
    return block if source == FULL else replace(block, source=source)


# -------------------------------------------------------------------------------------------------
# Utterances are the handles by which callers use a model.


def _no_memory(cause: MemoryError) -> DlmError:
    return DlmError(f"this call ran out of memory ({cause!r}); split it into smaller calls")


def waited(steps: Steps[T]) -> T:
    """Runs a call to its end, and returns its result; the caller's thread waits."""
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
    """Runs a call to its end, and returns its result; the caller's event loop is not blocked."""
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


class WithBlocks(BaseUtterance):
    """The calls of an utterance that need everything that is stored after a state."""

    def _next_words(
        self, asking: Asking, state: State, k: int
    ) -> Steps[list[tuple[int, np.float32]]]:
        if not isinstance(k, (int, np.integer)) or k < 1:
            raise QueryError(f"k is {k!r}; expected an integer, 1 or more")
        log10_prob = yield from self._next_distribution(asking, state)
        words = np.arange(len(log10_prob))
        begin = self._inputs.words.begin_id
        if begin != UNK_ID:  # <s> follows nothing, whatever probability a model gives it
            words = np.delete(words, begin)
        if k < len(words):
            found = log10_prob[words]
            words = words[found >= np.partition(found, len(found) - k)[len(found) - k]]
        best = words[np.argsort(-log10_prob[words], kind="stable")[:k]]
        return [(word, log10_prob[word]) for word in best.tolist()]

    def _next_distribution(self, asking: Asking, state: State) -> Steps[NDArray[np.float32]]:
        blocks = yield from self._context_blocks(asking, [state])
        found: NDArray[np.float32] = blocks.distribution()[0]
        return found

    def _context_blocks(
        self, asking: Asking, states: States | Sequence[State]
    ) -> Steps[ContextBlocks]:
        self._core.check_open()  # or low orders would answer after `close`
        file = self._core.local_model
        if isinstance(file, KenlmFile):  # a KenLM file cannot list the words after a context
            asked = self._inputs.states(states)
            return ContextBlocks(asked, self._inputs, tuple(map(file.block, asked.each())))
        fetches: list[BlockFetch] = []
        is_known = time.monotonic() >= self._blocks_unknown_until

        def first() -> Parts:
            # The fetch is made here, since a new utterance may switch models in its first call.
            source = LOCAL_FALLBACK if self.model_info.kind == LOCAL_MODEL else FULL
            fetch = BlockFetch(self._inputs.states(states), source)
            fetches.append(fetch)
            return stored_after(fetch.states, fetch.wanted, fetch.skips) if is_known else iter(())

        answers = yield from self._ask(asking, first, BLOCKS)
        fetch = fetches[-1]
        if not is_known:
            fetch.skip_all()
        while len(fetch.wanted):
            fetch.take([found for _, found in answers])
            if len(fetch.wanted):
                answers = yield from self._ask(
                    asking, lambda: stored_after(fetch.states, fetch.wanted, fetch.skips), BLOCKS
                )
        instead: dict[int, Answers] = {}
        if rows := fetch.unknown():
            self._blocks_unknown_until = time.monotonic() + UNKNOWN_S
            every = yield from self._ask(
                asking, lambda: every_word_after(fetch.states, rows, self.vocabulary_size)
            )
            each = len(every) // len(rows)
            for place, row in enumerate(rows):
                whole = every[place * each : (place + 1) * each]
                instead[row] = joined([answers for _, answers in whole])
        blocks = fetch.blocks(self._inputs.snapshot.grams.low, instead)
        return ContextBlocks(fetch.states, self._inputs, blocks)


class Utterance(WithBlocks):
    """A synchronous utterance, created by `Client.utterance`. Any thread may use it.

    It is pinned to a model, and its states carry that model. A state that is given to an utterance
    of another model raises a TypeError (ModelMismatch); it never gives a wrong score.
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
                   one word, even with spaces in it; `oov` marks words that the model lacks
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
        """The `k` most probable next words: (id, log10 P), best first, ties by id.

        They may include the sentence end and id 0, the unknown word, which stands for every word
        that the vocabulary lacks; never <s>. `vocabulary.words[id]` is the word of an id, as bytes.

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
        """Fetches everything stored after each of K states, to score any word without a message.

        This suits decoders that query many words after few states. The call takes one message per
        shard, or several if much is stored. If the servers do not know the call, the client asks
        for every word of the vocabulary.

        Raises  ModelMismatch (a TypeError), QueryError, UnavailableError, ProtocolError
        """
        return self._run(self._context_blocks, deadline_s, states)


class AsyncUtterance(WithBlocks):
    """An asynchronous utterance from `AsyncClient.utterance`, with the methods of `Utterance`.

    Awaiting an utterance connects its client if necessary, and returns the utterance.
    """

    _open_later: Callable[[], Opened] | None = None
    _opening: asyncio.Task[None] | None = None

    @classmethod
    def later(
        cls, opened: Callable[[], Opened], core: Scorer, deadline_s: float | None
    ) -> AsyncUtterance:
        """Returns an utterance whose first call connects: it runs `opened` in a thread."""
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
                # Reads a failed task's error, in case no call waits for the task any longer.
                self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())
            opening = self._opening
            # The task is not cancelled at the deadline: other or later calls may wait for it.
            await asyncio.wait([opening], timeout=None if asking is None else asking.left_s)
            if not opening.done():
                raise DeadlineExceeded(
                    "the client was not yet connected at the deadline of this call; retry, or "
                    "give a longer deadline"
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
