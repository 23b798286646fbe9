"""The search itself: arrays in, arrays out, no Python object, no GIL.

Nothing here checks an index: a view holds bare addresses. The callers named under `Trusts` check
first.

A block of contexts, then of words, goes through the stages together, and each stage asks for the
cache lines that the next will read: a model is far larger than the caches, and one search alone
would wait for memory at every step.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np
from numba import njit

from dlm.index import view as at
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
)
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED

CONTEXTS = 32  # of a block
WORDS = 64
DEPTHS = 16  # of arrays by context length: the largest order + 1

_0, _1, _3 = np.int64(0), np.int64(1), np.int64(3)
_SIGN = np.int64(1 << 31)


@njit(inline="always")
def log10_prob_of(code, table):  # type: ignore[no-untyped-def]
    """The probability with this code; see `packed.columns`."""
    if table:
        return load_float32(table + (code << np.int64(2)))
    return as_float32(code | _SIGN)


@njit(inline="always")
def log10_backoff_of(code, table):  # type: ignore[no-untyped-def]
    """The weight with this code."""
    if table:
        return load_float32(table + (code << np.int64(2)))
    return as_float32(code)


@njit(inline="always")
def ask_offset(address, base_bits, delta_bits, i):  # type: ignore[no-untyped-def]
    """Prefetches the block of offset i."""
    stride = base_bits + _1 + np.int64(15) * delta_bits
    prefetch(address + (((i >> np.int64(4)) * stride) >> _3))


@njit(inline="always")
def open_list(bit, size, key_bits):  # type: ignore[no-untyped-def]
    """Bits of a directory entry of a list (0: it has none), where its keys begin, their bits.

    See `packed.kernels.put_list`.
    """
    leading = directory_bits(size)
    if leading == 0:
        return _0, bit, key_bits
    step = leading + _3
    return step, bit + ((_1 << leading) + _1) * step, key_bits - leading


@njit(inline="always")
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


@njit(inline="always")
def child_at(view, level, node):  # type: ignore[no-untyped-def]
    """The first child of a node."""
    return offset_at(
        view[level + at.N_CHILD],
        view[level + at.N_CHILD_BASE],
        view[level + at.N_CHILD_DELTA],
        view[level + at.N_CHILD_WIDE],
        node,
    )


@njit(inline="always")
def find_near(keys, width, low, high, guess, target):  # type: ignore[no-untyped-def]
    """Place of `target` among the rising keys low .. high - 1, -1 where it is not.

    Keys are spread evenly, so that `guess` is near; the search gallops away from it.
    """
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


@njit(cache=True, nogil=True)
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
        shard.Shard.check and by the callers of shard.run_kernel; the columns: checked when they
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
    list_at = np.empty(CONTEXTS * DEPTHS, np.int64)
    list_size = np.empty(CONTEXTS * DEPTHS, np.int64)
    list_step = np.empty(CONTEXTS * DEPTHS, np.int64)  # bits of a directory entry; 0: no directory
    list_keys = np.empty(CONTEXTS * DEPTHS, np.int64)
    list_rest = np.empty(CONTEXTS * DEPTHS, np.int64)  # bits of a key beyond its bucket
    deepest = np.empty(CONTEXTS, np.int64)
    low_at = np.empty(CONTEXTS, np.int64)
    high_at = np.empty(CONTEXTS, np.int64)
    pair_of = np.empty(CONTEXTS, np.int64)
    active = np.empty(CONTEXTS, np.int64)

    q_at = np.empty(WORDS, np.int64)
    q_rank = np.empty(WORDS, np.int64)
    q_key = np.empty(WORDS, np.int64)
    q_low = np.empty(WORDS, np.int64)
    q_size = np.empty(WORDS, np.int64)
    q_alone = np.empty(WORDS, np.int64)
    q_live = np.empty(WORDS, np.int64)
    q_row = np.empty(WORDS, np.int64)
    q_best = np.empty(WORDS, np.float32)
    q_matched = np.empty(WORDS, np.int64)
    q_found = np.empty(WORDS, np.int64)
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
            deepest[c] = _1
            list_size[row + 1] = _0
            list_step[row + 1] = _0
            list_rest[row + 1] = key_bits
            if length == 0:
                list_at[row + 1] = word_value << _3  # never read: the list is empty
                list_keys[row + 1] = list_at[row + 1]
                list_size[row + 2] = _0
                total[row + 1] = np.float32(0.0)
                deepest[c] = _0
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
            list_at[row + 1] = bit
            list_size[row + 1] = size
            list_step[row + 1] = step
            list_keys[row + 1] = keys
            list_rest[row + 1] = rest
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
            pair_of[c] = first
            # The list of u takes the place of that of three words until it is used.
            list_size[row + 3] = size
            list_step[row + 3] = step
            list_keys[row + 3] = keys
            list_rest[row + 3] = rest
            low_at[c] = bit + (((v * multiplier) & key_mask) >> rest) * step
            prefetch(low_at[c] >> _3)
            active[pairs] = c
            pairs += _1
        # --- 3. the bucket
        for i in range(pairs):
            c = active[i]
            row = c * DEPTHS
            step = list_step[row + 3]
            if step:
                bit = low_at[c]
                low_at[c] = field(bit, step)
                high_at[c] = field(bit + step, step)
            else:
                low_at[c] = _0
                high_at[c] = list_size[row + 3]
            list_at[row + 3] = list_keys[row + 3] + low_at[c] * (list_rest[row + 3] + value_bits)
            prefetch(list_at[row + 3] >> _3)
            prefetch((list_at[row + 3] >> _3) + np.int64(64))
        # --- 4. the pair
        kept = _0
        for i in range(pairs):
            c = active[i]
            row = c * DEPTHS
            v = np.int64(context_words[context_begin[block + c + 1] - 1])
            rest = list_rest[row + 3]
            target = (v * multiplier) & key_mask & mask_of(rest)
            count = high_at[c] - low_at[c]
            place = find_key(list_at[row + 3], rest, _0, count, target)
            if place >= 0:
                pair_of[c] += low_at[c] + place
                low_at[c] = list_at[row + 3] + count * rest + place * value_bits
                if roots:
                    bucket = pair_of[c] >> root_key_bits
                    prefetch(root_bucket + ((bucket * bucket_bits) >> _3))
                active[kept] = c
                kept += _1
        # --- 5. its weight, and where its root should be
        pairs = kept
        kept = _0
        for i in range(pairs):
            c = active[i]
            bit = low_at[c]
            code = field(bit + near_bits, pair_backoff_bits)
            total[c * DEPTHS + 2] = log10_backoff_of(code, view[at.PAIR_BACKOFF_TABLE])
            if order > 2 and field(bit, np.int64(PAIR_FLAG_BITS)) & np.int64(STORED):
                needs_shard[block + c] = np.uint8(1)
                if roots:
                    bucket = pair_of[c] >> root_key_bits
                    low_at[c] = get(root_bucket, bucket * bucket_bits, bucket_bits)
                    high_at[c] = get(root_bucket, (bucket + _1) * bucket_bits, bucket_bits)
                    prefetch(root_key + ((low_at[c] * root_key_bits) >> _3))
                    active[kept] = c
                    kept += _1
        # --- 6. the root
        pairs = kept
        kept = _0
        level = np.int64(at.LEVEL)
        for i in range(pairs):
            c = active[i]
            target = pair_of[c] & mask_of(root_key_bits)
            node = find_key(root_key << _3, root_key_bits, low_at[c], high_at[c], target)
            if node >= 0:
                low_at[c] = node
                ask_node(view, level, node)
                active[kept] = c
                kept += _1
        # --- 7. down the tree, a level at a time; low_at[c] is the node
        k = np.int64(2)
        while kept:
            nodes = kept
            kept = _0
            below = level + at.LEVEL_PLACES
            for i in range(nodes):
                c = active[i]
                row = c * DEPTHS
                node = low_at[c]
                deepest[c] = k
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
                list_at[row + k] = bit
                prefetch(bit >> _3)
                end = context_begin[block + c + 1]
                if k < end - context_begin[block + c]:
                    first = child_at(view, level, node)
                    last = child_at(view, level, node + _1)
                    if last > first:
                        low_at[c] = first
                        high_at[c] = last
                        target = (np.int64(context_words[end - k - _1]) * multiplier) & key_mask
                        guess = first + ((target * (last - first)) >> key_bits)
                        pair_of[c] = guess
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
                    low_at[c],
                    high_at[c],
                    pair_of[c],
                    target,
                )
                if node >= 0:
                    low_at[c] = node
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
            for k in range(2, deepest[c] + 1):
                bit = list_at[row + k]
                shorter = list_size[row + k - 1]
                size, head = read_head(bit, shorter)
                bit += head
                width = rank_bits(size, shorter)
                if (width == 0 and size > 1) or size == shorter:
                    # All words of the shorter context follow: ranks are places.
                    step, keys, rest = _0, bit, _0
                else:
                    step, keys, rest = open_list(bit, size, width)
                list_at[row + k] = bit
                list_size[row + k] = size
                list_step[row + k] = step
                list_keys[row + k] = keys
                list_rest[row + k] = rest
                level += at.LEVEL_PLACES
            list_size[row + max(deepest[c], _1) + 1] = _0
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
                bit = list_at[row + 1]
                step = list_step[row + 1]
                rest = list_rest[row + 1]
                while i < until:
                    key = (np.int64(words[first_query + i]) * multiplier) & key_mask
                    place = bit + (key >> rest) * step
                    prefetch(place >> _3)
                    q_key[i] = key
                    q_at[i] = place
                    q_row[i] = row
                    i += _1
            # --- 2. the bucket
            for i in range(asked):
                row = q_row[i]
                step = list_step[row + 1]
                low, high = _0, list_size[row + 1]
                if step:
                    bit = q_at[i]
                    low = field(bit, step)
                    high = field(bit + step, step)
                bit = list_keys[row + 1] + low * (list_rest[row + 1] + value_bits)
                prefetch(bit >> _3)
                prefetch((bit + (high - low) * (list_rest[row + 1] + value_bits)) >> _3)
                q_rank[i] = low
                q_size[i] = high - low
                q_at[i] = bit
            # --- 3. the word in the list of the last word
            live = _0
            for i in range(asked):
                row = q_row[i]
                size = q_size[i]
                rest = list_rest[row + 1]
                place = find_key(q_at[i], rest, _0, size, q_key[i] & mask_of(rest))
                if place < 0:
                    q_matched[i] = _1
                    q_found[i] = _1
                    q_alone[alone] = i
                    alone += _1
                    prefetch(word_value + ((np.int64(words[first_query + i]) * word_bits) >> _3))
                    continue
                value = field(q_at[i] + size * rest + place * value_bits, near_bits)
                q_found[i] = np.int64(2)
                q_state[i] = value & np.int64(STATE_LENGTH)
                if value & np.int64(BLANK):
                    q_matched[i] = _1
                    q_alone[alone] = i
                    alone += _1
                else:
                    q_best[i] = log10_prob_of(value >> np.int64(PAIR_FLAG_BITS), pair_table)
                    q_matched[i] = np.int64(2)
                if list_size[row + 2]:
                    rank = q_rank[i] + place
                    bit = list_at[row + 2] + (rank >> list_rest[row + 2]) * list_step[row + 2]
                    prefetch(bit >> _3)
                    q_rank[i] = rank
                    q_at[i] = bit
                    q_live[live] = i
                    live += _1
            # --- 4. the 1-grams of those that have nothing longer yet
            for j in range(alone):
                i = q_alone[j]
                word = np.int64(words[first_query + i])
                value = get(word_value, word * word_bits, word_bits)
                q_best[i] = log10_prob_of(value >> _1, word_table)
                if q_found[i] == 1:
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
                    row = q_row[i] + k
                    rest = list_rest[row]
                    low, high = _0, list_size[row]
                    step = list_step[row]
                    if step:
                        low = field(q_at[i], step)
                        high = field(q_at[i] + step, step)
                    bit = list_keys[row] + low * (rest + record)
                    prefetch(bit >> _3)
                    q_size[i] = high - low
                    q_low[i] = low
                    q_at[i] = bit
                for j in range(alive):
                    i = q_live[j]
                    row = q_row[i] + k
                    rank = q_rank[i]
                    bit = q_at[i]
                    if list_size[row] == list_size[row - 1]:
                        place = rank
                    else:
                        rest = list_rest[row]
                        place = find_key(bit, rest, _0, q_size[i], rank & mask_of(rest))
                        bit += q_size[i] * rest
                    if place < 0:
                        continue
                    value = field(bit + place * record, record)
                    q_found[i] = k + _1
                    if flag_bits and value & _1:
                        q_state[i] = k + _1
                    if flag_bits < 2 or value & np.int64(2) == 0:
                        q_best[i] = log10_prob_of(value >> flag_bits, table)
                        q_matched[i] = k + _1
                    if list_size[row + 1]:
                        rank = q_low[i] + place
                        bit = list_at[row + 1] + (rank >> list_rest[row + 1]) * list_step[row + 1]
                        prefetch(bit >> _3)
                        q_rank[i] = rank
                        q_at[i] = bit
                        q_live[live] = i
                        live += _1
                k += _1
                level += at.LEVEL_PLACES
            # --- 6. the answers
            for i in range(asked):
                q = first_query + i
                matched = q_matched[i]
                log10_prob[q] = np.float32(total[q_row[i] + matched] + q_best[i])
                matched_order[q] = np.uint8(matched)
                ngram_length[q] = np.uint8(q_found[i])
                state_length[q] = np.uint8(q_state[i])
            first_query += asked
        block += here
