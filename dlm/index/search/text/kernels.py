"""Scores consecutive words.

A word's context is the previous word's context plus the previous word: the pair found for one word
is the root of the next word's context, and an n-gram that was not found cannot be a context. So
each list is searched once; separate queries would search it as a context and again for the word.
"""

# mypy: disable-error-code="assignment,arg-type"
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed.kernels import DIRECT, find_few, rank_bits
from dlm.index.packed.record_kernels import (
    LEVEL_PLACES,
    N_PROB_TABLE,
    N_VALUE_BITS,
    N_WEIGHT_TABLE,
    ask_bucket as ask_directory,
    bucket_of,
    find_child,
    open_record,
    width_before,
    words_bits,
)
from dlm.index.search.kernels import ANSWERS
from dlm.index.search.step_kernels import (
    address_of,
    alone,
    ask_alone,
    ask_bits,
    ask_entry,
    first_level,
    has_prob,
    is_stored,
    key_of,
    keys_of,
    list_after,
    log10_prob_of,
    low_of,
    matters,
    open_list,
    open_ranks,
    pair_prob,
    pair_state,
    record_bits,
    roots_of,
    width_of,
    word_code,
)
from dlm.jit import inlined, kernel
from dlm.ngram.kernels import slot_of
from dlm.ngram.memory_kernels import (
    as_float32,
    field,
    load_float32,
    mask_of,
    mirrored,
    of,
    prefetch,
    two_fields,
)

TOKENS = 256  # per block
STAGE = 32  # tokens that go through a stage before the next stage begins
# Columns of two tables, whose rows are cache lines: a block's tokens, and a stage's searches. See
# search.kernels.
T_SIZE, T_RANK, T_TREE, T_BIT, T_FOUND, T_MATCHED, T_STATE, T_NODES, T_COLUMNS = range(9)
S_BIT, S_STEP, S_KEYS, S_REST, S_KEY, S_LOW, S_HIGH = range(7)
S_COLUMNS = 8  # a cache line
# Columns for a stored context: the bit and the size of the list of words after it, and of the
# family of contexts below it. For one word, the family is a tree's roots.
C_WORDS, C_SIZE, C_FAMILY, C_COUNT, C_COLUMNS = range(5)

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)


class TokenBlock(NamedTuple):
    """The state of a block of R - 1 tokens, and of the previous token, which is row 0.

    Shapes  token    (R, T_COLUMNS)
            context  (R * lengths, C_COLUMNS), address (R * lengths,), weight (R * lengths,)
                     float32, at row * lengths + k: for the context of k words that ends in the
                     token, what is stored; the address of its weight; the weight itself, if no
                     table holds it. Weights are read last, since few of them are needed and the
                     tables are larger than the near caches
            best     (R,) float32  log10 P so far
            found, live, kept  (R,), alone (2 * STAGE + 1,)  rows that a stage goes through. A row
                     is written before it is known whether it belongs, so that there is no branch
                     to predict; so each array has a spare element
            search   (STAGE, S_COLUMNS)  the searches of a stage
            nothing  address of a weight of 0
    """

    token: NDArray[np.int64]
    context: NDArray[np.int64]
    address: NDArray[np.int64]
    weight: NDArray[np.float32]
    best: NDArray[np.float32]
    found: NDArray[np.int64]
    live: NDArray[np.int64]
    kept: NDArray[np.int64]
    alone: NDArray[np.int64]
    search: NDArray[np.int64]
    lengths: int
    nothing: int


@inlined
def make_block(count, order):  # type: ignore[no-untyped-def]
    """Makes all arrays in one allocation: separate ones took as long as scoring two tokens."""
    rows = min(count, np.int64(TOKENS)) + _1
    lengths = max(np.int64(order), _2) + _1
    lanes = rows * lengths
    contexts = np.int64(C_COLUMNS) * lanes
    sizes = (rows * np.int64(T_COLUMNS), contexts + lanes, lanes, _3 * (rows + _1))
    spare = np.int64(2 * STAGE + 1)
    places = sizes[0] + sizes[1] + sizes[2] + sizes[3] + spare + np.int64(STAGE * S_COLUMNS)
    memory = np.zeros(places, np.int64)
    end = sizes[0]
    token = memory[:end].reshape(rows, T_COLUMNS)
    context = memory[end : end + contexts].reshape(lanes, C_COLUMNS)
    address = memory[end + contexts : end + sizes[1]]
    end += sizes[1]
    value = memory[end : end + sizes[2]].view(np.float32).reshape(_2, lanes)
    end += sizes[2]
    row = memory[end : end + sizes[3]].reshape(_3, rows + _1)
    end += sizes[3]
    nothing = np.int64(memory.ctypes.data) + ((sizes[0] + sizes[1]) << _3)
    address[:] = nothing
    return TokenBlock(
        token, context, address, value[0], value[1], row[0], row[1], row[2],
        memory[end : end + spare], memory[end + spare :].reshape(STAGE, S_COLUMNS),
        lengths, nothing,
    )  # fmt: skip


