"""Steps of a CTC beam search over letters or word pieces (`beams.py`); beams are rows of ints.

A *part* is the beginning of a word: a node of the trie of the words that may be said or, numbered
from that trie's size on, of a growing trie of other words. A *text* is the words before a part,
stored as a shorter text plus a last word (a part). Part 0 and text 0 are empty. The *bias* of a
part is its node in the trie of the utterance's own words, or -1. A beam has

    text, part, last label, frames of its words, first frame of the part, its end, bias of the part

Most rows that a frame makes are pruned at once, so parts are made only for rows that stay. Before
pruning, PART holds the longest existing part and, from bit PENDING_BITS on, how many of the
label's last letters that part lacks.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import numpy as np

from dlm.jit import inlined, kernel

TEXT, PART, LAST, FRAMES, BEGIN, END, BIAS, COLUMNS = range(8)
# Columns of a text: the text before its last word, that word, its number of hotwords, and the last
# word's code (see `BeamWords`), or EMPTY.
BEFORE, WORD, HOT, CODE, TEXT_COLUMNS = range(5)
NO_LABEL, CLOSED = -1, -2  # values of LAST: no label; the blank after a label that ends a word
NEW_WORD, WHOLE_WORD = 1, 2  # kinds of labels: one begins a word, the other is a whole word
NOTHING_ENDED = -2  # value of END if a label began a word where no word had begun
EMPTY = -1  # marks free slots and missing values
PENDING_BITS = 32
_MIX = np.uint64(0x9E3779B97F4A7C15)
LETTER_BITS, TEXT_BITS = 21, 32  # how many low bits of a key hold a letter, or a part


@inlined
def _slot(keys, key):  # type: ignore[no-untyped-def]
    mask = len(keys) - 1
    at = np.int64((np.uint64(key) * _MIX) >> np.uint64(32)) & mask
    while keys[at] != key and keys[at] != EMPTY:
        at = (at + 1) & mask
    return at


@inlined
def _slots(rows):  # type: ignore[no-untyped-def]
    """Returns an empty hash table with room for `rows` rows."""
    size = 16
    while size < 2 * rows:
        size *= 2
    return np.full(size, np.int32(EMPTY))


@inlined
def _rounded(value, single):  # type: ignore[no-untyped-def]
    """Rounds to float32 if the posteriors are float32."""
    return np.float64(np.float32(value)) if single else np.float64(value)


@kernel("int32[:], int64[:], out int32[:, :], out int32[:]")
def grow_trie(letters, begins, nodes, ends):  # type: ignore[no-untyped-def]
    """Builds a trie of distinct words, sorted by their letters, depth first; returns its size.

    Shapes  letters  (L,)      int32  the letters of all words
            begins   (W + 1,)  int64  where each word begins in `letters`; then the end
            nodes    (L + 1, 3) int32  parent, letter and length of each node
            ends     (W,)      int32  the node of each word
    """
    size = 1
    nodes[0, 0] = nodes[0, 1] = nodes[0, 2] = 0
    path = np.zeros(1 + len(letters), np.int32)  # the nodes of the last word
    length = 0
    for word in range(len(ends)):
        first, last = begins[word], begins[word + 1]
        same = 0
        while same < length and first + same < last:
            if nodes[path[same + 1], 1] != letters[first + same]:
                break
            same += 1
        for at in range(same, last - first):
            nodes[size, 0], nodes[size, 1], nodes[size, 2] = path[at], letters[first + at], at + 1
            path[at + 1] = size
            size += 1
        length = last - first
        ends[word] = path[length]
    return size


@kernel("int64[:], int64, out int64[:], out int32[:]")
def enter(new, first, keys, values):  # type: ignore[no-untyped-def]
    """Enters keys into a hash table that has room, with the values `first`, `first` + 1, ..."""
    for at in range(len(new)):
        slot = _slot(keys, new[at])
        keys[slot], values[slot] = new[at], first + at


@inlined
def _child(children, last_letters, node, letter):  # type: ignore[no-untyped-def]
    low, high = np.int64(children[node]), np.int64(children[node + 1])
    while high - low > 8:
        middle = (low + high) >> 1
        if last_letters[middle] <= letter:
            low = middle
        else:
            high = middle
    for at in range(low, high):
        if last_letters[at] == letter:
            return at
    return np.int64(EMPTY)


@inlined
def _outside(keys, values, part, letter):  # type: ignore[no-untyped-def]
    slot = _slot(keys, (part << LETTER_BITS) | np.int64(letter))
    return np.int64(values[slot]) if keys[slot] != EMPTY else np.int64(EMPTY)


@inlined
def _add_part(part, letter, trie, counts, keys, values, parts):  # type: ignore[no-untyped-def]
    """Extends a part by a letter that the trie lacks; returns the part, new or not."""
    key = (np.int64(part) << LETTER_BITS) | np.int64(letter)
    slot = _slot(keys, key)
    if keys[slot] == EMPTY:
        new, outside = counts[0], part - len(trie)
        keys[slot], values[slot] = key, len(trie) + new
        parts[new, 0], parts[new, 1] = part, letter
        parts[new, 2] = 1 + (trie[part, 2] if outside < 0 else parts[outside, 2])
        parts[new, 3] = EMPTY
        counts[0] += 1
    return np.int64(values[slot])


@inlined
def _end_word(beam, counts, keys, values, texts, frames, trie_codes, parts, codes):  # type: ignore[no-untyped-def]
    """Adds a beam's part to its text as a word; returns this text and the frames of its words."""
    text, part, bias = beam[TEXT], beam[PART], beam[BIAS]
    key = (text << TEXT_BITS) | part
    slot = _slot(keys, key)
    if keys[slot] == EMPTY:
        new = counts[1]
        keys[slot], values[slot] = key, new
        texts[new, BEFORE], texts[new, WORD], texts[new, HOT] = text, part, texts[text, HOT]
        outside = part - len(trie_codes)
        texts[new, CODE] = trie_codes[part] if outside < 0 else parts[outside, 3]
        if bias >= 0:
            texts[new, HOT] += codes[bias, 0]
            if codes[bias, 1] != EMPTY:
                texts[new, CODE] = codes[bias, 1]
        counts[1] += 1
    new = counts[2]
    frames[new, 0], frames[new, 1], frames[new, 2] = beam[FRAMES], beam[BEGIN], beam[END]
    counts[2] += 1
    return np.int64(values[slot]), new


