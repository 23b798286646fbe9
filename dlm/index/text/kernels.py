"""Scores of consecutive words.

The context of a word is that of the word before and that word: the pair found when a word is scored
is the root of the next word's context, and an n-gram that was not found is no context. So each
list is searched once, where separate queries search it as a context and again for the word.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np
from numba import njit

from dlm.index import view as at
from dlm.index.kernels import (
    COLUMNS,
    DEPTHS,
    L_BIT,
    L_KEYS,
    L_REST,
    L_SIZE,
    L_STEP,
    ask_node,
    child_at,
    find_near,
    log10_backoff_of,
    log10_prob_of,
    open_list,
    share,
)
from dlm.index.packed.kernels import (
    field,
    find_key,
    get,
    mask_of,
    offset_at,
    prefetch,
    rank_bits,
    read_head,
    two_fields,
)
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED

TOKENS = 32  # of a block
# Columns of the table of a block's tokens; see index.kernels.
T_FIRST_PAIR, T_NODE, T_BIT, T_COUNT, T_LOW, T_RANK, T_FOUND, T_MATCHED = range(COLUMNS)

_0, _1, _3 = np.int64(0), np.int64(1), np.int64(3)


@njit(cache=True, nogil=True)
def score_tokens(  # type: ignore[no-untyped-def]
    view, order, words, reach, log10_prob, matched_order, ngram_length, state_length
):
    """Scores each word after those before it.

    Shapes
        view     int64           view.tree_view of the one shard of a set
        order    int   N
        words    (T,)   uint32   word ids, sentence after sentence
        reach    (T,)   uint8    words of the sentence before each, N - 1 at most
        log10_prob  (T,)  float32  filled, like those after it
        matched_order, ngram_length, state_length  (T,) uint8
    Guarantees
        equals ngram.backoff.score bit for bit
    Trusts
        ids below the vocabulary's size; reach[i] <= reach[i - 1] + 1: checked in text.score
    """
    key_bits = view[at.KEY_BITS]
    key_mask = mask_of(key_bits)
    multiplier = view[at.MULTIPLIER]
    word_value = view[at.WORD_VALUE]
    word_bits = view[at.WORD_PROB_BITS] + _1
    word_table = view[at.WORD_PROB_TABLE]
    list_bit = view[at.LIST] << _3
    pair_backoff_bits = view[at.PAIR_BACKOFF_BITS]
    near_bits = view[at.PAIR_PROB_BITS] + np.int64(PAIR_FLAG_BITS)
    value_bits = near_bits + pair_backoff_bits
    pair_table = view[at.PAIR_PROB_TABLE]
    word_entry = view[at.WORD_ENTRY] << _3
    begin_bits = view[at.BEGIN_BITS]
    place_bits = view[at.PLACE_BITS]
    word_backoff_bits = view[at.WORD_BACKOFF_BITS]
    entry_bits = begin_bits + place_bits + word_backoff_bits
    roots = view[at.ROOTS]
    root_key_bits = view[at.ROOT_KEY_BITS]
    bucket_bits = view[at.ROOT_BUCKET_BITS]
    root_bucket = view[at.ROOT_BUCKET]
    root_key = view[at.ROOT_KEY]

    # Row i + 1 belongs to token i of the block, row 0 to the last one of the block before. By
    # length k of the context that ends in the token: its weight and the list of what follows.
    rows = TOKENS + 1
    token = np.zeros((rows, COLUMNS), np.int64)
    lists = np.zeros((rows * DEPTHS, COLUMNS), np.int64)
    weight = np.zeros(rows * DEPTHS, np.float32)
    best = np.zeros(rows, np.float32)
    state = np.zeros(rows, np.int64)
    live = np.zeros(rows, np.int64)
    nodes = np.zeros(rows, np.int64)
    deepest = np.zeros(rows, np.int64)  # longest context that ends in the token and has a weight
    alone = np.zeros(rows, np.int64)

    count = np.int64(len(words))
    block = _0
    while block < count:
        here = min(count - block, np.int64(TOKENS))
        for i in range(here):
            bit = word_entry + np.int64(words[block + i]) * entry_bits
            prefetch(bit >> _3)
            prefetch((bit + entry_bits + begin_bits) >> _3)
        # --- 1. the list of each word
        for i in range(here):
            row = np.int64(i + 1) * DEPTHS
            entry = word_entry + np.int64(words[block + i]) * entry_bits
            first = field(entry, begin_bits)
            size = field(entry + entry_bits, begin_bits) - first
            bit = list_bit + field(entry + begin_bits, place_bits)
            code = field(entry + begin_bits + place_bits, word_backoff_bits)
            step, keys, rest = open_list(bit, size, key_bits)
            token[i + 1, T_FIRST_PAIR] = first
            weight[row + 1] = log10_backoff_of(code, view[at.WORD_BACKOFF_TABLE])
            lists[row + 1, L_BIT] = bit
            lists[row + 1, L_SIZE] = size
            lists[row + 1, L_STEP] = step
            lists[row + 1, L_KEYS] = keys
            lists[row + 1, L_REST] = rest
            weight[row + 2] = np.float32(0.0)
            lists[row + 2, L_SIZE] = _0
            deepest[i + 1] = _1
        # --- 2. where the word should be in the list of the one before
        alive = _0
        for i in range(here):
            before = np.int64(i) * DEPTHS + 1
            token[i + 1, T_NODE] = np.int64(-1)
            token[i + 1, T_FOUND] = _1
            token[i + 1, T_MATCHED] = _1
            if reach[block + i] and lists[before, L_SIZE]:
                key = (np.int64(words[block + i]) * multiplier) & key_mask
                bit = lists[before, L_BIT] + (key >> lists[before, L_REST]) * lists[before, L_STEP]
                prefetch(bit >> _3)
                token[i + 1, T_BIT] = bit
                live[alive] = i
                alive += _1
        # --- 3. the bucket
        for j in range(alive):
            i = live[j]
            before = i * DEPTHS + 1
            step = lists[before, L_STEP]
            low, high = _0, lists[before, L_SIZE]
            if step:
                low, high = two_fields(token[i + 1, T_BIT], step)
            bit = lists[before, L_KEYS] + low * (lists[before, L_REST] + value_bits)
            prefetch(bit >> _3)
            prefetch((bit + (high - low) * (lists[before, L_REST] + value_bits)) >> _3)
            token[i + 1, T_LOW] = low
            token[i + 1, T_COUNT] = high - low
            token[i + 1, T_BIT] = bit
        # --- 4. the pair
        kept = _0
        for j in range(alive):
            i = live[j]
            rest = lists[i * DEPTHS + 1, L_REST]
            key = (np.int64(words[block + i]) * multiplier) & key_mask & mask_of(rest)
            size = token[i + 1, T_COUNT]
            place = find_key(token[i + 1, T_BIT], rest, _0, size, key)
            if place < 0:
                continue
            bit = token[i + 1, T_BIT] + size * rest + place * value_bits
            value = field(bit, near_bits)
            code = field(bit + near_bits, pair_backoff_bits)
            weight[(i + 1) * DEPTHS + 2] = log10_backoff_of(code, view[at.PAIR_BACKOFF_TABLE])
            token[i + 1, T_FOUND] = np.int64(2)
            deepest[i + 1] = np.int64(2)
            state[i + 1] = value & np.int64(STATE_LENGTH)
            token[i + 1, T_RANK] = token[i + 1, T_LOW] + place
            if value & np.int64(BLANK) == 0:
                best[i + 1] = log10_prob_of(value >> np.int64(PAIR_FLAG_BITS), pair_table)
                token[i + 1, T_MATCHED] = np.int64(2)
            if roots and value & np.int64(STORED):
                pair = token[i, T_FIRST_PAIR] + token[i + 1, T_RANK]
                token[i + 1, T_BIT] = pair
                prefetch(root_bucket + (((pair >> root_key_bits) * bucket_bits) >> _3))
                live[kept] = i
                kept += _1
        # --- 5. the 1-grams of words that have nothing longer yet
        alone_count = _0
        for i in range(here):
            if token[i + 1, T_MATCHED] == 1:
                prefetch(word_value + ((np.int64(words[block + i]) * word_bits) >> _3))
                alone[alone_count] = i
                alone_count += _1
        # --- 6. the root that the pair is
        for j in range(kept):
            i = live[j]
            bucket = token[i + 1, T_BIT] >> root_key_bits
            low = get(root_bucket, bucket * bucket_bits, bucket_bits)
            token[i + 1, T_LOW] = low
            token[i + 1, T_COUNT] = get(root_bucket, (bucket + _1) * bucket_bits, bucket_bits)
            prefetch(root_key + ((low * root_key_bits) >> _3))
        level = np.int64(at.LEVEL)
        node_count = _0  # tokens at which a context of k words ends that is a node
        for j in range(kept):
            i = live[j]
            key = token[i + 1, T_BIT] & mask_of(root_key_bits)
            place = find_key(
                root_key << _3,
                root_key_bits,
                token[i + 1, T_LOW],
                token[i + 1, T_COUNT],
                key,
            )
            token[i + 1, T_NODE] = place
            if place >= 0:
                ask_node(view, level, place)
                nodes[node_count] = i
                node_count += _1
        for j in range(alone_count):
            i = alone[j]
            word = np.int64(words[block + i])
            value = get(word_value, word * word_bits, word_bits)
            best[i + 1] = log10_prob_of(value >> _1, word_table)
            if token[i + 1, T_FOUND] == 1:
                state[i + 1] = value & _1
        # --- 7. longer contexts, a length at a time
        k = np.int64(2)
        while k < order:
            below = level + at.LEVEL_PLACES
            # The list of each context of k words.
            for j in range(node_count):
                i = nodes[j]
                n = token[i + 1, T_NODE]
                bit = (view[level + at.N_LIST] << _3) + offset_at(
                    view[level + at.N_PLACE],
                    view[level + at.N_PLACE_BASE],
                    view[level + at.N_PLACE_DELTA],
                    view[level + at.N_PLACE_WIDE],
                    n,
                )
                token[i + 1, T_BIT] = bit
                prefetch(bit >> _3)
                if k > 2:
                    bits = view[level + at.N_BACKOFF_BITS]
                    code = get(view[level + at.N_BACKOFF], n * bits, bits)
                    weight[(i + 1) * DEPTHS + k] = log10_backoff_of(
                        code, view[level + at.N_BACKOFF_TABLE]
                    )
            if node_count == 0 and deepest[0] < k:
                break
            for j in range(node_count):
                i = nodes[j]
                row = np.int64(i + 1) * DEPTHS + k
                bit = token[i + 1, T_BIT]
                shorter = lists[row - 1, L_SIZE]
                size, head = read_head(bit, shorter)
                bit += head
                if size == shorter:
                    # All words of the shorter context follow: ranks are places.
                    step, keys, rest = _0, bit, _0
                else:
                    step, keys, rest = open_list(bit, size, rank_bits(size, shorter))
                lists[row, L_BIT] = bit
                lists[row, L_SIZE] = size
                lists[row, L_STEP] = step
                lists[row, L_KEYS] = keys
                lists[row, L_REST] = rest
                deepest[i + 1] = k
            # The word in the list of the context of k words before it.
            flag_bits = view[level + at.N_FLAG_BITS]
            record = view[level + at.N_PROB_BITS] + flag_bits
            table = view[level + at.N_PROB_TABLE]
            alive = _0
            for i in range(here):
                before = np.int64(i) * DEPTHS + k
                if (
                    token[i + 1, T_FOUND] == k
                    and deepest[i] >= k
                    and reach[block + i] >= k
                    and lists[before, L_SIZE]
                ):
                    bit = (
                        lists[before, L_BIT]
                        + (token[i + 1, T_RANK] >> lists[before, L_REST]) * lists[before, L_STEP]
                    )
                    prefetch(bit >> _3)
                    token[i + 1, T_BIT] = bit
                    live[alive] = i
                    alive += _1
            for j in range(alive):
                i = live[j]
                before = i * DEPTHS + k
                step = lists[before, L_STEP]
                low, high = _0, lists[before, L_SIZE]
                if step:
                    low, high = two_fields(token[i + 1, T_BIT], step)
                bit = lists[before, L_KEYS] + low * (lists[before, L_REST] + record)
                prefetch(bit >> _3)
                token[i + 1, T_LOW] = low
                token[i + 1, T_COUNT] = high - low
                token[i + 1, T_BIT] = bit
            for j in range(alive):
                i = live[j]
                before = i * DEPTHS + k
                bit = token[i + 1, T_BIT]
                if lists[before, L_SIZE] == lists[before - 1, L_SIZE]:
                    place = token[i + 1, T_RANK]
                else:
                    rest = lists[before, L_REST]
                    size = token[i + 1, T_COUNT]
                    place = find_key(bit, rest, _0, size, token[i + 1, T_RANK] & mask_of(rest))
                    bit += size * rest
                if place < 0:
                    continue
                value = field(bit + place * record, record)
                token[i + 1, T_FOUND] = k + _1
                token[i + 1, T_RANK] = token[i + 1, T_LOW] + place
                if flag_bits and value & _1:
                    state[i + 1] = k + _1
                if flag_bits < 2 or value & np.int64(2) == 0:
                    best[i + 1] = log10_prob_of(value >> flag_bits, table)
                    token[i + 1, T_MATCHED] = k + _1
            # Contexts of one word more: only what was found can be one.
            if k + 1 < order:
                kept = _0
                for j in range(node_count):
                    i = nodes[j]
                    if token[i + 1, T_FOUND] != k + 1:
                        continue
                    n = token[i + 1, T_NODE]
                    first = child_at(view, level, n)
                    last = child_at(view, level, n + _1)
                    if last > first:
                        key = (np.int64(words[block + i - k]) * multiplier) & key_mask
                        guess = first + share(key, last - first, key_bits)
                        prefetch(view[below + at.N_KEY] + ((guess * key_bits) >> _3))
                        token[i + 1, T_LOW] = first
                        token[i + 1, T_COUNT] = last
                        token[i + 1, T_BIT] = guess
                        live[kept] = i
                        kept += _1
                node_count = _0
                for j in range(kept):
                    i = live[j]
                    key = (np.int64(words[block + i - k]) * multiplier) & key_mask
                    n = find_near(
                        view[below + at.N_KEY] << _3,
                        key_bits,
                        token[i + 1, T_LOW],
                        token[i + 1, T_COUNT],
                        token[i + 1, T_BIT],
                        key,
                    )
                    if n >= 0:
                        token[i + 1, T_NODE] = n
                        bits = view[below + at.N_BACKOFF_BITS]
                        prefetch(view[below + at.N_BACKOFF] + ((n * bits) >> _3))
                        ask_node(view, below, n)
                        nodes[node_count] = i
                        node_count += _1
            level = below
            k += _1
        # --- 8. the answers
        for i in range(here):
            total = np.float32(0.0)
            before = np.int64(i) * DEPTHS
            longest = min(np.int64(reach[block + i]), deepest[i])
            for k in range(longest, token[i + 1, T_MATCHED] - 1, -1):
                total = np.float32(total + weight[before + k])
            q = block + i
            log10_prob[q] = np.float32(total + best[i + 1])
            matched_order[q] = np.uint8(token[i + 1, T_MATCHED])
            ngram_length[q] = np.uint8(token[i + 1, T_FOUND])
            state_length[q] = np.uint8(state[i + 1])
        # The last token stands before the next block.
        last = here * DEPTHS
        for k in range(DEPTHS):
            weight[k] = weight[last + k]
            for j in range(COLUMNS):
                lists[k, j] = lists[last + k, j]
        token[0, T_FIRST_PAIR] = token[here, T_FIRST_PAIR]
        deepest[0] = deepest[here]
        block += here


@njit(cache=True, nogil=True)
def lay_out(ids, sentence_begin, begin_id, end_id, bos, eos, order, words, reach, scored):  # type: ignore[no-untyped-def]
    """Sentences with their marks, one after the other.

    Shapes
        ids             (n,)      uint32  words of all sentences
        sentence_begin  (S + 1,)  int64   where each begins
        bos, eos        int               1: a mark stands there
        words           (T,)      uint32  filled: T = n + S * (bos + eos)
        reach           (T,)      uint8   filled: see `score_tokens`
        scored          (T,)      uint8   filled: 0 where the mark of a beginning stands
    """
    at_token = np.int64(0)
    for s in range(len(sentence_begin) - 1):
        first = at_token
        if bos:
            words[at_token] = begin_id
            scored[at_token] = np.uint8(0)
            at_token += 1
        for i in range(sentence_begin[s], sentence_begin[s + 1]):
            words[at_token] = ids[i]
            scored[at_token] = np.uint8(1)
            at_token += 1
        if eos:
            words[at_token] = end_id
            scored[at_token] = np.uint8(1)
            at_token += 1
        for i in range(first, at_token):
            reach[i] = np.uint8(min(i - first, order - 1))


@njit(cache=True, nogil=True)
def sum_sentences(log10_prob, sentence_begin, bos, eos, totals):  # type: ignore[no-untyped-def]
    """totals[s] = sum of the scores of sentence s, in double precision."""
    at_token = np.int64(0)
    for s in range(len(totals)):
        length = sentence_begin[s + 1] - sentence_begin[s] + bos + eos
        total = 0.0
        for i in range(at_token + bos, at_token + length):
            total += np.float64(log10_prob[i])
        totals[s] = total
        at_token += length
