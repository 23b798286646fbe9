"""Counted unigrams in a model: by the definition, context for context."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dlm.distill.fitting.topology import closed
from dlm.distill.fitting.unigrams import Unigrams, read_unigrams, with_unigrams
from dlm.errors import ConfigError, PrivacyError
from dlm.estimate.columns import ModelColumns
from dlm.ngram.backoff import DictModel
from dlm.record.counts_file import WordCounts, write_counts
from dlm.record.provenance import Guarantee, Provenance
from estimate.merge_models import normalised_model, read, worst_sum
from models import PlainModel

WORDS = list("abcdefgh")
COUNTED = {"b": 7.0, "zz": 5.0, "c": 4.0, "a": 2.0, "y": 1.0}
Table = dict[tuple[str, ...], tuple[float, float]]


def values_of(model: ModelColumns, folder: Path) -> tuple[Table, DictModel]:
    """P and backoff weight of each n-gram, from the model's file."""
    model.write(folder / "out.arpa")
    plain = DictModel.from_arpa(folder / "out.arpa")
    words = [word.decode() for word in plain.vocabulary.words]
    return {
        tuple(words[i] for i in ngram): (10.0 ** float(p), 10.0 ** float(b))
        for ngram, (p, b) in plain.ngrams.items()
    }, plain


def counted(record: Provenance | None = None) -> Unigrams:
    return Unigrams.of([w.encode() for w in COUNTED], np.array(list(COUNTED.values())), record)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_unigrams_are_replaced_and_all_backoff_weights_follow(
    tmp_path: Path, seed: int, order: int, weight: float
) -> None:
    """Each context by itself: it sums to 1, and the rest of it is spread as the shorter one has
    it. Words that were not counted keep what they had."""
    plain = normalised_model(seed, WORDS, order=order, missing_suffixes=False)
    model = closed(read(plain, tmp_path / "model.arpa")[0])
    old, _ = values_of(model, tmp_path)
    new, again = values_of(with_unigrams(model, counted(), weight), tmp_path)
    assert worst_sum(again) < 5e-6
    assert new.keys() == {*old, ("zz",), ("y",)}
    room = sum(old[w,][0] for w in COUNTED if (w,) in old)
    for (word, *more), (prob, _) in new.items():
        if more:
            assert prob == old[word, *more][0]
        elif word in COUNTED:
            own = old.get((word,), (0.0, 0.0))[0]
            wanted = (1 - weight) * own + weight * room * COUNTED[word] / sum(COUNTED.values())
            assert prob == pytest.approx(wanted, rel=1e-5)
        else:
            assert prob == pytest.approx(old[word,][0], rel=1e-6)

    def prob(context: tuple[str, ...], word: str) -> float:
        if (*context, word) in new:
            return new[*context, word][0]
        return new.get(context, (0.0, 1.0))[1] * prob(context[1:], word)

    changed = 0
    for context in new:
        listed = [n[-1] for n in new if n[:-1] == context and len(n) == len(context) + 1]
        if len(context) == order or not listed:
            continue
        left = 1 - math.fsum(new[*context, w][0] for w in listed)
        below = 1 - math.fsum(prob(context[1:], w) for w in listed)
        assert new[context][1] == pytest.approx(left / below, rel=3e-5)
        changed += new[context][1] != old[context][1]
    assert changed or order == 1


def test_words_are_split_over_spellings_and_marks_are_no_words(tmp_path: Path) -> None:
    """As the cased model has them where nothing was said before."""
    cased = PlainModel(
        2,
        {("<s>",): (-99.0, 0.0), ("</s>",): (-0.5, None), ("b",): (-1.0, 0.0)}
        | {("B",): (math.log10(0.3), 0.0), ("<s>", "B"): (-0.1, None), ("YY",): (-3.0, None)},
    )
    columns = ModelColumns.read(cased.write(tmp_path / "cap.arpa"))
    found = Unigrams.of([b"b", b"<unk>", b"yy", b"z"], np.array([0.4, 9.0, 0.5, 0.1]), None)
    assert found.words == [b"b", b"yy", b"z"]
    split = found.cased(columns)
    shares = dict(zip(split.words, split.shares.tolist(), strict=True))
    assert shares == pytest.approx({b"b": 0.1, b"B": 0.3, b"YY": 0.5, b"z": 0.1})


def test_counts_keep_their_record(tmp_path: Path) -> None:
    """That of the file beside them; somebody's word, or none."""
    path = tmp_path / "counts.tsv"
    path.write_text("b\t3\na\t1\n")
    assert read_unigrams(path).record is None
    said = read_unigrams(path, "ACME").record
    assert said is not None
    assert said.is_public
    given = Provenance(Guarantee(1.0, 1e-6, 0.1), stages=({"stage": "unigrams"},))
    write_counts(path, WordCounts(("b", "a"), np.array([3.0, 1.0]), given))
    found = read_unigrams(path, "ACME")
    assert found.words == [b"b", b"a"]
    assert found.shares.tolist() == [0.75, 0.25]
    assert found.record is not None
    assert found.record.guarantee == given.guarantee
    bare = tmp_path / "bare.tsv"
    bare.write_text("b\t3\n")
    (tmp_path / "bare.tsv.ledger.json").write_text("{}")
    with pytest.raises(PrivacyError, match="comes from users"):
        read_unigrams(bare, "ACME")


def test_unigrams_of_other_words_are_refused(tmp_path: Path) -> None:
    """A model of other words, or in other spelling."""
    model = closed(read(normalised_model(1, WORDS, order=2), tmp_path / "model.arpa")[0])
    with pytest.raises(ConfigError, match="none of the 1 words"):
        with_unigrams(model, Unigrams.of([b"A"], np.ones(1), None))
