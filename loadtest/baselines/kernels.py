"""Kernels of the baselines: a hash index of n-grams, and the routing of calls to servers.

An n-gram's key is 64 bits, folded from its last word to its first, so that the key of a longer
suffix follows from that of a shorter one. A table is a pair of arrays, keys and float32 values,
with open addressing; key 0 is an empty place. A key's upper half gives its home in a table, its
lower half its server, so that one server's table is filled as evenly as a table of all n-grams.

Contexts are rows (C, width) with the most recent word last, of which the last `lengths[r]` count.
"""

from __future__ import annotations

import numba
import numpy as np

from dlm.ngram.kernels import slot_of

# In DLM, a server answers a query with the result of Algorithm 1; in baseline A, with the longest
# n-gram that it holds; in baseline B, with the n-gram itself or nothing.
WHOLE, LONGEST, EXACT = 0, 1, 2
SLOTS, PAIR, WORD = 0, 1, 2  # for WHOLE: the part of a context that selects the server
WEIGHT_OF = 1 << 32  # the word `WEIGHT_OF - j` asks for the weight of its context's last j words
HALF = np.uint64(32)
LOWER = np.uint64(0xFFFFFFFF)
LONGEST_CONTEXT = 16

compiled = numba.njit(nogil=True, cache=True)


@compiled
def fold(h, word):  # type: ignore[no-untyped-def]
    """Returns an n-gram's key, from its suffix's key and its first word (SplitMix64's mixing)."""
    h = h + np.uint64(0x9E3779B97F4A7C15) * (np.uint64(word) + np.uint64(1))
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h if h else np.uint64(1)


@compiled
def find(keys, key):  # type: ignore[no-untyped-def]
    size = np.uint64(len(keys))
    at = np.int64(((key >> HALF) * size) >> HALF)
    while True:
        held = keys[at]
        if held == key:
            return at
        if held == np.uint64(0):
            return np.int64(-1)
        at += 1
        if at == len(keys):
            at = np.int64(0)


@compiled
def fill(keys, values, rows, given):  # type: ignore[no-untyped-def]
    """Puts n-grams (n, order) with their values into a table; False if two have the same key."""
    for r in range(len(rows)):
        key = np.uint64(0)
        for j in range(rows.shape[1] - 1, -1, -1):
            key = fold(key, rows[r, j])
        at = np.int64(((key >> HALF) * np.uint64(len(keys))) >> HALF)
        while keys[at] != np.uint64(0):
            if keys[at] == key:
                return False
            at += 1
            if at == len(keys):
                at = np.int64(0)
        keys[at] = key
        values[at] = given[r]
    return True


@compiled
def server_of(key, servers):  # type: ignore[no-untyped-def]
    return np.int32((key & LOWER) % np.uint64(servers))


@compiled
def owner(by, u, v, servers, slots):  # type: ignore[no-untyped-def]
    if by == SLOTS:
        return np.int32(slots[slot_of(u, v)])
    if by == PAIR:
        return server_of(fold(fold(np.uint64(0), v), u), servers)
    return server_of(fold(np.uint64(0), v), servers)


@compiled
def owners(by, rows, end, servers, slots, out):  # type: ignore[no-untyped-def]
    """Finds each row's server, by the two words before column `end`, or by all if `by` < 0."""
    for r in range(len(rows)):
        if by < 0:
            key = np.uint64(0)
            for j in range(rows.shape[1] - 1, -1, -1):
                key = fold(key, rows[r, j])
            out[r] = server_of(key, servers)
        else:
            u = rows[r, end - 2] if end >= 2 else rows[r, end - 1]
            out[r] = owner(by, u, rows[r, end - 1], servers, slots)


@compiled
def algorithm_1(  # type: ignore[no-untyped-def]
    probs, prob_values, weights, weight_values, unigrams, unigram_weights, context, begin, end, word
):
    """Runs DLM Algorithm 1 on two hash tables; returns (log10 P, matched order, searches).

    Guarantees  the same bits as `dlm.ngram.backoff.score`, if the tables hold all that is needed
    """
    length = end - begin
    grams = np.empty(LONGEST_CONTEXT + 1, np.uint64)
    grams[0] = fold(np.uint64(0), word)
    for j in range(1, length + 1):
        grams[j] = fold(grams[j - 1], context[end - j])
    keys = np.empty(LONGEST_CONTEXT + 1, np.uint64)
    keys[0] = np.uint64(0)
    for j in range(1, length + 1):
        keys[j] = fold(keys[j - 1], context[end - j])
    total = np.float32(0.0)
    searches = 0
    for j in range(length, 0, -1):
        searches += 1
        at = find(probs, grams[j])
        if at >= 0:
            return np.float32(total + prob_values[at]), j + 1, searches
        searches += 1
        if j == 1:
            total = np.float32(total + unigram_weights[context[end - 1]])
        else:
            at = find(weights, keys[j])
            if at >= 0:
                total = np.float32(total + weight_values[at])
    return np.float32(total + unigrams[word]), 1, searches + 1


