"""Records who took part, and when: accounting may claim only what this ledger has seen or enforced.

The file has salted hashes of user ids. Anybody who has the file can test guessed ids against it, so
keep it as secret as the list of participants.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.files import write_whole
from dlm.record.provenance import check_format

FORMAT_NAME = "dlm participation ledger"
FORMAT_VERSION = 1
SALT_BYTES = 16
# Sizes of cohorts are rejected if Poisson sampling gives them less than this probability.
IMPLAUSIBLE = 1e-9


class ParticipationLedger:
    """Rounds and their users, with the enforced bounds.

    Args
        population          users that could be drawn
        gap                 minimum rounds from one participation of a user to the next; None: any
        max_participations  maximum participations of a user; None: any
        sampling            how cohorts are drawn, as the sampler's `describe` returns it
        salt                salt of the hashes of ids; None: the operating system draws it
    Guarantees
        after any sequence of calls, `observed_gap` is at least the enforced gap and
        `observed_max_part` at most the enforced maximum; a refused round leaves no trace;
        a saved file that was changed by hand, cut short or extended is not loaded
    """

    def __init__(
        self,
        population: int,
        *,
        gap: int | None = None,
        max_participations: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        salt: bytes | None = None,
    ):
        if (
            population < 1
            or (gap is not None and gap < 1)
            or (max_participations is not None and max_participations < 1)
        ):
            raise ConfigError(
                "population, gap and max_participations must be 1 or more (the last two may be "
                f"None); found {population}, {gap}, {max_participations}"
            )
        self.population, self.gap, self.max_participations = population, gap, max_participations
        self.sampling = dict(sampling or {"kind": "unknown"})
        self._salt = os.urandom(SALT_BYTES) if salt is None else salt
        self._users: dict[str, int] = {}  # hash of the id -> user number, by first participation
        self._last: list[int] = []  # last round of each user
        self._counts: list[int] = []
        self._rounds: list[tuple[int, npt.NDArray[np.uint32]]] = []
        self._least_gap: int | None = None

    def record(self, round: int, user_ids: Iterable[str]) -> None:  # noqa: A002
        """Records a round's users; the last round may be recorded again with the same users. Raises
        PrivacyError if a user appears twice, too early or too often, or a round is out of order."""
        self._record(round, [self._hash(user) for user in user_ids])

    def _record(self, round: int, names: list[str]) -> None:  # noqa: A002
        if len(set(names)) != len(names):
            raise PrivacyError(
                f"round {round}: a user takes part twice, but the bound holds only for one "
                "contribution per user and round"
            )
        last = self.last_round
        if round == last:
            if {self._users.get(name, -1) for name in names} != set(self._rounds[-1][1].tolist()):
                raise PrivacyError(
                    f"round {round} is already recorded with other users: the run was resumed with "
                    "a different cohort. Resume it with the same users and "
                    "settings, or start a new run"
                )
            return
        if round < 0 or (last is not None and round < last):
            raise PrivacyError(
                f"round {round} comes after round {last}; rounds must be 0 or more, and increase"
            )
        known = [self._users[name] for name in names if name in self._users]
        total = len(self._users) + len(names) - len(known)
        if total > self.population:
            raise PrivacyError(
                f"{total} users took part, but the population is {self.population}. Start a new "
                "run whose population is the number of all users"
            )
        gaps = [round - self._last[user] for user in known]
        if self.gap is not None and gaps and min(gaps) < self.gap:
            early = sum(gap < self.gap for gap in gaps)
            raise PrivacyError(
                f"round {round} comes too early for {early} of its users, whose smallest gap is "
                f"{min(gaps)}; the guarantee is for a gap of {self.gap} (MinS {self.gap - 1}). "
                "Lengthen the clients' timer, or account for the smaller gap in a new run"
            )
        most = max((self._counts[user] + 1 for user in known), default=1 if names else 0)
        if self.max_participations is not None and most > self.max_participations:
            raise PrivacyError(
                f"round {round}: a user takes part in {most} rounds; the guarantee is for "
                f"at most {self.max_participations}. End the run, or account for more in a new run"
            )
        # From here on, nothing is refused.
        for name in names:
            if name not in self._users:
                self._users[name] = len(self._users)
                self._last.append(round)
                self._counts.append(0)
        numbers = np.array([self._users[name] for name in names], np.uint32)
        for user in numbers.tolist():
            self._last[user] = round
            self._counts[user] += 1
        if gaps:
            self._least_gap = min([*gaps, *([] if self._least_gap is None else [self._least_gap])])
        self._rounds.append((round, numbers))

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    @property
    def last_round(self) -> int | None:
        return self._rounds[-1][0] if self._rounds else None

    @property
    def participants(self) -> int:
        """The number of users who took part in any round."""
        return len(self._users)

    def cohort_sizes(self) -> list[int]:
        return [len(users) for _, users in self._rounds]

    def observed_gap(self) -> int | None:
        """The smallest gap between a user's participations, in rounds; None if nobody came back."""
        return self._least_gap

    def observed_min_sep(self) -> int | None:
        """MinS as in the papers' tables: the rounds *between* two participations."""
        return None if self._least_gap is None else self._least_gap - 1

    def observed_max_part(self) -> int:
        """The largest number of participations of a user: MaxP."""
        return max(self._counts, default=0)

    def participations(self, user_id: str) -> list[int]:
        """Returns the rounds in which a user took part."""
        number = self._users.get(self._hash(user_id))
        return [] if number is None else [r for r, users in self._rounds if number in users]

    def covers(self, *, gap: int, max_participations: int) -> None:
        """Raises PrivacyError if somebody took part more often, or returned sooner, than these
        bounds allow."""
        found = self.observed_gap()
        if found is not None and found < gap:
            raise PrivacyError(
                f"accounting assumes a gap of {gap} rounds, but the ledger shows a gap of {found}. "
                "Compute epsilon again, with that gap"
            )
        if self.observed_max_part() > max_participations:
            raise PrivacyError(
                f"accounting assumes at most {max_participations} participations per user, but the "
                f"ledger shows up to {self.observed_max_part()}. Compute epsilon for that many"
            )

    def check_poisson(self, q: float) -> None:
        """Raises PrivacyError unless Poisson sampling with this q could have drawn the cohorts.

        The total number of participations and the variance of cohort sizes are tested; with a
        fixed report goal, for example, sizes vary too little.
        """
        kind, declared = self.sampling.get("kind"), self.sampling.get("q")
        if kind != "poisson" or declared != q:
            raise PrivacyError(
                f"accounting by sampling needs cohorts from Poisson sampling with q = {q}; the "
                f"ledger says {kind}{'' if declared is None else f' with q = {declared}'}. "
                "Compute epsilon from gap and participations instead"
            )
        if (self.gap or 1) > 1 or self.max_participations is not None:
            raise PrivacyError(
                f"the bounds gap = {self.gap} and max_participations = {self.max_participations} "
                "were enforced, but a Poisson sampler does not draw cohorts under such bounds. "
                "Compute epsilon from these bounds, not q"
            )
        sizes = np.array(self.cohort_sizes(), np.float64)
        if not len(sizes):
            return
        mean, variance = self.population * q, self.population * q * (1 - q)
        if variance == 0:  # every user takes part in every round
            if bool((sizes != mean).any()):
                raise PrivacyError(
                    "with q = 1 every user takes part in each round, but here some users did not. "
                    "Compute epsilon from gap and participations, not q"
                )
            return
        tails = {
            "totals this far from the expected number": _normal_tail(
                float(sizes.sum() - mean * len(sizes)) / math.sqrt(variance * len(sizes))
            ),
            "sizes of cohorts that differ this much": _chi2_tail(
                float(((sizes - mean) ** 2 / variance).sum()), len(sizes)
            ),
        }
        for what, tail in tails.items():
            if tail < IMPLAUSIBLE:
                raise PrivacyError(
                    f"the cohorts were not drawn by Poisson sampling with q = {q} from "
                    f"{self.population} users: {what} in {len(sizes)} rounds have a probability of "
                    f"{tail:.0e}. Compute epsilon from gap and participations, not q"
                )

    def _hash(self, user: str) -> str:
        if not user:
            raise PrivacyError(
                "a user without an id cannot be counted; give each user an id that is not empty"
            )
        return hashlib.blake2b(user.encode(), key=self._salt, digest_size=12).hexdigest()

    def keyed_digest(self, digest: str) -> str:
        """Keys a digest of users' text with the salt, so that a report confirms no guessed text."""
        raw = b"data set\n" + digest.encode()
        return hashlib.blake2b(raw, key=self._salt, digest_size=32).hexdigest()

    def summary(self, *, secret: bool = False) -> dict[str, Any]:
        """Returns the figures for a report, which name no user. `secret` also leaves out the sizes
        and participations, for a guarantee that assumes that nobody knows who was sampled."""
        sizes = [] if secret else self.cohort_sizes()
        return {
            "population": self.population,
            "participants": None if secret else self.participants,
            "rounds": self.rounds,
            "cohort_size": {"min": min(sizes), "mean": sum(sizes) / len(sizes), "max": max(sizes)}
            if sizes
            else None,
            "enforced": {"gap": self.gap, "max_participations": self.max_participations},
            "observed": None
            if secret
            else {
                "gap": self.observed_gap(),
                "min_separation": self.observed_min_sep(),
                "max_participations": self.observed_max_part(),
            },
            "sampling": self.sampling,
            "digest": self.digest,
        }

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "population": self.population,
            "enforced": {"gap": self.gap, "max_participations": self.max_participations},
            "sampling": self.sampling,
            "salt": self._salt.hex(),
            "observed": {
                "gap": self.observed_gap(),
                "max_participations": self.observed_max_part(),
            },
            "users": list(self._users),
            "rounds": [
                {"round": number, "users": base64.b64encode(users.astype("<u4").tobytes()).decode()}
                for number, users in self._rounds
            ],
        }

    @property
    def digest(self) -> str:
        """SHA-256 of everything in the ledger; a checkpoint and a report carry it."""
        return hashlib.sha256(_canonical(self._body())).hexdigest()

    def to_bytes(self) -> bytes:
        body = self._body()
        seal = {"sha256": hashlib.sha256(_canonical(body)).hexdigest()}
        return (json.dumps({**body, "seal": seal}, indent=1) + "\n").encode()

    def save(self, path: str | Path) -> None:
        """Writes the complete ledger or nothing, with mode 0600."""
        # Guessed ids can be tested against the salted hashes, so only the owner may read them.
        write_whole(Path(path), self.to_bytes(), mode=0o600)

    @classmethod
    def load(cls, path: str | Path, *, expect: str | None = None) -> Self:
        """Reads a saved ledger; see `from_bytes`."""
        return cls.from_bytes(Path(path).read_bytes(), str(path), expect=expect)

    @classmethod
    def from_bytes(cls, text: bytes, path: str, *, expect: str | None = None) -> Self:
        """Reads a ledger from a file's text, and records its rounds again under its own bounds.

        Args
            path    for error messages
            expect  the digest in a checkpoint or report; a ledger with another digest is refused
        Raises
            FormatError   the text is not a ledger, or has another version
            PrivacyError  the text was changed by hand: digest or observed values do not match
        """
        try:
            body = json.loads(text)
            seal = body.pop("seal")
            check_format(body, FORMAT_NAME, FORMAT_VERSION, path)
            raw = _canonical(body)
            digest = hashlib.sha256(raw).hexdigest()
            if seal["sha256"] != digest:
                raise PrivacyError(
                    f"{path} was changed after it was written: its digest is {digest[:16]}..., but "
                    f"the file says {str(seal['sha256'])[:16]}...; no guarantee can rest on it. "
                    "Restore the file that the run wrote"
                )
            if expect is not None and expect != digest:
                raise PrivacyError(
                    f"{path} is not this run's ledger: its digest is {digest[:16]}...; expected "
                    f"{expect[:16]}... Give the ledger that the run wrote last"
                )
            found = cls(
                body["population"],
                gap=body["enforced"]["gap"],
                max_participations=body["enforced"]["max_participations"],
                sampling=body["sampling"],
                salt=bytes.fromhex(body["salt"]),
            )
            names: list[str] = body["users"]
            for entry in body["rounds"]:
                users = np.frombuffer(base64.b64decode(entry["users"], validate=True), "<u4")
                found._record(entry["round"], [names[user] for user in users.tolist()])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
            raise FormatError(
                f"{path} is not a participation ledger: {exc!r}. Give the file that the run wrote"
            ) from exc
        if found._body() != body:
            raise PrivacyError(
                f"the rounds in {path} do not match the observed values that the file states; no "
                "guarantee can rest on it. Restore the file that the run wrote"
            )
        return found


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _normal_tail(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def _chi2_tail(value: float, freedom: int) -> float:
    """The two-sided tail probability of a chi-squared variable (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return _normal_tail(((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
