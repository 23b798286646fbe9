"""Files and folders that appear whole or not at all, and that leave nothing behind.

All renames and all temporary files and folders are made here. A file being written is beside its
final place, under a hidden name with the id of its process: `.NAME.PID-RANDOM.partial`. The process
holds a lock (flock) on it, so that a later one can distinguish it from what a killed process left,
and removes the latter. The id is only for people: ids are reused, and containers that share a
folder do not share ids.

A command that is ended by SIGTERM or Ctrl-C removes what it was writing (`dlm.signals` turns the
signal into an exception); whatever escapes the `finally` blocks is removed when the interpreter
exits.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

SUFFIX = ".partial"
_TRIES = 100
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
REFUSED = (*NO_ROOM, errno.EIO)

# What this process has started and neither put in place nor removed: path -> process.
_unfinished: dict[Path, int] = {}


def try_lock(descriptor: int) -> bool:
    """Locks an open file; False if another process has the lock.

    Raises  OSError  the file system has no locks
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(file: Path) -> int | None:
    """A descriptor that holds the lock on a file, which is created if missing; `os.close` releases
    it. None if another process has the lock.

    Raises  OSError  the file cannot be opened, or the file system has no locks
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(FileNotFoundError):
        # The file must still exist, and not be one that its last owner has just removed.
        if try_lock(handle) and os.path.samestat(os.fstat(handle), file.stat()):
            return handle
    os.close(handle)
    return None


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(path: Path, names: str | None = None) -> None:
    """Removes what killed processes left of the file or folder that was to be at `path`.

    It leaves what a process is still writing, and what this one may not touch.

    Args
        names  a regular expression, for all such names in the folder of `path`
    """
    names = re.escape(path.name) if names is None else names
    named = re.compile(rf"\.{names}\.\d+-[0-9a-f]+{re.escape(SUFFIX)}")
    try:
        found = [beside for beside in path.parent.iterdir() if named.fullmatch(beside.name)]
    except OSError:
        return  # the folder does not exist, or cannot be read
    for beside in found:
        with contextlib.suppress(OSError):
            _remove_if_left(beside)


def _remove_if_left(left: Path) -> None:
    is_folder = stat.S_ISDIR(left.lstat().st_mode)
    way = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR  # NFS locks what may be written
    descriptor = os.open(left, way | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if try_lock(descriptor):
            _remove(left)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)


@atexit.register
def remove_unfinished() -> None:
    """Removes what this process has started to write; for a process that is about to end."""
    for path, process in list(_unfinished.items()):
        if process == os.getpid():  # a forked child has its parent's entries
            _remove(path)


def _beside(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Creates a locked file or folder beside `path`; returns it and its descriptor.

    Args
        make  creates it under a name and returns a descriptor; FileExistsError: another name
    """
    remove_leftovers(path)
    for _ in range(_TRIES):
        beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")
        _unfinished[beside] = os.getpid()
        try:
            descriptor = make(beside)
        except FileExistsError:
            del _unfinished[beside]
            continue
        except BaseException:
            _forget(beside)
            raise
        try:
            # Another process may have taken it for left before it was locked.
            locked = try_lock(descriptor)
        except OSError:
            locked = True  # no locks here: nobody can take it for left
        if locked and beside.exists():
            return beside, descriptor
        os.close(descriptor)
        _forget(beside)
    raise FileExistsError(f"no free name beside {path} after {_TRIES} tries")


def _forget(beside: Path) -> None:
    """Removes what was started."""
    _remove(beside)
    _unfinished.pop(beside, None)


