"""Scores a sentence of text in one call, whose arguments are all integers."""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from dlm.index.search.text.kernels import score_tokens
from dlm.index.search.view import LOW_PLACES
from dlm.jit import inlined, kernel
from dlm.kenlm.score_kernels import TEXT_BYTES
from dlm.ngram.kernels import bytes_at, find_word, hash_word, note_word

# Indices into a model's description, an array of int64.
(
    ASKED,  # words scored so far
    TABLE,  # address of an unpacked model's table
    LOW,  # address of the view of the low orders
    TREES,  # address of an array with the address of each tree's view
    SHARDS,
    SHARD_OF_SLOT,  # address of an array with the shard of each slot
    ORDER,
    BEGIN_ID,
    END_ID,
    SLOTS,  # this and the next three: the word table's addresses and mask, see ngram.kernels
    SLOT_MASK,
    WORD_BEGIN,
    WORD_BYTES,
    DELIMITERS,
    SCRATCH,  # address of a buffer for the words of a sentence and their results
    PLACES,
) = range(16)

SHARD_SLOTS = 4096  # equals `ngram.partition.SLOTS`
TOKENS = TEXT_BYTES // 2 + 2
AT_ONCE = 32
SCRATCH_BYTES = 16 * TOKENS + 32 * AT_ONCE


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


bytes_behind = _pointer_to(types.uint8)
numbers_behind = _pointer_to(types.int64)
words_behind = _pointer_to(types.uint64)
shards_behind = _pointer_to(types.uint16)
ids_behind = _pointer_to(types.uint32)
floats_behind = _pointer_to(types.float32)


@inlined
def read_words(model, text_at, size):  # type: ignore[no-untyped-def]
    model_ = numbers_behind(model)
    text = bytes_behind(text_at)
    slots, mask = words_behind(model_[SLOTS]), np.uint64(model_[SLOT_MASK])
    word_begin, word_bytes = numbers_behind(model_[WORD_BEGIN]), bytes_behind(model_[WORD_BYTES])
    delimiters = bytes_behind(model_[DELIMITERS])
    words = ids_behind(model_[SCRATCH])
    numbers = model_[SCRATCH] + 16 * TOKENS
    begins, lengths = numbers_behind(numbers), numbers_behind(numbers + 8 * AT_ONCE)
    firsts = words_behind(numbers + 16 * AT_ONCE)
    hashes = words_behind(numbers + 24 * AT_ONCE)
    count = np.int64(0)
    at = np.int64(0)
    while at < size:
        asked = np.int64(0)
        while asked < AT_ONCE and at < size:
            if delimiters[text[at]] != 0:
                at += 1
                continue
            at = note_word(
                text, at, delimiters, slots, mask, asked, begins, lengths, firsts, hashes
            )
            asked += 1
        for i in range(asked):
            word = find_word(
                slots, mask, word_begin, word_bytes, text, begins[i], lengths[i], firsts[i],
                hashes[i],
            )  # fmt: skip
            words[count] = max(word, 0)
            count += 1
    return count


@kernel("int64, int64, int64, int64, int64", nogil=False)
def score_sentence(model, text_at, size, bos, eos):  # type: ignore[no-untyped-def]
    """Returns the sum of the scores of a sentence's words, in double precision.

    Args    model, text_at  addresses of a model's description, and of at most TEXT_BYTES of text
    Trusts  that a delimiter follows the text, then PAD_BYTES more bytes
    """
    model_ = numbers_behind(model)
    order = model_[ORDER]
    longest = max(order - 1, 0)
    scratch = model_[SCRATCH]
    words = carray(ids_behind(scratch), TOKENS)
    reach = carray(bytes_behind(scratch + 4 * TOKENS), TOKENS)
    log10_prob = carray(floats_behind(scratch + 8 * TOKENS), TOKENS)
    rest = carray(bytes_behind(scratch + 12 * TOKENS), (3, TOKENS))
    count = read_words(model, text_at, size)
    if bos:
        for i in range(count, 0, -1):
            words[i] = words[i - 1]
        words[0] = model_[BEGIN_ID]
        count += 1
    if eos:
        words[count] = model_[END_ID]
        count += 1
    for i in range(count):
        reach[i] = min(np.int64(i), longest)
    low = carray(numbers_behind(model_[LOW]), LOW_PLACES)
    trees = carray(numbers_behind(model_[TREES]), model_[SHARDS])
    slots = carray(shards_behind(model_[SHARD_OF_SLOT]), SHARD_SLOTS)
    score_tokens(
        low, trees, slots, order, words[:count], reach[:count], log10_prob[:count], rest[0, :count],
        rest[1, :count], rest[2, :count],
    )  # fmt: skip
    model_[ASKED] += count - bos
    total = 0.0
    for i in range(np.int64(bos), count):
        total += np.float64(log10_prob[i])
    return total


@kernel("int64, int64, int64", nogil=False)
def find_id(model, text_at, size):  # type: ignore[no-untyped-def]
    """Returns a word's id, 0 if it is unknown. Trusts that PAD_BYTES more bytes follow the word."""
    model_ = numbers_behind(model)
    text = bytes_behind(text_at)
    slots, mask = words_behind(model_[SLOTS]), np.uint64(model_[SLOT_MASK])
    word_begin, word_bytes = numbers_behind(model_[WORD_BEGIN]), bytes_behind(model_[WORD_BYTES])
    first = bytes_at(text, np.int64(0), size)
    h = hash_word(text, np.int64(0), size, first)
    word = find_word(slots, mask, word_begin, word_bytes, text, np.int64(0), size, first, h)
    return max(word, 0)
