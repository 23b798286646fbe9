"""The ledger sees and enforces separation, and does not believe an edited file."""

from __future__ import annotations

import base64
import hashlib
import json
import stat
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.errors import FormatError, PrivacyError
from dlm.federated.keys import Key
from dlm.federated.run.sampling import FixedGoalSampler, PoissonSampler
from dlm.record.ledger import ParticipationLedger, _canonical


def filled(rounds: int = 12, **bounds: Any) -> ParticipationLedger:
    """A ledger of some rounds of 10 users, three at a time in turn."""
    ledger = ParticipationLedger(10, **bounds)
    for r in range(rounds):
        ledger.record(r, [f"u{(3 * r + i) % 10}" for i in range(3)])
    return ledger


def test_observed_values_are_those_of_a_plain_count() -> None:
    """Over random cohorts, with rounds left out."""
    random = np.random.default_rng(3)
    ledger, plain = ParticipationLedger(40), defaultdict(list)
    for r in sorted(random.choice(200, 60, replace=False).tolist()):
        users = random.choice(40, random.integers(0, 6), replace=False).tolist()
        ledger.record(r, [str(u) for u in users])
        for user in users:
            plain[user].append(r)
    gaps = [b - a for rounds in plain.values() for a, b in pairwise(rounds)]
    assert ledger.observed_gap() == min(gaps)
    assert ledger.observed_min_sep() == min(gaps) - 1
    assert ledger.observed_max_part() == max(map(len, plain.values()))
    assert ledger.participants == len(plain)
    assert all(ledger.participations(str(user)) == rounds for user, rounds in plain.items())


def test_nobody_coming_back_leaves_the_gap_open() -> None:
    """Rather than a number that means something else."""
    ledger = ParticipationLedger(10)
    assert (ledger.observed_gap(), ledger.observed_max_part()) == (None, 0)
    ledger.record(0, ["a", "b"])
    ledger.record(1, ["c"])
    assert (ledger.observed_gap(), ledger.observed_min_sep(), ledger.observed_max_part()) == (
        None,
        None,
        1,
    )
    ledger.covers(gap=1000, max_participations=1)


def test_a_participation_that_breaks_a_bound_is_refused_and_leaves_no_trace() -> None:
    """Exactly at the bound it is taken."""
    ledger = ParticipationLedger(10, gap=3, max_participations=2)
    ledger.record(0, ["a", "b"])
    before = ledger.digest
    with pytest.raises(PrivacyError, match=r"gap of 3 \(MinS 2\)"):
        ledger.record(2, ["c", "a"])
    assert ledger.digest == before
    ledger.record(3, ["c", "a"])
    with pytest.raises(PrivacyError, match=r"in 3 rounds; the guarantee .* 2"):
        ledger.record(9, ["a"])
    ledger.record(9, ["b"])
    assert (ledger.observed_gap(), ledger.observed_max_part()) == (3, 2)


@pytest.mark.parametrize(
    ("round_number", "users", "message"),
    [
        (12, ["u1", "u1"], "twice"),
        (5, ["u1"], "after round 11"),
        (12, [""], "without an id"),
        (12, ["new"], "11 users .*population is 10"),
        (11, ["u1"], "already recorded with other users"),
    ],
)
def test_what_cannot_be_is_refused(round_number: int, users: list[str], message: str) -> None:
    """And leaves no trace."""
    ledger = filled()
    before = ledger.digest
    with pytest.raises(PrivacyError, match=message):
        ledger.record(round_number, users)
    assert ledger.digest == before


def test_the_last_round_may_be_told_again() -> None:
    """A run that was stopped between recording and its checkpoint does so."""
    ledger = filled()
    before = ledger.digest
    ledger.record(11, ["u3", "u5", "u4"])
    assert ledger.digest == before


def test_a_saved_ledger_goes_on_where_it_was(tmp_path: Path) -> None:
    """Bounds, users and rounds; no id stands in the file."""
    whole = filled(12, gap=3, max_participations=5, salt=b"s" * 16)
    half = ParticipationLedger(10, gap=3, max_participations=5, salt=b"s" * 16)
    for r in range(6):
        half.record(r, [f"u{(3 * r + i) % 10}" for i in range(3)])
    half.save(tmp_path / "ledger.json")
    assert '"u1"' not in (tmp_path / "ledger.json").read_text()
    loaded = ParticipationLedger.load(tmp_path / "ledger.json", expect=half.digest)
    for r in range(6, 12):
        loaded.record(r, [f"u{(3 * r + i) % 10}" for i in range(3)])
    assert loaded.digest == whole.digest
    with pytest.raises(PrivacyError):
        loaded.record(12, ["u5"])


def edited(ledger: ParticipationLedger, change: Any, *, reseal: bool) -> bytes:
    """The file of a ledger with a change by hand, with the digest put right or not."""
    body = json.loads(ledger.to_bytes())
    seal = body.pop("seal")
    change(body)
    if reseal:
        seal["sha256"] = hashlib.sha256(_canonical(body)).hexdigest()
    return json.dumps({**body, "seal": seal}).encode()


def move_round(body: Any) -> None:
    body["rounds"][-1]["round"] += 5


def drop_round(body: Any) -> None:
    body["rounds"].pop()


