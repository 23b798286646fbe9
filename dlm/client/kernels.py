"""The two compiled steps of a call, `plan` and `finish`, and the kernels that they consist of.

All kernels take and return arrays; `plan`, which takes longest, releases the GIL. The file has over
600 lines because it holds every kernel of a client, including those for phrases.
"""

from __future__ import annotations

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from dlm.index.search.kernels import begins_of, complete
from dlm.index.search.low_kernels import search_low
from dlm.jit import inlined, kernel
from dlm.ngram.kernels import slot_of

# mypy: disable-error-code="assignment"


# A thread that runs a kernel for the first time in this process holds this lock; a process must not
# fork while another thread holds it.
COMPILER = global_compiler_lock

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@inlined
def _size_for(entries):  # type: ignore[no-untyped-def]
    # Returns the size of a hash table that these entries fill to at most half: a power of two.
    size = 16
    while size < 2 * entries:
        size *= 2
    return size


@inlined
def _group_contexts(contexts, lengths, counts, group_of, row):  # type: ignore[no-untyped-def]
    # Numbers the distinct contexts in the order of first appearance; writes each row's context
    # number (-1 without words) to group_of (K,), and each context's first row to row (K,).
    width = contexts.shape[1]
    size = _size_for(len(counts))
    mask = np.uint64(size - 1)
    table = np.full(size, -1, np.int32)
    group_hash = np.empty(len(counts), np.uint64)
    groups = np.int64(0)
    group = np.int64(-1)
    for r in range(len(counts)):
        group_of[r] = -1
        if counts[r] == 0:
            continue
        length = np.int64(lengths[r])
        same = group >= 0 and np.int64(lengths[row[group]]) == length
        if same:
            for j in range(width - length, width):
                if contexts[r, j] != contexts[row[group], j]:
                    same = False
                    break
        if not same:
            h = np.uint64(length)
            for j in range(width - length, width):
                h = (h ^ np.uint64(contexts[r, j])) * _MULTIPLIER
                h ^= h >> np.uint64(29)
            at = h & mask
            while True:
                group = np.int64(table[at])
                if group < 0:
                    group = groups
                    table[at] = group
                    row[group] = r
                    group_hash[group] = h
                    groups += 1
                    break
                if group_hash[group] == h and np.int64(lengths[row[group]]) == length:
                    equal = True
                    for j in range(width - length, width):
                        if contexts[r, j] != contexts[row[group], j]:
                            equal = False
                            break
                    if equal:
                        break
                at = (at + np.uint64(1)) & mask
        group_of[r] = group
    return groups


@inlined
def _distinct(group_of, counts, words, place, group_out, word_out):  # type: ignore[no-untyped-def]
    # Numbers distinct pairs of a row's group and a word in the order of first appearance; writes
    # the number of each word's pair to place, (Q,), and the pairs to group_out and word_out, (Q,).
    size = _size_for(len(words))
    mask = np.uint64(size - 1)
    table = np.full(size, -1, np.int32)
    uniques = np.int64(0)
    q = np.int64(0)
    for r in range(len(counts)):
        group = np.int64(group_of[r])
        for _ in range(np.int64(counts[r])):
            word = words[q]
            h = (np.uint64(group) * _MULTIPLIER ^ np.uint64(word)) * _MULTIPLIER
            at = (h ^ (h >> np.uint64(29))) & mask
            while True:
                u = np.int64(table[at])
                if u < 0:
                    u = uniques
                    table[at] = u
                    group_out[u] = group
                    word_out[u] = word
                    uniques += 1
                    break
                if group_out[u] == group and word_out[u] == word:
                    break
                at = (at + np.uint64(1)) & mask
            place[q] = u
            q += 1
    return uniques


