"""Decides from servers' reports which shard set to use and where its shards are (pure code), and
fetches the low orders from servers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeAlias

from dlm.client.cluster_file import Endpoint
from dlm.client.health import NO_LIMIT, Topology
from dlm.client.router import LowGrams
from dlm.client.rules import Again, Elsewhere, GiveUp, after_file, after_files
from dlm.client.server import Connection
from dlm.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    ShardFormatError,
    UnavailableError,
)
from dlm.files import lock_file, move, remove_unlocked, scratch_folder, sync_folder, unlock
from dlm.index import layout
from dlm.index.layout import Manifest, parse_manifest
from dlm.progress import ProgressReporter, compiling_notice
from dlm.units import counted
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import plain

# The largest manifest that a client accepts; a larger one would take too long to parse.
MAX_MANIFEST_BYTES = 4 << 20


def dedupe_faults(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Returns one line per fault, from (address, text); servers with the same fault share it."""
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
    defaults     number of servers whose default is this shard set
    max_queries  the most queries in one message that all its holders accept
    """

    manifest: Manifest
    addresses: dict[int, tuple[str, ...]] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)
    defaults: int = 0
    max_queries: int = NO_LIMIT

    def is_whole(self, more: Collection[int] = ()) -> bool:
        """Whether every shard has a server; the shards in `more` count as having one."""
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
            f"manifest describes shard set {manifest.shard_set}, with shards 0 to "
            f"{manifest.shards - 1}; restart that server"
        )
    if asked and asked != reply.shard_set:
        raise FalseDescription(
            f"{address} described shard set {named}; expected {asked.hex()}. Restart that server"
        )
    return manifest


class Census:
    """The servers' descriptions, put together.

    Attributes  token_models  the beginnings of model ids that the client's token names; empty if
                              the token names no model
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
        """Like `read_description`, but parses each manifest once; may run in any thread."""
        found = read_description(address, reply, asked, self._read.get(reply.manifest))
        self._read[reply.manifest] = found
        return found

    def add(self, endpoint: Endpoint, reply: pb.DescribeReply | DlmError, place: int) -> None:
        """Adds a description; the one at `place` 0 is of the server's default shard set."""
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
        """The shard set to use, by the rules in proto/README.md, "Which model".

        Args
            prefer   the shard set that is in use
            model    the only model that the client accepts; None for any
            default  the operator's default model: a running client waits until its shards answer
        Returns
            the only complete shard set that all its servers name as their default. If there is none
            or more than one: the shard set in use if it is complete, else the one with the most
            shards that answer, and among equals the default of the most servers. Silent servers
            whose shard the endpoints name are listed last, since they may answer later
        Raises
            ShardDown      no server answers; or none holds `model`, and some are silent
            ProtocolError  servers answer, but none with a readable description
            ConfigError    every server answers, and none holds `model`; or `model` matches several;
                           or the client's own credentials cannot be read
            AuthenticationError  every server refuses this client
        """
        wanted = self._beginning(model)
        if default is not None and model is None:
            wanted = self._beginning(default)
            if prefer in self.held and not any(held.is_whole() for held in wanted.values()):
                wanted = {prefer: self.held[prefer]}
        if not wanted:
            self._miss(model or default)
        # A briefly silent server still holds its shard, so the client can stay with this shard set.
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
        """Returns where the model of open utterances is served; None if no server holds it."""
        if not any(held.manifest.model == snapshot_model for held in self.held.values()):
            return None
        return self.choose(prefer, snapshot_model)

    def whole(self, model: str) -> Topology | None:
        """Returns where a model is served; None if shards lack a server or several ids match."""
        try:
            found = self._beginning(model)
        except ConfigError:
            return None
        held = [name for name, one in found.items() if one.is_whole()]
        return self.choose(held[0], held[0]) if held else None

    def _beginning(self, model: str | None) -> dict[str, _FoundShardSet]:
        """The shard sets whose id, or whose model's id, begins with `model` (all of them for None);
        raises `ConfigError` if they are of several models."""
        wanted = {
            name: held
            for name, held in self.held.items()
            if model is None or name.startswith(model) or held.manifest.model.startswith(model)
        }
        models = sorted({held.manifest.model for held in wanted.values()})
        if model is not None and len(models) > 1:
            raise ConfigError(
                f"the servers hold several models whose ids start with {model}: "
                f"{', '.join(models)}. Give more digits of the id"
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
        message = f"no server holds model {model}; the servers hold {found}"
        if self.token_models:
            message += f" (the token is valid only for {', '.join(sorted(self.token_models))})"
        if self.silent:
            raise ShardDown(f"{message}. Some servers do not answer: {faults}")
        raise ConfigError(f"{message}. Choose one of these, or serve {model}")


def _max_queries(reply: pb.DescribeReply, manifest: Manifest) -> int:
    limit = reply.max_queries or NO_LIMIT
    if reply.max_message_bytes:
        # The bytes of a query that shares its context with no other: the context's length and
        # words, the word count, and the word. 128 bytes are reserved for all other fields.
        widest = 1 + 4 * (manifest.order - 1) + 4 + 4
        limit = min(limit, (reply.max_message_bytes - 128) // widest)
    return max(limit, 1)


# -------------------------------------------------------------------------------------------------
# The low orders are fetched once, kept on disk in a folder named after the shard set, and shared by
# processes, which take turns with a lock.

FILES = {
    "vocabulary": pb.DOWNLOAD_FILE_VOCABULARY,
    "low_orders": pb.DOWNLOAD_FILE_LOW_ORDERS,
}

Source: TypeAlias = tuple[int, Connection]
Clock: TypeAlias = Callable[[], float]

LOCK_POLL_S = 0.05
PUT_TRIES = 20  # a try fails only if another process moves the cached copy meanwhile
LEAST_S = 1.0  # minimum seconds to spend on a server, unless less time is left
LEFT_S = 24 * 3600.0  # after this long, an unfinished download of another shard set is removed
KEEP_FREE_BYTES = 64 << 20  # space to leave free on the disk
PROGRESS_BYTES = codec.CHUNK_BYTES  # after this many bytes, a download's time limit begins anew
SHOWN_BYTES = 16 << 20  # the progress of larger downloads is shown, as they take seconds
RETRY_S = 0.1  # seconds before all servers are tried again; doubled each time, up to 2


def fetch(
    manifest: Manifest,
    sources: Sequence[Source],
    cache_dir: Path,
    timeout_s: float,
    *,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    shuffle: Callable[[list[Source]], None] = random.shuffle,
) -> LowGrams:
    """Returns the low orders of `manifest`, from the cache or else from any of the servers.

    Args
        sources    (shard, connection) of each server; `shuffle` sets the order in which they are
                   asked, so that clients that start together do not all ask the same one
        timeout_s  seconds allowed without progress; half of them may be spent waiting for the lock
    Raises
        ConfigError       the cache folder cannot be written, or its disk is too full
        UnavailableError  no server sent the files in time; the next try resumes the download
        ProtocolError     the files do not match the manifest
    """
    sources = list(sources)
    shuffle(sources)
    home = cache_dir / manifest.shard_set
    download = _Download(manifest, sources, home, timeout_s, clock, sleep)
    try:
        try:
            return LowGrams.open(home, manifest)
        except ShardFormatError:
            pass  # the cached copy is missing or damaged; `run` fetches it under the lock
        cache_dir.mkdir(parents=True, exist_ok=True)
        return download.run()
    except OSError as exc:
        raise ConfigError(
            f"cannot cache the low orders in {cache_dir}: {exc}. Free space there, "
            "or set DLM_CACHE_DIR to another folder"
        ) from exc


class _Download:
    """Fetches low orders into a folder beside `home`, and renames the complete folder to `home`.
    The download fails at the time `until`, which moves on after each `PROGRESS_BYTES` received."""

    def __init__(
        self,
        manifest: Manifest,
        sources: list[Source],
        home: Path,
        timeout_s: float,
        clock: Clock,
        sleep: Callable[[float], None],
    ) -> None:
        self.manifest, self.sources, self.home = manifest, sources, home
        self.timeout_s, self.clock, self.sleep = timeout_s, clock, sleep
        self.until = clock() + timeout_s
        self._fresh = 0  # bytes that have arrived since `until` was last postponed
        self._bytes = sum(manifest.file(kind).bytes for kind in FILES)
        self._progress = ProgressReporter(compiling_notice.tell)

    def run(self) -> LowGrams:
        home = self.home
        lock = home.with_name(home.name + ".lock")
        part = home.with_name(home.name + ".part")  # bytes in this folder are not fetched again
        turn_until, before = self.clock() + self.timeout_s / 2, _arrived(part)
        while (turn := lock_file(lock, mode=0o666)) is None and self.clock() < turn_until:
            self.sleep(LOCK_POLL_S)
            if (now := _arrived(part)) >= before + PROGRESS_BYTES:
                turn_until, before = self.clock() + self.timeout_s / 2, now
        self.until = max(self.until, self.clock() + self.timeout_s / 2)
        if turn is None:
            # A stalled process that holds the lock must not block others: this process fetches
            # the files into a folder of its own.
            with scratch_folder(home.parent, home.name) as own:
                return self._fetch_into(own / "part")
        try:
            return self._fetch_into(part)
        except UnavailableError:
            raise  # the next try resumes from what has arrived
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        finally:
            unlock(turn)

    def _fetch_into(self, part: Path) -> LowGrams:
        home, manifest = self.home, self.manifest
        try:
            return LowGrams.open(home, manifest)  # another process was faster
        except ShardFormatError:
            pass  # a damaged copy stays until a complete one can replace it
        _make_room(home.parent, part, manifest)
        part.mkdir(exist_ok=True)
        if self._bytes >= SHOWN_BYTES:
            size = self._bytes >> 20
            name = f"fetching {size:,} MiB of 1- and 2-grams, once, into {home.parent}"
            self._progress.stage(name, size, "MiB")
        for kind in FILES:
            self._fetch_in_time(kind, part)
        with (part / layout.MANIFEST).open("wb") as out:
            out.write(manifest.text)
            out.flush()
            os.fsync(out.fileno())
        sync_folder(part)
        # Maps the files before the move, so that this process keeps them if others replace `home`.
        try:
            grams = LowGrams.open(part, manifest)
        except ShardFormatError as exc:
            # The files' checksums match, so they were already unusable when the manifest was made.
            raise ProtocolError(
                f"the servers of shard set {manifest.shard_set} sent unusable low orders: "
                f"{plain(str(exc))}. Rebuild the shard set"
            ) from exc
        _put(part, home, manifest)
        return replace(grams, directory=home)

    def _fetch_in_time(self, kind: str, part: Path) -> None:
        pause_s = RETRY_S
        while True:
            try:
                self._fetch_file(kind, part)
                return
            except UnavailableError as exc:
                rest_s = pause_s * (0.5 + random.random())
                if isinstance(after_files(exc, rest_s, self.until - self.clock()), GiveUp):
                    entry = self.manifest.file(kind)
                    path = part / entry.name
                    exc.add_note(
                        f"{path.stat().st_size if path.exists() else 0} of {entry.bytes} bytes of "
                        f"{entry.name} arrived, fewer than {PROGRESS_BYTES} of them in the last "
                        f"{self.timeout_s:g} s (connect_s); connect again to resume"
                    )
                    raise
                self.sleep(rest_s)
                pause_s = min(2 * pause_s, 2.0)

    def _fetch_file(self, kind: str, part: Path) -> None:
        """Fetches one file, from where an earlier try stopped; skips a server that fails. No server
        may use up all the time that is left while others remain."""
        entry = self.manifest.file(kind)
        path = part / entry.name
        last: DlmError = (
            DeadlineExceeded(f"no time was left to fetch {entry.name}; raise connect_s")
            if self.sources
            else ShardDown(f"no server of shard set {self.manifest.shard_set} is known; start one")
        )
        if path.exists() and _is_whole(path, entry):
            return
        for place, (shard, connection) in enumerate(self.sources):
            then: Again | Elsewhere = Again()
            tries = 0
            while isinstance(then, Again):
                left_s = self.until - self.clock()
                if left_s <= 0:
                    raise last
                share_s = max(left_s / (len(self.sources) - place), min(left_s, LEAST_S))
                if path.exists() and path.stat().st_size > entry.bytes:
                    path.unlink()
                resumed = path.exists() and path.stat().st_size > 0
                tries += 1
                try:
                    self._receive(kind, shard, connection, path, share_s)
                except DlmError as exc:
                    # Keeps an `Overloaded`, which shows that a later try may succeed.
                    if not (isinstance(last, Overloaded) and isinstance(exc, UnavailableError)):
                        last = exc
                    then = after_file(tries, wrong=False, resumed=resumed)
                    continue
                if _is_whole(path, entry):
                    return
                path.unlink()
                last = ProtocolError(
                    f"{connection.address} sent a {kind} file that does not match the manifest; "
                    "the server's files are damaged (run `dlm verify DIR` on its host)"
                )
                then = after_file(tries, wrong=True, resumed=resumed)
        raise last

    def _receive(
        self, kind: str, shard: int, connection: Connection, path: Path, timeout_s: float
    ) -> None:
        until, entry = self.clock() + timeout_s, self.manifest.file(kind)
        shard_set = self.manifest.shard_set_bytes
        with path.open("ab") as out:
            offset = out.tell()
            request = pb.DownloadRequest(
                shard_set=shard_set, shard=shard, file=FILES[kind], offset=offset
            )
            with closing(connection.download(request, timeout_s)) as chunks:
                for chunk in chunks:
                    data = codec.decode_chunk(
                        chunk,
                        shard_set=shard_set,
                        shard=shard,
                        offset=offset,
                        file_bytes=entry.bytes,
                    )
                    out.write(data)
                    offset += len(data)
                    self._note(len(data))
                    if self.clock() >= until and offset < entry.bytes:
                        raise DeadlineExceeded(
                            f"{connection.address} sent only {offset} of {entry.bytes} bytes of "
                            f"{entry.name} in time; raise connect_s"
                        )
            if offset != entry.bytes:
                raise ProtocolError(
                    f"{connection.address} stopped at byte {offset} of {entry.bytes} of "
                    f"{entry.name}; connect again to resume"
                )
            out.flush()
            os.fsync(out.fileno())

    def _note(self, size: int) -> None:
        self._fresh += size
        if self._fresh >= PROGRESS_BYTES:
            self.until = self.clock() + self.timeout_s
            self._progress.step(self._fresh >> 20)
            self._fresh = 0


def _arrived(part: Path) -> int:
    arrived = 0
    for file in part.glob("*.arrow"):
        with contextlib.suppress(OSError):  # another process moved the file
            arrived += file.stat().st_size
    return arrived


def _make_room(cache_dir: Path, part: Path, manifest: Manifest) -> None:
    """Removes abandoned downloads of other shard sets: the old ones, then all if space is short.
    Raises `OSError` if space is still short."""
    needed = sum(manifest.file(kind).bytes for kind in FILES) - _arrived(part) + KEEP_FREE_BYTES
    for age_s in (LEFT_S, 0.0):
        for other in cache_dir.glob("*.part"):
            with contextlib.suppress(OSError):
                if other != part and other.stat().st_mtime <= time.time() - age_s:
                    remove_unlocked(other, other.with_suffix(".lock"))
        free = shutil.disk_usage(cache_dir).free
        if free >= needed:
            return
    raise OSError(
        errno.ENOSPC,
        f"shard set {manifest.shard_set} needs {needed} bytes, including a reserve of "
        f"{KEEP_FREE_BYTES}, but only {free} are free",
    )


def _put(part: Path, home: Path, manifest: Manifest) -> None:
    """Renames a complete copy to `home`, unless `home` is complete already. Other processes may
    replace `home` at any moment, so a copy that seems damaged is moved aside and checked again."""
    for tries_left in reversed(range(PUT_TRIES)):
        try:
            move(part, home)
            return
        except OSError:
            if not tries_left:
                raise
        if _is_whole_copy(home, manifest):
            return
        with scratch_folder(home.parent, home.name) as aside:
            try:
                move(home, aside / "damaged")
            except FileNotFoundError:
                continue  # another process was faster
            if _is_whole_copy(aside / "damaged", manifest):  # another process had replaced it
                with contextlib.suppress(OSError):
                    move(aside / "damaged", home)


def _is_whole_copy(folder: Path, manifest: Manifest) -> bool:
    try:
        LowGrams.open(folder, manifest)
    except ShardFormatError:
        return False
    return True


def _is_whole(path: Path, entry: layout.FileEntry) -> bool:
    return path.stat().st_size == entry.bytes and layout.file_checksum(path) == entry.xxh3_128
