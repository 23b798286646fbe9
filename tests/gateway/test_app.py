"""dlm.gateway.app: who may call, how much, how it is watched and how it ends; with real servers."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client.parser import text_string_to_metric_families

from certificates import Authority, Pair
from cluster import ModelFiles, free_ports, until
from dlm.client import AsyncClient
from dlm.errors import ConfigError, ShardFormatError
from dlm.gateway.answers import SERVICE
from dlm.gateway.config import GatewayConfig
from dlm.gateway.metrics import FAMILIES
from dlm.server.health import Event
from dlm.wire._pb import lm_pb2 as pb
from gateway.gateways import DOORS, Caller, Refused, ThreadGateway
from spans import recorder


def got(port: int, path: str) -> tuple[int, str]:
    """Status and text of what HTTP answers on the port of metrics."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_only_a_known_token_is_let_in(opening: Any, tokens: Path) -> None:
    """By each door, for each call; and a call is counted by the name of its token."""
    with ThreadGateway(opening, tokens=str(tokens)) as gateway:
        for door in DOORS:
            for token in ("", "c" * 32, "a" * 31):
                caller = Caller(gateway, door, token)
                with pytest.raises(Refused) as refused:
                    caller("Score", sentences=["a"])
                assert refused.value.reason == "UNAUTHENTICATED"
                caller.close()
            caller = Caller(gateway, door, "a" * 32)
            assert caller("Score", sentences=["a"]).scores
            caller.close()
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
            caller = Caller(gateway, door, letter * 32)
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
            caller.close()


def test_a_client_cannot_fill_the_gateway(opening: Any, tokens: Path) -> None:
    """Beyond its own calls in flight it is refused, with when to ask again; others are answered."""
    release = asyncio.Event()

    async def held(*_: Any) -> Any:
        await release.wait()
        return b"", 0

    limits = {"max_in_flight": 2, "client_in_flight": 1}
    with ThreadGateway(opening, tokens=str(tokens), **limits) as gateway:
        alice, bob = (Caller(gateway, "json", name * 32) for name in "ab")
        gateway.running.calls._answers.models = held  # type: ignore[union-attr, method-assign]
        waiting = Caller(gateway, "grpc", "a" * 32)
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
        for caller in (alice, bob, waiting):
            caller.close()


@pytest.mark.promise("gateway_private")
def test_a_draining_gateway_answers_until_its_callers_have_moved(opening: Any) -> None:
    """It is no longer ready at once, but ends only when nobody has asked for a second; who keeps a
    connection by HTTP is told that it ends."""
    (port,) = free_ports(1)
    gateway = ThreadGateway(opening, metrics_port=port, drain_grace_s=20.0).ready()
    assert got(port, "/readyz") == (200, "ready\n")
    caller = Caller(gateway, "grpc")
    check = caller._channel.unary_unary("/grpc.health.v1.Health/Check")
    asked = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    serving = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()
    assert check(asked) == serving
    assert caller("Score", sentences=["a"]).scores
    kept = Caller(gateway, "json")
    assert "connection" not in kept.post("Score", b"{}")[1]
    gateway.running.post(Event.STOP)
    until(lambda: got(port, "/readyz") == (503, "draining\n"))
    status, headers, _ = kept.post("Score", b"{}")
    assert (status, headers["connection"]) == (200, "close")
    kept.close()
    assert caller("Score", sentences=["a"]).scores
    assert check(asked) != serving
    assert gateway.end() == 0
    caller.close()


@pytest.mark.promise("gateway_private")
def test_metrics_are_the_families_of_the_page(opening: Any, tokens: Path) -> None:
    """And the client's; no label has what was asked."""
    (port,) = free_ports(1)
    with ThreadGateway(opening, metrics_port=port, tokens=str(tokens)) as gateway:
        gateway.running.process.certificate_days = lambda: 20.0
        caller = Caller(gateway, "json", "a" * 32)
        caller("Score", sentences=["very private"])
        with pytest.raises(Refused):
            caller("Extend", words=["very"], word_ids=[1])
        caller.close()
        text = got(port, "/metrics")[1]
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
        callers = [Caller(gateway, door) for door in DOORS]
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
            caller.close()
    assert "gateway.score.failed" in caplog.text
    assert word not in caplog.text


def test_tls_is_the_same_by_both_doors(opening: Any, tmp_path: Path) -> None:
    """A certificate of an authority that the caller trusts; a replaced one is used."""
    authority = Authority(tmp_path)
    pair, (port,) = authority.server, free_ports(1)
    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    with ThreadGateway(opening, **files, metrics_port=port) as gateway:
        found = re.search(r"^dlm_gateway_certificate_days (.+)$", got(port, "/metrics")[1], re.M)
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


def test_an_authority_of_callers_that_was_replaced_is_forgotten(
    opening: Any, tmp_path: Path
) -> None:
    """By HTTP, as by gRPC: certificates that it signed no longer let anyone in."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    trusted = tmp_path / "callers.pem"
    trusted.write_bytes(old.ca.read_bytes())
    pair = old.server

    def is_let_in(authority: Authority) -> bool:
        context = ssl.create_default_context(cafile=str(old.ca))
        context.load_cert_chain(authority.client.cert, authority.client.key)
        try:
            with urllib.request.urlopen(address, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(trusted)}
    with ThreadGateway(opening, **files) as gateway:
        address = f"https://localhost:{gateway.running.http_port}/openapi.json"
        assert is_let_in(old) and not is_let_in(new)
        trusted.write_bytes(new.ca.read_bytes())
        until(lambda: is_let_in(new))
        assert not is_let_in(old)


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


def test_a_call_is_a_span_of_its_caller(opening: Any) -> None:
    """If the caller sent a sampled context; it has numbers, and no text."""
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")
    spans = recorder()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with ThreadGateway(opening, trace=True) as gateway:
        caller = Caller(gateway, "grpc")
        method = caller._channel.unary_unary(f"/{SERVICE}/Score")
        request = pb.SentencesRequest(sentences=["a b"]).SerializeToString()
        method(request, metadata=[("traceparent", parent)])
        method(request)
        caller.close()
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
