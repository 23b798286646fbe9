"""What a newcomer sees first: help, examples, completion, the version, `dlm` alone."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import dlm
from cluster import WAIT_S
from dlm.cli.main import COMMANDS, FIRST_STEPS, HEADINGS, app

ROOT = Path(__file__).resolve().parents[2]
ROOT_COMMAND: Any = typer.main.get_command(app)


def all_commands(group: Any = ROOT_COMMAND, name: str = "dlm") -> Iterator[tuple[str, Any]]:
    """Every command by its full name: `dlm score`, `dlm privacy plan`; groups too."""
    yield name, group
    for child, command in getattr(group, "commands", {}).items():
        yield from all_commands(command, f"{name} {child}")


NAMED: Mapping[str, Any] = dict(all_commands())


def examples(name: str) -> list[str]:
    """The examples of a command, each on one line."""
    text = (NAMED[name].epilog or "").replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines()]


def dlm_words(line: str) -> list[str]:
    """The words of the `dlm` command in an example, after pipes and before redirections."""
    words = shlex.split(line)
    start = words.index("dlm")
    rest = words[start:]
    ends = [i for i, word in enumerate(rest) if word in ("|", ">", "<")]
    return rest[: min(ends, default=len(rest))]


def shown(*arguments: str) -> str:
    """Help in a terminal of 80 columns, of which click leaves two free."""
    done = CliRunner().invoke(app, [*arguments, "--help"], terminal_width=78, prog_name="dlm")
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("group", [name for name in NAMED if hasattr(NAMED[name], "commands")])
def test_commands_stand_under_headings_in_whole_sentences_at_eighty_columns(group: str) -> None:
    """Every command once, with what it does; nothing is cut."""
    text = shown(*group.split()[1:])
    sections = re.findall(r"^(\S[^\n]*):\n((?:  .*\n)+)", text, re.M)
    rows: dict[str, str] = {}
    for heading, body in sections:
        if heading not in ("Usage", "Options", "Examples"):
            for row in body.splitlines():
                name = row.split()[0]
                assert name not in rows, name
                rows[name] = row
    assert rows.keys() == NAMED[group].commands.keys()
    for row in rows.values():
        assert row.endswith(".") and "..." not in row and len(row) <= 80, row


def test_each_heading_begins_at_a_command() -> None:
    """The first command has one, so that none is without."""
    assert HEADINGS.keys() <= COMMANDS.keys()
    assert next(iter(COMMANDS)) in HEADINGS


@pytest.mark.parametrize("name", sorted(NAMED))
def test_help_ends_with_examples_whose_options_exist(name: str) -> None:
    """Each is parsed as the command line parses it: options, types, what is required."""
    text = shown(*name.split()[1:])
    listed = examples(name)
    assert listed, name
    assert text.rstrip().endswith(NAMED[name].epilog.splitlines()[-1].strip())
    assert all(len(line) <= 80 for line in text.splitlines())
    for line in listed:
        words = dlm_words(line)
        command, parent, words = ROOT_COMMAND, None, words[1:]
        path = "dlm"
        while hasattr(command, "commands"):
            parent = command.make_context(path, [], parent=parent, resilient_parsing=True)
            command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]
        if not hasattr(NAMED[name], "commands"):
            assert path == name, line
        command.make_context(path, list(words), parent=parent)


def run_here(
    words: list[str], folder: Path, environ: Mapping[str, str], **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `dlm` with these words."""
    return subprocess.run(
        [sys.executable, "-m", "dlm", *words],
        cwd=folder,
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        **more,
    )


def test_dlm_alone_says_what_to_do_first(tmp_path: Path, environ: dict[str, str]) -> None:
    """What it is, and three lines; status 0, and nothing else is imported for it."""
    done = run_here([], tmp_path, environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, FIRST_STEPS + "\n", "")
    assert len(FIRST_STEPS.split("\n\n")[1].splitlines()) == 3
    group = run_here(["privacy"], tmp_path, environ)
    assert (group.returncode, group.stderr) == (0, "")
    assert group.stdout.startswith("Usage: ")


def test_the_version_is_printed() -> None:
    """As `dlm NUMBER`, for scripts that report it."""
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"dlm {dlm.__version__}\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dlm privacy account --mech", ["--mechanism"]),
        ("dlm p", ["push", "perplexity", "prune", "pipeline", "pieces", "privacy"]),
    ],
)
def test_a_shell_is_told_how_a_line_goes_on(
    environ: dict[str, str], line: str, expected: list[str]
) -> None:
    """As the script of `dlm --show-completion bash` asks."""
    asked = {"_DLM_COMPLETE": "complete_bash", "COMP_WORDS": line}
    place = str(len(line.split()) - 1)
    command = "import sys; sys.argv = ['dlm']; from dlm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**environ, **asked, "COMP_CWORD": place},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stdout.split() == expected, done.stderr


def test_the_script_for_a_shell_is_printed(tmp_path: Path, environ: dict[str, str]) -> None:
    """That of bash here; which shell is the caller's, nobody can know in a test."""
    named = {**environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = run_here(["--show-completion", "bash"], tmp_path, named)
    assert script.returncode == 0, script.stderr
    assert "_DLM_COMPLETE=complete_bash" in script.stdout


@pytest.mark.promise("json")
def test_json_is_everywhere_where_facts_are_printed() -> None:
    """One option with one name; the commands without it print none."""
    lacking = {
        name
        for name, command in NAMED.items()
        if not hasattr(command, "commands")
        and not any("--json" in getattr(one, "opts", ()) for one in command.params)
    }
    assert lacking == {
        "dlm devices device",  # prints nothing
        "dlm devices register",  # prints a line of a file
        "dlm export",  # writes an ARPA file
        "dlm gateway",  # its logs are JSON
        "dlm serve",  # its logs are JSON
    }


# Metavars that differ in words alone.
KINDS = {
    **dict.fromkeys(("FILE", "DIR", "OUT", "PATH", "TEXT", "path"), "path"),
    **dict.fromkeys(("N", "K", "COUNTS", "ROUND", "int", "int range"), "number"),
}


def test_one_thing_has_one_name_in_all_commands() -> None:
    """The same option takes the same kind of value in every command."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for name, command in NAMED.items():
        for one in command.params:
            kind = str(one.metavar or one.type.name).replace("integer", "int")  # as typer 0.26
            for option in one.opts:
                if option.startswith("--"):
                    found = kinds.setdefault(option, {})
                    found.setdefault(KINDS.get(kind, kind), []).append(name)
    assert {option: found for option, found in kinds.items() if len(found) > 1} == {}
