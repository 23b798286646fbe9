"""Which shard set to use, and where its shards are, by what servers report. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from dlm.client.cluster_file import Endpoint
from dlm.client.membership import NO_LIMIT, Topology
from dlm.errors import (
    AuthenticationError,
    ConfigError,
    DlmError,
    ProtocolError,
    ShardDown,
    ShardFormatError,
)
from dlm.index.layout import Manifest, parse_manifest
from dlm.units import counted
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import plain

# Of a manifest on the wire: parsing it takes longer than sending it.
MAX_MANIFEST_BYTES = 4 << 20


def dedupe_faults(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Texts of servers' faults, of (address, text); servers with the same fault share one."""
    said: dict[str, dict[str, None]] = {}
    for address, fault in faults:
        text = fault.removeprefix(address).lstrip(": ")
        # gRPC repeats the address that it connected to.
        host, quoted = map(re.escape, (address, address.replace("[", "%5B").replace("]", "%5D")))
        text = re.sub(rf"ipv[46]:(?:{host}|{quoted}): ", "", text)
        # Another port may begin with the same digits.
        text = re.sub(rf"(?<![\w.:-])(?:ipv[46]:)?{host}(?!\d)", "it", text)
        said.setdefault(text, {})[address] = None
    return [f"{', '.join(addresses)}: {text}" for text, addresses in said.items()]


@dataclass(slots=True)
class _FoundShardSet:
    """A shard set that servers hold.

    addresses    shard -> addresses of servers that report it
    holders      every address that holds any shard of it
    defaults     servers whose default it is
    max_queries  that every server that holds it accepts in one message
    """

    manifest: Manifest
    addresses: dict[int, tuple[str, ...]] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)
    defaults: int = 0
    max_queries: int = NO_LIMIT

    def is_whole(self, more: Collection[int] = ()) -> bool:
        """Whether every shard has a server, including shards in `more`."""
        return len({*self.addresses, *more}) >= self.manifest.shards

    @property
    def is_named(self) -> bool:
        return 0 < self.defaults == len(self.holders)


class FalseDescription(ProtocolError):
    """A server's description is wrong: its manifest cannot be read or is contradictory."""


def read_description(
    address: str, reply: pb.DescribeReply, asked: bytes = b"", known: Manifest | None = None
) -> Manifest:
    """The manifest in a server's description of a shard set; raises `FalseDescription`.

    Args
        asked  the requested shard set; empty for the server's default
        known  the manifest, if the same bytes were read before
    """
    if len(reply.manifest) > MAX_MANIFEST_BYTES:
        raise FalseDescription(
            f"{address} sent a manifest of {len(reply.manifest)} bytes; expected at most "
            f"{MAX_MANIFEST_BYTES}"
        )
    try:
        manifest = known or parse_manifest(reply.manifest, f"the manifest of {address}")
    except ShardFormatError as exc:
        raise FalseDescription(plain(str(exc))) from exc
    named = reply.shard_set.hex()
    if reply.shard_set != manifest.shard_set_bytes or reply.shard >= manifest.shards:
        raise FalseDescription(
            f"{address} says that it holds shard {reply.shard} of shard set {named}, but its "
            f"manifest is of {manifest.shard_set}, with shards 0 to {manifest.shards - 1}; "
            "restart that server"
        )
    if asked and asked != reply.shard_set:
        raise FalseDescription(
            f"{address} described shard set {named}; expected {asked.hex()}. Restart that server"
        )
    return manifest


