"""An automaton that counts phrases in a sentence, word by word.

A node stands for the longest suffix of the words so far that begins a phrase. A bonus is paid in
advance: each word of a phrase adds its share, and a word that leaves the phrase takes the shares
back. The shares of a node are its potential, so the steps of a path add up to the bonuses of the
phrases that it completes, exactly: all are whole numbers of units.

Source  Aho and Corasick, "Efficient String Matching: An Aid to Bibliographic Search", CACM 1975;
        applied to words, with weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels
from dlm.errors import QueryError, shown
from dlm.ngram.vocab import UNK_ID, Vocabulary, as_bytes, is_mark
from dlm.units import counted

# -------------------------------------------------------------------------------------------------
# Splits text into words.


# As in ARPA files, words are split at spaces and tabs; a line end cannot be part of a word either.
SPACES = " \t\r\n"
_SPACES = re.compile(rb"[ \t\r\n]+")
_SPACES_OF_TEXT = re.compile(f"[{SPACES}]+")
SPLIT_BYTES = 1 << 16  # bytes of a sentence split at a time


def split_words(sentence: str | bytes) -> list[bytes]:
    """The words of a sentence, split at spaces, tabs and line ends, nowhere else."""
    return [word for some in split_parts(sentence) for word in some]


def split_text(text: str) -> list[str]:
    """The words of a string, as strings."""
    return [word for word in _SPACES_OF_TEXT.split(text) if word]


def split_parts(sentence: str | bytes) -> Iterator[list[bytes]]:
    """The words of a sentence, some at a time."""
    text = as_bytes(sentence)
    begin = 0
    while begin < len(text):
        cut = _SPACES.search(text, begin + SPLIT_BYTES) if len(text) - begin > SPLIT_BYTES else None
        end = len(text) if cut is None else cut.end()
        yield [w for w in _SPACES.split(text[begin:end]) if w]
        begin = end


UNIT = float(kernels.UNIT)  # unit of bonuses, log10


@dataclass(frozen=True, eq=False)
class PhraseAutomaton:
    """Matches phrases of symbols numbered from 1; symbol 0 stands for every other word.

    Nodes are numbered level by level, so the children of a node are one range, sorted by symbol.

    Shapes  N nodes, the first of which stands for no words
        children   (N + 1,) int32  children of node n are children[n] to children[n + 1]
        symbols    (N,)     int32  the last symbol of each node
        shorter    (N,)     int32  the node of its longest proper suffix
        completed  (N,)     int32  units of all phrases that end at the node
        held       (N,)     int32  units paid in advance, 0 or more; 0 at node 0
    """

    children: NDArray[np.int32]
    symbols: NDArray[np.int32]
    shorter: NDArray[np.int32]
    completed: NDArray[np.int32]
    held: NDArray[np.int32]

    @classmethod
    def of(cls, phrases: Sequence[Sequence[int]], units: Sequence[int]) -> PhraseAutomaton:
        """The automaton for distinct phrases, each of one symbol or more, and their bonuses.

        Trusts  sums of bonuses fit in an int32: limited by `Phrases`
        """
        order = sorted(range(len(phrases)), key=lambda at: tuple(phrases[at]))
        lengths = np.array([len(phrases[at]) for at in order], np.int64)
        bonuses = np.array([units[at] for at in order], np.int64)
        depth = int(lengths.max(initial=0))
        table = np.zeros((len(order), depth), np.int32)
        for row, at in enumerate(order):
            table[row, : lengths[row]] = phrases[at]
        parents, symbols = [np.zeros(1, np.int64)], [np.zeros(1, np.int32)]
        held, completed = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        levels, rows = [0, 1], np.arange(len(order))
        above = np.zeros(len(order), np.int64)  # the node of each row's beginning
        for level in range(depth):
            rows, above = rows[lengths[rows] > level], above[lengths[rows] > level]
            here = table[rows, level]
            new = np.ones(len(rows), bool)
            new[1:] = (above[1:] != above[:-1]) | (here[1:] != here[:-1])
            place = np.cumsum(new) - 1
            parents.append(above[new])
            symbols.append(here[new])
            ends = lengths[rows] == level + 1
            ahead, done = np.zeros(new.sum(), np.int64), np.zeros(new.sum(), np.int64)
            share = np.maximum(bonuses[rows], 0) * (level + 1) // lengths[rows]
            np.maximum.at(ahead, place[~ends], share[~ends])
            done[place[ends]] = bonuses[rows][ends]
            held.append(ahead)
            completed.append(done)
            above = levels[-1] + place
            levels.append(levels[-1] + len(ahead))
        return cls._linked(
            levels,
            np.concatenate(parents),
            np.concatenate(symbols),
            np.concatenate(held),
            np.concatenate(completed),
        )

    @classmethod
    def _linked(
        cls,
        levels: list[int],
        parents: NDArray[np.int64],
        symbols: NDArray[np.int32],
        held: NDArray[np.int64],
        completed: NDArray[np.int64],
    ) -> PhraseAutomaton:
        count = len(symbols)
        children = np.searchsorted(parents[1:], np.arange(count + 1)).astype(np.int32) + 1
        children = children.astype(np.int32)
        shorter = np.zeros(count, np.int32)
        nothing = [np.zeros(count, np.int32)] * 2  # no units: only the nodes are needed
        identity = np.arange(int(symbols.max()) + 1, dtype=np.int32)
        for first, last in pairwise(levels[2:]):
            level = slice(first, last)
            shorter[level], _ = kernels.advance(
                shorter[parents[level]],
                np.ones(last - first, np.uint32),
                symbols[level].astype(np.uint32),
                identity,
                children,
                symbols,
                shorter,
                *nothing,
            )
            held[level] = np.maximum(held[level], held[shorter[level]])
            completed[level] += completed[shorter[level]]
        return cls(children, symbols, shorter, completed.astype(np.int32), held.astype(np.int32))

    @cached_property
    def _edges(self) -> dict[tuple[int, int], int]:
        parents = np.repeat(np.arange(len(self.symbols)), np.diff(self.children))
        symbols = self.symbols[1:].tolist()
        pairs = zip(parents.tolist(), symbols, strict=True)
        return dict(zip(pairs, range(1, len(self.symbols)), strict=True))

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        return self.shorter.tolist(), self.completed.tolist(), self.held.tolist()

    def step(self, node: int, symbol: int) -> int:
        """The node after one symbol."""
        if symbol == 0:
            return 0
        edges, shorter = self._edges, self._lists[0]
        while (found := edges.get((node, symbol), 0)) == 0 and node:
            node = shorter[node]
        return found

    def added(self, before: int, after: int) -> int:
        """The units that one step adds."""
        _, completed, held = self._lists
        return completed[after] + held[after] - held[before]

    def advance(
        self,
        nodes: NDArray[np.int32],
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        symbol_of: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See `kernels.advance`."""
        found: tuple[NDArray[np.int32], NDArray[np.float32]] = kernels.advance(
            nodes,
            counts,
            words,
            symbol_of,
            self.children,
            self.symbols,
            self.shorter,
            self.completed,
            self.held,
        )
        return found

    def walk(
        self,
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        symbol_of: NDArray[np.int32],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """See `kernels.walk`."""
        found: tuple[NDArray[np.int64], NDArray[np.int32]] = kernels.walk(
            counts,
            words,
            symbol_of,
            self.children,
            self.symbols,
            self.shorter,
            self.completed,
        )
        return found


# -------------------------------------------------------------------------------------------------
# Phrases that one utterance makes likelier: names of contacts, products, today's topics.
#
#     phrases = Phrases({"doctor strangelove": 2.5, "sellers": 1.0})
#     utterance = client.utterance(phrases=phrases)
#
# A phrase may have words that the model lacks. They get ids after the model's own, so that states
# and lexicons tell them apart; the model scores each as its unknown word. Phrases stay in this
# process: servers see the same queries as without.


MAX_PHRASES = 100_000
MAX_WORDS = 32  # limit per phrase
MAX_BONUS = 100.0  # log10
BOUND = 4  # vocabularies that phrases stay prepared for

_NOTHING = np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.int32)
Weights: TypeAlias = Mapping[str, float] | Mapping[bytes, float]


