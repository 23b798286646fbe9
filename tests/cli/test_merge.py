"""`dlm merge`: what it writes and prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dlm.cli.merge import merge
from dlm.cli.score import perplexity
from dlm.errors import ArpaError, ConfigError, EstimationError
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.backoff import DictModel
from dlm.record.provenance import Guarantee, Provenance
from estimate.merge_models import normalised_model, worst_sum

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

TEXT = "w1 w2 w3\nw4 w5 w6 w7 zzz\n\nw0 w1 w8\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two models with words of their own, and a text."""
    for name, seed, low, high in (("a", 1, 0, 7), ("b", 2, 3, 10)):
        path = normalised_model(seed, [f"w{i}" for i in range(low, high)]).write(
            tmp_path / f"{name}.arpa"
        )
        path.write_text(f"# provenance: of {name}\n" + path.read_text())
    (tmp_path / "text").write_text(TEXT)
    return tmp_path


def test_the_command_writes_a_mixture_with_the_provenance_of_its_parts(
    run: Run, home: Path
) -> None:
    """Through the command line; the output sums to 1 and says what it is made of."""
    done = run("merge", "a.arpa", "b.arpa", "--weights", "0.6,0.4", "-o", "m.arpa.gz", cwd=home)
    assert done.returncode == 0, done.stderr
    assert worst_sum(DictModel.from_arpa(home / "m.arpa.gz")) < 1e-6
    with ArpaReader(home / "m.arpa.gz") as reader:
        (line,) = reader.comments
    about = json.loads(line.removeprefix("provenance: "))
    assert about["weights"] == [0.6, 0.4]
    assert [part["comments"] for part in about["inputs"]] == [
        ["provenance: of a"],
        ["provenance: of b"],
    ]
    refused = run("merge", "a.arpa", "b.arpa", "--weights", "0.6,0.6", "-o", "n.arpa", cwd=home)
    assert refused.returncode == 1
    assert refused.stderr.startswith(b"dlm: the weights sum to 1.2; expected 1.")


def test_models_are_merged_by_their_counts(run: Run, home: Path) -> None:
    """The words and n-grams of both, suffixes too; it is another model than the interpolation."""
    args = ("merge", "a.arpa", "b.arpa", "--weights", "0.6,0.4", "-o")
    run(*args, "m.arpa", "--by-counts", cwd=home, status=0)
    merged = DictModel.from_arpa(home / "m.arpa")
    assert worst_sum(merged) < 3e-6
    with ArpaReader(home / "m.arpa") as reader:
        (line,) = reader.comments
    assert json.loads(line.removeprefix("provenance: "))["method"] == "expected counts"
    run(*args, "n.arpa", cwd=home)
    other = DictModel.from_arpa(home / "n.arpa")

    def spelled(model: DictModel) -> set[tuple[bytes, ...]]:
        return {tuple(model.vocabulary.words[i] for i in ngram) for ngram in model.ngrams}

    assert spelled(merged) == {n[i:] for n in spelled(other) for i in range(len(n))}
    assert (home / "m.arpa").read_bytes() != (home / "n.arpa").read_bytes()
    refused = run("merge", "a.arpa", "--tune", "text", "-o", "o.arpa", "--by-counts", cwd=home)
    assert b"give --weights with --by-counts" in refused.stderr


STAGE = {
    "stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1,
    "gap": 1, "max_participations": 1, "extras": {"ledger": "a" * 64},
}  # fmt: skip
NOISED = Provenance(Guarantee(2.12, 1e-6, 0.125), stages=(STAGE,), ledgers=("a" * 64,))


