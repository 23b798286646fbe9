"""Scores words like KenLM's `FullScore`: in text, in groups, and one at a time.

Words are scored one after another, as in KenLM. The memory that a word reads first is prefetched
some words earlier, so that several reads from memory overlap.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.kenlm.kernels import (
    AT,
    BEGIN,
    END,
    ENTRIES,
    ENTRY_SIZE,
    IS_TRIE,
    ORDER,
    UNIGRAM_BYTES,
    UNIGRAMS,
    WORDS,
    aim,
    ask_child,
    ask_word,
    bucket_of,
    child_near,
    children_of_word,
    extends,
    find_longer,
    key_of,
    level_of,
    murmur,
    probe,
    values_at,
    values_of_word,
    word_id,
)
from dlm.ngram.memory_kernels import (
    load8,
    load32,
    load64,
    load_float32,
    of,
    prefetch,
    store32,
    store64,
    store_float32,
)

ANSWERS = "out float32[:], out uint8[:], out uint8[:], out uint8[:]"
AHEAD = 8  # words scored between the prefetch for a word and its score
_0, _1, _2, _3, _4 = np.int64(0), np.int64(1), np.int64(2), np.int64(3), np.int64(4)


@inlined
def ask_ahead(view, is_trie, order, word, length, context, step):  # type: ignore[no-untyped-def]
    """Prefetches what `score_word` reads first, given the first seven of its arguments."""
    prefetch(of(view, UNIGRAMS) + word * of(view, UNIGRAM_BYTES))
    if not is_trie and length:
        key = key_of(word, load32(context))
        prefetch(bucket_of(level_of(view, _2), key))
        if length > _1 and order > _2:
            prefetch(bucket_of(level_of(view, _3), key_of(key, load32(context + step))))


@inlined
def ask_children(view, word, length, context):  # type: ignore[no-untyped-def]
    """Prefetches the estimated place of a word's 2-gram in a trie; first reads its 1-gram."""
    if length:
        first, end = children_of_word(view, word)
        ask_child(view, level_of(view, _2), first, end, load32(context))


@inlined
def score_word(view, is_trie, order, word, length, context, step, weights, after):  # type: ignore[no-untyped-def]
    """Scores a word after a state, as `FullScore` does.

    Args
        is_trie, order  of the view
        context   address of the newest of the state's `length` words, uint32; `step` is the number
                  of bytes from a word to the next older one
        weights   address of the float32 weights of the state's last word, of its last two, ...
        after     address to which the weights of the next state are written
    Returns  (log10 P, ngram_length, number of words of the next state)
    """
    prob, backoff, node, end, goes_on = values_of_word(view, is_trie, word)
    store_float32(after, backoff)
    found = _1
    state = _1 if extends(backoff) else _0
    n = _2
    while goes_on and n <= length + _1:
        is_found, longer, backoff, node, end, goes_on = find_longer(
            view, is_trie, n, node, end, load32(context)
        )
        if not is_found:
            break
        prob, found = longer, n
        if n == order:
            break
        store_float32(after + (n - _1) * _4, backoff)
        if extends(backoff):
            state = n
        context += step
        n += _1
    return charged(prob, found, length, weights), found, state


@inlined
def charged(prob, found, length, weights):  # type: ignore[no-untyped-def]
    """Adds to a word's log10 P the weights of the contexts that were not matched."""
    for k in range(found - _1, length):
        prob = np.float32(prob + load_float32(weights + np.int64(k) * _4))
    return prob


@inlined
def weigh(view, is_trie, length, context, step, weights):  # type: ignore[no-untyped-def]
    """Writes the weights of a context, as `GetState` does; returns the length of its state."""
    if not length:
        return _0
    _, _, state = score_word(
        view, is_trie, of(view, ORDER), load32(context), length - _1, context + step, step,
        weights, weights,
    )  # fmt: skip
    return state


# ---------------------------------------------------------------------- words after one context
# All words of a block are looked up in the 1-grams; then words that go on are looked up in the
# 2-grams, and so on. So reads from memory overlap, and no branch depends on whether one word is
# found. In a trie, a word's place among children is estimated, since ids are in the order of hashes
# and so spread evenly. The estimate is improved twice, each time by the word found there, and is
# then at most a few entries off.

BLOCK = 32
# Columns of a block, int64 each. For every word: log10 P (float32) before weights are added, the
# length of the n-gram found, and the next state's length. For each word that goes on: its index in
# the block, its node and end (see `find_longer`), and where to look first.
PROB, FOUND, STATE, ITEM, NODE, NODE_END, PLACE, COLUMNS = range(8)
_COLUMN = np.int64(8 * BLOCK)

_LINE = np.int64(40)  # distance of the two prefetches from an estimate, in bytes


