"""A CTC beam search over letters or word pieces, frame by frame.

pyctcdecode makes a tuple and some strings for each beam and label of a frame, whose time is many
times that of the language model. Here a beam is a row of integers (`beam_kernels`). The new words
of all beams of all searches that `advance` takes together are one request to the language model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders import beam_kernels as kernels
from dlm.asr.decoders.beam_kernels import BEFORE, CODE, EMPTY, HOT, WORD
from dlm.asr.decoders.checks import check_known, check_utterance
from dlm.asr.decoders.labels import Labels, begins_of, codes_of
from dlm.asr.kenlm.table import ModelCounts, StepTable
from dlm.client import State, Utterance
from dlm.client.states import PhraseState
from dlm.errors import QueryError, shown
from dlm.ngram.vocab import UNK_ID, as_text
from dlm.units import LN_10

LONG_WORD = 6  # letters; a longer unknown beginning of a word costs more
LOG_BASE = 1.0 / math.log10(math.e)  # as pyctcdecode converts; differs from LN_10 in the last bit
ModelName: TypeAlias = str | os.PathLike[str]
ROOM = 1 << 12  # rows that tables begin with
STATES = 1 << 20  # of the table that all searches share


# --------------------------------------------------------------------------------- words


def _table(
    rows: NDArray[np.int32], bits: int, first: int, room: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """A hash table of rows by their first two columns, numbered from `first` on, with room."""
    size = 1 << (2 * max(len(rows), room)).bit_length()
    keys, values = np.full(size, EMPTY, np.int64), np.empty(size, np.int32)
    kernels.enter(rows[:, 0].astype(np.int64) << bits | rows[:, 1], first, keys, values)
    return keys, values


def _grown(rows: NDArray[Any], needed: int) -> NDArray[Any]:
    if needed <= len(rows):
        return rows
    more = np.zeros((2 * needed, *rows.shape[1:]), rows.dtype)
    more[: len(rows)] = rows
    return more


class WordTrie:
    """The beginnings of words; the first node is the root. Nodes are numbered level by level, so
    that those after a node are one range, by their letters.

    Shapes  nodes (N, 3) int32  parent, letter (its code point), length;  letters (N,) int32
            children (N + 1,) int32  those after node n are children[n] to children[n + 1]
            ends (W,)  the node of each of `words`, which are sorted
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = sorted(set(words))
        letters, begins = codes_of("".join(self.words)), begins_of(self.words)
        nodes, ends = np.empty((len(letters) + 1, 3), np.int32), np.empty(len(begins) - 1, np.int32)
        nodes = nodes[: kernels.grow_trie(letters, begins, nodes, ends)]
        order = np.argsort(nodes[:, 2], kind="stable")
        number = np.empty(len(nodes), np.int32)
        number[order] = np.arange(len(nodes))
        self.nodes = nodes[order]
        self.nodes[:, 0] = number[self.nodes[:, 0]]
        self.ends, self.letters = number[ends], self.nodes[:, 1].copy()
        children = np.searchsorted(self.nodes[1:, 0], np.arange(len(nodes) + 1)) + 1
        self.children = children.astype(np.int32)


class Bias:
    """The words of hotwords, and of the phrases of an utterance, for any number of searches.

    Attributes  codes  (N, 2) int32, scores (N,) float64: see `beam_kernels`
    """

    def __init__(
        self, hotwords: Iterable[str] | None, weight: float, utterance: Utterance | None = None
    ) -> None:
        if isinstance(hotwords, (str, bytes)):
            raise QueryError("hotwords is a string; expected a collection of words")
        hot = {word for phrase in hotwords or () for word in phrase.split()}
        self.utterance, self.weight = utterance, float(weight)
        self.phrases = phrases = None if utterance is None else utterance.phrases
        said: dict[str, int] = {}
        if phrases is not None:
            said = {as_text(word): phrases.id_of(word) for word in phrases.phrases.words}
        self.trie = trie = WordTrie(hot | set(said))
        self.codes = np.empty((len(trie.nodes) if trie.words else 0, 2), np.int32)
        self.codes[:] = 0, EMPTY
        shortest = np.full(len(trie.nodes), np.inf)
        for word, node in zip(trie.words, trie.ends.tolist(), strict=True):
            if word in said:
                self.codes[node, 1] = said[word] << 1 | 1
            if word in hot:
                self.codes[node, 0], shortest[node] = 1, len(word)
        parents, lengths = trie.nodes[:, 0], trie.nodes[:, 2]
        for length in range(lengths.max(), 0, -1):
            here = np.flatnonzero(lengths == length)
            np.minimum.at(shortest, parents[here], shortest[here])
        self.scores = self.weight * lengths / shortest


