"""Files that may change under a server; and the one that lists its shard sets, followed while it
serves.

The supervisor reads the list when it changes. When it is this server's turn on its machine, a child
process that gives way to all others checks the files of new sets. Then the workers load them, one
after another, beside what they serve; no connection ends. A list that cannot be served changes
nothing. `step` decides; it is pure.
"""

from __future__ import annotations

import asyncio
import errno
import json
import mmap
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
KINDS = ("low_orders", "vocabulary")  # of the files beside the shard's
# Of the longest list: paths of 4,096 bytes, each of them six in JSON. Only what is used is memory.
TOLD_BYTES = MAX_SHARD_SETS * (6 * 4096 + 100)
LONGEST_ERROR = 300  # characters, each of up to 12 bytes in JSON: a pipe takes 4,096, or nothing

TURN_S = 60.0  # that a server waits for the others; then it loads all the same
POLL_S = 0.25  # a change is applied at the second look: within half a second


@dataclass(frozen=True, slots=True)
class Listed:
    """A shard set of the list: its folder, and its id as hex digits."""

    folder: str
    shard_set: str


Sets: TypeAlias = tuple[Listed, ...]


# ------------------------------------------------------------------------------- the decision


@dataclass(frozen=True, slots=True)
class ListChanged:
    """The file lists these sets now."""

    sets: Sets