@inlined
def _same_words(counts, words):  # type: ignore[no-untyped-def]
    # Returns how many words each row has if all rows have the same words; else 0.
    if len(counts) < 2 or len(words) != len(counts) * np.int64(counts[0]):
        return np.int64(0)
    each = np.int64(counts[0])
    for r in range(len(counts)):
        if counts[r] != each:
            return np.int64(0)
    for q in range(each, len(words)):
        if words[q] != words[q - each]:
            return np.int64(0)
    return each


@kernel("uint32[:, :], uint8[:], uint32[:], uint32[:]", nogil=False)
def group_queries(contexts, lengths, counts, words):  # type: ignore[no-untyped-def]
    """Groups queries by context and drops repeats, in the order of first appearance.

    Shapes
        contexts  (K, W)  uint32  most recent word in the last column; unused columns come first
        lengths   (K,)    uint8   words of each context, at most W
        counts    (K,)    uint32  number of words after each context; contexts may repeat
        words     (Q,)    uint32  Q = sum(counts)
    Returns
        context_lengths  (C,)  uint8   of each distinct context that has words
        context_words    (sum(context_lengths),)  uint32
        word_counts      (C,)  uint32  number of distinct words after each context
        asked            (U,)  uint32  the words, group after group
        place            (Q,)  int64   the index in `asked` of each query's word
    Cost      O(K * W + Q): two hash tables; the second is for one row if all have the same words
    Trusts    lengths <= W, sum(counts) == Q: checked in `plan`
    """
    rows = len(counts)
    queries = len(words)
    width = contexts.shape[1]
    group_of = np.empty(rows, np.int64)
    row = np.empty(rows, np.int64)
    groups = _group_contexts(contexts, lengths, counts, group_of, row)
    place = np.empty(queries, np.int64)
    unique_group = np.empty(queries, np.int64)
    unique_word = np.empty(queries, np.uint32)
    word_counts = np.zeros(groups, np.uint32)
    each = _same_words(counts, words)
    if each:
        distinct = _distinct(group_of[:1], counts[:1], words, place, unique_group, unique_word)
        uniques = groups * distinct
        asked = np.empty(uniques, np.uint32)
        for g in range(groups):
            word_counts[g] = distinct
            asked[g * distinct : (g + 1) * distinct] = unique_word[:distinct]
        for r in range(rows - 1, -1, -1):  # backwards, since all rows read the first row's places
            for j in range(each):
                place[r * each + j] = group_of[r] * distinct + place[j]
    else:
        uniques = _distinct(group_of, counts, words, place, unique_group, unique_word)
        for u in range(uniques):
            word_counts[unique_group[u]] += np.uint32(1)
        cursor = np.zeros(groups + 1, np.int64)
        for g in range(groups):
            cursor[g + 1] = cursor[g] + np.int64(word_counts[g])
        asked = np.empty(uniques, np.uint32)
        place_of = np.empty(uniques, np.int64)
        for u in range(uniques):
            at_group = cursor[unique_group[u]]
            place_of[u] = at_group
            asked[at_group] = unique_word[u]
            cursor[unique_group[u]] = at_group + 1
        for q in range(queries):
            place[q] = place_of[place[q]]
    context_lengths = np.empty(groups, np.uint8)
    group_words = np.int64(0)
    for g in range(groups):
        context_lengths[g] = lengths[row[g]]
        group_words += np.int64(context_lengths[g])
    context_words = np.empty(group_words, np.uint32)
    out = np.int64(0)
    for g in range(groups):
        for j in range(width - np.int64(context_lengths[g]), width):
            context_words[out] = contexts[row[g], j]
            out += 1
    return context_lengths, context_words, word_counts, asked, place