class BeamWords:
    """The words of an utterance's model, and what they score; shared by all searches.

    Args    listed  the words that may be said, besides those of phrases; None: all of the model
            name    by which another process opens the model, if any
    """

    def __init__(
        self, utterance: Utterance, listed: Collection[str] | None, name: ModelName | None
    ) -> None:
        check_utterance(utterance)
        if isinstance(listed, (str, bytes)):
            raise QueryError("unigrams is a string; expected a collection of words")
        check_known(listed or (), utterance)
        vocabulary, self.listed, self.name = utterance.vocabulary, listed, name
        words = map(as_text, vocabulary.words[1:]) if listed is None else listed
        self.trie = WordTrie(word for word in words if vocabulary.id_of(word) != UNK_ID)
        # A code is an id, and whether the word is known, below it.
        self.codes = np.full(len(self.trie.nodes), 0 if listed is None else EMPTY, np.int32)
        self.codes[self.trie.ends] = vocabulary.ids_of(self.trie.words).astype(np.int32) << 1 | 1
        self.utterance, plain = utterance, utterance.without_phrases()
        self.table = StepTable(plain, ModelCounts(), self, states=STATES)

    def code_of(self, word: str) -> int:
        """Of a word that is not listed."""
        found = self.utterance.vocabulary.id_of(word)
        return found << 1 | int(not self.trie.words and found != UNK_ID)

    def step(
        self, searches: Sequence[BeamSearch], before: list[NDArray[np.int64]], words: list[Any]
    ) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """As `StepTable.step_all`, for each search; a full table is replaced."""
        sizes = np.cumsum([len(rows) for rows in before])[:-1]
        wanted = np.concatenate(words)
        while True:
            table = self.table
            before = [one.moved(table, rows) for one, rows in zip(searches, before, strict=True)]
            found = table.step_all(np.concatenate(before), wanted)
            if found is not None:
                parts = (np.split(column, sizes) for column in found)
                return list(zip(*parts, strict=True))
            self.table = table.renewed()


