"""dlm.server.answers: one call checks and searches, beside the checks that say what is wrong."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from dlm.errors import ProtocolError
from dlm.index.search.shard import Shard
from dlm.ngram.query import QueryGroups
from dlm.server.answers import Answerer
from dlm.server.refusals import Refusal
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason
from server.calls import seal


@pytest.fixture(scope="module")
def shard(sharded) -> Shard:
    """Shard 0."""
    return Shard.open(sharded.directory, 0)


@pytest.fixture(scope="module")
def answerer(sharded, shard) -> Answerer:
    """Of it; takes messages of shard 0 alone."""

    def require_same(shard_set: bytes, index: int) -> None:
        if (shard_set, index) != (sharded.manifest.shard_set_bytes, 0):
            raise Refusal(Reason.WRONG_SHARD, "another shard")

    return Answerer(shard, 1 << 16, require_same, time.monotonic)


def arrays(groups: QueryGroups) -> list[np.ndarray]:
    """The five, as `Shard.score_owned` is given them."""
    g = groups
    return [g.context_lengths, g.context_words, g.pairs, g.word_counts, g.words]


def questions(sharded, size: int, seed: int = 0) -> QueryGroups:
    """Queries of `size` contexts of shard 0."""
    asked = sharded.questions.ask(np.random.default_rng(seed), 0, size)
    return codec.decode_score_request(asked.data, max_queries=1 << 16).groups


def is_in_order(answerer: Answerer, groups: QueryGroups) -> bool:
    """By the checks that say what is wrong."""
    try:
        codec.check_counts(groups)
        codec.check_pairs(groups.pairs, len(groups.context_lengths))
        answerer.check(groups)
    except (ProtocolError, Refusal):
        return False
    return True


@pytest.mark.parametrize("times", [1500, pytest.param(6000, marks=pytest.mark.slow)])
def test_one_call_refuses_what_the_checks_refuse_and_nothing_else(
    sharded, shard, answerer, times: int
) -> None:
    """Each array with values changed, cut off and repeated; at the edges of all types."""
    rng = random.Random(5)
    edges = [0, 1, 2, 3, 4, 15, 16, 59, 60, 61, 62, 63, 255, 2**31 - 1, 2**31, 2**32 - 1]
    seen = {True: 0, False: 0}
    for number in range(times):
        broken = arrays(questions(sharded, rng.choice([1, 2, 5]), number % 40))
        for _ in range(rng.choice([0, 1, 1, 2])):
            place = rng.randrange(5)
            array = broken[place].copy()
            kind = rng.randrange(6)
            at = rng.randrange(len(array)) if len(array) else 0
            if kind == 0:
                array = array[:at]
            elif kind == 1:
                array = np.concatenate([array, array[at:]])
            elif len(array):
                value = rng.choice(edges) if kind < 5 else int(array[rng.randrange(len(array))])
                array[at] = value & (2 ** (8 * array.itemsize) - 1)
            broken[place] = array
        good = is_in_order(answerer, QueryGroups(*broken[:2], *broken[3:], broken[2]))
        assert (shard.score_owned(*broken) is not None) == good, broken
        seen[good] += 1
    assert min(seen.values()) > times / 12


def test_counts_that_wrap_to_the_right_total_are_refused(sharded, shard) -> None:
    """2^32 words asked too many are not none."""
    groups = questions(sharded, 2)
    counts = groups.word_counts.copy()
    with np.errstate(over="ignore"):
        counts[0] -= np.uint32(counts[0] + 1)
    wrapped = arrays(replace(groups, word_counts=counts))
    assert shard.score_owned(*wrapped) is None


@pytest.mark.parametrize(("field", "value"), [("shard_set", bytes(16)), ("shard", 2)])
def test_a_message_for_another_shard_is_not_searched(
    sharded, answerer, monkeypatch, field, value, asked
) -> None:
    """Whatever its queries are."""
    message = pb.ScoreRequest.FromString(asked.data)
    setattr(message, field, value)
    monkeypatch.setattr(Shard, "score_owned", lambda *_: pytest.fail("it was searched"))
    with pytest.raises(Refusal) as caught:
        answerer.score(pb.ScoreRequest.FromString(seal(message)), None)
    assert caught.value.reason is Reason.WRONG_SHARD


def test_a_fault_that_only_one_of_both_finds_is_one_of_ours(sharded, answerer, monkeypatch) -> None:
    """It becomes INTERNAL, and never an answer."""
    asked = sharded.questions.ask(np.random.default_rng(2), 0)
    monkeypatch.setattr(Shard, "score_owned", lambda *_: None)
    with pytest.raises(AssertionError, match="one check"):
        answerer.score(pb.ScoreRequest.FromString(asked.data), None)
