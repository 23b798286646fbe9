"""Steps in an unpacked model, with one hash-table lookup for each context length tried.

The contexts that matter (those that n-grams extend, or that have a back-off weight) are numbered
from 1; 0 is the empty context. The table maps (context, word) to the n-gram's probability and the
context after the word. If an entry is missing, the context's back-off weight is added, and the
next shorter context is tried.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.asr.kenlm.kernels import ASKED, HITS, ROW_BITS, add_one, row_in
from dlm.asr.kenlm.sentence_kernels import (
    ASKED as TEXT_ASKED,
    BEGIN_ID,
    END_ID,
    SCRATCH,
    TABLE,
    ids_behind,
    numbers_behind,
    read_words,
)
from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import (
    as_float32,
    bits_of_float32,
    load32,
    load64,
    load_float32,
    of,
    prefetch,
    store32,
    store64,
)

# Indices into a table, an array of int64.
(
    ENTRIES,  # address of the hash table; an entry is (context, word) and its value, 16 bytes
    SIZE,  # number of entries that the hash table has room for
    CONTEXTS,  # address; per context: a float32 weight, and the next shorter context, uint32
    WORDS,  # address; per word: float32 log10 P, and uint32 context after the word alone
    PLACES,
) = range(HITS + 1, HITS + 6)

ENTRY_BYTES = 16
_0, _1, _3, _4, _8 = np.int64(0), np.int64(1), np.int64(3), np.int64(4), np.int64(8)
_32 = np.int64(32)
_LOW_32 = np.int64((1 << 32) - 1)
_MIX = np.int64(-7046029254386353131)  # 2**64 over the golden ratio
# A blank, which only closes the model under suffixes, has these bits instead of a probability.
BLANK_BITS = np.int64(0x7FC00000)


@inlined
def slot_of(table, key):  # type: ignore[no-untyped-def]
    mixed = (key ^ (key >> _32)) * _MIX
    place = (((mixed >> _32) & _LOW_32) * of(table, SIZE)) >> _32
    return of(table, ENTRIES) + place * np.int64(ENTRY_BYTES)


@inlined
def find(table, key):  # type: ignore[no-untyped-def]
    """Returns a key's value, or -1 if the key is missing. A value is made of a probability's bits
    and, from bit 32 on, an answer in the form that `kernels.step` returns."""
    return find_from(table, slot_of(table, key), key)


@inlined
def find_from(table, at, key):  # type: ignore[no-untyped-def]
    end = of(table, ENTRIES) + of(table, SIZE) * np.int64(ENTRY_BYTES)
    while True:
        found = load64(at)
        if found == key:
            return load64(at + _8)
        if found == 0:
            return np.int64(-1)
        at += np.int64(ENTRY_BYTES)
        if at == end:
            at = of(table, ENTRIES)


@inlined
def put(table, key, value):  # type: ignore[no-untyped-def]
    at = slot_of(table, key)
    end = of(table, ENTRIES) + of(table, SIZE) * np.int64(ENTRY_BYTES)
    while load64(at) != 0:
        at += np.int64(ENTRY_BYTES)
        if at == end:
            at = of(table, ENTRIES)
    store64(at, key)
    store64(at + _8, value)


@kernel(
    "int64, int64, int64, int64[:], uint32[:], float32[:], bool[:], uint32[:], out uint32[:], "
    "out uint32[:]"
)
def enter_order(  # type: ignore[no-untyped-def]
    table, order, first, prefix, word, log10_backoff, extended, context_of, suffix, after
):
    """Enters the n-grams of one order. Calls must be in ascending order, from order 1.

    Args    first  row of the order's first n-gram; rows number the n-grams of all orders from 1
    Shapes
        prefix, word, log10_backoff, extended  (n,)  `prefix`: row of the n-gram without its last
                       word, 0 for a 1-gram
        context_of     (rows,)  the number of each n-gram as a context; 0: it is not a context
        suffix, after  (rows,)  filled for these n-grams: row of the n-gram without its first word;
                       number of the n-gram's longest suffix that matters
    Trusts  the table has room; the model is closed under suffixes; 1-grams are all numbered
    """
    for i in range(len(word)):
        if order > 1 and i + 16 < len(word):
            ahead = np.int64(context_of[prefix[i + 16]]) << _32 | np.int64(word[i + 16])
            prefetch(slot_of(table, ahead))
        row = first + i
        shorter = _0
        if order == 2:
            shorter = np.int64(word[i]) + _1
        elif order > 2:
            key = np.int64(context_of[suffix[prefix[i]]]) << _32 | np.int64(word[i])
            shorter = find(table, key)  # until `finish`, values in the table are rows
        suffix[row] = shorter
        after[row] = context_of[row] if extended[i] else after[shorter]
        if context_of[row]:
            context = of(table, CONTEXTS) + (np.int64(context_of[row]) << _3)
            store32(context, bits_of_float32(log10_backoff[i]))
            store32(context + _4, np.int64(after[shorter]))
        if order > 1:
            put(table, np.int64(context_of[prefix[i]]) << _32 | np.int64(word[i]), row)


@kernel("int64, float32[:], bool[:], uint32[:], uint8[:]")
def finish(table, log10_prob, blank, after, order_of):  # type: ignore[no-untyped-def]
    """Replaces the row numbers in the table by answers. Shapes: (rows,) for each array."""
    at = of(table, ENTRIES)
    for _ in range(of(table, SIZE)):
        if load64(at) != 0:
            row = load64(at + _8)
            bits = bits_of_float32(log10_prob[row])
            if blank[row]:
                bits = BLANK_BITS
            found = np.int64(order_of[row]) << np.int64(ROW_BITS)
            store64(at + _8, (found | np.int64(after[row])) << _32 | bits)
        at += np.int64(ENTRY_BYTES)


@inlined
def step_from(table, context, word):  # type: ignore[no-untyped-def]
    added = np.float32(0.0)
    answer = np.int64(-1)
    while context != 0:
        there = of(table, CONTEXTS) + (context << _3)
        prefetch(there)
        value = find(table, context << _32 | word)
        if value != -1:
            if answer < 0:
                answer = value >> _32
            if value & _LOW_32 != BLANK_BITS:
                return np.float32(added + as_float32(value)), answer
        added = np.float32(added + load_float32(there))
        context = load32(there + _4)
    there = of(table, WORDS) + (word << _3)
    if answer < 0:
        answer = _1 << np.int64(ROW_BITS) | load32(there + _4)
    return np.float32(added + load_float32(there)), answer


@kernel("int64, int64, int64", nogil=False)
def step(table, context, word):  # type: ignore[no-untyped-def]
    add_one(table, ASKED)
    log10_prob, answer = step_from(table, row_in(context), word)
    return np.float64(log10_prob), answer


@kernel("int64, int64, int64, int64, int64", nogil=False)
def score_sentence(model, text_at, size, bos, eos):  # type: ignore[no-untyped-def]
    model_ = numbers_behind(model)
    table = model_[TABLE]
    words = ids_behind(model_[SCRATCH])
    count = read_words(model, text_at, size)
    before = model_[BEGIN_ID]
    for i in range(count):
        word = np.int64(words[i])
        prefetch(of(table, WORDS) + (word << _3))
        if i or bos:
            prefetch(slot_of(table, (before + _1) << _32 | word))
        before = word
    if eos:
        words[count] = model_[END_ID]
        count += 1
    model_[TEXT_ASKED] += count
    context = _0
    if bos:
        context = load32(of(table, WORDS) + (model_[BEGIN_ID] << _3) + _4)
    total = 0.0
    for i in range(count):
        log10_prob, answer = step_from(table, context, np.int64(words[i]))
        context = row_in(answer)
        total += np.float64(log10_prob)
    return total


BLOCK = 32  # words whose entries are prefetched before the first is read
LONGEST = 256  # maximum length of a context, since an order is a uint8


@kernel("int64, int64[:], uint32[:, :], out float32[:, :]")
def score_rows(table, contexts, words, log10_prob):  # type: ignore[no-untyped-def]
    """Scores words after contexts. A context's shortest suffix is tried first: if a word does not
    follow it, longer ones are skipped, since the model with its blanks is closed under suffixes.

    Shapes      contexts (K,) int64;  words (1, W) for all contexts, or (K, W), uint32
                log10_prob (K, W) float32  filled
    Guarantees  equals `step` bit for bit: weights are added from the longest context down
    Trusts      valid numbers of contexts, ids below the vocabulary's size
    """
    width = words.shape[1]
    parts = np.empty(LONGEST, np.int64)
    above = np.empty(LONGEST, np.float32)  # for each part, the total weight of the longer ones
    slots = np.empty(BLOCK, np.int64)
    for k in range(len(contexts)):
        row = words[k if len(words) > 1 else 0]
        depth = 0
        weight = np.float32(0.0)
        context = contexts[k]
        while context != 0:
            parts[depth], above[depth] = context, weight
            depth += 1
            there = of(table, CONTEXTS) + (context << _3)
            weight = np.float32(weight + load_float32(there))
            context = load32(there + _4)
        shortest = parts[depth - 1] << _32 if depth else _0
        for begin in range(0, width, BLOCK):
            asked = min(width - begin, BLOCK)
            for i in range(asked):
                word = np.int64(row[begin + i])
                prefetch(of(table, WORDS) + (word << _3))
                if depth:
                    slots[i] = slot_of(table, shortest | word)
                    prefetch(slots[i])
            for i in range(asked):
                word = np.int64(row[begin + i])
                there = of(table, WORDS) + (word << _3)
                total = np.float32(weight + load_float32(there))
                part = depth - 1
                value = find_from(table, slots[i], shortest | word) if depth else np.int64(-1)
                while value != -1:
                    if value & _LOW_32 != BLANK_BITS:
                        total = np.float32(above[part] + as_float32(value))
                    part -= 1
                    if part < 0:
                        break
                    value = find(table, parts[part] << _32 | word)
                log10_prob[k, begin + i] = total