# --------------------------------------------------------------------------------- the search


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """See `dlm.asr.ctc`: `build_ctcdecoder`, and `BeamSearchDecoderCTC.decode_beams`."""

    alpha: float = 0.5
    beta: float = 1.5
    unk_score_offset: float = -10.0
    score_boundary: bool = True
    beam_width: int = 100
    beam_prune_logp: float = -10.0
    token_min_logp: float = -5.0
    prune_history: bool = False

    def __post_init__(self) -> None:
        most = {"beam_prune_logp": 0.0, "token_min_logp": 0.0}
        for name, value in asdict(self).items():
            low, high = float(name == "beam_width") or -math.inf, most.get(name, math.inf)
            if not isinstance(value, (int, float, np.number)) or not low <= value <= high:
                raise QueryError(
                    f"{name} is {shown(value)}; expected a number from {low:g} to {high:g}"
                )


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A text: its words, each with its first frame and the frame after its last, the state after
    it, ln P of the acoustic model, and the score of all."""

    words: tuple[str, ...]
    frames: tuple[tuple[int, int], ...]
    state: State | None
    logit: float
    score: float


class BeamSearch:
    """The beams of one utterance.

    Args  labels, words (None without a language model), bias  shared
          start  the state before it; None: that of `BeamOptions.score_boundary`
    """

    def __init__(
        self,
        labels: Labels,
        words: BeamWords | None,
        bias: Bias,
        options: BeamOptions,
        start: State | None,
    ) -> None:
        self.labels, self.words, self.bias, self.options = labels, words, bias, options
        self.trie = WordTrie(()) if words is None else words.trie
        self._codes = np.zeros(1, np.int32) if words is None else words.codes
        self._counts = np.array([0, 1, 1])  # of parts beyond the trie, of texts, of frames
        self._parts = np.empty((ROOM, 4), np.int32)
        self._texts = np.zeros((ROOM, kernels.TEXT_COLUMNS), np.int32)
        self._frames = np.zeros((ROOM, 3), np.int64)
        self._ln_probs, self._states = np.zeros(ROOM), np.zeros(ROOM, np.int64)
        self._nodes = np.zeros(ROOM, np.int32)  # of phrases
        self._enter()
        root = 0 if len(bias.codes) else EMPTY
        self.beams = np.array([[0, 0, kernels.NO_LABEL, 0, EMPTY, EMPTY, root]])
        self._logits = np.zeros(1)
        self.single = False  # whether posteriors are float32, as whose sums scores are rounded
        self.frame, self._scored, order = 0, 1, 1
        if words is not None:
            self._table, utterance = words.table, words.utterance
            if start is None:
                start = utterance.begin() if options.score_boundary else utterance.null()
            self._states[0] = self._table.row_of(start._words[::-1])
            self._nodes[0] = getattr(start, "_node", 0)
            longest = 0 if bias.phrases is None else bias.phrases.phrases.longest
            order = max(utterance.order, longest)
        self._history = max(1, order - 1) if options.prune_history else 0

    # -- a frame ------------------------------------------------------------------------------

    def expand(self, column: NDArray[np.float64], tried: Sequence[int]) -> None:
        """The beams with each of some labels, in this order."""
        labels, trie, bias = self.labels, self.trie, self.bias
        self._make_room(len(self.beams))
        self._found, self._found_logits = kernels.expand(
            self.beams, self._logits, column, np.array(tried, np.int64), labels.alike, labels.kinds,
            labels.letters, labels.begins, labels.blank, self.frame, self.single, trie.children,
            trie.letters, self._codes, bias.trie.children, bias.trie.letters, bias.codes,
            self._counts, self._part_keys, self._part_values, self._parts, self._text_keys,
            self._text_values, self._texts, self._frames,
        )  # fmt: skip

    def prune(self) -> None:
        labels, options, alone = self.labels, self.options, self.words is None
        self.beams, self._logits = kernels.prune(
            self._found, self._found_logits, self._ln_probs, labels.letters, labels.begins,
            self.trie.nodes, self.bias.scores, 0.0 if alone else options.unk_score_offset,
            LONG_WORD, self.bias.weight, options.beam_prune_logp, options.beam_width,
            self._history, self._texts, alone, self.single, self._counts, self._part_keys,
            self._part_values, self._parts,
        )  # fmt: skip
        self.frame += 1

    def _make_room(self, beams: int) -> None:
        parts, texts, frames = self._counts.tolist()
        letters = self.options.beam_width * self.labels.longest
        self._frames = _grown(self._frames, frames + beams)
        if parts + letters > len(self._parts) or texts + beams > len(self._texts):
            self._parts = _grown(self._parts, parts + letters)
            for name in ("_texts", "_ln_probs", "_states", "_nodes"):
                setattr(self, name, _grown(getattr(self, name), texts + beams))
            self._enter()

    def _enter(self) -> None:
        parts, texts, _ = self._counts.tolist()
        self._part_keys, self._part_values = _table(
            self._parts[:parts], kernels.LETTER_BITS, len(self.trie.nodes), len(self._parts)
        )
        self._text_keys, self._text_values = _table(
            self._texts[:texts], kernels.TEXT_BITS, 0, len(self._texts)
        )

    # -- the language model -------------------------------------------------------------------

    @property
    def has_new(self) -> bool:
        return bool(self._counts[1] > self._scored)

    def asked(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The states before all new words, and the ids of these."""
        rows, words = self._texts[self._scored : self._counts[1]], self.words
        assert words is not None
        for row in np.flatnonzero(rows[:, CODE] == EMPTY).tolist():
            part = int(rows[row, WORD])
            code = rows[row, CODE] = words.code_of(self._spelled(part))
            if (outside := part - len(self._codes)) < 0:
                self._codes[part] = code
            else:
                self._parts[outside, 3] = code
        ids = (rows[:, CODE] >> 1).astype(np.int64)
        ids[ids >= words.utterance.vocabulary_size] = UNK_ID  # new words of phrases
        return self._states[rows[:, BEFORE]], ids

    def take(self, log10_prob: NDArray[np.float64], after: NDArray[np.int64]) -> None:
        """Takes the scores of the new words, and the states after them."""
        new = slice(self._scored, int(self._counts[1]))
        before, codes = self._texts[new, BEFORE], self._texts[new, CODE]
        offset = self.options.unk_score_offset
        total = self._weighted(np.where(codes & 1, log10_prob, log10_prob + offset))
        if (phrases := self.bias.phrases) is not None:
            nodes = self._nodes[before]
            ids, ones = (codes >> 1).astype(np.uint32), np.ones(len(codes), np.uint32)
            self._nodes[new], _ = phrases.automaton.advance(nodes, ones, ids, phrases.symbols)
            total += LN_10 * phrases.bonus(nodes, self._nodes[new])
        self._ln_probs[new] = self._ln_probs[before] + total
        self._states[new] = after
        self._scored = new.stop

    def _weighted(self, log10_prob: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.options.alpha * log10_prob * LOG_BASE + self.options.beta

    def moved(self, table: StepTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same states in another table, with all states of the search."""
        if self._table is table:
            return rows
        texts = int(self._counts[1])
        every, places = np.unique(np.append(self._states[:texts], rows), return_inverse=True)
        there = np.array([table.row_of(self._table.words(row)) for row in every.tolist()])
        if there.min() < 0:
            raise QueryError(
                f"these utterances have more than {STATES:,} states of the language model; decode "
                "fewer at once, or with fewer beams"
            )
        self._table, found = table, there[places]
        self._states[:texts] = found[:texts]
        return found[texts:]

    # -- the end ------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends the last word of all beams. Where none has begun, one without letters ends: as in
        pyctcdecode, it costs what an unknown word does."""
        self.expand(np.zeros(len(self.labels.alike)), [len(self.labels.names)])
        last = self._found
        empty = last[:, kernels.END] == kernels.NOTHING_ENDED
        texts = last[empty, kernels.TEXT]
        new = np.arange(len(texts)) + self._counts[1]
        self._texts[new, BEFORE], self._texts[new, WORD] = texts, 0
        self._texts[new, HOT], self._texts[new, CODE] = self._texts[texts, HOT], 0
        last[empty, kernels.TEXT] = new
        self._counts[1] += len(new)

    @property
    def last_states(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._states[self._found[:, kernels.TEXT]]
        return found

    def hypotheses(self, log10_end: NDArray[np.float64]) -> list[BeamHypothesis]:
        """What the beams say after `end`, best first; `log10_end`: of the sentence end after each
        of `last_states`."""
        last, words, phrases = self._found, self.words, self.bias.phrases
        texts, kind = last[:, kernels.TEXT], np.float32 if self.single else np.float64
        added = self._ln_probs[texts] + self.options.alpha * log10_end * LOG_BASE
        added += self.bias.weight * self._texts[texts, HOT]
        if phrases is not None:
            added += LN_10 * phrases.finish(self._nodes[texts])
        logits = self._found_logits.astype(kind)
        scores = logits + added.astype(kind)
        best = np.argsort(-scores, kind="stable")[: self.options.beam_width]
        best = best[scores[best] >= scores[best[0]] + kind(self.options.beam_prune_logp)]
        states: list[State | None] = [None] * len(best)
        if words is not None:
            info = (self.bias.utterance or words.utterance).model_info
            kept = self._table.states(self.last_states[best]).contexts()
            node = () if phrases is None else (0,)  # whatever follows begins its phrases anew
            states = [(PhraseState if node else State)(info, one, *node) for one in kept]
        return [
            BeamHypothesis(
                self._said(text), self._times(frames), state, float(logits[row]), float(scores[row])
            )
            for row, text, frames, state in zip(
                best.tolist(),
                texts[best].tolist(),
                last[best, kernels.FRAMES].tolist(),
                states,
                strict=True,
            )
        ]

    def best(self) -> tuple[tuple[str, ...], int]:
        """The words of the best beam so far, the begun one included, and how many words all beams
        have in common."""
        shared = set(self.beams[:, kernels.TEXT].tolist())
        while len(shared) > 1:  # a text's beginning has a lower number
            shared.remove(longest := max(shared))
            shared.add(int(self._texts[longest, BEFORE]))
        text, part = self.beams[0, [kernels.TEXT, kernels.PART]].tolist()
        last = (self._spelled(part),) if part else ()
        return (*self._said(text), *last), len(self._said(shared.pop()))

    def _spelled(self, part: int) -> str:
        letters, nodes = [], self.trie.nodes
        while part:
            at = part - len(nodes)
            part, letter = (self._parts[at] if at >= 0 else nodes[part])[:2].tolist()
            letters.append(chr(letter))
        return "".join(reversed(letters))

    def _said(self, text: int) -> tuple[str, ...]:
        words = []
        while text:
            text, part = self._texts[text, :2].tolist()
            words += [self._spelled(part)] if part else []
        return tuple(reversed(words))

    def _times(self, frames: int) -> tuple[tuple[int, int], ...]:
        times = []
        while frames:
            frames, begin, end = self._frames[frames].tolist()
            times.append((begin, end))
        return tuple(reversed(times))


def _score_new(searches: Sequence[BeamSearch]) -> None:
    new = [search for search in searches if search.has_new and search.words is not None]
    if new and (words := new[0].words) is not None:
        before, ids = zip(*(search.asked() for search in new), strict=True)
        for search, answers in zip(new, words.step(new, list(before), list(ids)), strict=True):
            search.take(*answers)


def advance(
    searches: Sequence[BeamSearch], posteriors: Sequence[NDArray[np.floating[Any]]]
) -> None:
    """Takes (T, labels) ln P for each search, frame by frame."""
    plans = []
    for search, given in zip(searches, posteriors, strict=True):
        if not search.frame:
            search.single = given.dtype == np.float32
        likely = zip(given >= search.options.token_min_logp, given.argmax(axis=1), strict=True)
        # In the order of pyctcdecode's set, which decides among equals.
        tried = [list(set(np.flatnonzero(row).tolist()) | {int(best)}) for row, best in likely]
        plans.append((search, np.ascontiguousarray(given, np.float64), tried))
    for frame in range(max(map(len, posteriors), default=0)):
        going = [plan for plan in plans if frame < len(plan[1])]
        for search, every, tried in going:
            search.expand(every[frame], tried[frame])
        _score_new([search for search, _, _ in going])
        for search, _, _ in going:
            search.prune()


def finish(searches: Sequence[BeamSearch]) -> list[list[BeamHypothesis]]:
    """What each says, if it ends here; it may go on, too."""
    for search in searches:
        search.end()
    _score_new(searches)
    ends = [np.zeros(len(search.last_states)) for search in searches]
    words = searches[0].words if searches else None
    if words is not None and searches[0].options.score_boundary:
        end = words.utterance.vocabulary.end_id
        before = [search.last_states for search in searches]
        asked = [np.full(len(states), end) for states in before]
        ends = [log10_prob for log10_prob, _ in words.step(searches, before, asked)]
    return [search.hypotheses(one) for search, one in zip(searches, ends, strict=True)]
