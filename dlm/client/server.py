"""Carries bytes to a shard server and back.

Scores travel on streams that stay open (`stream`), everything else in separate calls. Sending does
not block: if a stream is not open yet, the loop opens it while the message is queued.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import grpc
import numpy as np
from numpy.typing import NDArray

from dlm.client import loop
from dlm.client.cascade import BeatReply
from dlm.client.cluster_file import Metadata
from dlm.client.config import PLAIN, ClientSecurity
from dlm.client.loop import LoopThread
from dlm.client.rules import Alone, GiveUp, after_stream
from dlm.client.stream import (
    LOOK_S,
    REFUSED,
    SERVICE,
    Ask,
    Exchange,
    Reply,
    SecurityFiles,
    closed_error,
    failed,
)
from dlm.errors import (
    AuthenticationError,
    ClientClosed,
    DeadlineExceeded,
    DlmError,
    ProtocolError,
    ShardDown,
)
from dlm.index.layout import Manifest
from dlm.ngram.query import Answers, QueryGroups
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.certificates import Contents

# Pause before an unreached server is tried again: each attempt costs a connection. It is longer
# if there is a live stream: a failed attempt costs a message that the stream could have carried.
PAUSE_S = 0.1
PAUSE_BESIDE_S = 2.0
# A call that gRPC has not ended this long after its deadline is considered lost.
END_S = 5.0
# New streams use a new token at once, but open streams stay open for this long: servers reread
# their token files within a second, and accept the old token until they know the new one.
TOKEN_SETTLE_S = 2.0

BEAT = "Heartbeat"

Came: TypeAlias = SimpleQueue[tuple[bytes | None, DlmError | None]]
Chunks = Generator[pb.DownloadChunk, None, None]
Withdraw = Callable[[], None]


def client_closed() -> ClientClosed:
    return ClientClosed("this client is closed; open another client")


# -------------------------------------------------------------------------------------------------
# Calls to one server outside its streams, over a separate channel on the loop: heartbeats,
# descriptions, downloads, and the few messages whose trace is sampled. A call costs three times as
# much as a message on a stream.


class Calls:
    """Makes calls over one channel, on the loop. The first call opens the channel. It is closed
    before a fork, or when a call reaches no server and the certificates have changed meanwhile.

    Guarantees  each call ends once, or `suspend` returns it
    """

    def __init__(self, address: str, security: SecurityFiles) -> None:
        self._address, self._security = address, security
        self._opened_with: Contents | None = None
        self._out: set[Ask] = set()
        self._channel: grpc.aio.Channel | None = None
        self._closing: asyncio.Future[None] | None = None  # kept, or it could be collected early

    def send(self, home: LoopThread, ask: Ask) -> None:
        self._out.add(ask)
        home.start(self._ask(ask))

    def suspend(self) -> list[Ask]:
        """Before a fork: returns the calls in flight, to be sent again after the fork."""
        out, self._out = list(self._out), set()
        self._close()
        return out

    def close(self) -> None:
        for ask in self.suspend():
            ask.end(None, closed_error(self._address))

    def _close(self) -> None:
        """Closes the channel, which never rereads certificates; the next call opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None and loop.is_here():
            self._closing = asyncio.ensure_future(channel.close())

    async def _ask(self, ask: Ask) -> None:
        data: bytes | None = None
        error: DlmError | None = closed_error(self._address)
        try:
            await self._security.read()
            used = self._security.metadata
            data, error = await self._call(ask)
            if isinstance(error, AuthenticationError) and used != self._security.metadata:
                data, error = await self._call(ask)
        finally:
            if ask in self._out:
                self._out.remove(ask)
                ask.end(data, error)

    async def _call(self, ask: Ask) -> tuple[bytes | None, DlmError | None]:
        if ask not in self._out:  # `suspend` took the call
            return None, None
        try:
            if self._channel is None:
                self._opened_with = self._security.certificates
                self._channel = self._security.open_channel()
            method = self._channel.unary_unary(f"/{SERVICE}/{ask.method}")
            left_s = max(ask.deadline - time.monotonic(), 0.0)
            metadata = (*self._security.metadata, *ask.metadata) or None
            data: bytes | None = await method(ask.request, timeout=left_s, metadata=metadata)
            if data is None:  # a success for gRPC, but the message's frame was damaged
                raise ProtocolError(f"the reply from {self._address} was damaged in transit; retry")
        except Exception as exc:  # noqa: BLE001 - the caller must be told
            error = failed(self._address, exc)
            if isinstance(error, REFUSED):
                await self._security.read(0.0)
            changed = self._security.certificates is not self._opened_with
            if isinstance(error, ShardDown) and changed:
                self._close()
            return None, error
        else:
            return data, None
        finally:
            method = None  # the method references the channel


