"""The privacy report of a whole pipeline, from its first stage to the shard set: made from the
model's record and the files beside the stages' outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.errors import DlmError
from dlm.federated.account.records import compose_records
from dlm.federated.account.runs import PIPELINE_REPORT
from dlm.federated.report.report import PrivacyReport
from dlm.federated.run.run_files import REPORTS
from dlm.files import write_whole
from dlm.index.layout import read_manifest
from dlm.kenlm.open import open_ngrams
from dlm.pipeline.settings import PipelineSettings, counts_of
from dlm.pipeline.stage import Places, Stage
from dlm.record.counts_file import REPORT_JSON
from dlm.record.provenance import Provenance, digest_of, file_digest, is_record_line
from dlm.record.sidecar import sidecar

FORMAT_NAME = PIPELINE_REPORT
FORMAT_VERSION = 1
MARKDOWN, JSON = "privacy.md", "privacy.json"
NOTHING = "no record, so the model has no guarantee"


@dataclass(frozen=True)
class WholeReport:
    """A pipeline's report. `privacy` has the checklist and the model's record; `inputs`, each
    input's record or attestation, if any; `stages`, what each does and writes, and how that is
    protected; `model`, the files with the record; `held_out`, perplexities of held-out text."""

    privacy: PrivacyReport
    inputs: Mapping[str, str]
    stages: Sequence[Mapping[str, str]]
    model: Mapping[str, str]
    held_out: Mapping[str, Any] | None

    def statement(self) -> str:
        return self.privacy.statement()

    def markdown(self) -> str:
        lines = ["", "## The pipeline", "", "| input | protection of the people in its text |"]
        lines += ["| --- | --- |", *(f"| {name} | {said} |" for name, said in self.inputs.items())]
        lines += ["", "| stage | what it does | its output, and how that is protected |"]
        lines += ["| --- | --- | --- |"]
        lines += [f"| {s['stage']} | {s['what']} | {s['wrote']} |" for s in self.stages]
        lines += ["", *(f"* {name}: {value}" for name, value in self.model.items())]
        if self.held_out is not None:
            lines += [f"* {name}: {value}" for name, value in self.held_out.items()]
        return self.privacy.markdown() + "\n".join([*lines, ""])

    def to_dict(self) -> dict[str, Any]:
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "statement": self.statement(),
            "inputs": dict(self.inputs),
            "stages": [dict(stage) for stage in self.stages],
            "model": dict(self.model),
            "held_out": None if self.held_out is None else dict(self.held_out),
            "privacy": self.privacy.to_dict(),
        }
        return {**body, "digest": digest_of(body)}


def write_report(report: WholeReport, folder: Path) -> None:
    write_whole(folder / MARKDOWN, report.markdown().encode())
    write_whole(folder / JSON, (json.dumps(report.to_dict(), indent=1) + "\n").encode())


def whole_report(settings: PipelineSettings, stages: Sequence[Stage]) -> WholeReport:
    """Builds the report of a finished pipeline; raises what `Provenance.from_json` raises."""
    at = Places(settings.run.folder)
    manifest = read_manifest(at.shards)
    record = _model_record(at.model)
    delta = settings.federate.privacy.delta if record.guarantee is None else record.guarantee.delta
    numbers: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    if record.guarantee is not None or record.simulated is not None:
        found = compose_records({"the model": record}, delta=delta)
        numbers, notes = found.numbers, found.notes
    parts = [
        _read(path)
        for path in (Path(f"{counts_of(settings.run)}{REPORT_JSON}"), at.network / REPORTS[1])
    ]
    whole: dict[str, dict[str, Any]] = {"ledgers": {}, "config": {}}
    for part in parts:
        for name, into in whole.items():
            into |= part.get(name, {})
    held_out = _read(at.held_out) if settings.inputs.held_out is not None else None
    unprotected = max(int(part.get("held_out_users", 0)) for part in parts)
    privacy = PrivacyReport(
        record,
        record.stages,
        whole["ledgers"],
        whole["config"],
        delta,
        numbers,
        notes,
        settings.federate.aggregation.secure,
        unprotected + int((held_out or {}).get("users", 0)),
        parts[-1].get("made") or "",  # later reports repeat the date of the last use of users' text
        parts[-1].get("data_set"),
    )
    return WholeReport(
        privacy,
        _inputs(settings),
        [{"stage": s.name, "what": s.what, "wrote": _wrote(s, at)} for s in stages],
        {
            "model": f"{at.model.name}, SHA-256 {file_digest(at.model)}",
            "shard set": f"{manifest.shard_set} of model {manifest.model}",
        },
        held_out,
    )


def _model_record(model: Path) -> Provenance:
    with open_ngrams(model) as reader:
        lines = [line for line in reader.comments if is_record_line(line)]
    if not lines:
        return Provenance.none("the model has no record")
    return Provenance.from_json(lines[0], str(model))


def _inputs(settings: PipelineSettings) -> dict[str, str]:
    inputs, public = settings.inputs, settings.inputs.public
    found = {"inputs.users": "depends on each stage; see the stages"}
    if inputs.held_out is not None:
        found["inputs.held_out"] = "measured without noise, so these users are not covered"
    given = {
        name: path
        for name, path in inputs.files().items()
        if name in ("wordlist", "vocabulary", "text", "topology")
    }
    for name, path in given.items():
        record = _record_of(path)
        if record is None:
            digest = "" if path.is_dir() else f", SHA-256 {file_digest(path)}"
            said = f"public, says {public}{digest}" if public else NOTHING
        else:
            said = f"record: {record.statement()}"
        found[f"inputs.{name}, {path.name}"] = said
    if text := settings.federate.pretrain.text:
        by = settings.federate.pretrain.public
        recorded = "has a record" if sidecar(text).exists() else NOTHING
        found[f"federate.pretrain.text, {Path(text).name}"] = (
            f"public, says {by}, SHA-256 {file_digest(text)}" if by else recorded
        )
    return found


def _record_of(path: Path) -> Provenance | None:
    if sidecar(path).exists():
        body = _read(sidecar(path)).get("provenance")
        return Provenance.from_dict(body, str(sidecar(path)))
    try:
        with open_ngrams(path) as reader:
            lines = [line for line in reader.comments if is_record_line(line)]
    except DlmError:  # a list of words, or plain text
        return None
    return Provenance.from_json(lines[0], str(path)) if lines else None


def _wrote(stage: Stage, at: Places) -> str:
    name = stage.plan.writes[0]
    path = at.place(name)
    if stage.name == "federate":
        record = _read(path.with_name(REPORTS[1])).get("provenance")
        return f"{name}: {Provenance.from_dict(record).statement()}"
    if stage.name in ("unigrams", "pieces", "distill", "prune"):
        found = _record_of(path)
        return f"{name}: {NOTHING if found is None else found.statement()}"
    return name


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
