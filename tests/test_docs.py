"""The README says what is true: its commands exist, its code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import forked
from dlm.cli.main import app
from dlm.client.cluster_file import write_cluster_file
from dlm.cluster.processes import running_servers
from dlm.index.making import build_shard_set
from models import PlainModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The pages for users: each begins where its reader begins.
USER_PAGES = [
    "README.md",
    *(f"deploy/{page}.md" for page in ("README", "hosts", "kubernetes", "security")),
    "dlm/asr/DECODERS.md",
    "dlm/asr/README.md",
    "dlm/asr/SPEECH.md",
    "dlm/client/README.md",
    "dlm/distill/README.md",
    "dlm/estimate/README.md",
    "dlm/federated/README.md",
    "dlm/federated/devices/README.md",
    "dlm/gateway/README.md",
    "dlm/index/README.md",
    "dlm/pipeline/README.md",
    "dlm/spark/README.md",
]
GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands  # type: ignore[attr-defined]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_readme_has_at_most_650_words() -> None:
    """It is the front door; what is longer has a page."""
    assert len(README.split()) <= 650


def test_every_command_stands_on_a_page_for_users() -> None:
    """A command nobody is told of is a command nobody uses."""
    pages = "".join(read(page) for page in USER_PAGES)
    for name in COMMANDS:
        assert re.search(rf"\bdlm {name}\b", pages), name


@pytest.mark.parametrize("page", USER_PAGES)
def test_every_option_that_a_page_uses_exists(page: str) -> None:
    """Each `dlm NAME --option` of the page, with the options of that command."""
    for line in re.findall(r"^\$ (?:.*\| )?(dlm .*)$", read(page), re.MULTILINE):
        name, *rest = line.split("#")[0].split()[1:]
        command = COMMANDS[name]
        while inner := getattr(command, "commands", None):  # a group: `dlm privacy account ...`
            command = inner[rest.pop(0)]
        options = {o for p in command.params for o in p.opts}
        used = {word for word in rest if word.startswith("--")}
        assert used <= options, line


# Commands of the pages that this test does not run, by what stands in them, and why.
ELSEWHERE = {
    "cluster": "runs until Ctrl-C; see the test of the page's Python",
    "--model": "needs servers",
    "runs/first": "reads the reader's own users",
    "pipeline": "the same",
    "spark": "needs Java",
}


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a page's consoles, with the lines that stand below it."""
    for block in re.findall(r"```console\n(.*?)```", read(page), re.S):
        for line, below in re.findall(r"^\$ (.*\n)((?:[^$].*\n)*)", block, re.M):
            yield line, below.splitlines()


