"""The bigram fallback: what it answers, when, and that every score says whose it is."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest

from client.questions import queries_to, random_queries, submit
from client.scripted import Network, free
from cluster import WAIT_S, Cluster, until
from dlm.client import AsyncClient
from dlm.client import router as lowgrams
from dlm.client.cluster_file import Endpoint, FixedEndpoints
from dlm.client.core import Core
from dlm.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    QueryError,
    ShardDown,
    StaleShardSet,
)
from dlm.index.search.shard import run_kernel
from dlm.ngram.partition import slots_of
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, Answers, QueryGroups


def shard_of(files, context: tuple[int, ...]) -> int | None:
    """The shard that answers for a context; None where the low orders do."""
    if len(context) < 2:
        return None
    pair = [np.array([word], np.uint32) for word in context[-2:]]
    return int(files.manifest.slots[slots_of(*pair)[0]])


def assert_each_is_of_its_model(files, queries, answers: Answers) -> None:
    """Each score is the oracle's of the model that its source names: the whole, or its bigrams."""
    assert answers.source is not None
    for at, (context, word) in enumerate(queries):
        known = context[-1:] if answers.source[at] == BIGRAM_FALLBACK else context
        expected = files.oracle.score(known, word)
        assert answers.log10_prob[at] == expected.log10_prob
        assert answers.matched_order[at] == expected.matched_order
        if answers.source[at] == BIGRAM_FALLBACK:
            assert answers.state_length[at] == min(len(context) + 1, files.manifest.order - 1)
        else:
            assert answers.state_length[at] == expected.state_length


def ask(client, queries, **more) -> Answers:
    """Scores queries of ids."""
    return client.utterance().score([c for c, _ in queries], [w for _, w in queries], **more)


@pytest.mark.promise("bigram_fallback")
@pytest.mark.parametrize(
    "error",
    [
        ShardDown("gone"),
        Overloaded("busy"),
        ProtocolError("nonsense"),
        DeadlineExceeded(""),
        AuthenticationError("the token was taken away"),
        StaleShardSet("another table"),
        ConfigError("the file of the token is gone"),
        RuntimeError("what nobody thought of"),
    ],
)
def test_only_what_the_failing_shard_owns_is_partial(
    cluster, connect, files, error: Exception
) -> None:
    """The rest is full, in the same call; the counters tell how many."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True)
    queries = list(dict.fromkeys(random_queries(files.oracle, 5, 300)))
    # The first calls of a process may take longer than any deadline: kernels are compiled.
    until(lambda: ask(client, queries).source is None)
    bad = cluster.addresses[1]
    asked_of_it = []
    for query in queries:
        sent = len(network.requests)
        ask(client, [query])
        asked_of_it.append([address for address, _ in network.requests[sent:]] == [bad])
    before = client.stats.bigram_fallback
    real = network.take

    def take(address, request, send) -> None:
        if address == bad:
            raise error
        real(address, request, send)

    network.take = take  # type: ignore[method-assign]
    answers = ask(client, queries)
    assert_each_is_of_its_model(files, queries, answers)
    assert answers.source is not None
    assert (answers.source == BIGRAM_FALLBACK).tolist() == asked_of_it
    for (context, _), source in zip(queries, answers.source, strict=True):
        assert source == FULL or shard_of(files, context) == 1
    # Distinct ones are counted; contexts are cut to what the model can use.
    assert (
        10 < client.stats.bigram_fallback - before <= int((answers.source == BIGRAM_FALLBACK).sum())
    )


def test_states_after_a_partial_score_hold_all_that_could_matter(cluster, connect, files) -> None:
    """They are not minimised: the next word is scored as if the context had been given whole."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True)
    utterance = client.utterance()
    contexts = [c for c, _ in queries_to(files, 0) if len(c) == 3][:5]
    words = [w for c, w in queries_to(files, 0) if len(c) == 3][:5]
    begun = [utterance.null() for _ in contexts]
    for place in range(3):
        step = utterance.extend(begun, np.array([[c[place]] for c in contexts]))
        begun = [step.states[i, 0] for i in range(len(contexts))]
    network.instant = ShardDown("gone")
    extension = utterance.extend(begun, np.array([[w] for w in words]))
    network.instant = None
    partly = extension.source[:, 0] == BIGRAM_FALLBACK
    assert partly.any()
    for at in np.flatnonzero(partly):
        whole = (*begun[at]._words, words[at])[-(files.manifest.order - 1) :]
        assert extension.states[int(at), 0]._words == whole