@kernel("uint8[:], uint32[:]", nogil=False)
def repeats(context_lengths, context_words):  # type: ignore[no-untyped-def]
    """Returns whether two of the contexts are equal; the arrays are as in `QueryGroups`."""
    contexts = len(context_lengths)
    size = 16
    while size < 2 * contexts:
        size *= 2
    mask = np.uint64(size - 1)
    table = np.full(size, -1, np.int32)
    begins = np.empty(contexts, np.int64)
    begin = np.int64(0)
    for c in range(contexts):
        length = np.int64(context_lengths[c])
        begins[c] = begin
        h = np.uint64(length)
        for j in range(length):
            h = (h ^ np.uint64(context_words[begin + j])) * _MULTIPLIER
            h ^= h >> np.uint64(29)
        at = h & mask
        while table[at] >= 0:
            other = np.int64(table[at])
            if np.int64(context_lengths[other]) == length:
                equal = True
                for j in range(length):
                    if context_words[begins[other] + j] != context_words[begin + j]:
                        equal = False
                        break
                if equal:
                    return True
            at = (at + np.uint64(1)) & mask
        table[at] = c
        begin += length
    return False


@kernel("uint8[:], uint32[:], uint32[:], uint32[:], uint32[:]", nogil=False)
def regroup(context_lengths, context_words, pairs, word_counts, words):  # type: ignore[no-untyped-def]
    """Merges several concatenated `QueryGroups` for a shard, in which contexts may repeat.

    Returns  lengths, context words, word counts, words, pairs, and place as from `group_queries`
    """
    rows = len(context_lengths)
    width = np.int64(1)
    for r in range(rows):
        width = max(width, np.int64(context_lengths[r]) + 1)
    # The pair, which depends only on the context, goes before the context's words.
    dense = np.zeros((rows, width), np.uint32)
    longer = np.empty(rows, np.uint8)
    begin = np.int64(0)
    for r in range(rows):
        length = np.int64(context_lengths[r])
        longer[r] = np.uint8(length + 1)
        dense[r, width - length - 1] = pairs[r]
        for j in range(length):
            dense[r, width - length + j] = context_words[begin + j]
        begin += length
    lengths, flat, counts, asked, place = group_queries(dense, longer, word_counts, words)
    groups = len(lengths)
    out_pairs = np.empty(groups, np.uint32)
    out_words = np.empty(len(flat) - groups, np.uint32)
    begin = np.int64(0)
    for g in range(groups):
        length = np.int64(lengths[g]) - 1
        lengths[g] = np.uint8(length)
        out_pairs[g] = flat[begin + g]
        for j in range(length):
            out_words[begin + j] = flat[begin + g + 1 + j]
        begin += length
    return lengths, out_words, counts, asked, out_pairs, place


@kernel("uint8[:], uint32[:], uint32[:], uint32[:], uint32[:]")
def regroup_large(  # type: ignore[no-untyped-def]
    context_lengths, context_words, pairs, word_counts, words
):
    """Runs `repeats` and `regroup` without the GIL, for calls that take longer than regaining it.

    Returns   whether contexts repeat, and the result of `regroup`, which is empty if none repeats
    """
    shared = repeats(context_lengths, context_words)
    if not shared:
        context_lengths, context_words = context_lengths[:0], context_words[:0]
        pairs, word_counts, words = pairs[:0], word_counts[:0], words[:0]
    lengths, flat, counts, asked, numbers, place = regroup(
        context_lengths, context_words, pairs, word_counts, words
    )
    return shared, lengths, flat, counts, asked, numbers, place


