"""`dlm federate`: rounds from the command line, gone on with, refused and reported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

from dlm.cli.main import app  # noqa: E402
from dlm.errors import ConfigError, DlmError, PrivacyError, TrainingDiverged  # noqa: E402
from dlm.federated.run.run_files import refuse_secrets_left  # noqa: E402
from dlm.federated.training.train import Training  # noqa: E402
from dlm.federated.users import UserDataset  # noqa: E402
from federated.compiling import quickly  # noqa: E402

CONFIG = """
[run]
rounds = 3
seed = 3
evaluate_every = 3
[data]
vocabulary = "words.txt"
public = "the tests"
held_out = 0.1
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
gap = 2
max_participations = 2
[sampling]
report_goal = 4
"""


@pytest.fixture(scope="module", autouse=True)
def quick_compiling() -> Iterator[None]:
    """Much is compiled here, and little computed."""
    with quickly():
        yield


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Users, words and settings."""
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma"]
    rows = [f"user{u}\t{' '.join(rng.choice(words, 5))}" for u in range(20) for _ in range(3)]
    (tmp_path / "users.tsv").write_text("user_id\tutterance\n" + "\n".join(rows) + "\n")
    (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def federate(place: Path, *more: str) -> Result:
    """The command, in this process."""
    given = [str(place / "users.tsv"), "--config", str(place / "run.toml")]
    return CliRunner().invoke(app, ["federate", *given, "--output", str(place / "out"), *more])


def test_rounds_are_told_kept_and_gone_on_with(place: Path) -> None:
    """A line of JSON a round; the same command does the rest; the report says what it is worth."""
    first = federate(place, "--json", "--stop-after", "2")
    assert first.exit_code == 0, first.exception
    assert [json.loads(line)["round"] for line in first.stdout.splitlines()] == [0, 1]
    assert "not private" in first.stderr
    assert "nothing to do" not in first.stderr
    again = federate(place, "--stop-after", "1")
    assert again.exit_code == 0
    assert "nothing to do" in again.stderr
    assert "already has 2 rounds, and stop_after is 1; raise --stop-after" in again.stderr
    assert re.search(r"round 1 of 3: \d+\.\d\d s, 4 users", first.stderr)
    # What the seconds before the first round go to, in order; none of it where nothing is done.
    waits = r"importing jax\n.*reading and sorting users' text\n.*compiling a round\n.*round 1 of"
    assert re.search(waits, first.stderr, re.DOTALL)
    assert "compiling a round" not in again.stderr
    rest = federate(place, "--json")
    assert rest.exit_code == 0, rest.exception
    (last,) = [json.loads(line) for line in rest.stdout.splitlines()]
    assert last["round"] == 2
    assert last["held_out"]["words"] > 0
    assert last["not_private"]["users"] == 4
    # The copy of users' text is announced while rounds are left, and goes with the last of them.
    assert f"dlm privacy erase {place / 'out'}" in first.stderr
    assert "erase" not in rest.stderr
    assert not (place / "out" / "users.store").exists()
    assert "resuming after round 2" in rest.stderr
    assert "3 of 3 rounds done" in rest.stderr
    report = (place / "out" / "privacy.md").read_text()
    assert "NO GUARANTEE" in report
    assert "simulation" in report
    facts = json.loads((place / "out" / "privacy.json").read_text())
    assert facts["provenance"]["guarantee"] == "none"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("users.tsv", "user_id\tutterance\n\talpha beta\n", "--missing count"),
        ("users.tsv", "user_id\tutterance\nuser1\t\n", "--missing count"),
        ("users.tsv", "who\ttext\nuser1\talpha\n", "--user-column, --text-column"),
        ("run.toml", CONFIG.replace("clip_norm = 0.5", ""), "run.toml: [privacy] lacks clip_norm"),
        ("run.toml", CONFIG.replace("[data]\nvocabulary", "[data]\n#"), "[data] lacks vocabulary"),
        ("run.toml", CONFIG.replace("rounds = 3", "rounds = 64"), "at most 8"),
        (
            "run.toml",
            CONFIG.replace("rounds = 3", "rounds = 9").replace("gap = 2", "gap = 6"),
            "6 rounds in a row need 24 different users",
        ),
        ("run.toml", CONFIG.replace("rounds = 3", "rouns = 3"), "a setting named rouns"),
    ],
)
def test_bad_input_is_refused_before_any_round(
    place: Path, file: str, text: str, message: str
) -> None:
    """Missing ids, empty users, a vocabulary of nothing, settings that cannot be."""
    (place / file).write_text(text)
    done = federate(place)
    assert isinstance(done.exception, DlmError)
    assert message in str(done.exception)
    assert not (place / "out" / "checkpoint.dlmfed").exists()
    assert not (place / "out" / "users.store").exists()


