"""A user's own model as a source: its words, its answers, and what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.plain import PlainSource, a_source
from dlm.distill.sampled import distill_samples
from dlm.distill.sources.source import (
    MOST_WORDS,
    PrefixHistories,
    SourceReader,
    UserSource,
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
        (Fixed(["<s>", "</s>"], [0.0, -np.inf]), SourceError, "all probability to"),
        (Fixed(["x", "a", "b"]), ConfigError, "no </s>.*set end_id"),
        (Fixed(["x", "a", "</s>"], begin_id=None), ConfigError, "no <s>.*set begin_id"),
        (Fixed(end_id=3), ConfigError, "end_id of it is 3; expected an id from 0 to 2"),
        (Fixed(begin_id="<s>"), ConfigError, "begin_id of it is '<s>'; expected an id"),
        (Fixed(end_id=0.5), ConfigError, "end_id of it is 0.5; expected an id"),
        (Fixed({"</s>": 0, "a": 2, "b": 1}), ConfigError, r"expected a list.*sorted\(ids, key"),
        (Fixed("ab"), ConfigError, "is 'ab'; expected a list"),
        (Fixed(None), ConfigError, "is None; expected a list"),
        (Fixed([]), ConfigError, r"is \[\]; expected a list"),
        (Fixed([0, 1, 2]), ConfigError, "is list of int; expected a list"),
        (Fixed(ln=LN.astype(complex)), SourceError, "complex128"),
        (Fixed(ln=["x", "y", "z"]), SourceError, "<U1"),
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


class Told:
    """Histories that say the same of all."""

    def __init__(self, given: Any, entropy: Any = 0.0, kind: Any = np.float32) -> None:
        self.given, self.entropy, self.kind = given, entropy, kind

    def __call__(self, places: int) -> Told:
        return self

    def advance(self, words: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `Histories` has it."""
        given = np.tile(np.array(self.given, self.kind), (len(places), 1))
        return given, np.full(len(places), self.entropy, np.float32)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"histories": Told([0.5, 0.5])}, r"returned float32 \(1, 2\).*expected float32 \(1, 5\)"),
        ({"histories": Told([0, 0.5, 0.5, 0, 0], kind=np.float64)}, "returned float64"),
        ({"histories": Told([0, 0.5, 0, 0, 0.5])}, "give a probability to <s>"),
        ({"histories": Told([0, 2, -1, 0, 0])}, "gives a probability of -1"),
        ({"sample": lambda seed, n: None}, "0 sentences"),
        ({"sample": lambda seed, n: ["ab"] * n}, r"<U2 .*\(\)"),
        ({"sample": lambda seed, n: [[1.5]] * n}, "float64"),
        ({"visits": lambda samples, seed: [1, 2]}, "visits of it yielded a int"),
    ],
)
def test_what_a_source_says_in_its_own_way_is_checked(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    """Shapes, types and bounds: compiled code takes them as they are."""
    _, topology, _ = a_source(1, tmp_path, words="ab")
    with pytest.raises(SourceError, match=said):
        distill_samples(UserSource(Fixed(**more), "it"), topology, samples=1)


def test_what_a_users_code_raises_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At import, when it is made, and when it is asked; an exit is no end in silence."""
    monkeypatch.syspath_prepend(tmp_path)
    lines = [
        "class Model:",
        "    vocabulary, begin_id, end_id = ['</s>', 'a'], 0, 0",
        "    def log_probs(self, prefixes, lengths): raise RuntimeError('out of memory')",
        "def make(): raise KeyError('weights')",
    ]
    (tmp_path / "raising.py").write_text("\n".join(lines))
    (tmp_path / "ending.py").write_text("raise SystemExit(0)")
    (tmp_path / "broken.py").write_text("def f(:")
    for name, said, place in (
        ("raising:make", "raising:make raised KeyError: 'weights'", "raising.py, line 4, make"),
        ("ending:f", "import of ending raised SystemExit", "ending.py, line 1"),
        ("broken:f", "import of broken raised SyntaxError.*broken.py, line 1", ""),
    ):
        with pytest.raises(SourceError, match=said) as raised:
            load_object(name)
        notes = "".join(getattr(raised.value, "__notes__", []))
        assert place in notes
    source = load_object("raising:Model")
    assert not hasattr(source, "sample")
    with pytest.raises(SourceError, match="log_probs of raising:Model raised RuntimeError") as met:
        SourceReader(source, "it")
    assert "raising.py, line 3, log_probs" in met.value.__notes__[0]


def test_prefixes_are_those_of_each_place(tmp_path: Path) -> None:
    """Whole histories in the source's ids."""
    plain, _, _ = a_source(2, tmp_path)
    reader = SourceReader(PlainSource(plain), "it")
    words = reader.vocabulary
    histories = PrefixHistories(reader, 3)
    begin = words.begin_id
    histories.advance(np.array([begin] * 3, np.uint32), np.arange(3))
    histories.advance(words.ids_of(["a", "b"]), np.array([0, 2]))
    given, entropy = histories.advance(
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
        ("no_such_module:make", "no module named no_such_module"),
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
