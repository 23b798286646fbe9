"""Exchange of a real server, message by message."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from cluster import WAIT_S, until
from dlm.server import replies
from dlm.server.health import Event, ServingState
from dlm.wire import codec, pairs
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason, reason_of
from http2 import Peer, wait_ended
from server.calls import Stream, seal, unread_reply

UNREAD = ("server.stream.unread", "server.reply.undelivered")


@pytest.fixture
def stream(callers) -> Iterator[Stream]:
    """A stream to shard 0."""
    made = Stream(callers[0])
    yield made
    made.end()


@pytest.mark.parametrize("contexts", [1, 20, 700])
def test_every_message_gets_the_oracles_answers_under_its_sequence(
    sharded, stream, contexts: int
) -> None:
    """Small ones in the stream's turn, large ones from threads, whichever is ready first."""
    rng = np.random.default_rng(contexts)
    asked = {n: sharded.questions.ask(rng, 0, contexts) for n in range(7, 15)}
    for sequence, one in asked.items():
        stream.put(one.data, sequence)
    for _ in range(len(asked)):
        message, data = stream.take()
        assert message.reason == ""
        sharded.questions.verify(0, asked.pop(message.sequence), data)
    assert not asked


@pytest.mark.parametrize("paired", [True, False])
def test_every_message_sent_after_a_reply_gets_its_answers(
    sharded, stream, monkeypatch, paired: bool
) -> None:
    """Small ones between large ones, whether or not gRPC sends a reply with the next read."""
    if not paired:
        monkeypatch.setattr(pairs, "AVAILABLE", False)
    rng = np.random.default_rng(8)
    for sequence, contexts in enumerate([3, 3, 700, 3, 500, 3, 3, 3]):
        asked = sharded.questions.ask(rng, 0, contexts)
        stream.put(asked.data, sequence)
        message, data = stream.take()
        assert message.sequence == sequence
        sharded.questions.verify(0, asked, data)


def test_a_small_reply_that_nobody_reads_is_no_load_and_is_not_followed(sharded, gated) -> None:
    """gRPC has it, and reads no further message of that stream until it is read."""
    _, server, caller = gated()
    metrics = server.server.service.metrics
    peer, asked = unread_reply(sharded, server)
    peer.ask_more(asked.data)
    other = Stream(caller)
    other.put(asked.data, 1)
    sharded.questions.verify(0, asked, other.take()[1])
    until(lambda: metrics.in_flight == 0)
    assert metrics.messages == 3
    peer.let_come(1 << 20)
    until(lambda: metrics.messages == 4)
    peer.close()
    other.end()


def test_a_refusal_names_its_message_and_the_stream_goes_on(sharded, stream) -> None:
    """Damage, a foreign shard set and a shard that is another's, each between good messages."""
    rng = np.random.default_rng(1)
    good = sharded.questions.ask(rng, 0)
    other = sharded.questions.ask(rng, 1)
    damaged = bytearray(good.data)
    damaged[-1] ^= 1  # of the checksum
    foreign = pb.ScoreRequest.FromString(good.data)
    foreign.shard_set = bytes(16)
    for sequence, (data, reason) in enumerate(
        [
            (bytes(damaged), "CHECKSUM"),
            (seal(foreign), "WRONG_SHARD_SET"),
            (other.data, "WRONG_SHARD"),
        ],
        start=1,
    ):
        stream.put(data, sequence)
        message, _ = stream.take()
        assert (message.sequence, message.reason) == (sequence, reason)
        assert message.message and not message.log10_probs
        codec.check_refusal(message)
        stream.put(good.data, 100)
        sharded.questions.verify(0, good, stream.take()[1])


def test_bytes_that_are_no_message_end_the_stream(stream) -> None:
    """With the reason in the trailing metadata."""
    stream.put_bytes(b"\xff\xff\xff")
    with pytest.raises(grpc.RpcError) as caught:
        stream.take()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("dlm-reason", "MALFORMED") in [tuple(m) for m in caught.value.trailing_metadata()]


def test_a_message_that_waited_longer_than_it_is_worth_is_not_worked_on(sharded, gated) -> None:
    """The second left a second after the first, and came ten seconds after it."""
    clock = [100.0]
    shard, _, caller = gated(clock=lambda: clock[0])
    stream = Stream(caller)
    asked = sharded.questions.ask(np.random.default_rng(2), 0)
    stream.put(asked.data, 1, timeout_us=30_000_000, sent_us=5_000_000)
    sharded.questions.verify(0, asked, stream.take()[1])
    calls = shard.calls
    clock[0] += 10.0
    stream.put(asked.data, 2, timeout_us=8_000_000, sent_us=6_000_000)
    message, _ = stream.take()
    assert (message.sequence, message.reason) == (2, "LATE")
    assert shard.calls == calls
    stream.put(asked.data, 3, timeout_us=10_000_000, sent_us=6_000_000)
    sharded.questions.verify(0, asked, stream.take()[1])
    stream.end()


