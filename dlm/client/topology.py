"""Where the servers are: cluster.toml, and asking each what it holds."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dlm.client.security import PLAIN, TLS_KEYS, ClientSecurity
from dlm.client.transport import Connection
from dlm.config import nearest
from dlm.errors import (
    AuthenticationError,
    ConfigError,
    DlmError,
    ProtocolError,
    ShardDown,
    ShardFormatError,
)
from dlm.index.layout import Manifest, parse_manifest
from dlm.wire._pb import shard_pb2 as pb

Connect = Callable[[str], Connection]
NO_LIMIT = 1 << 32
MAX_SHARD_SETS = 64  # of one server that are asked for; a server with more is not of this kind
WRITTEN_BY = "# Written by dlm cluster"
# What a cluster.toml may say, beside what `security` reads of [tls].
TOP_KEYS = ("small", "token_file", "tls", "server")
SERVER_KEYS = ("address", "shard", "pid")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and the shard it is said to hold: a hint, for while the server is silent.

    pid  of the server's process, where it runs on the machine that wrote the file
    """

    address: str
    shard: int | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """A shard set and where each of its shards answers.

    addresses  shard -> addresses of its replicas; a shard nobody is known to hold is missing
    faults     what was wrong with the servers that are not in it, address -> error
    max_queries  queries that each of its servers takes in one message
    """

    manifest: Manifest
    addresses: Mapping[int, tuple[str, ...]]
    faults: Mapping[str, str]
    max_queries: int = NO_LIMIT


def said_once(faults: Iterable[tuple[str, str]]) -> list[str]:
    """What is wrong with servers, a text each; those of which the same is to be said share one.

    Args
        faults  (address, what is wrong), which may begin with the address and hold it again
    """
    said: dict[str, dict[str, None]] = {}
    for address, fault in faults:
        text = fault.removeprefix(address).lstrip(": ")
        # gRPC says once more where it connected to.
        host, quoted = map(re.escape, (address, address.replace("[", "%5B").replace("]", "%5D")))
        text = re.sub(rf"ipv[46]:(?:{host}|{quoted}): ", "", text)
        # Its port may begin that of another.
        text = re.sub(rf"(?<![\w.:-])(?:ipv[46]:)?{host}(?!\d)", "it", text)
        said.setdefault(text, {})[address] = None
    return [f"{', '.join(addresses)}: {text}" for text, addresses in said.items()]


def read_cluster_file(path: str | os.PathLike[str]) -> list[Endpoint]:
    """The servers that a cluster.toml lists.

    The file has one table ``[[server]]`` a server, with ``address`` ("host:port") and ``shard``.

    Raises
        ConfigError  the file is missing, does not say that, or says what nobody reads
    """
    path = Path(path)
    return [_endpoint(path, server) for server in _servers(path, _content(path))]


def read_cluster_small(path: str | os.PathLike[str]) -> Path | None:
    """The folder of the small model that a cluster.toml names, relative to its own; None for none.

    Raises
        ConfigError  the file cannot be read, or ``small`` is no string
    """
    path = Path(path)
    small = _content(path).get("small")
    if small is None:
        return None
    if not isinstance(small, str) or not small:
        raise ConfigError(f"{path}: small must be the folder of a shard set, found {small!r}")
    return path.absolute().parent / small


def _content(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{path} does not exist; `dlm cluster DIR` writes it where it is started, "
            "or give --cluster FILE"
        ) from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read as TOML: {exc}") from exc
    # A misspelt small model would be none, in silence, until the servers fail. `token` is refused
    # where tokens are read, with what to do instead.
    for name in content:
        if name not in TOP_KEYS and name != "token":
            raise ConfigError(f"{path} has no setting named {name}{nearest(name, TOP_KEYS)}")
    return content


def _servers(path: Path, content: Mapping[str, Any]) -> Sequence[Any]:
    servers = content.get("server")
    if not isinstance(servers, list) or not servers:
        raise ConfigError(f"{path} lists no server; one [[server]] table a server is expected")
    return servers


