"""The client against real servers: every answer is the oracle's, bit for bit.

Above 600 lines: one interface, on servers that all of its tests share.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from client.questions import (
    answers_to,
    ask,
    assert_equal,
    assert_sentence,
    queries_to,
    random_queries,
    random_sentences,
    submit,
)
from client.scripted import Network, Scripted, free, settle
from cluster import WAIT_S, Cluster, build, until
from dlm.client import AsyncClient, Client, ClientConfig
from dlm.client.config import FailoverConfig, HeartbeatConfig
from dlm.errors import (
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    ModelMismatch,
    Overloaded,
    QueryError,
    ShardDown,
)
from dlm.ngram.vocab import UNK_ID
from models import HAND_MADE, PlainModel, random_model

MODELS = {
    **{f"hand_made_{name}": model for name, model in HAND_MADE.items()},
    **{
        f"random_order_{order}": random_model(order, order=order, words=12) for order in range(1, 6)
    },
    "random_closed": random_model(20, order=4, words=12, missing_suffixes=False),
    "random_without_unk": random_model(21, order=4, words=12, unk=False),
    "random_dense": random_model(22, order=5, words=4, per_order=300),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def served(request, tmp_path_factory, cache_dir):
    """A model of each kind: its cluster, oracle, and a client."""
    files = build(MODELS[request.param], tmp_path_factory.mktemp("model"), 2)
    with Cluster(files) as cluster:
        config = ClientConfig(deadline_s=20.0, cache_dir=cache_dir)
        async_client = asyncio.run(AsyncClient.connect(cluster.addresses, config))
        with Client.connect(cluster.addresses, config) as client:
            yield SimpleNamespace(
                cluster=cluster, oracle=files.oracle, client=client, async_client=async_client
            )
        asyncio.run(async_client.close())


def test_scores_equal_the_oracle(served) -> None:
    """Contexts of every length, the model's own and random ones, in one call."""
    ask(served.client.utterance(), served.oracle, random_queries(served.oracle, 1, 300))


def test_a_model_with_weights_far_above_0_is_served_as_it_was_built(connect, tmp_path) -> None:
    """It does not sum to 1, and scores above 0 follow; but what can be built can be asked."""
    plain = random_model(5, order=4, words=12, per_order=60)
    heavy = {ngram: (prob, 3.5) for ngram, (prob, _) in plain.ngrams.items()}
    files = build(PlainModel(4, heavy), tmp_path, 2)
    queries = random_queries(files.oracle, 3, 400)
    assert max(files.oracle.score(c, w).log10_prob for c, w in queries) > 4
    with Cluster(files) as cluster:
        ask(connect(cluster).utterance(), files.oracle, queries)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_sentences_equal_the_oracle(served, bos: bool, eos: bool) -> None:
    """Unknown words and an empty sentence among them."""
    sentences = random_sentences(served.oracle, 2, 12)
    scores = served.client.utterance().score_sentences(
        [" ".join(s) for s in sentences], bos=bos, eos=eos
    )
    for score, words in zip(scores, sentences, strict=True):
        assert_sentence(score, served.oracle, words, bos=bos, eos=eos)


def test_walking_word_by_word_gives_the_bits_of_full_contexts(served) -> None:
    """`extend` from minimised states, against the oracle with all words before; states as well."""
    oracle, utterance = served.oracle, served.client.utterance()
    sentences = random_sentences(oracle, 3, 6)
    longest = max(map(len, sentences))
    histories = [[oracle.vocabulary.begin_id] for _ in sentences]
    states = [utterance.begin() for _ in sentences]
    for position in range(longest):
        # One extend for all sentences at this position, each by a word of its own and `</s>`.
        rows = [[s[position] if position < len(s) else "</s>", "</s>"] for s in sentences]
        extension = utterance.extend(states, rows)
        for k, row in enumerate(rows):
            for w, word in enumerate(row):
                expected = oracle.score(histories[k], oracle.vocabulary.id_of(word))
                assert extension.log10_prob[k, w].tobytes() == expected.log10_prob.tobytes()
                assert extension.matched_order[k, w] == expected.matched_order
                assert extension.oov[k, w] == (oracle.vocabulary.id_of(word) == 0)
            histories[k].append(oracle.vocabulary.id_of(row[0]))
            state = extension.states[k, 0]
            assert state._words == oracle.state(histories[k])
        states = [extension.states[k, 0] for k in range(len(sentences))]


