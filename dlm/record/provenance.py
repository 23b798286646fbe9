"""A small record, kept with a file, of how the people behind the file's text are protected.

A record names the SHA-256 of its file's content, and has a digest of itself. Both detect mistakes,
but not an edit by someone who recomputes the digest; a signature (`signature`) detects that, too. A
record that was read but not verified with a trusted key is "unverified", and so is anything that
was made from its file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.errors import FormatError, PrivacyError

FORMAT_NAME = "dlm privacy provenance"
FORMAT_VERSION = 2
LINE_PREFIX = "privacy: "
UNIT = "user"
ADJACENCY = "zero-out"
# How far this process can trust a record; not stored in the record.
FIRST_HAND = "first hand"  # made by this process, or noted earlier by the same run
UNVERIFIED = "unverified"  # read from a file, not verified with a trusted key
WORTH = {UNVERIFIED: "unverified: this record was not verified with a trusted key"}


def check_format(body: Mapping[str, Any], name: str, version: int, place: object) -> None:
    """Raises FormatError unless a file's JSON has this format and version."""
    if body["format"] != name:
        raise FormatError(f"{place} is not a {name}: its format is {body['format']!r}")
    if body["version"] != version:
        raise FormatError(
            f"{place} is a {name} of version {body['version']}; this program reads version "
            f"{version}. Rebuild the file with this program"
        )


def is_record_line(line: str) -> bool:
    """Whether a line of a model's header is a record; `privacy: none`, say, is only free text."""
    return line.startswith(LINE_PREFIX) and line.removeprefix(LINE_PREFIX).lstrip()[:1] == "{"


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy; `rho`, of zero-concentrated privacy, may be None."""

    epsilon: float
    delta: float
    rho: float | None

    def __post_init__(self) -> None:
        numbers = [self.epsilon, self.delta, *([] if self.rho is None else [self.rho])]
        if not all(math.isfinite(n) and n >= 0 for n in numbers) or self.delta >= 1:
            raise PrivacyError(
                f"epsilon {self.epsilon}, delta {self.delta}, rho {self.rho} are not a valid "
                "guarantee; expected finite numbers, 0 or above, and a delta below 1"
            )

    def statement(self) -> str:
        text = f"(epsilon = {_up(self.epsilon)}, delta = {self.delta:g})-differential privacy"
        return text if self.rho is None else f"{text}, {_up(self.rho)}-zCDP"


def _up(value: float) -> str:
    """Writes three significant digits, rounded up, so that epsilon is never understated."""
    if value == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step - 1e-9) * step:.4g}"


@dataclass(frozen=True)
class PublicInput:
    """An input (`what`, such as "the vocabulary words.txt") attested to have no user's text."""

    what: str
    by: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not (self.by.strip() and self.what.strip()):
            raise PrivacyError(
                f"{self.what or 'something'} is declared public by {self.by!r}; say what is "
                "public, and give the name of the person who attests it"
            )

    def __str__(self) -> str:
        digest = "" if self.sha256 is None else f", SHA-256 {self.sha256}"
        return f"{self.what} (public, says {self.by}{digest})"


