"""Wordpieces to words as FNG 6 has it: a topology of pieces, B = M o A, and its counts moved to A.

A source says sequences of pieces; `Spelled` has all of them with their probabilities. M reads
pieces and the end of a word as a symbol of its own, and says words; A is the topology of words.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from distill.oracle import BEGIN, END, Ngram

SPACE = "▁"
UNK = "<unk>"
EOW = "<end of word>"
BOUNDARY, OUT = "", "<out>"  # states of M beside what has been spelled
Pieces = tuple[str, ...]


class Spelled:
    """A source of pieces, by a table that depends on all that was said, up to some length."""

    def __init__(self, pieces: list[str], seed: int, *, longest: int, choices: int = 4) -> None:
        self.pieces, self.seed, self.longest, self.choices = pieces, seed, longest, choices

    def after(self, said: Pieces) -> dict[str, float]:
        """What comes next; sentences end after `longest` pieces."""
        if len(said) == self.longest:
            return {END: 1.0}
        rng = random.Random(f"{self.seed} {' '.join(said)}")
        # A sentence begins with a word, nearly always.
        likely = [p for p in self.pieces if p.startswith(SPACE)]
        some = rng.sample(self.pieces, self.choices) if said else rng.sample(likely, self.choices)
        if not said and rng.random() < 0.5:
            some.append(rng.choice(self.pieces))
        weights = {piece: rng.random() ** 2 + 0.05 for piece in [*some, END]}
        total = sum(weights.values())
        return {piece: weight / total for piece, weight in weights.items()}

    def prefixes(self, said: Pieces = (), prob: float = 1.0) -> Iterator[tuple[Pieces, float]]:
        """All that can have been said so far, and how probable that is."""
        yield said, prob
        for piece, given in self.after(said).items():
            if piece != END:
                yield from self.prefixes((*said, piece), prob * given)

    def sample(self, rng: random.Random) -> Pieces:
        """A sentence."""
        said: Pieces = ()
        while True:
            given = self.after(said)
            piece = rng.choices(list(given), list(given.values()))[0]
            if piece == END:
                return said
            said = (*said, piece)


def words_of(said: Pieces, lexicon: set[str]) -> Ngram:
    """The words of a sentence; what begins without a mark is a word, too, that nobody knows."""
    words: list[str] = []
    for piece in said:
        if piece.startswith(SPACE) or not words:
            words.append("" if piece.startswith(SPACE) else UNK)
        words[-1] += piece.removeprefix(SPACE)
    return tuple(word if word in lexicon else UNK for word in words)


@dataclass(frozen=True)
class Composed:
    """B = M o A, its states and arcs as section 6 describes them.

    A state is (state of M, state of A); M spells the words of the lexicon.
    """

    lexicon: set[str]
    topology: set[Ngram]
    order: int

    def read(self, spelled: str, symbol: str) -> tuple[str, str]:
        """M: (next state, what it says) for a symbol; "" says nothing."""
        if symbol == END:
            return BOUNDARY, END
        if symbol == EOW:
            if spelled == OUT:
                return BOUNDARY, ""
            word = spelled.removeprefix(SPACE)
            return BOUNDARY, word if word in self.lexicon else UNK
        if spelled == OUT:
            return OUT, ""
        after = spelled + symbol
        if after.startswith(SPACE) and any((SPACE + w).startswith(after) for w in self.lexicon):
            return after, ""
        return OUT, UNK

    def can_say(self, spelled: str) -> set[str]:
        """R: what M says next from one of its states."""
        if spelled in (BOUNDARY, OUT):
            return {*self.lexicon, UNK, END}
        return {UNK} | {w for w in self.lexicon if (SPACE + w).startswith(spelled)}

    def listed(self, context: Ngram) -> set[str]:
        """L of a state of A; the empty context has all words."""
        return {n[-1] for n in self.topology if n[:-1] == context}

    def back(self, context: Ngram) -> Ngram | None:
        """Where a state of A backs off to: the longest end of it that is a state."""
        while context:
            context = context[1:]
            if not context or context in self.topology:
                return context
        return None

    def goes(self, context: Ngram, word: str) -> Ngram:
        """Where a state of A leads by a word that it lists."""
        after = (*context, word)[-(self.order - 1) :] if self.order > 1 else ()
        while after and after not in self.topology:
            after = after[1:]
        return after


class ComposedCounts:
    """C of the arcs of B, by the definition, each history alone, and what of it is A's."""

    def __init__(self, shape: Composed) -> None:
        self.shape = shape
        self.found: dict[Ngram, float] = defaultdict(float)
        self.backed: dict[Ngram, float] = defaultdict(float)

    def step(
        self, state: tuple[str, Ngram], symbol: str, weight: float
    ) -> tuple[str, Ngram]:  # fmt: skip
        """Follows an arc, down the failures that are before it; adds what it counts for A."""
        shape = self.shape
        spelled, context = state
        after, said = shape.read(spelled, symbol)
        while True:
            labels = shape.listed(context)
            if (said in labels) if said else bool(shape.can_say(after) & labels):
                break
            self.backed[context] += weight
            below = shape.back(context)
            assert below is not None, (state, symbol)
            context = below
        if not said:
            return after, context
        self.found[*context, said] += weight
        return after, shape.goes(context, said)

    def add(self, said: Pieces, given: dict[str, float], weight: float) -> None:
        """What is given after some pieces; the end of a word is a symbol of its own."""
        silent = ComposedCounts(self.shape)
        state: tuple[str, Ngram] = (BOUNDARY, (BEGIN,) if self.shape.order > 1 else ())
        for place, piece in enumerate(said):
            if piece.startswith(SPACE) and place:
                state = silent.step(state, EOW, 0.0)
            state = silent.step(state, piece, 0.0)
        over = {p: v for p, v in given.items() if p == END or p.startswith(SPACE)}
        for piece, prob in given.items():
            if piece not in over or not said:
                self.step(state, piece, weight * prob)
        if said and over:
            ending = sum(over.values())
            self.step(state, EOW, weight * ending)
            state = silent.step(state, EOW, 0.0)
            for piece, prob in over.items():
                self.step(state, piece, weight * ending * (prob / ending))