def test_a_server_that_drains_answers_what_comes_until_its_clients_have_moved(
    sharded, gated, monkeypatch
) -> None:
    """Heartbeats say DRAINING first; it ends as soon as the stream does, not after
    drain_grace_s."""
    monkeypatch.setattr("dlm.server.life.QUIET_S", WAIT_S)  # this client may be slow to ask
    _, server, caller = gated(drain_grace_s=WAIT_S)
    stream = Stream(caller)
    rng = np.random.default_rng(4)
    stream.put(sharded.questions.ask(rng, 0).data, 1)
    stream.take()
    server.post(Event.STOP)
    until(lambda: server.server.service.state is ServingState.DRAINING)
    for number in range(2, 20):
        asked = sharded.questions.ask(rng, 0, 1500 if number == 5 else 20)
        stream.put(asked.data, number)
        sharded.questions.verify(0, asked, stream.take()[1])
        assert caller.beat().state == pb.SERVER_STATE_DRAINING
    assert not server.status.done()
    stream.end()
    assert server.status.result(WAIT_S) == 0


def test_a_server_that_drains_does_not_wait_for_clients_that_ask_nothing(
    sharded, gated, monkeypatch, asked
) -> None:
    """Their stream stays open for as long as they live."""
    monkeypatch.setattr("dlm.server.life.QUIET_S", 0.05)
    _, server, caller = gated(drain_grace_s=3600.0)
    stream = Stream(caller)
    stream.put(asked.data, 1)
    sharded.questions.verify(0, asked, stream.take()[1])
    server.post(Event.STOP)
    assert server.status.result(WAIT_S) == 0


def test_a_server_that_goes_away_refuses_what_comes_and_ends_the_stream(sharded, gated) -> None:
    """A message in a thread holds the drain up; what comes meanwhile is told to ask another."""
    shard, server, caller = gated(drain_grace_s=0.0)
    stream = Stream(caller)
    rng = np.random.default_rng(3)
    large, small = sharded.questions.ask(rng, 0, 1500), sharded.questions.ask(rng, 0)
    shard.gate.clear()
    stream.put(large.data, 1)
    while not shard.calls or not server.server.service.metrics.in_flight:
        assert shard.entered.acquire(timeout=WAIT_S)
    server.post(Event.STOP)
    until(lambda: server.server.service.state is ServingState.DRAINING)
    stream.put(small.data, 2)
    assert stream.take()[0].reason == "DRAINING"
    shard.gate.set()
    sharded.questions.verify(0, large, stream.take()[1])
    assert server.status.result(WAIT_S) == 0
    with pytest.raises((grpc.RpcError, StopIteration)):
        while True:
            stream.take()


@pytest.mark.parametrize("inline_queries", [65_536, 0])
def test_a_client_that_reads_nothing_stops_counting_as_load(
    sharded, gated, monkeypatch, caplog, inline_queries: int
) -> None:
    """Answered in its turn or in threads: what it was owed is let go, and others are served."""
    monkeypatch.setattr(replies, "WRITE_S", 0.1)
    _, server, caller = gated(inline_queries=inline_queries)
    metrics = server.server.service.metrics
    asked = sharded.questions.ask(np.random.default_rng(4), 0, 1500)
    stream = Stream(caller)
    with caplog.at_level("INFO", "dlm.server"):
        # As much as gRPC and the system hold for it, and more.
        for sequence in range(1, 400):
            stream.put(asked.data, sequence)
        until(lambda: any(getattr(one, "event", "") in UNREAD for one in caplog.records))
        until(lambda: metrics.in_flight == 0)
    other = Stream(caller)
    other.put(asked.data, 1)
    sharded.questions.verify(0, asked, other.take()[1])
    with pytest.raises(grpc.RpcError) as caught:  # once it reads, it is told
        for _ in range(400):
            stream.take()
    assert reason_of(caught.value) is Reason.LATE


def test_what_a_stream_may_send_unread_does_not_grow(sharded, gated, asked) -> None:
    """The server does not measure the network, by pings, to take more."""
    _, server, _ = gated()
    peer = Peer(server.address)
    peer.ask("/dlm.v1.Shard/Exchange", asked.data + codec.exchange_tail(1, 0, 0))
    while not peer.ended:
        peer.read()
    assert (peer.windows, peer.pings) == ([512 << 10], 0)
    peer.close()


def test_every_message_of_a_stream_that_breaks_is_counted_once(sharded, gated, asked) -> None:
    """Three in threads when bytes come that are no message: abandoned, and one refusal."""
    shard, server, caller = gated(inline_queries=0, threads=4)
    metrics = server.server.service.metrics
    shard.gate.clear()
    stream = Stream(caller)
    for sequence in (1, 2, 3):
        stream.put(asked.data, sequence)
    until(lambda: metrics.in_flight == 3)
    stream.put_bytes(b"\xff\xff\xff")
    with pytest.raises(grpc.RpcError):
        stream.take()
    shard.gate.set()
    until(lambda: metrics.in_flight == 0)
    assert (metrics.messages, metrics.refusals.total(), metrics.abandoned) == (0, 1, 3)


def test_a_stream_that_was_not_read_ends_when_it_is(sharded, gated, monkeypatch, asked) -> None:
    """gRPC takes no status while a write is under way: nobody is left behind a stream without an
    end."""
    monkeypatch.setattr(replies, "WRITE_S", 0.1)
    _, server, _ = gated()
    peer = Peer(server.address, window=0)
    peer.ask("/dlm.v1.Shard/Exchange", asked.data + codec.exchange_tail(1, 0, 0), end=False)
    until(lambda: server.server.service.metrics.messages == 1)
    until(lambda: server.server.service.metrics.in_flight == 0)
    peer.let_come(1 << 20)
    wait_ended([peer], 1)
    peer.close()
