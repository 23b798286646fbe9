"""Which round each run on this machine has come to, outside of its folder.

A folder tells nothing of its copies: one that is put back whole, or that goes on twice, does rounds
again that were released. So the rounds of runs that release something are counted here, too, in
`runs/ID.json` of $DLM_STATE_DIR, or of dlm below the user's ($XDG_STATE_HOME, or ~/.local/state).

A copy that goes on under another user or on another machine is not noticed; the report says so.
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
    """Where runs are counted."""
    environ = os.environ if environ is None else environ
    if explicit := environ.get("DLM_STATE_DIR"):
        return Path(explicit) / "runs"
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "dlm" / "runs"


def run_id(text: object, place: Path) -> str:
    """The id of a run as a file has it, which is to become the name of one here.

    Raises
        FormatError  it is not an id
    """
    if not (isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text)):
        raise FormatError(f"{place} names its run {text!r}; expected 32 hexadecimal digits")
    return text


def rounds_of(run: str) -> int | None:
    """Rounds that a run has come to here; None where it is not known."""
    try:
        found = json.loads((state_folder() / f"{run}.json").read_text(encoding="utf-8"))
        return int(found["rounds"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def check_rounds_of(run: str, done: int, folder: Path) -> int | None:
    """Passes where a run of so many rounds may go on; how many are counted here, or None.

    Raises
        PrivacyError  more of its rounds were done
    """
    known = rounds_of(run)
    if known is not None and known > done:
        raise PrivacyError(
            f"{folder} is of {done} rounds, and of this run {known} were done on this machine: it "
            "is an older copy, or another copy went on. Those rounds were released, and doing them "
            "again with other noise and users would void the guarantee. Go on with the folder that "
            "has them, or begin elsewhere and account for both runs"
        )
    return known


@contextlib.contextmanager
def next_round(run: str, done: int, folder: Path) -> Iterator[bool]:
    """While a run's next rounds are put on disk, after `done`; they count here when that is over.

    Yields       whether they can be counted: the folder can be written to
    Raises
        PrivacyError  another copy of the folder did them meanwhile, or does them now
    """
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
                f"another copy of {folder} does a round now: two would release two noises of it"
            )
        check_rounds_of(run, done, folder)
        yield True
    finally:
        os.close(handle)


def count(run: str, rounds: int, folder: Path) -> bool:
    """Notes that a run has come to so many rounds, inside of `next_round`; whether that is so now.

    Guarantees   never notes fewer than were noted before
    """
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
    """Logs why rounds are not counted, as a full disk; a user without a home (RuntimeError), or who
    may not write there, has been so before and is told in the report alone."""
    if not isinstance(exc, RuntimeError | PermissionError):
        logger.warning(
            "federated.round.not_counted",
            extra={"run": run, "rounds": rounds, "error": type(exc).__name__, "why": str(exc)},
        )