@pytest.mark.parametrize(
    ("records", "more", "said"),
    [
        ((NOISED, None), (), "NO GUARANTEE: nothing says whose text model 2, b.arpa is"),
        (
            (NOISED, None),
            ("--public-attested-by", "ACME"),
            "0.125-zCDP for each user who took part.",
        ),
        ((NOISED, NOISED), (), "0.125-zCDP for each user who took part."),  # of one run
        ((NOISED, Provenance.none("no noise")), (), "NO GUARANTEE: no noise."),
        ((None, None), (), ""),
    ],
)
def test_a_mixture_carries_the_records_of_its_models_composed(
    home: Path, records: tuple[Provenance | None, ...], more: tuple[str, ...], said: str
) -> None:
    """One without a record leaves the whole without; none at all adds nothing."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    for name, record in zip("ab", records, strict=True):
        place = home / f"{name}.arpa"
        if record is not None:
            place.write_text(f"# {record.line}\n" + place.read_text())
    models = [home / "a.arpa", home / "b.arpa"]
    merge(models, home / "m.arpa", weights="0.6,0.4", public=more[1] if more else "", quiet=True)
    with ArpaReader(home / "m.arpa") as reader:
        lines = [line for line in reader.comments if line.startswith("privacy: ")]
    assert len(lines) == (said != "")
    for line in lines:
        assert said in Provenance.from_json(line).statement()


def test_two_models_of_one_file_name_are_two_inputs(home: Path) -> None:
    """The record of the one does not stand for the other, which has none."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    (home / "else").mkdir()
    other = home / "else" / "a.arpa"
    other.write_text(f"# {NOISED.line}\n" + (home / "b.arpa").read_text())
    merge([home / "a.arpa", other], home / "m.arpa", weights="0.6,0.4", quiet=True)
    with ArpaReader(home / "m.arpa") as reader:
        (line,) = [line for line in reader.comments if line.startswith("privacy: ")]
    found = Provenance.from_json(line)
    assert found.guarantee is None
    assert "model 1, a.arpa" in found.reasons[0]


def test_tuned_weights_are_told_with_the_perplexities_of_dlm_perplexity(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line a model and one of the mixture, which is at least as good as any model by itself
    on the words that both know."""
    models = [home / "a.arpa", home / "b.arpa"]
    merge(models, home / "m.arpa", tune=home / "text")
    _, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert abs(sum(float(row[0]) for row in rows[:2]) - 1) < 1e-5
    for row, model in zip(rows, models, strict=False):
        perplexity([model, home / "text"], as_json=True)
        facts = json.loads(capsys.readouterr().out)["summary"]
        assert abs(float(row[1]) / facts["perplexity"] - 1) < 1e-6
        assert abs(float(row[2]) / facts["perplexity_without_oovs"] - 1) < 1e-6
        assert int(row[3]) == facts["oovs"]
    assert rows[2][3] == "1"
    assert "iterations" in rows[2][4]
    with ArpaReader(home / "m.arpa") as reader:
        about = json.loads(reader.comments[0].removeprefix("provenance: "))
    assert about["tuned"]["text"] == "text"


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(home: Path) -> None:
    """Weights and text both or neither, no numbers, no memory, no text, a damaged model."""
    models, output = [home / "a.arpa", home / "b.arpa"], home / "m.arpa"
    (home / "empty").write_text("\n\n")
    for options, error, message in (
        ({}, ConfigError, "give --weights, one per model, or --tune"),
        ({"weights": "1,0", "tune": home / "text"}, ConfigError, "were both given"),
        ({"weights": "0.5;0.5"}, ConfigError, "expected numbers separated by commas"),
        ({"weights": "1.5,-0.5"}, ConfigError, "is not valid; expected numbers"),
        ({"weights": "1,0", "memory": 1024}, ConfigError, "the limit is 1,024; raise --memory"),
        ({"weights": "1,0", "threads": 0}, ConfigError, "--threads is 0; expected 1 or more"),
        ({"tune": home / "empty"}, EstimationError, "the held-out text is empty"),
    ):
        with pytest.raises(error, match=message):
            merge(models, output, **options)  # type: ignore[arg-type]
    text = models[1].read_text()
    models[1].write_text(text[: len(text) // 2])
    with pytest.raises(ArpaError, match="truncated"):
        merge(models, output, weights="0.5,0.5")
    assert sorted(path.name for path in home.iterdir()) == ["a.arpa", "b.arpa", "empty", "text"]
