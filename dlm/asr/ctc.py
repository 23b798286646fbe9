"""A CTC beam search with a language model and pyctcdecode's interface; see `build_ctcdecoder`.

    decoder = build_ctcdecoder(labels, "cluster.toml")
    text = decoder.decode(logits)

Labels are letters or word pieces. Hypotheses and scores equal those of pyctcdecode, except after
the unknown piece and after the piece "\u2581" alone: pyctcdecode then begins a new word in
whichever beam comes next; this search begins it in the beam that has the piece.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.beams import (
    DEFAULT_HOTWORD_WEIGHT,
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
from dlm.files import move, scratch_folder
from dlm.ngram.vocab import as_bytes

__all__ = ["BeamSearchDecoderCTC", "PartialText", "Stream", "build_ctcdecoder"]

LEAST_PROBABILITY = 1e-15  # lower probabilities of labels are raised to this
AT_ONCE = 64  # number of utterances that are searched together
# Files of a saved decoder.
_ALPHABET, _MODEL = "alphabet.json", "language_model"
_ATTRIBUTES, _UNIGRAMS = "attrs.json", "unigrams.txt"
_SAVED = "alpha", "beta", "unk_score_offset", "score_boundary"
Logits: TypeAlias = NDArray[np.floating[Any]]
Beam: TypeAlias = tuple[str, State | None, list[tuple[str, tuple[int, int]]], float, float]


@dataclass(frozen=True, slots=True)
class PartialText:
    """The best text so far. Its first `settled` words are final, since all remaining hypotheses
    contain them."""

    text: str
    settled: int


class Stream:
    """An utterance whose frames arrive in parts; made by `BeamSearchDecoderCTC.stream`."""

    def __init__(self, decoder: BeamSearchDecoderCTC, search: BeamSearch, logits: bool) -> None:
        self.decoder, self.search, self.logits = decoder, search, logits
        self.waiting: list[Logits] = []

    def push(self, frames: Logits) -> PartialText:
        """Takes the next frames, (T, labels), and returns the best text so far. If servers fail,
        another call, even without frames, repeats the queries. Raises what `decode_beams` does."""
        return self.decoder.push_all([self], [frames])[0]

    def settle(self) -> list[tuple[str, tuple[int, int]]]:
        """Returns the settled words, with frames, and removes them from the stream: later texts and
        hypotheses begin after them, so a stream of any length needs bounded memory."""
        return self.search.settle()

    def finish(self) -> list[Beam]:
        """Returns the hypotheses as if the utterance ended here; the stream can still continue."""
        return list(map(_beam, finish([self.search])[0]))


# Models by key. `_models` has those that decoders use, here or in a process that this one was
# forked from; `_named` keeps open the last `_KEPT` models that unpickled decoders asked for.
_models: WeakValueDictionary[bytes, BeamWords] = WeakValueDictionary()
_named: dict[bytes, BeamWords] = {}
_KEPT = 4


def _opened(name: ModelName | Utterance | None, unigrams: Iterable[str] | None) -> BeamWords:
    if name is None:
        raise ConfigError(
            "this decoder was built with an utterance, so it works only in the process that built "
            "it and in its forks; for use in another process, build the decoder with a model's name"
        )
    if not isinstance(name, (str, os.PathLike)):
        return BeamWords(name, unigrams, None)
    client = open_model(name, config=ClientConfig(bigram_fallback=True))
    return BeamWords(client.utterance(), unigrams, name)


def _found(key: bytes, name: ModelName | None, unigrams: Collection[str] | None) -> BeamWords:
    words = _named.pop(key, None) or _models.get(key) or _opened(name, unigrams)
    _models[key] = _named[key] = words
    for old in list(_named)[:-_KEPT]:
        del _named[old]
    return words


class BeamSearchDecoderCTC:
    """A decoder of CTC outputs, with or without a language model; `build_ctcdecoder` makes it.

    It can be pickled if its model was given by name, and it can be used in forked processes.
    """

    # The package transformers reads these names.
    _LANGUAGE_MODEL_SERIALIZED_DIRECTORY, _ALPHABET_SERIALIZED_FILENAME = _MODEL, _ALPHABET
    _model_key = "options"

    def __init__(
        self,
        labels: Labels,
        words: BeamWords | None = None,
        options: BeamOptions | None = None,
        named: tuple[bytes, ModelName | None, Collection[str] | None] | None = None,
    ) -> None:
        self._alphabet, self._options, self._named = labels, options or BeamOptions(), named
        if words is not None:
            self._words, self._named = words, (os.urandom(16), words.name, words.listed)
            _models[self._named[0]] = words

    @cached_property
    def _words(self) -> BeamWords | None:
        # Opens the model on first use: a pool's worker that fails to unpickle a task never answers.
        return None if self._named is None else _found(*self._named)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._alphabet, None, self._options, self._named)

    @property
    def model_container(self) -> dict[str, BeamOptions]:
        return {self._model_key: self._options}

    def reset_params(
        self,
        alpha: float | None = None,
        beta: float | None = None,
        unk_score_offset: float | None = None,
        lm_score_boundary: bool | None = None,
    ) -> None:
        """Changes some of the parameters of `build_ctcdecoder`."""
        values: Any = zip(_SAVED, (alpha, beta, unk_score_offset, lm_score_boundary), strict=True)
        self._options = replace(self._options, **{k: v for k, v in values if v is not None})

    # -- decoding -----------------------------------------------------------------------------

    def decode(self, logits: Logits, beam_width: int = 100, **options: Any) -> str:
        """Returns the best text that `decode_beams` finds with `prune_history`."""
        return self.decode_beams(logits, beam_width, **{"prune_history": True, **options})[0][0]

    def decode_beams(self, logits: Logits, beam_width: int = 100, **options: Any) -> list[Beam]:
        """Returns hypotheses, best first: (text, state after the text, words with their first frame
        and the frame after their last, ln P of the acoustic model, total score).

        Args
            logits            (T, labels): logits or ln P; or probabilities, recognised because
                              frames sum to 1 on average
            beam_width        maximum number of beams after a frame
            beam_prune_logp   beams further than this below the best one are dropped; default -10
            token_min_logp    only labels above this ln P, and the best one, are tried; default -5
            prune_history     keep one beam of those that differ only in words that the language
                              model no longer uses
            hotwords          words to make more probable, even if the model lacks them; phrases are
                              split into words
            hotword_weight    what each hotword adds to a score; default 10
            lm_start_state    a state that this method returned, to continue an utterance
            phrases           phrases with individual bonuses, log10, see `Client.utterance`
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
        """Returns each word of the best hypothesis, its frames, and the share of the hypotheses,
        weighted by exp(score), that have the word at that time. See `decode_beams`."""
        (found,) = self._decoded([logits], **options)
        shares = np.exp(np.array([one.score for one in found]) - found[0].score)
        shares /= shares.sum()
        return [
            (word, frames, float(shares @ [_has(one, word, *frames) for one in found]))
            for word, frames in zip(found[0].words, found[0].frames, strict=True)
        ]

    def decode_batch(self, pool: Any, logits_list: Iterable[Logits], **options: Any) -> list[str]:
        """Returns the best text of each utterance, computed by a `multiprocessing.Pool`. Without
        a pool, this process computes the texts, and queries up to `AT_ONCE` utterances together."""
        options = {"prune_history": True, **options}
        return [one[0][0] for one in self.decode_beams_batch(pool, logits_list, **options)]

    def decode_beams_batch(
        self, pool: Any, logits_list: Iterable[Logits], **options: Any
    ) -> list[list[tuple[Any, ...]]]:
        """Returns the hypotheses of each utterance, without states; see `decode_batch`."""
        if pool is None:
            parts = [self._decoded(list(logits_list), **options)]
        else:
            parts = pool.map(partial(self._decoded, **options), [[one] for one in logits_list])
        return [[beam[:1] + beam[2:] for beam in map(_beam, one)] for part in parts for one in part]

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
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
        lm_start_state: State | None = None,
        phrases: Phrases | Weights | None = None,
        **options: Any,
    ) -> Callable[[], BeamSearch]:
        words = self._words
        utterance = None if words is None else words.utterance
        if utterance is None and not (phrases is None and lm_start_state is None):
            raise QueryError(
                "phrases and lm_start_state need a language model, and this decoder has none; use "
                "hotwords, or build the decoder with a model"
            )
        if utterance is not None and phrases is not None:
            utterance = utterance.with_phrases(prepared(phrases))
        if utterance is not None and lm_start_state is not None:
            utterance.states([lm_start_state])  # checks the state
        bias, chosen = Bias(hotwords, hotword_weight, utterance), replace(self._options, **options)
        return partial(BeamSearch, self._alphabet, words, bias, chosen, lm_start_state)

    def _posteriors(self, logits: Logits, are_logits: bool | None = None) -> Logits:
        given, labels = np.asarray(logits), len(self._alphabet.labels)
        if given.ndim != 2 or given.shape[1] != labels or given.dtype.kind not in "fiu":
            raise QueryError(
                f"logits are {given.dtype} of shape {given.shape}; expected numbers of shape "
                f"(frames, {labels}), one per label, including the blank"
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
                f"frame {wrong[0]} of the logits is not usable: one value is NaN or +inf, or "
                "all values are -inf; check the acoustic model's output"
            )
        return np.asarray(found)

    # -- streams ------------------------------------------------------------------------------

    def stream(self, *, logits: bool = True, **options: Any) -> Stream:
        """Begins an utterance whose frames arrive in parts. Takes the options of `decode_beams`;
        the final hypotheses are those that it returns for all frames at once. `logits`: whether
        frames are logits or ln P, not probabilities."""
        return Stream(self, self._begin(**options)(), logits)

    def push_all(self, streams: Sequence[Stream], frames: Sequence[Logits]) -> list[PartialText]:
        """Pushes frames to several streams of this decoder, and queries their words together: at
        most one message per shard and frame. See `Stream.push`."""
        if not len(set(streams)) == len(streams) == len(frames) or any(
            stream.decoder is not self for stream in streams
        ):
            raise QueryError(
                f"found {len(streams)} streams and {len(frames)} arrays of frames; expected one "
                "array per stream, and distinct streams of this decoder"
            )
        pairs = zip(streams, frames, strict=True)
        for stream, one in [(one, self._posteriors(given, one.logits)) for one, given in pairs]:
            # Empty arrays are dropped, since they must not determine the dtype.
            stream.waiting = [kept for kept in (*stream.waiting, one) if len(kept)] or [one]
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
        """Saves the decoder as pyctcdecode does, all or nothing, with the model's file or a pointer
        to servers or shards. ConfigError if the folder has a model, or this model has no name."""
        folder, words = Path(filepath), self._words
        if (folder / _MODEL).exists() or (words is not None and words.name is None):
            raise ConfigError(
                f"cannot save: {folder} already contains a model, or the decoder was built with an "
                "utterance. Choose another folder, or build the decoder with a model's name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        alphabet = {"labels": self._alphabet.labels, "is_bpe": self._alphabet.is_pieces}
        with scratch_folder(folder, _MODEL) as beside:
            (part := beside / _MODEL).mkdir()
            if words is not None and words.name is not None:
                attributes = json.dumps({name: getattr(self._options, name) for name in _SAVED})
                (part / _ATTRIBUTES).write_text(attributes, encoding="utf-8")
                (part / _UNIGRAMS).write_bytes(b"\n".join(map(as_bytes, words.trie.words)))
                copy_model(words.name, part)
                move(part, folder / _MODEL)
            (folder / _ALPHABET).write_text(json.dumps(alphabet), encoding="utf-8")

    @classmethod
    def load_from_dir(
        cls, filepath: ModelName, unigram_encoding: str | None = "utf-8"
    ) -> BeamSearchDecoderCTC:
        """Loads a decoder that this class or pyctcdecode saved with `save_to_dir`. Raises
        ConfigError if the folder has no decoder."""
        folder = Path(filepath)
        try:
            alphabet = json.loads((folder / _ALPHABET).read_text(encoding="utf-8"))
            labels = Labels(alphabet["labels"], alphabet["is_bpe"])
            if not (folder / _MODEL).is_dir():
                return cls(labels)
            attributes = json.loads((folder / _MODEL / _ATTRIBUTES).read_text(encoding="utf-8"))
            text = (folder / _MODEL / _UNIGRAMS).read_bytes()
            listed = text.decode(unigram_encoding or "utf-8", "surrogateescape").split("\n")
            others = {one.name for one in (folder / _MODEL).glob("[!._]*")}
            if len(others := others - {_ATTRIBUTES, _UNIGRAMS}) != 1:
                raise ValueError(f"{_MODEL} contains {sorted(others)}; expected exactly one model")
            options = BeamOptions(**attributes)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"{folder} does not hold a saved decoder: {exc}; expected {_ALPHABET}, and in "
                f"{_MODEL}/: {_ATTRIBUTES}, {_UNIGRAMS} and a model"
            ) from exc
        words = _opened(folder / _MODEL / others.pop(), filter(None, listed))
        return cls(labels, words, options)

    @classmethod
    def load_from_hf_hub(cls, model_id: str, **kwargs: Any) -> BeamSearchDecoderCTC:
        """Loads a decoder from a Hugging Face repository, like `load_from_dir`; `kwargs` go to
        huggingface_hub's `snapshot_download`."""
        from huggingface_hub import snapshot_download

        return cls.load_from_dir(snapshot_download(model_id, **kwargs))


