"""The privacy report of a model: the guarantee, the people it covers, and the evidence; `checklist`
has the text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlm import __version__
from dlm.errors import ConfigError, PrivacyError
from dlm.federated.account.records import compose_records, plain
from dlm.federated.report import checklist
from dlm.files import write_whole
from dlm.record.ledger import ParticipationLedger
from dlm.record.lookup import REPORT_FORMAT
from dlm.record.provenance import (
    Provenance,
    digest_of,
)
from dlm.units import counted

FORMAT_VERSION = 1


@dataclass(frozen=True)
class PrivacyReport:
    """The completed checklist, as text and as data; `numbers` is None if there is no guarantee."""

    provenance: Provenance
    stages: tuple[Mapping[str, Any], ...]
    ledgers: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Any]
    delta: float
    numbers: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()
    secure_aggregation: bool = False
    held_out: int = 0
    made: str = ""
    data: Mapping[str, str] | None = None

    def checklist(self) -> list[tuple[str, str]]:
        """Returns (number and title, text) of each point, in the papers' order."""
        secure = checklist.secure_setting(self.stages) if self.secure_aggregation else ""
        said = [str(one) for one in self.provenance.public_inputs]
        return [
            ("1. Setting and adversary", checklist.SETTING + secure),
            ("2a. Data accesses covered", self._accesses()),
            ("2b. Final mechanism output", checklist.OUTPUT),
            ("2c. Unit of privacy", checklist.UNIT_TEXT),
            ("2d. Adjacency", checklist.ADJACENCY_TEXT),
            ("3a. Type of accounting", self._accounting()),
            ("3b. Accounting assumptions", self._assumptions()),
            ("3c. The formal statement", self.statement()),
            ("3d. Transparency and verifiability", checklist.TRANSPARENCY),
            ("4a. Noise", checklist.noise(self.stages)),
            (
                "4b. What was trusted",
                checklist.trusted(self.stages, said, self.provenance.unverified),
            ),
            ("4c. What was enforced", checklist.enforced(self.stages, self.ledgers, self.config)),
            ("4d. What is not covered", checklist.limits(self.held_out)),
        ]

    def statement(self) -> str:
        return self.provenance.statement(held_out=self.held_out)

    def _accesses(self) -> str:
        public = "; ".join(map(str, self.provenance.public_inputs)) or "none"
        return f"{checklist.accesses(self.stages)}\nPublic data used: {public}."

    def _accounting(self) -> str:
        if self.numbers is None:
            return "None: there is nothing to account for."
        text = (
            "Stages are composed adaptively, as zero-concentrated differential privacy, with a "
            "bound rho that holds whatever was released; epsilon holds for every mechanism with "
            "that rho."
        )
        if any(stage.get("sampling_rate") is not None for stage in self.stages):
            text += (
                " For stages with Poisson-sampled cohorts, amplification by sampling is computed "
                "from Renyi divergences of integer orders."
            )
        return " ".join([text, *(f"{note}." for note in self.notes)])

    def _assumptions(self) -> str:
        lines = []
        for stage in self.stages:
            name = stage["stage"]
            ledger = self.ledgers.get(str(name))
            if _is_raw(stage):
                lines.append(f"{name}: no noise, nothing assumed.")
                continue
            planned = (stage.get("extras") or {}).get("rounds_planned", stage["rounds"])
            if ledger is not None and ledger["rounds"] < stage["rounds"]:
                lines.append(
                    f"{name}: the run ended after {ledger['rounds']} of {planned} planned rounds "
                    "because its model diverged. That depends on what was released, so the numbers "
                    f"are for all {planned}."
                )
            if planned > stage["rounds"]:
                lines.append(
                    f"{name}: the run ended after {stage['rounds']} of {planned} planned rounds. "
                    "The numbers assume that nobody decided so by looking at its output; if "
                    f"somebody did (early stopping), account for all {planned}."
                )
            if stage.get("sampling_rate") is not None:
                lines.append(
                    f"{name}: every user takes part in each of {stage['rounds']} rounds with "
                    f"probability {stage['sampling_rate']}, independently; the sizes of the "
                    "cohorts agree with that."
                )
                continue
            gap = stage["gap"]
            how = checklist.sampling(str(stage.get("sampling")), None)
            lines.append(
                f"{name}: a user takes part at most "
                f"{counted(stage['max_participations'], 'time')}, and the rounds of two "
                f"participations differ by at least {gap} (MinS {gap - 1}). "
                f"Cohorts: {how}."
            )
            if ledger is None or ledger["observed"] is None:
                continue
            seen = ledger["observed"]
            gap_seen = (
                "nobody came back" if seen["gap"] is None else f"a gap of {seen['gap']} rounds"
            )
            lines.append(
                f"Of {ledger['population']} users, {ledger['participants']} took part; observed: "
                f"{gap_seen}, at most {counted(seen['max_participations'], 'participation')} per "
                "user. The numbers are based on what was enforced (4c), not on this."
            )
        return "\n".join(lines)

    def markdown(self) -> str:
        out = ["# Privacy report", "", f"**{self.statement()}**", ""]
        out += [f"* {what}: {value}" for what, value in self._head().items()] + [""]
        for title, text in self.checklist():
            # Lines of a list stay together; other lines become paragraphs.
            gap = "\n" if text.startswith("* ") else "\n\n"
            out += [f"## {title}", "", text.replace("\n", gap), ""]
        out += [
            "## Stages",
            "",
            "| stage | mechanism | noise multiplier | rounds | gap | max participations |",
        ]
        out += ["| --- | --- | --- | --- | --- | --- |"]
        for stage in self.stages:
            noise = stage.get("noise_multiplier")
            out.append(
                f"| {stage['stage']} | {stage.get('mechanism')} | "
                f"{'none' if noise is None else noise} | {stage.get('rounds')} | "
                f"{stage.get('gap')} | {stage.get('max_participations')} |"
            )
        if self.numbers is not None:
            out += [
                "",
                "## Numbers",
                "",
                "```json",
                json.dumps(plain(self.numbers), indent=1),
                "```",
            ]
        checks = self.checks()
        if checks:
            out += ["", "## Check the numbers", "", checklist.CHECKS]
        for check in checks:
            out += ["", f"{check['stage']}: {check['text']}.", "", "```", check["command"]]
            out += [f"# rho {check['rho']!r}", check["event"], "```"]
        out += ["", "## Evidence", "", f"* settings: SHA-256 {digest_of(plain(self.config))}"]
        out += [
            f"* participation ledger of {name}: SHA-256 {found['digest']}"
            for name, found in self.ledgers.items()
        ]
        out += ["", "```", self.provenance.to_json(), "```", ""]
        return "\n".join(out)

    def checks(self) -> list[dict[str, Any]]:
        """Returns what `account.recheck.checks_of` does, as JSON; empty if there are no numbers."""
        if self.numbers is None:
            return []
        from dlm.federated.account.compose import StageRecord
        from dlm.federated.account.recheck import checks_of

        stages = [StageRecord.from_json(stage) for stage in self.stages]
        return [check._asdict() for check in checks_of(stages, self.delta)]

    def _head(self) -> dict[str, str]:
        data = self.data or {}
        name, digest = data.get("name", "not named"), data.get("digest", "not noted")
        return {
            "made": f"{self.made or 'date not recorded'}, by dlm {__version__}",
            "data set": f"{name}, digest {digest} (keyed with the ledger: only its holder can "
            "check the digest, or a guess at the data)",
        }

    def write(self, markdown: Path, as_json: Path) -> None:
        write_whole(markdown, self.markdown().encode())
        write_whole(as_json, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def to_dict(self) -> dict[str, Any]:
        body = {
            "format": REPORT_FORMAT,
            "version": FORMAT_VERSION,
            "made": self.made or None,
            "made_by": f"dlm {__version__}",
            "data_set": None if self.data is None else dict(self.data),
            "statement": self.statement(),
            "checklist": {
                title.split(".")[0]: {"title": title.split(". ", 1)[1], "text": text}
                for title, text in self.checklist()
            },
            "delta": self.delta,
            "checks": self.checks(),
            "numbers": plain(self.numbers),
            "stages": [plain(stage) for stage in self.stages],
            "ledgers": {name: dict(found) for name, found in self.ledgers.items()},
            "config": plain(self.config),
            "public_data": [str(one) for one in self.provenance.public_inputs],
            "held_out_users": self.held_out,
            "provenance": self.provenance.to_dict(),
        }
        return {**body, "digest": digest_of(body)}


def build(
    stages: Sequence[Any],
    *,
    delta: float,
    ledgers: Mapping[str, ParticipationLedger] | None = None,
    config: Mapping[str, Any] | None = None,
    simulated: bool = False,
    secure_aggregation: bool = False,
    inputs: Mapping[str, Provenance | None] | None = None,
    void: Sequence[str] = (),
    content: Mapping[str, str] | None = None,
    held_out: int = 0,
    under_way: bool = False,
    at: datetime | None = None,
    data: Mapping[str, str] | None = None,
) -> PrivacyReport:
    """Builds the report of a run from its records.

    Args
        stages       every stage that used users' data: each an `account.StageRecord` or its JSON
        ledgers      stage -> who took part in it; a noised stage without one has no guarantee,
                     since nothing shows that its assumptions hold
        simulated    whether keys came from a configured seed: then nothing is guaranteed
        secure_aggregation   also implied by a stage whose norms are inflated by rounding
        inputs       inputs other than users' text, such as "the vocabulary words.txt", and their
                     records, whose stages are composed with `stages`; an input without a record or
                     guarantee leaves the report without a guarantee
        void         reasons, besides those found here, why there is no guarantee
        content      SHA-256, by name, of the outputs that the record is about
        held_out     number of users who are only evaluated, without noise; no guarantee covers them
        under_way    whether the stages have more rounds than the ledgers so far
        data         `name` of the users' data set, and its keyed `digest`: a plain digest would
                     be a release without noise
    Raises  PrivacyError  see `check_stage`
    """
    if not stages:
        raise ConfigError("a report needs at least one stage that used users' data")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; expected a number above 0 and below 1")
    records = [_as_dict(stage) for stage in stages]
    books = dict(ledgers or {})
    unknown = sorted(set(books) - {str(record["stage"]) for record in records})
    if unknown:
        raise ConfigError(
            f"ledgers were given for {', '.join(unknown)}, but this report has no such stage; "
            "give the ledgers of its stages only"
        )
    reasons = list(void)
    for record in records:
        name = str(record["stage"])
        if _is_raw(record):
            reasons.append(f"{name}: users' data were used without noise")
            continue
        book = books.get(name)
        if book is None:
            reasons.append(f"{name}: no ledger shows who took part")
        else:
            check_stage(record, book, under_way=under_way)
            reasons += unenforced(record, book)
            # The ledger identifies the run: a stage counts once in a composition, and again only
            # if another run repeats it.
            record["extras"] = {**(record.get("extras") or {}), "ledger": book.digest}
    made = compose_records(
        inputs or {},
        delta=delta,
        stages=records,
        ledgers=[book.digest for book in books.values()],
        void=reasons,
        simulated=simulated,
        config=config,
        content=content,
    )
    # The guarantee assumes that nobody knows which users were sampled, or how many.
    sampled = {str(r["stage"]) for r in records if r.get("sampling") == "poisson"}
    secret = sampled if made.provenance.simulated is None else set()
    return PrivacyReport(
        made.provenance,
        made.provenance.stages,
        {name: book.summary(secret=name in secret) for name, book in books.items()},
        dict(config or {}),
        delta,
        made.numbers,
        made.notes,
        secure_aggregation or any((r.get("norm_inflation") or 1) > 1 for r in records),
        held_out,
        "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        data,
    )


def check_stage(
    stage: Mapping[str, Any], ledger: ParticipationLedger, *, under_way: bool = False
) -> None:
    """Raises PrivacyError unless a ledger agrees with the rounds, participations and gap, or
    sampling, that accounting assumes about a stage."""
    if ledger.last_round is not None and ledger.last_round >= int(stage["rounds"]):
        raise PrivacyError(
            f"{stage['stage']}: the ledger's last round is {ledger.last_round}; expected at most "
            f"{int(stage['rounds']) - 1}, the last round accounted for. Give this stage's own "
            "ledger"
        )
    if ledger.rounds != int(stage["rounds"]) and not under_way:
        raise PrivacyError(
            f"{stage['stage']}: the ledger has {ledger.rounds} rounds, but the stage has "
            f"{stage['rounds']}. The ledger is another stage's, or was cut off. Give this stage's "
            "own ledger"
        )
    if stage.get("sampling_rate") is not None:
        ledger.check_poisson(float(stage["sampling_rate"]))
    else:
        ledger.covers(gap=int(stage["gap"]), max_participations=int(stage["max_participations"]))


def unenforced(stage: Mapping[str, Any], ledger: ParticipationLedger) -> list[str]:
    """Lists participation limits that accounting assumes but nothing enforced. Each one rules out a
    guarantee, even if the limit happened to hold."""
    if stage.get("sampling_rate") is not None:
        return []
    found, name, gap = [], stage["stage"], int(stage["gap"])
    if gap > (ledger.gap or 1):
        found.append(f"{name}: a gap of {gap} rounds is assumed, but was not enforced")
    most = ledger.max_participations or -(-int(stage["rounds"]) // (ledger.gap or 1))
    if int(stage["max_participations"]) < most:
        found.append(
            f"{name}: at most {stage['max_participations']} participations are assumed, but only "
            f"a limit of {most} was enforced"
        )
    return found


def _as_dict(record: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return dataclasses.asdict(record)
    if isinstance(record, Mapping):
        return dict(record)
    raise ConfigError(f"a stage is a {type(record).__name__}; expected a StageRecord or its JSON")


def _is_raw(stage: Mapping[str, Any]) -> bool:
    return stage.get("mechanism") == "none" or not stage.get("noise_multiplier")
