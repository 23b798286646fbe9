"""dlm.server.security: who may call, and how much one client may take; with real servers."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Iterator
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest

from certificates import Authority
from cluster import WAIT_S, ThreadServer, free_ports, until
from dlm.client.config import ClientSecurity
from dlm.server.config import ServerConfig
from dlm.server.security import UNAUTHENTICATED
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import PUSHBACK_KEY, REASON_KEY, Reason, reason_of
from http2 import Peer, wait_ended
from server.calls import Outcome, fetch, open_channel, outcome, outcome_of, unread_reply

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32
METHODS = (
    "/dlm.v1.Shard/Score",
    "/dlm.v1.Shard/Exchange",
    "/dlm.v1.Shard/Describe",
    "/dlm.v1.Shard/Download",
    "/dlm.v1.Shard/Heartbeat",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/dlm.v1.Shard/NoSuchMethod",
    "/no.such.Service/Method",
)


def write_tokens(path: Path, *lines: str) -> Path:
    """A tokens file, put in place by renaming."""
    new = path.with_name("new")
    new.touch(0o600)
    new.write_text("".join(f"{line}\n" for line in lines))
    new.rename(path)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """The tokens of alice and bob."""
    return write_tokens(tmp_path / "tokens", "# who may ask", f"alice:{ALICE}", f"bob:{BOB}")


@pytest.fixture
def server(gated, tokens) -> ThreadServer:
    """One that asks for them."""
    return gated(tokens=str(tokens))[1]


@pytest.fixture
def channels() -> Iterator[Any]:
    """Opens channels; closes them with the test."""
    made: list[grpc.Channel] = []

    def begin(
        address: str, token: str = "", options: dict[str, int] | None = None, **security: Any
    ) -> grpc.Channel:
        common = {"grpc.enable_retries": 0, "grpc.use_local_subchannel_pool": 1}
        chosen = common | (options or {})
        made.append(open_channel(address, chosen, ClientSecurity(token=token, **security)))
        return made[-1]

    yield begin
    for channel in made:
        channel.close()


def metadata_of(token: str) -> tuple[tuple[str, str], ...]:
    """What a call with `token` carries."""
    return (("authorization", f"Bearer {token}"),)


def call(channel: grpc.Channel, method: str, data: bytes = b"", **more: Any) -> Outcome:
    """One message, one reply."""
    return outcome_of(channel.unary_unary(method).future(data, timeout=WAIT_S, **more))


def watching(channel: grpc.Channel) -> Any:
    """A stream of the health service, which has said that the server serves."""
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=WAIT_S)
    assert next(watch) == b"\x08\x01"
    return watch


def beat(channel: grpc.Channel) -> Outcome:
    """A heartbeat: the cheapest call."""
    return call(channel, "/dlm.v1.Shard/Heartbeat")


# ------------------------------------------------------------------------------------- tokens


@pytest.mark.promise("authentication")
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        metadata_of("nobody-" + "n" * 32),
        metadata_of(ALICE[:-1] + "x"),
        metadata_of(ALICE + "x"),
        metadata_of(ALICE) + metadata_of(BOB),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer \x7e \x20 !\"'"),),
        (("authorization", "Bearer " + "\x20" * 3000),),
        (("authorization-bin", f"Bearer {ALICE}".encode()),),
        (("x-token", ALICE),),
    ],
)
def test_without_a_good_token_every_call_ends_alike(channels, metadata, server):
    """Whatever the method and whatever is wrong: one code, one message, one reason, no more."""
    channel, refused = channels(server.address), grpc.StatusCode.UNAUTHENTICATED
    for method in METHODS:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method)(b"", timeout=WAIT_S, metadata=metadata)
        error = caught.value
        assert (error.code(), error.details()) == (refused, UNAUTHENTICATED), method
        trailing = [tuple(pair) for pair in error.trailing_metadata()]
        assert trailing == [(REASON_KEY, "UNAUTHENTICATED")], method
        assert error.initial_metadata() is None or not list(error.initial_metadata())


@pytest.mark.promise("authentication")
def test_a_call_is_refused_before_its_request_is_there(server):
    """The headers alone are answered; no byte of a message was sent, or ever will be."""
    peer = Peer(server.address)
    for method in METHODS:
        peer.open_calls(method, 20)
    wait_ended([peer], 20 * len(METHODS))
    peer.close()
    assert server.server.service.metrics.unauthenticated == 20 * len(METHODS)


def test_with_a_good_token_every_method_answers(channels, sharded, asked, server):
    """And the name of the token is counted, not the token."""
    channel = channels(server.address, ALICE)
    answered = call(channel, "/dlm.v1.Shard/Score", asked.data)
    sharded.questions.verify(0, asked, answered.data)
    assert call(channel, "/dlm.v1.Shard/Describe").code is grpc.StatusCode.OK
    assert beat(channel).code is grpc.StatusCode.OK
    assert call(channel, "/grpc.health.v1.Health/Check").data == b"\x08\x01"
    watching(channel).cancel()
    reflection = channel.stream_stream(METHODS[7])(iter([b"\x3a\x00"]), timeout=WAIT_S)
    assert b"dlm.v1.Shard" in next(reflection)
    assert call(channel, "/dlm.v1.Shard/NoSuchMethod").code is grpc.StatusCode.UNIMPLEMENTED
    assert set(server.server.service.metrics.clients) == {"alice"}
    assert server.server.service.metrics.clients["alice"] >= 6


def test_health_is_open_where_the_configuration_says_so(gated, tokens, channels):
    """For probes; nothing else is."""
    _, server, _ = gated(tokens=str(tokens), open_health=True)
    channel = channels(server.address)
    assert call(channel, "/grpc.health.v1.Health/Check").data == b"\x08\x01"
    assert beat(channel).reason is Reason.UNAUTHENTICATED
    assert call(channel, "/grpc.health.v1.Health/NoSuch").reason is Reason.UNAUTHENTICATED


def test_metadata_above_the_bound_is_refused_and_the_server_lives(channels, server):
    """gRPC itself refuses it, before any of this code sees it."""
    huge = (("authorization", "Bearer " + "a" * 100_000),)
    refused = call(channels(server.address), METHODS[4], metadata=huge)
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert beat(channels(server.address, ALICE)).code is grpc.StatusCode.OK


@pytest.mark.promise("token_changes")
def test_streams_end_when_their_token_is_removed_and_others_stay(gated, tokens, channels, sharded):
    """Bob's calls and his connection go on; alice comes back with her new token."""
    _, server, _ = gated(tokens=str(tokens))
    alice, bob = channels(server.address, ALICE), channels(server.address, BOB)
    watches = [watching(channel) for channel in (alice, bob)]
    asked = sharded.questions.ask(np.random.default_rng(1), 0)
    sending: SimpleQueue[bytes] = SimpleQueue()
    sending.put(asked.data + codec.exchange_tail(1, 0, 0))
    exchange = alice.stream_stream(METHODS[1])(iter(sending.get, b""), timeout=WAIT_S)
    sharded.questions.verify(0, asked, next(exchange))
    new = ALICE[::-1]
    write_tokens(tokens, f"alice:{new}", f"bob:{BOB}")
    for stream in (watches[0], exchange):
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert reason_of(caught.value) is Reason.UNAUTHENTICATED
    sending.put(b"")
    assert beat(alice).reason is Reason.UNAUTHENTICATED
    assert beat(bob).code is grpc.StatusCode.OK
    assert beat(channels(server.address, new)).code is grpc.StatusCode.OK
    assert watches[1].is_active()
    watches[1].cancel()


