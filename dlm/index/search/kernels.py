"""Searches the trees of shards, and combines the results with those of the low orders.

Contexts, then words, go through the stages in blocks, and each stage prefetches the cache lines
that the next one reads. A block of contexts is walked down (`open_trees` to `add_weights`); then
the words queried after these contexts are searched. No kernel checks an index: the callers named
under `Trusts` check first.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import DIRECT, find_few
from dlm.index.packed.record_kernels import (
    N_PROB_TABLE,
    N_VALUE_BITS,
    ask_bucket,
    bucket_of,
    find_among_few,
    find_in_bucket,
    open_record,
    words_bits,
)
from dlm.index.search import view as at
from dlm.index.search.low_kernels import (
    CONTEXTS,
    L_BIT,
    L_KEYS,
    L_REST,
    L_SIZE,
    L_STEP,
    WORDS,
    put_list,
    search_low,
)
from dlm.index.search.step_kernels import (
    ask_bits,
    below,
    first_level,
    has_prob,
    key_of,
    keys_of,
    log10_prob_of,
    log10_weight_of,
    matters,
    open_ranks,
    record_bits,
    roots_of,
)
from dlm.jit import inlined, kernel
from dlm.ngram.kernels import slot_of
from dlm.ngram.memory_kernels import field, mask_of, of, prefetch, two_fields

# Columns of the tables that hold the state of a block, as in `low_kernels`. For a walk down a
# context, the number of words in its longest part that is a node, and what the next stage reads:
# the bit of a record or bucket, the bits of a key in it, a family, the family's size, and a key.
W_DEEPEST, W_RECORD, W_REST, W_FAMILY, W_COUNT, W_KEY = range(6)
L_WIDTH = 5  # bits of a rank in a list of ranks; `low_kernels` has a list's other columns
Q_AT, Q_RANK, Q_LOW, Q_SIZE, Q_ROW, Q_WORD = range(6)  # columns of a queried word
COLUMNS = 8
DEPTHS = 16  # rows of arrays by context length: the largest order + 1

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)

# Shapes of the state of a block, where c is a context, k counts words, and i is a queried word:
#   total  (CONTEXTS * DEPTHS,) float32, at c * DEPTHS + k: the weights added from the longest
#          context down to k words; lists, at the same rows: the list of words after k words
#   walk   (CONTEXTS, COLUMNS);  active, large (CONTEXTS,): the contexts that go on
#   query  (WORDS, COLUMNS);  live (WORDS,): the words that go on


# ----------------------------------------------------------------------- the walk down contexts


@inlined
def open_trees(  # type: ignore[no-untyped-def]
    trees, slots, chosen, context_begin, context_words, pairs, block, here, walk, active
):
    """1. Opens the family of roots in each context's tree; returns how many contexts go on."""
    kept = _0
    for i in range(here):
        end = context_begin[chosen[block + i] + 1]
        tree = trees[0]
        if len(trees) > 1:
            tree = trees[slots[slot_of(context_words[end - 2], context_words[end - 1])]]
        walk[i, W_DEEPEST] = _1
        family, count = roots_of(tree)
        if count and np.int64(pairs[chosen[block + i]]) < of(tree, at.PAIRS):
            walk[i, W_FAMILY] = family
            walk[i, W_COUNT] = count
            active[kept] = i
            kept += _1
    return kept


@inlined
def find_children(  # type: ignore[no-untyped-def]
    keys, k, chosen, context_begin, context_words, pairs, block, walk, active, nodes, large
):
    """2. Finds contexts of k words in the families of shorter ones, and puts their records' bits in
    W_RECORD; returns how many go on. A family with a directory takes two more steps."""
    kept = _0
    left = _0
    key_bits = keys.root_key_bits if k == 2 else keys.key_bits
    for i in range(nodes):
        c = active[i]
        context = chosen[block + c]
        word = np.int64(pairs[context])
        if k > 2:
            word = np.int64(context_words[context_begin[context + 1] - k])
        if walk[c, W_COUNT] > DIRECT:
            key = word if k == 2 else key_of(keys, word)
            walk[c, W_KEY] = key
            prefetch(ask_bucket(walk[c, W_FAMILY], walk[c, W_COUNT], key, key_bits) >> _3)
            large[left] = c
            left += _1
            continue
        record = find_among_few(walk[c, W_FAMILY], walk[c, W_COUNT], word)
        if record >= 0:
            walk[c, W_RECORD] = record
            ask_bits(record)
            active[kept] = c
            kept += _1
    for i in range(left):
        c = large[i]
        bucket, rest = bucket_of(walk[c, W_FAMILY], walk[c, W_COUNT], walk[c, W_KEY], key_bits)
        walk[c, W_RECORD] = bucket
        walk[c, W_REST] = rest
        ask_bits(bucket)
    for i in range(left):
        c = large[i]
        record = find_in_bucket(walk[c, W_RECORD], walk[c, W_REST], walk[c, W_KEY])
        if record >= 0:
            walk[c, W_RECORD] = record
            ask_bits(record)
            active[kept] = c
            kept += _1
    return kept


