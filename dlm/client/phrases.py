"""Finds phrases in a sentence, word by word, with an automaton.

A node stands for the longest suffix of the words so far that begins a phrase. A bonus is paid in
advance: each word of a phrase adds a share of the bonus, and a word that breaks the phrase off
subtracts the shares paid so far. Shares are whole numbers of units, so the steps of a path add up
to exactly the bonuses of the phrases that the path completes.

Source  Aho and Corasick, "Efficient String Matching: An Aid to Bibliographic Search", CACM 1975;
        applied here to words with bonuses.
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


# As in ARPA files, spaces and tabs separate words; a line end cannot be part of a word either.
SPACES = " \t\r\n"
_SPACES = re.compile(rb"[ \t\r\n]+")
_SPACES_OF_TEXT = re.compile(f"[{SPACES}]+")
SPLIT_BYTES = 1 << 16  # a longer sentence is split into parts of about this many bytes


def split_words(sentence: str | bytes) -> list[bytes]:
    """Splits a sentence into words at spaces, tabs and line ends, and nowhere else."""
    return [word for some in split_parts(sentence) for word in some]


def split_text(text: str) -> list[str]:
    """Like `split_words`, but takes and returns strings."""
    return [word for word in _SPACES_OF_TEXT.split(text) if word]


def split_parts(sentence: str | bytes) -> Iterator[list[bytes]]:
    """Yields the words of a sentence, about `SPLIT_BYTES` bytes of them at a time."""
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
        children   (N + 1,) int32  node n has the children children[n] to children[n + 1] - 1
        symbols    (N,)     int32  the last symbol of each node
        shorter    (N,)     int32  the node that stands for each node's longest proper suffix
        completed  (N,)     int32  sum of the bonuses, in units, of phrases that end at each node
        held       (N,)     int32  units paid in advance at each node, 0 or more; 0 at node 0
    """

    children: NDArray[np.int32]
    symbols: NDArray[np.int32]
    shorter: NDArray[np.int32]
    completed: NDArray[np.int32]
    held: NDArray[np.int32]

    @classmethod
    def of(cls, phrases: Sequence[Sequence[int]], units: Sequence[int]) -> PhraseAutomaton:
        """Builds the automaton for distinct phrases, each of one symbol or more, and their bonuses.

        Trusts  sums of bonuses fit in an int32, since `Phrases` limits them
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
        above = np.zeros(len(order), np.int64)  # each row's node on the level above
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
        nothing = [np.zeros(count, np.int32)] * 2  # zero units, since only the nodes are needed
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
        """Returns the node to which a symbol leads from `node`."""
        if symbol == 0:
            return 0
        edges, shorter = self._edges, self._lists[0]
        while (found := edges.get((node, symbol), 0)) == 0 and node:
            node = shorter[node]
        return found

    def added(self, before: int, after: int) -> int:
        """Returns the units that a step between two nodes adds."""
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
# Phrases that are made likelier for an utterance: names of contacts, products, today's topics.
#
#     phrases = Phrases({"doctor strangelove": 2.5, "sellers": 1.0})
#     utterance = client.utterance(phrases=phrases)
#
# A phrase may have words that the model lacks. These words get ids above the model's own, so that
# states and lexicons tell them apart; the model scores each as its unknown word. Phrases stay in
# this process: servers see the same queries as without phrases.


MAX_PHRASES = 100_000
MAX_WORDS = 32  # maximum number of words in a phrase
MAX_BONUS = 100.0  # log10
BOUND = 4  # number of vocabularies for which phrases stay prepared

_NOTHING = np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.int32)
Weights: TypeAlias = Mapping[str, float] | Mapping[bytes, float]


class Phrases:
    """Phrases and their bonuses, prepared once; any number of utterances and threads share them.

    Args  weights  maps each phrase to its bonus, log10, rounded to a multiple of 2^-10. The bonus
                   counts each time the phrase is said, also where phrases overlap; a negative one
                   makes it less likely. Spaces separate words, which are spelled as in the model
    Raises  QueryError  if a phrase has no words, more than `MAX_WORDS`, or a mark such as <s>, or
                        is given twice; if a bonus is not a number or its size exceeds `MAX_BONUS`;
                        if there are more than `MAX_PHRASES` phrases
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
                "utterance only the phrases that may be said in it, and mix in a language model "
                "for the rest"
            )
        units: dict[tuple[bytes, ...], int] = {}
        pairs: Iterable[tuple[str | bytes, float]] = weights.items()
        for number, (phrase, bonus) in enumerate(pairs, 1):
            name = f"phrase {number}"  # without the phrase's words, which may be a person's name
            words = words_of(phrase, name)
            if words in units:
                raise QueryError(
                    f"{name} has the same words as an earlier phrase; give only one of the two"
                )
            units[words] = units_of(bonus, name)
        self._units = dict(sorted(units.items()))  # so the given order changes no node or id
        self.words: tuple[bytes, ...] = tuple(sorted(set(chain.from_iterable(units))))
        self.longest = max(map(len, units), default=0)  # in words
        symbol = {word: at for at, word in enumerate(self.words, 1)}
        spelled = [[symbol[word] for word in words] for words in self._units]
        self.automaton = PhraseAutomaton.of(spelled, list(self._units.values()))
        self.automaton.walk(*_NOTHING)  # compiles the kernel before a deadline runs
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
        """Maps each phrase to its log10 bonus, rounded to a multiple of 2^-10."""
        return {b" ".join(words): bonus * UNIT for words, bonus in self._units.items()}

    def memory_bytes(self, vocabulary_size: int) -> int:
        """Estimates how many bytes the phrases take for a vocabulary of `vocabulary_size` words."""
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
        """Returns the phrases with their words as ids of a vocabulary."""
        kept = self._bound  # replaced as a whole, since a fork could leave a lock held forever
        found = kept.get(id(vocabulary)) or BoundPhrases(self, vocabulary)
        others = [(at, one) for at, one in kept.items() if one is not found][1 - BOUND :]
        # Each entry keeps its vocabulary alive, so the id stays unique.
        self._bound = dict([*others, (id(vocabulary), found)])
        return found


