"""A small recogniser for tests: a lexicon spelled in letters, posteriors of spoken sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models import PlainModel, random_model

LETTERS = "abcdefg"
TOKENS = ["-", "|", *LETTERS]  # the blank, and what stands between words
BLANK, SPACE = 0, 1


def spelled(count: int, seed: int = 0) -> list[str]:
    """`count` different words of two to four letters."""
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(list(LETTERS), rng.integers(2, 5)))] = None
    return list(found)


def posteriors(sentence: list[str], seed: int, flat: float = 3.0) -> NDArray[np.float32]:
    """(T, tokens) ln P of frames in which the sentence is said, unclearly; `flat` makes it more so.

    Two frames per letter, the second of which may be the blank.
    """
    rng = np.random.default_rng(seed)
    frames = []
    for letter in "|".join([*sentence, ""]):
        token = TOKENS.index(letter)
        frames += [token, BLANK if rng.random() < 0.7 else token]
    logits = rng.normal(0.0, 1.0, (len(frames), len(TOKENS)))
    logits[np.arange(len(frames)), frames] += 8.0 / flat
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits.astype(np.float32)


@dataclass(frozen=True)
class Hypothesis:
    """What a decoder found: words by index, and its score."""

    words: tuple[int, ...]
    score: float


def decode(
    lm: Any, lexicon: list[str], emissions: NDArray[np.float32], beam: int = 50
) -> list[Hypothesis]:
    """The n-best list of flashlight's lexicon decoder with this language model."""
    from flashlight.lib.text.decoder import (
        CriterionType,
        LexiconDecoder,
        LexiconDecoderOptions,
        SmearingMode,
        Trie,
    )

    trie = Trie(len(TOKENS), SPACE)
    start = lm.start(False)
    for index, word in enumerate(lexicon):
        trie.insert(
            [TOKENS.index(letter) for letter in word] + [SPACE], index, lm.score(start, index)[1]
        )
    trie.smear(SmearingMode.MAX)
    options = LexiconDecoderOptions(
        beam_size=beam,
        beam_size_token=len(TOKENS),
        beam_threshold=25.0,
        lm_weight=2.0,
        word_score=1.0,
        unk_score=-float("inf"),
        sil_score=0.0,
        log_add=False,
        criterion_type=CriterionType.CTC,
    )
    decoder = LexiconDecoder(options, trie, lm, SPACE, BLANK, -1, [], False)
    steps, tokens = emissions.shape
    found = decoder.decode(np.ascontiguousarray(emissions).ctypes.data, steps, tokens)
    return [Hypothesis(tuple(w for w in one.words if w >= 0), one.score) for one in found]


def spoken_model(lexicon: list[str], seed: int = 3) -> PlainModel:
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
