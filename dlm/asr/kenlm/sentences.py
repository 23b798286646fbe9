"""Whole sentences, by one table of states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm.opened import OpenedModel
from dlm.asr.kenlm.sentence_kernels import TEXT_BYTES
from dlm.asr.kenlm.table import NULL, ROW_MASK, StepTable
from dlm.index.search.text.score import score_lines
from dlm.ngram.query import Answers
from dlm.ngram.vocab import UNK_ID

# What splits words, as `bytes.split` does: to dlm, the last two are characters of words.
_SPACES = bytes.maketrans(b"\n\v\f", b"   ")
AT_ONCE = 512  # sentences in a call of servers
LENGTH_SHIFT = ROW_MASK.bit_length()


def step(
    model: OpenedModel, table: StepTable, row: int, word: int
) -> tuple[float, int, StepTable, int]:
    """log10 P of a word after a state, KenLM's ngram_length, and the next state."""
    log10_prob, answer = table.step(table.address, row, word)
    if answer < 0:
        table, log10_prob, answer = model.ask(table, row, word)
    return log10_prob, answer >> LENGTH_SHIFT, table, answer & ROW_MASK


def _ids(table: StepTable, text: bytes) -> list[int]:
    find = table.ids.__getitem__
    return [find(word.decode("utf-8", "surrogateescape")) for word in text.split()]


def score(model: OpenedModel, text: bytes, bos: bool, eos: bool) -> float:
    """The sum over the words of a sentence, in float64."""
    table = model.current()
    if not table.is_whole or len(text) > TEXT_BYTES:
        return float(score_many(model, [text], bos, eos)[0])
    return table.scorer.score(text, bos, eos)


def full_scores(
    model: OpenedModel, text: bytes, bos: bool, eos: bool
) -> Iterator[tuple[float, int, bool]]:
    """A tuple for each token; see `KenlmModel.full_scores`."""
    table = model.current()
    ids = _ids(table, text)
    unknown = [word == UNK_ID for word in ids] + [False] * eos
    if eos:
        ids.append(table.utterance.vocabulary.end_id)
    if not table.is_whole:
        answers = _asked(model, table, ids, bos)
        yield from zip(
            answers.log10_prob.tolist(), answers.ngram_length.tolist(), unknown, strict=True
        )
        return
    row = table.begin if bos else NULL
    for word, is_unknown in zip(ids, unknown, strict=True):
        log10_prob, length, table, row = step(model, table, row, word)
        yield log10_prob, length, is_unknown


def _asked(model: OpenedModel, table: StepTable, ids: list[int], bos: bool) -> Answers:
    """Each word after those before it, in one call."""
    begin = [table.utterance.vocabulary.begin_id] * bos
    whole, width = begin + ids, max(table.order - 1, 0)
    contexts = [whole[max(end - width, 0) : end] for end in range(len(begin), len(whole))]
    answers = table.utterance.score(contexts, ids)
    model.count_asked(answers.source, len(ids))
    return answers


def score_many(
    model: OpenedModel, texts: Sequence[bytes], bos: bool, eos: bool
) -> NDArray[np.float64]:
    """`score` of each."""
    table = model.current()
    local = table.utterance.local_model
    if not texts:
        return np.zeros(0)
    if local is not None:
        lines = score_lines(
            local, b"\n".join(t.translate(_SPACES) for t in texts), bos=bos, eos=eos
        )
        model.counts.queries += int(lines.begin[-1]) + eos * len(texts)
        return lines.totals
    found = []
    split = (text.split() for text in texts)
    while some := list(islice(split, AT_ONCE)):
        for one in table.utterance.score_sentences(some, bos=bos, eos=eos):
            found.append(one.log10_prob)
            model.count_asked(one.token_source)
    return np.array(found)


def distribution(model: OpenedModel, table: StepTable, row: int) -> NDArray[np.float32]:
    """log10 P of every word after a state."""
    ids = np.arange(table.utterance.vocabulary_size, dtype=np.uint32)
    rows = np.array([row], np.int64)
    if table.is_whole:
        model.counts.queries += len(ids)
        scores, _ = table.score_rows(rows, ids[None])
    else:
        blocks = table.utterance.context_blocks(table.states(rows))
        scores = blocks.distribution()
        model.count_asked(np.repeat(blocks.source, len(ids)))
    return scores.reshape(-1)
