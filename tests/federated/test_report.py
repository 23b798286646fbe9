"""The checklist is filled from what happened, and claims nothing that did not."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.keys import Key
from dlm.federated.report import checklist
from dlm.federated.report.report import build, check_stage
from dlm.federated.run.sampling import FixedGoalSampler, PoissonSampler
from dlm.record.ledger import ParticipationLedger
from dlm.record.provenance import Guarantee, Provenance, digest_of

RAW = {
    "stage": "unigrams",
    "mechanism": "none",
    "noise_multiplier": None,
    "rounds": 6,
    "gap": 1,
    "max_participations": 6,
    "sampling": "fixed",
}
NOISED = {
    "stage": "network",
    "mechanism": "gaussian",
    "noise_multiplier": 4.0,
    "rounds": 12,
    "gap": 3,
    "max_participations": 4,
    "sampling": "timer",
}


def ledger(
    rounds: int = 12, gap: int | None = 3, max_participations: int | None = 4
) -> ParticipationLedger:
    """Users in turn: a gap of 3 and 4 participations in 12 rounds; enforced if not None."""
    book = ParticipationLedger(
        10, sampling={"kind": "timer"}, gap=gap, max_participations=max_participations
    )
    for r in range(rounds):
        book.record(r, [f"u{(3 * r + i) % 9}" for i in range(3)])
    return book


FOUR = ["4a", "4b", "4c", "4d"]
TITLES = [
    "Setting and adversary",
    "Data accesses covered",
    "Final mechanism output",
    "Unit of privacy",
    "Adjacency",
    "Type of accounting",
    "Accounting assumptions",
    "The formal statement",
    "Transparency and verifiability",
    "Noise",
    "What was trusted",
    "What was enforced",
    "What is not covered",
]


def test_a_raw_stage_leaves_no_guarantee_and_the_report_says_so() -> None:
    """Every point of the checklist is there; the record inherits it."""
    report = build([RAW], delta=1e-6, config={"rounds": 6})
    assert report.provenance.guarantee is None
    assert report.statement().startswith("NO GUARANTEE: unigrams: users' data were used without")
    text = report.markdown()
    assert all(title in text for title in TITLES)
    assert "held-out" not in text
    body = report.to_dict()
    assert [point["title"] for point in body["checklist"].values()] == TITLES
    assert list(body["checklist"]) == ["1", "2a", "2b", "2c", "2d", "3a", "3b", "3c", "3d", *FOUR]
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["digest"] == digest_of({k: v for k, v in body.items() if k != "digest"})
    assert Provenance.from_dict(body["provenance"]) == report.provenance


def test_only_the_record_of_a_run_with_settings_has_their_digest() -> None:
    """What is made from it later has none: no settings of its own used users' text."""
    settings = {"rounds": 6}
    assert build([RAW], delta=1e-6, config=settings).provenance.config == digest_of(settings)
    assert build([RAW], delta=1e-6).provenance.config is None


@pytest.mark.parametrize(
    ("aggregator", "same_task"), [(checklist.REGISTERED, True), (checklist.UNREGISTERED, False)]
)
def test_a_report_of_devices_says_what_its_guarantee_needs_and_what_a_lying_server_learns(
    aggregator: str, same_task: bool
) -> None:
    extras = {"engine": checklist.ENGINE, "aggregator": aggregator}
    said = build([{**NOISED, "norm_inflation": 1.01, "extras": extras}], delta=1e-6).markdown()
    assert ("sums over devices that all had the same task" in said) == same_task
    assert ("not from one that lied" in said) == (not same_task)
    assert "holds if all devices of a sum follow the protocol" in said
    assert "does not depend" not in said


def test_a_noised_stage_without_a_ledger_has_no_guarantee() -> None:
    """Nothing shows that what accounting assumes did happen."""
    report = build([NOISED], delta=1e-6)
    assert "no ledger shows who took part" in report.statement()


def test_what_the_ledger_does_not_bear_out_is_refused() -> None:
    """A wider gap, fewer participations, fewer rounds than were run."""
    book = ledger()
    check_stage(NOISED, book)
    for change, message in (
        ({"gap": 4}, "gap of 4"),
        ({"max_participations": 3}, "assumes at most 3 participations"),
        ({"rounds": 11}, "last round is 11"),
    ):
        with pytest.raises(PrivacyError, match=message):
            build([{**NOISED, **change}], delta=1e-6, ledgers={"network": book})


def test_amplification_by_sampling_needs_sampled_cohorts() -> None:
    """In the ledger's own words and by the sizes of its cohorts."""
    key, q = Key.from_seed(2), 0.1
    stage = {**NOISED, "sampling": "poisson", "sampling_rate": q, "rounds": 60}
    poisson, fixed = PoissonSampler(500, q, key), FixedGoalSampler(500, 50, key)
    for sampler, declared, good in (
        (poisson, poisson, True),
        (fixed, fixed, False),
        (fixed, poisson, False),
    ):
        book = ParticipationLedger(500, sampling=declared.describe())
        for r in range(60):
            book.record(r, map(str, sampler.cohort(r).tolist()))
        if good:
            check_stage(stage, book)
        else:
            with pytest.raises(PrivacyError, match="Poisson"):
                check_stage(stage, book)


