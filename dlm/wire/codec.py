"""Converts messages to arrays and back: packed, little-endian, with checksums.

Every reader accepts arbitrary bytes: it returns arrays that keep the promises of proto/README.md,
or raises `ProtocolError`. This module has over 600 lines since readers are next to writers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import xxhash
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from dlm.errors import ProtocolError, UnknownCall
from dlm.ngram.query import Answers, QueryGroups, StoredWords
from dlm.wire import kernels
from dlm.wire._pb import shard_pb2 as pb

CHECKSUM_SEED = 0  # DO NOT CHANGE: on the wire
M = TypeVar("M", bound=Message)

# A probability's log10 is at most 0. But ARPA files do not bound back-off weights, so a score can
# be above 0 in a model whose probabilities do not sum to 1 in every context.
MAX_LOG10_PROB = np.finfo(np.float32).max

SHARD_SET_BYTES = 16
WORD_BYTES = 4
CHUNK_BYTES = 1 << 20

_U8 = np.dtype(np.uint8)
_U32 = np.dtype("<u4")
_F32 = np.dtype("<f4")
_HEAD = struct.Struct("<Q")
_SHARD = struct.Struct("<I")
_PLACE = struct.Struct("<QQ")
_NUMBERS = struct.Struct("<8Q")


class DamagedMessage(ProtocolError):
    """The content of a message does not match its checksum."""


class OversizedMessage(ProtocolError):
    """A message has more queries than the server accepts at once."""


class ScoreRequest(NamedTuple):
    """A decoded `dlm.v1.ScoreRequest`: only its lengths and checksum are checked."""

    shard_set: bytes
    shard: int
    groups: QueryGroups
    checksum: int
    sequence: int = 0
    timeout_us: int = 0
    sent_us: int = 0


def checksum(*parts: bytes | memoryview, head: int = 0) -> int:
    """XXH3-64 over `head` (uint64) and each part preceded by its length (uint64)."""
    pieces: list[bytes | memoryview] = [_HEAD.pack(head)]
    for part in parts:
        pieces += (_HEAD.pack(len(part)), part)
    return xxhash.xxh3_64_intdigest(b"".join(pieces), CHECKSUM_SEED)


def parse(message: M, data: bytes) -> M:
    """Fills and returns `message`; raises `ProtocolError` if the bytes are not of its type."""
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise ProtocolError(
            f"received {len(data)} bytes that are not a dlm.v1.{type(message).__name__}; they were "
            "damaged, or another program sent them. Send the request again"
        ) from exc
    return message


def _array(name: str, data: bytes, dtype: np.dtype) -> NDArray:  # type: ignore[type-arg]
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        raise ProtocolError(
            f"field {name} has {len(data)} bytes; expected a whole number of {dtype.name} values"
        ) from None


def _packed(array: NDArray[np.generic], dtype: np.dtype) -> bytes:
    return (array if array.dtype is dtype else array.astype(dtype, copy=False)).tobytes()


def encode_score_request(shard_set: bytes, shard: int, groups: QueryGroups) -> tuple[bytes, int]:
    """Returns the bytes of a ScoreRequest, and its checksum, which the reply's checksum covers."""
    parts = (
        _packed(groups.context_lengths, _U8),
        _packed(groups.context_words, _U32),
        b"" if groups.pairs is None else _packed(groups.pairs, _U32),
        _packed(groups.word_counts, _U32),
        _packed(groups.words, _U32),
    )
    total = checksum(shard_set, _SHARD.pack(shard), *parts)
    message = pb.ScoreRequest(
        shard_set=shard_set,
        shard=shard,
        context_lengths=parts[0],
        context_words=parts[1],
        pairs=parts[2],
        word_counts=parts[3],
        words=parts[4],
        checksum=total,
    )
    return message.SerializeToString(), total


def exchange_tail(sequence: int, timeout_us: int, sent_us: int) -> bytes:
    """Returns the bytes that Exchange appends to a ScoreRequest: joined protobuf messages merge."""
    return bytes(
        pb.ScoreRequest(
            sequence=sequence, timeout_us=timeout_us, sent_us=sent_us
        ).SerializeToString()
    )


