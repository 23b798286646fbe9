"""The folder of a run: one process at a time uses it, and no round is done twice.

| file | who may see it | contents |
| --- | --- | --- |
| `checkpoint.dlmfed` | whoever may have the model | what was released, settings, vocabulary |
| `private-N.state` | the owner (mode 0600) | noise buffers, ledger, sampler; erased at the end |
| `ledger.state` | the owner (mode 0600) | participation ledger of a run that has ended |
| the journal, `metrics.jsonl` | as the checkpoint | one line per round |
| `users.store` | the owner | users' text, sorted, while rounds remain |

A release cannot be taken back. A run restarted from an older state would draw other noise for
rounds that were already released, and count their users again: two answers to one question. So a
round counts once its checkpoint is in place. Its journal line is written after that, and lines
beyond the checkpoint show that the checkpoint is too old. Rounds are also counted outside the
folder (`register`), so an older copy of the whole folder is detected on this machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated import checkpoint, register
from dlm.federated.checkpoint import Arrays, Checkpoint
from dlm.federated.ledger import ParticipationLedger
from dlm.federated.provenance import (
    FORMAT_VERSION,
    Provenance,
    content_digest,
    file_digest,
)
from dlm.files import SUFFIX, erase, lock_file, write_whole

CHECKPOINT = "checkpoint.dlmfed"
METRICS = "metrics.jsonl"
STORE = "users.store"
LEDGER = "ledger.state"
REPORTS = ("privacy.md", "privacy.json")
PIPELINE_JOURNAL = "journal.json"  # of a pipeline's folder, whose reports have the same names
_LOCK = ".lock"
NOT_COUNTED = (
    "its rounds could not all be counted outside of it, so restoring an older copy is not detected"
)


@dataclass(frozen=True)
class RunBinding:
    """What must be the same when a run resumes.

    Text and vocabulary are compared by content, not by path.

    Fields
        public      settings, and digests of files; stored in the checkpoint
        private     digests of users' text: without noise, so they stay private
        vocabulary  the words or wordpieces as bytes, stored in the checkpoint; None if the run does
                    not know them
    """

    public: Mapping[str, Any]
    private: Mapping[str, Any]
    vocabulary: bytes | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """`public`, with the version of records, and the digest of the vocabulary."""
        found = {**self.public, "records": FORMAT_VERSION}
        if self.vocabulary is not None:
            found["vocabulary"] = content_digest(self.vocabulary)
        return found

    def of_version(self, file: Mapping[str, Any]) -> dict[str, Any]:
        """`settings` in the form of the version that wrote a file's settings.

        The first had no digest of the vocabulary (its ids of users' text are in `private`); the
        second had digests of records of another version.
        """
        mine = self.settings
        if "vocabulary" not in file:
            mine["vocabulary"] = None
        if "records" not in file:
            mine["records"] = None
            if "vocabulary_record" in mine:
                mine["vocabulary_record"] = file.get("vocabulary_record")
        return mine


@dataclass(frozen=True)
class RunState:
    """A run after a round that counts.

    Fields
        done     rounds
        public   arrays of what was released
        private  arrays that hide users, or reveal who took part; None of a run that has ended
        ledger   of participation
        now_s    the sampler's clock
        facts    more about the public part, as JSON
    """

    done: int
    public: Arrays
    private: Arrays | None
    ledger: ParticipationLedger
    now_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def check_history(
    place: Path,
    *,
    done: int | None,
    private: Iterable[int],
    journal: Iterable[int],
    released: bool,
    ended: bool = False,
) -> None:
    """Checks that resuming does not repeat a round.

    Args
        done      rounds in the checkpoint; None without one
        private   rounds of the private parts
        journal   rounds (from 0) in the journal
        released  whether rounds are releases, done only once; others can be repeated
        ended     whether there is the ledger of a run that has ended
    Raises
        PrivacyError  rounds were done that the checkpoint lacks
    """
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
                "there would forget who took part and what was released. Restore the checkpoint, "
                "or start in another folder and account for both runs"
            )
    elif last >= done:
        raise PrivacyError(
            f"the journal of {place} has round {last} (from 0), but the checkpoint only {done} "
            "rounds: it is an older one. The later rounds were released, and repeating them with "
            "other noise and users would void the guarantee. Restore the latest checkpoint and its "
            "private part, or start in another folder and account for both runs"
        )


class RunFolder:
    """The one owner of a run's folder.

    Args
        path      the folder; created if missing
        journal   path of the journal; default: in the folder. Outside of it, the journal also shows
                  that an older folder was restored *as a whole*
        reports   paths of the privacy report, as text and as JSON
        private   whether only its owner can read the whole folder
    Raises
        ConfigError  another process uses the folder; `path` is a file; it is a pipeline's
    Guarantees
        a folder in which no run has begun is left without a copy of users' text, and removed if it
        was created here; where a run is refused that was to resume, no copy is left that was made
        for it
    """

    def __init__(
        self,
        path: Path,
        *,
        journal: Path | None = None,
        reports: tuple[Path, Path] | None = None,
        private: bool = False,
    ):
        if path.is_file():
            raise ConfigError(
                f"{path} is a file; expected a folder, in which dlm now keeps a run. Resume a run "
                "of an earlier version with that version; or start with another output, and the "
                "privacy costs of both add up"
            )
        if (path / PIPELINE_JOURNAL).exists():
            raise ConfigError(
                f"{path} belongs to `dlm pipeline`; choose another --output. A run there would "
                "replace the pipeline's privacy report"
            )
        self.path, self.journal = path, journal or path / METRICS
        self.reports = reports or (path / REPORTS[0], path / REPORTS[1])
        self._mode = 0o600 if private else 0o644
        self.incidents: list[str] = []  # what a report must say about the folder
        self._came_after: int | None = None  # rounds that it had, where they are not counted here
        self._run = self._life = content_digest(os.urandom(16))[:32]
        self._earlier_lives: list[list[Any]] = []  # [id, rounds done by then] of each before this
        self._is_new = not path.exists()
        self._had_text = (path / STORE).exists()
        self._accepted = False  # a run was loaded or saved here
        path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        self._lock: int | None = _locked(path / _LOCK)

    @property
    def store(self) -> Path:
        """Path of users' sorted text."""
        return self.path / STORE

    @property
    def has_begun(self) -> bool:
        """Whether a run has begun."""
        return (self.path / CHECKPOINT).exists()

    def lives_after(self, done: int) -> list[list[Any]]:
        """The lives of the run after this many rounds: for each process that did some, in order,
        [a random id, rounds done by then].

        Two copies that resume get different ids, even with the same users; the same run read twice
        has the same ids.
        """
        earlier = self._earlier_lives
        if earlier and earlier[-1][1] == done:  # this process did none yet
            return earlier
        return [*earlier, [self._life, done]]

    def close(self) -> None:
        """Releases the folder."""
        if self._lock is None:
            return
        if not (self.has_begun and (self._accepted or self._had_text)):
            self.remove_text()
        if not self.has_begun and self._is_new:
            (self.path / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remove_text(self) -> None:
        """Removes the copy of users' text."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.store)

    def remove(self) -> None:
        """Removes the folder of a finished run; a journal elsewhere stays."""
        shutil.rmtree(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self, binding: RunBinding, *, released: bool) -> RunState | None:
        """The state to resume from; None if a new run may begin.

        Raises
            ConfigError   a run with other settings, users or vocabulary
            PrivacyError  a ledger or noise that is not the checkpoint's; released rounds that the
                          checkpoint lacks
            FormatError   a damaged or missing file
        """
        lines = _lines(_text(self.journal))
        parts = {int(p.stem.partition("-")[2]): p for p in self.path.glob(_PRIVATE)}
        again = released or any(line.released for line in lines)
        journal = [line.round for line in lines]
        if not self.has_begun:
            ended = (self.path / LEDGER).exists()
            check_history(
                self.path, done=None, private=parts, journal=journal, released=again, ended=ended
            )
            self._accepted = True
            return None
        found = checkpoint.read(self.path / CHECKPOINT)
        found.refuse_other_settings(binding.of_version(found.settings))
        done = int(found.facts["round"])
        self._run = register.run_id(found.facts.get("run", self._run), self.path / CHECKPOINT)
        self._life = content_digest(os.urandom(16))[:32]
        self._earlier_lives = [
            [register.run_id(life, self.path / CHECKPOINT), int(rounds)]
            for life, rounds in found.facts.get("lives", [(self._run, done)])
        ]
        self.incidents = list(found.facts.get("incidents", ()))
        last = _ended(self.path, found)
        private = last or _private_part(self.path, found)
        private.refuse_other_settings({**binding.of_version(private.settings), **binding.private})
        ledger = _ledger_in(private, found)
        check_history(self.path, done=done, private=parts, journal=journal, released=released)
        if released:
            self._look_at_register(done)
        own = _lines(found.facts.get("lines", ()))
        kept = {line.round for line in (*lines, *own)}
        if lacking := [index for index in range(done) if index not in kept]:
            self._tell(f"its journal was cut: it lacks {len(lacking)} of {done} rounds")
        self._mend_journal(done, [*lines, *own])
        self._erase_parts(None if last else private.path)
        self._accepted = True
        return RunState(
            done,
            found.arrays,
            None if last else private.arrays,
            ledger,
            float(private.facts["now_s"]),
            found.facts.get("state", {}),
        )

    def save(
        self,
        state: RunState,
        binding: RunBinding,
        lines: Sequence[Mapping[str, Any]] = (),
        *,
        released: bool,
        record: Provenance | None = None,
    ) -> None:
        """Makes rounds count: writes the private part, then the checkpoint, then erases the old
        private part. Of a run that ends (`state.private` is None), only the ledger is written.

        Args
            record    of the checkpoint's contents, stored in it
            lines     of the journal for this checkpoint's new rounds; the checkpoint has them too,
                      so that a stop before they are written loses none
            released  as in `check_history`
        """
        self._accepted = True
        if not released:
            self._save(state, binding, lines, released=False, record=record)
            return
        before = max(state.done - max(len(lines), 1), 0)
        with register.next_round(self._run, before, self.path) as counted:
            if self._came_after is not None:
                self._tell(
                    f"after round {self._came_after} it resumed where its rounds were not counted "
                    "before: on another machine, by another user, or after that count was lost. "
                    "Nothing here shows that no other copy of the folder was resumed"
                )
                self._came_after = None
            if not counted:
                self._tell(NOT_COUNTED)
            self._save(state, binding, lines, released=True, record=record)
            if counted and not register.count(self._run, state.done, self.path):
                self._tell(NOT_COUNTED)  # in the report, and in the next checkpoint

    def _look_at_register(self, done: int) -> None:
        """Rejects an older copy, and counts rounds that the register lacks. A run that is not in
        the register is counted, and reported as moved, once it resumes."""
        counted = register.check_rounds_of(self._run, done, self.path)
        if counted is None:
            self._came_after = done
        elif counted < done:
            with register.next_round(self._run, done, self.path) as can_be:
                if not (can_be and register.count(self._run, done, self.path)):
                    self._tell(NOT_COUNTED)

    def _tell(self, incident: str) -> None:
        self.incidents = list(dict.fromkeys([*self.incidents, incident]))

    def _save(
        self,
        state: RunState,
        binding: RunBinding,
        lines: Sequence[Mapping[str, Any]],
        *,
        released: bool,
        record: Provenance | None,
    ) -> None:
        mark = {"released": True} if released else {}
        texts = [json.dumps({**finite(line), **mark}) for line in lines]
        vocabulary = {} if binding.vocabulary is None else {"vocabulary": binding.vocabulary}
        ends = state.private is None
        # The checkpoint has a digest of this file. Whoever guesses the noise could confirm it by
        # that, if the file held nothing else that is unknown once it is erased.
        blind = {"blind": secrets.token_bytes(32)} if released and not ends else {}
        private = self.path / (LEDGER if ends else f"private-{state.done}.state")
        digest = checkpoint.save(
            private,
            state.private or (),
            {**binding.settings, **binding.private},
            facts={"now_s": state.now_s},
            attachments={"ledger": state.ledger.to_bytes(), **blind},
            mode=0o600,
        )
        facts = {
            "round": state.done,
            "private": digest,
            "ledger": state.ledger.digest,
            "lines": texts,
            "state": state.facts,
            **(self._facts_of_releases(state.done) if released else {}),
            **({} if record is None else {"record": record.to_dict()}),
        }
        checkpoint.save(
            self.path / CHECKPOINT,
            state.public,
            binding.settings,
            facts=facts,
            attachments=vocabulary,
            mode=self._mode,
        )
        self._erase_parts(private)
        if state.done == 0:
            write_whole(self.journal, b"", mode=self._mode)
            return
        with self.journal.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in texts)
            file.flush()
            os.fsync(file.fileno())

    def end(self) -> int:
        """Ends the run: erases its noise and the copy of users' text, and keeps the ledger.

        Returns
            rounds that count
        Raises
            ConfigError   no run has begun here
            PrivacyError  the private part is not the checkpoint's
        """
        if not self.has_begun:
            raise ConfigError(
                f"{self.path} contains no {CHECKPOINT}: give the folder of a run of `dlm federate`"
            )
        found = checkpoint.read(self.path / CHECKPOINT)
        if _ended(self.path, found) is None:
            private = _private_part(self.path, found)
            _ledger_in(private, found)
            checkpoint.save(
                self.path / LEDGER,
                (),
                private.settings,
                facts=private.facts,
                attachments={"ledger": private.attachments["ledger"]},
                mode=0o600,
            )
        self._erase_parts(None)
        self.remove_text()
        return int(found.facts["round"])

    def _erase_parts(self, current: Path | None) -> None:
        """Erases the private parts of other rounds, and what killed processes left of any."""
        for old in _private_parts(self.path):
            if old != current:
                erase(old)

    def _facts_of_releases(self, done: int) -> dict[str, Any]:
        lives = self.lives_after(done)
        return {"run": self._run, "lives": lives, "incidents": self.incidents}

    def _mend_journal(self, done: int, lines: Iterable[_Line]) -> None:
        """Removes lines of rounds from `done` on, which can be repeated to the bit, and restores
        lines that the checkpoint has and the journal lacks."""
        counted = {line.round: line.text for line in lines if line.round < done}
        text = "".join(f"{counted[index]}\n" for index in sorted(counted))
        write_whole(self.journal, text.encode(), mode=self._mode)


_PRIVATE = "private-*.state"


def _private_parts(folder: Path) -> list[Path]:
    """Files in a run's folder that hold noise, unfinished ones too."""
    return [*folder.glob(_PRIVATE), *folder.glob(f".{_PRIVATE}.*{SUFFIX}")]


def _ended(folder: Path, found: Checkpoint) -> Checkpoint | None:
    """The `ledger.state` of a run that has ended; None if rounds may remain.

    It is written before the last checkpoint, so it counts only if it has that one's ledger.
    """
    if not (folder / LEDGER).exists():
        return None
    kept = checkpoint.read(folder / LEDGER)
    ledger = ParticipationLedger.from_bytes(kept.attachments["ledger"], str(kept.path))
    return kept if ledger.digest == found.facts["ledger"] else None


def _private_part(folder: Path, found: Checkpoint) -> Checkpoint:
    """The private part of a checkpoint; raises as `RunFolder.load`."""
    part = folder / f"private-{found.facts['round']}.state"
    if not part.exists():
        raise FormatError(
            f"{part} is missing; without its noise state and ledger this run cannot resume under "
            "its guarantee. Restore it together with the checkpoint"
        )
    if file_digest(part) != found.facts["private"]:
        raise PrivacyError(
            f"{part} is not the one of this checkpoint: its noise or ledger is from another time, "
            "or was changed. Restore both files together"
        )
    return checkpoint.read(part)


def _ledger_in(private: Checkpoint, found: Checkpoint) -> ParticipationLedger:
    done = int(found.facts["round"])
    ledger = ParticipationLedger.from_bytes(
        private.attachments["ledger"], str(private.path), expect=found.facts["ledger"]
    )
    if ledger.rounds != done:
        raise PrivacyError(
            f"{private.path.parent} has {done} rounds, but a ledger of {ledger.rounds}"
        )
    return ledger


def refuse_noise_left(folder: Path) -> None:
    """Passes for the folder of a run that holds no noise, or that may resume.

    Raises
        PrivacyError  the run has ended, and its noise is still there
    """
    parts = _private_parts(folder)
    if parts and (folder / CHECKPOINT).exists():
        found = checkpoint.read(folder / CHECKPOINT)
        if _ended(folder, found) is not None:
            raise PrivacyError(
                f"the run in {folder} has ended, but {parts[0].name} still holds its noise: "
                "whoever has both can subtract the noise from the releases. Erase it: "
                f"dlm privacy erase {folder}"
            )


def _locked(file: Path) -> int:
    """A descriptor that holds the lock on a file; `os.close` releases it.

    Raises
        ConfigError  another process holds it
    """
    if (handle := lock_file(file)) is not None:
        return handle
    raise ConfigError(
        f"another process is using {file.parent}; wait for it, since two processes would release "
        "the same round with different noise"
    )


class _Line(NamedTuple):
    """A journal line of a round, counted from 0."""

    round: int
    released: bool
    text: str


def _text(journal: Path) -> list[str]:
    return journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []


def _lines(texts: Iterable[str]) -> list[_Line]:
    """Complete lines: a stop may have cut off the last one."""
    found = []
    for text in texts:
        try:
            line = json.loads(text)
            found.append(_Line(int(line["round"]), bool(line.get("released")), text))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def finite(value: Any) -> Any:
    """JSON values, with null for infinity and nan."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
