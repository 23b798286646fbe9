"""Files that may change under a server; and the one that lists its shard sets, followed while it
serves.

When the list changes and it is this server's turn on its machine, a child process that gives way to
all others checks the files of new sets. Then the server loads them beside what it serves; no
connection ends. A list that cannot be served changes nothing.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from dlm.errors import ConfigError, DlmError
from dlm.files import write_whole
from dlm.index.layout import Manifest, read_manifest
from dlm.logs import EventLog
from dlm.resources import available_bytes
from dlm.server.child import Child
from dlm.server.config import ServerConfig
from dlm.wire.ids import MAX_SHARD_SETS
from dlm.wire.secret import require_file, signature

logger = EventLog(__name__)

REPLACED = "# replaced: "  # before a folder

TURN_S = 60.0  # that a server waits for the others; then it loads all the same
# That the reader of new files gives way; on a machine whose cores are all busy it may never run.
GIVE_WAY_S = 60.0
POLL_S = 0.25  # a change is applied at the second look: within half a second


@dataclass(frozen=True, slots=True)
class Listed:
    """A shard set of the list: its folder, and its id as hex digits."""

    folder: str
    shard_set: str


Sets: TypeAlias = tuple[Listed, ...]


# ----------------------------------------------------------------------------------- the list


def read_sets(path: Path) -> list[Path]:
    """The folders that a file lists, one per line, relative to its own; `#` begins a comment.

    Raises  ConfigError  the file cannot be read, lists none, too many or one twice, or its last
                         line has no end
    """
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8")
        if "\0" in text:  # as some file systems leave after a crash; no path has one
            raise OSError("it has zero bytes")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}; expected the folders of shard sets, one per line"
        ) from exc
    if text and not text.endswith("\n"):
        raise ConfigError(
            f"{path}: its last line has no newline, so the file may be half-written; end it with a "
            "newline, and replace such files by renaming a new one over them"
        )
    lines = [line.strip() for line in text.splitlines()]
    named = [path.absolute().parent / line for line in lines if line and not line.startswith("#")]
    if not 0 < len(named) <= MAX_SHARD_SETS:
        raise ConfigError(
            f"{path} lists {len(named)} shard sets; expected 1 to {MAX_SHARD_SETS}, a folder per "
            "line"
        )
    for folder in named:
        if named.count(folder) > 1:
            raise ConfigError(f"{path} lists {folder} twice; give each shard set once")
    return named


def write_sets(path: Path, folders: Sequence[Path], replaced: Sequence[Path] = ()) -> None:
    """Replaces the list: these folders, by their whole paths, the default first; `replaced` stay
    as comments, for whoever goes back to them. Owner, mode and a symbolic link stay."""
    lines = [f"{folder.absolute()}\n" for folder in folders]
    lines += [f"{REPLACED}{folder.absolute()}\n" for folder in replaced]
    write_whole(path.resolve(), "".join(lines).encode(), keep_owner=True)


def replaced_sets(path: Path) -> list[Path]:
    """The folders that the list names as replaced."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Path(one.removeprefix(REPLACED)) for one in lines if one.startswith(REPLACED)]


def sets_file_of(cluster_file: Path) -> Path:
    """The list that the servers of `dlm cluster` follow, beside the file for their clients."""
    return cluster_file.with_suffix(".sets")


def sets_of(folders: Sequence[Path], index: int) -> list[tuple[Path, Manifest]]:
    """The shard sets in `folders` that have shard `index`, each with its manifest.

    Raises  ShardFormatError  a folder is incomplete;  ConfigError  none has the shard, or two hold
            the same set
    """
    found = [(folder, read_manifest(folder)) for folder in folders]
    names = [manifest.shard_set for _, manifest in found]
    for number, (folder, manifest) in enumerate(found):
        if manifest.shard_set in names[:number]:
            first = found[names.index(manifest.shard_set)][0]
            raise ConfigError(
                f"{folder} and {first} hold the same shard set, {manifest.shard_set}; give each "
                "once"
            )
    held = [(folder, manifest) for folder, manifest in found if index < manifest.shards]
    if not held:
        raise ConfigError(
            f"none of the listed shard sets has shard {index}, which this server serves; list one "
            "that has"
        )
    return held


def listed(folders: Sequence[Path], index: int) -> Sets:
    """As `sets_of`, by id."""
    return tuple(Listed(str(folder), one.shard_set) for folder, one in sets_of(folders, index))


def file_bytes(manifest: Manifest, index: int) -> int:
    """Bytes of the file that a server of shard `index` maps."""
    return manifest.file("shard", index).bytes


def check_memory(
    found: Sequence[tuple[Path, Manifest]],
    index: int,
    available: Callable[[], int] = available_bytes,
) -> None:
    """Raises `ConfigError` if the files of these sets do not fit beside what is in memory now."""
    wanted, free = sum(file_bytes(one, index) for _, one in found), available()
    if wanted > free:
        names = ", ".join(str(folder) for folder, _ in found)
        raise ConfigError(
            f"{names}: {wanted >> 20} MiB are to be loaded beside the models in memory, and "
            f"{free >> 20} MiB are free. Unload a model first, or raise the memory limit"
        )


