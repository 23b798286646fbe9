"""Steps of the automaton of phrases, for many words at once (`dlm.client.plan.automaton`)."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel

UNIT = np.float32(2.0**-10)  # of bonuses, log10


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


@kernel("uint32[:], uint32", nogil=False)
def fold_new(words, size):  # type: ignore[no-untyped-def]
    """The words, with id 0 for those from `size` on; and one more than the largest of them.

    Returns  (Q,) uint32, int64
    """
    out = np.empty(len(words), np.uint32)
    end = np.int64(0)
    for at in range(len(words)):
        word = words[at]
        end = max(end, np.int64(word) + 1)
        out[at] = word if word < size else np.uint32(0)
    return out, end


@kernel(
    "int32[:], uint32[:], uint32[:], int32[:], int32[:], int32[:], int32[:], int32[:], int32[:]",
    nogil=False,
)
def advance(  # type: ignore[no-untyped-def]
    nodes, counts, words, symbol_of, children, symbols, shorter, completed, held
):
    """The node after each word, and what the step adds.

    Shapes
        nodes      (K,)  int32   where the words of each row begin
        counts     (K,)  uint32  words of each row
        words      (Q,)  uint32  one row after the other; Q = sum(counts)
        symbol_of  (V,)  int32   the symbol of each word; 0 if no phrase has it
        children, symbols, shorter, completed, held  see `PhraseAutomaton`
    Returns  (Q,) int32, (Q,) float32, log10
    Cost     per word O(log of the phrases), on average over a sentence
    Trusts   words < V, sum(counts) == Q; nodes of this automaton
    """
    out = np.empty(len(words), np.int32)
    bonus = np.empty(len(words), np.float32)
    at = np.int64(0)
    for row in range(len(nodes)):
        node = np.int64(nodes[row])
        for _ in range(np.int64(counts[row])):
            after = _step(node, symbol_of[words[at]], children, symbols, shorter)
            out[at] = after
            # Exact: fewer than 2^24 units.
            units = np.int64(completed[after]) + np.int64(held[after]) - np.int64(held[node])
            bonus[at] = np.float32(units) * UNIT
            at += 1
    return out, bonus


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
