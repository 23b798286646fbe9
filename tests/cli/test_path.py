"""From text to scores: what one command writes, the next one reads."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dlm.ngram.backoff import DictModel

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

TEXT = b"a b c a b d\na b c\nd a b c a\nb c a b\na d a b c\n" * 3
ASKED = b"a b c d\nb xyzzy a b c\n\nd d a\n"


def test_text_becomes_a_model_whose_shards_score_as_the_pruned_model_does(
    run: Run, tmp_path: Path
) -> None:
    """estimate, prune, shard, score; perplexity tells the same of the ARPA file, and the oracle."""

    def done(*arguments: object, text: bytes = b"") -> tuple[list[str], list[str]]:
        result = run(*arguments, cwd=tmp_path, text=text)
        assert result.returncode == 0, result.stderr
        return result.stdout.decode().splitlines(), result.stderr.decode().splitlines()

    (tmp_path / "text").write_bytes(TEXT)
    done("estimate", "text", "--order", 3, "--discount-fallback", "--output", "model.arpa.gz")
    done("prune", "model.arpa.gz", "--ngrams", 28, "--output", "small.arpa")
    done("shard", "small.arpa", "--shards", 2, "--output", "shards")

    whole, small = (DictModel.from_arpa(tmp_path / m) for m in ("model.arpa.gz", "small.arpa"))
    assert len(small.ngrams) == 28 < len(whole.ngrams)

    scored, summary = done("score", "--local", "shards", text=ASKED)
    told, _ = done("perplexity", "small.arpa", text=ASKED)
    assert summary[-5:] == told[:5]
    sentences = [line.split() for line in ASKED.splitlines()]
    totals = [sum(float(s.log10_prob) for s in small.score_sentence(w)) for w in sentences]
    rows = [line.split("\t") for line in scored[1:]]
    assert [float(row[0]) for row in rows] == pytest.approx(totals, abs=1e-6)

    provenance = json.loads("\n".join(done("info", "shards", "--json")[0]))["provenance"]
    lines = [line.removeprefix("provenance: ") for line in provenance["comments"]]
    made_by = [json.loads(line)["made_by"] for line in lines]
    assert [name.split()[-1] for name in made_by] == ["estimate", "prune"]
