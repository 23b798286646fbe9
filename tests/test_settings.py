"""Settings are said once: the check, the option and the file follow from the fields."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import typer

from dlm.cli.options import option
from dlm.config import about, check, resolve, setting
from dlm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Example:
    """One setting of each kind."""

    path: Path = field(metadata=about("Where it is."))
    count: int = setting(3, "How many.", low=1, high=65_536, unit="threads", name="n_count")
    share: float = setting(0.5, "How much.", above=0, below=1)
    least: float = setting(0.0, "At least.", low=0)
    bound: float = setting(1.0, "At most.", above=0, high=math.inf)
    limit: int | None = setting(None, "Limit.", low=1)
    kind: Literal["one", "two", "three"] = setting("one", "Which.")
    word: str = setting("a", "Which.", one_of=("a", "b"), metavar="W", short="-w")

    def __post_init__(self) -> None:
        check("example", self)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": 0}, "example.n_count is 0; expected 1 to 65,536 threads"),
        ({"count": 65_537}, "expected 1 to 65,536 threads"),
        ({"count": 1.5}, "example.n_count is 1.5; expected an integer"),
        ({"count": None}, "example.n_count is None; expected an integer"),
        ({"share": 0.0}, "expected above 0 and below 1"),
        ({"share": 1.0}, "expected above 0 and below 1"),
        ({"share": "0.5"}, "example.share is '0.5'; expected a number"),
        ({"bound": True}, "example.bound is True; expected a number"),
        ({"least": math.inf}, "expected 0 or more"),
        ({"least": math.nan}, "expected 0 or more"),
        ({"bound": 0.0}, "expected above 0"),
        ({"limit": 0}, "expected 1 or more"),
        ({"kind": "four"}, "example.kind is 'four'; expected one, two or three"),
        ({"word": "c"}, "expected a or b"),
    ],
)
def test_a_value_out_of_bounds_is_refused(values: dict[str, Any], said: str) -> None:
    """With its place, itself and what was expected; the field before it is good."""
    with pytest.raises(ConfigError) as caught:
        Example(Path(), **values)
    assert said in str(caught.value)


def test_the_bounds_themselves_are_allowed() -> None:
    """Low and high, infinity where it is the bound, None where the type has it."""
    for values in ({"count": 1}, {"count": 65_536}, {"bound": math.inf}, {"limit": None}):
        Example(Path(), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, r"\[example\] lacks path"),
        ({"path": "x", "count": 2}, r"a setting named count \(did you mean n_count\?\)"),
        ({"path": "x", "n_count": 0}, "example.n_count is 0"),
        ({"path": "x", "n_count": True}, "example.n_count is True; expected an integer"),
    ],
)
def test_a_faulty_table_is_refused(found: dict[str, Any], said: str) -> None:
    """By the names that the file uses."""
    with pytest.raises(ConfigError, match=said):
        resolve(Example, "example", found={"example": found}, environ={})
    with pytest.raises(ConfigError, match="expected a table"):
        resolve(Example, "example", found={"example": 1}, environ={})


def test_flags_override_the_environment_and_that_the_file() -> None:
    """Each source has its names: fields, DLM_EXAMPLE_NAME, names of the file."""
    sources: dict[str, Any] = {
        "flags": {"least": 3.0, "count": None},
        "environ": {"DLM_EXAMPLE_LEAST": "2", "DLM_EXAMPLE_N_COUNT": "7"},
        "found": {"example": {"path": "x", "n_count": 8, "least": 1, "share": 0.25}},
    }
    made = resolve(Example, "example", **sources)
    assert made == Example(Path("x"), 7, 0.25, 3.0)
    assert dataclasses.replace(made, share=0.5).share == 0.5


@pytest.mark.parametrize(
    ("name", "flags", "metavar", "text"),
    [
        ("count", ("--n-count",), None, "How many.  [1 to 65,536 threads; default: 3]"),
        ("path", ("--path",), None, "Where it is."),
        ("word", ("--word", "-w"), "W", "Which.  [a or b; default: a]"),
    ],
)
def test_an_option_has_the_names_and_the_help_of_its_field(
    name: str, flags: tuple[str, ...], metavar: str | None, text: str
) -> None:
    """And its bounds and default."""
    made: Any = option(Example, name)
    assert isinstance(made, typer.models.OptionInfo)
    assert (made.default, *made.param_decls) == flags
    assert (made.metavar, made.help) == (metavar, text)


# The files of settings that commands import for their help.
LIGHT = [
    "dlm.asr.settings",
    "dlm.client.config",
    "dlm.distill.settings",
    "dlm.estimate.goal",
    "dlm.estimate.settings",
    "dlm.federated.pieces.settings",
    "dlm.federated.counting.settings",
    "dlm.index.settings",
    "dlm.pipeline.tables",
    "dlm.server.config",
]


def test_files_of_settings_import_only_the_standard_library() -> None:
    """And, of dlm, the errors, units and other such files: help starts with them."""

    def modules(*imported: str) -> list[str]:
        code = f"import {', '.join((*imported, 'sys'))}; print(*sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        return done.stdout.split()

    loaded = modules(*LIGHT)
    own = {name for name in loaded if name.partition(".")[0] == "dlm"}
    packages = {".".join(one.split(".")[:i]) for one in LIGHT for i in range(1, one.count(".") + 1)}
    beside = {"dlm.client.config", "dlm.wire", "dlm.wire.secret"}
    light = {"dlm.errors", "dlm.units", "dlm.config", "dlm.resources", *packages, *LIGHT}
    assert own <= light | beside
    # The environment's own start may import more, such as finders of editable packages.
    others = {name.partition(".")[0] for name in loaded} - {*sys.stdlib_module_names, "dlm"}
    assert others <= {name.partition(".")[0] for name in modules()}
