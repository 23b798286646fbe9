"""Settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass

from dlm.config import check, setting
from dlm.server.config import MIB, Access, check_exposure


@dataclass(frozen=True, slots=True)
class GatewayConfig(Access):
    """How a gateway listens, what it accepts and when it gives up; checked at construction."""

    port: int = setting(
        50070, "Port for gRPC; 0 picks a free one, which gateway.ready logs.", low=0, high=65_535
    )
    http_port: int = setting(
        8080,
        "Port for HTTP (JSON, and the page); 0 picks a free one, which gateway.ready logs.",
        low=0,
        high=65_535,
    )
    deadline_s: float = setting(
        2.0,
        "Deadline of a call that gives none, and the maximum deadline of any call.",
        unit="seconds",
        above=0,
        high=60,
    )
    max_queries: int = setting(
        16_384,
        "Maximum number of words scored in one call: tokens of sentences, or states times words.",
        low=1,
        high=1 << 20,
        why="A call of this size keeps a core of the gateway busy for tens of milliseconds; in "
        "JSON, for a hundred.",
    )
    max_sentences: int = setting(
        4096, "Maximum number of sentences, hypotheses or states per call.", low=1, high=1 << 20
    )
    max_message_bytes: int = setting(
        MIB,
        "Maximum size of one request.",
        unit="bytes",
        low=4096,
        high=64 * MIB,
        why="A thousand states of order 5 in JSON take 40 KiB.",
    )
    max_phrases_bytes: int = setting(
        128 * MIB,
        "Memory for callers' phrases, per process; the least recently used phrases are forgotten. "
        "If calls in flight use all of it, further calls are refused with OVERLOADED.",
        unit="bytes",
        low=MIB,
        high=1 << 40,
        why="A list takes some 500 bytes per phrase, and 4 per word of the vocabulary.",
    )
    max_in_flight: int = setting(
        128,
        "Maximum number of calls being answered; further calls are refused with OVERLOADED.",
        low=1,
        high=65_536,
        why="A process answers on one core; a call that waits behind so many is already late.",
    )
    client_in_flight: int = setting(
        96,
        "Maximum number of one client's calls being answered; further calls are refused with "
        "CLIENT_LIMIT.",
        low=1,
        high=65_536,
        why="Three quarters of `max_in_flight`, so that no single client can fill the gateway.",
    )
    max_connections: int = setting(
        4096,
        "Maximum number of HTTP connections; beyond it, the connection that has been idle longest "
        "is closed.",
        low=16,
        high=1 << 20,
        why="An idle connection takes about 10 KiB.",
    )

    def __post_init__(self) -> None:
        check_exposure("gateway", self)
        check("gateway", self)
