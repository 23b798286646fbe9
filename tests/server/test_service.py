"""dlm.server.service over the wire: right answers, or refusals with a code and a reason.

Long, since every refusal of the contract's table stands here, against the same running servers.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import struct
import threading

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import WAIT_S, until
from dlm import __version__
from dlm.index.making import build_shard_set
from dlm.server import answers
from dlm.server.config import ServerConfig
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import CODE_OF, Reason, reason_of
from models import HAND_MADE
from server.calls import Asked, Caller, outcome, seal
from server.test_context_block import request_for

OK = grpc.StatusCode.OK


def test_right_answers_equal_the_oracle_bit_for_bit(sharded, callers):
    """Messages of every size, to every shard, on the loop and in threads."""
    rng = np.random.default_rng(1)
    for shard, caller in enumerate(callers):
        for contexts in (1, 2, 31, 32, 33, 63, 64, 65, 300):
            asked = sharded.questions.ask(rng, shard, contexts)
            found = outcome(caller.score, asked.data)
            assert found.code is OK, found
            sharded.questions.verify(shard, asked, found.data)


def test_concurrent_messages_are_each_answered_right(sharded, callers):
    """Many in flight on one connection, small and large mixed."""
    rng = np.random.default_rng(2)
    asked = [sharded.questions.ask(rng, 1, int(rng.choice([1, 5, 200]))) for _ in range(60)]
    futures = [callers[1].score.future(a.data, timeout=WAIT_S) for a in asked]
    for a, future in zip(asked, futures, strict=True):
        sharded.questions.verify(1, a, future.result())


def test_message_without_queries_gets_an_empty_answer(sharded, callers):
    """Legal, and answered with a checksum that fits."""
    data, checksum = codec.encode_score_request(
        sharded.manifest.shard_set_bytes, 0, sharded.questions.pack([])
    )
    sharded.questions.verify(0, Asked([], data, checksum), outcome(callers[0].score, data).data)


def example(sharded, **changes) -> bytes:
    """A valid message for shard 0 with some fields replaced, and the checksum put right."""
    rng = np.random.default_rng(3)
    message = pb.ScoreRequest.FromString(sharded.questions.ask(rng, 0, 3).data)
    for name, value in changes.items():
        setattr(message, name, value)
    return seal(message)


def ids(*values: int) -> bytes:
    """uint32, packed."""
    return struct.pack(f"<{len(values)}I", *values)


def one(sharded, context: tuple[int, ...], pair: int = 0) -> bytes:
    """A message for shard 0 with one query."""
    message = pb.ScoreRequest(
        shard_set=sharded.manifest.shard_set_bytes,
        context_lengths=bytes([len(context)]),
        context_words=ids(*context),
        pairs=ids(pair),
        word_counts=ids(1),
        words=ids(1),
    )
    return seal(message)


def owned(sharded, shard: int = 0) -> tuple[int, int]:
    """A pair of words that belongs to `shard`."""
    return next(
        (u, v)
        for u in range(1, 60)
        for v in range(1, 60)
        if sharded.questions.owner((u, v)) == shard
    )


BAD = {
    "random bytes": (lambda s: b"\xff\xfe\xfd", Reason.MALFORMED),
    "nothing": (lambda s: b"", Reason.MALFORMED),
    "cut short": (lambda s: example(s)[:-3], Reason.MALFORMED),
    "counts that contradict": (lambda s: example(s, word_counts=ids(1)), Reason.MALFORMED),
    "flipped word": (
        lambda s: one(s, owned(s)).replace(ids(*owned(s)), ids(*owned(s)[::-1])[:7] + b"\x01"),
        Reason.CHECKSUM,
    ),
    "too many queries": (
        lambda s: seal(
            pb.ScoreRequest(
                shard_set=s.manifest.shard_set_bytes,
                context_lengths=bytes([2]),
                context_words=ids(*owned(s)),
                pairs=ids(0),
                word_counts=ids(65_537),
                words=bytes(4 * 65_537),
            )
        ),
        Reason.TOO_MANY_QUERIES,
    ),
    "other shard set": (lambda s: example(s, shard_set=bytes(16)), Reason.WRONG_SHARD_SET),
    "other shard": (lambda s: example(s, shard=1), Reason.WRONG_SHARD),
    "shard beyond all": (lambda s: example(s, shard=2**32 - 1), Reason.WRONG_SHARD),
    "context of one word": (lambda s: one(s, (1,)), Reason.CONTEXT_LENGTH),
    "context too long": (lambda s: one(s, (1, 1, *owned(s))), Reason.CONTEXT_LENGTH),
    "context word unknown": (lambda s: one(s, (2**32 - 1, *owned(s))), Reason.ID_OUT_OF_RANGE),
    "pair unknown": (lambda s: one(s, owned(s), s.manifest.pairs), Reason.ID_OUT_OF_RANGE),
    "pair missing": (lambda s: example(s, pairs=b""), Reason.MALFORMED),
    "slot of another": (lambda s: one(s, owned(s, 1)), Reason.SLOT_NOT_OWNED),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_message_is_refused_with_its_reason(sharded, callers, name):
    """Each kind of fault has one code and one reason, and a message that says what to expect."""
    make, reason = BAD[name]
    before = callers[0].beat()
    found = outcome(callers[0].score, make(sharded))
    assert (found.code, found.reason) == (CODE_OF[reason], reason), found
    assert len(found.details) > 20
    after = callers[0].beat()
    assert (after.refused - before.refused, after.messages - before.messages) == (1, 0)


def test_refusal_names_no_more_than_the_number_at_fault(sharded, callers):
    """The message of a refusal holds the bad id, and none of the good ones beside it."""
    found = outcome(callers[0].score, one(sharded, owned(sharded), 4_000_000_007))
    assert "4000000007" in found.details
    assert str(sharded.manifest.pairs) in found.details
    numbers = {int(n) for n in "".join(c if c.isdigit() else " " for c in found.details).split()}
    assert numbers == {0, 4_000_000_007, sharded.manifest.pairs}


def test_message_above_the_size_limit_is_refused(callers):
    """gRPC refuses it before it is read, without a reason of ours."""
    found = outcome(callers[0].score, bytes((4 << 20) + 1))
    assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found.reason is None


@pytest.mark.parametrize("name", ["unigrams_only", "bigrams_only", "empty_order_two_and_up"])
def test_model_without_partitioned_ngrams_is_served(tmp_path, start, name):
    """Orders 1 and 2 refuse every context; order 3 without 2-grams has none to ask after."""
    model = HAND_MADE[name]
    arpa = model.write(tmp_path / "model.arpa")
    manifest = build_shard_set(arpa, tmp_path / "shards", 1)
    caller = Caller(start(directory=tmp_path / "shards").ready().address)
    message = pb.ScoreRequest(
        shard_set=manifest.shard_set_bytes,
        context_lengths=bytes([2]),
        context_words=ids(1, 2),
        pairs=ids(0),
        word_counts=ids(1),
        words=ids(0),
    )
    found = outcome(caller.score, seal(message))
    reason = Reason.ID_OUT_OF_RANGE if model.order > 2 else Reason.CONTEXT_LENGTH
    assert found.reason is reason
    caller.close()


# -------------------------------------------------- load, deadlines and faults


@pytest.mark.promise("late_work")
def test_work_whose_deadline_has_passed_is_not_begun(sharded, gated):
    """A clock that leaps an hour at each look: the deadline is over before the kernel's turn."""
    now = [0.0]

    def leaping() -> float:
        now[0] += 3600.0
        return now[0]

    for inline_queries in (0, 1000):
        shard, _, caller = gated(clock=leaping, inline_queries=inline_queries)
        asked = sharded.questions.ask(np.random.default_rng(5), 0)
        before = shard.calls
        found = outcome(caller.score, asked.data)
        assert (found.code, found.reason) == (CODE_OF[Reason.LATE], Reason.LATE)
        assert shard.calls == before
        # Without a deadline the same message is answered.
        sharded.questions.verify(0, asked, caller.score(asked.data))


