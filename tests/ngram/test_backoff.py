"""The oracle agrees with sums made by hand and with KenLM: scores, lengths and states."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.errors import ArpaError
from dlm.ngram.backoff import DictModel
from models import BASE, HAND_MADE, PlainModel, random_model


def oracle_of(model: PlainModel, folder: Path) -> DictModel:
    return DictModel.from_arpa(model.write(folder / "model.arpa"))


# model, context, word -> log10 P as a sum of the file's numbers, matched order, KenLM's length,
# state length
EXPECTED: list[tuple[str, str, str, list[float], int, int, int]] = [
    ("missing_suffixes", "a b c", "d", [-0.1875], 4, 4, 1),
    ("missing_suffixes", "a b", "c", [-0.25], 3, 3, 3),
    # gamma(a b c), nothing for b c (a blank), gamma(c), P(b)
    ("missing_suffixes", "a b c", "b", [-0.75, -0.0625, -1.125], 1, 1, 1),
    # b c is a blank: length 2, order 1, and it can be extended by d
    ("missing_suffixes", "b", "c", [-0.375, -1.25], 1, 2, 2),
    ("missing_suffixes", "", "nowhere", [-2.0], 1, 1, 0),
    ("missing_suffixes", "nowhere", "a", [-1.0], 1, 1, 1),
    ("weight_without_continuation", "a b c", "b", [-0.75, -0.0625, -1.125], 1, 1, 1),
    ("weight_without_continuation", "b c", "d", [-0.6875], 2, 3, 0),
    ("weight_without_continuation", "a b", "c", [-0.25], 3, 3, 3),
    ("bigrams_only", "<s>", "a", [-0.25], 2, 2, 1),
    ("bigrams_only", "a", "c", [-0.5, -1.25], 1, 1, 1),
    ("unigrams_only", "", "a", [-1.0], 1, 1, 0),
    ("no_unknown_word", "a", "nowhere", [-0.5, -100.0], 1, 1, 1),
    ("no_unknown_word", "a b", "c", [-0.125], 3, 3, 1),
    ("unknown_word_in_longer_ngrams", "a nowhere", "b", [-0.125], 3, 3, 2),
    ("unknown_word_in_longer_ngrams", "a", "nowhere", [-0.5], 2, 2, 2),
]


@pytest.mark.parametrize(
    ("name", "context", "word", "parts", "matched", "length", "state"), EXPECTED
)
def test_scores_are_the_sums_made_by_hand(
    name: str,
    context: str,
    word: str,
    parts: list[float],
    matched: int,
    length: int,
    state: int,
    tmp_path: Path,
) -> None:
    """All the numbers are exact in binary, so that the sums are too."""
    oracle = oracle_of(HAND_MADE[name], tmp_path)
    ids = [oracle.vocabulary.id_of(w) for w in context.split()]
    score = oracle.score(ids, oracle.vocabulary.id_of(word))
    assert score.log10_prob == np.float32(sum(parts))
    assert score.log10_prob.dtype == np.float32
    assert (score.matched_order, score.ngram_length, score.state_length) == (matched, length, state)


def test_weights_are_added_from_the_longest_context_in_float32(tmp_path: Path) -> None:
    """Another order of additions gives other bits; this one is the contract."""
    weights = {"x": 1e-8, "y x": -1.0, "z y x": 1.0}
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {
        (k,): v for k, v in BASE.items()
    } | {(w,): (-1.0, None) for w in "xyz"}
    ngrams |= {("z", "y"): (-1.0, None)}
    ngrams |= {tuple(k.split()): (-1.0, v) for k, v in weights.items()}
    oracle = oracle_of(PlainModel(4, ngrams), tmp_path)
    context = [oracle.vocabulary.id_of(w) for w in "zyx"]
    total = np.float32(0)
    for part in (1.0, -1.0, 1e-8, -1.0):
        total = np.float32(total + np.float32(part))
    assert oracle.score(context, oracle.vocabulary.id_of("a")).log10_prob == total


def test_words_beyond_the_order_do_not_matter(tmp_path: Path) -> None:
    """A context is cut to the most recent N - 1 words."""
    oracle = oracle_of(HAND_MADE["missing_suffixes"], tmp_path)
    ids = oracle.vocabulary.ids_of(["d", "d", "a", "b", "c"]).tolist()
    word = oracle.vocabulary.id_of("d")
    assert oracle.score(ids, word) == oracle.score(ids[-3:], word)
    assert oracle.state(ids) == oracle.state(ids[-3:])


@pytest.mark.parametrize("seed", range(10))
def test_a_state_scores_every_word_as_its_whole_context_does(seed: int, tmp_path: Path) -> None:
    """Words beyond the state length cannot matter: not to the next word nor to any after it."""
    oracle = oracle_of(random_model(seed, order=2 + seed % 4, unk=bool(seed % 3)), tmp_path)
    rng = random.Random(seed)
    size = len(oracle.vocabulary)
    for _ in range(100):
        context = [rng.randrange(size) for _ in range(rng.randrange(6))]
        state: tuple[int, ...] = oracle.state(context)
        for _ in range(6):
            word = rng.randrange(size)
            whole, short = oracle.score(context, word), oracle.score(state, word)
            assert whole == short
            context.append(word)
            longer = (*state, word)
            state = longer[len(longer) - whole.state_length :]
            assert state == oracle.state(context)


def test_a_sentence_is_scored_from_its_begin_to_its_end(tmp_path: Path) -> None:
    """With and without the marks."""
    oracle = oracle_of(HAND_MADE["bigrams_only"], tmp_path)
    assert [float(s.log10_prob) for s in oracle.score_sentence(["a", b"b"])] == [
        -0.25,
        -0.5,
        -0.375 - 1.5,
    ]
    assert len(oracle.score_sentence(["a", "b"], eos=False)) == 2
    assert float(oracle.score_sentence(["a"], bos=False, eos=False)[0].log10_prob) == -1.0


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ({("a", "b", "c"): (-1.0, None)}, "prefix"),
        ({("a", "b"): (-1.0, None), ("c", "b", "a"): (-1.0, None)}, "prefix"),
    ],
)
def test_a_missing_prefix_is_refused(
    rows: dict[tuple[str, ...], tuple[float, float | None]], fault: str, tmp_path: Path
) -> None:
    """As KenLM does."""
    model = PlainModel(3, {**{(k,): v for k, v in BASE.items()}, **rows})
    with pytest.raises(ArpaError, match=fault):
        oracle_of(model, tmp_path)


def test_a_dictionary_without_its_prefixes_is_refused(tmp_path: Path) -> None:
    """However it was made."""
    good = oracle_of(HAND_MADE["bigrams_only"], tmp_path)
    value = (np.float32(-1), np.float32(0))
    with pytest.raises(ArpaError, match="prefix"):
        DictModel(good.vocabulary, 3, {**good.ngrams, (4, 4, 4): value})


# ------------------------------------------------------------------------------------- KenLM


def walk_beside_kenlm(model: PlainModel, folder: Path, seed: int) -> None:
    """Walks both models word by word and compares every score, length and state."""
    kenlm: Any = pytest.importorskip(
        "kenlm", reason="KenLM is not installed; pip install -e '.[peers]' compiles it"
    )
    oracle = oracle_of(model.padded(), folder)
    peer = kenlm.LanguageModel(str(folder / "model.arpa"))
    assert peer.order == oracle.order
    rng = random.Random(seed)
    words = oracle.vocabulary.words
    ours = [i for i, word in enumerate(words) if not word.startswith(b"filler")]
    follow: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for ngram in sorted(oracle.closure):
        if len(ngram) > 1:
            follow[ngram[:-1]].append(ngram[-1])

    seen: list[tuple[Any, tuple[int, ...]]] = []
    for _ in range(60):
        state = kenlm.State()
        context: list[int] = []
        if rng.random() < 0.5:
            peer.BeginSentenceWrite(state)
            context.append(oracle.vocabulary.begin_id)
        else:
            peer.NullContextWrite(state)
        mine = tuple(context)
        for _ in range(8):
            known = [
                word
                for length in range(1, oracle.order)
                for word in follow.get(tuple(context[-length:]), ())
            ]
            word = rng.choice(known if known and rng.random() < 0.7 else ours)
            after = kenlm.State()
            theirs = peer.BaseFullScore(state, words[word].decode(), after)
            score = oracle.score(context, word)
            assert float(score.log10_prob) == pytest.approx(theirs.log_prob, rel=1e-5, abs=1e-5)
            assert score.ngram_length == theirs.ngram_length
            assert oracle.score(mine, word) == score
            context.append(word)
            whole = (*mine, word)
            mine = whole[len(whole) - score.state_length :]
            assert mine == oracle.state(context)
            seen.append((after, mine))
            state = after
    sample = rng.sample(seen, 100)
    for their_one, our_one in sample:
        for their_two, our_two in sample:
            assert (their_one == their_two) == (our_one == our_two), (our_one, our_two)


@pytest.mark.parametrize("name", [name for name, model in HAND_MADE.items() if model.order > 1])
def test_hand_made_models_score_as_in_kenlm(name: str, tmp_path: Path) -> None:
    """Scores, lengths, and states that are equal exactly when KenLM's are (it has no order 1)."""
    walk_beside_kenlm(HAND_MADE[name], tmp_path, 1)


@pytest.mark.parametrize("seed", range(30))
def test_random_models_score_as_in_kenlm(seed: int, tmp_path: Path) -> None:
    """Suffixes missing, weights positive, no unknown word in every third."""
    model = random_model(
        seed, order=2 + seed % 5, unk=bool(seed % 3), per_order=10 + seed * 2, below_one=True
    )
    walk_beside_kenlm(model, tmp_path, seed)
