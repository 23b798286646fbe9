"""The page's section on lattices says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import typer

import forked
from asr.plain import random_lattice
from cluster import Cluster, build
from dlm.asr.rescoring.nbest import Hypothesis, nbest_json, nbest_text, read_nbest
from dlm.asr.rescoring.slf import slf_text
from dlm.cli.main import program
from models import HAND_MADE

PAGE = Path(__file__).parents[2] / "dlm" / "asr" / "SPEECH.md"
SECTION = PAGE.read_text(encoding="utf-8").split("\n## Lattices and n-best lists\n")[1]
SECTION = SECTION.split("\n## ")[0]


def test_its_python_runs(tmp_path: Path) -> None:
    """As written, beside a lattice and a cluster.toml."""
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.S)
    (tmp_path / "a1.slf").write_text(slf_text(random_lattice(1, words=["a", "b", "c"])))
    with Cluster(build(HAND_MADE["missing_suffixes"], tmp_path / "model", 2)) as cluster:
        cluster.write(tmp_path / "cluster.toml")
        done = forked.script(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_its_commands_have_these_options() -> None:
    """Every one that a line of the page gives."""
    command = typer.main.get_command(program(["rescore", "score"])).commands["rescore"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    used = set(re.findall(r"(--[a-z]+(?:-[a-z]+)*)", SECTION))
    assert used <= known
    assert len(used) > 5


def test_its_lists_are_what_is_read_and_written(tmp_path: Path) -> None:
    """JSON and text say the same."""
    blocks = re.findall(r"```\n(\{.*?|a1 .*?)```", SECTION, re.S)
    lists = []
    for name, text, write in zip(
        ("a.jsonl", "a.txt"), blocks, (nbest_json, nbest_text), strict=True
    ):
        (tmp_path / name).write_text(text)
        (found,) = read_nbest(tmp_path / name)
        assert write(found) == text
        lists.append(found)
    assert lists[0] == lists[1]
    assert lists[0].hypotheses[1] == Hypothesis(("a", "man"), -13.0, -6.5)
