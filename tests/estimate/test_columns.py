"""A model as sorted arrays: the n-grams of its file, in prefix order, with links that hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ArpaError, ConfigError
from dlm.estimate.columns import MISSING, ModelColumns, memory_bytes
from dlm.ngram.backoff import DictModel
from models import HAND_MADE, random_model

MODELS = {
    **HAND_MADE,
    **{f"random{seed}": random_model(seed, order=2 + seed % 5, per_order=60) for seed in range(5)},
    "no_unk": random_model(50, unk=False),
    "one_order": random_model(51, order=1),
    "long": random_model(52, order=7, words=3, per_order=200),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_columns_hold_the_ngrams_of_the_file_in_prefix_order(name: str, tmp_path: Path) -> None:
    """Against the plain dictionary, links included."""
    path = MODELS[name].write(tmp_path / "m.arpa")
    oracle = DictModel.from_arpa(path)
    model = ModelColumns.read(path)
    assert model.vocabulary == oracle.vocabulary
    assert model.order == oracle.order
    assert sum(model.counts) == len(oracle.ngrams)
    rows = [
        {ngram: row for row, ngram in enumerate(map(tuple, columns.ids.tolist()))}
        for columns in model.orders
    ]
    for k, columns in enumerate(model.orders, 1):
        assert list(rows[k - 1]) == sorted(rows[k - 1])
        assert set(rows[k - 1]) == {n for n in oracle.ngrams if len(n) == k} | (
            {(0,)} if k == 1 else set()
        )
        for row, ngram in enumerate(map(tuple, columns.ids.tolist())):
            if ngram in oracle.ngrams:
                found = (columns.log10_prob[row], columns.log10_backoff[row])
                assert found == oracle.ngrams[ngram]
            if k > 1:
                assert columns.prefix[row] == rows[k - 2][ngram[:-1]]
                assert columns.suffix[row] == rows[k - 2].get(ngram[1:], int(MISSING))
            begin, end = columns.first_child[row : row + 2].tolist()
            children = [] if k == model.order else model.orders[k].ids[begin:end].tolist()
            want = [n for n in sorted(oracle.ngrams) if len(n) == k + 1 and n[:-1] == ngram]
            assert [tuple(n) for n in children] == want


def test_a_selection_is_the_model_of_the_ngrams_kept(tmp_path: Path) -> None:
    """As if its file had held no others."""
    rng = np.random.default_rng(1)
    for seed in range(8):
        model = ModelColumns.read(random_model(seed, order=4).write(tmp_path / "m.arpa"))
        keep: list[np.ndarray | None] = [None]
        for columns in model.orders[1:]:
            kept = rng.random(len(columns)) < 0.6
            if keep[-1] is not None:
                kept &= keep[-1][columns.prefix]
            keep.append(kept)
        part = model.select(keep)
        part.write(tmp_path / "part.arpa")
        again = ModelColumns.read(tmp_path / "part.arpa")
        for ours, theirs in zip(part.orders, again.orders, strict=True):
            for column in ("ids", "log10_prob", "log10_backoff", "prefix", "suffix", "first_child"):
                assert np.array_equal(getattr(ours, column), getattr(theirs, column)), column


def test_a_selection_without_a_prefix_is_refused(tmp_path: Path) -> None:
    """No model may hold an n-gram whose prefix it lacks."""
    model = ModelColumns.read(random_model(3, order=3).write(tmp_path / "m.arpa"))
    nothing = np.zeros(len(model.orders[1]), bool)
    with pytest.raises(ValueError, match=r"3-gram .*prefix"):
        model.select([None, nothing, None])
    with pytest.raises(ValueError, match="every word"):
        model.select([np.zeros(len(model.orders[0]), bool), None, None])


def test_ngrams_in_any_order_make_the_same_model(tmp_path: Path) -> None:
    """From arrays as from a file."""
    model = ModelColumns.read(random_model(4, order=5, per_order=200).write(tmp_path / "m.arpa"))
    rng = np.random.default_rng(2)
    sections = []
    for columns in model.orders:
        place = rng.permutation(len(columns))
        sections.append(
            (columns.ids[place], columns.log10_prob[place], columns.log10_backoff[place])
        )
    again = ModelColumns.of(model.vocabulary, sections)
    for ours, theirs in zip(model.orders, again.orders, strict=True):
        for column in ("ids", "log10_prob", "log10_backoff", "prefix", "suffix", "first_child"):
            assert np.array_equal(getattr(ours, column), getattr(theirs, column)), column
    with pytest.raises(ValueError, match="id 99 "):
        ModelColumns.of(model.vocabulary, [(np.full((1, 1), 99, np.uint32), *sections[0][1:])])


def test_a_missing_prefix_is_refused_with_its_place(tmp_path: Path) -> None:
    """The line of the n-gram, not of the prefix that is not there."""
    model = HAND_MADE["weight_without_continuation"]
    text = model.arpa().replace("ngram 3=1", "ngram 3=2")
    text = text.replace("\\3-grams:", "\\3-grams:\n-0.5\td a b", 1)
    path = tmp_path / "m.arpa"
    path.write_text(text)
    with pytest.raises(ArpaError, match="3-gram 'd a b'") as caught:
        ModelColumns.read(path)
    assert caught.value.order == 3
    assert text.splitlines()[caught.value.line - 1] == "-0.5\td a b"


def test_an_ngram_that_stands_twice_is_refused_with_its_place(tmp_path: Path) -> None:
    """The second of the two lines."""
    text = HAND_MADE["weight_without_continuation"].arpa().replace("ngram 2=3", "ngram 2=4")
    lines = text.splitlines()
    end = lines.index("\\3-grams:") - 1
    lines.insert(end, "-0.5\ta b")
    path = tmp_path / "m.arpa"
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(ArpaError, match=r"2-gram 'a b' .*twice") as caught:
        ModelColumns.read(path)
    assert caught.value.line == end + 1
    with pytest.raises(ArpaError, match="listed twice"):
        model = ModelColumns.read(HAND_MADE["weight_without_continuation"].write(path))
        two = model.orders[1]
        twice = [np.concatenate([c, c]) for c in (two.ids, two.log10_prob, two.log10_backoff)]
        one = model.orders[0]
        ModelColumns.of(
            model.vocabulary,
            [(one.ids, one.log10_prob, one.log10_backoff), (twice[0], twice[1], twice[2])],
        )


def test_a_limit_of_memory_is_checked_before_the_ngrams_are_read(tmp_path: Path) -> None:
    """By the counts of the header, which also catches a header that lies."""
    path = random_model(5).write(tmp_path / "m.arpa")
    needed = memory_bytes(ModelColumns.read(path).counts)
    ModelColumns.read(path, memory_bytes=needed)
    with pytest.raises(ConfigError, match="raise --memory"):
        ModelColumns.read(path, memory_bytes=needed - 1)
