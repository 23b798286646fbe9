"""pyctcdecode's beam search over letters, compiled; the same hypotheses and scores.

pyctcdecode makes a tuple and some strings for each beam and letter of a frame, whose time is
several times that of the language model. Here a beam is a row of integers. Python scores words
only, each once after each text.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders import letter_kernels as kernels
from dlm.asr.decoders.contexts import Contexts, KnownContext
from dlm.asr.decoders.letter_kernels import EMPTY
from dlm.client import State
from dlm.client.api.phrases import BoundPhrases
from dlm.units import LN_10

_ROOM = 1 << 12  # rows that tables begin with
# A word that may follow a text: its id, whether it may be said, its symbol in phrases.
Word = tuple[int, bool, int]


def _codes(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def _begins(words: Sequence[str]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, words)], dtype=np.int64)


def _table(rows: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """An empty table for so many rows."""
    size = 1 << (2 * rows).bit_length()
    return np.full(size, EMPTY, np.int64), np.empty(size, np.int32)


class Start(Protocol):
    """Where a search begins: `DlmState`, whose constructor takes these."""

    state: State
    node: int  # of phrases
    phrases: str

    def __init__(self, state: State, node: int = 0, phrases: str = "") -> None: ...


class SearchedModel(Protocol):
    """What a search asks of `DlmLanguageModel`."""

    alpha: float
    beta: float
    unk_score_offset: float
    log_base: float
    long_word: int
    phrases: BoundPhrases | None
    contexts: Contexts

    @property
    def order(self) -> int:
        """Of the model, or words of the longest phrase."""

    @property
    def trie(self) -> LetterTrie:
        """Of the words that may be said."""

    def word(self, text: str) -> Word:
        """What must be known of a word."""

    def fetch(self, asked: Iterable[tuple[Any, str]], is_last_word: bool = False) -> None:
        """Fetches what `score` needs."""

    def score(self, prev_state: Any, word: str, is_last_word: bool = False) -> tuple[float, Any]:
        """The weighted score of a word, and the state after it."""


class LetterTrie:
    """The beginnings of words, for any number of searches; made once per model.

    Attributes
        nodes  (N, 3) int32  parent, letter (its code point), length; the first is the root
        words  of nodes that were asked for
    """

    def __init__(self, words: Sequence[str]) -> None:
        letters = _codes("".join(words))
        self.keys, self.values = _table(len(letters))
        nodes = np.empty((len(letters) + 1, 3), np.int32)
        size = kernels.grow_trie(letters, _begins(words), self.keys, self.values, nodes)
        self.nodes = nodes[:size].copy()
        self.words: dict[int, Word] = {}


class LetterLabels:
    """The labels of an acoustic model's outputs, whose letters spell words."""

    @classmethod
    def of(cls, labels: Sequence[str]) -> LetterLabels | None:
        """None if a space stands within a label: a text could have its words in several ways."""
        spaced = any(label.split() != [label] for label in labels if label not in ("", " "))
        return None if spaced else cls(labels)

    def __init__(self, labels: Sequence[str]) -> None:
        first: dict[str, int] = {}
        self.alike = np.array([first.setdefault(one, at) for at, one in enumerate(labels)])
        self.blank, self.space = first.get("", -2), first.get(" ", -2)
        self.letters, self.begins = _codes("".join(labels)), _begins(labels)
        self.longest = max(map(len, labels), default=0)
        self.spaces = labels.count(" ")


