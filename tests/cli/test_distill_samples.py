"""`dlm distill` of what is sampled: a user's own model, an ARPA file, parts, text, `self`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.trained import dlm, told
from dlm.errors import ConfigError, PrivacyError, SourceError
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.backoff import DictModel
from dlm.record.provenance import LINE_PREFIX, Guarantee, Provenance
from dlm.record.sidecar import sidecar, write_recorded
from estimate.merge_models import normalised_model, worst_sum

WORDS = [f"w{i}" for i in range(10)]
MODEL = """
import numpy as np
WORDS = ["<eos>", *(f"w{i}" for i in range(10))]
class Model:
    vocabulary, begin_id, end_id = WORDS, 0, 0
    def __init__(self, shift=0.0):
        self.shift = shift
    def log_probs(self, prefixes, lengths):
        last = prefixes[np.arange(len(prefixes)), lengths - 1]
        far = np.abs(np.arange(11)[None, :] - (last[:, None] * 3 + lengths[:, None]) % 11)
        logits = -0.5 * far + self.shift
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) + self.shift
def wrong():
    return Model(1.0)
def claiming():
    model = Model()
    model.record = "public"
    return model
"""


def figures(*arguments: object) -> dict[str, float]:
    """What it prints, of a run that ends well."""
    done = dlm(*arguments, "--json", "-q", status=0)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a Python model, an ARPA file, and a topology for both."""
    (tmp_path / "my_source.py").write_text(MODEL)
    normalised_model(1, WORDS, contexts=0.9, missing_suffixes=False).write(tmp_path / "big.arpa")
    normalised_model(2, [*WORDS, "other"], contexts=0.4).write(tmp_path / "top.arpa")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record_of(path: Path) -> Provenance:
    """The privacy record in a file's header."""
    with ArpaReader(path) as reader:
        (line,) = [line for line in reader.comments if line.startswith(LINE_PREFIX)]
    return Provenance.from_json(line)


def test_a_python_object_is_distilled_and_promises_nothing_of_itself(home: Path) -> None:
    """Unless somebody vouches for it."""
    args = ("distill", "my_source:Model", "--topology", "top.arpa", "-o", "out.arpa")
    found = figures(*args, "--samples", "3e3")
    assert 0 < found["relative_entropy_nats"] < 0.6
    model = DictModel.from_arpa(home / "out.arpa")
    assert worst_sum(model) < 3e-6
    assert set(model.vocabulary.words) >= {b"</s>", *(word.encode() for word in WORDS)}
    assert b"other" not in model.vocabulary.words
    assert b"<eos>" not in model.vocabulary.words
    record = record_of(home / "out.arpa")
    assert record.guarantee is None
    assert any("the source my_source:Model" in reason for reason in record.reasons)
    figures(*args, "--samples", "30", "--public-attested-by", "ACME")
    assert record_of(home / "out.arpa").guarantee == Guarantee(0.0, 0.0, 0.0)


def test_what_is_no_distribution_is_refused_before_the_topology_is_counted(home: Path) -> None:
    """By name, and nothing is written."""
    samples = ("--samples", 9)
    cased = (*samples, "--capitalize", "top.arpa")
    for source, more, error, message in (
        ("my_source:wrong", samples, SourceError, "my_source:wrong"),
        ("my_source:Model", (), ConfigError, "a Python object, which must be sampled"),
        ("my_source:Model", cased, ConfigError, "my_source:Model is a Python object"),
        ("my_source:claiming", samples, ConfigError, "the record of my_source:claiming is a str"),
    ):
        with pytest.raises(error, match=message):
            told("distill", source, "--topology", "top.arpa", "-o", "out.arpa", *more)
    assert not (home / "out.arpa").exists()


def test_samples_of_an_arpa_file_come_near_its_expected_counts(home: Path) -> None:
    """The perplexity of the new model is that of exact counts."""
    args = ("distill", "big.arpa", "--topology", "top.arpa", "-o", "out.arpa")
    exact, sampled = figures(*args), figures(*args, "--samples", "1e5")
    assert sampled["perplexity"] == pytest.approx(exact["perplexity"], rel=0.02)
    assert sampled["relative_entropy_nats"] == pytest.approx(
        exact["relative_entropy_nats"], rel=0.05
    )


@pytest.mark.promise("counting_resumes")
def test_parts_of_several_workers_become_one_model(home: Path) -> None:
    """As one process that has all samples makes of them, within their spread."""
    args = ("distill", "big.arpa", "--topology", "top.arpa")
    for i in (1, 2):
        done = dlm(*args, "--samples", "4e4", "--part", f"{i}/2", "--work", f"part{i}", status=0)
        assert f" --counts part{i} " in done.stdout
    added = figures(*args, "--counts", "part1", "--counts", "part2", "-o", "out.arpa")
    whole = figures(*args, "--samples", "4e4", "-o", "whole.arpa")
    assert added["perplexity"] == pytest.approx(whole["perplexity"], rel=0.02)
    with ArpaReader(home / "out.arpa") as reader:
        facts = json.loads(reader.comments[0].partition(": ")[2])
    assert [share["part"] for share in facts["parts"]] == ["1/2", "2/2"]
    some = dlm(*args, "--counts", "part2", "-o", "some.arpa")
    assert "missing from --counts: 1/2 of seed 0" in some.stderr