class Phrases:
    """Phrases and their bonuses, prepared once; any number of utterances and threads share them.

    Args  weights  the bonus of each phrase, log10, for each time that it is said, also inside other
                   phrases or overlapping them; rounded to 2^-10. Words are split at spaces, and
                   spelled as in the model. A negative bonus makes a phrase less likely
    Raises  QueryError  a phrase without words, of more than `MAX_WORDS`, with a mark such as <s>,
                        or given twice; a bonus that is not a number up to `MAX_BONUS`; more than
                        `MAX_PHRASES`
    """

    def __init__(self, weights: Weights) -> None:
        if not isinstance(weights, Mapping):
            raise QueryError(
                f"phrases is of type {type(weights).__name__}; expected a mapping from "
                'phrases to bonuses in log10, such as {"doctor strangelove": 2.5}'
            )
        if len(weights) > MAX_PHRASES:
            raise QueryError(
                f"found {len(weights):,} phrases; expected at most {MAX_PHRASES:,}. Give an "
                "utterance only the phrases that may be said in it, and mix in a language model of "
                "the others"
            )
        units: dict[tuple[bytes, ...], int] = {}
        pairs: Iterable[tuple[str | bytes, float]] = weights.items()
        for number, (phrase, bonus) in enumerate(pairs, 1):
            name = f"phrase {number}"  # not its words, which may be somebody's name
            words = words_of(phrase, name)
            if words in units:
                raise QueryError(
                    f"{name} has the same words as an earlier phrase; give only one of the two"
                )
            units[words] = units_of(bonus, name)
        self._units = dict(sorted(units.items()))  # nodes and ids do not depend on the order
        self.words: tuple[bytes, ...] = tuple(sorted(set(chain.from_iterable(units))))
        self.longest = max(map(len, units), default=0)  # in words
        symbol = {word: at for at, word in enumerate(self.words, 1)}
        spelled = [[symbol[word] for word in words] for words in self._units]
        self.automaton = PhraseAutomaton.of(spelled, list(self._units.values()))
        self.automaton.walk(*_NOTHING)  # compiles kernels while no deadline runs
        self.automaton.advance(np.zeros(0, np.int32), *_NOTHING)
        kernels.fold_new(_NOTHING[0], 0)
        rows = (b" ".join(words) + b"\n%d\n" % bonus for words, bonus in self._units.items())
        self.digest = hashlib.blake2b(b"".join(rows), digest_size=16).hexdigest()
        self._bound: dict[int, BoundPhrases] = {}  # the most recently used is last

    def __len__(self) -> int:
        return len(self._units)

    def __repr__(self) -> str:
        return f"Phrases({len(self)} phrases)"  # without words, which may be names of people

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
        """The approximate memory of the phrases when prepared for one vocabulary of this size."""
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
        kept = self._bound  # replaced as a whole: after a fork, a lock could stay held forever
        found = kept.get(id(vocabulary)) or BoundPhrases(self, vocabulary)
        others = [(at, one) for at, one in kept.items() if one is not found][1 - BOUND :]
        # Each entry keeps its vocabulary alive, so the id stays unique.
        self._bound = dict([*others, (id(vocabulary), found)])
        return found


