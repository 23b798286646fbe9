"""Scores of many words after one context: the words go through the orders together.

First all words of a block are looked for in the 1-grams, then those that go on in the 2-grams, and
so on. So the memory that they need is waited for together, and no branch depends on whether one
word is found. A word's place among the children of a trie is estimated, since ids are hashes in
their order and so spread evenly: twice, each time from the word that lies there, and then it is
within few entries of where it is.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined
from dlm.kenlm.kernels import (
    AT,
    ENTRIES,
    ENTRY_SIZE,
    ORDER,
    UNIGRAM_BYTES,
    UNIGRAMS,
    WORDS,
    aim,
    bucket_of,
    child_near,
    extends,
    key_of,
    level_of,
    of,
    probe,
    values_at,
    values_of_word,
)
from dlm.ngram.memory_kernels import load32, load64, prefetch, store64, store_float32

BLOCK = 32
# Columns of a block, int64 each. Of its words: log10 P (float32) before weights are added, the
# length of the n-gram found, and that of the next state. Of those that go on: which word it is, its
# node and end (see `find_longer`), and where to look first.
PROB, FOUND, STATE, ITEM, NODE, END, PLACE, COLUMNS = range(8)
_COLUMN = np.int64(8 * BLOCK)

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
_LINE = np.int64(40)  # bytes on both sides of an estimate that are prefetched


@inlined
def cell(block, column, i):  # type: ignore[no-untyped-def]
    """The address of a number of a block."""
    return block + np.int64(column) * _COLUMN + (np.int64(i) << _3)


@inlined
def get(block, column, i):  # type: ignore[no-untyped-def]
    """A number of a block."""
    return load64(cell(block, column, i))


@inlined
def put(block, column, i, value):  # type: ignore[no-untyped-def]
    """Writes a number of a block."""
    store64(cell(block, column, i), np.int64(value))


@inlined
def go_on(level, is_trie, block, live, item, node, end, word, share):  # type: ignore[no-untyped-def]
    """Enters a word that goes on in an order, and prefetches where it is looked for first.

    Args  word, share  the context's word of that order, and its id over the number of words
    """
    if is_trie:
        place = min(node + np.int64(np.float32(end - node) * share), end - _1)
        prefetch(of(level, AT) + ((place * of(level, ENTRY_SIZE)) >> _3))
    else:
        node = key_of(node, word)
        place = bucket_of(level, node)
        prefetch(place)
    put(block, ITEM, live, item)
    put(block, NODE, live, node)
    put(block, END, live, end)
    put(block, PLACE, live, place)


@inlined
def score_block(view, is_trie, words, count, after, context, step, length, block):  # type: ignore[no-untyped-def]
    """Looks for words after one context.

    Args
        words    address of the ids of `count` words, BLOCK at most, uint32
        after    how many ids follow them, whose 1-grams are prefetched
        context  address of the newest of the context's `length` words, uint32; each one before it
                 lies `step` bytes on
        block    address of room for COLUMNS * BLOCK int64; PROB, FOUND and STATE are filled
    """
    order = of(view, ORDER)
    each = np.float32(1) / np.float32(of(view, WORDS))
    unigrams, size = of(view, UNIGRAMS), of(view, UNIGRAM_BYTES)
    for i in range(count, count + min(after, np.int64(BLOCK))):
        prefetch(unigrams + load32(words + (np.int64(i) << _2)) * size)
    live, level = _0, level_of(view, _2)
    before = load32(context) if length else _0
    for i in range(count):
        prob, backoff, node, end, goes_on = values_of_word(
            view, is_trie, load32(words + (np.int64(i) << _2))
        )
        store_float32(cell(block, PROB, i), prob)
        put(block, FOUND, i, 1)
        put(block, STATE, i, extends(backoff))
        if length:
            share = np.float32(before) * each
            go_on(level, is_trie, block, live, i, node, end, before, share)
            live += np.int64(goes_on)
    n = _2
    while live:
        entries, size = of(level, ENTRIES), of(level, ENTRY_SIZE)
        if is_trie:
            for j in range(live):
                first, end = get(block, NODE, j), get(block, END, j)
                place = aim(level, each, first, end, get(block, PLACE, j), before)
                put(block, PLACE, j, place)
                at = of(level, AT) + ((place * size) >> _3)
                prefetch(at - _LINE)
                prefetch(at + _LINE)
        found = _0
        for j in range(live):
            node = get(block, NODE, j)
            if is_trie:
                end = get(block, END, j)
                place = aim(level, each, node, end, get(block, PLACE, j), before)
                place = child_near(level, node, end, place, before)
            else:
                place = probe(of(level, AT), entries, size, get(block, PLACE, j), node)
            put(block, ITEM, found, get(block, ITEM, j))
            put(block, NODE, found, node)
            put(block, PLACE, found, place)
            found += np.int64(place != _0)
        live, level = _0, level_of(view, n + _1)
        context += step
        if n <= length:
            before = load32(context)
        share = np.float32(before) * each
        for j in range(found):
            item = get(block, ITEM, j)
            prob, backoff, node, end, goes_on = values_at(
                view, is_trie, n, get(block, PLACE, j), get(block, NODE, j)
            )
            store_float32(cell(block, PROB, item), prob)
            put(block, FOUND, item, n)
            if n < order and extends(backoff):
                put(block, STATE, item, n)
            if n <= length:
                go_on(level, is_trie, block, live, item, node, end, before, share)
                live += np.int64(goes_on)
        n += _1
