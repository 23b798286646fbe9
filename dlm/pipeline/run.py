"""Runs a pipeline, from its settings to a shard set: decides on the next stage, and runs it."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections.abc import Iterable

from dlm import config
from dlm.errors import ConfigError, DlmError
from dlm.federated.run.run_files import PIPELINE_JOURNAL
from dlm.files import locked
from dlm.pipeline.check import check, voids
from dlm.pipeline.decide import Entry, Found, NextAction, StagePlan, next_action
from dlm.pipeline.journal import PipelineJournal
from dlm.pipeline.report import WholeReport, whole_report, write_report
from dlm.pipeline.settings import PipelineSettings
from dlm.pipeline.stage import Places, Stage
from dlm.pipeline.stages import stages_of
from dlm.pipeline.user_stages import USERS
from dlm.progress import ProgressReporter
from dlm.record.provenance import digest_of, file_digest

JOURNAL = PIPELINE_JOURNAL
_LOCK = ".lock"


class Pipeline:
    """A pipeline and its working folder. The stages in `redo`, and those that use their output,
    begin again; ConfigError for a name that no stage has."""

    def __init__(self, settings: PipelineSettings, redo: Iterable[str] = ()) -> None:
        self.settings = settings
        self.folder = settings.run.folder
        self.at = Places(self.folder)
        self.stages = stages_of(settings)
        self._by_name = {stage.name: stage for stage in self.stages}
        self._redo = set(redo)
        for name in self._redo:
            if name not in self._by_name:
                raise ConfigError(
                    f"--redo {name}: no stage has this name{config.nearest(name, self._by_name)}; "
                    f"the stages are {', '.join(self._by_name)}"
                )

    def run(self, progress: ProgressReporter) -> WholeReport:
        """Runs the stages that are not done, and reports what the whole pipeline guarantees.

        Raises
            ConfigError  the settings, input or output of a stage changed; another process uses the
                         folder; the disk has too little room. Also what the stages raise
        Guarantees
            after a stop, the same call resumes. Stages that use no users' text give the
            same bytes; in a simulation all stages do
        """
        check(self.settings)
        for reason in voids(self.settings):
            progress.tell(f"NO GUARANTEE: {reason}")
        self.folder.mkdir(parents=True, exist_ok=True)
        running = ConfigError(
            f"another process is using {self.folder}; wait for it, or give another [run] folder"
        )
        with locked(self.folder / _LOCK, running):
            journal = PipelineJournal(self.folder / JOURNAL)
            digests = Digests(self.at)
            told: set[str] = set()
            while (action := self._next(journal, digests)).kind != "finished":
                self._tell_done(action, told, progress)
                if action.kind == "refuse":
                    raise ConfigError(action.why)
                self._forget_text(action)
                stage = self._by_name[action.stage]
                said = {"go on": ", resumed", "adopt": ", done before"}.get(action.kind, "")
                progress.tell(f"{self._number(stage)}{said}: {stage.what}")
                told.add(stage.name)
                self._do(stage, action, journal, digests, progress)
            self._tell_done(action, told, progress)
            self._forget_text(action)
            report = whole_report(self.settings, self.stages)
            write_report(report, self.folder)
        return report

    def _forget_text(self, action: NextAction) -> None:
        """Removes users' sorted text once no remaining stage reads it."""
        names = [stage.name for stage in self.stages]
        left = self.stages[names.index(action.stage) :] if action.stage else []
        if not any(USERS in stage.plan.reads for stage in left):
            shutil.rmtree(self.at.users, ignore_errors=True)

    def look(self) -> list[tuple[Stage, str]]:
        """Returns each stage with "done" or what `run` would do: "begin", "go on", "adopt" or the
        reason to refuse. Changes nothing."""
        journal = PipelineJournal(self.folder / JOURNAL)
        action = self._next(journal, Digests(self.at))
        found: list[tuple[Stage, str]] = []
        reached = False
        for stage in self.stages:
            if stage.name == action.stage:
                reached = True
                found.append((stage, action.why or action.kind))
            else:
                found.append((stage, "begin" if reached else "done"))
        return found

    def _number(self, stage: Stage) -> str:
        return f"stage {self.stages.index(stage) + 1} of {len(self.stages)}, {stage.name}"

    def _tell_done(self, action: NextAction, told: set[str], progress: ProgressReporter) -> None:
        for stage in self.stages:
            if stage.name == action.stage:
                return
            if stage.name not in told:
                told.add(stage.name)
                progress.tell(f"{self._number(stage)}: already done, skipped")

    def _next(self, journal: PipelineJournal, digests: Digests) -> NextAction:
        plans = [stage.plan for stage in self.stages]
        under_way = frozenset(
            stage.name for stage in self.stages if stage.works is not None and stage.works.exists()
        )
        paths = {p for plan in plans for p in (*plan.reads.values(), *plan.writes)}
        return next_action(plans, journal.entries, Found(digests.of(paths), under_way), self._redo)

    def _do(
        self,
        stage: Stage,
        action: NextAction,
        journal: PipelineJournal,
        digests: Digests,
        progress: ProgressReporter,
    ) -> None:
        if action.kind == "begin":
            # The journal must not list files that were removed.
            journal.forget(action.anew)
            for name in action.anew:
                self._by_name[name].clean(self.at)
            self._redo -= set(action.anew)
            found = digests.of(stage.plan.reads.values())
            reads = {what: found[p] for what, p in stage.plan.reads.items() if p in found}
            journal.write(stage.name, Entry(stage.plan.settings, reads))
        if action.kind != "adopt":
            try:
                stage.run(progress)
            except DlmError as exc:
                for note in as_settings(str(exc), stage.plan):
                    exc.add_note(note)
                raise
        if stage.spare is not None:
            shutil.rmtree(stage.spare, ignore_errors=True)
        entry = journal.entries[stage.name]
        wrote = digests.of(stage.plan.writes)
        journal.write(stage.name, Entry(entry.settings, entry.reads, wrote))


def as_settings(text: str, plan: StagePlan) -> list[str]:
    """Returns notes: the configuration's name for each option in an error's text that it has."""
    options = dict.fromkeys(re.findall(r"--([a-z][a-z-]*[a-z])", text))
    found = []
    for option in options:
        name = option.replace("-", "_")
        place = "run" if name in ("memory", "threads") else plan.name
        if place == "run" or name in plan.settings:
            found.append(f"in the configuration, --{option} is {name} in [{place}]")
    return found


class Digests:
    """Digests of files by key, each computed once while inode, size and time are unchanged."""

    def __init__(self, at: Places) -> None:
        self._at = at
        self._digest = functools.cache(self._made)

    def of(self, keys: Iterable[str]) -> dict[str, str]:
        """Returns the digests of files that exist; a folder has one digest for all its files."""
        found = {}
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                now = self._at.place(key).stat()
                found[key] = self._digest(key, now.st_ino, now.st_size, now.st_mtime_ns)
        return found

    def _made(self, key: str, *_: int) -> str:
        path = self._at.place(key)
        if not path.is_dir():
            return file_digest(path)
        parts = sorted(part for part in path.rglob("*") if part.is_file())
        return digest_of({str(part.relative_to(path)): file_digest(part) for part in parts})