@inlined
def keep_weight(b, place, code, table):  # type: ignore[no-untyped-def]
    if table:
        b.address[place] = table + (code << _2)
    else:
        b.weight[place] = as_float32(code)
        b.address[place] = b.nothing + (place << _2)


@inlined
def level_of(levels, k):  # type: ignore[no-untyped-def]
    """The level of the contexts of k words, in all trees."""
    return levels + (k - _2) * np.int64(LEVEL_PLACES << 3)


@inlined
def keep_context(b, level, place, bit, is_root):  # type: ignore[no-untyped-def]
    """Opens the record at a bit, and prefetches the family below it."""
    shorter = b.context[place - _1, C_SIZE]
    size, width, count, weight, words_at = open_record(level, bit, shorter, is_root)
    family = words_at + words_bits(size, width, of(level, N_VALUE_BITS))
    b.context[place, C_WORDS] = words_at
    b.context[place, C_SIZE] = size
    b.context[place, C_FAMILY] = family
    b.context[place, C_COUNT] = count
    raw = weight >> np.int64(32)
    keep_weight(b, place, weight, _0 if raw else of(level, N_WEIGHT_TABLE))
    ask_bits(family)


# ------------------------------------------------------------------------- pairs of words


@inlined
def ask_entries(low, words, begin, count):  # type: ignore[no-untyped-def]
    for i in range(begin, min(begin + np.int64(STAGE), count)):
        ask_entry(low, np.int64(words[i]))


@inlined
def ask_lists(low, words, reach, begin, part, asked, before, b):  # type: ignore[no-untyped-def]
    """1. Prefetches where each word should be in the previous word's list, and opens its own list;
    returns the last list: its first pair, its size, its bit, and what `open_list` returns."""
    first, size, bit, step, keys, rest = before
    for i in range(asked):
        word = np.int64(words[begin + i])
        width = width_of(step, rest)
        key = mirrored(word, width)
        if reach[begin + i] == 0 or word >> width:  # above all words of the list
            size, step = _0, _0
        ask_key(b.search, i, key, bit, step, keys, rest, _0, size)
        t = part + i + _1
        b.token[t, T_RANK] = first
        b.token[t, T_NODES] = _1
        first, size, bit, width = list_after(low, word)
        keep_weight(b, t * b.lengths + _1, word_code(low, word), low.backoff_table)
        step, keys, rest = open_list(bit, size, width)
    return first, size, bit, step, keys, rest


@inlined
def ask_key(search, i, key, bit, step, keys, rest, low, high):  # type: ignore[no-untyped-def]
    """Prefetches where a key should be in a list; without a directory, that is low .. high - 1."""
    at_bit = bit + (key >> rest) * step
    prefetch(at_bit >> _3)
    search[i, S_BIT] = at_bit
    search[i, S_STEP] = step
    search[i, S_KEYS] = keys
    search[i, S_REST] = rest
    search[i, S_KEY] = key & mask_of(rest)
    search[i, S_LOW] = low
    search[i, S_HIGH] = high


@inlined
def ask_bucket(search, i, record):  # type: ignore[no-untyped-def]
    """Opens a search's bucket in a list whose entries have `record` bits beside their keys."""
    width = search[i, S_STEP]
    low, high = two_fields(search[i, S_BIT], width)
    low = low if width else search[i, S_LOW]
    high = high if width else search[i, S_HIGH]
    stride = search[i, S_REST] + record
    at_bit = search[i, S_KEYS] + low * stride
    prefetch(at_bit >> _3)
    prefetch((at_bit + (high - low) * stride) >> _3)
    search[i, S_LOW] = low
    search[i, S_HIGH] = high - low
    search[i, S_BIT] = at_bit


