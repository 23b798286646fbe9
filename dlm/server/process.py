"""What a server process reports about itself: which worker it is, and what it uses."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dlm.server.sets import ToldSets
from dlm.server.trouble import Cause, OpenFiles, SharedText

# Age of the memory figure in a heartbeat, at most about this many seconds.
MEMORY_AGE_S = 1.0
# The system walks the page tables to count; at most one part in this many of the time goes to that.
MEMORY_SHARE = 100


def private_memory(status: Path = Path("/proc/self")) -> int:
    """Bytes that would be freed if this process ended: those it wrote and shares with no other.

    Not pages of mapped files, which belong to the page cache, nor those shared with its parent.
    """
    try:
        lines = (status / "smaps_rollup").read_bytes().splitlines()
    except OSError:  # a kernel without it: shared pages of the parent count in
        resident, shared = (status / "statm").read_bytes().split()[1:3]
        return (int(resident) - int(shared)) * 4096
    sizes = {name: int(rest[0]) for name, *rest in map(bytes.split, lines) if len(rest) == 2}
    return 1024 * (sizes.get(b"Private_Dirty:", 0) + sizes.get(b"SwapPss:", 0))


class MemoryGauge:
    """`private_memory`, without waiting for it.

    Args        read   counts the bytes; may take milliseconds per GiB mapped
    Guarantees  only the first `bytes` reads on the caller's thread; later ones return the last
                known number and, if it is old, start a thread that finds the next
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
            threading.Thread(target=self._refresh, name="dlm-memory", daemon=True).start()
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


@dataclass(frozen=True, slots=True)
class Process:
    """One of the processes that share a port.

    restarts  earlier processes of this worker
    instance  drawn at random: a new number means a new process, whose counters began at 0
    metrics_socket  where it shows its metrics, if its supervisor joins those of all workers
    damage    a fault that its supervisor found in a file that all workers have mapped
    doubts    another worker could not read a page of a mapped file: this one reads the files and
              then maps them again
    checks    reports progress of that to its supervisor, repeatedly
    beat      reports to its supervisor that the event loop runs, every `restarts.BEAT_S` seconds
    sets      what its supervisor tells it to serve, if a file lists that
    rejected  why the last list of shard sets is not served, or ""
    """

    worker: int = 0
    workers: int = 1
    restarts: int = 0
    # Never 0, which is what an absent field reads as.
    instance: int = field(default_factory=lambda: secrets.randbits(64) | 1)
    memory: MemoryGauge = field(default_factory=MemoryGauge, compare=False, repr=False)
    open_files: OpenFiles = field(default_factory=OpenFiles, compare=False, repr=False)
    damage: SharedText = field(default_factory=SharedText, compare=False, repr=False)
    metrics_socket: socket.socket | None = field(default=None, compare=False, repr=False)
    beat: Callable[[], object] | None = field(default=None, compare=False, repr=False)
    sets: ToldSets | None = field(default=None, compare=False, repr=False)
    rejected: SharedText = field(default_factory=SharedText, compare=False, repr=False)
    doubts: bool = False
    checks: Callable[[], object] | None = field(default=None, compare=False, repr=False)

    @property
    def shares_port(self) -> bool:
        """Whether a supervisor has reserved the port."""
        return self.beat is not None

    def trouble(self) -> dict[Cause, str]:
        """Why it is not ready although it answers, by cause; "" for a cause that is absent."""
        return {
            Cause.DAMAGED_FILE: self.damage.read(),
            Cause.OPEN_FILES: self.open_files.trouble,
        }

    @staticmethod
    def cpu_ms() -> int:
        return time.process_time_ns() // 1_000_000