def _endpoint(path: Path, server: Any) -> Endpoint:
    if not isinstance(server, dict):
        raise ConfigError(f"{path}: each server is a table [[server]], found {server!r}")
    for name in server:
        if name not in SERVER_KEYS:
            # TOML counts to a table what stands below it, up to the next one.
            advice = (
                "; it must stand above the first table"
                if name in TOP_KEYS
                else nearest(name, SERVER_KEYS)
            )
            raise ConfigError(f"{path}: [[server]] has no setting named {name}{advice}")
    address = server.get("address")
    if not isinstance(address, str) or ":" not in address:
        raise ConfigError(f'{path}: a [[server]] needs address = "host:port", found {address!r}')
    for name, low in (("shard", 0), ("pid", 1)):
        value = server.get(name)
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < low
        ):
            raise ConfigError(f"{path}: {name} must be a number from {low}, found {value!r}")
    return Endpoint(address, server.get("shard"), server.get("pid"))


class ClusterFile:
    """Reads the servers from a cluster.toml, anew each time; picklable."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __call__(self) -> list[Endpoint]:
        return read_cluster_file(self.path)


class FixedEndpoints:
    """The same servers each time; picklable."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = list(endpoints)

    def __call__(self) -> list[Endpoint]:
        return self.endpoints


def write_cluster_file(
    path: Path,
    endpoints: Sequence[Endpoint],
    *,
    shard_set: str,
    security: ClientSecurity = PLAIN,
    small: Path | None = None,
) -> None:
    """Writes a cluster.toml whole or not at all; of `security` all but the token itself."""
    lines = [f"{WRITTEN_BY} for shard set {shard_set}."]
    if small is not None:
        lines += ["", f"small = {json.dumps(str(small.absolute()))}"]
    if security.token_file:
        lines += ["", f"token_file = {json.dumps(security.token_file)}"]
    if security.ca:
        values = [(name, getattr(security, name)) for name in TLS_KEYS]
        lines += ["", "[tls]", *(f"{name} = {json.dumps(v)}" for name, v in values if v)]
    for endpoint in endpoints:
        lines += ["", "[[server]]", f'address = "{endpoint.address}"']
        if endpoint.shard is not None:
            lines.append(f"shard = {endpoint.shard}")
        if endpoint.pid is not None:
            lines.append(f"pid = {endpoint.pid}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def check_model(model: str | None) -> str | None:
    """`model` in small letters; raises `ConfigError` unless it can begin the id of a model."""
    if model is None or re.fullmatch(r"[0-9a-f]{6,32}", model.lower()):
        return model and model.lower()
    raise ConfigError(
        f"the model {model!r} is no id: 6 to 32 hex digits are expected, the first of the model's "
        "id or of its shard set's, as `dlm info` prints them"
    )


@dataclass(slots=True)
class _Held:
    """A shard set that servers hold, and where.

    addresses   shard -> addresses of those that say so
    holders     every address that holds any shard of it
    defaults    servers that mean it where a call names no shard set
    max_queries of each server that holds it
    """

    manifest: Manifest
    addresses: dict[int, tuple[str, ...]] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)
    defaults: int = 0
    max_queries: list[int] = field(default_factory=list)


class _Census:
    """What the servers say of themselves, put together."""

    def __init__(self) -> None:
        self.asked = 0
        self.held: dict[str, _Held] = {}
        self.faults: dict[str, str] = {}
        self.errors: list[DlmError] = []
        self.silent: list[Endpoint] = []
        self._parsed: dict[bytes, Manifest] = {}

    def add(self, endpoint: Endpoint, reply: pb.DescribeReply | DlmError, place: int) -> None:
        """One description; `place` 0 is of the server's default."""
        address = endpoint.address
        self.asked += place == 0
        if isinstance(reply, DlmError):
            self._blame(address, reply)
            if place == 0:
                self.silent.append(endpoint)
            return
        try:
            manifest = self._parsed.get(reply.manifest) or parse_manifest(
                reply.manifest, f"the manifest of {address}"
            )
        except ShardFormatError as exc:
            self._blame(address, exc)
            return
        self._parsed[reply.manifest] = manifest
        held = self.held.setdefault(manifest.shard_set, _Held(manifest))
        known = held.addresses.get(reply.shard, ())
        if address not in known:
            held.addresses[reply.shard] = (*known, address)
        held.holders.add(address)
        held.defaults += place == 0
        held.max_queries.append(_max_queries(reply, manifest))

    def _blame(self, address: str, error: DlmError) -> None:
        self.faults[address] = str(error)
        self.errors.append(error)

    def choose(self, prefer: str | None, model: str | None) -> _Held:
        """The shard set to use; raises as `discover`."""
        wanted = {
            name: held
            for name, held in self.held.items()
            if model is None or name.startswith(model) or held.manifest.model.startswith(model)
        }
        if not wanted:
            self._miss(model)
        models = sorted({held.manifest.model for held in wanted.values()})
        if model is not None and len(models) > 1:
            raise ConfigError(
                f"{model} begins the ids of several models that the servers hold: "
                f"{', '.join(models)}. Give more digits"
            )
        return max(
            wanted.items(),
            key=lambda one: (
                len(one[1].addresses),
                one[0] == prefer,
                one[1].defaults,
                one[0],
            ),
        )[1]

    def _miss(self, model: str | None) -> NoReturn:
        faults = "; ".join(said_once(self.faults.items()))
        if not self.held:
            message = f"none of {self.asked} servers can be used: {faults}"
            if any(isinstance(e, (ProtocolError, ShardFormatError)) for e in self.errors):
                raise ProtocolError(message)
            if self.errors and all(isinstance(e, AuthenticationError) for e in self.errors):
                raise AuthenticationError(message)
            raise ShardDown(message)
        found = ", ".join(
            f"{held.manifest.model} (shard set {name})" for name, held in sorted(self.held.items())
        )
        message = f"no server holds a model {model}; they hold {found}"
        if self.silent:
            raise ShardDown(f"{message}. Not all of them answer: {faults}")
        raise ConfigError(f"{message}. Give one of these, or serve the other")


