"""The beam search finds what a search through every path finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")

from cluster import build
from dlm.asr.decoders.flashlight import DlmLM
from dlm.asr.settings import BeamSettings
from dlm.asr.speech.lexicon import LabelLexicon
from dlm.asr.speech.transcribe import CtcDecoder, HeardSentence
from dlm.client import Client, Utterance
from dlm.errors import ConfigError, QueryError
from models import HAND_MADE

# Two phonemes, a boundary and the blank; `c` sounds like `a`, and `b` has two pronunciations.
LABELS, BOUNDARY, BLANK = 4, 2, 3
WORDS = ("a", "b", "c")
SPELLINGS = ((0, (0,)), (1, (1,)), (1, (0, 1)), (2, (0,)))
# Nothing is pruned.
WIDE = BeamSettings(
    lm_weight=2.0, word_score=0.25, hypotheses=10_000, labels=LABELS, threshold=1e9, nbest=99
)


@pytest.fixture(scope="module")
def utterance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Utterance]:
    """On a 4-gram model of a to d."""
    files = build(HAND_MADE["missing_suffixes"], tmp_path_factory.mktemp("model"), 1)
    with Client.local(files.directory) as client:
        yield client.utterance()


def decode(
    utterance: Utterance,
    log_probs: NDArray[np.float32],
    settings: BeamSettings = WIDE,
    spellings: tuple[tuple[int, tuple[int, ...]], ...] = SPELLINGS,
    boundary: int | None = BOUNDARY,
) -> list[HeardSentence]:
    """What the decoder makes of it, over `WORDS`."""
    ids = np.array([utterance.vocabulary.id_of(word) for word in WORDS], np.uint32)
    unigrams = utterance.extend([utterance.null()], ids).log10_prob[0]
    lexicon = LabelLexicon(WORDS, ids, unigrams, spellings)
    decoder = CtcDecoder(lexicon, labels=LABELS, boundary=boundary, blank=BLANK, settings=settings)
    return decoder.decode(log_probs, DlmLM(utterance, ids.tolist()))


def random_log_probs(seed: int, frames: int) -> NDArray[np.float32]:
    """(frames, LABELS), rows that sum to one."""
    logits = np.random.default_rng(seed).normal(0.0, 2.0, (frames, LABELS))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def every_sentence(
    log_probs: NDArray[np.float32], utterance: Utterance, settings: BeamSettings
) -> dict[tuple[str, ...], float]:
    """The score of each sentence by its best path, of all paths there are."""
    best: dict[tuple[str, ...], float] = {}
    frames = np.arange(len(log_probs))
    for path in itertools.product(range(LABELS), repeat=len(log_probs)):
        labels = [x for x, _ in itertools.groupby(path) if x != BLANK]
        spoken = [
            tuple(part)
            for ends, part in itertools.groupby(labels, lambda label: label == BOUNDARY)
            if not ends
        ]
        ways = [[WORDS[place] for place, way in SPELLINGS if way == heard] for heard in spoken]
        acoustic = float(log_probs[frames, path].sum())
        for words in itertools.product(*ways):
            best[words] = max(best.get(words, -np.inf), acoustic)
    scores = utterance.score_sentences(list(best))
    return {
        words: acoustic + settings.lm_weight * lm.log10_prob + settings.word_score * len(words)
        for (words, acoustic), lm in zip(best.items(), scores, strict=True)
    }


@pytest.mark.parametrize("seed", range(12))
def test_the_sentences_and_scores_are_those_of_all_paths(utterance: Utterance, seed: int) -> None:
    """Each sentence once, the best first, and the parts of its score add up."""
    log_probs = random_log_probs(seed, 6)
    oracle = every_sentence(log_probs, utterance, WIDE)
    found = decode(utterance, log_probs)
    expected = sorted(oracle, key=oracle.__getitem__, reverse=True)[: WIDE.nbest]
    scores = [hypothesis.score for hypothesis in found]
    assert scores == sorted(scores, reverse=True)
    assert len({hypothesis.text for hypothesis in found}) == len(found)
    assert np.allclose(scores, [oracle[words] for words in expected], atol=1e-3)
    for hypothesis in found:
        words = tuple(word.word for word in hypothesis.words)
        assert hypothesis.score == pytest.approx(oracle[words], abs=1e-3)
        parts = (
            hypothesis.acoustic_score
            + WIDE.lm_weight * hypothesis.log10_prob
            + WIDE.word_score * len(words)
        )
        assert hypothesis.score == pytest.approx(parts, abs=1e-3)
        (score,) = utterance.score_sentences([list(words)])
        assert hypothesis.log10_prob == pytest.approx(score.log10_prob, abs=1e-4)


def spoken(*labels: int) -> NDArray[np.float32]:
    """Frames in which these labels are heard clearly."""
    log_probs = np.full((len(labels), LABELS), -9.0, np.float32)
    log_probs[np.arange(len(labels)), labels] = -0.01
    return log_probs


def test_words_have_the_times_of_their_phonemes(utterance: Utterance) -> None:
    """Without blanks and boundaries around; the last word needs no boundary."""
    path = (BLANK, 1, 1, BLANK, BOUNDARY, BLANK, BOUNDARY, 0, BLANK, 1)
    (best, *_) = decode(utterance, spoken(*path), BeamSettings(lm_weight=0.0))
    assert [(w.word, w.start_s, w.end_s) for w in best.words] == [
        ("b", 0.02, 0.06),
        ("b", 0.14, 0.2),
    ]
    assert sum(word.acoustic_score for word in best.words) == pytest.approx(best.acoustic_score)


@pytest.mark.parametrize("seed", range(8))
def test_words_of_pieces_end_where_the_next_begins(utterance: Utterance, seed: int) -> None:
    """Their last piece may go on for frames, without a boundary or a blank after it."""
    spellings = ((0, (0,)), (1, (0, 2)), (2, (1, 2)))
    rng = np.random.default_rng(seed)
    path, ends = [BLANK], []
    for _, pieces in (spellings[i] for i in rng.integers(0, 3, 6)):
        for piece in pieces:
            path += [BLANK] * int(path[-1] == piece or rng.random() < 0.5)
            path += [piece] * rng.integers(1, 3)
        ends.append(len(path))
    log_probs = spoken(*path)
    found = decode(utterance, log_probs, BeamSettings(lm_weight=0.1), spellings, None)[0]
    assert found.acoustic_score == pytest.approx(-0.01 * len(path))
    begins = [word.start_s for word in found.words[1:]]
    assert all(0 <= begin - end * 0.02 < 0.03 for begin, end in zip(begins, ends, strict=False))
    assert len(found.words) == 6


def test_the_list_is_as_long_as_asked(utterance: Utterance) -> None:
    """One sentence by default; silence is one, too, without words."""
    (best, *_) = decode(utterance, spoken(*[BLANK] * 20))
    assert (best.words, best.text) == ((), "")
    log_probs = random_log_probs(1, 6)
    assert len(decode(utterance, log_probs, BeamSettings())) == 1
    assert len(decode(utterance, log_probs, BeamSettings(nbest=3))) == 3


def test_posteriors_of_another_kind_are_refused(utterance: Utterance) -> None:
    """The native library would read past them."""
    for wrong in (np.zeros((5, 3), np.float32), np.zeros((5, 4)), np.zeros(4, np.float32)):
        with pytest.raises(QueryError, match="float32"):
            decode(utterance, wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, 0) for name in ("hypotheses", "labels", "nbest", "threshold")]
    + [("lm_weight", -1.0), ("lm_weight", float("nan")), ("word_score", float("inf"))],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=name):
        BeamSettings(**{name: value})  # type: ignore[arg-type]


def test_what_the_model_raises_comes_out_of_the_decoder(utterance: Utterance) -> None:
    """Through the native library, as itself."""
    ids = np.array([utterance.vocabulary.id_of(word) for word in WORDS], np.uint32)
    lexicon = LabelLexicon(WORDS, ids, np.full(3, -1.0, np.float32), SPELLINGS)
    decoder = CtcDecoder(lexicon, labels=LABELS, boundary=BOUNDARY, blank=BLANK)
    lm = DlmLM(utterance, ids[:1].tolist())
    with pytest.raises(QueryError, match="not in the lexicon of 1 words"):
        decoder.decode(random_log_probs(1, 6), lm)