def test_a_stream_ends_when_its_token_expires_and_goes_on_with_the_next(gated, tokens, channels):
    """Within a second; the same client has two tokens while one replaces the other."""
    new = ALICE[::-1]
    write_tokens(tokens, f"alice:{ALICE} expires=2100-01-31", f"alice:{new}")
    _, server, _ = gated(tokens=str(tokens))
    old, following = channels(server.address, ALICE), channels(server.address, new)
    watches = [watching(channel) for channel in (old, following)]
    server.server.guard._now = lambda: 4.2e9  # in 2103
    with pytest.raises(grpc.RpcError) as caught:
        next(watches[0])
    assert reason_of(caught.value) is Reason.UNAUTHENTICATED
    assert beat(old).reason is Reason.UNAUTHENTICATED
    assert beat(following).code is grpc.StatusCode.OK
    assert watches[1].is_active()
    watches[1].cancel()


def test_a_stream_that_is_not_read_is_told_of_its_removed_token_when_it_is(gated, tokens, sharded):
    """It is served nothing more and counts as its client's until then: gRPC takes no status in the
    midst of a write."""
    _, server, _ = gated(tokens=str(tokens))
    guard, metrics = server.server.guard, server.server.service.metrics
    asked = sharded.questions.ask(np.random.default_rng(2), 0)
    peer = Peer(server.address, window=0)
    message = asked.data + codec.exchange_tail(1, 0, 0)
    peer.ask(METHODS[1], message, metadata_of(ALICE), end=False)
    until(lambda: metrics.messages == 1)
    write_tokens(tokens, f"bob:{BOB}")
    until(lambda: metrics.in_flight == 0)
    assert (guard._open, metrics.unauthenticated) == (1, 0)
    peer.let_come(1 << 20)
    wait_ended([peer], 1)
    assert metrics.unauthenticated == 1
    until(lambda: guard._open == 0)
    peer.close()


