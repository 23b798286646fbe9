"""Refuses calls, each with a reason and a message for the client."""

from __future__ import annotations

from typing import Any, NoReturn

from dlm.errors import ProtocolError
from dlm.logs import EventLog
from dlm.wire import codec
from dlm.wire.status import CODE_OF, PUSHBACK_KEY, REASON_KEY, Reason

logger = EventLog(__name__)

# A client refused because of load may retry after this time: by then, the queue has advanced.
RETRY_AFTER_MS = 50
LOAD_REASONS = frozenset({Reason.OVERLOADED, Reason.CLIENT_LIMIT})


class Refusal(Exception):
    """A refused call, with a message for the client's log.

    The exception stays in the server: it becomes a status code and metadata, or a stream's reply.

    Args  retry_ms  when a client that was refused because of load may retry
    """

    def __init__(self, reason: Reason, message: str, retry_ms: int = RETRY_AFTER_MS) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_ms = retry_ms if reason in LOAD_REASONS else 0

    async def abort(self, context: Any) -> NoReturn:
        metadata: tuple[tuple[str, str], ...] = ((REASON_KEY, self.reason.value),)
        if self.retry_ms:
            metadata += ((PUSHBACK_KEY, str(self.retry_ms)),)
        await context.abort(CODE_OF[self.reason], self.message, metadata)
        raise AssertionError("abort returned")

    def reply(self, sequence: int) -> bytes:
        return codec.encode_refusal(sequence, self.reason.value, self.message, self.retry_ms)


def too_late() -> Refusal:
    return Refusal(
        Reason.LATE, "the deadline passed before work started; allow more time, or ask a replica"
    )


def of_fault(error: ProtocolError) -> Refusal:
    if isinstance(error, codec.DamagedMessage):
        return Refusal(Reason.CHECKSUM, str(error))
    if isinstance(error, codec.OversizedMessage):
        return Refusal(Reason.TOO_MANY_QUERIES, str(error))
    return Refusal(Reason.MALFORMED, str(error))


def of_exception(call: str, exc: Exception, *, part: str = "server", **fields: int) -> Refusal:
    """The refusal for any exception. Bugs are logged without messages, which may hold queries."""
    if isinstance(exc, Refusal):
        return exc
    kind = type(exc).__name__
    shown = RuntimeError(f"{kind}; its message is withheld, since it may contain queries")
    logger.error(
        "server.%s.failed" if part == "server" else "gateway.%s.failed",
        call,
        exc_info=(RuntimeError, shown, exc.__traceback__),
        extra={"error": kind, **fields},
    )
    return Refusal(Reason.INTERNAL, f"the server failed ({kind}); see its log")


def parse(message: codec.M, data: bytes) -> codec.M:
    try:
        return codec.parse(message, data)
    except ProtocolError as exc:
        raise Refusal(Reason.MALFORMED, str(exc)) from exc
