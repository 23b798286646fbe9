"""Whole clients against servers with certificates and tokens, right and wrong."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from client.questions import ask, random_queries
from cluster import WAIT_S, Cluster, ModelFiles, until
from connect_proxy import VARIABLES, ConnectProxy
from dlm.client import Client, ClientConfig, server as transport
from dlm.client.cluster_file import Endpoint, write_cluster_file
from dlm.client.config import ClientSecurity
from dlm.client.server import Connection
from dlm.errors import AuthenticationError, ConfigError, ShardDown
from dlm.wire._pb import shard_pb2 as pb
from server.test_security import write_tokens

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """That both sides trust."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def serve(files: ModelFiles) -> Iterator[Any]:
    """Starts a cluster with these settings; ends it with the test."""
    running: list[Cluster] = []

    def begin(**config: Any) -> Cluster:
        given = {k: str(v) if isinstance(v, Path) else v for k, v in config.items()}
        running.append(Cluster(files, **given))
        return running[-1]

    yield begin
    for cluster in running:
        cluster.end()


@pytest.fixture
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Connects a client with these settings; closes it with the test."""
    made: list[Client] = []

    def begin(cluster: Cluster, **config: Any) -> Client:
        cache = tmp_path_factory.getbasetemp() / "low-orders"
        given = {k: v if isinstance(v, int) else str(v) for k, v in config.items()}
        made.append(
            Client.connect(
                cluster.addresses, ClientConfig(deadline_s=WAIT_S, cache_dir=cache, **given)
            )
        )
        return made[-1]

    yield begin
    for client in made:
        client.close()


def tls(authority: Authority) -> dict[str, Path]:
    """A server's settings."""
    return {"tls_cert": authority.server.cert, "tls_key": authority.server.key}


def test_a_client_with_a_certificate_and_a_token_gets_the_oracles_scores(
    serve, connect, files, authority, tmp_path
) -> None:
    """From cluster.toml alone; and so does a copy in another process."""
    token = tmp_path / "alice.token"
    write_tokens(token, ALICE)
    tokens = write_tokens(tmp_path / "tokens", f"alice:{ALICE}")
    cluster = serve(**tls(authority), tls_client_ca=authority.ca, tokens=tokens)
    (tmp_path / "decoder.pem").write_bytes(authority.client.cert.read_bytes())
    write_tokens(tmp_path / "decoder.key", authority.client.key.read_text().rstrip())
    path = tmp_path / "cluster.toml"
    lines = "\n".join(f'[[server]]\naddress = "{address}"' for address in cluster.addresses)
    path.write_text(
        f'token_file = "alice.token"\n{lines}\n[tls]\nca = "{authority.ca}"\n'
        'cert = "decoder.pem"\nkey = "decoder.key"\n'
    )
    config = ClientConfig(deadline_s=WAIT_S, cache_dir=tmp_path / "cache")
    queries = random_queries(files.oracle, 7, 200)
    with Client.connect(path, config) as client:
        ask(client.utterance(), files.oracle, queries)
        frozen = pickle.dumps(client)
        assert ALICE.encode() not in frozen
        with pickle.loads(frozen) as copy:
            ask(copy.utterance(), files.oracle, queries)


@pytest.mark.parametrize("token", [None, ALICE + "x"])
def test_without_its_token_a_client_is_told_so_and_asks_once(
    serve, connect, tmp_path, token
) -> None:
    """At connecting; the error is no UnavailableError, so nobody tries again."""
    cluster = serve(tokens=write_tokens(tmp_path / "tokens", f"alice:{ALICE}"))
    with pytest.raises(AuthenticationError, match="authorization: Bearer TOKEN") as caught:
        connect(cluster, **({"token": token} if token else {}))
    assert ALICE not in str(caught.value)
    counted = [server.server.service.metrics.unauthenticated for server in cluster.servers]
    assert counted == [1, 1]