def test_a_string_with_a_space_is_one_word_and_marked_as_unknown(served) -> None:
    """It scores as `<unk>`; one word for all states, rows, and no words at all."""
    utterance = served.client.utterance()
    begin = utterance.begin()
    known = utterance.vocabulary.words[int(utterance.vocabulary_size) - 1]
    for words in ([known, b"a b"], [[known, b"a b"]]):
        extension = utterance.extend([begin], words)
        assert extension.oov.tolist() == [[False, True]]
        assert extension.oov.dtype == bool
        assert extension.log10_prob[0, 1] == utterance.extend([begin], [0]).log10_prob[0, 0]
    assert utterance.extend([begin], []).oov.shape == (1, 0)


@pytest.mark.promise("states_as_kenlm")
def test_states_are_equal_exactly_where_the_oracle_says_so(served) -> None:
    """Random histories; equal states hash alike."""
    oracle, utterance = served.oracle, served.client.utterance()
    found = []
    for context, word in random_queries(oracle, 4, 60):
        state = utterance.null()
        for i in (*context, word):
            state = utterance.extend([state], [i]).states[0, 0]
        found.append((state, oracle.state((*context, word))))
    for state, expected in found:
        assert state._words == expected
    for a, expected_a in found[::5]:
        for b, expected_b in found:
            assert (a == b) == (expected_a == expected_b)
            assert a != b or hash(a) == hash(b)


def test_the_likeliest_next_words_are_those_of_the_whole_vocabulary(served) -> None:
    """Best first, ties by id, more asked for than there are words; all but <s>, which follows
    nothing."""
    oracle, utterance = served.oracle, served.client.utterance()
    size = len(oracle.vocabulary)
    for context, word in random_queries(oracle, 5, 5):
        state = utterance.null()
        for i in (*context, word):
            state = utterance.extend([state], [i]).states[0, 0]
        scores = [oracle.score((*context, word), w).log10_prob for w in range(size)]
        words = set(range(size)) - ({oracle.vocabulary.begin_id} - {UNK_ID})
        expected = sorted(words, key=lambda w: (-scores[w], w))
        for k in (1, 3, size + 5):
            found = utterance.next_words(state, k)
            assert [i for i, _ in found] == expected[:k]
            assert [p.tobytes() for _, p in found] == [scores[i].tobytes() for i in expected[:k]]


@pytest.mark.promise("local_as_client")
def test_the_asyncio_face_gives_the_same(served) -> None:
    """Each method, awaited."""
    utterance, other = served.client.utterance(), served.async_client.utterance()
    queries = random_queries(served.oracle, 6, 40)
    contexts, words = [c for c, _ in queries], [w for _, w in queries]
    sentences = random_sentences(served.oracle, 7, 4)

    async def ask():
        return (
            await other.score(contexts, words),
            await other.score_sentences(sentences),
            await other.extend([other.begin(), other.null()], words),
            await other.next_words(other.begin(), 4),
        )

    answers, scores, extension, likeliest = asyncio.run(ask())
    expected = utterance.extend([utterance.begin(), utterance.null()], words)
    assert_equal(answers, [served.oracle.score(c, w) for c, w in queries])
    for score, sentence in zip(scores, sentences, strict=True):
        assert_sentence(score, served.oracle, sentence)
    assert extension.log10_prob.tobytes() == expected.log10_prob.tobytes()
    assert [list(row) for row in extension.states] == [list(row) for row in expected.states]
    assert likeliest == utterance.next_words(utterance.begin(), 4)