class ReceivedFile:
    """A download, over a separate channel so that it does not delay heartbeats. The loop reads one
    chunk ahead of the reader of `chunks`. The last item has no data, and has an error unless the
    server sent the whole file."""

    def __init__(
        self, address: str, request: bytes, deadline: float, security: SecurityFiles
    ) -> None:
        self.chunks: SimpleQueue[tuple[bytes | None, DlmError | None]] = SimpleQueue()
        self._address = address
        self._request, self._deadline, self._security = request, deadline, security
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: DlmError | None = closed_error(address)  # unless a task runs to its end

    def begin(self, home: LoopThread) -> None:
        if home.ending:  # the caller will resume the download later
            self._ended()
        else:
            self._task = home.start(self._run())
            # `_run` cannot do this, since a task that is cancelled before it starts runs no code.
            self._task.add_done_callback(self._ended)

    def _ended(self, _: object = None) -> None:
        self.chunks.put((None, self._error))

    def go_on(self) -> None:
        self._more.set()

    def end(self) -> None:
        """On the loop: ends the call when the connection is closed, or when the reader stops early,
        so that the server is not kept busy."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._security.read(0.0)
            async with self._security.open_channel() as channel:
                call = channel.unary_stream(f"/{SERVICE}/Download")(
                    self._request,
                    timeout=max(self._deadline - time.monotonic(), 0.0),
                    metadata=self._security.metadata or None,
                )
                while (data := await call.read()) is not grpc.aio.EOF:
                    self.chunks.put((data, None))
                    await self._more.wait()
                    self._more.clear()
                self._error = None
        except Exception as exc:  # noqa: BLE001 - the reader must be told
            self._error = failed(self._address, exc)
        finally:
            call = channel = None


# -------------------------------------------------------------------------------------------------
# One server.


class Connection:
    """A connection to one server. Each stream has a gRPC channel, and another stream is opened
    when all are busy, since processes that share a port divide the load by connection. Tests
    replace this class with scripted connections to make the network fail.

    A failure is a `DlmError`, raised or passed to `reply`. If a server sent it, it has a `reason`.
    """

    def __init__(self, address: str, streams: int = 1, *, security: ClientSecurity = PLAIN) -> None:
        self.address = address
        # The address is checked once: its name is not looked up again, even if it later resolves
        # to another machine.
        self._security = SecurityFiles(security.target(address), security)
        self._most = streams
        self._closed = False
        # Used only on the loop:
        self._streams: list[Exchange | None] = [None]
        self._retired: list[Exchange] = []  # streams with a token that is no longer in the file
        # There are two channels, so that descriptions, which are large, do not delay heartbeats.
        self._beats = Calls(address, self._security)
        self._calls = Calls(address, self._security)
        self._files: weakref.WeakSet[ReceivedFile] = weakref.WeakSet()  # tasks keep files alive

    # -- in any thread ------------------------------------------------------------------------

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw:
        """Sends a ScoreRequest, with a trace context as metadata; `reply` is called once, on any
        thread. Returns a function that withdraws the request unless it was already sent; `reply`
        is called either way."""
        deadline = time.monotonic() + timeout_s
        return self._post(Ask("Score", request, deadline, reply, metadata, request))

    def context_block(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw:
        """Sends a ContextBlockRequest, as `score` sends a ScoreRequest."""
        deadline, carried = time.monotonic() + timeout_s, codec.carry_block_request(request)
        unpack = codec.carried_block_reply
        ask = Ask("ContextBlock", request, deadline, reply, metadata, carried, unpack)
        return self._post(ask)

    def describe(self, timeout_s: float, shard_set: bytes = b"") -> pb.DescribeReply:
        """Asks for the server's shards of `shard_set`, or of its default; verifies the checksum."""
        request = pb.DescribeRequest(shard_set=shard_set).SerializeToString()
        message = codec.parse(pb.DescribeReply(), self._wait("Describe", request, timeout_s))
        if message.checksum != codec.describe_checksum(message):
            raise ProtocolError(f"{self.address}'s DescribeReply was damaged in transit; retry")
        return message

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """Asks for the server's state, which shows that it is alive; verifies the checksum."""
        data = self._wait(BEAT, request.SerializeToString(), timeout_s)
        return self._read_beat(request, data)

    def heartbeat_later(
        self, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        """On the loop: like `heartbeat`, without waiting; `reply` is called once, on any thread."""

        def came(data: bytes | None, error: DlmError | None) -> None:
            found = None
            try:
                if data is not None:
                    found = self._read_beat(request, data)
            except DlmError as exc:
                error = exc
            reply(found, error)

        deadline = time.monotonic() + timeout_s
        self._post(Ask(BEAT, request.SerializeToString(), deadline, came))

    def _read_beat(self, request: pb.HeartbeatRequest, data: bytes) -> pb.HeartbeatReply:
        message = codec.parse(pb.HeartbeatReply(), data)
        if message.checksum != codec.heartbeat_checksum(message):
            raise ProtocolError(f"the heartbeat reply from {self.address} was damaged in transit")
        if message.sequence != request.sequence:
            raise ProtocolError(
                f"the heartbeat reply from {self.address} has number {message.sequence}; expected "
                f"{request.sequence}"
            )
        return message

    def _wait(self, method: str, request: bytes, timeout_s: float) -> bytes:
        came: Came = SimpleQueue()
        deadline = time.monotonic() + timeout_s

        def reply(data: bytes | None, error: DlmError | None) -> None:
            came.put((data, error))

        self._post(Ask(method, request, deadline, reply))
        return self._take(came, timeout_s)

    def _take(self, came: Came, left_s: float) -> bytes:
        try:
            # The call ends at its deadline, unless the loop is suspended.
            data, error = came.get(timeout=max(left_s, 0.0) + END_S)
        except Empty:
            raise DeadlineExceeded(
                f"{self.address} did not answer before the deadline; retry, or give a longer "
                "deadline"
            ) from None
        if error is not None:
            raise error
        return data or b""

    def download(self, request: pb.DownloadRequest, timeout_s: float) -> Chunks:
        """Yields the chunks of a file."""
        deadline = time.monotonic() + timeout_s
        data = request.SerializeToString()
        file = ReceivedFile(self.address, data, deadline, self._security)
        self._check_open()
        try:
            loop.post(self._begin, file)
        except Exception as exc:
            raise failed(self.address, exc) from exc
        try:
            while data := self._take(file.chunks, deadline - time.monotonic()):
                loop.leave(file.go_on)
                yield codec.parse(pb.DownloadChunk(), data)
        finally:
            loop.leave(file.end)

    def close(self) -> None:
        self._closed = True
        loop.leave(self._end)

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error(self.address)

    def _post(self, ask: Ask) -> Withdraw:
        self._check_open()
        if loop.is_here():
            self._start(ask)
            return ask.withdraw
        try:
            loop.post(self._start, ask)
        except Exception as exc:  # no loop can be started; the next loop finds `ask` withdrawn
            ask.withdraw()
            raise failed(self.address, exc) from exc
        return ask.withdraw

    # -- on the loop --------------------------------------------------------------------------

    def suspend(self) -> None:
        self._security.suspend()
        asks = [ask for stream in self._all_streams() for ask in stream.suspend()]
        for ask in (*asks, *self._beats.suspend(), *self._calls.suspend()):
            loop.post(self._start, ask)

    def _start(self, ask: Ask) -> None:
        if not ask.wanted:
            ask.drop()
            return
        try:
            self._send(ask)
        except Exception as exc:  # noqa: BLE001 - the waiting caller must be told
            ask.end(None, failed(self.address, exc))

    def _send(self, ask: Ask) -> None:
        if ask.carried is not None and not ask.metadata:
            stream = self._stream()
            if stream is not None:
                stream.send(ask)
                return
        else:
            self._check_open()
            loop.suspend_at_forks(self)
            home = loop.running()
            if not home.ending:
                (self._beats if ask.method == BEAT else self._calls).send(home, ask)
                return
        loop.post(self._start, ask)  # this event loop ends; the next one sends `ask`

    def _begin(self, file: ReceivedFile) -> None:
        loop.suspend_at_forks(self)
        self._files.add(file)
        file.begin(loop.running())
        if self._closed:  # closed before this step ran
            file.end()

    def _stream(self) -> Exchange | None:
        """On the loop: returns the least busy stream, or None if the loop is ending for a fork."""
        first = self._streams[0]
        if (
            first is not None
            and not (first.ended or first.metadata)
            and (self._most == 1 or not first.load)
        ):
            return first
        self._check_open()
        now = time.monotonic()
        self._retire_old(now)
        lives = any(stream is not None and not stream.ended for stream in self._streams)
        pause = PAUSE_BESIDE_S if lives else PAUSE_S
        best, fewest = -1, 0
        failed = ""
        for i, stream in enumerate(self._streams):
            load = 0
            if stream is not None and not stream.ended:
                load = stream.load
            elif stream is not None and stream.failure is not None:
                when, what = stream.failure
                if now < when + pause:
                    failed = what
                    continue
            if best < 0 or load < fewest:
                best, fewest = i, load
        if best < 0:
            raise ShardDown(failed)
        if fewest and not failed and len(self._streams) < self._most:
            self._streams.append(None)
            best = len(self._streams) - 1
        found = self._streams[best]
        if found is not None and not found.ended:
            return found
        loop.suspend_at_forks(self)
        home = loop.running()
        if home.ending:
            return None
        if found is not None:
            self._retire(found)  # the old stream may still answer
        found = Exchange(home, self._security, self.address, self._ask_again)
        self._streams[best] = found
        return found

    def _retire(self, stream: Exchange) -> None:
        self._retired = [old for old in (*self._retired, stream) if old.pending]

    def _retire_old(self, now: float) -> None:
        """Retires streams whose token is no longer in the client's token file: the server ends such
        streams when the token is removed from the server's tokens."""
        security = self._security
        security.look(now - LOOK_S)
        if now < security.token_changed + TOKEN_SETTLE_S:
            return
        for stream in self._streams:
            if stream is None or stream.ended or stream.metadata == security.metadata:
                continue
            stream.retire()
            self._retire(stream)

    def _ask_again(self, ask: Ask, changed: bool, lost: bool) -> bool:
        left_s = ask.deadline - time.monotonic()
        how = after_stream(ask.wanted, left_s, changed=changed, lost=lost)
        if isinstance(how, GiveUp):
            return False
        if isinstance(how, Alone):
            ask.carried = None
        try:
            self._send(ask)
        except DlmError:
            return False
        return True

    def _all_streams(self) -> list[Exchange]:
        return [*self._retired, *(s for s in self._streams if s is not None)]

    def _end(self) -> None:
        for stream in self._all_streams():
            stream.close(closed_error(self.address))
        self._beats.close()
        self._calls.close()
        for file in list(self._files):
            file.end()


Connect = Callable[[str], Connection]  # makes a connection to an address


# -------------------------------------------------------------------------------------------------
# A message to a shard asks either for scores of words or for all words stored after contexts.


class ScoreAsks:
    """Asks for word scores after contexts (`Answers`). Each kind of message has its own queues."""

    name = "scores"

    def encode(self, manifest: Manifest, shard: int, groups: QueryGroups) -> tuple[bytes, int]:
        """The encoded request for `groups`, and its checksum."""
        return codec.encode_score_request(manifest.shard_set_bytes, shard, groups)

    def decode(
        self, data: bytes, manifest: Manifest, shard: int, groups: QueryGroups, checksum: int
    ) -> Answers:
        """The answers in a reply; raises `ProtocolError` if the reply is not valid."""
        answers = codec.decode_score_reply(
            data,
            shard_set=manifest.shard_set_bytes,
            shard=shard,
            queries=len(groups.words),
            request_checksum=checksum,
        )
        codec.check_answers(answers, groups, manifest.order)
        return answers

    def send(self, connection: Connection, *message: Any) -> Withdraw:
        """Sends a request with `Connection.score`."""
        return connection.score(*message)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """What a reply says about one context, in whole or in part: `total`, the number of words stored
    after the context; and, as in `StoredWords`, log10_backoffs (L - 1,), ranks (n,) and answers."""

    total: int
    log10_backoffs: NDArray[np.float32]
    ranks: NDArray[np.uint32]
    answers: Answers


class BlockAsks:
    """Asks for all words stored after contexts; the answer is one `BlockPart` per context. Each
    context is sent like a query for a word, whose id is the number of words received so far."""

    name = "blocks"

    def encode(self, manifest: Manifest, shard: int, groups: QueryGroups) -> tuple[bytes, int]:
        lengths, words = _each(groups)
        assert groups.pairs is not None
        pairs = np.repeat(groups.pairs, groups.word_counts)
        return codec.encode_block_request(
            manifest.shard_set_bytes, shard, lengths, words, pairs, groups.words
        )

    def decode(
        self, data: bytes, manifest: Manifest, shard: int, groups: QueryGroups, checksum: int
    ) -> list[BlockPart]:
        lengths, _ = _each(groups)
        stored = codec.decode_block_reply(
            data,
            shard_set=manifest.shard_set_bytes,
            shard=shard,
            context_lengths=lengths,
            skips=groups.words,
            request_checksum=checksum,
            order=manifest.order,
            vocabulary_size=manifest.vocabulary_size,
        )
        parts, a = [], stored.answers
        word_end, weight_end = 0, 0
        rows = (stored.totals.tolist(), stored.counts.tolist(), lengths.tolist())
        for total, count, length in zip(*rows, strict=True):
            here = slice(word_end, word_end + count)
            weights = stored.log10_backoffs[weight_end : weight_end + length - 1]
            answers = Answers(
                a.log10_prob[here],
                a.matched_order[here],
                a.ngram_length[here],
                a.state_length[here],
            )
            parts.append(BlockPart(total, weights, stored.ranks[here], answers))
            word_end, weight_end = word_end + count, weight_end + length - 1
        return parts

    def send(self, connection: Connection, *message: Any) -> Withdraw:
        return connection.context_block(*message)


Asks: TypeAlias = ScoreAsks | BlockAsks
SCORES, BLOCKS = ScoreAsks(), BlockAsks()


def _each(groups: QueryGroups) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    if (groups.word_counts == 1).all():
        return groups.context_lengths, groups.context_words
    lengths = groups.context_lengths.astype(np.int64)
    begins = np.repeat(np.cumsum(lengths) - lengths, groups.word_counts)
    repeated = np.repeat(groups.context_lengths, groups.word_counts)
    before = np.cumsum(repeated, dtype=np.int64) - repeated
    places = np.repeat(begins - before, repeated) + np.arange(int(repeated.sum(dtype=np.int64)))
    return repeated, groups.context_words[places]
