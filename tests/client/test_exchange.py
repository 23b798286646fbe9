"""Messages over one stream, against a real gRPC server that does what a test says; above 600 lines,
since all tests share that server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from cluster import WAIT_S, until
from dlm.client import loop, server as transport, stream as exchange
from dlm.client.config import ClientSecurity
from dlm.client.server import Connection
from dlm.client.stream import SERVICE, is_lost
from dlm.errors import (
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
    UnavailableError,
)
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import REASON_KEY

Script = Callable[[Any, pb.ScoreRequest], Awaitable[None]]


class Server:
    """A gRPC server in a thread, on a port and a path, whose Exchange calls `script` for each
    message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.peers: set[str] = set()
        self.described = threading.Event()
        self.received: SimpleQueue[pb.ScoreRequest] = SimpleQueue()
        self.script: Script = self.answer
        self._loop = asyncio.new_event_loop()
        self._bound = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))
        self._thread.start()
        assert self._bound.wait(WAIT_S)

    async def _run(self) -> None:
        server = grpc.aio.server()
        handlers = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
            "Heartbeat": grpc.stream_stream_rpc_method_handler(self._nothing),
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
            "Download": grpc.unary_stream_rpc_method_handler(self._download),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.add_insecure_port(f"unix:{self.path}")
        await server.start()
        self._bound.set()
        await self._stop.wait()
        await server.stop(None)

    async def _exchange(self, _: Any, context: Any) -> None:
        self.peers.add(context.peer())
        while (data := await context.read()) is not grpc.aio.EOF:
            message = pb.ScoreRequest.FromString(data)
            self.received.put(message)
            await self.script(context, message)

    @property
    def streams(self) -> int:
        """Connections that messages came by."""
        return len(self.peers)

    async def _nothing(self, _: Any, context: Any) -> None:
        """Ends well, without a message."""
        await context.read()

    async def _describe(self, _: Any, context: Any) -> bytes:
        """The first is never answered."""
        if not self.described.is_set():
            self.described.set()
            await asyncio.sleep(WAIT_S)
        reply = pb.DescribeReply(shard=3)
        reply.checksum = codec.describe_checksum(reply)
        return bytes(reply.SerializeToString())

    async def _download(self, _: Any, context: Any) -> None:
        """One chunk of several."""
        await context.write(pb.DownloadChunk(data=b"some").SerializeToString())
        await asyncio.sleep(WAIT_S)

    @staticmethod
    async def answer(context: Any, message: pb.ScoreRequest) -> None:
        """Echoes the shard and the sequence."""
        reply = pb.ScoreReply(shard=message.shard, sequence=message.sequence)
        await context.write(reply.SerializeToString())

    def end(self) -> None:
        """Stops it."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that answers."""
    with tempfile.TemporaryDirectory() as folder:
        made = Server(Path(folder) / "socket")
        yield made
        made.end()


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Connection]]:
    """Makes connections to the server; closes them at the end."""
    made: list[Connection] = []

    def begin(streams: int = 1) -> Connection:
        made.append(Connection(server.address, streams))
        return made[-1]

    yield begin
    for connection in made:
        connection.close()


