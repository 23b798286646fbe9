"""Searches the low orders, which lets a client answer most queries itself.

Blocks are as in `kernels`. No kernel checks an index; `search_low` says which code does.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import find_few, find_key
from dlm.index.search.step_kernels import (
    address_of,
    alone,
    ask_alone,
    ask_entry,
    is_stored,
    list_after,
    low_of,
    open_list,
    pair_prob,
    pair_state,
    width_of,
    word_backoff,
)
from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import field, mask_of, mirrored, prefetch, two_fields

CONTEXTS = 32  # per block
WORDS = 64
# Columns of the tables that hold the state of a block. One row is one cache line: separate arrays
# took twice the time, since their lines evict each other. The array indexes used for each word are
# unsigned: checking whether a signed index is negative, as numba does, took 5 % of the time.
L_BIT, L_SIZE, L_STEP, L_KEYS, L_REST = range(5)  # a list: bit, size, what `open_list` returns
L_LOW, L_HIGH, L_FIRST = 5, 6, 7  # for the list in which a pair is sought: two values that
#                                  the next stage reads, and the list's first pair
L_KEY = L_SIZE  # in `older`, the pair's key; L_HIGH has the size until the bucket is known
Q_AT, Q_SIZE, Q_KEY, Q_CONTEXT, Q_RANK, Q_REST = range(6)  # columns of a queried word
COLUMNS = 8

_0, _1, _2 = np.int64(0), np.int64(1), np.int64(2)

# Shapes of the state of a block:
#   lists, older (CONTEXTS, COLUMNS): the lists of the last word, and of the one before it
#   backoff (CONTEXTS, 2) float32: the weight of the last word, and 0
#   query (WORDS, COLUMNS);  active (WORDS,), later named found: the contexts, then the words, for
#   the next stage;  alone_ (WORDS,): the words that need their 1-gram


@inlined
def put_list(lists, row, bit, size, step, keys, rest):  # type: ignore[no-untyped-def]
    lists[row, L_BIT] = bit
    lists[row, L_SIZE] = size
    lists[row, L_STEP] = step
    lists[row, L_KEYS] = keys
    lists[row, L_REST] = rest


@inlined
def ask_contexts(low, context_begin, context_words, block, here):  # type: ignore[no-untyped-def]
    """1. Prefetches the entries of the last two words."""
    for c in range(here):
        end = context_begin[block + c + 1]
        length = end - context_begin[block + c]
        if length >= 1:
            ask_entry(low, np.int64(context_words[end - 1]))
        if length >= 2:
            ask_entry(low, np.int64(context_words[end - 2]))


@inlined
def open_words(  # type: ignore[no-untyped-def]
    low,
    order,
    context_begin,
    context_words,
    block,
    here,
    needs_shard,
    backoff,
    lists,
    older,
    active,
):
    """2. Opens the last word's list; prefetches where the last word should be in the list of the
    second-last word; returns how many contexts go on to stage 3."""
    pairs = _0
    for c in range(here):
        end = context_begin[block + c + 1]
        length = end - context_begin[block + c]
        needs_shard[block + c] = np.uint8(0)
        if length == 0:
            put_list(lists, c, low.list, _0, _0, low.list, _1)  # empty: never read
            backoff[c, 0] = np.float32(0.0)
            continue
        last = np.int64(context_words[end - 1])
        backoff[c, 0] = word_backoff(low, last)
        _, size, bit, width = list_after(low, last)
        step, keys, rest = open_list(bit, size, width)
        put_list(lists, c, bit, size, step, keys, rest)
        if length < 2 or order < 3:
            continue
        first, size, bit, width = list_after(low, np.int64(context_words[end - 2]))
        if size == 0 or last >> width:
            continue
        older[c, L_FIRST] = first
        step, keys, rest = open_list(bit, size, width)
        put_list(older, c, bit, size, step, keys, rest)
        key = mirrored(last, width)
        older[c, L_KEY], older[c, L_HIGH] = key & mask_of(rest), size
        older[c, L_LOW] = bit + (key >> rest) * step
        prefetch(older[c, L_LOW] >> np.int64(3))
        active[pairs] = c
        pairs += _1
    return pairs


@inlined
def open_buckets(low, older, active, pairs):  # type: ignore[no-untyped-def]
    """3. Opens the bucket of each pair."""
    for i in range(pairs):
        c = active[i]
        step = older[c, L_STEP]
        begin, end = _0, older[c, L_HIGH]
        if step:
            begin, end = two_fields(older[c, L_LOW], step)
        bit = older[c, L_KEYS] + begin * (older[c, L_REST] + low.pair_bits)
        older[c, L_BIT] = bit
        older[c, L_LOW] = begin
        older[c, L_HIGH] = end - begin
        prefetch(bit >> np.int64(3))
        prefetch((bit >> np.int64(3)) + np.int64(64))


@inlined
def find_stored(  # type: ignore[no-untyped-def]
    low, context_begin, context_words, block, pairs, needs_shard, older, active, count
):
    """4. Finds whether anything is stored under each pair, and the pair's number."""
    for i in range(count):
        c = active[i]
        rest, size = older[c, L_REST], older[c, L_HIGH]
        place = find_key(older[c, L_BIT], rest, _0, size, older[c, L_KEY])
        if place >= 0:
            value = older[c, L_BIT] + size * rest + place * low.pair_bits
            if is_stored(low, field(value, _2)):
                needs_shard[block + c] = np.uint8(1)
                pairs[block + c] = np.uint32(older[c, L_FIRST] + older[c, L_LOW] + place)


