"""A model reduced to a vocabulary: what is kept, what it scores, and what it sums to."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest

from dlm.errors import ArpaError, ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.filter import filter_arpa, kept_words, read_words, renormalised
from dlm.ngram.arpa import ArpaReader, write_arpa
from dlm.ngram.backoff import DictModel
from estimate.merge_models import normalised_model, worst_sum
from models import PlainModel, random_model

WORDS = [f"w{i}" for i in range(9)]
KEPT = {b"w1", b"w2", b"w5", b"w8", b"absent"}


def is_tag(word: bytes) -> bool:
    return word.startswith(b"<") and word.endswith(b">")


def by_words(path: Path) -> dict[tuple[bytes, ...], tuple[bytes, bytes]]:
    """n-gram -> the bits of its values."""
    model = DictModel.from_arpa(path)
    return {
        tuple(model.vocabulary.words[i] for i in ngram): (prob.tobytes(), backoff.tobytes())
        for ngram, (prob, backoff) in model.ngrams.items()
    }


@pytest.mark.parametrize("contexts", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_ngrams_of_the_vocabulary_are_kept_with_their_bits(
    seed: int, contexts: bool, tmp_path: Path
) -> None:
    """All words in it, or all but the last; marks always; in the order of the file."""
    model = random_model(seed, words=9, per_order=60, order=1 + seed % 4, unk=seed % 3 > 0)
    source = model.write(tmp_path / "model.arpa")
    found = filter_arpa(source, tmp_path / "out.arpa", KEPT, contexts=contexts)
    before = by_words(source)
    expected = {
        ngram: values
        for ngram, values in before.items()
        if all(w in KEPT or is_tag(w) for w in (ngram[:-1] if contexts else ngram))
    }
    after = by_words(tmp_path / "out.arpa")
    assert after == expected
    assert list(after) == [ngram for ngram in before if ngram in expected]
    assert sum(found.counts) == len(expected)
    assert found.words_missing == 1
    with ArpaReader(tmp_path / "out.arpa") as reader:
        assert tuple(reader.counts) == found.counts


def test_the_output_is_that_of_kenlms_filter(tmp_path: Path) -> None:
    """`filter single` and `filter single context`, byte for byte but for the numbers' digits."""
    binary = os.environ.get("DLM_KENLM_FILTER")
    if not binary:
        pytest.skip("name KenLM's program `filter` in DLM_KENLM_FILTER to compare with it")
    source = normalised_model(4, [*WORDS, "<tag>"], order=4).write(tmp_path / "model.arpa")
    for contexts in (False, True):
        filter_arpa(source, tmp_path / "ours.arpa", KEPT, contexts=contexts)
        kind = ["context"] if contexts else []
        subprocess.run(
            [binary, "single", *kind, f"model:{source}", str(tmp_path / "theirs.arpa")],
            input=b"\n".join(KEPT),
            check=True,
            capture_output=True,
        )
        assert by_words(tmp_path / "ours.arpa") == by_words(tmp_path / "theirs.arpa")


@pytest.mark.parametrize("missing_suffixes", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_renormalised_is_the_model_given_that_words_are_of_the_vocabulary(
    seed: int, missing_suffixes: bool, tmp_path: Path
) -> None:
    """P(w | h) over its sum, for every context and word; and every context sums to 1."""
    plain = normalised_model(
        seed, WORDS, order=1 + seed % 4, missing_suffixes=missing_suffixes, unk=seed % 3 > 0
    )
    source = plain.write(tmp_path / "model.arpa")
    vocabulary, sections, missing = renormalised(ModelColumns.read(source), KEPT)
    assert missing == 1
    write_arpa(tmp_path / "out.arpa", vocabulary, sections)
    whole, small = DictModel.from_arpa(source), DictModel.from_arpa(tmp_path / "out.arpa")
    assert worst_sum(small) < 1e-6
    filter_arpa(source, tmp_path / "plain.arpa", KEPT)
    assert set(by_words(tmp_path / "out.arpa")) == set(by_words(tmp_path / "plain.arpa"))
    known = [w for w in small.vocabulary.words if w != b"<s>" and w in whole.vocabulary.ids]
    if not small.vocabulary.unk_in_model:
        known.remove(b"<unk>")
    for context in [(), *(n for n in small.ngrams if len(n) < small.order)]:
        words = [small.vocabulary.words[i] for i in context]
        ids = [whole.vocabulary.id_of(w) for w in words]
        probs = {w: 10.0 ** float(whole.score(ids, whole.vocabulary.id_of(w)).log10_prob)
                 for w in known}  # fmt: skip
        total = math.fsum(probs.values())
        for w in known:
            found = 10.0 ** float(small.score(context, small.vocabulary.id_of(w)).log10_prob)
            assert math.isclose(found, probs[w] / total, rel_tol=5e-6), (words, w)


def test_a_vocabulary_without_a_word_of_the_model_is_refused(tmp_path: Path) -> None:
    """Marks are none of its words; nothing is left behind."""
    source = normalised_model(6, WORDS).write(tmp_path / "model.arpa")
    for words in (set(), {b"W1", b"never"}, {b"</s>", b"<unk>"}):
        with pytest.raises(ConfigError, match=r"model\.arpa .*vocabulary"):
            filter_arpa(source, tmp_path / "out.arpa", words)
        with pytest.raises(ConfigError, match="vocabulary"):
            renormalised(ModelColumns.read(source), words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.arpa"]


def test_a_damaged_model_leaves_the_old_output(tmp_path: Path) -> None:
    """The file is read to its end before anything is put in its place."""
    text = normalised_model(7, WORDS).arpa()
    (tmp_path / "cut.arpa").write_text(text[: len(text) * 2 // 3])
    (tmp_path / "out.arpa").write_text("old")
    with pytest.raises(ArpaError, match="truncated"):
        filter_arpa(tmp_path / "cut.arpa", tmp_path / "out.arpa", KEPT)
    assert (tmp_path / "out.arpa").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ConfigError, match=f"{tmp_path}/no .*--tmp"):
        filter_arpa(tmp_path / "cut.arpa", tmp_path / "out.arpa", KEPT, tmp=tmp_path / "no")


def test_words_are_read_between_white_space(tmp_path: Path) -> None:
    """In lines or not; bytes that are no UTF-8 are words too."""
    (tmp_path / "words").write_bytes(b"a b\n\ncaf\xe9\tb\r\n")
    assert read_words(tmp_path / "words") == {b"a", b"b", b"caf\xe9"}


def test_words_in_angle_brackets_are_kept(tmp_path: Path) -> None:
    """As KenLM takes them for tags."""
    model = PlainModel(1, {(w,): (-1.0, None) for w in ("<s>", "</s>", "<noise>", "a", "b", "<")})
    vocabulary = DictModel.from_arpa(model.write(tmp_path / "m.arpa")).vocabulary
    keep, _ = kept_words(vocabulary, {b"a"}, "m.arpa")
    kept = {w for w, k in zip(vocabulary.words, keep.tolist(), strict=True) if k}
    assert kept == {b"<unk>", b"<s>", b"</s>", b"<noise>", b"a"}
