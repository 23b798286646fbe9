"""Scores of consecutive words.

The context of a word is that of the word before and that word: the pair found when a word is scored
is the root of the next word's context, and an n-gram that was not found is no context. So each
list is searched once, where separate queries search it as a context and again for the word.
"""

# mypy: disable-error-code="assignment,arg-type"
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed.kernels import find_few, find_key
from dlm.index.packed.low import BLANK, STATE_LENGTH, STORED
from dlm.index.search import view as at
from dlm.index.search.kernels import ANSWERS
from dlm.index.search.step_kernels import (
    alone,
    ask_alone,
    ask_children,
    ask_entry,
    ask_node_backoff,
    ask_place,
    ask_root,
    ask_root_keys,
    below,
    children,
    find_near,
    first_level,
    has_prob,
    key_of,
    list_after,
    log10_prob_of,
    low_of,
    matters,
    node_code,
    node_list,
    open_list,
    open_ranks,
    pair_code,
    pair_prob,
    record_bits,
    root_bucket,
    roots_of,
    share,
    word_code,
)
from dlm.jit import inlined, kernel
from dlm.ngram.kernels import slot_of
from dlm.ngram.memory_kernels import (
    as_float32,
    field,
    load_float32,
    mask_of,
    of,
    prefetch,
    two_fields,
)

TOKENS = 256  # of a block
STAGE = 32  # that go through a stage before the next begins
# Columns of the table of a block's tokens, one cache line each, and of that of a stage's searches;
# see search.kernels. A token's place in a list is needed until its tree is known.
T_SIZE, T_RANK, T_PLACE, T_BIT, T_FOUND, T_MATCHED, T_STATE, T_NODES, T_COLUMNS = range(9)
T_TREE = T_PLACE
S_BIT, S_STEP, S_KEYS, S_REST, S_KEY, S_LOW, S_HIGH, S_LEVEL, S_COLUMNS = range(9)

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)


