"""`dlm devices`: devices as processes of their own, and the server of their rounds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")

from dlm.cli.main import app  # noqa: E402
from dlm.errors import ConfigError, UnavailableError  # noqa: E402
from dlm.federated.devices.training import MOST_ABANDONED  # noqa: E402
from dlm.federated.training.trained import load_model  # noqa: E402

CONFIG = """
[run]
rounds = 2
[data]
vocabulary = "words.txt"
public = "the tests"
[model]
embedding_size = 4
hidden_size = 5
[local]
batch_size = 2
unroll = 4
[privacy]
clip_norm = 0.5
mechanism = "tree"
noise_multiplier = 0.5
[sampling]
report_goal = 4
[aggregation]
secure = true
"""
NAMES = ["ann", "bob", "cy", "di"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A list of devices, their keys and text; words and settings."""
    rng = np.random.default_rng(0)
    words, lines = ["alpha", "beta", "gamma"], []
    for name in NAMES:
        text = [" ".join(rng.choice(words, 5)) for _ in range(3)]
        (tmp_path / f"{name}.txt").write_text("\n".join(text) + "\n")
        lines.append(devices("register", name, "--state", str(tmp_path / name)).stdout)
    (tmp_path / "devices.tsv").write_text("".join(lines))
    (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def devices(*words: str) -> Result:
    return CliRunner().invoke(app, ["devices", *words])


def server(place: Path, *more: str) -> Result:
    given = [str(place / "devices.tsv"), "--config", str(place / "run.toml")]
    given += ["--sockets", str(place / "s"), "--output", str(place / "out")]
    return devices("server", *given, *more)


def device(place: Path, name: str) -> list[str]:
    given = [str(place / f"{name}.txt"), "--name", name, "--state", str(place / name)]
    given += ["--devices", str(place / "devices.tsv"), "--sockets", str(place / "s")]
    return [*given, "--rest-s", "0"]


@pytest.fixture
def listening(place: Path) -> Iterator[Path]:
    """The place, once all devices listen."""
    with ExitStack() as stack:
        started = []
        for name in NAMES:
            command = [sys.executable, "-m", "dlm", "devices", "device", *device(place, name)]
            one = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            stack.callback(one.kill)
            started.append(one)
        for one in started:
            assert one.stderr is not None
            assert any("listens" in line for line in iter(one.stderr.readline, ""))
        yield place
        for one in started:
            one.send_signal(signal.SIGTERM)
        assert [one.wait() for one in started] == [143] * len(NAMES)
    assert not list((place / "s").iterdir())


@pytest.mark.slow
@pytest.mark.promise("devices_train")
def test_devices_train_a_network_in_two_commands(listening: Path) -> None:
    """The second resumes; the report says how updates were hidden, and what was trusted."""
    first = server(listening, "--json", "--stop-after", "1")
    assert first.exit_code == 0, first.exception
    rest = server(listening)
    assert rest.exit_code == 0, rest.exception
    for done in (first, rest):
        assert "4 of 4 devices" in done.stderr, done.stderr
        assert "abandoned" not in done.stderr
    assert json.loads(first.stdout)["released_norm"] > 0
    report = (listening / "out" / "privacy.md").read_text()
    for said in ("-differential privacy", "no outside cryptogra", "registered keys", "own clock"):
        assert said in report
    assert "simulation of it" not in report
    assert load_model(listening / "out").rounds == 2
    counted = [json.loads((listening / name / "clocks.json").read_text()) for name in NAMES]
    assert [list(one["runs"].values()) for one in counted] == [[[1, 2]]] * len(NAMES)


@pytest.mark.slow
def test_a_run_stops_after_some_rounds_that_were_abandoned(listening: Path) -> None:
    """Here devices have no registered keys of the list that the server has."""
    (listening / "run.toml").write_text(CONFIG.replace("rounds = 2", "rounds = 9"))
    (listening / "devices.tsv").write_text("".join(f"{name}\n" for name in NAMES))
    done = server(listening)
    assert isinstance(done.exception, UnavailableError)
    assert done.stderr.count("abandoned, and") == MOST_ABANDONED
    assert len((listening / "out" / "metrics.jsonl").read_text().splitlines()) == MOST_ABANDONED


def test_a_server_waits_no_longer_than_it_is_told(place: Path) -> None:
    done = server(place, "--wait-s", "0")
    assert isinstance(done.exception, UnavailableError)


@pytest.mark.parametrize(
    ("setting", "wrong", "said"),
    [
        ("secure = true", "secure = false", "aggregation.secure"),
        ("report_goal = 4", "report_goal = 2", "report_goal"),
        ("report_goal = 4", 'report_goal = 4\nkind = "fixed"', "sampling.kind"),
        ("report_goal = 4", "report_goal = 4\nlow = 0.5", "sampling.low"),
        ("unroll = 4", "unroll = 4\nusers_at_once = 2", "users_at_once"),
        ('public = "the tests"', 'public = "x"\nheld_out = 0.5', "data.held_out"),
    ],
)
def test_what_devices_cannot_do_is_refused(
    place: Path, setting: str, wrong: str, said: str
) -> None:
    (place / "run.toml").write_text(CONFIG.replace(setting, wrong))
    done = server(place)
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


def test_more_devices_than_its_goal_could_finish_a_round_with_are_not_asked(place: Path) -> None:
    done = server(place, "--over-selection", "2")
    assert isinstance(done.exception, ConfigError)
    assert "over_selection" in str(done.exception)


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "../x\n",
        "ann\nann\n",
        "ann\tkey\n",
        f"ann\t{'0' * 64}\nbob\n",
        f"ann\t{'0' * 64}\nbob\t{'0' * 64}\n",
    ],
    ids=["empty", "a path", "twice", "no key", "one without", "one key"],
)
def test_a_list_of_devices_that_says_something_else_is_refused(place: Path, lines: str) -> None:
    (place / "devices.tsv").write_text(lines)
    assert isinstance(server(place).exception, ConfigError)


