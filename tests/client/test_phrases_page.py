"""The examples of dlm/client/PHRASES.md run as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.index.making import build_shard_set
from models import PlainModel

TEXT = (Path(__file__).parents[2] / "dlm/client/PHRASES.md").read_text(encoding="utf-8")


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a general model and a domain's."""
    monkeypatch.chdir(tmp_path)
    words = {
        "model": ["the", "a", "there", "man", "is", "house", "peter", "doctor"],
        "radiology": ["the", "thorax", "is", "there"],
    }
    for name, listed in words.items():
        marks = ["<s>", "</s>", "<unk>"]
        ngrams: dict[tuple[str, ...], Any] = {(w,): (-1.0, -0.5) for w in [*listed, *marks]}
        ngrams |= {("<s>", "the"): (-0.5, -0.25), ("the", "is"): (-0.25, None)}
        PlainModel(2, ngrams).write(tmp_path / "model.arpa")
        build_shard_set(tmp_path / "model.arpa", tmp_path / "shards" / name, 1)


@pytest.mark.usefixtures("_folder")
def test_the_python_of_the_page_prints_what_its_comments_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names per utterance, and a mixture."""
    names, mixture = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(names, {})
    printed = " ".join(capsys.readouterr().out.split())
    for said in re.findall(r"# (\[\[.*?\]\])", names):
        assert said in printed
    assert printed.endswith(" 3.0")
    found: dict[str, Any] = {}
    exec(mixture, found)
    assert sum(found["tuned"].weights) == pytest.approx(1.0)
    assert found["first"].log10_prob.shape == (1, 3)


@pytest.mark.usefixtures("_folder")
def test_the_command_of_the_page_rescores_with_its_file() -> None:
    """The hypothesis with a name of the list is the best."""
    (listed,) = [b for kind, b in re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S) if not kind]
    Path("names.tsv").write_text(listed, encoding="utf-8")
    hyps = [{"words": f"doctor {name} is there"} for name in ("house", "strangelove")]
    Path("nbest.jsonl").write_text(json.dumps({"id": "a", "hyps": hyps}), encoding="utf-8")
    (line,) = re.findall(r"^\$ dlm (rescore .*)$", TEXT, re.M)
    plain = line.replace(" --phrases names.tsv", "").replace("rescored.jsonl", "plain.jsonl")
    for one in (plain, line):
        done = CliRunner().invoke(app, shlex.split(one))
        assert done.exit_code == 0, done.output
    best = [
        json.loads(Path(name).read_text())["hyps"][0]["words"].split()[1]
        for name in ("plain.jsonl", "rescored.jsonl")
    ]
    assert best == ["house", "strangelove"]
