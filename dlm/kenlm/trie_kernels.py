"""Reads the n-grams of a trie one after another: arrays out, no search."""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.kenlm.kernels import (
    AT,
    BACKOFF_BITS,
    BACKOFFS,
    ENTRIES,
    ENTRY_SIZE,
    LEVEL_PLACES,
    LEVELS,
    ORDER,
    PROB_BITS,
    PROBS,
    WORD_BITS,
    WORDS,
    children_of,
    children_of_word,
    level_of,
    of,
)
from dlm.ngram.memory_kernels import as_float32, field, load_float32

# Columns of the cursor of each order: its n-gram, where the children of that end, and its word.
NODE, CHILDREN_END, WORD = range(3)
CURSOR_FIELDS = 3
# What is wrong with a file, as `read_trie` returns it.
BAD_POINTER, BAD_WORD = -1, -2

_2, _3 = np.int64(2), np.int64(3)
_SIGN = np.int64(0x80000000)


@inlined
def level(view, order, place):  # type: ignore[no-untyped-def]
    """A number of an order above 1."""
    return of(view, LEVELS + (order - _2) * LEVEL_PLACES + place)


@inlined
def entry_at(view, order, i):  # type: ignore[no-untyped-def]
    """The bit at which an n-gram begins."""
    return (level(view, order, AT) << _3) + i * level(view, order, ENTRY_SIZE)


@inlined
def count_of(view, order):  # type: ignore[no-untyped-def]
    """How many n-grams of an order there are."""
    return of(view, WORDS) if order == 1 else level(view, order, ENTRIES)


@inlined
def children(view, order, i):  # type: ignore[no-untyped-def]
    """First and end of the n-grams that have one more word before n-gram i of an order."""
    if order == 1:
        return children_of_word(view, i)
    place = entry_at(view, order, i)
    skipped = level(view, order, WORD_BITS) + level(view, order, PROB_BITS)
    skipped += level(view, order, BACKOFF_BITS)
    return children_of(level_of(view, order), place, place + skipped)


@kernel("int64, int64, int64, out int64[:, :], out uint32[:, :], out float32[:], out float32[:]")
def read_trie(view, order, first, cursors, ids, prob, backoff):  # type: ignore[no-untyped-def]
    """N-grams `first` and on of an order above 1.

    Shapes
        cursors  (order, CURSOR_FIELDS)  int64    of the orders below; NODE -1, the rest 0, before
                                                  the first call
        ids      (n, order)              uint32   filled; oldest word first
        prob     (n,)                    float32  filled
        backoff  (n,)                    float32  filled; 0 at the highest order
    Returns      n, or BAD_POINTER or BAD_WORD where the file is damaged
    Guarantees   words of one node rise, so no n-gram comes twice
    Trusts       first + n <= the n-grams of the order; calls go on where the last ended
    """
    words = of(view, WORDS)
    top = order == of(view, ORDER)
    word_bits, prob_bits = level(view, order, WORD_BITS), level(view, order, PROB_BITS)
    backoff_bits = level(view, order, BACKOFF_BITS)
    probs, backoffs = level(view, order, PROBS), level(view, order, BACKOFFS)
    before = np.int64(-1)
    node = cursors[order - 1, NODE]
    for i in range(len(prob)):
        target = first + i
        k = order - 1
        while k >= 1 and target >= cursors[k, CHILDREN_END]:
            while target >= cursors[k, CHILDREN_END]:
                here = cursors[k, NODE] + 1
                if here >= count_of(view, k):
                    return np.int64(BAD_POINTER)
                begin, end = children(view, k, here)
                if begin != cursors[k, CHILDREN_END]:
                    return np.int64(BAD_POINTER)
                cursors[k, NODE], cursors[k, CHILDREN_END] = here, end
            target = cursors[k, NODE]
            word = target
            if k > 1:
                word = field(entry_at(view, k, target), level(view, k, WORD_BITS))
            if word >= words:
                return np.int64(BAD_WORD)
            cursors[k, WORD] = word
            k -= 1
        at = entry_at(view, order, first + i)
        word = field(at, word_bits)
        if word >= words or (node == cursors[order - 1, NODE] and word <= before):
            return np.int64(BAD_WORD)
        node, before = cursors[order - 1, NODE], word
        ids[i, 0] = word
        for k in range(1, order):
            ids[i, order - k] = cursors[k, WORD]
        at += word_bits
        if probs:
            weight = np.float32(0.0)
            if not top:
                weight = load_float32(backoffs + (field(at, backoff_bits) << _2))
                at += backoff_bits
            prob[i] = load_float32(probs + (field(at, prob_bits) << _2))
            backoff[i] = weight
        else:
            prob[i] = as_float32(field(at, prob_bits) | _SIGN)
            backoff[i] = np.float32(0.0)
            if not top:
                backoff[i] = as_float32(field(at + prob_bits, backoff_bits))
    return np.int64(len(prob))


@kernel("int64")
def has_unk(view):  # type: ignore[no-untyped-def]
    """Whether word 0 is in a 2-gram."""
    first, end = children_of_word(view, np.int64(0))
    if first < end:
        return True
    bits = level(view, _2, WORD_BITS)
    found = False
    for i in range(level(view, _2, ENTRIES)):
        found |= field(entry_at(view, _2, i), bits) == 0
    return found
