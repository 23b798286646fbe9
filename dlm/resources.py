"""A process's limits and priority, free memory and disk space, and sizes as people write them."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Self, TypeVar

from dlm.errors import ConfigError

T = TypeVar("T")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MIN_FILES = 64  # a client or one-process server opens 30 files; gRPC aborts at the limit
MORE_FILES = "Allow more: ulimit -n 1024 in a shell, LimitNOFILE= in a systemd unit"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\Z", re.IGNORECASE)


class Closeable(ABC):
    """An object that is closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Releases the object's resources; further calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def in_order(coming: Iterable[Future[T]], most: int) -> Iterator[T]:
    """Yields the results of futures in order; at most `most` futures wait at a time."""
    waiting: deque[Future[T]] = deque()
    for one in coming:
        waiting.append(one)
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def cache_folder() -> Path:
    """The cache of this machine's user: $DLM_CACHE_DIR, or dlm below the user's cache folder."""
    if explicit := os.environ.get("DLM_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dlm"


def parse_size(text: str) -> int:
    """Parses a size as people write it: 800M, 1.5G, 2GiB; units are powers of 1,024 bytes."""
    match = _SIZE.match(text.strip())
    if match is None:
        percent = "; percentages are not supported" if "%" in text else ""
        raise ConfigError(f"{text!r} is not a size{percent}; write, for example, 800M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_open_files(*, may_raise: bool = False) -> None:
    """Raises `ConfigError` if this process may open too few files and connections.

    Args  may_raise  first raise a soft limit that is too low, as far as needed; leave it False in
                     a program that uses dlm as a library
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if may_raise and limit < MIN_FILES and (hard >= MIN_FILES or hard == resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_FILES, hard))
    elif limit < MIN_FILES:
        raise ConfigError(
            f"this process can open only {limit} files and connections; dlm needs at least "
            f"{MIN_FILES}. {MORE_FILES}"
        )


def give_way() -> None:
    """Gives every other process of the machine precedence over this thread and its children.

    Uses Linux's idle policy: another thread that wakes takes this one's core at once. With only
    `nice 19`, the other thread often waits for the end of a time slice, and servers' p99 doubles.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid this; servers are then slower
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def available_bytes() -> int:
    """Returns the bytes of memory that the machine and control group still allow this process."""
    found = [
        int(line.split()[1]) << 10
        for line in _read("/proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            places = [("/sys/fs/cgroup", "memory.max", "memory.current")]
        elif "memory" in controllers.split(","):
            places = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")]
        else:
            continue
        for root, limit, usage in places:
            path = Path(root + group)
            while path.is_relative_to(root):
                most, used = _read(path / limit).strip(), _read(path / usage).strip()
                if most.isdigit() and used.isdigit():
                    # Pages of files count as used, although they are released on demand.
                    cached = 0
                    for row in _read(path / "memory.stat").splitlines():
                        name, _, number = row.partition(" ")
                        if name in ("total_inactive_file", "inactive_file"):
                            cached = max(cached, int(number))
                    found.append(max(int(most) - int(used) + cached, 0))
                path = path.parent
    return min(found, default=1 << 30)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def check_disk(
    folder: Path, needed: int, what: str, *, advice: str = "another place with --output or --tmp"
) -> None:
    """Raises `ConfigError`, with `advice`, unless `needed` bytes are free in `folder`."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{what} needs about {needed:,} bytes in {os.fspath(folder)}, but only {free:,} are "
            f"free there. Free some space there, or choose {advice}"
        )
