"""The state of a client and its servers, as `client.cascade` shows it."""

from __future__ import annotations

from dataclasses import dataclass

from dlm.client.membership import Liveness
from dlm.client.modes import Mode


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """What a client knows of a server.

    ready    whether it can be asked, by its last heartbeat; not while it is down
    delay_s, baseline_s  shortest round trip of the last heartbeats, and what it is compared with;
                         None before any was answered
    """

    address: str
    shard: int
    health: Liveness
    ready: bool
    delay_s: float | None
    baseline_s: float | None


@dataclass(frozen=True, slots=True)
class CascadeStatus:
    """How a client stands.

    mode      which model new utterances are scored with; always `full` without a small model,
              also while every server is down
    reason    why it was entered: "failures", "delay" or "recovered"; "" where the client, or the
              parent it was forked from, began in it
    small     whether there is a small model to go over to
    for_s     seconds since it was entered
    messages  logical messages in the window of the failure rate; failed: those of them that did
    switches  times that each mode was entered, and why: (mode, reason) -> times
    servers   by shard and address
    """

    mode: Mode
    for_s: float
    messages: int
    failed: int
    switches: dict[tuple[Mode, str], int]
    servers: tuple[ServerHealth, ...]
    reason: str = ""
    small: bool = False
