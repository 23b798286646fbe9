"""`dlm perplexity`: one summary from an ARPA file, a shard set and servers."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import MODEL
from dlm.cli.score import perplexity
from dlm.errors import ArpaError, ConfigError
from dlm.ngram.backoff import DictModel

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

TEXT = b"a b c d\nd a b\n\nnever a  seen\tb\r\n\xff\xfe a\na b c d a b c"


def test_the_summary_is_that_of_score_with_hits_of_each_order(run: Run, folder: Path) -> None:
    """The lines of `dlm score`, then tokens by the longest n-gram, which the oracle finds too."""
    scored = run("score", "--local", folder / "shards", text=TEXT)
    done = run("perplexity", folder / "model.arpa", text=TEXT, status=0)
    lines = done.stdout.splitlines()
    assert lines[:5] == scored.stderr.splitlines()[-5:]

    oracle = DictModel.from_arpa(folder / "model.arpa")
    hits = [0] * oracle.order
    for line in TEXT.split(b"\n"):
        for score in oracle.score_sentence(line.replace(b"\r", b"").split()):
            hits[score.matched_order - 1] += 1
    tokens = sum(hits)
    expected = [f"Hits of order {k}:\t{n}\t{100 * n / tokens:.2f} %" for k, n in enumerate(hits, 1)]
    assert [line.decode() for line in lines[5:]] == expected


@pytest.mark.promise("perplexity")
def test_perplexities_are_those_of_kenlm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without OOVs, as its Python module scores the tokens."""
    kenlm = pytest.importorskip(
        "kenlm", reason="kenlm is not installed (pip install -e '.[peers]')"
    )
    MODEL.padded().write(tmp_path / "padded.arpa")
    model = kenlm.LanguageModel(str(tmp_path / "padded.arpa"))
    total = without = 0.0
    tokens = oovs = 0
    text = "a b c d\nd a b\nx a b zz c\n\nd d d\n"
    for line in text.splitlines():
        for prob, _, oov in model.full_scores(line):
            total += prob
            without += 0 if oov else prob
            tokens += 1
            oovs += oov
    (tmp_path / "text").write_text(text)
    perplexity([tmp_path / "padded.arpa", tmp_path / "text"], as_json=True)
    found = json.loads(capsys.readouterr().out)["summary"]
    assert (found["tokens"], found["oovs"]) == (tokens, oovs)
    assert math.isclose(found["perplexity"], 10 ** (-total / tokens), rel_tol=1e-6)
    excluding = 10 ** (-without / (tokens - oovs))
    assert math.isclose(found["perplexity_without_oovs"], excluding, rel_tol=1e-6)


def test_a_bad_model_is_refused_and_nothing_stays_behind(folder: Path, tmp_path: Path) -> None:
    """The message names the place; the temporary folder is removed."""
    whole = (folder / "model.arpa").read_bytes()
    (tmp_path / "cut.arpa").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "tmp").mkdir()
    with pytest.raises(ArpaError, match=r"cut\.arpa, 1-grams"):
        perplexity([tmp_path / "cut.arpa"], tmp=tmp_path / "tmp")
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": Path("x.toml"), "memory": 1 << 30}, "--memory and --tmp apply to an ARPA"),
        ({"memory": 1 << 30}, "is a folder"),
        ({"tmp": Path("x")}, "is a folder"),
        ({"model": "ab12"}, "add --cluster"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    """Rather than passed over."""
    text = tmp_path / "text"
    text.write_text("a b\n")
    with pytest.raises(ConfigError, match=message):
        perplexity([folder / "shards", text], **options)