def decode_score_request(data: bytes, *, max_queries: int) -> ScoreRequest:
    """Decodes a ScoreRequest, and checks that its arrays fit together.

    Raises  DamagedMessage    the checksum is wrong
            OversizedMessage  there are more than `max_queries` queries
            ProtocolError     the bytes are no message, an array has a wrong length, the counts do
                              not add up, or a context has no words to score
    """
    return read_score_request(parse(pb.ScoreRequest(), data), max_queries=max_queries)


def read_score_request(m: pb.ScoreRequest, *, max_queries: int) -> ScoreRequest:
    """Like `decode_score_request`, for a message that is already parsed."""
    request = open_score_request(m, max_queries=max_queries)
    check_counts(request.groups)
    return request


def open_score_request(m: pb.ScoreRequest, *, max_queries: int) -> ScoreRequest:
    """Like `read_score_request`, for callers that call `check_counts` elsewhere."""
    # Read once, since each access of a field creates a Python object.
    shard_set, shard = m.shard_set, m.shard
    parts = m.context_lengths, m.context_words, m.pairs, m.word_counts, m.words
    expected = _check_request(m.checksum, shard_set, shard, parts)
    groups = QueryGroups(
        _array("context_lengths", parts[0], _U8),
        _array("context_words", parts[1], _U32),
        _array("word_counts", parts[3], _U32),
        _array("words", parts[4], _U32),
        _array("pairs", parts[2], _U32),
    )
    if len(groups.words) > max_queries:
        raise OversizedMessage(
            f"the message has {len(groups.words)} queries; the server accepts at most "
            f"{max_queries}. Send them in several messages"
        )
    return ScoreRequest(shard_set, shard, groups, expected, m.sequence, m.timeout_us, m.sent_us)


def _check_request(given: int, shard_set: bytes, shard: int, parts: Sequence[bytes]) -> int:
    if len(shard_set) != SHARD_SET_BYTES:
        raise ProtocolError(f"shard_set has {len(shard_set)} bytes; expected {SHARD_SET_BYTES}")
    expected = checksum(shard_set, _SHARD.pack(shard), *parts)
    if given != expected:
        raise DamagedMessage(
            f"the request's checksum is {given:016x}, but its content gives {expected:016x}; "
            "it was damaged in transit. Send it again"
        )
    return expected


def check_counts(groups: QueryGroups) -> None:
    """Raises `ProtocolError` unless the counts add up and each context has words to score."""
    if len(groups.word_counts) != len(groups.context_lengths):
        raise ProtocolError(
            f"received {len(groups.context_lengths)} context lengths but "
            f"{len(groups.word_counts)} word counts; expected one of each per context"
        )
    context_total, word_total, silent = kernels.totals(groups.context_lengths, groups.word_counts)
    if context_total != len(groups.context_words):
        raise ProtocolError(
            f"the context lengths add up to {context_total}, but "
            f"{len(groups.context_words)} context words were received"
        )
    if word_total != len(groups.words):
        raise ProtocolError(
            f"the word counts add up to {word_total}, but {len(groups.words)} words were received"
        )
    if silent:
        raise ProtocolError("a context has no words to score; expected at least one")


def check_pairs(pairs: NDArray[np.uint32] | None, contexts: int) -> None:
    """Raises `ProtocolError` unless there is a 2-gram per context."""
    found = 0 if pairs is None else len(pairs)
    if found != contexts:
        raise ProtocolError(
            f"received {contexts} context lengths but {found} 2-grams; expected one of each "
            "per context"
        )


def encode_score_reply(request: ScoreRequest, packed: NDArray[np.uint8]) -> bytes:
    """Returns the bytes of a ScoreReply; `packed` (7 Q,) is log10_prob, then the uint8 columns."""
    data, queries = packed.tobytes(), len(packed) // 7
    a, b, c = 4 * queries, 5 * queries, 6 * queries
    parts = data[:a], data[a:b], data[b:c], data[c:]
    place = request.shard_set, _SHARD.pack(request.shard)
    reply = pb.ScoreReply(
        shard_set=request.shard_set,
        shard=request.shard,
        log10_probs=parts[0],
        matched_orders=parts[1],
        ngram_lengths=parts[2],
        state_lengths=parts[3],
        checksum=checksum(*place, *parts, head=request.checksum),
        sequence=request.sequence,
    )
    return bytes(reply.SerializeToString())


