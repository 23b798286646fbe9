"""Counting kernels for a source that spells its words. They run without the GIL."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.distill.sources.walk_kernels import NO_ARC, arc_of
from dlm.jit import kernel

# What a piece does to a word: it continues the word, begins one that may be in the lexicon, begins
# one that cannot be, ends the sentence, or never occurs.
GOES_ON, BEGINS, BEGINS_UNKNOWN, ENDS, NEVER = 0, 1, 2, 3, 4
OUTSIDE = -1  # the node of a word that left the lexicon


@kernel("uint32[:], int64[:], uint32[:], float64[:], uint32[:], uint32[:], out float64[:], "
        "out float64[:]")  # fmt: skip
def add_mass(  # type: ignore[no-untyped-def]
    contexts, rows, words, mass, first_child, last_words, ngram_counts, context_counts
):
    """Adds a source's mass on some words to the counts of each history's last context.

    Shapes, h histories, e words, contexts of length k
        contexts        (h,)      uint32   context of length k that ends each history, or NO_ROW
        rows            (e,)      int64    the history of each word
        words, mass     (e,)      uint32, float64
        first_child     (m + 1,)  uint32   where each context's n-grams of order k + 1 begin
        last_words      (n,)      uint32   last words of these; increasing within a context
        ngram_counts    (n,)      float64  added to
        context_counts  (m,)      float64  added to
    Trusts              rows < h
    """
    for e in range(len(rows)):
        row = np.int64(contexts[rows[e]])
        if row >= len(context_counts):
            continue
        context_counts[row] += mass[e]
        begin, end = np.int64(first_child[row]), np.int64(first_child[row + 1])
        at = arc_of(words[e], begin, end, last_words)
        if at != NO_ARC:
            ngram_counts[at] += mass[e]


@kernel("int64[:], int64[:], uint8[:], int64[:], int64[:], int64[:], int64[:]")
def walk(nodes, pieces, kind, enters, begin, arc_piece, arc_node):  # type: ignore[no-untyped-def]
    """Returns the node after each piece, given the node before that piece.

    Shapes, b words; the rest as in `pieces_to_words.Lexicon`
        nodes    (b,)  int64  before each piece: 0, the root, after `<s>`; or OUTSIDE
        pieces   (b,)  int64
        returns  (b,)  int64
    """
    out = np.empty(len(nodes), np.int64)
    for i in range(len(nodes)):
        piece, node = pieces[i], nodes[i]
        if kind[piece] == BEGINS or kind[piece] == BEGINS_UNKNOWN:
            out[i] = enters[piece]
        elif node <= 0:
            out[i] = OUTSIDE
        else:
            arc = arc_of(piece, begin[node], begin[node + 1], arc_piece)
            out[i] = arc_node[arc] if arc != NO_ARC else OUTSIDE
    return out


@kernel("float64[:, :], int64[:], uint8[:], int64[:], int64[:], out float64[:, :]")
def split_mass(given, nodes, kind, begin, arc_piece, out):  # type: ignore[no-untyped-def]
    """Computes how likely the next piece is to do each of four things to the word being spelled.

    Shapes, b words, v pieces
        given   (b, v)  float64
        nodes   (b,)    int64    as in `walk`
        out     (b, 4)  float64  filled: to begin a word that may be in the lexicon; to begin one
                                 that cannot be; to end the sentence; to leave the lexicon
    """
    out[:] = 0.0
    for i in range(len(given)):
        on = 0.0
        for piece in range(given.shape[1]):
            if kind[piece] == GOES_ON:
                on += given[i, piece]
            elif kind[piece] == BEGINS:
                out[i, 0] += given[i, piece]
            elif kind[piece] == BEGINS_UNKNOWN:
                out[i, 1] += given[i, piece]
            elif kind[piece] == ENDS:
                out[i, 2] += given[i, piece]
        if nodes[i] > 0:
            for arc in range(begin[nodes[i]], begin[nodes[i] + 1]):
                on -= given[i, arc_piece[arc]]
        if nodes[i] != OUTSIDE:
            out[i, 3] = max(on, 0.0)