class TokenBlock(NamedTuple):
    """The state of a block of R - 1 tokens and the one before them, which is row 0.

    Shapes  token    (R, T_COLUMNS)
            node, address  (R * lengths,), weight (R * lengths,) float32, at row * lengths + k, of
                     the context of k words that ends in the token: its node; the address of its
                     weight, which is read at the end if it is needed: most are not, and the tables
                     are larger than the near caches; and its weight, where no table holds it
            best     (R,) float32  log10 P so far
            found, live, kept  (R,), alone (2 * STAGE + 1,)  rows that a stage goes through. A row
                     is written before it is known whether it belongs, so that there is no branch
                     to predict; hence one place more
            search   (STAGE, S_COLUMNS)  a search, by its place in its stage
            nothing  address of the weight of no words
    """

    token: NDArray[np.int64]
    node: NDArray[np.int64]
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
    """One allocation for all: those of each array took as long as two tokens."""
    rows = min(count, np.int64(TOKENS)) + _1
    lengths = max(np.int64(order), _2) + _1
    lanes = rows * lengths
    sizes = (rows * np.int64(T_COLUMNS), _2 * lanes, lanes, _3 * (rows + _1))
    spare = np.int64(2 * STAGE + 1)
    places = sizes[0] + sizes[1] + sizes[2] + sizes[3] + spare + np.int64(STAGE * S_COLUMNS)
    memory = np.zeros(places, np.int64)
    end = sizes[0]
    token = memory[:end].reshape(rows, T_COLUMNS)
    lane = memory[end : end + sizes[1]].reshape(_2, lanes)
    end += sizes[1]
    value = memory[end : end + sizes[2]].view(np.float32).reshape(_2, lanes)
    end += sizes[2]
    row = memory[end : end + sizes[3]].reshape(_3, rows + _1)
    end += sizes[3]
    nothing = np.int64(memory.ctypes.data) + ((sizes[0] + sizes[1]) << _3)
    lane[1, :] = nothing
    return TokenBlock(
        token, lane[0], lane[1], value[0], value[1], row[0], row[1], row[2],
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
def level_of(tree, k):  # type: ignore[no-untyped-def]
    """Of the contexts of k words."""
    return first_level(tree) + (k - _2) * np.int64(at.LEVEL_PLACES << 3)


# ------------------------------------------------------------------------- pairs of words


@inlined
def ask_entries(low, words, begin, count):  # type: ignore[no-untyped-def]
    for i in range(begin, min(begin + np.int64(STAGE), count)):
        ask_entry(low, np.int64(words[i]))


@inlined
def ask_lists(low, words, reach, begin, part, asked, before, b):  # type: ignore[no-untyped-def]
    """1. Where each word should be in the list of the one before, and its own list; returns that
    of the last: its first pair, how many, its bit, and as `open_list`."""
    first, size, bit, step, keys, rest = before
    for i in range(asked):
        word = np.int64(words[begin + i])
        key = key_of(low, word)
        if reach[begin + i] == 0:
            size, step = _0, _0
        ask_key(b.search, i, key, bit, step, keys, rest, _0, size)
        t = part + i + _1
        b.token[t, T_SIZE] = size
        b.token[t, T_RANK] = first
        b.token[t, T_NODES] = _1
        first, size, bit = list_after(low, word)
        keep_weight(b, t * b.lengths + _1, word_code(low, word), low.backoff_table)
        step, keys, rest = open_list(bit, size, low.key_bits)
    return first, size, bit, step, keys, rest


@inlined
def ask_key(search, i, key, bit, step, keys, rest, low, high):  # type: ignore[no-untyped-def]
    """Where a key should be in an opened list; in low .. high - 1, if that has no directory."""
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
    """The bucket of a search in a list whose entries have `record` bits beside their keys."""
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
    """3. The pair of each word and the one before; how many are found in all, and how many words
    stand alone."""
    lonely = _0
    for i in range(asked):
        t = part + i + _1
        entries = b.search[i, S_HIGH]
        width = b.search[i, S_REST]
        at_bit = b.search[i, S_BIT]
        place = find_few(at_bit, width, entries, b.search[i, S_KEY])
        there = np.int64(place < entries)
        b.token[t, T_PLACE] = b.search[i, S_LOW] + place
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
    """4. What a pair says, and the tree that has its root, by the slot of its words; how many words
    need their 1-gram, and how many pairs may be roots, in `kept` from `first` on."""
    stored = _0
    for j in range(first, pairs):
        t = b.found[j]
        at_bit = b.token[t, T_BIT]
        value = field(at_bit, low.near_bits)
        keep_weight(b, t * b.lengths + _2, pair_code(low, at_bit), low.pair_backoff_table)
        b.best[t] = pair_prob(low, value)
        blank = np.int64(value & np.int64(BLANK) != 0)
        b.token[t, T_STATE] = value & np.int64(STATE_LENGTH)
        b.token[t, T_MATCHED] = _2 - blank
        b.alone[lonely] = t
        lonely += blank
        pair = b.token[t, T_RANK] + b.token[t, T_PLACE]
        b.token[t, T_RANK] = b.token[t, T_PLACE]
        tree = trees[0]
        if len(trees) > 1:
            tree = trees[slots[slot_of(words[block + t - _2], words[block + t - _1])]]
        b.token[t, T_TREE] = tree
        roots = roots_of(tree)
        ask_root(roots, pair)
        b.token[t, T_BIT] = pair
        b.kept[stored] = t
        stored += np.int64(value & np.int64(STORED) != 0) & np.int64(roots.count > 0)
    return lonely, stored


@inlined
def open_roots(stored, b):  # type: ignore[no-untyped-def]
    """5. Among which roots that of a pair is."""
    for j in range(stored):
        t = b.kept[j]
        roots = roots_of(b.token[t, T_TREE])
        first, end = root_bucket(roots, b.token[t, T_BIT])
        b.search[j, S_LOW] = first
        b.search[j, S_HIGH] = end - first
        ask_root_keys(roots, first)


@inlined
def read_alone(low, words, block, lonely, b):  # type: ignore[no-untyped-def]
    """6. The 1-grams of words that have nothing longer yet."""
    for j in range(lonely):
        t = b.alone[j]
        prob, reaches = alone(low, np.int64(words[block + t - _1]))
        b.best[t] = prob
        if b.token[t, T_FOUND] == 1:
            b.token[t, T_STATE] = reaches


@inlined
def find_roots(stored, b):  # type: ignore[no-untyped-def]
    """7. The roots."""
    for j in range(stored):
        t = b.kept[j]
        tree = b.token[t, T_TREE]
        roots = roots_of(tree)
        first, entries = b.search[j, S_LOW], b.search[j, S_HIGH]
        target = b.token[t, T_BIT] & mask_of(roots.key_bits)
        place = find_few(
            (roots.key << _3) + first * roots.key_bits, roots.key_bits, entries, target
        )
        if place < entries:
            b.node[t * b.lengths + _2] = first + place
            b.token[t, T_NODES] = _2
            ask_place(first_level(tree), first + place)


# ------------------------------------------------------------- longer contexts, a length at a time


@inlined
def choose_live(reach, block, k, pairs, b):  # type: ignore[no-untyped-def]
    """Words whose shorter context has them and whose context of k words is a node, in `live`."""
    alive = _0
    for j in range(pairs):
        t = b.found[j]
        b.live[alive] = t
        alive += np.int64(b.token[t - _1, T_NODES] >= k) & np.int64(reach[block + t - _1] >= k)
    return alive


@inlined
def ask_node_lists(k, part, asked, b):  # type: ignore[no-untyped-def]
    """8. The list of each node, which is in the tree of the token before."""
    for i in range(asked):
        t = b.live[part + i]
        level = level_of(b.token[t - _1, T_TREE], k)
        at_bit = node_list(level, b.node[(t - _1) * b.lengths + k])
        b.search[i, S_LEVEL] = level
        b.search[i, S_BIT] = at_bit
        prefetch(at_bit >> _3)


@inlined
def open_node_lists(part, asked, b):  # type: ignore[no-untyped-def]
    """9. Where each word should be in it, by its rank in the list of the shorter context."""
    for i in range(asked):
        t = b.live[part + i]
        shorter = b.token[t, T_SIZE]
        rank = b.token[t, T_RANK]
        size, bit, step, keys, rest = open_ranks(b.search[i, S_BIT], shorter)
        # Where all words of the shorter context follow, ranks are places.
        low, high = (rank, rank + _1) if size == shorter else (_0, size)
        ask_key(b.search, i, rank, bit, step, keys, rest, low, high)
        b.token[t, T_SIZE] = size


@inlined
def find_ranks(k, part, asked, pairs, b):  # type: ignore[no-untyped-def]
    """11. The words in those lists; how many are found in all."""
    for i in range(asked):
        t = b.live[part + i]
        entries = b.search[i, S_HIGH]
        width = b.search[i, S_REST]
        at_bit = b.search[i, S_BIT]
        _, record = record_bits(b.search[i, S_LEVEL])
        place = find_few(at_bit, width, entries, b.search[i, S_KEY])
        place = place if width else _0
        b.token[t, T_RANK] = b.search[i, S_LOW] + place
        b.token[t, T_BIT] = at_bit + entries * width + place * record
        b.found[pairs] = t
        pairs += np.int64(place < entries)
    return pairs


@inlined
def read_records(low, words, block, k, first, pairs, extended, b):  # type: ignore[no-untyped-def]
    """12. What they say; how many tokens may have a context of k + 1 words, in `kept`."""
    for j in range(first, pairs):
        t = b.found[j]
        level = level_of(b.token[t - _1, T_TREE], k)
        flag_bits, record = record_bits(level)
        value = field(b.token[t, T_BIT], record)
        b.token[t, T_FOUND] = k + _1
        if has_prob(value, flag_bits):
            b.best[t] = log10_prob_of(value >> flag_bits, of(level, at.N_PROB_TABLE))
            b.token[t, T_MATCHED] = k + _1
        if matters(value, flag_bits):
            b.token[t, T_STATE] = k + _1
            if add_suffixes(low, words, block, k, t, b) == k:
                ask_children(level_of(b.token[t, T_TREE], k), b.node[t * b.lengths + k])
                b.kept[extended] = t
                extended += _1
    return extended


@inlined
def add_suffixes(low, words, block, k, t, b):  # type: ignore[no-untyped-def]
    """How many words the longest node of a token has, after those up to k words are found: a suffix
    that nothing extends was left out, and is on the way to them."""
    depth = b.token[t, T_NODES]
    while _2 <= depth and depth < k:
        level = level_of(b.token[t, T_TREE], depth)
        place = t * b.lengths + depth
        first, end = children(level, b.node[place])
        level = below(level)
        key = key_of(low, np.int64(words[block + t - depth - _1]))
        n = find_key(of(level, at.N_KEY) << _3, low.key_bits, first, end, key)
        if n < 0:
            break
        depth += _1
        b.node[place + _1] = n
        keep_weight(b, place + _1, node_code(level, n), of(level, at.N_BACKOFF_TABLE))
        b.token[t, T_NODES] = depth
    return depth


@inlined
def ask_keys(low, words, block, k, part, asked, b):  # type: ignore[no-untyped-def]
    """13. Where the context of k words should be below that of k - 1: what nothing extends has no
    weight and no list. How many may be there, in `live`."""
    alive = _0
    for j in range(part, part + asked):
        t = b.kept[j]
        level = level_of(b.token[t, T_TREE], k - _1)
        first, end = children(level, b.node[t * b.lengths + k - _1])
        if end > first:
            key = key_of(low, np.int64(words[block + t - k]))
            guess = first + share(key, end - first, low.key_bits)
            level = below(level)
            prefetch(of(level, at.N_KEY) + ((guess * low.key_bits) >> _3))
            b.search[alive, S_LEVEL] = level
            b.search[alive, S_LOW] = first
            b.search[alive, S_HIGH] = end
            b.search[alive, S_BIT] = guess
            b.search[alive, S_KEY] = key
            b.live[alive] = t
            alive += _1
    return alive


@inlined
def find_contexts(low, k, alive, b):  # type: ignore[no-untyped-def]
    """14. These contexts, and where their weights are."""
    nodes = _0
    for i in range(alive):
        t = b.live[i]
        level = b.search[i, S_LEVEL]
        n = find_near(
            of(level, at.N_KEY) << _3, low.key_bits, b.search[i, S_LOW], b.search[i, S_HIGH],
            b.search[i, S_BIT], b.search[i, S_KEY],
        )  # fmt: skip
        if n >= 0:
            b.node[t * b.lengths + k] = n
            b.token[t, T_NODES] = k
            ask_node_backoff(level, n)
            ask_place(level, n)
            b.live[nodes] = t
            nodes += _1
    for i in range(nodes):
        place = b.live[i] * b.lengths + k
        level = level_of(b.token[b.live[i], T_TREE], k)
        keep_weight(b, place, node_code(level, b.node[place]), of(level, at.N_BACKOFF_TABLE))


# ---------------------------------------------------------------------------------- the answers


@inlined
def put_answers(  # type: ignore[no-untyped-def]
    order, reach, block, here, b, log10_prob, matched_order, ngram_length, state_length
):
    """15. The weights of the contexts that do not have the word, from the longest down, and P."""
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
            # To add 0 changes no bit, and needs no guess at how many weights there are.
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
    """The last token stands before the next block."""
    last = here * b.lengths
    for k in range(_1, b.lengths):
        b.node[k] = b.node[last + k]
        b.weight[k] = b.weight[last + k]
        inside = b.address[last + k] == b.nothing + ((last + k) << _2)
        b.address[k] = b.nothing + (k << _2) if inside else b.address[last + k]
    b.token[0, T_TREE] = b.token[here, T_TREE]
    b.token[0, T_NODES] = b.token[here, T_NODES]
    b.token[0, T_STATE] = b.token[here, T_STATE]


@kernel(f"int64[:], uint16[:], int64, uint32[:], uint8[:], {ANSWERS}")
def score_tokens(  # type: ignore[no-untyped-def]
    trees, slots, order, words, reach, log10_prob, matched_order, ngram_length, state_length
):
    """Scores each word after those before it.

    Shapes      trees  (B,)  address of the view.tree_view of each shard of a set;  order  N
                slots  (4096,)  the shard of each slot
                words  (T,)  word ids, sentence after sentence
                reach  (T,) uint8  words of the sentence before each, N - 1 at most
                log10_prob  (T,) float32 filled, like those after it
                matched_order, ngram_length, state_length  (T,) uint8
    Guarantees  equals ngram.backoff.score bit for bit
    Trusts      ids below the vocabulary's size; reach[i] <= reach[i - 1] + 1: checked in text.score
    """
    low = low_of(trees[0])
    count = np.int64(len(words))
    b = make_block(count, order)
    before = _0, _0, low.list, _0, low.list, low.key_bits
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
            for i in range(asked):  # 2.
                ask_bucket(b.search, i, low.pair_bits)
            first = pairs
            pairs, lonely = find_pairs(part, asked, low.pair_bits, pairs, b)
            for j in range(lonely):
                ask_alone(low, np.int64(words[block + b.alone[j] - _1]))
            lonely, stored = read_pairs(low, trees, slots, words, block, first, pairs, lonely, b)
            open_roots(stored, b)
            read_alone(low, words, block, lonely, b)
            find_roots(stored, b)
            part += asked
        k = _2
        while k < order and pairs:
            alive = choose_live(reach, block, k, pairs, b)
            pairs, extended = _0, _0
            part = _0
            while part < alive:
                asked = min(alive - part, np.int64(STAGE))
                ask_node_lists(k, part, asked, b)
                open_node_lists(part, asked, b)
                for i in range(asked):  # 10.
                    _, record = record_bits(b.search[i, S_LEVEL])
                    ask_bucket(b.search, i, record)
                first = pairs
                pairs = find_ranks(k, part, asked, pairs, b)
                extended = read_records(low, words, block, k, first, pairs, extended, b)
                part += asked
            k += _1
            part = _0
            while k < order and part < extended:
                asked = min(extended - part, np.int64(STAGE))
                find_contexts(low, k, ask_keys(low, words, block, k, part, asked, b), b)
                part += asked
        put_answers(
            order, reach, block, here, b, log10_prob, matched_order, ngram_length, state_length
        )
        begin_next(here, b)
        block += here
