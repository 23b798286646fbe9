"""When a device may take part: in a run, and in all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm.errors import FormatError, PrivacyError
from dlm.federated.devices.clocks import Clocks
from dlm.federated.devices.settings import OwnerLimits

ALLOWED = OwnerLimits(rest_s=60.0, max_participations=3)


def taken_part(path: Path, *, times: int) -> None:
    """In rounds 5, 10, ... of a run, an hour apart; the first at 0 s."""
    for time in range(times):
        clocks = Clocks(path, lambda time=time: 3600.0 * time)  # type: ignore[misc]
        clocks.set("run", clocks.after("run", 5 * time + 5, 2, 10, ALLOWED))


@pytest.mark.promise("devices_refuse")
@pytest.mark.parametrize(
    ("times", "now_s", "run", "index", "gap", "most", "may"),
    [
        (2, 7200.0, "run", 12, 2, 10, True),
        (2, 7200.0, "run", 11, 2, 10, False),
        (2, 7200.0, "run", 10, 1, 10, False),
        (2, 7200.0, "run", 12, 2, 2, False),
        (2, 7200.0, "other", 0, 2, 10, True),
        (2, 3659.0, "other", 0, 2, 10, False),
        (3, 30 * 86_400.0 - 1, "other", 0, 2, 10, False),
        (3, 30 * 86_400.0, "other", 0, 2, 10, True),
    ],
    ids=["may", "gap", "again", "most", "another run", "rest", "most in a month", "a month later"],
)
def test_a_device_that_is_asked_too_often_refuses(
    tmp_path: Path, times: int, now_s: float, run: str, index: int, gap: int, most: int, may: bool
) -> None:
    """By the file alone, and whatever a server calls its runs."""
    taken_part(tmp_path / "clocks", times=times)
    clocks = Clocks(tmp_path / "clocks", lambda: now_s)
    if may:
        clocks.after(run, index, gap, most, ALLOWED)
    else:
        with pytest.raises(PrivacyError):
            clocks.after(run, index, gap, most, ALLOWED)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"times_s": [], "runs": {"a": 1}}'])
def test_a_damaged_clock_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "clocks").write_text(content)
    with pytest.raises(FormatError):
        Clocks(tmp_path / "clocks")