@pytest.fixture(params=[True, False])
def _pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a client whose version of gRPC does not send and receive by one operation."""
    monkeypatch.setattr("dlm.wire.pairs.AVAILABLE", request.param)


class Asked:
    """One message, and what came of it."""

    def __init__(self, connection: Connection, shard: int, timeout_s: float = WAIT_S) -> None:
        self._came = threading.Event()
        self.times = 0
        request = pb.ScoreRequest(shard=shard).SerializeToString()
        connection.score(request, timeout_s, self._reply)

    def _reply(self, data: bytes | None, error: DlmError | None) -> None:
        self.times += 1
        self._outcome = data, error
        self._came.set()

    def outcome(self) -> tuple[bytes | None, DlmError | None]:
        """Bytes or an error."""
        assert self._came.wait(WAIT_S)
        return self._outcome

    def shard(self) -> int:
        """The shard in the reply."""
        data, error = self.outcome()
        assert error is None and data is not None
        return pb.ScoreReply.FromString(data).shard

    def failure(self) -> DlmError:
        """The error."""
        _, error = self.outcome()
        assert error is not None
        return error


@pytest.mark.usefixtures("_pairs")
def test_replies_find_whoever_asked_in_whatever_order_they_come(server, connect) -> None:
    """The server holds messages back and answers the last first."""
    held: list[tuple[Any, pb.ScoreRequest]] = []

    async def backwards(context: Any, message: pb.ScoreRequest) -> None:
        held.append((context, message))
        while len(held) >= 20:
            await server.answer(*held.pop())
        if len(held) == 19 and server.received.qsize() >= 20:
            while held:
                await server.answer(*held.pop())

    server.script = backwards
    connection = connect()
    asked = [Asked(connection, shard) for shard in range(20)]
    assert [a.shard() for a in asked] == list(range(20))
    assert server.streams == 1 and all(a.times == 1 for a in asked)


def test_a_message_says_what_time_is_left_when_it_is_written(server, connect, monkeypatch) -> None:
    """Not when it began to wait for a connection."""
    open_channel, gone_s = exchange.SecurityFiles.open_channel, 0.4

    def slowly(security: Any) -> Any:
        time.sleep(gone_s)  # on the loop: as a handshake with a busy server
        return open_channel(security)

    monkeypatch.setattr(exchange.SecurityFiles, "open_channel", slowly)
    assert Asked(connect(), 1).shard() == 1
    assert server.received.get(timeout=WAIT_S).timeout_us <= (WAIT_S - gone_s) * 1e6


def test_messages_say_how_long_they_are_worth_an_answer_and_when_they_left(server, connect) -> None:
    """Sequences rise; times are those of the stream's own clock."""
    connection = connect()
    for shard in range(3):
        Asked(connection, shard, timeout_s=40.0).shard()
    seen = [server.received.get(timeout=WAIT_S) for _ in range(3)]
    assert [m.sequence for m in seen] == [1, 2, 3]
    assert all(30_000_000 < m.timeout_us <= 40_000_000 for m in seen)  # what is left when it leaves
    assert 0 <= seen[0].sent_us <= seen[1].sent_us <= seen[2].sent_us < WAIT_S * 1e6


def test_a_message_that_gets_no_answer_fails_at_its_deadline_and_harms_no_other(
    server, connect
) -> None:
    """Only even shards are answered; the reply that comes too late goes nowhere."""
    late: list[tuple[Any, pb.ScoreRequest]] = []

    async def even(context: Any, message: pb.ScoreRequest) -> None:
        if message.shard % 2:
            late.append((context, message))
            return
        await server.answer(context, message)
        while late and message.shard == 8:
            await server.answer(*late.pop())

    server.script = even
    connection = connect()
    lost = [Asked(connection, shard, timeout_s=0.05 * shard) for shard in (3, 1, 5)]
    assert Asked(connection, 2).shard() == 2
    for asked in lost:
        assert isinstance(asked.failure(), DeadlineExceeded)
    assert Asked(connection, 8).shard() == 8
    assert Asked(connection, 4).shard() == 4
    assert [asked.times for asked in lost] == [1, 1, 1] and server.streams == 1


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("OVERLOADED", Overloaded),
        ("LATE", DeadlineExceeded),
        ("WRONG_SHARD_SET", StaleShardSet),
        ("DRAINING", ShardDown),
        ("MALFORMED", ProtocolError),
        ("A_REASON_OF_TOMORROW", ShardDown),
    ],
)
def test_a_refusal_becomes_its_error_with_the_advice_it_carries(
    server, connect, reason: str, kind: type[DlmError]
) -> None:
    """As a status would outside of a stream; the stream goes on, unless the server says late what
    is not: then its idea of the client's clock is wrong, and a new stream begins with a new one; or
    it is going away: then a new connection may meet another behind the same address."""

    async def refuse(context: Any, message: pb.ScoreRequest) -> None:
        if message.shard:
            await context.write(codec.encode_refusal(message.sequence, reason, "so", 70))
        else:
            await server.answer(context, message)

    server.script = refuse
    connection = connect()
    error = Asked(connection, 1).failure()
    assert type(error) is kind
    assert getattr(error, "retry_after_s", None) == (
        0.07 if issubclass(kind, UnavailableError) else None
    )
    assert f"{reason}: so" in str(error)
    assert Asked(connection, 0).shard() == 0
    assert server.streams == (2 if reason in ("LATE", "DRAINING") else 1)


