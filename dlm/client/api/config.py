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
    """Where low orders are kept: $DLM_CACHE_DIR, or dlm below the user's cache folder."""
    if explicit := os.environ.get("DLM_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dlm"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How a client asks.

    deadline_s     seconds, > 0; a call that has no answer by then raises. 2 suits a decoder that
                   has a second of audio in hand; each call may give its own.
    connect_s      seconds, > 0; for finding the servers, and as long again for fetching the low
                   orders. What came of them by then is kept, and connecting again goes on from
                   there. 10; more where they are larger than the network carries in that time.
    window         messages in flight a shard at most, >= 1. The second leaves only when the first
                   takes longer than usual: so concurrent queries gather into one message, and a
                   stall does not block every utterance. 4.
    hedging        where a shard has several servers, ask a second one as well when a message takes
                   longer than 95 of 100 do; two messages in a hundred at most, in the long run.
    connections    connections a server, >= 1; the second is opened when the first is busy. Workers
                   that share a port share the load by connections, so several. 4.
    max_queries    queries in one message, >= 1; fewer where the servers take fewer. 16,384: about
                   200 KiB a message, where the cost a query has long stopped falling.
    partial        where no shard answers in time, answer from the low orders alone, P(w | v), and
                   say so (`source`), instead of raising. For decoders, which must go on; not for
                   whoever needs the model's own scores.
    small          folder of a shard set that is opened here and answers while the servers fail:
                   new utterances go to it, by the rules of `switching` (DLM 3.4). Its own words
                   and ids; so an utterance's ids are those of its own `vocabulary`. With it,
                   `partial` is on. None: the one that cluster.toml names (`dlm cluster --small`),
                   if `partial` is on and `heartbeats` are not off; for whoever needs the model's
                   own scores, and leaves `partial` off, cluster.toml's is nothing.
    heartbeats     ask every server regularly whether it is there. None: where it is of use, that
                   is with `partial`, with `small`, or where a shard has several servers.
    beating        how often, and what is made of it
    switching      when to go over to the small model, and back
    cache_dir      folder for low orders, shared by processes.
    trace          make an OpenTelemetry span of each call; needs the extra `trace`.

    ca, cert, key, server_name, token_file, token, insecure, use_proxy: whom to trust, what to show,
    and whether the environment's proxy is used, see `ClientSecurity`. Each stands before what
    cluster.toml says; without any, calls are plaintext.
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
                    f"client.small is {self.small!r}; the folder of a shard set is expected"
                )
            object.__setattr__(self, "small", Path(self.small).absolute())
            object.__setattr__(self, "partial", True)
            if self.heartbeats is False:
                raise ConfigError(
                    "client.heartbeats is False with a small model; without them nobody would know "
                    "when to come back from it"
                )
        _ = self.security  # which checks them
        for name in ("deadline_s", "connect_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, (int, float)) or not 0 < seconds < MAX_DEADLINE_S:
                raise ConfigError(f"client.{name} is {seconds!r}; seconds above 0 are expected")
        for name in ("window", "connections", "max_queries"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(
                    f"client.{name} is {getattr(self, name)!r}; a whole number from 1 is expected"
                )

    @property
    def security(self) -> ClientSecurity:
        """How this client shows who it is.

        Raises  ConfigError  half of a pair, or no token where one is expected
        """
        return ClientSecurity(**{f.name: getattr(self, f.name) for f in fields(ClientSecurity)})