def _answer_parts(answers: Answers) -> tuple[bytes, bytes, bytes, bytes]:
    return (
        answers.log10_prob.astype(_F32, copy=False).tobytes(),
        answers.matched_order.tobytes(),
        answers.ngram_length.tobytes(),
        answers.state_length.tobytes(),
    )


class BlockRequest(NamedTuple):
    """A decoded `dlm.v1.ContextBlockRequest`: only lengths and checksum are checked."""

    shard_set: bytes
    shard: int
    context_lengths: NDArray[np.uint8]
    context_words: NDArray[np.uint32]
    pairs: NDArray[np.uint32]
    skips: NDArray[np.uint32]
    checksum: int
    sequence: int | None = None  # the message's number in Exchange; None outside Exchange
    timeout_us: int = 0
    sent_us: int = 0


def encode_block_request(
    shard_set: bytes,
    shard: int,
    context_lengths: NDArray[np.uint8],
    context_words: NDArray[np.uint32],
    pairs: NDArray[np.uint32],
    skips: NDArray[np.uint32],
) -> tuple[bytes, int]:
    """Returns a ContextBlockRequest's bytes and its checksum, which the reply's checksum covers."""
    parts = (
        context_lengths.astype(np.uint8, copy=False).tobytes(),
        context_words.astype(_U32, copy=False).tobytes(),
        pairs.astype(_U32, copy=False).tobytes(),
        skips.astype(_U32, copy=False).tobytes(),
    )
    total = checksum(shard_set, _SHARD.pack(shard), *parts)
    message = pb.ContextBlockRequest(
        shard_set=shard_set,
        shard=shard,
        context_lengths=parts[0],
        context_words=parts[1],
        pairs=parts[2],
        skips=parts[3],
        checksum=total,
    )
    return message.SerializeToString(), total


def carry_block_request(data: bytes) -> bytes:
    """Wraps an encoded ContextBlockRequest in a ScoreRequest, to be sent in Exchange.

    The ScoreRequest has no queries: a server that does not know `context_block` replies without it.
    """
    request = parse(pb.ContextBlockRequest(), data)
    shard_set, shard = request.shard_set, request.shard
    nothing = checksum(shard_set, _SHARD.pack(shard), *5 * [b""])
    message = pb.ScoreRequest(
        shard_set=shard_set, shard=shard, checksum=nothing, context_block=data
    )
    return bytes(message.SerializeToString())


def carried_block_reply(data: bytes) -> bytes:
    """Unwraps the ContextBlockReply from a ScoreReply; raises `UnknownCall` if there is none."""
    reply = bytes(parse(pb.ScoreReply(), data).context_block)
    if not reply:
        raise UnknownCall(
            "the server answered a ContextBlock as if it were a Score, so it is too old to support "
            "the call; use another server, or upgrade this one"
        )
    return reply


def read_carried_block_request(m: pb.ScoreRequest, *, max_queries: int) -> BlockRequest:
    request = decode_block_request(m.context_block, max_queries=max_queries)
    return request._replace(sequence=m.sequence, timeout_us=m.timeout_us, sent_us=m.sent_us)


def decode_block_request(data: bytes, *, max_queries: int) -> BlockRequest:
    """Decodes a ContextBlockRequest, and checks it; raises what `decode_score_request` does."""
    m = parse(pb.ContextBlockRequest(), data)
    shard_set, shard = m.shard_set, m.shard
    parts = m.context_lengths, m.context_words, m.pairs, m.skips
    expected = _check_request(m.checksum, shard_set, shard, parts)
    lengths = _array("context_lengths", parts[0], _U8)
    words, pairs, skips = (
        _array(name, part, _U32)
        for name, part in zip(("context_words", "pairs", "skips"), parts[1:], strict=True)
    )
    if len(lengths) > max_queries:
        raise OversizedMessage(
            f"the message has {len(lengths)} contexts; the server accepts at most {max_queries}. "
            "Send them in several messages"
        )
    if len(skips) != len(lengths):
        raise ProtocolError(
            f"received {len(lengths)} context lengths but {len(skips)} skips; expected one of each "
            "per context"
        )
    check_pairs(pairs, len(lengths))
    if (total := int(lengths.sum(dtype=np.int64))) != len(words):
        raise ProtocolError(
            f"the context lengths add up to {total}, but {len(words)} context words were received"
        )
    return BlockRequest(shard_set, shard, lengths, words, pairs, skips, expected)


