"""`dlm unigrams` counts, resumes, refuses, and says what is guaranteed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import WAIT_S, command
from dlm import checkpoint
from dlm.cli.main import app
from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated.counting.collect import Collection, folder_of
from dlm.federated.counting.settings import UnigramConfig
from dlm.federated.counting.unigrams import UserCounts, round_sum
from dlm.federated.keys import Key
from dlm.federated.run.sampling import AvailabilitySampler, FixedGoalSampler, PoissonSampler
from dlm.federated.users import UserDataset
from dlm.record.counts_file import WordCounts, read_counts, write_counts
from dlm.record.ledger import ParticipationLedger
from dlm.record.provenance import Guarantee, Provenance
from federated.corpus import WORDS, population

KEY = Key.from_seed(6)
STAGE = {
    "stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1, "gap": 1,
    "max_participations": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> UserDataset:
    """300 users; their file is users.tsv beside words.txt."""
    folder = tmp_path_factory.mktemp("people")
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    dataset = population(folder)
    dataset.folder = folder  # type: ignore[attr-defined]
    return dataset


def arguments(people: UserDataset, output: Path, *more: object) -> list[object]:
    """Of the command."""
    folder = people.folder  # type: ignore[attr-defined]
    return [
        *("unigrams", folder / "users.tsv", "--wordlist", folder / "words.txt"),
        *(
            "--tokenizer",
            "whitespace",
            "--public-attested-by",
            "the tests",
            "--output",
            output,
            *more,
        ),
    ]


def unigrams(people: UserDataset, output: Path, *more: object) -> None:
    """Runs the command in this process."""
    app([str(word) for word in arguments(people, output, *more)], standalone_mode=False)


def test_every_user_once_gives_the_plain_sum(people: UserDataset, tmp_path: Path) -> None:
    """Ten rounds of thirty, each of 300 users in one: FNG's sum, with all its files beside it."""
    options = ("--lambda", 50, "--rounds", 10, "--report-goal", 30, "--max-participations", 1)
    done = subprocess.run(
        command(*arguments(people, tmp_path / "counts.tsv", *options)),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    counts = UserCounts(people, WORDS)
    plain = round_sum(map(counts.of, range(len(people))), 50.0, len(WORDS))
    found = read_counts(tmp_path / "counts.tsv")
    table = dict(zip(found.words, found.counts.tolist(), strict=True))
    for word, count in zip(WORDS, plain.tolist(), strict=True):
        assert table.get(word, 0.0) == pytest.approx(count, rel=1e-8)
    assert found.counts.tolist() == sorted(found.counts.tolist(), reverse=True)
    assert "NO GUARANTEE: unigrams: users' data were used without noise" in done.stdout
    assert found.provenance.guarantee is None
    ledger = ParticipationLedger.load(tmp_path / "counts.tsv.ledger.json")
    assert (ledger.rounds, ledger.participants, ledger.observed_max_part()) == (10, 300, 1)
    assert found.provenance.ledgers == (ledger.digest,)
    report = json.loads((tmp_path / "counts.tsv.privacy.json").read_text())
    assert report["provenance"] == found.provenance.to_dict()
    assert "# Privacy report" in (tmp_path / "counts.tsv.privacy.md").read_text()
    assert sorted(p.name.removeprefix("counts.tsv") for p in tmp_path.iterdir()) == [
        *("", ".ledger.json", ".metrics.jsonl", ".privacy.json", ".privacy.md", ".provenance.json"),
    ]
    assert "round 8/10" in done.stderr and "Z " in done.stderr


def test_an_out_of_vocabulary_rate_is_told_of_users_that_were_kept_out(
    people: UserDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in no round."""
    unigrams(
        people,
        tmp_path / "counts.tsv",
        *("--lambda", "inf", "--rounds", 4, "--report-goal", 60, "--seed", 3, "--quiet"),
        *("--test-fraction", 0.2, "--capacity", 40),
    )
    said = capsys.readouterr()
    assert said.err == ""
    train, test = people.split(0.2, name="unigrams")
    assert f"OOV rate of {len(test)} held-out users, vocabulary of 40 words" in said.out
    assert ParticipationLedger.load(tmp_path / "counts.tsv.ledger.json").population == len(train)


def test_a_list_of_words_without_a_guarantee_or_a_signature_begins_no_run(
    people: UserDataset, tmp_path: Path
) -> None:
    """Counted without noise; or noised, and signed by nobody. No user's text is looked at."""
    pytest.importorskip("cryptography", reason="pip install -e '.[train]'")
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    from dlm.record.signature import Claim, read_private_key, sign

    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    for line in (f"genpkey -algorithm ed25519 -out {key}", f"pkey -in {key} -pubout -out {public}"):
        subprocess.run(["openssl", *line.split()], check=True, capture_output=True)
    words = tmp_path / "list.tsv"
    values = np.arange(len(WORDS), 0.0, -1)
    noise = (
        "--lambda",
        50,
        "--rounds",
        5,
        "--report-goal",
        60,
        "--max-participations",
        1,
        "--quiet",
    )
    private = (
        *noise,
        "--noise-multiplier",
        2,
        "--delta",
        1e-6,
        "--public-attested-by",
        "",
        "--wordlist",
        words,
    )
    write_counts(words, WordCounts(tuple(WORDS), values, Provenance.none("no noise")))
    with pytest.raises(PrivacyError, match=r"the list of words has no guarantee \(no noise\)"):
        unigrams(people, tmp_path / "a.tsv", *private)
    good = Provenance(Guarantee(2.12, 1e-6, 0.125), stages=(STAGE,))
    write_counts(words, WordCounts(tuple(WORDS), values, good))
    with pytest.raises(PrivacyError, match=r"unverified: .* is not signed"):
        unigrams(people, tmp_path / "a.tsv", *private, "--public-key", public)
    assert not list(tmp_path.glob("a.tsv*"))
    sign(Claim.of(words), read_private_key(key), at=datetime(2026, 11, 22, tzinfo=UTC))
    unigrams(people, tmp_path / "a.tsv", *private, "--public-key", public)
    found = read_counts(tmp_path / "a.tsv").provenance
    assert found.guarantee is not None
    assert found.unverified == ()
    assert [one["stage"] for one in found.stages] == ["unigrams", "unigrams"]


def test_noise_is_accounted_for(
    people: UserDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One participation of z = 2: rho is 1/8; from a seed it is a simulation. With noise nothing of
    users' text is told without it, how much they wrote neither; of a simulation it is."""
    pytest.importorskip("dlm.federated.account.compose", reason="pip install -e '.[train]'")
    from dlm.federated.account.zcdp import zcdp_epsilon

    shared = ("--lambda", 50, "--rounds", 5, "--report-goal", 60, "--noise-multiplier", 2)
    shared += ("--delta", 1e-6, "--max-participations", 1)
    unigrams(people, tmp_path / "a.tsv", *shared)
    found = read_counts(tmp_path / "a.tsv").provenance.guarantee
    assert found is not None
    assert found.rho == pytest.approx(0.125)
    assert found.delta == 1e-6
    said = capsys.readouterr()
    assert "0.125-zCDP" in said.out
    assert said.err.startswith("300 users\n")
    assert not re.search(r"\d s\b", said.err)
    unigrams(people, tmp_path / "b.tsv", *shared, "--seed", 1)
    said = capsys.readouterr()
    assert "NO GUARANTEE: keys were made from a configured seed" in said.out
    assert " utterances, " in said.err
    assert re.search(r"\d s\b", said.err)
    record = read_counts(tmp_path / "b.tsv").provenance
    assert record.guarantee is None
    assert record.simulated == Guarantee(zcdp_epsilon(0.125, 1e-6), 1e-6, 0.125)
    assert found.epsilon == record.simulated.epsilon
    text = Path(f"{tmp_path / 'a.tsv'}.privacy.md").read_text()
    assert "2^-32" in text
    assert "by ChaCha20; the grid costs nothing" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--noise-multiplier", 1), "give both --noise-multiplier and --delta"),
        (("--noise-multiplier", 1, "--delta", 1e-6), "needs --max-participations"),
        (("--max-participations", 1, "--report-goal", 60), "at most 5"),
        (("--report-goal", 301), "is 301; .* 300"),
        (("--report-goal", 5, "--tokenizer", "letters"), "words or whitespace"),
        (
            ("--report-goal", 5, "--poisson", 0.1, "--max-participations", 1),
            "leave out --max-participations",
        ),
        (("--poisson", 0.1, "--report-goal", 5), "--poisson .*--report-goal"),
        (("--report-goal", 5, "--user-column", "who"), "'who' exactly once"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_counted(
    people: UserDataset, tmp_path: Path, more: tuple[object, ...], message: str
) -> None:
    """With what to do, and no file left."""
    with pytest.raises((ConfigError, FormatError), match=message):
        unigrams(people, tmp_path / "counts.tsv", "--lambda", 50, "--rounds", 6, *more)
    assert list(tmp_path.iterdir()) == []


def test_a_release_is_never_replaced(people: UserDataset, tmp_path: Path) -> None:
    """By a second one, which composes with it, or by counts of a simulation; these may be."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    output = tmp_path / "a.tsv"
    raw = ("--lambda", 50, "--rounds", 2, "--report-goal", 60, "--max-participations", 1, "--quiet")
    noised = (*raw, "--noise-multiplier", 2, "--delta", 1e-6)
    unigrams(people, output, *noised, "--seed", 1)
    unigrams(people, output, *raw)
    with pytest.raises(ConfigError, match="privacy cost"):
        unigrams(people, output, *noised)
    for path in tmp_path.iterdir():
        path.unlink()
    unigrams(people, output, *noised)
    held = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for again in (noised, raw, (*noised, "--seed", 1)):
        with pytest.raises(ConfigError, match="privacy cost"):
            unigrams(people, output, *again)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == held
    # Its counts alone were moved: what they were made of is still evidence of them.
    output.rename(tmp_path / "b.tsv")
    with pytest.raises(ConfigError, match=r"a\.tsv\.ledger\.json.* exists"):
        unigrams(people, output, *noised)


def collection(people: UserDataset, output: Path | None, **changes: Any) -> Collection:
    """A small one, with noise, in the folder of its output."""
    key = changes.pop("key", KEY)
    sampler = changes.pop(
        "sampler",
        AvailabilitySampler(len(people), 20, key.fold("sampling"), gap=2, max_participations=6),
    )
    settings = {"gap": 2, "max_participations": 6, **changes}
    config = settings.pop("config", UnigramConfig(30.0, 24, noise_multiplier=0.5))
    words = settings.pop("words", WORDS)
    if output is None:
        return Collection(people, words, config, sampler, key, **settings)
    released = config.noise_multiplier is not None and not key.simulated
    with contextlib.ExitStack() as on_error:
        folder = on_error.enter_context(folder_of(output, released=released))
        made = Collection(people, words, config, sampler, key, folder=folder, **settings)
        on_error.pop_all()
    return made


def rounds(people: UserDataset, output: Path, until: int | None = None, **changes: Any) -> int:
    """Goes on with a collection; how many rounds it has then."""
    with collection(people, output, **changes) as run:
        list(run.run(until))
        return run.rounds_done


@pytest.mark.parametrize("noise", [None, 0.5])
def test_a_stopped_run_ends_in_the_bits_of_one_that_was_not(
    people: UserDataset, tmp_path: Path, noise: float | None
) -> None:
    """Counts, history and ledger's rounds, wherever it was stopped."""
    config = UnigramConfig(30.0, 24, noise_multiplier=noise)
    whole = collection(people, None, config=config)
    list(whole.run())
    output = tmp_path / "counts.tsv"
    for until in (1, 7, 16, None):
        with collection(people, output, config=config) as part:
            assert part.resumed == (until != 1)
            list(part.run(until))
    assert part.rounds_done == 24
    np.testing.assert_array_equal(part.state.totals, whole.state.totals)
    np.testing.assert_array_equal(part.state.seen, whole.state.seen)
    assert part.state.history == whole.state.history
    assert part.ledger.cohort_sizes() == whole.ledger.cohort_sizes()
    gap = part.ledger.observed_gap()
    assert gap is not None
    assert gap == whole.ledger.observed_gap()
    assert gap >= 2
    for user in range(0, 300, 50):
        name = people.user_id(user)
        assert part.ledger.participations(name) == whole.ledger.participations(name)


def test_a_stop_between_any_two_writes_loses_nothing_that_counted(
    people: UserDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each file of a round takes its name, before an old one goes, at the journal."""
    whole = tmp_path / "whole.tsv"
    rounds(people, whole, 3)
    journal = (tmp_path / "whole.tsv.metrics.jsonl").read_bytes()
    state = checkpoint.read(tmp_path / "whole.tsv.work/checkpoint.dlmfed")
    steps_left = [0]

    def doomed(real: Any) -> Any:
        def step(*args: Any, **more: Any) -> Any:
            steps_left[0] -= 1
            if steps_left[0] == 0:
                raise KeyboardInterrupt
            return real(*args, **more)

        return step

    for name in ("replace", "unlink", "open"):
        monkeypatch.setattr(Path, name, doomed(getattr(Path, name)))
    stopped = 0
    for steps in range(1, 40):
        output = tmp_path / f"stopped{steps}.tsv"
        steps_left[0] = steps
        try:
            rounds(people, output, 2)
        except KeyboardInterrupt:
            stopped += 1
        steps_left[0] = -1
        rounds(people, output, 3)
        assert Path(f"{output}.metrics.jsonl").read_bytes() == journal
        found = checkpoint.read(Path(f"{output}.work/checkpoint.dlmfed"))
        for a, b in zip(found.arrays, state.arrays, strict=True):
            assert a.tobytes() == b.tobytes()
    assert 9 < stopped < 39


def test_with_noise_a_round_is_kept_before_it_is_told(people: UserDataset, tmp_path: Path) -> None:
    """A run that dies while it tells has not released what it does not remember."""
    output = tmp_path / "counts.tsv"
    with collection(people, output) as dying:
        for metrics in dying.run():
            assert dying.folder is not None
            held = tmp_path / f"copy{metrics.round}.tsv"
            shutil.copytree(dying.folder.path, f"{held}.work")
            shutil.copy(dying.folder.journal, f"{held}.metrics.jsonl")
            with collection(people, held) as copy:
                assert copy.state.history[-1] == metrics
            if metrics.round == 3:
                break
    with collection(people, output) as run:
        assert run.rounds_done == run.ledger.rounds == 3


def test_an_older_folder_that_is_put_back_is_not_noised_anew(
    people: UserDataset, tmp_path: Path
) -> None:
    """The journal beside it tells of the rounds it lacks, also when the run is long over."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    output, real = tmp_path / "a.tsv", {"key": Key.from_system()}
    rounds(people, output, 2, **real)
    shutil.copytree(tmp_path / "a.tsv.work", tmp_path / "older")
    rounds(people, output, 3, **real)
    for _ in range(2):
        shutil.rmtree(tmp_path / "a.tsv.work")
        shutil.copytree(tmp_path / "older", tmp_path / "a.tsv.work")
        with pytest.raises(PrivacyError, match=r"has round \d+ .* checkpoint .*only 2 rounds"):
            rounds(people, output, **real)
        # The second time, the journal is of a run that ended.
        shutil.copy(tmp_path / "a.tsv.metrics.jsonl", tmp_path / "whole")
        lines = [{"round": index, "released": True} for index in range(24)]
        (tmp_path / "a.tsv.metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    # Without the folder, neither a release nor what may be repeated begins over it.
    shutil.rmtree(tmp_path / "a.tsv.work")
    for more in (real, {}):
        with pytest.raises((ConfigError, PrivacyError), match=r"exists|of earlier rounds"):
            rounds(people, output, **more)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"config": UnigramConfig(31.0, 24, noise_multiplier=0.5)}, "unigrams.clip was 30.0 and"),
        ({"config": UnigramConfig(30.0, 24)}, "unigrams.noise_multiplier was 0.5 and is None"),
        ({"words": (*WORDS[1:], WORDS[0])}, "vocabulary was"),
        ({"max_participations": 5}, "enforced.max_participations was 6 and is 5"),
        ({"key": Key.from_seed(7)}, "key was"),
        ({"sampler": FixedGoalSampler(300, 20, KEY)}, "sampling.kind was 'timer' and is 'fixed'"),
        ({"tokenizer": "words"}, "tokenizer was 'whitespace' and is 'words'"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(
    people: UserDataset, tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    """Each names what differs; other users are another data set too."""
    output = tmp_path / "counts.tsv"
    rounds(people, output, 1)
    with pytest.raises(ConfigError, match=rf"other settings: .*{part}"):
        collection(people, output, **change)
    with pytest.raises(ConfigError, match=r"sampling.users was 300 and is 299"):
        sampler = AvailabilitySampler(299, 20, KEY.fold("sampling"), gap=2, max_participations=6)
        collection(people.select(range(299)), output, sampler=sampler)
    others = people.select([*range(1, 300), 0])
    with pytest.raises(ConfigError, match="users was"):
        collection(others, output)


def test_noise_without_a_bound_on_participation_is_refused(people: UserDataset) -> None:
    """By the library as by the command; a Poisson sampler needs none and keeps to none."""
    with pytest.raises(PrivacyError, match="Poisson sampling or max_participations"):
        collection(
            people, None, sampler=FixedGoalSampler(300, 20, KEY), gap=None, max_participations=None
        )
    poisson = collection(
        people, None, sampler=PoissonSampler(300, 0.1, KEY), gap=None, max_participations=None
    )
    assert len(list(poisson.run(3))) == 3
    assert poisson.stage()["sampling_rate"] == 0.1
    assert poisson.stage()["max_participations"] == 3
    with pytest.raises(ConfigError, match="sampler is for 10 users"):
        collection(people, None, sampler=FixedGoalSampler(10, 2, KEY))
    for bounds in ({"gap": 2, "max_participations": None}, {"gap": None, "max_participations": 3}):
        with pytest.raises(PrivacyError, match="not Poisson samples"):
            collection(people, None, sampler=PoissonSampler(300, 0.1, KEY), **bounds)


def test_a_cohort_that_breaks_the_bounds_is_never_counted(people: UserDataset) -> None:
    """A sampler that does not keep the gap meets a ledger that does."""
    run = collection(people, None, sampler=FixedGoalSampler(300, 200, KEY))
    with pytest.raises(PrivacyError, match="gap of 2"):
        list(run.run())
    assert run.state.round == 1