@inlined
def read_records(  # type: ignore[no-untyped-def]
    level, k, chosen, context_begin, block, total, lists, walk, active, nodes
):
    """3. Reads the weight, list and family of each context of k words; returns how many go on."""
    kept = _0
    value_bits = of(level, N_VALUE_BITS)
    for i in range(nodes):
        c = active[i]
        row = c * DEPTHS + k
        walk[c, W_DEEPEST] = k
        shorter = lists[row - 1, L_SIZE]
        size, width, count, weight, bit = open_record(level, walk[c, W_RECORD], shorter, k == 2)
        total[row] = log10_weight_of(level, weight)
        step, keys, rest = open_ranks(bit, size, width)
        put_list(lists, row, bit, size, step, keys, rest)
        lists[row, L_WIDTH] = width
        context = chosen[block + c]
        if count and k < context_begin[context + 1] - context_begin[context]:
            family = bit + words_bits(size, width, value_bits)
            walk[c, W_FAMILY] = family
            walk[c, W_COUNT] = count
            ask_bits(family)
            active[kept] = c
            kept += _1
    return kept


@inlined
def add_weights(here, total, lists, walk):  # type: ignore[no-untyped-def]
    """4. Sums the weights from the longest context down; puts an empty list after the longest."""
    for c in range(here):
        row = np.int64(c) * DEPTHS
        deepest = walk[c, W_DEEPEST]
        put_list(lists, row + deepest + 1, walk[c, W_RECORD], _0, _0, _0, _0)
        lists[row + deepest + 1, L_WIDTH] = _0
        total[row + deepest + 1] = np.float32(0.0)
        for k in range(deepest, 1, -1):
            total[row + k] = np.float32(total[row + k + 1] + total[row + k])


# ------------------------------------------------------------------- the words of these contexts


@inlined
def ask_rank(lists, row, query, i, rank):  # type: ignore[no-untyped-def]
    bit = lists[row, L_BIT] + (rank >> lists[row, L_REST]) * lists[row, L_STEP]
    prefetch(bit >> _3)
    query[i, Q_RANK] = rank
    query[i, Q_AT] = bit


@inlined
def ask_words(  # type: ignore[no-untyped-def]
    row, begin, end, ranks, total, lists, query, live, asked, log10_backoff, log10_prob
):
    """5. Adds weights to the low orders' answers to words begin .. end - 1; prefetches where these
    words are in the root's list, at `row`; returns how many words go on. The loop has no branch.

    A rank may come from a client; if it has more bits than the list's ranks, as NO_RANK has, it
    counts as absent from the list.
    """
    size, width, added = lists[row, L_SIZE], lists[row, L_WIDTH], total[row]
    for word in range(begin, end):
        q = np.uint64(word)
        rank = np.int64(ranks[q])
        query[asked, Q_WORD] = word
        query[asked, Q_ROW] = row - 2
        ask_rank(lists, row, query, asked, rank)
        live[asked] = asked
        asked += np.int64(size > 0) & np.int64(rank >> width == 0)
        log10_prob[q] = np.float32(np.float32(added + log10_backoff[q]) + log10_prob[q])
    return asked


@inlined
def ask_ranks(k, record, lists, query, live, asked):  # type: ignore[no-untyped-def]
    """6a. Opens each word's bucket in the list after k words."""
    for j in range(asked):
        i = np.uint64(live[j])
        row = np.uint64(query[i, Q_ROW] + k)
        begin, end = _0, lists[row, L_SIZE]
        step = lists[row, L_STEP]
        if step:
            begin, end = two_fields(query[i, Q_AT], step)
        bit = lists[row, L_KEYS] + begin * (lists[row, L_REST] + record)
        prefetch(bit >> _3)
        query[i, Q_SIZE] = end - begin
        query[i, Q_LOW] = begin
        query[i, Q_AT] = bit


@inlined
def find_ranks(k, record, lists, query, live, asked):  # type: ignore[no-untyped-def]
    """6b. Finds each word in the list after k words; returns how many words are found."""
    found = _0
    for j in range(asked):
        i = np.uint64(live[j])
        row = np.uint64(query[i, Q_ROW] + k)
        bit, size, rest = query[i, Q_AT], query[i, Q_SIZE], lists[row, L_REST]
        place = find_few(bit, rest, size, query[i, Q_RANK] & mask_of(rest))
        place = place if lists[row, L_WIDTH] else query[i, Q_RANK]
        query[i, Q_RANK] = query[i, Q_LOW] + place
        query[i, Q_AT] = bit + size * rest + place * record
        live[found] = live[j]
        found += np.int64(place < size)
    return found


