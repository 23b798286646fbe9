"""What follows a context: the words of its list, and any word's answer from these.

Plain searches, one after another: a block is read once, its words are queried many times.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import rank_bits
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED
from dlm.index.search.step_kernels import (
    address_of,
    alone,
    below,
    find_child,
    find_pair,
    find_root,
    first_level,
    list_after,
    low_of,
    node_backoff,
    node_list,
    open_list,
    open_ranks,
    pair_backoff,
    pair_prob,
    record_bits,
    roots_of,
    word_backoff,
)
from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import (
    field,
    two_fields,
)

_0, _1, _2 = np.int64(0), np.int64(1), np.int64(2)


@inlined
def root_of(low, roots, older, word):  # type: ignore[no-untyped-def]
    """The node of the context (older, word), -1 where nothing is stored under it."""
    first, size, bit = list_after(low, older)
    place, value = find_pair(low, size, bit, word)
    if place < 0 or field(value, np.int64(PAIR_FLAG_BITS)) & np.int64(STORED) == 0:
        return np.int64(-1)
    return find_root(roots, first + place)


@inlined
def inverse_of(multiplier):  # type: ignore[no-untyped-def]
    """The inverse of an odd number modulo a power of two, which turns keys into words.

    By Newton's method: each step doubles the bits that are right, from three on.
    """
    inverse = multiplier
    for _ in range(5):
        inverse = inverse * (_2 - multiplier * inverse)
    return inverse


@kernel("int64[:], uint8[:], uint32[:], out int64[:], out uint32[:], out float32[:]")
def find_blocks(view, context_lengths, context_words, nodes, totals, log10_backoffs):  # type: ignore[no-untyped-def]
    """The root of each context, the words that follow it, and the weights of its longer suffixes.

    Shapes  view  of view.tree_view;  context_lengths (C,), two or more each;  context_words (sum,)
            nodes, totals   (C,) filled: -1 and 0 where nothing is stored
            log10_backoffs  (sum(context_lengths - 2),) filled: of each context the weights of its
                            last three words, four, ..., all; 0 where there is none
    Trusts  as `kernels.score_groups`; the shard owns the contexts
    """
    address = address_of(view)
    low, roots = low_of(address), roots_of(address)
    end = _0
    out = _0
    for c in range(len(context_lengths)):
        length = np.int64(context_lengths[c])
        end += length
        log10_backoffs[out : out + length - 2] = np.float32(0.0)
        last = np.int64(context_words[end - 1])
        node = root_of(low, roots, np.int64(context_words[end - 2]), last)
        nodes[c] = node
        totals[c] = np.uint32(0)
        if node >= 0:
            level = first_level(address)
            _, parents, _ = list_after(low, last)
            size, _, _, _, _ = open_ranks(node_list(level, node), parents)
            totals[c] = np.uint32(size)
            for k in range(3, length + 1):
                node = find_child(low, level, node, np.int64(context_words[end - k]))
                if node < 0:
                    break
                level = below(level)
                log10_backoffs[out + k - 3] = node_backoff(level, node)
        out += length - 2
    return 0


@inlined
def words_after(view, last, node, words):  # type: ignore[no-untyped-def]
    """The words (n,) that follow a root whose last word is `last`, by rising key."""
    low = low_of(view)
    inverse = inverse_of(low.multiplier)
    _, parents, parent_bit = list_after(low, last)
    step, keys, rest = open_list(parent_bit, parents, low.key_bits)
    buckets = _1 << (low.key_bits - rest) if step else _1

    level = first_level(view)
    size, bit, own_step, own_keys, own_rest = open_ranks(node_list(level, node), parents)
    _, record = record_bits(level)
    own_buckets = _1 << (rank_bits(size, parents) - own_rest) if own_step else _1
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
                after, until = parent_bucket + _1, min(parent_bucket + np.int64(5), buckets)
                if field(parent_bit + until * step, step) <= rank:
                    after, until = until, buckets
                while until - after > 1:
                    middle = (after + until) >> _1
                    if field(parent_bit + middle * step, step) <= rank:
                        after = middle
                    else:
                        until = middle
                parent_bucket = after
                begin, end = two_fields(parent_bit + parent_bucket * step, step)
            key = field(keys + begin * (rest + low.pair_bits) + (rank - begin) * rest, rest)
            key |= parent_bucket << rest
            words[at_word] = np.uint32((key * inverse) & low.key_mask)
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

    Shapes   nodes, totals (C,) as `find_blocks` fills them;  skips (C,)
             counts (C,) filled: how many stand in `words`;  words (n,) filled
    Returns  the sum of the counts, at most n
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
        words_after(address_of(view), np.int64(context_words[end - 1]), nodes[c], after)
        after.sort()
        for i in range(count):
            words[given + i] = after[skip + i]
        given += count
    return given


@kernel("int64[:], uint8[:], uint32[:], float32[:], out float32[:, :]")
def sum_backoffs(view, context_lengths, context_words, log10_backoffs, sums):  # type: ignore[no-untyped-def]
    """What is added to the 1-gram and to the 2-gram of a word that follows no longer suffix.

    Shapes  view            the low orders are enough
            log10_backoffs  as `find_blocks` fills them, of contexts of three words or more
            sums            (C, 2) filled: the weights added from the longest context down to one
                            word; down to two
    """
    low = low_of(address_of(view))
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
            _, size, bit = list_after(low, np.int64(context_words[end - 2]))
            place, value = find_pair(low, size, bit, np.int64(context_words[end - 1]))
            weight = pair_backoff(low, value) if place >= 0 else np.float32(0.0)
            total = np.float32(total + weight)
        sums[c, 1] = total
        if length >= 1:
            total = np.float32(total + word_backoff(low, np.int64(context_words[end - 1])))
        sums[c, 0] = total
    return 0


@inlined
def find_word(words, word):  # type: ignore[no-untyped-def]
    low, high = _0, np.int64(len(words))
    while low < high:
        middle = (low + high) >> _1
        if words[middle] < word:
            low = middle + _1
        else:
            high = middle
    return low if low < len(words) and words[low] == word else np.int64(-1)


@inlined
def list_of(low, last):  # type: ignore[no-untyped-def]
    """Size and bit of the list of a context's last word; no list where `last` is -1."""
    if last < 0:
        return _0, _0
    _, size, bit = list_after(low, last)
    return size, bit


