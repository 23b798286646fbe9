"""All that follows a context: the words of its list, and any word's answer from these and the low
orders.

Plain searches, one after another: a block is read once, its words are queried many times.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import (
    field,
    find_key,
    get,
    mask_of,
    offset_at,
    rank_bits,
    read_head,
    two_fields,
)
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED
from dlm.index.search import view as at
from dlm.index.search.kernels import child_at, log10_backoff_of, log10_prob_of, open_list
from dlm.jit import inlined, kernel

_0, _1, _3 = np.int64(0), np.int64(1), np.int64(3)


@inlined
def entry_of(view, word):  # type: ignore[no-untyped-def]
    """Bit of the entry of `word`, the number of its first pair, its pairs, the bit of its list."""
    entry_bits = view[at.BEGIN_BITS] + view[at.PLACE_BITS] + view[at.WORD_BACKOFF_BITS]
    entry = (view[at.WORD_ENTRY] << _3) + word * entry_bits
    first = field(entry, view[at.BEGIN_BITS])
    size = field(entry + entry_bits, view[at.BEGIN_BITS]) - first
    bit = (view[at.LIST] << _3) + field(entry + view[at.BEGIN_BITS], view[at.PLACE_BITS])
    return entry, first, size, bit


@inlined
def pair_bits(view):  # type: ignore[no-untyped-def]
    """Bits of the value beside a 2-gram's key."""
    return np.int64(PAIR_FLAG_BITS) + view[at.PAIR_PROB_BITS] + view[at.PAIR_BACKOFF_BITS]


@inlined
def find_pair(view, size, bit, word):  # type: ignore[no-untyped-def]
    """Place of `word` in the list of `size` at `bit`, and the bit of its value; -1 for no place."""
    value_bits = pair_bits(view)
    key_bits = view[at.KEY_BITS]
    key = (word * view[at.MULTIPLIER]) & mask_of(key_bits)
    step, keys, rest = open_list(bit, size, key_bits)
    low, high = _0, size
    if step:
        low, high = two_fields(bit + (key >> rest) * step, step)
    bucket = keys + low * (rest + value_bits)
    place = find_key(bucket, rest, _0, high - low, key & mask_of(rest))
    if place < 0:
        return place, _0
    return low + place, bucket + (high - low) * rest + place * value_bits


@inlined
def word_backoff(view, word):  # type: ignore[no-untyped-def]
    """The weight of a word as a context."""
    entry, _, _, _ = entry_of(view, word)
    bits = view[at.WORD_BACKOFF_BITS]
    code = field(entry + view[at.BEGIN_BITS] + view[at.PLACE_BITS], bits)
    return log10_backoff_of(code, view[at.WORD_BACKOFF_TABLE])


@inlined
def find_root(view, older, word):  # type: ignore[no-untyped-def]
    """The node of the context (older, word), -1 where there is none."""
    _, first, size, bit = entry_of(view, older)
    place, value = find_pair(view, size, bit, word)
    if place < 0 or field(value, np.int64(PAIR_FLAG_BITS)) & np.int64(STORED) == 0:
        return np.int64(-1)
    pair = first + place
    bits = view[at.ROOT_BUCKET_BITS]
    bucket = pair >> view[at.ROOT_KEY_BITS]
    low = get(view[at.ROOT_BUCKET], bucket * bits, bits)
    high = get(view[at.ROOT_BUCKET], (bucket + _1) * bits, bits)
    target = pair & mask_of(view[at.ROOT_KEY_BITS])
    return find_key(view[at.ROOT_KEY] << _3, view[at.ROOT_KEY_BITS], low, high, target)


@inlined
def open_root(view, node, parent_size):  # type: ignore[no-untyped-def]
    """Words that follow a root, and the bit of its list after the head.

    Args
        parent_size  pairs that begin with the root's last word
    """
    level = np.int64(at.LEVEL)
    bit = (view[level + at.N_LIST] << _3) + offset_at(
        view[level + at.N_PLACE],
        view[level + at.N_PLACE_BASE],
        view[level + at.N_PLACE_DELTA],
        view[level + at.N_PLACE_WIDE],
        node,
    )
    size, head = read_head(bit, parent_size)
    return size, bit + head


