"""Writes files and folders that appear complete or not at all, and leaves nothing behind.

Only this module renames, locks, or makes temporary files and folders. An unfinished file is beside
its final place, under a hidden name: `.NAME.PID-RANDOM.partial`. Its writer holds a lock (flock),
so that a later process can recognise and remove files of a killed process. The PID is only for
people: PIDs are reused, and the same one may be in use in two containers that share a folder.

A cache is a folder of folders, each marked by the processes that use it (`claim`).

A command that is ended by SIGTERM or Ctrl-C removes what it was writing (`dlm.signals`); files that
escape the `finally` blocks are removed when the interpreter exits.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

SUFFIX = ".partial"
IN_USE = ".in-use"
_TRIES = 100
_POLL_S = 0.05
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
REFUSED = (*NO_ROOM, errno.EIO)
# Hard links fail across file systems, on a file system without links, after too many links, or for
# another user's file.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

# Files that this process started to write and neither finished nor removed: path -> process.
_unfinished: dict[Path, int] = {}


def try_lock(descriptor: int) -> bool:
    """Locks an open file; False if another process has the lock; OSError if locks do not work."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(file: Path, *, needs_locks: bool = True, mode: int = 0o600) -> int | None:
    """Locks a file, which is created if missing; returns a descriptor for `unlock`, or None if
    another process has the lock.

    Args    needs_locks  False: if the file system has no locks, continue without a lock
            mode         of a new file, before the umask; 0o666 if users share the folder
    Raises  OSError  the file cannot be opened, or the file system has no locks
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        is_ours = try_lock(handle)
    except OSError:
        if needs_locks:
            os.close(handle)
            raise
        return handle
    with contextlib.suppress(FileNotFoundError):
        # The path must still name the locked file: the lock's last owner may have removed it.
        if is_ours and os.path.samestat(os.fstat(handle), file.stat()):
            return handle
    os.close(handle)
    return None


def unlock(descriptor: int) -> None:
    """Releases the lock of `lock_file`, also for children forked while it was held."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def locked(
    file: Path,
    refusal: Exception | None = None,
    *,
    tell: Callable[[], None] = lambda: None,
    remove: bool = False,
    needs_locks: bool = True,
) -> Iterator[None]:
    """Holds the lock on a file inside the block. If another process has it, this raises `refusal`
    or, if that is None, calls `tell` once and waits; `remove` removes the file at the end. Raises
    the errors of `lock_file`."""
    handle = lock_file(file, needs_locks=needs_locks)
    if handle is None:
        if refusal is not None:
            raise refusal
        tell()
        while (handle := lock_file(file, needs_locks=needs_locks)) is None:
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        if remove:
            file.unlink(missing_ok=True)
        unlock(handle)


def editing(path: Path) -> contextlib.AbstractContextManager[None]:
    return locked(path.with_name(f".{path.name}.edit"), remove=True, needs_locks=False)


# The locks of the cache entries that this process uses; forked children have them too.
_claims: dict[Path, int] = {}


def claim(entry: Path) -> bool:
    """Marks a folder of a cache as in use until this process ends, and as used now; nothing is
    marked if the cache cannot be written, or has no locks. Returns whether the folder exists:
    another process may have removed it."""
    with contextlib.suppress(OSError):
        if entry not in _claims:
            handle = os.open(entry / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH)
                if not os.path.samestat(os.fstat(handle), (entry / IN_USE).stat()):
                    raise FileNotFoundError(entry)
            except OSError:
                os.close(handle)
                raise
            _claims[entry] = handle
        os.utime(entry)
    return entry.is_dir()


def release(entry: Path) -> None:
    """Ends a `claim`."""
    if (handle := _claims.pop(entry, None)) is not None:
        unlock(handle)


def evict(cache: Path, names: str, *, most: float = math.inf, most_bytes: float = math.inf) -> None:
    """Removes a cache's unclaimed folders, the least recently claimed first, until it is within its
    limits. Only folders whose names match the regular expression `names` are removed."""
    found = []
    for entry in cache.iterdir():
        if re.fullmatch(names, entry.name):
            with contextlib.suppress(OSError):  # another process is removing it
                size = sum(file.stat().st_size for file in entry.iterdir())
                found.append((entry.stat().st_mtime_ns, size, entry))
    left, left_bytes = len(found), sum(size for _, size, _ in found)
    for _, size, entry in sorted(found):
        if left <= most and left_bytes <= most_bytes:
            return
        if remove_unlocked(entry, entry / IN_USE):
            left, left_bytes = left - 1, left_bytes - size


def remove_unlocked(folder: Path, lock: Path) -> bool:
    """Removes a folder unless a process has its lock; returns whether it is gone."""
    with contextlib.suppress(OSError):
        if (handle := lock_file(lock)) is not None:
            try:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                unlock(handle)
            return not folder.exists()
    return False


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(path: Path, names: str | None = None) -> None:
    """Removes the unfinished files and folders that killed processes left beside `path`: those for
    `path`, or for all names that match `names`. Skips those in use, or that cannot be removed."""
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
    way = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR  # NFS locks need write access
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
    """Removes the unfinished files of this process, which is about to end."""
    for path, process in list(_unfinished.items()):
        if process == os.getpid():  # a forked child has its parent's entries
            _remove(path)


