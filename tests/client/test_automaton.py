"""The automaton of phrases, beside a count of what is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dlm.client.phrases import UNIT, PhraseAutomaton

SYMBOLS = 4


def spelled(text: str) -> tuple[int, ...]:
    """A phrase of letters as symbols: "a" is 1; any other letter than a to d is no symbol."""
    return tuple("abcd".find(letter) + 1 for letter in text)


def occurrences(phrase: tuple[int, ...], said: tuple[int, ...]) -> int:
    """How often a phrase is in what is said, overlaps included."""
    size = len(phrase)
    return sum(said[i : i + size] == phrase for i in range(len(said) - size + 1))


def random_phrases(rng: np.random.Generator, count: int) -> dict[tuple[int, ...], int]:
    """Short ones of few symbols: prefixes, suffixes and repeats of each other; some unwanted."""
    found = {}
    while len(found) < count:
        phrase = tuple(rng.integers(1, SYMBOLS + 1, rng.integers(1, 6)).tolist())
        found[phrase] = int(rng.integers(-500, 3000))
    return found


def expected(phrases: dict[tuple[int, ...], int], said: tuple[int, ...]) -> int:
    """The units of all phrases in what is said."""
    return sum(units * occurrences(phrase, said) for phrase, units in phrases.items())


@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_steps_of_a_path_add_up_to_the_phrases_it_completes(count: int) -> None:
    """Word by word, in batches and for whole sentences; every step is that of the kernels."""
    rng = np.random.default_rng(count)
    symbol_of = np.arange(SYMBOLS + 1, dtype=np.int32)
    for _ in range(40):
        phrases = random_phrases(rng, count)
        automaton = PhraseAutomaton.of(list(phrases), list(phrases.values()))
        said = rng.integers(0, SYMBOLS + 1, (25, 12)).astype(np.uint32)
        counts = np.full(len(said), said.shape[1], np.uint32)
        totals, ends = automaton.walk(counts, said.reshape(-1), symbol_of)
        assert totals.tolist() == [expected(phrases, tuple(row)) for row in said.tolist()]
        nodes, added = np.zeros(len(said), np.int32), np.zeros(len(said), np.int64)
        summed = np.zeros(len(said))
        for column in said.T:
            ones = np.ones(len(said), np.uint32)
            after, bonus = automaton.advance(nodes, ones, np.ascontiguousarray(column), symbol_of)
            steps = zip(nodes.tolist(), column.tolist(), strict=True)
            assert after.tolist() == [automaton.step(*step) for step in steps]
            added += automaton.completed[after] + automaton.held[after] - automaton.held[nodes]
            summed += bonus
            nodes = after
        assert nodes.tolist() == ends.tolist()
        assert (summed == added * UNIT).all()
        assert (added - automaton.held[nodes] == totals).all()  # shares are given back
        assert (automaton.held >= 0).all() and automaton.held[0] == 0


@pytest.mark.parametrize(
    ("phrases", "said", "bonuses"),
    [
        ({"ab": 10}, "xabx", [0, 5, 5, 0]),  # half of it with each word
        ({"abc": 9}, "abx", [3, 3, -6]),  # leaving gives back
        ({"ab": 10}, "aab", [5, 0, 5]),  # beginning anew keeps the share
        ({"aa": 4}, "aaaa", [2, 4, 4, 4]),  # overlaps; the last a holds a share again
        ({"abcd": 8, "bc": 6}, "abcx", [2, 2, 8, -6]),  # one within another, which is left
        ({"a": 5, "ab": -4}, "ab", [5, -4]),  # what is unwanted costs when it is complete
        ({"a": 0}, "a", [0]),
        ({}, "ab", [0, 0]),
    ],
)
def test_a_bonus_is_handed_out_word_by_word(
    phrases: dict[str, int], said: str, bonuses: list[int]
) -> None:
    """In shares of a phrase, rounded down; the last word brings the rest."""
    automaton = PhraseAutomaton.of([spelled(phrase) for phrase in phrases], list(phrases.values()))
    nodes = list(
        itertools.accumulate(spelled(said), lambda node, one: automaton.step(node, one), initial=0)
    )
    found = [
        int(automaton.completed[after] + automaton.held[after] - automaton.held[before])
        for before, after in itertools.pairwise(nodes)
    ]
    assert found == bonuses
