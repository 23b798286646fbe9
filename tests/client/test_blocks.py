"""All that is stored after some states, fetched once: any word has the bits that servers give."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.scripted import Clients, Network
from cluster import Cluster, ModelFiles, build
from dlm.client import AsyncClient, Client, ContextBlocks, State, Utterance
from dlm.errors import ProtocolError, ShardDown
from dlm.ngram.query import BIGRAM_FALLBACK
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from models import PlainModel, random_model


def states_of(utterance: Utterance, files: ModelFiles, count: int) -> list[State]:
    """States along n-grams of the model, of all lengths."""
    known = sorted(n for n in files.oracle.ngrams if len(n) > 1)
    found = [utterance.begin(), utterance.null()]
    rng = np.random.default_rng(count)
    while len(found) < count:
        state = utterance.begin()
        for word in known[rng.integers(len(known))]:
            state = utterance.extend([state], [int(word)]).states[0, 0]
            found.append(state)
    return list(dict.fromkeys(found))


def assert_answers(blocks: ContextBlocks, utterance: Utterance, states: Sequence[State]) -> None:
    """Every word of every state, by each of the ways to ask."""
    every = np.arange(utterance.vocabulary_size)
    expected = utterance.extend(states, every)
    for found in (blocks.extend(every), blocks.extend(), blocks.extend([every] * len(states))):
        assert found.log10_prob.tobytes() == expected.log10_prob.tobytes()
        for name in ("matched_order", "ngram_length", "source", "oov"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert list(found.states.reshape(-1)) == list(expected.states.reshape(-1))
    assert blocks.distribution().tobytes() == expected.log10_prob.tobytes()
    for row, word in ((0, 3), (len(states) - 1, 5)):
        assert blocks.score(row, word) == (
            expected.log10_prob[row, word],
            expected.states[row, word],
        )


@pytest.mark.promise("blocks")
def test_blocks_answer_as_servers_do(files: ModelFiles, cluster: Cluster, connect: Clients) -> None:
    """From servers, here and asynchronously; afterwards without a message."""
    network = Network()
    client = connect(cluster.addresses, network)
    utterance = client.utterance()
    states = states_of(utterance, files, 60)
    blocks = utterance.context_blocks(states)
    assert len(blocks) == len(states) == len(blocks.states)
    assert len(network.blocks) == files.manifest.shards  # one message each
    asked, sent = len(network.requests), client.stats.messages
    blocks.extend(np.arange(10))
    assert (len(network.requests), client.stats.messages) == (asked, sent)
    assert_answers(blocks, utterance, states)
    with Client.local(files.directory) as local:
        assert_answers(local.utterance().context_blocks(states), utterance, states)

    async def ask() -> ContextBlocks:
        async with AsyncClient.connect(cluster.addresses, client._core.config) as other:
            return await (await other.utterance()).context_blocks(states)

    assert_answers(asyncio.run(ask()), utterance, states)


@pytest.mark.parametrize(
    "options", [{}, {"encoding": "compact", "bits": 8}], ids=["exact", "8 bits"]
)
@pytest.mark.parametrize(("seed", "order", "words"), [(1, 3, 20), (2, 5, 8), (3, 2, 9), (4, 1, 9)])
def test_blocks_of_any_model_have_the_bits_of_its_queries(
    seed: int, order: int, words: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Suffixes missing, quantised or not; also models that shards have nothing of."""
    files = build(
        random_model(seed, order=order, words=words, per_order=200), tmp_path, 2, **options
    )
    with Client.local(files.directory) as client:
        utterance = client.utterance()
        states = states_of(utterance, files, 25) if order > 1 else [utterance.begin()]
        assert_answers(utterance.context_blocks(states), utterance, states)


def test_states_that_need_no_message_cost_none(
    files: ModelFiles, cluster: Cluster, connect: Clients, network: Network
) -> None:
    """Short ones, pairs under which nothing is stored, and no states at all."""
    utterance = connect(cluster.addresses, network).utterance()
    states = [utterance.begin(), utterance.null()]
    assert_answers(utterance.context_blocks(states), utterance, states)
    assert len(utterance.context_blocks([])) == 0
    assert utterance.context_blocks([]).extend([1, 2]).log10_prob.shape == (0, 2)
    assert network.blocks == []


def test_what_is_too_much_for_a_message_comes_in_several(tmp_path: Path, connect: Clients) -> None:
    """A server that sends at most 64 words at once, and 150 that follow one pair."""
    words = [f"w{i}" for i in range(150)]
    ngrams = {(w,): (-2.0, -0.5) for w in ("<s>", "</s>", "<unk>", *words)}
    ngrams |= {("w0", w): (-1.0, -0.25) for w in words} | {("w1", "w0"): (-0.5, -0.125)}
    ngrams |= {("w1", "w0", w): (-i / 256, None) for i, w in enumerate(words)}
    files = build(PlainModel(3, ngrams), tmp_path, 1)
    with Cluster(files, max_queries=64) as running:
        network = Network()
        utterance = connect(running.addresses, network).utterance()
        state = utterance.extend([utterance.null()], ["w1"]).states[0, 0]
        state = utterance.extend([state], ["w0"]).states[0, 0]
        states = [state, utterance.begin(), state]
        blocks = utterance.context_blocks(states)
        assert [r.skips.tolist() for _, r in network.blocks] == [[0], [64], [128]]
        assert_answers(blocks, utterance, states)


