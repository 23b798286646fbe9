"""Steps of the automaton of phrases, for many words at once (`dlm.client.plan.automaton`)."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel


@inlined
def _step(node, symbol, children, symbols, shorter):  # type: ignore[no-untyped-def]
    """The node after a symbol: the longest suffix of what was said that begins a phrase."""
    if symbol == 0:
        return np.int64(0)
    while True:
        low = np.int64(children[node])
        end = np.int64(children[node + 1])
        high = end
        while low < high:
            middle = (low + high) // 2
            if symbols[middle] < symbol:
                low = middle + 1
            else:
                high = middle
        if low < end and symbols[low] == symbol:
            return low
        if node == 0:
            return np.int64(0)
        node = np.int64(shorter[node])


@kernel("int32[:], uint32[:], uint32[:], int32[:], int32[:], int32[:], int32[:]", nogil=False)
def advance(  # type: ignore[no-untyped-def]
    nodes, counts, words, symbol_of, children, symbols, shorter
):
    """The node after each word.

    Shapes
        nodes      (K,)  int32   where the words of each row begin
        counts     (K,)  uint32  words of each row
        words      (Q,)  uint32  one row after the other; Q = sum(counts)
        symbol_of  (V,)  int32   the symbol of each word; 0 if no phrase has it
        children, symbols, shorter  see `PhraseAutomaton`
    Returns  (Q,) int32
    Cost     per word O(log of the phrases), on average over a sentence
    Trusts   words < V, sum(counts) == Q; nodes of this automaton
    """
    out = np.empty(len(words), np.int32)
    at = np.int64(0)
    for row in range(len(nodes)):
        node = np.int64(nodes[row])
        for _ in range(np.int64(counts[row])):
            out[at] = _step(node, symbol_of[words[at]], children, symbols, shorter)
            at += 1
    return out


@kernel("uint32[:], uint32[:], int32[:], int32[:], int32[:], int32[:], int32[:]", nogil=False)
def walk(  # type: ignore[no-untyped-def]
    counts, words, symbol_of, children, symbols, shorter, completed
):
    """What the phrases of whole sentences add, and the node after each.

    Shapes   as in `advance`; completed (N,) int32, see `PhraseAutomaton`
    Returns  (K,) int64, (K,) int32
    """
    totals = np.zeros(len(counts), np.int64)
    nodes = np.zeros(len(counts), np.int32)
    at = np.int64(0)
    for row in range(len(counts)):
        node = np.int64(0)
        for _ in range(np.int64(counts[row])):
            node = _step(node, symbol_of[words[at]], children, symbols, shorter)
            totals[row] += np.int64(completed[node])
            at += 1
        nodes[row] = node
    return totals, nodes