@inlined
def _place(slots, mask, found, text, part, last):  # type: ignore[no-untyped-def]
    mixed = (np.uint64(text) * _MIX) ^ np.uint64(part)
    mixed = ((mixed * _MIX) ^ np.uint64(last)) * _MIX
    at = np.int64(mixed >> np.uint64(32)) & mask
    while slots[at] != EMPTY:
        one = slots[at]
        if found[one, TEXT] == text and found[one, PART] == part and found[one, LAST] == last:
            break
        at = (at + 1) & mask
    return at


@kernel(
    "int64[:, :], float64[:], float64[:], int64[:], int64[:], uint8[:], int32[:], int64[:], int64, "
    "int64, bool, int32[:], int32[:], int32[:], int32[:], int32[:], int32[:, :], "
    "out int64[:], int64[:], int32[:], int32[:, :], out int64[:], out int32[:], "
    "out int32[:, :], out int64[:, :]"
)
def expand(  # type: ignore[no-untyped-def]
    beams, logits, probs, labels, alike, kinds, letters, begins, blank, frame, single,
    trie_children, trie_letters, trie_codes, bias_children, bias_letters, bias_codes, counts,
    part_keys, part_values, parts, text_keys, text_values, texts, frames,
):  # fmt: skip
    """Extends each beam by each label of a frame. Beams that spell the same become one, with the
    frames of the last beam and the sum of all their probabilities.

    Shapes
        beams, logits  (B, COLUMNS) int64, (B,) float64
        probs, labels  ln P of each label, and the labels to try, in order
        alike          for each label, the first one spelled the same; `blank`: the first blank
        kinds          NEW_WORD, WHOLE_WORD, or 0 for other labels
        letters        label n has letters begins[n] to begins[n + 1] - 1
        trie_children  see `WordTrie`; trie_codes: CODE of the word that ends at each node
        bias_codes     (N, 2) int32  whether the word of a node is a hotword; its CODE, or EMPTY.
                       No rows: the utterance has no words of its own
        counts         numbers of parts, texts, frames; new texts and frames are stored and counted
    Returns            rows in the form of `beams`, and their logits
    Trusts             there is room for one more text per beam
    """
    slots = _slots(len(beams) * len(labels))
    mask = len(slots) - 1
    found = np.empty((len(beams) * len(labels), COLUMNS), np.int64)
    found_logits = np.empty(len(found))
    trie_size = len(trie_codes)
    root = np.int64(0 if len(bias_codes) else EMPTY)
    ended = np.full((len(beams), 2), np.int64(EMPTY))  # text and frames, once a word has ended
    count = 0
    for label in labels:
        prob, same = probs[label], alike[label]
        for row in range(len(beams)):
            text, part, last, bias = beams[row, TEXT], beams[row, PART], beams[row, LAST], root
            words, begin, end = beams[row, FRAMES], beams[row, BEGIN], beams[row, END]
            closed = last == CLOSED or (last >= 0 and kinds[last] == WHOLE_WORD)
            reached = same
            if same in (blank, last):
                bias = beams[row, BIAS]
                if same != blank:
                    end = frame + 1
                elif closed:
                    reached = np.int64(CLOSED)
            else:
                if closed or kinds[same]:
                    if part:
                        if ended[row, 0] == EMPTY:
                            ended[row, 0], ended[row, 1] = _end_word(
                                beams[row], counts, text_keys, text_values, texts, frames,
                                trie_codes, parts, bias_codes,
                            )  # fmt: skip
                        text, words = ended[row, 0], ended[row, 1]
                    begin, end = np.int64(EMPTY), np.int64(EMPTY if part else NOTHING_ENDED)
                    part = np.int64(0)
                else:
                    bias = beams[row, BIAS]
                if begins[same + 1] > begins[same]:
                    begin, end = frame if begin < 0 else begin, frame + 1
                pending = np.int64(0)
                for at in range(begins[same], begins[same + 1]):
                    if bias >= 0:
                        bias = _child(bias_children, bias_letters, bias, letters[at])
                    child = np.int64(EMPTY)
                    if part < trie_size and not pending:
                        child = _child(trie_children, trie_letters, part, letters[at])
                    if child < 0 and not pending:
                        child = _outside(part_keys, part_values, part, letters[at])
                    if child < 0:
                        pending += 1
                    else:
                        part = child
                part |= pending << PENDING_BITS
            logit = _rounded(logits[row] + prob, single)
            at = _place(slots, mask, found, text, part, reached)
            one = np.int64(slots[at])
            if one >= 0:
                high, low = max(found_logits[one], logit), min(found_logits[one], logit)
                more = math.log(1.0 + math.exp(_rounded(low - high, single)))
                found_logits[one] = _rounded(high + _rounded(more, single), single)
            else:
                one = np.int64(count)
                slots[at] = np.int32(count)
                found[one, TEXT], found[one, PART], found[one, LAST] = text, part, reached
                found[one, BIAS] = bias
                found_logits[one] = logit
                count += 1
            found[one, FRAMES], found[one, BEGIN], found[one, END] = words, begin, end
    return found[:count], found_logits[:count]


