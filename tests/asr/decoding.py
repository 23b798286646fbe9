"""A small recogniser for tests and benchmarks: words in letters, posteriors of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models import PlainModel, random_model

LETTERS = "abcdefg"
BLANK, SPACE = 0, 1


def tokens_of(letters: str) -> list[str]:
    """What the acoustic model tells apart: the blank, what stands between words, letters."""
    return ["-", "|", *letters]


TOKENS = tokens_of(LETTERS)


def spelled(count: int, seed: int = 0) -> list[str]:
    """`count` different words of two to four letters."""
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(list(LETTERS), rng.integers(2, 5)))] = None
    return list(found)


def posteriors(
    sentence: Sequence[str],
    seed: int,
    flat: float = 3.0,
    tokens: Sequence[str] = TOKENS,
    frames_per_letter: int = 2,
) -> NDArray[np.float32]:
    """(T, tokens) ln P of frames in which the sentence is said, unclearly; `flat` makes it more so.

    The first frame of a letter is its own, each of the others mostly the blank.
    """
    rng = np.random.default_rng(seed)
    frames = []
    for letter in "|".join([*sentence, ""]):
        token = tokens.index(letter)
        frames.append(token)
        frames += [BLANK if rng.random() < 0.7 else token for _ in range(frames_per_letter - 1)]
    logits = rng.normal(0.0, 1.0, (len(frames), len(tokens)))
    logits[np.arange(len(frames)), frames] += 8.0 / flat
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits.astype(np.float32)


@dataclass(frozen=True)
class Hypothesis:
    """What a decoder found: words by index, and its score."""

    words: tuple[int, ...]
    score: float


def lexicon_trie(
    lexicon: Sequence[str], scores: Sequence[float], tokens: Sequence[str] = TOKENS
) -> Any:
    """flashlight's trie of the words in letters, with the score of each as a first word."""
    from flashlight.lib.text.decoder import SmearingMode, Trie

    trie = Trie(len(tokens), SPACE)
    for index, (word, score) in enumerate(zip(lexicon, scores, strict=True)):
        trie.insert([*(tokens.index(letter) for letter in word), SPACE], index, score)
    trie.smear(SmearingMode.MAX)
    return trie


def lexicon_options(tokens: Sequence[str], beam: int) -> Any:
    """What flashlight's decoder is told beside."""
    from flashlight.lib.text.decoder import CriterionType, LexiconDecoderOptions

    return LexiconDecoderOptions(
        beam_size=beam,
        beam_size_token=len(tokens),
        beam_threshold=25.0,
        lm_weight=2.0,
        word_score=1.0,
        unk_score=-float("inf"),
        sil_score=0.0,
        log_add=False,
        criterion_type=CriterionType.CTC,
    )


def lexicon_decoder(lm: Any, trie: Any, tokens: Sequence[str] = TOKENS, beam: int = 50) -> Any:
    """flashlight's decoder of these words with this language model."""
    from flashlight.lib.text.decoder import LexiconDecoder

    options = lexicon_options(tokens, beam)
    return LexiconDecoder(options, trie, lm, SPACE, BLANK, -1, [], False)


def decode(
    lm: Any, lexicon: Sequence[str], emissions: NDArray[np.float32], beam: int = 50
) -> list[Hypothesis]:
    """The n-best list of flashlight's lexicon decoder with this language model."""
    start = lm.start(False)
    scores = [lm.score(start, index)[1] for index in range(len(lexicon))]
    return decode_with(lexicon_decoder(lm, lexicon_trie(lexicon, scores), beam=beam), emissions)


def decode_with(decoder: Any, emissions: NDArray[np.float32]) -> list[Hypothesis]:
    """The n-best list of a decoder."""
    steps, tokens = emissions.shape
    found = decoder.decode(np.ascontiguousarray(emissions).ctypes.data, steps, tokens)
    return [Hypothesis(tuple(w for w in one.words if w >= 0), one.score) for one in found]


def spoken_model(lexicon: Sequence[str], seed: int = 3) -> PlainModel:
    """A random 4-gram model of these words, without blanks, which KenLM counts otherwise."""
    model = random_model(
        seed,
        order=4,
        words=len(lexicon),
        per_order=60 * len(lexicon),
        missing_suffixes=False,
        below_one=True,
    )
    names = {f"w{i}": word for i, word in enumerate(lexicon)}
    renamed = {tuple(names.get(w, w) for w in ngram): v for ngram, v in model.ngrams.items()}
    return PlainModel(model.order, renamed)