class Replacement:
    """A file that is written beside its final place and then moved there.

    Args
        path        final place; a pipe or a device there is written to directly
        mode        of the file, less the umask
        keep_owner  if a file exists there, the new one gets its owner, group and mode
        buffering   as that of `open`
    Raises
        OSError     nothing can be written beside it
    Guarantees
        `commit` puts all that was written to `file` in place, on disk, in one step; until then and
        after `discard` the place is as it was. What killed processes left beside it is removed
    Usage
        r = Replacement(path)
        try: r.file.write(...); r.commit()
        finally: r.discard()
    """

    def __init__(
        self, path: Path, *, mode: int = 0o666, keep_owner: bool = False, buffering: int = -1
    ) -> None:
        self.path = path
        self._beside: Path | None = None
        self._done = False
        if path.exists() and not path.is_file():
            self.file: IO[bytes] = path.open("wb", buffering=buffering)
            return

        def make(beside: Path) -> int:
            way = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(beside, way, 0o600 if keep_owner else mode)

        self._beside, descriptor = _beside(path, make)
        try:
            if keep_owner:
                _take_owner(descriptor, path, mode)
            # By its name, which is then what `file.name` says.
            self.file = open(  # noqa: SIM115 - an opener; closed by commit and discard
                self._beside, "wb", buffering, opener=lambda *_: descriptor
            )
        except BaseException:
            os.close(descriptor)
            _forget(self._beside)
            raise

    @property
    def is_direct(self) -> bool:
        """Whether a pipe or a device is written to, so that nothing is put in a place."""
        return self._beside is None

    def sync(self) -> None:
        """Waits until what was written is on disk: what a full disk refuses is refused here."""
        with naming(self.path):
            self.file.flush()
            if not self.is_direct:
                os.fsync(self.file.fileno())

    def commit(self) -> None:
        """Puts the file in its place and closes it."""
        self.sync()
        if self._beside is not None:
            self._beside.replace(self.path)
            _unfinished.pop(self._beside, None)
        self._done = True
        self.file.close()
        if self._beside is not None:
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes what was written, unless it was committed."""
        if self._done:
            return
        self._done = True
        try:
            if self._beside is not None:
                _forget(self._beside)
        finally:
            with contextlib.suppress(
                OSError
            ):  # what is left in its buffer has no room, or no reader
                self.file.close()


def _take_owner(descriptor: int, path: Path, mode: int) -> None:
    if path.exists():
        found = path.stat()
        os.fchown(descriptor, found.st_uid, found.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
    else:
        os.fchmod(descriptor, mode)


@contextlib.contextmanager
def replacing(
    path: Path, *, mode: int = 0o666, keep_owner: bool = False, buffering: int = -1
) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` where nothing is raised.

    `name` of the file is where it stands until then, for what writes to paths. Arguments, errors
    and guarantees are those of `Replacement`.
    """
    replacement = Replacement(path, mode=mode, keep_owner=keep_owner, buffering=buffering)
    try:
        with naming(path):
            yield replacement.file
        replacement.commit()
    finally:
        replacement.discard()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the name `path` to a "disk full" error, since the system names no file."""
    try:
        yield
    except OSError as exc:
        if exc.errno in REFUSED and exc.filename is None:
            exc.filename = str(path)
        raise


def write_whole(path: Path, content: bytes, *, mode: int = 0o666, keep_owner: bool = False) -> None:
    """The file at `path` with this content, on disk; or what was there before, nothing between."""
    with replacing(path, mode=mode, keep_owner=keep_owner) as file:
        file.write(content)


def erase(path: Path) -> None:
    """Overwrites a file in place, waits until that is on disk, and removes it.

    Guarantees
        a file system that writes in place holds none of its bytes afterwards; journals, snapshots,
        copy-on-write, the spare blocks of an SSD and backups may keep them
    """
    with path.open("r+b") as file:
        left = file.seek(0, os.SEEK_END)
        file.seek(0)
        while left:
            left -= file.write(bytes(min(left, 1 << 20)))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def move(source: Path, destination: Path) -> None:
    """Renames a file or folder in one step, and waits until that is on disk.

    Raises
        OSError  the target of a folder is a file, or a folder that is not empty: both stay
    """
    source.replace(destination)
    sync_folder(destination.absolute().parent)


def temporary_folder() -> Path:
    """The system's folder for temporary files."""
    return Path(tempfile.gettempdir())


def scratch_file(folder: Path) -> int:
    """The descriptor of a new file without a name, removed when it is closed or its process ends.

    Raises  OSError  nothing can be written there
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def scratch_folder(parent: Path | None, name: str) -> Iterator[Path]:
    """A folder that exists until the end of the block; only its owner has access.

    Args
        parent  its parent; None takes the system's folder for temporary files
        name    its purpose: what killed processes left under the same name is removed
    """
    place = temporary_folder() if parent is None else parent

    def make(beside: Path) -> int:
        beside.mkdir(0o700)
        try:
            return os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileExistsError from None  # taken for left already: another name

    beside, descriptor = _beside(place / name, make)
    try:
        yield beside
    finally:
        _forget(beside)
        os.close(descriptor)