@kernel("int64[:], uint8[:], uint32[:], out int64[:], out uint32[:], out float32[:]")
def find_blocks(view, context_lengths, context_words, nodes, totals, log10_backoffs):  # type: ignore[no-untyped-def]
    """The root of each context, the words that follow it, and the weights of its longer suffixes.

    Shapes
        view            int64  view.tree_view
        context_lengths (C,) uint8, two or more each; context_words (sum,) uint32
        nodes, totals   (C,) filled: -1 and 0 where nothing is stored
        log10_backoffs  (sum(context_lengths - 2),) float32 filled: of each context the weights of
                        its last three words, four, ..., all; 0 where there is none
    Trusts  as `kernels.score_groups`; the shard owns the contexts
    """
    key_bits = view[at.KEY_BITS]
    end = _0
    out = _0
    for c in range(len(context_lengths)):
        length = np.int64(context_lengths[c])
        end += length
        log10_backoffs[out : out + length - 2] = np.float32(0.0)
        last = np.int64(context_words[end - 1])
        node = find_root(view, np.int64(context_words[end - 2]), last)
        nodes[c] = node
        totals[c] = np.uint32(0)
        if node >= 0:
            _, _, parent_size, _ = entry_of(view, last)
            size, _ = open_root(view, node, parent_size)
            totals[c] = np.uint32(size)
            level = np.int64(at.LEVEL)
            for k in range(3, length + 1):
                first = child_at(view, level, node)
                beyond = child_at(view, level, node + _1)
                level += np.int64(at.LEVEL_PLACES)
                key = (np.int64(context_words[end - k]) * view[at.MULTIPLIER]) & mask_of(key_bits)
                # Keys rise among the children of a node.
                keys = view[level + at.N_KEY] << _3
                low, high = first, beyond
                while high - low > 8:
                    middle = (low + high) >> _1
                    if field(keys + middle * key_bits, key_bits) <= key:
                        low = middle
                    else:
                        high = middle
                node = find_key(keys, key_bits, low, high, key)
                if node < 0:
                    break
                bits = view[level + at.N_BACKOFF_BITS]
                code = get(view[level + at.N_BACKOFF], node * bits, bits)
                log10_backoffs[out + k - 3] = log10_backoff_of(
                    code, view[level + at.N_BACKOFF_TABLE]
                )
        out += length - 2
    return 0


@inlined
def words_after(view, last, node, words):  # type: ignore[no-untyped-def]
    """The words that follow a root whose last word is `last`, by rising key.

    Shapes  words (n,) uint32, n as `find_blocks` said
    """
    key_bits = view[at.KEY_BITS]
    multiplier = view[at.MULTIPLIER]
    mask = mask_of(key_bits)
    # The inverse of an odd number modulo a power of two, by Newton's method: each step doubles the
    # bits that are right, from three on.
    inverse = multiplier
    for _ in range(5):
        inverse = inverse * (np.int64(2) - multiplier * inverse)
    _, _, parents, parent_bit = entry_of(view, last)
    value_bits = pair_bits(view)
    step, keys, rest = open_list(parent_bit, parents, key_bits)
    buckets = _1 << (key_bits - rest) if step else _1

    size, bit = open_root(view, node, parents)
    level = np.int64(at.LEVEL)
    record = view[level + at.N_PROB_BITS] + view[level + at.N_FLAG_BITS]
    width = rank_bits(size, parents)
    own_step, own_keys, own_rest = open_list(bit, size, width)
    own_buckets = _1 << (width - own_rest) if own_step else _1
    whole = size == parents

    parent_bucket = _0  # the bucket of the parent list that holds the rank, and its entries
    begin, end = _0, parents
    if step:
        begin, end = two_fields(parent_bit, step)
    at_word = _0
    for own in range(_1 if whole else own_buckets):
        first, beyond = _0, size
        if own_step and not whole:
            first, beyond = two_fields(bit + own * own_step, own_step)
        here = own_keys + first * (own_rest + record)
        for i in range(first, beyond):
            if whole:
                rank = i
            else:
                rank = (own << own_rest) | field(here + (i - first) * own_rest, own_rest)
            if rank >= end:
                # Ranks rise: mostly the next bucket or one near it; else it is searched for.
                low, high = parent_bucket + _1, min(parent_bucket + np.int64(5), buckets)
                if field(parent_bit + high * step, step) <= rank:
                    low, high = high, buckets
                while high - low > 1:
                    middle = (low + high) >> _1
                    if field(parent_bit + middle * step, step) <= rank:
                        low = middle
                    else:
                        high = middle
                parent_bucket = low
                begin, end = two_fields(parent_bit + parent_bucket * step, step)
            key = field(keys + begin * (rest + value_bits) + (rank - begin) * rest, rest)
            key |= parent_bucket << rest
            words[at_word] = np.uint32((key * inverse) & mask)
            at_word += _1
    return 0


