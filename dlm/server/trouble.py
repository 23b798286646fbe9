"""Why a server is not ready although its workers answer; for probes, metrics and the log.

Either a mapped file is damaged, and every worker that reads the missing pages dies; or the process
has no file descriptors left, so that it accepts no new connection and tells nobody.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from dlm.files import NO_DESCRIPTOR
from dlm.logs import EventLog

logger = EventLog(__name__)

REMIND_S = 60.0  # lasting trouble is logged again after this long
CALM_LOOKS = 5  # looks in a row that must find room before the trouble is over


class Cause(Enum):
    """Why a server is not ready; values are labels."""

    DAMAGED_FILE = "damaged_file"
    OPEN_FILES = "open_files"


class OpenFiles:
    """How many files and connections this process has open, and whether it may open another.

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
        """Files and connections open now; takes a microsecond for each."""
        try:
            return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # less the folder itself
        except OSError:
            return self.limit  # not even the folder can be opened

    def check(self) -> str:
        """One look; why no file can be opened, or "" if one can."""
        try:
            self._room()
        except OSError as exc:
            # Another error (no memory, no such device) says nothing about how many are open.
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
                "unit, ulimit -n) or find who opens so many connections"
            )
        else:
            self.trouble = (
                "this machine has reached its limit of open files and connections (fs.file-max); "
                "new clients wait for one to close. Raise it with sysctl or find who opens so many"
            )
        now = self._clock()
        if begins or now - self._logged_at >= REMIND_S:
            self._logged_at = now
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            facts = {"limit": self.limit, "hard_limit": hard, "error": self.trouble}
            logger.error("server.open_files.exhausted", extra=facts)


def _open_one() -> None:
    os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


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
