"""cluster.toml: where the servers are, which model is the default, and how to reach them.

A running client reads the servers and the default model again whenever the file changes. It reads
the settings of connections and of the small model only once. A later change to these is checked and
logged, so the operator learns of a mistake before the next start.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlm.client.api.config import ClientConfig
from dlm.client.deliver.security import PLAIN, ClientSecurity, check_address, check_files
from dlm.config import nearest
from dlm.errors import ConfigError
from dlm.files import write_whole
from dlm.wire.secret import signature

WRITTEN_BY = "# Written by dlm cluster"
TOP_KEYS = ("model", "small", "token_file", "tls", "server")
TLS_KEYS = ("ca", "cert", "key", "server_name", "use_proxy")
SERVER_KEYS = ("address", "shard", "pid")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and the shard listed for it: a hint, used while the server does not answer.

    pid  of the server's process, if it runs on the machine that wrote the file
    """

    address: str
    shard: int | None = None
    pid: int | None = None


class Servers(Protocol):
    """Says where the servers are; asked again whenever the table is stale. Picklable."""

    def __call__(self) -> Sequence[Endpoint]:
        """The current servers."""

    def model(self) -> str | None:
        """The default model that the operator names; None leaves it to the servers."""

    def stamp(self) -> object:
        """Differs from the last one if the servers or the model may have changed."""

    def kept(self) -> list[str]:
        """Changed settings that a running client does not apply.

        Raises  ConfigError  a client that starts now would reject them
        """