def stored_pairs(oracle) -> set[tuple[int, ...]]:
    """Pairs under which a shard holds anything: longer n-grams, or weights of contexts."""
    pairs = {n[-3:-1] for n in oracle.ngrams if len(n) > 2}
    return pairs | {
        n[-2:] for n, (_, weight) in oracle.ngrams.items() if 1 < len(n) < oracle.order and weight
    }


@pytest.mark.promise("one_message")
def test_a_query_costs_one_message_at_most_and_none_where_nothing_is_stored(served) -> None:
    """Counted by the servers, one query at a time."""
    oracle, utterance = served.oracle, served.client.utterance()
    stored = stored_pairs(oracle)
    total = 0
    for context, word in random_queries(oracle, 8, 80):
        before = served.cluster.messages()
        utterance.score([context], [word])
        cost = served.cluster.messages() - before
        pair = context[-2:]
        allowed = len(pair) == 2 and oracle.order > 2 and pair in stored
        assert cost <= int(allowed)
        total += cost
    assert total or not stored


def test_words_may_be_text_bytes_ids_or_arrays(client, files) -> None:
    """All forms of the same queries give the same bits; arrays may lie in memory in any way: slices
    of a matrix, another order of its axes or bytes, and what is not aligned."""
    utterance = client.utterance()
    queries = [q for q in random_queries(files.oracle, 9, 60) if q[1] and all(q[0])]
    contexts, words = [list(c) for c, _ in queries], [w for _, w in queries]
    expected = utterance.score(contexts, words).log10_prob.tobytes()
    text = files.words()
    for form in (
        lambda i: text[i],
        lambda i: text[i].encode(),
        np.uint32,
        np.int64,
        lambda i: np.str_(text[i]),
    ):
        again = utterance.score([[form(i) for i in c] for c in contexts], [form(i) for i in words])
        assert again.log10_prob.tobytes() == expected
    for dtype in (np.uint8, np.int32, np.int64, np.uint64, object):
        again = utterance.score([np.array(c, dtype) for c in contexts], np.array(words, dtype))
        assert again.log10_prob.tobytes() == expected
    states = [utterance.begin(), utterance.null()]
    rows = utterance.extend(states, [words[:4], words[4:8]])
    for given in (np.array([words[:4], words[4:8]]), [np.array(words[:4]), tuple(words[4:8])]):
        assert utterance.extend(states, given).log10_prob.tobytes() == rows.log10_prob.tobytes()
    table = (np.arange(24, dtype=np.uint32).reshape(3, 8) * 7) % len(files.oracle.vocabulary)
    states = [utterance.begin()] * 3
    moved = np.frombuffer(b"\0" + table.tobytes(), np.uint32, offset=1).reshape(3, 8)
    layouts = [table, table[:, 1:2], table[:, ::2], np.asfortranarray(table), moved]
    for asked in [*layouts, table.astype(">u4"), table.astype(np.int16)]:
        found = utterance.extend(states, asked)
        expected_ = utterance.extend(states, asked.tolist())
        assert found.log10_prob.tobytes() == expected_.log10_prob.tobytes()
        assert found.states.keys() == expected_.states.keys()


def test_words_that_change_during_a_call_change_nothing_of_it(cluster, connect, files) -> None:
    """A decoder may reuse its array for the next call."""
    network = Network()
    utterance = connect(cluster, network).utterance()
    size = len(files.oracle.vocabulary)
    words = np.arange(size, dtype=np.uint32).reshape(1, -1)
    states = utterance.extend([utterance.begin()], words[0]).states.reshape(-1)
    asked = np.repeat(words, len(states), axis=0)
    expected = utterance.extend(states, asked.copy())
    before = len(network.requests)
    with ThreadPoolExecutor(1) as pool:
        with network.held():
            call = pool.submit(utterance.extend, states, asked)
            until(lambda: len(network.requests) > before)
            asked[:] = UNK_ID
        found = call.result(WAIT_S)
    assert found.log10_prob.tobytes() == expected.log10_prob.tobytes()
    assert found.states.keys() == expected.states.keys()
    assert found.oov.tolist() == expected.oov.tolist()