@inlined
def score_low(low, size, bit, sums, word):  # type: ignore[no-untyped-def]
    """Score, matched order, n-gram length and state length of a word that only the low orders
    have, by the list of `size` at `bit` of the context's last word."""
    place, near = np.int64(-1), _0
    if size:
        place, value = find_pair(low, size, bit, word)
        if place >= 0:
            near = field(value, low.near_bits)
            if near & np.int64(BLANK) == 0:
                score = np.float32(sums[1] + pair_prob(low, near))
                return score, _2, _2, near & np.int64(STATE_LENGTH)
    prob, reaches = alone(low, word)
    if place >= 0:
        return np.float32(sums[0] + prob), _1, _2, near & np.int64(STATE_LENGTH)
    return np.float32(sums[0] + prob), _1, _1, reaches


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

    Shapes      view   the low orders are enough;  last  the context's last word, -1 where it has
                       none
                sums   (2,)  of the context, as `sum_backoffs` gives them
                words  (n,) rising, and their answers: all words stored after the last two
                asked  (Q,);  out_... (Q,) filled
    Guarantees  as `kernels.score_groups`, from what it answered to `words`
    Trusts      ids below the vocabulary's size
    """
    low = low_of(address_of(view))
    size, bit = list_of(low, last)
    for q in range(len(asked)):
        place = find_word(words, asked[q])
        if place >= 0:
            out_prob[q] = log10_prob[place]
            out_matched[q] = matched_order[place]
            out_ngram[q] = ngram_length[place]
            out_state[q] = state_length[place]
        else:
            prob, matched, ngram, state = score_low(low, size, bit, sums, np.int64(asked[q]))
            out_prob[q] = prob
            out_matched[q] = np.uint8(matched)
            out_ngram[q] = np.uint8(ngram)
            out_state[q] = np.uint8(state)
    return 0


@kernel("int64[:], int64, float32[:], uint32[:], float32[:], uint8[:], int64")
def score_one_after(view, last, sums, words, log10_prob, state_length, word):  # type: ignore[no-untyped-def]
    """`score_after` of one word: its score and its state length."""
    place = find_word(words, np.uint32(word))
    if place >= 0:
        return log10_prob[place], np.int64(state_length[place])
    low = low_of(address_of(view))
    size, bit = list_of(low, last)
    prob, _, _, state = score_low(low, size, bit, sums, word)
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
    """`score_after` for every word of the vocabulary by id, each list read once; out_... (V,)."""
    low = low_of(address_of(view))
    for w in range(len(out_prob)):
        prob, reaches = alone(low, np.int64(w))
        out_prob[w] = np.float32(sums[0] + prob)
        out_matched[w] = np.uint8(1)
        out_ngram[w] = np.uint8(1)
        out_state[w] = np.uint8(reaches)
    if last >= 0:
        inverse = inverse_of(low.multiplier)
        _, size, bit = list_after(low, last)
        step, keys, rest = open_list(bit, size, low.key_bits)
        buckets = _1 << (low.key_bits - rest) if step else _1
        for bucket in range(buckets):
            begin, end = _0, size
            if step:
                begin, end = two_fields(bit + bucket * step, step)
            here = keys + begin * (rest + low.pair_bits)
            values = here + (end - begin) * rest
            for i in range(end - begin):
                key = (np.int64(bucket) << rest) | field(here + i * rest, rest)
                w = (key * inverse) & low.key_mask
                near = field(values + i * low.pair_bits, low.near_bits)
                out_ngram[w] = np.uint8(2)
                out_state[w] = np.uint8(near & np.int64(STATE_LENGTH))
                if near & np.int64(BLANK) == 0:
                    out_prob[w] = np.float32(sums[1] + pair_prob(low, near))
                    out_matched[w] = np.uint8(2)
    for i in range(len(words)):
        w = np.int64(words[i])
        out_prob[w] = log10_prob[i]
        out_matched[w] = matched_order[i]
        out_ngram[w] = ngram_length[i]
        out_state[w] = state_length[i]
    return 0