@kernel(
    "int64[:], uint8[:], uint32[:], int64[:], uint32[:], uint32[:], int64, out uint32[:], "
    "out uint32[:]"
)
def list_blocks(  # type: ignore[no-untyped-def]
    view, context_lengths, context_words, nodes, totals, skips, most, counts, words
):
    """The words that follow each context, rising, but the first `skips` of each; `most` in all.

    Shapes
        nodes, totals   (C,) as `find_blocks` fills them; skips (C,) uint32
        counts          (C,) uint32 filled: how many stand in `words`
        words           (n,) uint32 filled, n at least the sum of the counts
    Returns  that sum
    """
    end = _0
    given = _0
    for c in range(len(context_lengths)):
        end += np.int64(context_lengths[c])
        total = np.int64(totals[c])
        skip = min(np.int64(skips[c]), total)
        count = min(total - skip, most - given)
        counts[c] = np.uint32(count)
        if count == 0:
            continue
        after = np.empty(total, np.uint32)
        words_after(view, np.int64(context_words[end - 1]), nodes[c], after)
        after.sort()
        for i in range(count):
            words[given + i] = after[skip + i]
        given += count
    return given


@kernel("int64[:], uint8[:], uint32[:], float32[:], out float32[:, :]")
def sum_backoffs(view, context_lengths, context_words, log10_backoffs, sums):  # type: ignore[no-untyped-def]
    """What is added to the 1-gram and to the 2-gram of a word that follows no longer suffix.

    Shapes
        view            int64  the low orders are enough
        log10_backoffs  as `find_blocks` fills them, of contexts of three words or more
        sums            (C, 2) float32 filled: the weights added from the longest context down to
                        one word; down to two
    """
    end = _0
    given = _0
    for c in range(len(context_lengths)):
        length = np.int64(context_lengths[c])
        end += length
        total = np.float32(0.0)
        for k in range(length, 2, -1):
            total = np.float32(total + log10_backoffs[given + k - 3])
        given += max(length - 2, _0)
        if length >= 2:
            older = np.int64(context_words[end - 2])
            _, _, size, bit = entry_of(view, older)
            place, value = find_pair(view, size, bit, np.int64(context_words[end - 1]))
            weight = np.float32(0.0)
            if place >= 0:
                value += np.int64(PAIR_FLAG_BITS) + view[at.PAIR_PROB_BITS]
                code = field(value, view[at.PAIR_BACKOFF_BITS])
                weight = log10_backoff_of(code, view[at.PAIR_BACKOFF_TABLE])
            total = np.float32(total + weight)
        sums[c, 1] = total
        if length >= 1:
            total = np.float32(total + word_backoff(view, np.int64(context_words[end - 1])))
        sums[c, 0] = total
    return 0


@inlined
def find_word(words, word):  # type: ignore[no-untyped-def]
    """Place of `word` among rising `words`, -1 where it is not."""
    low, high = _0, np.int64(len(words))
    while low < high:
        middle = (low + high) >> _1
        if words[middle] < word:
            low = middle + _1
        else:
            high = middle
    return low if low < len(words) and words[low] == word else np.int64(-1)


@inlined
def score_low(view, size, bit, sums, word):  # type: ignore[no-untyped-def]
    """Score, matched order, n-gram length and state length of a word that only the low orders have,
    by the list of `size` at `bit` of the context's last word."""
    place, value = np.int64(-1), _0
    if size:
        place, value = find_pair(view, size, bit, word)
    if place >= 0:
        value = field(value, np.int64(PAIR_FLAG_BITS) + view[at.PAIR_PROB_BITS])
        if value & np.int64(BLANK) == 0:
            prob = log10_prob_of(value >> np.int64(PAIR_FLAG_BITS), view[at.PAIR_PROB_TABLE])
            return (
                np.float32(sums[1] + prob),
                np.int64(2),
                np.int64(2),
                value & np.int64(STATE_LENGTH),
            )
    word_bits = view[at.WORD_PROB_BITS] + _1
    alone = get(view[at.WORD_VALUE], word * word_bits, word_bits)
    prob = log10_prob_of(alone >> _1, view[at.WORD_PROB_TABLE])
    if place >= 0:
        return np.float32(sums[0] + prob), _1, np.int64(2), value & np.int64(STATE_LENGTH)
    return np.float32(sums[0] + prob), _1, _1, alone & _1


