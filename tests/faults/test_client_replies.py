"""Replies that are damaged, exchanged or never read: typed errors, never a score, nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from client.questions import ask, assert_equal, queries_to, submit
from client.scripted import Clients, Network, free, settle
from cluster import WAIT_S, Cluster, until
from dlm.client import AsyncClient, Client
from dlm.client.call import Call
from dlm.client.core import Core
from dlm.errors import DlmError, ProtocolError, ShardDown
from dlm.ngram.query import Answers
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from models import packed


@pytest.fixture
def network() -> Network:
    """Stands between the client and the servers."""
    return Network()


@pytest.fixture
def client(cluster: Cluster, network: Network, connect: Clients) -> Client:
    """A client whose messages pass through `network`, one at a time a shard."""
    return connect(cluster.addresses, network, window=1)


def without_sequence(data: bytes) -> bytes:
    """The part of a reply that its checksum covers, and the checksum."""
    message = pb.ScoreReply.FromString(data)
    message.ClearField("sequence")
    assert data.startswith(message.SerializeToString())
    return message.SerializeToString()


def flipped(data: bytes, at: int, bit: int) -> bytes:
    """One bit changed."""
    out = bytearray(data)
    out[at] ^= 1 << bit
    return bytes(out)


@pytest.mark.promise("damaged_replies")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data, at: flipped(data, at, at % 8),
        lambda data, at: data[:at],
        lambda data, at: data + bytes([at]),
    ],
    ids=["flipped", "cut", "longer"],
)
def test_no_damaged_reply_becomes_a_score(
    client: Client, network: Network, files, damage: Callable[[bytes, int], bytes]
) -> None:
    """At every byte of a reply, each sent to a call of its own; not those of the sequence, at its
    end: by then the stream has read it (see test_exchange)."""
    queries = queries_to(files, 0)[:2]
    utterance = client.utterance()
    sizes: list[int] = []
    network.change = lambda data: sizes.append(len(without_sequence(data))) or data
    ask(utterance, files.oracle, queries)
    for at in range(sizes[0]):
        network.change = lambda data, at=at: damage(data, at)
        with pytest.raises(ProtocolError) as caught:
            ask(utterance, files.oracle, queries)
        assert any("127.0.0.1" in note for note in caught.value.__notes__)
    network.change = None
    ask(utterance, files.oracle, queries)
    assert free(client)
    assert client.stats.failed == sizes[0]


@pytest.mark.promise("damaged_replies")
@pytest.mark.parametrize("shard", [0, 1])
def test_the_reply_to_another_request_becomes_no_score(
    client: Client, network: Network, files, shard: int
) -> None:
    """As many answers, from the same shard or another: each request's reply is its own alone."""
    utterance = client.utterance()
    kept: list[bytes] = []
    network.change = lambda data: kept.append(data) or data
    ask(utterance, files.oracle, queries_to(files, 0)[:3])
    network.change = lambda data: kept[0]
    with pytest.raises(ProtocolError):
        ask(utterance, files.oracle, queries_to(files, shard)[3:6])
    network.change = None
    ask(utterance, files.oracle, queries_to(files, shard)[3:6])


def decoded(network: Network, data: bytes) -> tuple[codec.ScoreRequest, Answers]:
    """The last request, and the answers of its reply."""
    (_, request) = network.requests[-1]
    answers = codec.decode_score_reply(
        data,
        shard_set=request.shard_set,
        shard=request.shard,
        queries=len(request.groups.words),
        request_checksum=request.checksum,
    )
    return request, answers


def test_a_reply_with_too_few_answers_and_the_right_checksum_becomes_no_score(
    client: Client, network: Network, files
) -> None:
    """A server that loses count: the checksum holds, the number does not."""

    def short(data: bytes) -> bytes:
        request, answers = decoded(network, data)
        fewer = type(answers)(
            *(getattr(answers, f)[:-1] for f in answers.__slots__ if f != "source")
        )
        return codec.encode_score_reply(request, packed(fewer))

    network.change = short
    with pytest.raises(ProtocolError, match=r"2 .*log10_prob; .*3"):
        ask(client.utterance(), files.oracle, queries_to(files, 0)[:3])
    network.change = None
    ask(client.utterance(), files.oracle, queries_to(files, 0)[:3])


