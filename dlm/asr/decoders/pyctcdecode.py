"""A language model for pyctcdecode, and a decoder that queries it once per frame.

`DlmDecoder` fetches the new contexts of all beams of a frame together; then every word is answered
locally. Its beam search over letters is compiled (`LetterSearch`), with the same hypotheses and
scores; pyctcdecode's own goes on where labels are word pieces, or its own hotwords are given.

pyctcdecode declares numpy below 2 and dlm needs 2 or later, but it works with both:
`pip install --no-deps pyctcdecode pygtrie`. Beams may be tuples, as in release 0.5.0, or objects.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders import letter_kernels as kernels
from dlm.asr.decoders.contexts import (
    MAX_WORDS,
    Contexts,
    Counts,
    KnownContext,
    check_known,
    check_utterance,
)
from dlm.asr.decoders.letter_kernels import EMPTY
from dlm.client import State, Utterance
from dlm.errors import ConfigError, ModelMismatch, QueryError
from dlm.extras import needed
from dlm.ngram.vocab import UNK_ID, as_text
from dlm.units import LN_10

try:
    from pyctcdecode import language_model
    from pyctcdecode.alphabet import Alphabet
    from pyctcdecode.constants import (
        AVG_TOKEN_LEN,
        DEFAULT_ALPHA,
        DEFAULT_BETA,
        DEFAULT_SCORE_LM_BOUNDARY,
        DEFAULT_UNK_LOGP_OFFSET,
        LOG_BASE_CHANGE_FACTOR,
    )
    from pyctcdecode.decoder import EMPTY_START_BEAM, BeamSearchDecoderCTC
    from pyctcdecode.language_model import LanguageModel
    from pygtrie import CharTrie
except ModuleNotFoundError as exc:
    raise needed(exc, ["--no-deps", "pyctcdecode", "pygtrie"]) from exc

__all__ = ["DlmDecoder", "DlmLanguageModel", "DlmState", "build_decoder"]


_ROOM = 1 << 12  # rows that tables begin with
# A word that may follow a text: its id, whether it may be said, its symbol in phrases.
Word = tuple[int, bool, int]


# What pyctcdecode 0.5.0 passes to the search.
_ARGUMENTS = {
    *("beam_width", "beam_prune_logp", "token_min_logp", "prune_history", "hotword_scorer"),
    "lm_start_state",
}


class DlmState(getattr(language_model, "AbstractLMState", object)):  # type: ignore[misc]
    """A dlm state for pyctcdecode, and the node of its phrases; it can be pickled."""

    def __init__(self, state: State, node: int = 0, phrases: str = "") -> None:
        self.state, self.node = state, node
        self.phrases = phrases  # their digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DlmState) and self.state == other.state and self.node == other.node

    def __hash__(self) -> int:
        return hash((self.state, self.node))

    def get_mp_safe_state(self) -> DlmState:
        return self


class _Known:
    """What pyctcdecode needs from a KenLM model besides scores."""

    def __init__(self, utterance: Utterance) -> None:
        phrases = utterance.phrases
        # pyctcdecode drops beams that differ only in words before the last `order` - 1.
        self.order = max(utterance.order, 0 if phrases is None else phrases.phrases.longest)
        self._ids = utterance.vocabulary.ids
        self._new = {} if phrases is None else phrases.new

    def __contains__(self, word: str) -> bool:
        key = word.encode("utf-8", "surrogateescape")
        return self._ids.get(key, UNK_ID) != UNK_ID or key in self._new

    def id_of(self, word: str) -> int:
        return self._ids.get(word.encode("utf-8", "surrogateescape"), UNK_ID)


class DlmLanguageModel(LanguageModel):  # type: ignore[misc]
    """A model behind an utterance as pyctcdecode's `LanguageModel`, with the same settings.

    Args
        utterance  the bonuses of its phrases are added to the score, outside of `alpha`;
                   `unk_score_offset` is not added to their words
        unigrams   the words that may be said, besides those of phrases; default: all of the model
        max_words  stored words to keep in memory, 11 bytes each
    Raises  QueryError, ConfigError  see `word_ids`
            QueryError, UnavailableError, ProtocolError, through the decoder that calls it; with
                `ClientConfig(bigram_fallback=True)` server failures raise nothing
    """

    def __init__(
        self,
        utterance: Utterance,
        unigrams: Collection[str] | None = None,
        alpha: float = DEFAULT_ALPHA,
        beta: float = DEFAULT_BETA,
        unk_score_offset: float = DEFAULT_UNK_LOGP_OFFSET,
        score_boundary: bool = DEFAULT_SCORE_LM_BOUNDARY,
        *,
        max_words: int = MAX_WORDS,
    ) -> None:
        check_utterance(utterance)
        vocabulary = utterance.vocabulary
        if isinstance(unigrams, (str, bytes)):
            raise QueryError("unigrams is a string; expected a collection of words")
        check_known(unigrams or (), utterance)
        if unigrams is None:
            unigrams = [w.decode("utf-8", "surrogateescape") for w in vocabulary.words[1:]]
        self.phrases = utterance.phrases
        if self.phrases is not None:
            unigrams = [*unigrams, *map(as_text, self.phrases.phrases.words)]
        self._digest = "" if self.phrases is None else self.phrases.phrases.digest
        self._known = _Known(utterance)
        # As the base class does, but for its trie of letters, which takes most of the time.
        self._kenlm_model = self._known
        self._unigram_set = language_model._prepare_unigram_set(unigrams, self._known)
        self.alpha, self.beta, self.unk_score_offset = alpha, beta, unk_score_offset
        self.score_boundary = score_boundary
        self.long_word, self.log_base = AVG_TOKEN_LEN, LOG_BASE_CHANGE_FACTOR
        # Whatever was said of a phrase, the model's contexts are the same.
        self._utterance = utterance if self.phrases is None else utterance.without_phrases()
        self._end_id = vocabulary.end_id
        self.contexts = Contexts(self._utterance, max_words)

    @property
    def counts(self) -> Counts:
        return self.contexts.counts

    @cached_property
    def _char_trie(self) -> CharTrie:
        return CharTrie.fromkeys(self._unigram_set)

    @cached_property
    def trie(self) -> LetterTrie:
        return LetterTrie(sorted(self._unigram_set))

    def word(self, text: str) -> Word:
        known = text in (self._unigram_set or self._known)
        phrases = self.phrases
        symbol = 0 if phrases is None else int(phrases.symbols[phrases.id_of(text)])
        return self._known.id_of(text), known, symbol

    def get_start_state(self) -> DlmState:
        self.contexts.begin_sentence()
        begin = self._utterance.begin if self.score_boundary else self._utterance.null
        return DlmState(begin(), 0, self._digest)

    def fetch(self, asked: Iterable[tuple[DlmState, str]], is_last_word: bool = False) -> None:
        """Fetches what `score` will need, in one message per shard, or in two if the sentence end
        is scored after the words."""
        pairs = [(state.state, word) for state, word in asked]
        if not pairs:
            return
        contexts = self.contexts.get_all([state for state, _ in pairs])
        if is_last_word and self.score_boundary:
            ids = [self._known.id_of(word) for _, word in pairs]
            after = [context.score(i)[1] for context, i in zip(contexts, ids, strict=True)]
            self.contexts.get_all(after)

    def score(
        self, prev_state: DlmState, word: str, is_last_word: bool = False
    ) -> tuple[float, DlmState]:
        """The weighted score of a word, and the state after it, not counting the sentence end."""
        self.contexts.counts.queries += 1
        context = self.contexts.get(prev_state.state)
        log10_prob, after = context.score(self._known.id_of(word))
        if (self._unigram_set and word not in self._unigram_set) or word not in self._known:
            log10_prob += self.unk_score_offset
        if is_last_word and self.score_boundary:
            log10_prob += self.contexts.get(after).score(self._end_id)[0]
        total = self.alpha * log10_prob * LOG_BASE_CHANGE_FACTOR + self.beta
        if self.phrases is None:
            return total, DlmState(after)
        node, bonus = self.phrases.step(prev_state.node, self.phrases.id_of(word))
        if is_last_word:  # which gives shares back: whatever follows begins its phrases anew
            bonus, node = bonus + float(self.phrases.finish(node)), 0
        return total + LN_10 * bonus, DlmState(after, node, prev_state.phrases)

    def check(self, state: object) -> None:
        """Raises `QueryError`, or `ModelMismatch` for a state of another model or other phrases."""
        if not isinstance(state, DlmState):
            raise QueryError(
                f"lm_start_state is of type {type(state).__name__}; expected the state that "
                "decode_beams returned with a hypothesis"
            )
        self._utterance.states([state.state])
        if state.phrases != self._digest:
            raise ModelMismatch(
                "lm_start_state is of an utterance with other phrases; give both the same"
            )

    def save_to_dir(self, filepath: str) -> None:
        _refuse_saving(filepath)


# ------------------------------------------------------------- the beam search over letters
# pyctcdecode makes a tuple and some strings for each beam and letter of a frame, whose time is
# several times that of the language model. Here a beam is a row of integers. Python scores words
# only, each once after each text.


def _codes(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def _begins(words: Sequence[str]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, words)], dtype=np.int64)


def _table(rows: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    size = 1 << (2 * rows).bit_length()
    return np.full(size, EMPTY, np.int64), np.empty(size, np.int32)


class LetterTrie:
    """The beginnings of words, for any number of searches; made once per model. `nodes` are (N, 3)
    int32: parent, letter (its code point), length; the first is the root."""

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

    def __init__(self, model: DlmLanguageModel, alphabet: LetterLabels, start: DlmState) -> None:
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
    ) -> list[tuple[str, DlmState, list[tuple[str, tuple[int, int]]], Any, Any]]:
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
            text: DlmState(self._states[text], self._nodes[text], self._start.phrases)
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
    more = np.zeros((2 * needed, *rows.shape[1:]), rows.dtype)
    more[: len(rows)] = rows
    return more


# ------------------------------------------------------------------------------- the decoder


class DlmDecoder(BeamSearchDecoderCTC):  # type: ignore[misc]
    """pyctcdecode's decoder, fetching for all beams of a frame together; same results."""

    def save_to_dir(self, filepath: str) -> None:
        _refuse_saving(filepath)

    def _decode_logits(self, logits: NDArray[Any], *others: Any, **given: Any) -> list[Any]:
        model, labels = self._language_model, self._labels
        start = given.get("lm_start_state")
        if start is not None and isinstance(model, DlmLanguageModel):
            model.check(start)
        if (
            labels is None
            or type(model) is not DlmLanguageModel
            or others
            or set(given) != _ARGUMENTS
            or given["beam_width"] < 1
            or len(given["hotword_scorer"]._char_trie)
            or logits.dtype not in (np.float32, np.float64)
            or not np.isfinite(logits).all()
        ):
            found: list[Any] = super()._decode_logits(logits, *others, **given)
            return found
        search = LetterSearch(model, labels, model.get_start_state() if start is None else start)
        return search.run(
            logits,
            given["beam_width"],
            given["beam_prune_logp"],
            given["token_min_logp"],
            given["prune_history"],
        )

    @cached_property
    def _labels(self) -> LetterLabels | None:
        """None where labels are not letters of words, or beams not those of 0.5.0."""
        if self._is_bpe or not isinstance(EMPTY_START_BEAM, tuple):
            return None
        return LetterLabels.of(self._alphabet.labels)

    def _get_lm_beams(
        self,
        beams: list[Any],
        hotword_scorer: Any,
        cached_lm_scores: dict[tuple[str, bool], Any],
        cached_partial_token_scores: dict[str, float],
        is_eos: bool = False,
    ) -> list[Any]:
        model = self._language_model
        if isinstance(model, DlmLanguageModel):
            model.fetch(_unscored(beams, cached_lm_scores, is_eos), is_eos)
        found: list[Any] = super()._get_lm_beams(
            beams, hotword_scorer, cached_lm_scores, cached_partial_token_scores, is_eos
        )
        return found


