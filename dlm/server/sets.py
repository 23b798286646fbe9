"""Follows files that may change while a server runs, such as the list of its shard sets.

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
from typing import TypeAlias, TypeVar

from dlm.errors import ConfigError, DlmError
from dlm.files import write_whole
from dlm.index.layout import Manifest
from dlm.index.placed import manifest_of
from dlm.logs import EventLog
from dlm.resources import available_bytes
from dlm.server.child import Child
from dlm.server.config import ServerConfig
from dlm.stores.fetching import remembered
from dlm.stores.remote import AnyPath, RemotePath, located
from dlm.wire.ids import MAX_SHARD_SETS
from dlm.wire.secret import require_file, signature

logger = EventLog(__name__)

REPLACED = "# replaced: "  # prefix of a replaced folder

TURN_S = 60.0  # seconds that a server waits for its turn; after that it loads anyway
# The reader of new files gives way for this long at most; on a machine whose cores are all busy, it
# would otherwise never run.
GIVE_WAY_S = 60.0
AGAIN_S = 20.0  # seconds before a rejected list in a store is read again
POLL_S = 0.25  # seconds between checks; a change is applied at the second check that sees it


@dataclass(frozen=True, slots=True)
class Listed:
    """A shard set of the list: its folder, and its id as hex digits."""

    folder: str
    shard_set: str


Sets: TypeAlias = tuple[Listed, ...]
L = TypeVar("L", Path, RemotePath)


# ----------------------------------------------------------------------------------- the list


def read_sets(path: AnyPath) -> list[AnyPath]:
    """The folders or URLs that a file lists, one per line, relative to the file's folder; `#`
    begins a comment.

    Raises  ConfigError  the file cannot be read, lists no folder, too many or one twice, or its
                         last line has no newline
    """
    try:
        if isinstance(path, RemotePath):
            text = remembered("list", path, path.read_text)
        else:
            require_file(path)
            text = path.read_text(encoding="utf-8")
        if "\0" in text:  # some file systems leave NULs after a crash; no path has one
            raise OSError("it contains NUL bytes")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}; expected the folders of shard sets, one per line"
        ) from exc
    if text and not text.endswith("\n"):
        raise ConfigError(
            f"{path}: its last line has no newline, so the file may be half-written; end it with a "
            "newline, and replace the file only by renaming a new one over it"
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


def write_sets(
    path: AnyPath,
    folders: Sequence[AnyPath],
    replaced: Sequence[AnyPath] = (),
) -> None:
    """Writes the list: the absolute paths of `folders`, the default first, and of `replaced`, as
    comments, for `dlm rollout --undo`. Keeps owner and mode, and follows a symbolic link."""
    lines = [f"{folder.absolute()}\n" for folder in folders]
    lines += [f"{REPLACED}{folder.absolute()}\n" for folder in replaced]
    content = "".join(lines).encode()
    if not isinstance(path, RemotePath):
        write_whole(path.resolve(), content, keep_owner=True)
    elif not path.replace(content, "dlm rollout"):
        raise ConfigError(f"another process changed {path}; run the command again")


def replaced_sets(path: AnyPath) -> list[AnyPath]:
    """The folders that the list names as replaced."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [located(one.removeprefix(REPLACED)) for one in lines if one.startswith(REPLACED)]


def sets_file_of(cluster_file: L) -> L:
    """The list that the servers of `dlm cluster` follow, beside the file for their clients."""
    return cluster_file.with_suffix(".sets")


def sets_of(folders: Sequence[AnyPath], index: int) -> list[tuple[AnyPath, Manifest]]:
    """The shard sets in `folders` that have shard `index`, each with its manifest.

    Raises  ShardFormatError  a folder is incomplete;  ConfigError  none has the shard, or two hold
            the same set
    """
    found = [(folder, manifest_of(folder)) for folder in folders]
    names = [manifest.shard_set for _, manifest in found]
    for number, (folder, manifest) in enumerate(found):
        if manifest.shard_set in names[:number]:
            first = found[names.index(manifest.shard_set)][0]
            raise ConfigError(
                f"{folder} and {first} hold the same shard set; list only one of these folders"
            )
    held = [(folder, manifest) for folder, manifest in found if index < manifest.shards]
    if not held:
        raise ConfigError(
            f"none of the listed shard sets has shard {index}, which this server serves; list a "
            "set that has this shard"
        )
    return held


def listed(folders: Sequence[AnyPath], index: int) -> Sets:
    """Returns the sets of `sets_of`, each with its id."""
    return tuple(Listed(str(folder), one.shard_set) for folder, one in sets_of(folders, index))


