"""The client and the current table that all `Model`s of the same name in a process share."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm.state import KenlmState, PickledStates, not_a_state
from dlm.asr.kenlm.table import (
    NULL,
    ROW_MASK,
    ModelCounts,
    ModelTable,
    StepTable,
    TextScorer,
    UnpackedTable,
    fits,
)
from dlm.asr.open import SCHEME, open_model
from dlm.client import ClientConfig
from dlm.client.states import FULL_MODEL
from dlm.errors import DlmError, ModelMismatch, QueryError
from dlm.index.search.local import LocalModel
from dlm.index.search.text.score import score_lines
from dlm.kenlm.score_kernels import TEXT_BYTES
from dlm.ngram.query import BIGRAM_FALLBACK, Answers
from dlm.ngram.vocab import UNK_ID
from dlm.progress import Tell, compiling_notice
from dlm.units import counted
from dlm.wire.secret import signature

TOLD_NGRAMS = 10_000_000  # a larger model takes seconds to unpack, so a line is printed
LOOK_S = 1.0  # seconds between checks of which model new sentences use
# Separators of words in `bytes.split`; elsewhere in dlm, \v and \f are characters of words.
_SPACES = bytes.maketrans(b"\n\v\f", b"   ")
AT_ONCE = 512  # sentences per call to servers
LENGTH_SHIFT = ROW_MASK.bit_length()

_opened: weakref.WeakValueDictionary[tuple[Any, ...], OpenedModel] = weakref.WeakValueDictionary()


def opened(
    named: bytes,
    config: ClientConfig | None,
    *,
    unpacks: bool,
    show_progress: bool,
    vocab: str | None = None,
) -> OpenedModel:
    text = os.fsdecode(named)
    stamp = None if text.startswith(SCHEME) else signature(Path(text))
    key = (named, repr(stamp), repr(config), unpacks, vocab)
    found = _opened.get(key)
    if found is None:
        tell = _tell if show_progress else lambda line: None
        compiling_notice.use(tell)
        found = _opened[key] = OpenedModel(named, config, unpacks, tell, vocab)
    return found


def _tell(line: str) -> None:
    sys.stderr.write(f"dlm: {line}\n")


class OpenedModel:
    """A client, and the table that new sentences use for their states."""

    def __init__(
        self,
        named: bytes,
        config: ClientConfig | None,
        unpacks: bool,
        tell: Tell,
        vocab: str | None,
    ) -> None:
        # Decoders cannot handle server errors, so 2-grams answer if no shard does in time.
        config = replace(ClientConfig(), bigram_fallback=True) if config is None else config
        self.client = open_model(named, config=config, tell=tell, vocab=vocab)
        self.counts = ModelCounts()
        self._mark = object()  # owner of the tables, which must not keep `self` alive
        utterance = self.client.utterance()
        local = utterance.local_model
        self._is_fixed = local is not None and utterance.model_info.kind == FULL_MODEL
        self.table: ModelTable
        unpacks = unpacks and self._is_fixed
        if unpacks and isinstance(local, LocalModel) and fits(local):
            ngrams = sum(local.manifest.counts)
            if ngrams > TOLD_NGRAMS:
                tell(f"unpacking {counted(ngrams, 'n-gram')} into memory")
            self.table = UnpackedTable(utterance, self.counts, self._mark, local)
        else:
            self.table = StepTable(utterance, self.counts, self._mark)
        # If the whole model stays in this process, this scores sentences without a table.
        self.direct: TextScorer | None = None
        if self._is_fixed and self.table.local is not None:
            self.direct = self.table.scorer
        self._looked_s = time.monotonic()

    def current(self) -> ModelTable:
        if not self._is_fixed and time.monotonic() - self._looked_s > LOOK_S:
            self._look()
        return self.table

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        try:
            utterance = self.client.utterance(wait_s=0.0)
        except DlmError:
            return  # the sentence begins on the previous model, whose 2-grams answer
        if utterance.model_info != self.table.model_info:
            self.table.count()
            self.table = StepTable(utterance, self.counts, self._mark)

    def resolve(self, state: KenlmState) -> tuple[ModelTable, int]:
        """Returns the table and row in which a state continues. Raises TypeError if the state is
        not dlm's, and ModelMismatch if it belongs to another model or shard set."""
        if not isinstance(state, KenlmState):
            raise not_a_state(state)
        other, row = state._place()
        if other is None:
            return self.table, NULL
        if other.model_info == self.table.model_info:
            return self.entered(self.table, other.words(row))
        if not isinstance(other, PickledStates) and other.owner is self._mark:
            return other, row  # a sentence that began on the previous model
        theirs, ours = other.model_info, self.table.model_info
        raise ModelMismatch(
            f"found a state of model {theirs.model} (shard set {theirs.shard_set}), expected "
            f"model {ours.model} (shard set {ours.shard_set}); a sentence cannot mix scores of "
            "two models, or of two shard sets of one model"
        )

    def entered(self, table: ModelTable, words: tuple[int, ...]) -> tuple[ModelTable, int]:
        """Returns the table (a new one if this is full) and the row of these ids, newest first."""
        row = table.row_of(words)
        if row < 0:
            table = self.renew(table)
            row = table.row_of(words)
        return table, row

    def renew(self, table: ModelTable) -> StepTable:
        assert isinstance(table, StepTable)  # other tables are never full
        fresh = table.renewed()
        if table is self.table:
            self.table = fresh
        return fresh

    def ask(self, table: ModelTable, row: int, word: int) -> tuple[ModelTable, float, int]:
        row &= ROW_MASK
        while True:
            log10_prob, answer = table.score(row, word)
            if answer >= 0:
                return table, log10_prob, answer
            table, row = self.entered(self.renew(table), table.words(row))

    def count_asked(self, source: NDArray[np.uint8]) -> None:
        """Counts queries that the table did not answer."""
        self.counts.queries += source.size
        self.counts.cache_misses += source.size
        self.counts.bigram_fallback += int((source == BIGRAM_FALLBACK).sum())

    def stats(self) -> dict[str, int]:
        self.table.count()
        return asdict(self.counts)

    # -- sentences ----------------------------------------------------------------------------

    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        table = self.current()
        if table.local is not None and len(text) <= TEXT_BYTES:
            return table.scorer.score(text, bos, eos)
        if len(text) > TEXT_BYTES:
            return float(self.score_many([text], bos, eos)[0])
        total = 0.0
        for log10_prob in self._served(table, _ids(table, text, eos), bos)[0]:
            total += log10_prob
        return total

    def full_scores(self, text: bytes, bos: bool, eos: bool) -> Iterator[tuple[float, int, bool]]:
        table = self.current()
        ids = _ids(table, text, eos)
        unknown = [word == UNK_ID for word in ids]
        if eos:
            unknown[-1] = False
        if not table.is_whole:
            log10_probs, lengths = self._served(table, ids, bos)
            yield from zip(log10_probs, lengths, unknown, strict=True)
            return
        row = table.start(bos)
        for word, is_unknown in zip(ids, unknown, strict=True):
            log10_prob, answer = table.step(table.address, row, word)
            if answer < 0:
                table, log10_prob, answer = self.ask(table, row, word)
            row = answer
            yield log10_prob, row >> LENGTH_SHIFT, is_unknown

    def _served(
        self, table: ModelTable, ids: list[int], bos: bool
    ) -> tuple[list[float], list[int]]:
        """Returns log10 P and KenLM's ngram_length of each word. The table answers up to the first
        word that it lacks; one call of the utterance answers the rest."""
        assert isinstance(table, StepTable)
        log10_probs: list[float] = []
        lengths: list[int] = []
        row = table.start(bos)
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
                self.renew(table)
            log10_probs += answers.log10_prob.tolist()
            lengths += answers.ngram_length.tolist()
        return log10_probs, lengths

    def score_many(self, texts: Sequence[bytes], bos: bool, eos: bool) -> NDArray[np.float64]:
        table = self.current()
        local = table.local
        if not texts:
            return np.zeros(0)
        if local is not None:
            joined = b"\n".join(texts)
            if joined.count(b"\n") >= len(texts) or b"\v" in joined or b"\f" in joined:
                joined = b"\n".join(text.translate(_SPACES) for text in texts)
            lines = score_lines(local, joined, bos=bos, eos=eos)
            self.counts.queries += int(lines.begin[-1]) + eos * len(texts)
            return lines.totals
        found = []
        split = (text.split() for text in texts)
        while some := list(islice(split, AT_ONCE)):
            for one in table.utterance.score_sentences(some, bos=bos, eos=eos):
                found.append(one.log10_prob)
                self.count_asked(one.token_source)
        return np.array(found)

    # -- many words ---------------------------------------------------------------------------

    def distribution(self, state: KenlmState) -> NDArray[np.float32]:
        table, row = self.resolve(state)
        ids = np.arange(table.utterance.vocabulary_size, dtype=np.uint32)
        rows = np.array([row], np.int64)
        if table.is_whole:
            return table.score_rows(rows, ids[None]).reshape(-1)
        assert isinstance(table, StepTable)
        blocks = table.utterance.context_blocks(table.states(rows))
        self.count_asked(np.repeat(blocks.source, len(ids)))
        return blocks.distribution().reshape(-1)

    def score_batch(
        self, states: Sequence[KenlmState], words: Any
    ) -> tuple[NDArray[np.float32], NextStates]:
        if isinstance(states, KenlmState):
            raise QueryError("found a State, expected a sequence of states; give [state]")
        if isinstance(words, (str, bytes)):
            raise QueryError("found a string, expected a sequence of words; give [word]")
        table, rows = self._rows_of(states)
        find = table.id_of
        if len(words) > 0 and not isinstance(words[0], str):
            if len(words) != len(states) or len({len(row) for row in words}) > 1:
                raise QueryError(
                    f"{len(words)} rows of words were given for {len(states)} states; expected one "
                    "row per state, all of the same length"
                )
            ids = np.array([list(map(find, row)) for row in words], np.uint32)
        else:
            ids = np.fromiter(map(find, words), np.uint32, len(words))
        if table.is_whole:
            ids = np.atleast_2d(ids)
            return table.score_rows(rows, ids), NextStates(
                (len(rows), ids.shape[1]),
                lambda k, w: self.ask(table, int(rows[k]), int(ids[k % len(ids), w]))[::2],
            )
        assert isinstance(table, StepTable)
        found = table.utterance.extend(table.states(rows), ids)
        self.count_asked(found.source)
        return found.log10_prob, NextStates(
            found.log10_prob.shape,
            lambda k, w: self.entered(table, found.states[k, w]._words[::-1]),
        )

    def _rows_of(self, states: Sequence[KenlmState]) -> tuple[ModelTable, NDArray[np.int64]]:
        while True:
            table = self.table
            rows = []
            for state in states:
                if getattr(state, "_table", None) is table:
                    rows.append(state._answer & ROW_MASK)
                    continue
                found, row = self.resolve(state)
                if found is not table:
                    break
                rows.append(row)
            else:
                return table, np.array(rows, np.int64)
            if found is not self.table:
                raise QueryError(
                    "the states belong to different models, since the servers changed models after "
                    "some sentences had begun; score the sentences one by one"
                )


def _ids(table: ModelTable, text: bytes, eos: bool) -> list[int]:
    known, find = table.ids, table.id_of
    words = [word.decode("utf-8", "surrogateescape") for word in text.split()]
    # `known` is read once per word: another thread may clear it.
    ids = [find(word) if (known_id := known.get(word)) is None else known_id for word in words]
    return [*ids, table.vocabulary.end_id] if eos else ids


def _asked(table: ModelTable, ids: list[int], bos: bool, known: int) -> Answers:
    begin = [table.vocabulary.begin_id] * bos
    whole, width = begin + ids, max(table.order - 1, 0)
    ends = range(len(begin) + known, len(whole))
    return table.utterance.score([whole[max(end - width, 0) : end] for end in ends], ids[known:])


class NextStates:
    """The states after each of K states and each of W words; `after[k, w]` creates one of them."""

    def __init__(
        self, shape: tuple[int, ...], find: Callable[[int, int], tuple[ModelTable, int]]
    ) -> None:
        self.shape, self._find = shape, find

    def __getitem__(self, at: tuple[int, int]) -> KenlmState:
        made = KenlmState()
        made._table, made._answer = self._find(*at)
        return made
