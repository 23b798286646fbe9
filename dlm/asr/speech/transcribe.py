"""Turns speech into words with an acoustic model, a lexicon and a language model.

with open_model("cluster.toml") as client:
    for segment in Transcriber(client).transcribe(read_audio("a.flac")):
        print(segment.text)

The acoustic model is the phoneme CTC network in the package `hama`, or your own model.
flashlight-text's lexicon beam search turns its output into words. It scores a hypothesis as
ln P(audio | words) + lm_weight * log10 P(words) + word_score per word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.flashlight import DlmLM
from dlm.asr.settings import BeamSettings
from dlm.asr.speech.acoustic import AcousticModel, PhonemeModel
from dlm.asr.speech.audio import SAMPLE_RATE, Segment, cut_at_pauses
from dlm.asr.speech.lexicon import WORDS, LabelLexicon, Sounds, model_lexicon, speller
from dlm.client import Client, ModelInfo, Phrases, Utterance
from dlm.client.phrases import BoundPhrases, Weights, prepared
from dlm.client.states import FULL_MODEL, LOCAL_MODEL
from dlm.errors import ConfigError, QueryError
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, LOCAL_FALLBACK
from dlm.progress import Tell
from dlm.units import LN_10

# Modes: the full model answered; its 2-grams answered some queries; the local fallback answered.
BIGRAM_FALLBACK_MODE = "bigram_fallback"
_MODES = {FULL: FULL_MODEL, BIGRAM_FALLBACK: BIGRAM_FALLBACK_MODE, LOCAL_FALLBACK: LOCAL_MODEL}
PARTIAL_S = 1.0  # minimum seconds of new streamed audio before a segment is transcribed again


@dataclass(frozen=True, slots=True)
class HeardWord:
    """A word of a hypothesis, with the times at which its first phoneme begins and its last ends,
    in seconds after the first frame (accurate to about 40 ms), and ln P of its frames."""

    word: str = field(repr=False)  # speech must not appear in logs
    start_s: float
    end_s: float
    acoustic_score: float


@dataclass(frozen=True, slots=True)
class HeardSentence:
    """A sentence that may have been said.

    score           acoustic_score + lm_weight * log10_prob + word_score * number of words, plus the
                    bonus as a natural logarithm
    acoustic_score  ln P of the best path through the frames
    log10_prob      log10 P of the words and the sentence end, by the language model
    bonus           log10 bonus that the utterance's phrases add
    """

    words: tuple[HeardWord, ...] = field(repr=False)
    score: float
    acoustic_score: float
    log10_prob: float
    bonus: float = 0.0

    @property
    def text(self) -> str:
        return " ".join(one.word for one in self.words)

    def shifted(self, seconds: float) -> HeardSentence:
        words = (
            replace(
                one,
                start_s=round(one.start_s + seconds, 3),
                end_s=round(one.end_s + seconds, 3),
            )
            for one in self.words
        )
        return replace(self, words=tuple(words))


class CtcDecoder:
    """A beam search over the words of a lexicon, see `lexicon.model_lexicon`.

    Args  labels, boundary, blank  the number of labels, and the ids of boundary and blank; if
                                   boundary is None, words follow each other directly
    """

    def __init__(
        self,
        lexicon: LabelLexicon,
        *,
        labels: int,
        boundary: int | None,
        blank: int,
        frame_s: float = PhonemeModel.frame_s,
        settings: BeamSettings | None = None,
    ) -> None:
        from flashlight.lib.text import decoder

        self.settings = settings or BeamSettings()
        self._words, self._frame_s, self._ends = lexicon.words, frame_s, boundary is not None
        self._labels, self._blank = labels, blank
        self._boundary = labels if boundary is None else boundary
        trie = decoder.Trie(labels + 1, self._boundary)
        ahead = lexicon.log10_unigram.astype(np.float64)
        if lexicon.log10_bonus is not None:
            # The look-ahead includes the bonus, so a rare word is not dropped before its end.
            ahead += lexicon.log10_bonus * LN_10 / self.settings.lm_weight
        unigrams = ahead.tolist()
        for place, spelling in lexicon.spellings:
            trie.insert([*spelling, *[self._boundary] * self._ends], place, unigrams[place])
        trie.smear(decoder.SmearingMode.MAX)
        self._trie = trie
        self._options = decoder.LexiconDecoderOptions(
            self.settings.hypotheses,
            self.settings.labels,
            self.settings.threshold,
            self.settings.lm_weight,
            self.settings.word_score,
            float("-inf"),  # no unknown words
            0.0,
            False,
            decoder.CriterionType.CTC,
        )

    def decode(self, log_probs: NDArray[np.float32], lm: Any) -> list[HeardSentence]:
        """Returns the most probable distinct sentences, best first, at most `BeamSettings.nbest`.

        Args    log_probs  (T, labels) float32, natural logarithms
                lm         an `LM` of flashlight for the lexicon, like a `DlmLM`; one call at a time
        Raises  QueryError  wrong shape or type;  what the language model raises
        """
        from flashlight.lib.text.decoder import LexiconDecoder

        if log_probs.shape != (len(log_probs), self._labels) or log_probs.dtype != np.float32:
            raise QueryError(
                f"log_probs are {log_probs.dtype} of shape {log_probs.shape}; expected float32 of "
                f"shape (T, {self._labels})"
            )
        frames = self._ended(log_probs) if self._ends else self._held(log_probs)
        searching = LexiconDecoder(
            self._options, self._trie, lm, self._boundary, self._blank, -1, [], False
        )
        found = searching.decode(frames.ctypes.data, *frames.shape)
        different: dict[tuple[int, ...], Any] = {}
        for result in found:
            different.setdefault(tuple(place for place in result.words if place >= 0), result)
        return [self._sentence(one, frames) for one in [*different.values()][: self.settings.nbest]]

    def _ended(self, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Adds a frame in which the last word may end at no cost, since its boundary is often not
        heard if the audio stops right after the word."""
        closing = np.full((1, self._labels), log_probs.min(initial=-100.0), np.float32)
        closing[0, [self._boundary, self._blank]] = 0.0
        return np.concatenate([log_probs, closing])

    def _held(self, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Lets a word's last label continue after the frame that ended the word, which flashlight's
        search does not allow: adds a column for the previous frame's most probable label. A word of
        one label that lasts three frames may be found twice if the language model prefers that."""
        frames = np.arange(len(log_probs))
        before = np.append(self._blank, log_probs[:-1].argmax(axis=1))[: len(frames)]
        held = np.where(before == self._blank, -np.inf, log_probs[frames, before])
        return np.column_stack([log_probs, held])

    def _sentence(self, result: Any, frames: NDArray[np.float32]) -> HeardSentence:
        """Converts flashlight's result, whose lists also have entries for root and finish."""
        labels = np.array(result.tokens[1 : len(frames) + 1], np.int64)
        path = frames[np.arange(len(frames)), labels]
        places = np.array(result.words[1 : len(frames) + 1], np.int64)
        ends = np.flatnonzero(places >= 0)
        spans = np.split(np.arange(len(frames)), ends + 1)  # the last span has no word
        words = (
            self._word(places[end], labels, path, span)
            for end, span in zip(ends, spans, strict=False)
        )
        return HeardSentence(tuple(words), result.score, result.emittingModelScore, result.lmScore)

    def _word(
        self,
        place: int,
        labels: NDArray[np.int64],
        path: NDArray[np.float32],
        span: NDArray[np.int64],
    ) -> HeardWord:
        sounding = span[~np.isin(labels[span], (self._boundary, self._blank))]
        return HeardWord(
            self._words[place],
            round(float(sounding[0]) * self._frame_s, 3),
            round(float(sounding[-1] + 1) * self._frame_s, 3),
            float(path[span].sum()),
        )


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a segment of audio.

    sentences       the most probable sentences, best first; empty if nothing fits
    mode            "full"; "bigram_fallback" if servers failed and 2-grams answered some queries;
                    "local_fallback" if the local fallback answered
    log10_probs     log10 P of each word of the best sentence, given the words before it
    sources         the source of each of these probabilities, with the values of `mode`
    """

    start_s: float
    end_s: float
    sentences: tuple[HeardSentence, ...] = field(repr=False)
    mode: str
    bigram_fallback: int
    log10_probs: tuple[float, ...]
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.sentences[0].text if self.sentences else ""


class Transcriber:
    """A speech recogniser that uses a client's language model; not thread-safe.

    Args
        client  client of servers or of a shard set. Each segment is an utterance of its own, so if
                servers fail, the next one uses the local fallback (`ClientConfig.local_fallback`)
        words   number of the model's most probable words to recognise
        tell    gets lines about steps that take a long time
        phrases, sounds  for every segment; see `model_lexicon`
        acoustic  by default the packaged model, which hears English
        pieces  file of the SentencePiece model whose pieces are the labels of `acoustic`; None:
                the labels are letters
    Raises
        ConfigError  the model has no word that can be spelled; or the packaged acoustic model
                     does not run on this platform; or phrases with an lm_weight of 0; or pieces
                     without an acoustic model of pieces, or the reverse
        QueryError   see `Phrases`
    """

    def __init__(
        self,
        client: Client,
        settings: BeamSettings | None = None,
        *,
        words: int = WORDS,
        tell: Tell | None = None,
        phrases: Phrases | Weights | None = None,
        sounds: Mapping[str, Sequence[Sounds]] | None = None,
        acoustic: AcousticModel | None = None,
        pieces: Path | None = None,
    ) -> None:
        self.settings = settings or BeamSettings()
        self._phrases, self._sounds = prepared(phrases), sounds
        if self._phrases and not self.settings.lm_weight > 0:
            raise ConfigError(
                "lm_weight is 0, but phrase bonuses are part of the language model's scores; set "
                "lm_weight above 0"
            )
        self._client = client
        self._limit = words
        self._tell = tell
        self._acoustic = acoustic or AcousticModel()
        # The labels of the user's own model spell words; those of the packaged model are sounds.
        self._spell = None if acoustic is None else speller(pieces)
        if (pieces is None) != (acoustic is None or self._acoustic.boundary is not None):
            raise ConfigError(
                "give both --pieces (a SentencePiece model) and an --acoustic model whose labels "
                "are its pieces, or neither; in pieces, U+2581 begins a word, and no label ends one"
            )
        self._known: dict[ModelInfo, tuple[LabelLexicon, CtcDecoder]] = {}
        self._decoder_of(client.utterance(phrases=self._phrases))

    def transcribe(self, samples: NDArray[np.float32]) -> Iterator[Transcript]:
        """Yields the segments of the audio in order, each as soon as it is transcribed.

        Shapes  samples (N,) float32, 16 kHz: see `dlm.asr.speech.audio.read_audio`
        Raises  QueryError  samples of the wrong shape or type
                UnavailableError, ProtocolError, AuthenticationError  servers fail, and the
                    client has neither `bigram_fallback` nor `local_fallback`; earlier segments
                    stay valid
        """
        return (found for found, _ in self.stream([samples], math.inf))

    def stream(
        self, blocks: Iterable[NDArray[np.float32]], every_s: float = PARTIAL_S
    ) -> Iterator[tuple[Transcript, bool]]:
        """Transcribes audio that arrives in blocks. Yields (segment, True) for each segment, and
        before that (the segment so far, False), at most once per `every_s` seconds of audio. A
        segment is repeated only once it has grown by a quarter, so all repetitions take at most
        five times as long as transcribing each segment once."""
        heard_s = 0.0
        for segment, is_whole in cut_at_pauses(blocks):
            length_s = len(segment.samples) / SAMPLE_RATE
            if length_s and (is_whole or length_s >= heard_s + max(every_s, heard_s / 4)):
                heard_s = 0.0 if is_whole else length_s
                yield self._transcribe(segment), is_whole

    def _transcribe(self, segment: Segment) -> Transcript:
        utterance = self._client.utterance(phrases=self._phrases)
        end_s = segment.start_s + len(segment.samples) / SAMPLE_RATE
        if segment.samples.min() == segment.samples.max():  # digital silence, perhaps hours of it
            return Transcript(segment.start_s, end_s, (), utterance.model_info.kind, 0, (), ())
        log_probs = self._acoustic.log_probs(segment.samples)
        lexicon, decoder = self._decoder_of(utterance)
        before = self._client.stats.bigram_fallback
        lm = DlmLM(utterance, lexicon.ids.tolist(), lm_weight=self.settings.lm_weight)
        found = decoder.decode(log_probs, lm)
        if utterance.phrases is not None:
            found = [self._split(one, utterance.phrases) for one in found]
        sentences = [one.shifted(segment.start_s) for one in found]
        words = [one.word for one in sentences[0].words] if sentences else []
        (score,) = utterance.score_sentences([words])
        partial = self._client.stats.bigram_fallback - before
        kind = utterance.model_info.kind
        return Transcript(
            segment.start_s,
            end_s,
            tuple(sentences),
            BIGRAM_FALLBACK_MODE if partial and kind == FULL_MODEL else kind,
            partial,
            tuple(score.token_log10_prob[: len(words)].tolist()),
            tuple(_MODES[s] for s in score.token_source[: len(words)].tolist()),
        )

    def _split(self, one: HeardSentence, phrases: BoundPhrases) -> HeardSentence:
        bonus = phrases.of_words([word.word for word in one.words])
        own = one.log10_prob - bonus * LN_10 / self.settings.lm_weight
        return replace(one, log10_prob=own, bonus=bonus)

    def _decoder_of(self, utterance: Utterance) -> tuple[LabelLexicon, CtcDecoder]:
        model_info = utterance.model_info
        if model_info not in self._known:
            acoustic = self._acoustic
            lexicon = model_lexicon(
                utterance,
                acoustic.labels,
                limit=self._limit,
                tell=self._tell,
                sounds=self._sounds,
                spell=self._spell,
            )
            self._known[model_info] = (
                lexicon,
                CtcDecoder(
                    lexicon,
                    labels=len(acoustic.labels),
                    boundary=acoustic.boundary,
                    blank=acoustic.blank,
                    frame_s=acoustic.frame_s,
                    settings=self.settings,
                ),
            )
        return self._known[model_info]
