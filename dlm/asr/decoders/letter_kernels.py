"""Steps of a beam search over letters (`pyctcdecode.LetterSearch`); beams are rows of integers.

A *part* is the beginning of a word: a node of the trie of the words that may be said, or, from its
size on, of a trie of others that grows. A *text* is the words before it: the text without its last
word, and that word, a part. Part 0 and text 0 are empty. A beam has

    text, part, label of the last letter, frames of its words, first frame of the part, its end
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import numpy as np

from dlm.jit import inlined, kernel

TEXT, PART, LAST, FRAMES, BEGIN, END = range(6)
EMPTY = -1  # in tables
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LETTER_BITS = 21  # of Unicode


@inlined
def _slot(keys, key):  # type: ignore[no-untyped-def]
    mask = len(keys) - 1
    at = np.int64((np.uint64(key) * _MIX) >> np.uint64(32)) & mask
    while keys[at] != key and keys[at] != EMPTY:
        at = (at + 1) & mask
    return at


@inlined
def _rounded(value, single):  # type: ignore[no-untyped-def]
    """As float32 where the posteriors are."""
    return np.float64(np.float32(value)) if single else np.float64(value)


@kernel("int32[:], int64[:], out int64[:], out int32[:], out int32[:, :]")
def grow_trie(letters, begins, keys, values, nodes):  # type: ignore[no-untyped-def]
    """Adds words to an empty trie; returns its size.

    Shapes  letters  (L,)      int32  of all words
            begins   (W + 1,)  int64  where each begins
            keys     (2^n,)    int64  EMPTY; a node and a letter, for
            values   (2^n,)    int32  the node after it
            nodes    (L + 1, 3) int32  parent, letter, length of each
    """
    size = 1
    nodes[0, 0] = nodes[0, 1] = nodes[0, 2] = 0
    for word in range(len(begins) - 1):
        node = np.int64(0)
        for at in range(begins[word], begins[word + 1]):
            key = (node << _LETTER_BITS) | np.int64(letters[at])
            slot = _slot(keys, key)
            if keys[slot] == EMPTY:
                keys[slot], values[slot] = key, size
                nodes[size, 0], nodes[size, 1] = node, letters[at]
                nodes[size, 2] = nodes[node, 2] + 1
                size += 1
            node = np.int64(values[slot])
    return size


@kernel("int64[:], int32[:], out int64[:], out int32[:]")
def move_table(keys, values, new_keys, new_values):  # type: ignore[no-untyped-def]
    for at in range(len(keys)):
        if keys[at] != EMPTY:
            slot = _slot(new_keys, keys[at])
            new_keys[slot], new_values[slot] = keys[at], values[at]


@kernel(
    "int64[:, :], float64[:], float64[:], int64[:], int64[:], int32[:], int64[:], int64, int64, "
    "int64, bool, int64[:], int32[:], int32[:, :], out int64[:], out int64[:], out int32[:], "
    "out int32[:, :], out int64[:], out int32[:], out int32[:, :], out int64[:, :], out int32[:], "
    "out int64[:, :], out float64[:]"
)
def expand(  # type: ignore[no-untyped-def]
    beams, logits, probs, labels, alike, letters, begins, blank, space, frame, single, trie_keys,
    trie_values, trie, counts, part_keys, part_values, parts, text_keys, text_values, texts,
    frames, slots, found, found_logits,
):  # fmt: skip
    """Each beam with each label of a frame; those that spell the same are one, with the
    sum of their probabilities and the frames of the last.

    Shapes
        beams, logits  (B, 6) int64, (B,) float64
        probs, labels  ln P of each label; those to try, in order
        alike          the first label that is spelled like each; `blank` and `space` are of these
        letters        of label n: begins[n] to begins[n + 1]
        counts         of parts, texts and frames; grow, as do their tables and rows
        slots          int32, 2^n
    Returns            how many rows of `found` and `found_logits` there are
    Trusts             all rows have room for one more of each beam and letter, `slots` for twice
    """
    trie_size = len(trie)
    size = 16
    while size < 2 * len(beams) * len(labels):
        size *= 2
    slots[:size] = EMPTY
    mask = size - 1
    count = 0
    for label in labels:
        prob, same = probs[label], alike[label]
        for row in range(len(beams)):
            text, part, last = beams[row, TEXT], beams[row, PART], beams[row, LAST]
            begin, end = beams[row, BEGIN], beams[row, END]
            ends_word = False
            if same == blank:
                pass
            elif same == last:
                end = frame + 1
            elif same == space:
                ends_word = part != 0
                if ends_word:
                    key = (text << 32) | part
                    slot = _slot(text_keys, key)
                    if text_keys[slot] == EMPTY:
                        text_keys[slot], text_values[slot] = key, counts[1]
                        texts[counts[1], 0], texts[counts[1], 1] = text, part
                        counts[1] += 1
                    text = np.int64(text_values[slot])
                part, begin, end = np.int64(0), np.int64(-1), np.int64(-1)
            else:
                for at in range(begins[same], begins[same + 1]):
                    key = (part << _LETTER_BITS) | np.int64(letters[at])
                    known = False
                    if part < trie_size:
                        slot = _slot(trie_keys, key)
                        known = trie_keys[slot] != EMPTY
                        if known:
                            part = np.int64(trie_values[slot])
                    if not known:
                        slot = _slot(part_keys, key)
                        if part_keys[slot] == EMPTY:
                            new = counts[0]
                            part_keys[slot], part_values[slot] = key, trie_size + new
                            parts[new, 0], parts[new, 1] = part, letters[at]
                            before = (
                                trie[part, 2] if part < trie_size else parts[part - trie_size, 2]
                            )
                            parts[new, 2] = before + 1
                            counts[0] += 1
                        part = np.int64(part_values[slot])
                begin = frame if begin < 0 else begin
                end = frame + 1
            logit = _rounded(logits[row] + prob, single)
            mixed = (np.uint64(text) * _MIX) ^ np.uint64(part)
            mixed = ((mixed * _MIX) ^ np.uint64(same)) * _MIX
            at = np.int64(mixed >> np.uint64(32)) & mask
            while slots[at] != EMPTY:
                one = slots[at]
                if (
                    found[one, TEXT] == text
                    and found[one, PART] == part
                    and found[one, LAST] == same
                ):
                    break
                at = (at + 1) & mask
            if slots[at] != EMPTY:
                one = slots[at]
                high, low = max(found_logits[one], logit), min(found_logits[one], logit)
                more = math.log(1.0 + math.exp(_rounded(low - high, single)))
                found_logits[one] = _rounded(high + _rounded(more, single), single)
            else:
                one = np.int32(count)
                slots[at] = one
                found[one, TEXT], found[one, PART], found[one, LAST] = text, part, same
                found_logits[one] = logit
                count += 1
            found[one, FRAMES] = beams[row, FRAMES]
            if ends_word:
                new = counts[2]
                frames[new, 0] = beams[row, FRAMES]
                frames[new, 1], frames[new, 2] = beams[row, BEGIN], beams[row, END]
                found[one, FRAMES] = new
                counts[2] += 1
            found[one, BEGIN], found[one, END] = begin, end
    return count


@inlined
def _same_words(one, other, count, texts):  # type: ignore[no-untyped-def]
    for _ in range(count):
        if one == other:
            return True
        if one == 0 or other == 0 or texts[one, 1] != texts[other, 1]:
            return False
        one, other = np.int64(texts[one, 0]), np.int64(texts[other, 0])
    return True


@kernel(
    "int64[:, :], float64[:], float64[:], int32[:, :], int64, float64, int64, float64, int64, "
    "int64, int32[:, :], bool, out int32[:], out int64[:, :], out float64[:]"
)
def prune(  # type: ignore[no-untyped-def]
    found, found_logits, ln_probs, parts, trie_size, offset, long, least, width, history, texts,
    single, slots, beams, logits,
):  # fmt: skip
    """The best beams, best first, and of those that can no longer differ the best one.

    Shapes
        ln_probs  (texts,) float64  of the language model, weighted
        parts     (P, 3) int32  parent, letter, length of those beyond the trie, which cost `offset`
                                each, more if longer than `long`
        least     what a beam may be below the best
        history   words of a text that matter; 0: all
    Returns       how many rows of `beams` and `logits` there are
    """
    scores = np.empty(len(found))
    best = -np.inf
    for row in range(len(found)):
        score, part = ln_probs[found[row, TEXT]], found[row, PART]
        if part >= trie_size:
            length = np.int64(parts[part - trie_size, 2])
            score += offset * length / long if length > long else offset
        scores[row] = _rounded(found_logits[row] + _rounded(score, single), single)
        best = max(best, scores[row])
    least = _rounded(best + _rounded(least, single), single)
    rows = np.flatnonzero(scores >= least)
    rows = rows[np.argsort(-scores[rows], kind="mergesort")[:width]]
    size = 16
    while size < 2 * len(rows):
        size *= 2
    slots[:size] = EMPTY
    mask = size - 1
    count = 0
    for row in rows:
        text, part, last = found[row, TEXT], found[row, PART], found[row, LAST]
        if history > 0:
            mixed = (np.uint64(part) * _MIX) ^ np.uint64(last)
            at = text
            for _ in range(history):
                if at == 0:
                    break
                mixed = (mixed * _MIX) ^ np.uint64(texts[at, 1])
                at = np.int64(texts[at, 0])
            slot = np.int64((mixed * _MIX) >> np.uint64(32)) & mask
            while slots[slot] != EMPTY:
                one = slots[slot]
                if (
                    beams[one, PART] == part
                    and beams[one, LAST] == last
                    and _same_words(beams[one, TEXT], text, history, texts)
                ):
                    break
                slot = (slot + 1) & mask
            if slots[slot] != EMPTY:
                continue
            slots[slot] = count
        for column in range(found.shape[1]):
            beams[count, column] = found[row, column]
        logits[count] = found_logits[row]
        count += 1
    return count
