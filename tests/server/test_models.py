"""dlm.server.service over the wire: several models behind one port, each with its own answers."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
import numpy as np
import pytest

from cluster import WAIT_S, ThreadServer, until
from dlm.index.search.shard import Shard
from dlm.server.health import Event
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import CODE_OF, Reason
from server.calls import Caller, GatedShard, Stream, outcome

UNKNOWN = bytes(range(16))


@pytest.fixture
def serving():
    """Starts a server of some shards; ends it, and what calls it, with the test."""
    with ExitStack() as held:

        def begin(*shards, **config):
            server = ThreadServer(list(shards), **config).ready()
            held.callback(server.end, at_once=True)
            caller = Caller(server.address)
            held.callback(caller.close)
            return server, caller

        yield begin


@pytest.fixture
def pair(sharded, other, serving):
    """A server of shard 0 of both models, the first the default, and a caller."""
    return serving(*(Shard.open(one.directory, 0) for one in (sharded, other)))


@pytest.fixture
def busy(sharded, other, serving):
    """Starts such a server, in which a message to the second model waits: its gate, server and
    caller, and how to check the answer."""
    gated = GatedShard(Shard.open(other.directory, 0))

    def begin(**config):
        shards = Shard.open(sharded.directory, 0), gated
        server, caller = serving(*shards, own_loop=True, inline_queries=0, **config)
        asked = other.questions.ask(np.random.default_rng(4), 0)
        gated.hold()
        answer = caller.score.future(asked.data, timeout=WAIT_S)
        assert gated.entered.acquire(timeout=WAIT_S)

        def verify():
            other.questions.verify(0, asked, answer.result())

        return gated.gate, server, caller, verify

    yield begin
    gated.gate.set()


def test_each_model_gives_its_own_answers(sharded, other, pair):
    """By the shard set that a message names, turn by turn; and counts its own."""
    server, caller = pair
    rng = np.random.default_rng(1)
    for _ in range(5):
        for one in (sharded, other, other):
            asked = one.questions.ask(rng, 0)
            one.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
    assert [service.metrics.messages for service in server.server.models] == [5, 10]
    assert caller.beat().messages == 5
    assert caller.beat(shard_set=other.manifest.shard_set_bytes).messages == 10
    assert caller.beat().instance == caller.beat(shard_set=other.manifest.shard_set_bytes).instance


def test_fields_in_another_order_reach_the_same_model(other, pair):
    """Protobuf allows any: the shard set last."""
    _, caller = pair
    asked = other.questions.ask(np.random.default_rng(2), 0)
    head = 2 + codec.SHARD_SET_BYTES
    data = asked.data[head:] + asked.data[:head]
    other.questions.verify(0, asked, caller.score(data, timeout=WAIT_S))


def test_a_set_that_is_not_here_is_refused_with_what_is(sharded, other, pair, asked):
    """For every call; and a message that is damaged is told so, not sent to another table."""
    _, caller = pair
    names = [one.manifest.shard_set for one in (sharded, other)]
    request = codec.decode_score_request(asked.data, max_queries=10_000)
    data, _ = codec.encode_score_request(UNKNOWN, 0, request.groups)
    describe = pb.DescribeRequest(shard_set=UNKNOWN).SerializeToString()
    beat = pb.HeartbeatRequest(shard_set=UNKNOWN).SerializeToString()
    for call, message in (
        (caller.score, data),
        (caller.describe, describe),
        (caller.heartbeat, beat),
    ):
        found = outcome(call, message)
        assert (found.code, found.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            Reason.WRONG_SHARD_SET,
        )
        assert UNKNOWN.hex() in found.details
        assert all(name in found.details for name in names)
    damaged = bytearray(asked.data)
    damaged[5] ^= 1  # in the shard set
    assert outcome(caller.score, bytes(damaged)).reason is Reason.CHECKSUM
    assert outcome(caller.score, b"\x0a\x10short").reason is Reason.MALFORMED


def test_a_message_in_the_wrong_hands_is_refused(other, pair):
    """The choice of a service is no check: each makes sure that a message is its own."""
    server, caller = pair
    server.server.models.find = lambda shard_set: server.server.models.default
    asked = other.questions.ask(np.random.default_rng(6), 0)
    stream = Stream(caller)
    stream.put(asked.data, 1)
    assert stream.take()[0].reason == Reason.WRONG_SHARD_SET
    stream.end()


def test_one_stream_may_ask_several_models(sharded, other, pair):
    """Each message of an Exchange goes to the set that it names; one that is not here is refused,
    and the stream goes on."""
    server, caller = pair
    rng = np.random.default_rng(7)
    asked = {n: (one, one.questions.ask(rng, 0)) for n, one in enumerate((sharded, other) * 3)}
    stream = Stream(caller)
    for sequence, (_, one) in asked.items():
        stream.put(one.data, sequence)
        groups = codec.decode_score_request(one.data, max_queries=10_000).groups
        stream.put(codec.encode_score_request(UNKNOWN, 0, groups)[0], 100 + sequence)
    refused = []
    for _ in range(2 * len(asked)):
        reply, data = stream.take()
        if reply.reason:
            assert reply.reason == Reason.WRONG_SHARD_SET
            refused.append(reply.sequence)
        else:
            of, one = asked.pop(reply.sequence)
            of.questions.verify(0, one, data)
    stream.end()
    assert not list(stream.call)
    assert not asked
    assert sorted(refused) == [100 + n for n in range(6)]
    until(lambda: server.server.models.in_flight == 0)
    assert [service.metrics.messages for service in server.server.models] == [3, 3]


def test_draining_waits_for_every_model(sharded, busy):
    """The second model's message is answered though the first has nothing to do."""
    gate, server, caller, verify = busy(drain_grace_s=0.0, shutdown_timeout_s=WAIT_S)
    server.post(Event.STOP)
    late = sharded.questions.ask(np.random.default_rng(5), 0)
    assert outcome(caller.score, late.data).reason is Reason.DRAINING
    assert not server.status.done()
    gate.set()
    verify()
    assert server.status.result(WAIT_S) == 0


def test_messages_in_flight_count_whatever_model_they_ask(sharded, other, busy, asked):
    """The limit bounds the memory of the process; a message above it is refused for any model."""
    gate, _, caller, verify = busy(max_in_flight=1)
    refused = outcome(caller.score, asked.data)
    assert (refused.code, refused.reason) == (CODE_OF[Reason.OVERLOADED], Reason.OVERLOADED)
    of_other = {"shard_set": other.manifest.shard_set_bytes}
    beats = caller.beat(), caller.beat(**of_other)  # heartbeats are answered
    assert [(beat.in_flight, beat.refused, beat.messages) for beat in beats] == [
        (0, 1, 0),
        (1, 0, 0),
    ]
    gate.set()
    verify()
    sharded.questions.verify(0, asked, outcome(caller.score, asked.data).data)
    assert caller.beat(**of_other).in_flight == 0
    assert caller.beat().queries == len(asked.queries)
