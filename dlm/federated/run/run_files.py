"""The files in a run's folder: their names, and checks that they belong to one state of one run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dlm import checkpoint
from dlm.checkpoint import CHECKPOINT, Checkpoint
from dlm.errors import FormatError, PrivacyError
from dlm.files import SUFFIX
from dlm.record.ledger import ParticipationLedger
from dlm.record.provenance import file_digest

METRICS = "metrics.jsonl"
STORE = "users.store"
LEDGER = "ledger.state"
REPORTS = ("privacy.md", "privacy.json")
PIPELINE_JOURNAL = "journal.json"  # in a pipeline's folder, where reports are also named `REPORTS`
PRIVATE = "private-*.state"


def check_history(
    place: Path,
    *,
    done: int | None,
    private: Iterable[int],
    journal: Iterable[int],
    released: bool,
    ended: bool = False,
) -> None:
    """Checks that resuming does not repeat a `released` round. Raises PrivacyError if the
    journal has rounds after the checkpoint's `done` rounds; or if there is no checkpoint (`done` is
    None), but the journal, private parts or, if `ended`, the ledger show rounds."""
    if not released:
        return
    last = max(journal, default=-1)
    if done is None:
        traces = [f"private-{rounds}.state" for rounds in sorted(private) if rounds]
        if ended:
            traces.append(LEDGER)
        if last >= 0:
            traces.append("a journal")
        if traces:
            raise PrivacyError(
                f"{place} has {', '.join(traces)} of earlier rounds, but no checkpoint; a new run "
                "in it would forget who took part and what was released. Restore the checkpoint, "
                "or start in another folder and account for both runs"
            )
    elif last >= done:
        raise PrivacyError(
            f"the journal of {place} has round {last} (counted from 0), but the checkpoint has "
            f"only {done} rounds, so it is older. The later rounds were released, and repeating "
            "them with other noise and users would void the guarantee. Restore the latest "
            "checkpoint and its private part, or start in another folder and account for both runs"
        )


def private_parts(folder: Path) -> list[Path]:
    """Lists the files in a run's folder that hold noise, including incomplete files."""
    return [*folder.glob(PRIVATE), *folder.glob(f".{PRIVATE}.*{SUFFIX}")]


def ended_part(folder: Path, found: Checkpoint) -> Checkpoint | None:
    """Reads the `ledger.state` of a run that has ended; None if rounds may remain. The file is
    written before the last checkpoint, so it counts only if both have the same ledger."""
    if not (folder / LEDGER).exists():
        return None
    kept = checkpoint.read(folder / LEDGER)
    ledger = ParticipationLedger.from_bytes(kept.attachments["ledger"], str(kept.path))
    return kept if ledger.digest == found.facts["ledger"] else None


def private_part(folder: Path, found: Checkpoint) -> Checkpoint:
    """The private part of a checkpoint; see `run_folder.RunFolder.load` for errors."""
    part = folder / f"private-{found.facts['round']}.state"
    if not part.exists():
        raise FormatError(
            f"{part} is missing; without the noise and ledger in this file, the run cannot resume "
            "under its guarantee. Restore the file together with the checkpoint"
        )
    if file_digest(part) != found.facts["private"]:
        raise PrivacyError(
            f"{part} does not belong to this checkpoint: its noise or ledger was saved at another "
            "time, or was changed. Restore this file together with its checkpoint"
        )
    return checkpoint.read(part)


def ledger_in(private: Checkpoint, found: Checkpoint) -> ParticipationLedger:
    done = int(found.facts["round"])
    ledger = ParticipationLedger.from_bytes(
        private.attachments["ledger"], str(private.path), expect=found.facts["ledger"]
    )
    if ledger.rounds != done:
        raise PrivacyError(
            f"the checkpoint in {private.path.parent} has {done} rounds, but the ledger has "
            f"{ledger.rounds}, so they were saved at different times. Restore the checkpoint and "
            "its private part together"
        )
    return ledger


def refuse_secrets_left(folder: Path) -> None:
    """Raises PrivacyError if a folder still holds noise or a copy of users' text although its run
    has ended."""
    parts, text = private_parts(folder), folder / STORE
    if (parts or text.exists()) and (folder / CHECKPOINT).exists():
        found = checkpoint.read(folder / CHECKPOINT)
        if ended_part(folder, found) is not None:
            held = f"{STORE} still holds users' text"
            if parts:
                held = (
                    f"{parts[0].name} still holds its noise: whoever has this file and the "
                    "releases can subtract the noise from them"
                )
            raise PrivacyError(
                f"the run in {folder} has ended, but {held}. Erase this: dlm privacy erase {folder}"
            )


class JournalLine(NamedTuple):
    """The journal's line about a round; rounds count from 0."""

    round: int
    released: bool
    text: str


def journal_text(journal: Path) -> list[str]:
    return journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []


def journal_lines(texts: Iterable[str]) -> list[JournalLine]:
    """Returns the complete lines; a stop may have cut off the last line."""
    found = []
    for text in texts:
        try:
            line = json.loads(text)
            found.append(JournalLine(int(line["round"]), bool(line.get("released")), text))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
