"""Keeps each state in a row, with the lists that its words lead to, and scores words after a row.

A row holds the state's words that still matter and, for each context length, the back-off weight
and the list of the words that follow. So a context is walked once per state.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import find_key, rank_bits
from dlm.index.packed.record_kernels import (
    N_PROB_TABLE,
    find_child,
    open_record,
    width_before,
    words_bits,
)
from dlm.index.search.step_kernels import (
    alone,
    ask_alone,
    ask_entry,
    below,
    find_pair,
    find_root,
    first_level,
    has_prob,
    is_stored,
    key_of,
    list_after,
    log10_prob_of,
    log10_weight_of,
    low_of,
    matters,
    open_ranks,
    pair_prob,
    pair_state,
    record_bits,
    word_backoff,
)
from dlm.jit import inlined
from dlm.ngram.memory_kernels import (
    bits_of_float32,
    field,
    load32,
    load64,
    load_float32,
    mask_of,
    of,
    prefetch,
    store32,
    store64,
    two_fields,
)

# A row begins with uint32 fields: the number of words, whether anything is stored under the last
# two, and the words, newest first. For the context of each length, the address of its list in bits
# (int64), the number of words in the list (uint32) and the context's weight (float32) follow.
HEAD_BYTES, CONTEXT_BYTES = 8, 16

_0, _1, _2, _3, _4 = np.int64(0), np.int64(1), np.int64(2), np.int64(3), np.int64(4)


@inlined
def word_at(row, i):  # type: ignore[no-untyped-def]
    return load32(row + np.int64(HEAD_BYTES) + (i << _2))


@inlined
def put_word_at(row, i, word):  # type: ignore[no-untyped-def]
    store32(row + np.int64(HEAD_BYTES) + (i << _2), word)


@inlined
def put_context(context, bit, size, weight):  # type: ignore[no-untyped-def]
    store64(context, bit)
    store32(context + np.int64(8), size)
    store32(context + np.int64(12), bits_of_float32(weight))


@inlined
def walk(view, tree, order, row, contexts):  # type: ignore[no-untyped-def]
    """Writes the contexts of a row, and whether something is stored under its last two words.

    Args    view, tree  addresses of the views of the low orders and of the only tree (0: no tree)

    Trusts  ids below the vocabulary's size, fewer words than the order
    """
    length = load32(row)
    store32(row + _4, _0)
    for k in range(length):
        put_context(contexts + np.int64(k * CONTEXT_BYTES), _0, _0, np.float32(0.0))
    if length == 0:
        return
    low = low_of(view)
    last = word_at(row, _0)
    _, size, bit, _ = list_after(low, last)
    put_context(contexts, bit, size, word_backoff(low, last))
    if length == 1:
        return
    first, pairs, bit, width = list_after(low, word_at(row, _1))
    place, value = find_pair(low, pairs, bit, width, last)
    if place < 0:
        return
    context = contexts + np.int64(CONTEXT_BYTES)
    if order < 3 or is_stored(low, field(value, _2)) == 0:
        return
    store32(row + _4, _1)
    if tree == 0:
        return
    node = find_root(tree, first + place)
    level = first_level(tree)
    k = _2
    while node >= 0:
        size, width, count, code, bit = open_record(level, node, size, k == 2)
        put_context(context, bit, size, log10_weight_of(level, code))
        if k == length:
            return
        _, value_bits = record_bits(level)
        word = word_at(row, k)
        family = bit + words_bits(size, width, value_bits)
        node = find_child(family, count, word, key_of(low, word), low.key_bits)
        level = below(level)
        context += np.int64(CONTEXT_BYTES)
        k += _1


@inlined
def ask_ahead(view, row, contexts, word):  # type: ignore[no-untyped-def]
    """Prefetches what `search` and the next `walk` will read, where the address is known."""
    low = low_of(view)
    ask_alone(low, word)
    ask_entry(low, word)
    for k in range(1, load32(row)):
        prefetch(load64(contexts + np.int64(k * CONTEXT_BYTES)) >> _3)


@inlined
def search(view, tree, row, contexts, word):  # type: ignore[no-untyped-def]
    """Scores a word after a row's words, list by list, like `index.search.kernels.score_groups`.
    Returns (log10 P float32, length of the longest n-gram or blank found, number of words that
    affect later words). `view`, `tree`: see `walk`. Trusts an id below the vocabulary's size."""
    low = low_of(view)
    length = load32(row)
    found, matched, reach = _1, _1, _0
    best = np.float32(0.0)
    if length >= 1:
        _, size, bit, width = list_after(low, word_at(row, _0))
        place, value_at = find_pair(low, size, bit, width, word)
        if place >= 0:
            found, matched, reach, best = search_longer(
                low, tree, contexts, length, word, place, value_at
            )
    if matched == 1:
        best, reaches = alone(low, word)
        if found == 1:
            reach = reaches
    return np.float32(weight_from(contexts, length, matched) + best), found, reach


@inlined
def weight_from(contexts, length, matched):  # type: ignore[no-untyped-def]
    """Sums the weights of the contexts from `length` words down to `matched`, longest first."""
    total = np.float32(0.0)
    for k in range(length, matched - 1, -1):
        weight = contexts + (np.int64(k) * np.int64(CONTEXT_BYTES) - _4)
        total = np.float32(total + load_float32(weight))
    return total


@inlined
def search_longer(low, tree, contexts, length, word, rank, value_at):  # type: ignore[no-untyped-def]
    """Reads the value of a pair that was found, then searches the lists of longer contexts.

    Args     word, rank  the pair's second word, and its rank in the list of the first word
             value_at  address of the pair's value, in bits
    Returns  (length of the longest n-gram or blank found, length of the longest n-gram, number of
             words that affect later words, log10 P of the longest n-gram if it is not a 1-gram)
    """
    value = field(value_at, low.pair_bits)
    found, matched = _2, _1
    reach = pair_state(low, value, word)
    best = np.float32(0.0)
    if value & low.blank == 0:
        matched = _2
        best = pair_prob(low, value)
    level = first_level(tree)
    context = contexts
    size = _0
    for k in range(2, length + 1):
        shorter = size
        context += np.int64(CONTEXT_BYTES)
        size = load32(context + np.int64(8))
        if size == 0:
            break
        bit = load64(context)
        flag_bits, record = record_bits(level)
        begin, end = _0, size
        if k == 2:
            width = width_before(bit)
            if rank >> width:
                break
        else:
            width = rank_bits(size, shorter)
        step, keys, rest = open_ranks(bit, size, width)
        if step:
            begin, end = two_fields(bit + (rank >> rest) * step, step)
        bit = keys + begin * (rest + record)
        if width == 0:
            place = rank  # the shorter context's list has the same words, so ranks are indices
        else:
            place = find_key(bit, rest, _0, end - begin, rank & mask_of(rest))
            bit += (end - begin) * rest
        if place < 0:
            break
        value = field(bit + place * record, record)
        found = np.int64(k) + _1
        if matters(value, flag_bits):
            reach = found
        if has_prob(value, flag_bits):
            matched = found
            best = log10_prob_of(value >> flag_bits, of(level, N_PROB_TABLE))
        rank = begin + place
        level = below(level)
    return found, matched, reach, best
