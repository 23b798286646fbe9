"""Reports on a server process (its resources, its readiness, its event loop), and releases memory
that the process no longer needs."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import xxhash

from dlm.files import NO_DESCRIPTOR, write_whole
from dlm.logs import EventLog

logger = EventLog(__name__)

T = TypeVar("T")

# Approximate maximum age of the memory figure in a heartbeat, in seconds.
MEMORY_AGE_S = 1.0
# The system walks the page tables to count memory; counting may take at most 1/MEMORY_SHARE of the
# time.
MEMORY_SHARE = 100

REMIND_S = 60.0  # lasting trouble is logged again after this long
CALM_LOOKS = 5  # consecutive checks that must find room before the trouble is over


GROWTH = 64 << 20  # growth in bytes since the start that makes a trim worthwhile
BEAT_S = 1.0  # seconds between a process's checks of itself
HUNG_S = 10.0  # seconds without a check after which a process counts as hung, not as busy
TRIM_S = 20.0  # seconds between two trims; one takes about 10 ms per 100 MB, in its own thread


def private_memory(status: Path = Path("/proc/self")) -> int:
    """Bytes that would be freed if this process ended: pages that it wrote and does not share.

    Pages of mapped files do not count, since they belong to the page cache.
    """
    try:
        lines = (status / "smaps_rollup").read_bytes().splitlines()
    except OSError:  # the kernel has no such file
        resident, shared = (status / "statm").read_bytes().split()[1:3]
        return (int(resident) - int(shared)) * 4096
    sizes = {name: int(rest[0]) for name, *rest in map(bytes.split, lines) if len(rest) == 2}
    return 1024 * (sizes.get(b"Private_Dirty:", 0) + sizes.get(b"SwapPss:", 0))


def keep_objects() -> None:
    """Hides current objects from the garbage collector, which would need 0.1 s to traverse them."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a thread that delays neither signals nor the process's end."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # so that it cannot be cancelled before it begins

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as exc:  # noqa: BLE001 - raised to whoever takes the result
            result.set_exception(exc)

    threading.Thread(target=run, name="dlm-load", daemon=True).start()
    return result


