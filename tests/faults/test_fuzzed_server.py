"""Bytes that no client would send, to a real server: nothing malformed is answered, and it lives.

DLM_FUZZ_MESSAGES sets how many messages each test sends; by default few enough for every run.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from cluster import WAIT_S, ProcessServer
from dlm.index.making import build_shard_set
from dlm.ngram.backoff import DictModel
from dlm.wire._pb import shard_pb2 as pb
from models import random_model
from server.calls import Asked, Caller, Questions, Stream, outcome, seal

AT_ONCE = 40
MESSAGES = int(os.environ.get("DLM_FUZZ_MESSAGES", "480"))
ARRAYS = ("context_lengths", "context_words", "pairs", "word_counts", "words")
REFUSED = {
    *("MALFORMED", "CHECKSUM", "ID_OUT_OF_RANGE", "CONTEXT_LENGTH", "TOO_MANY_QUERIES"),
    *("WRONG_SHARD_SET", "WRONG_SHARD", "SLOT_NOT_OWNED", "LATE"),
}


class Site:
    """A server of shard 0 of two, and questions to it."""

    def __init__(self, folder) -> None:
        arpa = random_model(seed=3, order=4, words=50, per_order=300).write(folder / "m.arpa")
        manifest = build_shard_set(arpa, folder / "shards", 2)
        self.questions = Questions(folder / "shards", manifest, DictModel.from_arpa(arpa))
        self.server = ProcessServer(folder / "shards", 0, max_queries=500)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    """Started once."""
    made = Site(tmp_path_factory.mktemp("fuzzed"))
    made.server.ready()
    yield made
    made.server.end()


def hurt(rng: np.random.Generator, data: bytes) -> bytes:
    """Bytes changed, cut out, doubled, put in or cut off, at one to three places."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(out) + 1))
        length = int(rng.integers(1, 9))
        kind = rng.integers(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del out[at : at + length]
        elif kind == 2:
            out[at:at] = out[at : at + length]
        elif kind == 3:
            out[at:at] = rng.bytes(length)
        elif kind == 4:
            out[at : at + 4] = int(rng.choice([0, 1, 2**31, 2**32 - 1])).to_bytes(4, "little")
        else:
            del out[at:]
    return bytes(out)


def fuzzed(rng: np.random.Generator, questions: Questions) -> bytes:
    """A request gone wrong: its bytes, or one of its arrays under a checksum that fits."""
    data = questions.ask(rng, 0, int(rng.integers(1, 5))).data
    if rng.random() < 0.4:
        return hurt(rng, data)
    message = pb.ScoreRequest.FromString(data)
    for _ in range(rng.integers(1, 3)):
        name = ARRAYS[rng.integers(len(ARRAYS))]
        value = hurt(rng, getattr(message, name))
        if rng.random() < 0.7:
            value = value[: len(value) // 4 * 4] if name != "context_lengths" else value
        setattr(message, name, value)
    if rng.random() < 0.1:
        message.shard = int(rng.integers(0, 3))
    if rng.random() < 0.1:
        message.shard_set = hurt(rng, message.shard_set)
    return seal(message)


def plainly(questions: Questions, data: bytes) -> Asked:
    """What a message that was answered asked, read without anything of dlm.wire.codec; raises
    where the contract calls it malformed."""
    message = pb.ScoreRequest.FromString(data)
    sealed = pb.ScoreRequest.FromString(seal(pb.ScoreRequest.FromString(data)))
    assert message.checksum == sealed.checksum
    assert (message.shard, message.shard_set) == (0, questions.manifest.shard_set_bytes)
    contexts = list(np.frombuffer(message.context_words, "<u4").tolist())
    words = list(np.frombuffer(message.words, "<u4").tolist())
    counts = np.frombuffer(message.word_counts, "<u4").tolist()
    pairs = np.frombuffer(message.pairs, "<u4").tolist()
    queries = []
    for length, count, pair in zip(message.context_lengths, counts, pairs, strict=True):
        context = tuple(contexts[:length])
        assert 2 <= length < questions.order and count >= 1
        assert questions.owner(context) == 0
        del contexts[:length]
        assert all(i < questions.size for i in context) and pair < questions.manifest.pairs
        # What is said of another 2-gram, or of a place that no word has, means nothing.
        followers = {rank: w for (v, w), rank in questions.ranks.items() if v == context[-1]}
        good = questions.stored.get(context[-2:]) == pair
        queries += [(context, followers.get(rank) if good else None) for rank in words[:count]]
        assert len(words) >= count
        del words[:count]
    assert not contexts and not words
    return Asked(queries, data, message.checksum)


@pytest.mark.promise("every_input")
def test_no_fuzzed_message_of_a_stream_is_answered_unless_it_is_whole(site) -> None:
    """Each reply is a refusal, or the oracle's answers to what is, by chance, a good message."""
    rng = np.random.default_rng(int(os.environ.get("DLM_FUZZ_SEED", "1")))
    caller = Caller(site.server.address)
    stream = Stream(caller)
    said: Counter[str] = Counter()
    sequence = 0
    while sequence < MESSAGES:
        # Some at once, and their replies in the same order: small ones are answered in turn.
        left = deque((sequence + n, fuzzed(rng, site.questions)) for n in range(1, AT_ONCE + 1))
        sequence += AT_ONCE
        for number, data in left:
            stream.put(data, number)
        while left:
            number, data = left.popleft()
            try:
                reply, raw = stream.take()
            except grpc.RpcError as exc:
                assert exc.code() is grpc.StatusCode.INVALID_ARGUMENT, (number, exc)
                said["stream ended"] += 1
                stream.end()  # or a thread of gRPC waits for what is sent next
                stream = Stream(caller)
                for other, unread in left:
                    stream.put(unread, other)
                continue
            if reply.reason:
                assert reply.reason in REFUSED, (number, reply)
                said[reply.reason] += 1
            elif reply.sequence == number:  # else the damage had swallowed the number
                site.questions.verify(0, plainly(site.questions, data), raw)
                said["answered"] += 1
    assert len(said) >= 6, said
    print(f"{sequence} messages: {dict(said)}")
    good = site.questions.ask(rng, 0)
    stream.put(good.data, 0)
    site.questions.verify(0, good, stream.take()[1])
    stream.end()
    caller.close()
    assert site.server.process.poll() is None and "Traceback" not in site.server.errors


@pytest.mark.promise("every_input")
@pytest.mark.parametrize("method", ["score", "describe", "heartbeat", "download"])
def test_raw_bytes_to_every_call_end_in_a_status(site, method: str) -> None:
    """Random bytes, and good messages gone wrong; the server answers a good one afterwards."""
    rng = np.random.default_rng(5)
    caller = Caller(site.server.address)
    good = {
        "score": site.questions.ask(rng, 0).data,
        "describe": pb.DescribeRequest().SerializeToString(),
        "heartbeat": pb.HeartbeatRequest(sequence=5).SerializeToString(),
        "download": pb.DownloadRequest(
            shard_set=site.questions.manifest.shard_set_bytes, file=1
        ).SerializeToString(),
    }[method]
    allowed = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
    for _ in range(MESSAGES // 12):
        data = rng.bytes(int(rng.integers(0, 200))) if rng.random() < 0.3 else hurt(rng, good)
        if method == "download":
            try:
                for _ in caller.download(data, timeout=WAIT_S):
                    pass
            except grpc.RpcError as exc:
                assert exc.code() in allowed, (data, exc)
            continue
        found = outcome(getattr(caller, method), data)
        assert found.code in allowed, (data, found)
        if method == "score" and found.code is grpc.StatusCode.OK:
            site.questions.verify(0, plainly(site.questions, data), found.data)
    assert caller.beat(sequence=9).sequence == 9
    caller.close()
    assert site.server.process.poll() is None and "Traceback" not in site.server.errors
