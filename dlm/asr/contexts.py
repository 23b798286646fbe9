"""A cache of contexts with all that is stored after each: decoders ask for many words after few."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from dlm.client import ContextBlocks, State, Utterance
from dlm.ngram.query import BIGRAM_FALLBACK

MAX_WORDS = 1 << 22  # in all cached blocks: some 60 MB
BLOCK_WORDS = 64  # an empty block takes as much memory as this many words
MAX_ANSWERS = 1 << 14  # per context


@dataclass(slots=True)
class Counts:
    """What decoders asked for and what it cost, since the cache was created.

    queries      words scored
    contexts     blocks fetched, or built from the low orders
    round_trips  calls that may have waited for servers
    """

    queries: int = 0
    contexts: int = 0
    round_trips: int = 0


class KnownContext:
    """A state with all that is stored after it; `answers` by word id: log10 P, the next state."""

    __slots__ = ("_blocks", "_row", "answers", "bigram_fallback", "size", "state")

    def __init__(self, state: State, blocks: ContextBlocks, row: int) -> None:
        self.state = state
        self._blocks, self._row = blocks, row
        self.answers: dict[int, tuple[float, State]] = {}
        self.size = BLOCK_WORDS + int(blocks.sizes[row])
        self.bigram_fallback = bool(blocks.source[row] == BIGRAM_FALLBACK)

    def score(self, word: int) -> tuple[float, State]:
        found = self.answers.get(word)
        if found is None:
            if len(self.answers) >= MAX_ANSWERS:
                self.answers.clear()
            found = self.answers[word] = self._blocks.score(self._row, word)
        return found


class Contexts:
    """The contexts of one utterance's model that were used last; not thread-safe.

    Args  max_words  stored words over all contexts; the least recently used is dropped first
    """

    def __init__(self, utterance: Utterance, max_words: int = MAX_WORDS) -> None:
        self.utterance = utterance
        self.counts = Counts()
        self._max_words = max_words
        self._kept: OrderedDict[State, KnownContext] = OrderedDict()
        self._passing: dict[State, KnownContext] = {}
        self._words = 0

    def begin_sentence(self) -> None:
        """Forgets the bigram fallback's answers, since servers may be back."""
        self._passing.clear()

    def find(self, state: State) -> KnownContext | None:
        found = self._kept.get(state)
        if found is not None:
            self._kept.move_to_end(state)
            return found
        return self._passing.get(state)

    def get(self, state: State) -> KnownContext:
        return self.find(state) or self.get_all([state])[0]

    def get_all(self, states: Sequence[State]) -> list[KnownContext]:
        kept, passing = self._kept, self._passing
        missing = [s for s in dict.fromkeys(states) if s not in kept and s not in passing]
        fetched: dict[State, KnownContext] = {}
        if missing:
            blocks = self.utterance.context_blocks(missing)
            self.counts.contexts += len(missing)
            self.counts.round_trips += any(len(state) >= 2 for state in missing)
            fetched = {s: KnownContext(s, blocks, row) for row, s in enumerate(missing)}
        found = [fetched.get(s) or passing.get(s) or kept[s] for s in states]
        for state in states:
            if state in kept:
                kept.move_to_end(state)
        for state, context in fetched.items():
            self._keep(state, context)
        return found

    def _keep(self, state: State, context: KnownContext) -> None:
        if context.bigram_fallback:
            self._passing[state] = context
            return
        self._kept[state] = context
        self._words += context.size
        while self._words > self._max_words and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._words -= oldest.size
