"""The folder of a run: one process at a time, and no round of it done twice.

What a round released cannot be taken back. A run that begins again from an older state draws other
noise for rounds that were seen already, and counts their users anew: two answers to one question.
Metrics are written after the checkpoint of their round, so that lines beyond the checkpoint show
that the checkpoint is an older one.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from dlm.errors import ConfigError, PrivacyError
from dlm.files import write_whole

METRICS = "metrics.jsonl"


def locked(file: Path) -> int:
    """A handle on a lock file that no other process has; `os.close` lets go of it.

    Raises
        ConfigError  another process has it
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(handle)
        raise ConfigError(
            f"another process is at work in {file.parent}; two would release two noises of a round"
        ) from exc
    return handle


def refuse_a_new_run(folder: Path) -> None:
    """Passes where no round was done.

    Raises
        PrivacyError  what is left of rounds lies there, without the checkpoint
    """
    left = [path.name for path in folder.glob("private-*.state") if path.stem != "private-0"]
    if _lines(folder / METRICS):
        left.append(METRICS)
    if left:
        raise PrivacyError(
            f"{folder} has {', '.join(sorted(left))} of rounds that were done, and no checkpoint: "
            "a new run there would forget who took part and what was released. Put the checkpoint "
            "back, or begin in another folder and account for both runs"
        )


def keep_metrics(folder: Path, done: int, *, simulation: bool) -> None:
    """Lines of rounds from `done` on go: a simulation does those again, to the bit.

    Raises
        PrivacyError  a run that is no simulation told of rounds that its checkpoint lacks
    """
    kept: list[tuple[int, str]] = []
    later: list[tuple[int, str]] = []
    for index, line in _lines(folder / METRICS):
        (kept if index < done else later).append((index, line))
    if later and not simulation:
        raise PrivacyError(
            f"{folder / METRICS} tells of round {later[-1][0]} (from 0), and the checkpoint is of "
            f"{done} rounds: an older one was put back. Those rounds were released, and doing them "
            "again with other noise and users would void the guarantee. Put the latest checkpoint "
            "and its private part back, or begin in another folder and account for both runs"
        )
    write_whole(folder / METRICS, "".join(line + "\n" for _, line in kept).encode())


def _lines(path: Path) -> list[tuple[int, str]]:
    """(round, line) of whole lines: a stop may have cut the last one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append((int(json.loads(line)["round"]), line))
        except (ValueError, KeyError, TypeError):
            continue
    return found