@inlined
def cell(block, column, i):  # type: ignore[no-untyped-def]
    return block + np.int64(column) * _COLUMN + (np.int64(i) << _3)


@inlined
def get(block, column, i):  # type: ignore[no-untyped-def]
    return load64(cell(block, column, i))


@inlined
def put(block, column, i, value):  # type: ignore[no-untyped-def]
    store64(cell(block, column, i), np.int64(value))


@inlined
def go_on(level, is_trie, block, live, item, node, end, word, share):  # type: ignore[no-untyped-def]
    """Enters an item to look up in an order, and prefetches the first place to look; `word` is
    the context's word for that order, and `share` is that word's id / (number of words)."""
    if is_trie:
        place = min(node + np.int64(np.float32(end - node) * share), end - _1)
        prefetch(of(level, AT) + ((place * of(level, ENTRY_SIZE)) >> _3))
    else:
        node = key_of(node, word)
        place = bucket_of(level, node)
        prefetch(place)
    put(block, ITEM, live, item)
    put(block, NODE, live, node)
    put(block, NODE_END, live, end)
    put(block, PLACE, live, place)


@inlined
def score_block(view, is_trie, words, count, after, context, step, length, block):  # type: ignore[no-untyped-def]
    """Looks up words after one context.

    Args
        words    address of the ids of `count` words, BLOCK at most, uint32
        after    number of ids that follow these; their 1-grams are prefetched
        context  address of the newest of the context's `length` words, uint32; `step` is the
                 number of bytes from a word to the next older one
        block    address of room for COLUMNS * BLOCK int64; PROB, FOUND and STATE are filled
    """
    order = of(view, ORDER)
    each = np.float32(1) / np.float32(of(view, WORDS))
    unigrams, size = of(view, UNIGRAMS), of(view, UNIGRAM_BYTES)
    for i in range(count, count + min(after, np.int64(BLOCK))):
        prefetch(unigrams + load32(words + (np.int64(i) << _2)) * size)
    live, level = _0, level_of(view, _2)
    before = load32(context) if length else _0
    for i in range(count):
        prob, backoff, node, end, goes_on = values_of_word(
            view, is_trie, load32(words + (np.int64(i) << _2))
        )
        store_float32(cell(block, PROB, i), prob)
        put(block, FOUND, i, 1)
        put(block, STATE, i, extends(backoff))
        if length:
            share = np.float32(before) * each
            go_on(level, is_trie, block, live, i, node, end, before, share)
            live += np.int64(goes_on)
    n = _2
    while live:
        entries, size = of(level, ENTRIES), of(level, ENTRY_SIZE)
        if is_trie:
            for j in range(live):
                first, end = get(block, NODE, j), get(block, NODE_END, j)
                place = aim(level, each, first, end, get(block, PLACE, j), before)
                put(block, PLACE, j, place)
                at = of(level, AT) + ((place * size) >> _3)
                prefetch(at - _LINE)
                prefetch(at + _LINE)
        found = _0
        for j in range(live):
            node = get(block, NODE, j)
            if is_trie:
                end = get(block, NODE_END, j)
                place = aim(level, each, node, end, get(block, PLACE, j), before)
                place = child_near(level, node, end, place, before)
            else:
                place = probe(of(level, AT), entries, size, get(block, PLACE, j), node)
            put(block, ITEM, found, get(block, ITEM, j))
            put(block, NODE, found, node)
            put(block, PLACE, found, place)
            found += np.int64(place != _0)
        live, level = _0, level_of(view, n + _1)
        context += step
        if n <= length:
            before = load32(context)
        share = np.float32(before) * each
        for j in range(found):
            item = get(block, ITEM, j)
            prob, backoff, node, end, goes_on = values_at(
                view, is_trie, n, get(block, PLACE, j), get(block, NODE, j)
            )
            store_float32(cell(block, PROB, item), prob)
            put(block, FOUND, item, n)
            if n < order and extends(backoff):
                put(block, STATE, item, n)
            if n <= length:
                go_on(level, is_trie, block, live, item, node, end, before, share)
                live += np.int64(goes_on)
        n += _1


