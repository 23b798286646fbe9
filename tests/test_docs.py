"""The README says what is true: its commands exist, its code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.client.topology import write_cluster_file
from dlm.cluster.processes import running_servers
from dlm.index.build import build_shard_set
from models import PlainModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = sorted(path.parent.name for path in (ROOT / "dlm").glob("*/__init__.py"))
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


# Commands of the README that this test does not run, by what stands in them, and why.
ELSEWHERE = {
    "cluster": "runs until Ctrl-C; see the test of the page's Python",
    "serve": "names another host",
    "status": "needs servers",
    "chaos": "needs servers",
    "spark": "needs Java",
    "hdfs": "needs Hadoop",
    "--model": "needs servers",
    "| dlm score\n": "needs servers",
    "dlm score --words": "needs servers",
    "unigrams": "reads the reader's own users",
    "pieces": "reads the reader's own counts",
    "federate": "reads the reader's own users",
    "privacy": "needs the extra train",
}


def test_the_commands_of_the_readme_run_in_their_order_and_print_what_stands_below(
    tmp_path: Path,
) -> None:
    """All that need no servers and none of the reader's files; lines with times are left out."""
    (tmp_path / "dlm").mkdir()
    (tmp_path / "dlm/data").symlink_to(ROOT / "dlm/data")
    command = tmp_path / "bin/dlm"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m dlm "$@"\n')
    command.chmod(0o755)
    environ = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    ran = 0
    for block in re.findall(r"```console\n(.*?)```", README, re.S):
        for line, below in re.findall(r"^\$ (.*\n)((?:[^$].*\n)*)", block, re.M):
            if any(mark in line for mark in ELSEWHERE):
                continue
            done = subprocess.run(
                line, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True
            )
            assert done.returncode == 0, line + done.stderr
            printed = done.stdout.splitlines()
            for expected in below.splitlines():
                if expected != "..." and not expected.startswith("["):
                    assert expected in printed, line + done.stdout
            ran += 1
    assert ran > 10


def test_the_first_two_blocks_are_the_two_commands() -> None:
    """What .ci/run takes from the README: one line each."""
    first, second = re.findall(r"```sh\n(.*?)\n```", README, re.S)[:2]
    assert "\n" not in first + second
    assert first.endswith("dlm demo")
    assert " -m pytest" in second


def test_one_line_says_which_extras_turn_skipped_tests_on() -> None:
    """All but those that the test command itself installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"test", "trace"}
    (line,) = [line for line in README.splitlines() if line.startswith("Extras turn them on")]
    assert set(re.findall(r"`(\w+)`", line)) == extras


PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [
        *(ROOT / "dlm").rglob("*.md"),
        *(ROOT / "loadtest").rglob("*.md"),
        ROOT / "tests/README.md",
    ]
    if page.name != "CHANGELOG.md"  # tells of what was
)
# What looks like a name of ours: CamelCase, or words with underscores.
OURS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]*)+|[A-Za-z]\w*_\w+")


def prose(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Every word of what is written in a language for machines."""
    kinds = {".py", ".proto", ".toml", ".yaml"}
    files = [
        f for d in ("dlm", "loadtest", "tests", "proto", "deploy") for f in (ROOT / d).rglob("*")
    ]
    texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in kinds]
    return {word for text in texts for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    """The walk through the code, and the tables of the files of each part, lead to what is there;
    and so do links."""
    text, folder = prose(page), (ROOT / page).parent
    for path in re.findall(r"`([\w./-]+(?:\.(?:py|md|proto)|/))`", text):
        places = [ROOT / path, ROOT / "dlm" / path, folder / path]
        assert any(place.exists() for place in places), f"{page} names {path}"
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in link or (folder / link).exists(), f"{page} links to {link}"


@pytest.mark.parametrize(
    "folder", sorted(p.parent.name for p in (ROOT / "dlm").glob("*/__init__.py"))
)
def test_the_page_of_a_folder_names_all_of_its_files(folder: str) -> None:
    """A file of the folder by its name; those of a folder below at least by that folder's."""
    here = ROOT / "dlm" / folder
    page = "".join(path.read_text(encoding="utf-8") for path in here.glob("README*.md"))
    wanted = {path.name for path in here.glob("*.py")} - {"__init__.py"}
    wanted |= {f"{path.parent.name}/" for path in here.glob("*/__init__.py")}
    named = re.findall(r"`([\w/.*]+)`", page)
    named += [name[: name.index("/") + 1] for name in named if "/" in name]
    assert not wanted - set(named), folder


def test_the_pages_of_loadtest_name_all_of_its_files() -> None:
    """How it works, file by file."""
    here = ROOT / "loadtest"
    named = re.findall(r"`([\w/.*]+)`", (here / "DESIGN.md").read_text(encoding="utf-8"))
    assert {path.name for path in here.glob("*.py")} - {"__init__.py", "__main__.py"} <= set(named)


@pytest.mark.parametrize("page", PAGES)
def test_every_name_that_a_page_has_as_code_exists(page: str, words: set[str]) -> None:
    """Classes, functions, settings and metrics; beside a file (`a.py`, `name`) one in that file."""
    text, folder = prose(page), (ROOT / page).parent
    for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*?\))?`", text):
        parts = {part for part in name.split(".") if OURS.fullmatch(part)}
        assert parts <= words, f"{page} names {name}"
    for path, name in re.findall(r"`([\w/]+\.py)`[,:] `(\w+)`", text):
        found = [p for p in (ROOT / path, ROOT / "dlm" / path, folder / path) if p.exists()]
        assert name in found[0].read_text(encoding="utf-8"), f"{page}: no {name} in {path}"


@pytest.mark.parametrize("page", ["README.md", "dlm/client/README.md"])
def test_the_python_of_the_page_runs(tmp_path: Path, page: str) -> None:
    """As written, beside a cluster.toml and the shards."""
    words = ["the", "a", "there", "man", "is", "went", "to", "house", "<s>", "</s>", "<unk>"]
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {(w,): (-1.0, -0.5) for w in words}
    ngrams |= {("<s>", "the"): (-0.5, -0.25), ("<s>", "the", "man"): (-0.25, None)}
    PlainModel(3, ngrams).write(tmp_path / "model.arpa")
    manifest = build_shard_set(tmp_path / "model.arpa", tmp_path / "shards/model", 2)
    build_shard_set(tmp_path / "model.arpa", tmp_path / "shards/small", 1)
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    with running_servers([tmp_path / "shards/model"]) as servers:
        write_cluster_file(
            tmp_path / "cluster.toml", [s.endpoint for s in servers], shard_set=manifest.shard_set
        )
        code = code.replace("deadline_s=0.5", "deadline_s=60")
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    assert ("Stats(queries=" if page == "README.md" else "State(family=") in done.stdout
