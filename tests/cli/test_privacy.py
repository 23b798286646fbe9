"""`dlm privacy`: the keys it answers with, and published numbers out of the command itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from typer.testing import CliRunner

from cli.trained import told as told_by
from dlm.cli.main import app
from dlm.errors import ConfigError

PLAN = ("plan", "--population", "4000000", "--rounds", "2000", "--target-rho", "0.5")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test alone."""
    monkeypatch.delenv("DLM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def answer(*arguments: object) -> dict[str, Any]:
    """What `dlm privacy ... --json` prints."""
    found = json.loads(told_by("privacy", *arguments, "--json").stdout)
    assert isinstance(found, dict)
    return found


def account(
    mechanism: str, z: float, n: int, min_separation: int, max_participations: int
) -> dict[str, Any]:
    """At delta 1e-10, as the tables are."""
    return answer(
        "account", "--mechanism", mechanism, "--noise-multiplier", z, "--rounds", n,
        "--min-separation", min_separation, "--max-participations", max_participations, "--delta",
        1e-10,
    )  # fmt: skip


@pytest.mark.promise("account")
@pytest.mark.parametrize(
    ("mechanism", "settings", "rho", "epsilon"),
    [
        ("blt", (7.379, 1280, 300, 4), 0.16, 3.46),
        ("tree", (7, 2350, 437, 5), 0.94, 9.29),
        ("bandmf", (4.523, 2000, 2001, 1), 0.0245, 1.32),
    ],
)
def test_account_prints_the_published_table(
    mechanism: str, settings: tuple[float, int, int, int], rho: float, epsilon: float
) -> None:
    """BLT Table 4, which rounds up."""
    found = account(mechanism, *settings)
    step = 1e-4 if rho < 0.1 else 1e-2
    assert math.ceil(found["rho"] / step) * step == pytest.approx(rho)
    assert math.ceil(found["epsilon_gaussian"] * 100) / 100 == pytest.approx(epsilon)
    assert found["rho"] == pytest.approx(found["sensitivity"] ** 2 / (2 * settings[0] ** 2))


def test_a_multiplier_of_a_matrix_with_another_column_norm_is_accounted_for() -> None:
    """What was published is the noise over the clip norm; the matrix's scale belongs to it."""
    asked = (
        "account", "--noise-multiplier", 1.411, "--rounds", 2000, "--min-separation", 484,
        "--max-participations", 3, "--delta", 1e-10,
    )  # fmt: skip
    found = answer(*asked, "--mechanism", "bandmf", "--bands", 400, "--column-norm", 0.2**0.5)
    assert found["rho"] == pytest.approx(0.150684, abs=1e-6)
    assert found["made_for"] == "400 bands, columns of norm 0.447214"
    # Columns that end with the matrix count as well.
    short = (
        "--mechanism",
        "bandfhu",
        "--rounds",
        20,
        "--min-separation",
        3,
        "--max-participations",
        5,
    )
    more = ("account", *short, "--noise-multiplier", 1, "--delta", 1e-6, "--bands", 8)
    plain = answer(*more)["sensitivity"]
    assert answer(*more, "--column-norm", 0.5)["sensitivity"] == pytest.approx(plain / 2)
    for wrong, message in [("0", "above 0"), ("inf", "finite"), ("nan", "finite")]:
        with pytest.raises(ConfigError, match=message):
            answer(*asked, "--mechanism", "bandmf", "--column-norm", wrong)
    with pytest.raises(ConfigError, match="whose columns all have the same norm"):
        answer(*asked, "--mechanism", "tree", "--column-norm", 0.5)


def test_a_number_of_participations_below_the_possible_is_remarked_on() -> None:
    """GDP Table 1, de-DE: 4 are printed, 5 fit."""
    found = account("tree", 7, 930, 212, 4)
    assert found["rho"] == pytest.approx(47 / 98)
    assert "5 participations fit" in found["notes"][0]
    assert account("tree", 7, 930, 212, 5)["notes"] == []
    assert account("tree", 7, 930, 212, 5)["rho"] == pytest.approx(55 / 98)


def test_a_blt_is_accounted_for_as_it_was_made() -> None:
    """The nearest published one, or the one that is asked for; the answer says which."""
    other = account("blt", 5, 200, 50, 3)
    assert other["made_for"] == "n=2000 gap=100 k=10"
    assert "--made-for 200,51,3" in other["notes"][-1]
    found = answer(
        "account", "--mechanism", "blt", "--noise-multiplier", 5, "--rounds", 200,
        "--min-separation", 50,
        "--max-participations", 3, "--delta", 1e-8, "--made-for", "200,51,3", "--buffers", 2,
    )  # fmt: skip
    assert found["made_for"].startswith("n=200 gap=51 k=3 buffers=2")
    assert not any("--made-for" in note for note in found["notes"])
    same = answer(
        "mechanism", "--mechanism", "blt", "--rounds", 200, "--gap", 51, "--max-participations", 3,
        "--buffers", 2,
    )  # fmt: skip
    assert found["sensitivity"] == pytest.approx(same["sensitivity"])
    decay, scale = (",".join(map(str, same["matrix"][name])) for name in ("decay", "scale"))
    given = answer(
        "account", "--mechanism", "blt", "--noise-multiplier", 5, "--rounds", 200,
        "--min-separation", 50, "--max-participations", 3, "--delta", 1e-8, "--decay", decay,
        "--scale", scale,
    )  # fmt: skip
    assert given["sensitivity"] == same["sensitivity"]


@pytest.mark.parametrize(
    "mechanism", ["gaussian", "tree", "tree-full", "bandmf", "bandtoep", "blt"]
)
def test_mechanism_answers_for_all(mechanism: str) -> None:
    """The three keys; noise that is correlated beats noise that is not."""
    asked = ("--rounds", 64, "--gap", 16, "--max-participations", 4)
    found = answer("mechanism", "--mechanism", mechanism, *asked)
    assert 0 < found["rms_loss"] <= found["max_loss"]
    assert found["sensitivity"] >= 1
    plain = answer("mechanism", "--mechanism", "gaussian", *asked)
    assert plain["sensitivity"] == 2.0
    assert plain["rms_loss"] == pytest.approx(2 * math.sqrt(65 / 2))
    assert found["rms_loss"] <= plain["rms_loss"]


def test_the_published_losses_of_trees_and_blts_come_out() -> None:
    """BLT Table 3, whose columns are exchanged: MaxLoss first, RmsLoss second."""
    asked = ("--rounds", 2052, "--gap", 342, "--max-participations", 6)
    full = answer("mechanism", "--mechanism", "tree-full", *asked)
    assert (round(full["max_loss"], 2), round(full["rms_loss"], 2)) == (14.98, 12.47)
    for buffers, published in [(2, (10.81, 9.34)), (3, (10.79, 9.33))]:
        blt = answer("mechanism", "--mechanism", "blt", *asked, "--buffers", buffers)
        assert (round(blt["max_loss"], 2), round(blt["rms_loss"], 2)) == published
    # Those made for one participation, and used for six.
    for buffers, published in [(2, (11.80, 11.15)), (5, (11.40, 10.87))]:
        once = answer(
            "mechanism", "--mechanism", "blt", *asked, "--buffers", buffers,
            "--made-for", "2052,2052,1",
        )  # fmt: skip
        assert (round(once["max_loss"], 2), round(once["rms_loss"], 2)) == published


def test_a_plan_starts_without_jax() -> None:
    """Which takes longer to load than all of the plan."""
    start = "import sys; sys.modules['jax'] = None; from dlm.cli.main import main; main()"
    command = [sys.executable, "-c", start, "privacy", *PLAN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "report goal" in done.stdout


def test_plan_says_what_to_run_and_draws_it(tmp_path: Path) -> None:
    """With a target of either kind; a figure if one is asked for."""
    asked = ("plan", "--population", 4_000_000, "--rounds", 2000, "--delta", 1e-10)
    found = answer(*asked, "--target-rho", 0.8, "--round-minutes", 4)
    assert found["chosen"]["rho"] <= 0.8
    assert found["keeps_utility"] is True
    assert found["timer_hours"] >= 24
    blt = answer(*asked, "--target-rho", 0.8, "--mechanism", "blt")
    assert blt["chosen"]["report_goal"] < found["chosen"]["report_goal"]
    pytest.importorskip("matplotlib", reason="draws")
    file = tmp_path / "plan.png"
    other = answer(*asked, "--target-epsilon", 8, "--plot", file)
    assert other["chosen"]["epsilon"] <= 8
    assert file.stat().st_size > 1000


def test_the_first_epsilon_is_what_a_run_reports() -> None:
    """Discrete noise's; the exact Gaussian's, which papers print, stands beside it."""
    from dlm.federated.account.compose import StageRecord, compose

    run = StageRecord("network", "tree", 7.0, 930, 213, 4)
    told = account("tree", 7, 930, 212, 4)
    assert told["epsilon"] == pytest.approx(compose([run], 1e-10).epsilon, rel=1e-9)
    assert 1.03 < told["epsilon"] / told["epsilon_gaussian"] < 1.08

    sampled = StageRecord("network", "gaussian", 1.0, 50, 1, 50, sampling="poisson",
                          sampling_rate=0.01)  # fmt: skip
    asked = ("--sampling-probability", 0.01, "--delta", 1e-6)
    told = answer("account", "--mechanism", "gaussian", "--noise-multiplier", 1, "--rounds", 50,
                  *asked)  # fmt: skip
    assert told["epsilon"] == pytest.approx(compose([sampled], 1e-6).epsilon, rel=1e-9)


def test_a_plan_meets_its_target_as_a_run_reports_it() -> None:
    """And its settings, accounted for, give the number that it promised."""
    asked = ("plan", "--population", 4_000_000, "--rounds", 2000, "--delta", 1e-10)
    chosen = answer(*asked, "--target-epsilon", 7)["chosen"]
    assert chosen["epsilon_gaussian"] < chosen["epsilon"] <= 7
    told = account(
        "tree",
        chosen["noise_multiplier"],
        2000,
        chosen["min_separation"],
        chosen["max_participations"],
    )
    assert told["epsilon"] == pytest.approx(chosen["epsilon"])
    assert told["epsilon_gaussian"] == pytest.approx(chosen["epsilon_gaussian"])
    text = CliRunner().invoke(app, ["privacy", *PLAN]).stdout
    assert "as a run reports it (discrete noise)" in text
    assert "for exact Gaussian noise, as papers print it" in text


@pytest.mark.parametrize(
    ("probability", "published"),
    [("5000/763430", 4.634), ("1250/1e8", 0.987)],
)
def test_sampled_cohorts_are_accounted_for_as_dp_fedavg_prints(
    probability: str, published: float
) -> None:
    """DPF Table 2, by its own accountant; today's two are below it."""
    found = answer(
        "account", "--mechanism", "gaussian", "--noise-multiplier", 1, "--rounds", 5000,
        "--sampling-probability", probability, "--delta", 1e-9,
    )  # fmt: skip
    assert round(found["epsilon_moments"], 3) == published
    assert 0 < found["epsilon_pld"] < found["epsilon_rdp"] <= found["epsilon"]
    assert found["epsilon"] < found["epsilon_moments"]
    assert "drawn independently" in found["notes"][0]


def test_the_gap_is_given_by_itself_or_as_the_rounds_between() -> None:
    """The gap is one more than MinS of the papers; for both commands that take it."""
    for asked in (
        ("account", "--noise-multiplier", 7, "--delta", 1e-10, "--mechanism", "tree"),
        ("mechanism", "--mechanism", "tree"),
    ):
        asked += ("--rounds", 64, "--max-participations", 4)
        found = answer(*asked, "--gap", 16)
        assert found == answer(*asked, "--min-separation", 15)
        assert found["gap"] == 16
        for more, message in (
            ((), "give --gap"),
            (("--gap", 16, "--min-separation", 15), "MinS . 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                answer(*asked, *more)


ACCOUNT = "account --rounds 64 --noise-multiplier 1 --delta 1e-6"
BOUNDED = "--rounds 64 --max-participations 4 --gap 16"
PLANNED = "plan --population 4000000 --rounds 2000"
NOISE = "account --rounds 64 --delta 1e-6"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        # Amplification of correlated noise, beside a separation, with a probability that is none.
        (f"{ACCOUNT} --mechanism tree --sampling-probability 0.1", "tree.*Give --min-separation"),
        (
            f"{ACCOUNT} --mechanism gaussian --sampling-probability 0.1 --max-participations 3",
            "replaces --gap",
        ),
        (f"{ACCOUNT} --mechanism gaussian --sampling-probability 1.5", "probability is 1.5"),
        (f"{ACCOUNT} --mechanism gaussian --sampling-probability tenth", "5000/763430"),
        (f"{ACCOUNT} --mechanism gaussian --sampling-probability 1/0", "5000/763430"),
        (
            f"{ACCOUNT} --mechanism gaussian --min-separation 3",
            "give --gap .or --min-separation. and --max-participations",
        ),
        (f"{ACCOUNT} --mechanism tree", "or --sampling-probability"),
        # Settings that cannot be.
        ("plan --population 1000 --rounds 10", "one target"),
        # What these can bear is not published.
        (f"{PLANNED} --target-rho 1 --mechanism bandmf", "simulated-noise"),
        (f"{PLANNED} --target-rho 1 --mechanism gaussian", "simulated-noise"),
        (f"{PLANNED} --target-rho 0.5 --round-minutes 0", "round minutes is"),
        (f"{PLANNED} --target-rho 0.5 --round-minutes inf", "round minutes is"),
        (f"{PLANNED} --target-rho 0.5 --round-minutes nan", "round minutes is"),
        (f"{ACCOUNT} --mechanism tree --gap 4 --max-participations 1 --rounds 0", "rounds"),
        (f"{ACCOUNT} --mechanism tree --min-separation -1 --max-participations 1", "-1"),
        (f"{ACCOUNT} --mechanism tree --gap 4 --max-participations 1 --delta 2", "delta"),
        (f"{ACCOUNT} --mechanism tree {BOUNDED} --made-for 1,2,3", "made-for"),
        # Options without a use: buffers of a published BLT, an error of a tree.
        (f"{ACCOUNT} --mechanism blt {BOUNDED} --buffers 2", "--buffers is 2 without --made-for"),
        (
            f"{ACCOUNT} --mechanism blt {BOUNDED} --decay 0.9",
            "--decay and --scale describe the same buffers",
        ),
        (
            f"{ACCOUNT} --mechanism blt {BOUNDED} --decay 1 --scale 1 --made-for 9,3,3",
            "--made-for and --decay",
        ),
        (
            f"{ACCOUNT} --mechanism bandmf {BOUNDED} --coefficients 1,1",
            "--coefficients applies to --mechanism bandtoep",
        ),
        (
            f"{ACCOUNT} --mechanism tree {BOUNDED} --restarts 9,5",
            r"restarts are \[9, 5\]; expected ascending rounds",
        ),
        (
            f"mechanism --mechanism tree {BOUNDED} --error mean",
            "--error applies to --mechanism blt only, but the mechanism is tree",
        ),
        *(
            (f"{NOISE} --noise-multiplier {noise} {how}", r"multiplier is .*expected 0 or more")
            for noise in ("inf", "nan", "-1")
            for how in (
                "--mechanism gaussian --sampling-probability 0.1",
                "--mechanism tree --gap 16 --max-participations 4",
            )
        ),
    ],
)
def test_what_has_no_guarantee_or_no_meaning_is_refused(asked: str, message: str) -> None:
    """As an error of settings, not as a number."""
    with pytest.raises(ConfigError, match=message):
        answer(*asked.split())


def test_no_noise_is_no_guarantee() -> None:
    """Infinite, which JSON writes as null."""
    found = account("tree", 0, 10, 3, 1)
    assert found["rho"] is None
    assert found["epsilon"] is None
    sampled = answer(
        "account", "--mechanism", "gaussian", "--noise-multiplier", 0, "--rounds", 10,
        "--sampling-probability", 0.1, "--delta", 1e-6,
    )  # fmt: skip
    names = ("rho", "epsilon", "epsilon_pld", "epsilon_rdp", "epsilon_moments")
    assert [sampled[name] for name in names] == [None] * 5


@pytest.mark.parametrize(
    ("mechanism", "more", "message"),
    [
        ("bandmf", ("--bands", 0), "--bands is 0; expected 1 to the number of rounds, 64"),
        ("bandtoep", ("--bands", 65), "--bands is 65"),
        (
            "tree",
            ("--bands", 4),
            "--bands applies to --mechanism bandmf or bandtoep or bandfhu only",
        ),
        (
            "gaussian",
            ("--buffers", 4),
            "--buffers applies to --mechanism blt only, but the mechanism is gaussian",
        ),
        ("blt", ("--made-for", "64,16,4", "--buffers", 0), "--buffers is 0; expected 1 to 10"),
    ],
)
def test_bands_and_buffers_that_mean_nothing_are_refused(
    mechanism: str, more: tuple[object, ...], message: str
) -> None:
    """By both commands, and never cut or ignored."""
    chosen = ("--mechanism", mechanism, "--rounds", 64, "--max-participations", 4, *more)
    with pytest.raises(ConfigError, match=message):
        answer("account", *chosen, "--min-separation", 15, "--noise-multiplier", 1, "--delta", 1e-6)
    with pytest.raises(ConfigError, match=message):
        answer("mechanism", *chosen, "--gap", 16)


def test_a_target_that_is_not_met_is_said_first_and_by_the_exit_status() -> None:
    """Nothing that is printed then is called a guarantee."""
    asked = ["privacy", "plan", "--population", "4000000", "--rounds", "2000"]
    missed = CliRunner().invoke(app, [*asked, "--target-rho", "0.01"])
    assert missed.exit_code == 1
    assert missed.stdout.startswith("NOT MET: ")
    assert "guarantee" not in missed.stdout
    told = CliRunner().invoke(app, [*asked, "--target-rho", "0.01", "--json"])
    assert told.exit_code == 1
    assert json.loads(told.stdout)["keeps_utility"] is False
    met = CliRunner().invoke(app, [*asked, "--target-rho", "0.5"])
    assert met.exit_code == 0
    assert "guarantee" in met.stdout
    assert "NOT MET" not in met.stdout


@pytest.mark.parametrize("name", ["m.xyz", "m", "file/m.png"])
def test_a_figure_that_cannot_be_written_is_refused_before_any_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its ending or its folder, in one line."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr("dlm.federated.noise.make.make_mechanism", never)
    monkeypatch.setattr("dlm.federated.account.plan.make_plan", never)
    (tmp_path / "file").touch()
    message = "is not a folder" if "/" in name else r"\.png or \.svg"
    with pytest.raises(ConfigError, match=message):
        answer("mechanism", "--mechanism", "tree", "--rounds", 64, "--max-participations", 4,
            "--gap", 16,
               "--plot", tmp_path / name)  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        answer("plan", "--population", 4_000_000, "--rounds", 2000, "--target-rho", 0.5,
               "--plot", tmp_path / name)  # fmt: skip
