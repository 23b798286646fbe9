"""dlm.server.config: what a server may be told."""

from __future__ import annotations

import dataclasses

import pytest

from dlm.config import resolve
from dlm.errors import ConfigError
from dlm.server.config import ServerConfig, is_loopback


def test_defaults_are_valid_and_local():
    """A server that was told nothing listens on this machine alone."""
    config = ServerConfig()
    assert config.address == "127.0.0.1:0"
    assert not config.insecure
    assert config.verify


@pytest.mark.promise("authentication")
@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_remote_address_needs_clients_that_say_who_they_are(host, local):
    """Where anybody could ask, or a token be read on the way, it must be asked for twice."""
    assert is_loopback(host) == local
    tls = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
    open_to_all = [
        ({}, "not authenticate"),
        (tls, "not authenticate"),
        ({"tokens": "t"}, "without TLS"),
    ]
    for settings, fault in open_to_all:
        if local:
            assert ServerConfig(host=host, **settings).host == host
        else:
            with pytest.raises(ConfigError, match=fault):
                ServerConfig(host=host, **settings)
        assert ServerConfig(host=host, insecure=True, **settings).host == host
    for settings in (tls | {"tokens": "t"}, tls | {"tls_client_ca": "ca.pem"}):
        assert ServerConfig(host=host, **settings).host == host


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"tls_cert": "c"}, "server.tls_key is missing"),
        ({"tls_key": "k"}, "server.tls_cert is missing"),
        ({"tls_client_ca": "ca"}, "over TLS"),
    ],
)
def test_half_of_tls_is_refused(settings, missing):
    """Even on loopback, even insecure: it is a mistake."""
    for insecure in (False, True):
        with pytest.raises(ConfigError, match=missing):
            ServerConfig(insecure=insecure, **settings)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("port", (-1, 65_536)),
        ("max_queries", (0, (1 << 22) + 1)),
        ("max_message_bytes", (4095, (64 << 20) + 1)),
        ("max_in_flight", (0, 65_537)),
        ("inline_queries", (-1, 65_537)),
        ("threads", (0, 257)),
        ("max_downloads", (0, 1025)),
        ("client_streams", (0, 65_537)),
        ("client_in_flight", (0, 65_537)),
        ("client_downloads", (0, 1025)),
        ("max_calls", (63, (1 << 20) + 1)),
        ("drain_grace_s", (-0.1, 3601.0, float("nan"))),
        ("shutdown_timeout_s", (-0.1, 3601.0, float("nan"))),
        ("host", ("",)),
    ],
)
def test_value_out_of_bounds_is_refused_by_name(field, values):
    """The message names the setting."""
    for value in values:
        with pytest.raises(ConfigError, match=f"server.{field}"):
            ServerConfig(**{field: value})


def test_ipv6_address_is_written_in_brackets():
    """gRPC wants [::1]:port."""
    assert ServerConfig(host="::1", port=50051).address == "[::1]:50051"


def test_every_setting_can_come_from_the_environment():
    """The types of the fields are such as `config.resolve` can fill."""
    environ = {
        f"DLM_SERVER_{f.name.upper()}": str(f.default).lower()
        for f in dataclasses.fields(ServerConfig)
    }
    assert resolve(ServerConfig, "server", environ=environ) == ServerConfig()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("DLM_SERVER_TOKEN", "DLM_SERVER_TOKENS"),
        ("DLM_SERVER_THREAD", "DLM_SERVER_THREADS"),
        ("DLM_SERVER_MAXINFLIGHT", "DLM_SERVER_MAX_IN_FLIGHT"),
        ("DLM_SERVER_XYZZY_PLUGH", None),
        ("DLM_SERVER_FOO", None),
    ],
)
def test_a_misspelt_variable_is_refused_with_what_was_meant(variable, meant):
    """A server without the tokens that somebody gave it would let in everybody."""
    with pytest.raises(ConfigError, match=f" {variable}") as caught:
        resolve(ServerConfig, "server", environ={variable: "1", "DLM_CACHE_DIR": "x"})
    assert (f"did you mean {meant}?" in str(caught.value)) == (meant is not None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('tokens = "t"\n', r"tokens .*\[server\]"),
        ("[server]\nthread = 2\n", r" thread \(did you mean threads\?\)"),
        (
            '[sever]\ntokens = "t"\n',
            r"sever .*\[server\]",
        ),
    ],
)
def test_a_misspelt_or_misplaced_setting_is_refused(tmp_path, text, said):
    """It would have no effect, and nobody would hear of it."""
    path = tmp_path / "server.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        resolve(ServerConfig, "server", file=path, environ={})
