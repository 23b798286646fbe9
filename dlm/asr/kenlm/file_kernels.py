"""One word after one state of a KenLM file, in the tables of `kernels.py`.

In a row of these tables, the contexts are the weights of the state's last word, its last two, ...,
float32: what KenLM keeps in a state.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np
from numba import types

from dlm.asr.kenlm.kernels import (
    ASKED,
    CONTEXTS,
    COUNT,
    ROW_BITS,
    ROWS,
    STRIDE,
    VIEW,
    add_one,
    find_row,
    line_of,
    put_next,
    put_state,
    put_step,
    recall,
    row_in,
)
from dlm.asr.kenlm.row_kernels import HEAD_BYTES
from dlm.jit import inlined, kernel
from dlm.kenlm.block_kernels import BLOCK, COLUMNS, FOUND, PROB, STATE, cell, get, score_block
from dlm.kenlm.kernels import IS_TRIE, ORDER, of
from dlm.kenlm.score_kernels import charged, score_word, weigh
from dlm.ngram.memory_kernels import as_float32, bits_of_float32, load32, load64, load_float32

_0, _1, _2, _4, _8, _16, _32 = (np.int64(n) for n in (0, 1, 2, 4, 8, 16, 32))
_HEAD = np.int64(HEAD_BYTES)


# Of CPython: what a built-in function makes numbers of its arguments with, and its result.
_number_of = types.ExternalFunction("PyLong_AsLongLong", types.int64(types.int64))
_number = types.ExternalFunction("PyLong_FromLongLong", types.int64(types.int64))
_float = types.ExternalFunction("PyFloat_FromDouble", types.int64(types.float64))
_new_tuple = types.ExternalFunction("PyTuple_New", types.int64(types.int64))
_set_item = types.ExternalFunction("PyTuple_SetItem", types.int32(*3 * [types.int64]))


@inlined
def pair(log10_prob, answer):  # type: ignore[no-untyped-def]
    """A tuple of a float and an int, by its address."""
    made = _new_tuple(_2)
    _set_item(made, _0, _float(np.float64(log10_prob)))
    _set_item(made, _1, _number(answer))
    return made


@kernel("int64, int64, int64", nogil=False)
def step(_, arguments, count):  # type: ignore[no-untyped-def]
    """Scores a word after a state, as `kernels.step`: with KenLM's bits. For `jit.builtin`.

    Args  arguments  table, state and word, as `kernels.step` has them
    """
    table, state = _number_of(load64(arguments)), row_in(_number_of(load64(arguments + _8)))
    word = _number_of(load64(arguments + _16))
    key = (state << _32 | word) + _1
    line = line_of(table, key)
    value = recall(table, line, key)
    if value >= 0:
        return pair(as_float32(value), value >> _32)
    view, contexts = of(table, VIEW), of(table, CONTEXTS)
    row = of(table, ROWS) + state * of(table, STRIDE)
    new = of(table, ROWS) + of(table, COUNT) * of(table, STRIDE)
    log10_prob, found, reach = score_word(
        view, of(view, IS_TRIE), of(view, ORDER), word, load32(row), row + _HEAD, _4,
        row + contexts, new + contexts,
    )  # fmt: skip
    put_next(table, state, word, reach)
    after, _ = find_row(table)
    if after < 0:
        return pair(np.float32(0), after)
    after |= found << np.int64(ROW_BITS)
    put_step(line, key, after << _32 | bits_of_float32(log10_prob))
    add_one(table, ASKED)
    return pair(log10_prob, after)


@kernel("int64, uint32[:]", nogil=False)
def enter_state(table, words):  # type: ignore[no-untyped-def]
    """As `kernels.enter_state`."""
    row = put_state(table, words)
    view = of(table, VIEW)
    weights = row + of(table, CONTEXTS)
    weigh(view, of(view, IS_TRIE), np.int64(len(words)), row + _HEAD, _4, weights)
    count, _ = find_row(table)
    return count


@kernel("int64, int64[:], uint32[:, :], out float32[:, :], out uint8[:, :]")
def score_rows(table, rows, words, log10_prob, reach):  # type: ignore[no-untyped-def]
    """As `kernels.score_rows`."""
    view = of(table, VIEW)
    room = np.empty(COLUMNS * BLOCK, np.int64)
    block, width = np.int64(room.ctypes.data), words.shape[1]
    for k in range(len(rows)):
        here = np.int64(words.ctypes.data) + np.int64(k * width * 4 if len(words) > 1 else 0)
        row = of(table, ROWS) + rows[k] * of(table, STRIDE)
        length, weights = load32(row), row + of(table, CONTEXTS)
        for first in range(0, width, BLOCK):
            count = min(np.int64(width - first), np.int64(BLOCK))
            at = here + np.int64(first) * _4
            rest = np.int64(width - first) - count
            score_block(view, of(view, IS_TRIE), at, count, rest, row + _HEAD, _4, length, block)
            for i in range(count):
                prob, found = load_float32(cell(block, PROB, i)), get(block, FOUND, i)
                log10_prob[k, first + i] = charged(prob, found, length, weights)
                reach[k, first + i] = np.uint8(get(block, STATE, i))