@inlined
def ask_lists(low, word_begin, words, block, context, first, asked, lists, query):  # type: ignore[no-untyped-def]
    """5. Prefetches where each word should be in the list of its context's last word."""
    i = _0
    while i < asked:
        while word_begin[block + context + 1] <= first + i:
            context += _1
        until = min(word_begin[block + context + 1] - first, asked)
        bit, step, rest = lists[context, L_BIT], lists[context, L_STEP], lists[context, L_REST]
        width = width_of(step, rest)
        while i < until:
            word = np.int64(words[first + i])
            key = mirrored(word, width)
            place = bit + (key >> rest) * step
            prefetch(place >> np.int64(3))
            # A word above all words of the list would get the key of another word.
            query[i, Q_KEY] = key & mask_of(rest) if word >> width == 0 else -_1
            query[i, Q_AT] = place
            query[i, Q_CONTEXT] = context
            i += _1
    return context


@inlined
def ask_buckets(low, asked, lists, query):  # type: ignore[no-untyped-def]
    """6. Opens each word's bucket."""
    for i in range(asked):
        c = np.uint64(query[i, Q_CONTEXT])
        step = lists[c, L_STEP]
        begin, end = _0, lists[c, L_SIZE]
        if step:
            begin, end = two_fields(query[i, Q_AT], step)
        end = end if query[i, Q_KEY] >= 0 else begin
        rest = lists[c, L_REST]
        stride = rest + low.pair_bits
        bit = lists[c, L_KEYS] + begin * stride
        prefetch(bit >> np.int64(3))
        prefetch((bit + (end - begin) * stride) >> np.int64(3))
        query[i, Q_RANK] = begin
        query[i, Q_SIZE] = end - begin
        query[i, Q_AT] = bit
        query[i, Q_REST] = rest


@inlined
def find_in_pairs(  # type: ignore[no-untyped-def]
    low, words, first, asked, backoff, query, log10_backoff, matched_order, ngram_length, ranks,
    found, alone_,
):  # fmt: skip
    """7. Finds each word in the last word's list; returns the numbers found and not found."""
    pairs = _0
    lonely = _0
    for i in range(asked):
        q = np.uint64(first + i)
        bit, size, rest = query[i, Q_AT], query[i, Q_SIZE], query[i, Q_REST]
        place = find_few(bit, rest, size, query[i, Q_KEY])
        there = np.int64(place < size)
        query[i, Q_AT] = bit + size * rest + place * low.pair_bits
        ranks[q] = np.uint32((query[i, Q_RANK] + place) | (there - _1))  # NO_RANK has all bits set
        matched_order[q] = np.uint8(_1 + there)
        ngram_length[q] = np.uint8(_1 + there)
        log10_backoff[q] = backoff[np.uint64(query[i, Q_CONTEXT]), there]
        ask_alone(low, np.int64(words[q]))
        found[pairs] = i
        pairs += there
        alone_[lonely] = np.int64(q)
        lonely += _1 - there
    return pairs, lonely