@inlined
def find_pairs(part, asked, pair_bits, pairs, b):  # type: ignore[no-untyped-def]
    """3. Finds the pair of each word and the previous word; returns how many pairs are found so
    far, and how many words have no pair."""
    lonely = _0
    for i in range(asked):
        t = part + i + _1
        entries = b.search[i, S_HIGH]
        width = b.search[i, S_REST]
        at_bit = b.search[i, S_BIT]
        place = find_few(at_bit, width, entries, b.search[i, S_KEY])
        there = np.int64(place < entries)
        # The number of the pair, and the word's rank among those that follow the previous word.
        rank = b.search[i, S_LOW] + place
        b.token[t, T_SIZE] = b.token[t, T_RANK] + rank
        b.token[t, T_RANK] = rank
        b.token[t, T_BIT] = at_bit + entries * width + place * pair_bits
        b.token[t, T_FOUND] = _1 + there
        b.token[t, T_MATCHED] = _1
        b.found[pairs] = t
        pairs += there
        b.alone[lonely] = t
        lonely += _1 - there
    return pairs, lonely


@inlined
def read_pairs(low, trees, slots, words, block, first, pairs, lonely, b):  # type: ignore[no-untyped-def]
    """4. Reads each pair from `first` on, and finds the tree that has its root, by its slot;
    returns how many words need their 1-gram, and how many pairs, in `kept`, may be roots."""
    stored = _0
    for j in range(first, pairs):
        t = b.found[j]
        at_bit = b.token[t, T_BIT]
        value = field(at_bit, low.pair_bits)
        b.best[t] = pair_prob(low, value)
        blank = np.int64(value & low.blank != 0)
        b.token[t, T_STATE] = pair_state(low, value, np.int64(words[block + t - _1]))
        b.token[t, T_MATCHED] = _2 - blank
        b.alone[lonely] = t
        lonely += blank
        tree = trees[0]
        if len(trees) > 1:
            tree = trees[slots[slot_of(words[block + t - _2], words[block + t - _1])]]
        b.token[t, T_TREE] = tree
        family, count = roots_of(tree)
        place = t * b.lengths + _1
        b.context[place, C_FAMILY] = family
        b.context[place, C_COUNT] = count
        b.kept[stored] = t
        stored += np.int64(is_stored(low, value) != 0)
    return lonely, stored


@inlined
def read_alone(low, words, block, lonely, b):  # type: ignore[no-untyped-def]
    """6. Reads the 1-grams of words that have nothing longer yet."""
    for j in range(lonely):
        t = b.alone[j]
        prob, reaches = alone(low, np.int64(words[block + t - _1]))
        b.best[t] = prob
        if b.token[t, T_FOUND] == 1:
            b.token[t, T_STATE] = reaches


# ------------------------------------------------------------- longer contexts, a length at a time


@inlined
def choose_live(reach, block, k, pairs, b):  # type: ignore[no-untyped-def]
    """Fills `live` with words that the shorter context has and whose k-word context is a node."""
    alive = _0
    for j in range(pairs):
        t = b.found[j]
        b.live[alive] = t
        alive += np.int64(b.token[t - _1, T_NODES] >= k) & np.int64(reach[block + t - _1] >= k)
    return alive


@inlined
def ask_words(k, part, asked, b):  # type: ignore[no-untyped-def]
    """9. Prefetches where each word should be in its context's list, by its rank in the list of the
    context without the oldest word."""
    for i in range(asked):
        t = b.live[part + i]
        place = (t - _1) * b.lengths + k
        size = b.context[place, C_SIZE]
        rank, bit = b.token[t, T_RANK], b.context[place, C_WORDS]
        if k == 2:
            width = width_before(bit)
            size = size if rank >> width == 0 else _0  # otherwise the list lacks the rank
        else:
            width = rank_bits(size, b.token[t, T_SIZE])
        step, keys, rest = open_ranks(bit, size, width)
        # If all words after the shorter context follow this one, a rank is itself an index.
        low, high = (_0, size) if width else (rank, rank + min(size, _1))
        ask_key(b.search, i, rank, bit, step, keys, rest, low, high)
        b.token[t, T_SIZE] = size


@inlined
def find_ranks(record, part, asked, pairs, b):  # type: ignore[no-untyped-def]
    """11. Finds each word in its context's list; returns how many words are found in all."""
    for i in range(asked):
        t = b.live[part + i]
        entries = b.search[i, S_HIGH]
        width = b.search[i, S_REST]
        at_bit = b.search[i, S_BIT]
        place = find_few(at_bit, width, entries, b.search[i, S_KEY])
        place = place if width else _0
        b.token[t, T_RANK] = b.search[i, S_LOW] + place
        b.token[t, T_BIT] = at_bit + entries * width + place * record
        b.found[pairs] = t
        pairs += np.int64(place < entries)
    return pairs


