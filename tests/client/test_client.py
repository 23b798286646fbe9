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
    ask,
    assert_equal,
    assert_sentence,
    queries_to,
    random_queries,
    random_sentences,
    submit,
)
from client.scripted import Network, free, settle
from cluster import WAIT_S, Cluster, build, until
from dlm.client import AsyncClient, Client, ClientConfig
from dlm.client.call import Call
from dlm.client.core import SURELY_EVERYWHERE
from dlm.client.lanes import Attempt, Message
from dlm.client.runtime import closed_error
from dlm.errors import (
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    DlmError,
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
    queries = random_queries(served.oracle, 1, 300)
    answers = served.client.utterance().score([c for c, _ in queries], [w for _, w in queries])
    assert_equal(answers, [served.oracle.score(c, w) for c, w in queries])


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


# ---------------------------------------------------------------- what may be given


def test_words_may_be_text_bytes_ids_or_arrays(client, files) -> None:
    """All forms of the same queries give the same bits."""
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


def test_word_ids_may_lie_in_memory_in_any_way(client, files) -> None:
    """Slices of a matrix, another order of its axes or bytes, and what is not aligned."""
    utterance = client.utterance()
    size = len(files.oracle.vocabulary)
    table = (np.arange(24, dtype=np.uint32).reshape(3, 8) * 7) % size
    states = [utterance.begin()] * 3
    moved = np.frombuffer(b"\0" + table.tobytes(), np.uint32, offset=1).reshape(3, 8)
    layouts = [table, table[:, 1:2], table[:, ::2], np.asfortranarray(table), moved]
    for asked in [*layouts, table.astype(">u4"), table.astype(np.int16)]:
        found = utterance.extend(states, asked)
        expected = utterance.extend(states, asked.tolist())
        assert found.log10_prob.tobytes() == expected.log10_prob.tobytes()
        assert found.states.keys() == expected.states.keys()


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
    """Nothing holds itself: their arrays go with the last who looks at them."""
    utterance = client.utterance()
    queries = random_queries(files.oracle, 1, 50)
    ask(utterance, files.oracle, queries)
    kinds = (Call, Message, Attempt)

    def alive() -> list[Any]:
        """All of this process, some perhaps of clients that other tests left."""
        return [found for found in gc.get_objects() if isinstance(found, kinds)]

    gc.collect()
    gc.disable()
    try:
        of_others = alive()  # held, so that they neither go nor count
        for _ in range(5):
            ask(utterance, files.oracle, queries)
        until(lambda: len(alive()) == len(of_others))
    finally:
        gc.enable()


def test_sentences_split_at_spaces_tabs_and_line_ends_only(client, files) -> None:
    """U+00A0 and U+3000 are part of a word; bytes and lists of words are taken too."""
    utterance = client.utterance()
    words = files.words()[3:6]
    joined = "\t ".join(words)
    scores = utterance.score_sentences(
        [joined, f" {joined}\r\n", joined.encode(), words, [w.encode() for w in words]]
    )
    for score in scores:
        assert_sentence(score, files.oracle, words)
    (odd,) = utterance.score_sentences([f"{words[0]}\u00a0{words[1]}\u3000{words[2]}"])
    assert (odd.tokens, odd.oovs) == (2, 1)
    assert utterance.score_sentences([]) == []
    (empty,) = utterance.score_sentences([""], bos=False, eos=False)
    assert (empty.tokens, empty.log10_prob) == (0, 0.0)


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


def test_questions_without_an_answer_are_refused(client) -> None:
    """Ids out of range and shapes that do not fit: QueryError, and nothing is sent."""
    utterance = client.utterance()
    size = utterance.vocabulary_size
    begin = utterance.begin()
    before = client.stats.messages
    for question in (
        lambda: utterance.score([[1]], [size]),
        lambda: utterance.score([[1]], [-1]),
        lambda: utterance.score([[size]], [1]),
        lambda: utterance.score([[1, 1]], np.array([size])),
        lambda: utterance.score([[1, 1]], np.array([-1])),
        lambda: utterance.score([np.array([1 << 40])], [1]),
        lambda: utterance.score([[1]], [1, 2]),
        lambda: utterance.score([[1], [2]], [1]),
        lambda: utterance.score(["a"], ["a"]),
        lambda: utterance.score([["a"]], "a"),
        lambda: utterance.score([[1], [1]], np.array([[1, 2], [3, 4]])),
        lambda: utterance.extend([begin], "a"),
        lambda: utterance.extend([begin], [[1], [2]]),
        lambda: utterance.extend([begin, begin], [[1, 2], [1]]),
        lambda: utterance.extend([begin], np.zeros((1, 1, 1), np.int64)),
        lambda: utterance.extend([begin], [size]),
        lambda: utterance.next_words(begin, 0),
        lambda: utterance.extend([begin], [None]),
        lambda: utterance.extend([begin], [1, None]),
        lambda: utterance.extend(begin, [1]),
        lambda: utterance.score([[1]], [None]),
        lambda: utterance.score([[None]], [1]),
        lambda: utterance.score_sentences("a b"),
        lambda: utterance.score_sentences(b"a b"),
    ):
        with pytest.raises(QueryError):
            question()
    assert client.stats.messages == before


# ---------------------------------------------------------------- states


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
                assert isinstance(caught.value, TypeError)
                assert isinstance(caught.value, QueryError)
    with pytest.raises(TypeError):
        utterance.extend([("a", "b")], [1])  # type: ignore[list-item]


# ---------------------------------------------------------------- many at once


@pytest.mark.promise("shared_clients")
def test_many_threads_each_get_their_own_answers(cluster, connect, files) -> None:
    """A window of 1 and few queries a message, so that calls wait, merge and split all the time."""
    client = connect(cluster, window=1, max_queries=50)
    batches = [random_queries(files.oracle, 100 + i, 60) for i in range(40)]

    def ask(batch):
        return client.utterance().score([c for c, _ in batch], [w for _, w in batch])

    with ThreadPoolExecutor(8) as pool:
        for batch, answers in zip(batches, pool.map(ask, batches), strict=True):
            assert_equal(answers, [files.oracle.score(c, w) for c, w in batch])
    until(lambda: free(client))


def test_many_coroutines_each_get_their_own_answers(cluster, cache_dir, files) -> None:
    """As above, on one event loop."""
    batches = [random_queries(files.oracle, 200 + i, 40) for i in range(60)]

    async def ask_all():
        config = ClientConfig(deadline_s=20.0, window=1, max_queries=64, cache_dir=cache_dir)
        async with await AsyncClient.connect(cluster.addresses, config) as client:
            asked = [
                client.utterance().score([c for c, _ in b], [w for _, w in b]) for b in batches
            ]
            return await asyncio.gather(*asked)

    for batch, answers in zip(batches, asyncio.run(ask_all()), strict=True):
        assert_equal(answers, [files.oracle.score(c, w) for c, w in batch])


def test_what_gathers_behind_a_full_window_leaves_in_one_message(cluster, connect, files) -> None:
    """Five utterances ask while one message is held: one more message, no query in it twice."""
    network = Network()
    client = connect(cluster.addresses, network, window=1)
    first, *rest = queries_to(files, 0)[:8]
    utterances = [client.utterance() for _ in range(6)]

    before = cluster.messages()
    with network.held():
        futures = [submit(utterances[0], [first])]
        until(lambda: client._core.load() == {0: (1, 0)})
        futures += [submit(u, rest[:5]) for u in utterances[1:5]]
        futures.append(submit(utterances[5], [*rest, first]))
        until(lambda: client._core.load() == {0: (1, 5)})
        assert len(network.requests) == 1
    asked = [[first]] + [rest[:5]] * 4 + [[*rest, first]]
    for future, queries in zip(futures, asked, strict=True):
        assert_equal(future.result(WAIT_S), [files.oracle.score(c, w) for c, w in queries])
    assert cluster.messages() - before == 2
    _, second = network.requests[1]
    assert len(second.groups.words) == 8
    assert client.stats.duplicates == 4 * 5 + 8 - 8
    assert client.stats.sent_queries == 9


def settled(client: Client, call: Call) -> Call:
    """A call of which the loop knows."""
    settle(client)
    return call


def test_what_only_would_wait_is_refused_at_once_and_small_calls_still_find_low_orders(
    cluster, connect, files
) -> None:
    """One shard full: a large call is told before any work; what was let in is answered whole."""
    network = Network()
    client = connect(cluster.addresses, network, window=1, max_queries=64)
    utterance = client.utterance()
    shards = range(files.manifest.shards)
    queries = [
        query
        for some in zip(*(queries_to(files, s) for s in shards), strict=False)
        for query in some
    ]
    rng = np.random.default_rng(4)
    words = rng.integers(0, utterance.vocabulary_size, 32 * SURELY_EVERYWHERE).tolist()
    many = [(queries[i % len(queries)][0], word) for i, word in enumerate(words)]
    waiting = []
    with network.held():
        while not settled(client, asked := submit(utterance, many)).done():
            waiting.append(asked)
        assert len(waiting) >= 2
        before = client.stats
        assert isinstance(submit(utterance, many).exception(0), Overloaded)
        assert isinstance(submit(utterance, many, 1e-9).exception(0), DeadlineExceeded)
        assert client.stats == before
        ask(utterance, files.oracle, [((), word) for _, word in queries[:5]])
    expected = [files.oracle.score(*query) for query in many]
    for future in waiting:
        assert_equal(future.result(WAIT_S), expected)
    until(lambda: free(client))
    ask(utterance, files.oracle, many)


@pytest.mark.slow
def test_no_message_is_larger_than_the_servers_take(files, connect) -> None:
    """Servers that take 16 queries at most get no more, whatever the client's own setting."""
    queries = random_queries(files.oracle, 30, 300)
    for limits in ({"max_queries": 16}, {"max_message_bytes": 4096}):
        with Cluster(files, **limits) as cluster:
            network = Network()
            client = connect(cluster.addresses, network, max_queries=100_000)
            answers = client.utterance().score(
                [c for c, _ in queries] * 4, [w for _, w in queries] * 4
            )
            assert_equal(answers, [files.oracle.score(c, w) for c, w in queries] * 4)
            sizes = [len(request.groups.words) for _, request in network.requests]
            assert max(sizes) <= (16 if "max_queries" in limits else 4096 // 21)
            assert client.stats.failed == 0


# ---------------------------------------------------------------- life


@pytest.mark.promise("shared_clients")
def test_a_client_pickles_into_one_that_connects_by_itself(client, files) -> None:
    """Of both faces; the copy has its own connections and counters."""
    queries = random_queries(files.oracle, 31, 50)
    expected = [files.oracle.score(c, w) for c, w in queries]
    client.utterance().score([[1, 2]], [3])
    again = pickle.loads(pickle.dumps(client))
    assert repr(again) == "Client(not connected)"
    with again:
        assert again.stats.queries == 0
        assert_equal(
            again.utterance().score([c for c, _ in queries], [w for _, w in queries]), expected
        )
        client.close()
        assert again.utterance().score([[1, 2]], [3]).matched_order[0] >= 1


def test_a_closed_client_says_so(client) -> None:
    """Every call: ClientClosed. Closing twice, looking at it and copying it still work."""
    utterance = client.utterance()
    client.close()
    client.close()
    assert "Client(" in repr(client)
    assert client.stats.queries == 0
    with pytest.raises(ClientClosed):
        utterance.score([[1, 2]], [3])
    with pytest.raises(ClientClosed):
        utterance.score([[]], [3])
    with pytest.raises(ClientClosed):
        utterance.next_words(utterance.null(), 1)
    with pytest.raises(ClientClosed):
        client.utterance()

    async def ask() -> None:
        async_client = AsyncClient(client._core)
        await async_client.utterance().score([[1, 2]], [3])

    with pytest.raises(ClientClosed):
        asyncio.run(ask())


def test_a_client_that_was_closed_is_no_reason_to_try_again() -> None:
    """Code that handles a server that is down handles it, too."""
    assert issubclass(ClientClosed, ShardDown)
    assert not closed_error().retryable


@pytest.mark.parametrize("deadline_s", [-1, 0, "x", float("nan")])
def test_a_handle_with_a_deadline_that_is_none_is_refused_when_it_is_opened(
    client, deadline_s
) -> None:
    """Not at its first call, elsewhere in the program."""
    with pytest.raises(QueryError, match=f"deadline is {re.escape(repr(deadline_s))}"):
        client.utterance(deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"deadline_s": "x"}, "client.deadline_s is 'x'"),
        ({"connect_s": None}, "client.connect_s is None"),
        ({"window": "4"}, "client.window is '4'"),
        ({"window": 0}, "client.window is 0"),
        ({"local_fallback": 3}, "client.local_fallback is 3"),
    ],
)
def test_settings_of_another_type_are_refused_by_name(settings, said: str) -> None:
    """With what is expected, not as a TypeError of Python's own."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        ClientConfig(**settings)


def test_a_look_that_closing_cuts_short_logs_nothing(client, caplog) -> None:
    """Servers are looked at in the background; the client's end is no fault of theirs."""
    client.utterance()
    table = client._core.table
    client.close()
    table.refresh_quietly(table.known)
    assert not [r for r in caplog.records if r.name.startswith("dlm.client.table")]


