"""A command's parameters become options: a dataclass becomes several, and values are checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from dlm.cli.checks import READ, WRITE, within
from dlm.cli.options import Options, spread
from dlm.config import about, check, setting
from dlm.errors import ConfigError


@dataclass(frozen=True)
class Example:
    """Settings: one is required."""

    size: int = field(metadata=about("How many.", low=1))
    word: str = setting("a", "Which.", short="-w")
    limit: float | None = setting(None, "Limit.", name="most")
    is_open: bool = setting(False, "Open.")

    def __post_init__(self) -> None:
        check("example", self)


def invoke(command: Any, *arguments: object) -> str:
    """What a command prints; its error is raised."""
    app = typer.Typer()
    app.command()(spread(command))
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def whole(
    place: Annotated[str, typer.Option()] = "here",
    *,
    example: Annotated[Example, Options()],
    last: Annotated[str, typer.Option()],
) -> None:
    print(place, example, last)


def test_a_dataclass_comes_back_whole_from_the_options_of_its_fields() -> None:
    """Required options stand first in the help, the others in the order of the parameters."""
    given = ("--size", 2, "-w", "b", "--most", 0.5, "--is-open", "--last", "z")
    assert invoke(whole, *given).split(" ", 1) == ["here", f"{Example(2, 'b', 0.5, True)} z\n"]
    assert invoke(whole, "--size", 2, "--last", "z") == f"here {Example(2)} z\n"
    shown = re.findall(r"(--[a-z-]+)", invoke(whole, "--help"))
    assert shown[:6] == ["--size", "--last", "--place", "--word", "--most", "--is-open"]
    assert "--size" in invoke(whole, "--last", "z")  # it is missing
    with pytest.raises(ConfigError, match=r"^--size is 0; expected 1 or more"):
        invoke(whole, "--size", 0, "--last", "z")


def test_a_command_may_take_some_fields_require_one_or_take_what_is_given_as_a_dict() -> None:
    """A dict has None for what is not given: a file may say it."""

    def some(example: Annotated[Example, Options("size limit", required="limit")]) -> None:
        print(example)

    def given(example: Annotated[dict[str, Any], Options("limit size", of=Example)]) -> None:
        print(example)

    assert "--most" in invoke(some, "--size", 2)
    assert invoke(some, "--size", 2, "--most", 1) == f"{Example(2, limit=1.0)}\n"
    assert "--word" not in invoke(some, "--help")
    assert invoke(given, "--size", 2) == "{'limit': None, 'size': 2}\n"


def checked(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT..."), READ],
    new: Annotated[Path | None, typer.Option("--output", "-o"), WRITE] = None,
    share: Annotated[float | None, typer.Option(), within(above=0)] = None,
) -> None:
    print(len(texts), new, share)


def test_values_are_checked_before_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the argument or option; no file is written that is read."""
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    assert invoke(checked, "a", "-o", "new/b") == "1 new/b None\n"
    for given, said in (
        (("a", "gone"), "TEXT: no such file or folder: gone"),
        (("a", "-o", "a"), "--output: a is an input of this command"),
        (("a", "--share", "0"), "--share is 0; expected above 0"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
            invoke(checked, *given)
