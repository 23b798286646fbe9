"""A whole run: it goes on to the bit, keeps its promises about files, and refuses to change."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")

from dlm import checkpoint  # noqa: E402
from dlm.checkpoint import CHECKPOINT  # noqa: E402
from dlm.errors import ConfigError, FormatError, PrivacyError, TrainingDiverged  # noqa: E402
from dlm.federated.account.compose import StageRecord  # noqa: E402
from dlm.federated.account.recheck import recheck  # noqa: E402
from dlm.federated.account.zcdp import zcdp_epsilon  # noqa: E402
from dlm.federated.counting.unigrams import read_wordlist  # noqa: E402
from dlm.federated.devices.encoding import SecureAggregator  # noqa: E402
from dlm.federated.keys import Key  # noqa: E402
from dlm.federated.noise.blt import Blt, BltParameters  # noqa: E402
from dlm.federated.noise.discrete import DiscreteState  # noqa: E402
from dlm.federated.run.run_files import LEDGER, METRICS, refuse_secrets_left  # noqa: E402
from dlm.federated.run.run_folder import RunFolder  # noqa: E402
from dlm.federated.training import grid, train  # noqa: E402
from dlm.federated.training.engine import LocalEngine  # noqa: E402
from dlm.federated.training.settings import TrainingSettings  # noqa: E402
from dlm.federated.training.train import Training  # noqa: E402
from dlm.federated.training.trained import load_model  # noqa: E402
from dlm.federated.users import UserDataset  # noqa: E402
from dlm.federated.words import WordList  # noqa: E402
from dlm.record import counts_file  # noqa: E402
from dlm.record.provenance import Guarantee, Provenance  # noqa: E402
from dlm.record.sidecar import sidecar  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiling")

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
WORDS = ["alpha", "beta", "gamma", "delta", "rho"]
FILE = """
[run]
rounds = 6
seed = 3
evaluate_every = 3
[data]
vocabulary = "words.txt"
public = "the tests"
max_tokens = 30
held_out = 0.2
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
gap = 3
max_participations = 3
[sampling]
report_goal = 6
"""


@cache
def engine_of(model: Any, config: Any, bits: int) -> LocalEngine:
    """An engine for all runs with the same network: it takes seconds to compile."""
    return LocalEngine(model, config, bits=bits)


@pytest.fixture(autouse=True)
def shared_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that add up in the clear share their engines; they hold no state."""

    def made(model: Any, config: Any, *, bits: int, aggregator: Any = None) -> LocalEngine:
        if aggregator is not None:
            return LocalEngine(model, config, bits=bits, aggregator=aggregator)
        return engine_of(model, config, bits)

    monkeypatch.setattr(train, "LocalEngine", made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users, words and settings."""
    place = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    lines = ["user_id\tutterance"]
    for user in range(40):
        lines += [
            f"user{user}\t{' '.join(rng.choice([*WORDS, 'unheard'], rng.integers(1, 9)))}"
            for _ in range(int(rng.integers(1, 6)))
        ]
    (place / "users.tsv").write_text("\n".join(lines) + "\n")
    (place / "words.txt").write_text("\n".join(WORDS) + "\n")
    (place / "run.toml").write_text(FILE)
    return place


@pytest.fixture(scope="module")
def users(folder: Path) -> UserDataset:
    """The dataset."""
    return UserDataset.open(folder / "users.tsv", store=folder / "store")


def settings(folder: Path, **tables: dict[str, Any]) -> TrainingSettings:
    """The file's settings, some changed."""
    return TrainingSettings.read(folder / "run.toml", flags=tables, environ={})


def state_bits(training: Training) -> list[bytes]:
    """Every number of a run's state, and its ledger."""
    released, private, _ = training._arrays()
    return [*(array.tobytes() for array in [*released, *private]), training.ledger.to_bytes()]


def finished(
    folder: Path, users: UserDataset, output: Path, stops: tuple[int, ...] = (), **tables: Any
) -> tuple[list[bytes], list[dict[str, Any]]]:
    """A run that is stopped after some rounds and gone on with: its state and its lines."""
    for stop in (*stops, 0):
        run = {**tables.get("run", {}), "stop_after": stop}
        with Training(settings(folder, **{**tables, "run": run}), users, output) as training:
            list(training.run())
            bits = state_bits(training)
    lines = [json.loads(line) for line in (output / METRICS).read_text().splitlines()]
    return bits, lines


ADAPTIVE = {
    "mechanism": "tree-restart",
    "adaptive": True,
    "first_restart": 1,
    "restart_every": 2,
    "count_stddev": 2.0,
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "tree": {},
    "adaptive": {"privacy": ADAPTIVE},
    "bands": {"privacy": {"mechanism": "bandfhu", "bands": 3}},
    "full tree, secure": {
        "privacy": {"mechanism": "tree-full"},
        "aggregation": {"secure": True},
    },
    "poisson, adam": {
        "sampling": {"kind": "poisson", "q": 0.2},
        "server": {"optimizer": "adam", "learning_rate": 0.1},
        "privacy": {"mechanism": "gaussian", "gap": 1, "max_participations": 0},
    },
}


@pytest.mark.promise("rounds_once")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    name: str, folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Model, optimiser, noise, clip norm, ledger and metrics are those of a run in one piece."""
    tables: dict[str, Any] = {**VARIANTS[name]}
    whole, lines = finished(folder, users, tmp_path / "whole", **tables)
    parts, lines_of_parts = finished(folder, users, tmp_path / "parts", (1, 4), **tables)
    assert parts == whole

    def untimed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k != "seconds"} for line in found]

    assert [line["round"] for line in lines] == list(range(6))
    # A run that stops evaluates where it stops, too.
    for a, b in zip(untimed(lines), untimed(lines_of_parts), strict=True):
        assert {k: v for k, v in b.items() if k in a} == a
    assert "held_out" in lines[2]
    assert "held_out" in lines[5]


@pytest.mark.promise("keys")
def test_no_key_is_in_any_file_of_a_run_that_is_no_simulation(
    folder: Path, users: UserDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the system's random bytes nor any key made from them; and two runs differ."""
    drawn: list[bytes] = []
    urandom = os.urandom

    def remembered(count: int) -> bytes:
        drawn.append(urandom(count))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", remembered)
    keys: list[bytes] = []
    wrap = jax.random.wrap_key_data

    def wrapped(data: Any, **more: Any) -> Any:
        raw = np.asarray(data).tobytes()
        if any(raw):
            keys.append(raw)
        return wrap(data, **more)

    monkeypatch.setattr(jax.random, "wrap_key_data", wrapped)
    material = Key.material

    def expanded(key: Key) -> bytes:
        streams.append(material(key))
        return streams[-1]

    streams: list[bytes] = []
    monkeypatch.setattr(Key, "material", expanded)
    real = {"run": {"seed": -1, "stop_after": 3}}
    models = []
    for name in ("one", "two"):
        with Training(settings(folder, **real), users, tmp_path / name) as training:
            list(training.run())
            models.append(state_bits(training))
    assert models[0] != models[1]
    assert drawn
    assert keys
    # Of two runs of three rounds: a leaf each and one node, each with a stream for doubts.
    assert len(streams) == len(set(streams)) == 2 * 2 * (3 + 1)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            for secret in [*drawn, *keys, *streams]:
                assert secret not in content
                assert secret.hex().encode() not in content
    private = next((tmp_path / "one").glob("private-*.state"))
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    lines = [json.loads(x) for x in (tmp_path / "one" / METRICS).read_text().splitlines()]
    assert len(lines) == 3
    assert all("not_private" not in line for line in lines)
    # It goes on, with other noise than a copy of it that goes on: keys are fresh.
    ends = []
    for _ in range(2):
        with Training(
            settings(folder, run={"seed": -1, "stop_after": 4}), users, tmp_path / "one"
        ) as training:
            noise = training.state.noise
            assert isinstance(noise, DiscreteState)
            ends.append(material(noise.key))
            assert training.rounds_done == noise.round == 3
            assert len(noise.buffers) == 2
            assert all(buffer.any() for buffer in noise.buffers)
    assert ends[0] != ends[1]


def test_a_run_that_is_no_simulation_has_discrete_noise_and_its_report_says_so(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Grid, generator and cost; epsilon is that of any mechanism of its rho."""
    tables: dict[str, Any] = {"run": {"seed": -1, "stop_after": 1, "evaluate_every": 0}}
    for name, mechanism in (("tree", "tree"), ("bands", "bandfhu")):
        given = {**tables, "privacy": {"mechanism": mechanism}}
        with Training(settings(folder, **given), users, tmp_path / name) as training:
            list(training.run())
            stage, report = training.stage(), training.report()
        assert (stage.rounding == 1) == (mechanism == "tree")
        assert stage.rounding < 1.0000001
        text = report.markdown()
        assert "2^-32" in text
        assert "by ChaCha20; the grid costs" in text
        assert ("costs nothing" in text) == (mechanism == "tree")
        assert "epsilon holds for every mechanism with that rho" in text
        assert report.numbers is not None
        assert report.numbers["epsilon"] == zcdp_epsilon(stage.rho, 1e-6)
        assert "gaussian" not in report.numbers["epsilons"]
        assert recheck(report.provenance).follows
        # The same run, read from its checkpoint: one release.
        assert load_model(tmp_path / name).record.stages == report.provenance.stages
        assert report.provenance.stages[0]["extras"]["released"]


def test_a_grid_that_is_too_coarse_is_refused_before_the_first_round(
    folder: Path, users: UserDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rounding would cost more than a thousandth of rho."""
    monkeypatch.setattr(grid, "MOST_COST", 1 + 1e-9)
    tables: dict[str, Any] = {"privacy": {"mechanism": "bandfhu"}}
    with pytest.raises(PrivacyError, match="the grid of discrete noise is too coarse"):
        Training(settings(folder, **tables), users, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_checkpoint_alone_does_not_hold_the_noise(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """The model may be given away; the buffers that tie rounds together are beside it."""
    with Training(settings(folder, run={"stop_after": 3}), users, tmp_path) as training:
        list(training.run())
        held = [buffer for buffer in training.state.noise.buffers if buffer.any()]
    public, private = (tmp_path / CHECKPOINT).read_bytes(), next(tmp_path.glob("private-*"))
    assert held
    for row in held:
        assert row.astype("<i8").tobytes()[:64] not in public
        assert row.astype("<i8").tobytes()[:64] in private.read_bytes()


@pytest.mark.promise("keys")
@pytest.mark.parametrize(
    "mechanism",
    ["blt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tree", "bandfhu"))],
)
@pytest.mark.parametrize("last", [6, 3], ids=["finished", "aborted"])
def test_a_run_that_has_ended_keeps_none_of_its_noise(
    mechanism: str, last: int, folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Neither the buffers of the last round nor those of any before; who took part stays."""
    tables = {"run": {"seed": -1, "stop_after": last}, "privacy": {"mechanism": mechanism}}
    given, secrets = settings(folder, **tables), []
    with Training(given, users, tmp_path) as training:
        for _ in training.run():
            noise = training.state.noise
            secrets += [row.tobytes()[:64] for b in noise.buffers for row in np.atleast_2d(b)]
        ledger = training.ledger.digest
    secrets = [secret for secret in secrets if any(secret)]
    assert secrets

    def held() -> set[str]:
        contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        return {name for name, found in contents.items() for one in secrets if one in found}

    back = tmp_path / f"private-{last}.state"
    if last < given.run.rounds:
        assert held() == {back.name}
        refuse_secrets_left(tmp_path)  # rounds remain
        with RunFolder(tmp_path) as left:
            assert left.end() == (last, [back.name])
    # A copy that comes back, as from a backup, is refused until it is erased.
    back.write_bytes(secrets[0])
    with pytest.raises(PrivacyError, match=f"{back.name} still holds its noise"):
        refuse_secrets_left(tmp_path)
    with RunFolder(tmp_path) as left:
        assert left.end() == (last, [back.name])
    assert held() == set()
    assert not list(tmp_path.glob("*private*"))
    assert stat.S_IMODE((tmp_path / LEDGER).stat().st_mode) == 0o600
    with Training(given, users, tmp_path) as again:
        assert (again.rounds_done, again.ledger.digest) == (last, ledger)
        assert list(again.run()) == []
        assert again.report().provenance.guarantee is not None
    if last < given.run.rounds:
        with (
            Training(settings(folder, **{**tables, "run": {"seed": -1}}), users, tmp_path) as again,
            pytest.raises(PrivacyError, match=r"ended after 3 of 6 rounds.* noise .*erased"),
        ):
            list(again.run())


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"run": {"rounds": 7}}, "run.rounds was 6 and is 7"),
        ({"run": {"seed": -1}}, "run.seed was 3 and is -1"),
        ({"privacy": {"noise_multiplier": 0.4}}, "privacy.noise_multiplier was 0.5 and is 0.4"),
        ({"local": {"learning_rate": 0.1}}, "local.learning_rate"),
        ({"data": {"max_tokens": 31}}, "data.max_tokens"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(
    tables: dict[str, Any], named: str, folder: Path, users: UserDataset, begun: Path
) -> None:
    """Each by its name, with both values."""
    with pytest.raises(ConfigError, match=named):
        Training(settings(folder, **tables), users, begun)


@pytest.fixture(scope="module")
def begun_once(folder: Path, users: UserDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after two rounds."""
    output = tmp_path_factory.mktemp("begun")
    with Training(settings(folder, run={"stop_after": 2}), users, output) as training:
        list(training.run())
    return output


@pytest.fixture
def begun(begun_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(begun_once, tmp_path / "begun"))


def test_a_run_does_not_go_on_with_other_users_or_words(
    folder: Path, users: UserDataset, begun: Path, tmp_path: Path
) -> None:
    """Their contents are compared, not their names."""
    text = (folder / "users.tsv").read_text()
    (tmp_path / "other.tsv").write_text(text + "user0\talpha\n")
    other = UserDataset.open(tmp_path / "other.tsv", store=tmp_path / "store")
    with pytest.raises(ConfigError, match="users was"):
        Training(settings(folder), other, begun)
    (tmp_path / "words.txt").write_text("\n".join([*WORDS[1:], WORDS[0]]) + "\n")
    (tmp_path / "run.toml").write_text(FILE)
    with pytest.raises(ConfigError, match="vocabulary was"):
        Training(settings(tmp_path), users, begun)
    (tmp_path / "words.txt").write_text("\n".join([*WORDS, "more"]) + "\n")
    with pytest.raises(ConfigError, match="vocab_size was 8 and is 9"):
        Training(settings(tmp_path), users, begun)


def test_noise_or_ledger_of_another_time_is_refused(
    folder: Path, users: UserDataset, begun: Path
) -> None:
    """Missing, damaged, or the right kind of file with the wrong content."""
    private = begun / "private-2.state"
    content = private.read_bytes()
    private.unlink()
    with pytest.raises(FormatError, match="is missing"):
        Training(settings(folder), users, begun)
    private.write_bytes(content.replace(b'"max_participations": 1', b'"max_participations": 0', 1))
    with pytest.raises(PrivacyError, match="does not belong to this checkpoint"):
        Training(settings(folder), users, begun)
    private.write_bytes(content)
    with Training(settings(folder), users, begun) as training:
        assert training.rounds_done == 2


@pytest.mark.promise("rounds_once")
def test_a_round_that_was_released_is_not_done_again(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """With an older checkpoint and its own private part put back, or with no checkpoint left."""
    output, older = tmp_path / "run", tmp_path / "older"

    def to(stop: int) -> None:
        real = settings(folder, run={"seed": -1, "stop_after": stop, "evaluate_every": 0})
        with Training(real, users, output) as training:
            list(training.run())

    to(1)
    shutil.copytree(output, older)
    to(2)
    newest = {file.name: file.read_bytes() for file in output.iterdir()}
    for file in output.glob("*[!l]"):
        file.unlink()
    for file in older.glob("*[!l]"):
        shutil.copy(file, output)
    with pytest.raises(PrivacyError, match="so it is older"):
        to(3)
    (output / CHECKPOINT).unlink()
    with pytest.raises(PrivacyError, match="no checkpoint"):
        to(3)
    for name, content in newest.items():
        (output / name).write_bytes(content)
    to(3)
    assert len((output / METRICS).read_text().splitlines()) == 3
    assert "seconds" not in (output / METRICS).read_text()


def test_a_run_does_not_go_on_with_another_matrix(
    folder: Path, users: UserDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimised anew, or changed on disk: half of a stream would be of one, half of the other."""
    made = [Blt(6, BltParameters((0.9, 0.4), (0.1, 0.2)))]
    monkeypatch.setattr(train, "make_mechanism", lambda *_, **__: made[0])
    given = {"privacy": {"mechanism": "blt"}}
    for stop in (1, 2):
        stopped = settings(folder, run={"stop_after": stop, "evaluate_every": 0}, **given)
        with Training(stopped, users, tmp_path) as training:
            list(training.run())
    made[0] = Blt(6, BltParameters((0.9, 0.4), (0.1, 0.1)))
    with pytest.raises(ConfigError, match="matrix was"):
        Training(settings(folder, **given), users, tmp_path)


def test_a_vocabulary_of_users_words_costs_what_counting_them_cost(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Counts without noise are refused before any round, others are composed with the run."""
    for name in ("users.tsv", "run.toml"):
        shutil.copy(folder / name, tmp_path)
    file = tmp_path / "words.txt"
    stage = StageRecord("unigrams", "gaussian", 2.0, 4, sampling="timer")
    noised = Provenance(
        Guarantee(1.0, 1e-6, stage.rho), stages=(stage.to_json(),), ledgers=("a ledger",)
    )
    steps = {"seed": -1, "stop_after": 1, "evaluate_every": 0}
    found = {}
    records = {"raw": Provenance.none("counted without noise"), "noised": noised, "public": None}
    for name, record in records.items():
        if record is None:
            sidecar(file).unlink()
            file.write_text("\n".join(WORDS) + "\n")
        else:
            words = counts_file.WordCounts(tuple(WORDS), np.arange(5.0, 0.0, -1), record)
            counts_file.write_counts(file, words)
        said = "the tests" if record is None else ""
        real = settings(tmp_path, run=steps, data={"public": said})
        if name == "raw":
            refused = r"the vocabulary words\.txt has no guarantee \(counted without noise\)"
            with pytest.raises(PrivacyError, match=refused):
                Training(real, users, tmp_path / name)
            assert not (tmp_path / name).exists()
            continue
        with Training(real, users, tmp_path / name) as training:
            list(training.run())
            found[name] = training.report().provenance
    alone, both = found["public"].guarantee, found["noised"].guarantee
    assert alone is not None
    assert both is not None
    assert alone.rho is not None
    assert both.rho == pytest.approx(alone.rho + 0.125)
    assert both.epsilon > alone.epsilon
    assert [s["stage"] for s in found["noised"].stages] == ["unigrams", "network"]
    assert found["noised"].ledgers[0] == "a ledger"
    # What went in is bound to the run: a record that is gone does not make it better.
    with pytest.raises(ConfigError, match="vocabulary_record was"):
        Training(real, users, tmp_path / "noised")


def test_wordpieces_of_noised_counts_are_composed_and_stay_the_same(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Others are refused, even where they have the stages of these and cut this text alike."""
    pieces = pytest.importorskip(
        "dlm.federated.pieces.inventory", reason="pip install -e '.[train]'"
    )
    pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")
    stage = StageRecord("unigrams", "gaussian", 2.0, 4, sampling="timer")
    noised = Provenance(Guarantee(1.0, 1e-6, stage.rho), stages=(stage.to_json(),))
    text = FILE.replace("words.txt", "some.model").replace("seed = 3", "stop_after = 1")
    text = text.replace('public = "the tests"', "")
    (tmp_path / "run.toml").write_text(text)
    run = settings(tmp_path)
    assert not run.run.simulation
    made = []
    for ratio in (1.0, 1.001):
        counts = counts_file.WordCounts(("alp", "pal", "lap"), np.array([3.0, 2.0, ratio]), noised)
        made.append(pieces.build_inventory(counts, len(WORDS) + 3))
    one, other = made
    said = [u.split() for user in range(len(users)) for u in users.utterances(user)]
    assert all(np.array_equal(one.encode(words), other.encode(words)) for words in said)
    assert one.provenance.stages == other.provenance.stages
    assert one.model != other.model
    one.save(tmp_path / "some.model")
    with Training(run, users, tmp_path / "out") as training:
        list(training.run())
        found, alone = training.report().provenance, training.stage()
    assert found.guarantee is not None
    assert found.guarantee.rho == pytest.approx(alone.rho + stage.rho)
    assert found.derived == (f"wordpieces {len(WORDS) + 3}",)
    other.save(tmp_path / "some.model")
    with pytest.raises(ConfigError, match="vocabulary was"):
        Training(run, users, tmp_path / "out")
    one.save(tmp_path / "some.model")
    with Training(run, users, tmp_path / "out") as training:
        assert training.rounds_done == 1


def test_what_is_verified_is_what_is_read(
    folder: Path, users: UserDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' words and another checkpoint, which make way for those that were signed as soon as a
    key is asked for."""
    from dlm.record import signature
    from dlm.record.signature import Claim, sign

    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    for line in (f"genpkey -algorithm ed25519 -out {key}", f"pkey -in {key} -pubout -out {public}"):
        subprocess.run(["openssl", *line.split()], check=True, capture_output=True)
    stage = StageRecord("unigrams", "gaussian", 2.0, 4, sampling="timer")
    noised = Provenance(Guarantee(1.0, 1e-6, stage.rho), stages=(stage.to_json(),))
    file, values = tmp_path / "words.txt", np.arange(5.0, 0.0, -1)
    places: dict[str, Path] = {}

    def swapped() -> None:
        """Puts what was signed in the place of what was not."""
        for end in ("", ".provenance.json"):
            if (signed := Path(f"{places['signed']}{end}")).exists():
                shutil.copy(signed, f"{places['used']}{end}")

    def read_key(place: Path) -> Any:
        swapped()
        return known(place)

    known = signature.read_public_key
    monkeypatch.setattr(signature, "read_public_key", read_key)
    counts_file.write_counts(file, counts_file.WordCounts(tuple(WORDS), values, noised))
    sign(Claim.of(file), signature.read_private_key(key), at=NOW)
    places |= {"signed": tmp_path / "signed.txt", "used": file}
    for end in ("", ".provenance.json"):
        shutil.copy(f"{file}{end}", f"{tmp_path / 'signed.txt'}{end}")
    (tmp_path / "run.toml").write_text((folder / "run.toml").read_text())
    real = settings(tmp_path, **REAL, data={"public": "", "public_key": str(public)})
    with Training(real, users, tmp_path / "good") as training:
        list(training.run(1))
    others = tuple(reversed(WORDS))
    counts_file.write_counts(file, counts_file.WordCounts(others, values, noised))
    with pytest.raises(PrivacyError, match="wrong: "):
        Training(real, users, tmp_path / "bad")
    assert WordList.read(file).words == tuple(WORDS)  # by now it is the one that was signed

    place = tmp_path / "good" / CHECKPOINT
    sign(Claim.of(place), signature.read_private_key(key), at=NOW)
    places |= {"signed": Path(shutil.copy(place, tmp_path / "signed.dlmfed")), "used": place}
    assert load_model(place, public_key=public).rounds == 1
    with Training(real, users, tmp_path / "good") as training:
        list(training.run(2))
    with pytest.raises(PrivacyError, match=r"wrong: .* is the signature of another file"):
        load_model(place, public_key=public)


def test_text_to_begin_with_is_read_once(
    folder: Path, users: UserDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its digest is noted of is what the network learns from."""
    text = tmp_path / "text.txt"
    text.write_text("alpha beta\n" * 20)
    given = {"text": str(text), "steps": 1, "batch_size": 2, "unroll": 4, "public": "a librarian"}
    seen = []

    def put_another(*args: Any, **options: Any) -> Any:
        text.write_text("gamma gamma gamma\n" * 20)
        return known(*args, **options)

    def noted(params: Any, model: Any, utterances: Any, **options: Any) -> Any:
        seen.append({int(i) for ids in utterances for i in ids})
        return params

    known = train.public_text
    monkeypatch.setattr(train, "public_text", put_another)
    monkeypatch.setattr(train, "pretrain", noted)
    Training(settings(folder, pretrain=given), users, tmp_path / "out").close()
    assert seen == [{3, 4}]


def test_an_encoder_whose_record_is_lost_begins_no_run(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Wrapped, it says nothing of whose text it was made from; that it is public has to be said."""
    stage = StageRecord("unigrams", "gaussian", 2.0, 4, sampling="timer")
    noised = Provenance(Guarantee(1.0, 1e-6, stage.rho), stages=(stage.to_json(),))

    pieces = pytest.importorskip(
        "dlm.federated.pieces.inventory", reason="pip install -e '.[train]'"
    )
    pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")
    counts = counts_file.WordCounts(("alp", "pal", "lap"), np.array([3.0, 2.0, 1.0]), noised)
    made = pieces.build_inventory(counts, len(WORDS) + 3)
    known = made.encode
    ids = known(["pal"]).tolist()
    made._cache["pal"] = [0, 0, 0]  # the run does not use the object that it is given
    cache_of = lru_cache(known)
    wrapped: dict[str, Any] = {
        "lambda": lambda words: known(words),
        "partial": partial(known),
        "cached": lambda words: cache_of(tuple(words)),
    }
    real = settings(folder, run={"seed": -1, "stop_after": 1, "evaluate_every": 0})
    for name in ("lambda", "partial", "cached"):
        with pytest.raises(
            PrivacyError, match=r"given encoder has no guarantee .*whose text the g"
        ):
            Training(real, users, tmp_path / name, encode=wrapped[name], vocab_size=8)
        assert not (tmp_path / name).exists()
    with pytest.raises(PrivacyError, match="belongs to it"):
        Training(
            real, users, tmp_path / "given", encode=wrapped["lambda"], vocab_size=8,
            vocabulary_record=made.provenance,
        )  # fmt: skip
    with Training(real, users, tmp_path / "bound", encode=known, vocab_size=8) as training:
        list(training.run())
        report = training.report()
        assert training._encode(["pal"]).tolist() == ids
    assert report.provenance.guarantee is not None
    # Of six planned rounds one was done: whoever chose that by the metrics is told what it costs.
    assumptions = dict(report.checklist())["3b. Accounting assumptions"]
    assert "ended after 1 of 6 planned rounds" in assumptions
    assert "account for all 6" in assumptions
    public = Provenance.public("the tests", "the encoder")
    with Training(
        real, users, tmp_path / "public", encode=wrapped["lambda"], vocab_size=8,
        vocabulary_record=public,
    ) as training:  # fmt: skip
        list(training.run())
        assert training.report().provenance.guarantee is not None


def test_an_engine_or_aggregator_that_is_not_ours_leaves_no_guarantee(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Nothing here bounds what it adds up; ours are named in the report. A run that goes on with
    ours remembers it: the rounds that it added up stay in the model."""

    class Unbounded(SecureAggregator):
        """Says that it adds as ours does."""

    class Elsewhere(LocalEngine):
        """Says that it computes as ours does."""

    real = settings(folder, run={"seed": -1, "stop_after": 1, "evaluate_every": 0})
    network = real.model.network(len(WORDS) + 3)
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "aggregator": ({"aggregator": Unbounded(0.5, 1e3, 6)}, "unknown aggregator Unbounded"),
        "engine": ({"engine": Elsewhere(network, real.local)}, "unknown engine Elsewhere"),
        "ours": ({}, ""),
    }
    for name, (given, reason) in cases.items():
        with Training(real, users, tmp_path / name, **given) as training:
            list(training.run())
            found, stage = training.report().provenance, training.stage()
        assert (found.guarantee is None) == (reason != ""), name
        assert any(reason in text for text in found.reasons) == (reason != "")
    assert stage.extras["engine"] == "LocalEngine"
    assert stage.extras["aggregator"] == "integers in the clear"
    with Training(settings(folder, **REAL), users, tmp_path / "engine") as training:
        list(training.run(2))
        found, stage = training.report().provenance, training.stage()
    assert found.reasons == ("unknown engine Elsewhere",)
    assert stage.extras["engine"] == "Elsewhere, then LocalEngine"


@pytest.mark.parametrize(
    ("rate", "run", "why"),
    [
        (1e4, {"evaluate_every": 1}, "its perplexity on held-out users is"),
        (1e4, {"evaluate_every": 0}, "its loss on users is"),
        (1e12, {"evaluate_every": 0, "seed": -1}, "a parameter is"),
    ],
)
def test_a_run_that_diverges_is_stopped(
    rate: float, run: dict[str, Any], why: str, folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Its rounds count, and are reported; nothing goes on from there."""
    wild = settings(folder, server={"learning_rate": rate}, run=run)
    with Training(wild, users, tmp_path) as training:
        rounds = training.run()
        with pytest.raises(TrainingDiverged, match=rf"after round \d the model diverges: ({why})"):
            for done in rounds:
                assert done is not None
        ended = training.rounds_done
        assert 1 <= ended <= 2
        report = training.report()
    with Training(wild, users, tmp_path) as training:
        assert training.rounds_done == ended
        for until in (None, ended):
            with pytest.raises(TrainingDiverged, match=f"after round {ended} "):
                list(training.run(until))
        assert training.report().provenance == report.provenance
    assert load_model(tmp_path).record == report.provenance


def test_a_round_that_broke_off_is_not_done_again_by_the_same_run(
    folder: Path, users: UserDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise may have been drawn; opened again, the run goes on from what counts."""
    calm = settings(folder, server={"learning_rate": 0.1}, run={"evaluate_every": 1})
    with Training(calm, users, tmp_path) as training:
        with monkeypatch.context() as patch:
            patch.setattr(training, "evaluate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                list(training.run())
        done = training.rounds_done
        with pytest.raises(PrivacyError, match=rf"round {done} .*interrupted"):
            list(training.run())
    with Training(calm, users, tmp_path) as training:
        assert training.rounds_done == done
        assert len(list(training.run())) == training.rounds - done


REAL = {"run": {"seed": -1, "evaluate_every": 0}}


def test_a_model_is_loaded_with_its_vocabulary_and_its_record(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """From the folder or the checkpoint alone; while rounds are left, of all that are planned."""
    seen = []
    with Training(settings(folder, **REAL), users, tmp_path) as training:
        began = load_model(tmp_path).record
        seen += [load_model(tmp_path).record for _ in training.run()]
        report = training.report()
    assert began.reasons == ("no round is done yet: the network is as it began",)
    made = load_model(tmp_path)
    moved = shutil.copy(tmp_path / CHECKPOINT, tmp_path / "model.dlmfed")
    assert made.record == load_model(str(moved)).record == report.provenance
    assert made.rounds == 6
    assert made.vocabulary is not None
    assert made.vocabulary.words == WordList(tuple(WORDS), made.record)
    assert made.record.guarantee is not None
    assert "Unverified" in made.record.statement()
    (public,) = made.record.public_inputs
    assert (public.what, public.by) == ("the vocabulary words.txt", "the tests")
    rho = [record.guarantee.rho for record in seen if record.guarantee and record.guarantee.rho]
    assert rho == [made.record.guarantee.rho] * 6
    assert [record.stages[0]["rounds"] for record in seen] == [6] * 6
    # Each is of its own parameters.
    assert len({record.content["state_sha256"] for record in seen}) == 6


def test_the_record_of_another_checkpoint_is_refused(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Put into a checkpoint whose own checksums then hold; without a record nothing is promised."""
    for name, noise in (("good", 9.0), ("poor", 0.1)):
        run = settings(folder, **REAL, privacy={"noise_multiplier": noise})
        with Training(run, users, tmp_path / name) as training:
            list(training.run(1))
    good, poor = (checkpoint.read(tmp_path / name / CHECKPOINT) for name in ("good", "poor"))

    def written(**facts: Any) -> Path:
        place = tmp_path / "forged.dlmfed"
        checkpoint.save(place, poor.arrays, poor.settings, facts=facts, attachments=attachments)
        return place

    attachments = poor.attachments
    with pytest.raises(PrivacyError, match="belongs to other parameters"):
        load_model(written(**{**poor.facts, "record": good.facts["record"]}))
    attachments = {**attachments, "vocabulary": b"others\n"}
    with pytest.raises(PrivacyError, match="or another vocabulary"):
        load_model(written(**poor.facts))
    attachments = poor.attachments
    bare = {name: value for name, value in poor.facts.items() if name != "record"}
    assert load_model(written(**bare)).record.reasons == (
        "the checkpoint carries no privacy record",
    )


@pytest.mark.promise("public_text")
def test_a_real_run_is_refused_where_nobody_says_whose_text_its_inputs_are(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Before any round; text to begin with as well as words. A name is told in the report."""
    nobody = settings(folder, **REAL, data={"public": ""})
    with pytest.raises(PrivacyError, match=r"vocabulary words\.txt has no privacy .* data\.public"):
        Training(nobody, users, tmp_path / "words")
    text = tmp_path / "text.txt"
    text.write_text("alpha beta\n" * 20)
    given = {"text": str(text), "steps": 1, "batch_size": 2, "unroll": 4}
    with pytest.raises(PrivacyError, match=r"text\.txt to pretrain on has no privacy record"):
        Training(settings(folder, **REAL, pretrain=given), users, tmp_path / "text")
    assert not (tmp_path / "text" / CHECKPOINT).exists()
    named = settings(folder, **REAL, pretrain={**given, "public": "a librarian"})
    for _ in range(2):  # it is told of a run that goes on, too, wherever the text is by then
        with Training(named, users, tmp_path / "named") as training:
            list(training.run(training.rounds_done + 1))
            report = training.report().markdown()
        assert "the text text.txt to pretrain on (public, says a librarian, SHA-256" in report
        assert "trusted key" not in report
        text.unlink(missing_ok=True)


def test_users_who_wrote_no_word_take_part_with_nothing(folder: Path, tmp_path: Path) -> None:
    """Digits alone, where words are of letters: a round of them is as any other."""
    rows = ["user_id\tutterance", "user0\talpha beta", *(f"user{n}\t123 4!" for n in range(1, 20))]
    (tmp_path / "users.tsv").write_text("\n".join(rows) + "\n")
    few = UserDataset.open(tmp_path / "users.tsv", store=tmp_path / "store")
    run = settings(folder, data={"tokenizer": "words", "held_out": 0.0}, run={"stop_after": 1})
    with Training(run, few, tmp_path / "out") as training:
        (done,) = training.run()
    raw = done.diagnostics.raw
    assert raw is not None
    assert raw.users == 6


def test_a_poisson_cohort_of_any_size_fits_into_secure_aggregation(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Were large ones refused, and drawn again on going on, they were no Poisson samples."""
    sampling = {"kind": "poisson", "q": 0.2}
    given = settings(
        folder,
        sampling=sampling,
        aggregation={"secure": True},
        privacy={"mechanism": "gaussian", "gap": 1, "max_participations": 0},
    )
    with Training(given, users, tmp_path) as training:
        engine: Any = training.engine
        aggregator = engine._aggregator
        assert aggregator.report_goal == len(training.train_users)


@pytest.mark.promise("participations")
def test_participation_is_bounded_as_it_is_accounted_for(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Over a run that was stopped, too: gap and number of participations of every user."""
    finished(folder, users, tmp_path, (2, 3))
    with Training(settings(folder), users, tmp_path) as training:
        ledger = training.ledger
        assert ledger.rounds == 6
        assert ledger.cohort_sizes() == [6] * 6
        ledger.covers(gap=3, max_participations=3)
        stage = training.stage()
        report = training.report()
        made = load_model(tmp_path)
        assert made.network == training.model
        for a, b in zip(*map(jax.tree.leaves, (made.params, training.state.params)), strict=True):
            assert np.array_equal(a, b)
    assert (stage.gap, stage.max_participations, stage.rounds) == (3, 3, 6)
    assert stage.simulated
    assert stage.noise_multiplier == 0.5
    assert report.provenance.guarantee is None
    assert report.provenance.simulated is not None
    assert report.provenance.simulated.rho
    assert report.provenance.simulated.rho > 0


def test_held_out_users_never_train(folder: Path, users: UserDataset, tmp_path: Path) -> None:
    """Nobody is on both sides."""
    with Training(settings(folder), users, tmp_path) as training:
        train_ids = set(training.train_users.user_ids())
        held_out = set(training.held_out_users.user_ids())
        assert held_out
        assert not train_ids & held_out
        assert len(train_ids | held_out) == len(users)
        list(training.run())
        for user in held_out:
            assert training.ledger.participations(user) == []


def test_public_text_first_moves_the_model_and_costs_no_participation(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """The loss on the public text falls; the ledger is empty before the first round."""
    (tmp_path / "public.txt").write_text("alpha beta gamma delta rho\n" * 30)
    pretrain = {
        "text": str(tmp_path / "public.txt"),
        "steps": 60,
        "batch_size": 4,
        "unroll": 6,
        "learning_rate": 0.03,
    }
    told: list[str] = []
    models = {}
    for name, more in (("with", {"pretrain": pretrain}), ("without", {})):
        with Training(
            settings(folder, **more), users, tmp_path / name, progress=told.append
        ) as training:
            assert training.ledger.rounds == 0
            models[name] = training.state.params
            network = training.model
            encode = training._encode
    from dlm.federated.training import metrics

    text = [encode(["alpha", "beta", "gamma", "delta", "rho"])]
    found = {name: metrics.evaluate(p, network, text).perplexity for name, p in models.items()}
    assert found["with"] < 0.5 * found["without"]
    assert any("step 60: loss" in line for line in told)


def test_updates_that_are_encoded_for_secure_aggregation_give_nearly_the_same_model(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """Rounding is seen in the sensitivity that accounting takes, hardly in the model."""
    models = {}
    for name, secure in (("plain", False), ("secure", True)):
        given = settings(folder, run={"stop_after": 2}, aggregation={"secure": secure})
        with Training(given, users, tmp_path / name) as training:
            list(training.run())
            models[name] = np.concatenate(
                [np.asarray(x).ravel() for x in jax.tree.leaves(training.state.params)]
            )
            factor = training.stage().norm_inflation
            assert factor == 1.0 if name == "plain" else 1.0 < factor < 1.1
    difference = np.linalg.norm(models["plain"] - models["secure"])
    assert 0 < difference < 0.02


def test_a_round_waits_until_enough_devices_are_available(
    folder: Path, users: UserDataset, tmp_path: Path
) -> None:
    """A run begins at midnight: where it is noon then, and nobody is at noon, it begins later."""
    sampling = {"low": 0.0, "high": 0.9, "zones": "12:1"}
    with Training(settings(folder, sampling=sampling), users, tmp_path) as training:
        training._cohort(0)
        hours = training.cohorts.now_s / 3600
    assert 1 < hours < 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("alpha\nbeta gamma\n", "line 2.*not one word"),
        ("alpha\n\nbeta\n", "line 2.*not one word"),
        ("alpha\nbeta\nalpha\n", "line 3.*appears twice"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """With the line."""
    (tmp_path / "words.txt").write_text(text)
    with pytest.raises(ConfigError, match=message):
        WordList.read(tmp_path / "words.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        WordList.read(tmp_path / "nothing.txt")


def test_a_vocabulary_may_be_the_first_words_of_a_file() -> None:
    """With the record that counts have; no more words than there are."""
    record = Provenance.none("counted without noise")
    whole = WordList(("a", "b", "c"), record)
    assert whole.first(2) == WordList(("a", "b"), record)
    assert whole.first(0) == whole
    with pytest.raises(ConfigError, match="has 3 words; expected 4"):
        whole.first(4)


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    """As some editors put it there."""
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfalpha\r\nbeta\r\n")
    assert WordList.read(tmp_path / "words.txt").words == ("alpha", "beta")
    assert read_wordlist(tmp_path / "words.txt") == ["alpha", "beta"]


def test_words_are_ids_in_the_order_of_the_file() -> None:
    """From 3 on; 0 for the rest."""
    encode = WordList(("a", "b")).encoder()
    assert encode(["b", "x", "a"]).tolist() == [4, 0, 3]
