"""One life of a run: it begins or goes on, does its rounds, and each counts once.

    with Training(settings, users, folder) as run:        # or `collect.Collection`
        for report in run.run():
            ...                                           # the round is kept by now

No key is in any file. A simulation makes its keys again from the seed and goes on to the bit. A run
that is none draws new ones when it goes on: what noise is still to come is independent of what was
drawn before, and what ties rounds together are the buffers, so that its law stays the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from dlm.errors import PrivacyError, TrainingDiverged
from dlm.federated.checkpoint import Arrays
from dlm.federated.cohorts import Cohorts
from dlm.federated.ledger import ParticipationLedger
from dlm.federated.provenance import Provenance
from dlm.federated.report import PrivacyReport
from dlm.federated.run_folder import RunBinding, RunFolder, RunState

Done = TypeVar("Done")  # what is told of a round


class FederatedRun(ABC, Generic[Done]):
    """Rounds over users, in a folder that they go on from or, without one, in memory.

    Fields
        rounds      how many there are in all
        rounds_done  how many count
        cohorts     who takes part
        binding     what makes two runs the same
        released    whether rounds are releases, which are done once; simulations are done again
        save_every  rounds between checkpoints
        resumed     whether it goes on with what the folder held
    Guarantees
        a run that was stopped anywhere and goes on with the same seed ends in the same bits,
        journal included; nothing is told of a round before it is kept
    """

    rounds: int
    cohorts: Cohorts
    binding: RunBinding
    released: bool
    save_every: int = 1
    folder: RunFolder | None = None
    rounds_done: int = 0
    resumed: bool = False
    _ends: bool = False  # whether the next checkpoint is the last for now
    _in_round: bool = False  # also after one that broke off
    _over: str = ""  # why the run ended early; "" while it has not

    def _begin(self, folder: RunFolder | Path | None) -> None:
        """Takes the folder over: goes on from what it holds, or begins there."""
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
            own = len(found.private) - len(self.cohorts.arrays())
            self.cohorts.restore(found.private[own:], found.ledger, found.now_s)
            self._restore(found.public, found.private[:own], found.facts)
            self.rounds_done, self.resumed = found.done, True
        except BaseException:
            self.close()
            raise

    def run(self, until: int | None = None) -> Iterator[Done]:
        """Runs the remaining rounds, at most up to `until`, and reports each once it counts.

        Raises
            PrivacyError      a participation that breaks the enforced bounds; a round of this run
                              broke off in this process
            TrainingDiverged  after the round that shows it, which counts; and at once of a run that
                              goes on from there
        """
        last = min(self.rounds, self.rounds if until is None else until)
        if self.folder is not None:
            # A report of fewer rounds must not stand beside what more gave, if this is killed.
            for path in self.folder.reports:
                path.unlink(missing_ok=True)
        waiting: list[Done] = []
        while self.rounds_done < last:
            if self._over:
                raise TrainingDiverged(self._over)
            if self._in_round:
                raise PrivacyError(
                    f"round {self.rounds_done} (from 0) of this run broke off, perhaps after its "
                    "noise was drawn: going on here could release it twice. Open the run again"
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
        """Lets others have the folder."""
        if self.folder is not None:
            self.folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ledger(self) -> ParticipationLedger:
        """Who took part when."""
        return self.cohorts.ledger

    def _cohort(self, index: int) -> list[int]:
        """The users of a round, who are in the ledger from then on."""
        return self.cohorts.draw(index)

    def _lives(self) -> dict[str, Any]:
        """Of a stage whose rounds are releases, the lives of the run (`lineage`), for its extras;
        a simulation that goes on draws the same noise again."""
        if self.folder is None or not self.released:
            return {}
        return {"lives": self.folder.lives_after(self.rounds_done)}

    def _save(self, done: Sequence[Done]) -> None:
        if self.folder is None:
            return
        public, private, facts = self._arrays()
        state = RunState(
            self.rounds_done,
            public,
            [*private, *self.cohorts.arrays()],
            self.ledger,
            self.cohorts.now_s,
            facts,
        )
        lines = [self._line(one) for one in done]
        record = self._record(public)
        self.folder.save(state, self.binding, lines, released=self.released, record=record)

    def _record(self, public: Arrays) -> Provenance | None:
        """The record that a checkpoint with these arrays carries; None where a file of its own is
        made of them, with a record beside it."""
        del public
        return None

    @abstractmethod
    def report(self, *, at: datetime | None = None, data_name: str = "") -> PrivacyReport:
        """The privacy report of the rounds that count, from their ledger: when this is, and what
        the users' data set is called."""

    @abstractmethod
    def _first(self) -> None:
        """Makes the state before the first round."""

    @abstractmethod
    def _round(self, index: int, users: Sequence[int], is_last: bool) -> Done:
        """Takes the state one round further, with these users."""

    @abstractmethod
    def _arrays(self) -> tuple[Arrays, Arrays, Mapping[str, Any]]:
        """(what was released, what stays private, facts about the former) of the state."""

    @abstractmethod
    def _restore(self, public: Arrays, private: Arrays, facts: Mapping[str, Any]) -> None:
        """Makes the state from what `_arrays` gave."""

    @abstractmethod
    def _line(self, done: Done) -> dict[str, Any]:
        """What the journal says of a round; `round` counts from 0."""