def test_next_words_and_the_distribution_come_from_a_block(
    files: ModelFiles, cluster: Cluster, connect: Clients, network: Network
) -> None:
    """One message each."""
    client = connect(cluster.addresses, network)
    utterance = client.utterance()
    for state in states_of(utterance, files, 12):
        before = len(network.blocks), len(network.requests)
        found, likeliest = utterance.next_distribution(state), utterance.next_words(state, 5)
        assert found.shape == (utterance.vocabulary_size,)
        assert found.dtype == np.float32
        assert len(network.blocks) <= before[0] + 2
        assert len(network.requests) == before[1]
        expected = utterance.extend([state], np.arange(utterance.vocabulary_size)).log10_prob[0]
        assert found.tobytes() == expected.tobytes()
        assert likeliest == [(word, expected[word]) for word, _ in likeliest]


@pytest.mark.slow
def test_servers_that_do_not_know_the_call_are_asked_for_all_words(
    files: ModelFiles, connect: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in a while whether they know it by now, else by Score alone."""
    parse = codec.parse

    def older(message: Any, data: bytes) -> Any:
        found = parse(message, data)
        if isinstance(found, pb.ScoreRequest):
            found.ClearField("context_block")  # what it does not know it leaves unread
        return found

    monkeypatch.setattr(codec, "parse", older)
    with Cluster(files) as running:
        network = Network()
        utterance = connect(running.addresses, network).utterance()
        states = states_of(utterance, files, 12)
        assert_answers(utterance.context_blocks(states), utterance, states)
        tried = len(network.blocks)
        assert tried > 0
        assert_answers(utterance.context_blocks(states), utterance, states)
        assert len(network.blocks) == tried
        assert utterance.next_words(states[3], 3)


@pytest.mark.slow
def test_without_servers_in_time_blocks_are_partial_where_that_is_allowed(
    files: ModelFiles, connect: Clients
) -> None:
    """P(w | v), and every score says so; else the error of the server is raised."""
    with Cluster(files) as running:
        wary = connect(
            running.addresses, bigram_fallback=True, heartbeats=False, deadline_s=5.0
        ).utterance()
        strict = connect(running.addresses, deadline_s=5.0).utterance()
        states = [s for s in states_of(strict, files, 30) if len(s._words) >= 2]
        wary.extend(states, [1, 2])
        running.end()
        with pytest.raises(ShardDown):
            strict.context_blocks(states)
        blocks = wary.context_blocks(states)
        every = np.arange(wary.vocabulary_size)
        found = blocks.extend(every)
        for row, state in enumerate(states):
            block = blocks._blocks[row]
            if block.source != BIGRAM_FALLBACK:  # nothing is stored under its last two words
                continue
            assert (found.source[row] == BIGRAM_FALLBACK).all()
            bits = [files.oracle.score(state._words[-1:], w).log10_prob for w in every.tolist()]
            assert found.log10_prob[row].tobytes() == np.array(bits, np.float32).tobytes()
            assert set(found.states._lengths[row].tolist()) == {3}
        assert (found.source == BIGRAM_FALLBACK).any()


def test_a_reply_that_cannot_be_is_a_protocol_error(
    files: ModelFiles, cluster: Cluster, connect: Clients, network: Network
) -> None:
    """Whoever made it; nothing of it is used, and the next is."""
    utterance = connect(cluster.addresses, network).utterance()
    states = states_of(utterance, files, 30)

    def change(name: str, value: bytes) -> Any:
        def changed(data: bytes) -> bytes:
            reply = pb.ContextBlockReply.FromString(data)
            setattr(reply, name, value)
            return bytes(reply.SerializeToString())

        return changed

    for damage in (change("words", b""), change("totals", b"\1"), lambda data: data[:-1] + b"x"):
        network.change = damage
        with pytest.raises(ProtocolError):
            utterance.context_blocks(states)
        network.change = None
        assert_answers(utterance.context_blocks(states), utterance, states)


def test_counters_tell_of_blocks(files: ModelFiles, cluster: Cluster, connect: Clients) -> None:
    """A context of two words or more is a query, asked once; the others cost nothing at all."""
    client = connect(cluster.addresses)
    utterance = client.utterance()
    states = states_of(utterance, files, 20)
    before = client.stats
    utterance.context_blocks([*states, states[-1]])
    after = client.stats
    long = [state for state in [*states, states[-1]] if len(state._words) >= 2]
    assert after.queries - before.queries == len(long)
    assert 0 < after.messages - before.messages <= files.manifest.shards
    assert after.sent_queries - before.sent_queries <= len(states)
    assert pickle.loads(pickle.dumps(client)).utterance().model_info == utterance.model_info