class LetterSearch:
    """One utterance. `run` returns what pyctcdecode's `decode_beams` does."""

    def __init__(self, model: SearchedModel, alphabet: LetterLabels, start: Start) -> None:
        self._model, self._alphabet, self._trie = model, alphabet, model.trie
        self._counts = np.array([0, 1, 1])  # of parts beyond the trie, of texts, of frames
        self._part_keys, self._part_values = _table(_ROOM)
        self._parts = np.empty((_ROOM, 3), np.int32)
        self._text_keys, self._text_values = _table(_ROOM)
        self._texts = np.zeros((_ROOM, 2), np.int32)
        self._frames = np.full((_ROOM, 3), -1, np.int64)
        self._ln_probs = np.zeros(_ROOM)
        self._slots = np.empty(0, np.int32)
        self._words: dict[int, Word] = {}  # of parts beyond the trie
        self._start = start
        self._states: list[State] = [start.state]
        self._nodes = [start.node]
        self._contexts: list[KnownContext | None] = [None]
        self._weights = model.alpha, model.beta, model.unk_score_offset, model.log_base

    def run(
        self,
        posteriors: NDArray[np.floating[Any]],
        width: int,
        least: float,
        min_logp: float,
        prune_history: bool,
    ) -> list[tuple[str, Start, list[tuple[str, tuple[int, int]]], Any, Any]]:
        """Text, state, frames of the words, score of the acoustic model and of both; best first.

        Args  posteriors  (T, labels) natural logarithms, float32 or float64
        """
        alphabet, trie, model = self._alphabet, self._trie, self._model
        single = posteriors.dtype == np.float32
        every = np.ascontiguousarray(posteriors, np.float64)
        history = max(1, model.order - 1) if prune_history else 0
        beams, logits = np.array([[0, 0, -1, 0, -1, -1]]), np.zeros(1)
        found, found_logits = np.empty((0, 6), np.int64), np.empty(0)
        best = posteriors.argmax(axis=1).tolist() if len(posteriors) else []
        likely = posteriors >= min_logp
        for frame, column in enumerate(every):
            # In the order of pyctcdecode's set, which decides among equals.
            tried = set(np.flatnonzero(likely[frame]).tolist()) | {best[frame]}
            labels = np.fromiter(tried, np.int64, len(tried))
            more = len(beams) * len(labels)
            if more > len(found):
                found, found_logits = np.empty((2 * more, 6), np.int64), np.empty(2 * more)
                self._slots = np.empty(1 << (4 * more + 16).bit_length(), np.int32)
            self._make_room(len(beams), len(beams) * alphabet.spaces, more * alphabet.longest)
            known = int(self._counts[1])
            count = kernels.expand(
                beams, logits, column, labels, alphabet.alike, alphabet.letters, alphabet.begins,
                alphabet.blank, alphabet.space, frame, single, trie.keys, trie.values, trie.nodes,
                self._counts, self._part_keys, self._part_values, self._parts, self._text_keys,
                self._text_values, self._texts, self._frames, self._slots, found, found_logits,
            )  # fmt: skip
            if self._counts[1] > known:
                self._score(known, int(self._counts[1]))
            beams = np.empty((min(count, width), 6), np.int64)
            logits = np.empty(len(beams))
            kept = kernels.prune(
                found[:count], found_logits[:count], self._ln_probs, self._parts, len(trie.nodes),
                model.unk_score_offset, model.long_word, least, width, history, self._texts, single,
                self._slots, beams, logits,
            )  # fmt: skip
            beams, logits = beams[:kept], logits[:kept]
        return self._ended(beams, logits.astype(posteriors.dtype), width, least)

    def _make_room(self, beams: int, spaces: int, letters: int) -> None:
        """For one more text of each beam, and so many more words with frames, and parts."""
        parts, texts, frames = self._counts.tolist()
        if parts + letters > len(self._parts):
            self._parts = _grown(self._parts, parts + letters)
            table = _table(len(self._parts))
            kernels.move_table(self._part_keys, self._part_values, *table)
            self._part_keys, self._part_values = table
        if texts + beams > len(self._texts):
            self._texts = _grown(self._texts, texts + beams)
            self._ln_probs = _grown(self._ln_probs, texts + beams)
            table = _table(len(self._texts))
            kernels.move_table(self._text_keys, self._text_values, *table)
            self._text_keys, self._text_values = table
        if frames + spaces > len(self._frames):
            self._frames = _grown(self._frames, frames + spaces)

    def _score(self, known: int, end: int) -> None:
        """Scores new texts, each the last word after the text before it."""
        model, contexts, trie_words = self._model, self._contexts, self._trie.words
        pairs = self._texts[known:end].tolist()
        wanted = [before for before in dict.fromkeys(p for p, _ in pairs) if not contexts[before]]
        if wanted:
            fetched = model.contexts.get_all([self._states[before] for before in wanted])
            for before, context in zip(wanted, fetched, strict=True):
                contexts[before] = context
        contexts.extend([None] * len(pairs))
        model.contexts.counts.queries += len(pairs)
        alpha, beta, offset, log_base = self._weights
        ln_probs, phrases, nodes = self._ln_probs, model.phrases, self._nodes
        trie_size = len(self._trie.nodes)
        for text, (before, part) in enumerate(pairs, known):
            words = trie_words if part < trie_size else self._words
            word = words.get(part)
            if word is None:
                word = words[part] = model.word(self._spelled(part))
            known_context = contexts[before]
            assert known_context is not None
            answer = known_context.answers.get(word[0])
            log10_prob, after = known_context.score(word[0]) if answer is None else answer
            if not word[1]:
                log10_prob += offset
            total = alpha * log10_prob * log_base + beta
            node = 0
            if phrases is not None and (word[2] or nodes[before]):
                node, bonus = phrases.step_symbol(nodes[before], word[2])
                total += LN_10 * bonus
            ln_probs[text] = ln_probs[before] + total
            self._states.append(after)
            nodes.append(node)

    def _spelled(self, part: int) -> str:
        letters, nodes = [], self._trie.nodes
        while part:
            at = part - len(nodes)
            part, letter, _ = (self._parts[at] if at >= 0 else nodes[part]).tolist()
            letters.append(chr(letter))
        return "".join(reversed(letters))

    def _said(self, text: int) -> list[str]:
        words = []
        while text:
            text, part = self._texts[text].tolist()
            words.append(self._spelled(part))
        return words[::-1]

    def _times(self, frames: int) -> list[tuple[int, int]]:
        times = []
        while frames:
            frames, begin, end = self._frames[frames].tolist()
            times.append((begin, end))
        return times[::-1]

    def _ended(
        self, beams: NDArray[np.int64], logits: NDArray[Any], width: int, least: float
    ) -> list[Any]:
        """The last words completed, the end scored; those that are spelled the same are one."""
        model = self._model
        merged: dict[str, tuple[Any, ...]] = {}
        for (text, part, _, frames, begin, end), logit in zip(beams.tolist(), logits, strict=True):
            last = self._spelled(part)
            words = self._said(text) + [last] * bool(last)
            times = self._times(frames) + [(begin, end)] * bool(last)
            said = " ".join(words)
            if said in merged:
                other = merged[said][0]
                high, low = max(other, logit), min(other, logit)
                logit = high + math.log(1 + math.exp(low - high))
            merged[said] = logit, words, times, text, last  # all but the sum is of the last
        before = {
            text: type(self._start)(self._states[text], self._nodes[text], self._start.phrases)
            for _, _, _, text, _ in merged.values()
        }
        model.fetch([(before[text], last) for _, _, _, text, last in merged.values()], True)
        scored = []
        for said, (logit, words, times, text, last) in merged.items():
            score, state = model.score(before[text], last, True)
            both = logit + (float(self._ln_probs[text]) + score)
            scored.append((said, state, list(zip(words, times, strict=False)), logit, both))
        best = max(one[-1] for one in scored)
        kept = [one for one in scored if one[-1] >= best + least]
        return heapq.nlargest(width, kept, key=lambda one: one[-1])


def _grown(rows: NDArray[Any], needed: int) -> NDArray[Any]:
    """The same rows, with room for twice as many as needed."""
    more = np.zeros((2 * needed, *rows.shape[1:]), rows.dtype)
    more[: len(rows)] = rows
    return more
