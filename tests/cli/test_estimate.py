"""`dlm estimate`: what it takes, tells and refuses."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from benchmarks.commands import cost
from cli.trained import told
from dlm.cli.main import program
from dlm.errors import ConfigError, EstimationError
from dlm.ngram.arpa import ArpaReader

app = program(["estimate"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some thousand words."""
    r = random.Random(1)
    lines = (" ".join(f"w{int(r.paretovariate(0.7)) % 99}" for _ in range(9)) for _ in range(900))
    path = tmp_path / "text"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(*arguments: object, stdin: bytes = b"") -> Result:
    """The command; what it raised is raised here too."""
    return told("estimate", *arguments, input=stdin)


def ngrams(path: Path) -> Sequence[int]:
    """How many the model has, by order, all of them read."""
    with ArpaReader(path) as reader:
        for _ in reader.batches():
            pass
        return reader.counts


def test_a_model_is_made_and_its_stages_told(text: Path, tmp_path: Path) -> None:
    """With counts of what was read on standard output."""
    model = tmp_path / "m.arpa.zst"
    done = run(text, "--order", 3, "--prune", "0,0,1", "--output", model, "--discount-fallback")
    assert done.exit_code == 0
    assert len(ngrams(model)) == 3
    for part in ("counting", "probabilities of order 3", "writing order 3", "order 3: ", "done:"):
        assert part in done.stderr
    assert "text        8,100 words, 900 lines, 0 empty lines, 0 faulty lines" in done.stdout
    assert "n-grams     " in done.stdout


def test_text_comes_from_a_pipe_and_the_vocabulary_from_a_file(text: Path, tmp_path: Path) -> None:
    """N-grams with other words are gone."""
    (tmp_path / "words").write_text("w1 w2\nw3\n", encoding="utf-8")
    options = ("-n", 2, "-o", tmp_path / "m.arpa", "--vocab", tmp_path / "words", "-q")
    run("-", *options, "--discount-fallback", stdin=text.read_bytes())
    assert ngrams(tmp_path / "m.arpa")[0] == 6


def test_skipped_lines_are_told_and_stand_in_the_model(tmp_path: Path) -> None:
    """Without --skip they are an error that names the place."""
    (tmp_path / "text").write_bytes(b"a b\n\n\xff\nb <s> a\nb a\n")
    options = (tmp_path / "text", "-n", 2, "-o", tmp_path / "m.arpa", "--discount-fallback")
    with pytest.raises(EstimationError, match=r"line 3 \(from byte 5 on\)"):
        run(*options)
    assert not (tmp_path / "m.arpa").exists()
    done = run(*options, "--skip")
    expected = (
        "4 words, 2 lines, 1 empty line (left out), 2 faulty lines left out "
        "(not UTF-8: 1, reserved word: 1)"
    )
    assert expected in done.stdout
    with ArpaReader(tmp_path / "m.arpa") as reader:
        for _ in reader.batches():
            pass
        about = json.loads(reader.comments[0].removeprefix("provenance: "))
    assert about["text"]["skipped"] == {"not UTF-8": 1, "reserved word": 1}
    assert about["text"]["empty_lines"] == 1


@pytest.mark.promise("estimate_memory")
@pytest.mark.slow
def test_the_whole_process_stays_below_its_memory(tmp_path: Path) -> None:
    """With a text that would take more: runs and columns go to disk."""
    r = np.random.default_rng(2)
    words = (r.zipf(1.3, 500_000) % 20_000).astype(str)
    lines = (" ".join(words[at : at + 12]) for at in range(0, len(words), 12))
    (tmp_path / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
    memory = 300
    arguments = [str(tmp_path / "text"), "--output", str(tmp_path / "m.arpa")]
    options = ["--memory", f"{memory}M", "--discount-fallback", "--tmp", str(tmp_path)]
    command = [sys.executable, "-m", "dlm", "estimate"]
    cost([*command, "-n", "1", *arguments, *options])  # may compile
    used = cost([*command, *arguments, *options])
    assert used.peak_bytes <= memory << 20
    assert ngrams(tmp_path / "m.arpa")[0] > 10_000


def test_an_output_that_is_perhaps_an_order_is_refused(text: Path, tmp_path: Path) -> None:
    """lmplz's -o is the order: neither a file named 4 nor the first of two outputs is meant."""
    with pytest.raises(ConfigError, match="Did you mean --order 4"):
        run(text, "-o", "4")
    told = CliRunner().invoke(
        app, ["estimate", str(text), "-o", "4", "--output", str(tmp_path / "m.arpa")]
    )
    assert told.exit_code == 2
    assert "given more than once" in told.output
    assert "-n, --order" in told.output
    assert list(tmp_path.glob("*.arpa")) == []


@pytest.mark.parametrize(
    ("given", "ours"),
    [(("-S", "2G"), "--memory"), (("--limit_vocab_file", "w"), "--vocab"), (("-T", "."), "--tmp")],
)
def test_options_of_lmplz_are_named_as_ours(text: Path, given: tuple[str, ...], ours: str) -> None:
    """They are refused with the name to use."""
    told = CliRunner().invoke(app, ["estimate", str(text), "-o", "m.arpa", *given])
    assert told.exit_code == 2
    assert f"lmplz's {given[0]} is called {ours}" in told.output


def test_no_text_is_refused_with_what_stands_for_a_pipe(tmp_path: Path) -> None:
    """Other commands read standard input then; here a forgotten name would wait for a terminal."""
    done = CliRunner().invoke(app, ["estimate", "--output", str(tmp_path / "out")])
    assert "name one or more files, or - for standard input" in str(done.exception)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--prune", "0,x"), "expected numbers separated by commas"),
        (("--prune", "1,0"), "must not decrease: 1,0"),
        (("--memory", "lots"), "is not a size; write"),
        (("--memory", "50%"), "percentages are not supported; write"),
        (("--memory", "2"), "did you mean 2G"),
        (("--memory", "1M"), "at least"),
        (("--order", "12"), "1 to 8"),
        (("--tmp", "/dev/null/folder"), "/dev/null is not a folder"),
        (("--discount-fallback", "--fallback-discounts", "2"), "expected 0 to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(
    text: Path, tmp_path: Path, options: tuple[str, ...], complaint: str
) -> None:
    """Before the text is read."""
    with pytest.raises(ConfigError, match=complaint):
        run(text, "--output", tmp_path / "m.arpa", *options)
    assert not (tmp_path / "m.arpa").exists()