@kernel(
    "int64[:], int64, float32[:], uint32[:], float32[:], uint8[:], uint8[:], uint8[:], uint32[:], "
    "out float32[:], out uint8[:], out uint8[:], out uint8[:]"
)
def score_after(  # type: ignore[no-untyped-def]
    view,
    last,
    sums,
    words,
    log10_prob,
    matched_order,
    ngram_length,
    state_length,
    asked,
    out_prob,
    out_matched,
    out_ngram,
    out_state,
):
    """Answers for any words after one context.

    Shapes
        view    int64  the low orders are enough
        last    the last word of the context, -1 where it has none
        sums    (2,) float32  of the context, as `sum_backoffs` gives them
        words   (n,) uint32, rising, and their answers: all words stored after the last two
        asked   (Q,) uint32; out_... (Q,) filled
    Guarantees  as `kernels.score_groups`, from what it answered to `words`
    Trusts  ids below the vocabulary's size
    """
    size = _0
    bit = _0
    if last >= 0:
        _, _, size, bit = entry_of(view, last)
    for q in range(len(asked)):
        place = find_word(words, asked[q])
        if place >= 0:
            out_prob[q] = log10_prob[place]
            out_matched[q] = matched_order[place]
            out_ngram[q] = ngram_length[place]
            out_state[q] = state_length[place]
        else:
            prob, matched, ngram, state = score_low(view, size, bit, sums, np.int64(asked[q]))
            out_prob[q] = prob
            out_matched[q] = np.uint8(matched)
            out_ngram[q] = np.uint8(ngram)
            out_state[q] = np.uint8(state)
    return 0


@kernel("int64[:], int64, float32[:], uint32[:], float32[:], uint8[:], int64")
def score_one_after(view, last, sums, words, log10_prob, state_length, word):  # type: ignore[no-untyped-def]
    """`score_after` of one word.

    Returns  its score and its state length
    """
    place = find_word(words, np.uint32(word))
    if place >= 0:
        return log10_prob[place], np.int64(state_length[place])
    size = _0
    bit = _0
    if last >= 0:
        _, _, size, bit = entry_of(view, last)
    prob, _, _, state = score_low(view, size, bit, sums, word)
    return prob, state


@kernel(
    "int64[:], int64, float32[:], uint32[:], float32[:], uint8[:], uint8[:], uint8[:], "
    "out float32[:], out uint8[:], out uint8[:], out uint8[:]"
)
def score_all_after(  # type: ignore[no-untyped-def]
    view,
    last,
    sums,
    words,
    log10_prob,
    matched_order,
    ngram_length,
    state_length,
    out_prob,
    out_matched,
    out_ngram,
    out_state,
):
    """`score_after` for every word of the vocabulary, in the order of ids.

    Shapes  out_... (V,) filled
    Cost    a load for each word, then each list once
    """
    word_bits = view[at.WORD_PROB_BITS] + _1
    bit = view[at.WORD_VALUE] << _3
    for w in range(len(out_prob)):
        value = field(bit + np.int64(w) * word_bits, word_bits)
        prob = log10_prob_of(value >> _1, view[at.WORD_PROB_TABLE])
        out_prob[w] = np.float32(sums[0] + prob)
        out_matched[w] = np.uint8(1)
        out_ngram[w] = np.uint8(1)
        out_state[w] = np.uint8(value & _1)
    if last >= 0:
        key_bits = view[at.KEY_BITS]
        multiplier = view[at.MULTIPLIER]
        mask = mask_of(key_bits)
        inverse = multiplier
        for _ in range(5):
            inverse = inverse * (np.int64(2) - multiplier * inverse)
        value_bits = pair_bits(view)
        near_bits = np.int64(PAIR_FLAG_BITS) + view[at.PAIR_PROB_BITS]
        _, _, size, bit = entry_of(view, last)
        step, keys, rest = open_list(bit, size, key_bits)
        buckets = _1 << (key_bits - rest) if step else _1
        for bucket in range(buckets):
            begin, end = _0, size
            if step:
                begin, end = two_fields(bit + bucket * step, step)
            here = keys + begin * (rest + value_bits)
            values = here + (end - begin) * rest
            for i in range(end - begin):
                key = (np.int64(bucket) << rest) | field(here + i * rest, rest)
                w = (key * inverse) & mask
                value = field(values + i * value_bits, near_bits)
                out_ngram[w] = np.uint8(2)
                out_state[w] = np.uint8(value & np.int64(STATE_LENGTH))
                if value & np.int64(BLANK) == 0:
                    prob = log10_prob_of(
                        value >> np.int64(PAIR_FLAG_BITS), view[at.PAIR_PROB_TABLE]
                    )
                    out_prob[w] = np.float32(sums[1] + prob)
                    out_matched[w] = np.uint8(2)
    for i in range(len(words)):
        w = np.int64(words[i])
        out_prob[w] = log10_prob[i]
        out_matched[w] = matched_order[i]
        out_ngram[w] = ngram_length[i]
        out_state[w] = state_length[i]
    return 0
