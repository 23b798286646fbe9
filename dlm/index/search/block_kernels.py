"""Kernels that list the words stored after a context, and score any word from such a list.

The searches run one after another, without prefetching: a block is read once but queried often.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.record_kernels import find_child, get_words, open_record, words_bits
from dlm.index.search import view as at
from dlm.index.search.step_kernels import (
    address_of,
    alone,
    below,
    find_pair,
    find_root,
    first_level,
    is_stored,
    key_of,
    keys_of,
    list_after,
    log10_weight_of,
    low_of,
    open_list,
    pair_prob,
    pair_state,
    record_bits,
    word_backoff,
)
from dlm.jit import inlined, kernel
from dlm.ngram.kernels import NO_RANK
from dlm.ngram.memory_kernels import field, mirrored, of, two_fields

_0, _1, _2 = np.int64(0), np.int64(1), np.int64(2)


@kernel("int64[:], uint8[:], uint32[:], uint32[:], out int64[:], out uint32[:], out float32[:]")
def find_blocks(view, context_lengths, context_words, pairs, nodes, totals, log10_backoffs):  # type: ignore[no-untyped-def]
    """Finds the root of each context, how many words follow it, and the weights of its suffixes.

    Shapes  view  of view.tree_view;  context_lengths (C,), two or more each;  context_words (sum,)
            pairs (C,)  the number of the 2-gram that ends each context
            nodes, totals   (C,) filled: the bit of each root's record, -1 where nothing is
                            stored; how many words follow each context
            log10_backoffs  (sum(context_lengths - 1),) filled: the weights of each context's last
                            two words, last three words, ..., all words; 0 where there is no weight
    Trusts  what `kernels.search_trees` trusts
    """
    address = address_of(view)
    made = keys_of(address)
    end = _0
    out = _0
    for c in range(len(context_lengths)):
        length = np.int64(context_lengths[c])
        end += length
        log10_backoffs[out : out + length - 1] = np.float32(0.0)
        node = np.int64(-1)
        if np.int64(pairs[c]) < of(address, at.PAIRS):
            node = find_root(address, np.int64(pairs[c]))
        nodes[c] = node
        totals[c] = np.uint32(0)
        size = _0
        level = first_level(address)
        k = _2
        while node >= 0:
            size, width, count, weight, bit = open_record(level, node, size, k == 2)
            if k == 2:
                totals[c] = np.uint32(size)
            log10_backoffs[out + k - 2] = log10_weight_of(level, weight)
            if k == length:
                break
            k += _1
            _, value_bits = record_bits(level)
            family = bit + words_bits(size, width, value_bits)
            word = np.int64(context_words[end - k])
            node = find_child(family, count, word, key_of(made, word), made.key_bits)
            level = below(level)
        out += length - 1
    return 0


@kernel("int64[:], int64[:], uint32[:], uint32[:], int64, out uint32[:], out uint32[:]")
def list_blocks(view, nodes, totals, skips, most, counts, ranks):  # type: ignore[no-untyped-def]
    """Lists the ranks, ascending, of the words that follow each context, except the first `skips`
    of them; at most `most` ranks in all.

    Shapes   nodes, totals (C,) as `find_blocks` fills them;  skips (C,)
             counts (C,) filled: how many ranks each context has;  ranks (n,) filled
    Returns  the sum of the counts, at most n
    """
    level = first_level(address_of(view))
    _, record = record_bits(level)
    given = _0
    for c in range(len(nodes)):
        total = np.int64(totals[c])
        skip = min(np.int64(skips[c]), total)
        count = min(total - skip, most - given)
        counts[c] = np.uint32(count)
        if count == 0:
            continue
        after, values = np.empty(total, np.uint32), np.empty(total, np.uint64)
        size, width, _, _, bit = open_record(level, nodes[c], _0, True)
        get_words(bit, size, width, record, after, values, _0)
        for i in range(count):  # not as a slice: see `text.kernels.begin_next`
            ranks[given + i] = after[skip + i]
        given += count
    return given


@kernel("int64[:], uint32[:], uint32[:], out uint32[:]")
def find_stored(view, first, second, pairs):  # type: ignore[no-untyped-def]
    """Finds the number of each word pair's 2-gram if anything is stored under it, else NO_RANK.

    Shapes  view  of view.low_view;  first, second, pairs (n,), the last filled
    Trusts  ids below the vocabulary's size
    """
    low = low_of(address_of(view))
    for i in range(len(pairs)):
        begin, size, bit, width = list_after(low, np.int64(first[i]))
        place, value = find_pair(low, size, bit, width, np.int64(second[i]))
        pairs[i] = np.uint32(NO_RANK)
        if place >= 0 and is_stored(low, field(value, _2)):
            pairs[i] = np.uint32(begin + place)
    return 0


@kernel("int64[:], int64, uint32[:], out uint32[:]")
def words_of_ranks(view, last, ranks, words):  # type: ignore[no-untyped-def]
    """Finds the words (n,) that have these ranks (n,) among the words that follow a word.

    Shapes   view  of view.low_view
    Returns  whether all ranks exist, in ascending order
    """
    low = low_of(address_of(view))
    _, size, bit, width = list_after(low, last)
    step, keys, rest = open_list(bit, size, width)
    bucket = _0  # the bucket that holds the rank; its entries are begin .. end - 1
    begin, end = _0, size
    if step:
        begin, end = two_fields(bit, step)
    for i in range(len(ranks)):
        rank = np.int64(ranks[i])
        if rank >= size or (i and rank <= np.int64(ranks[i - 1])):
            return False
        while rank >= end:
            bucket += _1
            begin, end = two_fields(bit + bucket * step, step)
        key = field(keys + begin * (rest + low.pair_bits) + (rank - begin) * rest, rest)
        words[i] = np.uint32(mirrored((bucket << rest) | key, width))
    return True


@kernel("int64[:], uint8[:], uint32[:], float32[:], out float32[:, :]")
def sum_backoffs(view, context_lengths, context_words, log10_backoffs, sums):  # type: ignore[no-untyped-def]
    """Sums the weights to add to a word's 1-gram or 2-gram, where this n-gram is the longest match.

    Shapes  view            of view.low_view
            log10_backoffs  as `find_blocks` fills them
            sums            (C, 2) filled: the sum of the weights from the longest context down to
                            one word; the sum down to two words
    """
    low = low_of(address_of(view))
    end = _0
    given = _0
    for c in range(len(context_lengths)):
        length = np.int64(context_lengths[c])
        end += length
        total = np.float32(0.0)
        for k in range(length, 1, -1):
            total = np.float32(total + log10_backoffs[given + k - 2])
        given += max(length - 1, _0)
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
    """Returns size, bit and key bits of the list after a context's last word; size 0 for -1."""
    if last < 0:
        return _0, _0, _1
    _, size, bit, width = list_after(low, last)
    return size, bit, width