def encode_block_reply(request: BlockRequest, stored: StoredWords) -> bytes:
    """Returns the ContextBlockReply to `request`, in a ScoreReply if `request` came in Exchange."""
    parts = (
        stored.totals.astype(_U32, copy=False).tobytes(),
        stored.counts.astype(_U32, copy=False).tobytes(),
        stored.log10_backoffs.astype(_F32, copy=False).tobytes(),
        stored.ranks.astype(_U32, copy=False).tobytes(),
        *_answer_parts(stored.answers),
    )
    place = request.shard_set, _SHARD.pack(request.shard)
    reply = pb.ContextBlockReply(
        shard_set=request.shard_set,
        shard=request.shard,
        totals=parts[0],
        word_counts=parts[1],
        log10_backoffs=parts[2],
        words=parts[3],
        log10_probs=parts[4],
        matched_orders=parts[5],
        ngram_lengths=parts[6],
        state_lengths=parts[7],
        checksum=checksum(*place, *parts, head=request.checksum),
    )
    data = bytes(reply.SerializeToString())
    if request.sequence is None:
        return data
    carrier = pb.ScoreReply(sequence=request.sequence, context_block=data)
    return bytes(carrier.SerializeToString())


def decode_block_reply(
    data: bytes,
    *,
    shard_set: bytes,
    shard: int,
    context_lengths: NDArray[np.uint8],
    skips: NDArray[np.uint32],
    request_checksum: int,
    order: int,
    vocabulary_size: int,
) -> StoredWords:
    """Decodes the reply to a ContextBlockRequest: the words that the server stores after contexts.

    Args    skips  the `skips` of the request, below the vocabulary's size
    Raises  ProtocolError  the reply is no message, is for another request, shard or shard set, was
                           damaged in transit, or breaks a rule of proto/README.md, "ContextBlock"
    """
    m = parse(pb.ContextBlockReply(), data)
    parts = (
        *(m.totals, m.word_counts, m.log10_backoffs, m.words),
        *(m.log10_probs, m.matched_orders, m.ngram_lengths, m.state_lengths),
    )
    _check_reply(m, shard_set, shard, parts, request_checksum)
    totals, counts = _array("totals", parts[0], _U32), _array("word_counts", parts[1], _U32)
    log10_backoffs, words = (
        _array("log10_backoffs", parts[2], _F32),
        _array("words", parts[3], _U32),
    )
    answers = _answers(parts[4:])
    contexts = len(context_lengths)
    length, given, _ = kernels.totals(context_lengths[: len(counts)], counts[:contexts])
    weights = length - contexts
    for name, array, wanted in (
        ("totals", totals, contexts),
        ("word_counts", counts, contexts),
        ("log10_backoffs", log10_backoffs, weights),
        ("words", words, given),
        ("log10_probs", answers.log10_prob, given),
        ("matched_orders", answers.matched_order, given),
        ("ngram_lengths", answers.ngram_length, given),
        ("state_lengths", answers.state_length, given),
    ):
        if len(array) != wanted:
            raise ProtocolError(f"received {len(array)} values of {name}; expected {wanted}")
    stored = StoredWords(totals, counts, log10_backoffs, words, answers)
    fault = _fault_of_block(stored, skips, vocabulary_size)
    if fault:
        raise ProtocolError(f"{fault}. The server is faulty; use another server")
    check_answers(answers, QueryGroups(context_lengths, words, counts, words, words), order)
    return stored


def _fault_of_block(stored: StoredWords, skips: NDArray[np.uint32], vocabulary_size: int) -> str:
    fault, at = kernels.block_fault(
        stored.totals,
        stored.counts,
        skips,
        stored.ranks,
        stored.log10_backoffs,
        stored.answers.ngram_length,
        vocabulary_size,
    )
    if not fault:
        return ""
    if fault == kernels.TOTAL:
        return (
            f"{stored.totals[at]} words follow a context, but the vocabulary has {vocabulary_size}"
        )
    if fault == kernels.WORD:
        return (
            f"received rank {stored.ranks[at]} for a word after a context; expected a rank "
            f"below {vocabulary_size}"
        )
    return {
        kernels.COUNT: "received more words after a context than its total allows",
        kernels.NO_PROGRESS: "received none of the words that are stored",
        kernels.RISE: "received words after a context that are not in rising order",
        kernels.WEIGHT: "received a back-off weight that is not finite",
        kernels.NGRAM: "received a word that is stored after fewer than two words",
    }[int(fault)]


