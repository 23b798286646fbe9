"""A device's own record of when it took part in which run (GDP 2.2), whatever a server says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.errors import FormatError, PrivacyError
from dlm.federated.devices.settings import PERIOD_DAYS, OwnerLimits
from dlm.files import write_whole

PERIOD_S = 86_400.0 * PERIOD_DAYS


@dataclass(frozen=True, slots=True)
class Clock:
    """The last round of a run in which a device took part, or -1, and the number of such rounds."""

    last: int = -1
    count: int = 0

    def after(self, round: int, gap: int, most: int) -> Clock:  # noqa: A002
        """The clock after a round in which the device takes part; PrivacyError if it may not."""
        if round <= self.last:
            raise PrivacyError(
                f"round {round} was requested after round {self.last}; each round runs once, in "
                "order"
            )
        if self.last >= 0 and round - self.last < gap:
            raise PrivacyError(
                f"round {round} was requested {round - self.last} rounds after this device's last "
                f"round; expected a difference of {gap} or more"
            )
        if self.count >= most:
            raise PrivacyError(
                f"this device already took part {self.count} times; the maximum is {most}"
            )
        return Clock(round, self.count + 1)


class Clocks:
    """The clocks of all runs, and the times of the last participations, in a file that is written
    before an input leaves the device. The caller's lock keeps other processes from the file."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        try:
            found: dict[str, Any] = {"times_s": [], "runs": {}}
            if path.exists():
                found = json.loads(path.read_text("utf-8"))
            self._times_s = list(map(float, found["times_s"]))
            runs = found["runs"].items()
            self._of = {run: Clock(int(last), int(count)) for run, (last, count) in runs}
        except (ValueError, TypeError, AttributeError, KeyError) as exc:
            raise FormatError(
                f"{path} does not list when this device took part: {exc!r}. Restore the file: "
                "without it, the device could take part too often"
            ) from exc

    def after(
        self,
        run: str,
        round: int,  # noqa: A002
        gap: int,
        most: int,
        allowed: OwnerLimits,
    ) -> Clock:
        """Returns a run's clock after one more participation. PrivacyError if the run's limits
        forbid it, or the owner's limits for all runs, which renaming a run does not reset."""
        if (times := len(self._recent())) >= allowed.max_participations:
            raise PrivacyError(
                f"this device already took part {times} times in {PERIOD_DAYS} days; its owner "
                f"allows no more than {allowed.max_participations}"
            )
        # A time in the future, from a wrong clock, counts as now.
        last_s = min(max(self._times_s, default=-math.inf), self._now())
        rest_s = last_s + allowed.rest_s - self._now()
        if allowed.rest_s and rest_s > 0:
            raise PrivacyError(
                f"this device took part recently, and must wait another {rest_s:.0f} s"
            )
        return self._of.get(run, Clock()).after(round, gap, most)

    def set(self, run: str, clock: Clock) -> None:
        after, times_s = {**self._of, run: clock}, [*self._recent(), self._now()]
        runs = {name: [one.last, one.count] for name, one in after.items()}
        content = json.dumps({"times_s": times_s, "runs": runs}, indent=1)
        write_whole(self._path, content.encode(), mode=0o600)
        self._of, self._times_s = after, times_s

    def _recent(self) -> list[float]:
        begin_s = self._now() - PERIOD_S
        return [one for one in self._times_s if one > begin_s]