def test_what_is_known_of_a_server_ends_once_the_table_has_it_no_longer(cluster, connect) -> None:
    """Addresses come and go."""
    client = connect(cluster)
    client.utterance()
    core, runtime = client._core, client._core._links.runtime

    def note() -> None:
        for address in ("gone:1", "asked:1", *cluster.addresses):
            runtime.note(address, DeadlineExceeded("late"), 0.0)
            runtime.note(address, ShardDown("lost"), 0.0)
        runtime.outstanding["asked:1"] += 5

    core._delivery.tell(note)
    core.table.refresh_quietly(core.table.known)
    left = {"asked:1", *cluster.addresses}
    until(lambda: "gone:1" not in runtime.missed and runtime.missed.keys() == left)
    assert runtime.usual.keys() == left


def test_a_client_that_was_never_connected_and_is_closed_says_so(cluster, connect) -> None:
    """The first call finds the servers, unless the client was closed before."""
    client = connect(cluster.addresses, Network())
    client.close()
    with pytest.raises(ClientClosed):
        client.utterance()


def test_closing_ends_calls_in_flight_and_calls_that_wait(cluster, connect, files) -> None:
    """Nobody is left waiting for a deadline, and each caller gets an error of its own."""
    network = Network()
    client = connect(cluster.addresses, network, window=1, deadline_s=WAIT_S)
    utterance = client.utterance()
    queries = queries_to(files, 0)[:4]
    with network.held():
        futures = [submit(utterance, [query]) for query in queries]
        client.close()
        waiting = futures[1:]
        errors = [future.exception(WAIT_S) for future in waiting]
    errors.append(futures[0].exception(WAIT_S))
    assert all(isinstance(e, ShardDown) for e in errors)
    assert len(set(map(id, errors))) == len(errors)


