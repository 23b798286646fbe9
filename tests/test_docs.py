"""The README says what is true: its commands exist, its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.cli.processes import running_servers
from dlm.client.topology import write_cluster_file
from dlm.index.build import build_shard_set
from models import PlainModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands  # type: ignore[attr-defined]


def test_every_command_stands_in_the_readme_and_shows_an_example() -> None:
    """A command nobody is told of is a command nobody uses."""
    for name, command in COMMANDS.items():
        assert re.search(rf"\bdlm {name}\b", README), name
        assert f"Example: dlm {name}" in (command.help or ""), name


def test_the_list_of_commands_is_whole_at_eighty_columns() -> None:
    """What each does, in a sentence that is not cut."""
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80)
    assert shown.exit_code == 0
    lines = shown.output.split("Commands:\n")[1].splitlines()
    told = {line.split()[0]: line.strip() for line in lines if line.strip()}
    assert told.keys() == COMMANDS.keys()
    for line in told.values():
        assert line.endswith("."), line
        assert "..." not in line, line


def test_every_option_that_the_readme_uses_exists() -> None:
    """Each `dlm NAME --option` of the README, with the options of that command."""
    for line in re.findall(r"^\$ (?:.*\| )?(dlm .*)$", README, re.MULTILINE):
        name, *rest = line.split("#")[0].split()[1:]
        command = COMMANDS[name]
        while inner := getattr(command, "commands", None):  # a group: `dlm privacy account ...`
            command = inner[rest.pop(0)]
        options = {o for p in command.params for o in p.opts}
        used = {word for word in rest if word.startswith("--")}
        assert used <= options, line


def test_the_first_two_blocks_are_the_two_commands() -> None:
    """What .ci/run takes from the README: one line each."""
    first, second = re.findall(r"```sh\n(.*?)\n```", README, re.S)[:2]
    assert "\n" not in first + second
    assert first.endswith("dlm demo")
    assert " -m pytest" in second


@pytest.mark.parametrize(
    "name",
    [
        "dlm", "dlm/ngram", "dlm/index", "dlm/estimate", "dlm/estimate/prune",
        "dlm/estimate/merge", "dlm/wire", "dlm/server", "dlm/client", "dlm/federated",
        "dlm/spark",
    ],
)  # fmt: skip
def test_every_file_of_a_package_that_its_readme_names_exists(name: str) -> None:
    """The walk through the code leads to files that are there."""
    text = (ROOT / name / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"`([a-z_/]+\.(?:py|md|proto))`", text):
        places = [ROOT / path, ROOT / "dlm" / path, ROOT / name / path]
        assert any(place.exists() for place in places), f"{name}/README.md names {path}"


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    """As written, beside a cluster.toml."""
    words = ["the", "a", "there", "man", "is", "went", "to", "house", "<s>", "</s>", "<unk>"]
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {(w,): (-1.0, -0.5) for w in words}
    ngrams |= {("<s>", "the"): (-0.5, -0.25), ("<s>", "the", "man"): (-0.25, None)}
    PlainModel(3, ngrams).write(tmp_path / "model.arpa")
    manifest = build_shard_set(tmp_path / "model.arpa", tmp_path / "shards/model", 2)
    build_shard_set(tmp_path / "model.arpa", tmp_path / "shards/small", 1)
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.S))
    with running_servers([tmp_path / "shards/model"]) as servers:
        write_cluster_file(
            tmp_path / "cluster.toml", [s.endpoint for s in servers], shard_set=manifest.shard_set
        )
        code = code.replace("deadline_s=0.5", "deadline_s=60")
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    assert "Stats(queries=" in done.stdout