def file_bytes(manifest: Manifest, index: int) -> int:
    """Bytes of the file that a server of shard `index` maps."""
    return manifest.file("shard", index).bytes


def check_memory(
    found: Sequence[tuple[AnyPath, Manifest]],
    index: int,
    available: Callable[[], int] = available_bytes,
) -> None:
    """Raises `ConfigError` if the files of these sets do not fit beside what is in memory now."""
    wanted, free = sum(file_bytes(one, index) for _, one in found), available()
    if wanted > free:
        names = ", ".join(str(folder) for folder, _ in found)
        raise ConfigError(
            f"loading {names} needs {wanted >> 20} MiB in addition to the models in memory, "
            f"but only {free >> 20} MiB are free. Unload a model first, or raise the memory limit"
        )


class Turn:
    """A lock that one process of this machine holds at a time, at most until the process ends.

    The name of an abstract socket can be bound once, by any user and without a writable file
    system; each container has its own names.
    """

    def __init__(self, name: str = "load", clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = f"\0dlm.server.turn/{name}", clock
        self._socket: socket.socket | None = None
        self._since: float | None = None

    def take(self) -> bool:
        """Whether this process has the turn, or has waited long enough; if not, call again."""
        if self._socket is not None:
            return True
        now = self._clock()
        self._since = now if self._since is None else self._since
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left: loading reports that
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
    """The list that a server follows; only one thread at a time may use this.

    Attributes  checking  the sets to serve once their files have been read; None at other times
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
        self._path, self._key = located(config.sets), config.public_key
        self._index, self._available, self._clock = index, available, clock
        self._watch = FileWatcher([self._path])
        self.folders = [folder for folder, _ in sets_of(read_sets(self._path), index)]
        self.serving = listed(self.folders, index)
        self.checking: Sets | None = None
        self.rejected = ""
        self._loading: Sets | None = None
        self.turn = turn or Turn()
        self._child: Child | None = None
        self._new: list[str] = []  # folders whose files are being read
        self._hurries_at = self._again_at = math.inf

    def look(self) -> Sets | None:
        """Takes a change of the file one step further; call this several times per second. If it
        returns the sets to serve from now on, call `loaded` next."""
        if self._child is not None and (wrong := self._child.poll()) is not None:
            self._child = None
            if wrong:
                self._settle(wrong)
            else:
                self._loading, self.checking = self.checking, None
            return self._loading
        # A store that failed may work later.
        again = self.rejected and self._child is None and self._clock() >= self._again_at
        if self._watch.changed() or (again and isinstance(self._path, RemotePath)):
            return self._read()
        if self._child is not None and self._clock() >= self._hurries_at:
            self._begin_check(give_way=False)
        return None

    def loaded(self, error: str = "") -> None:
        """Notes that the sets from `look` are served or, after an `error`, the previous ones."""
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
            self._watch.applied()  # the file is not read again until it changes
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
        arguments = ["--give-way"] * give_way + [self._key, str(self._index), *self._new]
        try:
            self._child = Child("dlm.server.opening", *arguments)
        except OSError as exc:  # no process or no descriptor is left
            self._settle(f"no process can read the new shard sets: {exc}")

    def _stop_check(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _settle(self, error: str) -> None:
        is_new = error != self.rejected
        self.rejected, self.checking = error, None
        self._again_at = self._clock() + AGAIN_S
        self.turn.leave()
        if error and is_new:
            logger.error("server.sets.rejected", extra={"error": error})


# ------------------------------------------------------------------------------- files that change


class FileWatcher:
    """Tells if files have changed and settled: two checks agree and differ from what was loaded."""

    def __init__(self, paths: Sequence[AnyPath]) -> None:
        self.paths = tuple(paths)
        self._loaded = self._seen = [*map(signature_of, self.paths)]
        self.error = ""  # why the change was rejected

    def changed(self) -> bool:
        """Checks the files; True from the end of a change until it is applied."""
        before, self._seen = self._seen, [*map(signature_of, self.paths)]
        return self._seen == before != self._loaded

    def applied(self) -> None:
        self._loaded, self.error = self._seen, ""


def signature_of(path: AnyPath) -> object:
    """A value that changes with the file, or with the object in a store."""
    return path.version() if isinstance(path, RemotePath) else signature(path)


# Applies a change; returns the fields to log about it, if any.
Reload = Callable[[], Mapping[str, object] | None]


def reload_if_changed(watch: FileWatcher, reload: Reload, *, what: str) -> None:
    """Calls `reload` after a change; if that is rejected, keeps the old files and tries again.

    A reason is logged once. If a change failed for lack of descriptors, a later try applies it.
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