@inlined
def score_low(low, listed, sums, word):  # type: ignore[no-untyped-def]
    """Returns score, matched order, n-gram length and state length of a word that only the low
    orders have; `listed` is what `list_of` returned."""
    prob, reaches = alone(low, word)
    if listed[0]:
        place, value = find_pair(low, *listed, word)
        if place >= 0:
            near = field(value, low.pair_bits)
            state = pair_state(low, near, word)
            if near & low.blank == 0:
                return np.float32(sums[1] + pair_prob(low, near)), _2, _2, state
            return np.float32(sums[0] + prob), _1, _2, state
    return np.float32(sums[0] + prob), _1, _1, reaches


@kernel(
    "int64[:], int64, float32[:], uint32[:], out float32[:], out uint8[:], out uint8[:], "
    "out uint8[:]"
)
def complete_after(view, last, sums, words, log10_prob, matched_order, ngram_length, state_length):  # type: ignore[no-untyped-def]
    """From the low orders, fills the gaps in a tree's answers for words (n,) after a context."""
    low = low_of(address_of(view))
    listed = list_of(low, last)
    for i in range(len(words)):
        if matched_order[i] and ngram_length[i] and state_length[i]:
            continue
        prob, matched, length, state = score_low(low, listed, sums, np.int64(words[i]))
        if matched_order[i] == 0:
            log10_prob[i], matched_order[i] = prob, np.uint8(matched)
        if ngram_length[i] == 0:
            ngram_length[i] = np.uint8(length)
        if state_length[i] == 0:
            state_length[i] = np.uint8(state)
    return 0


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
    """Answers queries for any words after one context.

    Shapes      view   of view.low_view;  last  the context's last word, -1 if the context is
                       empty
                sums   (2,)  of the context, as `sum_backoffs` gives them
                words  (n,) ascending, and their answers: all stored after the context's last two
                asked  (Q,);  out_... (Q,) filled
    Guarantees  answers equal those of `kernels.score_groups`, if those for `words` do
    Trusts      ids below the vocabulary's size
    """
    low = low_of(address_of(view))
    listed = list_of(low, last)
    for q in range(len(asked)):
        place = find_word(words, asked[q])
        if place >= 0:
            out_prob[q] = log10_prob[place]
            out_matched[q] = matched_order[place]
            out_ngram[q] = ngram_length[place]
            out_state[q] = state_length[place]
        else:
            prob, matched, ngram, state = score_low(low, listed, sums, np.int64(asked[q]))
            out_prob[q] = prob
            out_matched[q] = np.uint8(matched)
            out_ngram[q] = np.uint8(ngram)
            out_state[q] = np.uint8(state)
    return 0