def test_a_client_whose_token_is_removed_is_refused_and_comes_back_with_another(
    serve, connect, files, tmp_path
) -> None:
    """It reads its file again; the connection stays."""
    tokens = write_tokens(tmp_path / "tokens", f"alice:{ALICE}")
    token = write_tokens(tmp_path / "alice.token", ALICE)
    cluster = serve(tokens=tokens)
    client = connect(cluster, token_file=token)
    queries = random_queries(files.oracle, 3, 50)
    ask(client.utterance(), files.oracle, queries)
    write_tokens(tokens, f"alice:{BOB}")

    def refused() -> bool:
        try:
            ask(client.utterance(), files.oracle, queries)
        except AuthenticationError:
            return True
        return False

    until(refused)
    token.write_text(BOB)  # half-written: its line has no end, so the old one stays
    assert refused()
    token.write_text(f"{BOB}\n")
    until(lambda: not refused())


@pytest.mark.promise("token_changes")
@pytest.mark.slow
@pytest.mark.parametrize("settle_s", [0.0, transport.TOKEN_SETTLE_S])
def test_a_token_changes_under_load_without_a_call_that_fails(
    serve, connect, files, tmp_path, monkeypatch, settle_s
) -> None:
    """Three times: a new line for the servers, the client's file renamed in, the old line away,
    each as soon as the one before is known. Streams are left in time, or else what they lost is
    asked again."""
    monkeypatch.setattr(transport, "TOKEN_SETTLE_S", settle_s)
    names = [f"token-{n}-" + "x" * 32 for n in range(4)]
    tokens = write_tokens(tmp_path / "tokens", f"alice:{names[0]}")
    token = write_tokens(tmp_path / "alice.token", names[0])
    cluster = serve(tokens=tokens)
    client = connect(cluster, token_file=token, connections=2)
    queries = random_queries(files.oracle, 5, 20)
    answered = [0, 0, 0]
    failed: list[Exception] = []
    stop = threading.Event()

    def load(number: int) -> None:
        while not stop.is_set() and not failed:
            try:
                ask(client.utterance(), files.oracle, queries)
            except Exception as exc:  # noqa: BLE001 - whatever it is, the test fails by it
                failed.append(exc)
            answered[number] += 1

    def more(calls: int) -> None:
        wanted = sum(answered) + calls
        until(lambda: bool(failed) or sum(answered) >= wanted)

    def known(name: str) -> None:
        """Until every server lets in whoever has this token."""
        security = ClientSecurity(token=name)
        for address in cluster.addresses:
            with closing(Connection(address, security=security)) as probe:
                until(lambda probe=probe: lets_in(probe))

    threads = [threading.Thread(target=load, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    more(10)
    for old, new in pairwise(names):
        write_tokens(tokens, f"alice:{old}", f"alice:{new}")
        known(new)
        write_tokens(token, new)
        more(10)
        write_tokens(tokens, f"alice:{new}")
        with closing(Connection(cluster.addresses[1], security=ClientSecurity(token=old))) as p:
            until(lambda p=p: not lets_in(p))
        more(10)
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []


def lets_in(connection: Connection) -> bool:
    """Whether a server answers a heartbeat."""
    try:
        connection.heartbeat(pb.HeartbeatRequest(sequence=1), WAIT_S)
    except AuthenticationError:
        return False
    return True


def failure(connect: Any, cluster: Cluster, **config: Any) -> str:
    """What a client is told that finds no server it can use."""
    with pytest.raises(ShardDown) as caught:
        connect(cluster, **config)
    return str(caught.value)


@pytest.mark.parametrize("name", ["authority", "other"])
def test_a_certificate_of_another_authority_is_refused(
    serve, connect, authority, tmp_path, name
) -> None:
    """Of another name, or of the same: by the client."""
    told = failure(connect, serve(**tls(authority)), ca=Authority(tmp_path, name).ca)
    assert "authority in ca" in told


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ({"expired": True}, "has expired"),
        ({"self_signed": True}, "authority in ca"),
        ({"host": "other.example"}, "server_name"),
    ],
)
def test_a_bad_certificate_of_a_server_is_refused(serve, connect, authority, kind, told) -> None:
    """Expired, signed by itself, of another host: at once, with what to do."""
    pair = authority.issue("bad", **kind)
    cluster = serve(tls_cert=pair.cert, tls_key=pair.key)
    assert told in failure(connect, cluster, ca=authority.ca)


