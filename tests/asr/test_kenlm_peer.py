"""`dlm.asr.kenlm` beside the package kenlm: the same calls, the same answers.

Scores agree within 1e-6 of their size (KenLM adds back-off weights in another order, which can
change the last bit), n-gram lengths and unknown words exactly, states in which of them are equal.
"""

from __future__ import annotations

import copy
import io
import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dlm.asr.kenlm as ours
from models import HAND_MADE, PlainModel, random_model

peer: Any = pytest.importorskip(
    "kenlm", reason="kenlm is not installed (pip install -e '.[peers]')"
)
DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
ARPA = DATA / "arpa" / "books5.arpa.zst"
TEXT = DATA / "text" / "gutenberg.txt.zst"

if peer is ours:  # a test of the hook put it there
    pytest.skip("import kenlm gives dlm's", allow_module_level=True)


def opened(arpa: Path, module: Any, load_method: int = 2) -> Any:
    """A model of the file, silently."""
    config = module.Config()
    config.show_progress = False
    config.load_method = load_method
    config.arpa_complain = module.ARPALoadComplain.NONE
    return module.Model(str(arpa), config)


def both(
    model: PlainModel, folder: Path, monkeypatch: pytest.MonkeyPatch, load_method: int = 2
) -> tuple[Any, Any]:
    """dlm's and KenLM's of one file."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(folder / "cache"))
    arpa = model.padded().write(folder / "model.arpa")
    return opened(arpa, ours, load_method), opened(arpa, peer)


def near(score: float, other: float) -> bool:
    """Within 1e-6 of their size."""
    return abs(score - other) <= 1e-6 * max(abs(score), abs(other), 1e-3)


class Walk:
    """The same steps by both; `seen` are the states after each."""

    def __init__(self, mine: Any, theirs: Any) -> None:
        self.models: tuple[tuple[ModuleType, Any], ...] = (ours, mine), (peer, theirs)
        self.seen: list[tuple[Any, Any]] = []

    def begin(self, bos: bool) -> tuple[Any, ...]:
        """States at the beginning, or that know nothing."""
        states = []
        for module, model in self.models:
            state = module.State()
            (model.BeginSentenceWrite if bos else model.NullContextWrite)(state)
            states.append(state)
        return tuple(states)

    def step(self, states: tuple[Any, ...], word: str) -> tuple[Any, ...]:
        """Compares one step, both ways of asking; the states after it."""
        after = tuple(module.State() for module, _ in self.models)
        again = tuple(module.State() for module, _ in self.models)
        found = [
            model.BaseFullScore(state, word, out)
            for (_, model), state, out in zip(self.models, states, after, strict=True)
        ]
        alone = [
            model.BaseScore(state, word, out)
            for (_, model), state, out in zip(self.models, states, again, strict=True)
        ]
        assert near(found[0].log_prob, found[1].log_prob), (word, found)
        assert [one.log_prob for one in found] == alone
        assert found[0].ngram_length == found[1].ngram_length, (word, found)
        assert found[0].oov == found[1].oov
        assert after == again
        self.seen.append((after[0], after[1]))
        return after

    def compare_states(self, pairs: int, seed: int = 0) -> None:
        """Pairs of the states seen are equal by both, or by neither."""
        rng = random.Random(seed)
        for _ in range(pairs):
            one, two = rng.choice(self.seen), rng.choice(self.seen)
            assert (one[0] == two[0]) == (one[1] == two[1])
            assert one[0] != two[0] or hash(one[0]) == hash(two[0])


def walk(mine: Any, theirs: Any, words: list[str], steps: int, seed: int) -> Walk:
    """Random sentences, which follow n-grams more often than chance would."""
    rng = random.Random(seed)
    path = Walk(mine, theirs)
    followed = [words[i : i + 4] for i in range(len(words) - 4)]
    while len(path.seen) < steps:
        states = path.begin(rng.random() < 0.7)
        for _ in range(rng.randrange(1, 5)):
            for word in rng.choice(followed) if rng.random() < 0.7 else [rng.choice(words)]:
                states = path.step(states, word)
    return path


def compare_sentences(mine: Any, theirs: Any, texts: list[str]) -> None:
    """Whole sentences, by every way of asking."""
    for text in texts:
        for bos in (True, False):
            for eos in (True, False):
                tokens = list(mine.full_scores(text, bos=bos, eos=eos))
                other = list(theirs.full_scores(text, bos=bos, eos=eos))
                assert [token[1:] for token in tokens] == [token[1:] for token in other]
                assert all(near(a[0], b[0]) for a, b in zip(tokens, other, strict=True))
                # KenLM adds up in float32: an error of its own for each word.
                total = theirs.score(text, bos, eos)
                assert mine.score(text, bos, eos) == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert mine.perplexity(text) == pytest.approx(theirs.perplexity(text), rel=1e-4)
        for word in text.split():
            assert (word in mine) == (word in theirs)


@pytest.mark.promise("kenlm_api")
def test_public_names_are_those_of_kenlm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the module, and of each of its classes."""
    names = {name for name in dir(peer) if not name.startswith("_")} - {"os"}  # which it imports
    assert names <= set(dir(ours))
    pairs = [
        both(random_model(1, below_one=True), tmp_path, monkeypatch),
        *((getattr(ours, name), getattr(peer, name)) for name in sorted(names)),
        (ours.State(), peer.State()),
        (ours.Config(), peer.Config()),
        (ours.FullScoreReturn(-1.5, 2, True), peer.FullScoreReturn(-1.5, 2, True)),
    ]
    for mine, theirs in pairs:
        wanted = set(dir(theirs)) - {"__setstate__", "__setstate_cython__", "__reduce_cython__"}
        if isinstance(theirs, type):  # what instances have is compared below
            wanted = {name for name in wanted if callable(getattr(theirs, name))}
        assert wanted - {"__pyx_vtable__"} <= set(dir(mine)), theirs
    for mine, theirs in ((ours.LoadMethod, peer.LoadMethod), (ours.Config(), peer.Config())):
        for name in dir(theirs):
            if not name.startswith("_"):
                assert getattr(mine, name) == getattr(theirs, name), name
    assert vars(ours.ARPALoadComplain)["NONE"] == peer.ARPALoadComplain.NONE
    assert repr(ours.FullScoreReturn(-1.5, 2, True)) == repr(peer.FullScoreReturn(-1.5, 2, True))