@pytest.mark.slow
def test_no_flipped_bit_of_a_refusal_is_believed(server, connect) -> None:
    """Each is told as damage; what looks like answers is refused where answers are read."""
    at = [0]

    async def damage(context: Any, message: pb.ScoreRequest) -> None:
        data = bytearray(codec.encode_refusal(message.sequence, "OVERLOADED", "so", 70))
        data[at[0] // 8] ^= 1 << at[0] % 8
        await context.write(bytes(data))

    server.script = damage
    connection = connect()
    for at[0] in range(8 * len(codec.encode_refusal(1, "OVERLOADED", "so", 70))):
        asked = Asked(connection, 1, timeout_s=0.2)
        data, error = asked.outcome()
        if data is not None:
            with pytest.raises(ProtocolError):
                codec.decode_score_reply(
                    data, shard_set=bytes(16), shard=1, queries=1, request_checksum=5
                )
        else:
            assert isinstance(error, ProtocolError), at[0]


@pytest.mark.usefixtures("_pairs")
@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"\xff\xff\xff", ProtocolError),
        (pb.ScoreReply(sequence=5).SerializeToString(), ProtocolError),
        (None, Overloaded),
    ],
    ids=["no reply", "a reply to another message", "the server's own status"],
)
def test_a_stream_that_breaks_fails_what_is_in_flight_and_the_next_message_opens_another(
    server, connect, sent: bytes | None, kind: type[DlmError]
) -> None:
    """Behind bytes that are no reply nothing can be trusted."""

    async def broken(context: Any, message: pb.ScoreRequest) -> None:
        if server.streams > 1:
            await server.answer(context, message)
        elif message.shard == 2 and sent is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too busy")
        elif message.shard == 2:
            await context.write(sent)

    server.script = broken
    connection = connect()
    waiting, last = Asked(connection, 1), Asked(connection, 2)
    assert {type(asked.failure()) for asked in (waiting, last)} <= {kind, ShardDown}
    assert isinstance(last.failure(), kind)
    assert Asked(connection, 6).shard() == 6
    assert server.streams == 2


@pytest.mark.usefixtures("_pairs")
def test_a_stream_that_ends_while_it_is_idle_costs_no_message(server, connect) -> None:
    """The next message opens another."""

    async def answer_and_end(context: Any, message: pb.ScoreRequest) -> None:
        await server.answer(context, message)
        if message.shard == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")

    server.script = answer_and_end
    connection = connect()
    for shard in (5, 1):
        assert Asked(connection, shard).shard() == shard
    (first,) = connection._streams
    until(lambda: first is not None and first.ended)
    assert Asked(connection, 6).shard() == 6
    assert server.streams == 2


def test_another_stream_is_opened_only_where_the_first_is_busy(server, connect) -> None:
    """One message after the other stays on one; two at once take two, never more than allowed."""
    connection = connect(streams=2)
    for shard in range(5):
        assert Asked(connection, shard).shard() == shard
    assert server.streams == 1
    gate = asyncio.Event()

    async def wait(context: Any, message: pb.ScoreRequest) -> None:
        if message.shard == 9:
            gate.set()
        await gate.wait()
        await server.answer(context, message)

    server.script = wait
    asked = [Asked(connection, shard) for shard in (1, 2, 3)]
    for _ in range(5 + 2):
        server.received.get(timeout=WAIT_S)  # both streams wait at the gate
    server._loop.call_soon_threadsafe(gate.set)
    assert [a.shard() for a in asked] == [1, 2, 3]
    assert server.streams == 2


def stuck(server: Any) -> asyncio.Event:
    """The server reads nothing more until this is set, in its loop."""
    gate = asyncio.Event()

    async def wait(context: Any, message: pb.ScoreRequest) -> None:
        await gate.wait()
        await server.answer(context, message)

    server.script = wait
    return gate


