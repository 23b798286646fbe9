"""What stands in deploy/: its files, the commands they quote, and what the code says to both."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import typer
import yaml

from dlm.cli.main import app
from dlm.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

SETTINGS = frozenset(f.name for f in fields(ServerConfig))


@dataclass(frozen=True)
class Quoted:
    """A command line of dlm, and where it stands."""

    place: str
    words: tuple[str, ...]  # "dlm" first


def load(name: str) -> Any:
    """A YAML file of deploy/ with one document."""
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def texts() -> dict[str, str]:
    """Every file of deploy/, by its path there."""
    return {
        str(path.relative_to(DEPLOY)): path.read_text(encoding="utf-8")
        for path in sorted(DEPLOY.rglob("*"))
        if path.is_file()
    }


def shell_lines(text: str) -> list[str]:
    """Commands of a page: lines after `$ ` in its blocks, and code in its sentences.

    A command that a sentence merely names (`dlm verify`) stands there as its help.
    """
    blocks = re.findall(r"```console\n(.*?)```", text, re.S)
    lines = re.findall(r"^ *\$ (.*)$", "\n".join(blocks), re.M)
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    named = re.findall(r"`([^`\n]+)`", outside)
    return lines + [re.sub(r"^(dlm \w+)$", r"\1 --help", code) for code in named]


def commands_of_dlm(line: str) -> list[tuple[str, ...]]:
    """The command lines of dlm in a line of shell; redirections are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found = []
    for is_operator, part in groupby(lexer, key=lambda word: word[0] in "|&;"):
        words = [] if is_operator else list(takewhile(lambda word: word[0] not in "<>", part))
        if words and re.fullmatch(r"(\S+/bin/)?dlm", words[0]) and len(words) > 1:
            found.append(("dlm", *words[1:]))
    return found


def quoted() -> list[Quoted]:
    """Every command line of dlm that deploy/ has."""
    out = []
    for name, text in texts().items():
        lines: list[str] = []
        if name.endswith(".md"):
            lines = shell_lines(text)
        elif name.startswith("container/"):
            lines = text.split("\n")
        elif name.endswith((".service", ".yaml", ".env")):
            lines = re.findall(r"^ExecStart=(.*)$", text, re.M)
            # Of comments, what stands in backquotes and what is set off as a block.
            lines += re.findall(r"^\s*#.*?`(dlm [^`]+)`", text, re.M)
            lines += re.findall(r"^#   (.*)$", text, re.M)
        out += [Quoted(name, words) for line in lines for words in commands_of_dlm(line)]
    for name, service in load("compose.yaml")["services"].items():
        command = service.get("command", [])
        if command[:1] == ["dlm"]:
            out.append(Quoted(f"compose.yaml, {name}", tuple(command)))
    shown = re.findall(r"^CMD (\[.*\])$", texts()["Containerfile"], re.M)
    out += [Quoted("Containerfile", tuple(yaml.safe_load(line))) for line in shown]
    return out


def fault_of(words: tuple[str, ...]) -> str | None:
    """What is wrong with a command line of dlm, by the parser of the real command."""
    _, name, *rest = words
    if name.startswith("--"):
        return None if [name, *rest] == ["--version"] else f"dlm has no option {name}"
    if name not in COMMANDS:
        return f"there is no dlm {name}"
    command = COMMANDS[name]
    if rest == ["--help"]:
        return None
    kept = [re.sub(r"%i|\$\w+|\$\{\w+\}", "0", word) for word in rest]
    try:
        command.make_context(name, kept)
    except Exception as exc:  # noqa: BLE001 - whatever the parser says is the answer
        return f"{' '.join(words)}: {getattr(exc, 'message', exc)}"
    return None
