"""The search itself. Nothing here checks an index: the callers named under `Trusts` check first.

A block of contexts, then of words, goes through the stages together, and each stage asks for the
cache lines that the next will read. A block of contexts is walked down (`ask_words` to
`add_weights`); then the words asked of them are searched (`ask_lists` to `put_answers`). Above 600
lines: one pipeline, whose stages share the tables below.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import find_key
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED
from dlm.index.search import view as at
from dlm.index.search.step_kernels import (
    address_of,
    alone,
    ask_alone,
    ask_children,
    ask_entry,
    ask_node_backoff,
    ask_place,
    ask_root,
    ask_root_keys,
    below,
    children,
    find_near,
    first_level,
    has_prob,
    key_of,
    list_after,
    log10_prob_of,
    low_of,
    matters,
    node_backoff,
    node_list,
    open_list,
    open_ranks,
    pair_backoff,
    pair_prob,
    record_bits,
    root_bucket,
    roots_of,
    share,
    word_backoff,
)
from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import (
    field,
    mask_of,
    of,
    prefetch,
    two_fields,
)

CONTEXTS = 32  # of a block
WORDS = 64
# Columns of the tables that hold the state of a block. One row is one cache line: separate arrays
# took twice the time, since their lines evict each other.
L_BIT, L_SIZE, L_STEP, L_KEYS, L_REST = range(5)  # a list: its first bit and what `open_list` says
# The walk down a context: its longest part that is a node; the pair of its last two words, then the
# guess where a child is; and what the next stage reads: a bit, a range of keys, a node.
W_DEEPEST, W_LOW, W_HIGH, W_PAIR = range(4)
Q_AT, Q_RANK, Q_KEY, Q_LOW, Q_SIZE, Q_ROW, Q_MATCHED, Q_FOUND = range(8)  # a word asked
COLUMNS = 8
DEPTHS = 16  # of arrays by context length: the largest order + 1

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)

# Shapes of the state of a block, c a context of it, k words of that, i a word asked:
#   total  (CONTEXTS * DEPTHS,) float32, at c * DEPTHS + k: the weights added from the longest
#          context down to k words; lists, of these rows: the list of the words that follow k words
#   walk   (CONTEXTS, COLUMNS);  active (CONTEXTS,): the contexts that go on
#   query  (WORDS, COLUMNS);  q_alone, q_live (WORDS,): the words that need their 1-gram, that go on
#   best   (WORDS,) float32;  state (WORDS,): log10 P so far, words that matter to the right


# ----------------------------------------------------------------------- the walk down contexts


@inlined
def put_list(lists, row, bit, size, step, keys, rest):  # type: ignore[no-untyped-def]
    lists[row, L_BIT] = bit
    lists[row, L_SIZE] = size
    lists[row, L_STEP] = step
    lists[row, L_KEYS] = keys
    lists[row, L_REST] = rest


@inlined
def ask_words(low, context_begin, context_words, block, here):  # type: ignore[no-untyped-def]
    """1. Asks for what stands beside the last two words."""
    for c in range(here):
        end = context_begin[block + c + 1]
        length = end - context_begin[block + c]
        if length >= 1:
            ask_entry(low, np.int64(context_words[end - 1]))
        if length >= 2:
            ask_entry(low, np.int64(context_words[end - 2]))


@inlined
def open_words(  # type: ignore[no-untyped-def]
    low, context_begin, context_words, block, here, needs_shard, total, lists, walk, active
):
    """2. The list of the last word; where the pair of the last two should be in that of the
    other; how many contexts go on."""
    pairs = _0
    for c in range(here):
        end = context_begin[block + c + 1]
        length = end - context_begin[block + c]
        needs_shard[block + c] = np.uint8(0)
        row = np.int64(c) * DEPTHS
        walk[c, W_DEEPEST] = _1
        if length == 0:
            put_list(lists, row + 1, _0, _0, _0, _0, low.key_bits)  # empty: never read
            lists[row + 2, L_SIZE] = _0
            total[row + 1] = np.float32(0.0)
            walk[c, W_DEEPEST] = _0
            continue
        for k in range(2, length + 2):
            total[row + k] = np.float32(0.0)
        last = np.int64(context_words[end - 1])
        total[row + 1] = word_backoff(low, last)
        _, size, bit = list_after(low, last)
        step, keys, rest = open_list(bit, size, low.key_bits)
        put_list(lists, row + 1, bit, size, step, keys, rest)
        if length < 2:
            continue
        first, size, bit = list_after(low, np.int64(context_words[end - 2]))
        if size == 0:
            continue
        step, keys, rest = open_list(bit, size, low.key_bits)
        walk[c, W_PAIR] = first
        # The list of the other word takes the place of that of three words until it is used.
        lists[row + 3, L_SIZE] = size
        lists[row + 3, L_STEP] = step
        lists[row + 3, L_KEYS] = keys
        lists[row + 3, L_REST] = rest
        walk[c, W_LOW] = bit + (key_of(low, last) >> rest) * step
        prefetch(walk[c, W_LOW] >> _3)
        active[pairs] = c
        pairs += _1
    return pairs


@inlined
def open_buckets(low, lists, walk, active, pairs):  # type: ignore[no-untyped-def]
    """3. The bucket of the pair."""
    for i in range(pairs):
        c = active[i]
        row = c * DEPTHS + 3
        step = lists[row, L_STEP]
        if step:
            bit = walk[c, W_LOW]
            walk[c, W_LOW] = field(bit, step)
            walk[c, W_HIGH] = field(bit + step, step)
        else:
            walk[c, W_LOW] = _0
            walk[c, W_HIGH] = lists[row, L_SIZE]
        bit = lists[row, L_KEYS] + walk[c, W_LOW] * (lists[row, L_REST] + low.pair_bits)
        lists[row, L_BIT] = bit
        prefetch(bit >> _3)
        prefetch((bit >> _3) + np.int64(64))


@inlined
def find_pairs(low, roots, context_begin, context_words, block, lists, walk, active, pairs):  # type: ignore[no-untyped-def]
    """4. The pair: its number, and the bit of its value; how many go on."""
    kept = _0
    for i in range(pairs):
        c = active[i]
        row = c * DEPTHS + 3
        last = np.int64(context_words[context_begin[block + c + 1] - 1])
        rest = lists[row, L_REST]
        count = walk[c, W_HIGH] - walk[c, W_LOW]
        target = key_of(low, last) & mask_of(rest)
        place = find_key(lists[row, L_BIT], rest, _0, count, target)
        if place >= 0:
            walk[c, W_PAIR] += walk[c, W_LOW] + place
            walk[c, W_LOW] = lists[row, L_BIT] + count * rest + place * low.pair_bits
            if roots.count:
                ask_root(roots, walk[c, W_PAIR])
            active[kept] = c
            kept += _1
    return kept


@inlined
def weigh_pairs(low, roots, order, block, needs_shard, total, walk, active, pairs):  # type: ignore[no-untyped-def]
    """5. The weight of the pair, and where its root should be; how many go on."""
    kept = _0
    for i in range(pairs):
        c = active[i]
        bit = walk[c, W_LOW]
        total[c * DEPTHS + 2] = pair_backoff(low, bit)
        if order > 2 and field(bit, np.int64(PAIR_FLAG_BITS)) & np.int64(STORED):
            needs_shard[block + c] = np.uint8(1)
            if roots.count:
                first, end = root_bucket(roots, walk[c, W_PAIR])
                walk[c, W_LOW] = first
                walk[c, W_HIGH] = end
                ask_root_keys(roots, first)
                active[kept] = c
                kept += _1
    return kept


@inlined
def find_roots(roots, level, walk, active, pairs):  # type: ignore[no-untyped-def]
    """6. The root, in W_LOW; how many go on."""
    kept = _0
    for i in range(pairs):
        c = active[i]
        target = walk[c, W_PAIR] & mask_of(roots.key_bits)
        keys = roots.key << _3
        node = find_key(keys, roots.key_bits, walk[c, W_LOW], walk[c, W_HIGH], target)
        if node >= 0:
            walk[c, W_LOW] = node
            ask_place(level, node)
            ask_children(level, node)
            active[kept] = c
            kept += _1
    return kept


@inlined
def read_nodes(  # type: ignore[no-untyped-def]
    low, level, k, context_begin, context_words, block, total, lists, walk, active, nodes
):
    """7a. Of the nodes of a level, contexts of k words: the weight, where the list is, and where
    the child should be; how many go on."""
    kept = _0
    for i in range(nodes):
        c = active[i]
        row = c * DEPTHS + k
        node = walk[c, W_LOW]
        walk[c, W_DEEPEST] = k
        if k > 2:
            total[row] = node_backoff(level, node)
        bit = node_list(level, node)
        lists[row, L_BIT] = bit
        prefetch(bit >> _3)
        end = context_begin[block + c + 1]
        if k < end - context_begin[block + c]:
            first, last = children(level, node)
            if last > first:
                walk[c, W_LOW] = first
                walk[c, W_HIGH] = last
                target = key_of(low, np.int64(context_words[end - k - _1]))
                guess = first + share(target, last - first, low.key_bits)
                walk[c, W_PAIR] = guess
                prefetch(of(below(level), at.N_KEY) + ((guess * low.key_bits) >> _3))
                active[kept] = c
                kept += _1
    return kept


@inlined
def find_nodes(low, level, k, context_begin, context_words, block, walk, active, nodes):  # type: ignore[no-untyped-def]
    """7b. The nodes of the level below, contexts of k words, in W_LOW; how many go on."""
    kept = _0
    for i in range(nodes):
        c = active[i]
        target = key_of(low, np.int64(context_words[context_begin[block + c + 1] - k]))
        keys = of(level, at.N_KEY) << _3
        node = find_near(
            keys, low.key_bits, walk[c, W_LOW], walk[c, W_HIGH], walk[c, W_PAIR], target
        )
        if node >= 0:
            walk[c, W_LOW] = node
            ask_node_backoff(level, node)
            ask_place(level, node)
            ask_children(level, node)
            active[kept] = c
            kept += _1
    return kept


@inlined
def open_nodes(lists, walk, here):  # type: ignore[no-untyped-def]
    """8. The lists of the nodes; an empty one after the longest."""
    for c in range(here):
        row = np.int64(c) * DEPTHS
        for k in range(2, walk[c, W_DEEPEST] + 1):
            size, bit, step, keys, rest = open_ranks(
                lists[row + k, L_BIT], lists[row + k - 1, L_SIZE]
            )
            put_list(lists, row + k, bit, size, step, keys, rest)
        lists[row + max(walk[c, W_DEEPEST], _1) + 1, L_SIZE] = _0


@inlined
def add_weights(context_begin, block, here, total):  # type: ignore[no-untyped-def]
    """9. The sums of the weights, from the longest context down."""
    for c in range(here):
        row = np.int64(c) * DEPTHS
        length = context_begin[block + c + 1] - context_begin[block + c]
        added = np.float32(0.0)
        for k in range(length, 0, -1):
            added = np.float32(added + total[row + k])
            total[row + k] = added
        total[row + length + 1] = np.float32(0.0)


# ------------------------------------------------------------------- the words of these contexts


@inlined
def ask_lists(low, word_begin, words, block, context, first, asked, lists, query):  # type: ignore[no-untyped-def]
    """1. Asks for where each word should be in the list of its context's last word."""
    i = _0
    while i < asked:
        while word_begin[block + context + 1] <= first + i:
            context += _1
        until = min(word_begin[block + context + 1] - first, asked)
        row = context * DEPTHS
        bit = lists[row + 1, L_BIT]
        step = lists[row + 1, L_STEP]
        rest = lists[row + 1, L_REST]
        while i < until:
            key = key_of(low, np.int64(words[first + i]))
            place = bit + (key >> rest) * step
            prefetch(place >> _3)
            query[i, Q_KEY] = key
            query[i, Q_AT] = place
            query[i, Q_ROW] = row
            i += _1
    return context


