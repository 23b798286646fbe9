"""What protects the people whose text a file was made from: a small record that files carry.

    record = Provenance.none("words were counted without noise", stages=[...])
    record.derive("wordpieces").to_json()       # whatever is made from it inherits what it says

The record stands beside counts and pieces, in the header of an ARPA file (`line`) and in the
manifest of a shard set. Its digest tells an edit by hand or by mistake, not an edit by somebody who
computes the digest anew; what is *claimed* rests on the ledger and the report it names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.errors import FormatError, PrivacyError

FORMAT_NAME = "dlm privacy provenance"
FORMAT_VERSION = 1
LINE_PREFIX = "privacy: "
UNIT = "user"
ADJACENCY = "zero-out"


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, and rho of zero-concentrated privacy if it has one."""

    epsilon: float
    delta: float
    rho: float | None

    def __post_init__(self) -> None:
        numbers = [self.epsilon, self.delta, *([] if self.rho is None else [self.rho])]
        if not all(math.isfinite(n) and n >= 0 for n in numbers) or self.delta >= 1:
            raise PrivacyError(
                f"epsilon {self.epsilon}, delta {self.delta}, rho {self.rho} is no guarantee"
            )

    def statement(self) -> str:
        """In words, each number rounded up."""
        text = f"(epsilon = {_up(self.epsilon)}, delta = {self.delta:g})-differential privacy"
        return text if self.rho is None else f"{text}, {_up(self.rho)}-zCDP"


def _up(value: float) -> str:
    """Three significant digits, rounded up: a guarantee is never told smaller than it is."""
    if value == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step - 1e-9) * step:.4g}"


@dataclass(frozen=True)
class Provenance:
    """What is guaranteed, to whom and by what; or that nothing is, and why.

    `guarantee` is None exactly where `reasons` is not empty. `simulated` is what would be
    guaranteed if the keys had been secret: figures of an experiment, never a promise.
    """

    guarantee: Guarantee | None
    reasons: tuple[str, ...] = ()
    simulated: Guarantee | None = None
    unit: str = UNIT
    adjacency: str = ADJACENCY
    stages: tuple[Mapping[str, Any], ...] = ()  # each stage that touched users, as JSON
    ledgers: tuple[str, ...] = ()  # digests of the participation ledgers
    config: str | None = None  # digest of the settings of the run
    derived: tuple[str, ...] = ()  # what was made from it since, without touching users again

    def __post_init__(self) -> None:
        if (self.guarantee is None) != bool(self.reasons):
            raise PrivacyError("a record has a guarantee, or reasons why there is none: not both")

    @classmethod
    def none(cls, *reasons: str, **fields: Any) -> Provenance:
        """A record that promises nothing, for these reasons."""
        return cls(None, tuple(reasons), **fields)

    @classmethod
    def public(cls) -> Provenance:
        """A record of what no user's text is in: whatever is made from it owes them nothing."""
        return cls(Guarantee(0.0, 0.0, 0.0))

    @property
    def is_public(self) -> bool:
        """Whether it touched no user."""
        return self.guarantee == Guarantee(0.0, 0.0, 0.0) and not self.stages

    def statement(self) -> str:
        """The guarantee in one or two sentences, or that there is none and why."""
        if self.is_public:
            return "Public: no user's text is in it."
        if self.guarantee is not None:
            return f"{self.guarantee.statement()} for each {self.unit}."
        text = "NO GUARANTEE: " + "; ".join(self.reasons) + "."
        if self.simulated is not None:
            text += (
                " Figures of a simulation, which promise nothing to anybody: "
                f"{self.simulated.statement()}."
            )
        return text

    def derive(self, step: str) -> Provenance:
        """The record of something made from this without touching users: it inherits all of it."""
        return dataclasses.replace(self, derived=(*self.derived, step))

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with the digest."""
        body: dict[str, Any] = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "guarantee": "none" if self.guarantee is None else dataclasses.asdict(self.guarantee),
            "reasons": list(self.reasons),
            "unit": self.unit,
            "adjacency": self.adjacency,
            "stages": [dict(stage) for stage in self.stages],
            "ledgers": list(self.ledgers),
            "config": self.config,
            "derived": list(self.derived),
        }
        if self.simulated is not None:
            body["simulated"] = dataclasses.asdict(self.simulated)
        return {**body, "digest": digest_of(body)}

    def to_json(self) -> str:
        """The record as one line of JSON, the same for the same record."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def line(self) -> str:
        """One line for the header of an ARPA file."""
        return LINE_PREFIX + self.to_json()

    @property
    def digest(self) -> str:
        """SHA-256 of the record."""
        return str(self.to_dict()["digest"])

    @classmethod
    def from_json(cls, text: str | bytes, place: str = "the record") -> Provenance:
        """Reads a record, or a `line`.

        Raises
            FormatError    no record, or of another version
            PrivacyError   its digest does not fit what it says
        """
        try:
            if isinstance(text, bytes):
                text = text.decode("utf-8")
            return cls.from_dict(json.loads(text.strip().removeprefix(LINE_PREFIX)), place)
        except (json.JSONDecodeError, UnicodeDecodeError) as exc:
            raise FormatError(f"{place} is no privacy provenance: {exc}") from exc

    @classmethod
    def from_dict(cls, record: Any, place: str = "the record") -> Provenance:
        """Reads `to_dict`; raises as `from_json`."""
        try:
            body = dict(record)
            if body["format"] != FORMAT_NAME:
                raise ValueError(body["format"])
            if body["version"] != FORMAT_VERSION:
                raise FormatError(
                    f"{place} is of version {body['version']}; this program reads {FORMAT_VERSION}"
                )
            digest = body.pop("digest")
            if digest != digest_of(body):
                raise PrivacyError(
                    f"{place} was changed after it was written: its digest does not fit. Take it "
                    "from the run again; nothing can be claimed from this one"
                )
            return cls(
                None if body["guarantee"] == "none" else Guarantee(**body["guarantee"]),
                tuple(body["reasons"]),
                Guarantee(**body["simulated"]) if "simulated" in body else None,
                body["unit"],
                body["adjacency"],
                tuple(body["stages"]),
                tuple(body["ledgers"]),
                body["config"],
                tuple(body["derived"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise FormatError(f"{place} is no privacy provenance: {exc!r}") from exc


def digest_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever their order: what records and configs are compared by."""
    raw = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)
    return hashlib.sha256(raw.encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def merged(records: Sequence[Provenance]) -> Provenance:
    """The record of something made from several things.

    Guarantees   one thing without a guarantee leaves the whole without. Several guarantees are not
                 added up here: their stages have to be composed (`report.build`)
    """
    if not records:
        raise PrivacyError("nothing is made from nothing: there is no record to merge")
    if len({record.digest for record in records}) == 1:
        return records[0]
    reasons = tuple(dict.fromkeys(r for record in records for r in record.reasons))
    guaranteed = [record for record in records if record.guarantee is not None]
    if len(guaranteed) > 1 and not reasons:
        raise PrivacyError(
            "two guarantees are not one: compose their stages in one report, which gives the record"
        )
    stages = [json.dumps(dict(s), sort_keys=True) for record in records for s in record.stages]
    return Provenance(
        None,
        reasons,
        stages=tuple(json.loads(stage) for stage in dict.fromkeys(stages)),
        ledgers=tuple(dict.fromkeys(x for record in records for x in record.ledgers)),
        derived=tuple(dict.fromkeys(x for record in records for x in record.derived)),
    )
