"""ContextBlock in the codec: what goes in comes out, and what a server invents is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dlm.errors import ProtocolError
from dlm.ngram.query import Answers, StoredWords
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb

SHARD_SET = bytes(range(16))
ORDER, SIZE = 4, 40
LENGTHS = np.array([2, 3], np.uint8)
CONTEXTS = np.array([5, 6, 4, 5, 6], np.uint32)
PAIRS = np.array([10, 10], np.uint32)
SKIPS = np.array([0, 1], np.uint32)


def stored() -> StoredWords:
    """Two words after (5 6), the second and third of three after (4 5 6)."""
    return StoredWords(
        np.array([2, 3], np.uint32),
        np.array([2, 2], np.uint32),
        np.array([-0.5, 0.0, -0.25], np.float32),
        np.array([7, 9, 2, 39], np.uint32),
        Answers(
            np.array([-0.5, -1.25, -2.0, -np.inf], np.float32),
            np.array([3, 0, 4, 3], np.uint8),
            np.array([3, 3, 4, 3], np.uint8),
            np.array([0, 0, 3, 0], np.uint8),
        ),
    )


def asked() -> tuple[codec.BlockRequest, bytes]:
    """The request, read and as it is sent."""
    data, _ = codec.encode_block_request(SHARD_SET, 3, LENGTHS, CONTEXTS, PAIRS, SKIPS)
    return codec.decode_block_request(data, max_queries=2), data


def read(data: bytes) -> StoredWords:
    """A reply, as a client reads it."""
    return codec.decode_block_reply(
        data,
        shard_set=SHARD_SET,
        shard=3,
        context_lengths=LENGTHS,
        skips=SKIPS,
        request_checksum=asked()[0].checksum,
        order=ORDER,
        vocabulary_size=SIZE,
    )


def seal(reply: pb.ContextBlockReply) -> bytes:
    """The reply with the checksum that its content gives, whatever the content."""
    parts = [
        *(reply.totals, reply.word_counts, reply.log10_backoffs, reply.words),
        *(reply.log10_probs, reply.matched_orders, reply.ngram_lengths, reply.state_lengths),
    ]
    place = reply.shard_set, struct.pack("<I", reply.shard)
    reply.checksum = codec.checksum(*place, *parts, head=asked()[0].checksum)
    return reply.SerializeToString()


def test_request_and_reply_come_out_as_they_went_in() -> None:
    """Every array."""
    request, _ = asked()
    assert (request.shard_set, request.shard) == (SHARD_SET, 3)
    for found, expected in (
        (request.context_lengths, LENGTHS),
        (request.context_words, CONTEXTS),
        (request.pairs, PAIRS),
        (request.skips, SKIPS),
    ):
        assert found.tolist() == expected.tolist()
    found, expected = read(codec.encode_block_reply(request, stored())), stored()
    for name in ("totals", "counts", "log10_backoffs", "ranks"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    for name in ("log10_prob", "matched_order", "ngram_length", "state_length"):
        assert getattr(found.answers, name).tolist() == getattr(expected.answers, name).tolist()


def test_every_flipped_byte_is_noticed() -> None:
    """In the request by the server, in the reply by the client."""
    request, data = asked()
    reply = codec.encode_block_reply(request, stored())
    for sent, decode in (
        (data, lambda d: codec.decode_block_request(d, max_queries=2)),
        (reply, read),
    ):
        for at in range(len(sent)):
            damaged = bytearray(sent)
            damaged[at] ^= 4
            with pytest.raises(ProtocolError):
                decode(bytes(damaged))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"shard_set": b"short"}, ProtocolError),
        ({"context_words": b"\0" * 8}, ProtocolError),
        ({"context_words": b"\0" * 7}, ProtocolError),
        ({"context_lengths": b"\2\2\2"}, ProtocolError),
        ({"skips": b"\0" * 4}, ProtocolError),
        ({"pairs": b"\0" * 4}, ProtocolError),
        ({"checksum": 1}, codec.DamagedMessage),
    ],
)
def test_request_that_does_not_fit_together_is_refused(
    changes: dict[str, Any], error: type[ProtocolError]
) -> None:
    """With the error that says which reason a server gives."""
    message = pb.ContextBlockRequest.FromString(asked()[1])
    for name, value in changes.items():
        setattr(message, name, value)
    if "checksum" not in changes:
        message.checksum = codec.checksum(
            message.shard_set,
            struct.pack("<I", message.shard),
            message.context_lengths,
            message.context_words,
            message.pairs,
            message.skips,
        )
    with pytest.raises(error):
        codec.decode_block_request(message.SerializeToString(), max_queries=9)


def test_request_of_too_many_contexts_has_its_own_error() -> None:
    """As for Score."""
    with pytest.raises(codec.OversizedMessage, match=r"2 contexts.*at most 1"):
        codec.decode_block_request(asked()[1], max_queries=1)


def floats(*values: float) -> bytes:
    """float32, packed."""
    return struct.pack(f"<{len(values)}f", *values)


def ids(*values: int) -> bytes:
    """uint32, packed."""
    return struct.pack(f"<{len(values)}I", *values)


HOSTILE: list[tuple[str, Callable[[pb.ContextBlockReply], Any]]] = [
    ("not in rising order", lambda m: setattr(m, "words", ids(9, 7, 2, 39))),
    ("not in rising order", lambda m: setattr(m, "words", ids(7, 7, 2, 39))),
    (" 40 ", lambda m: setattr(m, "words", ids(7, 9, 2, 40))),
    ("received more words", lambda m: setattr(m, "totals", ids(2, 2))),
    (
        " words .* 40",
        lambda m: setattr(m, "totals", ids(2, 2**32 - 1)),
    ),
    ("values of words; expected", lambda m: setattr(m, "word_counts", ids(2, 1))),
    ("values of word_counts", lambda m: setattr(m, "word_counts", ids(4))),
    ("of words; expected", lambda m: setattr(m, "word_counts", ids(2**32 - 1, 5))),
    ("values of log10_backoffs", lambda m: setattr(m, "log10_backoffs", floats(0, 0))),
    ("not finite", lambda m: setattr(m, "log10_backoffs", floats(0, float("inf"), 0))),
    ("log10_prob nan", lambda m: setattr(m, "log10_probs", floats(float("nan"), -1, -1, -1))),
    ("log10_prob 0.5", lambda m: setattr(m, "log10_probs", floats(0.5, -1, -1, -1))),
    ("fewer than two words", lambda m: setattr(m, "ngram_lengths", b"\2\3\4\3")),
    ("matched_order 4", lambda m: setattr(m, "matched_orders", b"\4\0\4\3")),
    ("state_length 4", lambda m: setattr(m, "state_lengths", b"\0\0\4\0")),
    ("whole number", lambda m: setattr(m, "words", b"12345")),
    ("shard 2 of", lambda m: setattr(m, "shard", 2)),
    (
        "received none of the words",
        lambda m: (
            [
                m.ClearField(name)
                for name in (
                    "words",
                    "log10_probs",
                    "matched_orders",
                    "ngram_lengths",
                    "state_lengths",
                )
            ]
            + [setattr(m, "word_counts", ids(0, 0))]
        ),
    ),
]


@pytest.mark.parametrize(("says", "change"), HOSTILE)
def test_reply_that_cannot_be_is_refused(
    says: str, change: Callable[[pb.ContextBlockReply], Any]
) -> None:
    """Whatever its checksum."""
    reply = pb.ContextBlockReply.FromString(codec.encode_block_reply(asked()[0], stored()))
    change(reply)
    with pytest.raises(ProtocolError, match=says):
        read(seal(reply))