@compiled
def answer(  # type: ignore[no-untyped-def]
    mode, probs, prob_values, weights, weight_values, unigrams, unigram_weights,
    lengths, context_words, counts, words, out, orders,
):  # fmt: skip
    """Fills in a server's answers to a message; returns the number of searches. An order of 0 means
    that no n-gram was found; a weight has order 1. `out` and `orders` are (Q,)."""
    end = np.int64(0)
    q = np.int64(0)
    searches = 0
    for c in range(len(lengths)):
        begin, end = end, end + np.int64(lengths[c])
        for _ in range(counts[c]):
            asked = np.int64(words[q])
            out[q] = np.float32(0.0)
            orders[q] = 0
            if asked >= WEIGHT_OF - LONGEST_CONTEXT:
                key = np.uint64(0)
                for j in range(1, WEIGHT_OF - asked + 1):
                    key = fold(key, context_words[end - j])
                at = find(weights, key)
                searches += 1
                orders[q] = 1
                if at >= 0:
                    out[q] = weight_values[at]
            elif mode == WHOLE:
                out[q], order, some = algorithm_1(
                    probs, prob_values, weights, weight_values, unigrams, unigram_weights,
                    context_words, begin, end, asked,
                )  # fmt: skip
                orders[q] = order
                searches += some
            else:
                grams = np.empty(LONGEST_CONTEXT + 1, np.uint64)
                grams[0] = fold(np.uint64(0), asked)
                for j in range(1, end - begin + 1):
                    grams[j] = fold(grams[j - 1], context_words[end - j])
                shortest = end - begin if mode == EXACT else np.int64(2)
                for j in range(end - begin, shortest - 1, -1):
                    at = find(probs, grams[j])
                    searches += 1
                    if at >= 0:
                        out[q] = prob_values[at]
                        orders[q] = j + 1
                        break
            q += 1
    return searches


@compiled
def score(  # type: ignore[no-untyped-def]
    probs, prob_values, weights, weight_values, unigrams, unigram_weights,
    contexts, lengths, words, out, orders,
):  # fmt: skip
    """Runs Algorithm 1 for each row and its one word; returns the number of searches."""
    searches = 0
    width = contexts.shape[1]
    for r in range(len(words)):
        out[r], order, some = algorithm_1(
            probs, prob_values, weights, weight_values, unigrams, unigram_weights,
            contexts[r], width - np.int64(lengths[r]), width, words[r],
        )  # fmt: skip
        orders[r] = order
        searches += some
    return searches


@compiled
def asks_servers(cached, stored, contexts, lengths, out):  # type: ignore[no-untyped-def]
    """Tells whether each context needs more than the client's own n-grams.

    Args  cached  number of orders that the client holds
          stored  keys of pairs after which longer n-grams are stored; empty if unknown
    """
    width = contexts.shape[1]
    for r in range(len(lengths)):
        out[r] = lengths[r] >= cached
        if out[r] and len(stored):
            pair = fold(fold(np.uint64(0), contexts[r, width - 1]), contexts[r, width - 2])
            out[r] = find(stored, pair) >= 0


@compiled
def look_up(  # type: ignore[no-untyped-def]
    mode, by, servers, slots, contexts, lengths, remote, row, words, active, low, high,
    server, at_row, length, asked, key, target, weight,
):  # fmt: skip
    """Fills in a call's look-ups on servers; some look-ups may be equal. Returns their number.

    Args    low, high  lengths of n-grams that EXACT asks for in this round
            active     (Q,) whether each query is asked
    Shapes, Q queries, room for Q * order + C * order look-ups
            row, words   (Q,) context and word of each query
            server       -1 where any server will do
            at_row, length  context: the last `length` words of that row
            asked        the word, or `WEIGHT_OF` - j for the weight of the last j words
            key          equal for equal look-ups
            target       the query, or the row of a weight
            weight       length of the context's suffix whose weight is asked; 0 for a probability
    """
    n = 0
    width = contexts.shape[1]
    needed = np.zeros((len(lengths), LONGEST_CONTEXT + 1), np.bool_)
    for q in range(len(words)):
        r = row[q]
        if not remote[r] or not active[q]:
            continue
        k = np.int64(lengths[r])
        word = words[q]
        if mode != EXACT:
            if mode == LONGEST:
                server[n] = owner(PAIR, contexts[r, width - 1], word, servers, slots)
                for j in range(3, k + 1):
                    needed[r, j] = True
            elif k >= 2 or (by == WORD and k == 1):
                u = contexts[r, width - 2] if k >= 2 else np.uint32(0)
                server[n] = owner(by, u, contexts[r, width - 1], servers, slots)
            else:
                server[n] = -1
            at_row[n], length[n], asked[n] = r, k, word
            key[n], target[n], weight[n] = np.uint64(n), q, 0
            n += 1
            continue
        gram = fold(np.uint64(0), word)
        for j in range(1, k + 1):
            gram = fold(gram, contexts[r, width - j])
            if j + 1 < 3 or not low <= j + 1 <= high:
                continue
            server[n] = server_of(gram, servers)
            at_row[n], length[n], asked[n] = r, j, word
            key[n], target[n], weight[n] = gram, q, 0
            n += 1
        for j in range(3, k + 1):
            if low <= j <= high:
                needed[r, j] = True
    for r in range(len(lengths)):
        k = np.int64(lengths[r])
        gram = np.uint64(0)
        for j in range(1, k + 1):
            gram = fold(gram, contexts[r, width - j])
            if not needed[r, j]:
                continue
            if mode == EXACT:
                server[n], length[n] = server_of(gram, servers), j
            else:
                pair = owner(PAIR, contexts[r, width - 2], contexts[r, width - 1], servers, slots)
                server[n], length[n] = pair, k
            at_row[n], asked[n] = r, np.uint32(WEIGHT_OF - j)
            key[n] = fold(gram, np.uint64(WEIGHT_OF)) if mode == EXACT else np.uint64(n)
            target[n], weight[n] = r, j
            n += 1
    return n