def test_other_columns_and_rows_of_nobody_are_taken_as_the_message_says(place: Path) -> None:
    """With the options that it names; what is left out is told."""
    users = place / "users.tsv"
    lines = users.read_text().splitlines()[1:]
    users.write_text("\n".join(["who\ttext", "\talpha", *lines]) + "\n")
    more = ("--user-column", "who", "--text-column", "text")
    refused = federate(place, *more)
    assert "no user id" in str(refused.exception)
    wrong = federate(place, *more, "--missing", "drop")
    assert "--missing is 'drop'; expected refuse or count" in str(wrong.exception)
    done = federate(place, *more, "--missing", "count", "--stop-after", "1")
    assert done.exit_code == 0, done.exception
    assert "left out: 1 row without a user id, 0 users" in done.stderr


def test_held_out_users_are_named_where_a_guarantee_is_told(place: Path) -> None:
    """They are evaluated exactly: the command and the report say so."""
    (place / "run.toml").write_text(CONFIG.replace("seed = 3\n", ""))
    done = federate(place, "--stop-after", "1")
    assert done.exit_code == 0, done.exception
    assert "held-out users are evaluated without noise" in done.stderr
    # How long a round takes tells how much its users wrote.
    assert "round 1 of 3" in done.stderr
    assert not re.search(r"\d s\b", done.stderr)
    assert "held-out users are in no round" in (place / "out" / "privacy.md").read_text()


def test_a_delta_that_would_permit_publishing_a_user_is_warned_of(place: Path) -> None:
    """17 users train: whoever publishes one of them keeps delta = 1/17."""
    real = CONFIG.replace("seed = 3\n", "")
    (place / "run.toml").write_text(real.replace("[privacy]", "[privacy]\ndelta = 0.1"))
    assert "privacy.delta is 0.1; with 17 users" in federate(place, "--stop-after", "1").stderr
    (place / "run.toml").write_text(real)
    (place / "out").rename(place / "first")
    less = federate(place, "--stop-after", "1")
    assert "epsilon" in less.stderr
    assert "privacy.delta" not in less.stderr


def test_too_few_users_are_told_of_with_those_who_are_held_out(place: Path) -> None:
    """They could train."""
    (place / "run.toml").write_text(CONFIG.replace("report_goal = 4", "report_goal = 400"))
    refused = federate(place).exception
    assert isinstance(refused, ConfigError)
    assert any("held out by data.held_out" in note for note in refused.__notes__)


def test_the_folder_of_a_pipeline_is_refused(place: Path) -> None:
    """A run there would replace the pipeline's report by one of other rounds."""
    (place / "out").mkdir()
    (place / "out" / "journal.json").write_text("{}")
    (place / "out" / "privacy.md").write_text("the pipeline's")
    done = federate(place)
    assert isinstance(done.exception, ConfigError)
    assert "belongs to `dlm pipeline`; choose another --output" in str(done.exception)
    assert sorted(p.name for p in (place / "out").iterdir()) == ["journal.json", "privacy.md"]


