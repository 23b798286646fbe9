"""What a client takes from cluster.toml: what it follows while it runs, and what it starts with.

The servers and the default model are read again whenever the file changes. What connections and the
small model are made of is taken once: a change is checked, so that the operator hears of it before
the next start does, and reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dlm.client.api.config import ClientConfig
from dlm.client.deliver.security import TLS_KEYS, ClientSecurity, check_files, read_cluster_security
from dlm.client.plan.topology import (
    Endpoint,
    read_cluster_file,
    read_cluster_model,
    read_cluster_small,
)
from dlm.errors import ConfigError
from dlm.wire.secret import signature


@dataclass(frozen=True, slots=True)
class StartSettings:
    """What a client takes from cluster.toml when it starts, and from its configuration."""

    security: ClientSecurity
    small: Path | None

    def changed(self, now: StartSettings) -> list[str]:
        """Names, as cluster.toml has them, of the settings that `now` has otherwise."""
        tls = [
            f"tls.{key}"
            for key in TLS_KEYS
            if getattr(self.security, key) != getattr(now.security, key)
        ]
        small = ["small"] * (self.small != now.small)
        return small + ["token_file"] * (self.security.token_file != now.security.token_file) + tls


def read_start_settings(path: Path, config: ClientConfig) -> StartSettings:
    """What a client of this configuration that starts now takes; `config` stands before the file.

    Raises
        ConfigError  the file says what cannot be, or names a file or folder that is missing or no
                     good
    """
    security = config.security.over(read_cluster_security(path))
    check_files(security)
    small = config.small
    if config.partial and small is None and config.heartbeats is not False:
        small = _small_of(path)
    return StartSettings(security, small)


class ClusterFile:
    """Reads the servers from a cluster.toml, anew each time; picklable.

    Args
        config   of the client; stands before what the file says
    Attributes
        started  what a client that is made with this takes from the file
    Raises
        ConfigError  the file is missing, or a client cannot start with it
    """

    def __init__(self, path: str | os.PathLike[str], config: ClientConfig | None = None) -> None:
        self.path = Path(path).absolute()
        self._config = config or ClientConfig()
        self()  # says what to do where there is no such file
        self.started = read_start_settings(self.path, self._config)

    def __call__(self) -> list[Endpoint]:
        return read_cluster_file(self.path)

    def model(self) -> str | None:
        """See `topology.Servers`."""
        return read_cluster_model(self.path)

    def stamp(self) -> object:
        """See `topology.Servers`."""
        return signature(self.path)

    def kept(self) -> list[str]:
        """See `topology.Servers`."""
        return self.started.changed(read_start_settings(self.path, self._config))


def _small_of(path: Path) -> Path | None:
    small = read_cluster_small(path)
    if small is not None and not small.is_dir():
        if small.exists():
            raise ConfigError(
                f"{path} names the small model {small}, which is a file; the folder "
                "of a shard set is expected, as `dlm shard` makes them"
            )
        raise ConfigError(
            f"{path} names the small model {small}, and there is no such folder on "
            "this machine; copy it there, write where it is into the file, or give "
            "ClientConfig(small=...)"
        )
    return small