@inlined
def read_values(  # type: ignore[no-untyped-def]
    level, k, total, lists, query, live, found, log10_prob, matched_order, ngram_length,
    state_length,
):  # fmt: skip
    """6c. Reads what is stored with each word; returns how many words go on."""
    kept = _0
    flag_bits, record = record_bits(level)
    for j in range(found):
        i = np.uint64(live[j])
        q, row = np.uint64(query[i, Q_WORD]), np.uint64(query[i, Q_ROW] + k + _1)
        value = field(query[i, Q_AT], record)
        ngram_length[q] = np.uint8(k + _1)
        state = state_length[q]
        state_length[q] = np.uint8(k + _1) if matters(value, flag_bits) else state
        if has_prob(value, flag_bits):
            prob = log10_prob_of(value >> flag_bits, of(level, N_PROB_TABLE))
            log10_prob[q] = np.float32(total[row] + prob)
            matched_order[q] = np.uint8(k + _1)
        ask_rank(lists, row, query, i, query[i, Q_RANK])
        live[kept] = live[j]
        kept += np.int64(lists[row, L_SIZE] > 0)
    return kept


@kernel
def search_trees(  # type: ignore[no-untyped-def]
    trees,
    slots,
    chosen,
    context_begin,
    context_words,
    pairs,
    word_begin,
    ranks,
    log10_backoff,
    log10_prob,
    matched_order,
    ngram_length,
    state_length,
):
    """Completes the low orders' answers to words after contexts of two words or more.

    Shapes  trees   (B,)  address of each shard's view.tree_view; a single one serves all slots
            slots   (4096,)  the shard of each slot;  chosen (n,) the contexts that are searched
            context_begin, context_words, word_begin  as in `low_kernels.search_low`
            pairs (C,), ranks (Q,) uint32  as `search_low` fills them; other values are not found
            log10_backoff, log10_prob (Q,) float32, matched_order, ngram_length, state_length (Q,)
                    uint8  as `search_low` fills them; all but the first are brought up to date.
                    If all are zeros, `complete` can add the low orders later
    Trusts  what `search_low` trusts, except `pairs` and `ranks`
    Paper
        DLM Algorithm 4, but a word is searched from the shortest context up: with blanks in place
        of missing suffixes, a word that is absent after a context is absent after all longer
        contexts. Unlike in the paper, the client holds the low orders, and adds them
    """
    # Keys and levels are the same in all trees of a model.
    keys, levels = keys_of(trees[0]), first_level(trees[0])
    # There are few allocations, since each takes as long as scoring a word.
    tables = np.empty((CONTEXTS * DEPTHS + CONTEXTS + WORDS + 1, COLUMNS), np.int64)
    lists, walk = tables[: CONTEXTS * DEPTHS], tables[CONTEXTS * DEPTHS :]
    query = tables[CONTEXTS * DEPTHS + CONTEXTS :]
    rows = np.empty((3, WORDS + 1), np.int64)
    active, large, live = rows[0], rows[1], rows[2]
    total = np.empty(CONTEXTS * DEPTHS, np.float32)
    contexts = np.int64(len(chosen))
    block = _0
    while block < contexts:
        here = min(contexts - block, np.int64(CONTEXTS))
        left = open_trees(
            trees, slots, chosen, context_begin, context_words, pairs, block, here, walk, active
        )
        level = levels
        k = _2
        while left:
            left = find_children(
                keys, k, chosen, context_begin, context_words, pairs, block, walk, active, left,
                large,
            )  # fmt: skip
            left = read_records(
                level, k, chosen, context_begin, block, total, lists, walk, active, left
            )
            k += _1
            level = below(level)
        add_weights(here, total, lists, walk)

        c = _0
        q = word_begin[chosen[block]]
        while c < here:
            asked = _0
            while asked < WORDS and c < here:
                end = word_begin[chosen[block + c] + 1]
                until = min(end, q + WORDS - asked)
                asked = ask_words(
                    c * DEPTHS + 2, q, until, ranks, total, lists, query, live, asked,
                    log10_backoff, log10_prob,
                )  # fmt: skip
                q = until
                if q == end:
                    c += _1
                    q = word_begin[chosen[min(block + c, contexts - 1)]]
            k = _2
            level = levels
            while asked:
                _, record = record_bits(level)
                ask_ranks(k, record, lists, query, live, asked)
                found = find_ranks(k, record, lists, query, live, asked)
                asked = read_values(
                    level, k, total, lists, query, live, found, log10_prob, matched_order,
                    ngram_length, state_length,
                )  # fmt: skip
                k += _1
                level = below(level)
        block += here


