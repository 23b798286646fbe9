"""Walks a backoff model as an automaton: draws sentences, and counts the states that text visits.

Shapes of the automaton: `s` states (contexts, the empty one first), `a` arcs (n-grams, by state)
    first   (s + 1,)  int64    arcs of state i are first[i]:first[i + 1]
    parent  (s,)      uint32   the state that each state backs off to
    word    (a,)      uint32   increasing within a state
    reached (a,)      float64  cumulative probability of a state's arcs, up to this arc
    leads   (a,)      uint32   the state after an arc
The words of a state's arcs are also words of its parent's arcs; the empty context has all words.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel

# After this many consecutive draws of words that the longer context lists, a word is drawn from
# that context: the shorter one has no other words, and was reached only because of rounding.
_MOST_TRIES = 10_000
NO_ARC = -1


@inlined
def random_share(random):  # type: ignore[no-untyped-def]
    """Returns a random number in [0, 1), by SplitMix64 (Steele, Lea and Flood 2014)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inlined
def arc_of(wanted, begin, end, word):  # type: ignore[no-untyped-def]
    """Returns the arc of a word among begin..end, where words increase, or NO_ARC."""
    high = end
    while begin < high:
        middle = (begin + high) >> 1
        if word[middle] < wanted:
            begin = middle + 1
        else:
            high = middle
    return begin if begin < end and word[begin] == wanted else NO_ARC


@inlined
def arc_at(share, begin, end, reached):  # type: ignore[no-untyped-def]
    """Returns the first arc among begin..end whose cumulative probability exceeds `share`."""
    last = end - 1
    while begin < last:
        middle = (begin + last) >> 1
        if reached[middle] > share:
            last = middle
        else:
            begin = middle + 1
    return begin


@kernel(
    "int64[:], uint32[:], uint32[:], float64[:], uint32[:], int64, int64, int64, int64, "
    "out uint64[:], out float64[:], out uint32[:]"
)
def draw_sentences(  # type: ignore[no-untyped-def]
    first, parent, word, reached, leads, start, end_word, sentences, most, random, visits, said
):
    """Draws sentences, and counts the states that they visit.

    A word is drawn from a state's own arcs, or else from its parent. If the parent yields a word
    that the state lists, another word is drawn.

    Shapes
        start      the state that begins a sentence
        most       maximum words in a sentence; a longer sentence is cut
        random     (1,)  uint64   the state of `random_share`; updated
        visits     (s,)  float64  added to
        said       (n,)  uint32   filled: words, with end_word after each sentence, even a cut one;
                                  n = 0 keeps none, otherwise n >= sentences * (most + 1)
    Returns        how many words were written to `said`
    """
    keeps = len(said) > 0
    n = 0
    for _ in range(sentences):
        state = start
        for _ in range(most):
            visits[state] += 1.0
            here = state
            child = NO_ARC  # the state that backed off to `here`
            tries = 0
            arc = 0
            while True:
                begin, end = first[here], first[here + 1]
                share = random_share(random)
                if here == 0:
                    share *= reached[end - 1]
                if end == begin or share >= reached[end - 1]:
                    child = here
                    here = np.int64(parent[here])
                    tries = 0
                    continue
                arc = arc_at(share, begin, end, reached)
                if child == NO_ARC:
                    break
                if arc_of(word[arc], first[child], first[child + 1], word) == NO_ARC:
                    break
                tries += 1
                if tries == _MOST_TRIES:
                    begin, end = first[child], first[child + 1]
                    arc = arc_at(share * reached[end - 1], begin, end, reached)
                    break
            if word[arc] == end_word:
                break
            if keeps:
                said[n] = word[arc]
                n += 1
            state = np.int64(leads[arc])
        if keeps:
            said[n] = end_word
            n += 1
    return n


@kernel(
    "int64[:], uint32[:], uint32[:], uint32[:], int64, int64, uint32[:], int64[:], out float64[:]"
)
def follow_sentences(  # type: ignore[no-untyped-def]
    first, parent, word, leads, start, most, ids, begins, visits
):
    """Counts the states that given sentences visit.

    Shapes
        ids     (n,)      uint32   words, sentence by sentence
        begins  (m + 1,)  int64    where each sentence begins
        visits  (s,)      float64  added to
    """
    for i in range(len(begins) - 1):
        state = start
        visits[state] += 1.0
        for at in range(begins[i], min(begins[i + 1], begins[i] + most)):
            here = state
            arc = arc_of(ids[at], first[here], first[here + 1], word)
            while arc == NO_ARC:
                here = np.int64(parent[here])
                arc = arc_of(ids[at], first[here], first[here + 1], word)
            state = np.int64(leads[arc])
            visits[state] += 1.0
