"""Scores a word after a state (a *step*), in one call with integer arguments. Tables are passed as
addresses, since passing an array takes as long as a step. The GIL is held: threads need no lock."""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np
from numba import types

from dlm.asr.kenlm.row_kernels import (
    HEAD_BYTES,
    ask_ahead,
    put_word_at,
    search,
    search_longer,
    walk,
    weight_from,
    word_at,
)
from dlm.index.search.step_kernels import alone, find_pair, list_after, low_of
from dlm.jit import inlined, kernel
from dlm.kenlm.kernels import IS_TRIE, ORDER as FILE_ORDER
from dlm.kenlm.score_kernels import (
    BLOCK,
    COLUMNS,
    FOUND,
    PROB,
    cell,
    charged,
    get,
    score_block,
    score_word,
    weigh,
)
from dlm.ngram.memory_kernels import (
    as_float32,
    bits_of_float32,
    load32,
    load64,
    load_float32,
    mask_of,
    of,
    store32,
    store64,
)

# Indices into a table, an array of int64. An unpacked model's table shares only the first two.
(
    ASKED,
    HITS,
    CACHE,  # address of the cache, of lines of four steps
    LINE_MASK,
    VIEW,  # address of the view of the low orders
    TREE,  # address of the view of the tree, if there is one for the whole model; otherwise 0
    ORDER,
    ROWS,  # address of the rows, one per state; see row_kernels
    STRIDE,  # bytes of a row
    CONTEXTS,  # bytes of a row before its contexts
    COUNT,  # rows in use
    CAPACITY,
    SLOTS,  # address of the hash table of rows: int64, row + 1, or 0
    SLOT_MASK,
    PLACES,
) = range(15)

WAYS = 4  # steps in a cache line; a step is two int64, so a line has 64 bytes
LINE_BYTES = 16 * WAYS
# A step's answer has the next state's row in its low ROW_BITS bits, and above them the length of
# the n-gram found. An answer can be passed as a state: `row_in` extracts the row.
ROW_BITS = 27
# A step returns one of these values if it has no answer.
NEEDS_SHARD, FULL = -1, -2

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
_4, _8, _16, _32 = np.int64(4), np.int64(8), np.int64(16), np.int64(32)
_MIX = np.int64(-7046029254386353131)  # 2**64 over the golden ratio
_LOW_32 = np.int64((1 << 32) - 1)
_HEAD = np.int64(HEAD_BYTES)


@inlined
def row_in(state):  # type: ignore[no-untyped-def]
    return state & mask_of(np.int64(ROW_BITS))


@inlined
def add_one(table, place):  # type: ignore[no-untyped-def]
    store64(table + (np.int64(place) << _3), of(table, place) + _1)


@inlined
def line_of(table, key):  # type: ignore[no-untyped-def]
    mixed = (key ^ (key >> _32)) * _MIX
    return of(table, CACHE) + ((mixed >> _32) & of(table, LINE_MASK)) * np.int64(LINE_BYTES)


@inlined
def put_step(line, key, value):  # type: ignore[no-untyped-def]
    for way in range(WAYS - 1, 0, -1):
        here = line + np.int64(way) * _16
        store64(here, load64(here - _16))
        store64(here + np.int64(8), load64(here - np.int64(8)))
    store64(line, key)
    store64(line + np.int64(8), value)


@inlined
def recall(table, line, key):  # type: ignore[no-untyped-def]
    """Returns a step's value from its cache line and counts the query; or returns -1 if absent."""
    for way in range(WAYS):
        here = line + np.int64(way) * _16
        if load64(here) == key:
            add_one(table, ASKED)
            add_one(table, HITS)
            return load64(here + np.int64(8))
    return np.int64(-1)