@kernel("uint8[:], uint32[:], uint32[:], uint32[:], uint32[:], uint8[:], uint16[:], int64")
def route_groups(  # type: ignore[no-untyped-def]
    context_lengths, context_words, pairs, word_counts, words, needs_shard, slots, shards
):
    """Selects the groups that shards must answer, and orders them by shard; the order is stable.

    Shapes
        the first five as in QueryGroups for a shard
        needs_shard  (C,)     uint8   1 if a shard must answer; 0 for contexts of 0 or 1 words
        slots   (4096,)  uint16         the shard of each slot, below `shards`
    Returns
        edges   (shards + 1, 3)  int64  where each shard's contexts, context words and words begin
        context_lengths, context_words, word_counts, words, pairs  of the remote groups, shard after
                shard
        at      (U,)  int64  the index that each of these words had in `words`
    """
    contexts = len(context_lengths)
    shard_of = np.empty(contexts, np.int64)
    edges = np.zeros((shards + 1, 3), np.int64)
    end = np.int64(0)
    for c in range(contexts):
        end += np.int64(context_lengths[c])
        shard_of[c] = -1
        if needs_shard[c]:
            shard = np.int64(slots[slot_of(context_words[end - 2], context_words[end - 1])])
            shard_of[c] = shard
            edges[shard + 1, 0] += 1
            edges[shard + 1, 1] += np.int64(context_lengths[c])
            edges[shard + 1, 2] += np.int64(word_counts[c])
    for s in range(shards):
        for j in range(3):
            edges[s + 1, j] += edges[s, j]
    cursor = edges.copy()
    out_lengths = np.empty(edges[shards, 0], np.uint8)
    out_context = np.empty(edges[shards, 1], np.uint32)
    out_counts = np.empty(edges[shards, 0], np.uint32)
    out_pairs = np.empty(edges[shards, 0], np.uint32)
    out_words = np.empty(edges[shards, 2], np.uint32)
    at = np.empty(edges[shards, 2], np.int64)
    context = np.int64(0)
    word = np.int64(0)
    for c in range(contexts):
        length = np.int64(context_lengths[c])
        count = np.int64(word_counts[c])
        shard = shard_of[c]
        if shard >= 0:
            out_lengths[cursor[shard, 0]] = context_lengths[c]
            out_counts[cursor[shard, 0]] = word_counts[c]
            out_pairs[cursor[shard, 0]] = pairs[c]
            cursor[shard, 0] += 1
            to = cursor[shard, 1]
            for j in range(length):
                out_context[to + j] = context_words[context + j]
            cursor[shard, 1] = to + length
            to = cursor[shard, 2]
            for j in range(count):
                out_words[to + j] = words[word + j]
                at[to + j] = word + j
            cursor[shard, 2] = to + count
        context += length
        word += count
    return edges, out_lengths, out_context, out_counts, out_words, out_pairs, at


@kernel(
    "int64[:], int64, int64, uint32[:, :], uint8[:], uint32[:], uint32[:], uint16[:], int64, bool"
)
def plan(  # type: ignore[no-untyped-def]
    view, order, size, contexts, lengths, counts, words, slots, shards, blocks
):
    """Checks a call, groups its queries, answers those that low orders can, and routes the rest.

    Args
        view   columns of the low orders
        size   the limit below which all ids must be
        blocks whether the call is for context blocks, whose `words` are counts and go out unchanged
    Shapes
        contexts, lengths, counts, words as in `group_queries`; slots, shards as in `route_groups`
    Returns
        valid   False if lengths, counts or ids are out of range; the rest then means nothing
        shard_asked  number of words, repeats included, that a shard must answer
        place   (Q,) int64: the index of each query among the U distinct queries
        low     (2, U) float32: the two values that are added to a shard's sum, in this order
        log10_prob (U,) float32, and (3, U) uint8: matched_order, ngram_length, state_length; as if
                the low orders were the whole model
        edges, context_lengths, context_words, word_counts, words, pairs, at  as from `route_groups`
    Trusts  shapes agree, except for sum(counts)
    """
    valid = True
    for i in range(contexts.shape[0]):
        for j in range(contexts.shape[1]):
            valid &= contexts[i, j] < size
    total = np.int64(0)
    for i in range(len(counts)):
        valid &= np.int64(lengths[i]) <= contexts.shape[1]
        total += np.int64(counts[i])
    for i in range(len(words)):
        valid &= words[i] < size
    if not valid or total != len(words):
        contexts, lengths, counts, words = contexts[:0], lengths[:0], counts[:0], words[:0]
        valid = False
    group_lengths, group_words, word_counts, asked, place = group_queries(
        contexts, lengths, counts, words
    )
    low = np.empty((2, len(asked)), np.float32)
    rest = np.empty((3, len(asked)), np.uint8)
    needs_shard = np.empty(len(group_lengths), np.uint8)
    pairs, ranks = np.empty(len(group_lengths), np.uint32), np.empty(len(asked), np.uint32)
    search_low(
        view,
        order,
        begins_of(group_lengths),
        group_words,
        begins_of(word_counts),
        asked,
        low[1],
        low[0],
        rest[0],
        rest[1],
        rest[2],
        needs_shard,
        pairs,
        ranks,
    )
    log10_prob = low[0] + low[1]
    edges, out_lengths, out_context, out_counts, out_words, out_pairs, at = route_groups(
        group_lengths, group_words, pairs, word_counts, asked if blocks else ranks, needs_shard,
        slots, shards,
    )  # fmt: skip
    shard_asked = len(at)
    if len(place) != len(asked) and len(at):
        from_shard = np.zeros(len(asked), np.uint8)
        for i in range(len(at)):
            from_shard[at[i]] = 1
        shard_asked = np.int64(0)
        for q in range(len(place)):
            shard_asked += np.int64(from_shard[place[q]])
    return (
        valid,
        shard_asked,
        place,
        low,
        log10_prob,
        rest,
        edges,
        out_lengths,
        out_context,
        out_counts,
        out_words,
        out_pairs,
        at,
    )