class MemoryGauge:
    """Reports `private_memory` without waiting for it.

    Args        read   counts the bytes; may take milliseconds per GiB mapped
    Guarantees  only the first call of `bytes` reads on the caller's thread; later calls return
                the last known number and, if it is old, start a thread that counts again
    """

    def __init__(
        self,
        read: Callable[[], int] = private_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._bytes: int | None = None
        self._due = 0.0
        self._reading = threading.Lock()

    def bytes(self) -> int:
        if self._bytes is None:
            self._measure()
        elif self._clock() >= self._due and self._reading.acquire(blocking=False):
            try:
                threading.Thread(target=self._refresh, name="dlm-memory", daemon=True).start()
            except RuntimeError:  # no thread could be started: the next call tries again
                self._reading.release()
        return self._bytes or 0

    def _refresh(self) -> None:
        try:
            self._measure()
        finally:
            self._reading.release()

    def _measure(self) -> None:
        begun = self._clock()
        try:
            self._bytes = self._read()
        except OSError:  # no file can be opened now: the last number stays
            self._bytes = self._bytes or 0
        now = self._clock()
        self._due = now + max(MEMORY_AGE_S, MEMORY_SHARE * (now - begun))


class OpenFiles:
    """The number of files and connections that this process has open, and whether it may open more.

    Args  room  raises OSError if nothing can be opened
    """

    def __init__(
        self, room: Callable[[], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._room, self._clock = room or _open_one, clock
        self._calm_looks = CALM_LOOKS
        self._logged_at = 0.0
        self.trouble = ""

    @property
    def limit(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def count(self) -> int:
        """The files and connections open now; counting takes a microsecond for each."""
        try:
            return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # less the folder itself
        except OSError:
            return self.limit  # not even the folder can be opened

    def check(self) -> str:
        """Checks once; returns why no file can be opened, or "" if one can."""
        try:
            self._room()
        except OSError as exc:
            # Other errors (no memory, no such device) say nothing about the number of open files.
            if exc.errno in NO_DESCRIPTOR:
                self._none_left(exc.errno)
        else:
            self._calm_looks += 1
            if self.trouble and self._calm_looks >= CALM_LOOKS:
                self.trouble = ""
                logger.info("server.open_files.recovered", extra={"open": self.count()})
        return self.trouble

    def _none_left(self, number: int) -> None:
        self._calm_looks = 0
        begins = not self.trouble
        if number == errno.EMFILE:
            self.trouble = (
                f"{self.limit:,} files and connections are open, which is this process's limit; "
                "new clients wait for one to close. Raise the limit (LimitNOFILE= in a systemd "
                "unit, ulimit -n) or find out what opens so many"
            )
        else:
            self.trouble = (
                "this machine has reached its limit of open files and connections (fs.file-max); "
                "new clients wait for one to close. Raise the limit with sysctl, or find "
                "out what opens so many"
            )
        now = self._clock()
        if begins or now - self._logged_at >= REMIND_S:
            self._logged_at = now
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            facts = {"limit": self.limit, "hard_limit": hard, "error": self.trouble}
            logger.error("server.open_files.exhausted", extra=facts)


def _open_one() -> None:
    os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


class Watchdog:
    """Tells systemd that the event loop runs, if systemd asks (`Type=notify`, `WatchdogSec=`).

    Args  ends  whether it also ends this process, with a traceback, once the loop no longer runs
    """

    def __init__(self, *, ends: bool = False) -> None:
        self._ends = ends
        self._manager = os.environ.pop("NOTIFY_SOCKET", "") if ends else ""  # hidden from children

    def beat(self) -> None:
        if self._ends:
            with suppress(RuntimeError):  # no thread could be started: the next beat tries again
                faulthandler.dump_traceback_later(HUNG_S, exit=True)
        self._notify(b"WATCHDOG=1")

    def ready(self) -> None:
        self._notify(b"READY=1")

    def close(self) -> None:
        if self._ends:
            faulthandler.cancel_dump_traceback_later()

    def _notify(self, said: bytes) -> None:
        if self._manager:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.sendto(said, self._manager.replace("@", "\0", 1))


class PortMates:
    """The processes that share a port. While a process serves, it binds a name, which says what it
    serves and which vanishes with it; all processes can read the names.

    Args  address  "host:port";  file  the system's list of names
    """

    def __init__(
        self,
        address: str,
        file: Path = Path("/proc/net/unix"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = f"dlm.server.port/{xxhash.xxh3_64_hexdigest(address.encode())}/"
        self._file, self._clock = file, clock
        self._socket: socket.socket | None = None
        self._mine = ""
        self._found, self._due = (1, 1), 0.0

    def show(self, sets: Sequence[bytes]) -> None:
        """Announces that this process serves these shard sets from now on."""
        self.close()
        self._mine, self._due = f"/{xxhash.xxh3_64_hexdigest(b''.join(sets))}", 0.0
        self.count()

    def count(self) -> tuple[int, int]:
        """Counts the processes, and those that serve the same sets; recounts once a second."""
        now = self._clock()
        if self._mine and now >= self._due:
            self._due = now + MEMORY_AGE_S
            with suppress(OSError):  # no descriptor is left: the last numbers stay
                self._bind()
                words = self._file.read_text("ascii", "replace").split()
                names = [word for word in words if self._place in word]
                self._found = len(names), sum(name.endswith(self._mine) for name in names)
        return self._found

    def _bind(self) -> None:
        if self._socket is None:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            found.bind(f"\0{self._place}{os.getpid()}{self._mine}")
            self._socket = found

    def close(self) -> None:
        self._mine = ""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(slots=True)
class Process:
    """What a server knows about its process.

    instance  drawn at random: a new number means a new process, whose counters began at 0
    mates     the processes that share its port, if more than one may
    rejected  whether the list of shard sets was rejected, so that the earlier sets are served
    certificate_days  days until its certificate expires, if it has one
    """

    # Never 0: an absent field reads as 0.
    instance: int = field(default_factory=lambda: secrets.randbits(64) | 1)
    memory: MemoryGauge = field(default_factory=MemoryGauge, compare=False, repr=False)
    open_files: OpenFiles = field(default_factory=OpenFiles, compare=False, repr=False)
    mates: PortMates | None = field(default=None, compare=False, repr=False)
    watchdog: Watchdog = field(default_factory=Watchdog, compare=False, repr=False)
    rejected: bool = False
    certificate_days: Callable[[], float] | None = None


def find_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`, which runs without the GIL; None in another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class Heap:
    """Releases memory that glibc keeps free after floods of HTTP/2 frames (`malloc_trim`), if that
    is due; `size` is the process's private memory at the start of serving, in bytes."""

    def __init__(self, size: int) -> None:
        self._trim = find_trim()
        self._at_start = size
        self._due_s = 0.0

    def is_due(self, size: int, now_s: float) -> bool:
        grown = size >= self._at_start + GROWTH
        return self._trim is not None and grown and now_s >= self._due_s

    def trim(self, now_s: float) -> None:
        assert self._trim is not None
        self._due_s = now_s + TRIM_S
        self._trim(0)


# The facts about a ready process that its parent needs; the ready file has them as its fields.
Ready: TypeAlias = Mapping[str, Any]
OnReady = Callable[[Ready], object]


class Notice:
    """`publish` writes the ready file and calls `on_ready`; `withdraw` removes the file."""

    def __init__(self, on_ready: OnReady | None = None, file: Path | None = None) -> None:
        self._on_ready = on_ready
        self._file = file
        self.withdraw()

    def publish(self, ready: Ready) -> None:
        if self._file is not None:
            write_whole(self._file, json.dumps(ready).encode() + b"\n")
        if self._on_ready is not None:
            self._on_ready(ready)

    def withdraw(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