def answering(network: Network, **fields: object) -> Callable[[bytes], bytes]:
    """Puts these values into the first answer of each reply, with the checksum that they give."""

    def change(data: bytes) -> bytes:
        request, answers = decoded(network, data)
        arrays = {name: getattr(answers, name).copy() for name in answers.__slots__[:4]}
        for name, value in fields.items():
            arrays[name][0] = value
        return codec.encode_score_reply(request, packed(type(answers)(**arrays)))

    return change


@pytest.mark.parametrize(
    "fields",
    [
        {"log10_prob": float("nan")},
        {"log10_prob": float("inf")},
        {"log10_prob": 5.0},
        {"log10_prob": 1e-6},
        {"log10_prob": float("inf"), "matched_order": 1, "ngram_length": 1, "state_length": 1},
        {"log10_prob": float("nan"), "matched_order": 1, "ngram_length": 1, "state_length": 1},
        {"matched_order": 2},
        {"matched_order": 5, "ngram_length": 5},
        {"matched_order": 255, "ngram_length": 255},
        {"ngram_length": 3},
        {"ngram_length": 5},
        {"ngram_length": 255},
        {"state_length": 4},
        {"state_length": 255},
        {"matched_order": 1, "ngram_length": 2, "state_length": 3},
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_one_becomes_no_score(
    client: Client, network: Network, files, fields: dict[str, float]
) -> None:
    """After contexts of three words in a model of order 4, all of which it holds; the checksum is
    right. With `bigram_fallback` the low orders answer, as for any fault of a server."""
    network.change = answering(network, **fields)
    queries = queries_to(files, 0)[:3]
    with pytest.raises(ProtocolError, match="answer 0 "):
        ask(client.utterance(), files.oracle, queries)
    network.change = answering(network)
    ask(client.utterance(), files.oracle, queries)


def test_an_answer_is_checked_by_the_context_it_was_asked_after(
    cluster: Cluster, network: Network, connect: Clients, files
) -> None:
    """Three words of a 3-gram cannot be matched by four; of several contexts, each has its own
    bound. A state longer than its history would bring words into it that nobody said."""
    client = connect(cluster.addresses, network, window=1)
    long = queries_to(files, 0)[:4]
    short = [(context[1:], word) for context, word in long]
    impossible = {"matched_order": 4, "ngram_length": 4, "state_length": 3}
    for queries in (short, short + long):
        network.change = answering(network, **impossible)
        with pytest.raises(ProtocolError, match="context of 2 words"):
            ask(client.utterance(), files.oracle, queries)
        network.change = None
        ask(client.utterance(), files.oracle, queries)


def test_a_probability_of_zero_is_an_answer(client: Client, network: Network, files) -> None:
    """Models may hold -inf."""
    network.change = answering(network, log10_prob=float("-inf"))
    (context, word) = queries_to(files, 0)[0]
    answers = client.utterance().score([context], [word])
    assert answers.log10_prob.tolist() == [float("-inf")]


def test_callers_who_share_a_message_each_get_an_error_of_their_own(
    client: Client, network: Network, files
) -> None:
    """One object raised in several threads would mix their traces and grow for ever."""
    utterance = client.utterance()
    with network.held():
        first, *others = queries_to(files, 0)[:10]
        futures = [submit(utterance, [first])]
        settle(client)  # it is on its way alone
        futures += [submit(utterance, [query]) for query in others]
        settle(client)
        network.change = lambda data: data[:-1]
    errors = [future.exception(WAIT_S) for future in futures]
    assert len(network.requests) == 2
    assert all(isinstance(e, ProtocolError) for e in errors)
    assert len(set(map(id, errors))) == len(errors)
    assert len({id(e.__notes__) for e in errors}) == len(errors)
    assert all(len(e.__notes__) == 1 for e in errors)
    assert all(e.__traceback__ is None for e in errors[1:])


@pytest.mark.parametrize("fault", [ShardDown("gone"), RuntimeError("a fault in the program")])
def test_a_long_queue_that_fails_at_once_takes_no_stack(
    cluster: Cluster, network: Network, connect: Clients, files, fault: Exception
) -> None:
    """1,200 messages wait, then each fails while it is sent; every caller is told, in order."""
    client = connect(cluster.addresses, network, window=1, max_queries=1)
    utterance = client.utterance()
    queries = queries_to(files, 0)
    with network.held():
        futures = [submit(utterance, [queries[i % len(queries)]]) for i in range(1200)]
        network.instant = fault
    assert_equal(futures[0].result(WAIT_S), [files.oracle.score(*queries[0])])
    for future in futures[1:]:
        error = future.exception(WAIT_S)
        assert isinstance(error, DlmError)
        assert str(fault) in str(error)
    until(lambda: free(client))
    network.instant = None
    ask(utterance, files.oracle, queries)


def test_a_broken_partial_model_leaves_nobody_waiting(
    cluster: Cluster, network: Network, connect: Clients, files, monkeypatch
) -> None:
    """The first error reaches the caller, with a note."""

    def broken(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(Call, "_fall_back_to_bigrams", broken)
    client = connect(cluster.addresses, network, bigram_fallback=True)
    network.change = lambda data: b""
    with pytest.raises(ProtocolError) as caught:
        ask(client.utterance(), files.oracle, queries_to(files, 0)[:3])
    assert any("broken" in note for note in caught.value.__notes__)
    until(lambda: free(client))


# ---------------------------------------------------------------- callers who give up


async def test_cancelled_calls_leak_nothing_and_what_waited_is_never_sent(
    cluster: Cluster, network: Network, connect: Clients, files
) -> None:
    """One call in flight and five that wait are cancelled; the sixth that waits is answered."""
    config = connect(cluster.addresses, network, window=1)._core.config
    queries = queries_to(files, 0)[:7]
    oracle = files.oracle

    core = Core(connect.opened[0]._core.table.endpoints, config, connect=network.connect)
    async with AsyncClient(core) as client:
        core.snapshot()
        utterance = client.utterance()
        with network.held():
            tasks = [asyncio.create_task(utterance.score([c], [w])) for c, w in queries[:1]]
            await asyncio.to_thread(until, lambda: core.load() == {0: (1, 0)})
            tasks += [asyncio.create_task(utterance.score([c], [w])) for c, w in queries[1:]]
            await asyncio.to_thread(until, lambda: core.load() == {0: (1, 6)})
            for task in tasks[:6]:
                task.cancel()
            ended = await asyncio.gather(*tasks[:6], return_exceptions=True)
            assert all(isinstance(e, asyncio.CancelledError) for e in ended)
        assert_equal(await tasks[6], [oracle.score(*queries[6])])
        asked = [len(request.groups.words) for _, request in network.requests]
        assert asked == [1, 1]
        until(lambda: free(client))  # type: ignore[arg-type]
        answers = await utterance.score([c for c, _ in queries], [w for _, w in queries])
        assert_equal(answers, [oracle.score(c, w) for c, w in queries])


def test_an_event_loop_that_closed_before_the_answer_came_harms_nobody(
    cluster: Cluster, network: Network, client: Client, files
) -> None:
    """The reply arrives when its loop is gone; the client goes on, on another loop and without."""
    query = queries_to(files, 0)[0]

    async def abandon() -> None:
        utterance = AsyncClient(client._core).utterance()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(utterance.score([query[0]], [query[1]]), 0.01)

    with network.held():
        asyncio.run(abandon())
    until(lambda: free(client))
    ask(client.utterance(), files.oracle, [query])


def test_a_call_that_failed_in_one_part_sends_no_more_of_the_others(
    cluster: Cluster, network: Network, connect: Clients, files
) -> None:
    """Ten messages of one call, a window of 1: after the first failure nothing more is sent."""
    client = connect(cluster.addresses, network, window=1, max_queries=5)
    network.change = lambda data: b""
    with network.held():
        future = submit(client.utterance(), queries_to(files, 0)[:50])
    assert isinstance(future.exception(WAIT_S), ProtocolError)
    until(lambda: free(client))
    assert len(network.requests) == 1
    network.change = None
    ask(client.utterance(), files.oracle, queries_to(files, 0)[:50])
