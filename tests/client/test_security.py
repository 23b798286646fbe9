"""dlm.client.config: what a client shows, and to whom."""

from __future__ import annotations

import copy
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from certificates import Authority
from client.questions import ask, random_queries
from cluster import WAIT_S
from dlm.client.cluster_file import ClusterToml, Endpoint, write_cluster_file
from dlm.client.config import PLAIN, ClientConfig, ClientSecurity
from dlm.client.server import Connection
from dlm.errors import ConfigError

TOKEN = "decoder-" + "d" * 32


def token_file(folder: Path, content: str = TOKEN + "\n") -> Path:
    """A client's token file."""
    path = folder / "decoder.token"
    path.touch(0o600)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"cert": "c"}, r"client\.cert and client\.key"),
        ({"key": "k"}, r"client\.cert and client\.key"),
        ({"cert": "c", "key": "k"}, r"set client\.ca"),
        ({"server_name": "n"}, r"set client\.ca"),
        ({"token": TOKEN, "token_file": "f"}, r"client\.token and client\.token_file"),
        ({"token": "short"}, r"client\.token .*16 to 512"),
        ({"token": TOKEN + "\n"}, r"client\.token .*16 to 512"),
        ({"token": "é" * 20}, r"client\.token .*16 to 512"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, fault):
    """Before anything is sent; and the token is not in the message."""
    with pytest.raises(ConfigError, match=fault) as caught:
        ClientSecurity(**settings)
    assert TOKEN not in str(caught.value)


