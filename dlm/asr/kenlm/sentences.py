"""Scores whole sentences, with one table of states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm.opened import OpenedModel
from dlm.asr.kenlm.sentence_kernels import TEXT_BYTES
from dlm.asr.kenlm.table import NULL, ROW_MASK, ModelTable, StepTable
from dlm.index.search.local import LocalModel
from dlm.index.search.text.score import score_lines
from dlm.ngram.query import Answers
from dlm.ngram.vocab import UNK_ID

# Word separators, as in `bytes.split`; elsewhere in dlm the last two are characters of words.
_SPACES = bytes.maketrans(b"\n\v\f", b"   ")
AT_ONCE = 512  # sentences per call to servers
LENGTH_SHIFT = ROW_MASK.bit_length()


def step(
    model: OpenedModel, table: ModelTable, row: int, word: int
) -> tuple[float, int, ModelTable, int]:
    log10_prob, answer = table.step(table.address, row, word)
    if answer < 0:
        table, log10_prob, answer = model.ask(table, row, word)
    return log10_prob, answer >> LENGTH_SHIFT, table, answer


def _ids(table: ModelTable, text: bytes, eos: bool) -> list[int]:
    known, find = table.ids, table.id_of
    words = [word.decode("utf-8", "surrogateescape") for word in text.split()]
    # Read once: another thread may clear it.
    ids = [find(word) if (known_id := known.get(word)) is None else known_id for word in words]
    return [*ids, table.vocabulary.end_id] if eos else ids


def score(model: OpenedModel, text: bytes, bos: bool, eos: bool) -> float:
    table = model.current()
    if len(text) > TEXT_BYTES:
        return float(score_many(model, [text], bos, eos)[0])
    if table.is_whole:
        return table.score(text, bos, eos)
    if table.local is not None:
        return float(score_many(model, [text], bos, eos)[0])
    total = 0.0
    for log10_prob in _served(model, table, _ids(table, text, eos), bos)[0]:
        total += log10_prob
    return total


def full_scores(
    model: OpenedModel, text: bytes, bos: bool, eos: bool
) -> Iterator[tuple[float, int, bool]]:
    table = model.current()
    ids = _ids(table, text, eos)
    unknown = [word == UNK_ID for word in ids]
    if eos:
        unknown[-1] = False
    if not table.is_whole:
        log10_probs, lengths = _served(model, table, ids, bos)
        yield from zip(log10_probs, lengths, unknown, strict=True)
        return
    row = table.begin if bos else NULL
    for word, is_unknown in zip(ids, unknown, strict=True):
        log10_prob, length, table, row = step(model, table, row, word)
        yield log10_prob, length, is_unknown


def _served(
    model: OpenedModel, table: ModelTable, ids: list[int], bos: bool
) -> tuple[list[float], list[int]]:
    """log10 P and KenLM's ngram_length of each word after those before it.

    The table answers the first words. From the first that it lacks, all are requested in one call.
    """
    assert isinstance(table, StepTable)
    log10_probs: list[float] = []
    lengths: list[int] = []
    row = table.begin if bos else NULL
    for word in ids:
        log10_prob, answer = table.step(table.address, row, word)
        if answer < 0:
            break
        log10_probs.append(log10_prob)
        lengths.append(answer >> LENGTH_SHIFT)
        row = answer
    known = len(lengths)
    if known < len(ids):
        answers = _asked(table, ids, bos, known)
        if not table.remember(row, ids[known:], answers):
            model.renew(table)
        log10_probs += answers.log10_prob.tolist()
        lengths += answers.ngram_length.tolist()
    return log10_probs, lengths


def _asked(table: ModelTable, ids: list[int], bos: bool, known: int) -> Answers:
    begin = [table.vocabulary.begin_id] * bos
    whole, width = begin + ids, max(table.order - 1, 0)
    ends = range(len(begin) + known, len(whole))
    contexts = [whole[max(end - width, 0) : end] for end in ends]
    return table.utterance.score(contexts, ids[known:])


def score_many(
    model: OpenedModel, texts: Sequence[bytes], bos: bool, eos: bool
) -> NDArray[np.float64]:
    table = model.current()
    local = table.local
    if not texts:
        return np.zeros(0)
    several = isinstance(local, LocalModel) and len(local.shards) > 1
    if several and table.is_whole and max(map(len, texts)) <= TEXT_BYTES:
        # Unpacked: the state is carried from word to word. Mapped shards ask query by query.
        return np.array([table.score(text, bos, eos) for text in texts])
    if local is not None:
        joined = b"\n".join(texts)
        if joined.count(b"\n") >= len(texts) or b"\v" in joined or b"\f" in joined:
            joined = b"\n".join(text.translate(_SPACES) for text in texts)
        lines = score_lines(local, joined, bos=bos, eos=eos)
        model.counts.queries += int(lines.begin[-1]) + eos * len(texts)
        return lines.totals
    found = []
    split = (text.split() for text in texts)
    while some := list(islice(split, AT_ONCE)):
        for one in table.utterance.score_sentences(some, bos=bos, eos=eos):
            found.append(one.log10_prob)
            model.count_asked(one.token_source)
    return np.array(found)


def distribution(model: OpenedModel, table: ModelTable, row: int) -> NDArray[np.float32]:
    ids = np.arange(table.utterance.vocabulary_size, dtype=np.uint32)
    rows = np.array([row], np.int64)
    if not isinstance(table, StepTable) or table.is_whole:
        model.counts.queries += len(ids)
        scores, _ = table.score_rows(rows, ids[None])
    else:
        blocks = table.utterance.context_blocks(table.states(rows))
        scores = blocks.distribution()
        model.count_asked(np.repeat(blocks.source, len(ids)))
    return scores.reshape(-1)