def test_a_reply_that_waits_with_the_next_read_ends_with_its_token_when_it_is_read(
    tokens, sharded, server
):
    """The client is told after the reply."""
    guard, metrics = server.server.guard, server.server.service.metrics
    peer, asked = unread_reply(sharded, server, metadata_of(ALICE))
    peer.ask_more(asked.data)
    write_tokens(tokens, f"bob:{BOB}")
    until(lambda: metrics.unauthenticated == 1)
    peer.let_come(1 << 20)
    wait_ended([peer], 1)
    until(lambda: guard._open == 0)
    assert metrics.messages == 2
    peer.close()


def test_a_call_in_a_kernel_ends_too_when_its_token_is_removed(gated, tokens, channels, sharded):
    """Its answer is thrown away."""
    shard, server, _ = gated(tokens=str(tokens), inline_queries=0)
    shard.hold()
    asked = sharded.questions.ask(np.random.default_rng(1), 0)
    score = channels(server.address, ALICE).unary_unary(METHODS[0])
    waiting = score.future(asked.data, timeout=WAIT_S)
    assert shard.entered.acquire(timeout=WAIT_S)
    write_tokens(tokens, f"bob:{BOB}")
    assert outcome_of(waiting).reason is Reason.UNAUTHENTICATED
    shard.gate.set()
    assert beat(channels(server.address, BOB)).code is grpc.StatusCode.OK


@pytest.mark.promise("token_changes")
@pytest.mark.parametrize("content", [b"", f"bob:{BOB}\nal".encode(), None])
def test_a_bad_tokens_file_keeps_the_old_tokens(tokens, channels, caplog, content, server):
    """And the log says what is wrong with it, but nothing of what it holds."""
    alice = channels(server.address, ALICE)
    if content is None:
        tokens.unlink()
    else:
        tokens.write_bytes(content)
    until(lambda: any(getattr(r, "event", "") == "server.tokens.kept" for r in caplog.records))
    [record] = [r for r in caplog.records if getattr(r, "event", "") == "server.tokens.kept"]
    assert str(tokens) in record.error
    assert beat(alice).code is grpc.StatusCode.OK
    assert not any(BOB in str(vars(r)) for r in caplog.records)
    write_tokens(tokens, f"bob:{BOB}")
    until(lambda: beat(alice).reason is Reason.UNAUTHENTICATED)


def test_refusals_are_logged_now_and_then_without_tokens(channels, caplog, server):
    """A flood of them does not flood the log."""
    channel = channels(server.address, ALICE + "x")
    for _ in range(50):
        assert beat(channel).reason is Reason.UNAUTHENTICATED
    records = [r for r in caplog.records if getattr(r, "event", "") == "server.unauthenticated"]
    assert 1 <= len(records) < 50
    assert records[0].peer.startswith("ipv4:127.0.0.1:")
    assert not any(ALICE in str(vars(r)) for r in caplog.records)


# ------------------------------------------------------------------------------------- limits


