"""What was guaranteed, to whom, and how that is known: the checklist that a private model needs.

    report = build(stages, ledgers={"network": ledger}, config=run.to_dict(), delta=1e-10)
    report.write(Path("privacy.md"), Path("privacy.json"))
    report.provenance                           # the small record that files carry

The checklist is GDP's Appendix A and BLT's Appendix C, after Ponomareva et al. (2023) section 5.3.
It is filled from what happened: the ledgers say who took part when, the stages what noise was
added, and `build` refuses to claim what they do not bear out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.ledger import ParticipationLedger
from dlm.federated.provenance import ADJACENCY, UNIT, Guarantee, Provenance, digest_of
from dlm.files import write_whole

FORMAT_NAME = "dlm privacy report"
FORMAT_VERSION = 1

SETTING = (
    "A central guarantee: whoever runs the training is trusted to do what is said here. Users are "
    "protected from everybody who sees the model or anything else that is released, not from the "
    "server."
)
SECURE_SETTING = (
    " Updates were encoded for secure aggregation, which hides single updates from the server when "
    "the protocol for it is used; the guarantee itself does not rest on that."
)
ACCESSES = (
    "The text of users who keep to the algorithm, its limits of participation among them, in one "
    "training run. A user who does not keep to it weakens nobody else's guarantee. Choosing "
    "settings or a checkpoint by looking at users' data, other runs and A/B tests are not covered."
)
OUTPUT = (
    "The whole sequence of noised sums, and so every model on the way, those sent to devices among "
    "them, and all that is made from them without touching users again."
)
UNIT_TEXT = (
    "One user id of the data with all its text, however much. Where an id is a device, a person "
    "with several devices has a weaker guarantee (group privacy gives it), and several people on "
    "one device share one that is not weaker than each one's own."
)
ADJACENCY_TEXT = (
    "Zero-out: two data sets are neighbours if one is the other with everything that one user adds "
    "replaced by zeros (Kairouz et al. 2021, definition 1.1), a form of adding or removing a user."
)
TRANSPARENCY = (
    "The code that adds noise, counts participations and computes these numbers is this project's; "
    "the digests below say which ledgers and settings they were computed from."
)


@dataclass(frozen=True)
class PrivacyReport:
    """The filled checklist, as text and as data.

    `numbers` is what accounting found for each stage and for all together, None where there is no
    guarantee at all.
    """

    provenance: Provenance
    stages: tuple[Mapping[str, Any], ...]
    ledgers: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Any]
    delta: float
    numbers: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()
    public_data: str = "none"
    secure_aggregation: bool = False
    held_out: int = 0

    def checklist(self) -> list[tuple[str, str]]:
        """(number and title, text) of each point, in the papers' order."""
        setting = SETTING + (SECURE_SETTING if self.secure_aggregation else "")
        return [
            ("1. Setting", setting),
            ("2a. Data accesses covered", self._accesses()),
            ("2b. Final mechanism output", OUTPUT),
            ("2c. Unit of privacy", UNIT_TEXT),
            ("2d. Adjacency", ADJACENCY_TEXT),
            ("3a. Type of accounting", self._accounting()),
            ("3b. Accounting assumptions", self._assumptions()),
            ("3c. The formal statement", self.statement()),
            ("3d. Transparency and verifiability", TRANSPARENCY),
        ]

    def statement(self) -> str:
        """The guarantee in one or two sentences, or that there is none and why."""
        return self.provenance.statement()

    def _accesses(self) -> str:
        text = f"{ACCESSES} Public data used: {self.public_data}."
        if self.held_out:
            text += (
                f" NOT covered: {self.held_out} held-out users, who are in no round and are "
                "evaluated without noise. What is told of them is exact, and they must have agreed "
                "to it."
            )
        return text

    def _accounting(self) -> str:
        if self.numbers is None:
            return "None: there is nothing to account for."
        text = (
            "Gaussian stages compose by zero-concentrated differential privacy into one Gaussian, "
            "whose epsilon is exact."
        )
        if any(stage.get("sampling_rate") is not None for stage in self.stages):
            text += (
                " Stages with Poisson-sampled cohorts are amplified by sampling, by privacy loss "
                "distributions."
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
            if name == "unigrams":
                lines.append("unigrams: the list of words is public; no user's text went into it.")
            planned = (stage.get("extras") or {}).get("rounds_planned", stage["rounds"])
            if planned > stage["rounds"]:
                lines.append(
                    f"{name}: it ended after {stage['rounds']} of {planned} planned rounds, and "
                    "that this was decided without looking at what it released. If it was decided "
                    f"by that (early stopping), account for all {planned}."
                )
            if stage.get("sampling_rate") is not None:
                lines.append(
                    f"{name}: every user takes part in each of {stage['rounds']} rounds with "
                    f"probability {stage['sampling_rate']}, independently; the sizes of the "
                    "cohorts bear that out."
                )
                continue
            gap = stage["gap"]
            lines.append(
                f"{name}: a user takes part at most {stage['max_part']} times, and the rounds of "
                f"two participations differ by at least {gap} (MinS {gap - 1})."
            )
            if ledger is not None:
                enforced, seen = ledger["enforced"], ledger["observed"]
                gap_seen = "more than the run" if seen["gap"] is None else seen["gap"]
                how = [
                    f"{what} {'enforced' if enforced[field] is not None else 'measured'}"
                    for what, field in (("the gap was", "gap"), ("participations were", "max_part"))
                ]
                lines.append(
                    f"Of {ledger['population']} users {ledger['participants']} took part; observed "
                    f"were a gap of {gap_seen}"
                    f" and at most {seen['max_part']} participations; {' and '.join(how)}."
                )
        return "\n".join(lines)

    def markdown(self) -> str:
        """The report for people."""
        out = ["# Privacy report", "", f"**{self.statement()}**", ""]
        for title, text in self.checklist():
            out += [f"## {title}", "", text.replace("\n", "\n\n"), ""]
        out += [
            "## Stages",
            "",
            "| stage | mechanism | noise multiplier | rounds | gap | max part |",
        ]
        out += ["| --- | --- | --- | --- | --- | --- |"]
        for stage in self.stages:
            noise = stage.get("noise_multiplier")
            out.append(
                f"| {stage['stage']} | {stage.get('mechanism')} | "
                f"{'none' if noise is None else noise} | {stage.get('rounds')} | "
                f"{stage.get('gap')} | {stage.get('max_part')} |"
            )
        if self.numbers is not None:
            out += [
                "",
                "## Numbers",
                "",
                "```json",
                json.dumps(_plain(self.numbers), indent=1),
                "```",
            ]
        out += ["", "## Evidence", "", f"* settings: SHA-256 {self.provenance.config}"]
        out += [
            f"* participation ledger of {name}: SHA-256 {found['digest']}"
            for name, found in self.ledgers.items()
        ]
        out += ["", "```", self.provenance.to_json(), "```", ""]
        return "\n".join(out)

    def write(self, markdown: Path, as_json: Path) -> None:
        """Writes it for people and for programs, each file whole or not at all."""
        write_whole(markdown, self.markdown().encode())
        write_whole(as_json, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def to_dict(self) -> dict[str, Any]:
        """The report for programs, with a digest."""
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "statement": self.statement(),
            "checklist": {
                title.split(".")[0]: {"title": title.split(". ", 1)[1], "text": text}
                for title, text in self.checklist()
            },
            "delta": self.delta,
            "numbers": _plain(self.numbers),
            "stages": [_plain(stage) for stage in self.stages],
            "ledgers": {name: dict(found) for name, found in self.ledgers.items()},
            "config": _plain(self.config),
            "public_data": self.public_data,
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
    public_data: str = "none",
    secure_aggregation: bool = False,
    derived: Sequence[str] = (),
    inherited: Sequence[Provenance] = (),
    held_out: int = 0,
) -> PrivacyReport:
    """The report of a run, from its records.

    Args
        stages       every stage that touched users: `account.StageRecord`s, or what
                     `Collection.stage` gives
        delta        of the guarantee
        ledgers      stage -> who took part in it; a noised stage without one has no guarantee,
                     since nothing shows its assumptions to hold
        simulated    whether keys came from a configured seed: then nothing is guaranteed, and the
                     numbers are told as those of a simulation
        public_data  what was used besides, in words
        secure_aggregation   also said by a stage whose norms are inflated by rounding
        inherited    records of what the run was made with, such as its vocabulary: their stages
                     touched users too and are composed with these; what has no guarantee leaves
                     the whole without
        held_out     users who are in no round and evaluated without noise, which is not covered
    Raises
        PrivacyError   a ledger that has seen more than its stage assumes, fewer or other rounds, or
                       cohorts that were not sampled as they are accounted for
    """
    if not stages:
        raise ConfigError("a report is of at least one stage that touched users")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it is between 0 and 1")
    records = [_as_dict(stage) for stage in stages]
    books = dict(ledgers or {})
    unknown = sorted(set(books) - {str(record["stage"]) for record in records})
    if unknown:
        raise ConfigError(f"a ledger is of {', '.join(unknown)}, which is no stage of this report")
    reasons: list[str] = []
    earlier = [dict(stage) for record in inherited for stage in record.stages]
    simulated = simulated or any(r.get("simulated") is True for r in [*earlier, *records])
    for given in inherited:
        # Of a simulation it is said below, once, and its figures are composed as such; what does
        # not name the stage that was one could pass for noise that nobody knows.
        composed = given.simulated is not None and any(
            s.get("simulated") is True for s in given.stages
        )
        if given.guarantee is None and not composed:
            reasons += given.reasons
        elif not given.stages and not given.is_public:
            reasons.append("a record that the run was made with names no stage to compose")
    for record in records:
        name = str(record["stage"])
        if _is_raw(record):
            reasons.append(f"{name}: users' data were used without noise")
            continue
        book = books.get(name)
        if book is None:
            reasons.append(f"{name}: no ledger shows who took part")
        else:
            check_stage(record, book)
    numbers: dict[str, Any] | None = None
    found: Guarantee | None = None
    notes: tuple[str, ...] = ()
    secret = {str(r["stage"]) for r in records if r.get("sampling_rate") is not None}
    if simulated:
        secret = set()
    stages, records = [*earlier, *stages], [*earlier, *records]
    if not reasons:
        numbers, found, notes = _account(stages, records, delta)
        if found is None:
            reasons.append("accounting finds no finite epsilon")
    if simulated:
        reasons.append(
            "the keys were made from a configured seed: whoever knows it can take the noise off"
        )
    fields: dict[str, Any] = {
        "stages": tuple(_plain(record) for record in records),
        "ledgers": (
            *dict.fromkeys(digest for record in inherited for digest in record.ledgers),
            *(book.digest for book in books.values()),
        ),
        "config": digest_of(_plain(config or {})),
        "derived": (*(step for record in inherited for step in record.derived), *derived),
        "unit": UNIT,
        "adjacency": ADJACENCY,
    }
    provenance = (
        Provenance(None, tuple(reasons), found if simulated else None, **fields)
        if reasons
        else Provenance(found, **fields)
    )
    return PrivacyReport(
        provenance,
        fields["stages"],
        {name: book.summary(secret=name in secret) for name, book in books.items()},
        dict(config or {}),
        delta,
        numbers,
        notes,
        public_data,
        secure_aggregation or any((r.get("norm_inflation") or 1) > 1 for r in records),
        held_out,
    )


def check_stage(stage: Mapping[str, Any], ledger: ParticipationLedger) -> None:
    """Passes if a ledger bears out what accounting assumes of a stage.

    Raises
        PrivacyError   it has seen more rounds, more participations, a smaller gap, or cohorts that
                       were not sampled as said
    """
    if ledger.last_round is not None and ledger.last_round >= int(stage["rounds"]):
        raise PrivacyError(
            f"{stage['stage']}: the ledger has a round {ledger.last_round}, and accounting is for "
            f"{stage['rounds']} rounds, from 0"
        )
    if stage.get("sampling_rate") is not None:
        ledger.check_poisson(float(stage["sampling_rate"]))
    else:
        ledger.covers(gap=int(stage["gap"]), max_part=int(stage["max_part"]))


def _account(
    stages: Sequence[Any], records: Sequence[Mapping[str, Any]], delta: float
) -> tuple[dict[str, Any], Guarantee | None, tuple[str, ...]]:
    """What `account.compose` finds: (numbers, guarantee, notes)."""
    from dlm.federated.account.compose import StageRecord, compose

    typed = [
        stage if isinstance(stage, StageRecord) else StageRecord.from_json(record)
        for stage, record in zip(stages, records, strict=True)
    ]
    result = compose(typed, delta)
    numbers = _as_dict(result)
    epsilon = float(numbers["epsilon"])
    if not math.isfinite(epsilon):
        return numbers, None, tuple(numbers.get("notes", ()))
    rho = numbers.get("rho")
    finite = rho is not None and math.isfinite(float(rho))
    guarantee = Guarantee(epsilon, delta, float(rho) if finite else None)  # type: ignore[arg-type]
    return numbers, guarantee, tuple(numbers.get("notes", ()))


def _as_dict(record: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return dataclasses.asdict(record)
    if isinstance(record, Mapping):
        return dict(record)
    raise ConfigError(f"{type(record).__name__} is no record of a stage")


def _is_raw(stage: Mapping[str, Any]) -> bool:
    return stage.get("mechanism") == "none" or not stage.get("noise_multiplier")


def _plain(value: Any) -> Any:
    """JSON values: infinities are words, tuples lists, keys text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "infinite" if value > 0 else str(value)
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        return _plain(value.item())
    return value