# ------------------------------------------------------------------------------ both searches


@inlined
def complete(  # type: ignore[no-untyped-def]
    low_prob, low_backoff, low_matched, low_length, low_state, prob, matched, length, state
):
    """Combines the low orders' answer and the tree's answer; returns the answer's four values."""
    if matched == 0:
        prob = np.float32(np.float32(prob + low_backoff) + low_prob)
        matched = low_matched
    return prob, matched, length if length else low_length, state if state else low_state


# The types of the arrays that hold answers: log10_prob, matched_order, ngram_length, state_length.
ANSWERS = "out float32[:], out uint8[:], out uint8[:], out uint8[:]"


@kernel
def score_groups(  # type: ignore[no-untyped-def]
    view,
    trees,
    slots,
    order,
    context_begin,
    context_words,
    word_begin,
    words,
    log10_prob,
    matched_order,
    ngram_length,
    state_length,
    needs_shard,
):
    """Scores groups of words that share a context, by the low orders and trees of a set.

    Shapes  trees (B,)  as in `search_trees`; none: the low orders answer as if they were the model
            other arrays as in `low_kernels.search_low`; answers (Q,) filled
    Guarantees
        scores equal ngram.backoff.score bit for bit: the back-off weights are added to 0 in float32
        from the longest context to the shortest, then the probability
    """
    queries = len(words)
    backoff = np.empty(queries, np.float32)
    numbers = np.empty(queries + len(needs_shard), np.uint32)
    ranks, pairs = numbers[:queries], numbers[queries:]
    search_low(
        view, order, context_begin, context_words, word_begin, words, log10_prob, backoff,
        matched_order, ngram_length, state_length, needs_shard, pairs, ranks,
    )  # fmt: skip
    contexts = len(needs_shard)
    chosen = np.empty(contexts if len(trees) else 0, np.int64)
    remote = _0
    for c in range(contexts):
        if needs_shard[c] and len(trees):
            chosen[remote] = c
            remote += _1
            continue
        for q in range(word_begin[c], word_begin[c + 1]):
            log10_prob[q] = np.float32(backoff[q] + log10_prob[q])
    if remote:
        search_trees(
            trees, slots, chosen[:remote], context_begin, context_words, pairs, word_begin, ranks,
            backoff, log10_prob, matched_order, ngram_length, state_length,
        )  # fmt: skip


# The faults that `score_lengths` finds; 0 if there is none.
LENGTHS, CONTEXT_LENGTH, IDS = 1, 2, 3


@inlined
def begins_of(counts):  # type: ignore[no-untyped-def]
    """Returns where each group begins, and where the last one ends. Fewer than 2^31 counts of 32
    bits cannot add up to 2^63, so hostile counts never wrap around to the expected sum."""
    begin = np.empty(len(counts) + 1, np.int64)
    total = _0
    for i in range(len(counts)):
        begin[i] = total
        total += np.int64(counts[i])
    begin[len(counts)] = total
    return begin


@kernel(
    "int64[:], int64[:], uint16[:], int64, uint8[:], uint32[:], uint32[:], uint32[:], "
    + ANSWERS
    + ", out uint8[:]"
)
def score_lengths(  # type: ignore[no-untyped-def]
    view,
    trees,
    slots,
    order,
    context_lengths,
    context_words,
    word_counts,
    words,
    log10_prob,
    matched_order,
    ngram_length,
    state_length,
    needs_shard,
):
    """Checks what `score_groups` trusts, then calls it; takes lengths (C,) in place of begins.

    Returns  0; or the number of a fault, in which case nothing is scored
    """
    contexts = len(context_lengths)
    if len(word_counts) != contexts:
        return LENGTHS
    for c in range(contexts):
        if np.int64(context_lengths[c]) >= order:
            return CONTEXT_LENGTH
    context_begin, word_begin = begins_of(context_lengths), begins_of(word_counts)
    if context_begin[contexts] != len(context_words) or word_begin[contexts] != len(words):
        return LENGTHS
    last = np.uint32(view[at.WORDS] - 1)
    good = True
    for i in range(len(context_words)):
        good &= context_words[i] <= last
    for i in range(len(words)):
        good &= words[i] <= last
    if not good:
        return IDS
    score_groups(
        view,
        trees,
        slots,
        order,
        context_begin,
        context_words,
        word_begin,
        words,
        log10_prob,
        matched_order,
        ngram_length,
        state_length,
        needs_shard,
    )
    return 0