@inlined
def ask_buckets(low, asked, lists, query):  # type: ignore[no-untyped-def]
    """2. The bucket."""
    for i in range(asked):
        row = query[i, Q_ROW] + 1
        step = lists[row, L_STEP]
        begin, end = _0, lists[row, L_SIZE]
        if step:
            begin, end = two_fields(query[i, Q_AT], step)
        stride = lists[row, L_REST] + low.pair_bits
        bit = lists[row, L_KEYS] + begin * stride
        prefetch(bit >> _3)
        prefetch((bit + (end - begin) * stride) >> _3)
        query[i, Q_RANK] = begin
        query[i, Q_SIZE] = end - begin
        query[i, Q_AT] = bit


@inlined
def ask_rank(lists, row, query, i, rank):  # type: ignore[no-untyped-def]
    bit = lists[row, L_BIT] + (rank >> lists[row, L_REST]) * lists[row, L_STEP]
    prefetch(bit >> _3)
    query[i, Q_RANK] = rank
    query[i, Q_AT] = bit


@inlined
def find_in_pairs(low, words, first, asked, lists, query, best, state, q_alone, q_live):  # type: ignore[no-untyped-def]
    """3. The word in the list of the last word: how many need their 1-gram, how many go on."""
    alone_count = _0
    live = _0
    for i in range(asked):
        row = query[i, Q_ROW] + 1
        size = query[i, Q_SIZE]
        rest = lists[row, L_REST]
        place = find_key(query[i, Q_AT], rest, _0, size, query[i, Q_KEY] & mask_of(rest))
        if place < 0:
            query[i, Q_MATCHED] = _1
            query[i, Q_FOUND] = _1
            q_alone[alone_count] = i
            alone_count += _1
            ask_alone(low, np.int64(words[first + i]))
            continue
        value = field(query[i, Q_AT] + size * rest + place * low.pair_bits, low.near_bits)
        query[i, Q_FOUND] = _2
        state[i] = value & np.int64(STATE_LENGTH)
        if value & np.int64(BLANK):
            query[i, Q_MATCHED] = _1
            q_alone[alone_count] = i
            alone_count += _1
        else:
            best[i] = pair_prob(low, value)
            query[i, Q_MATCHED] = _2
        if lists[row + 1, L_SIZE]:
            ask_rank(lists, row + 1, query, i, query[i, Q_RANK] + place)
            q_live[live] = i
            live += _1
    return alone_count, live


