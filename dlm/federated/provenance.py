"""What protects the people whose text a file was made from: a small record that files carry.

    record = Provenance.none("words were counted without noise", stages=[...])
    record.derive("wordpieces").to_json()       # whatever is made from it inherits what it says

The record stands beside counts and pieces, in a checkpoint, in the header of an ARPA file (`line`)
and in the manifest of a shard set. It names the SHA-256 of what it speaks of, and its own digest
covers all that it says. Both find a mistake; neither finds an edit by somebody who computes the
digest anew. Against that it can be signed (`signature`): one that was read and not verified with a
trusted key is "unverified", and so is whatever is made from it.
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
FORMAT_VERSION = 2
LINE_PREFIX = "privacy: "
UNIT = "user"
ADJACENCY = "zero-out"
# How much a record is worth to whoever holds it; not a part of it.
FIRST_HAND = "first hand"  # of what this process did itself
UNVERIFIED = "unverified"  # read from a file, and by no key that is trusted
WORTH = {UNVERIFIED: "unverified: this record was not verified with a trusted key"}


def is_record_line(line: str) -> bool:
    """Whether a line of a model's header is a record. Others may begin alike, as `privacy: none`:
    they are free text and claim nothing."""
    return line.startswith(LINE_PREFIX) and line.removeprefix(LINE_PREFIX).lstrip()[:1] == "{"


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
class PublicInput:
    """Something that no user's text is in, because somebody says so.

    Fields
        what    as "the vocabulary words.txt"
        by      who says it
        sha256  of its content; None where that is not known
    """

    what: str
    by: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not (self.by.strip() and self.what.strip()):
            raise PrivacyError(
                f"{self.what or 'something'} is said to be public by {self.by!r}: name who says so"
            )

    def __str__(self) -> str:
        digest = "" if self.sha256 is None else f", SHA-256 {self.sha256}"
        return f"{self.what} (public, says {self.by}{digest})"


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
    public_inputs: tuple[PublicInput, ...] = ()  # what is in it and public, as somebody says
    unverified: tuple[str, ...] = ()  # what went in with a record that was not verified
    content: Mapping[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 by name
    standing: str = dataclasses.field(default=FIRST_HAND, compare=False)

    def __post_init__(self) -> None:
        if (self.guarantee is None) != bool(self.reasons):
            raise PrivacyError("a record has a guarantee, or reasons why there is none: not both")

    @classmethod
    def none(cls, *reasons: str, **fields: Any) -> Provenance:
        """A record that promises nothing, for these reasons."""
        return cls(None, tuple(reasons), **fields)

    @classmethod
    def public(cls, by: str, what: str, sha256: str | None = None) -> Provenance:
        """A record of what no user's text is in, as somebody says: it owes nobody anything.

        Raises
            PrivacyError  nobody is named
        """
        return cls(Guarantee(0.0, 0.0, 0.0), public_inputs=(PublicInput(what, by.strip(), sha256),))

    @property
    def is_public(self) -> bool:
        """Whether it touched no user, as somebody says."""
        nothing = self.guarantee == Guarantee(0.0, 0.0, 0.0)
        return nothing and not self.stages and bool(self.public_inputs)

    def statement(self, *, held_out: int = 0, with_standing: bool = True) -> str:
        """The guarantee in one or two sentences, or that there is none and why.

        Args
            held_out       users who were evaluated without noise, whom it does not cover
            with_standing  False leaves out that this record is unverified, for who said so already
        """
        if self.guarantee is None:
            text = "NO GUARANTEE: " + "; ".join(self.reasons) + "."
            if self.simulated is not None:
                text += (
                    " Figures of a simulation, which promise nothing to anybody: "
                    f"{self.simulated.statement()}."
                )
            return text
        if self.is_public:
            says = "; ".join(str(one) for one in self.public_inputs)
            text = f"Public: no user's text is in it. {says[0].upper()}{says[1:]}."
        else:
            besides = f" ({held_out} held-out {self.unit}s are not covered)" if held_out else ""
            text = f"{self.guarantee.statement()} for each {self.unit} who took part{besides}."
        if self.standing != FIRST_HAND and with_standing:
            text += f" {WORTH.get(self.standing, self.standing).capitalize()}."
        if self.unverified and self.standing != UNVERIFIED:
            of = _and(self.unverified)
            text += f" Unverified: the record of {of} was not verified with a trusted key."
        return text

    def derive(self, step: str, **content: str) -> Provenance:
        """The record of something made from this without touching users: it inherits all of it.

        Args
            step     what was done
            content  SHA-256 of what was made, by name: the new record speaks of that alone
        """
        made = dataclasses.replace(self, derived=(*self.derived, step), content={})
        if self.standing == UNVERIFIED and self.guarantee is not None:
            # A signature of what is made does not make up for one that was not there.
            of = f"what {step} is made of"
            made = dataclasses.replace(made, standing=FIRST_HAND, unverified=(*self.unverified, of))
        return made.about(**content)

    def verified(self, key: str) -> Provenance:
        """The record, signed by a trusted key of this name."""
        return dataclasses.replace(self, standing=f"verified: signed by the key {key}")

    def about(self, **content: str) -> Provenance:
        """The record with the SHA-256 of what it speaks of, by name, beside those it has."""
        return dataclasses.replace(self, content={**self.content, **content})

    def speaks_of(self, **content: str) -> bool:
        """Whether these SHA-256 are those that the record has under these names."""
        return all(self.content.get(name) == digest for name, digest in content.items())

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
            "public": [dataclasses.asdict(one) for one in self.public_inputs],
            "unverified": list(self.unverified),
            "content": dict(self.content),
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
        """Reads `to_dict`; raises as `from_json`. What is read is unverified."""
        try:
            body = dict(record)
            if body["format"] != FORMAT_NAME:
                raise ValueError(body["format"])
            version = body["version"]
            if version not in (1, FORMAT_VERSION):
                raise FormatError(
                    f"{place} is of version {version}; this program reads 1 to {FORMAT_VERSION}"
                )
            digest = body.pop("digest")
            if digest != digest_of(body):
                raise PrivacyError(
                    f"{place} was changed after it was written: its digest does not fit. Take it "
                    "from the run again; nothing can be claimed from this one"
                )
            if version == 1:
                body |= {"public": [], "unverified": [], "content": {}}
            found = cls(
                None if body["guarantee"] == "none" else Guarantee(**body["guarantee"]),
                tuple(body["reasons"]),
                Guarantee(**body["simulated"]) if "simulated" in body else None,
                body["unit"],
                body["adjacency"],
                tuple(body["stages"]),
                tuple(body["ledgers"]),
                body["config"],
                tuple(body["derived"]),
                tuple(PublicInput(**one) for one in body["public"]),
                tuple(body["unverified"]),
                dict(body["content"]),
                UNVERIFIED,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise FormatError(f"{place} is no privacy provenance: {exc!r}") from exc
        return found._without_an_empty_promise()

    def _without_an_empty_promise(self) -> Provenance:
        """Itself, if a guarantee rests on a stage or on somebody's word that all is public.

        Version 1 had "public" without a name.
        """
        if self.guarantee is None or self.stages or self.is_public:
            return self
        why = "the record names no stage to compose, and nobody who says that it is public"
        return dataclasses.replace(self, guarantee=None, reasons=(why,))


def digest_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever their order: what records and configs are compared by."""
    raw = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)
    return hashlib.sha256(raw.encode()).hexdigest()


def content_digest(content: bytes) -> str:
    """SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