@kernel(f"int64, uint32[:], uint8[:], bool, {ANSWERS}")
def score_tokens(  # type: ignore[no-untyped-def]
    view, words, reach, bos, log10_prob, matched_order, ngram_length, state_length
):
    """Scores each word of a text after the words before it.

    Shapes
        view     address of a file's view
        words    (T,)  uint32  ids, sentence after sentence, <s> before each if `bos`
        reach    (T,)  uint8   number of words before each in its sentence, at most order - 1
        log10_prob  (T,)  float32  filled, like the next three; the value for <s> means nothing
        matched_order, ngram_length, state_length  (T,) uint8; the first two are the same, since a
                 file does not say which n-grams are blanks
    Trusts   ids below the number of words; reach[i] <= reach[i - 1] + 1
    """
    order, is_trie = of(view, ORDER), of(view, IS_TRIE)
    room = np.empty(2 * order, np.float32)
    weights = np.int64(room.ctypes.data)
    after = weights + order * _4
    base = np.int64(words.ctypes.data)
    count = np.int64(len(words))
    length = _0
    for i in range(min(count, np.int64(AHEAD))):
        at = base + np.int64(i) * _4
        ask_ahead(view, is_trie, order, load32(at), np.int64(reach[i]), at - _4, -_4)
    for i in range(count):
        at = base + np.int64(i) * _4
        if i + AHEAD < count:
            there = at + np.int64(4 * AHEAD)
            reached = np.int64(reach[i + AHEAD])
            ask_ahead(view, is_trie, order, load32(there), reached, there - _4, -_4)
        if is_trie and i + AHEAD // 2 < count:
            there = at + np.int64(2 * AHEAD)
            ask_children(view, load32(there), np.int64(reach[i + AHEAD // 2]), there - _4)
        prob, found, state = score_word(
            view, is_trie, order, load32(at), min(length, np.int64(reach[i])), at - _4, -_4,
            weights, after,
        )  # fmt: skip
        # KenLM's begin state has one word, even if nothing extends it.
        length = _1 if bos and not reach[i] else state
        weights, after = after, weights
        log10_prob[i] = prob
        matched_order[i] = ngram_length[i] = np.uint8(found)
        state_length[i] = np.uint8(length)


@kernel(f"int64, uint8[:], uint32[:], uint32[:], uint32[:], {ANSWERS}")
def score_groups(  # type: ignore[no-untyped-def]
    view, lengths, contexts, counts, words,
    log10_prob, matched_order, ngram_length, state_length,
):  # fmt: skip
    """Scores the words of each group after its context, as `GetState` and `FullScore` do.

    Shapes  view, and the arrays of `QueryGroups`, C contexts and Q words
            log10_prob and those after it  (Q,)  filled, as by `score_tokens`
    Trusts   ids below the number of words, lengths below the order, counts that add up
    """
    is_trie = of(view, IS_TRIE)
    room, rows = np.empty(of(view, ORDER), np.float32), np.empty(COLUMNS * BLOCK, np.int64)
    weights, block = np.int64(room.ctypes.data), np.int64(rows.ctypes.data)
    context = np.int64(contexts.ctypes.data) - _4
    base = np.int64(words.ctypes.data)
    first, size = _0, of(view, UNIGRAM_BYTES)
    for i in range(min(len(words), BLOCK)):
        prefetch(of(view, UNIGRAMS) + np.int64(words[i]) * size)
    for c in range(len(lengths)):
        context += np.int64(lengths[c]) * _4
        length = weigh(view, is_trie, np.int64(lengths[c]), context, -_4, weights)
        if c + 1 < len(lengths) and lengths[c + 1]:
            before = np.int64(lengths[c + 1]) - _1
            newest = context + (before << _2) + _4
            ask_ahead(view, is_trie, of(view, ORDER), load32(newest), before, newest - _4, -_4)
        end = first + np.int64(counts[c])
        while first < end:
            count = min(end - first, np.int64(BLOCK))
            at, rest = base + first * _4, np.int64(len(words)) - first - count
            score_block(view, is_trie, at, count, rest, context, -_4, length, block)
            for i in range(count):
                at, found = first + i, get(block, FOUND, i)
                prob = load_float32(cell(block, PROB, i))
                log10_prob[at] = charged(prob, found, length, weights)
                matched_order[at] = ngram_length[at] = np.uint8(found)
                state_length[at] = np.uint8(get(block, STATE, i))
            first += count


# -------------------------------------------------------------------------------------- text

WORDS_AHEAD = 32  # words whose places are prefetched before the first is looked up


@inlined
def read_words(view, text, at, end, splits, line_end, hashes, ids):  # type: ignore[no-untyped-def]
    """Writes the ids of a line's words, uint32.

    Args    text, splits  addresses of a text, and of 256 flags: 1 if a byte separates words
            at, end       where to read; the line ends at `end`, or earlier at a byte `line_end`
            hashes, ids   addresses of room for WORDS_AHEAD int64, and for the ids
    Returns  (the place after the line, the address after the ids)
    """
    is_open = True
    while is_open:
        asked = _0
        while asked < WORDS_AHEAD:
            byte = load8(text + at) if at < end else line_end
            if byte == line_end:
                at += _1
                is_open = False
                break
            begin = at
            at += _1
            if load8(splits + byte):
                continue
            while at < end and not load8(splits + load8(text + at)):
                at += _1
            found = murmur(text + begin, at - begin)
            store64(hashes + (asked << _3), found)
            ask_word(view, found)
            asked += _1
        for i in range(asked):
            store32(ids, word_id(view, load64(hashes + (np.int64(i) << _3))))
            ids += _4
    return at, ids


@kernel("int64, uint8[:], int64, uint8[:], out uint32[:], out int64[:]")
def find_text(view, text, size, splits, ids, sentence_begin):  # type: ignore[no-untyped-def]
    """Ids of the words of a text, one sentence per line.

    Shapes
        text            (bytes,)  uint8   size bytes, then PAD_BYTES
        splits          (256,)    uint8   1: the byte separates words; the newline is one
        ids             (words,)  uint32  filled, 0 where the model lacks a word
        sentence_begin  (lines + 1,)  int64  filled: the first word of each line; then their number
    Returns  the number of words
    """
    base, flags = np.int64(text.ctypes.data), np.int64(splits.ctypes.data)
    hashes = np.empty(WORDS_AHEAD, np.int64)
    room, begin = np.int64(hashes.ctypes.data), np.int64(ids.ctypes.data)
    at, here = _0, begin
    for line in range(len(sentence_begin) - 1):
        sentence_begin[line] = (here - begin) >> _2
        at, here = read_words(view, base, at, size, flags, np.int64(10), room, here)
    count = (here - begin) >> _2
    sentence_begin[len(sentence_begin) - 1] = count
    return count


# Indices into a scorer of sentences, an array of int64.
ASKED, VIEW, SPLITS, SCRATCH, PLACES = range(5)  # ASKED: words scored so far
TEXT_BYTES = 4096  # maximum bytes of a sentence
# Bytes for the hashes, for the weights of two states, and for the ids.
SCRATCH_BYTES = 8 * WORDS_AHEAD + 2 * 4 * 16 + 4 * (TEXT_BYTES // 2 + 3)


@kernel("int64, int64, int64, bool, bool", nogil=False)
def score_sentence(scorer, text, size, bos, eos):  # type: ignore[no-untyped-def]
    """Returns the sum of the scores of a sentence's words, in float32, like KenLM's `Model.score`.

    Args    scorer, text  addresses; text: `size` bytes, at most TEXT_BYTES, then PAD_BYTES more
            bos, eos  whether the sentence begins after <s>, and whether its end is scored
    """
    view, hashes = of(scorer, VIEW), of(scorer, SCRATCH)
    order, is_trie = of(view, ORDER), of(view, IS_TRIE)
    weights = hashes + np.int64(8 * WORDS_AHEAD)
    after = weights + order * _4
    ids = hashes + np.int64(8 * WORDS_AHEAD + 2 * 4 * 16)
    at = ids + _4
    store32(ids, of(view, BEGIN))
    _, end = read_words(view, text, _0, size, of(scorer, SPLITS), np.int64(-1), hashes, at)
    if eos:
        store32(end, of(view, END))
        end += _4
    store64(scorer, of(scorer, ASKED) + ((end - at) >> _2))
    length = _0
    if bos:
        # KenLM's begin state has one word, even if nothing extends it.
        weigh(view, is_trie, _1, ids, _4, weights)
        length = _1
    total = np.float32(0)
    longest = order - _1
    there = at
    while there < min(end, at + np.int64(4 * AHEAD)):
        ask_ahead(view, is_trie, order, load32(there), longest, there - _4, -_4)
        there += _4
    while at < end:
        if there < end:
            ask_ahead(view, is_trie, order, load32(there), longest, there - _4, -_4)
            there += _4
        if is_trie and at + np.int64(2 * AHEAD) < end:
            half = at + np.int64(2 * AHEAD)
            ask_children(view, load32(half), longest, half - _4)
        prob, _, length = score_word(
            view, is_trie, order, load32(at), length, at - _4, -_4, weights, after
        )
        weights, after = after, weights
        total = np.float32(total + prob)
        at += _4
    return np.float64(total)


@kernel("int64, int64, int64", nogil=False)
def find_id(scorer, text, size):  # type: ignore[no-untyped-def]
    return word_id(of(scorer, VIEW), murmur(text, size))


@kernel("float32[:], int64[:], int64, int64, out float64[:]")
def sum_sentences(log10_prob, sentence_begin, bos, eos, totals):  # type: ignore[no-untyped-def]
    for s in range(len(totals)):
        first = sentence_begin[s] + s * (bos + eos) + bos
        total = np.float32(0)
        for i in range(first, first + sentence_begin[s + 1] - sentence_begin[s] + eos):
            total = np.float32(total + log10_prob[i])
        totals[s] = np.float64(total)
