"""What the decoders of `decoders.py` hear: sentences drawn from a model, or recorded speech."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asr.decoding import decode_with, lexicon_decoder, lexicon_trie, posteriors, tokens_of
from dlm.asr.settings import BeamSettings
from dlm.asr.speech.acoustic import AcousticModel
from dlm.asr.speech.audio import read_audio
from dlm.asr.speech.lexicon import model_lexicon
from dlm.asr.speech.transcribe import CtcDecoder
from dlm.client import Client

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
TOKENS = tokens_of(LETTERS)
FRAMES_PER_LETTER = 3
NBEST = 20

Decode = Callable[[Any], list[tuple[Any, float]]]


@dataclass(frozen=True, eq=False)
class Heard:
    """Posteriors of utterances, and flashlight's search over the words of a lexicon.

    words    by index, as the language model is asked
    decoder  what decodes one utterance with a language model: hypotheses and scores, best first
    """

    name: str
    words: Sequence[str]
    spoken: Sequence[Any]
    decoder: Callable[[Any], Decode]

    @property
    def audio_s(self) -> float:
        """Seconds of audio."""
        return 0.02 * sum(map(len, self.spoken))


def drawn(model: Path, limit: int, count: int, flat: float, beam: int) -> Heard:
    """Sentences of the model, said unclearly, letter by letter."""
    with Client.local(model) as client:
        utterance = client.utterance()
        names = [word.decode("utf-8", "replace") for word in utterance.vocabulary.words[1:]]
        words = [name for name in names if name and set(name) <= set(LETTERS)][:limit]
        start = utterance.begin()
        scores = utterance.extend([start], words).log10_prob[0].tolist()
    said = sentences(model, words, count, 1)
    spoken = [posteriors(s, seed, flat, TOKENS, FRAMES_PER_LETTER) for seed, s in enumerate(said)]
    trie = lexicon_trie(words, scores, TOKENS)

    def decoder(lm: Any) -> Decode:
        made = lexicon_decoder(lm, trie, TOKENS, beam)
        return lambda emissions: [(one.words, one.score) for one in decode_with(made, emissions)]

    return Heard(f"drawn sentences, flat {flat:g}, beam {beam}", words, spoken, decoder)


def recorded(folder: Path, model: Path, limit: int, count: int, beam: int) -> Heard:
    """Utterances of the files in a folder, by the acoustic model that comes with dlm."""
    files = sorted(folder.rglob("*.flac"))
    files = files[:: max(len(files) // count, 1)][:count]  # of many speakers
    acoustic = AcousticModel()
    spoken = [acoustic.log_probs(read_audio(file)) for file in files]
    with Client.local(model) as client:
        lexicon = model_lexicon(client.utterance(), acoustic.labels, limit=limit)
    search = CtcDecoder(
        lexicon,
        labels=len(acoustic.labels),
        boundary=acoustic.boundary,
        blank=acoustic.blank,
        settings=BeamSettings(hypotheses=beam, nbest=NBEST),
    )

    def decoder(lm: Any) -> Decode:
        return lambda heard: [(one.text, one.score) for one in search.decode(heard, lm)]

    return Heard(f"recorded speech, beam {beam}", lexicon.words, spoken, decoder)


def sentences(model: Path, words: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """Sentences of the model, of words that can be spelled."""
    rng = np.random.default_rng(seed)
    allowed = set(words)
    out: list[list[str]] = []
    with Client.local(model) as client:
        utterance = client.utterance()
        names = [word.decode() for word in utterance.vocabulary.words]
        while len(out) < count:
            state, said = utterance.begin(), list[str]()
            while len(said) < 12:
                likely = utterance.next_words(state, 200)
                chosen = [(w, p) for w, p in likely if names[w] in allowed or names[w] == "</s>"]
                weights = np.array([10.0 ** float(p) for _, p in chosen])
                word = chosen[rng.choice(len(chosen), p=weights / weights.sum())][0]
                if names[word] == "</s>":
                    break
                said.append(names[word])
                state = utterance.extend([state], [word]).states[0, 0]
            if len(said) > 3:
                out.append(said)
    return out