@compiled
def pack(contexts, order, at_row, length, asked, server, whole):  # type: ignore[no-untyped-def]
    """Packs look-ups in `order`, as in `QueryGroups`: a message per server, or per look-up.

    Args     order  look-ups by server, then row, then length
             whole  whether all look-ups on a server travel together
    Returns  lengths, context words, counts, words, and (M, 4) of each message: its server, and its
             ends in contexts, context words and words
    """
    n = len(order)
    width = contexts.shape[1]
    lengths = np.empty(n, np.uint8)
    context_words = np.empty(n * width, np.uint32)
    counts = np.zeros(n, np.uint32)
    words = np.empty(n, np.uint32)
    messages = np.empty((n, 4), np.int64)
    c = m = w = np.int64(0)
    for i in range(n):
        at = order[i]
        before = order[i - 1] if i else at
        new_message = i == 0 or not whole or server[at] != server[before]
        if new_message and i:
            m += 1
        if new_message or at_row[at] != at_row[before] or length[at] != length[before]:
            lengths[c] = length[at]
            for j in range(width - np.int64(length[at]), width):
                context_words[w] = contexts[at_row[at], j]
                w += 1
            c += 1
        counts[c - 1] += np.uint32(1)
        words[i] = asked[at]
        messages[m, 0], messages[m, 1] = server[at], c
        messages[m, 2], messages[m, 3] = w, i + 1
    made = m + 1 if n else m
    return lengths[:c], context_words[:w], counts[:c], words, messages[:made]


@compiled
def take(target, suffix, place, values, matched, found, orders, weights):  # type: ignore[no-untyped-def]
    """Stores servers' answers for each query and context; the longest n-gram wins."""
    for n in range(len(place)):
        at = place[n]
        if suffix[n]:
            weights[target[n], suffix[n]] = values[at]
        elif matched[at] > orders[target[n]]:
            found[target[n]], orders[target[n]] = values[at], matched[at]


@compiled
def combine(  # type: ignore[no-untyped-def]
    mode, probs, prob_values, weights, weight_values, unigrams, unigram_weights,
    contexts, lengths, remote, row, words, found, orders, suffix_weights, out,
):  # fmt: skip
    """Computes a call's scores from servers' answers and the client's own n-grams.

    Args  probs, ...      tables of the client: 2-grams alone
          found, orders   (Q,) of each query: log10 probability, and order of its n-gram or 0
          suffix_weights  (C, order) of each context: weight of its last j words, from j = 3
    """
    width = contexts.shape[1]
    for q in range(len(words)):
        r = row[q]
        k = np.int64(lengths[r])
        if remote[r] and mode == WHOLE:
            out[q] = found[q]
            continue
        order = np.int64(orders[q]) if remote[r] else np.int64(0)
        total = np.float32(0.0)
        for j in range(k, 2, -1):
            if remote[r] and j >= order:
                total = np.float32(total + suffix_weights[r, j])
        if order >= 3:
            out[q] = np.float32(total + found[q])
            continue
        own = np.float32(0.0)
        if k >= 2:
            pair = fold(fold(np.uint64(0), contexts[r, width - 1]), contexts[r, width - 2])
            at = find(weights, pair)
            own = weight_values[at] if at >= 0 else np.float32(0.0)
            total = np.float32(total + own)
        if k >= 1:
            gram = fold(fold(np.uint64(0), words[q]), contexts[r, width - 1])
            at = find(probs, gram)
            if at >= 0:
                out[q] = np.float32(total + prob_values[at])
                continue
            total = np.float32(total + unigram_weights[contexts[r, width - 1]])
        out[q] = np.float32(total + unigrams[words[q]])
