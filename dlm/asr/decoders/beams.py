"""A CTC beam search over letters or word pieces, frame by frame.

pyctcdecode makes a tuple and some strings for each beam and label of a frame, which takes many
times as long as the language model. Here a beam is a row of integers (`beam_kernels`). `advance`
sends one request to the language model for the new words of all beams of all its searches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders import beam_kernels as kernels
from dlm.asr.decoders.beam_kernels import BEFORE, CODE, EMPTY, HOT, WORD
from dlm.asr.decoders.checks import check_known, check_number, check_utterance, listed_words
from dlm.asr.decoders.labels import Labels, begins_of, codes_of
from dlm.asr.kenlm.table import ModelCounts, StepTable
from dlm.client import State, Utterance
from dlm.client.states import PhraseState
from dlm.ngram.vocab import UNK_ID, as_text
from dlm.units import LN_10

LONG_WORD = 6  # letters; a longer unknown beginning of a word costs more
LOG_BASE = 1.0 / math.log10(math.e)  # pyctcdecode's factor; it differs from LN_10 in the last bit
ModelName: TypeAlias = str | os.PathLike[str]
ROOM = 1 << 12  # minimum number of unused rows in a table
STATES = 1 << 20  # states in the table that all searches share


# --------------------------------------------------------------------------------- words


def _table(
    rows: NDArray[np.int32], count: int, bits: int, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Makes a hash table with room for all rows. The keys are the first two columns of the first
    `count` rows; the value of row i is `first` + i."""
    size = 1 << (2 * len(rows)).bit_length()
    keys, values = np.full(size, EMPTY, np.int64), np.empty(size, np.int32)
    given = rows[:count, 0].astype(np.int64) << bits | rows[:count, 1]
    kernels.enter(given, first, keys, values)
    return keys, values


def _with_room(rows: NDArray[Any], needed: int) -> NDArray[Any]:
    more = max(ROOM, len(rows), needed)
    return np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])


def _reached(
    parents: NDArray[np.integer[Any]], tops: NDArray[np.integer[Any]], root: int
) -> NDArray[np.int64]:
    """Returns the rows on the paths from `root` to `tops`, sorted; parents have lower numbers."""
    found: set[int] = set()
    for row in tops.tolist():
        while row > root and row not in found:
            found.add(row)
            row = int(parents[row])
    return np.array([root, *sorted(found)])


class WordTrie:
    """A trie of words; the first node is the root. Nodes are numbered by level, so that a
    node's children are one range, sorted by their letters.

    Shapes  nodes (N, 3) int32  parent, letter (its code point), length;  letters (N,) int32
            children (N + 1,) int32  node n has children children[n] to children[n + 1] - 1
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
    """Hotwords, and words of an utterance's phrases; any number of searches can share them.

    Attributes  codes  (N, 2) int32, scores (N,) float64: see `beam_kernels`
    """

    def __init__(
        self, hotwords: Iterable[str] | None, weight: float, utterance: Utterance | None = None
    ) -> None:
        hot = set(" ".join(listed_words("hotwords", () if hotwords is None else hotwords)).split())
        check_number("hotword_weight", weight, -LARGEST, LARGEST)
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
    """The words of an utterance's model, and their scores; shared by all searches.

    Args    listed  the words that may be said, besides those of phrases; None: all model words
            name    the name by which another process opens the model, if any
    """

    def __init__(
        self, utterance: Utterance, listed: Iterable[str] | None, name: ModelName | None
    ) -> None:
        check_utterance(utterance)
        listed = None if listed is None else listed_words("unigrams", listed)
        check_known(listed or (), utterance)
        vocabulary, self.listed, self.name = utterance.vocabulary, listed, name
        words = map(as_text, vocabulary.words[1:]) if listed is None else listed
        self.trie = WordTrie(word for word in words if vocabulary.id_of(word) != UNK_ID)
        # A code is a word's id times 2, plus 1 if the word is known.
        self.codes = np.full(len(self.trie.nodes), 0 if listed is None else EMPTY, np.int32)
        self.codes[self.trie.ends] = vocabulary.ids_of(self.trie.words).astype(np.int32) << 1 | 1
        self.utterance, plain = utterance, utterance.without_phrases()
        self.table = StepTable(plain, ModelCounts(), self, states=STATES)

    def code_of(self, word: str) -> int:
        """Returns the code of a word that is not listed."""
        word_id = self.utterance.vocabulary.id_of(word)
        return word_id << 1 | int(not self.trie.words and word_id != UNK_ID)

    def step(
        self, searches: Sequence[BeamSearch], before: list[NDArray[np.int64]], words: list[Any]
    ) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Like `StepTable.score_all`, for each search; a table without enough room is replaced."""
        sizes = np.cumsum([len(rows) for rows in before])[:-1]
        wanted, table = np.concatenate(words), self.table
        if (
            len(table) + len(wanted) + sum(one.states_outside(table) for one in searches)
            > table.room
        ):
            states = len(wanted) + sum(one.states_outside(None) for one in searches)
            self.table = table = table.renewed(max(STATES, 2 * states))
        before = [one.moved(table, rows) for one, rows in zip(searches, before, strict=True)]
        found = table.score_all(np.concatenate(before), wanted)
        assert found is not None
        return list(zip(*(np.split(column, sizes) for column in found), strict=True))