def _beam(one: BeamHypothesis) -> Beam:
    text, words = " ".join(one.words), [*zip(one.words, one.frames, strict=True)]
    return text, one.state, words, one.logit, one.score


def _has(one: BeamHypothesis, word: str, begin: int, end: int) -> bool:
    return any(
        other == word and first < end and begin < last
        for other, (first, last) in zip(one.words, one.frames, strict=True)
    )


def build_ctcdecoder(
    labels: Sequence[str],
    model: ModelName | Utterance | None = None,
    unigrams: Iterable[str] | None = None,
    alpha: float = 0.5,
    beta: float = 1.5,
    unk_score_offset: float = -10.0,
    lm_score_boundary: bool = True,
    *,
    kenlm_model_path: ModelName | None = None,
) -> BeamSearchDecoderCTC:
    """Builds a decoder for these labels.

    Args
        labels    of the acoustic model's outputs: letters with a space or "|" between words; or
                  pieces, marked as SentencePiece ("\u2581the") or BERT ("##s") does. "", "<pad>" or
                  "[PAD]" is the blank, which is added at the end if it is missing; "<unk>" or
                  "[UNK]" is an unknown piece
        model     what `dlm.asr.open.open_model` opens, or an utterance; None: no language model.
                  pyctcdecode's name for it is `kenlm_model_path`
        unigrams  the words that may be said, besides those of phrases; default: all model words
        alpha     weight of the language model
        beta      what each word adds to a score
        unk_score_offset   what is added to the log10 P of an unknown word
        lm_score_boundary  whether utterances are whole sentences, not parts of longer ones
    Raises
        ConfigError  labels that `Labels` rejects, or unigrams of which the model has none;
                     and what `open_model` raises
        QueryError   a client was given instead of a model, or a parameter is not a number
    """
    options = BeamOptions(alpha, beta, unk_score_offset, lm_score_boundary)
    alphabet, named = Labels(labels), kenlm_model_path if model is None else model
    words = None if named is None else _opened(named, unigrams)
    return BeamSearchDecoderCTC(alphabet, words, options)
