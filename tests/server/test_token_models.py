"""Tokens that name models: what their callers may ask of a server of several, and what they see."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from cluster import ThreadServer, until
from dlm.client.config import ClientSecurity
from dlm.index.search.shard import Shard
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason
from server.calls import Outcome, Stream, open_channel, outcome
from server.test_security import ALICE, BOB, write_tokens

UNKNOWN = bytes(range(16))
CAROL = "carol-" + "c" * 32


class Caller:
    """Calls with a token to a server."""

    def __init__(self, address: str, token: str) -> None:
        options = {"grpc.enable_retries": 0, "grpc.use_local_subchannel_pool": 1}
        self.channel = open_channel(address, options, ClientSecurity(token=token))

    def ask(self, method: str, data: bytes) -> Outcome:
        """One message, one reply."""
        return outcome(self.channel.unary_unary(f"/dlm.v1.Shard/{method}"), data)

    def describe(self, shard_set: bytes = b"") -> Outcome:
        """A description."""
        return self.ask("Describe", pb.DescribeRequest(shard_set=shard_set).SerializeToString())


def write(path, alices):
    """The tokens file, replaced."""
    lines = (f"alice:{ALICE} models={alices}", f"bob:{BOB}", f"carol:{CAROL} models=ffffffffffff")
    write_tokens(path, *lines)


@pytest.fixture(params=[256, 0], ids=["on the loop", "in a thread"])
def server(request, tmp_path, sharded, other):
    """Shard 0 of both models. Bob may ask for both, alice for `other` alone, carol for neither."""
    path = tmp_path / "tokens"
    write(path, other.manifest.model[:12])
    shards = [Shard.open(one.directory, 0) for one in (sharded, other)]
    server = ThreadServer(shards, tokens=str(path), inline_queries=request.param).ready()
    made = {
        name: Caller(server.address, token)
        for name, token in (("alice", ALICE), ("bob", BOB), ("carol", CAROL))
    }
    yield made, path
    for caller in made.values():
        caller.channel.close()
    server.end(at_once=True)


@pytest.mark.promise("token_models")
def test_a_token_sees_only_the_models_that_it_names(sharded, other, server):
    """Its default is the first of them; each description says what the token names."""
    callers, _ = server
    names = [one.manifest.shard_set_bytes for one in (sharded, other)]
    for name, seen, named in (
        ("alice", names[1:], [other.manifest.model[:12]]),
        ("bob", names, []),
    ):
        reply = pb.DescribeReply.FromString(callers[name].describe().data)
        assert list(reply.shard_sets) == seen
        assert reply.shard_set == seen[0]
        assert list(reply.token_models) == named
        beat = pb.HeartbeatReply.FromString(callers[name].ask("Heartbeat", b"").data)
        assert beat.shard_set == seen[0]


@pytest.mark.promise("token_models")
def test_a_model_that_a_token_does_not_name_is_as_one_that_is_not_there(sharded, other, server):
    """For every call, with the same words; and the other model answers."""
    callers, _ = server
    alice, rng = callers["alice"], np.random.default_rng(1)
    asked = sharded.questions.ask(rng, 0)
    groups = codec.decode_score_request(asked.data, max_queries=10_000).groups
    unknown, _ = codec.encode_score_request(UNKNOWN, 0, groups)
    hidden = sharded.manifest.shard_set_bytes
    messages = {"Score": (asked.data, unknown)}
    for call, kind in (
        ("Describe", pb.DescribeRequest),
        ("Heartbeat", pb.HeartbeatRequest),
        ("Download", pb.DownloadRequest),
    ):
        messages[call] = tuple(kind(shard_set=s).SerializeToString() for s in (hidden, UNKNOWN))
    for call, pair in messages.items():
        found, told = (alice.ask(call, data) for data in pair)
        assert (found.code, found.reason) == (told.code, told.reason)
        assert found.reason is Reason.WRONG_SHARD_SET
        assert found.details.replace(hidden.hex(), UNKNOWN.hex()) == told.details
    damaged = bytearray(asked.data)
    damaged[-1] ^= 1
    assert alice.ask("Score", bytes(damaged)).reason is Reason.CHECKSUM
    mine = other.questions.ask(rng, 0)
    other.questions.verify(0, mine, alice.ask("Score", mine.data).data)
    sharded.questions.verify(0, asked, callers["bob"].ask("Score", asked.data).data)


def test_a_token_that_names_no_model_of_the_server_is_refused_with_what_to_do(sharded, server):
    """As one that is unknown, where the call names no set; as a set that is gone, where it does."""
    callers, _ = server
    carol = callers["carol"]
    asked = sharded.questions.ask(np.random.default_rng(2), 0)
    for found in (carol.describe(), carol.ask("Heartbeat", b"")):
        assert (found.code, found.reason) == (
            grpc.StatusCode.UNAUTHENTICATED,
            Reason.UNAUTHENTICATED,
        )
        assert "models=" in found.details
    assert carol.ask("Score", asked.data).reason is Reason.WRONG_SHARD_SET


@pytest.mark.promise("token_models")
def test_open_streams_follow_the_models_of_their_token(sharded, other, server):
    """Another model is added while the stream is open, and one is taken away."""
    callers, path = server
    rng, stream = np.random.default_rng(3), Stream(callers["alice"])
    asked = {one.manifest.shard_set: (one, one.questions.ask(rng, 0)) for one in (sharded, other)}
    sequence = 0

    def answers() -> set[str]:
        """The shard sets that the stream answers for; the scores are checked."""
        nonlocal sequence
        found = set()
        for name, (one, question) in asked.items():
            sequence += 1
            stream.put(question.data, sequence)
            reply, data = stream.take()
            if reply.reason:
                assert reply.reason == "WRONG_SHARD_SET"
            else:
                one.questions.verify(0, question, data)
                found.add(name)
        return found

    assert answers() == {other.manifest.shard_set}
    write(path, f"{other.manifest.model[:12]},{sharded.manifest.shard_set[:12]}")
    until(lambda: answers() == set(asked))
    write(path, sharded.manifest.model)
    until(lambda: answers() == {sharded.manifest.shard_set})
    stream.end()
