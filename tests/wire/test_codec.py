"""dlm.wire.codec: what goes in comes out, and what was damaged or invented is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from dlm.errors import ProtocolError
from dlm.ngram.query import Answers, QueryGroups
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from models import packed
from server.calls import pack, seal

SHARD_SET = bytes(range(16))
IDS = st.integers(0, 2**32 - 1)
GROUPS = st.lists(
    st.tuples(st.lists(IDS, min_size=2, max_size=14), st.lists(IDS, min_size=1, max_size=9)),
    max_size=12,
)


def arrays(groups: QueryGroups) -> list[list[int]]:
    """The arrays as lists, for comparing."""
    return [getattr(groups, field.name).tolist() for field in fields(groups)]


def random_answers(seed: int, queries: int) -> Answers:
    """Any answers."""
    rng = np.random.default_rng(seed)
    return Answers(
        rng.normal(size=queries).astype(np.float32),
        *(rng.integers(0, 6, queries, dtype=np.uint8) for _ in range(3)),
    )


def example() -> pb.ScoreRequest:
    """A small valid request, not sealed."""
    return pb.ScoreRequest(
        shard_set=SHARD_SET,
        shard=3,
        context_lengths=bytes([2, 3]),
        context_words=struct.pack("<5I", 5, 6, 4, 5, 6),
        pairs=struct.pack("<2I", 11, 12),
        word_counts=struct.pack("<2I", 2, 1),
        words=struct.pack("<3I", 7, 8, 9),
    )


def decode(data: bytes, max_queries: int = 1000) -> codec.ScoreRequest:
    """`decode_score_request` with a limit."""
    return codec.decode_score_request(data, max_queries=max_queries)


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16))
def test_request_comes_out_as_it_went_in(groups, shard, shard_set):
    """Any groups, shard and shard set survive the way."""
    packed = pack(groups)
    data, checksum = codec.encode_score_request(shard_set, shard, packed)
    request = decode(data)
    assert (request.shard_set, request.shard, request.checksum) == (shard_set, shard, checksum)
    assert arrays(request.groups) == arrays(packed)


@settings(max_examples=100, deadline=None)
@given(GROUPS, st.integers(0, 1000))
def test_reply_comes_out_as_it_went_in(groups, seed):
    """Any answers survive the way, bit for bit."""
    data, checksum = codec.encode_score_request(SHARD_SET, 3, pack(groups))
    request = decode(data)
    answers = random_answers(seed, len(request.groups.words))
    reply = codec.encode_score_reply(request, packed(answers))
    found = codec.decode_score_reply(
        reply,
        shard_set=SHARD_SET,
        shard=3,
        queries=len(answers),
        request_checksum=checksum,
    )
    assert found.log10_prob.tobytes() == answers.log10_prob.tobytes()
    for name in ("matched_order", "ngram_length", "state_length"):
        assert getattr(found, name).tolist() == getattr(answers, name).tolist()


def flipped(data: bytes) -> Iterator[bytes]:
    """The message with each byte in each of its 255 wrong values."""
    for place in range(len(data)):
        for change in range(1, 256):
            yield data[:place] + bytes([data[place] ^ change]) + data[place + 1 :]


def test_every_flipped_byte_of_a_request_is_noticed():
    """It is refused, or changes nothing."""
    data = seal(example())
    expected = arrays(decode(data).groups)
    for broken in flipped(data):
        try:
            request = decode(broken)
        except ProtocolError:
            continue
        assert arrays(request.groups) == expected
        assert (request.shard_set, request.shard) == (SHARD_SET, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shard_set": bytes(17)}, "shard_set has 17 bytes"),
        ({"words": bytes(13)}, "field words has 13 bytes"),
        ({"word_counts": bytes(7)}, "field word_counts has 7 bytes"),
        ({"context_lengths": bytes([2, 2, 1])}, "3 context lengths .*2 word counts"),
        ({"context_lengths": bytes([2, 2])}, "context lengths .* 4"),
        ({"word_counts": struct.pack("<2I", 2, 2)}, "word counts .* 4"),
        ({"word_counts": struct.pack("<2I", 3, 0)}, "no words"),
        # 2**32 - 1 + 4 wraps to 3 in 32 bits, which is the number of words sent.
        ({"word_counts": struct.pack("<2I", 2**32 - 1, 4)}, "4294967299"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(change, says):
    """A right checksum does not help a message whose arrays contradict each other."""
    message = example()
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(ProtocolError, match=says):
        decode(seal(message))


def test_context_lengths_that_wrap_are_refused():
    """Lengths are summed in 64 bits: 129 times 2 is not 2."""
    message = example()
    message.context_lengths = bytes([2] * 129)
    message.word_counts = struct.pack("<129I", *[1] * 129)
    message.words = struct.pack("<129I", *range(129))
    message.context_words = struct.pack("<2I", 1, 2)
    with pytest.raises(ProtocolError, match="258"):
        decode(seal(message))


def test_wrong_checksum_and_size_have_their_own_errors():
    """A server tells damage and size from nonsense by the class of the error."""
    message = example()
    message.checksum = 1
    with pytest.raises(codec.DamagedMessage):
        decode(message.SerializeToString())
    with pytest.raises(codec.OversizedMessage, match=r"3 queries.*at most 2"):
        decode(seal(example()), max_queries=2)
    assert len(decode(seal(example()), max_queries=3).groups.words) == 3


def test_checksum_is_what_the_contract_says():
    """XXH3-64 over the head and each part behind its length, all uint64 little-endian."""
    plain = struct.pack("<QQ", 7, 2) + b"ab" + struct.pack("<Q", 0) + struct.pack("<Q", 1) + b"c"
    assert codec.checksum(b"ab", b"", b"c", head=7) == xxhash.xxh3_64_intdigest(plain, seed=0)
    assert codec.checksum(b"ab", b"c") != codec.checksum(b"a", b"bc")


# ---------------------------------------------------------------------- chunks


def chunk_of(raw: bytes, offset: int = 0, file_bytes: int | None = None) -> pb.DownloadChunk:
    """A chunk of a file that ends with it, unless told."""
    size = offset + len(raw) if file_bytes is None else file_bytes
    return codec.encode_chunk(raw, shard_set=SHARD_SET, shard=2, offset=offset, file_bytes=size)


def read(chunk: pb.DownloadChunk, offset: int = 0, file_bytes: int | None = None) -> bytes:
    """`decode_chunk` for a chunk of `chunk_of`."""
    size = chunk.file_bytes if file_bytes is None else file_bytes
    return codec.decode_chunk(chunk, shard_set=SHARD_SET, shard=2, offset=offset, file_bytes=size)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=4000), st.integers(0, 2**40), st.integers(1, 50))
def test_chunk_comes_out_as_it_went_in(piece, offset, times):
    """Compressed where that helps, raw where not, the same bytes either way."""
    raw = piece * times
    chunk = chunk_of(raw, offset)
    assert len(chunk.data) <= len(raw)
    assert read(chunk, offset) == raw


def test_chunk_is_raw_where_compression_does_not_help():
    """Random bytes travel as they are."""
    raw = random.Random(2).randbytes(5000)
    assert chunk_of(raw).encoding == pb.CHUNK_ENCODING_RAW
    assert chunk_of(bytes(5000)).encoding == pb.CHUNK_ENCODING_ZSTD


@pytest.mark.parametrize("raw", [bytes(range(256)) * 2, random.Random(3).randbytes(300)])
def test_every_flipped_byte_of_a_chunk_is_noticed(raw):
    """A flipped byte of a chunk, compressed or not, is refused or changes nothing."""
    chunk = chunk_of(raw, 100, 5000)
    data = chunk.SerializeToString()
    for place in range(len(data)):
        for change in (1, 16, 128, 255):
            broken = bytearray(data)
            broken[place] ^= change
            try:
                found = codec.parse(pb.DownloadChunk(), bytes(broken))
                assert read(found, 100, 5000) == raw
            except ProtocolError:
                continue


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 1),
        ("file_bytes", 999),
        ("shard_set", bytes(16)),
        ("shard", 3),
        ("raw_bytes", 0),
        ("raw_bytes", 4999),
        ("raw_bytes", 5001),
        ("raw_bytes", 2**32 - 1),
        ("encoding", pb.CHUNK_ENCODING_UNSPECIFIED),
        ("encoding", pb.CHUNK_ENCODING_RAW),
        ("encoding", 77),
        ("data", b""),
        ("checksum", 0),
    ],
)
def test_chunk_with_a_wrong_field_is_refused(field, value):
    """Whatever a chunk says of itself must hold."""
    chunk = chunk_of(bytes(5000), 0, 10_000)
    setattr(chunk, field, value)
    with pytest.raises(ProtocolError):
        read(chunk, 0, 10_000)


def test_chunk_that_unpacks_to_more_than_it_says_is_refused():
    """A small frame of a hundred megabytes, announced as a thousand bytes, is not unpacked."""
    bomb = pa.Codec("zstd", 3).compress(bytes(100 << 20), asbytes=True)
    for raw_bytes in (1000, codec.CHUNK_BYTES):
        chunk = chunk_of(bytes(1000), 0, 1 << 30)
        chunk.data = bomb
        chunk.raw_bytes = raw_bytes
        with pytest.raises(ProtocolError):
            read(chunk, 0, 1 << 30)


def test_chunk_larger_than_the_limit_or_past_the_end_is_refused():
    """No chunk is above CHUNK_BYTES, and none reaches past its file."""
    with pytest.raises(ProtocolError, match="expected 1 to"):
        read(chunk_of(bytes(codec.CHUNK_BYTES + 1)))
    with pytest.raises(ProtocolError, match="expected 1 to"):
        read(chunk_of(bytes(100), 50, 100), 50)
    assert len(read(chunk_of(bytes(codec.CHUNK_BYTES)))) == codec.CHUNK_BYTES


# ------------------------------------------------------- describe and heartbeat


def test_describe_checksum_covers_what_it_should():
    """Manifest, shard and shard set change it; the state, which may change, does not."""
    reply = pb.DescribeReply(manifest=b"{}", shard=1, shard_set=SHARD_SET)
    before = codec.describe_checksum(reply)
    reply.state = pb.SERVER_STATE_READY
    assert codec.describe_checksum(reply) == before
    for field, value in (("manifest", b"{ }"), ("shard", 2), ("shard_set", bytes(16))):
        other = pb.DescribeReply()
        other.CopyFrom(reply)
        setattr(other, field, value)
        assert codec.describe_checksum(other) != before


def test_heartbeat_checksum_covers_every_field():
    """Each number of a heartbeat changes its checksum."""
    reply = pb.HeartbeatReply(shard_set=SHARD_SET)
    before = codec.heartbeat_checksum(reply)
    for field in pb.HeartbeatReply.DESCRIPTOR.fields:
        if field.number >= pb.HeartbeatReply.CHECKSUM_FIELD_NUMBER:
            continue  # added later: outside of it, so that older clients can check the rest
        other = pb.HeartbeatReply()
        other.CopyFrom(reply)
        setattr(other, field.name, bytes(16) if field.name == "shard_set" else 1)
        assert codec.heartbeat_checksum(other) != before, field.name