def test_what_nobody_waits_for_does_not_pile_up_behind_a_server_that_does_not_read(
    server, connect
) -> None:
    """20 MB to a server that stops reading: all fail at their deadlines, and what had not left by
    then never leaves."""
    gate = stuck(server)
    connection = connect()
    big = pb.ScoreRequest(shard=1, words=bytes(1 << 18)).SerializeToString()
    failures: SimpleQueue[DlmError | None] = SimpleQueue()
    for _ in range(80):
        connection.score(big, 0.5, lambda data, error: failures.put(error))
    for _ in range(80):
        assert isinstance(failures.get(timeout=WAIT_S), DeadlineExceeded)
    server._loop.call_soon_threadsafe(gate.set)
    assert Asked(connection, 2).shard() == 2
    assert server.received.qsize() < 40


def test_what_is_withdrawn_before_it_left_never_leaves(server, connect) -> None:
    """Behind a server that does not read: told once, and the server never sees it; what is
    withdrawn after it left is answered."""
    gate = stuck(server)
    connection = connect()
    big = pb.ScoreRequest(shard=1, words=bytes(1 << 18)).SerializeToString()
    told: SimpleQueue[tuple[int, bool]] = SimpleQueue()

    def ask(shard: int, request: bytes) -> Callable[[], None]:
        return connection.score(
            request, WAIT_S, lambda data, error: told.put((shard, error is None))
        )

    withdraw_first = ask(1, big)
    assert server.received.get(timeout=WAIT_S).shard == 1
    for _ in range(79):
        ask(1, big)
    withdraw = ask(2, pb.ScoreRequest(shard=2).SerializeToString())
    ask(3, pb.ScoreRequest(shard=3).SerializeToString())
    withdraw()
    withdraw_first()
    server._loop.call_soon_threadsafe(gate.set)
    came = [told.get(timeout=WAIT_S) for _ in range(82)]
    assert sorted(came) == [(1, True)] * 80 + [(2, False), (3, True)]
    seen = [server.received.get(timeout=WAIT_S).shard for _ in range(80)]
    assert sorted(seen) == [1] * 79 + [3] and server.received.empty() and told.empty()


def test_where_nobody_is_found_nobody_is_looked_for_at_every_message() -> None:
    """A thousand messages to a port that turns all away: told at once, by few connections."""
    made: list[int] = []

    def turn_away(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listening.accept()[0].close()
                made.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=turn_away, args=(listening,), daemon=True).start()
        connection = Connection(f"127.0.0.1:{listening.getsockname()[1]}")
        for shard in range(1000):
            with contextlib.suppress(ShardDown):
                assert isinstance(Asked(connection, shard).failure(), ShardDown)
        connection.close()
        listening.shutdown(socket.SHUT_RDWR)
    assert 0 < len(made) < 500


def test_closing_fails_what_is_in_flight_and_what_comes_after(server, connect) -> None:
    """With `ShardDown`, at once; a download, too."""

    async def silence(context: Any, message: pb.ScoreRequest) -> None:
        pass

    server.script = silence
    connection = connect()
    waiting = Asked(connection, 1)
    server.received.get(timeout=WAIT_S)
    chunks = connection.download(pb.DownloadRequest(), WAIT_S)
    assert next(chunks).data == b"some"
    connection.close()
    assert isinstance(waiting.failure(), ShardDown)
    with pytest.raises(ShardDown):
        next(chunks)
    with pytest.raises(ShardDown):
        Asked(connection, 2)