def encode_refusal(sequence: int, reason: str, message: str, retry_after_ms: int = 0) -> bytes:
    """The bytes of a ScoreReply that refuses a message of Exchange."""
    reply = pb.ScoreReply(
        sequence=sequence,
        reason=reason,
        message=message,
        retry_after_ms=retry_after_ms,
        checksum=_refusal_checksum(sequence, reason, message, retry_after_ms),
    )
    return bytes(reply.SerializeToString())


def _refusal_checksum(sequence: int, reason: str, message: str, retry_after_ms: int) -> int:
    parts = (reason.encode(), message.encode(), _HEAD.pack(retry_after_ms))
    return checksum(*parts, head=sequence)


def check_refusal(reply: pb.ScoreReply) -> None:
    if reply.checksum != _refusal_checksum(
        reply.sequence, reply.reason, reply.message, reply.retry_after_ms
    ):
        raise DamagedMessage("a refusal was damaged in transit; send the request again")


def decode_score_reply(
    data: bytes, *, shard_set: bytes, shard: int, queries: int, request_checksum: int
) -> Answers:
    """Decodes the reply to the request with `request_checksum`.

    Raises  ProtocolError  the reply is no message, is for another request, shard or shard set, has
                           too few or too many answers, or was damaged in transit
    """
    m = parse(pb.ScoreReply(), data)
    parts = m.log10_probs, m.matched_orders, m.ngram_lengths, m.state_lengths
    _check_reply(m, shard_set, shard, parts, request_checksum)
    answers = _answers(parts)
    for name in ("log10_prob", "matched_order", "ngram_length", "state_length"):
        if (found := len(getattr(answers, name))) != queries:
            raise ProtocolError(f"received {found} values of {name}; expected {queries}")
    return answers


def _check_reply(
    m: pb.ScoreReply | pb.ContextBlockReply,
    shard_set: bytes,
    shard: int,
    parts: Sequence[bytes],
    request_checksum: int,
) -> None:
    if m.shard_set != shard_set or m.shard != shard:
        raise ProtocolError(
            f"the reply is from shard {m.shard} of shard set {m.shard_set.hex()}; "
            f"expected shard {shard} of {shard_set.hex()}"
        )
    expected = checksum(shard_set, _SHARD.pack(shard), *parts, head=request_checksum)
    if m.checksum != expected:
        raise DamagedMessage(
            f"the reply's checksum is {m.checksum:016x}, but its content gives {expected:016x}; "
            "it was damaged in transit or answers another request. Send the request again"
        )


def _answers(parts: Sequence[bytes]) -> Answers:
    return Answers(
        _array("log10_probs", parts[0], _F32),
        _array("matched_orders", parts[1], _U8),
        _array("ngram_lengths", parts[2], _U8),
        _array("state_lengths", parts[3], _U8),
    )


def check_answers(answers: Answers, groups: QueryGroups, order: int) -> None:
    """Raises `ProtocolError` if answers are outside the ranges of proto/README.md, "Score".

    A checksum proves that the answers are as the server sent them, not that they are possible.
    """
    at = kernels.out_of_range(
        answers.log10_prob,
        answers.matched_order,
        answers.ngram_length,
        answers.state_length,
        groups.context_lengths,
        groups.word_counts,
        groups.words,
        order,
        MAX_LOG10_PROB,
    )
    if at < 0:
        return
    group = np.searchsorted(np.cumsum(groups.word_counts), at, side="right")
    words = int(groups.context_lengths[group]) + 1
    raise ProtocolError(
        f"answer {at} has log10_prob {answers.log10_prob[at]:g}, matched_order "
        f"{answers.matched_order[at]}, ngram_length {answers.ngram_length[at]}, state_length "
        f"{answers.state_length[at]}; after a context of {words - 1} words, at order {order}, "
        f"expected matched_order <= ngram_length <= {words}, state_length <= ngram_length and "
        f"state_length < {order}; these three must be 0 or >= 3, and 0 if the word never follows "
        f"the last context word; log10_prob must be <= 0 if matched_order is {words}, otherwise "
        "< inf. The server is faulty; use another server"
    )