@inlined
def find_row(table):  # type: ignore[no-untyped-def]
    """Adds the row written after the last one, unless an equal row exists. Returns the row's number
    (FULL: no room), and whether it is new. Trusts that there is space for CAPACITY + 1 rows."""
    rows, stride, count = of(table, ROWS), of(table, STRIDE), of(table, COUNT)
    row = rows + count * stride
    length = load32(row)
    mixed = length
    for i in range(length):
        mixed = (mixed ^ word_at(row, np.int64(i))) * _MIX
        mixed ^= mixed >> _32
    slots, mask = of(table, SLOTS), of(table, SLOT_MASK)
    slot = (mixed * _MIX >> _32) & mask
    while True:
        other = of(slots, slot)
        if other == 0:
            break
        there = rows + (other - _1) * stride
        same = load32(there) == length
        for i in range(length):
            same = same and word_at(there, np.int64(i)) == word_at(row, np.int64(i))
        if same:
            return other - _1, False
        slot = (slot + _1) & mask
    if count == of(table, CAPACITY):
        return np.int64(FULL), False
    store64(slots + (slot << _3), count + _1)
    store64(table + (np.int64(COUNT) << _3), count + _1)
    return count, True


@inlined
def enter_row(table):  # type: ignore[no-untyped-def]
    count, is_new = find_row(table)
    if is_new:
        row = of(table, ROWS) + count * of(table, STRIDE)
        contexts = row + of(table, CONTEXTS)
        walk(of(table, VIEW), of(table, TREE), of(table, ORDER), row, contexts)
    return count


@inlined
def put_next(table, state, word, length):  # type: ignore[no-untyped-def]
    stride = of(table, STRIDE)
    before = of(table, ROWS) + state * stride
    row = of(table, ROWS) + of(table, COUNT) * stride
    store32(row, length)
    put_word_at(row, _0, word)
    for i in range(1, length):
        put_word_at(row, np.int64(i), word_at(before, np.int64(i) - _1))


@inlined
def next_row(table, state, word, length):  # type: ignore[no-untyped-def]
    """Returns the row of the state with the last `length` words of (`state`, `word`), or FULL."""
    put_next(table, state, word, length)
    return enter_row(table)


@inlined
def put_state(table, words):  # type: ignore[no-untyped-def]
    """Writes a state's words, newest first, to a row after the last one; returns its address."""
    row = of(table, ROWS) + of(table, COUNT) * of(table, STRIDE)
    store32(row, np.int64(len(words)))
    for i in range(len(words)):
        put_word_at(row, np.int64(i), np.int64(words[i]))
    return row


@inlined
def take_step(table, state, word):  # type: ignore[no-untyped-def]
    state = row_in(state)
    key = (state << _32 | word) + _1
    line = line_of(table, key)
    value = recall(table, line, key)
    if value >= 0:
        return np.float64(as_float32(value)), value >> _32
    row = of(table, ROWS) + state * of(table, STRIDE)
    ask_ahead(of(table, VIEW), row, row + of(table, CONTEXTS), word)
    tree = of(table, TREE)
    if load32(row + _4) and not tree:
        return 0.0, np.int64(NEEDS_SHARD)
    contexts = row + of(table, CONTEXTS)
    log10_prob, found, reach = search(of(table, VIEW), tree, row, contexts, word)
    after = next_row(table, state, word, reach)
    if after < 0:
        return 0.0, after
    after |= found << np.int64(ROW_BITS)
    put_step(line, key, after << _32 | bits_of_float32(log10_prob))
    add_one(table, ASKED)
    return np.float64(log10_prob), after


@kernel("int64, int64, int64", nogil=False)
def step(table, state, word):  # type: ignore[no-untyped-def]
    """Scores a word after a state.

    Args        table, word  address of the table, and an id below the vocabulary's size
                state        a row in use, or the answer of the step that led to the state
    Returns     (log10 P, answer). An answer is the next state's row and, from bit ROW_BITS on,
                KenLM's ngram_length; or NEEDS_SHARD, if only a shard's tree can answer; or FULL
    Guarantees  equals ngram.backoff.score bit for bit
    """
    return take_step(table, state, word)


