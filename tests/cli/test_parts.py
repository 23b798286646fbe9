"""A model in parts is a model to every command: what is made of it is what is made of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.trained import told
from dlm.cli.main import app
from dlm.ngram.arpa import PARTS_INDEX, ArpaReader, parts_index
from normalised import normalised_model


def run(*arguments: object) -> str:
    """What a command prints; its error is raised."""
    done = told(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """One model, as a file and as a folder of two parts an order; both of one name."""
    file, folder = tmp_path / "file/model.arpa", tmp_path / "parts/model.arpa"
    file.parent.mkdir()
    text = normalised_model(1, order=3, words=15, share=0.4).arpa()
    file.write_text(text)
    parts: list[list[tuple[str, int]]] = []
    for n in (1, 2, 3):
        rows = text.split(f"\\{n}-grams:\n")[1].split("\n\n")[0].splitlines(keepends=True)
        rows[-1] = rows[-1].removesuffix("\n") + "\n"
        parts.append([])
        for name, own in ((f"{n}-0", rows[:9]), (f"{n}-1", rows[9:])):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("".join(own))
            parts[-1].append((name, (folder / name).stat().st_size))
    with ArpaReader(file) as reader:
        (folder / PARTS_INDEX).write_bytes(parts_index(reader.comments, reader.counts, parts))
    (tmp_path / "words").write_text("w0 w1 w2 w3\n")
    (tmp_path / "text").write_text("w1 w2 w3\nw3 w2 unheard\n")
    return [file, folder]


COMMANDS: dict[str, Callable[[Path], list[Any]]] = {
    "prune": lambda model: ["prune", model, "--threshold", "1e-3", "-q"],
    "prune to a number": lambda model: ["prune", model, "--ngrams", "-,30,20", "-q"],
    "reduce": lambda model: ["reduce", model, "--order", 2],
    "filter": lambda model: ["filter", model, "--vocab", model.parents[1] / "words"],
    "merge": lambda model: ["merge", model, model, "--weights", "0.6,0.4"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_models_made_of_parts_are_those_made_of_the_file(
    models: list[Path], tmp_path: Path, name: str
) -> None:
    """To the byte."""
    made = []
    for k, model in enumerate(models):
        run(*COMMANDS[name](model), "--output", tmp_path / f"{k}.arpa")
        made.append((tmp_path / f"{k}.arpa").read_bytes())
    assert made[0] == made[1]
    assert b"ngram 2=" in made[0]


def test_parts_are_sharded_verified_and_judged_as_the_file(
    models: list[Path], tmp_path: Path
) -> None:
    """The text of the file has other blank lines perhaps, but n-grams and scores are the same."""
    file, folder = models
    run("shard", folder, "--shards", 2, "--output", tmp_path / "shards", "-q")
    assert "every n-gram equals that of" in run("verify", tmp_path / "shards", "--arpa", folder)
    assert "every n-gram equals that of" in run("verify", tmp_path / "shards", "--arpa", file)
    told = [run("perplexity", place, tmp_path / "text") for place in (*models, tmp_path / "shards")]
    assert told[0] == told[1] == told[2]
    assert "OOVs:\t1" in told[0]


def test_the_commands_are_those_of_dlm() -> None:
    """So that a command that is renamed is not passed over."""
    names = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {command.split()[0] for command in COMMANDS} <= set(names)
