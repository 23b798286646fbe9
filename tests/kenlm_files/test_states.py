"""Blanks, least states and the unknown word, as KenLM has them, from files of each structure.

`golden/states` has the models, with weights that are exact in binary: so the sums here are the
float32 that KenLM answers, and quantised files have them too, since each value has its own code.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dlm.asr.kenlm as kenlm
from dlm.asr.kenlm.table import StepTable
from dlm.errors import KenlmFormatError
from dlm.kenlm.open import open_ngrams

STATES = Path(__file__).parent / "golden/states"
FILES = sorted(path.name for path in STATES.glob("*.binary") if "above0" not in path.name)

Steps = list[tuple[str, float, int, int]]
# After the empty context: words, each with log10 P, ngram_length and words of the next state.
WALKS: dict[str, Steps] = {
    "the longest n-gram, whose weight nothing follows": [
        ("a", -1.25, 1, 1),
        ("b", -0.5, 2, 2),
        ("c", -0.25, 3, 3),
        ("d", -0.125, 4, 1),
        ("a", -4, 2, 1),
    ],
    "blanks, and the states that they are part of": [
        ("b", -1.5, 1, 1),
        ("c", -1.75 - 0.125, 2, 2),
        ("d", -3 - 0.5, 3, 1),
    ],
    "weights of contexts that were not matched": [
        ("a", -1.25, 1, 1),
        ("b", -0.5, 2, 2),
        ("c", -0.25, 3, 3),
        ("g", -2.75 - 0.5 - 0.5, 1, 0),
    ],
    "a weight that nothing extends, above 0": [("e", -2.5, 1, 1), ("d", -3 + 1.5, 1, 1)],
    "no weight, written or not": [
        ("f", -2.25, 1, 0),
        ("g", -2.75, 1, 0),
        ("d", -3, 1, 1),
        ("f", -2.25, 1, 0),
    ],
}
UNKNOWN: dict[str, Steps] = {
    "n-grams of unknown words": [
        ("x", -2, 1, 1),
        ("y", -6, 2, 2),
        ("z", -6 - 2, 2, 2),
        ("a", -3.5 - 2, 2, 2),
        ("b", -0.5 - 0.75, 2, 2),
    ],
    "the weight of an unknown word": [("x", -2, 1, 1), ("b", -1.5 - 4, 1, 1)],
}


@pytest.mark.promise("kenlm_api")
@pytest.mark.parametrize("name", [*FILES, "states.arpa", "nounk.arpa"])
def test_scores_lengths_and_states_are_those_of_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files as they lie, and of their ARPA files."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    model = kenlm.Model(str(STATES / name))
    walks = WALKS if "nounk" in name else WALKS | UNKNOWN
    for title, steps in walks.items():
        state = kenlm.State()
        for word, log10_prob, length, kept in steps:
            after = kenlm.State()
            found = model.BaseFullScore(state, word, after)
            answer = found.log_prob, found.ngram_length, len(after._words())
            assert answer == (log10_prob, length, kept), (title, word)
            assert found.oov == (word in "xyz")
            state = after


@pytest.mark.parametrize("name", [name for name in [*FILES, "nounk.arpa"] if "nounk" in name])
def test_a_model_without_an_unknown_word_has_kenlms_value_for_it(name: str) -> None:
    """And is without it again when its n-grams are read."""
    model = kenlm.Model(str(STATES / name))
    assert model.BaseScore(kenlm.State(), "x", kenlm.State()) == -100
    with open_ngrams(STATES / name) as reader:
        assert sum(len(batch) for batch in reader.batches()) == sum(reader.counts)
        assert not reader.vocabulary.unk_in_model


@pytest.mark.parametrize("name", ["above0.probing.binary", "above0.trie.binary"])
def test_a_blank_above_0_comes_back_as_kenlm_scores_it(name: str, tmp_path: Path) -> None:
    """Backing off gives 2 - 1.75, but a KenLM file has no room for the sign."""
    model, state = kenlm.Model(str(STATES / name)), kenlm.State()
    model.BaseScore(state, "b", state)
    assert model.BaseScore(state, "c", state) == -0.25
    with open_ngrams(STATES / name) as reader:
        batches = list(reader.batches())
        b, c = reader.vocabulary.ids_of([b"b", b"c"]).tolist()
    (found,) = (
        float(prob)
        for batch in batches
        if batch.order == 2
        for ids, prob in zip(batch.ids.tolist(), batch.log10_prob, strict=True)
        if ids == [b, c]
    )
    assert found == -0.25


def test_a_quantised_blank_above_0_is_scored_and_has_no_arpa_file() -> None:
    """Codes keep the sign; the refusal names the value, and is no report of damage."""
    path = STATES / "above0.quant.binary"
    model, state = kenlm.Model(str(path)), kenlm.State()
    model.BaseScore(state, "b", state)
    assert model.BaseScore(state, "c", state) == 0.25
    with open_ngrams(path) as reader, pytest.raises(KenlmFormatError, match=r"0\.25") as error:
        list(reader.batches())
    assert error.value.section == "2-grams"


def test_words_are_counted_after_a_full_table_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sentences, too, for which no table is needed."""
    given = StepTable.__init__.__kwdefaults__ or {}
    monkeypatch.setattr(StepTable.__init__, "__kwdefaults__", {**given, "states": 4})
    model = kenlm.Model(str(shutil.copy(STATES / FILES[0], tmp_path)))  # which nobody has open
    first, state = model._opened.table, kenlm.State()
    for word in "abcdefg":
        model.BaseScore(kenlm.State(), word, state)
    before = model.stats()["queries"]
    model.score("a b c")
    assert model._opened.table is not first
    assert model.stats()["queries"] == before + 4