def test_a_sentence_tells_which_of_its_tokens_are_partial(cluster, connect, files) -> None:
    """Token by token, and their sum is the sentence's."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True)
    network.instant = ShardDown("gone")
    words = files.words()
    (score,) = client.utterance().score_sentences([[words[i] for i in (5, 6, 7, 8, 9, 10)]])
    assert set(score.token_source.tolist()) <= {FULL, BIGRAM_FALLBACK}
    assert BIGRAM_FALLBACK in score.token_source
    assert score.log10_prob == float(score.token_log10_prob.sum(dtype=np.float64))


def test_nobody_waits_past_the_deadline_and_what_comes_later_changes_nothing(
    cluster, connect, files
) -> None:
    """Held messages: the call ends without them, partial; then its messages come back."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True)
    queries = random_queries(files.oracle, 6, 100)
    ask(client, queries)
    with network.held():
        answers = ask(client, queries, deadline_s=0.2)
        kept = [a.copy() for a in (answers.log10_prob, answers.state_length)]
    assert_each_is_of_its_model(files, queries, answers)
    until(lambda: free(client))
    assert np.array_equal(kept[0], answers.log10_prob)
    assert np.array_equal(kept[1], answers.state_length)


def test_what_waits_for_a_full_window_is_partial_in_time_or_refused_at_once(
    cluster, connect, files
) -> None:
    """One message in flight, held: those behind it end at their deadline, each of its own model."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True, window=1)
    queries = queries_to(files, 0)[:5]
    ask(client, queries)
    with network.held():
        for _ in range(3):
            assert_each_is_of_its_model(files, queries, ask(client, queries, deadline_s=0.1))
    assert ask(client, queries).source is None


def test_a_shard_that_has_too_much_to_do_makes_only_its_own_queries_partial(
    cluster, connect, files
) -> None:
    """What the others answer is of use all the same."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True, window=1, max_queries=16)
    each = [queries_to(files, shard)[:20] for shard in range(3)]
    for queries in each:
        until(lambda queries=queries: ask(client, queries).source is None)
    with network.held():
        futures = []
        utterance = client.utterance()
        # Partial at once, where the shard has too much to do.
        while not (futures and futures[-1].done()):
            futures.append(asked := submit(utterance, each[1] * 64, WAIT_S))
            waits = 1, 2 * len(futures) - 1  # 20 queries are two parts, and one of all is under way
            until(
                lambda asked=asked, waits=waits: (
                    asked.done() or client._core.load().get(1, (0, 0)) >= waits
                )
            )
        refused = submit(utterance, each[0] + each[1] + each[2], WAIT_S)
        until(lambda: len(client._core.load()) == 3)
        assert not refused.done()  # the others are asked
    answers = refused.result(WAIT_S)
    assert_each_is_of_its_model(files, each[0] + each[1] + each[2], answers)
    assert (answers.source == BIGRAM_FALLBACK).tolist() == [False] * 20 + [True] * 20 + [False] * 20
    for future in futures:
        future.result(WAIT_S)


@pytest.mark.slow
def test_an_utterance_goes_on_though_its_servers_hold_another_model_by_now(
    cluster, connect, files, other_files
) -> None:
    """On the low orders that it was opened with; and what is new is on the other model."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True)
    queries = random_queries(files.oracle, 8, 200)
    utterance = client.utterance()
    contexts, words = [c for c, _ in queries], [w for _, w in queries]
    until(lambda: utterance.score(contexts, words).source is None)
    told = client.utterance(on_switch="rescore")
    with Cluster(other_files) as others:
        network.moved = dict(zip(cluster.addresses, others.addresses * 2, strict=False))
        while client.manifest.model == files.manifest.model:
            assert_each_is_of_its_model(files, queries, utterance.score(contexts, words))
        answers = utterance.score(contexts, words)
        assert_each_is_of_its_model(files, queries, answers)
        assert BIGRAM_FALLBACK in answers.source
        assert client.utterance().model_info.model == other_files.manifest.model
        with pytest.raises(StaleShardSet):
            told.score(contexts, words)


def test_a_caller_who_asks_wrongly_is_told_so(cluster, connect) -> None:
    """The bigram fallback stands in for servers, not for callers."""
    client = connect(cluster.addresses, bigram_fallback=True)
    with pytest.raises(QueryError):
        client.utterance().score([(1, 2)], [10_000_000])


def test_without_the_setting_an_error_is_an_error(cluster, connect, files) -> None:
    """The default: whoever wants the model's scores gets them or none."""
    network = Network()
    client = connect(cluster.addresses, network)
    network.instant = ShardDown("gone")
    with pytest.raises(ShardDown):
        ask(client, queries_to(files, 0)[:5])