@inlined
def read_values(low, levels, words, block, k, first, pairs, extended, b):  # type: ignore[no-untyped-def]
    """12. Reads the words' values; returns how many in `kept` may end a context of k + 1 words."""
    level = level_of(levels, k)
    flag_bits, record = record_bits(level)
    for j in range(first, pairs):
        t = b.found[j]
        value = field(b.token[t, T_BIT], record)
        b.token[t, T_FOUND] = k + _1
        if has_prob(value, flag_bits):
            b.best[t] = log10_prob_of(value >> flag_bits, of(level, N_PROB_TABLE))
            b.token[t, T_MATCHED] = k + _1
        if matters(value, flag_bits):
            b.token[t, T_STATE] = k + _1
            if add_suffixes(low, levels, words, block, k, t, b) == k:
                b.kept[extended] = t
                extended += _1
    return extended


@inlined
def add_suffixes(low, levels, words, block, k, t, b):  # type: ignore[no-untyped-def]
    """Finds a token's nodes of up to k words; returns how many words the longest has. A suffix that
    nothing extends was skipped earlier, but its node leads to those of longer suffixes."""
    depth = b.token[t, T_NODES]
    while _2 <= depth and depth < k:
        place = t * b.lengths + depth
        word = np.int64(words[block + t - depth - _1])
        family, count = b.context[place, C_FAMILY], b.context[place, C_COUNT]
        bit = find_child(family, count, word, key_of(low, word), low.key_bits)
        if bit < 0:
            break
        depth += _1
        keep_context(b, level_of(levels, depth), place + _1, bit, False)
        b.token[t, T_NODES] = depth
    return depth


@inlined
def ask_contexts(keys, words, block, k, part, asked, b):  # type: ignore[no-untyped-def]
    """13. Prefetches where each context of k words should be in the family below k - 1 words; puts
    those that may exist into `live`, and returns their number. A context that nothing extends is
    left out: it has no weight and no list. A family with a directory takes two more steps."""
    key_bits = keys.root_key_bits if k == 2 else keys.key_bits
    alive = _0
    for j in range(part, part + asked):
        t = b.kept[j]
        place = t * b.lengths + k - _1
        family, count = b.context[place, C_FAMILY], b.context[place, C_COUNT]
        if count:
            word = b.token[t, T_SIZE]  # the number of the pair
            key = word
            if k > 2:
                word = np.int64(words[block + t - k])
                key = key_of(keys, word)
            b.search[alive, S_LOW] = word
            b.search[alive, S_KEY] = key
            if count > DIRECT:
                prefetch(ask_directory(family, count, key, key_bits) >> _3)
            b.live[alive] = t
            alive += _1
    for i in range(alive):
        place = b.live[i] * b.lengths + k - _1
        family, count = b.context[place, C_FAMILY], b.context[place, C_COUNT]
        if count > DIRECT:
            bucket, _ = bucket_of(family, count, b.search[i, S_KEY], key_bits)
            ask_bits(bucket)
    return alive


@inlined
def find_contexts(keys, levels, k, alive, b):  # type: ignore[no-untyped-def]
    """14. Finds the contexts in `live`, and opens their records."""
    key_bits = keys.root_key_bits if k == 2 else keys.key_bits
    nodes = _0
    for i in range(alive):
        t = b.live[i]
        place = t * b.lengths + k - _1
        family, count = b.context[place, C_FAMILY], b.context[place, C_COUNT]
        bit = find_child(family, count, b.search[i, S_LOW], b.search[i, S_KEY], key_bits)
        if bit >= 0:
            b.token[t, T_NODES] = k
            ask_bits(bit)
            b.live[nodes] = t
            b.search[nodes, S_BIT] = bit
            nodes += _1
    level = level_of(levels, k)
    for i in range(nodes):
        place = b.live[i] * b.lengths + k
        keep_context(b, level, place, b.search[i, S_BIT], k == 2)


# ---------------------------------------------------------------------------------- the answers


@inlined
def put_answers(  # type: ignore[no-untyped-def]
    order, reach, block, here, b, log10_prob, matched_order, ngram_length, state_length
):
    """15. Adds the weights of the contexts that lack the word, the longest first, then log10 P."""
    for i in range(here):
        longest = min(np.int64(reach[block + i]), b.token[i, T_STATE])
        matched = b.token[i + 1, T_MATCHED]
        at_row = i * b.lengths
        prefetch(b.address[at_row + 1] if matched == 1 and longest >= 1 else b.nothing)
        prefetch(b.address[at_row + 2] if matched <= 2 and longest >= 2 else b.nothing)
    for i in range(here):
        t = i + _1
        q = block + i
        total = np.float32(0.0)
        longest = min(np.int64(reach[q]), b.token[i, T_STATE])
        matched = b.token[t, T_MATCHED]
        for k in range(order - _1, 0, -1):
            # Adding 0 changes no bit, and no branch depends on how many weights there are.
            needed = matched <= k and k <= longest
            total = np.float32(
                total + load_float32(b.address[i * b.lengths + k] if needed else b.nothing)
            )
        log10_prob[q] = np.float32(total + b.best[t])
        matched_order[q] = np.uint8(matched)
        ngram_length[q] = np.uint8(b.token[t, T_FOUND])
        state_length[q] = np.uint8(b.token[t, T_STATE])