def test_server_name_stands_for_the_address(serve, connect, files, authority) -> None:
    """Servers behind addresses that no certificate names."""
    pair = authority.issue("named", host="dlm.example")
    cluster = serve(tls_cert=pair.cert, tls_key=pair.key)
    client = connect(cluster, ca=authority.ca, server_name="dlm.example")
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 1, 20))


@pytest.mark.parametrize("kind", [None, {"expired": True}, {"self_signed": True}, "stranger"])
def test_a_client_without_a_good_certificate_is_refused(
    serve, connect, authority, tmp_path, kind
) -> None:
    """None, an expired one, one of its own, one of another authority."""
    cluster = serve(**tls(authority), tls_client_ca=authority.ca)
    mine = {}
    if kind is not None:
        issuer = Authority(tmp_path) if kind == "stranger" else authority
        pair = issuer.issue("bad-client", **({} if kind == "stranger" else kind))
        mine = {"cert": pair.cert, "key": pair.key}
    assert "set cert and key" in failure(connect, cluster, ca=authority.ca, **mine)


@pytest.mark.parametrize("which", ["ca", "cert", "key"])
def test_a_connection_keeps_its_certificates_while_a_file_is_unusable(
    serve, authority, tmp_path, caplog, which
) -> None:
    """New channels use the last usable files, and the log says so once."""
    cluster = serve(**tls(authority), tls_client_ca=authority.ca)
    mine = {"ca": authority.ca, "cert": authority.client.cert, "key": authority.client.key}
    for name, source in mine.items():
        write_tokens(tmp_path / name, source.read_text().rstrip())
    security = ClientSecurity(**{name: str(tmp_path / name) for name in mine})
    with closing(Connection(cluster.addresses[0], security=security)) as connection:
        write_tokens(tmp_path / which, mine[which].read_text()[:150])

        def kept() -> list[Any]:
            return [r for r in caplog.records if getattr(r, "event", "").endswith(".kept")]

        until(lambda: lets_in(connection) and bool(kept()))
        assert connection.describe(WAIT_S).shard_set  # over another channel
        assert [r.event for r in kept()] == ["client.certificates.kept"]
        assert str(tmp_path / which) in kept()[0].error


def test_a_connection_outlives_a_change_of_the_authority(serve, files, authority, tmp_path) -> None:
    """Heartbeats and rare calls too, though their channels stay open."""
    ca, other = tmp_path / "ca", Authority(tmp_path / "other")
    write_tokens(ca, authority.ca.read_text().rstrip())
    cluster = serve(**tls(authority))
    with closing(Connection(cluster.addresses[0], security=ClientSecurity(ca=str(ca)))) as both:
        assert lets_in(both)
        assert both.describe(WAIT_S).shard_set
        port = cluster.ports[0]
        cluster.end()
        serve(**tls(other), ports=[port])
        with pytest.raises(ShardDown):
            lets_in(both)
        write_tokens(ca, other.ca.read_text().rstrip())
        until(lambda: reached(lambda: lets_in(both)))
        until(lambda: reached(lambda: both.describe(WAIT_S)))


def reached(ask_: Callable[[], object]) -> bool:
    """Whether a server was found."""
    try:
        ask_()
    except ShardDown:
        return False
    return True