def test_the_asyncio_face_does_the_same(cluster, connect, files, cache_dir) -> None:
    """In time, and each score of the model that it names."""
    network = Network()
    queries = random_queries(files.oracle, 7, 50)
    settings = connect(cluster.addresses, bigram_fallback=True)._core.config

    async def main() -> Answers:
        endpoints = FixedEndpoints([Endpoint(address) for address in cluster.addresses])
        client = AsyncClient(Core(endpoints, settings, connect=network.connect))
        contexts, words = [c for c, _ in queries], [w for _, w in queries]
        await client.utterance().score(contexts, words)
        with network.held():
            answers = await client.utterance().score(contexts, words, deadline_s=0.2)
        await client.close()
        return answers

    assert_each_is_of_its_model(files, queries, asyncio.run(main()))


def test_the_partial_model_is_the_reduction_to_order_two(files, connect, cluster) -> None:
    """Every word after every context of the model, against the oracle of the bigrams alone."""
    client = connect(cluster)
    grams = client._core.snapshot().grams
    contexts = sorted({n[:-1] for n in files.oracle.ngrams if len(n) > 2})[:200]
    size = files.manifest.vocabulary_size
    groups = QueryGroups(
        np.array([len(c) for c in contexts], np.uint8),
        np.array([w for c in contexts for w in c], np.uint32),
        np.full(len(contexts), size, np.uint32),
        np.tile(np.arange(size, dtype=np.uint32), len(contexts)),
    )
    answers, _ = run_kernel(grams.low.view, grams.manifest.order, groups)
    expected = [files.oracle.score(c[-1:], w).log10_prob for c in contexts for w in range(size)]
    assert np.array_equal(answers.log10_prob, np.array(expected, np.float32))
    assert answers.matched_order.max() <= 2 and answers.ngram_length.max() <= 2


def spells(caplog) -> list[tuple[object, ...]]:
    """What was logged of them."""
    return [
        (r.event, r.shard, r.error) if r.event.endswith("started") else (r.event, r.queries)
        for r in caplog.records
        if getattr(r, "event", "").startswith("client.bigram_fallback.")
    ]


@pytest.mark.parametrize("how", ["fails", "is silent"])
def test_partial_scores_are_logged_when_they_begin_and_when_they_end(
    cluster, connect, files, caplog, monkeypatch, how: str
) -> None:
    """Once each, however many there are, with the shard; and while some are answered, they last."""
    caplog.set_level(logging.INFO, "dlm.client")
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True, heartbeats=False)
    bad, well = queries_to(files, 1)[:5], queries_to(files, 0)[:5]
    monkeypatch.setattr(lowgrams, "QUIET_S", 1e9)
    # The first call of a process may take longer than any deadline: kernels are compiled.
    assert ask(client, bad + well, deadline_s=WAIT_S).source is None
    before = client.stats.bigram_fallback
    if how == "fails":
        network.instant = ShardDown("gone")
        for _ in range(3):
            ask(client, bad)
        network.instant = None
    else:
        with network.held():
            for _ in range(3):
                ask(client, bad, deadline_s=0.1)
    ask(client, well)
    error = "ShardDown" if how == "fails" else "DeadlineExceeded"
    began = ("client.bigram_fallback.started", 1, error)
    assert spells(caplog) == [began]
    monkeypatch.setattr(lowgrams, "QUIET_S", 0.0)
    given = client.stats.bigram_fallback - before
    until(lambda: ask(client, well).source is None and len(spells(caplog)) == 2)
    assert given >= 15
    assert spells(caplog) == [began, ("client.bigram_fallback.ended", given)]