HERE = [
    *("127.0.0.1:5", "localhost:5", "LOCALHOST:5", "[::1]:5", "[::ffff:127.0.0.1]:5"),
    *("ipv4:127.0.0.1:5", "ipv4:127.0.0.1:5,127.0.0.2:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5"),
    *("dns:localhost:5", "dns:///localhost:5", "dns:///[::1]:5", "unix:/run/dlm"),
    "unix-abstract:dlm",
]
ELSEWHERE = [
    *("ipv6:[::1]:5,[2001:db8::1]:5", "dns://8.8.8.8/localhost:5", "xds:///127.0.0.1:5"),
    *("xds:127.0.0.1:5", "evil.com/127.0.0.1:50", "evil.com?127.0.0.1:50", "user@127.0.0.1:5"),
    *("127.0.0.1:5,evil.com:5", "[::ffff:10.0.0.1]:5", "vsock:127.0.0.1:5", "UNIX:/run/dlm"),
    *("127.0.0.1", "ipv4:127.0.0.1:5,10.0.0.1:5", "10.0.0.1:5", "[2001:db8::1]:5"),
    *("example.org:5", "dns:///example.org:5", "dns://127.0.0.1/example.org:5", "0.0.0.0:5"),
    *("localhost.example.org:5", "127.0.0.1.example.org:5"),
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    """One that signs certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.promise("secret_tokens")
@pytest.mark.parametrize("address", [*HERE, *ELSEWHERE])
def test_a_token_leaves_this_machine_over_tls_alone(tmp_path, authority, address):
    """Unless insecure; without a token there is nothing to protect."""
    for given in ({"token": TOKEN}, {"token_file": str(token_file(tmp_path))}):
        if address in HERE:
            Connection(address, security=ClientSecurity(**given)).close()
        else:
            with pytest.raises(ConfigError, match="another machine") as caught:
                Connection(address, security=ClientSecurity(**given))
            assert TOKEN not in str(caught.value)
        Connection(address, security=ClientSecurity(**given, insecure=True)).close()
        Connection(address, security=ClientSecurity(**given, ca=str(authority.ca))).close()
    Connection(address, security=PLAIN).close()


@pytest.mark.promise("secret_tokens")
@pytest.mark.parametrize("which", ["token", "token_file"])
def test_a_token_is_shown_nowhere(tmp_path, which):
    """Nor pickled, where it is named by its file."""
    given = TOKEN if which == "token" else str(token_file(tmp_path))
    security = ClientSecurity(**{which: given})
    config = ClientConfig(cache_dir=tmp_path, **{which: given})
    connection = Connection("127.0.0.1:1", security=security)
    for shown in (security, config, config.security, connection, connection.__dict__):
        assert TOKEN not in repr(shown)
    for kept in (security, config):
        assert (TOKEN.encode() in pickle.dumps(kept)) == (which == "token")
        assert pickle.loads(pickle.dumps(kept)) == kept == copy.deepcopy(kept)
    connection.close()


def test_files_are_read_when_the_connection_is_made(tmp_path):
    """So that what is missing is told at once, and not as a server that does not answer."""
    authority = Authority(tmp_path)
    for settings, fault in (
        ({"ca": tmp_path / "none"}, "none"),
        ({"ca": token_file(tmp_path)}, "PEM"),
        ({"token_file": tmp_path / "none"}, "none"),
        ({"ca": authority.ca, "cert": authority.client.cert, "key": tmp_path / "none"}, "none"),
    ):
        with pytest.raises(ConfigError, match=fault):
            Connection("127.0.0.1:1", security=ClientSecurity(**settings))
    mine = {"cert": authority.client.cert, "key": authority.client.key}
    authority.client.cert.write_bytes(b"")  # gRPC itself would end the process
    with pytest.raises(ConfigError, match=f"{authority.client.cert}.*PEM"):
        Connection("127.0.0.1:1", security=ClientSecurity(ca=authority.ca, **mine))


def test_cluster_toml_says_whom_to_trust(tmp_path):
    """Paths are relative to its folder; what is written is what is read."""
    path = tmp_path / "cluster.toml"
    server = '[[server]]\naddress = "h:1"\n'
    path.write_text(f'token_file = "t"\n{server}[tls]\nca = "ca.pem"\nserver_name = "n"\n')
    read = ClusterToml(path).security()
    assert read == ClientSecurity(
        ca=str(tmp_path / "ca.pem"), server_name="n", token_file=str(tmp_path / "t")
    )
    assert ClusterToml(path).servers() == [Endpoint("h:1")]
    by_proxy = ClientSecurity(ca=str(tmp_path / "ca.pem"), use_proxy=True)
    for security in (read, by_proxy, PLAIN):
        write_cluster_file(path, [Endpoint("h:1", 0)], security=security)
        assert ClusterToml(path).security() == security


def test_the_configuration_stands_before_cluster_toml(tmp_path):
    """Setting by setting; a token and a token file, a certificate and its key go together."""
    base = ClientSecurity(ca="/a", cert="/c", key="/k", server_name="n", token_file="/t")
    assert PLAIN.over(base) == base
    assert base.over(PLAIN) == base
    assert ClientSecurity(ca="/b").over(base).ca == "/b"
    assert ClientSecurity(token=TOKEN).over(base).token_file == ""
    mine = ClientSecurity(ca="/a", cert="/mine", key="/mine.key").over(base)
    assert (mine.cert, mine.key, mine.token_file) == ("/mine", "/mine.key", "/t")


def test_a_name_that_resolves_slowly_holds_up_no_call(
    files, cluster, connect, tmp_path, monkeypatch
):
    """A server is listed by a name while calls go to others: no lock is held meanwhile."""
    entered, goes_on = threading.Event(), threading.Event()
    real = socket.getaddrinfo

    def slow(host, *args, **more):
        if host == "slow.example":
            entered.set()
            goes_on.wait(WAIT_S)
        return real(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr("dlm.client.config.RESOLVE_S", WAIT_S)
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.0)
    path = cluster.write(tmp_path / "cluster.toml")
    client = connect(path, token=TOKEN, heartbeats=False)
    queries = random_queries(files.oracle, 5, 200)
    path.write_text(path.read_text() + '[[server]]\naddress = "slow.example:1"\n')
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(client.utterance).result(WAIT_S / 10)  # it is found that the file changed
            assert entered.wait(WAIT_S)
            asked = pool.submit(lambda: ask(client.utterance(), files.oracle, queries))
            asked.result(WAIT_S / 10)
        finally:
            goes_on.set()
