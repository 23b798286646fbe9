"""Turns lines of text into tokens with marks, and sums, counts and prints their scores."""

from __future__ import annotations

import numpy as np

from dlm.jit import kernel
from dlm.ngram.digit_kernels import COUNT_BYTES, FIXED_BYTES, put_count, put_fixed

TAB, NEWLINE = ord("\t"), ord("\n")
ROW_BYTES = FIXED_BYTES + 2 * COUNT_BYTES + 3  # maximum bytes of a row of `put_totals`


@kernel("uint32[:], int64[:], int64, int64, int64, int64, int64, out uint32[:], out uint8[:]")
def lay_out(ids, sentence_begin, begin_id, end_id, bos, eos, order, words, reach):  # type: ignore[no-untyped-def]
    """Lays out sentences with their marks, one after the other.

    Shapes  ids (n,)  words of all sentences;  sentence_begin (S + 1,)  where each begins
            bos, eos  1: each sentence gets a begin mark, or an end mark
            words, reach (T,) filled, T = n + S * (bos + eos): see `kernels.score_tokens`
    """
    longest = np.int64(max(order - 1, 0))
    at_token = np.int64(0)
    for s in range(len(sentence_begin) - 1):
        before = np.int64(0)
        if bos:
            words[at_token] = begin_id
            reach[at_token] = np.uint8(0)
            at_token += 1
            before = min(np.int64(1), longest)
        for i in range(sentence_begin[s], sentence_begin[s + 1]):
            words[at_token] = ids[i]
            reach[at_token] = np.uint8(before)
            at_token += 1
            before = min(before + np.int64(1), longest)
        if eos:
            words[at_token] = end_id
            reach[at_token] = np.uint8(before)
            at_token += 1


@kernel("float32[:], int64[:], int64, int64, out float64[:]")
def sum_sentences(log10_prob, sentence_begin, bos, eos, totals):  # type: ignore[no-untyped-def]
    """Sums the scores of each sentence's tokens: words and, with `eos`, the sentence end.

    Shapes  log10_prob (T,)  scores of the tokens that `lay_out` laid out
            sentence_begin (S + 1,)  where each sentence's words begin, marks not counted
            totals (S,) float64 filled: sums of log10_prob, in double precision
    """
    for s in range(len(totals)):
        first = sentence_begin[s] + s * (bos + eos) + bos
        total = 0.0
        for i in range(first, first + sentence_begin[s + 1] - sentence_begin[s] + eos):
            total += np.float64(log10_prob[i])
        totals[s] = total


@kernel(
    "uint32[:], float32[:], uint8[:], int64[:], int64, int64, out int64[:], out float64[:], out "
    "int64[:]"
)
def count_sentences(  # type: ignore[no-untyped-def]
    words, log10_prob, matched_order, sentence_begin, bos, eos, oovs, log10_oovs, hits
):
    """Counts the unknown tokens of each sentence, and the lengths of the n-grams found.

    Shapes  words, log10_prob, matched_order, sentence_begin  as in `sum_sentences`
            oovs, log10_oovs (S,) filled: tokens whose id is 0, and the sum of their log10_prob
            hits (order + 1,)  added to: tokens by matched order
    """
    for s in range(len(oovs)):
        first = sentence_begin[s] + s * (bos + eos) + bos
        of_oovs = 0.0
        unknown = np.int64(0)
        for i in range(first, first + sentence_begin[s + 1] - sentence_begin[s] + eos):
            hits[matched_order[i]] += 1
            if words[i] == 0:  # the unknown word
                of_oovs += np.float64(log10_prob[i])
                unknown += 1
        oovs[s] = unknown
        log10_oovs[s] = of_oovs


@kernel("float64[:], int64[:], int64[:], out uint8[:]")
def put_totals(totals, tokens, oovs, text):  # type: ignore[no-untyped-def]
    """Writes a row for each sentence: log10 P with six decimals, tokens and OOVs, tabs between.

    Shapes   totals, tokens, oovs (S,);  text (S * ROW_BYTES,) filled
    Returns  bytes written
    Trusts   what `put_fixed` trusts: checked in text.score
    """
    at = np.int64(0)
    for s in range(len(totals)):
        at = put_fixed(text, at, totals[s])
        text[at] = TAB
        at = put_count(text, at + 1, tokens[s])
        text[at] = TAB
        at = put_count(text, at + 1, oovs[s])
        text[at] = NEWLINE
        at += 1
    return at
