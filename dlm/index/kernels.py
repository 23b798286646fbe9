"""The search itself: arrays in, arrays out, no Python object, no GIL.

Nothing here checks an index; numba reads out of range without a word. The callers named under
`Trusts` check first.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np
from numba import njit

from dlm.index.layout import BLANK, STATE_LENGTH_MASK, STORED

_MASK = np.uint8(STATE_LENGTH_MASK)
_STORED = np.uint8(STORED)
_BLANK = np.uint8(BLANK)


@njit(cache=True, nogil=True)
def find(sorted_keys, begin, end, key):  # type: ignore[no-untyped-def]
    """Place of `key` in sorted_keys[begin:end], -1 where it is not.

    Shapes
        sorted_keys  (n,) uint32, ascending between begin and end
        begin, end   int64;  key uint32
    """
    low = np.int64(begin)
    last = np.int64(end)  # offsets may be unsigned, which numba compares with int64 as floats
    high = last
    while low < high:
        middle = (low + high) >> 1
        if sorted_keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    if low < last and sorted_keys[low] == key:
        return low
    return np.int64(-1)


@njit(cache=True, nogil=True)
def score_groups(  # type: ignore[no-untyped-def]
    low,
    tree,
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
        low            the columns of the low orders: unigram (log10_prob, backoff, meta), bigram
                       (begin, word, log10_prob, backoff, meta)
        tree           the columns of a shard: level_begin, node (key, backoff, child, gram), gram
                       (word, log10_prob, meta); with no roots, only the low orders answer
        order          int   N
        context_begin  (C + 1,)  int64   where each context begins in context_words
        context_words  uint32            word ids, most recent last, at most N - 1 a context
        word_begin     (C + 1,)  int64   where the words of each context begin in words
        words          (Q,)      uint32
        log10_prob     (Q,)      float32 filled, like the four after it
        matched_order, ngram_length, state_length  (Q,) uint8
        needs_shard    (C,)      uint8   1 where the bigram table says that something is stored
                       under the context's last two words: the low orders alone cannot answer
    Guarantees
        equals ngram.backoff.score bit for bit: the back-off weights are added to 0 in float32 from
        the longest context to the shortest, then the probability
    Cost
        a context: one walk, order - 1 binary searches; a word: one search a level until it is
        missing
    Trusts
        ids below the vocabulary's size, lengths below the order, begins in order: checked in
        shard.Shard.check and by the callers of shard.run_kernel; the columns: checked when they
        are mapped (shard.LowOrders.open, shard.Shard.open)
    Paper
        DLM Algorithm 4, the word searched from the shallow end: with blanks in place of missing
        suffixes, a word that is absent at one depth is absent below it
    """
    uni_prob, uni_backoff, uni_meta, bi_begin, bi_word, bi_prob, bi_backoff, bi_meta = low
    level_begin, node_key, node_backoff, node_child, node_gram, gram_word, gram_prob, gram_meta = (
        tree
    )
    roots = np.int64(level_begin[1]) if len(level_begin) > 1 else np.int64(0)
    backoff = np.zeros(order + 1, np.float32)  # of the context's last k words, at k
    path = np.zeros(order + 1, np.int64)  # node of the context's last k words, at k
    for c in range(len(context_begin) - 1):
        first = np.int64(context_begin[c])
        end = np.int64(context_begin[c + 1])
        length = end - first
        for k in range(order + 1):
            backoff[k] = np.float32(0.0)
        deepest = np.int64(1)  # words of the longest context that is a node
        needs_shard[c] = np.uint8(0)
        v = np.uint32(0)
        if length >= 1:
            v = context_words[end - 1]
            backoff[1] = uni_backoff[v]
        if length >= 2:
            u = context_words[end - 2]
            pair = find(bi_word, bi_begin[u], bi_begin[u + 1], v)
            if pair >= 0:
                backoff[2] = bi_backoff[pair]
                if order > 2 and bi_meta[pair] & _STORED:
                    needs_shard[c] = np.uint8(1)
                    node = find(node_key, 0, roots, np.uint32(pair))
                    k = np.int64(2)
                    while node >= 0:
                        path[k] = node
                        deepest = k
                        backoff[k] = node_backoff[node]
                        k += 1
                        if k > length:
                            break
                        node = find(
                            node_key, node_child[node], node_child[node + 1], context_words[end - k]
                        )
        for q in range(np.int64(word_begin[c]), np.int64(word_begin[c + 1])):
            word = words[q]
            best = uni_prob[word]
            matched = np.int64(1)
            found = np.int64(1)
            state = uni_meta[word] & _MASK
            if length >= 1:
                at = find(bi_word, bi_begin[v], bi_begin[v + 1], word)
                if at >= 0:
                    found = np.int64(2)
                    state = bi_meta[at] & _MASK
                    if bi_meta[at] & _BLANK == 0:
                        best = bi_prob[at]
                        matched = np.int64(2)
                    for k in range(2, deepest + 1):
                        at = find(gram_word, node_gram[path[k]], node_gram[path[k] + 1], word)
                        if at < 0:
                            break
                        found = k + 1
                        state = gram_meta[at] & _MASK
                        if gram_meta[at] & _BLANK == 0:
                            best = gram_prob[at]
                            matched = k + 1
            total = np.float32(0.0)
            for k in range(length, matched - 1, -1):
                total = np.float32(total + backoff[k])
            log10_prob[q] = np.float32(total + best)
            matched_order[q] = matched
            ngram_length[q] = found
            state_length[q] = state