@inlined
def _same_words(one, other, count, texts):  # type: ignore[no-untyped-def]
    for _ in range(count):
        if one == other:
            return True
        if one == 0 or other == 0 or texts[one, WORD] != texts[other, WORD]:
            return False
        one, other = np.int64(texts[one, BEFORE]), np.int64(texts[other, BEFORE])
    return True


@inlined
def _history(part, last, text, history, texts):  # type: ignore[no-untyped-def]
    mixed = (np.uint64(part) * _MIX) ^ np.uint64(last)
    for _ in range(history):
        if text == 0:
            break
        mixed = (mixed * _MIX) ^ np.uint64(texts[text, WORD])
        text = np.int64(texts[text, BEFORE])
    return np.int64((mixed * _MIX) >> np.uint64(32))


@kernel("int64[:, :], int32[:, :]")
def shared_text(beams, texts):  # type: ignore[no-untyped-def]
    """Returns the longest text that begins all beams' texts; extending raises a text's number."""
    shared = beams[0, TEXT]
    for row in range(1, len(beams)):
        other = beams[row, TEXT]
        while shared != other:
            low, high = min(shared, other), max(shared, other)
            shared, other = low, np.int64(texts[high, BEFORE])
    return shared


@kernel(
    "int64[:, :], float64[:], float64[:], int32[:], int64[:], int32[:, :], float64[:], float64, "
    "int64, float64, float64, int64, int64, int32[:, :], bool, bool, out int64[:], out int64[:], "
    "out int32[:], out int32[:, :]"
)
def prune(  # type: ignore[no-untyped-def]
    found, found_logits, ln_probs, letters, begins, trie, biases, offset, long, hot, least, width,
    history, texts, alone, single, counts, part_keys, part_values, parts,
):  # fmt: skip
    """Keeps the best beams, best first, and only the best one of beams that can no longer differ.

    Shapes
        ln_probs  (texts,) float64  of the language model, weighted
        trie      (N, 3) int32  parent, letter, length
        parts     (P, 4) int32  parts beyond the trie: as in `trie`, and the code. Such a part
                                costs `offset`, more if longer than `long`; new ones are stored
        biases    (N,) float64  what parts of the utterance's own words add instead of `offset`
        hot       what a hotword of a text adds
        least     how far below the best a beam may be, as a negative number
        history   number of a text's last words that matter; 0: all
        alone     true without a language model: pyctcdecode then rounds in another order
    Returns       rows and their logits
    """
    trie_size, present = len(trie), (np.int64(1) << PENDING_BITS) - 1
    scores = np.empty(len(found))
    for row in range(len(found)):
        text, bias = found[row, TEXT], found[row, BIAS]
        part, pending = found[row, PART] & present, found[row, PART] >> PENDING_BITS
        score, partial = ln_probs[text] + hot * texts[text, HOT], 0.0
        if bias > 0:
            partial = biases[bias]
        elif part >= trie_size or pending:
            outside = part - trie_size
            length = pending + np.int64(trie[part, 2] if outside < 0 else parts[outside, 2])
            partial = offset * length / long if length > long else offset
        if alone:
            heard = _rounded(found_logits[row] + _rounded(score, single), single)
            scores[row] = _rounded(heard + _rounded(partial, single), single)
        else:
            score = _rounded(score + partial, single)
            scores[row] = _rounded(found_logits[row] + score, single)
    least = _rounded(scores.max() + _rounded(least, single), single)
    rows = np.flatnonzero(scores >= least)
    rows = rows[np.argsort(-scores[rows], kind="mergesort")[:width]]
    beams, logits = np.empty((len(rows), COLUMNS), np.int64), np.empty(len(rows))
    slots = _slots(len(rows))
    mask, count = len(slots) - 1, 0
    for row in rows:
        text, part, last = found[row, TEXT], found[row, PART], found[row, LAST]
        for at in range(
            begins[max(last, 0) + 1] - (part >> PENDING_BITS), begins[max(last, 0) + 1]
        ):
            part = _add_part(
                part & present, letters[at], trie, counts, part_keys, part_values, parts
            )
        if history > 0:
            slot = _history(part, last, text, history, texts) & mask
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
        for column in range(COLUMNS):
            beams[count, column] = found[row, column]
        beams[count, PART] = part
        logits[count] = found_logits[row]
        count += 1
    return beams[:count], logits[:count]