@inlined
def read_alone(low, words, first, query, best, state, q_alone, count):  # type: ignore[no-untyped-def]
    """4. The 1-grams of those that have nothing longer yet."""
    for j in range(count):
        i = q_alone[j]
        prob, reaches = alone(low, np.int64(words[first + i]))
        best[i] = prob
        if query[i, Q_FOUND] == 1:
            state[i] = reaches


@inlined
def ask_ranks(k, record, lists, query, q_live, live):  # type: ignore[no-untyped-def]
    """5a. The bucket in the list of k words."""
    for j in range(live):
        i = q_live[j]
        row = query[i, Q_ROW] + k
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
def find_ranks(level, k, flag_bits, record, lists, query, best, state, q_live, live):  # type: ignore[no-untyped-def]
    """5b. The word in the list of k words; how many go on."""
    kept = _0
    table = of(level, at.N_PROB_TABLE)
    for j in range(live):
        i = q_live[j]
        row = query[i, Q_ROW] + k
        rank = query[i, Q_RANK]
        bit = query[i, Q_AT]
        if lists[row, L_SIZE] == lists[row - 1, L_SIZE]:
            place = rank
        else:
            rest = lists[row, L_REST]
            place = find_key(bit, rest, _0, query[i, Q_SIZE], rank & mask_of(rest))
            bit += query[i, Q_SIZE] * rest
        if place < 0:
            continue
        value = field(bit + place * record, record)
        query[i, Q_FOUND] = k + _1
        if matters(value, flag_bits):
            state[i] = k + _1
        if has_prob(value, flag_bits):
            best[i] = log10_prob_of(value >> flag_bits, table)
            query[i, Q_MATCHED] = k + _1
        if lists[row + 1, L_SIZE]:
            ask_rank(lists, row + 1, query, i, query[i, Q_LOW] + place)
            q_live[kept] = i
            kept += _1
    return kept