def test_plaintext_to_a_tls_port_and_tls_to_a_plaintext_port_say_so(
    serve, connect, authority
) -> None:
    """The usual mistakes, each with its remedy."""
    assert "set ca" in failure(connect, serve(**tls(authority)))
    assert "leave ca out" in failure(connect, serve(), ca=authority.ca)


@pytest.fixture
def proxy(monkeypatch) -> Iterator[ConnectProxy]:
    """A proxy that every variable of the environment names."""
    with ConnectProxy() as running:
        for name in VARIABLES:
            monkeypatch.setenv(name, running.url)
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield running


@pytest.mark.promise("secret_tokens")
def test_the_environments_proxy_is_not_used(serve, connect, files, proxy, tmp_path) -> None:
    """Neither by calls nor by streams; so nobody there reads a token that goes in the clear."""
    cluster = serve(tokens=write_tokens(tmp_path / "tokens", f"alice:{ALICE}"))
    client = connect(cluster, token=ALICE)
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 7, 50))
    assert not proxy.received


def test_the_environments_proxy_is_used_over_tls_where_a_setting_says_so(
    serve, connect, files, authority, proxy, tmp_path
) -> None:
    """It opens tunnels and sees no token."""
    tokens = write_tokens(tmp_path / "tokens", f"alice:{ALICE}")
    cluster = serve(**tls(authority), tokens=tokens)
    client = connect(cluster, token=ALICE, ca=authority.ca, use_proxy=True)
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 7, 50))
    assert set(proxy.asked) == set(cluster.addresses)
    assert ALICE.encode() not in proxy.received
    assert b"authorization" not in proxy.received


def test_a_proxy_without_tls_is_refused(connect, serve, proxy) -> None:
    """It would read everything, queries too."""
    with pytest.raises(ConfigError, match=r"use_proxy.*TLS"):
        connect(serve(), use_proxy=True)
    assert not proxy.received


def resolver(monkeypatch: pytest.MonkeyPatch, **hosts: list[str]) -> list[str]:
    """Has `hosts` resolve so; the names that were looked up."""
    asked: list[str] = []

    def look(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if host.lower() not in hosts:
            raise OSError(f"{host} is not known")
        return [(0, 0, 0, "", (address, port)) for address in hosts[host.lower()]]

    monkeypatch.setattr("socket.getaddrinfo", look)
    return asked


def test_a_token_goes_to_the_address_that_was_judged(
    serve, connect, files, monkeypatch, tmp_path
) -> None:
    """A name that resolves to this machine is looked up once for a connection, by its client and
    not by gRPC, so that it cannot become another machine between the two."""
    cluster = serve(tokens=write_tokens(tmp_path / "tokens", f"alice:{ALICE}"))
    asked = resolver(monkeypatch, lm=["127.0.0.1", "::1"])  # gRPC knows no such name
    addresses = [f"LM:{port}" for port in cluster.ports]
    config = ClientConfig(deadline_s=WAIT_S, cache_dir=tmp_path / "cache", token=ALICE)
    with Client.connect(addresses, config) as client:
        monkeypatch.setattr("socket.getaddrinfo", None)
        ask(client.utterance(), files.oracle, random_queries(files.oracle, 7, 50))
    assert asked == ["LM", "LM"]


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], []])
@pytest.mark.parametrize("is_file", [False, True], ids=["address", "cluster.toml"])
def test_a_token_is_not_sent_to_what_may_be_another_machine(
    monkeypatch, tmp_path, addresses, is_file: bool
) -> None:
    """Any address of another machine is one too many, and so is a name that nobody knows."""
    resolver(monkeypatch, localhost=addresses)
    config = ClientConfig(deadline_s=WAIT_S, cache_dir=tmp_path, token=ALICE)
    write_cluster_file(tmp_path / "cluster.toml", [Endpoint("localhost:1", 0)])
    with pytest.raises(ConfigError, match="another machine"):
        Client.connect(tmp_path / "cluster.toml" if is_file else ["localhost:1"], config)