def test_a_report_of_nothing_or_of_unknown_stages_is_refused() -> None:
    """As is a delta that is none."""
    with pytest.raises(ConfigError, match="at least one stage"):
        build([], delta=1e-6)
    with pytest.raises(ConfigError, match="delta"):
        build([RAW], delta=0.0)
    with pytest.raises(ConfigError, match=r"ledgers .*network.* stage"):
        build([RAW], delta=1e-6, ledgers={"network": ledger()})


@pytest.fixture
def compose() -> Any:
    """Accounting, where what it needs is installed."""
    return pytest.importorskip("dlm.federated.account.compose", reason="pip install -e '.[train]'")


def test_the_statement_is_what_accounting_finds(compose: Any) -> None:
    """rho by hand: 4 participations of independent noise, 4 / (2 z^2)."""
    report = build([NOISED], delta=1e-6, ledgers={"network": ledger(gap=3, max_participations=4)})
    found = report.provenance.guarantee
    assert found is not None
    assert found.rho == pytest.approx(4 / (2 * 16.0))
    numbers = compose.compose([compose.StageRecord.from_json(NOISED)], 1e-6)
    assert found.epsilon == numbers.epsilon
    assert "0.125-zCDP" in report.statement()
    # What is told is never smaller than what was found.
    told = float(report.statement().split("epsilon = ")[1].split(",")[0])
    assert found.epsilon <= told <= found.epsilon * 1.01
    assert "enforced" in report.markdown()
    assert report.provenance.ledgers == (ledgers_digest(report),)


def test_the_report_reads_as_a_reviewer_asks(compose: Any) -> None:
    """Date, version, data set, adversary; noise and generator; what was trusted and enforced; and
    nothing of secure aggregation where no stage rounded for it."""
    book = ledger()
    extras = {
        "engine": "LocalEngine",
        "aggregator": "integers in the clear",
        "grid": "steps of 2^-40",
        "generator": "ChaCha20",
    }
    stage = {**NOISED, "extras": extras}

    def made(**given: Any) -> str:
        return build(
            [{**stage, **given.pop("stage", {})}],
            delta=1e-6,
            ledgers={"network": book},
            config={"privacy": {"clip_norm": 0.5}},
            inputs={"the vocabulary": Provenance.public("ACME", "the vocabulary", "d" * 64)},
            **given,
        ).markdown()

    text = made(
        at=datetime(2026, 11, 22, 16, 5, tzinfo=UTC),
        data={"name": "users.tsv", "digest": book.keyed_digest("0123")},
        held_out=56,
    )
    for said in (
        "for each user who took part (56 held-out users are not covered).**",
        "56 held-out users are in no round",
        "* made: 2026-11-22 16:05 UTC, by dlm ",
        f"* data set: users.tsv, digest {book.keyed_digest('0123')} (keyed",
        "The adversary sees every intermediate model",
        "Public data used: the vocabulary (public, says ACME, SHA-256 dddd",
        "mechanism gaussian, noise multiplier 4.0; discrete Gaussian, ",
        "2^-40",
        "; generator: ChaCha20; ",
        "keys: drawn from the operating system, and never written to a file",
        "dlm privacy account --mechanism gaussian --noise-multiplier 4.0 --rounds 12 --gap 3",
        "* That no user's text is in the vocabulary (public, says ACME",
        "computed and clipped by LocalEngine, and added up by integers in the clear",
        "* network: the L2 norm of an update is at most 0.5",
        "* network: a gap of 3 rounds and at most 4 participations",
        "resumes a copy of the run's folder",
    ):
        assert said in text, said
    assert "encoded for secure aggregation" not in text
    assert "encoded for secure aggregation" in made(stage={"norm_inflation": 1.01})
    # A digest of the data set alone would confirm a guess of what somebody wrote.
    assert "0123" not in book.keyed_digest("0123")
    assert ParticipationLedger(10).keyed_digest("0123") != book.keyed_digest("0123")


def test_the_sizes_of_poisson_samples_are_told_nowhere(compose: Any) -> None:
    """Whether amplification was claimed or not: a full cohort had everybody in it."""
    sampler = PoissonSampler(500, 0.1, Key.from_seed(2))
    book = ParticipationLedger(500, sampling=sampler.describe())
    for r in range(12):
        book.record(r, map(str, sampler.cohort(r).tolist()))
    poisson = {**NOISED, "sampling": "poisson", "gap": 1, "max_participations": 12}
    for stage in (poisson, {**poisson, "sampling_rate": 0.1}):
        report = build([stage], delta=1e-6, ledgers={"network": book})
        assert report.provenance.guarantee is not None
        told = report.to_dict()["ledgers"]["network"]
        assert (told["cohort_size"], told["participants"], told["observed"]) == (None, None, None)
        assert "took part; observed" not in report.markdown()
        assert not re.search(rf"\b{book.participants}\b", report.markdown())