def test_message_whose_caller_left_is_dropped_from_the_queue(sharded, gated, asked):
    """One thread, busy: what waits behind it and is cancelled never reaches the kernel."""
    shard, server, caller = gated(inline_queries=0, threads=1)
    shard.hold()
    before = shard.calls
    first = caller.score.future(asked.data, timeout=WAIT_S)
    assert shard.entered.acquire(timeout=WAIT_S)
    waiting = [caller.score.future(asked.data, timeout=WAIT_S) for _ in range(5)]
    until(lambda: caller.beat().in_flight == 6)
    for future in waiting:
        future.cancel()
    until(lambda: caller.beat().in_flight == 1)
    shard.gate.set()
    sharded.questions.verify(0, asked, first.result())
    assert outcome(caller.score, asked.data).code is OK
    assert shard.calls - before == 2
    assert server.server.service.metrics.abandoned == 5
    assert caller.beat().refused == 0


def test_fault_inside_is_internal_logged_and_survived(sharded, gated, caplog):
    """The client learns the type, the log learns where, nobody learns what was asked."""
    for inline_queries in (0, 1000):
        shard, _, caller = gated(inline_queries=inline_queries)
        asked = sharded.questions.ask(np.random.default_rng(7), 0)
        contexts = sharded.questions.contexts(np.random.default_rng(7), 0, 2)
        block, _ = request_for(sharded, 0, contexts)
        shard.fault = ValueError("secret 987654321")
        for call, data in ((caller.score, asked.data), (caller.context_block, block)):
            caplog.clear()
            with caplog.at_level(logging.ERROR, logger="dlm.server"):
                found = outcome(call, data)
            assert (found.code, found.reason) == (grpc.StatusCode.INTERNAL, Reason.INTERNAL)
            assert "987654321" not in found.details
            assert "987654321" not in caplog.text
            assert "ValueError" in caplog.text
            assert "raise self.fault" in caplog.text
        shard.fault = None
        sharded.questions.verify(0, asked, outcome(caller.score, asked.data).data)
        assert outcome(caller.context_block, block).code is OK
        assert caller.beat().refused == 2