class Census:
    """The servers' descriptions, put together.

    Attributes  token_models  what the client's token may ask for, where it names models: the first
                              digits of their ids
    """

    def __init__(self) -> None:
        self.asked = 0
        self.held: dict[str, _FoundShardSet] = {}
        self.faults: dict[str, str] = {}
        self.errors: list[DlmError] = []
        self.silent: list[Endpoint] = []
        self.token_models: set[str] = set()
        self._read: dict[bytes, Manifest] = {}

    def read(self, address: str, reply: pb.DescribeReply, asked: bytes = b"") -> Manifest:
        """As `read_description`, but parses each manifest once; from any thread."""
        found = read_description(address, reply, asked, self._read.get(reply.manifest))
        self._read[reply.manifest] = found
        return found

    def add(self, endpoint: Endpoint, reply: pb.DescribeReply | DlmError, place: int) -> None:
        """One description; `place` 0 is of the server's default."""
        address = endpoint.address
        self.asked += place == 0
        if isinstance(reply, DlmError):
            self.faults[address] = str(reply)
            self.errors.append(reply)
            if place == 0 and not isinstance(reply, FalseDescription):
                self.silent.append(endpoint)
            return
        manifest = self.read(address, reply)
        self.token_models.update(plain(one) for one in reply.token_models)
        held = self.held.setdefault(manifest.shard_set, _FoundShardSet(manifest))
        known = held.addresses.get(reply.shard, ())
        if address not in known:
            held.addresses[reply.shard] = (*known, address)
        held.holders.add(address)
        held.defaults += place == 0
        held.max_queries = min(held.max_queries, _max_queries(reply, manifest))

    def choose(
        self, prefer: str | None, model: str | None = None, default: str | None = None
    ) -> Topology:
        """The shard set to use, by the rules of proto/README.md, "Which model".

        Args
            prefer   the one that is in use
            model    that the client was given: it accepts no other
            default  that the operator names: a running client waits until all its shards answer
        Returns
            the one complete shard set that all its servers name as their default. If there is none,
            or several: the one in use if it is complete, else the one with most shards answering,
            and among equals the default of most servers. Silent servers come after those that
            answer for their shard (by the endpoints), so that asking them fails now and works later
        Raises
            ShardDown      no server answers; or none holds `model`, and some are silent
            ProtocolError  servers answer, but none with a readable description
            ConfigError    every server answers, and none holds `model`, or it matches several; or
                           the client's own credentials cannot be read
            AuthenticationError  every server refuses this client
        """
        wanted = self._beginning(model)
        if default is not None and model is None:
            wanted = self._beginning(default)
            if prefer in self.held and not any(held.is_whole() for held in wanted.values()):
                wanted = {prefer: self.held[prefer]}
        if not wanted:
            self._miss(model or default)
        # A server that is briefly silent still holds its shards: not a reason to leave a set.
        silent = {e.shard for e in self.silent if e.shard is not None}

        def is_whole(name: str) -> bool:
            return wanted[name].is_whole(silent if name == prefer else ())

        named = [name for name, held in wanted.items() if held.is_named and is_whole(name)]
        if len(named) == 1:
            return self._topology(wanted[named[0]])
        return self._topology(
            max(
                wanted.items(),
                key=lambda one: (
                    one[0] == prefer and is_whole(one[0]),
                    len(one[1].addresses),
                    one[0] == prefer,
                    one[1].defaults,
                    one[0],
                ),
            )[1]
        )

    def of(self, snapshot_model: str, prefer: str) -> Topology | None:
        """Where the model of open utterances is served; None if it no longer is."""
        if not any(held.manifest.model == snapshot_model for held in self.held.values()):
            return None
        return self.choose(prefer, snapshot_model)

    def whole(self, model: str) -> Topology | None:
        """Where a model is served, if all its shards are; None too if several have such an id."""
        try:
            found = self._beginning(model)
        except ConfigError:
            return None
        held = [name for name, one in found.items() if one.is_whole()]
        return self.choose(held[0], held[0]) if held else None

    def _beginning(self, model: str | None) -> dict[str, _FoundShardSet]:
        """The shard sets whose id, or whose model's id, begins with `model`, all for None; raises
        `ConfigError` if they are of several models."""
        wanted = {
            name: held
            for name, held in self.held.items()
            if model is None or name.startswith(model) or held.manifest.model.startswith(model)
        }
        models = sorted({held.manifest.model for held in wanted.values()})
        if model is not None and len(models) > 1:
            raise ConfigError(
                f"the servers hold several models whose ids start with {model}: "
                f"{', '.join(models)}. Give more digits"
            )
        return wanted

    def _topology(self, chosen: _FoundShardSet) -> Topology:
        manifest, faults = chosen.manifest, dict(self.faults)
        for shard_set, held in self.held.items():
            for address in held.holders - chosen.holders:
                faults.setdefault(address, f"holds shard set {shard_set}, not {manifest.shard_set}")
        addresses = dict(chosen.addresses)
        for endpoint in self.silent:
            if endpoint.shard is not None and endpoint.shard < manifest.shards:
                known = addresses.get(endpoint.shard, ())
                if endpoint.address not in known:
                    addresses[endpoint.shard] = (*known, endpoint.address)
        return Topology(manifest, addresses, faults, chosen.max_queries)

    def _miss(self, model: str | None) -> NoReturn:
        faults = "; ".join(dedupe_faults(self.faults.items()))
        if not self.held:
            message = f"none of {counted(self.asked, 'server')} can be used: {faults}"
            if not self.asked:
                message = 'no server addresses were given; expected at least one "host:port"'
            if any(isinstance(e, (ProtocolError, ShardFormatError)) for e in self.errors):
                raise ProtocolError(message)
            if self.errors and all(isinstance(e, AuthenticationError) for e in self.errors):
                raise AuthenticationError(message)
            raise ShardDown(message)
        found = ", ".join(
            f"{held.manifest.model} (shard set {name})" for name, held in sorted(self.held.items())
        )
        message = f"no server holds model {model}; they hold {found}"
        if self.token_models:
            message += f" (the token may ask only for {', '.join(sorted(self.token_models))})"
        if self.silent:
            raise ShardDown(f"{message}. Some servers do not answer: {faults}")
        raise ConfigError(f"{message}. Choose one of these, or serve {model}")


def _max_queries(reply: pb.DescribeReply, manifest: Manifest) -> int:
    limit = reply.max_queries or NO_LIMIT
    if reply.max_message_bytes:
        # A query alone in its context: its length, its words, its count, its word; and the rest.
        widest = 1 + 4 * (manifest.order - 1) + 4 + 4
        limit = min(limit, (reply.max_message_bytes - 128) // widest)
    return max(limit, 1)