@kernel("int64[:], int64, float32[:], uint32[:], float32[:], uint8[:], int64")
def score_one_after(view, last, sums, words, log10_prob, state_length, word):  # type: ignore[no-untyped-def]
    """Like `score_after`, but for one word; returns its score and its state length."""
    place = find_word(words, np.uint32(word))
    if place >= 0:
        return log10_prob[place], np.int64(state_length[place])
    low = low_of(address_of(view))
    listed = list_of(low, last)
    prob, _, _, state = score_low(low, listed, sums, word)
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
    """Like `score_after`, but for all words; reads each list once; out_... (V,), by id."""
    low = low_of(address_of(view))
    for w in range(len(out_prob)):
        prob, reaches = alone(low, np.int64(w))
        out_prob[w] = np.float32(sums[0] + prob)
        out_matched[w] = np.uint8(1)
        out_ngram[w] = np.uint8(1)
        out_state[w] = np.uint8(reaches)
    if last >= 0:
        _, size, bit, width = list_after(low, last)
        step, keys, rest = open_list(bit, size, width)
        buckets = _1 << (width - rest)
        for bucket in range(buckets):
            begin, end = _0, size
            if step:
                begin, end = two_fields(bit + bucket * step, step)
            here = keys + begin * (rest + low.pair_bits)
            values = here + (end - begin) * rest
            for i in range(end - begin):
                key = (np.int64(bucket) << rest) | field(here + i * rest, rest)
                w = mirrored(key, width)
                near = field(values + i * low.pair_bits, low.pair_bits)
                out_ngram[w] = np.uint8(2)
                out_state[w] = np.uint8(pair_state(low, near, w))
                if near & low.blank == 0:
                    out_prob[w] = np.float32(sums[1] + pair_prob(low, near))
                    out_matched[w] = np.uint8(2)
    for i in range(len(words)):
        w = np.int64(words[i])
        out_prob[w] = log10_prob[i]
        out_matched[w] = matched_order[i]
        out_ngram[w] = ngram_length[i]
        out_state[w] = state_length[i]
    return 0
