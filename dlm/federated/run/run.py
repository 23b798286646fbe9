"""Begins or resumes a run in this process, and does its rounds, each of which counts once. No file
contains a key, and after the run has ended, no file contains its noise."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from dlm import checkpoint
from dlm.checkpoint import Arrays
from dlm.errors import PrivacyError, TrainingDiverged
from dlm.federated.report.report import PrivacyReport
from dlm.federated.run.cohorts import Cohorts
from dlm.federated.run.run_folder import RunBinding, RunFolder, RunState
from dlm.record.ledger import ParticipationLedger
from dlm.record.provenance import Provenance
from dlm.resources import Closeable

Done = TypeVar("Done")  # what is reported about a round


class FederatedRun(Closeable, Generic[Done]):
    """Runs rounds over users, in a folder from which they resume or, without a folder, in memory.

    A run stopped anywhere and resumed with the same seed ends in the same bits, including the
    journal; a round is reported only after it is saved.

    `binding` is what must not change when a run resumes. If `released`, rounds are releases, which
    are never repeated.
    """

    rounds: int
    cohorts: Cohorts
    binding: RunBinding
    released: bool
    save_every: int = 1
    folder: RunFolder | None = None
    rounds_done: int = 0
    resumed: bool = False
    _ends: bool = False  # whether the next checkpoint is the last of this call
    _in_round: bool = False  # also true after an interrupted round
    _over: str = ""  # why the run ended early; "" if it has not ended early

    def _begin(self, folder: RunFolder | Path | None) -> None:
        if folder is None:
            self._first()
            return
        self.folder = RunFolder(folder) if isinstance(folder, Path) else folder
        try:
            found = self.folder.load(self.binding, released=self.released)
            if found is None:
                self._first()
                self._save([])
                return
            if found.private is None:
                self.cohorts.ledger = found.ledger
                self._restore(found.public, None, found.facts)
            else:
                own = len(found.private) - len(self.cohorts.arrays())
                self.cohorts.restore(found.private[own:], found.ledger, found.now_s)
                self._restore(found.public, found.private[:own], found.facts)
            self.rounds_done, self.resumed = found.done, True
        except BaseException:
            self.close()
            raise

    def run(self, until: int | None = None) -> Iterator[Done]:
        """Runs the remaining rounds, but none after `until`, and reports each round once it counts.

        Raises
            PrivacyError      a participation that breaks the enforced limits; a round of this run
                              was interrupted in this process; the run's noise was erased
            TrainingDiverged  the model diverged in a round, which counts; raised after that round,
                              and at once when the run resumes
        """
        if self._over:
            raise TrainingDiverged(self._over)
        last = min(self.rounds, self.rounds if until is None else until)
        if self.folder is not None and self.folder.has_ended and self.rounds_done < last:
            raise PrivacyError(
                f"the run in {self.folder.path} was ended after {self.rounds_done} of "
                f"{self.rounds} rounds and its noise was erased, so it cannot continue. Start a "
                "new run in another folder; the privacy costs of both runs add up"
            )
        if self.folder is not None:
            # If this process is killed, a report of fewer rounds must not stay beside newer output.
            for path in self.folder.reports:
                path.unlink(missing_ok=True)
        waiting: list[Done] = []
        while self.rounds_done < last:
            if self._in_round:
                raise PrivacyError(
                    f"round {self.rounds_done} (counted from 0) was interrupted, perhaps after its "
                    "noise was drawn, so continuing here could release it twice. Open the run again"
                )
            index = self.rounds_done
            users = self._cohort(index)
            self._in_round = True
            waiting.append(self._round(index, users, index + 1 == last))
            self._in_round = False
            self.rounds_done += 1
            self._ends = self.rounds_done == last or bool(self._over)
            if self.rounds_done % self.save_every == 0 or self._ends:
                self._save(waiting)
                yield from waiting
                waiting.clear()
            if self._over:
                raise TrainingDiverged(self._over)

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()

    @property
    def ledger(self) -> ParticipationLedger:
        return self.cohorts.ledger

    def _cohort(self, index: int) -> list[int]:
        return self.cohorts.draw(index)

    def _releases(self) -> dict[str, str]:
        """Identifies the run and its releases in a stage's extras (see `account.records`); empty if
        rounds are not releases, as in a simulation, which draws the same noise when it resumes."""
        if self.folder is None or not self.released:
            return {}
        return {"run": self.folder.run_id, "released": checkpoint.digest(self._arrays()[0])}

    def _save(self, done: Sequence[Done]) -> None:
        if self.folder is None:
            return
        public, private, facts = self._arrays()
        ends = self.rounds_done == self.rounds or bool(self._over)
        state = RunState(
            self.rounds_done,
            public,
            None if ends else [*private, *self.cohorts.arrays()],
            self.ledger,
            self.cohorts.now_s,
            facts,
        )
        lines = [self._line(one) for one in done]
        record = self._record(public)
        self.folder.save(state, self.binding, lines, released=self.released, record=record)

    def _record(self, public: Arrays) -> Provenance | None:
        """The record for a checkpoint with these arrays; None if another file has the record."""
        return None

    @abstractmethod
    def report(self, *, at: datetime | None = None, data_name: str = "") -> PrivacyReport:
        """The privacy report of the rounds that count, from their ledger, as of the time `at`."""

    @abstractmethod
    def _first(self) -> None:
        """Creates the state before the first round."""

    @abstractmethod
    def _round(self, index: int, users: Sequence[int], is_last: bool) -> Done:
        """Advances the state by one round, with these users."""

    @abstractmethod
    def _arrays(self) -> tuple[Arrays, Arrays, Mapping[str, Any]]:
        """The state as (released arrays, private arrays, facts about the released ones)."""

    @abstractmethod
    def _restore(self, public: Arrays, private: Arrays | None, facts: Mapping[str, Any]) -> None:
        """Restores what `_arrays` returned; `private` is None if the run has ended."""

    @abstractmethod
    def _line(self, done: Done) -> dict[str, Any]:
        """A round's journal entry; `round` counts from 0."""
