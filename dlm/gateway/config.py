"""Settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass

from dlm.config import check, setting
from dlm.server.config import MIB, Access, check_exposure


@dataclass(frozen=True, slots=True)
class GatewayConfig(Access):
    """How a gateway listens, what it takes and when it gives up; checked at construction."""

    port: int = setting(
        50070, "Port of gRPC; 0 picks a free one, which gateway.ready logs.", low=0, high=65_535
    )
    http_port: int = setting(
        8080,
        "Port of HTTP: JSON, and the page; 0 picks a free one, which gateway.ready logs.",
        low=0,
        high=65_535,
    )
    deadline_s: float = setting(
        2.0,
        "Time for a call that gives no deadline; and the most that a call gets.",
        unit="seconds",
        above=0,
        high=60,
    )
    max_queries: int = setting(
        16_384,
        "Words scored in one call: tokens of its sentences, or states times words.",
        low=1,
        high=1 << 20,
        why="Such a call takes a core of the gateway tens of milliseconds, by JSON a hundred.",
    )
    max_sentences: int = setting(
        4096, "Sentences, hypotheses or states in one call.", low=1, high=1 << 20
    )
    max_message_bytes: int = setting(
        MIB,
        "Size of one request.",
        unit="bytes",
        low=4096,
        high=64 * MIB,
        why="A thousand states of order 5 in JSON take 40 KiB.",
    )
    max_phrases_bytes: int = setting(
        128 * MIB,
        "Memory for phrases of callers, by process; those used longest ago are forgotten. If calls "
        "in flight use all of it, more are refused with OVERLOADED.",
        unit="bytes",
        low=MIB,
        high=1 << 40,
        why="A list takes some 500 bytes per phrase, and 4 per word of the vocabulary.",
    )
    max_in_flight: int = setting(
        128,
        "Calls being answered; more are refused with OVERLOADED.",
        low=1,
        high=65_536,
        why="A process answers on one core; what waits behind so many is late already.",
    )
    client_in_flight: int = setting(
        96,
        "Calls of one client being answered; more are refused with CLIENT_LIMIT.",
        low=1,
        high=65_536,
        why="Three quarters of `max_in_flight`, so that no single client can fill the gateway.",
    )
    max_connections: int = setting(
        4096,
        "Connections by HTTP; beyond it, the one that has been idle for longest is closed.",
        low=16,
        high=1 << 20,
        why="An idle one takes some 10 KiB.",
    )

    def __post_init__(self) -> None:
        check_exposure("gateway", self)
        check("gateway", self)