def test_server_that_warms_up_refuses_as_not_ready(sharded, gated, asked):
    """Score and Download wait for READY; Describe and Heartbeat say WARMING."""
    shard, server, caller = gated(open_gate=False, wait=False)
    found = outcome(caller.score, asked.data)
    assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NOT_READY)
    with pytest.raises(grpc.RpcError) as caught:
        list(caller.download(download_request(sharded), timeout=WAIT_S))
    assert reason_of(caught.value) == Reason.NOT_READY
    assert caller.beat().state == pb.SERVER_STATE_WARMING
    assert describe(caller).state == pb.SERVER_STATE_WARMING
    shard.gate.set()
    server.ready()
    sharded.questions.verify(0, asked, outcome(caller.score, asked.data).data)
    assert caller.beat().state == pb.SERVER_STATE_READY


# ---------------------------------------------------- Describe and Heartbeat


def describe(caller: Caller, **fields) -> pb.DescribeReply:
    """What Describe answers."""
    request = pb.DescribeRequest(**fields).SerializeToString()
    return pb.DescribeReply.FromString(caller.describe(request, timeout=WAIT_S))


def test_describe_gives_the_manifest_and_the_limits(sharded, callers):
    """The manifest byte for byte, and what a client must know to send."""
    for shard, caller in enumerate(callers):
        for known in (b"", sharded.manifest.shard_set_bytes):
            reply = describe(caller, shard_set=known)
            assert reply.manifest == (sharded.directory / "manifest.json").read_bytes()
            assert reply.shard == shard
            assert reply.shard_set == sharded.manifest.shard_set_bytes
            assert reply.state == pb.SERVER_STATE_READY
            config = ServerConfig()
            assert reply.max_queries == config.max_queries
            assert reply.max_message_bytes == config.max_message_bytes
            assert reply.server_version == __version__
            assert reply.checksum == codec.describe_checksum(reply)