def test_what_a_caller_sends_when_told_late_too_soon_is_answered_and_so_is_what_was_in_flight(
    server, connect
) -> None:
    """The next message takes a new stream at once, and the old one lives until all that it took was
    answered or has run out; then no connection stays behind."""
    held: list[tuple[Any, pb.ScoreRequest]] = []
    ended = threading.Event()

    async def late(context: Any, message: pb.ScoreRequest) -> None:
        if message.shard == 1:
            held.append((context, message))
        elif message.shard == 2:
            context.add_done_callback(lambda _: ended.set())
            await context.write(codec.encode_refusal(message.sequence, "LATE", "so", 0))
        elif message.shard == 3:
            await server.answer(context, message)
            await server.answer(*held.pop())

    server.script = late
    connection = connect()
    first, lost = Asked(connection, 1), Asked(connection, 4, timeout_s=0.3)
    told: SimpleQueue[tuple[DlmError | None, Asked]] = SimpleQueue()
    connection.score(
        pb.ScoreRequest(shard=2).SerializeToString(),
        WAIT_S,
        lambda data, error: told.put((error, Asked(connection, 3))),
    )
    error, third = told.get(timeout=WAIT_S)
    assert isinstance(error, DeadlineExceeded)
    assert third.shard() == 3
    assert first.shard() == 1
    assert isinstance(lost.failure(), DeadlineExceeded)
    assert ended.wait(WAIT_S)
    assert server.streams == 2


def first_is_mute(server: Any) -> list[Any]:
    """The first connection with a message never answers; it is in the list then."""
    mute: list[str] = []

    async def answer(context: Any, message: pb.ScoreRequest) -> None:
        if not mute:
            mute.append(context.peer())
        if context.peer() != mute[0]:
            await server.answer(context, message)

    server.script = answer
    return mute


def test_a_stream_that_stays_silent_is_not_asked_while_another_answers(server, connect) -> None:
    """Its server may be stuck while the connection lives; one message is lost, not every one."""
    mute = first_is_mute(server)
    connection = connect(streams=2)
    while not mute:  # a machine that stands still may not have sent it in that time
        assert isinstance(Asked(connection, 1, timeout_s=1.0).failure(), DeadlineExceeded)
    for shard in range(5):
        assert Asked(connection, shard, timeout_s=WAIT_S / 2).shard() == shard
    assert server.streams == 2


def test_a_stream_that_stays_silent_for_long_is_given_up_for_another(
    server, connect, monkeypatch
) -> None:
    """Even the only one: its framing may be damaged while its connection lives."""
    first_is_mute(server)
    connection = connect(streams=1)
    monkeypatch.setattr(exchange, "SILENT_S", 3600.0)
    for _ in range(4):  # soon after it was made: it may yet speak
        assert isinstance(Asked(connection, 1, timeout_s=0.05).failure(), DeadlineExceeded)
    assert server.streams == 1
    monkeypatch.setattr(exchange, "SILENT_S", 0.0)
    assert isinstance(Asked(connection, 1, timeout_s=0.05).failure(), DeadlineExceeded)
    for shard in range(5):
        assert Asked(connection, shard).shard() == shard
    assert server.streams == 2


def test_a_call_that_ends_well_without_a_message_is_a_broken_contract(connect) -> None:
    """As one does whose frames were damaged; whoever waits for a heartbeat is told."""
    request = pb.HeartbeatRequest(sequence=1)
    connection = connect()
    with pytest.raises(ProtocolError):
        connection.heartbeat(request, WAIT_S)
    told: SimpleQueue[DlmError | None] = SimpleQueue()
    later = functools.partial(connection.heartbeat_later, request, WAIT_S)
    loop.post(later, lambda found, error: told.put(error))
    assert isinstance(told.get(timeout=WAIT_S), ProtocolError)


def test_a_call_that_a_fork_interrupts_is_sent_again_and_a_download_ends_with_an_error(
    server, connect
) -> None:
    """As messages are: a call changes nothing on the server. A download is resumed from what has
    come."""
    connection = connect()
    chunks = connection.download(pb.DownloadRequest(), WAIT_S)
    assert next(chunks).data == b"some"
    found: SimpleQueue[int] = SimpleQueue()
    asking = threading.Thread(target=lambda: found.put(connection.describe(WAIT_S).shard))
    asking.start()
    assert server.described.wait(WAIT_S)
    # What a fork does; a process in which a grpc.aio server ran cannot fork.
    loop.suspend(loop._suspend)
    assert found.empty()
    loop.resume()
    assert found.get(timeout=WAIT_S) == 3
    asking.join(WAIT_S)
    with pytest.raises(ShardDown):
        next(chunks)


