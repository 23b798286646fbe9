"""The folder of a run: one process at a time uses it, and no round is done twice.

| file | who may see it | contents |
| --- | --- | --- |
| `checkpoint.dlmfed` | whoever may have the model | what was released, settings, vocabulary |
| `private-N.state` | the owner (mode 0600) | noise buffers, ledger, sampler; erased at the end |
| `ledger.state` | the owner (mode 0600) | participation ledger of a run that has ended |
| the journal, `metrics.jsonl` | as the checkpoint | one line per round |
| `users.store` | the owner | users' text, sorted, while rounds remain |

A round counts once its checkpoint is in place; its journal line is written after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dlm import checkpoint
from dlm.checkpoint import CHECKPOINT, Arrays
from dlm.errors import ConfigError
from dlm.federated.run.run_files import (
    LEDGER,
    METRICS,
    PIPELINE_JOURNAL,
    PRIVATE,
    REPORTS,
    STORE,
    JournalLine,
    check_history,
    ended_part,
    journal_lines,
    journal_text,
    ledger_in,
    private_part,
    private_parts,
)
from dlm.files import erase, lock_file, write_whole
from dlm.record.ledger import ParticipationLedger
from dlm.record.provenance import (
    FORMAT_VERSION,
    Provenance,
    content_digest,
)
from dlm.resources import Closeable
from dlm.units import finite

_LOCK = ".lock"


@dataclass(frozen=True)
class RunBinding:
    """What must not change when a run resumes, such as the content of files (paths may change).
    `public` settings and digests go into the checkpoint; digests of users' text have no noise, so
    they stay `private`. `vocabulary` is None if the run does not know the vocabulary."""

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


@dataclass(frozen=True)
class RunState:
    """A run's state after `done` rounds that count: `public` arrays, with `facts` about them as
    JSON; `private` arrays, which hold noise or reveal who took part; None once the run ends."""

    done: int
    public: Arrays
    private: Arrays | None
    ledger: ParticipationLedger
    now_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


class ErasedRun(NamedTuple):
    rounds: int
    erased: list[str]


class RunFolder(Closeable):
    """A run's folder, which one process at a time can use.

    Args
        path      created if missing
        journal   path of the journal, by default in the folder; a journal elsewhere also shows if
                  an older copy of the *whole* folder was restored
        reports   paths of the privacy report, as text and as JSON
        private   whether only the folder's owner can read it
    Raises  ConfigError  another process uses the folder; `path` is a file or a pipeline's folder
    Guarantees
        once closed, the folder holds no copy of users' text if its run has ended, if none has begun
        (a folder that was created here is then removed), or if the copy was made for a run that
        `load` refused to resume
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
            raise ConfigError(f"{path} is a file; expected a folder for the run")
        if (path / PIPELINE_JOURNAL).exists():
            raise ConfigError(
                f"{path} belongs to `dlm pipeline`; choose another --output. A run there would "
                "replace the pipeline's privacy report"
            )
        self.path, self.journal = path, journal or path / METRICS
        self.reports = reports or (path / REPORTS[0], path / REPORTS[1])
        self._mode = 0o600 if private else 0o644
        self._run = secrets.token_hex(16)
        self._is_new = not path.exists()
        self._had_text = (path / STORE).exists()
        self._accepted = False  # whether a run was loaded or saved
        self.has_ended = False  # whether that run has ended, so that it holds no noise
        path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        self._lock: int | None = _locked(path / _LOCK)

    @property
    def store(self) -> Path:
        return self.path / STORE

    @property
    def run_id(self) -> str:
        """A random id; a resumed run keeps it if its rounds are releases."""
        return self._run

    @property
    def has_begun(self) -> bool:
        return (self.path / CHECKPOINT).exists()

    def close(self) -> None:
        if self._lock is None:
            return
        if self.has_ended or not (self.has_begun and (self._accepted or self._had_text)):
            self.remove_text()
        if not self.has_begun and self._is_new:
            (self.path / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # raised if the folder is not empty
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def remove_text(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.store)

    def remove(self) -> None:
        """Removes the folder of a finished run; a journal elsewhere stays."""
        shutil.rmtree(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self, binding: RunBinding, *, released: bool) -> RunState | None:
        """Returns the state to resume from; None if a new run may begin.

        Raises ConfigError for other settings, users or vocabulary; FormatError for damage;
        PrivacyError for another checkpoint's ledger or noise, or if released rounds are missing.
        """
        lines = journal_lines(journal_text(self.journal))
        parts = {int(p.stem.partition("-")[2]): p for p in self.path.glob(PRIVATE)}
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
        found.refuse_other_settings(binding.settings)
        done = int(found.facts["round"])
        if released:
            self._run = str(found.facts["run"])
        last = ended_part(self.path, found)
        self.has_ended = last is not None
        private = last or private_part(self.path, found)
        private.refuse_other_settings({**binding.settings, **binding.private})
        ledger = ledger_in(private, found)
        check_history(self.path, done=done, private=parts, journal=journal, released=released)
        own = journal_lines(found.facts["lines"])
        self._mend_journal(done, [*lines, *own])
        self._erase_parts(None if last else private.path)
        self._accepted = True
        return RunState(
            done,
            found.arrays,
            None if last else private.arrays,
            ledger,
            float(private.facts["now_s"]),
            found.facts["state"],
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
        """Makes rounds count: writes the private part, then the checkpoint with `record` and the
        new `lines` (the journal may lack these after a crash), then erases older private parts. If
        the run ends (`state.private` is None), the private part is only the ledger. `released` is
        as in `check_history`."""
        self._accepted = True
        mark = {"released": True} if released else {}
        texts = [json.dumps({**finite(line), **mark}) for line in lines]
        vocabulary = {} if binding.vocabulary is None else {"vocabulary": binding.vocabulary}
        ends = state.private is None
        # The checkpoint has the private part's digest. Random bytes keep the digest from confirming
        # a guess at the noise once the private part is erased.
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
            **({"run": self._run} if released else {}),
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
        self.has_ended = ends
        self._erase_parts(private)
        if state.done == 0:
            write_whole(self.journal, b"", mode=self._mode)
            return
        with self.journal.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in texts)
            file.flush()
            os.fsync(file.fileno())

    def end(self) -> ErasedRun:
        """Ends the run: erases its noise and the copy of users' text, and keeps the ledger.
        Raises ConfigError if no run has begun here, PrivacyError for the private part of another
        checkpoint."""
        if not self.has_begun:
            raise ConfigError(
                f"{self.path} contains no {CHECKPOINT}: give the folder of a run of `dlm federate`"
            )
        found = checkpoint.read(self.path / CHECKPOINT)
        if ended_part(self.path, found) is None:
            private = private_part(self.path, found)
            ledger_in(private, found)
            checkpoint.save(
                self.path / LEDGER,
                (),
                private.settings,
                facts=private.facts,
                attachments={"ledger": private.attachments["ledger"]},
                mode=0o600,
            )
        held = [path for path in (*private_parts(self.path), self.store) if path.exists()]
        self._erase_parts(None)
        self.remove_text()
        return ErasedRun(int(found.facts["round"]), sorted(path.name for path in held))

    def _erase_parts(self, current: Path | None) -> None:
        """Erases the private parts of other rounds, and parts that killed processes left."""
        for old in private_parts(self.path):
            if old != current:
                erase(old)

    def _mend_journal(self, done: int, lines: Iterable[JournalLine]) -> None:
        """Keeps one line per round before `done`, from journal or checkpoint; drops later lines,
        whose rounds can be repeated exactly."""
        counted = {line.round: line.text for line in lines if line.round < done}
        text = "".join(f"{counted[index]}\n" for index in sorted(counted))
        write_whole(self.journal, text.encode(), mode=self._mode)


def _locked(file: Path) -> int:
    if (handle := lock_file(file)) is not None:
        return handle
    raise ConfigError(
        f"another process is using {file.parent}; wait until that process ends, since two "
        "processes would release the same round with different noise"
    )
