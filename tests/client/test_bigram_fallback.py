"""The bigram fallback: what it answers, when, and that every score says whose it is."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from client.questions import (
    answers_to,
    assert_each_is_of_its_model,
    assert_equal,
    events,
    queries_to,
    random_queries,
    submit,
)
from client.scripted import Network, free, load, settle
from cluster import WAIT_S, Cluster, until
from dlm.client import AsyncClient, router as lowgrams
from dlm.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
)
from dlm.ngram.query import BIGRAM_FALLBACK, Answers


def ask(client, queries, **more) -> Answers:
    """Those of a new utterance."""
    return answers_to(client.utterance(), queries, **more)


@pytest.mark.promise("bigram_fallback")
def test_only_what_the_failing_shard_owns_is_partial(cluster, connect, files, network) -> None:
    """The other queries of the call get full scores, whatever the error; all are counted."""
    client = connect(cluster.addresses, network, bigram_fallback=True)
    queries = list(dict.fromkeys(random_queries(files.oracle, 5, 300)))
    # The first calls of a process may take longer than any deadline: kernels are compiled.
    until(lambda: ask(client, queries).source is None)
    bad, real = cluster.addresses[1], network.take
    asked_of_it = []
    for query in queries:
        sent = len(network.requests)
        ask(client, [query])
        asked_of_it.append([address for address, _ in network.requests[sent:]] == [bad])
    for error in (
        ShardDown("gone"),
        Overloaded("busy"),
        ProtocolError("nonsense"),
        DeadlineExceeded(""),
        AuthenticationError("the token was taken away"),
        StaleShardSet("another table"),
        ConfigError("the file of the token is gone"),
        RuntimeError("what nobody thought of"),
    ):
        before = client.stats.bigram_fallback

        def take(address, request, send, error=error) -> None:
            if address == bad:
                raise error
            real(address, request, send)

        network.take = take  # type: ignore[method-assign]
        answers = ask(client, queries)
        network.take = real  # type: ignore[method-assign]
        assert_each_is_of_its_model(files, queries, answers)
        assert (answers.source == BIGRAM_FALLBACK).tolist() == asked_of_it, error
        # Distinct ones are counted; contexts are cut to what the model can use.
        assert 10 < client.stats.bigram_fallback - before <= sum(asked_of_it)
        until(lambda: ask(client, queries).source is None)


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


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_nobody_waits_past_the_deadline_and_what_comes_later_changes_nothing(
    cluster, connect, files, face: str, network: Network
) -> None:
    """The first call's messages are held, others wait behind them: all end partial, each score of
    the model that it names. Then the messages come back."""
    client = connect(cluster.addresses, network, bigram_fallback=True, window=1)
    queries = random_queries(files.oracle, 6, 100)
    ask(client, queries)

    def late() -> Answers:
        if face == "sync":
            return ask(client, queries, deadline_s=0.1)
        return asyncio.run(later())

    async def later() -> Answers:
        return await answers_to(AsyncClient(client._core).utterance(), queries, deadline_s=0.1)

    with network.held():
        answers = [late() for _ in range(3)]
        kept = [one.log10_prob.copy() for one in answers]
        for one in answers:
            assert_each_is_of_its_model(files, queries, one)
            assert BIGRAM_FALLBACK in one.source
    until(lambda: free(client))
    assert all(map(np.array_equal, kept, (one.log10_prob for one in answers)))
    until(lambda: ask(client, queries).source is None)


def test_a_shard_that_has_too_much_to_do_makes_only_its_own_queries_partial(
    cluster, connect, files, network
) -> None:
    """What the others answer is of use all the same."""
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
                    asked.done() or load(client).get(1, (0, 0)) >= waits
                )
            )
        refused = submit(utterance, each[0] + each[1] + each[2], WAIT_S)
        until(lambda: len(load(client)) == 3)
        assert not refused.done()  # the others are asked
    answers = refused.result(WAIT_S)
    assert_each_is_of_its_model(files, each[0] + each[1] + each[2], answers)
    assert (answers.source == BIGRAM_FALLBACK).tolist() == [False] * 20 + [True] * 20 + [False] * 20
    for future in futures:
        future.result(WAIT_S)


def test_a_part_that_is_found_stale_twice_ends_no_other(
    cluster, connect, files, other_files, network
) -> None:
    """The servers hold another model as soon as they are looked for, and still once it is fetched;
    a part as large is on its way to a server that answers."""
    client = connect(cluster.addresses, network, bigram_fallback=True)
    queries = queries_to(files, 0)[:20] + queries_to(files, 1)[:20]
    utterance = client.utterance()
    until(lambda: answers_to(utterance, queries).source is None)
    given, real = client.stats.bigram_fallback, network.take

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
            settle()
            assert not future.done()
            network.moved = {}
        answers = future.result(WAIT_S)
    assert_each_is_of_its_model(files, queries, answers)
    assert (answers.source == BIGRAM_FALLBACK).tolist() == [False] * 20 + [True] * 20
    assert client.stats.bigram_fallback - given == 20


def spells(caplog) -> list[tuple[object, ...]]:
    """What was logged of them."""
    return [
        (r.event, r.shard, r.error) if r.event.endswith("started") else (r.event, r.queries)
        for r in events(caplog, "client.bigram_fallback.")
    ]


@pytest.mark.parametrize("how", ["fails", "is silent"])
def test_partial_scores_are_logged_when_they_begin_and_when_they_end(
    cluster, connect, files, caplog, monkeypatch, how: str, network: Network
) -> None:
    """Once each, however many there are, with the shard; and while some are answered, they last."""
    caplog.set_level(logging.INFO, "dlm.client")
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


def test_a_spell_of_partial_scores_ends_when_none_came_for_a_while() -> None:
    """It is as long as from the first to the latest, whenever that is noticed."""
    outage = lowgrams.Outage(5.0, 5.0, 3).extended(2, 9.0)
    assert (outage.seconds, outage.queries) == (4.0, 5)
    assert not outage.is_over(9.0 + lowgrams.QUIET_S - 0.1)
    assert outage.is_over(9.0 + lowgrams.QUIET_S)
    assert outage.extended(1, 20.0).seconds == 15.0


@pytest.mark.slow
def test_what_waits_while_the_table_changes_is_not_refused_after_it(
    cluster, connect, files, monkeypatch, network
) -> None:
    """The same model is cut into fewer shards, for which more calls wait than would be let in."""
    limits = {"window": 1, "max_queries": 64}
    client = connect(cluster.addresses, network, bigram_fallback=True, heartbeats=False, **limits)
    utterance = client.utterance()
    contexts = dict.fromkeys(c for s in range(3) for c, _ in queries_to(files, s)[:20])
    queries = [(context, word) for context in contexts for word in range(3, 53)]
    until(lambda: ask(client, queries).source is None)
    other = files.again(2)
    with Cluster(other) as others:
        with network.held():
            calls = [submit(utterance, queries, WAIT_S) for _ in range(5)]
            settle()
            network.moved = dict(zip(cluster.addresses, others.addresses * 2, strict=False))
            monkeypatch.setattr("dlm.client.table.FOLLOW_S", 0.0)  # a new utterance has it look
            until(lambda: client.utterance() and client.manifest.shards == 2)
        found = [call.result(WAIT_S) for call in calls]
    expected = [files.oracle.score(c, w) for c, w in queries]
    for answers in found:
        assert answers.source is None
        assert_equal(answers, expected)