@pytest.mark.promise("client_limits")
def test_one_client_above_its_streams_is_refused_and_others_are_not(gated, tokens, channels):
    """With the time after which to try again; what ends makes room."""
    _, server, _ = gated(tokens=str(tokens), client_streams=3)
    alice, bob = channels(server.address, ALICE), channels(server.address, BOB)
    watches = [watching(alice) for _ in range(3)]
    with pytest.raises(grpc.RpcError) as caught:
        alice.unary_unary(METHODS[4])(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(caught.value) is Reason.CLIENT_LIMIT
    assert (PUSHBACK_KEY, "1000") in [tuple(p) for p in caught.value.trailing_metadata()]
    assert beat(bob).code is grpc.StatusCode.OK
    watches.pop().cancel()
    until(lambda: beat(alice).code is grpc.StatusCode.OK)
    for watch in watches:
        watch.cancel()


def test_one_client_cannot_fill_the_server_with_scores(gated, tokens, channels, sharded, asked):
    """Above client_in_flight it is refused; another is answered."""
    shard, server, _ = gated(tokens=str(tokens), client_in_flight=2, inline_queries=0, threads=4)
    shard.hold()
    alice, bob = channels(server.address, ALICE), channels(server.address, BOB)
    waiting = [alice.unary_unary(METHODS[0]).future(asked.data, timeout=WAIT_S) for _ in range(2)]
    waiting.append(bob.unary_unary(METHODS[0]).future(asked.data, timeout=WAIT_S))
    for _ in waiting:
        assert shard.entered.acquire(timeout=WAIT_S)
    refused = outcome(alice.unary_unary(METHODS[0]), asked.data)
    assert (refused.code, refused.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.CLIENT_LIMIT,
    )
    assert server.server.service.metrics.refusals[Reason.CLIENT_LIMIT] == 1
    shard.gate.set()
    for future in waiting:
        sharded.questions.verify(0, asked, outcome_of(future).data)
    sharded.questions.verify(0, asked, outcome(alice.unary_unary(METHODS[0]), asked.data).data)


def test_calls_take_turns_before_they_are_read(channels, server):
    """One of another client is answered among the first of many that were there before it."""
    alice, bob = channels(server.address, ALICE), channels(server.address, BOB)
    assert beat(alice).code is beat(bob).code is grpc.StatusCode.OK
    turns = server.server.models.turns
    turns._calls.free = 0
    answered: list[str] = []

    def ask(name: str, channel: grpc.Channel, method: str) -> grpc.Future:
        future = channel.unary_unary(method).future(b"", timeout=WAIT_S)
        future.add_done_callback(lambda _: answered.append(name))
        return future

    futures = [ask("alice", alice, METHODS[2 + 2 * (i % 2)]) for i in range(150)]
    until(lambda: sum(map(len, turns._calls._calls.values())) == 150)
    futures.append(ask("bob", bob, METHODS[4]))
    until(lambda: sum(map(len, turns._calls._calls.values())) == 151)
    turns._calls.free = inf
    server.server._loop.call_soon_threadsafe(turns._end_of(turns._calls))
    for future in futures:
        assert outcome_of(future).code is grpc.StatusCode.OK
    until(lambda: len(answered) == 151)
    assert answered.index("bob") < 50


def test_streams_of_a_connection_above_its_share_are_read_no_further(
    gated, tokens, channels, sharded, asked
):
    """Half of what its client may have in flight: what else it sends waits, and is answered."""
    shard, server, _ = gated(tokens=str(tokens), client_in_flight=4, inline_queries=0, threads=4)
    shard.hold()
    alice, bob = channels(server.address, ALICE), channels(server.address, BOB)
    messages = [asked.data + codec.exchange_tail(i, 0, 0) for i in range(1, 6)]
    replies = alice.stream_stream(METHODS[1])(iter(messages), timeout=WAIT_S)
    for _ in range(2):
        assert shard.entered.acquire(timeout=WAIT_S)
    waiting = bob.unary_unary(METHODS[0]).future(asked.data, timeout=WAIT_S)
    assert shard.entered.acquire(timeout=WAIT_S)
    assert server.server.service.metrics.in_flight == 3
    shard.gate.set()
    sharded.questions.verify(0, asked, outcome_of(waiting).data)
    answered = [pb.ScoreReply.FromString(data) for data in replies]
    assert not any(reply.reason for reply in answered)
    assert {reply.sequence for reply in answered} == set(range(1, 6))


@pytest.mark.parametrize("inline_queries", [0, 65_536])
def test_a_peer_that_does_not_read_its_answers_keeps_nobody_out(
    gated, tokens, channels, sharded, inline_queries, asked
):
    """Its answers wait in its streams, and count as its messages in flight, not as everybody's."""
    _, server, _ = gated(
        tokens=str(tokens), max_in_flight=8, client_in_flight=5, inline_queries=inline_queries
    )
    metrics = server.server.service.metrics
    # One answer does not fit what a stream may hold unread.
    large = sharded.questions.ask(np.random.default_rng(1), 0, contexts=8000)
    options = {"grpc.http2.bdp_probe": 0}
    alice, bob = channels(server.address, ALICE, options=options), channels(server.address, BOB)
    messages = [large.data + codec.exchange_tail(i, 0, 0) for i in range(1, 4)]
    streams = [alice.stream_stream(METHODS[1])(iter(messages), timeout=WAIT_S) for _ in range(10)]
    share = 5 if inline_queries else 2  # of large ones a connection has less
    until(lambda: metrics.in_flight == share)
    for _ in range(5):
        sharded.questions.verify(0, asked, outcome(bob.unary_unary(METHODS[0]), asked.data).data)
    for stream in streams:
        stream.cancel()
    until(lambda: metrics.in_flight == 0)
    again = outcome(alice.unary_unary(METHODS[0]), asked.data)
    sharded.questions.verify(0, asked, again.data)


def test_a_server_that_is_full_says_so_to_everybody(gated, channels):
    """max_calls, over all clients."""
    _, server, _ = gated(max_calls=64, client_streams=100)
    peer = Peer(server.address, source="127.0.0.2")
    peer.open_calls("/dlm.v1.Shard/Score", 70)
    wait_ended([peer], 6)
    refused = beat(channels(server.address))
    assert refused.reason is Reason.OVERLOADED
    peer.close()
    until(lambda: beat(channels(server.address)).code is grpc.StatusCode.OK)


@pytest.mark.parametrize("by", ["address", pytest.param("token", marks=pytest.mark.slow)])
def test_three_thousand_idle_calls_of_one_peer_keep_nobody_out(start, tokens, channels, by):
    """Opened and left so, on ten connections, with the limits that a server has by default."""
    server = start(**({"tokens": str(tokens)} if by == "token" else {})).ready()
    source, metadata = ("127.0.0.1", metadata_of(ALICE)) if by == "token" else ("127.0.0.2", ())
    peers = [Peer(server.address, source=source) for _ in range(10)]
    for i, peer in enumerate(peers):
        peer.open_calls(METHODS[(0, 6, 3)[i % 3]], 300, metadata)
    channel = channels(server.address, BOB if by == "token" else "")
    for _ in range(20):  # while they pour in
        assert beat(channel).code is grpc.StatusCode.OK
    wait_ended(peers, 3000 - ServerConfig().client_streams)  # so the server has looked at all
    for _ in range(20):
        assert beat(channel).code is grpc.StatusCode.OK
    watching(channel).cancel()
    for peer in peers:
        peer.close()
    again = channels(server.address, ALICE if by == "token" else "")
    until(lambda: beat(again).code is grpc.StatusCode.OK)  # once the server has seen them close


@pytest.mark.parametrize("kind", ["silent", "half a hello"])
def test_two_thousand_idle_connections_keep_nobody_out(start, tmp_path, channels, kind):
    """To a TLS port: connected and silent, or stuck in the middle of the handshake."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process can open {hard} files, the test needs 4,096")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    authority = Authority(tmp_path)
    pair = authority.server
    server = start(tls_cert=str(pair.cert), tls_key=str(pair.key)).ready()
    host, port = server.address.split(":")
    idle = []
    try:
        for _ in range(2000):
            idle.append(socket.create_connection((host, int(port)), WAIT_S, ("127.0.0.2", 0)))
            if kind != "silent":
                idle[-1].sendall(bytes.fromhex("160301020001"))  # the first bytes of a ClientHello
        for _ in range(5):
            channel = channels(server.address, ca=str(authority.ca))
            assert beat(channel).code is grpc.StatusCode.OK
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_call_whose_message_never_comes_ends(gated, monkeypatch):
    """It would be open as long as its peer likes."""
    monkeypatch.setattr("dlm.server.security.REQUEST_S", 0.05)
    _, server, _ = gated()
    peer = Peer(server.address)
    peer.open_calls("/dlm.v1.Shard/Score", 5)
    peer.open_calls("/dlm.v1.Shard/Download", 3)
    wait_ended([peer], 8)
    peer.close()


def test_a_download_that_nobody_reads_ends_and_leaves_its_place_to_others(
    sharded, gated, monkeypatch, channels
):
    """All places at once, from two addresses; what is kept for the peers counts as their calls."""
    monkeypatch.setattr("dlm.server.replies.WRITE_S", 0.1)
    _, server, _ = gated(max_downloads=4, client_downloads=2)
    request = pb.DownloadRequest(
        shard_set=sharded.manifest.shard_set_bytes, file=pb.DOWNLOAD_FILE_VOCABULARY
    ).SerializeToString()
    peers = [Peer(server.address, source=f"127.0.0.{n}", window=0) for n in (2, 3)]
    for peer in peers:
        for _ in range(2):
            peer.ask(METHODS[3], request)
    until(lambda: server.server.guard._open == 4)
    download = channels(server.address).unary_stream(METHODS[3])

    def has_a_place() -> bool:
        try:
            return len(list(download(request, timeout=WAIT_S))) == 1
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False

    until(has_a_place)
    until(lambda: server.server.guard._open == 4)
    for peer in peers:
        peer.close()
    until(lambda: server.server.guard._open == 0)


def test_answers_that_nobody_reads_count_as_calls_of_their_client(gated, channels):
    """They are kept for it: beyond its limit it gets no more, and others are answered."""
    _, server, _ = gated(client_streams=3)
    peer = Peer(server.address, source="127.0.0.2", window=0)
    for _ in range(3):
        peer.ask(METHODS[2], b"")
    until(lambda: server.server.guard._open == 3)
    for _ in range(5):
        peer.ask(METHODS[2], b"")
    wait_ended([peer], 5)
    assert server.server.service.metrics.client_limits == 5
    assert beat(channels(server.address)).code is grpc.StatusCode.OK
    peer.close()
    until(lambda: server.server.guard._open == 0)


# ------------------------------------------------------------------------------ certificates


def test_certificates_of_clients_are_asked_for_and_name_them(gated, tmp_path, channels, caplog):
    """Two clients with certificates have limits of their own on one address."""
    authority = Authority(tmp_path)
    pair, other = authority.server, authority.issue("other")
    _, server, _ = gated(
        tls_cert=str(pair.cert),
        tls_key=str(pair.key),
        tls_client_ca=str(authority.ca),
        client_streams=1,
    )
    mine = {"ca": authority.ca, "cert": authority.client.cert, "key": authority.client.key}
    channel = channels(server.address, **mine)
    watch = watching(channel)
    assert beat(channels(server.address, **mine)).reason is Reason.CLIENT_LIMIT
    [record] = [r for r in caplog.records if getattr(r, "event", "") == "server.client.limit"]
    assert record.client == "CN=decoder"
    theirs = {"ca": authority.ca, "cert": other.cert, "key": other.key}
    assert beat(channels(server.address, **theirs)).code is grpc.StatusCode.OK
    assert beat(channels(server.address, ca=authority.ca)).code is grpc.StatusCode.UNAVAILABLE
    watch.cancel()


def test_days_until_a_certificate_expires_are_shown(gated, tmp_path):
    """Those of the one that is in use."""
    authority, (port,) = Authority(tmp_path), free_ports(1)
    pair = authority.server
    gated(tls_cert=str(pair.cert), tls_key=str(pair.key), metrics_port=port)

    def days() -> float:
        _, text = fetch(port, "/metrics")
        (line,) = re.findall(r"^dlm_server_certificate_days{.*", text, re.MULTILINE)
        return float(line.split()[-1])

    assert 19 < days() <= 20
    authority.issue("server", days=9)  # in place of the files
    until(lambda: 8 < days() <= 9)


@pytest.mark.promise("token_changes")
def test_certificates_are_changed_under_a_running_server(gated, tmp_path, channels, caplog):
    """New connections get the new one, the old connection goes on; a bad file changes nothing."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(authority: Authority) -> None:
        for source, place in ((authority.server.cert, cert), (authority.server.key, key)):
            fresh = place.with_suffix(".new")
            fresh.touch(0o600)
            fresh.write_bytes(source.read_bytes())
            fresh.rename(place)

    put(old)
    _, server, _ = gated(tls_cert=str(cert), tls_key=str(key))
    first = channels(server.address, ca=old.ca)
    assert beat(first).code is grpc.StatusCode.OK
    cert.write_bytes(new.server.cert.read_bytes()[:300])
    until(
        lambda: any(getattr(r, "event", "") == "server.certificates.kept" for r in caplog.records)
    )
    assert beat(channels(server.address, ca=old.ca)).code is grpc.StatusCode.OK
    put(new)
    until(lambda: beat(channels(server.address, ca=new.ca)).code is grpc.StatusCode.OK)
    assert beat(channels(server.address, ca=old.ca)).code is grpc.StatusCode.UNAVAILABLE
    assert beat(first).code is grpc.StatusCode.OK