@inlined
def read_pairs(  # type: ignore[no-untyped-def]
    low, words, first, pairs, lonely, backoff, query, log10_prob, log10_backoff, matched_order,
    state_length, found, alone_,
):  # fmt: skip
    """8. Reads the pairs' values; returns how many words need their 1-gram."""
    for j in range(pairs):
        i = np.uint64(found[j])
        q = np.uint64(first + found[j])
        value = field(query[i, Q_AT], low.pair_bits)
        log10_prob[q] = pair_prob(low, value)
        state_length[q] = np.uint8(pair_state(low, value, np.int64(words[q])))
        if value & low.blank:
            matched_order[q] = np.uint8(1)
            log10_backoff[q] = backoff[np.uint64(query[i, Q_CONTEXT]), 0]
            alone_[lonely] = np.int64(q)
            lonely += _1
    return lonely


@inlined
def read_alone(low, words, lonely, log10_prob, ngram_length, state_length, alone_):  # type: ignore[no-untyped-def]
    """9. Reads the 1-grams of words that have nothing longer."""
    for j in range(lonely):
        q = np.uint64(alone_[j])
        prob, reaches = alone(low, np.int64(words[q]))
        log10_prob[q] = prob
        if ngram_length[q] == 1:
            state_length[q] = np.uint8(reaches)


@kernel
def search_low(  # type: ignore[no-untyped-def]
    view,
    order,
    context_begin,
    context_words,
    word_begin,
    words,
    log10_prob,
    log10_backoff,
    matched_order,
    ngram_length,
    state_length,
    needs_shard,
    pairs,
    ranks,
):
    """Finds the low orders' answers to words after contexts.

    Shapes  view           view.low_view;  order  N
            context_begin  (C + 1,)  where each context begins in context_words
            context_words  word ids, most recent last, at most N - 1 a context
            word_begin     (C + 1,)  where the words of each context begin in words
            words          (Q,)
            log10_prob     (Q,) float32 filled, like the four after it: of the 2-gram, or, where
                           there is none, of the 1-gram
            log10_backoff  (Q,) float32  the weight to add to log10_prob: that of the context's last
                           word, or 0 where there is a 2-gram
            matched_order, ngram_length, state_length  (Q,) uint8  as far as the low orders know
            needs_shard    (C,) uint8  1 where something is stored under the last two words: then
                           the low orders alone cannot answer
            pairs          (C,) uint32  filled where needs_shard is 1: the number of the 2-gram
            ranks          (Q,) uint32 filled: the rank of the word among the words that follow the
                           context's last word; NO_RANK if the word does not follow
    Trusts  ids below the vocabulary's size, lengths below the order, begins in order: checked in
            `kernels.score_lengths`; the columns: checked when they are mapped
    """
    low = low_of(address_of(view))
    # There are few allocations, since each takes as long as scoring a word.
    tables = np.empty((2 * CONTEXTS + WORDS, COLUMNS), np.int64)
    lists, older, query = tables[:CONTEXTS], tables[CONTEXTS:-WORDS], tables[-WORDS:]
    rows = np.empty((2, WORDS), np.int64)
    active, alone_ = rows[0], rows[1]
    backoff = np.zeros((CONTEXTS, 2), np.float32)
    contexts = np.int64(len(context_begin) - 1)
    block = _0
    while block < contexts:
        here = min(contexts - block, np.int64(CONTEXTS))
        ask_contexts(low, context_begin, context_words, block, here)
        left = open_words(
            low, order, context_begin, context_words, block, here, needs_shard, backoff, lists,
            older, active,
        )  # fmt: skip
        open_buckets(low, older, active, left)
        find_stored(
            low, context_begin, context_words, block, pairs, needs_shard, older, active, left
        )
        context = _0
        first, end = word_begin[block], word_begin[block + here]
        while first < end:
            asked = min(end - first, np.int64(WORDS))
            context = ask_lists(low, word_begin, words, block, context, first, asked, lists, query)
            ask_buckets(low, asked, lists, query)
            paired, lonely = find_in_pairs(
                low, words, first, asked, backoff, query, log10_backoff, matched_order,
                ngram_length, ranks, active, alone_,
            )  # fmt: skip
            lonely = read_pairs(
                low, words, first, paired, lonely, backoff, query, log10_prob, log10_backoff,
                matched_order, state_length, active, alone_,
            )  # fmt: skip
            read_alone(low, words, lonely, log10_prob, ngram_length, state_length, alone_)
            first += asked
        block += here
