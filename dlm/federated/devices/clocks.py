"""When a device took part in which run (GDP 2.2): its own record, whatever a server says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dlm.errors import FormatError, PrivacyError
from dlm.files import write_whole


@dataclass(frozen=True, slots=True)
class Clock:
    """When a device took part in a run: the last round (-1: never), and how often."""

    last: int = -1
    count: int = 0

    def after(self, round: int, gap: int, most: int) -> Clock:  # noqa: A002
        """The clock once it has taken part; PrivacyError if it may not."""
        if round <= self.last:
            raise PrivacyError(f"round {round} is asked for after round {self.last}")
        if self.last >= 0 and round - self.last < gap:
            raise PrivacyError(
                f"round {round} is asked for {round - self.last} rounds after the last one of this "
                f"device; expected {gap} or more"
            )
        if self.count >= most:
            raise PrivacyError(f"this device took part {self.count} times; expected at most {most}")
        return Clock(round, self.count + 1)


class Clocks:
    """The clocks of all runs, in a file that is written before an input leaves the device. One
    process at a time has it: the caller holds a lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found = json.loads(path.read_text("utf-8")) if path.exists() else {}
            self._of = {run: Clock(int(last), int(count)) for run, (last, count) in found.items()}
        except (ValueError, TypeError, AttributeError) as exc:
            raise FormatError(
                f"{path} does not list when this device took part: {exc}. Without it, the device "
                "could take part too often: restore it"
            ) from exc

    def after(self, run: str, round: int, gap: int, most: int, in_all: int) -> Clock:  # noqa: A002
        """The clock of a run once the device has taken part; PrivacyError if it may not, there or,
        since a server can call a run by a new name, `in_all`."""
        total = sum(one.count for one in self._of.values())
        if total >= in_all:
            raise PrivacyError(
                f"this device took part {total} times in all runs; its owner allows {in_all}"
            )
        return self._of.get(run, Clock()).after(round, gap, most)

    def set(self, run: str, clock: Clock) -> None:
        after = {**self._of, run: clock}
        content = {name: [one.last, one.count] for name, one in after.items()}
        write_whole(self._path, json.dumps(content, indent=1).encode(), mode=0o600)
        self._of = after