@inlined
def put_answers(  # type: ignore[no-untyped-def]
    first, asked, total, query, best, state, log10_prob, matched_order, ngram_length, state_length
):
    """6. The answers."""
    for i in range(asked):
        q = first + i
        matched = query[i, Q_MATCHED]
        log10_prob[q] = np.float32(total[query[i, Q_ROW] + matched] + best[i])
        matched_order[q] = np.uint8(matched)
        ngram_length[q] = np.uint8(query[i, Q_FOUND])
        state_length[q] = np.uint8(state[i])


@kernel
def score_groups(  # type: ignore[no-untyped-def]
    view,
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
    """Scores groups of words that share a context; the back-off is done whole.

    Shapes  view           view.low_view or view.tree_view;  order  N
            context_begin  (C + 1,)  where each context begins in context_words
            context_words  word ids, most recent last, at most N - 1 a context
            word_begin     (C + 1,)  where the words of each context begin in words
            words          (Q,)
            log10_prob     (Q,) float32 filled, like the four after it
            matched_order, ngram_length, state_length  (Q,) uint8
            needs_shard    (C,) uint8  1 where the low orders say that something is stored under the
                           context's last two words: they alone cannot answer
    Guarantees
        equals ngram.backoff.score bit for bit: the back-off weights are added to 0 in float32 from
        the longest context to the shortest, then the probability
    Trusts
        ids below the vocabulary's size, lengths below the order, begins in order: checked in
        `score_lengths`, or before it by whoever calls `Shard.score`; the columns: checked when they
        are mapped (shard.LowOrders.open, shard.Shard.open)
    Paper
        DLM Algorithm 4, the word searched from the shallow end: with blanks in place of missing
        suffixes, a word that is absent at one depth is absent below it
    """
    address = address_of(view)
    low, roots = low_of(address), roots_of(address)
    total = np.empty(CONTEXTS * DEPTHS, np.float32)
    lists = np.empty((CONTEXTS * DEPTHS, COLUMNS), np.int64)
    walk = np.empty((CONTEXTS, COLUMNS), np.int64)
    query = np.empty((WORDS, COLUMNS), np.int64)
    active = np.empty(CONTEXTS, np.int64)
    q_alone = np.empty(WORDS, np.int64)
    q_live = np.empty(WORDS, np.int64)
    best = np.empty(WORDS, np.float32)
    state = np.empty(WORDS, np.int64)

    contexts = np.int64(len(context_begin) - 1)
    block = _0
    while block < contexts:
        here = min(contexts - block, np.int64(CONTEXTS))
        ask_words(low, context_begin, context_words, block, here)
        left = open_words(
            low, context_begin, context_words, block, here, needs_shard, total, lists, walk, active
        )
        open_buckets(low, lists, walk, active, left)
        left = find_pairs(
            low, roots, context_begin, context_words, block, lists, walk, active, left
        )
        left = weigh_pairs(low, roots, order, block, needs_shard, total, walk, active, left)
        level = first_level(address)
        left = find_roots(roots, level, walk, active, left)
        k = _2
        while left:
            left = read_nodes(
                low, level, k, context_begin, context_words, block, total, lists, walk, active, left
            )
            k += _1
            level = below(level)
            left = find_nodes(
                low, level, k, context_begin, context_words, block, walk, active, left
            )
        open_nodes(lists, walk, here)
        add_weights(context_begin, block, here, total)

        context = _0
        first, end = word_begin[block], word_begin[block + here]
        while first < end:
            asked = min(end - first, np.int64(WORDS))
            context = ask_lists(low, word_begin, words, block, context, first, asked, lists, query)
            ask_buckets(low, asked, lists, query)
            alone_count, live = find_in_pairs(
                low, words, first, asked, lists, query, best, state, q_alone, q_live
            )
            read_alone(low, words, first, query, best, state, q_alone, alone_count)
            k = _2
            level = first_level(address)
            while live:
                flag_bits, record = record_bits(level)
                ask_ranks(k, record, lists, query, q_live, live)
                live = find_ranks(
                    level, k, flag_bits, record, lists, query, best, state, q_live, live
                )
                k += _1
                level = below(level)
            put_answers(
                first, asked, total, query, best, state,
                log10_prob, matched_order, ngram_length, state_length,
            )  # fmt: skip
            first += asked
        block += here


# What `score_lengths` found wrong; 0 where nothing is.
LENGTHS, CONTEXT_LENGTH, IDS = 1, 2, 3


# The types of log10_prob, matched_order, ngram_length and state_length, which answers are put in.
ANSWERS = "out float32[:], out uint8[:], out uint8[:], out uint8[:]"


@kernel(
    "int64[:], int64, uint8[:], uint32[:], uint32[:], uint32[:], bool, "
    + ANSWERS
    + ", out uint8[:]"
)
def score_lengths(  # type: ignore[no-untyped-def]
    view,
    order,
    context_lengths,
    context_words,
    word_counts,
    words,
    check_ids,
    log10_prob,
    matched_order,
    ngram_length,
    state_length,
    needs_shard,
):
    """`score_groups` by lengths (C,) in place of begins, which it makes; checks what that trusts.

    Args     check_ids  whether ids may be out of range; False where the caller looked at them
    Returns  0, or the number of what is wrong, and then nothing is scored
    """
    contexts = len(context_lengths)
    if len(word_counts) != contexts:
        return LENGTHS
    context_begin = np.empty(contexts + 1, np.int64)
    word_begin = np.empty(contexts + 1, np.int64)
    context_total = _0
    word_total = _0
    for c in range(contexts):
        context_begin[c] = context_total
        word_begin[c] = word_total
        if np.int64(context_lengths[c]) >= order:
            return CONTEXT_LENGTH
        context_total += np.int64(context_lengths[c])
        word_total += np.int64(word_counts[c])
    context_begin[contexts] = context_total
    word_begin[contexts] = word_total
    if context_total != len(context_words) or word_total != len(words):
        return LENGTHS
    last = np.uint32(view[at.WORDS] - 1)
    good = True
    if check_ids:
        for i in range(len(context_words)):
            good &= context_words[i] <= last
        for i in range(len(words)):
            good &= words[i] <= last
    if not good:
        return IDS
    score_groups(
        view,
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