# The kernels below take microseconds, and hold the GIL, as regaining it would take longer.


@kernel(
    "int64[:], int64[:], float32[:], uint8[:], uint8[:], uint8[:], float32[:, :], "
    "out float32[:], out uint8[:, :]",
    nogil=False,
)
def finish(  # type: ignore[no-untyped-def]
    place, at, log10_prob, matched, ngram, state, low, known_prob, known
):
    """Gives each query its answer, from the low orders alone or with a shard's answer.

    Shapes
        place (Q,), low (2, U), known_prob (U,), known (3, U)  from `plan`
        at  (n,) int64: the distinct queries that the next four arrays, each (n,), answer
    Returns  (Q,) float32 and (3, Q) uint8: known_prob and known, once filled in, for each query
    Trusts   places are within the arrays: `plan` made them, and a message's answers were counted
    """
    for i in range(len(at)):
        k = at[i]
        known_prob[k], known[0, k], known[1, k], known[2, k] = complete(
            low[1, k], low[0, k], known[0, k], known[1, k], known[2, k],
            log10_prob[i], matched[i], ngram[i], state[i],
        )  # fmt: skip
    queries = len(place)
    out_prob = np.empty(queries, np.float32)
    out = np.empty((3, queries), np.uint8)
    for q in range(queries):
        k = place[q]
        out_prob[q] = known_prob[k]
        out[0, q] = known[0, k]
        out[1, q] = known[1, k]
        out[2, q] = known[2, k]
    return out_prob, out


@kernel("uint32[:], int64", nogil=False)
def are_word(words, word):  # type: ignore[no-untyped-def]
    """Returns (Q,) bool: whether each of `words` (Q,) equals `word`."""
    out = np.empty(len(words), np.bool_)
    for q in range(len(words)):
        out[q] = words[q] == word
    return out


@kernel("uint32[:, :], uint32[:], uint32[:], uint8[:]", nogil=False)
def next_states(contexts, counts, words, state_length):  # type: ignore[no-untyped-def]
    """The state after each query's word.

    Shapes   contexts (K, W) uint32 right-aligned; counts (K,) uint32; words, state_length (Q,) of
             uint32 and uint8
    Returns  (Q, W) uint32 right-aligned, zero where unused, and (Q,) uint8, at most W
    Trusts   sum(counts) == Q
    """
    width = contexts.shape[1]
    out = np.zeros((len(words), width), np.uint32)
    lengths = np.zeros(len(words), np.uint8)
    q = np.int64(0)
    for c in range(len(counts)):
        for _ in range(counts[c]):
            length = min(np.int64(state_length[q]), np.int64(width))
            lengths[q] = length
            if length:
                out[q, width - 1] = words[q]
                for j in range(width - length, width - 1):
                    out[q, j] = contexts[c, j + 1]
            q += 1
    return out, lengths