def prepared(phrases: Phrases | Weights | None) -> Phrases | None:
    """The prepared phrases given to `Client.utterance`; None if there are no phrases."""
    if phrases is None or isinstance(phrases, Phrases):
        return phrases or None
    return Phrases(phrases) or None


def words_of(phrase: str | bytes, name: str) -> tuple[bytes, ...]:
    """The words of a phrase. Errors call the phrase `name`; for its form, see `Phrases`."""
    if not isinstance(phrase, (str, bytes)):
        raise QueryError(f"{name} is of type {type(phrase).__name__}; expected str or bytes")
    words = tuple(split_words(phrase))
    if not 1 <= len(words) <= MAX_WORDS:
        raise QueryError(
            f"{name} has {counted(len(words), 'word')}; expected 1 to {MAX_WORDS}, separated "
            "by spaces"
        )
    if any(map(is_mark, words)):
        raise QueryError(f"{name} contains a mark such as <s> or <unk>; expected spoken words only")
    return words


def units_of(bonus: float, name: str) -> int:
    """The bonus of a phrase in units of 2^-10; see `Phrases`."""
    if (
        isinstance(bonus, bool)
        or not isinstance(bonus, (int, float, np.integer, np.floating))
        or not abs(bonus) <= MAX_BONUS  # true for nan, too
    ):
        raise QueryError(
            f"the bonus of {name} is {shown(bonus)}; expected a log10 value from {-MAX_BONUS:g} to "
            f"{MAX_BONUS:g}"
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
        """The ids to ask the model about: its unknown word stands for each word that it lacks.

        Raises  QueryError  an id beyond those of the phrases
        """
        folded, end = kernels.fold_new(words.reshape(-1), self.size)
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
        """Like `step`, by the symbol of a word."""
        after = self.automaton.step(node, symbol)
        if node == after == 0:  # true of most words
            return 0, 0.0
        return after, self.automaton.added(node, after) * UNIT

    def bonus(self, before: Any, after: Any) -> Any:
        """What a step from one node to another adds, log10; for numbers or arrays, as in NumPy."""
        automaton = self.automaton
        gained = automaton.completed[after] + automaton.held[after]
        return (gained - automaton.held[before]) * UNIT

    def finish(self, nodes: Any) -> Any:
        """What the end of a sentence adds if </s> is not scored: it takes shares back."""
        return -self.automaton.held[nodes] * UNIT

    def lookahead(self, words: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """The most that each word can add at any place in a phrase, 0 or more, log10."""
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
        """The bonus of one sentence: each phrase's bonus, as often as it occurs."""
        ids = np.fromiter(map(self.id_of, words), np.uint32, len(words))
        return float(self.walk(ids, [len(ids)])[0][0])
