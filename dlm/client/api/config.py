"""Settings of the client."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from dlm.client.deliver.security import ClientSecurity
from dlm.client.health.membership import Beating
from dlm.client.health.modes import Switching
from dlm.errors import ConfigError

MAX_DEADLINE_S = 1e6


def default_cache_dir() -> Path:
    """The folder for low orders: $DLM_CACHE_DIR, or dlm below the user's cache folder."""
    if explicit := os.environ.get("DLM_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dlm"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of a client, each with its default.

    deadline_s     2.0 seconds, > 0; a call without an answer by then raises. That suits a decoder
                   with a second of audio in hand; each call may give its own.
    connect_s      10 seconds, > 0; to find the servers, and as long again to fetch the low orders.
                   A partial download is kept, and the next connect resumes it. Increase it if the
                   network needs longer than that.
    window         4 messages in flight per shard at most, >= 1. A second is sent only if the first
                   takes longer than usual: so concurrent queries share one message, and a stall
                   does not block every utterance.
    connections    4 per server, >= 1; the second is opened when the first is busy. Workers that
                   share a port share the load by connections.
    hedging        on: if a shard has several servers, also ask a second one when a message takes
                   longer than 95 % of them do; at most 2 % of messages in the long run.
    max_queries    16,384 in one message, >= 1; fewer if the servers take fewer. About 200 KiB per
                   message, where the cost per query has long stopped falling.
    partial        off: raise if no shard answers in time. On: answer from only the low orders,
                   P(w | v), and mark it (`source`). For decoders, which must continue; not for
                   callers who need the model's own scores.
    small          folder of a shard set to open in this process. New utterances use it while the
                   servers fail, by the rules of `switching` (DLM 3.4), with its words and ids
                   (`Utterance.vocabulary`). It turns `partial` on. None: the one that cluster.toml
                   names (`dlm cluster --small`), if `partial` is on and `heartbeats` are not off.
    heartbeats     check regularly that every server is up. None: with `partial`, with `small`, or
                   if a shard has several servers.
    beating        how often, and when a server counts as down or slow
    switching      when to switch to the small model, and back
    cache_dir      folder for low orders, shared by processes.
    trace          make an OpenTelemetry span of each call; needs the extra `trace`.

    ca, cert, key, server_name, token_file, token, insecure, use_proxy: see `ClientSecurity`. Each
    takes precedence over cluster.toml. Without any, calls are plaintext.
    """

    deadline_s: float = 2.0
    connect_s: float = 10.0
    window: int = 4
    connections: int = 4
    hedging: bool = True
    max_queries: int = 16384
    partial: bool = False
    small: Path | None = None
    heartbeats: bool | None = None
    beating: Beating = field(default_factory=Beating)
    switching: Switching = field(default_factory=Switching)
    cache_dir: Path = field(default_factory=default_cache_dir)
    trace: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""
    token: str = field(default="", repr=False)
    insecure: bool = False
    use_proxy: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_dir", Path(self.cache_dir))
        if self.small is not None:
            if not isinstance(self.small, (str, os.PathLike)):
                raise ConfigError(
                    f"client.small is {self.small!r}; expected the folder of a shard set"
                )
            object.__setattr__(self, "small", Path(self.small).absolute())
            object.__setattr__(self, "partial", True)
            if self.heartbeats is False:
                raise ConfigError(
                    "client.heartbeats is False, but a small model needs them to know when to "
                    "switch back; remove heartbeats=False"
                )
        _ = self.security  # which checks them
        for name in ("deadline_s", "connect_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, (int, float)) or not 0 < seconds < MAX_DEADLINE_S:
                raise ConfigError(f"client.{name} is {seconds!r}; expected seconds above 0")
        for name in ("window", "connections", "max_queries"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(
                    f"client.{name} is {getattr(self, name)!r}; expected a whole number above 0"
                )

    @property
    def security(self) -> ClientSecurity:
        """Its credentials, and the authorities it trusts.

        Raises  ConfigError  half of a pair, or an invalid token
        """
        return ClientSecurity(**{f.name: getattr(self, f.name) for f in fields(ClientSecurity)})
