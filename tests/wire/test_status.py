"""dlm.wire.status: every reason has a code, every code an error, and the README says the same."""

from __future__ import annotations

import copy
from pathlib import Path

import grpc
import pytest

from dlm.errors import (
    AuthenticationError,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
    UnavailableError,
)
from dlm.wire.status import (
    CODE_OF,
    ERROR_OF,
    PUSHBACK_KEY,
    REASON_KEY,
    Reason,
    advice_on,
    error_from_refusal,
    error_from_rpc,
    reason_of,
)

README = (Path(__file__).resolve().parents[2] / "proto" / "README.md").read_text()


class FakeRpcError(grpc.RpcError):
    """What a failed call raises."""

    def __init__(self, code, metadata=None, details="it said why"):
        self._code = code
        self._details = details
        self._metadata = metadata

    def code(self):
        """The status code."""
        return self._code

    def details(self):
        """The message."""
        return self._details

    def trailing_metadata(self):
        """As gRPC gives it: pairs, or None."""
        return self._metadata


# Whose table is older than the server's.
STALE_REASONS = {Reason.WRONG_SHARD_SET, Reason.WRONG_SHARD, Reason.SLOT_NOT_OWNED}


def test_every_reason_has_a_code():
    """The table of codes is total, and no refusal looks like success."""
    assert set(CODE_OF) == set(Reason)
    assert grpc.StatusCode.OK not in CODE_OF.values()


def test_values_of_the_reasons_are_their_names():
    """They are on the wire."""
    assert all(reason.value == reason.name for reason in Reason)


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_every_grpc_code_becomes_a_dlm_error(code):
    """Codes that no dlm server sends (a proxy may) become a DlmError too."""
    error = error_from_rpc(FakeRpcError(code), where="shard 3 at host:1")
    assert isinstance(error, DlmError)
    assert "shard 3 at host:1" in str(error)
    assert "it said why" in str(error)


@pytest.mark.promise("errors")
@pytest.mark.parametrize(
    ("said", "after_s"),
    [("50", 0.05), ("1000", 1.0), ("0", None), ("-1", None), ("soon", None), (None, None)],
)
def test_an_error_of_a_call_says_when_to_ask_again(said, after_s):
    """What the server says in gRPC's own metadata; nothing where it says none, or nonsense."""
    metadata = ((REASON_KEY, "OVERLOADED"), *(((PUSHBACK_KEY, said),) if said else ()))
    error = error_from_rpc(
        FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, metadata), where="host:1"
    )
    assert isinstance(error, Overloaded)
    assert error.retryable
    assert error.retry_after_s == after_s
    assert copy.copy(error).retry_after_s == after_s


def test_a_refusal_in_a_stream_says_when_to_ask_again():
    """As one of a call."""
    error = error_from_refusal("CLIENT_LIMIT", "so", where="host:1", retry_after_ms=70)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 0.07
    assert error_from_refusal("DRAINING", "so", where="host:1").retry_after_s is None
    assert not hasattr(error_from_refusal("MALFORMED", "so", where="host:1"), "retry_after_s")


def test_stale_reasons_are_those_that_become_stale_shard_set():
    """A refusal for an old table, and no other, is StaleShardSet."""
    for reason in Reason:
        assert (ERROR_OF[CODE_OF[reason]] is StaleShardSet) == (reason in STALE_REASONS)


@pytest.mark.promise("errors")
def test_only_what_may_pass_is_unavailable():
    """Faults of the message are ProtocolError: asking again gives the same."""
    for reason in Reason:
        kind = ERROR_OF[CODE_OF[reason]]
        passing = {Reason.NOT_READY, Reason.DRAINING, Reason.LATE}
        passing |= {Reason.OVERLOADED, Reason.CLIENT_LIMIT}
        if reason in passing:
            assert issubclass(kind, UnavailableError)
            assert kind.retryable
        elif reason is Reason.UNAUTHENTICATED:
            assert kind is AuthenticationError
        elif reason not in STALE_REASONS:
            assert kind is ProtocolError


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL])
def test_a_torn_connection_is_lost_unless_a_server_says_so(code):
    """gRPC's own words for a TLS record that was damaged; a server's words are a server's fault."""
    torn = "Stream removed (TSI_DATA_CORRUPTED)"
    lost = error_from_rpc(FakeRpcError(code, details=torn), where="host:1")
    assert isinstance(lost, ShardDown) and lost.retryable
    said = FakeRpcError(code, [(REASON_KEY, Reason.INTERNAL)], details=torn)
    assert isinstance(error_from_rpc(said, where="host:1"), ProtocolError)


def test_reason_is_read_from_the_metadata():
    """A known one, an unknown one, none, and no metadata at all."""
    code = grpc.StatusCode.UNAVAILABLE
    for reason in Reason:
        error = FakeRpcError(code, (("other", "x"), (REASON_KEY, reason.value)))
        assert reason_of(error) is reason
    assert reason_of(FakeRpcError(code, ((REASON_KEY, "FROM_THE_FUTURE"),))) is None
    assert reason_of(FakeRpcError(code, ())) is None
    assert reason_of(FakeRpcError(code)) is None
    assert reason_of(grpc.RpcError()) is None


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:34087: Failed "
            "to connect to remote host: Connection refused",
            "127.0.0.1:34087 gave no answer: connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:1: "
            "Endpoint closing",
            "127.0.0.1:34087 gave no answer: endpoint closing",
        ),
        (
            "failed to connect to all addresses; last error: FD Shutdown",
            "127.0.0.1:34087 gave no answer: FD Shutdown",
        ),
        ("Socket closed", "127.0.0.1:34087 gave no answer: UNAVAILABLE: Socket closed"),
        ("", "127.0.0.1:34087 gave no answer: UNAVAILABLE: "),
    ],
)
def test_where_nobody_is_the_cause_is_said_once(details, said):
    """gRPC says three times that it could not connect, and where."""
    error = FakeRpcError(grpc.StatusCode.UNAVAILABLE)
    error.details = lambda: details
    assert str(error_from_rpc(error, where="127.0.0.1:34087")) == said


def test_a_connection_that_was_not_made_comes_with_advice():
    """Where gRPC's words say what is wrong; not for a connection that broke later."""
    failed = "failed to connect to all addresses; last error: "
    assert "leave ca out" in advice_on(failed + "Tls handshake failed: WRONG_VERSION_NUMBER")
    assert "closed the connection at once" in advice_on(failed + "Socket closed")
    assert advice_on(failed + "Connection refused") is None
    assert advice_on("Socket closed") is None


@pytest.mark.promise("worked_example")
def test_readme_lists_every_reason_with_its_code():
    """The table of errors in proto/README.md is this table."""
    rows = {}
    for line in README.splitlines():
        cells = [c.strip().strip("`") for c in line.split("|")]
        if len(cells) > 3 and cells[2] in Reason.__members__:
            rows[Reason(cells[2])] = cells[1]
    assert rows == {reason: code.name for reason, code in CODE_OF.items()}
    assert f"`{REASON_KEY}`" in README