def test_calls_that_ended_are_not_left_to_the_garbage_collector(client, files) -> None:
    """Nothing holds itself: what a call was made of goes with the last who looks at it."""
    utterance = client.utterance()
    queries = random_queries(files.oracle, 1, 50)
    ask(utterance, files.oracle, queries)

    def alive() -> list[Any]:
        """Objects of the client's classes, some perhaps of clients that other tests left."""
        return [o for o in gc.get_objects() if str(type(o).__module__).startswith("dlm.client")]

    gc.collect()
    gc.disable()
    try:
        before = alive()  # held, so that they do not go meanwhile
        for _ in range(20):
            ask(utterance, files.oracle, queries)
        until(lambda: len(alive()) < len(before) + 20)
    finally:
        gc.enable()


def test_nothing_asked_is_nothing_answered(client) -> None:
    """Empty batches of every shape."""
    utterance = client.utterance()
    assert len(utterance.score([], [])) == 0
    for states, words, shape in (
        ([], ["a", "b"], (0, 2)),
        ([utterance.begin()], [], (1, 0)),
        ([], [], (0, 0)),
        ([utterance.begin()] * 2, [[], []], (2, 0)),
        ([], np.zeros((0, 3), np.uint32), (0, 3)),
    ):
        extension = utterance.extend(states, words)
        assert extension.log10_prob.shape == extension.states.shape == shape


def test_states_hash_copy_and_pickle(client) -> None:
    """A copy is equal; arrays of states index and reshape as NumPy's do."""
    utterance = client.utterance()
    states = utterance.extend([utterance.begin(), utterance.null()], [1, 2, 3]).states
    assert states.shape == (2, 3)
    for state in (utterance.begin(), utterance.null(), states[1, 2]):
        again = [copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
        assert {state, *again} == {state}
    rows = [[states[k, w] for w in range(3)] for k in range(2)]
    assert [list(row) for row in states] == rows
    assert list(states.reshape(-1)) == rows[0] + rows[1]
    assert list(states[:, 1]) == list(states[..., 1]) == [rows[0][1], rows[1][1]]
    assert list(states[np.array([[True, False, False], [False, True, True]])]) == [
        rows[0][0],
        rows[1][1],
        rows[1][2],
    ]
    a = utterance.extend(states, [4])
    b = utterance.extend(rows[0] + rows[1], [4])
    assert a.log10_prob.tobytes() == b.log10_prob.tobytes()
    c = utterance.extend(pickle.loads(pickle.dumps(states)), [4])
    assert c.log10_prob.tobytes() == b.log10_prob.tobytes()


@pytest.mark.promise("states_as_kenlm")
def test_a_state_of_another_family_is_a_type_error(client, connect, files, other_files) -> None:
    """Of another model, or of another sharding of the same: never a score."""
    utterance = client.utterance()
    with Cluster(other_files) as other, Cluster(files.again(2)) as resharded:
        for cluster in (other, resharded):
            foreign = connect(cluster).utterance()
            for states in (
                [foreign.begin()],
                foreign.extend([foreign.begin()], [1]).states,
                [utterance.begin(), foreign.null()],
            ):
                with pytest.raises(ModelMismatch, match="cannot mix") as caught:
                    utterance.extend(states, [1])
                with pytest.raises(ModelMismatch):
                    utterance.context_blocks(states)
                assert isinstance(caught.value, TypeError)
                assert isinstance(caught.value, QueryError)
    with pytest.raises(TypeError):
        utterance.extend([("a", "b")], [1])  # type: ignore[list-item]


def test_states_made_of_their_words_are_the_same_states(client) -> None:
    """Those of a search, on another utterance; and they score alike."""
    utterance, other = client.utterance(), client.utterance()
    words = [1, 5, 9]
    first = utterance.extend([utterance.begin(), utterance.null()], words)
    states = utterance.extend(first.states.reshape(-1), words).states.reshape(-1)
    again = other.states_after(states.contexts())
    assert list(again) == list(states)
    assert utterance.states(list(states)).contexts() == states.contexts()
    expected = utterance.extend(states, words).log10_prob
    assert (other.extend(again, words).log10_prob == expected).all()


def test_a_context_keeps_its_last_words(client, files) -> None:
    """Order - 1 of them, strings or ids; the empty one is the state that knows nothing."""
    utterance = client.utterance()
    a, b = files.words()[5:7]
    states = utterance.states_after([[a] * 9 + [b], [], [5]])
    assert states.contexts() == [(5,) * (utterance.order - 2) + (6,), (), (5,)]
    assert states[1] == utterance.null()
    with pytest.raises(QueryError, match=r"contexts is "):
        utterance.states_after("a b")
    with pytest.raises(QueryError, match=r"contexts\[0\] is "):
        utterance.states_after(["a b"])


@pytest.mark.promise("shared_clients")
def test_many_threads_and_tasks_each_get_their_own_answers(cluster, connect, files) -> None:
    """A window of 1 and few queries a message, so that calls wait, merge and split all the time."""
    client = connect(cluster, window=1, max_queries=50)
    batches = [random_queries(files.oracle, 100 + i, 60) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda batch: ask(client.utterance(), files.oracle, batch), batches))

    async def ask_all():
        other = AsyncClient(client._core)
        return await asyncio.gather(*(answers_to(other.utterance(), one) for one in batches))

    for batch, answers in zip(batches, asyncio.run(ask_all()), strict=True):
        assert_equal(answers, [files.oracle.score(c, w) for c, w in batch])
    until(lambda: free(client))


