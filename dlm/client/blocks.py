"""Everything the model stores after some states, to score any word without a message.

A decoder asks for many words after few states, one after another. It fetches a block for each state
once; from then on the block and the low orders answer, bit for bit as the servers would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.call import UNKNOWN
from dlm.client.inputs import Inputs, Word
from dlm.client.phrases import BoundPhrases
from dlm.client.server import BlockPart
from dlm.client.states import Extension, PhraseState, State, States
from dlm.errors import ProtocolError
from dlm.index.search.blocks import ContextBlock
from dlm.index.search.shard import LowOrders
from dlm.kenlm.model import KenlmBlock
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, Answers
from dlm.ngram.vocab import UNK_ID


def source_of(answers: Answers) -> NDArray[np.uint8]:
    return np.zeros(len(answers), np.uint8) if answers.source is None else answers.source


def joined(answers: Sequence[Answers]) -> Answers:
    if len(answers) == 1:
        return answers[0]
    plain = all(a.source is None for a in answers)
    return Answers(
        np.concatenate([a.log10_prob for a in answers]),
        np.concatenate([a.matched_order for a in answers]),
        np.concatenate([a.ngram_length for a in answers]),
        np.concatenate([a.state_length for a in answers]),
        None if plain else np.concatenate([source_of(a) for a in answers]),
    )


@dataclass(frozen=True, eq=False)
class ContextBlocks:
    """K states with everything the model stores after them; scoring a word needs no message.

    Made by `Utterance.context_blocks`; any thread may use it. The answers are those of
    `Utterance.extend`, bit for bit.

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
        """(K,) words stored for each state; each takes 11 bytes."""
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
        """Answers to words by id, each after one of the states.

        Trusts  the ids are below the vocabulary's size
        """
        return self._blocks[row].score(words)

    def score(self, row: int, word: Word) -> tuple[float, State]:
        """log10 P of one word after one of the states, and the state after it. What phrases add is
        `Utterance.bonus` of both states."""
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
    """The blocks of some states as they arrive: what to ask for next, until they are complete.

    Args
        states  (K,)
        source  of the low orders' answers
    Attributes
        wanted  (n,) int64: rows to ask for, starting at `skips`. At first, those whose contexts may
                have something stored after them that the low orders lack
    """

    def __init__(self, states: States, source: int) -> None:
        self.states = states
        self._fetched = [_Fetched([], source) for _ in range(len(states))]
        self.wanted: NDArray[np.int64] = np.flatnonzero(states._lengths >= 2)

    @property
    def skips(self) -> NDArray[np.uint32]:
        """Words already fetched for each wanted row."""
        return np.array([self._fetched[row].words for row in self.wanted], np.uint32)

    def take(self, answered: list[tuple[list[BlockPart | None], NDArray[np.uint8]]]) -> None:
        """Takes what arrived for the wanted rows; raises `ProtocolError` for words that cannot
        follow those before them."""
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
                    "the words stored after a context changed between two replies. The server is "
                    "faulty; use another"
                )
            fetched.total, fetched.source = part.total, source
            fetched.parts.append(part)
            if fetched.words < part.total:
                left.append(row)
        self.wanted = np.array(left, np.int64)

    def skip_all(self) -> None:
        """Asks for nothing: the servers do not know the call."""
        for row in self.wanted.tolist():
            self._fetched[row].source = UNKNOWN
        self.wanted = self.wanted[:0]

    def unknown(self) -> list[int]:
        return [row for row, f in enumerate(self._fetched) if f.source == UNKNOWN]

    def blocks(self, low: LowOrders, instead: dict[int, Answers]) -> tuple[ContextBlock, ...]:
        """The block of each row; `instead`: for each `unknown` one, the answers to every word."""
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
        if source_of(whole).any():  # no shard gave all of it in time
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
