"""`dlm prune` and `dlm reduce`: what they write, say and refuse."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.trained import told
from dlm.cli.score import perplexity
from dlm.errors import ConfigError, DlmError
from dlm.ngram.arpa import ArpaReader
from normalised import normalised_model, read_plain


def run(*arguments: object) -> str:
    """What a command prints; its error is raised."""
    done = told(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of order 3, with a comment."""
    path = tmp_path / "model.arpa"
    plain = normalised_model(1, order=3, words=15, share=0.4)
    path.write_text("# made by hand\n" + plain.arpa())
    return path


def header(path: Path) -> tuple[list[str], tuple[int, ...]]:
    """Comments and counts."""
    with ArpaReader(path) as reader:
        return reader.comments, tuple(reader.counts)


def test_a_pruned_model_says_where_it_comes_from(model: Path, tmp_path: Path) -> None:
    """After what its model said of itself; and the summary has the counts of both."""
    said = run("prune", model, "--threshold", 1e-3, "--output", tmp_path / "p.arpa.gz")
    comments, counts = header(tmp_path / "p.arpa.gz")
    before = header(model)[1]
    assert comments[0] == "made by hand"
    about = json.loads(comments[1].removeprefix("provenance: "))
    assert about["made_by"].endswith(" prune")
    assert about["method"] == "relative entropy"
    assert about["threshold"] == 0.001
    assert about["from"] == "model.arpa"
    assert about["from_ngrams"] == list(before)
    assert 0 < counts[2] < before[2]
    for a, b in zip(before, counts, strict=True):
        assert f"{a:>15,} {b:>15,}" in said
    assert "criterion, summed over the pruned n-grams as if each were pruned alone" in said
    assert "perplexity" not in said


def perplexities(said: str) -> list[tuple[float, float, float]]:
    """Before, after and the change, of what was measured: with OOVs, without."""
    pattern = r"perplexity \w+ OOVs: ([\d.]+) before, ([\d.]+) after, ([-+][\d.]+)%"
    return [(float(a), float(b), float(c)) for a, b, c in re.findall(pattern, said)]


def test_the_input_is_not_replaced(model: Path, tmp_path: Path) -> None:
    """By another name neither."""
    held = model.read_bytes()
    link = tmp_path / "link.arpa"
    link.symlink_to(model)
    for output in (model, link):
        with pytest.raises(ConfigError, match="is an input of this command"):
            run("prune", model, "--threshold", "1e-7", "--output", output)
    assert model.read_bytes() == held


def test_the_loss_is_measured_on_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perplexities are those that `dlm perplexity` has of both files; text may be parquet."""
    rng = random.Random(7)
    words = [n[0] for n in read_plain(model).ngrams if len(n) == 1 and n[0][0] != "<"] + ["never"]
    rows = [" ".join(rng.choices(words, k=rng.randint(0, 9))) for _ in range(300)]
    (tmp_path / "plain").write_text("\n".join(rows) + "\n")
    pq.write_table(pa.table({"said": [*rows, None]}), tmp_path / "rows")
    out = tmp_path / "p.arpa"
    said = run("prune", model, "--threshold", 3e-2, "-o", out, "--text", tmp_path / "plain")
    again = run(
        "prune", model, "--threshold", 3e-2, "-o", out,
        "--text", tmp_path / "rows", "--text-column", "said", "--skip",
    )  # fmt: skip
    measured = perplexities(said)
    assert measured == perplexities(again)
    expected = []
    for path in (model, out):
        perplexity([path, tmp_path / "plain"], as_json=True, quiet=True)
        expected.append(json.loads(capsys.readouterr().out.splitlines()[-1])["summary"])
    for (before, after, change), name in zip(
        measured, ("perplexity", "perplexity_without_oovs"), strict=True
    ):
        assert before == pytest.approx(expected[0][name], rel=1e-6)
        assert after == pytest.approx(expected[1][name], rel=1e-6)
        assert before != after
        assert change == pytest.approx(100 * (after / before - 1), abs=0.01)
    assert f"on {expected[0]['tokens']:,} tokens, {expected[0]['oovs']:,} of them OOVs" in said


def test_a_text_without_lines_measures_nothing(model: Path, tmp_path: Path) -> None:
    """The model is there; the error says what is missing."""
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DlmError, match="the text to measure the loss on is empty"):
        run(
            "prune", model, "--threshold", 1e-3, "-o", tmp_path / "p.arpa",
            "--text", tmp_path / "empty",
        )  # fmt: skip
    assert (tmp_path / "p.arpa").exists()


def test_histories_of_another_model_change_what_stays(model: Path, tmp_path: Path) -> None:
    """And the header names it."""
    other = normalised_model(2, order=2, words=15).write(tmp_path / "unigrams.arpa")
    for name, options in (("a", []), ("b", ["--history-lm", other])):
        run("prune", model, "--ngrams", 60, "--output", tmp_path / f"{name}.arpa", *options)
    one, two = (set(read_plain(tmp_path / f"{n}.arpa").ngrams) for n in "ab")
    assert one != two
    assert len(one) == len(two) == 60
    assert '"histories": "unigrams.arpa"' in header(tmp_path / "b.arpa")[0][-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give one of"),
        (["--ngrams", "few"], "expected a number, or one entry per order"),
        (["--ngrams", "1,2"], "for 2 orders"),
        (["--threshold", "1e-8", "--memory", "1M"], "raise --memory"),
        (["--threshold", "1e-8", "--threads", "0"], "--threads is 0; expected 1 or more"),
    ],
)
def test_wrong_settings_are_refused_and_nothing_is_written(
    options: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigError, match=message):
        run("prune", model, "--output", tmp_path / "p.arpa", *options)
    assert [p.name for p in tmp_path.iterdir()] == ["model.arpa"]


def test_a_model_larger_than_the_memory_is_pruned_the_same(model: Path, tmp_path: Path) -> None:
    """Its arrays are in files then, which leave nothing behind."""
    from dlm.estimate.prune import least_bytes, needed_bytes

    counts = header(model)[1]
    large = max(needed_bytes(counts) - 1, least_bytes(counts))
    out, spill = tmp_path / "p.arpa", tmp_path / "spill"
    spill.mkdir()
    run("prune", model, "--threshold", 1e-3, "-o", out, "-q")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dlm.estimate.prune.needed_bytes", lambda *_: 1 << 60)
        patch.setattr("dlm.resources.check_disk", lambda *_: None)
        again = tmp_path / "again.arpa"
        run("prune", model, "--threshold", 1e-3, "-o", again, "--memory", large, "--tmp", spill)
    assert again.read_bytes() == out.read_bytes()
    assert list(spill.iterdir()) == []


def test_a_reduced_model_says_where_it_comes_from(model: Path, tmp_path: Path) -> None:
    """After what its model said of itself; n-grams and scores are those of before."""
    out = tmp_path / "r.arpa"
    assert "order 3 cut to 2" in run("reduce", model, "--order", 2, "--output", out)
    comments, counts = header(out)
    assert counts == header(model)[1][:2]
    assert comments[0] == "made by hand"
    assert '"order": 2' in comments[1]