def test_the_same_command_goes_on_and_another_is_refused(home: Path) -> None:
    """With --work."""
    args = ("distill", "my_source:Model", "--topology", "top.arpa", "-o", "out.arpa")
    work = ("--work", "work", "--samples")
    first = figures(*args, *work, 300)
    content = (home / "out.arpa").read_bytes()
    again = figures(*args, *work, 300)
    assert again["perplexity"] == first["perplexity"]
    assert (home / "out.arpa").read_bytes() == content
    for more in ((200,), (300, "--seed", 4)):
        done = dlm(*args, *work, *more)
        assert isinstance(done.exception, ConfigError)
        assert "share." in str(done.exception)


def test_contexts_of_a_text_take_the_place_of_samples(home: Path) -> None:
    """The text's record is composed: nobody vouches for it, and there is no guarantee."""
    (home / "lines.txt").write_text("w1 w2 w3\nw4 w1 unheard w2\n\n" * 20)
    (home / "big.arpa").write_text(
        "# " + Provenance.public("ACME", "it").line + "\n" + (home / "big.arpa").read_text()
    )
    args = ("distill", "big.arpa", "--topology", "big.arpa", "-o", "out.arpa")
    found = figures(*args, "--text", "lines.txt")
    assert found["relative_entropy_nats"] == pytest.approx(0, abs=2e-3)  # the prior of 0.01
    assert found["unvisited_contexts"] > 0
    assert any("lines.txt" in reason for reason in record_of(home / "out.arpa").reasons)
    counts = ("distill", "big.arpa", "--topology", "big.arpa")
    dlm(*counts, "--text", "lines.txt", "--work", "work")
    figures(*args, "--counts", "work")
    assert any("the text" in reason for reason in record_of(home / "out.arpa").reasons)
    figures(*args, "--text", "lines.txt", "--public-attested-by", "ACME")
    assert record_of(home / "out.arpa").guarantee == Guarantee(0.0, 0.0, 0.0)


def test_a_topology_of_the_sources_own_n_grams(home: Path) -> None:
    """Of the size asked for; with another's, both, and their interpolation."""
    samples = ("--samples", "5e3", "-o", "out.arpa")
    own = figures("distill", "big.arpa", "--topology", "self", "--ngrams", 60, *samples)
    assert sum(own["ngrams"]) == 60
    more = figures("distill", "big.arpa", "--topology", "self", "--ngrams", 90, *samples)
    assert 0 < more["relative_entropy_nats"] < own["relative_entropy_nats"]
    assert worst_sum(DictModel.from_arpa(home / "out.arpa")) < 3e-6
    both = ("distill", "big.arpa", "--topology", "self+top.arpa", "--ngrams", 90, *samples)
    again, mixed = figures(*both), figures(*both, "--interpolated")
    assert sum(again["ngrams"]) == sum(mixed["ngrams"]) == 90
    assert again["relative_entropy_nats"] < mixed["relative_entropy_nats"]
    with ArpaReader(home / "out.arpa") as reader:
        facts = json.loads(reader.comments[0].partition(": ")[2])
    assert (facts["topology"], facts["interpolated"]) == ("self+topology", True)
    of_object = figures("distill", "my_source:Model", "--topology", "self", "--order", 2, *samples)
    assert len(of_object["ngrams"]) == 2


def test_a_text_keeps_its_own_record_whoever_vouches(home: Path) -> None:
    """--public-attested-by speaks for what has none; counts bring the text's record to whoever
    adds them up; what stands beside it says that it is of users, though its record was removed."""
    topology = Provenance.public("ACME", "it").line
    (home / "pub.arpa").write_text(f"# {topology}\n" + (home / "big.arpa").read_text())
    said = Provenance.none("users' text, without noise")
    write_recorded("of_users.txt", b"w1 w2\nw3 w4\n" * 9, said, digest_name="text_sha256")
    args = ("distill", "pub.arpa", "--topology", "pub.arpa", "--text", "of_users.txt")
    public = ("--public-attested-by", "ACME")
    figures(*args, *public, "-o", "out.arpa")
    assert record_of(home / "out.arpa").reasons == said.reasons
    assert dlm(*args, "--work", "work").exit_code == 0
    counts = ("distill", "pub.arpa", "--topology", "pub.arpa", "--counts", "work")
    figures(*counts, *public, "-o", "out.arpa")
    assert record_of(home / "out.arpa").reasons == said.reasons
    (home / "of_users.txt").write_text("w1\n")
    done = dlm(*args, "-o", "out.arpa")
    assert isinstance(done.exception, PrivacyError)  # the record is of another file
    sidecar("of_users.txt").unlink()
    (home / "of_users.txt.ledger.json").write_text("{}")
    done = dlm(*args, *public, "-o", "out.arpa")
    assert isinstance(done.exception, PrivacyError)
    assert "of_users.txt.ledger.json says" in str(done.exception)
    assert dlm(*args, "--work", "again").exit_code == 0
    figures(*counts[:-1], "again", *public, "-o", "out.arpa")
    assert "ledger.json says" in record_of(home / "out.arpa").statement()
