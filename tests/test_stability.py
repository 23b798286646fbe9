"""Public names stay: those of `golden/names.txt`, each with the class that the reference shows.

`DLM_REWRITE_NAMES=1 pytest tests/test_stability.py` adds new ones to the file.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

import dlm.client
from dlm.cli import main, reference
from loadtest.cli.main import app as loadtest
from test_site import module

GOLDEN = Path(__file__).parent / "golden/names.txt"
MODULES = ("dlm.client", *module("reference").MODULES)  # of the site
MISSING = {"dlm.asr.decoders.flashlight"} if find_spec("flashlight") is None else set()


def of_command(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """A command with its options, and those below it."""
    yield "command", name
    for one in command.params:
        words = one.opts + one.secondary_opts if one.param_type_name == "option" else [one.name]
        yield from (("command", f"{name} {word}") for word in words if word != "--help")
    for child, below in getattr(command, "commands", {}).items():
        yield from of_command(f"{name} {child}", below)


def of_python(name: str, found: Any) -> Iterator[tuple[str, str]]:
    """An object with its parameters, and its public members; without the parameters of a class
    whose objects are made by others, or by its own `open` or the like."""
    yield "python", name
    kinds = [one for one in getattr(found, "__mro__", ()) if one.__module__.startswith("dlm.")]
    members = {member: one for kind in kinds for member, one in vars(kind).items()}
    given = name.startswith("dlm.client.") and not name.endswith(("Config", "Phrases"))
    if not given and not any(isinstance(one, classmethod) for one in members.values()):
        yield from (("python", f"{name}({one})") for one in parameters(found))
    for member in members:
        if not member.startswith("_"):
            yield "python", f"{name}.{member}"
            called = getattr(found, member)
            if inspect.isfunction(called) or inspect.ismethod(called):
                yield from (("python", f"{name}.{member}({one})") for one in parameters(called))


def parameters(called: Any) -> list[str]:
    """The names that a caller may use."""
    names = inspect.signature(called).parameters if callable(called) else ()
    return [name for name in names if name != "self" and not name.startswith("_")]


def public() -> Iterator[tuple[str, str]]:
    """(kind, name) of all that users see and this environment has the packages for."""
    yield from of_command("dlm", typer.main.get_command(main.program()))
    yield from of_command("python -m loadtest", typer.main.get_command(loadtest))
    for topic, found, heading, entry in reference.entries():
        yield found.kind, f"{topic}.{heading}.{entry.name}"
        if found.kind in ("event", "metric") and entry.facts[0]:
            yield from (
                (found.kind, f"{topic}.{heading}.{entry.name}({one})")
                for one in entry.facts[0].split(", ")
            )
    yield from of_python("dlm.LocalModel", dlm.LocalModel)
    for place in sorted({*MODULES} - MISSING):
        for name in pkgutil.resolve_name(place).__all__:
            yield from of_python(f"{place}.{name}", pkgutil.resolve_name(f"{place}:{name}"))


@pytest.fixture(scope="module")
def now() -> set[str]:
    """Lines as in the file."""
    return {f"{reference.stability(kind, name)} {kind} {name}" for kind, name in public()}


def promised(lines: set[str]) -> set[str]:
    """Those that are not experimental."""
    return {line for line in lines if not line.startswith("experimental ")}


@pytest.fixture(scope="module")
def golden(now: set[str]) -> set[str]:
    """Those kept, of what this environment has the packages for."""
    kept = set(GOLDEN.read_text(encoding="utf-8").splitlines())
    if os.environ.get("DLM_REWRITE_NAMES"):
        kept |= promised(now)
        GOLDEN.write_text("".join(f"{line}\n" for line in sorted(kept)), encoding="utf-8")
    topics = {topic for topic, *_ in reference.entries()}
    missing = [f" setting {one}." for one in reference.SETTINGS if one not in topics]
    missing += [f" python {place}." for place in MISSING]
    return {line for line in kept if not any(one in line for one in missing)}


def test_what_was_promised_is_still_there(now: set[str], golden: set[str]) -> None:
    """With its class."""
    assert not golden - now, "restore these, or keep them with a warning for one minor version"


def test_what_is_new_is_written_down(now: set[str], golden: set[str]) -> None:
    """So that the next version keeps it."""
    assert not promised(now) - golden, "run DLM_REWRITE_NAMES=1 pytest tests/test_stability.py"


def test_what_is_called_experimental_exists(now: set[str]) -> None:
    """The list has no name that is gone."""
    pytest.importorskip("jax", reason="needs the extra train, for its settings")
    for kind, starts in reference.EXPERIMENTAL.items():
        for start in starts:
            assert any(line.startswith(f"experimental {kind} {start}") for line in now), start