def test_partial_scores_that_begin_while_others_end_are_logged_apart(
    cluster, connect, files, caplog, monkeypatch
) -> None:
    """Callers leave it to the loop, which ends the one and begins the other: none is lost."""
    caplog.set_level(logging.INFO, "dlm.client")
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True, heartbeats=False)
    bad, well = queries_to(files, 1)[:5], queries_to(files, 0)[:5]
    assert ask(client, bad + well, deadline_s=WAIT_S).source is None
    before = client.stats.bigram_fallback
    network.instant = ShardDown("gone")
    ask(client, bad)
    network.instant = None
    late = threading.Thread(
        target=client._core._delivery.count_bigram_fallback,
        args=(submit(client.utterance(), bad, WAIT_S), 7, ShardDown("gone"), 1),
    )

    def is_over(outage: lowgrams.Outage, now: float) -> bool:
        if late.ident is None:
            late.start()
            late.join(WAIT_S)
        return True

    monkeypatch.setattr(lowgrams.Outage, "is_over", is_over)
    until(lambda: ask(client, well).source is None and late.ident is not None)
    until(lambda: ask(client, well).source is None and len(spells(caplog)) == 4)
    began = ("client.bigram_fallback.started", 1, "ShardDown")
    first = client.stats.bigram_fallback - before - 7
    ended = [("client.bigram_fallback.ended", queries) for queries in (first, 7)]
    assert spells(caplog) == [began, ended[0], began, ended[1]]


def test_a_spell_of_partial_scores_ends_when_none_came_for_a_while() -> None:
    """It is as long as from the first to the latest, whenever that is noticed."""
    outage = lowgrams.Outage(5.0, 5.0, 3).extended(2, 9.0)
    assert (outage.seconds, outage.queries) == (4.0, 5)
    assert not outage.is_over(9.0 + lowgrams.QUIET_S - 0.1)
    assert outage.is_over(9.0 + lowgrams.QUIET_S)
    assert outage.extended(1, 20.0).seconds == 15.0


def test_a_call_that_was_given_up_is_not_ended_twice(cluster, connect, files) -> None:
    """It keeps its first end, whatever comes after it."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True)
    queries = queries_to(files, 0)[:5]
    ask(client, queries)
    with network.held():
        call = submit(client.utterance(), queries, WAIT_S)
        call.give_up(DeadlineExceeded("late"))
        first = call.result(0)
        call.give_up(DeadlineExceeded("later"))
    until(lambda: free(client))
    assert call.result(0) is first and first.source.tolist() == [BIGRAM_FALLBACK] * 5


@pytest.mark.slow
def test_what_waits_while_the_table_changes_is_not_refused_after_it(
    cluster, connect, files, monkeypatch
) -> None:
    """The same model is cut in another way, and every shard has too much to do by then."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True, window=1, heartbeats=False)
    core, utterance = client._core, client.utterance()
    each = [queries_to(files, shard)[:20] for shard in range(3)]
    queries = each[0] + each[1] + each[2]
    until(lambda: submit(utterance, queries).result(WAIT_S).source is None)
    other = files.again(3, seed=9)
    with Cluster(other) as others:
        with network.held():
            # The last shard's message comes back first: its pieces are the last of the call.
            first = [submit(utterance, each[shard][:5], WAIT_S) for shard in (2, 1, 0)]
            waiting = submit(utterance, queries, WAIT_S)
            network.moved = dict(zip(cluster.addresses, others.addresses, strict=True))
            core.refresh_later()
            until(lambda: core.snapshot().shard_set == other.manifest.shard_set)
            monkeypatch.setattr("dlm.client.runtime.PATIENCE", 0.0)  # all would wait too long
        answers = waiting.result(WAIT_S)
        for future in first:
            future.result(WAIT_S)
    assert answers.source is None
    expected = [files.oracle.score(context, word) for context, word in queries]
    assert answers.log10_prob.tolist() == [float(e.log10_prob) for e in expected]