@pytest.mark.parametrize("second", ["asks", "rests", "blocks the event loop"])
def test_what_tasks_that_are_woken_together_ask_next_is_sent_together(
    cluster, connect, files, second: str, network: Network
) -> None:
    """Not before the last of them has asked; one of them may ask nothing more, or wait for its
    answer without letting the others go on."""
    client = connect(cluster.addresses, network)
    queries = queries_to(files, 0)[:6]
    asked: list[int] = []  # queries so far, when each message was sent
    real = network.take
    network.take = lambda *given: (asked.append(client.stats.queries), real(*given))  # type: ignore

    async def task(number: int, utterance: Any) -> None:
        await answers_to(utterance, queries[number : number + 1])
        following = queries[number + 3 : number + 4]
        if number == 1 and second.startswith("blocks"):
            ask(client.utterance(), files.oracle, following)
        elif number != 1 or second == "asks":
            await answers_to(utterance, following)

    async def story() -> None:
        utterance = await AsyncClient(client._core).utterance()
        with network.held():
            tasks = [asyncio.create_task(task(number, utterance)) for number in range(3)]
            await asyncio.to_thread(until, lambda: client.stats.queries == 3)
        # The event loop stands still until all are answered.
        until(lambda: free(client) and (settle() or free(client)))
        asked.clear()
        await asyncio.gather(*tasks)

    asyncio.run(story())
    if not second.startswith("blocks"):
        assert set(asked) == {5 + (second == "asks")}