@kernel("int64, int64[:], int64[:], out float64[:], out int64[:]", nogil=False)
def step_all(table, states, words, log10_prob, answers):  # type: ignore[no-untyped-def]
    """Like `step`, for several words, each after its own state."""
    for i in range(len(states)):
        log10_prob[i], answers[i] = take_step(table, states[i], words[i])


@kernel(
    "int64, int64, uint32[:], float32[:], uint8[:], uint8[:], bool, bool, out int64[:]",
    nogil=False,
)
def enter_steps(  # type: ignore[no-untyped-def]
    table, state, words, log10_prob, found, reach, keep, follow, answers
):
    """Enters a shard's answers to words: all after one state, or each after the previous word.

    Args  found, reach  KenLM's ngram_length, and how many words of (state, word) the next state has
          keep, follow  whether to cache the answers, and whether each word follows the previous one
          answers  filled with answers as `step` returns them; after a FULL, all are FULL
    """
    for i in range(len(words)):
        state, word = row_in(state), np.int64(words[i])
        after = next_row(table, state, word, np.int64(reach[i]))
        if after < 0:
            answers[i:] = after
            return
        after |= np.int64(found[i]) << np.int64(ROW_BITS)
        if keep:
            key = (state << _32 | word) + _1
            bits = bits_of_float32(log10_prob[i]) & _LOW_32
            put_step(line_of(table, key), key, after << _32 | bits)
        add_one(table, ASKED)
        answers[i] = after
        if follow:
            state = after


@kernel("int64, uint32[:]", nogil=False)
def enter_state(table, words):  # type: ignore[no-untyped-def]
    """Returns the row of the state with these words, newest first, or FULL. Trusts that there are
    fewer words than the order, and that ids are below the vocabulary's size."""
    put_state(table, words)
    return enter_row(table)


@kernel("int64, int64[:], uint32[:, :], out float32[:, :]")
def score_rows(table, rows, words, log10_prob):  # type: ignore[no-untyped-def]
    """Scores words after states of a table that has the whole model.

    Shapes      rows (K,) int64;  words (1, W) for all states, or (K, W), uint32
                log10_prob (K, W) float32  filled
    Guarantees  equals ngram.backoff.score bit for bit
    Trusts      rows in use, ids below the vocabulary's size
    """
    low, tree = low_of(of(table, VIEW)), of(table, TREE)
    single = np.empty(words.shape[1], np.float32)
    for k in range(len(rows)):
        here = words[k if len(words) > 1 else 0]
        if k == 0 or len(words) > 1:
            for i in range(len(here)):
                single[i], _ = alone(low, np.int64(here[i]))
        row = of(table, ROWS) + rows[k] * of(table, STRIDE)
        contexts = row + of(table, CONTEXTS)
        length = load32(row)
        weight = weight_from(contexts, length, 1)
        size, bit, width = _0, _0, _1
        if length:
            _, size, bit, width = list_after(low, word_at(row, _0))
        for i in range(len(here)):
            word, best = np.int64(here[i]), single[i]
            log10_prob[k, i] = np.float32(weight + best)
            place, value_at = find_pair(low, size, bit, width, word) if size else (-_1, _0)
            if place >= 0:
                _, matched, _, longer = search_longer(
                    low, tree, contexts, length, word, place, value_at
                )
                if matched > 1:
                    best = longer
                log10_prob[k, i] = np.float32(weight_from(contexts, length, matched) + best)


# ------------------------------------------------------------------------------- in a KenLM file
# Here the contexts of a row are only float32 weights: of the state's last word, of its last two
# words, and so on, as in KenLM's own states.