def test_a_heartbeat_for_another_shard_or_for_what_is_no_set_is_refused(sharded, callers):
    """With a shard set, the shard must be right too; of another set see test_models."""
    shard_set = sharded.manifest.shard_set_bytes
    data = pb.HeartbeatRequest(shard_set=shard_set, shard=1).SerializeToString()
    assert outcome(callers[0].heartbeat, data).reason is Reason.WRONG_SHARD
    assert callers[1].beat(shard_set=shard_set, shard=1).shard == 1
    for call, kind in (("describe", pb.DescribeRequest), ("heartbeat", pb.HeartbeatRequest)):
        found = outcome(getattr(callers[0], call), kind(shard_set=b"x").SerializeToString())
        assert (found.code, found.reason) == (CODE_OF[Reason.MALFORMED], Reason.MALFORMED)


def test_heartbeat_counts_what_was_sent(sharded, callers):
    """Messages, queries and refusals, exactly; the sequence comes back, the instance stays."""
    rng = np.random.default_rng(9)
    before = callers[2].beat(sequence=2**64 - 1)
    assert before.sequence == 2**64 - 1
    assert before.instance != 0
    asked = [sharded.questions.ask(rng, 2, 10) for _ in range(7)]
    for a in asked:
        assert outcome(callers[2].score, a.data).code is OK
    for _ in range(3):
        assert outcome(callers[2].score, asked[0].data[:-1]).code is not OK
    after = callers[2].beat(sequence=5)
    assert after.sequence == 5
    assert after.messages - before.messages == 7
    assert after.queries - before.queries == sum(len(a.queries) for a in asked)
    assert after.refused - before.refused == 3
    assert after.in_flight == 0
    assert after.instance == before.instance
    assert after.uptime_ms >= before.uptime_ms
    assert after.state == pb.SERVER_STATE_READY
    assert callers[1].beat().instance != after.instance


# -------------------------------------------------------------------- Download


def download_request(sharded, file=pb.DOWNLOAD_FILE_VOCABULARY, offset=0, shard=0, **more) -> bytes:
    """The bytes of a DownloadRequest."""
    fields = {"shard_set": sharded.manifest.shard_set_bytes, **more}
    return pb.DownloadRequest(file=file, offset=offset, shard=shard, **fields).SerializeToString()


FILES = {
    pb.DOWNLOAD_FILE_VOCABULARY: "vocabulary.arrow",
    pb.DOWNLOAD_FILE_LOW_ORDERS: "low_orders.arrow",
}


def fetch(sharded, caller, file, offset=0) -> bytes:
    """The file from `offset` on, each chunk checked."""
    size = (sharded.directory / FILES[file]).stat().st_size
    out = b""
    for data in caller.download(download_request(sharded, file, offset), timeout=WAIT_S):
        chunk = codec.parse(pb.DownloadChunk(), data)
        out += codec.decode_chunk(
            chunk,
            shard_set=sharded.manifest.shard_set_bytes,
            shard=0,
            offset=offset + len(out),
            file_bytes=size,
        )
    return out


