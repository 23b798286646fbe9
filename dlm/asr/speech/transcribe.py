"""Turns speech into words with audio, acoustic model, lexicon and language model.

with open_model("cluster.toml") as client:
    for segment in Transcriber(client).transcribe(read_audio("a.flac")):
        print(segment.text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.flashlight import DlmLM
from dlm.asr.settings import BeamSettings
from dlm.asr.speech.acoustic import AcousticModel
from dlm.asr.speech.audio import SAMPLE_RATE, Segment, cut_at_pauses
from dlm.asr.speech.lexicon import WORDS, PhonemeLexicon, Sounds, model_lexicon
from dlm.asr.speech.lexicon_search import CtcDecoder, HeardSentence
from dlm.client import Client, ModelInfo, Phrases, Utterance
from dlm.client.api.phrases import BoundPhrases, Weights, prepared
from dlm.client.api.states import FULL_MODEL, LOCAL_MODEL
from dlm.errors import ConfigError
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, LOCAL_FALLBACK
from dlm.progress import Tell
from dlm.units import LN_10

# What answered: the full model; its 2-grams, for some queries; the local fallback.
BIGRAM_FALLBACK_MODE = "bigram_fallback"
_MODES = {FULL: FULL_MODEL, BIGRAM_FALLBACK: BIGRAM_FALLBACK_MODE, LOCAL_FALLBACK: LOCAL_MODEL}


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a segment of audio.

    start_s, end_s  of the segment in the whole audio, like the times of its words
    sentences       the likeliest ones, best first; empty if nothing fits
    mode            "full"; "bigram_fallback" if servers failed and 2-grams answered some queries;
                    "local_fallback" on the local fallback
    bigram_fallback  number of queries that 2-grams answered
    log10_probs     of each word of the best sentence, after the words before it
    sources         of each of these, with the values of `mode`
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
    """A recogniser of English speech that uses a client's language model; not thread-safe.

    Args
        client  of servers or a shard set. Each segment is a separate utterance, so after servers
                fail the next one uses the local fallback (`ClientConfig.local_fallback`)
        words   most words of the model to recognise, by unigram probability
        tell    gets lines about steps that take long
        phrases  what may be said in every segment; their words are recognised besides the others
        sounds  pronunciations of some words, see `model_lexicon`
    Raises
        ConfigError  the model has no word that can be pronounced; or the acoustic model does not
                     run on this platform; or phrases with an lm_weight of 0
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
    ) -> None:
        self.settings = settings or BeamSettings()
        self._phrases, self._sounds = prepared(phrases), sounds
        if self._phrases and not self.settings.lm_weight > 0:
            raise ConfigError(
                "lm_weight is 0, and there are phrases, whose bonuses come with the language "
                "model's scores; set it above 0"
            )
        self._client = client
        self._limit = words
        self._tell = tell
        self._acoustic = AcousticModel()
        self._known: dict[ModelInfo, tuple[PhonemeLexicon, CtcDecoder]] = {}
        self._decoder_of(self._open())

    def _open(self) -> Utterance:
        return self._client.utterance(phrases=self._phrases)

    def transcribe(self, samples: NDArray[np.float32]) -> Iterator[Transcript]:
        """The segments of the audio in order, each as soon as it is done.

        Shapes  samples (N,) float32, 16 kHz: see `dlm.asr.speech.audio.read_audio`
        Raises  QueryError  samples of the wrong shape or type
                UnavailableError, ProtocolError, AuthenticationError  servers fail, and the
                    client has neither `bigram_fallback` nor `local_fallback`; earlier segments
                    stay valid
        """
        for segment in cut_at_pauses(samples):
            yield self._transcribe(segment)

    def _transcribe(self, segment: Segment) -> Transcript:
        utterance = self._open()
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
        """The sentence with the bonus beside the model's own score."""
        bonus = phrases.of_words([word.word for word in one.words])
        own = one.log10_prob - bonus * LN_10 / self.settings.lm_weight
        return replace(one, log10_prob=own, bonus=bonus)

    def _decoder_of(self, utterance: Utterance) -> tuple[PhonemeLexicon, CtcDecoder]:
        """The lexicon and decoder for the utterance's model; models differ in their words."""
        model_info = utterance.model_info
        if model_info not in self._known:
            acoustic = self._acoustic
            lexicon = model_lexicon(
                utterance,
                acoustic.labels,
                limit=self._limit,
                tell=self._tell,
                sounds=self._sounds,
            )
            self._known[model_info] = (
                lexicon,
                CtcDecoder(
                    lexicon,
                    labels=len(acoustic.labels),
                    boundary=acoustic.boundary,
                    blank=acoustic.blank,
                    settings=self.settings,
                ),
            )
        return self._known[model_info]