@inlined
def begin_next(here, b):  # type: ignore[no-untyped-def]
    """Copies the last token of a block to row 0 of the next block."""
    last = here * b.lengths
    for k in range(_1, b.lengths):
        for i in range(C_COLUMNS):  # slices would make numba compile an error path
            b.context[k, i] = b.context[last + k, i]
        b.weight[k] = b.weight[last + k]
        inside = b.address[last + k] == b.nothing + ((last + k) << _2)
        b.address[k] = b.nothing + (k << _2) if inside else b.address[last + k]
    b.token[0, T_TREE] = b.token[here, T_TREE]
    b.token[0, T_NODES] = b.token[here, T_NODES]
    b.token[0, T_STATE] = b.token[here, T_STATE]


@kernel(f"int64[:], int64[:], uint16[:], int64, uint32[:], uint8[:], {ANSWERS}")
def score_tokens(  # type: ignore[no-untyped-def]
    view, trees, slots, order, words, reach, log10_prob, matched_order, ngram_length, state_length
):
    """Scores each word after the words that precede it.

    Shapes      view   view.low_view;  order  N
                trees  (B,)  address of the view.tree_view of each shard of a set
                slots  (4096,)  the shard of each slot
                words  (T,)  word ids, sentence after sentence
                reach  (T,) uint8  how many words precede each in its sentence, at most N - 1
                log10_prob  (T,) float32 filled, like those after it
                matched_order, ngram_length, state_length  (T,) uint8
    Guarantees  scores equal ngram.backoff.score bit for bit
    Trusts      ids below the vocabulary's size; reach[i] <= reach[i - 1] + 1: checked in text.score
    """
    low = low_of(address_of(view))
    keys, levels = keys_of(trees[0]), first_level(trees[0])  # the same for all trees
    count = np.int64(len(words))
    b = make_block(count, order)
    before = _0, _0, low.list, _0, low.list, _1
    ask_entries(low, words, _0, count)
    block = _0
    while block < count:
        here = min(count - block, np.int64(TOKENS))
        pairs = _0
        part = _0
        while part < here:
            begin = block + part
            asked = min(here - part, np.int64(STAGE))
            before = ask_lists(low, words, reach, begin, part, asked, before, b)
            ask_entries(low, words, begin + asked, count)
            for i in range(asked):  # stage 2
                ask_bucket(b.search, i, low.pair_bits)
            first = pairs
            pairs, lonely = find_pairs(part, asked, low.pair_bits, pairs, b)
            for j in range(lonely):
                ask_alone(low, np.int64(words[block + b.alone[j] - _1]))
            lonely, stored = read_pairs(low, trees, slots, words, block, first, pairs, lonely, b)
            stored = stored if order > 2 else _0
            read_alone(low, words, block, lonely, b)
            alive = ask_contexts(keys, words, block, _2, _0, stored, b)
            find_contexts(keys, levels, _2, alive, b)
            part += asked
        k = _2
        while k < order and pairs:
            alive = choose_live(reach, block, k, pairs, b)
            _, record = record_bits(level_of(levels, k))
            pairs, extended = _0, _0
            part = _0
            while part < alive:
                asked = min(alive - part, np.int64(STAGE))
                ask_words(k, part, asked, b)
                for i in range(asked):  # stage 10
                    ask_bucket(b.search, i, record)
                first = pairs
                pairs = find_ranks(record, part, asked, pairs, b)
                extended = read_values(low, levels, words, block, k, first, pairs, extended, b)
                part += asked
            k += _1
            part = _0
            while k < order and part < extended:
                asked = min(extended - part, np.int64(STAGE))
                alive = ask_contexts(keys, words, block, k, part, asked, b)
                find_contexts(keys, levels, k, alive, b)
                part += asked
        put_answers(
            order, reach, block, here, b, log10_prob, matched_order, ngram_length, state_length
        )
        begin_next(here, b)
        block += here