@dataclass(frozen=True)
class UnverifiedInput:
    """An input (`what`) whose record, with digest `record`, was read but not verified."""

    what: str
    record: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Provenance:
    """A guarantee, the people that it covers and its basis; or why there is no guarantee.

    `guarantee` is None exactly if `reasons` is not empty. `simulated` is what would be guaranteed
    if the keys had been secret: the figures of an experiment, never a promise.
    """

    guarantee: Guarantee | None
    reasons: tuple[str, ...] = ()
    simulated: Guarantee | None = None
    unit: str = UNIT
    adjacency: str = ADJACENCY
    stages: tuple[Mapping[str, Any], ...] = ()  # each stage that used users' data, as JSON
    ledgers: tuple[str, ...] = ()  # digests of the participation ledgers
    config: str | None = None  # digest of the settings of the run
    derived: tuple[str, ...] = ()  # later steps, which did not use users' data again
    public_inputs: tuple[PublicInput, ...] = ()  # inputs attested to be public
    unverified: tuple[UnverifiedInput, ...] = ()  # unverified at creation; covered by the digest
    content: Mapping[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 by name
    standing: str = dataclasses.field(default=FIRST_HAND, compare=False)
    # Digests of the records that this record's trusted signer saw; not stored in the record.
    seen: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if (self.guarantee is None) != bool(self.reasons):
            raise PrivacyError(
                "a record needs either a guarantee or reasons why it has none; got both or neither"
            )

    @classmethod
    def none(cls, *reasons: str, **fields: Any) -> Provenance:
        return cls(None, tuple(reasons), **fields)

    @classmethod
    def public(cls, by: str, what: str, sha256: str | None = None) -> Provenance:
        """The record of something that a named person attests to contain no user's text."""
        return cls(Guarantee(0.0, 0.0, 0.0), public_inputs=(PublicInput(what, by.strip(), sha256),))

    @property
    def is_public(self) -> bool:
        nothing = self.guarantee == Guarantee(0.0, 0.0, 0.0)
        return nothing and not self.stages and bool(self.public_inputs)

    def statement(self, *, held_out: int = 0, with_standing: bool = True) -> str:
        """The guarantee in one or two sentences, or why there is none.

        Args
            held_out       users who were evaluated without noise and are not covered
            with_standing  False leaves out that this record is unverified, if that is already said
        """
        if self.guarantee is None:
            text = "NO GUARANTEE: " + "; ".join(self.reasons) + "."
            if self.simulated is not None:
                text += (
                    " Figures of a simulation, which promise nothing to anyone: "
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
            worth = WORTH.get(self.standing, self.standing)
            text += f" {worth[0].upper()}{worth[1:]}."
        if self.still_unverified and self.standing != UNVERIFIED:
            of = _and(self.still_unverified)
            text += f" Unverified: the record of {of} was not verified with a trusted key."
        return text

    @property
    def still_unverified(self) -> tuple[UnverifiedInput, ...]:
        """The unverified inputs whose record this record's trusted signer has not seen."""
        return tuple(one for one in self.unverified if one.record not in self.seen)

    def derive(self, step: str, **content: str) -> Provenance:
        """Returns the record of an output that `step` makes from this record's file without users'
        data. The output's record inherits everything but `content`, which has the SHA-256 of the
        output by name."""
        made = dataclasses.replace(
            self,
            derived=(*self.derived, step),
            content={},
            unverified=self.still_unverified,
            seen=frozenset(),
        )
        if self.standing == UNVERIFIED and self.guarantee is not None:
            # Signing the output does not make up for an unsigned input.
            of = UnverifiedInput(f"what {step} is made of", self.digest)
            made = dataclasses.replace(made, standing=FIRST_HAND, unverified=(*self.unverified, of))
        return made.about(**content)

    def verified(self, key: str, seen: Iterable[str] = ()) -> Provenance:
        """Returns this record marked as signed by the trusted key `key`, whose owner also saw the
        records with the digests `seen`."""
        made = dataclasses.replace(self, seen=frozenset(seen))
        inputs = [one for one in self.unverified if one not in made.still_unverified]
        standing = f"verified: signed by the key {key}"
        if inputs:
            standing += f" together with {_and(inputs)}"
        return dataclasses.replace(made, standing=standing)

    def about(self, **content: str) -> Provenance:
        """Returns this record with more SHA-256 digests, by name, of what it is about."""
        return dataclasses.replace(self, content={**self.content, **content})

    def speaks_of(self, **content: str) -> bool:
        """Whether the record has these SHA-256 digests under these names."""
        return all(self.content.get(name) == digest for name, digest in content.items())

    def to_dict(self) -> dict[str, Any]:
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
            "unverified": [dataclasses.asdict(one) for one in self.unverified],
            "content": dict(self.content),
        }
        if self.simulated is not None:
            body["simulated"] = dataclasses.asdict(self.simulated)
        return {**body, "digest": digest_of(body)}

    def to_json(self) -> str:
        """Returns this record as one line of JSON; equal records give equal lines."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def line(self) -> str:
        """This record as a line for the header of an ARPA file."""
        return LINE_PREFIX + self.to_json()

    @property
    def digest(self) -> str:
        return str(self.to_dict()["digest"])

    @classmethod
    def from_json(cls, text: str | bytes, place: str = "the record") -> Provenance:
        """Reads a record from JSON or a `line`; the result is unverified. Raises FormatError, also
        for another version, and PrivacyError if the digest does not match the content."""
        try:
            if isinstance(text, bytes):
                text = text.decode("utf-8")
            return cls.from_dict(json.loads(text.strip().removeprefix(LINE_PREFIX)), place)
        except (json.JSONDecodeError, UnicodeDecodeError) as exc:
            raise FormatError(
                f"{place} is not a privacy record: {exc}. Copy the record and its file again"
            ) from exc

    @classmethod
    def from_dict(cls, record: Any, place: str = "the record") -> Provenance:
        """Like `from_json`, from the values of `to_dict`."""
        try:
            body = dict(record)
            check_format(body, FORMAT_NAME, FORMAT_VERSION, place)
            take_digest(body, place)
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
                tuple(PublicInput(**one) for one in body["public"]),
                tuple(UnverifiedInput(**one) for one in body["unverified"]),
                dict(body["content"]),
                UNVERIFIED,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise FormatError(
                f"{place} is not a privacy record: {exc!r}. Copy the record and its file again"
            ) from exc


def digest_of(body: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of JSON values, to compare records or settings; ignores key order."""
    raw = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)
    return hashlib.sha256(raw.encode()).hexdigest()


def take_digest(body: dict[str, Any], place: object) -> None:
    """Removes the digest from a record's or report's JSON; PrivacyError if it does not match."""
    if body.pop("digest", None) != digest_of(body):
        raise PrivacyError(
            f"{place} was changed after it was written: its digest does not match. Copy it from "
            "the run again; this record guarantees nothing"
        )


def content_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _and(inputs: Sequence[UnverifiedInput]) -> str:
    names = [str(one) for one in inputs]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
