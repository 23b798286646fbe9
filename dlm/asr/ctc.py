"""A CTC beam search with a language model, as pyctcdecode's: `build_ctcdecoder`.

    decoder = build_ctcdecoder(labels, "cluster.toml")
    text = decoder.decode(logits)

Labels are letters or word pieces. Hypotheses and scores are pyctcdecode's, whose interface this is,
except where a label that ends its word (its own sign for unknown pieces) is tried: pyctcdecode then
begins a new word in whichever beam comes next, and this search in that beam.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.beams import (
    BeamHypothesis,
    BeamOptions,
    BeamSearch,
    BeamWords,
    Bias,
    ModelName,
    advance,
    finish,
)
from dlm.asr.decoders.labels import Labels
from dlm.asr.open import copy_model, open_model
from dlm.client import ClientConfig, Phrases, State, Utterance
from dlm.client.phrases import Weights, prepared
from dlm.errors import ConfigError, QueryError

__all__ = ["BeamSearchDecoderCTC", "PartialText", "Stream", "build_ctcdecoder"]

LEAST_PROBABILITY = 1e-15  # of a label
AT_ONCE = 64  # utterances that are searched together
# Of a saved decoder.
_ALPHABET, _MODEL = "alphabet.json", "language_model"
_ATTRIBUTES, _UNIGRAMS = "attrs.json", "unigrams.txt"
_SAVED = "alpha", "beta", "unk_score_offset", "score_boundary"
Logits: TypeAlias = NDArray[np.floating[Any]]
Beam: TypeAlias = tuple[str, State | None, list[tuple[str, tuple[int, int]]], float, float]


@dataclass(frozen=True, slots=True)
class PartialText:
    """The best text so far; its first `settled` words stay whatever follows, since all hypotheses
    that are left have them."""

    text: str
    settled: int


class Stream:
    """An utterance whose frames come bit by bit; `BeamSearchDecoderCTC.stream` begins it."""

    def __init__(self, decoder: BeamSearchDecoderCTC, search: BeamSearch, logits: bool) -> None:
        self.decoder, self.search, self.logits = decoder, search, logits
        self.waiting: list[Logits] = []

    def push(self, frames: Logits) -> PartialText:
        """Takes further frames, (T, labels). If servers fail, what they were asked for is asked
        again by the next call, which may have no frames; see `decode_beams` for errors."""
        return self.decoder.push_all([self], [frames])[0]

    def finish(self) -> list[Beam]:
        """The hypotheses, if the utterance ends here; it may go on, too."""
        return list(map(_beam, finish([self.search])[0]))


# By key, those of this process and what it was forked from, and those that others named.
_models: WeakValueDictionary[bytes, BeamWords] = WeakValueDictionary()
_named: dict[bytes, BeamWords] = {}


def _opened(name: ModelName | None, unigrams: Collection[str] | None) -> BeamWords:
    if name is None:
        raise ConfigError(
            "this decoder was built with an utterance; to use it in a process that is not forked "
            "after it was built, build it with the name of a model"
        )
    client = open_model(name, config=ClientConfig(bigram_fallback=True))
    return BeamWords(client.utterance(), unigrams, name)


class BeamSearchDecoderCTC:
    """A decoder of CTC outputs, with or without a language model; `build_ctcdecoder` makes it.

    It may be pickled if its model was given by name, and used in forked processes.
    """

    def __init__(
        self, labels: Labels, words: BeamWords | None = None, options: BeamOptions | None = None
    ) -> None:
        self._labels, self._words, self._options = labels, words, options or BeamOptions()
        self._key = os.urandom(16)
        if words is not None:
            _models[self._key] = words

    def __reduce__(self) -> tuple[Any, ...]:
        words = self._words
        found = None if words is None else (self._key, words.name, words.listed)
        return _unpickled, (self._labels, found, self._options)

    def reset_params(
        self,
        alpha: float | None = None,
        beta: float | None = None,
        unk_score_offset: float | None = None,
        lm_score_boundary: bool | None = None,
    ) -> None:
        """Changes some of the parameters of `build_ctcdecoder`."""
        names = "alpha", "beta", "unk_score_offset", "score_boundary"
        values: Any = zip(names, (alpha, beta, unk_score_offset, lm_score_boundary), strict=True)
        given = {name: value for name, value in values if value is not None}
        self._options = replace(self._options, **given)

    # -- decoding -----------------------------------------------------------------------------

    def decode(self, logits: Logits, beam_width: int = 100, **options: Any) -> str:
        """The best text: that of `decode_beams` with `prune_history`."""
        return self.decode_beams(logits, beam_width, **{"prune_history": True, **options})[0][0]

    def decode_beams(self, logits: Logits, beam_width: int = 100, **options: Any) -> list[Beam]:
        """Hypotheses, best first: text, state after it, words with their frames (the first, and the
        one after the last), ln P of the acoustic model, and the score of all.

        Args
            logits            (T, labels): logits or ln P; or probabilities, if the sums of the
                              frames are 1 on average
            beam_width        most beams after a frame
            beam_prune_logp   beams so far below the best one are dropped, -10
            token_min_logp    only labels above this ln P are tried, and the best one, -5
            prune_history     keep one beam of those that differ only in words that the language
                              model no longer looks at
            hotwords          words that are likelier, also those that the model lacks; phrases are
                              split into words
            hotword_weight    what each hotword adds to a score, 10
            lm_start_state    a state that this returned, for an utterance that goes on
            phrases           phrases with bonuses of their own, log10, see `Client.utterance`
        Raises
            QueryError        logits of another shape, or not numbers; an argument out of range
            ModelMismatch     `lm_start_state` is of another model, or of other phrases
            UnavailableError, ProtocolError  servers fail, and the utterance has no bigram fallback
        """
        (found,) = self._decoded([logits], beam_width=beam_width, **options)
        return list(map(_beam, found))

    def decode_words(
        self, logits: Logits, **options: Any
    ) -> list[tuple[str, tuple[int, int], float]]:
        """The words of the best hypothesis, with frames, and the share of the hypotheses, by their
        scores, that have each at that time. See `decode_beams`."""
        (found,) = self._decoded([logits], **options)
        shares = np.exp(np.array([one.score for one in found]) - found[0].score)
        shares /= shares.sum()
        return [
            (word, frames, float(shares @ [_has(one, word, *frames) for one in found]))
            for word, frames in zip(found[0].words, found[0].frames, strict=True)
        ]

    def decode_batch(self, pool: Any, logits_list: Iterable[Logits], **options: Any) -> list[str]:
        """The best text of each utterance; in the processes of a `multiprocessing.Pool`, or here if
        it is None: then all of them ask the language model together."""
        found = self.decode_beams_batch(pool, logits_list, **{"prune_history": True, **options})
        return [beams[0][0] for beams in found]

    def decode_beams_batch(
        self, pool: Any, logits_list: Iterable[Logits], **options: Any
    ) -> list[list[tuple[Any, ...]]]:
        """The hypotheses of each utterance, without states; see `decode_batch`."""
        every = list(logits_list)
        if pool is None:
            found = self._decoded(every, **options)
        else:
            parts = pool.map(partial(self._decoded, **options), [[one] for one in every])
            found = [one for part in parts for one in part]
        return [[beam[:1] + beam[2:] for beam in map(_beam, one)] for one in found]

    def _decoded(self, logits: Sequence[Logits], **options: Any) -> list[list[BeamHypothesis]]:
        every, begin, found = [self._posteriors(one) for one in logits], self._begin(**options), []
        for first in range(0, len(every), AT_ONCE):
            some = every[first : first + AT_ONCE]
            searches = [begin() for _ in some]
            advance(searches, some)
            found += finish(searches)
        return found

    def _begin(
        self,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = 10.0,
        lm_start_state: State | None = None,
        phrases: Phrases | Weights | None = None,
        **options: Any,
    ) -> Callable[[], BeamSearch]:
        words = self._words
        utterance = None if words is None else words.utterance
        if utterance is None and not (phrases is None and lm_start_state is None):
            raise QueryError(
                "phrases and lm_start_state need a language model, and this decoder has none; use "
                "hotwords, or build it with a model"
            )
        if utterance is not None and phrases is not None:
            utterance = utterance.with_phrases(prepared(phrases))
        if utterance is not None and lm_start_state is not None:
            utterance.states([lm_start_state])  # checks it
        bias = Bias(hotwords, hotword_weight, utterance)
        chosen = replace(self._options, **options)
        return partial(BeamSearch, self._labels, words, bias, chosen, lm_start_state)

    def _posteriors(self, logits: Logits, are_logits: bool | None = None) -> Logits:
        given, labels = np.asarray(logits), len(self._labels.names)
        if given.ndim != 2 or given.shape[1] != labels or given.dtype.kind not in "fiu":
            raise QueryError(
                f"logits are {given.dtype} of shape {given.shape}; expected numbers of shape "
                f"(frames, {labels}), one per label, the blank included"
            )
        if given.dtype not in (np.float32, np.float64):
            given = given.astype(np.float32 if given.dtype == np.float16 else np.float64)
        with np.errstate(all="ignore"):
            if are_logits is None:
                are_logits = not (len(given) and math.isclose(given.sum(axis=1).mean(), 1))
            if are_logits:
                highest = given.max(axis=1, keepdims=True, initial=-np.inf)
                above = given - np.where(np.isfinite(highest), highest, 0).astype(given.dtype)
                logs = above - np.log(np.exp(above).sum(axis=1, keepdims=True))
                found = np.clip(logs, np.log(LEAST_PROBABILITY), 0)
            else:
                found = np.log(np.clip(given, LEAST_PROBABILITY, 1))
        wrong = np.flatnonzero(np.isnan(found).any(axis=1))
        if len(wrong):
            raise QueryError(
                f"frame {wrong[0]} of the logits has no probabilities: a value is not a number or "
                "infinite, or all are -inf; check the acoustic model's output"
            )
        return np.asarray(found)

    # -- streams ------------------------------------------------------------------------------

    def stream(self, *, logits: bool = True, **options: Any) -> Stream:
        """Begins an utterance whose frames come bit by bit; its end has the hypotheses of
        `decode_beams`, whose further arguments this takes. `logits`: whether frames will be logits
        (or ln P), or probabilities."""
        return Stream(self, self._begin(**options)(), logits)

    def push_all(self, streams: Sequence[Stream], frames: Sequence[Logits]) -> list[PartialText]:
        """`Stream.push` of different streams of this decoder, whose words ask the language model
        together: at most one message per shard and frame."""
        if any(stream.decoder is not self for stream in streams):
            raise QueryError("found a stream of another decoder; push it to its own")
        pairs = list(zip(streams, frames, strict=True))
        for stream, one in [(one, self._posteriors(given, one.logits)) for one, given in pairs]:
            stream.waiting.append(one)
        searches = [stream.search for stream in streams]
        some = [np.concatenate(stream.waiting) for stream in streams]
        ends = [search.frame + len(one) for search, one in zip(searches, some, strict=True)]
        try:
            advance(searches, some)
        finally:
            for stream, one, end in zip(streams, some, ends, strict=True):
                stream.waiting = [one[len(one) - (end - stream.search.frame) :]]
        return [
            PartialText(" ".join(words), count) for words, count in map(BeamSearch.best, searches)
        ]

    # -- files --------------------------------------------------------------------------------

    def save_to_dir(self, filepath: ModelName) -> None:
        """Saves the decoder, as pyctcdecode does. A model's file is copied; for servers and shard
        sets, there is a pointer file. Raises ConfigError: the folder has a model already, or this
        decoder was built with an utterance, which has no name."""
        folder, words = Path(filepath), self._words
        if words is not None and (words.name is None or (folder / _MODEL).exists()):
            raise ConfigError(
                f"{folder} has a model already, or this decoder was built with an utterance; "
                "choose another folder, and build the decoder with the name of a model"
            )
        (folder if words is None else folder / _MODEL).mkdir(parents=True, exist_ok=True)
        alphabet = {"labels": self._labels.names, "is_bpe": self._labels.is_pieces}
        (folder / _ALPHABET).write_text(json.dumps(alphabet), encoding="utf-8")
        if words is not None and words.name is not None:
            attributes = {name: getattr(self._options, name) for name in _SAVED}
            (folder / _MODEL / _ATTRIBUTES).write_text(json.dumps(attributes), encoding="utf-8")
            listed = "".join(f"{word}\n" for word in words.trie.words)
            (folder / _MODEL / _UNIGRAMS).write_text(listed, encoding="utf-8")
            copy_model(words.name, folder / _MODEL)

    @classmethod
    def load_from_dir(
        cls, filepath: ModelName, unigram_encoding: str | None = "utf-8"
    ) -> BeamSearchDecoderCTC:
        """The decoder that `save_to_dir` saved, here or of pyctcdecode. Raises ConfigError for a
        folder without it."""
        folder = Path(filepath)
        try:
            alphabet = json.loads((folder / _ALPHABET).read_text(encoding="utf-8"))
            labels = Labels(alphabet["labels"], alphabet["is_bpe"])
            if not (folder / _MODEL).is_dir():
                return cls(labels)
            attributes = json.loads((folder / _MODEL / _ATTRIBUTES).read_text(encoding="utf-8"))
            text = (folder / _MODEL / _UNIGRAMS).read_text(encoding=unigram_encoding)
            (model,) = (
                path
                for path in (folder / _MODEL).iterdir()
                if path.name not in (_ATTRIBUTES, _UNIGRAMS) and path.name[0] not in "._"
            )
            options = BeamOptions(**attributes)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"{folder} is not the folder of a saved decoder: {exc}; expected {_ALPHABET} and "
                f"{_MODEL}/ with {_ATTRIBUTES}, {_UNIGRAMS} and a model"
            ) from exc
        return cls(labels, _opened(model, text.splitlines()), options)


def _unpickled(
    labels: Labels, found: tuple[bytes, ModelName | None, Any] | None, options: BeamOptions
) -> BeamSearchDecoderCTC:
    if found is None:
        return BeamSearchDecoderCTC(labels, None, options)
    key, name, unigrams = found
    words = _models.get(key)
    if words is None:
        words = _models[key] = _named[key] = _opened(name, unigrams)
    return BeamSearchDecoderCTC(labels, words, options)


def _beam(one: BeamHypothesis) -> Beam:
    words = list(zip(one.words, one.frames, strict=True))
    return " ".join(one.words), one.state, words, one.logit, one.score


def _has(one: BeamHypothesis, word: str, begin: int, end: int) -> bool:
    return any(
        other == word and first < end and begin < last
        for other, (first, last) in zip(one.words, one.frames, strict=True)
    )


def build_ctcdecoder(
    labels: Sequence[str],
    model: ModelName | Utterance | None = None,
    unigrams: Collection[str] | None = None,
    alpha: float = 0.5,
    beta: float = 1.5,
    unk_score_offset: float = -10.0,
    lm_score_boundary: bool = True,
    *,
    kenlm_model_path: ModelName | None = None,
) -> BeamSearchDecoderCTC:
    """A decoder of these labels.

    Args
        labels    of the acoustic model's outputs: letters with a space or "|" between words; or
                  pieces, marked as SentencePiece ("\u2581the") or BERT ("##s") does. "", "<pad>" or
                  "[PAD]" is the blank, which stands at the end if none is there; "<unk>" or
                  "[UNK]" an unknown piece
        model     what `dlm.asr.open.open_model` opens, or an utterance; None: no language model.
                  pyctcdecode's name for it is `kenlm_model_path`
        unigrams  the words that may be said, besides those of phrases; default: all of the model
        alpha     weight of the language model
        beta      what each word adds to a score
        unk_score_offset   what an unknown word adds to its log10 P
        lm_score_boundary  whether sentences begin and end, or are cut out of longer ones
    Raises
        ConfigError  labels that are no alphabet (`Labels`), or the model has none of the unigrams;
                     what `open_model` raises
        QueryError   a client in place of a model, or a parameter that is not a number
    """
    options = BeamOptions(alpha, beta, unk_score_offset, lm_score_boundary)
    alphabet, named = Labels(labels), kenlm_model_path if model is None else model
    words = None
    if isinstance(named, (str, os.PathLike)):
        words = _opened(named, unigrams)
    elif named is not None:
        words = BeamWords(named, unigrams, None)
    return BeamSearchDecoderCTC(alphabet, words, options)
