"""Where the servers are: cluster.toml, and asking each what it holds."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.client.security import PLAIN, ClientSecurity
from dlm.client.transport import Connection
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
WRITTEN_BY = "# Written by dlm cluster"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and the shard it is said to hold: a hint, for while the server is silent."""

    address: str
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """A shard set and where each of its shards answers.

    addresses  shard -> address; a shard nobody is known to hold is missing
    faults     what was wrong with the servers that are not in it, address -> error
    max_queries  queries that each of its servers takes in one message
    """

    manifest: Manifest
    addresses: Mapping[int, str]
    faults: Mapping[str, str]
    max_queries: int = NO_LIMIT


def read_cluster_file(path: str | os.PathLike[str]) -> list[Endpoint]:
    """The servers that a cluster.toml lists.

    The file has one table ``[[server]]`` a server, with ``address`` ("host:port") and ``shard``.

    Raises
        ConfigError  the file is missing or does not say that
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{path} does not exist; `dlm cluster DIR` writes it where it is started, "
            "or give --cluster FILE"
        ) from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read as TOML: {exc}") from exc
    return [_endpoint(path, server) for server in _servers(path, content)]


def _servers(path: Path, content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    servers = content.get("server")
    if not isinstance(servers, list) or not servers:
        raise ConfigError(f"{path} lists no server; one [[server]] table a server is expected")
    return servers


def _endpoint(path: Path, server: Mapping[str, Any]) -> Endpoint:
    address, shard = server.get("address"), server.get("shard")
    if not isinstance(address, str) or ":" not in address:
        raise ConfigError(f'{path}: a [[server]] needs address = "host:port", found {address!r}')
    if shard is not None and (not isinstance(shard, int) or isinstance(shard, bool) or shard < 0):
        raise ConfigError(f"{path}: shard must be a number from 0, found {shard!r}")
    return Endpoint(address, shard)


def write_cluster_file(
    path: Path, endpoints: Sequence[Endpoint], *, shard_set: str, security: ClientSecurity = PLAIN
) -> None:
    """Writes a cluster.toml whole or not at all; of `security` all but the token itself."""
    lines = [f"{WRITTEN_BY} for shard set {shard_set}."]
    if security.token_file:
        lines += ["", f"token_file = {json.dumps(security.token_file)}"]
    if security.ca:
        names = ("ca", "cert", "key", "server_name")
        values = [(name, getattr(security, name)) for name in names]
        lines += ["", "[tls]", *(f"{name} = {json.dumps(v)}" for name, v in values if v)]
    for endpoint in endpoints:
        lines += ["", "[[server]]", f'address = "{endpoint.address}"']
        if endpoint.shard is not None:
            lines.append(f"shard = {endpoint.shard}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def discover(
    endpoints: Sequence[Endpoint],
    connect: Connect,
    timeout_s: float,
    *,
    prefer: str | None = None,
) -> Topology:
    """Asks every server what it holds.

    Args
        prefer  shard set to choose where servers disagree, if any of them holds it
    Returns
        the shard set of which most shards answer; a shard whose server is silent stands at the
        address that the endpoints give for it, so that asking it fails and later works
    Raises
        ShardDown      no server answers
        ProtocolError  servers answer, and none with a description that can be read
        AuthenticationError  every server refuses this client
    """
    found: dict[str, tuple[Manifest, dict[int, str]]] = {}
    faults: dict[str, str] = {}
    silent: list[Endpoint] = []
    parsed: dict[bytes, Manifest] = {}
    errors: list[DlmError] = []

    def ask(endpoint: Endpoint) -> tuple[Endpoint, Any]:
        try:
            return endpoint, connect(endpoint.address).describe(timeout_s)
        except ConfigError:
            raise  # not the server's fault, and the same for each
        except DlmError as exc:
            return endpoint, exc

    with ThreadPoolExecutor(max_workers=min(len(endpoints), 16) or 1) as pool:
        replies = list(pool.map(ask, endpoints))
    for endpoint, reply in replies:
        if isinstance(reply, DlmError):
            faults[endpoint.address] = str(reply)
            errors.append(reply)
            silent.append(endpoint)
            continue
        try:
            manifest = parsed.get(reply.manifest) or parse_manifest(
                reply.manifest, f"the manifest of {endpoint.address}"
            )
        except ShardFormatError as exc:
            faults[endpoint.address] = str(exc)
            errors.append(exc)
            continue
        parsed[reply.manifest] = manifest
        found.setdefault(manifest.shard_set, (manifest, {}))[1].setdefault(
            reply.shard, endpoint.address
        )
    if not found:
        message = f"none of {len(endpoints)} servers can be used: " + "; ".join(
            f"{address}: {fault}" for address, fault in faults.items()
        )
        if any(isinstance(e, (ProtocolError, ShardFormatError)) for e in errors):
            raise ProtocolError(message)
        if errors and all(isinstance(e, AuthenticationError) for e in errors):
            raise AuthenticationError(message)
        raise ShardDown(message)
    chosen = max(found, key=lambda s: (len(found[s][1]), s == prefer, s))
    manifest, addresses = found[chosen]
    for shard_set, (_, others) in found.items():
        if shard_set != chosen:
            for address in others.values():
                faults[address] = f"holds shard set {shard_set}, not {chosen}"
    for endpoint in silent:
        if endpoint.shard is not None and endpoint.shard < manifest.shards:
            addresses.setdefault(endpoint.shard, endpoint.address)
    limits = [_max_queries(reply, manifest) for _, reply in replies if _is_of(reply, manifest)]
    return Topology(manifest, addresses, faults, min(limits, default=NO_LIMIT))


def _is_of(reply: Any, manifest: Manifest) -> bool:
    return not isinstance(reply, DlmError) and reply.manifest == manifest.text


def _max_queries(reply: pb.DescribeReply, manifest: Manifest) -> int:
    """Queries that fit one message by the limits of a server, whatever their contexts."""
    limit = reply.max_queries or NO_LIMIT
    if reply.max_message_bytes:
        # A query alone in its context: its length, its words, its count, its word; and the rest.
        widest = 1 + 4 * (manifest.order - 1) + 4 + 4
        limit = min(limit, (reply.max_message_bytes - 128) // widest)
    return max(limit, 1)
