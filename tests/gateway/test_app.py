"""dlm.gateway.app: who may call, how much, how it is watched and how it ends; with real servers."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client.parser import text_string_to_metric_families

from certificates import Authority, Pair
from cluster import WAIT_S, ModelFiles, free_ports, until
from dlm.client import AsyncClient
from dlm.errors import ConfigError, ShardFormatError
from dlm.gateway.answers import SERVICE
from dlm.gateway.config import GatewayConfig
from dlm.gateway.metrics import FAMILIES
from dlm.server.health import Event
from dlm.wire._pb import lm_pb2 as pb
from dlm.wire.status import Reason, reason_of
from gateway.gateways import DOORS, Refused, ThreadGateway
from server.calls import fetch
from spans import recorder


def test_only_a_known_token_is_let_in(opening: Any, tokens: Path) -> None:
    """By each door, for each call; and a call is counted by the name of its token."""
    with ThreadGateway(opening, tokens=str(tokens)) as gateway:
        for door in DOORS:
            for token in ("", "c" * 32, "a" * 31):
                with pytest.raises(Refused) as refused:
                    gateway.caller(door, token)("Score", sentences=["a"])
                assert refused.value.reason == "UNAUTHENTICATED"
            assert gateway.caller(door, "a" * 32)("Score", sentences=["a"]).scores
        assert gateway.running.metrics.clients == {"alice": 3}
        assert gateway.running.metrics.unauthenticated == 9


@pytest.mark.parametrize("door", DOORS)
def test_a_token_may_ask_only_for_the_models_that_it_names(
    opening: Any, tokens: Path, files: ModelFiles, door: str
) -> None:
    """By the id of the model, or of the shard set."""
    model, shard_set = files.manifest.model, files.manifest.shard_set
    lines = [f"a:{'a' * 32} models={model[:8]},{'0' * 32}", f"b:{'b' * 32} models={shard_set}"]
    tokens.write_text("\n".join([*lines, f"c:{'c' * 32} models={'0' * 32}\n"]))
    with ThreadGateway(opening, tokens=str(tokens)) as gateway:
        for letter in "abc":
            caller = gateway.caller(door, letter * 32)
            for call, request in (
                ("Score", {"sentences": ["a"]}),
                ("Rescore", {}),
                ("NextWords", {}),
                ("Extend", {"words": ["a"]}),
                ("Models", {}),
            ):
                try:
                    caller(call, **request)
                except Refused as refused:
                    assert (letter, refused.reason) == ("c", "UNAUTHENTICATED")
                else:
                    assert letter != "c"


def test_a_client_cannot_fill_the_gateway(opening: Any, tokens: Path) -> None:
    """Beyond its own calls in flight it is refused, with when to ask again; others are answered."""
    release = asyncio.Event()

    async def held(*_: Any) -> Any:
        await release.wait()
        return b"", 0

    limits = {"max_in_flight": 2, "client_in_flight": 1}
    with ThreadGateway(opening, tokens=str(tokens), **limits) as gateway:
        alice, bob = (gateway.caller("json", name * 32) for name in "ab")
        gateway.running.calls._answers.models = held  # type: ignore[union-attr, method-assign]
        waiting = gateway.caller("grpc", "a" * 32)
        future = waiting._channel.unary_unary(f"/{SERVICE}/Models").future(
            b"", metadata=waiting.metadata
        )
        until(lambda: gateway.running.metrics.in_flight == 1)
        status, headers, _ = alice.post("Score", b"{}")
        assert (status, headers["dlm-reason"], headers["retry-after"]) == (429, "CLIENT_LIMIT", "1")
        assert bob("Score", sentences=["a"]).scores
        gateway.running._loop.call_soon_threadsafe(release.set)
        future.result()
        assert alice("Score", sentences=["a"]).scores


@pytest.mark.promise("gateway_private")
def test_a_draining_gateway_answers_until_its_callers_have_moved(opening: Any) -> None:
    """It is no longer ready at once, but ends only when nobody has asked for a second; who keeps a
    connection by HTTP is told that it ends."""
    (port,) = free_ports(1)
    with ThreadGateway(opening, metrics_port=port, drain_grace_s=20.0) as gateway:
        assert fetch(port, "/readyz") == (200, "ready\n")
        caller = gateway.caller("grpc")
        check = caller._channel.unary_unary("/grpc.health.v1.Health/Check")
        asked = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
        serving = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()
        assert check(asked) == serving
        assert caller("Score", sentences=["a"]).scores
        kept = gateway.caller("json")
        assert "connection" not in kept.post("Score", b"{}")[1]
        gateway.running.post(Event.STOP)
        until(lambda: fetch(port, "/readyz") == (503, "draining\n"))
        status, headers, _ = kept.post("Score", b"{}")
        assert (status, headers["connection"]) == (200, "close")
        assert caller("Score", sentences=["a"]).scores
        assert check(asked) != serving
        assert gateway.end() == 0


@pytest.mark.promise("gateway_private")
def test_metrics_are_the_families_of_the_page(opening: Any, tokens: Path) -> None:
    """And the client's; no label has what was asked."""
    (port,) = free_ports(1)
    with ThreadGateway(opening, metrics_port=port, tokens=str(tokens)) as gateway:
        gateway.running.process.certificate_days = lambda: 20.0
        caller = gateway.caller("json", "a" * 32)
        caller("Score", sentences=["very private"])
        with pytest.raises(Refused):
            caller("Extend", words=["very"], word_ids=[1])
        text = fetch(port, "/metrics")[1]
    found = {
        sample.name: {*sample.labels}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, (_, labels) in FAMILIES.items():
        sample = f"{name}_bucket" if "le" in labels else name
        assert found[sample] == set(labels), name
    assert 'dlm_gateway_calls_total{call="Extend",door="http",result="MALFORMED"} 1.0' in text
    assert "dlm_client_queries_total" in found
    assert "private" not in text


@pytest.mark.promise("gateway_private")
def test_nothing_that_was_asked_is_logged(opening: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong, a bug of the gateway included."""
    caplog.set_level(logging.DEBUG)
    word = "".join(["secret", "word"])  # the stack of an error shows lines of this file

    async def broken(*_: Any) -> Any:
        raise RuntimeError(word)

    with ThreadGateway(opening) as gateway:
        callers = [gateway.caller(door) for door in DOORS]
        phrases = pb.Phrases(phrases=[pb.Phrase(text=word, bonus=1.0)])
        for caller in callers:
            caller("Score", sentences=[word], phrases=phrases)
            with pytest.raises(Refused):
                caller("Extend", words=[word], word_ids=[1])
        gateway.running.calls._answers.score = broken  # type: ignore[union-attr, method-assign]
        for caller in callers:
            with pytest.raises(Refused) as refused:
                caller("Score", sentences=[word])
            assert refused.value.reason == "INTERNAL"
            assert word not in refused.value.message
    assert "gateway.score.failed" in caplog.text
    assert word not in caplog.text


def test_tls_is_the_same_by_both_doors(opening: Any, tmp_path: Path) -> None:
    """A certificate of an authority that the caller trusts; a replaced one is used."""
    authority = Authority(tmp_path)
    pair, (port,) = authority.server, free_ports(1)
    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    with ThreadGateway(opening, **files, metrics_port=port) as gateway:
        found = re.search(r"^dlm_gateway_certificate_days (.+)$", fetch(port, "/metrics")[1], re.M)
        assert found and 19 < float(found[1]) <= 20
        trusted = ssl.create_default_context(cafile=str(authority.ca))
        address = f"https://localhost:{gateway.running.http_port}/openapi.json"
        with urllib.request.urlopen(address, context=trusted) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(address, context=ssl.create_default_context())
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        with grpc.secure_channel(f"localhost:{gateway.running.port}", credentials) as channel:
            method = channel.unary_unary(f"/{SERVICE}/Models")
            assert pb.ModelsReply.FromString(method(b"")).models
        doors = [("127.0.0.1", gateway.running.port), ("127.0.0.1", gateway.running.http_port)]
        before = [ssl.get_server_certificate(door) for door in doors]
        assert before[0] == before[1]
        authority.issue("server")  # in place of the files
        until(lambda: all(ssl.get_server_certificate(door) != before[0] for door in doors))


def test_who_asks_that_its_connection_ends_sees_its_end_at_once(
    opening: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS, too; the gateway waits for nothing that its caller has said already."""
    monkeypatch.setattr("dlm.wire.http.LINGER_S", WAIT_S)
    pair = Authority(tmp_path).server
    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    for config in ({}, files):
        with ThreadGateway(opening, **config) as gateway, ExitStack() as held:
            place = ("127.0.0.1", gateway.running.http_port)
            line = held.enter_context(socket.create_connection(place, WAIT_S / 10))
            if config:
                line = held.enter_context(ssl._create_unverified_context().wrap_socket(line))
            line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while line.recv(65536):
                pass


@pytest.mark.parametrize("options", [0, ssl.OP_NO_TICKET], ids=["ticket", "id"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_authority_of_callers_that_was_replaced_is_forgotten(
    opening: Any, tmp_path: Path, version: ssl.TLSVersion, options: int
) -> None:
    """By HTTP, as by gRPC: certificates that it signed no longer let anyone in, nor do sessions
    that began with them."""
    authorities = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    trusted = tmp_path / "callers.pem"
    trusted.write_bytes(authorities[0].ca.read_bytes())
    pair = authorities[0].server
    old, new = (ssl.create_default_context(cafile=str(authorities[0].ca)) for _ in range(2))
    for context, authority in zip((old, new), authorities, strict=True):
        context.maximum_version = version
        context.options |= options
        context.load_cert_chain(authority.client.cert, authority.client.key)

    def begun(by: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        """The session of a caller who is let in."""
        place = ("127.0.0.1", gateway.running.http_port)
        with (
            suppress(OSError),
            socket.create_connection(place) as raw,
            by.wrap_socket(raw, server_hostname="localhost", session=session) as line,
        ):
            line.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: line.recv(65536), b""))
            return line.session if answer else None
        return None

    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(trusted)}
    with ThreadGateway(opening, **files) as gateway:
        session = begun(old)
        assert session and begun(old, session) and not begun(new)
        trusted.write_bytes(authorities[1].ca.read_bytes())
        until(lambda: begun(new))
        assert not begun(old) and not begun(old, session)


@pytest.mark.parametrize(
    "subject", ["CN=decoder", r"2.5.4.5=7,CN=\ #D\, Ü\+1 \"x\"\ ,OU=a+UID=b,O=c\;d,C=DE"]
)
def test_a_caller_with_a_certificate_is_the_same_by_both_doors(
    opening: Any, tmp_path: Path, subject: str
) -> None:
    """And another from its address has limits of its own."""
    authority = Authority(tmp_path)
    pair, other = authority.server, authority.issue("other")
    one = authority.issue("one", subject=subject)

    def ask(caller: Pair) -> int:
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.load_cert_chain(caller.cert, caller.key)
        address = f"https://localhost:{gateway.running.http_port}/{SERVICE}/Models"
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(address, b"{}", kind)
        try:
            with urllib.request.urlopen(asked, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code

    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    more = {"tls_client_ca": str(authority.ca), "client_streams": 1}
    with ThreadGateway(opening, **files, **more) as gateway:
        credentials = grpc.ssl_channel_credentials(
            authority.ca.read_bytes(), one.key.read_bytes(), one.cert.read_bytes()
        )
        with grpc.secure_channel(f"localhost:{gateway.running.port}", credentials) as channel:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert next(watch) == b"\x08\x01"
            assert (ask(one), ask(other)) == (429, 200)
            watch.cancel()


def test_an_address_is_the_same_client_by_both_doors(opening: Any) -> None:
    """Where nothing else says who calls."""
    with ThreadGateway(opening, client_streams=1) as gateway:
        watch = gateway.caller("grpc")._channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert next(watch) == b"\x08\x01"
        status, headers, _ = gateway.caller("json").post("Models", b"{}")
        assert (status, headers["dlm-reason"]) == (429, "CLIENT_LIMIT")
        watch.cancel()


def test_calls_that_come_in_while_the_gateway_ends_are_told_so(opening: Any) -> None:
    """By either door: the rest of one is waited for, and nothing is cut off."""
    with ThreadGateway(opening) as gateway, ExitStack() as held:
        app = gateway.running
        late = SimpleQueue[bytes | None]()
        method = gateway.caller("grpc")._channel.stream_unary(f"/{SERVICE}/Models")
        call = method.future(iter(late.get, None))
        line = held.enter_context(socket.create_connection(("127.0.0.1", app.http_port), WAIT_S))
        line.sendall(f"POST /{SERVICE}/Models HTTP/1.1\r\nHost: localhost\r\n".encode())
        line.sendall(b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{")
        until(lambda: app.guard.half_received == 2)
        app.post(Event.STOP)
        until(lambda: app._phase.refuses)
        line.sendall(b"}")
        assert line.recv(65536).startswith(b"HTTP/1.1 503 ")
        late.put(b"")
        late.put(None)
        assert reason_of(call.exception()) is Reason.DRAINING
        assert gateway.status.result(WAIT_S) == 0


def test_a_call_is_a_span_of_its_caller(opening: Any) -> None:
    """If the caller sent a sampled context; it has numbers, and no text."""
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")
    spans = recorder()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with ThreadGateway(opening, trace=True) as gateway:
        method = gateway.caller("grpc")._channel.unary_unary(f"/{SERVICE}/Score")
        request = pb.SentencesRequest(sentences=["a b"]).SerializeToString()
        method(request, metadata=[("traceparent", parent)])
        method(request)
    (span,) = [one for one in spans.get_finished_spans() if one.name == "dlm.gateway"]
    assert f"{span.context.trace_id:032x}" in parent
    assert dict(span.attributes) == {
        "dlm.call": "Score",
        "dlm.door": "grpc",
        "dlm.queries": 3,
        "dlm.result": "ok",
    }


@pytest.mark.parametrize(
    "config",
    [{"host": "0.0.0.0"}, {"tls_cert": "a"}, {"tls_client_ca": "a"}, {"deadline_s": 0.0}],
)
def test_settings_that_expose_the_model_are_refused(config: dict[str, Any]) -> None:
    """As those of a server, under its own name."""
    with pytest.raises(ConfigError, match=r"^gateway\."):
        GatewayConfig(**config)


def test_what_it_cannot_open_ends_it(tmp_path: Path, files: ModelFiles) -> None:
    """A folder that is no shard set, the key of another certificate, and a port that is taken."""
    with pytest.raises(ShardFormatError):
        ThreadGateway(lambda: AsyncClient.local(tmp_path)).status.result()
    local = lambda: AsyncClient.local(files.directory)  # noqa: E731
    authority = Authority(tmp_path)
    unlike = {"tls_cert": str(authority.server.cert), "tls_key": str(authority.client.key)}
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        ThreadGateway(local, **unlike).status.result()
    with ThreadGateway(local) as gateway:
        for name in ("port", "http_port"):
            taken = {name: getattr(gateway.running, name)}
            with pytest.raises(ConfigError):
                ThreadGateway(local, **taken).status.result()