def _refuse_saving(folder: str) -> NoReturn:
    raise ConfigError(
        f"{folder}: a decoder whose model is on servers cannot be saved; create it with "
        "build_decoder wherever you need it"
    )


def _unscored(
    beams: Iterable[Any], cached: Mapping[tuple[str, bool], Any], is_eos: bool
) -> list[tuple[DlmState, str]]:
    found: dict[str, tuple[DlmState, str]] = {}
    for beam in beams:
        text, word = beam[:2] if isinstance(beam, tuple) else (beam.text, beam.next_word)
        if not (word or is_eos):
            continue  # most beams: no word has ended, so the text already has its score
        merged = f"{text} {word}" if text and word else text or word
        if (merged, is_eos) not in cached:
            found.setdefault(merged, (cached[text, False][2], word))  # the first is asked
    return list(found.values())


def build_decoder(
    labels: Sequence[str],
    utterance: Utterance,
    unigrams: Collection[str] | None = None,
    alpha: float = DEFAULT_ALPHA,
    beta: float = DEFAULT_BETA,
    unk_score_offset: float = DEFAULT_UNK_LOGP_OFFSET,
    lm_score_boundary: bool = DEFAULT_SCORE_LM_BOUNDARY,
) -> DlmDecoder:
    """Like pyctcdecode's `build_ctcdecoder`, with an utterance instead of a model's path."""
    model = DlmLanguageModel(utterance, unigrams, alpha, beta, unk_score_offset, lm_score_boundary)
    return DlmDecoder(Alphabet.build_alphabet(list(labels)), model)