def test_closing_while_threads_ask_gives_answers_or_typed_errors(cluster, connect, files) -> None:
    """Each call ends, well before its deadline, with the right bits or a DlmError."""
    queries = random_queries(files.oracle, 32, 30)
    expected = [files.oracle.score(c, w) for c, w in queries]
    for _ in range(5):
        client = connect(cluster, window=1, deadline_s=WAIT_S)
        begun = threading.Barrier(5)

        def ask(client=client, begun=begun) -> int:
            utterance = client.utterance()
            begun.wait(WAIT_S)
            answered = 0
            for _ in range(1000):
                try:
                    answers = utterance.score([c for c, _ in queries], [w for _, w in queries])
                except DlmError as exc:
                    assert isinstance(exc, ShardDown)
                    return answered
                assert_equal(answers, expected)
                answered += 1
            return answered

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask) for _ in range(4)]
            begun.wait(WAIT_S)
            client.close()
            assert all(a.result(WAIT_S) < 1000 for a in asked)


def test_closing_ends_the_search_for_a_server_that_sends_the_low_orders(
    cluster, connect, tmp_path
) -> None:
    """All of them fail, and would be asked again."""
    network, tried = Network(), threading.Event()
    made = network.connect

    def broken(address: str) -> Any:
        def download(request: Any, timeout_s: float) -> Any:
            tried.set()
            raise ShardDown("it ended")

        connection: Any = made(address)
        connection.download = download
        return connection

    network.connect = broken  # type: ignore[method-assign]
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
    (tmp_path / "cluster.toml").write_text('[[server]]\naddress = "nowhere"\n')
    with pytest.raises(ConfigError, match="host:port"):
        Client.connect(tmp_path / "cluster.toml", config)
    with pytest.raises(ShardDown, match=r"1 server .*127\.0\.0\.1:9"):
        Client.connect(["127.0.0.1:9"], config)
    with pytest.raises(ShardDown, match="no server addresses"):
        Client.connect([], config)


@pytest.mark.parametrize("address", ["127.0.0.1", "cluster", b"127.0.0.1:1", 50060])
def test_an_address_without_a_port_is_refused_as_such(address, cache_dir) -> None:
    """Nobody is looked for at a port that gRPC makes up."""
    with pytest.raises(ConfigError, match="host:port"):
        Client.connect([address], ClientConfig(cache_dir=cache_dir))