class FixedEndpoints(Servers):
    """The same servers each time."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = list(endpoints)

    def __call__(self) -> list[Endpoint]:
        return self.endpoints

    def model(self) -> str | None:
        return None

    def stamp(self) -> object:
        return None

    def kept(self) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class StartSettings:
    """The settings that a client takes from cluster.toml and its configuration when it starts."""

    security: ClientSecurity
    small: Path | None

    @classmethod
    def read(cls, path: Path, config: ClientConfig) -> StartSettings:
        """The settings of a client that starts now; `config` takes precedence.

        Raises
            ConfigError  the file is wrong, or names a file or folder that is missing or unusable
        """
        security = config.security.over(read_cluster_security(path))
        check_files(security)
        small = config.small
        if config.partial and small is None and config.heartbeats is not False:
            small = read_cluster_small(path)
            if small is not None and not small.is_dir():
                raise ConfigError(
                    f"{path} names the small model {small}, which is a file; expected the folder "
                    "of a shard set, as `dlm shard` writes it"
                    if small.exists()
                    else f"{path} names the small model {small}, but there is no such folder on "
                    "this machine; copy it there, correct the path in the file, or pass "
                    "ClientConfig(small=...)"
                )
        return cls(security, small)

    def changed(self, now: StartSettings) -> list[str]:
        """Settings that differ in `now`, by their names in cluster.toml."""
        mine, other = self.security, now.security
        keys = [
            key for key in ("token_file", *TLS_KEYS) if getattr(mine, key) != getattr(other, key)
        ]
        small = ["small"] if self.small != now.small else []
        return small + [f"tls.{key}" if key in TLS_KEYS else key for key in keys]


class ClusterFile(Servers):
    """Reads the servers from a cluster.toml, again on every call.

    Args
        config   of the client; takes precedence over the file
    Attributes
        started  the settings that a client takes from the file when it starts
    Raises
        ConfigError  the file is missing, or a client cannot start with it
    """

    def __init__(self, path: str | os.PathLike[str], config: ClientConfig | None = None) -> None:
        self.path = Path(path).absolute()
        self._config = config or ClientConfig()
        self()  # raises, and says what to do, if there is no such file
        self.started = StartSettings.read(self.path, self._config)

    def __call__(self) -> list[Endpoint]:
        return read_cluster_file(self.path)

    def model(self) -> str | None:
        return read_cluster_model(self.path)

    def stamp(self) -> object:
        return signature(self.path)

    def kept(self) -> list[str]:
        return self.started.changed(StartSettings.read(self.path, self._config))


def read_cluster_file(path: str | os.PathLike[str]) -> list[Endpoint]:
    """The servers that a cluster.toml lists.

    The file has one table ``[[server]]`` per server, with ``address`` ("host:port") and ``shard``.

    Raises
        ConfigError  the file is missing, has another form, or has an unknown setting
    """
    path = Path(path)
    servers = _content(path).get("server")
    if not isinstance(servers, list) or not servers:
        raise ConfigError(f"{path} lists no servers; expected one [[server]] table per server")
    return [_endpoint(path, server) for server in servers]


def read_cluster_small(path: str | os.PathLike[str]) -> Path | None:
    """The folder of the small model that a cluster.toml names, relative to its own; None for none.

    Raises
        ConfigError  the file cannot be read, or ``small`` is not a string
    """
    path = Path(path)
    small = _content(path).get("small")
    if small is None:
        return None
    if not isinstance(small, str) or not small:
        raise ConfigError(f"{path}: small must be the folder of a shard set, found {small!r}")
    return path.absolute().parent / small


def read_cluster_model(path: str | os.PathLike[str]) -> str | None:
    """The default model that a cluster.toml names; None for none.

    Raises
        ConfigError  the file cannot be read, or ``model`` is not the start of an id
    """
    path = Path(path)
    model = _content(path).get("model")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"{path}: model must be the first digits of an id, found {model!r}")
    try:
        return check_model(model)
    except ConfigError as exc:
        exc.add_note(f"in {path}")
        raise


def read_cluster_security(path: str | os.PathLike[str]) -> ClientSecurity:
    """The credentials that a cluster.toml names: the table [tls], and token_file.

    Paths in it are relative to its folder. It contains no token itself, since it is not secret.

    Raises
        ConfigError  an unknown setting, or one of the wrong type
    """
    path = Path(path)
    content = _content(path)
    table = content.get("tls", {})
    values = {**table} if isinstance(table, dict) else {"tls": table}
    if "token" in content or "token" in values:
        raise ConfigError(
            f"{path} contains a token, but many people can read files like it; move the token to a "
            "file that only its owner can read, and set token_file to the path of that file"
        )
    if "token_file" in content:
        values["token_file"] = content["token_file"]
    for name, value in values.items():
        if name not in (*TLS_KEYS, "token_file"):
            advice = nearest(name, TLS_KEYS) or f"; there are {', '.join(TLS_KEYS)}"
            raise ConfigError(f"{path}: [tls] has no setting named {name}{advice}")
        kind, what = (bool, "true or false") if name == "use_proxy" else (str, "a string")
        if not isinstance(value, kind):
            raise ConfigError(f"{path}: {name} must be {what}, found {value!r}")
        if value and isinstance(value, str) and name != "server_name":
            values[name] = str(path.absolute().parent / value)
    try:
        return ClientSecurity(**values)
    except ConfigError as exc:
        exc.add_note(f"in {path}")
        raise


def _content(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{path} does not exist. `dlm cluster DIR` writes it to its working directory; run "
            "this there, or give the path of the file"
        ) from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read as TOML: {exc}") from exc
    # A misspelt `small` would otherwise mean no small model, unnoticed until the servers fail.
    # `read_cluster_security` refuses `token`, and says what to do instead.
    for name in content:
        if name not in TOP_KEYS and name != "token":
            raise ConfigError(f"{path} has no setting named {name}{nearest(name, TOP_KEYS)}")
    return content


def _endpoint(path: Path, server: Any) -> Endpoint:
    if not isinstance(server, dict):
        raise ConfigError(f"{path}: each server must be a [[server]] table, found {server!r}")
    for name in server:
        if name not in SERVER_KEYS:
            # In TOML, everything below a table belongs to it, up to the next one.
            advice = (
                "; move it above the first table"
                if name in TOP_KEYS
                else nearest(name, SERVER_KEYS)
            )
            raise ConfigError(f"{path}: [[server]] has no setting named {name}{advice}")
    address = server.get("address")
    if address is None:
        raise ConfigError(f'{path}: a [[server]] has no address; add address = "host:port"')
    try:
        check_address(address)
    except ConfigError as exc:
        raise ConfigError(f"{path}: in [[server]], {exc}") from exc
    for name, low in (("shard", 0), ("pid", 1)):
        value = server.get(name)
        if value is not None and (type(value) is not int or value < low):
            raise ConfigError(
                f"{path}: {name} must be a whole number of at least {low}, found {value!r}"
            )
    return Endpoint(address, server.get("shard"), server.get("pid"))


def write_cluster_file(
    path: Path,
    endpoints: Sequence[Endpoint],
    *,
    shard_set: str,
    security: ClientSecurity = PLAIN,
    small: Path | None = None,
    model: str | None = None,
) -> None:
    """Writes a cluster.toml whole or not at all; all of `security` except the token itself."""
    folder = None if small is None else str(small.absolute())
    lines = [f"{WRITTEN_BY} for shard set {shard_set}."]
    for name, value in (("small", folder), ("model", model), ("token_file", security.token_file)):
        if value:
            lines += ["", f"{name} = {json.dumps(value)}"]
    if security.ca:
        values = [(name, getattr(security, name)) for name in TLS_KEYS]
        lines += ["", "[tls]", *(f"{name} = {json.dumps(v)}" for name, v in values if v)]
    for endpoint in endpoints:
        lines += ["", "[[server]]", f'address = "{endpoint.address}"']
        if endpoint.shard is not None:
            lines.append(f"shard = {endpoint.shard}")
        if endpoint.pid is not None:
            lines.append(f"pid = {endpoint.pid}")
    write_whole(path, ("\n".join(lines) + "\n").encode())


def check_model(model: str | None) -> str | None:
    """`model` in lower case; raises `ConfigError` unless it can begin the id of a model."""
    if model is None or re.fullmatch(r"[0-9a-f]{6,32}", model.lower()):
        return model and model.lower()
    raise ConfigError(
        f"the model {model!r} is not an id; expected the first 6 to 32 hex digits of the id of a "
        "model or of its shard set, as `dlm info` prints it"
    )