def test_what_only_would_wait_is_refused_at_once_and_small_calls_still_find_low_orders(
    cluster, connect, files, network
) -> None:
    """One shard full: a large call is told before any work; what was let in is answered whole."""
    client = connect(cluster.addresses, network, window=1, max_queries=64)
    utterance = client.utterance()
    shards = range(files.manifest.shards)
    queries = [
        query
        for some in zip(*(queries_to(files, s) for s in shards), strict=False)
        for query in some
    ]
    rng = np.random.default_rng(4)
    words = rng.integers(0, utterance.vocabulary_size, 256).tolist()
    many = [(queries[i % len(queries)][0], word) for i, word in enumerate(words)]
    waiting = []
    with network.held():
        while not waiting or not waiting[-1].done():
            waiting.append(submit(utterance, many))
            settle()  # the loop knows of it
        waiting.pop()
        assert len(waiting) >= 2
        before = client.stats
        assert isinstance(submit(utterance, many).exception(0), Overloaded)
        assert isinstance(submit(utterance, many, 1e-9).exception(0), DeadlineExceeded)
        assert client.stats == before
        ask(utterance, files.oracle, [((), word) for _, word in queries[:5]])
    expected = [files.oracle.score(*query) for query in many]
    for future in waiting:
        assert_equal(future.result(WAIT_S), expected)
    ask(utterance, files.oracle, many)


@pytest.mark.slow
def test_no_message_is_larger_than_the_servers_take(files, connect) -> None:
    """Servers that take 16 queries at most get no more, whatever the client's own setting."""
    queries = random_queries(files.oracle, 30, 300)
    for limits in ({"max_queries": 16}, {"max_message_bytes": 4096}):
        with Cluster(files, **limits) as cluster:
            network = Network()
            client = connect(cluster.addresses, network, max_queries=100_000)
            ask(client.utterance(), files.oracle, queries * 4)
            sizes = [len(request.groups.words) for _, request in network.requests]
            assert max(sizes) <= (16 if "max_queries" in limits else 4096 // 21)
            assert client.stats.failed == 0


@pytest.mark.promise("shared_clients")
def test_a_client_pickles_into_one_that_connects_by_itself(client, files) -> None:
    """Of both faces; the copy has its own connections and counters."""
    queries = random_queries(files.oracle, 31, 50)
    client.utterance().score([[1, 2]], [3])
    again = pickle.loads(pickle.dumps(client))
    assert repr(again) == "Client(not connected)"
    with again:
        assert again.stats.queries == 0
        ask(again.utterance(), files.oracle, queries)
        client.close()
        assert again.utterance().score([[1, 2]], [3]).matched_order[0] >= 1


def test_a_closed_client_says_so(client, cluster, connect) -> None:
    """Every call: ClientClosed, which is no reason to try again, though code that handles a server
    that is down handles it, too. Closing twice, looking at it and copying it still work."""
    utterance, never_connected = client.utterance(), connect(cluster, Network())

    async def later() -> None:
        await AsyncClient(client._core).utterance().score([[1, 2]], [3])

    for one in (client, client, never_connected):
        one.close()
    assert "Client(" in repr(client)
    assert client.stats.queries == 0
    with pickle.loads(pickle.dumps(client)) as copied:
        assert len(copied.utterance().score([[1, 2]], [3])) == 1
    for refused in (
        lambda: utterance.score([[1, 2]], [3]),
        lambda: utterance.score([[]], [3]),
        lambda: utterance.next_words(utterance.null(), 1),
        client.utterance,
        never_connected.utterance,
        lambda: asyncio.run(later()),
    ):
        with pytest.raises(ClientClosed) as caught:
            refused()
        assert isinstance(caught.value, ShardDown) and not caught.value.retryable


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (ClientConfig, "client.deadline_s", "x"),
        (ClientConfig, "client.connect_s", None),
        (ClientConfig, "client.window", "4"),
        (ClientConfig, "client.window", 0),
        (ClientConfig, "client.local_fallback", 3),
        (HeartbeatConfig, "heartbeat_config.interval_s", 0.0),
        (HeartbeatConfig, "heartbeat_config.jitter", 1.0),
        (HeartbeatConfig, "heartbeat_config.down_after", 0),
        (HeartbeatConfig, "heartbeat_config.slow_ratio", float("nan")),
        (FailoverConfig, "failover_config.window_s", 0.5),
        (FailoverConfig, "failover_config.failing", 1.5),
        (FailoverConfig, "failover_config.probes", 0),
        (FailoverConfig, "failover_config.max_wait_s", 0.5),
        (FailoverConfig, "failover_config.slow_s", float("inf")),
    ],
)
def test_a_setting_of_another_type_or_out_of_its_bounds_is_refused_by_name(
    kind: Any, name: str, value: Any
) -> None:
    """With what was found, not as a TypeError of Python's own."""
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}")):
        kind(**{name.rpartition(".")[2]: value})