def describe_checksum(reply: pb.DescribeReply) -> int:
    return checksum(reply.shard_set, _SHARD.pack(reply.shard), reply.manifest)


def heartbeat_checksum(reply: pb.HeartbeatReply) -> int:
    numbers = (
        reply.sequence,
        reply.state,
        reply.instance,
        reply.messages,
        reply.queries,
        reply.refused,
        reply.in_flight,
        reply.uptime_ms,
    )
    return checksum(reply.shard_set, _SHARD.pack(reply.shard), _NUMBERS.pack(*numbers))


def encode_chunk(
    data: bytes | memoryview, *, shard_set: bytes, shard: int, offset: int, file_bytes: int
) -> pb.DownloadChunk:
    """Encodes a chunk of a file, at most `CHUNK_BYTES`; compresses it if that saves bytes."""
    raw = bytes(data)
    packed = pa.Codec("zstd", 3).compress(raw, asbytes=True) if raw else b""
    smaller = len(packed) < len(raw)
    return pb.DownloadChunk(
        offset=offset,
        file_bytes=file_bytes,
        encoding=pb.CHUNK_ENCODING_ZSTD if smaller else pb.CHUNK_ENCODING_RAW,
        data=packed if smaller else raw,
        raw_bytes=len(raw),
        shard_set=shard_set,
        shard=shard,
        checksum=_chunk_checksum(shard_set, shard, offset, file_bytes, raw),
    )


def _chunk_checksum(shard_set: bytes, shard: int, offset: int, file_bytes: int, raw: bytes) -> int:
    return checksum(shard_set, _SHARD.pack(shard), _PLACE.pack(offset, file_bytes), raw)


def decode_chunk(
    chunk: pb.DownloadChunk, *, shard_set: bytes, shard: int, offset: int, file_bytes: int
) -> bytes:
    """Decodes a chunk, which must start at `offset` in a file of `file_bytes`.

    Raises  ProtocolError  the chunk is of another shard, shard set or offset, exceeds `CHUNK_BYTES`
                           or the file, cannot be decoded, or was damaged in transit
    """
    if chunk.shard_set != shard_set or chunk.shard != shard:
        raise ProtocolError(
            f"received a chunk from shard {chunk.shard} of shard set {chunk.shard_set.hex()}; "
            f"expected shard {shard} of {shard_set.hex()}"
        )
    if chunk.offset != offset or chunk.file_bytes != file_bytes:
        raise ProtocolError(
            f"received a chunk at byte {chunk.offset} of {chunk.file_bytes}; "
            f"expected byte {offset} of {file_bytes}"
        )
    if not 0 < chunk.raw_bytes <= min(CHUNK_BYTES, file_bytes - offset):
        raise ProtocolError(
            f"a chunk at byte {offset} of {file_bytes} claims {chunk.raw_bytes} bytes; expected 1 "
            f"to {min(CHUNK_BYTES, file_bytes - offset)}"
        )
    if chunk.encoding == pb.CHUNK_ENCODING_RAW:
        raw = chunk.data
    elif chunk.encoding == pb.CHUNK_ENCODING_ZSTD:
        try:
            raw = pa.Codec("zstd").decompress(
                chunk.data, decompressed_size=chunk.raw_bytes, asbytes=True
            )
        except (pa.ArrowException, OSError) as exc:
            raise ProtocolError(
                f"the chunk at byte {offset} cannot be decompressed; fetch it again"
            ) from exc
    else:
        raise ProtocolError(
            f"this dlm does not know chunk encoding {chunk.encoding}; install the server's version"
        )
    expected = _chunk_checksum(shard_set, chunk.shard, offset, file_bytes, raw)
    if len(raw) != chunk.raw_bytes or expected != chunk.checksum:
        raise DamagedMessage(f"the chunk at byte {offset} was damaged in transit; fetch it again")
    return raw