# --------------------------------------------------------------------------------- the search


# pyctcdecode's names.
DEFAULT_BEAM_WIDTH, DEFAULT_PRUNE_LOGP, DEFAULT_MIN_TOKEN_LOGP = 100, -10.0, -5.0
DEFAULT_HOTWORD_WEIGHT = 10.0
LARGEST = 1e6  # limit of weights and addends
NEVER = -1e25  # added to a log10 P instead of -inf; float32 can hold it
_RANGES: dict[str, tuple[float, float]] = {
    "alpha": (-LARGEST, LARGEST),
    "beta": (-LARGEST, LARGEST),
    "unk_score_offset": (-math.inf, LARGEST),
    "score_boundary": (0, 1),
    "beam_width": (1, 1 << 24),
    "beam_prune_logp": (-math.inf, 0.0),
    "token_min_logp": (-math.inf, 0.0),
    "prune_history": (0, 1),
}


@dataclass(slots=True)
class BeamOptions:
    """Options of `dlm.asr.ctc`: see `build_ctcdecoder`, `BeamSearchDecoderCTC.decode_beams`."""

    alpha: float = 0.5
    beta: float = 1.5
    unk_score_offset: float = -10.0
    score_boundary: bool = True
    beam_width: int = DEFAULT_BEAM_WIDTH
    beam_prune_logp: float = DEFAULT_PRUNE_LOGP
    token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP
    prune_history: bool = False

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_number(name, value, *_RANGES[name])
        self.beam_width = int(self.beam_width)
        self.unk_score_offset = max(self.unk_score_offset, NEVER)  # finite, for products with 0


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A text: its words; for each word, the first frame and the frame after the last; the state
    after the text; ln P of the acoustic model; and the total score."""

    words: tuple[str, ...]
    frames: tuple[tuple[int, int], ...]
    state: State | None
    logit: float
    score: float


class BeamSearch:
    """The beams of one utterance.

    Args  labels, words, bias  shared with other searches; no language model: words is None
          start  the state before the utterance; None: `BeamOptions.score_boundary` decides
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
        self._counts = np.array([0, 1, 1])  # counts: parts outside the trie, texts, frames
        self._parts = np.empty((0, 4), np.int32)
        self._texts = np.zeros((1, kernels.TEXT_COLUMNS), np.int32)
        self._frames = np.zeros((1, 3), np.int64)
        self._ln_probs, self._states = np.zeros(1), np.zeros(1, np.int64)
        self._nodes = np.zeros(1, np.int32)  # by text: its node in the phrases' automaton
        root = 0 if len(bias.codes) else EMPTY
        self.beams = np.array([[0, 0, kernels.NO_LABEL, 0, EMPTY, EMPTY, root]])
        self._logits = np.zeros(1)
        # The longest text that all beams share, and the words of that text.
        self._shared, self._settled = 0, tuple[str, ...]()
        self.single = False  # whether posteriors, and so the final scores, are float32
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
        """Extends the beams by each label in `tried`, in this order."""
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
        if (
            parts + letters > len(self._parts)
            or texts + beams > len(self._texts)
            or frames + beams > len(self._frames)
        ):
            self._forget(0)

    def _forget(self, root: int) -> None:
        """Drops texts that no beam uses, and makes room; the text `root` becomes the empty text."""
        beams, size = self.beams, len(self.trie.nodes)
        texts = _reached(self._texts[:, BEFORE], beams[:, kernels.TEXT], root)
        frames = _reached(self._frames[:, 0], beams[:, kernels.FRAMES], 0)
        self._texts, self._frames = self._texts[texts], self._frames[frames]
        words, begun = self._texts[1:, WORD], beams[:, kernels.PART]
        parts = _reached(self._parts[:, 0] - size, np.append(words, begun) - size, -1)[1:]
        self._parts = self._parts[parts]
        for column, kept, first in (
            (self._texts[:, BEFORE], texts, 0),
            (beams[:, kernels.TEXT], texts, 0),
            (self._frames[:, 0], frames, 0),
            (beams[:, kernels.FRAMES], frames, 0),
            (words, parts, size),
            (begun, parts, size),
            (self._parts[:, 0], parts, size),
        ):
            moved = column >= first
            column[moved] = first + np.searchsorted(kept, column[moved] - first)
        if root:
            self._shared, self._settled = 0, ()
        self._shared = int(np.searchsorted(texts, self._shared))
        self._counts[:] = len(parts), len(texts), len(frames)
        self._scored = len(texts)
        letters = self.options.beam_width * self.labels.longest
        self._parts = _with_room(self._parts, letters)
        self._frames = _with_room(self._frames, len(beams))
        self._texts = _with_room(self._texts, len(beams))
        for name in ("_ln_probs", "_states", "_nodes"):
            setattr(self, name, _with_room(getattr(self, name)[texts], len(beams)))
        self._part_keys, self._part_values = _table(
            self._parts, len(parts), kernels.LETTER_BITS, size
        )
        self._text_keys, self._text_values = _table(self._texts, len(texts), kernels.TEXT_BITS, 0)

    # -- the language model -------------------------------------------------------------------

    def asked(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns, for each new word, the state before it, and its id."""
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
        total = np.where(codes & 1, log10_prob, log10_prob + self.options.unk_score_offset)
        total = self.options.alpha * total * LOG_BASE + self.options.beta
        if (phrases := self.bias.phrases) is not None:
            nodes = self._nodes[before]
            ids, ones = (codes >> 1).astype(np.uint32), np.ones(len(codes), np.uint32)
            self._nodes[new], _ = phrases.automaton.advance(nodes, ones, ids, phrases.symbols)
            total += LN_10 * phrases.bonus(nodes, self._nodes[new])
        self._ln_probs[new] = self._ln_probs[before] + total
        self._states[new] = after
        self._scored = new.stop

    def states_outside(self, table: StepTable | None) -> int:
        return 0 if self._table is table else len(np.unique(self._states[: self._counts[1]]))

    def moved(self, table: StepTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Moves the search's states to another table, which has room; returns `rows` there."""
        if self._table is table:
            return rows
        texts = int(self._counts[1])
        every, places = np.unique(np.append(self._states[:texts], rows), return_inverse=True)
        there = np.array([table.row_of(self._table.words(row)) for row in every.tolist()])
        self._table, found = table, there[places]
        self._states[:texts] = found[:texts]
        return found[texts:]

    # -- the end ------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends the last word of all beams. Where no word has begun, an empty word ends; as in
        pyctcdecode, it costs as much as an unknown word."""
        self.expand(np.zeros(len(self.labels.alike)), [len(self.labels.labels)])
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
        return np.asarray(self._states[self._found[:, kernels.TEXT]])

    def hypotheses(self, log10_end: NDArray[np.float64]) -> list[BeamHypothesis]:
        """Texts after `end`, best first. `log10_end`: log10 P of </s> after `last_states`, or 0."""
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
            node = () if phrases is None else (0,)  # after this state, phrases begin anew
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
        """Returns the best beam's words, finished or not, and how many words all beams share."""
        text, part = self.beams[0, [kernels.TEXT, kernels.PART]].tolist()
        before, self._shared = self._shared, kernels.shared_text(self.beams, self._texts)
        self._settled += self._said(self._shared, before)
        last = (self._spelled(part),) if part else ()
        return (*self._settled, *self._said(text, self._shared), *last), len(self._settled)

    def settle(self) -> list[tuple[str, tuple[int, int]]]:
        """Removes the words that all beams share, except the last ones, which `prune_history` still
        compares; returns the removed words, with their frames in the best beam."""
        shared = kernels.shared_text(self.beams, self._texts)
        for _ in range(self._history):
            shared = int(self._texts[shared, BEFORE])
        if not shared:
            return []
        times = self._times(int(self.beams[0, kernels.FRAMES]))
        found = list(zip(self._said(shared), times, strict=False))
        for beam in self.beams:
            text, frames, after = beam[kernels.TEXT], beam[kernels.FRAMES], None
            while text != shared:
                text, after, frames = self._texts[text, BEFORE], frames, self._frames[frames, 0]
            if after is None:
                beam[kernels.FRAMES] = 0
            else:
                self._frames[after, 0] = 0
        self._forget(shared)
        return found

    def _spelled(self, part: int) -> str:
        letters, nodes = [], self.trie.nodes
        while part:
            at = part - len(nodes)
            part, letter = (self._parts[at] if at >= 0 else nodes[part])[:2].tolist()
            letters.append(chr(letter))
        return "".join(reversed(letters))

    def _said(self, text: int, beginning: int = 0) -> tuple[str, ...]:
        words = []
        while text != beginning:
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
    new = [one for one in searches if one.words is not None and one._counts[1] > one._scored]
    if new and (words := new[0].words) is not None:
        before, ids = zip(*(search.asked() for search in new), strict=True)
        for search, answers in zip(new, words.step(new, list(before), list(ids)), strict=True):
            search.take(*answers)


def advance(
    searches: Sequence[BeamSearch], posteriors: Sequence[NDArray[np.floating[Any]]]
) -> None:
    """Feeds (T, labels) ln P to each search, frame by frame."""
    plans = []
    for search, given in zip(searches, posteriors, strict=True):
        if not search.frame:
            search.single = given.dtype == np.float32
        likely = zip(given >= search.options.token_min_logp, given.argmax(axis=1), strict=True)
        # Labels are in the order of pyctcdecode's set, which breaks ties.
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
    """Returns each search's hypotheses as if it ended here; a search can still continue."""
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
