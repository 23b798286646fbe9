"""Phrases that one utterance makes likelier: names of contacts, products, today's topics.

    phrases = Phrases({"doctor strangelove": 2.5, "sellers": 1.0})
    utterance = client.utterance(phrases=phrases)

A phrase may have words that the model lacks. They get ids after the model's own, so that states and
lexicons tell them apart; the model scores each as its unknown word. Phrases stay in this process:
servers see the same queries as without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.splitting import split_words
from dlm.client.plan import phrase_kernels
from dlm.client.plan.automaton import UNIT, PhraseAutomaton
from dlm.errors import QueryError, shown
from dlm.ngram.vocab import UNK_ID, Vocabulary, as_bytes, is_mark
from dlm.units import counted

MAX_PHRASES = 100_000
MAX_WORDS = 32  # of a phrase
MAX_BONUS = 100.0  # log10
BOUND = 4  # vocabularies that phrases stay prepared for

_NOTHING = np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.int32)
Weights: TypeAlias = Mapping[str, float] | Mapping[bytes, float]


class Phrases:
    """Phrases and their bonuses, prepared once; any number of utterances and threads share them.

    Args  weights  the bonus of each phrase, log10, for each time that it is said, also within and
                   across others; rounded to 2^-10. Words are split at spaces, and spelled as in the
                   model. A negative bonus makes a phrase less likely
    Raises  QueryError  a phrase without words, of more than `MAX_WORDS`, with a mark such as <s>,
                        or given twice; a bonus that is not a number up to `MAX_BONUS`; more than
                        `MAX_PHRASES`
    """

    def __init__(self, weights: Weights) -> None:
        if not isinstance(weights, Mapping):
            raise QueryError(
                f"phrases is of type {type(weights).__name__}; expected a mapping of each phrase "
                'to its bonus in log10, such as {"doctor strangelove": 2.5}'
            )
        if len(weights) > MAX_PHRASES:
            raise QueryError(
                f"found {len(weights):,} phrases; expected at most {MAX_PHRASES:,}. Give an "
                "utterance the phrases that may be said in it; mix in a model of the others"
            )
        units: dict[tuple[bytes, ...], int] = {}
        pairs: Iterable[tuple[str | bytes, float]] = weights.items()
        for number, (phrase, bonus) in enumerate(pairs, 1):
            name = f"phrase {number}"  # not its words, which may be somebody's name
            words = words_of(phrase, name)
            if words in units:
                raise QueryError(
                    f"{name} differs from an earlier one only in its spaces; leave it out"
                )
            units[words] = units_of(bonus, name)
        self._units = dict(sorted(units.items()))  # the same nodes and ids, however they came
        self.words: tuple[bytes, ...] = tuple(sorted(set(chain.from_iterable(units))))
        self.longest = max(map(len, units), default=0)  # words
        symbol = {word: at for at, word in enumerate(self.words, 1)}
        spelled = [[symbol[word] for word in words] for words in self._units]
        self.automaton = PhraseAutomaton.of(spelled, list(self._units.values()))
        self.automaton.walk(*_NOTHING)  # compiled here, where no deadline runs
        self.automaton.advance(np.zeros(0, np.int32), *_NOTHING)
        phrase_kernels.fold_new(_NOTHING[0], 0)
        rows = (b" ".join(words) + b"\n%d\n" % bonus for words, bonus in self._units.items())
        self.digest = hashlib.blake2b(b"".join(rows), digest_size=16).hexdigest()
        self._bound: dict[int, BoundPhrases] = {}  # the last one used is last

    def __len__(self) -> int:
        return len(self._units)

    def __repr__(self) -> str:
        return f"Phrases({len(self)} phrases)"  # no words: these are names of people

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Phrases) and self._units == other._units

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Phrases, ({b" ".join(w): bonus * UNIT for w, bonus in self._units.items()},)

    @property
    def weights(self) -> dict[bytes, float]:
        """The bonus of each phrase, as rounded."""
        return {b" ".join(words): bonus * UNIT for words, bonus in self._units.items()}

    def memory_bytes(self, vocabulary_size: int) -> int:
        """About how much memory they take, prepared for one vocabulary of this size."""
        words = sum(map(len, self._units))
        text = sum(map(len, self.words))
        nodes = 20 * len(self.automaton.symbols)
        return (
            300 * len(self)
            + 16 * words
            + 200 * len(self.words)
            + 3 * text
            + nodes
            + (4 * vocabulary_size)
        )

    def bound(self, vocabulary: Vocabulary) -> BoundPhrases:
        """The phrases in ids of a vocabulary."""
        kept = self._bound  # replaced as a whole: a lock could be held by nobody after a fork
        found = kept.get(id(vocabulary)) or BoundPhrases(self, vocabulary)
        others = [(at, one) for at, one in kept.items() if one is not found][1 - BOUND :]
        # Each has its vocabulary, so the id stays its own.
        self._bound = dict([*others, (id(vocabulary), found)])
        return found


def prepared(phrases: Phrases | Weights | None) -> Phrases | None:
    """What `Client.utterance` was given; None if there are no phrases."""
    if phrases is None or isinstance(phrases, Phrases):
        return phrases or None
    return Phrases(phrases) or None


def words_of(phrase: str | bytes, name: str) -> tuple[bytes, ...]:
    """The words of a phrase, which errors call `name`; see `Phrases`."""
    if not isinstance(phrase, (str, bytes)):
        raise QueryError(f"{name} is of type {type(phrase).__name__}; expected a string")
    words = tuple(split_words(phrase))
    if not 1 <= len(words) <= MAX_WORDS:
        raise QueryError(
            f"{name} has {counted(len(words), 'word')}; expected 1 to {MAX_WORDS}, with spaces "
            "between them"
        )
    if any(map(is_mark, words)):
        raise QueryError(f"{name} has a mark such as <s> or <unk>; expected words that are said")
    return words


def units_of(bonus: float, name: str) -> int:
    """The bonus of a phrase in units of 2^-10; see `Phrases`."""
    if (
        isinstance(bonus, bool)
        or not isinstance(bonus, (int, float, np.integer, np.floating))
        or not abs(bonus) <= MAX_BONUS  # also not a number
    ):
        raise QueryError(
            f"the bonus of {name} is {shown(bonus)}; expected a number from {-MAX_BONUS:g} to "
            f"{MAX_BONUS:g}, log10"
        )
    return round(float(bonus) / UNIT)


class BoundPhrases:
    """Phrases in ids of one vocabulary.

    Shapes
        symbols  (V + N,) int32  the automaton's symbol of each id; 0 if no phrase has the word
    Attributes
        new   id of each of the N words that the vocabulary lacks, from V on
    """

    def __init__(self, phrases: Phrases, vocabulary: Vocabulary) -> None:
        self.phrases, self.vocabulary = phrases, vocabulary
        self.automaton = phrases.automaton
        self.size = len(vocabulary)
        ids = vocabulary.ids_of(phrases.words).astype(np.int64)
        lacked = np.flatnonzero(ids == UNK_ID)
        ids[lacked] = self.size + np.arange(len(lacked))
        self.new = {phrases.words[at]: self.size + n for n, at in enumerate(lacked.tolist())}
        self.symbols = np.zeros(self.size + len(lacked), np.int32)
        self.symbols[ids] = np.arange(1, len(ids) + 1)

    def id_of(self, word: str | bytes) -> int:
        """The id of a word; 0 where neither the vocabulary nor a phrase has it."""
        return self.vocabulary.id_of(word) or self.new.get(as_bytes(word), UNK_ID)

    def model_words(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The ids that the model is asked for: its unknown word, where it lacks one.

        Raises  QueryError  an id beyond those of the phrases
        """
        folded, end = phrase_kernels.fold_new(words.reshape(-1), self.size)
        if end > len(self.symbols):
            raise QueryError(
                f"word id {end - 1} is out of range; ids are 0 to {len(self.symbols) - 1}"
            )
        found: NDArray[np.uint32] = folded.reshape(words.shape)
        return found

    def step(self, node: int, word: int) -> tuple[int, float]:
        """The node after one word, and what it adds, log10."""
        return self.step_symbol(node, int(self.symbols[word]))

    def step_symbol(self, node: int, symbol: int) -> tuple[int, float]:
        """The same, by the symbol of a word."""
        after = self.automaton.step(node, symbol)
        if node == after == 0:  # most words
            return 0, 0.0
        return after, self.automaton.added(node, after) * UNIT

    def bonus(self, before: Any, after: Any) -> Any:
        """What a step from one node to another adds, log10; numbers or arrays, as NumPy does it."""
        automaton = self.automaton
        gained = automaton.completed[after] + automaton.held[after]
        return (gained - automaton.held[before]) * UNIT

    def finish(self, nodes: Any) -> Any:
        """What the end of a sentence adds if no </s> is scored: shares are given back."""
        return -self.automaton.held[nodes] * UNIT

    def lookahead(self, words: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """The most that each word adds in any place of a phrase, 0 or more, log10."""
        automaton = self.automaton
        nodes = np.arange(1, len(automaton.symbols))
        parents = np.searchsorted(automaton.children, nodes, side="right") - 1
        best = np.zeros(len(self.phrases.words) + 1)
        np.maximum.at(best, automaton.symbols[nodes], self.bonus(parents, nodes))
        found: NDArray[np.float64] = best[self.symbols[words]]
        return found

    def walk(
        self, words: NDArray[np.uint32], counts: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """The bonuses of whole sentences, (K,), and the node after each."""
        sizes = np.array(counts, np.uint32)
        units, nodes = self.automaton.walk(sizes, np.ascontiguousarray(words), self.symbols)
        return np.asarray(units * UNIT, np.float64), nodes

    def of_words(self, words: Sequence[str | bytes]) -> float:
        """The bonus of one sentence: that of each phrase, as often as it is said."""
        ids = np.fromiter(map(self.id_of, words), np.uint32, len(words))
        return float(self.walk(ids, [len(ids)])[0][0])
