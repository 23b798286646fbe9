"""A call whose parts end in any order, some of them twice: each answer is of who came first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from client.questions import queries_to, submit
from client.scripted import Network
from client.test_bigram_fallback import assert_each_is_of_its_model
from cluster import WAIT_S, Cluster, until
from dlm.client import router
from dlm.client.call import Call
from dlm.errors import DeadlineExceeded, ShardDown, StaleShardSet
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, Answers, QueryGroups

GONE = ShardDown("gone")


def answers_of(value: float, count: int) -> Answers:
    """Answers that can be told from others."""
    some = np.full(count, 3, np.uint8)
    return Answers(np.full(count, value, np.float32), some, some, some)


def call_of(grams, contexts: np.ndarray, words: np.ndarray, max_queries: int, slots) -> Call:
    """A call of so many contexts, each asked as many words, all of shards."""
    rows, each = len(contexts), len(words) // len(contexts)
    lengths = np.full(rows, contexts.shape[1], np.uint8)
    counts, pairs = np.full(rows, each, np.uint32), np.zeros(rows, np.uint32)
    groups = QueryGroups(lengths, contexts.reshape(-1), counts, words, pairs)
    pieces = router.route(groups, slots, 4, max_queries)
    return Call.of_pieces("model", pieces, 0.0, "set")


@pytest.mark.parametrize("seed", range(40))
def test_each_query_has_the_answer_of_who_came_first(client, files, seed: int) -> None:
    """Parts that are answered, missed, asked of others or given up, once or several times; never
    half a call."""
    rng = random.Random(seed)
    grams = client._core.snapshot().grams
    longest = sorted(n for n in files.oracle.ngrams if len(n) == 4)[:30]
    contexts = np.array([n[:3] for n in longest], np.uint32)
    words = np.array([rng.randrange(60) for _ in range(60)], np.uint32)
    slots = np.array([rng.randrange(4) for _ in range(4096)], np.uint16)
    call = call_of(grams, contexts, words, rng.choice([7, 1000]), slots)
    told: list[int] = []
    call.fall_back(grams, lambda call, queries, error, shard: told.append(queries))
    expected: dict[int, float] = {}  # the value of who came first; 0 for the bigram fallback
    parts = list(call.parts)
    events = [part for part in parts for _ in range(rng.choice([1, 1, 2, 3]))]
    rng.shuffle(events)
    for number, part in enumerate(events, 1):
        assert call.done() == (len(expected) == 60)
        awaited = [q for q in part.at.tolist() if q not in expected]
        kind = rng.choice(["answer", "answer", "miss", "again"])
        if kind == "again" and not part.ended and part in call.parts:
            # By another table, which may cut it: its own parts end in its place.
            pieces = router.route(part.groups, np.roll(slots, 1), 4, 5)
            for place, one in enumerate(call.replace(part, pieces, "other")):
                value = number + place / 100
                call.answer(one, answers_of(value, one.queries), slice(None))
                expected |= dict.fromkeys(one.at.tolist(), value)
        elif part not in call.parts:
            continue  # whoever had it has it no more
        elif kind == "miss":
            call.miss(part, GONE)
            expected |= dict.fromkeys(awaited, 0.0)
        else:
            begin = rng.randrange(3)
            there = range(begin, begin + part.queries)
            answers = answers_of(float(number), there.stop)
            answers.log10_prob[:] += np.arange(there.stop) / 256  # each can be told
            # One behind the other, or as they stand in a message that asked what parts share once.
            mixed = np.array(rng.choices(range(there.stop), k=part.queries), np.int64)
            where = rng.choice([slice(begin, there.stop), mixed])
            call.answer(part, answers, where)
            values = zip(part.at.tolist(), answers.log10_prob[where].tolist(), strict=True)
            expected |= {q: value for q, value in values if q in awaited}
        if rng.random() < 0.05:
            call.give_up(DeadlineExceeded("late"))
            break
    result = call.result(0)
    expected |= dict.fromkeys(set(range(60)).difference(expected), 0.0)
    source = np.zeros(60, np.uint8) if result.source is None else result.source
    for at, value in expected.items():
        assert source[at] == (FULL if value else BIGRAM_FALLBACK)
        if value:
            assert result.log10_prob[at] == np.float32(value)
    assert sum(told) == sum(not value for value in expected.values())
    assert call.result(0) is result


@pytest.mark.parametrize("when", ["before", "while the bigram fallback scores"])
def test_who_gives_up_what_is_answered_meanwhile_gets_whole_answers(
    client, files, monkeypatch, when
) -> None:
    """The last answer came at the deadline: it counts or it does not, and no error takes its
    place."""
    grams = client._core.snapshot().grams
    ((context, word),) = queries_to(files, 0)[:1]
    words, one = np.array([word], np.uint32), np.ones(1, np.uint32)
    asked = np.array([context], np.uint32), np.full(1, len(context), np.uint8), one, words
    plan = router.plan(grams, grams.manifest, *asked, 10)
    call = Call("model", plan, 0.0, "set")
    call.fall_back(grams, lambda *_: None)
    (part,) = call.parts
    fall_back = Call._fall_back_to_bigrams

    def late(*args) -> None:
        call.answer(part, answers_of(7.0, 1), slice(None))
        fall_back(*args)

    if when == "before":
        call.answer(part, answers_of(7.0, 1), slice(None))
    else:
        monkeypatch.setattr(Call, "_fall_back_to_bigrams", late)
    call.give_up(DeadlineExceeded("late"))
    result = call.result(0)
    if when == "before":
        assert result.log10_prob.tolist() == [7.0] and result.source is None
    else:
        expected = [files.oracle.score(context[-1:], word).log10_prob]
        assert (result.log10_prob.tolist(), result.source.tolist()) == (expected, [BIGRAM_FALLBACK])


def test_a_part_that_is_found_stale_twice_ends_no_other(
    cluster, connect, files, other_files
) -> None:
    """The servers hold another model as soon as they are looked for, and still once it is fetched;
    a part as large is on its way to a server that answers."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True)
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
    assert (answers.source == BIGRAM_FALLBACK).tolist() == [False] * 20 + [True] * 20
