"""Converts gRPC status codes to dlm's errors, and back (proto/README.md, "Errors")."""

from __future__ import annotations

import re
from enum import StrEnum

import grpc

from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
    UnavailableError,
    UnknownCall,
)

REASON_KEY = "dlm-reason"  # DO NOT CHANGE: trailing metadata of a refusal, on the wire
MAX_TEXT = 1000  # maximum number of characters of a server's text in an error
PUSHBACK_KEY = "grpc-retry-pushback-ms"  # gRPC's own name (gRFC A6): when to retry


class Reason(StrEnum):
    """Why a server refused a call; sent in the trailing metadata. DO NOT CHANGE the values."""

    MALFORMED = "MALFORMED"
    CHECKSUM = "CHECKSUM"
    ID_OUT_OF_RANGE = "ID_OUT_OF_RANGE"
    CONTEXT_LENGTH = "CONTEXT_LENGTH"
    TOO_MANY_QUERIES = "TOO_MANY_QUERIES"
    OFFSET_OUT_OF_RANGE = "OFFSET_OUT_OF_RANGE"
    WRONG_SHARD_SET = "WRONG_SHARD_SET"
    WRONG_SHARD = "WRONG_SHARD"
    SLOT_NOT_OWNED = "SLOT_NOT_OWNED"
    PHRASES_UNKNOWN = "PHRASES_UNKNOWN"
    NOT_READY = "NOT_READY"
    DRAINING = "DRAINING"
    OVERLOADED = "OVERLOADED"
    CLIENT_LIMIT = "CLIENT_LIMIT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    LATE = "LATE"
    INTERNAL = "INTERNAL"


CODE_OF: dict[Reason, grpc.StatusCode] = {
    Reason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.CHECKSUM: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.ID_OUT_OF_RANGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.CONTEXT_LENGTH: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOO_MANY_QUERIES: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.OFFSET_OUT_OF_RANGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.WRONG_SHARD_SET: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.WRONG_SHARD: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SLOT_NOT_OWNED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PHRASES_UNKNOWN: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.CLIENT_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

# Reasons that show a rolling restart: another server of the shard answers, or will soon.
MOVING_REASONS = frozenset({Reason.DRAINING, Reason.NOT_READY})

ERROR_OF: dict[grpc.StatusCode, type[DlmError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.FAILED_PRECONDITION: StaleShardSet,
    grpc.StatusCode.UNAVAILABLE: ShardDown,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.CANCELLED: ShardDown,
    grpc.StatusCode.ABORTED: ShardDown,
    grpc.StatusCode.INTERNAL: ProtocolError,
    grpc.StatusCode.UNKNOWN: ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: UnknownCall,
    grpc.StatusCode.OUT_OF_RANGE: ProtocolError,
    grpc.StatusCode.DATA_LOSS: ProtocolError,
}
# gRPC's words for a connection that was torn while in use, e.g. by a damaged TLS record; gRPC
# has no code of its own for this.
TORN = ("Stream removed", "TSI_DATA_CORRUPTED")


_STRANGER = "the server's certificate is out of date, or the authority in ca did not sign it"
# gRPC's words for causes of a failed connection, and the advice that dlm gives for each.
ADVICE = (
    (
        "WRONG_VERSION_NUMBER",
        "the server does not use TLS: leave ca out, or start the server with --tls-cert",
    ),
    ("CERTIFICATE_VERIFY_FAILED", _STRANGER),
    ("certificate signature failure", _STRANGER),
    (
        "Hostname Verification",
        "the server's certificate is not for this address: connect by the name in the certificate, "
        "or set server_name to it",
    ),
    (
        "Socket closed",
        "the server closed the connection at once: it may use TLS (set ca), or require a valid "
        "certificate signed by its authority (set cert and key)",
    ),
)


# gRPC's words if it reached no server: what it tried, the code, the address and the cause.
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses; last error: (?:[A-Z_]+: )?(?:ipv[46]:\S+: )?"
    r"(?:Failed to connect to remote host: )?(?P<cause>.+)",
    re.DOTALL,
)


def _cause(code: grpc.StatusCode, details: str) -> str:
    match = _NOT_CONNECTED.fullmatch(details)
    if match is None:
        return f"{code.name}: {details}"
    cause = match["cause"]
    return cause[0].lower() + cause[1:] if cause[1:2].islower() else cause


def advice_on(details: str) -> str | None:
    """Returns advice on a failed connection if gRPC's words show the cause; otherwise None."""
    if "failed to connect" not in details:
        return None
    return next((advice for words, advice in ADVICE if words in details), None)


def plain(text: str) -> str:
    """Makes a server's text safe for a terminal: one short line without control characters.

    Escape sequences, line ends and changes of text direction are shown as Python writes them. Every
    text of a server that becomes an error passes through here.
    """
    cut = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def reason_of(error: grpc.RpcError) -> Reason | None:
    """Returns the reason that a server gave; None if it gave none that this version knows."""
    return _reason(_metadata(error, REASON_KEY))


def _reason(value: str | None) -> Reason | None:
    try:
        return Reason(value or "")
    except ValueError:
        return None


def _metadata(error: grpc.RpcError, key: str) -> str | None:
    metadata = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return dict(metadata or ()).get(key)


def error_from_rpc(error: grpc.RpcError, *, where: str) -> DlmError:
    """The dlm error that stands for a failed call to `where` (an address or a shard)."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    kind = ERROR_OF.get(code, ProtocolError)
    details = error.details() if hasattr(error, "details") else str(error)
    # A dlm server gives a reason; otherwise the words are gRPC's, and perhaps no server was there.
    answered = reason_of(error) is not None
    if not answered and any(words in (details or "") for words in TORN):
        kind = ShardDown
    said = "answered" if answered else "gave no answer:"
    failure = kind(f"{where} {said} {plain(_cause(code, details or ''))}")
    if isinstance(failure, UnavailableError):
        failure.retry_after_s = _pushback_s(error)
    if advice := advice_on(details or ""):
        failure.args = (f"{failure}. Perhaps {advice}",)
    return failure


def _pushback_s(error: grpc.RpcError) -> float | None:
    try:
        return max(int(_metadata(error, PUSHBACK_KEY) or ""), 0) / 1000 or None
    except (ValueError, OverflowError):
        return None


def error_from_refusal(
    reason: str, message: str, *, where: str, retry_after_ms: int = 0
) -> DlmError:
    """The dlm error for a refusal that `where` sent; an unknown reason means `ShardDown`."""
    known = _reason(reason)
    kind = ShardDown if known is None else ERROR_OF[CODE_OF[known]]
    error = kind(f"{where} answered {plain(reason)}: {plain(message)}")
    if isinstance(error, UnavailableError):
        error.retry_after_s = retry_after_ms / 1000 or None
    error.reason = known  # type: ignore[attr-defined]
    return error