def _describe(
    endpoint: Endpoint, connect: Connect, timeout_s: float
) -> list[pb.DescribeReply | DlmError]:
    """What a server says of its default shard set, then of each other one."""
    try:
        connection = connect(endpoint.address)
        first = connection.describe(timeout_s)
    except ConfigError:
        raise  # not the server's fault, and the same for each
    except DlmError as exc:
        return [exc]
    replies: list[pb.DescribeReply | DlmError] = [first]
    others = [one for one in dict.fromkeys(first.shard_sets) if one != first.shard_set]
    for shard_set in others[:MAX_SHARD_SETS]:
        try:
            replies.append(connection.describe(timeout_s, shard_set))
        except DlmError as exc:
            replies.append(exc)
    return replies


def discover(
    endpoints: Sequence[Endpoint],
    connect: Connect,
    timeout_s: float,
    *,
    prefer: str | None = None,
    model: str | None = None,
) -> Topology:
    """Asks every server what it holds.

    Args
        timeout_s  for each description
        prefer     shard set to choose where servers disagree, if any of them holds it
        model      only shard sets whose id, or the id of whose model, begins so; see `check_model`
    Returns
        the shard set of which most shards answer, and among equals the one that is the default of
        most servers; a server that is silent stands behind those that answer for the shard that
        the endpoints give for it, so that asking it fails and later works
    Raises
        ShardDown      no server answers, or none that does holds `model` while others are silent
        ProtocolError  servers answer, and none with a description that can be read
        ConfigError    every server answers, and none holds `model`; or it stands for several; or
                       what the client is to show of itself cannot be read
        AuthenticationError  every server refuses this client
    """
    with ThreadPoolExecutor(max_workers=min(len(endpoints), 16) or 1) as pool:
        replies = list(pool.map(lambda e: _describe(e, connect, timeout_s), endpoints))
    census = _Census()
    for endpoint, said in zip(endpoints, replies, strict=True):
        for place, reply in enumerate(said):
            census.add(endpoint, reply, place)
    chosen = census.choose(prefer, model)
    manifest, addresses = chosen.manifest, chosen.addresses
    _blame_others(census, chosen)
    for endpoint in census.silent:
        if endpoint.shard is not None and endpoint.shard < manifest.shards:
            known = addresses.get(endpoint.shard, ())
            if endpoint.address not in known:
                addresses[endpoint.shard] = (*known, endpoint.address)
    return Topology(manifest, addresses, census.faults, min(chosen.max_queries, default=NO_LIMIT))


def _blame_others(census: _Census, chosen: _Held) -> None:
    """Names the servers that hold other shard sets only."""
    for shard_set, held in census.held.items():
        for address in held.holders - chosen.holders:
            census.faults.setdefault(
                address, f"holds shard set {shard_set}, not {chosen.manifest.shard_set}"
            )


def _max_queries(reply: pb.DescribeReply, manifest: Manifest) -> int:
    """Queries that fit one message by the limits of a server, whatever their contexts."""
    limit = reply.max_queries or NO_LIMIT
    if reply.max_message_bytes:
        # A query alone in its context: its length, its words, its count, its word; and the rest.
        widest = 1 + 4 * (manifest.order - 1) + 4 + 4
        limit = min(limit, (reply.max_message_bytes - 128) // widest)
    return max(limit, 1)
