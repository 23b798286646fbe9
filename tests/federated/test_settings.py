"""A run's settings: from a file, under flags and variables; refused where they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.run.sampling import Diurnal
from dlm.federated.training.settings import REAL, TrainingSettings

FILE = """
[run]
rounds = 20
seed = 3
[data]
vocabulary = "words.txt"
[privacy]
clip_norm = 0.5
mechanism = "tree"
noise_multiplier = 7
gap = 5
schedule = []
[sampling]
report_goal = 100
"""


def read(tmp_path: Path, text: str = FILE, **more: Any) -> TrainingSettings:
    """Settings of a file with this text."""
    (tmp_path / "run.toml").write_text(text)
    return TrainingSettings.read(tmp_path / "run.toml", **{"environ": {}, **more})


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    """One setting of each kind; paths are relative to the file."""
    got = read(
        tmp_path,
        environ={
            "DLM_FEDERATE_RUN_SEED": "4",
            "DLM_FEDERATE_RUN_ROUNDS": "21",
            "DLM_FEDERATE_LOCAL_UNROLL": "7",
        },
        flags={"run": {"seed": 5, "stop_after": None}},
    )
    assert (got.run.seed, got.run.rounds, got.local.unroll, got.local.epochs) == (5, 21, 7, 1)
    assert got.data.vocabulary == tmp_path / "words.txt"
    assert got.privacy.noise_multiplier == 7.0
    assert got.run.simulation


def test_variables_of_a_server_of_models_are_no_settings_of_a_run(tmp_path: Path) -> None:
    """Both have a table [server], and one environment may hold the variables of both."""
    environ = {
        "DLM_SERVER_PORT": "50061",
        "DLM_SERVER_MOMENTUM": "0.1",
        "DLM_FEDERATE_SERVER_MOMENTUM": "0.5",
    }
    assert read(tmp_path, environ=environ).server.momentum == 0.5
    with pytest.raises(ConfigError, match=r"DLM_FEDERATE_SERVER_MOMENTUMM.*did you mean"):
        read(tmp_path, environ={"DLM_FEDERATE_SERVER_MOMENTUMM": "0.5"})
    with pytest.raises(
        ConfigError, match=r"unknown environment variable DLM_FEDERATE_SERVE_MOMENTUM"
    ):
        read(tmp_path, environ={"DLM_FEDERATE_SERVE_MOMENTUM": "0.5"})


def test_without_a_seed_a_run_is_no_simulation(tmp_path: Path) -> None:
    """And must save every round."""
    text = FILE.replace("seed = 3\n", "")
    got = read(tmp_path, text)
    assert got.run.seed == REAL
    assert not got.run.simulation
    with pytest.raises(PrivacyError, match="must save every round"):
        read(tmp_path, text.replace("rounds = 20", "rounds = 20\ncheckpoint_every = 5"))


def test_the_usual_noise_on_the_count_is_a_twentieth(tmp_path: Path) -> None:
    """Of the report goal, or of the denominator that is given."""
    text = FILE.replace("gap = 5", "adaptive = true").replace('"tree"', '"tree-restart"')
    got = read(tmp_path, text.replace("noise_multiplier = 7", "noise_multiplier = 2"))
    adaptive = got.privacy.release(got.sampling.users_a_round(10_000)).adaptive
    assert adaptive is not None
    assert adaptive.count_stddev == 5.0
    few = read(tmp_path, text.replace("report_goal = 100", "report_goal = 50"))
    with pytest.raises(PrivacyError, match="above 70;"):
        few.privacy.release(few.sampling.users_a_round(10_000))


def test_devices_are_available_by_the_hour_where_that_is_said(tmp_path: Path) -> None:
    """Else always, all of them."""
    assert read(tmp_path).sampling.diurnal() is None
    text = FILE + 'low = 0.05\nhigh = 0.6\nzones = "0:0.25, -8:0.75"\n'
    assert read(tmp_path, text).sampling.diurnal() == Diurnal(0.05, 0.6, ((0, 0.25), (-8, 0.75)))


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("[sampling]", "[samplin]", ConfigError, "unknown table samplin"),
        ("rounds = 20", "round = 20", ConfigError, "a setting named round"),
        ("rounds = 20\n", "", ConfigError, r"\[run\] lacks rounds"),
        ("rounds = 20", f"rounds = {10**11}", ConfigError, f"rounds is {10**11}"),
        ("[run]", "a = " + "[" * 5000, ConfigError, "TOML"),
        ("rounds = 20", 'rounds = "8"', ConfigError, "expected an integer"),
        ("noise_multiplier = 7\n", "", PrivacyError, "or neither"),
        ("gap = 5", "gap = 0", ConfigError, "gap is 0"),
        ("gap = 5", "delta = 1.0", ConfigError, "delta is 1.0; expected above 0 and below 1"),
        ("schedule = []", "schedule = [3]", ConfigError, "pairs"),
        ("report_goal = 100", "q = 0.0", ConfigError, "q is 0.0"),
        ("report_goal = 100", 'kind = "all"', ConfigError, "kind is 'all'"),
        ("[sampling]", '[sampling]\nkind = "poisson"', PrivacyError, "no longer a Poisson sample"),
        ("[sampling]", "[sampling]\nlow = 0.6\nhigh = 0.5", ConfigError, "0 <= low <= high <= 1"),
        ("[sampling]", '[sampling]\nzones = "0"', ConfigError, "zones is '0'"),
        ("[sampling]", '[sampling]\nzones = "0:1,nan:0"', ConfigError, "time zone"),
        ("[sampling]", '[sampling]\nkind = "fixed"\nhigh = 0.5\nlow = 0', ConfigError, "timer"),
        ("clip_norm = 0.5", "clip_norm = 1e-20", PrivacyError, "1e-12 or more"),
        ("[sampling]", "[pretrain]\nsteps = 5\n[sampling]", ConfigError, "steps, or neither"),
        ("[data]", '[model]\npreset = "gpt"\n[data]', ConfigError, "no preset is named 'gpt'"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    """With the table and the setting."""
    assert old in FILE
    with pytest.raises(error, match=message):
        found = read(tmp_path, FILE.replace(old, new))
        found.model.network(100)
        found.privacy.release(100.0)


def test_a_preset_takes_the_vocabulary_of_the_run(tmp_path: Path) -> None:
    """And a model without one its own settings."""
    got = read(tmp_path, FILE.replace("[data]", '[model]\npreset = "fng-p4kg"\n[data]'))
    network = got.model.network(1234)
    assert (network.vocab_size, network.groups, network.cell) == (1234, 5, "lstm")
    plain = read(tmp_path, FILE.replace("[data]", "[model]\nhidden_size = 32\n[data]"))
    assert plain.model.network(50).hidden_size == 32


def test_what_binds_a_run_leaves_out_where_files_lie_and_when_it_stops(tmp_path: Path) -> None:
    """Everything else is compared when it goes on."""
    one, other = read(tmp_path), read(tmp_path, flags={"run": {"stop_after": 3}})
    assert one.binding() == other.binding()
    assert read(tmp_path, flags={"server": {"momentum": 0.8}}).binding() != one.binding()