# -------------------------------------------------------------------------------------------------
# Steps of the automaton of phrases, for many words at once (`dlm.client.phrases`).


# mypy: disable-error-code="assignment"


UNIT = np.float32(2.0**-10)  # the unit of bonuses, log10


@inlined
def _step(node, symbol, children, symbols, shorter):  # type: ignore[no-untyped-def]
    """The node after a symbol: the longest suffix of the words so far that begins a phrase."""
    if symbol == 0:
        return np.int64(0)
    while True:
        low = np.int64(children[node])
        end = np.int64(children[node + 1])
        high = end
        while low < high:
            middle = (low + high) // 2
            if symbols[middle] < symbol:
                low = middle + 1
            else:
                high = middle
        if low < end and symbols[low] == symbol:
            return low
        if node == 0:
            return np.int64(0)
        node = np.int64(shorter[node])


@kernel("uint32[:], uint32", nogil=False)
def fold_new(words, size):  # type: ignore[no-untyped-def]
    """Returns the words, with id 0 for ids from `size` on, and the largest given id plus one.

    Returns  (Q,) uint32, int64
    """
    out = np.empty(len(words), np.uint32)
    end = np.int64(0)
    for at in range(len(words)):
        word = words[at]
        end = max(end, np.int64(word) + 1)
        out[at] = word if word < size else np.uint32(0)
    return out, end


@kernel(
    "int32[:], uint32[:], uint32[:], int32[:], int32[:], int32[:], int32[:], int32[:], int32[:]",
    nogil=False,
)
def advance(  # type: ignore[no-untyped-def]
    nodes, counts, words, symbol_of, children, symbols, shorter, completed, held
):
    """Returns the node after each word, and the bonus that the word adds.

    Shapes
        nodes      (K,)  int32   the node before each row's words
        counts     (K,)  uint32  words of each row
        words      (Q,)  uint32  one row after the other; Q = sum(counts)
        symbol_of  (V,)  int32   the symbol of each word; 0 if no phrase has it
        children, symbols, shorter, completed, held  see `PhraseAutomaton`
    Returns  (Q,) int32, (Q,) float32, log10
    Cost     O(log(number of phrases)) per word, on average over a sentence
    Trusts   words < V, sum(counts) == Q; nodes of this automaton
    """
    out = np.empty(len(words), np.int32)
    bonus = np.empty(len(words), np.float32)
    at = np.int64(0)
    for row in range(len(nodes)):
        node = np.int64(nodes[row])
        for _ in range(np.int64(counts[row])):
            after = _step(node, symbol_of[words[at]], children, symbols, shorter)
            out[at] = after
            # The float32 is exact, as there are fewer than 2^24 units.
            units = np.int64(completed[after]) + np.int64(held[after]) - np.int64(held[node])
            bonus[at] = np.float32(units) * UNIT
            at += 1
    return out, bonus


@kernel("uint32[:], uint32[:], int32[:], int32[:], int32[:], int32[:], int32[:]", nogil=False)
def walk(  # type: ignore[no-untyped-def]
    counts, words, symbol_of, children, symbols, shorter, completed
):
    """Returns the bonus of each sentence, in `UNIT`, and the node at the end of the sentence.

    Shapes   as in `advance`; completed (N,) int32, see `PhraseAutomaton`
    Returns  (K,) int64, (K,) int32
    """
    totals = np.zeros(len(counts), np.int64)
    nodes = np.zeros(len(counts), np.int32)
    at = np.int64(0)
    for row in range(len(counts)):
        node = np.int64(0)
        for _ in range(np.int64(counts[row])):
            node = _step(node, symbol_of[words[at]], children, symbols, shorter)
            totals[row] += np.int64(completed[node])
            at += 1
        nodes[row] = node
    return totals, nodes
