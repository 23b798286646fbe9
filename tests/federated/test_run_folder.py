"""No round of a run that is no simulation is done twice, and one process has its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.run_folder import METRICS, keep_metrics, locked, refuse_a_new_run


def told(folder: Path, rounds: range, more: str = "") -> None:
    """Metrics of these rounds."""
    lines = [json.dumps({"round": index}) + "\n" for index in rounds]
    (folder / METRICS).write_text("".join(lines) + more)


def rounds_of(folder: Path) -> list[int]:
    """Rounds that metrics are of."""
    return [json.loads(line)["round"] for line in (folder / METRICS).read_text().splitlines()]


def test_rounds_that_were_told_and_are_in_no_checkpoint_stop_a_run(tmp_path: Path) -> None:
    """An older checkpoint was put back; in a simulation the same bits come again."""
    pytest.importorskip("jax", reason="pip install -e '.[train]'")
    told(tmp_path, range(4))
    with pytest.raises(PrivacyError, match=r"tells of round 3 .* checkpoint is of 2 rounds"):
        keep_metrics(tmp_path, 2, simulation=False)
    assert rounds_of(tmp_path) == [0, 1, 2, 3]
    keep_metrics(tmp_path, 2, simulation=True)
    assert rounds_of(tmp_path) == [0, 1]


def test_a_stop_while_metrics_were_written_stops_nothing(tmp_path: Path) -> None:
    """The last line is cut, or was not begun."""
    pytest.importorskip("jax", reason="pip install -e '.[train]'")
    told(tmp_path, range(2), '{"round": 2, "clip')
    keep_metrics(tmp_path, 3, simulation=False)
    assert rounds_of(tmp_path) == [0, 1]


def test_a_new_run_does_not_begin_over_what_is_left_of_an_old_one(tmp_path: Path) -> None:
    """A stop before the first checkpoint leaves the private part of round 0 alone."""
    refuse_a_new_run(tmp_path)
    (tmp_path / "private-0.state").write_bytes(b"")
    told(tmp_path, range(0))
    refuse_a_new_run(tmp_path)
    told(tmp_path, range(1))
    with pytest.raises(PrivacyError, match=r"has metrics\.jsonl of rounds that were done"):
        refuse_a_new_run(tmp_path)
    told(tmp_path, range(0))
    (tmp_path / "private-3.state").write_bytes(b"")
    with pytest.raises(PrivacyError, match=r"has private-3\.state of rounds"):
        refuse_a_new_run(tmp_path)


def test_a_lock_is_one_processs(tmp_path: Path) -> None:
    """Until it lets go."""
    handle = locked(tmp_path / ".lock")
    with pytest.raises(ConfigError, match="another process"):
        locked(tmp_path / ".lock")
    os.close(handle)
    os.close(locked(tmp_path / ".lock"))
