"""The search itself: arrays in, arrays out, no Python object, no GIL.

Nothing here checks an index: a view holds bare addresses. The callers named under `Trusts` check
first.

A block of contexts, then of words, goes through the stages together, and each stage asks for the
cache lines that the next will read: a model is far larger than the caches, and one search alone
would wait for memory at every step.

One file past 500 lines: most of it is one search, whose stages share the state of a block.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import (
    as_float32,
    directory_bits,
    field,
    find_key,
    get,
    load_float32,
    mask_of,
    offset_at,
    prefetch,
    rank_bits,
    read_head,
    two_fields,
)
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED
from dlm.index.search import view as at
from dlm.jit import inlined, kernel

CONTEXTS = 32  # of a block
WORDS = 64
# Columns of the tables that hold the state of a block. One row is one cache line: separate arrays
# took twice the time, since their lines evict each other.
L_BIT, L_SIZE, L_STEP, L_KEYS, L_REST = range(5)  # a list: its first bit and what `open_list` says
W_DEEPEST, W_LOW, W_HIGH, W_PAIR = range(4)  # the walk down a context
Q_AT, Q_RANK, Q_KEY, Q_LOW, Q_SIZE, Q_ROW, Q_MATCHED, Q_FOUND = range(8)  # a word asked
COLUMNS = 8
DEPTHS = 16  # of arrays by context length: the largest order + 1

_0, _1, _3 = np.int64(0), np.int64(1), np.int64(3)
_SIGN = np.int64(1 << 31)


@inlined
def log10_prob_of(code, table):  # type: ignore[no-untyped-def]
    """The probability with this code; see `packed.columns`."""
    if table:
        return load_float32(table + (code << np.int64(2)))
    return as_float32(code | _SIGN)


@inlined
def log10_backoff_of(code, table):  # type: ignore[no-untyped-def]
    """The weight with this code."""
    if table:
        return load_float32(table + (code << np.int64(2)))
    return as_float32(code)


@inlined
def ask_offset(address, base_bits, delta_bits, i):  # type: ignore[no-untyped-def]
    """Prefetches offset i and the beginning of its block."""
    at_bit = (i >> np.int64(4)) * (base_bits + _1 + np.int64(15) * delta_bits)
    prefetch(address + (at_bit >> _3))
    prefetch(address + ((at_bit + base_bits + (i & np.int64(15)) * delta_bits) >> _3))


@inlined
def open_list(bit, size, key_bits):  # type: ignore[no-untyped-def]
    """Bits of a directory entry of a list (0: it has none), where its keys begin, their bits.

    See `packed.kernels.put_list`.
    """
    leading = directory_bits(size)
    if leading == 0:
        return _0, bit, key_bits
    step = leading + _3
    return step, bit + ((_1 << leading) + _1) * step, key_bits - leading


@inlined
def ask_node(view, level, node):  # type: ignore[no-untyped-def]
    """Prefetches where the list and the children of a node begin."""
    ask_offset(
        view[level + at.N_PLACE],
        view[level + at.N_PLACE_BASE],
        view[level + at.N_PLACE_DELTA],
        node,
    )
    ask_offset(
        view[level + at.N_CHILD],
        view[level + at.N_CHILD_BASE],
        view[level + at.N_CHILD_DELTA],
        node,
    )


@inlined
def child_at(view, level, node):  # type: ignore[no-untyped-def]
    """The first child of a node."""
    return offset_at(
        view[level + at.N_CHILD],
        view[level + at.N_CHILD_BASE],
        view[level + at.N_CHILD_DELTA],
        view[level + at.N_CHILD_WIDE],
        node,
    )


@inlined
def share(key, count, key_bits):  # type: ignore[no-untyped-def]
    """Where `key` should be among `count` keys of `key_bits` bits that are spread evenly."""
    # Both may have 32 bits: the product needs all 64.
    return np.int64((np.uint64(key) * np.uint64(count)) >> np.uint64(key_bits))


@inlined
def find_near(keys, width, low, high, guess, target):  # type: ignore[no-untyped-def]
    """Place of `target` among the rising keys low .. high - 1, -1 where it is not.

    Keys are spread evenly, so that `guess` is near; the search gallops away from it.
    """
    if high - low <= 6:
        return find_key(keys, width, low, high, target)
    step = np.int64(2)
    if field(keys + guess * width, width) <= target:
        low = guess
        while low + step < high:
            if field(keys + (low + step) * width, width) <= target:
                low += step
                step += step
            else:
                high = low + step
                break
    else:
        high = guess
        while high - step > low:
            if field(keys + (high - step) * width, width) > target:
                high -= step
                step += step
            else:
                low = high - step
                break
    # The key, if it is there, is in low .. high - 1.
    while high - low > 6:
        middle = (low + high) >> _1
        if field(keys + middle * width, width) <= target:
            low = middle
        else:
            high = middle
    return find_key(keys, width, low, high, target)


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

    Shapes
        view           int64             view.low_view or view.tree_view
        order          int   N
        context_begin  (C + 1,)  int64   where each context begins in context_words
        context_words  uint32            word ids, most recent last, at most N - 1 a context
        word_begin     (C + 1,)  int64   where the words of each context begin in words
        words          (Q,)      uint32
        log10_prob     (Q,)      float32 filled, like the four after it
        matched_order, ngram_length, state_length  (Q,) uint8
        needs_shard    (C,)      uint8   1 where the low orders say that something is stored
                       under the context's last two words: they alone cannot answer
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
    key_bits = view[at.KEY_BITS]
    key_mask = mask_of(key_bits)
    multiplier = view[at.MULTIPLIER]
    word_value = view[at.WORD_VALUE]
    word_bits = view[at.WORD_PROB_BITS] + _1
    word_table = view[at.WORD_PROB_TABLE]
    list_bit = view[at.LIST] << _3
    pair_prob_bits = view[at.PAIR_PROB_BITS]
    pair_backoff_bits = view[at.PAIR_BACKOFF_BITS]
    near_bits = pair_prob_bits + np.int64(PAIR_FLAG_BITS)
    value_bits = near_bits + pair_backoff_bits
    pair_table = view[at.PAIR_PROB_TABLE]
    word_entry = view[at.WORD_ENTRY] << _3
    begin_bits = view[at.BEGIN_BITS]
    place_bits = view[at.PLACE_BITS]
    word_backoff_bits = view[at.WORD_BACKOFF_BITS]
    entry_bits = begin_bits + place_bits + word_backoff_bits
    roots = view[at.ROOTS] if len(view) > at.LEVEL else _0
    root_key_bits = view[at.ROOT_KEY_BITS]
    bucket_bits = view[at.ROOT_BUCKET_BITS]
    root_bucket = view[at.ROOT_BUCKET]
    root_key = view[at.ROOT_KEY]

    # By context and length k: the weights added from the longest context down to k words, and the
    # list of the words that follow: see `open_list`.
    total = np.empty(CONTEXTS * DEPTHS, np.float32)
    lists = np.empty((CONTEXTS * DEPTHS, COLUMNS), np.int64)
    walk = np.empty((CONTEXTS, COLUMNS), np.int64)
    query = np.empty((WORDS, COLUMNS), np.int64)
    active = np.empty(CONTEXTS, np.int64)

    q_alone = np.empty(WORDS, np.int64)
    q_live = np.empty(WORDS, np.int64)
    q_best = np.empty(WORDS, np.float32)
    q_state = np.empty(WORDS, np.int64)

    contexts = np.int64(len(context_begin) - 1)
    block = _0
    while block < contexts:
        here = min(contexts - block, np.int64(CONTEXTS))
        # --- the walk: 1. ask for what stands beside the last two words
        for c in range(here):
            end = context_begin[block + c + 1]
            length = end - context_begin[block + c]
            if length >= 1:
                bit = word_entry + np.int64(context_words[end - 1]) * entry_bits
                prefetch(bit >> _3)
                prefetch((bit + entry_bits + begin_bits) >> _3)
            if length >= 2:
                bit = word_entry + np.int64(context_words[end - 2]) * entry_bits
                prefetch(bit >> _3)
                prefetch((bit + entry_bits + begin_bits) >> _3)
        # --- 2. the list of the last word; where the pair of the last two should be
        pairs = _0
        for c in range(here):
            end = context_begin[block + c + 1]
            length = end - context_begin[block + c]
            needs_shard[block + c] = np.uint8(0)
            row = np.int64(c) * DEPTHS
            walk[c, W_DEEPEST] = _1
            lists[row + 1, L_SIZE] = _0
            lists[row + 1, L_STEP] = _0
            lists[row + 1, L_REST] = key_bits
            if length == 0:
                lists[row + 1, L_BIT] = word_value << _3  # never read: the list is empty
                lists[row + 1, L_KEYS] = lists[row + 1, L_BIT]
                lists[row + 2, L_SIZE] = _0
                total[row + 1] = np.float32(0.0)
                walk[c, W_DEEPEST] = _0
                continue
            for k in range(2, length + 2):
                total[row + k] = np.float32(0.0)
            v = np.int64(context_words[end - 1])
            entry = word_entry + v * entry_bits
            code = field(entry + begin_bits + place_bits, word_backoff_bits)
            total[row + 1] = log10_backoff_of(code, view[at.WORD_BACKOFF_TABLE])
            size = field(entry + entry_bits, begin_bits) - field(entry, begin_bits)
            bit = list_bit + field(entry + begin_bits, place_bits)
            step, keys, rest = open_list(bit, size, key_bits)
            lists[row + 1, L_BIT] = bit
            lists[row + 1, L_SIZE] = size
            lists[row + 1, L_STEP] = step
            lists[row + 1, L_KEYS] = keys
            lists[row + 1, L_REST] = rest
            if length < 2:
                continue
            u = np.int64(context_words[end - 2])
            entry = word_entry + u * entry_bits
            first = field(entry, begin_bits)
            size = field(entry + entry_bits, begin_bits) - first
            if size == 0:
                continue
            bit = list_bit + field(entry + begin_bits, place_bits)
            step, keys, rest = open_list(bit, size, key_bits)
            walk[c, W_PAIR] = first
            # The list of u takes the place of that of three words until it is used.
            lists[row + 3, L_SIZE] = size
            lists[row + 3, L_STEP] = step
            lists[row + 3, L_KEYS] = keys
            lists[row + 3, L_REST] = rest
            walk[c, W_LOW] = bit + (((v * multiplier) & key_mask) >> rest) * step
            prefetch(walk[c, W_LOW] >> _3)
            active[pairs] = c
            pairs += _1
        # --- 3. the bucket
        for i in range(pairs):
            c = active[i]
            row = c * DEPTHS
            step = lists[row + 3, L_STEP]
            if step:
                bit = walk[c, W_LOW]
                walk[c, W_LOW] = field(bit, step)
                walk[c, W_HIGH] = field(bit + step, step)
            else:
                walk[c, W_LOW] = _0
                walk[c, W_HIGH] = lists[row + 3, L_SIZE]
            lists[row + 3, L_BIT] = lists[row + 3, L_KEYS] + walk[c, W_LOW] * (
                lists[row + 3, L_REST] + value_bits
            )
            prefetch(lists[row + 3, L_BIT] >> _3)
            prefetch((lists[row + 3, L_BIT] >> _3) + np.int64(64))
        # --- 4. the pair
        kept = _0
        for i in range(pairs):
            c = active[i]
            row = c * DEPTHS
            v = np.int64(context_words[context_begin[block + c + 1] - 1])
            rest = lists[row + 3, L_REST]
            target = (v * multiplier) & key_mask & mask_of(rest)
            count = walk[c, W_HIGH] - walk[c, W_LOW]
            place = find_key(lists[row + 3, L_BIT], rest, _0, count, target)
            if place >= 0:
                walk[c, W_PAIR] += walk[c, W_LOW] + place
                walk[c, W_LOW] = lists[row + 3, L_BIT] + count * rest + place * value_bits
                if roots:
                    bucket = walk[c, W_PAIR] >> root_key_bits
                    prefetch(root_bucket + ((bucket * bucket_bits) >> _3))
                active[kept] = c
                kept += _1
        # --- 5. its weight, and where its root should be
        pairs = kept
        kept = _0
        for i in range(pairs):
            c = active[i]
            bit = walk[c, W_LOW]
            code = field(bit + near_bits, pair_backoff_bits)
            total[c * DEPTHS + 2] = log10_backoff_of(code, view[at.PAIR_BACKOFF_TABLE])
            if order > 2 and field(bit, np.int64(PAIR_FLAG_BITS)) & np.int64(STORED):
                needs_shard[block + c] = np.uint8(1)
                if roots:
                    bucket = walk[c, W_PAIR] >> root_key_bits
                    walk[c, W_LOW] = get(root_bucket, bucket * bucket_bits, bucket_bits)
                    walk[c, W_HIGH] = get(root_bucket, (bucket + _1) * bucket_bits, bucket_bits)
                    prefetch(root_key + ((walk[c, W_LOW] * root_key_bits) >> _3))
                    active[kept] = c
                    kept += _1
        # --- 6. the root
        pairs = kept
        kept = _0
        level = np.int64(at.LEVEL)
        for i in range(pairs):
            c = active[i]
            target = walk[c, W_PAIR] & mask_of(root_key_bits)
            node = find_key(root_key << _3, root_key_bits, walk[c, W_LOW], walk[c, W_HIGH], target)
            if node >= 0:
                walk[c, W_LOW] = node
                ask_node(view, level, node)
                active[kept] = c
                kept += _1
        # --- 7. down the tree, a level at a time; walk[c, W_LOW] is the node
        k = np.int64(2)
        while kept:
            nodes = kept
            kept = _0
            below = level + at.LEVEL_PLACES
            for i in range(nodes):
                c = active[i]
                row = c * DEPTHS
                node = walk[c, W_LOW]
                walk[c, W_DEEPEST] = k
                if k > 2:
                    bits = view[level + at.N_BACKOFF_BITS]
                    code = get(view[level + at.N_BACKOFF], node * bits, bits)
                    total[row + k] = log10_backoff_of(code, view[level + at.N_BACKOFF_TABLE])
                bit = (view[level + at.N_LIST] << _3) + offset_at(
                    view[level + at.N_PLACE],
                    view[level + at.N_PLACE_BASE],
                    view[level + at.N_PLACE_DELTA],
                    view[level + at.N_PLACE_WIDE],
                    node,
                )
                lists[row + k, L_BIT] = bit
                prefetch(bit >> _3)
                end = context_begin[block + c + 1]
                if k < end - context_begin[block + c]:
                    first = child_at(view, level, node)
                    last = child_at(view, level, node + _1)
                    if last > first:
                        walk[c, W_LOW] = first
                        walk[c, W_HIGH] = last
                        target = (np.int64(context_words[end - k - _1]) * multiplier) & key_mask
                        guess = first + share(target, last - first, key_bits)
                        walk[c, W_PAIR] = guess
                        prefetch(view[below + at.N_KEY] + ((guess * key_bits) >> _3))
                        active[kept] = c
                        kept += _1
            level = below
            nodes = kept
            kept = _0
            k += _1
            for i in range(nodes):
                c = active[i]
                older = np.int64(context_words[context_begin[block + c + 1] - k])
                target = (older * multiplier) & key_mask
                node = find_near(
                    view[level + at.N_KEY] << _3,
                    key_bits,
                    walk[c, W_LOW],
                    walk[c, W_HIGH],
                    walk[c, W_PAIR],
                    target,
                )
                if node >= 0:
                    walk[c, W_LOW] = node
                    prefetch(
                        view[level + at.N_BACKOFF]
                        + ((node * view[level + at.N_BACKOFF_BITS]) >> _3)
                    )
                    ask_node(view, level, node)
                    active[kept] = c
                    kept += _1
        # --- 8. the lists of the nodes; the sums of the weights
        for c in range(here):
            row = c * DEPTHS
            level = np.int64(at.LEVEL)
            for k in range(2, walk[c, W_DEEPEST] + 1):
                bit = lists[row + k, L_BIT]
                shorter = lists[row + k - 1, L_SIZE]
                size, head = read_head(bit, shorter)
                bit += head
                width = rank_bits(size, shorter)
                if (width == 0 and size > 1) or size == shorter:
                    # All words of the shorter context follow: ranks are places.
                    step, keys, rest = _0, bit, _0
                else:
                    step, keys, rest = open_list(bit, size, width)
                lists[row + k, L_BIT] = bit
                lists[row + k, L_SIZE] = size
                lists[row + k, L_STEP] = step
                lists[row + k, L_KEYS] = keys
                lists[row + k, L_REST] = rest
                level += at.LEVEL_PLACES
            lists[row + max(walk[c, W_DEEPEST], _1) + 1, L_SIZE] = _0
            length = context_begin[block + c + 1] - context_begin[block + c]
            added = np.float32(0.0)
            for k in range(length, 0, -1):
                added = np.float32(added + total[row + k])
                total[row + k] = added
            total[row + length + 1] = np.float32(0.0)

        # --- the words of these contexts
        context = _0
        first_query = word_begin[block]
        last_query = word_begin[block + here]
        while first_query < last_query:
            asked = min(last_query - first_query, np.int64(WORDS))
            # --- 1. ask for where the word should be in the list
            i = _0
            alone = _0  # queries that need their 1-gram
            while i < asked:
                while word_begin[block + context + 1] <= first_query + i:
                    context += _1
                until = min(word_begin[block + context + 1] - first_query, asked)
                row = context * DEPTHS
                bit = lists[row + 1, L_BIT]
                step = lists[row + 1, L_STEP]
                rest = lists[row + 1, L_REST]
                while i < until:
                    key = (np.int64(words[first_query + i]) * multiplier) & key_mask
                    place = bit + (key >> rest) * step
                    prefetch(place >> _3)
                    query[i, Q_KEY] = key
                    query[i, Q_AT] = place
                    query[i, Q_ROW] = row
                    i += _1
            # --- 2. the bucket
            for i in range(asked):
                row = query[i, Q_ROW]
                step = lists[row + 1, L_STEP]
                low, high = _0, lists[row + 1, L_SIZE]
                if step:
                    bit = query[i, Q_AT]
                    low, high = two_fields(bit, step)
                bit = lists[row + 1, L_KEYS] + low * (lists[row + 1, L_REST] + value_bits)
                prefetch(bit >> _3)
                prefetch((bit + (high - low) * (lists[row + 1, L_REST] + value_bits)) >> _3)
                query[i, Q_RANK] = low
                query[i, Q_SIZE] = high - low
                query[i, Q_AT] = bit
            # --- 3. the word in the list of the last word
            live = _0
            for i in range(asked):
                row = query[i, Q_ROW]
                size = query[i, Q_SIZE]
                rest = lists[row + 1, L_REST]
                place = find_key(query[i, Q_AT], rest, _0, size, query[i, Q_KEY] & mask_of(rest))
                if place < 0:
                    query[i, Q_MATCHED] = _1
                    query[i, Q_FOUND] = _1
                    q_alone[alone] = i
                    alone += _1
                    prefetch(word_value + ((np.int64(words[first_query + i]) * word_bits) >> _3))
                    continue
                value = field(query[i, Q_AT] + size * rest + place * value_bits, near_bits)
                query[i, Q_FOUND] = np.int64(2)
                q_state[i] = value & np.int64(STATE_LENGTH)
                if value & np.int64(BLANK):
                    query[i, Q_MATCHED] = _1
                    q_alone[alone] = i
                    alone += _1
                else:
                    q_best[i] = log10_prob_of(value >> np.int64(PAIR_FLAG_BITS), pair_table)
                    query[i, Q_MATCHED] = np.int64(2)
                if lists[row + 2, L_SIZE]:
                    rank = query[i, Q_RANK] + place
                    bit = (
                        lists[row + 2, L_BIT]
                        + (rank >> lists[row + 2, L_REST]) * lists[row + 2, L_STEP]
                    )
                    prefetch(bit >> _3)
                    query[i, Q_RANK] = rank
                    query[i, Q_AT] = bit
                    q_live[live] = i
                    live += _1
            # --- 4. the 1-grams of those that have nothing longer yet
            for j in range(alone):
                i = q_alone[j]
                word = np.int64(words[first_query + i])
                value = get(word_value, word * word_bits, word_bits)
                q_best[i] = log10_prob_of(value >> _1, word_table)
                if query[i, Q_FOUND] == 1:
                    q_state[i] = value & _1
            # --- 5. down the nodes of the context
            k = np.int64(2)
            level = np.int64(at.LEVEL)
            while live:
                alive = live
                live = _0
                flag_bits = view[level + at.N_FLAG_BITS]
                record = view[level + at.N_PROB_BITS] + flag_bits
                table = view[level + at.N_PROB_TABLE]
                for j in range(alive):
                    i = q_live[j]
                    row = query[i, Q_ROW] + k
                    rest = lists[row, L_REST]
                    low, high = _0, lists[row, L_SIZE]
                    step = lists[row, L_STEP]
                    if step:
                        low, high = two_fields(query[i, Q_AT], step)
                    bit = lists[row, L_KEYS] + low * (rest + record)
                    prefetch(bit >> _3)
                    query[i, Q_SIZE] = high - low
                    query[i, Q_LOW] = low
                    query[i, Q_AT] = bit
                for j in range(alive):
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
                    if flag_bits and value & _1:
                        q_state[i] = k + _1
                    if flag_bits < 2 or value & np.int64(2) == 0:
                        q_best[i] = log10_prob_of(value >> flag_bits, table)
                        query[i, Q_MATCHED] = k + _1
                    if lists[row + 1, L_SIZE]:
                        rank = query[i, Q_LOW] + place
                        bit = (
                            lists[row + 1, L_BIT]
                            + (rank >> lists[row + 1, L_REST]) * lists[row + 1, L_STEP]
                        )
                        prefetch(bit >> _3)
                        query[i, Q_RANK] = rank
                        query[i, Q_AT] = bit
                        q_live[live] = i
                        live += _1
                k += _1
                level += at.LEVEL_PLACES
            # --- 6. the answers
            for i in range(asked):
                q = first_query + i
                matched = query[i, Q_MATCHED]
                log10_prob[q] = np.float32(total[query[i, Q_ROW] + matched] + q_best[i])
                matched_order[q] = np.uint8(matched)
                ngram_length[q] = np.uint8(query[i, Q_FOUND])
                state_length[q] = np.uint8(q_state[i])
            first_query += asked
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
    """`score_groups` by lengths in place of begins, which it makes; checks what that trusts.

    Shapes
        context_lengths (C,) uint8, word_counts (C,) uint32; the others as there
        check_ids  whether ids may be out of range; False where the caller looked at them
    Returns
        0, or the number of what is wrong, and then nothing is scored
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
