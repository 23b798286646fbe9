"""A user's own model as a source: its words, its answers, and what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.plain import PlainSource, a_source
from dlm.distill.sampled import distill_samples
from dlm.distill.source import (
    MOST_WORDS,
    PrefixHistories,
    SourceReader,
    is_object_name,
    load_object,
)
from dlm.errors import ConfigError, SourceError
from dlm.ngram.vocab import Vocabulary

LN = np.log(np.array([0.5, 0.25, 0.25], np.float32))


class Fixed:
    """The same distribution after every history."""

    def __init__(self, vocabulary: Any = ("</s>", "a", "b"), ln: Any = LN, **more: Any) -> None:
        self.vocabulary, self.ln = vocabulary, np.asarray(ln)
        self.begin_id = 0
        vars(self).update(more)

    def log_probs(self, prefixes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """As `Source` has it."""
        assert (prefixes[:, 0] == self.begin_id).all()
        return np.tile(self.ln, (len(prefixes), 1))


def test_words_are_numbered_as_those_of_models() -> None:
    """One id may begin and end sentences, as in GPT-2; what the begin gets is left out."""
    reader = SourceReader(Fixed(), "it")
    assert reader.vocabulary.words == [b"<unk>", b"</s>", b"a", b"b", b"<s>"]
    assert not reader.vocabulary.unk_in_model
    np.testing.assert_allclose(reader.first, [0, 0.5, 0.25, 0.25, 0])
    apart = Fixed(["a", "<s>", "</s>", "<unk>"], np.log([0.2, 0.2, 0.5, 0.1]), begin_id=1)
    reader = SourceReader(apart, "it")
    assert reader.vocabulary.words == [b"<unk>", b"a", b"<s>", b"</s>"]
    np.testing.assert_allclose(reader.first, [0.125, 0.25, 0, 0.625], rtol=1e-6)
    named = Fixed(["a", "START", "stop"], np.log([0.5, 1e-30, 0.5]), begin_id=1, end_id=2)
    assert SourceReader(named, "it").vocabulary.words == [b"<unk>", b"a", b"<s>", b"</s>"]


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (Fixed(ln=[np.nan, 0, 0]), SourceError, "NaN or"),
        (Fixed(ln=[np.inf, 0, 0]), SourceError, "NaN or"),
        (Fixed(ln=LN + 1), SourceError, "sum to 2.71828; expected 1"),
        (Fixed(ln=[2.0, 1.0, -1.0]), SourceError, "softmax"),
        (Fixed(ln=LN[:2]), SourceError, r"returned shape \(1, 2\).*expected \(1, 3\)"),
        (Fixed(["<s>", "</s>"], [0.0, -np.inf]), SourceError, "all probability to the word that"),
        (Fixed(["x", "a", "b"]), ConfigError, "no </s>.*set end_id"),
        (Fixed(["x", "a", "</s>"], begin_id=None), ConfigError, "no <s>.*set begin_id"),
        (Fixed(end_id=3), ConfigError, "end_id of it is 3; its vocabulary has 3"),
        (Fixed(["</s>", "a", "a"]), ConfigError, "twice"),
        (Fixed(["</s>", "a", "b c"]), ConfigError, "'b c', which is not a word"),
        (Fixed(["</s>", "a", ""]), ConfigError, "'', which is not a word"),
    ],
)
def test_a_source_that_says_no_distribution_of_words_is_refused(
    source: Fixed, error: type[Exception], said: str
) -> None:
    """When it is opened: at the begin of a sentence."""
    with pytest.raises(error, match=said):
        SourceReader(source, "it")


def test_a_row_that_goes_wrong_later_ends_the_run(tmp_path: Path) -> None:
    """A NaN after some words is no count."""

    class Later(Fixed):
        def log_probs(self, prefixes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            given = super().log_probs(prefixes, lengths)
            given[lengths > 2, 1] = np.nan
            return given

    _, topology, _ = a_source(1, tmp_path, words="ab")
    with pytest.raises(SourceError, match="NaN"):
        distill_samples(Later(), topology, samples=50)


def test_prefixes_are_those_of_each_place(tmp_path: Path) -> None:
    """Whole histories in the source's ids; what is taken up from arrays goes on alike."""
    plain, _, _ = a_source(2, tmp_path)
    reader = SourceReader(PlainSource(plain), "it")
    words = reader.vocabulary
    histories = PrefixHistories(reader, 3)
    begin = words.begin_id
    histories.advance(np.array([begin] * 3, np.uint32), np.arange(3))
    histories.advance(words.ids_of(["a", "b"]), np.array([0, 2]))
    other = PrefixHistories(reader, 3)
    other.restore([array.copy() for array in histories.arrays()])
    for each in (histories, other):
        given, entropy = each.advance(
            np.array([words.id_of("c"), begin, words.id_of("d")], np.uint32), np.arange(3)
        )
        for row, history in enumerate((("<s>", "a", "c"), ("<s>",), ("<s>", "b", "d"))):
            after = plain.after(history)
            expected = [after.get(word.decode(), 0.0) for word in words.words]
            np.testing.assert_allclose(given[row], expected, atol=1e-6)
            positive = [p for p in expected if p > 0]
            assert entropy[row] == pytest.approx(-np.dot(positive, np.log(positive)), rel=1e-5)
    for _ in range(MOST_WORDS - 1):  # as long as a sentence may get
        histories.advance(words.ids_of(["a"]), np.array([1]))


def test_a_python_object_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class, a function that makes one, or the object itself."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_model.py").write_text(
        "class Model:\n"
        "    vocabulary = ['</s>', 'a']\n"
        "    def log_probs(self, prefixes, lengths): return None\n"
        "def make(): return Model()\n"
        "model = Model()\n"
        "class Other: vocabulary = []\n"
    )
    for name in ("my_model:Model", "my_model:make", "my_model:model"):
        assert is_object_name(name)
        assert list(load_object(name).vocabulary) == ["</s>", "a"]
    assert not any(map(is_object_name, ("model.arpa", "a:b.c d", ":x", "C:/x.arpa")))
    for name, said in (
        ("no_such_module:make", "no module no_such_module"),
        ("my_model:none", "has no none"),
        ("my_model:Other", "no log_probs"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_object(name)


def test_a_vocabulary_of_dlm_keeps_its_ids() -> None:
    """Nothing is renumbered; <unk> is predicted only if the model has it."""
    words = [b"<unk>", b"<s>", b"</s>", b"a"]
    ln = np.log(np.array([0.25, 1e-30, 0.25, 0.5]))
    for has_unk, first in ((True, [0.25, 0, 0.25, 0.5]), (False, [0, 0, 1 / 3, 2 / 3])):
        source = Fixed(Vocabulary(words, unk_in_model=has_unk), ln, begin_id=1)
        reader = SourceReader(source, "it")
        assert reader.vocabulary == source.vocabulary
        np.testing.assert_allclose(reader.first, first, atol=1e-6)