def test_a_run_that_users_run_out_of_says_what_can_be_done(place: Path) -> None:
    """A folder of an earlier program, begun without enough users: its rounds can be reported."""
    (place / "run.toml").write_text(
        CONFIG.replace("rounds = 3", "rounds = 12").replace(
            "max_participations = 2", "max_participations = 1"
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_check_population", lambda self: None)
        first = federate(place)
    assert isinstance(first.exception, ConfigError)
    said = str(first.exception)
    assert "no cohort was found" in said
    done = int(said.split("run.stop_after = ")[1].split(".")[0])
    assert 1 <= done < 12
    reported = federate(place, "--stop-after", str(done))
    assert reported.exit_code == 0, reported.exception
    assert (place / "out" / "privacy.md").exists()


def test_no_report_of_fewer_rounds_stands_beside_a_model_of_more(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on and is killed leaves none; told to do nothing, it writes it again."""
    assert federate(place, "--stop-after", "1").exit_code == 0
    assert (place / "out" / "privacy.json").exists()

    def killed(self: Training, index: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_cohort", killed)
        assert federate(place).exit_code != 0
    assert not list((place / "out").glob("privacy.*"))
    assert federate(place, "--stop-after", "1").exit_code == 0
    assert (place / "out" / "privacy.json").exists()


@pytest.mark.parametrize("rounds", [1, 3], ids=["in its last round", "before it"])
def test_a_run_that_diverges_is_reported_and_ends(
    place: Path, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds were released: they have a report. Nobody's text is read again, or advised to."""
    wild = CONFIG + "[server]\nlearning_rate = 1e12\n"
    (place / "run.toml").write_text(wild.replace("rounds = 3", f"rounds = {rounds}"))
    first = federate(place)
    report = (place / "out" / "privacy.md").read_text()
    assert ("the run ended after 1 of 3 planned rounds" in report) == (rounds > 1)
    kept = sorted(path.name for path in (place / "out").iterdir())
    assert not [name for name in kept if name == "users.store" or "private" in name]

    def read(*_: object, **__: object) -> None:
        pytest.fail("users' text was read")

    monkeypatch.setattr(UserDataset, "open", read)
    for done in (first, federate(place), *(federate(place, "--stop-after", n) for n in "13")):
        assert isinstance(done.exception, TrainingDiverged)
        assert "after round 1 the model diverges" in str(done.exception)
        assert "privacy costs of both runs add up" in str(done.exception)
        assert any(str(place / "out" / "privacy.md") in note for note in done.exception.__notes__)
        assert "stop" not in str(done.exception)
        assert "keeps noise" not in done.stderr
        assert "nothing to do" not in done.stderr
        assert sorted(path.name for path in (place / "out").iterdir()) == kept
        assert (place / "out" / "privacy.md").read_text() == report


def test_a_diverged_run_whose_report_is_missing_gets_it(place: Path) -> None:
    """Killed before it was written; users' text does not stay."""
    (place / "run.toml").write_text(CONFIG + "[server]\nlearning_rate = 1e12\n")
    federate(place)
    (place / "out" / "privacy.json").unlink()
    assert isinstance(federate(place, "--stop-after", "1").exception, TrainingDiverged)
    assert (place / "out" / "privacy.json").exists()
    assert not (place / "out" / "users.store").exists()


def test_a_run_that_was_ended_takes_no_text_again(place: Path) -> None:
    """It is refused more rounds, or reported again; `dlm privacy erase` says what it removed."""
    erase = ["privacy", "erase", str(place / "out")]
    federate(place, "--stop-after", "1")
    assert json.loads(CliRunner().invoke(app, [*erase, "--json"]).stdout) == {
        "run": str(place / "out"),
        "rounds": 1,
        "erased": ["private-1.state", "users.store"],
    }
    assert isinstance(federate(place).exception, PrivacyError)
    assert not (place / "out" / "users.store").exists()
    again = federate(place, "--stop-after", "1")
    assert again.exit_code == 0
    assert "keeps noise" not in again.stderr
    assert "nothing to do" not in again.stderr
    assert not (place / "out" / "users.store").exists()
    # A copy of users' text that comes back is refused until it is erased.
    (place / "out" / "users.store").mkdir()
    with pytest.raises(PrivacyError, match=r"users\.store"):
        refuse_secrets_left(place / "out")
    assert "erased: users.store" in CliRunner().invoke(app, erase).stdout
    refuse_secrets_left(place / "out")
    assert "erased: nothing" in CliRunner().invoke(app, erase).stdout


def test_wordpieces_that_cannot_be_used_are_refused_by_name(place: Path) -> None:
    """No file, no model, words asked for by number, no such tokenizer."""
    for more, message in (
        ("", "data.vocabulary: no such file or folder: "),
        ("\nvocabulary_size = 3", "make fewer pieces with dlm pieces"),
        ('\ntokenizer = "letters"', "data.tokenizer is 'letters'; expected words or white"),
    ):
        settings = CONFIG.replace('"words.txt"', f'"pieces.model"{more}')
        (place / "run.toml").write_text(settings)
        found = federate(place).exception
        assert isinstance(found, ConfigError)
        assert message in str(found)
    (place / "run.toml").write_text(CONFIG.replace('"words.txt"', '"pieces.model"'))
    (place / "pieces.model").write_bytes(b"no model")
    message = str(federate(place).exception)
    assert "pieces.model: not a SentencePiece model" in message
    assert "wordpieces from dlm pieces; give a list of words another name" in message
