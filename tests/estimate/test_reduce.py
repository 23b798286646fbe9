"""A model without its highest orders says, after short contexts, what it said before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ConfigError
from dlm.estimate.reduce import needed_bytes, reduce_arpa
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.backoff import DictModel
from models import HAND_MADE, PlainModel, random_model
from normalised import read_plain

MODELS = {
    **HAND_MADE,
    "random": random_model(1, order=5),
    "no unk": random_model(2, order=3, unk=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_reduced_model_scores_as_the_whole_does_after_short_contexts(
    name: str, tmp_path: Path
) -> None:
    """To the bit, for each order and contexts of fewer words than it."""
    path = MODELS[name].write(tmp_path / "m.arpa")
    whole = DictModel.from_arpa(path)
    rng = np.random.default_rng(0)
    for order in range(1, whole.order + 1):
        result = reduce_arpa(path, order, tmp_path / "r.arpa", comment="reduced")
        part = DictModel.from_arpa(tmp_path / "r.arpa")
        assert part.vocabulary == whole.vocabulary
        assert part.order == order == len(result.counts)
        assert sum(result.counts) == len(part.ngrams)
        assert result.counts == result.counts_before[:order]
        for _ in range(100):
            *context, word = rng.integers(0, len(whole.vocabulary), rng.integers(1, order + 1))
            before, after = whole.score(context, word), part.score(context, word)
            assert before.log10_prob.tobytes() == after.log10_prob.tobytes()
            assert before.matched_order == after.matched_order
        with ArpaReader(tmp_path / "r.arpa") as reader:
            assert reader.comments[-1] == "reduced"


def test_what_lies_above_the_order_is_not_read(tmp_path: Path) -> None:
    """A fault there is no fault of what is written."""
    text = random_model(1, order=3).arpa()
    path = tmp_path / "m.arpa"
    path.write_text(text[: text.index("\\3-grams:")] + "\\3-grams:\nno number\n")
    reduce_arpa(path, 2, tmp_path / "r.arpa")
    assert DictModel.from_arpa(tmp_path / "r.arpa").order == 2


def test_words_in_any_order_keep_their_ngrams(tmp_path: Path) -> None:
    """Where the unknown word is not the first."""
    model = PlainModel(
        2,
        {
            ("a",): (-1.0, -0.5),
            ("<s>",): (-99.0, -0.25),
            ("<unk>",): (-2.0, None),
            ("</s>",): (-1.5, None),
            ("a", "</s>"): (-0.5, None),
        },
    )
    path = model.write(tmp_path / "m.arpa")
    reduce_arpa(path, 2, tmp_path / "r.arpa")
    assert read_plain(tmp_path / "r.arpa").ngrams.keys() == model.ngrams.keys()
    assert read_plain(tmp_path / "r.arpa").ngrams[("a",)] == (-1.0, -0.5)


def test_orders_and_memory_are_checked_first(tmp_path: Path) -> None:
    """And nothing is written."""
    path = random_model(1, order=3).write(tmp_path / "m.arpa")
    for order in (0, 4):
        with pytest.raises(ConfigError, match="1 to 3"):
            reduce_arpa(path, order, tmp_path / "r.arpa")
    with ArpaReader(path) as reader:
        needed = needed_bytes(reader.counts[:2])
    with pytest.raises(ConfigError, match="raise --memory"):
        reduce_arpa(path, 2, tmp_path / "r.arpa", memory_bytes=needed - 1)
    assert not (tmp_path / "r.arpa").exists()
    reduce_arpa(path, 2, tmp_path / "r.arpa", memory_bytes=needed)
