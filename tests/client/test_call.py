"""A call whose parts end in any order, some of them twice: each answer is of who came first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from client.questions import queries_to, submit
from client.scripted import Network
from client.test_partial import assert_each_is_of_its_model
from cluster import WAIT_S, Cluster, until
from dlm.client import partial, router
from dlm.client.call import Call
from dlm.errors import DeadlineExceeded, ShardDown, StaleShardSet
from dlm.ngram.query import FULL, PARTIAL, Answers

GONE = ShardDown("gone")


def answers_of(value: float, count: int) -> Answers:
    """Answers that can be told from others."""
    some = np.full(count, 3, np.uint8)
    return Answers(np.full(count, value, np.float32), some, some, some)


@pytest.mark.parametrize("seed", range(40))
def test_each_query_has_the_answer_of_who_came_first(client, files, seed: int) -> None:
    """Pieces that are answered, missed or given up, once or several times; never half a call."""
    rng = random.Random(seed)
    grams = client._core.snapshot().grams
    longest = sorted(n for n in files.oracle.ngrams if len(n) == 4)
    context_words = np.array([n[:3] for n in longest[:30]], np.uint32)
    count = len(context_words)
    groups = router.group(
        context_words,
        np.full(count, 3, np.uint8),
        np.full(count, 2, np.uint32),
        np.array([rng.randrange(60) for _ in range(2 * count)], np.uint32),
    ).groups
    answers, remote = grams.score(groups)
    assert remote.all()
    queries = len(groups.words)
    place = np.arange(queries, dtype=np.int64)
    call = Call("model", answers, groups, remote, place, 0.0)
    call.fall_back(grams)
    slots = np.array([rng.randrange(4) for _ in range(4096)], np.uint16)
    pieces = router.route(groups, remote, slots, 4, rng.choice([7, 1000]))
    expected: dict[int, float] = {}  # the value of who came first; 0 for the partial model
    events = [at for at in range(len(pieces)) for _ in range(rng.choice([1, 1, 2, 3]))]
    rng.shuffle(events)
    for number, at in enumerate(events, 1):
        piece = pieces[at]
        assert call.future.done() == (len(expected) == queries)
        assert call.unanswered == queries - len(expected)
        awaited = [q for q in piece.at.tolist() if q not in expected]
        kind = rng.choice(["fill", "fill", "miss"])
        if kind == "fill":
            size = len(piece.at)
            call.fill(piece.at, np.arange(size), answers_of(float(number), size))
        else:
            assert call.miss(piece, GONE) == len(awaited)
        expected |= dict.fromkeys(awaited, float(number) if kind == "fill" else 0.0)
        if rng.random() < 0.05:
            missing = set(range(queries)).difference(expected)
            assert call.give_up(DeadlineExceeded("late")) == len(missing)
            expected |= dict.fromkeys(missing, 0.0)
    result = call.future.result(0)
    source = np.zeros(queries, np.uint8) if result.source is None else result.source
    for at, value in expected.items():
        assert source[at] == (FULL if value else PARTIAL)
        if value:
            assert result.log10_prob[at] == value


class Slow(Call):
    """Whoever brings the last answer does not come to tell the caller, for now."""

    __slots__ = ("told",)

    def succeed(self) -> None:
        """The first time, nothing."""
        if hasattr(self, "told"):
            super().succeed()
        self.told = True


@pytest.mark.parametrize("when", ["before", "while the partial model scores"])
def test_who_gives_up_what_is_answered_gets_the_answers(client, files, monkeypatch, when) -> None:
    """The last answer came at the deadline, and no error takes its place."""
    grams = client._core.snapshot().grams
    (context, word) = queries_to(files, 0)[0]
    groups = router.group(
        np.array([context], np.uint32),
        np.array([3], np.uint8),
        np.array([1], np.uint32),
        np.array([word], np.uint32),
    ).groups
    answers, remote = grams.score(groups)
    only = np.zeros(1, np.int64)
    call = Slow("model", answers, groups, remote, only, 0.0)
    call.fall_back(grams)
    score = partial.score

    def late(*args) -> Answers:
        call.fill(only, only, answers_of(7.0, 1))
        return score(*args)

    if when == "before":
        call.fill(only, only, answers_of(7.0, 1))
    else:
        monkeypatch.setattr(partial, "score", late)
    assert not call.future.done()
    assert call.give_up(DeadlineExceeded("late")) == 0
    result = call.future.result(0)
    assert result.log10_prob.tolist() == [7.0] and result.source is None


def test_a_part_that_is_found_stale_twice_ends_no_other(
    cluster, connect, files, other_files
) -> None:
    """The servers hold another model as soon as they are looked for, and still once it is fetched;
    a part as large is on its way to a server that answers."""
    network = Network()
    client = connect(cluster.addresses, network, partial=True)
    queries = queries_to(files, 0)[:20] + queries_to(files, 1)[:20]
    utterance = client.utterance()
    until(lambda: submit(utterance, queries).result(WAIT_S).source is None)
    real = network.take

    def take(address, request, send) -> None:
        if address == cluster.addresses[1]:
            raise StaleShardSet("another table")
        real(address, request, send)

    with Cluster(other_files) as others:
        network.moved = dict(zip(cluster.addresses, others.addresses * 2, strict=False))
        network.take = take  # type: ignore[method-assign]
        with network.held():
            future = submit(utterance, queries, WAIT_S)
            until(lambda: client.manifest.model == other_files.manifest.model)
            until(lambda: not client._core._runtime.helper._work_queue.qsize())
            client._core._runtime.helper.submit(lambda: None).result(WAIT_S)
            assert not future.done()
            network.moved = {}
        answers = future.result(WAIT_S)
    assert_each_is_of_its_model(files, queries, answers)
    assert (answers.source == PARTIAL).tolist() == [False] * 20 + [True] * 20