@dataclass(frozen=True, slots=True)
class SetsChecked:
    """The files of the new sets were read; `error` says what is wrong with one."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker serves list `number`; or cannot, and `error` says why."""

    worker: int
    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of a worker ended."""

    worker: int


Event: TypeAlias = ListChanged | SetsChecked | Loaded | Ended


@dataclass(frozen=True, slots=True)
class CheckSets:
    """Read the files of these sets."""

    sets: Sets


@dataclass(frozen=True, slots=True)
class Tell:
    """Let the first `workers` workers serve list `number`."""

    sets: Sets
    number: int
    workers: int


@dataclass(frozen=True, slots=True)
class Report:
    """Log that the workers serve these sets; or, with `error`, that a list was rejected."""

    sets: Sets
    error: str = ""


Action: TypeAlias = CheckSets | Tell | Report


@dataclass(frozen=True, slots=True)
class SetsState:
    """What the workers serve, and what they are to serve.

    serving  of all workers; while others load, of the rest
    loading  the next list, or None;  told  workers that may load it: 0 while its files are checked
    number   of the last list that a worker was told
    rejected why the file's list is not served, or ""
    """

    serving: Sets
    loading: Sets | None = None
    told: int = 0
    number: int = 0
    rejected: str = ""

    def of(self, worker: int) -> tuple[int, Sets]:
        """The list that a worker serves from its start, and its number."""
        if self.loading is not None and self.told:
            if worker < self.told - 1:  # the one that is loading starts with what works
                return self.number, self.loading
            return self.number - 1, self.serving
        return self.number, self.serving


def step(state: SetsState, event: Event, workers: int) -> tuple[SetsState, tuple[Action, ...]]:
    """The next state, and what to do.

    Guarantees  one worker loads at a time; if it fails or ends, all serve the list before
    """
    if isinstance(event, ListChanged):
        if state.told:
            return state, ()  # asked again once it is over
        if event.sets == state.serving:
            return replace(state, loading=None, rejected=""), ()
        if any(one not in state.serving for one in event.sets):
            return replace(state, loading=event.sets), (CheckSets(event.sets),)
        return _tell(replace(state, loading=event.sets, number=state.number + 1), 1)
    if state.loading is None:
        return state, ()
    if isinstance(event, SetsChecked):
        if state.told:
            return state, ()
        if event.error:
            return _reject(state, event.error)
        return _tell(replace(state, number=state.number + 1), 1)
    if not state.told or event.worker != state.told - 1:
        return state, ()
    if isinstance(event, Ended):
        return _revert(state, workers, f"worker {event.worker} ended while it loaded them")
    if event.number != state.number:
        return state, ()
    if event.error:
        return _revert(state, workers, event.error)
    if state.told < workers:
        return _tell(state, state.told + 1)
    done = SetsState(state.loading, number=state.number)
    return done, (Report(state.loading),)


def _tell(state: SetsState, workers: int) -> tuple[SetsState, tuple[Action, ...]]:
    assert state.loading is not None
    return replace(state, told=workers), (Tell(state.loading, state.number, workers),)


def _reject(state: SetsState, error: str) -> tuple[SetsState, tuple[Action, ...]]:
    kept = SetsState(state.serving, number=state.number, rejected=error)
    return kept, (Report(state.serving, error),)


def _revert(state: SetsState, workers: int, error: str) -> tuple[SetsState, tuple[Action, ...]]:
    back = replace(state, number=state.number + 1)
    kept, said = _reject(back, error)
    return kept, (Tell(state.serving, back.number, workers), *said)


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
    """As `sets_of`, for `SetsState`."""
    return tuple(Listed(str(folder), one.shard_set) for folder, one in sets_of(folders, index))


def file_bytes(manifest: Manifest, index: int) -> int:
    """Bytes of the files that a server of shard `index` maps."""
    return manifest.file("shard", index).bytes + sum(manifest.file(k).bytes for k in KINDS)


def check_memory(
    found: Sequence[tuple[Path, Manifest]],
    index: int,
    copies: int,
    available: Callable[[], int] = available_bytes,
) -> None:
    """Raises `ConfigError` if the files of these sets do not fit beside what is in memory now."""
    wanted, free = copies * sum(file_bytes(one, index) for _, one in found), available()
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
        """Also in a forked child, whose copy would keep it from the others."""
        self._since = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


# ---------------------------------------------------------------------------- the supervisor


class ListedSets:
    """The list of a server with a supervisor; every method is called by the supervisor.

    Args  check  reads all files of the sets in these folders; raises DlmError or OSError
    """

    def __init__(
        self,
        config: ServerConfig,
        index: int,
        check: Callable[[Sequence[Path]], None],
        available: Callable[[], int] = available_bytes,
        turn: Turn | None = None,
    ) -> None:
        self._path = Path(config.sets)
        self._config, self._index, self._available = config, index, available
        self._check = check
        self._watch = FileWatcher([self._path])
        self.folders = [folder for folder, _ in sets_of(read_sets(self._path), index)]
        self.state = SetsState(listed(self.folders, index))
        self.told, self.rejected = SharedText(TOLD_BYTES), SharedText()
        self.turn = turn or Turn()
        self._child: Child | None = None

    def look(self) -> None:
        """Called several times per second: takes a change of the file a step further."""
        child = self._child
        if child is not None and (ended := child.poll()) is not None:
            self._child = None
            self._take(SetsChecked(ended))
        if not self.state.told and self._watch.changed():
            self._read()

    def _read(self) -> None:
        self._stop_check()
        new = []
        try:
            found = sets_of(read_sets(self._path), self._index)
            held = {one.shard_set for one in self.state.serving}
            new = [one for one in found if one[1].shard_set not in held]
            copies = self._config.workers if self._config.huge_pages else 1
            if new:
                check_memory(new, self._index, copies, self._available)
        except (DlmError, OSError) as exc:
            self._watch.applied()  # not read again until it changes
            self._carry_out(*_reject(self.state, str(exc)))
            return
        if not new or self.turn.take():
            self._watch.applied()
            self._take(ListChanged(tuple(Listed(str(f), one.shard_set) for f, one in found)))

    def holds(self, shard_set: str) -> bool:
        """Whether a worker serves it, or may."""
        every = self.state.serving + (self.state.loading or ())
        return any(one.shard_set == shard_set for one in every)

    def heard(self, worker: int, content: dict[str, object]) -> None:
        """A worker's report: the `number` of the list that it serves, or its `error`."""
        self._take(Loaded(worker, int(str(content["number"])), str(content.get("error", ""))))

    def ended(self, worker: int) -> None:
        self._take(Ended(worker))

    def close(self) -> None:
        self._stop_check()
        self.turn.leave()

    def _begin_check(self, folders: Sequence[Path]) -> None:
        try:
            self._child = Child(lambda: self._check(folders))
        except OSError as exc:  # no process or no descriptor is left
            self._take(SetsChecked(f"no process could be started to read them: {exc}"))

    def _stop_check(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _take(self, event: Event) -> None:
        self._carry_out(*step(self.state, event, self._config.workers))

    def _carry_out(self, state: SetsState, actions: Sequence[Action]) -> None:
        self.state = state
        if state.loading is None:
            self.turn.leave()
        self.rejected.write(state.rejected)
        for action in actions:
            if isinstance(action, CheckSets):
                held = state.serving
                new = [Path(one.folder) for one in action.sets if one not in held]
                logger.info("server.sets.checking", extra={"sets": len(new)})
                self._begin_check(new)
            elif isinstance(action, Tell):
                self.told.write(as_text(action))
            elif action.error:
                logger.error("server.sets.rejected", extra={"error": action.error})
            else:
                names = [one.shard_set for one in action.sets]
                logger.info("server.sets.loaded", extra={"shard_sets": names})


def as_text(told: Tell) -> str:
    """For `ToldSets`, which reads it in the workers' processes."""
    sets = [[one.folder, one.shard_set] for one in told.sets]
    return json.dumps({"number": told.number, "workers": told.workers, "sets": sets})


# -------------------------------------------------------------------------------- the worker


class ToldSets:
    """What a worker is told to serve; in the worker's process.

    Args  number  of the list that it began with
          say     reports to the supervisor; false if that reads nothing now
    """

    def __init__(
        self, told: SharedText, worker: int, number: int, say: Callable[[dict[str, object]], bool]
    ) -> None:
        self._told, self._worker, self.number, self._say = told, worker, number, say
        self._unsaid: dict[str, object] | None = None

    def due(self) -> Sets | None:
        """Another list that this worker is to serve now; each is returned once.

        Also repeats a report that could not be sent: the supervisor waits for it.
        """
        self._send()
        text = self._told.read()
        if not text:
            return None
        content = json.loads(text)
        if content["number"] == self.number or self._worker >= content["workers"]:
            return None
        self.number = content["number"]
        return tuple(Listed(folder, name) for folder, name in content["sets"])

    def report(self, error: str = "") -> None:
        self._unsaid = {"number": self.number}
        if error:
            self._unsaid["error"] = error[:LONGEST_ERROR]
        self._send()

    def _send(self) -> None:
        if self._unsaid is not None and self._say(self._unsaid):
            self._unsaid = None


class SharedText:
    """A text that this process writes and its forked children read; cut off after `size` bytes."""

    def __init__(self, size: int = 4096) -> None:
        self._memory = mmap.mmap(-1, size)

    def write(self, text: str) -> None:
        data = text.encode()[: len(self._memory) - 4]
        self._memory[:4] = bytes(4)  # a reader meanwhile finds nothing rather than half
        self._memory[4 : 4 + len(data)] = data
        self._memory[:4] = len(data).to_bytes(4, "little")

    def read(self) -> str:
        length = self._memory[:4]
        data = self._memory[4 : 4 + int.from_bytes(length, "little")]
        if self._memory[:4] != length:  # written to meanwhile
            return ""
        return data.decode(errors="replace")


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
