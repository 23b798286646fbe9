"""Turns posteriors of a phoneme CTC model into words: flashlight-text's lexicon beam search.

A hypothesis is scored as ln P(audio | words) + lm_weight * log10 P(words) + word_score per word.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.settings import BeamSettings
from dlm.asr.speech.acoustic import FRAME_S
from dlm.asr.speech.lexicon import PhonemeLexicon
from dlm.errors import QueryError
from dlm.units import LN_10


@dataclass(frozen=True, slots=True)
class HeardWord:
    """A word of a hypothesis.

    word             as the model spells it
    start_s, end_s   of its first and last phoneme, seconds from the first frame, to some 40 ms
    acoustic_score   ln P of its frames
    """

    word: str = field(repr=False)  # what was said is not for logs
    start_s: float
    end_s: float
    acoustic_score: float


@dataclass(frozen=True, slots=True)
class HeardSentence:
    """A sentence that may have been said.

    score           acoustic_score + lm_weight * log10_prob + word_score * number of words, and the
                    natural logarithm of the bonus
    acoustic_score  ln P of the best path through the frames
    log10_prob      of the words and the sentence end, by the language model
    bonus           of the utterance's phrases, log10
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
    """A beam search over the words of a lexicon.

    Args  lexicon  see `lexicon.model_lexicon`;  labels  how many the acoustic model has
          boundary, blank  its ids of the word boundary and of CTC's blank
    """

    def __init__(
        self,
        lexicon: PhonemeLexicon,
        *,
        labels: int,
        boundary: int,
        blank: int,
        settings: BeamSettings | None = None,
    ) -> None:
        from flashlight.lib.text import decoder

        self.settings = settings or BeamSettings()
        self._words = lexicon.words
        self._labels, self._boundary, self._blank = labels, boundary, blank
        trie = decoder.Trie(labels, boundary)
        ahead = lexicon.log10_unigram.astype(np.float64)
        if lexicon.log10_bonus is not None:
            # In the look-ahead too, else a rare word is dropped before its last phoneme.
            ahead += lexicon.log10_bonus * LN_10 / self.settings.lm_weight
        unigrams = ahead.tolist()
        for place, spelling in lexicon.spellings:
            trie.insert([*spelling, boundary], place, unigrams[place])
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
        """The likeliest sentences, best first; each once, at most `BeamSettings.nbest`, maybe none.

        Args    lm  flashlight's `LM` over the lexicon's words, such as `DlmLM`; one call at a time
        Shapes  log_probs (T, labels) float32, natural logarithms
        Raises  QueryError  wrong shape or type;  what the language model raises
        """
        from flashlight.lib.text.decoder import LexiconDecoder

        if log_probs.shape != (len(log_probs), self._labels) or log_probs.dtype != np.float32:
            raise QueryError(
                f"log_probs are {log_probs.dtype} of shape {log_probs.shape}; expected float32 of "
                f"shape (T, {self._labels})"
            )
        # After the last frame the last word may end at no cost: its boundary is often not heard
        # when the audio stops right after it.
        closing = np.full((1, self._labels), log_probs.min(initial=-100.0), np.float32)
        closing[0, [self._boundary, self._blank]] = 0.0
        frames = np.concatenate([log_probs, closing])
        searching = LexiconDecoder(
            self._options, self._trie, lm, self._boundary, self._blank, -1, [], False
        )
        found = searching.decode(frames.ctypes.data, *frames.shape)
        different: dict[tuple[int, ...], HeardSentence] = {}
        for result in found:
            key = tuple(place for place in result.words if place >= 0)
            if key not in different:
                different[key] = self._sentence(result, frames)
            if len(different) == self.settings.nbest:
                break
        return list(different.values())

    def _sentence(self, result: Any, frames: NDArray[np.float32]) -> HeardSentence:
        """Converts flashlight's result, whose lists begin with the root and end with the finish."""
        labels = np.array(result.tokens[1 : len(frames) + 1])
        path = frames[np.arange(len(frames)), labels]
        words = []
        begin = 0
        for frame, place in enumerate(result.words[1 : len(frames) + 1]):
            if place < 0:
                continue
            first, last = self._sounding(labels, begin, frame)
            words.append(
                HeardWord(
                    self._words[place],
                    round(first * FRAME_S, 3),
                    round((last + 1) * FRAME_S, 3),
                    float(path[begin : frame + 1].sum()),
                )
            )
            begin = frame + 1
        return HeardSentence(tuple(words), result.score, result.emittingModelScore, result.lmScore)

    def _sounding(self, labels: NDArray[np.int64], begin: int, end: int) -> tuple[int, int]:
        sounding = np.flatnonzero(~np.isin(labels[begin:end], (self._boundary, self._blank)))
        return begin + int(sounding[0]), begin + int(sounding[-1])
