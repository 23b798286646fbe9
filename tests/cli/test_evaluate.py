"""`dlm evaluate`: what it prints, beside `dlm perplexity`, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")

from cli.trained import dlm
from dlm.errors import ConfigError
from estimate.merge_models import normalised_model

WORDS = [f"w{i}" for i in range(9)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two models, and text with words that they lack, of users and of nobody."""
    for name, seed, words in (("one", 1, WORDS), ("two", 2, WORDS)):
        normalised_model(seed, words).write(tmp_path / f"{name}.arpa")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice([*WORDS, "x"], rng.integers(1, 7))) for _ in range(40)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    rows = [f"user{i // 4}\t{line.upper()}" for i, line in enumerate(lines)]
    (tmp_path / "users.tsv").write_text("user_id\tutterance\n" + "\n".join(rows) + "\n")
    return tmp_path


def test_perplexities_are_those_of_the_other_command(home: Path) -> None:
    """Of one model, for which its own words are the known ones."""
    given = ("evaluate", home / "one.arpa", "--text", home / "text.txt", "--json", "-q")
    done = dlm(*given, status=0)
    figures = json.loads(done.stdout)
    other = json.loads(dlm("perplexity", home / "one.arpa", home / "text.txt", "--json").stdout)
    (model,) = figures["models"]
    assert model["perplexity"]["value"] == pytest.approx(other["summary"]["perplexity"], rel=1e-5)
    assert model["perplexity_without_oovs"]["value"] == pytest.approx(
        other["summary"]["perplexity_without_oovs"], rel=1e-5
    )
    assert figures["words"] - figures["known_words"] == other["summary"]["oovs"] > 0
    assert figures["sentences"] == 40
    assert figures["users"] is None
    assert model["top1"]["low"] is None


def test_models_are_compared_on_users_text(home: Path) -> None:
    """With intervals, and the difference of the second to the first; the tokenizer's words."""
    args = ("evaluate", home / "one.arpa", home / "two.arpa", "--users", home / "users.tsv")
    figures = json.loads(dlm(*args, "--tokenizer", "words", "--json", "-q").stdout)
    assert figures["users"] == 10
    first, second = figures["models"]
    assert first["perplexity"]["low"] < first["perplexity"]["value"] < first["perplexity"]["high"]
    assert second["perplexity_difference"]["value"] == pytest.approx(
        second["perplexity"]["value"] - first["perplexity"]["value"]
    )
    again = json.loads(dlm(*args, "--tokenizer", "words", "--json", "-q").stdout)
    assert again == figures
    said = dlm(*args, "--draws", "0").stdout
    assert "10 users, 40 sentences" in said
    assert "0 of them known to all models" in said  # in upper case, as they stand
    assert "perplexity difference" in said
    assert "top1" in said and "unknown" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --users"),
        (["--text", "text.txt", "--users", "users.tsv"], "give either --users"),
        (["--text", "none.txt"], "none.txt"),
        (["--text", "text.txt", "--tokenizer", "none"], "--tokenizer is none; expected words or"),
        (["--text", "text.txt", "--draws", "-1"], "--draws is -1; expected 0 or more"),
        (["--users", "users.tsv", "--seed", "-1"], "--seed is -1; expected 0 or more"),
        (["--text", "text.txt", "--memory", "1M"], "raise --memory"),
    ],
)
def test_what_cannot_be_judged_is_refused(home: Path, options: list[str], message: str) -> None:
    """Before anything is printed."""
    paths = [str(home / o) if o.endswith((".txt", ".tsv")) else o for o in options]
    done = dlm("evaluate", home / "one.arpa", *paths)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert done.stdout == ""


def test_a_word_of_probability_0_is_no_number_that_json_lacks(home: Path) -> None:
    """Its log-likelihood is -inf, which readers of JSON refuse."""
    rows = "-99\t<s>\n-0.3\t</s>\n-inf\tw0\n-0.3\tw1\n"
    (home / "zero.arpa").write_text(f"\\data\\\nngram 1=4\n\n\\1-grams:\n{rows}\n\\end\\\n")
    (home / "zero.txt").write_text("w0 w1\n")
    done = dlm("evaluate", home / "zero.arpa", "--text", home / "zero.txt", "--json", "-q")
    assert done.exit_code == 0, done.output
    (model,) = json.loads(done.stdout, parse_constant=pytest.fail)["models"]
    assert model["sll_without_oovs"]["value"] is None