def _beside(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Creates a locked file or folder beside `path`; returns it and its descriptor. On
    FileExistsError, `make` is called with another name."""
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
            # Before this lock, another process may have judged the file abandoned.
            locked = try_lock(descriptor)
        except OSError:
            locked = True  # without locks, no process judges a file abandoned
        if locked and beside.exists():
            return beside, descriptor
        os.close(descriptor)
        _forget(beside)
    raise FileExistsError(
        f"found no free name beside {path}, since other processes took every name that was tried; "
        "run the command again"
    )


def _forget(beside: Path) -> None:
    _remove(beside)
    _unfinished.pop(beside, None)


class Replacement:
    """A file that is written beside its final place and then moved there.

        r = Replacement(path)
        try: r.file.write(...); r.commit()
        finally: r.discard()

    Args        path        final place; a pipe or a device there is written to directly
                mode        of the file, less the umask
                keep_owner  whether the new file gets the owner, group and mode of an existing one
    Raises      OSError  no file can be created beside the path
    Guarantees  `commit` puts everything written to `file` in place, on disk, in one step; until
                then, and after `discard`, the path is unchanged. Files that killed processes left
                beside it are removed
    """

    def __init__(
        self, path: Path, *, mode: int = 0o666, keep_owner: bool = False, buffering: int = -1
    ) -> None:
        self.path = path
        self._beside: Path | None = None
        self._done = False
        keep_owner = keep_owner and path.exists()
        if path.exists() and not path.is_file():
            self.file: IO[bytes] = path.open("wb", buffering=buffering)
            return

        def make(beside: Path) -> int:
            way = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(beside, way, 0o600 if keep_owner else mode)

        self._beside, descriptor = _beside(path, make)
        try:
            if keep_owner:
                _take_owner(descriptor, path)
            # Opened by its name, so that `file.name` is right.
            self.file = open(  # noqa: SIM115 - an opener; closed by commit and discard
                self._beside, "wb", buffering, opener=lambda *_: descriptor
            )
        except BaseException:
            os.close(descriptor)
            _forget(self._beside)
            raise

    @property
    def is_direct(self) -> bool:
        """Whether the target is a pipe or a device, which is written in place."""
        return self._beside is None

    def sync(self) -> None:
        """Waits until the content is on disk; raises the error if the disk is full."""
        with naming(self.path):
            self.file.flush()
            if not self.is_direct:
                os.fsync(self.file.fileno())

    def commit(self, instead_of: bytes | None = None) -> bool:
        """Puts the file in place, or returns False if the existing content is not `instead_of`."""
        self.sync()
        if instead_of is not None and self.path.read_bytes() != instead_of:
            return False
        if self._beside is not None:
            self._beside.replace(self.path)
            _unfinished.pop(self._beside, None)
        self._done = True
        self.file.close()
        if self._beside is not None:
            sync_folder(self.path.parent)
        return True

    def discard(self) -> None:
        if self._done:
            return
        self._done = True
        try:
            if self._beside is not None:
                _forget(self._beside)
        finally:
            with contextlib.suppress(
                OSError
            ):  # closing flushes the buffer: a disk may be full, or a pipe may have no reader
                self.file.close()


def _take_owner(descriptor: int, path: Path) -> None:
    found = path.stat()
    os.fchown(descriptor, found.st_uid, found.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode))


@contextlib.contextmanager
def replacing(
    path: Path, *, mode: int = 0o666, keep_owner: bool = False, buffering: int = -1
) -> Iterator[IO[bytes]]:
    """Yields a file to write, like `Replacement`; it replaces `path` unless the block raises. The
    file's `name` is its temporary path."""
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


def write_whole(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o666,
    keep_owner: bool = False,
    instead_of: bytes | None = None,
) -> bool:
    """Writes the file at `path` with this content, on disk, completely or not at all.

    Returns  False, and nothing is written, if the content is no longer `instead_of`
    """
    replacement = Replacement(path, mode=mode, keep_owner=keep_owner)
    try:
        with naming(path):
            replacement.file.write(content)
        return replacement.commit(instead_of)
    finally:
        replacement.discard()


def erase(path: Path) -> None:
    """Overwrites a file in place, waits until that is on disk, and removes it.

    If the file system writes in place, it holds none of the bytes afterwards; journals, snapshots,
    copy-on-write, the spare blocks of an SSD and backups may keep them.
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
    """Renames a file or folder in one step, and waits until that is on disk. Raises OSError, and
    changes nothing, if a folder's target is a file or a folder that is not empty."""
    source.replace(destination)
    sync_folder(destination.absolute().parent)


def link_or_copy(source: Path, destination: Path) -> bool:
    """Makes `source` also available at `destination`: as a hard link if the file systems allow it,
    otherwise as a copy on disk; returns whether it is a link."""
    source = source.resolve()
    try:
        os.link(source, destination)
    except OSError as exc:
        if exc.errno not in NO_LINK:
            raise
        with naming(destination), source.open("rb") as read, destination.open("xb") as written:
            shutil.copyfileobj(read, written, 1 << 22)
            written.flush()
            os.fsync(written.fileno())
        return False
    return True


def temporary_folder() -> Path:
    return Path(tempfile.gettempdir())


def scratch_file(folder: Path) -> int:
    """The descriptor of a new file without a name, which is removed when the descriptor closes."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def scratch_folder(parent: Path | None, name: str) -> Iterator[Path]:
    """A folder that exists until the end of the block; only its owner has access. Folders of
    the same name that killed processes left are removed."""
    place = temporary_folder() if parent is None else parent

    def make(beside: Path) -> int:
        beside.mkdir(0o700)
        try:
            return os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileExistsError from None  # removed as abandoned: try another name

    beside, descriptor = _beside(place / name, make)
    try:
        yield beside
    finally:
        _forget(beside)
        os.close(descriptor)