def runs_and_prints(line: str, below: list[str], folder: Path) -> None:
    """A command in a folder with dlm/data; lines of time and left out lines may differ.

    `dlm score` asks the shards without servers: the same bits, and no port to find.
    """
    line = line.replace("| dlm score ", "| dlm score --local shards/model ")
    command = folder / "bin/dlm"
    if not command.exists():
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m dlm "$@"\n')
        command.chmod(0o755)
        (folder / "dlm").mkdir()
        (folder / "dlm/data").symlink_to(ROOT / "dlm/data")
    environ = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = subprocess.run(line, shell=True, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, line + done.stderr
    printed = done.stdout.splitlines()
    for expected in below:
        if expected != "..." and not expected.startswith("["):
            assert expected in printed, line + done.stdout


@pytest.mark.parametrize(
    ("page", "at_least"),
    [
        ("README.md", 1),
        pytest.param("dlm/estimate/README.md", 8, marks=pytest.mark.slow),
        pytest.param("dlm/index/README.md", 4, marks=pytest.mark.slow),
        pytest.param("dlm/kenlm/QUESTIONS.md", 13, marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_a_page_run_in_their_order_and_print_what_stands_below(
    tmp_path: Path, page: str, at_least: int
) -> None:
    """All that need no servers and none of the reader's files."""
    ran = [
        runs_and_prints(line, below, tmp_path)
        for line, below in commands(page)
        if not any(mark in line for mark in ELSEWHERE)
    ]
    assert len(ran) >= at_least


def test_the_privacy_accounts_of_the_page_are_what_the_commands_print(tmp_path: Path) -> None:
    """Those that read no run."""
    pytest.importorskip("jax", reason="needs the extra train")
    ran = [
        runs_and_prints(line, below, tmp_path)
        for line, below in commands("dlm/federated/README.md")
        if re.search("privacy (account|plan)", line)
    ]
    assert len(ran) == 2


@pytest.mark.slow
def test_the_training_on_the_page_runs_from_nothing(tmp_path: Path) -> None:
    """Its users, settings and commands, from the counts to the evaluation."""
    pytest.importorskip("jax", reason="needs the extra train")
    text = read("dlm/federated/README.md")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    (tmp_path / "run.toml").write_text(block, encoding="utf-8")
    ran = [
        runs_and_prints(line, [], tmp_path)  # noise is new each time: no output to compare
        for line, _ in commands("dlm/federated/README.md")
        if " privacy " not in line
    ]
    assert len(ran) == 10
    assert (tmp_path / "private.arpa").exists()


def test_the_two_commands_stand_below_their_names() -> None:
    """What .ci/run takes from the README: one line each."""
    (demo,) = re.findall(r"<!-- run: demo -->\n```sh\n(.*)\n```", README)
    (tests,) = re.findall(r"<!-- run: tests -->\n```sh\n(.*)\n```", README)
    assert demo.endswith("dlm demo")
    assert " -m pytest" in tests


def test_one_line_says_which_extras_turn_skipped_tests_on() -> None:
    """All but those that the test command itself installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"test", "stores", "trace"}
    lines = read("tests/README.md").splitlines()
    (line,) = [line for line in lines if line.startswith("Extras turn them on")]
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
    """The walk through the code, and the pages of the parts, lead to files."""
    text, folder = prose(page), (ROOT / page).parent
    for path in re.findall(r"`([\w./-]+(?:\.(?:py|md|proto)|/))`", text):
        places = [ROOT / path, ROOT / "dlm" / path, folder / path]
        assert any(place.exists() for place in places), f"{page} names {path}"


def test_every_file_says_what_it_does() -> None:
    """In its first lines: pages do not list the files."""
    files = [f for d in ("dlm", "loadtest") for f in (ROOT / d).rglob("*.py")]
    texts = {f: f.read_text(encoding="utf-8") for f in files if "_pb" not in f.parts}
    assert [f for f, text in texts.items() if text and not text.startswith('"""')] == []


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


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("README.md", "-"),
        pytest.param("dlm/asr/README.md", "the old man", marks=pytest.mark.slow),
        pytest.param("dlm/client/README.md", "Stats(queries=", marks=pytest.mark.slow),
        pytest.param("dlm/index/README.md", "[", marks=pytest.mark.slow),
    ],
)
def test_the_python_of_the_page_runs(
    tmp_path: Path, page: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As written, in a checkout, beside a cluster.toml and the shards."""
    monkeypatch.setattr("dlm.cluster.processes._start", forked.serve)
    words = ["the", "a", "there", "man", "is", "went", "to", "house", "<s>", "</s>", "<unk>"]
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {(w,): (-1.0, -0.5) for w in words}
    ngrams |= {("<s>", "the"): (-0.5, -0.25), ("<s>", "the", "man"): (-0.25, None)}
    PlainModel(3, ngrams).write(tmp_path / "model.arpa")
    build_shard_set(tmp_path / "model.arpa", tmp_path / "shards/model", 2)
    build_shard_set(tmp_path / "model.arpa", tmp_path / "shards/small", 1)
    (tmp_path / "dlm").mkdir()
    (tmp_path / "dlm/data").symlink_to(ROOT / "dlm/data")
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    with running_servers([tmp_path / "shards/model"]) as servers:
        write_cluster_file(tmp_path / "cluster.toml", [s.endpoint for s in servers])
        code = code.replace("deadline_s=0.5", "deadline_s=60")
        done = forked.script(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert all(b in done.stdout for b in re.findall(r"\nIt prints:\n+```\n(.*?)```", text, re.S))