def fewer(body: Any) -> None:
    body["observed"]["max_participations"] = 1


def wider(body: Any) -> None:
    body["enforced"]["gap"] = 9


def sampled(body: Any) -> None:
    body["sampling"] = {"kind": "poisson", "q": 0.3}


def other_user(body: Any) -> None:
    body["rounds"][0]["users"] = base64.b64encode(np.array([1, 2], "<u4").tobytes()).decode()


CHANGES = [move_round, drop_round, fewer, wider, sampled, other_user]


@pytest.mark.parametrize("change", CHANGES)
def test_a_ledger_edited_by_hand_is_refused(change: Any) -> None:
    """Each field that a guarantee rests on."""
    ledger = filled(gap=3)
    with pytest.raises(PrivacyError, match="changed after it was written"):
        ParticipationLedger.from_bytes(edited(ledger, change, reseal=False), "ledger.json")


@pytest.mark.parametrize("change", CHANGES)
def test_an_edited_ledger_with_a_new_digest_is_refused_by_what_else_is_known(change: Any) -> None:
    """By the digest that a checkpoint carries, and mostly by its own rounds."""
    ledger = filled(gap=3)
    text = edited(ledger, change, reseal=True)
    with pytest.raises(PrivacyError):
        ParticipationLedger.from_bytes(text, "ledger.json", expect=ledger.digest)
    if change in (fewer, wider, other_user):
        with pytest.raises((PrivacyError, FormatError)):
            ParticipationLedger.from_bytes(text, "ledger.json")


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"seal": 3, "format": "other"}', b"\xff"])
def test_what_is_no_ledger_is_a_format_error(text: bytes) -> None:
    """Whatever else it may be."""
    with pytest.raises(FormatError, match=r"is not a (dlm )?participation ledger"):
        ParticipationLedger.from_bytes(text, "x.json")


def test_accounting_may_not_assume_more_than_the_ledger_has_seen() -> None:
    """Neither a wider gap nor fewer participations; less is allowed."""
    ledger = filled()
    gap, most = ledger.observed_gap(), ledger.observed_max_part()
    assert gap == 3
    ledger.covers(gap=gap, max_participations=most)
    ledger.covers(gap=1, max_participations=most + 1)
    with pytest.raises(PrivacyError, match="gap of 4"):
        ledger.covers(gap=gap + 1, max_participations=most)
    with pytest.raises(PrivacyError, match="participations"):
        ledger.covers(gap=gap, max_participations=most - 1)


def drawn(sampler: Any, declared: dict[str, Any], rounds: int = 60) -> ParticipationLedger:
    """A ledger of cohorts of one sampler that claims to be of another."""
    ledger = ParticipationLedger(sampler.users, sampling=declared)
    for r in range(rounds):
        ledger.record(r, map(str, sampler.cohort(r).tolist()))
    return ledger


def test_accounting_by_sampling_needs_cohorts_that_were_sampled() -> None:
    """Declared and plausible: a fixed goal, another q, and users left out are found out."""
    key, users, q = Key.from_seed(4), 1000, 0.05
    poisson = PoissonSampler(users, q, key)
    drawn(poisson, poisson.describe()).check_poisson(q)
    with pytest.raises(PrivacyError, match="the ledger says fixed"):
        fixed = FixedGoalSampler(users, 50, key)
        drawn(fixed, fixed.describe()).check_poisson(q)
    with pytest.raises(PrivacyError, match=r"with q = 0\.05"):
        drawn(poisson, poisson.describe()).check_poisson(0.04)
    with pytest.raises(PrivacyError, match="sizes of cohorts"):
        drawn(FixedGoalSampler(users, 50, key), poisson.describe()).check_poisson(q)
    with pytest.raises(PrivacyError, match="totals this far"):
        drawn(PoissonSampler(users, 0.06, key), poisson.describe()).check_poisson(q)


def test_a_sample_is_secret_where_the_guarantee_rests_on_it() -> None:
    """Two of two users in a round: whoever reads the sizes knows that both were in it."""
    ledger = ParticipationLedger(2, sampling={"kind": "poisson", "q": 0.5})
    ledger.record(0, ["al", "bea"])
    told = ledger.summary(secret=True)
    assert told["population"] == 2
    assert told["participants"] is told["cohort_size"] is told["observed"] is None
    assert ledger.summary()["cohort_size"]["min"] == 2


def test_cohorts_that_had_to_keep_to_bounds_are_no_poisson_samples() -> None:
    """A round that was refused for one, and drawn again, is conditioned on it."""
    several: list[dict[str, Any]] = [{"gap": 2}, {"max_participations": 3}]
    for bounds in several:
        ledger = ParticipationLedger(10, sampling={"kind": "poisson", "q": 0.5}, **bounds)
        with pytest.raises(PrivacyError, match="a Poisson sampler does not draw cohorts"):
            ledger.check_poisson(0.5)


def test_a_saved_ledger_is_its_owners_alone(tmp_path: Path) -> None:
    """Whoever guesses an id can look for its hash."""
    ParticipationLedger(2).save(tmp_path / "ledger")
    assert stat.S_IMODE((tmp_path / "ledger").stat().st_mode) == 0o600