def test_a_look_that_closing_cuts_short_logs_nothing(client, caplog) -> None:
    """Servers are looked at in the background; the client's end is no fault of theirs."""
    client.utterance()
    table = client._core.table
    client.close()
    table.refresh_quietly(table.known)
    assert not [r for r in caplog.records if r.name.startswith("dlm.client.table")]


def test_closing_ends_calls_in_flight_and_calls_that_wait(cluster, connect, files, network) -> None:
    """Nobody is left waiting for a deadline, and each caller gets an error of its own."""
    client = connect(cluster.addresses, network, window=1, deadline_s=WAIT_S)
    utterance = client.utterance()
    queries = queries_to(files, 0)[:4]
    with network.held():
        futures = [submit(utterance, queries[:1])]
        until(lambda: client._core.load() == {0: (1, 0)})
        futures += [submit(utterance, [query]) for query in queries[1:]]
        client.close()
        waiting = futures[1:]
        errors = [future.exception(WAIT_S) for future in waiting]
    errors.append(futures[0].exception(WAIT_S))
    assert all(isinstance(e, ShardDown) for e in errors)
    assert len(set(map(id, errors))) == len(errors)


def test_closing_while_threads_ask_gives_answers_or_typed_errors(cluster, connect, files) -> None:
    """Each call ends, well before its deadline, with the right bits or a DlmError."""
    queries = random_queries(files.oracle, 32, 30)

    def answered(client: Client, begun: threading.Barrier) -> int:
        utterance = client.utterance()
        begun.wait(WAIT_S)
        for number in range(1000):
            try:
                ask(utterance, files.oracle, queries)
            except ShardDown:
                return number
        return 1000

    for _ in range(5):
        client = connect(cluster, window=1, deadline_s=WAIT_S)
        begun = threading.Barrier(5)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(answered, client, begun) for _ in range(4)]
            begun.wait(WAIT_S)
            client.close()
            assert all(a.result(WAIT_S) < 1000 for a in asked)


def test_closing_ends_the_search_for_a_server_that_sends_the_low_orders(
    cluster, connect, tmp_path
) -> None:
    """All of them fail, and would be asked again."""
    network, tried = Network(), threading.Event()

    class Broken(Scripted):
        def download(self, request: Any, timeout_s: float) -> Any:
            tried.set()
            raise ShardDown("it ended")

    network.connect = lambda address: Broken(network, address)  # type: ignore[method-assign]
    client = connect(cluster.addresses, network, cache_dir=tmp_path, connect_s=WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(client.utterance)
        assert tried.wait(WAIT_S)
        client.close()
        with pytest.raises(ClientClosed):
            opening.result()


def test_a_client_without_servers_is_told_where_it_looked(tmp_path, cache_dir) -> None:
    """No file, no server, an address where nobody listens."""
    config = ClientConfig(cache_dir=cache_dir, connect_s=5)
    with pytest.raises(ConfigError, match=r"cluster\.toml"):
        Client.connect(tmp_path / "cluster.toml", config)
    with pytest.raises(ShardDown, match=r"1 server .*127\.0\.0\.1:9"):
        Client.connect(["127.0.0.1:9"], config)
    with pytest.raises(ShardDown, match="no server addresses"):
        Client.connect([], config)
