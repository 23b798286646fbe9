"""`dlm distill`: what it writes and prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.trained import dlm
from dlm.errors import DlmError
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.backoff import DictModel
from dlm.record.provenance import Guarantee, Provenance
from estimate.merge_models import normalised_model, worst_sum

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

WORDS = [f"w{i}" for i in range(12)]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """A source, and a model with fewer n-grams and a word of its own."""
    models = {
        "big": normalised_model(1, WORDS, contexts=0.9),
        "top": normalised_model(2, [*WORDS[2:], "x"], contexts=0.4),
    }
    return {name: f"# provenance: of {name}\n{model.arpa()}" for name, model in models.items()}


@pytest.fixture
def home(texts: dict[str, str], tmp_path: Path) -> Path:
    """Both, in files."""
    for name, text in texts.items():
        (tmp_path / f"{name}.arpa").write_text(text)
    return tmp_path


def test_the_command_writes_the_nearest_model_and_says_how_near(run: Run, home: Path) -> None:
    """Its n-grams are the topology's in the source's words; the header keeps both provenances."""
    out = home / "out.arpa"
    done = run("distill", home / "big.arpa", "--topology", home / "top.arpa", "-o", out, "--json")
    figures = json.loads(done.stdout)
    assert b", which contain 1 word that " in done.stderr
    model, topology = DictModel.from_arpa(out), DictModel.from_arpa(home / "top.arpa")
    source = DictModel.from_arpa(home / "big.arpa")

    def spelled(plain: DictModel) -> set[tuple[bytes, ...]]:
        return {tuple(plain.vocabulary.words[i] for i in ngram) for ngram in plain.ngrams}

    wanted = {ngram for ngram in spelled(topology) if b"x" not in ngram}
    wanted |= {ngram for ngram in spelled(source) if len(ngram) == 1}
    wanted |= {ngram[1:] for ngram in wanted if len(ngram) > 1}
    assert spelled(model) == wanted
    assert sum(figures["ngrams"]) == len(wanted)
    assert worst_sum(model) < 3e-6
    assert figures["perplexity"] > figures["source_perplexity"] > 1
    assert figures["relative_entropy_nats"] > 0
    assert 0 <= figures["excess_nats"] < 1e-4
    with ArpaReader(out) as reader:
        (line,) = reader.comments
    made = json.loads(line.partition(": ")[2])
    assert made["made_by"].endswith(" distill")
    assert [(part["as"], part["comments"]) for part in made["inputs"]] == [
        ("source", ["provenance: of big"]),
        ("topology", ["provenance: of top"]),
    ]


STAGE = {
    "stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1,
    "gap": 1, "max_participations": 1, "extras": {"ledger": "a" * 64},
}  # fmt: skip
NOISED = Provenance(Guarantee(2.12, 1e-6, 0.125), stages=(STAGE,), ledgers=("a" * 64,))


@pytest.mark.promise("distilled_record")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "top.arpa is: it has no record."),
        (("--public-attested-by", "ACME"), "0.125-zCDP for each user who took part."),
    ],
)
def test_the_record_of_the_source_is_composed_with_the_topologys(
    run: Run, home: Path, more: tuple[str, ...], said: str
) -> None:
    """A topology without one leaves none, for its n-grams tell whose text it is of."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    big = home / "big.arpa"
    big.write_text(f"# {NOISED.line}\n" + big.read_text())
    done = run("distill", big, "--topology", home / "top.arpa", "-o", home / "out.arpa", *more)
    assert done.returncode == 0, done.stderr
    with ArpaReader(home / "out.arpa") as reader:
        (line,) = [line for line in reader.comments if line.startswith("privacy: ")]
    record = Provenance.from_json(line)
    assert said in record.statement()
    assert said in done.stderr.decode()
    assert record.derived[-1] == "distill"


def test_a_model_on_its_own_n_grams_loses_nothing(run: Run, home: Path) -> None:
    """As people read it, too."""
    source = normalised_model(3, WORDS, missing_suffixes=False).write(home / "whole.arpa")
    args = ("distill", source, "--topology", source, "-o", home / "out.arpa")
    figures = json.loads(run(*args, "--json", "-q").stdout)
    assert abs(figures["relative_entropy_nats"]) < 1e-6
    said = run(*args)
    assert b"perplexity on the source's own text: " in said.stdout
    assert b"expected counts of" in said.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1M"], "Raise --memory"),
        (["--threads", "0"], "expected 1 or more"),
        (["--topology", "none.arpa"], "none.arpa"),
        (
            ["--samples", "9", "--text", "big.arpa"],
            "give only one of --samples, --text and --counts",
        ),
        (["--topology", "self"], "inferred from samples; give --samples"),
        (["--ngrams", "9"], "need --topology self"),
        (["--topology", "self", "--samples", "9", "--interpolated"], "--topology self+FILE"),
        (["--topology", "self", "--samples", "9", "--part", "1/2"], "would infer a different one"),
        (["--samples", "9", "--part", "1/2"], "give --work without --output"),
        (["--samples", "9", "--part", "two"], "expected I/N"),
        (["--samples", "0"], "1 to 1e+15"),
        (["--samples", "nan"], "distill.samples is nan; expected 1 to"),
        (["--topology", "self", "--samples", "9", "--order", "6"], "expected 1 to 5"),
        (["--topology", "self+", "--samples", "9"], "no file is named"),
        (["--topology", ""], "--topology is empty"),
        (["--prior", "inf"], "distill.prior is inf; expected 0 or more"),
        (["--samples", "9", "--seed", "-1"], "distill.seed is -1; expected 0 or more"),
        (["--work", "here"], "leave out --work"),
        (["--text", "none.txt"], "none.txt"),
        (["--capitalize", "big.arpa"], "--capitalize needs a network"),
        (["--unigrams", "none.tsv"], "none.tsv"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_begun(
    home: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is written."""
    monkeypatch.chdir(home)
    done = dlm("distill", "big.arpa", "--topology", "top.arpa", "-o", "out.arpa", *options)
    assert isinstance(done.exception, (DlmError, OSError))
    assert message in str(done.exception)
    assert done.stdout == ""
    assert not (home / "out.arpa").exists()