@pytest.mark.parametrize("file", FILES)
def test_download_from_any_offset_is_the_rest_of_the_file(
    sharded, callers, gated, monkeypatch, file
):
    """In one chunk and in many; at the end it is empty."""
    expected = (sharded.directory / FILES[file]).read_bytes()
    size = len(expected)
    rng = random.Random(13)
    offsets = [0, 1, size // 2, size - 1, size, *(rng.randrange(size) for _ in range(5))]
    for offset in offsets:
        assert fetch(sharded, callers[0], file, offset) == expected[offset:]
    _, _, caller = gated()
    monkeypatch.setattr(codec, "CHUNK_BYTES", 700)
    for offset in offsets:
        assert fetch(sharded, caller, file, offset) == expected[offset:]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shard_set": bytes(16)}, Reason.WRONG_SHARD_SET),
        ({"shard_set": b""}, Reason.MALFORMED),
        ({"shard": 1}, Reason.WRONG_SHARD),
        ({"file": pb.DOWNLOAD_FILE_UNSPECIFIED}, Reason.MALFORMED),
        ({"file": 99}, Reason.MALFORMED),
        ({"offset": 2**64 - 1}, Reason.OFFSET_OUT_OF_RANGE),
    ],
)
def test_bad_download_is_refused_with_its_reason(sharded, callers, changes, reason):
    """Each fault by its code and reason."""
    call = callers[0].download(download_request(sharded, **changes), timeout=WAIT_S)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is CODE_OF[reason]
    assert ("dlm-reason", reason.value) in tuple(call.trailing_metadata())


def test_downloads_beyond_the_limit_are_refused(sharded, gated):
    """While one is being read a second is refused, and afterwards taken."""
    _, server, caller = gated(max_downloads=1)
    downloads = server.server.service.downloads
    gate, entered, read = threading.Event(), threading.Event(), downloads.read_chunk

    def waiting(*args):
        entered.set()
        assert gate.wait(WAIT_S)
        return read(*args)

    downloads.read_chunk = waiting
    first = caller.download(download_request(sharded), timeout=WAIT_S)
    assert entered.wait(WAIT_S)
    second = caller.download(download_request(sharded), timeout=WAIT_S)
    with pytest.raises(grpc.RpcError) as caught:
        list(second)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    gate.set()
    assert len(list(first)) == 1
    until(lambda: server.server.service.metrics.downloads == 0)
    assert fetch(sharded, caller, pb.DOWNLOAD_FILE_VOCABULARY) != b""


def test_file_that_shrank_is_internal_and_not_a_short_file(sharded, gated):
    """A file cut while it is served ends the download with an error."""
    _, server, caller = gated()
    files = server.server.service.downloads.files
    descriptor, entry = files[pb.DOWNLOAD_FILE_VOCABULARY]
    longer = dataclasses.replace(entry, bytes=entry.bytes + 100)
    files[pb.DOWNLOAD_FILE_VOCABULARY] = (descriptor, longer)
    with pytest.raises(grpc.RpcError) as caught:
        list(caller.download(download_request(sharded), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


# ------------------------------------------------------------------ reflection


def test_reflection_lists_the_service_and_its_file(callers):
    """Tools that know no proto file can ask for it."""
    stub = reflection_pb2_grpc.ServerReflectionStub(callers[0].channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="dlm.v1.Shard"),
    ]
    listed, described = stub.ServerReflectionInfo(iter(requests), timeout=WAIT_S)
    names = {s.name for s in listed.list_services_response.service}
    assert {"dlm.v1.Shard", "grpc.health.v1.Health"} <= names
    files = described.file_descriptor_response.file_descriptor_proto
    assert any(b"dlm/v1/shard.proto" in file for file in files)


def test_unknown_method_is_unimplemented(callers):
    """A call of a later version fails at once."""
    found = outcome(callers[0].channel.unary_unary("/dlm.v1.Shard/Later"), b"")
    assert found.code is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_in_order_is_checked_and_searched_in_one_call(
    sharded, gated, monkeypatch, asked
) -> None:
    """What says where something is wrong looks at none but those where something is."""
    shard, _, caller = gated()
    calls, looks = shard.calls, list[int]()
    check = answers.kernels.check
    monkeypatch.setattr(answers.kernels, "check", lambda *a: looks.append(1) or check(*a))
    sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
    assert (shard.calls - calls, len(looks)) == (1, 0)
    assert outcome(caller.score, one(sharded, owned(sharded, 1))).reason is Reason.SLOT_NOT_OWNED
    assert (shard.calls - calls, len(looks)) == (2, 1)