def test_a_second_connection_that_cannot_be_made_costs_one_message_not_the_others(
    server, monkeypatch
) -> None:
    """The first is busy and lives: it takes what comes until the second is tried again."""
    monkeypatch.setattr(transport, "PAUSE_BESIDE_S", 3600.0)

    async def hold(context: Any, message: pb.ScoreRequest) -> None:
        if message.shard != 1:
            await server.answer(context, message)

    server.script = hold
    with contextlib.closing(Connection(f"unix:{server.path}", 2)) as connection:
        assert Asked(connection, 5).shard() == 5
        server.path.unlink()  # what is connected stays so, and nobody else connects
        busy = Asked(connection, 1)
        assert isinstance(Asked(connection, 6).failure(), ShardDown)
        for shard in range(7, 27):
            assert Asked(connection, shard).shard() == shard
        assert busy.times == 0


@pytest.mark.parametrize(
    ("code", "details", "reason", "lost"),
    [
        ("INTERNAL", "Internal error from Core", "", True),
        ("INTERNAL", "Internal error from Core", "INTERNAL", False),
        ("INTERNAL", "the server failed", "", False),
        ("UNAVAILABLE", "Internal error from Core", "", False),
    ],
)
def test_a_stream_that_grpc_lost_is_no_broken_contract(
    code: str, details: str, reason: str, lost: bool
) -> None:
    """gRPC's words for a write into a stream that had ended; a server's own INTERNAL is another."""
    error = grpc.RpcError()
    error.code, error.details = (lambda: grpc.StatusCode[code]), (lambda: details)
    error.trailing_metadata = lambda: ((REASON_KEY, reason),) if reason else ()
    assert is_lost(error) == lost


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file that holds one."""
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("a" * 32 + "\n")
    return tmp_path / "token"


def test_a_new_token_leaves_old_streams_what_they_have_in_flight(
    server, token, monkeypatch
) -> None:
    """The old stream answers what it took, takes nothing more and is closed."""
    monkeypatch.setattr(transport, "LOOK_S", 0.0)
    monkeypatch.setattr(transport, "TOKEN_SETTLE_S", 0.0)
    held: list[Any] = []
    closed = threading.Event()

    async def script(context: Any, message: pb.ScoreRequest) -> None:
        if message.shard == 7:
            context.add_done_callback(lambda _: closed.set())
            held.append((context, message))
        else:
            await server.answer(context, message)
            while held and server.streams == 2:
                await server.answer(*held.pop())

    server.script = script
    security = ClientSecurity(token_file=str(token))
    with contextlib.closing(Connection(server.address, security=security)) as connection:
        slow = Asked(connection, 7)
        until(lambda: bool(held))
        token.write_text("b" * 32 + "\n")
        until(lambda: Asked(connection, 1).shard() == 1 and server.streams == 2)
        assert slow.shard() == 7
        assert closed.wait(WAIT_S)


def test_a_file_system_that_stalls_holds_up_no_message(server, connect, token, monkeypatch) -> None:
    """Neither of other connections nor of the one whose token it holds, open or not yet: it uses
    the last one."""
    stalls, goes_on, stat = threading.Event(), threading.Event(), Path.stat

    def slow(path: Path, **more: Any) -> Any:
        if path == token and stalls.is_set():
            goes_on.wait(WAIT_S)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", slow)
    monkeypatch.setattr(transport, "LOOK_S", 0.0)
    security = ClientSecurity(token_file=str(token))
    opened, later = (Connection(server.address, security=security) for _ in range(2))
    with contextlib.closing(opened), contextlib.closing(later):
        assert Asked(opened, 1).shard() == 1
        stalls.set()
        server.described.set()
        due = time.monotonic() + exchange.LOOK_S
        until(lambda: time.monotonic() > due)  # to read it again
        try:
            for connection in (opened, connect(), later):
                assert Asked(connection, 2, timeout_s=WAIT_S / 4).shard() == 2
            assert later.describe(WAIT_S / 4).shard == 3
        finally:
            goes_on.set()
