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
from dlm.client.cluster_file import ClusterToml, Endpoint, write_cluster_file
from dlm.client.config import PLAIN, ClientConfig, ClientSecurity
from dlm.client.server import GrpcConnection
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


@pytest.mark.promise("secret_tokens")
@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:5", True),
        ("localhost:5", True),
        ("[::1]:5", True),
        ("ipv4:127.0.0.1:5", True),
        ("ipv6:[::1]:5", True),
        ("ipv6:%5B::1%5D:5", True),
        ("dns:///localhost:5", True),
        ("unix:/run/dlm", True),
        ("unix-abstract:dlm", True),
        ("LOCALHOST:5", True),
        ("dns:localhost:5", True),
        ("dns:///[::1]:5", True),
        ("[::ffff:127.0.0.1]:5", True),
        ("ipv4:127.0.0.1:5,127.0.0.2:5", True),
        ("ipv6:[::1]:5,[2001:db8::1]:5", False),
        ("dns://8.8.8.8/localhost:5", False),
        ("xds:///127.0.0.1:5", False),
        ("xds:127.0.0.1:5", False),
        ("evil.com/127.0.0.1:50", False),
        ("evil.com?127.0.0.1:50", False),
        ("127.0.0.1:5,evil.com:5", False),
        ("user@127.0.0.1:5", False),
        ("[::ffff:10.0.0.1]:5", False),
        ("vsock:127.0.0.1:5", False),
        ("UNIX:/run/dlm", False),
        ("127.0.0.1", False),
        ("ipv4:127.0.0.1:5,10.0.0.1:5", False),
        ("10.0.0.1:5", False),
        ("[2001:db8::1]:5", False),
        ("example.org:5", False),
        ("dns:///example.org:5", False),
        ("dns://127.0.0.1/example.org:5", False),
        ("localhost.example.org:5", False),
        ("127.0.0.1.example.org:5", False),
        ("0.0.0.0:5", False),
    ],
)
def test_a_token_leaves_this_machine_over_tls_alone(tmp_path, address, local):
    """Unless insecure; without a token there is nothing to protect."""
    path = str(token_file(tmp_path))
    authority = Authority(tmp_path)
    for given in ({"token": TOKEN}, {"token_file": path}):
        if local:
            GrpcConnection(address, security=ClientSecurity(**given)).close()
        else:
            with pytest.raises(ConfigError, match="another machine") as caught:
                GrpcConnection(address, security=ClientSecurity(**given))
            assert TOKEN not in str(caught.value)
        GrpcConnection(address, security=ClientSecurity(**given, insecure=True)).close()
        GrpcConnection(address, security=ClientSecurity(**given, ca=str(authority.ca))).close()
    GrpcConnection(address, security=PLAIN).close()


@pytest.mark.promise("secret_tokens")
@pytest.mark.parametrize("which", ["token", "token_file"])
def test_a_token_is_shown_nowhere(tmp_path, which):
    """Nor pickled, where it is named by its file."""
    given = TOKEN if which == "token" else str(token_file(tmp_path))
    security = ClientSecurity(**{which: given})
    config = ClientConfig(cache_dir=tmp_path, **{which: given})
    connection = GrpcConnection("127.0.0.1:1", security=security)
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
            GrpcConnection("127.0.0.1:1", security=ClientSecurity(**settings))
    mine = {"cert": authority.client.cert, "key": authority.client.key}
    authority.client.cert.write_bytes(b"")  # gRPC itself would end the process
    with pytest.raises(ConfigError, match=f"{authority.client.cert}.*PEM"):
        GrpcConnection("127.0.0.1:1", security=ClientSecurity(ca=authority.ca, **mine))


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
    write_cluster_file(path, [Endpoint("h:1", 0)], security=read)
    assert ClusterToml(path).security() == read
    write_cluster_file(path, [Endpoint("h:1", 0)])
    assert ClusterToml(path).security() == PLAIN


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f'token = "{TOKEN}"', "token_file"),
        (f'[tls]\ntoken = "{TOKEN}"', "token_file"),
        ("[tls]\nca = 3", "tls.ca is 3; expected a string"),
        ("token_file = 3", "^token_file is 3; expected a string"),
        ('[tls]\nuse_proxy = "yes"', "use_proxy .*'yes'"),
        ('tls = "ca.pem"', "tls is 'ca.pem'; expected a table"),
        ('[tls]\nauthority = "x"', "setting named authority"),
        ('[tls]\nserver_nam = "x"', r"cluster\.toml: \[tls\].* server_nam .*mean server_name"),
        ('[tls]\ncert = "x"', "cert.*key"),
        ("[tls", "TOML"),
        ("model = " + "1" * 5000, "TOML"),
    ],
)
def test_a_cluster_toml_that_says_it_wrongly_is_refused(tmp_path, text, fault):
    """With the path; a token in it is refused, since such files are no secret."""
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault) as caught:
        ClusterToml(path).security()
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert str(path) in said
    assert TOKEN not in said


def test_cluster_toml_turns_the_proxy_on(tmp_path):
    """As it is written, as it is read."""
    path = tmp_path / "cluster.toml"
    given = ClientSecurity(ca=str(tmp_path / "ca.pem"), use_proxy=True)
    write_cluster_file(path, [Endpoint("h:1", 0)], security=given)
    assert ClusterToml(path).security() == given


def test_the_configuration_stands_before_cluster_toml(tmp_path):
    """Setting by setting; a token and a token file, a certificate and its key go together."""
    base = ClientSecurity(ca="/a", cert="/c", key="/k", server_name="n", token_file="/t")
    assert PLAIN.over(base) == base
    assert base.over(PLAIN) == base
    assert ClientSecurity(ca="/b").over(base).ca == "/b"
    assert ClientSecurity(token=TOKEN).over(base).token_file == ""
    mine = ClientSecurity(ca="/a", cert="/mine", key="/mine.key").over(base)
    assert (mine.cert, mine.key, mine.token_file) == ("/mine", "/mine.key", "/t")


def test_a_name_that_resolves_slowly_holds_up_no_call(files, cluster, connect, monkeypatch):
    """A server is listed by a name while calls go to others: no lock is held meanwhile."""
    entered, goes_on = threading.Event(), threading.Event()
    real = socket.getaddrinfo

    def slow(host, *args, **more):
        if host == "slow.example":
            entered.set()
            goes_on.wait(60)
        return real(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr("dlm.client.config.RESOLVE_S", 60.0)
    client = connect(cluster, token=TOKEN, heartbeats=False)
    queries = random_queries(files.oracle, 5, 200)
    with ThreadPoolExecutor(2) as pool:
        try:
            connecting = pool.submit(client._core.connection, "slow.example:1")
            assert entered.wait(30)
            pool.submit(ask, client.utterance(), files.oracle, queries).result(30)
            assert not connecting.done()
        finally:
            goes_on.set()
        with pytest.raises(ConfigError, match="another machine"):
            connecting.result(60)