def prepared(phrases: Phrases | Weights | None) -> Phrases | None:
    """Prepares the phrases given to `Client.utterance`; returns None if there are no phrases."""
    if phrases is None or isinstance(phrases, Phrases):
        return phrases or None
    return Phrases(phrases) or None


def words_of(phrase: str | bytes, name: str) -> tuple[bytes, ...]:
    """Splits a phrase into words, and checks its limits. Error messages call the phrase `name`."""
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
    """Rounds the bonus of a phrase to units of 2^-10. Errors call the phrase `name`."""
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
    """Phrases whose words are ids of one vocabulary.

    Shapes
        symbols  (V + N,) int32  the automaton's symbol for each id; 0 if no phrase has the word
    Attributes
        new   the ids, from V on, of the N words that phrases have and the vocabulary lacks
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
        """Returns the id of a word; 0 if neither the vocabulary nor a phrase has the word."""
        return self.vocabulary.id_of(word) or self.new.get(as_bytes(word), UNK_ID)

    def model_words(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Replaces the ids of words that the model lacks by the id of its unknown word.

        Raises  QueryError  if an id is out of range
        """
        folded, end = kernels.fold_new(words.reshape(-1), self.size)
        if end > len(self.symbols):
            raise QueryError(
                f"word id {end - 1} is out of range; ids are 0 to {len(self.symbols) - 1}"
            )
        found: NDArray[np.uint32] = folded.reshape(words.shape)
        return found

    def step(self, node: int, word: int) -> tuple[int, float]:
        """Returns the node to which a word leads from `node`, and the log10 bonus of that step."""
        return self.step_symbol(node, int(self.symbols[word]))

    def step_symbol(self, node: int, symbol: int) -> tuple[int, float]:
        """Like `step`, but takes the automaton's symbol of the word."""
        after = self.automaton.step(node, symbol)
        if node == after == 0:  # true of most words
            return 0, 0.0
        return after, self.automaton.added(node, after) * UNIT

    def bonus(self, before: Any, after: Any) -> Any:
        """Returns the log10 bonus of a step between two nodes, given as numbers or as arrays."""
        automaton = self.automaton
        gained = automaton.completed[after] + automaton.held[after]
        return (gained - automaton.held[before]) * UNIT

    def finish(self, nodes: Any) -> Any:
        """Returns the log10 value that cancels unfinished phrases if </s> is not scored."""
        return -self.automaton.held[nodes] * UNIT

    def lookahead(self, words: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Returns the largest log10 bonus, at least 0, that a step by each word can add."""
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
        """Returns the bonus of each of K sentences, (K,), and the node at the end of each one."""
        sizes = np.array(counts, np.uint32)
        units, nodes = self.automaton.walk(sizes, np.ascontiguousarray(words), self.symbols)
        return np.asarray(units * UNIT, np.float64), nodes

    def of_words(self, words: Sequence[str | bytes]) -> float:
        """Sums the bonuses of all occurrences of phrases in one sentence, log10."""
        ids = np.fromiter(map(self.id_of, words), np.uint32, len(words))
        return float(self.walk(ids, [len(ids)])[0][0])