def test_what_was_not_enforced_is_the_worst_case_or_no_guarantee(compose: Any) -> None:
    """That nobody came back too early this time is luck."""

    def made(book: ParticipationLedger, **stage: Any) -> Provenance:
        return build([{**NOISED, **stage}], delta=1e-6, ledgers={"network": book}).provenance

    for bounds, why in (
        ({"gap": None}, "network: a gap of 3 rounds is assumed, but was not enforced"),
        ({"gap": None, "max_participations": None}, "at most 4 participations are assumed"),
        ({"gap": 2, "max_participations": None}, "at most 4 participations are assumed"),
    ):
        found = made(ledger(**bounds))
        assert found.guarantee is None
        assert any(why in reason for reason in found.reasons), found.reasons
    worst = made(ledger(gap=None, max_participations=None), gap=1, max_participations=12).guarantee
    assert worst is not None
    assert worst.rho == pytest.approx(12 / 32)
    alone = made(
        ledger(gap=3, max_participations=None)
    ).guarantee  # 12 rounds in gaps of 3: 4 at most
    assert alone is not None
    assert alone.rho == pytest.approx(4 / 32)


def test_a_ledger_that_was_cut_bears_nothing_out(compose: Any) -> None:
    """A blank one of the same bounds would bear out everything."""
    for rounds in (0, 11):
        with pytest.raises(PrivacyError, match=rf"ledger .* {rounds} rounds"):
            build([NOISED], delta=1e-6, ledgers={"network": ledger(rounds)})


def ledgers_digest(report: Any) -> str:
    """Of the network's ledger."""
    return str(report.ledgers["network"]["digest"])


def test_a_raw_stage_before_a_noised_one_voids_both(compose: Any) -> None:
    """Pieces from raw counts under a private network: nothing is guaranteed."""
    report = build([RAW, NOISED], delta=1e-6, ledgers={"network": ledger()})
    assert report.provenance.guarantee is None
    assert len(report.provenance.stages) == 2
    both = build(
        [{**NOISED, "stage": "unigrams"}, NOISED],
        delta=1e-6,
        ledgers={"network": ledger(), "unigrams": ledger()},
    )
    assert both.provenance.guarantee is not None
    assert both.provenance.guarantee.rho == pytest.approx(0.25)


@pytest.mark.promise("keys")
def test_keys_of_a_seed_make_it_a_simulation(compose: Any) -> None:
    """The figures are told as such, and are no guarantee."""
    book = ledger()
    for report in (
        build([NOISED], delta=1e-6, ledgers={"network": book}, simulated=True),
        build([{**NOISED, "simulated": True}], delta=1e-6, ledgers={"network": book}),
    ):
        assert report.provenance.guarantee is None
        assert report.provenance.simulated is not None
        assert report.provenance.simulated.rho == pytest.approx(0.125)
        assert "configured seed" in report.statement()
        assert "Figures of a simulation" in report.statement()
        assert report.provenance.derive("arpa").simulated == report.provenance.simulated


def test_the_numbers_of_a_report_are_plain_json(compose: Any) -> None:
    """Infinities are words, not what JSON has no form for."""
    report = build([NOISED], delta=1e-6, ledgers={"network": ledger()}, config={"lambda": math.inf})
    assert report.to_dict()["config"] == {"lambda": "infinite"}
    odd = dataclasses.replace(report, numbers={"rho": math.inf, "all": (1, 2.0)})
    assert odd.to_dict()["numbers"] == {"rho": "infinite", "all": [1, 2.0]}
    json.dumps(odd.to_dict(), allow_nan=False)


def test_a_guarantee_without_its_stages_is_no_part_of_another() -> None:
    """It cannot be composed, and leaving it out would tell too small an epsilon; what is public
    has no stage and owes nobody anything."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

    def made(*given: Provenance) -> Provenance:
        books = {"network": ledger(gap=3, max_participations=4)}
        inputs = {f"input {n}": record for n, record in enumerate(given)}
        return build([NOISED], delta=1e-6, ledgers=books, inputs=inputs).provenance

    alone = made()
    assert alone.guarantee is not None
    assert (
        made(Provenance.public("ACME", "words").derive("wordpieces")).guarantee == alone.guarantee
    )
    bare = made(Provenance(Guarantee(1.0, 1e-6, 0.1)))
    assert bare.guarantee is None
    assert "names no stage to compose" in bare.statement()


def test_a_simulation_whose_stages_do_not_say_so_gives_no_guarantee_to_what_is_made_of_it() -> None:
    """Its figures would be composed as if nobody could take that noise off."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    books = {"network": ledger()}
    seeded = build([NOISED], delta=1e-6, ledgers=books, simulated=True).provenance
    assert seeded.simulated is not None
    for given in (seeded, dataclasses.replace(seeded, stages=())):
        made = build(
            [NOISED], delta=1e-6, ledgers=books, inputs={"x": given.derive("x")}
        ).provenance
        assert made.guarantee is None
        assert "made from a configured seed" in made.statement()
