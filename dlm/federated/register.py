"""Counts the rounds of each run on this machine, outside its folder, which may be copied.

Only rounds that are released are counted, in `runs/ID.json` of $DLM_STATE_DIR, by default dlm below
$XDG_STATE_HOME or ~/.local/state. A copy that continues as another user or on another machine is
not detected; the report says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dlm.errors import FormatError, PrivacyError
from dlm.files import try_lock, write_whole
from dlm.logs import EventLog

logger = EventLog(__name__)


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    environ = os.environ if environ is None else environ
    if explicit := environ.get("DLM_STATE_DIR"):
        return Path(explicit) / "runs"
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "dlm" / "runs"


def run_id(text: object, place: Path) -> str:
    """A run's id from a file; FormatError for another text, since it becomes a file name here."""
    if not (isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text)):
        raise FormatError(
            f"{place} gives the run id {text!r}; expected 32 hexadecimal digits. Restore the file"
        )
    return text


def rounds_of(run: str) -> int | None:
    """Rounds counted here for a run; None if unknown."""
    try:
        found = json.loads((state_folder() / f"{run}.json").read_text(encoding="utf-8"))
        return int(found["rounds"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def check_rounds_of(run: str, done: int, folder: Path) -> int | None:
    """Rounds counted for a run with `done` rounds, or None; PrivacyError if more were done."""
    known = rounds_of(run)
    if known is not None and known > done:
        raise PrivacyError(
            f"{folder} has {done} rounds, but {known} rounds of this run were done on this "
            "machine: it is an older copy, or another copy went on. Those rounds were released; "
            "repeating them with other noise and users would void the guarantee. Continue with "
            "the folder that has them, or start a new run and account for both"
        )
    return known


@contextlib.contextmanager
def next_round(run: str, done: int, folder: Path) -> Iterator[bool]:
    """Held while the rounds after `done` are written to disk; then they are counted here, which it
    yields: False if the state folder is not writable. PrivacyError if another copy of the folder
    did them meanwhile, or is doing them."""
    try:
        place = state_folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(place / f"{run}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError) as exc:
        _warn(run, done, exc)
        yield False
        return
    try:
        try:
            is_alone = try_lock(handle)
        except OSError:  # a file system without locks
            is_alone = True
        if not is_alone:
            raise PrivacyError(
                f"another copy of {folder} is doing a round now: both would release it, with "
                "different noise. Wait for it, and continue with one copy only"
            )
        check_rounds_of(run, done, folder)
        yield True
    finally:
        os.close(handle)


def count(run: str, rounds: int, folder: Path) -> bool:
    """Counts a run's rounds, inside `next_round`, never fewer; returns whether they are counted."""
    known = rounds_of(run)
    if known is not None and known > rounds:
        return True
    body = {"rounds": rounds, "folder": str(folder.absolute())}
    try:
        write_whole(state_folder() / f"{run}.json", json.dumps(body).encode(), mode=0o600)
    except (OSError, RuntimeError) as exc:
        _warn(run, rounds, exc)
        return False
    return True


def _warn(run: str, rounds: int, exc: Exception) -> None:
    """Logs why rounds are not counted, as a full disk. A missing home (RuntimeError) or permission
    is permanent, so only the report mentions it."""
    if not isinstance(exc, RuntimeError | PermissionError):
        logger.warning(
            "federated.round.not_counted",
            extra={"run": run, "rounds": rounds, "error": type(exc).__name__, "why": str(exc)},
        )
