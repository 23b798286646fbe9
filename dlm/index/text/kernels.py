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
    DEPTHS,
    ask_node,
    child_at,
    find_near,
    log10_backoff_of,
    log10_prob_of,
    open_list,
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
)
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED

TOKENS = 64  # of a block

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
    weight = np.zeros(rows * DEPTHS, np.float32)
    list_at = np.zeros(rows * DEPTHS, np.int64)
    list_size = np.zeros(rows * DEPTHS, np.int64)
    list_step = np.zeros(rows * DEPTHS, np.int64)
    list_keys = np.zeros(rows * DEPTHS, np.int64)
    list_rest = np.zeros(rows * DEPTHS, np.int64)
    first_pair = np.zeros(rows, np.int64)  # number of the first pair that the token begins
    node = np.full(rows, np.int64(-1), np.int64)  # of the context at hand
    bit_of = np.zeros(rows, np.int64)
    size_of = np.zeros(rows, np.int64)
    low_of = np.zeros(rows, np.int64)
    rank = np.zeros(rows, np.int64)
    best = np.zeros(rows, np.float32)
    matched = np.zeros(rows, np.int64)
    found = np.zeros(rows, np.int64)
    state = np.zeros(rows, np.int64)
    live = np.zeros(rows, np.int64)

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
            first_pair[i + 1] = first
            weight[row + 1] = log10_backoff_of(code, view[at.WORD_BACKOFF_TABLE])
            list_at[row + 1] = bit
            list_size[row + 1] = size
            list_step[row + 1] = step
            list_keys[row + 1] = keys
            list_rest[row + 1] = rest
            for k in range(2, order + 1):
                weight[row + k] = np.float32(0.0)
                list_size[row + k] = _0
        # --- 2. where the word should be in the list of the one before
        alive = _0
        for i in range(here):
            before = np.int64(i) * DEPTHS + 1
            node[i + 1] = np.int64(-1)
            found[i + 1] = _1
            matched[i + 1] = _1
            if reach[block + i] and list_size[before]:
                key = (np.int64(words[block + i]) * multiplier) & key_mask
                bit = list_at[before] + (key >> list_rest[before]) * list_step[before]
                prefetch(bit >> _3)
                bit_of[i + 1] = bit
                live[alive] = i
                alive += _1
        # --- 3. the bucket
        for j in range(alive):
            i = live[j]
            before = i * DEPTHS + 1
            step = list_step[before]
            low, high = _0, list_size[before]
            if step:
                low = field(bit_of[i + 1], step)
                high = field(bit_of[i + 1] + step, step)
            bit = list_keys[before] + low * (list_rest[before] + value_bits)
            prefetch(bit >> _3)
            prefetch((bit + (high - low) * (list_rest[before] + value_bits)) >> _3)
            low_of[i + 1] = low
            size_of[i + 1] = high - low
            bit_of[i + 1] = bit
        # --- 4. the pair
        kept = _0
        for j in range(alive):
            i = live[j]
            rest = list_rest[i * DEPTHS + 1]
            key = (np.int64(words[block + i]) * multiplier) & key_mask & mask_of(rest)
            size = size_of[i + 1]
            place = find_key(bit_of[i + 1], rest, _0, size, key)
            if place < 0:
                continue
            bit = bit_of[i + 1] + size * rest + place * value_bits
            value = field(bit, near_bits)
            code = field(bit + near_bits, pair_backoff_bits)
            weight[(i + 1) * DEPTHS + 2] = log10_backoff_of(code, view[at.PAIR_BACKOFF_TABLE])
            found[i + 1] = np.int64(2)
            state[i + 1] = value & np.int64(STATE_LENGTH)
            rank[i + 1] = low_of[i + 1] + place
            if value & np.int64(BLANK) == 0:
                best[i + 1] = log10_prob_of(value >> np.int64(PAIR_FLAG_BITS), pair_table)
                matched[i + 1] = np.int64(2)
            if roots and value & np.int64(STORED):
                pair = first_pair[i] + rank[i + 1]
                bit_of[i + 1] = pair
                prefetch(root_bucket + (((pair >> root_key_bits) * bucket_bits) >> _3))
                live[kept] = i
                kept += _1
        # --- 5. the 1-grams of words that have nothing longer yet
        for i in range(here):
            if matched[i + 1] == 1:
                prefetch(word_value + ((np.int64(words[block + i]) * word_bits) >> _3))
        # --- 6. the root that the pair is
        for j in range(kept):
            i = live[j]
            bucket = bit_of[i + 1] >> root_key_bits
            low = get(root_bucket, bucket * bucket_bits, bucket_bits)
            low_of[i + 1] = low
            size_of[i + 1] = get(root_bucket, (bucket + _1) * bucket_bits, bucket_bits)
            prefetch(root_key + ((low * root_key_bits) >> _3))
        level = np.int64(at.LEVEL)
        for j in range(kept):
            i = live[j]
            key = bit_of[i + 1] & mask_of(root_key_bits)
            place = find_key(root_key << _3, root_key_bits, low_of[i + 1], size_of[i + 1], key)
            node[i + 1] = place
            if place >= 0:
                ask_node(view, level, place)
        for i in range(here):
            if matched[i + 1] == 1:
                word = np.int64(words[block + i])
                value = get(word_value, word * word_bits, word_bits)
                best[i + 1] = log10_prob_of(value >> _1, word_table)
                if found[i + 1] == 1:
                    state[i + 1] = value & _1
        # --- 7. longer contexts, a length at a time
        k = np.int64(2)
        while k < order:
            below = level + at.LEVEL_PLACES
            any_node = False
            # The list of each context of k words; where its children are.
            for i in range(here):
                n = node[i + 1]
                if n >= 0:
                    any_node = True
                    bit = (view[level + at.N_LIST] << _3) + offset_at(
                        view[level + at.N_PLACE],
                        view[level + at.N_PLACE_BASE],
                        view[level + at.N_PLACE_DELTA],
                        view[level + at.N_PLACE_WIDE],
                        n,
                    )
                    bit_of[i + 1] = bit
                    prefetch(bit >> _3)
                    if k > 2:
                        bits = view[level + at.N_BACKOFF_BITS]
                        code = get(view[level + at.N_BACKOFF], n * bits, bits)
                        weight[(i + 1) * DEPTHS + k] = log10_backoff_of(
                            code, view[level + at.N_BACKOFF_TABLE]
                        )
            if not any_node and list_size[k] == 0:
                break
            for i in range(here):
                if node[i + 1] >= 0:
                    row = np.int64(i + 1) * DEPTHS + k
                    bit = bit_of[i + 1]
                    shorter = list_size[row - 1]
                    size, head = read_head(bit, shorter)
                    bit += head
                    if size == shorter:
                        # All words of the shorter context follow: ranks are places.
                        step, keys, rest = _0, bit, _0
                    else:
                        step, keys, rest = open_list(bit, size, rank_bits(size, shorter))
                    list_at[row] = bit
                    list_size[row] = size
                    list_step[row] = step
                    list_keys[row] = keys
                    list_rest[row] = rest
            # The word in the list of the context of k words before it.
            flag_bits = view[level + at.N_FLAG_BITS]
            record = view[level + at.N_PROB_BITS] + flag_bits
            table = view[level + at.N_PROB_TABLE]
            alive = _0
            for i in range(here):
                before = np.int64(i) * DEPTHS + k
                if found[i + 1] == k and reach[block + i] >= k and list_size[before]:
                    bit = list_at[before] + (rank[i + 1] >> list_rest[before]) * list_step[before]
                    prefetch(bit >> _3)
                    bit_of[i + 1] = bit
                    live[alive] = i
                    alive += _1
            for j in range(alive):
                i = live[j]
                before = i * DEPTHS + k
                step = list_step[before]
                low, high = _0, list_size[before]
                if step:
                    low = field(bit_of[i + 1], step)
                    high = field(bit_of[i + 1] + step, step)
                bit = list_keys[before] + low * (list_rest[before] + record)
                prefetch(bit >> _3)
                low_of[i + 1] = low
                size_of[i + 1] = high - low
                bit_of[i + 1] = bit
            for j in range(alive):
                i = live[j]
                before = i * DEPTHS + k
                bit = bit_of[i + 1]
                if list_size[before] == list_size[before - 1]:
                    place = rank[i + 1]
                else:
                    rest = list_rest[before]
                    size = size_of[i + 1]
                    place = find_key(bit, rest, _0, size, rank[i + 1] & mask_of(rest))
                    bit += size * rest
                if place < 0:
                    continue
                value = field(bit + place * record, record)
                found[i + 1] = k + _1
                rank[i + 1] = low_of[i + 1] + place
                if flag_bits and value & _1:
                    state[i + 1] = k + _1
                if flag_bits < 2 or value & np.int64(2) == 0:
                    best[i + 1] = log10_prob_of(value >> flag_bits, table)
                    matched[i + 1] = k + _1
            # Contexts of one word more: only what was found can be one.
            if k + 1 < order:
                kept = _0
                for i in range(here):
                    n = node[i + 1]
                    if n >= 0 and found[i + 1] == k + 1:
                        first = child_at(view, level, n)
                        last = child_at(view, level, n + _1)
                        if last > first:
                            key = (np.int64(words[block + i - k]) * multiplier) & key_mask
                            guess = first + ((key * (last - first)) >> key_bits)
                            prefetch(view[below + at.N_KEY] + ((guess * key_bits) >> _3))
                            low_of[i + 1] = first
                            size_of[i + 1] = last
                            bit_of[i + 1] = guess
                            live[kept] = i
                            kept += _1
                    node[i + 1] = np.int64(-1)
                for j in range(kept):
                    i = live[j]
                    key = (np.int64(words[block + i - k]) * multiplier) & key_mask
                    n = find_near(
                        view[below + at.N_KEY] << _3,
                        key_bits,
                        low_of[i + 1],
                        size_of[i + 1],
                        bit_of[i + 1],
                        key,
                    )
                    node[i + 1] = n
                    if n >= 0:
                        bits = view[below + at.N_BACKOFF_BITS]
                        prefetch(view[below + at.N_BACKOFF] + ((n * bits) >> _3))
                        ask_node(view, below, n)
            level = below
            k += _1
        # --- 8. the answers
        for i in range(here):
            total = np.float32(0.0)
            before = np.int64(i) * DEPTHS
            for k in range(np.int64(reach[block + i]), matched[i + 1] - 1, -1):
                total = np.float32(total + weight[before + k])
            q = block + i
            log10_prob[q] = np.float32(total + best[i + 1])
            matched_order[q] = np.uint8(matched[i + 1])
            ngram_length[q] = np.uint8(found[i + 1])
            state_length[q] = np.uint8(state[i + 1])
        # The last token stands before the next block.
        last = here * DEPTHS
        for k in range(DEPTHS):
            weight[k] = weight[last + k]
            list_at[k] = list_at[last + k]
            list_size[k] = list_size[last + k]
            list_step[k] = list_step[last + k]
            list_keys[k] = list_keys[last + k]
            list_rest[k] = list_rest[last + k]
        first_pair[0] = first_pair[here]
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