# Functions of CPython with which a built-in function converts its arguments and its result.
_number_of = types.ExternalFunction("PyLong_AsLongLong", types.int64(types.int64))
_number = types.ExternalFunction("PyLong_FromLongLong", types.int64(types.int64))
_float = types.ExternalFunction("PyFloat_FromDouble", types.int64(types.float64))
_new_tuple = types.ExternalFunction("PyTuple_New", types.int64(types.int64))
_set_item = types.ExternalFunction("PyTuple_SetItem", types.int32(*3 * [types.int64]))


@inlined
def pair(log10_prob, answer):  # type: ignore[no-untyped-def]
    made = _new_tuple(_2)
    _set_item(made, _0, _float(np.float64(log10_prob)))
    _set_item(made, _1, _number(answer))
    return made


@inlined
def take_step_in_file(table, state, word):  # type: ignore[no-untyped-def]
    key = (state << _32 | word) + _1
    line = line_of(table, key)
    value = recall(table, line, key)
    if value >= 0:
        return as_float32(value), value >> _32
    view, contexts = of(table, VIEW), of(table, CONTEXTS)
    row = of(table, ROWS) + state * of(table, STRIDE)
    new = of(table, ROWS) + of(table, COUNT) * of(table, STRIDE)
    log10_prob, found, reach = score_word(
        view, of(view, IS_TRIE), of(view, FILE_ORDER), word, load32(row), row + _HEAD, _4,
        row + contexts, new + contexts,
    )  # fmt: skip
    put_next(table, state, word, reach)
    after, _ = find_row(table)
    if after < 0:
        return np.float32(0), after
    after |= found << np.int64(ROW_BITS)
    put_step(line, key, after << _32 | bits_of_float32(log10_prob))
    add_one(table, ASKED)
    return log10_prob, after


@kernel("int64, int64, int64", nogil=False)
def step_in_file(_, arguments, count):  # type: ignore[no-untyped-def]
    """Like `step`, with exactly KenLM's scores. Takes an array of arguments, for `jit.builtin`."""
    table, state = _number_of(load64(arguments)), row_in(_number_of(load64(arguments + _8)))
    log10_prob, answer = take_step_in_file(table, state, _number_of(load64(arguments + _16)))
    return pair(log10_prob, answer)


@kernel("int64, int64[:], int64[:], out float64[:], out int64[:]", nogil=False)
def step_all_in_file(table, states, words, log10_prob, answers):  # type: ignore[no-untyped-def]
    for i in range(len(states)):
        prob, answers[i] = take_step_in_file(table, row_in(states[i]), words[i])
        log10_prob[i] = np.float64(prob)


@kernel("int64, uint32[:]", nogil=False)
def enter_state_of_file(table, words):  # type: ignore[no-untyped-def]
    row = put_state(table, words)
    view = of(table, VIEW)
    weights = row + of(table, CONTEXTS)
    weigh(view, of(view, IS_TRIE), np.int64(len(words)), row + _HEAD, _4, weights)
    count, _ = find_row(table)
    return count


@kernel("int64, int64[:], uint32[:, :], out float32[:, :]")
def score_rows_in_file(table, rows, words, log10_prob):  # type: ignore[no-untyped-def]
    view, room = of(table, VIEW), np.empty(COLUMNS * BLOCK, np.int64)
    block, width = np.int64(room.ctypes.data), np.int64(words.shape[1])
    for k in range(len(rows)):
        here = np.int64(words.ctypes.data) + np.int64(k if len(words) > 1 else 0) * width * _4
        row = of(table, ROWS) + rows[k] * of(table, STRIDE)
        length, weights = load32(row), row + of(table, CONTEXTS)
        for first in range(_0, width, np.int64(BLOCK)):
            count = min(width - first, np.int64(BLOCK))
            at, rest = here + first * _4, width - first - count
            score_block(view, of(view, IS_TRIE), at, count, rest, row + _HEAD, _4, length, block)
            for i in range(count):
                prob, found = load_float32(cell(block, PROB, i)), get(block, FOUND, i)
                log10_prob[k, first + i] = charged(prob, found, length, weights)