class Turn:
    """Held by one process of this machine at a time, and released whenever that ends.

    An abstract socket's name can be bound once, by any user and without a file system to write to;
    each container has names of its own.
    """

    def __init__(self, name: str = "load", clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = f"\0dlm.server.turn/{name}", clock
        self._socket: socket.socket | None = None
        self._since: float | None = None

    def take(self) -> bool:
        """Whether it is this process's turn, or it has waited long enough; ask again if not."""
        if self._socket is not None:
            return True
        now = self._clock()
        self._since = now if self._since is None else self._since
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left: loading says so
            return True
        try:
            found.bind(self._name)
        except OSError as exc:
            found.close()
            return exc.errno != errno.EADDRINUSE or now - self._since >= TURN_S
        self._socket = found
        return True

    def leave(self) -> None:
        self._since = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


# -------------------------------------------------------------------------- following the list


class FollowedSets:
    """The list that a server follows; one thread at a time uses this.

    Attributes  checking  what is to be served once its files were read, or None
                rejected  why the file's list is not served, or ""
    """

    def __init__(
        self,
        config: ServerConfig,
        index: int,
        available: Callable[[], int] = available_bytes,
        turn: Turn | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(config.sets)
        self._index, self._available, self._clock = index, available, clock
        self._watch = FileWatcher([self._path])
        self.folders = [folder for folder, _ in sets_of(read_sets(self._path), index)]
        self.serving = listed(self.folders, index)
        self.checking: Sets | None = None
        self.rejected = ""
        self._loading: Sets | None = None
        self.turn = turn or Turn()
        self._child: Child | None = None
        self._new: list[str] = []  # folders whose files it reads
        self._hurries_at = math.inf

    def look(self) -> Sets | None:
        """Called several times per second: takes a change of the file a step further. Returns the
        sets to serve from now on; then `loaded` is to be called."""
        if self._child is not None and (wrong := self._child.poll()) is not None:
            self._child = None
            if wrong:
                self._settle(wrong)
            else:
                self._loading, self.checking = self.checking, None
            return self._loading
        if self._watch.changed():
            return self._read()
        if self._child is not None and self._clock() >= self._hurries_at:
            self._begin_check(give_way=False)
        return None

    def loaded(self, error: str = "") -> None:
        """The sets that `look` returned are served; or, for this reason, those before."""
        if self._loading is not None:
            if not error:
                self.serving = self._loading
            self._loading = None
            self._settle(error)

    def close(self) -> None:
        self._stop_check()
        self.turn.leave()

    def _read(self) -> Sets | None:
        self._stop_check()
        self.checking = None
        try:
            found = sets_of(read_sets(self._path), self._index)
            held = {one.shard_set for one in self.serving}
            new = [one for one in found if one[1].shard_set not in held]
            if new:
                check_memory(new, self._index, self._available)
        except (DlmError, OSError) as exc:
            self._watch.applied()  # not read again until it changes
            self._settle(str(exc))
            return None
        if new and not self.turn.take():
            return None
        self._watch.applied()
        sets = tuple(Listed(str(folder), one.shard_set) for folder, one in found)
        if not new:
            self._settle("")
            self._loading = None if sets == self.serving else sets
            return self._loading
        self.checking, self._new = sets, [str(folder) for folder, _ in new]
        logger.info("server.sets.checking", extra={"sets": len(new)})
        self._begin_check()
        return None

    def _begin_check(self, *, give_way: bool = True) -> None:
        self._stop_check()
        self._hurries_at = self._clock() + GIVE_WAY_S if give_way else math.inf
        arguments = ["--give-way"] * give_way + [str(self._index), *self._new]
        try:
            self._child = Child("dlm.server.opening", *arguments)
        except OSError as exc:  # no process or no descriptor is left
            self._settle(f"no process can read them: {exc}")

    def _stop_check(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _settle(self, error: str) -> None:
        self.rejected, self.checking = error, None
        self.turn.leave()
        if error:
            logger.error("server.sets.rejected", extra={"error": error})


# ------------------------------------------------------------------------------- files that change


class FileWatcher:
    """Whether files have changed and settled: alike at two looks, unlike what was loaded."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._loaded = self._seen = signature(*self.paths)
        self.error = ""  # why the change was rejected

    def changed(self) -> bool:
        """A look; True when a change is over, and until it is applied."""
        before, self._seen = self._seen, signature(*self.paths)
        return self._seen == before != self._loaded

    def applied(self) -> None:
        self._loaded, self.error = self._seen, ""


# Applies a change; returns what to log about it, if anything.
Reload = Callable[[], Mapping[str, object] | None]


def reload_if_changed(watch: FileWatcher, reload: Reload, *, what: str) -> None:
    """Calls `reload` after a change; if that is rejected, keeps the old files and tries again.

    A reason is logged once. Trying again applies a change for which descriptors were short.
    """
    if not watch.changed():
        return
    try:
        told = reload()
    except ConfigError as exc:
        if str(exc) != watch.error:
            watch.error = str(exc)
            logger.error("server.%s.kept", what, extra={"error": watch.error})
    else:
        watch.applied()
        logger.info("server.%s.reloaded", what, extra={"files": len(watch.paths), **(told or {})})


async def follow(watch: FileWatcher, reload: Reload, *, what: str) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        reload_if_changed(watch, reload, what=what)
