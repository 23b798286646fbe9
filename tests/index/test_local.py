"""A query needs one shard at most, and the bit of its pair says whether it needs that one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import QueryError
from dlm.index.making import build_shard_set
from dlm.index.search.local import LocalModel
from dlm.index.search.shard import run_kernel
from dlm.ngram.backoff import DictModel
from dlm.ngram.query import QueryGroups
from models import build, queries, random_model

SHARDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with missing suffixes, in four shards."""
    path = tmp_path_factory.mktemp("local")
    build(random_model(11, order=5, words=10, per_order=120), path, SHARDS)
    return path


def groups_of(asked: tuple[np.ndarray, np.ndarray, np.ndarray]) -> QueryGroups:
    """The same queries, a group each."""
    contexts, lengths, words = asked
    reached = np.arange(contexts.shape[1]) >= contexts.shape[1] - lengths[:, None].astype(int)
    return QueryGroups(lengths, contexts[reached], np.ones(len(words), np.uint32), words)


def test_where_the_bit_says_nothing_is_stored_the_low_orders_answer_exactly(folder: Path) -> None:
    """And it says so for some queries and not for others."""
    local = LocalModel.open(folder / "set")
    oracle = DictModel.from_arpa(folder / "model.arpa")
    contexts, lengths, words = asked = queries(oracle, 3000)
    answers, needs_shard = run_kernel(local.low.view, local.order, groups_of(asked))
    here = needs_shard == 0
    assert here[lengths >= 2].any()
    assert (needs_shard == 1).any()
    for q in np.flatnonzero(here):
        context = contexts[q, contexts.shape[1] - lengths[q] :].tolist()
        expected = oracle.score(context, int(words[q]))
        assert answers.log10_prob[q].tobytes() == expected.log10_prob.tobytes()
        assert answers.state_length[q] == expected.state_length


@pytest.mark.parametrize("shards", [1, SHARDS])
def test_words_that_share_a_context_score_as_each_alone(
    shards: int, folder: Path, tmp_path: Path
) -> None:
    """Groups of no word, of one and of hundreds, and contexts of every length."""
    source = folder / "set"
    if shards == 1:
        build_shard_set(folder / "model.arpa", tmp_path / "one", 1)
        source = tmp_path / "one"
    local = LocalModel.open(source)
    contexts, lengths, _ = queries(DictModel.from_arpa(folder / "model.arpa"), 300)
    rng = np.random.default_rng(2)
    counts = rng.choice([0, 1, 2, 70, 300], len(lengths)).astype(np.uint32)
    words = rng.integers(0, len(local.vocabulary), counts.sum()).astype(np.uint32)
    reached = np.arange(contexts.shape[1]) >= contexts.shape[1] - lengths[:, None].astype(int)
    found = local.score_groups(QueryGroups(lengths, contexts[reached], counts, words))
    each = np.repeat(np.arange(len(lengths)), counts)
    expected = local.score(contexts[each], lengths[each], words)
    for column in ("log10_prob", "matched_order", "ngram_length", "state_length"):
        assert getattr(found, column).tobytes() == getattr(expected, column).tobytes()


GOOD = np.zeros((2, 4), np.uint32), np.zeros(2, np.uint8), np.zeros(2, np.uint32)


@pytest.mark.parametrize(
    "asked",
    [
        (GOOD[0][:, 1:], GOOD[1], GOOD[2]),
        (GOOD[0][:1], GOOD[1], GOOD[2]),
        (GOOD[0].astype(np.int64), GOOD[1], GOOD[2]),
        (GOOD[0], GOOD[1].astype(np.uint32), GOOD[2]),
        (GOOD[0], GOOD[1], GOOD[2].astype(np.int64)),
        (GOOD[0], GOOD[1][:1], GOOD[2]),
        (GOOD[0], GOOD[1] + np.uint8(5), GOOD[2]),
        (GOOD[0], GOOD[1], GOOD[2] + np.uint32(10_000)),
        (GOOD[0] + np.uint32(0xFFFFFFFF), GOOD[1] + np.uint8(4), GOOD[2]),
    ],
)
def test_a_query_that_no_model_could_answer_is_refused(
    folder: Path, asked: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """A shape, a type, a length or an id is wrong; the kernel never sees it."""
    local = LocalModel.open(folder / "set")
    assert len(local.score(*GOOD)) == 2
    with pytest.raises(QueryError):
        local.score(*asked)


def test_groups_that_do_not_fit_are_refused(folder: Path) -> None:
    """Lengths, types, ids and sums are checked before the kernel sees them."""
    local = LocalModel.open(folder / "set")

    def groups(
        lengths: list[int], context: list[int], counts: list[int], words: list[int]
    ) -> QueryGroups:
        return QueryGroups(
            np.array(lengths, np.uint8),
            np.array(context, np.uint32),
            np.array(counts, np.uint32),
            np.array(words, np.uint32),
        )

    local.score_groups(groups([2, 4], [1, 2, 1, 2, 3, 4], [1, 2], [5, 6, 7]))
    for bad in (
        groups([5], [1, 2, 3, 4, 5], [1], [5]),
        groups([2], [1, 99], [1], [5]),
        groups([2], [1, 2], [1], [99]),
        groups([2], [1, 2, 3], [1], [5]),
        groups([2], [1, 2], [2], [5]),
        groups([2], [1, 2], [1, 1], [5, 5]),
        groups([2], [1, 2], [0xFFFFFFFF], [5]),
    ):
        with pytest.raises(QueryError):
            local.score_groups(bad)
    wrong = groups([2], [1, 2], [1], [5])
    with pytest.raises(QueryError, match="int64"):
        local.score_groups(dataclasses.replace(wrong, words=wrong.words.astype(np.int64)))