def test_a_device_with_another_key_than_the_list_has_is_refused(place: Path) -> None:
    given = device(place, "ann")
    given[given.index("--name") + 1] = "bob"
    assert isinstance(devices("device", *given).exception, ConfigError)


@pytest.mark.parametrize(
    ("keys", "more"), [(None, []), (False, []), (True, ["--unregistered"])], ids=str
)
def test_a_device_has_registered_keys_or_says_that_it_does_without(
    place: Path, keys: bool | None, more: list[str]
) -> None:
    """`None`: it has no list; a list may be without keys, too."""
    if keys is False:
        (place / "devices.tsv").write_text("".join(f"{name}\n" for name in NAMES))
    given = device(place, "ann")
    if keys is None:
        at = given.index("--devices")
        del given[at : at + 2]
    done = devices("device", *given, *more)
    assert isinstance(done.exception, ConfigError)
    assert "--unregistered" in str(done.exception)


def test_a_device_that_is_told_to_does_without_keys(place: Path) -> None:
    """It comes as far as its socket, whose path is too long here."""
    given = [str(place / "ann.txt"), "--name", "ann", "--state", str(place / "ann")]
    done = devices("device", *given, "--unregistered", "--sockets", "x" * 100)
    assert isinstance(done.exception, ConfigError)
    assert "local socket" in str(done.exception)


def test_a_device_keeps_its_key(place: Path) -> None:
    again = devices("register", "ann", "--state", str(place / "ann"))
    assert isinstance(again.exception, ConfigError)


def users_file(place: Path) -> str:
    """The text of all devices, as that of users."""
    text = {name: (place / f"{name}.txt").read_text().splitlines() for name in NAMES}
    rows = "".join(f"{name}\t{line}\n" for name in NAMES for line in text[name])
    (place / "users.tsv").write_text(f"user_id\tutterance\n{rows}")
    return str(place / "users.tsv")


@pytest.mark.slow
@pytest.mark.promise("devices_train")
def test_rounds_on_devices_are_those_of_dlm_federate(listening: Path) -> None:
    """With one seed, and text in the order of the file; devices draw their rounding themselves."""
    with_seed = CONFIG.replace("rounds = 2", "rounds = 2\nseed = 3")
    (listening / "run.toml").write_text(
        with_seed.replace("unroll = 4", "unroll = 4\nshuffle = false")
    )
    done = server(listening)
    assert done.exit_code == 0, done.exception
    given = [users_file(listening), "--config", str(listening / "run.toml")]
    done = CliRunner().invoke(app, ["federate", *given, "--output", str(listening / "here")])
    assert done.exit_code == 0, done.exception
    there, here = (load_model(listening / folder).params for folder in ("out", "here"))
    for one, other in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        np.testing.assert_allclose(one, other, atol=0.01)


@pytest.mark.slow
@pytest.mark.promise("devices_train")
def test_counts_on_devices_are_those_of_dlm_unigrams_bit_for_bit(listening: Path) -> None:
    """With one seed; the report says how counts were hidden. A network begins with them."""
    given = ["--wordlist", str(listening / "words.txt"), "--public-attested-by", "the tests"]
    given += ["--lambda", "2.3", "--rounds", "2", "--report-goal", "4", "--tokenizer", "whitespace"]
    given += ["--noise-multiplier", "0.1", "--delta", "1e-3", "--max-participations", "2"]
    given += ["--seed", "3", "--cap-words", "11"]
    there, here = str(listening / "there.tsv"), str(listening / "here.tsv")
    where = [str(listening / "devices.tsv"), "--sockets", str(listening / "s")]
    for done in (
        devices("unigrams", *where, *given, "--output", there),
        CliRunner().invoke(app, ["unigrams", users_file(listening), *given, "--output", here]),
    ):
        assert done.exit_code == 0, done.exception
    assert Path(there).read_bytes() == Path(here).read_bytes()
    report = Path(f"{there}.privacy.md").read_text()
    for said in ("no outside cryptographer", "registered keys", "own clock"):
        assert said in report
    assert len(Path(there).read_text().splitlines()) > 1
    with_counts = CONFIG.replace("words.txt", "there.tsv").replace('public = "the tests"\n', "")
    (listening / "run.toml").write_text(with_counts.replace("rounds = 2", "rounds = 2\nseed = 3"))
    done = server(listening, "--stop-after", "1")
    assert done.exit_code == 0, done.exception