@pytest.mark.promise("kenlm_api")
@pytest.mark.parametrize("load_method", [ours.LoadMethod.LAZY, ours.LoadMethod.READ])
@pytest.mark.parametrize("name", [name for name, model in HAND_MADE.items() if model.order > 1])
def test_hand_made_models_answer_as_kenlm(
    name: str, load_method: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What real models lack: weights that nothing follows, suffixes that are missing."""
    mine, theirs = both(HAND_MADE[name], tmp_path, monkeypatch, load_method)
    words = [w for w in mine.vocab if not w.startswith("filler")] + ["unheard", "<s>"]
    walk(mine, theirs, words * 2, 300, 1).compare_states(3000)
    rng = random.Random(1)
    compare_sentences(mine, theirs, [" ".join(rng.choices(words, k=6)) for _ in range(20)])


@pytest.mark.parametrize("load_method", [ours.LoadMethod.LAZY, ours.LoadMethod.READ])
@pytest.mark.parametrize("seed", range(6))
def test_random_models_with_missing_suffixes_answer_as_kenlm(
    seed: int, load_method: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of orders 2 to 6, with and without an unknown word, some with positive weights."""
    model = random_model(
        seed, order=2 + seed % 5, unk=bool(seed % 3), per_order=60, words=12, below_one=True
    )
    mine, theirs = both(model, tmp_path, monkeypatch, load_method)
    words = [w for w in mine.vocab if not w.startswith("filler")] + ["unheard"]
    random.Random(seed).shuffle(words)
    walk(mine, theirs, words * 3, 1500, seed).compare_states(10_000)
    rng = random.Random(seed)
    compare_sentences(mine, theirs, [" ".join(rng.choices(words, k=7)) for _ in range(20)])


def test_wrong_types_are_errors_of_the_same_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks that catch the one catch the other."""
    for model in both(random_model(1, below_one=True), tmp_path, monkeypatch):
        module: Any = ours if isinstance(model, ours.Model) else peer
        state = module.State()
        for call in (
            lambda: model.BaseScore(state, b"w1", module.State()),  # noqa: B023
            lambda: model.score(3),  # noqa: B023
            lambda: 3 in model,  # noqa: B023
            lambda: module.Config(3),  # noqa: B023
            lambda: iter(state),  # noqa: B023
        ):
            with pytest.raises(TypeError):
                call()
        for name in ("order", "unheard"):
            with pytest.raises(AttributeError):
                setattr(model, name, 3)
                getattr(model, "missing_name")  # noqa: B009
        with pytest.raises(OSError, match="Cannot read model"):
            module.Model(str(tmp_path / "none.arpa"))
        assert copy.copy(state) == state


# -- a real model ---------------------------------------------------------------------------------


def text_of(words: int) -> list[list[str]]:
    """Lines of a real text, until they have so many words."""
    stream = pa.CompressedInputStream(pa.OSFile(str(TEXT)), "zstd")
    found: list[list[str]] = []
    for line in io.TextIOWrapper(io.BufferedReader(stream), "utf-8"):
        if split := line.lower().split():
            found.append(split)
            words -= len(split)
        if words <= 0:
            break
    return found


@pytest.mark.promise("kenlm_api")
@pytest.mark.slow
@pytest.mark.skipif(not (ARPA.exists() and TEXT.exists()), reason=f"no {ARPA} or {TEXT}")
@pytest.mark.parametrize("load_method", [ours.LoadMethod.LAZY, ours.LoadMethod.READ])
def test_a_real_model_answers_as_kenlm(
    load_method: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 steps through text with random words in it, and a million pairs of states."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path / "cache"))
    plain = tmp_path / "books5.arpa"
    with pa.CompressedInputStream(pa.OSFile(str(ARPA)), "zstd") as stream, plain.open("wb") as out:
        while block := stream.read(1 << 20):
            out.write(block)
    mine, theirs = opened(plain, ours, load_method), opened(plain, peer)
    lines = text_of(20_000)
    words = [word for line in lines for word in line] + ["unheard", "<unk>", "<s>", "</s>"]
    rng = random.Random(7)
    path = Walk(mine, theirs)
    for line in lines:
        states = path.begin(rng.random() < 0.8)
        for word in line:
            states = path.step(states, word if rng.random() < 0.8 else rng.choice(words))
    assert len(path.seen) >= 20_000
    path.compare_states(1_000_000)
    compare_sentences(mine, theirs, [" ".join(line) for line in lines[:500]])
    scores = mine.score_many([" ".join(line) for line in lines])
    assert np.allclose(scores, [theirs.score(" ".join(line)) for line in lines], rtol=1e-5)
    assert os.path.basename(theirs.path) == b"books5.arpa"  # noqa: PTH119
