"""Each room of the code stays below its ceiling of weight.toml.

`python tests/test_weight.py` prints the table, and what no command and no public name reaches.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from parsed import tree_of

ROOT = Path(__file__).parents[1]
CEILINGS = tomllib.loads((ROOT / "tests/weight.toml").read_text(encoding="utf-8"))
LONG = 60  # statements; a function above is hard to follow
SLACK = 30  # statements that a room may lie below its ceiling; more goes to the bank
OTHER_CODE = {".css", ".html", ".js", ".sh", ".toml"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Weight:
    """Of one room, or of all."""

    statements: int = 0  # of Python, without docstrings
    expressions: int = 0  # nodes of expressions, without docstrings
    docstring_lines: int = 0
    other_lines: int = 0  # of code that is no Python: templates, TOML, scripts
    functions: list[tuple[int, str]] = field(default_factory=list)  # (statements, where)

    def __add__(self, other: Weight) -> Weight:
        return Weight(
            self.statements + other.statements,
            self.expressions + other.expressions,
            self.docstring_lines + other.docstring_lines,
            self.other_lines + other.other_lines,
            self.functions + other.functions,
        )


def docstring_of(node: ast.AST) -> ast.Expr | None:
    """The statement that is the docstring of a module, class or function."""
    if isinstance(node, Definition | ast.Module) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return first if isinstance(first.value.value, str) else None
    return None


def weigh_below(node: ast.AST, name: str, found: Weight) -> int:
    """Adds what is below a node to `found`; returns the number of its statements."""
    left_out, count = docstring_of(node), 0
    if left_out is not None:
        found.docstring_lines += (left_out.end_lineno or 0) - left_out.lineno + 1
    for child in ast.iter_child_nodes(node):
        if child is not left_out:
            count += weigh_below(child, name, found) + isinstance(child, ast.stmt)
            found.expressions += isinstance(child, ast.expr)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        found.functions.append((count, f"{name}:{node.lineno} {node.name}"))
    return count


def weight_of(tree: ast.Module, name: str) -> Weight:
    """Of one file; `name` says in which file its functions are."""
    found = Weight()
    found.statements = weigh_below(tree, name, found)
    return found


def files_of(places: list[str]) -> Iterator[Path]:
    """Those of a room: a folder stands for all below it, but dlm for its own files."""
    for place in places:
        path = ROOT / place
        found = path.iterdir() if place == "dlm" else path.rglob("*")
        yield from (file for file in found if file.is_file() and "_pb" not in file.parts)


def weigh(places: list[str]) -> Weight:
    """A room."""
    found = Weight()
    for file in files_of(places):
        if file.suffix == ".py":
            found += weight_of(tree_of(file), str(file.relative_to(ROOT)))
        elif file.suffix in OTHER_CODE:
            found.other_lines += len(file.read_text(encoding="utf-8").splitlines())
    return found


def lines_of_tests() -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("tests/**/*.py")
    )


def words_of_pages() -> int:
    """Of all pages for users and of how it works; those of packages installed here are none."""
    tops = ("dlm", "proto", "shards", "deploy", "loadtest", "tests", ".github")
    pages = [*ROOT.glob("*.md"), *(page for top in tops for page in (ROOT / top).rglob("*.md"))]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


@cache
def all_rooms() -> dict[str, Weight]:
    return {name: weigh(room["of"]) for name, room in CEILINGS["rooms"].items()}


def longest(weight: Weight) -> str:
    """The three largest functions."""
    return ", ".join(f"{name} ({count})" for count, name in sorted(weight.functions)[:-4:-1])


@pytest.mark.parametrize("name", CEILINGS["rooms"])
def test_a_room_stays_below_its_ceiling(name: str) -> None:
    """What it saves goes to the bank, so that the ceiling comes down with it."""
    room = CEILINGS["rooms"][name]
    found, ceiling = all_rooms()[name], room["statements"]
    assert found.statements <= ceiling, (
        f"{name} has {found.statements} statements, {found.statements - ceiling} above its "
        f"ceiling; its largest functions are {longest(found)}"
    )
    assert ceiling <= found.statements + SLACK, (
        f"lower the ceiling of {name} to {found.statements} in tests/weight.toml"
    )


def test_every_file_has_one_room() -> None:
    """And the ceilings with the bank stay below the ceiling of all."""
    files = [file for room in CEILINGS["rooms"].values() for file in files_of(room["of"])]
    every = [file for top in ("dlm", "loadtest") for file in (ROOT / top).rglob("*.py")]
    assert sorted(file for file in files if file.suffix == ".py") == sorted(
        file for file in every if "_pb" not in file.parts
    )
    rooms = sum(room["statements"] for room in CEILINGS["rooms"].values())
    assert rooms + sum(CEILINGS["bank"].values()) <= CEILINGS["all"]["statements"]


def test_fewer_statements_are_not_denser_ones() -> None:
    """Nor are they longer functions, or moved into templates, docstrings, tests and pages."""
    found, ceilings = sum(all_rooms().values(), Weight()), CEILINGS["all"]
    assert found.expressions / found.statements <= ceilings["expressions_per_statement"]
    long = [name for count, name in found.functions if count > LONG]
    assert len(long) <= ceilings["long_functions"], long
    assert found.docstring_lines <= ceilings["docstring_lines"]
    assert found.other_lines <= ceilings["lines_of_other_code"]
    assert lines_of_tests() <= ceilings["lines_of_tests"]
    assert words_of_pages() <= ceilings["words_of_pages"]


def test_what_counts() -> None:
    """Docstrings do not, but a text that stands alone elsewhere does; what is in an inner function
    counts for the outer one, too."""
    tree = ast.parse(
        '"""Of the module,\nof two lines."""\nx = f(1) + 2\n"no docstring"\n'
        'class A:\n    """Of A."""\n    def g(self):\n        def h():\n            pass\n'
    )
    assert weight_of(tree, "a.py") == Weight(6, 7, 3, 0, [(1, "a.py:8 h"), (2, "a.py:7 g")])


def table() -> Iterator[str]:
    """A line per room, and one for all."""
    yield f"{'room':<32} statements  ceiling  expressions  docstrings"
    rooms = {**all_rooms()}
    ceilings: dict[str, Any] = {n: room["statements"] for n, room in CEILINGS["rooms"].items()}
    rooms["all"] = sum(rooms.values(), Weight())
    ceilings["all"] = CEILINGS["all"]["statements"]
    for name, found in rooms.items():
        yield (
            f"{name:<32} {found.statements:>10,} {ceilings[name]:>8,} {found.expressions:>12,} "
            f"{found.docstring_lines:>11,}"
        )
    density = rooms["all"].expressions / rooms["all"].statements
    long = [where for count, where in rooms["all"].functions if count > LONG]
    yield f"{density:.3f} expressions per statement; {len(long)} functions above {LONG} statements"
    yield (
        f"{rooms['all'].other_lines:,} lines of other code, {lines_of_tests():,} of tests; "
        f"{words_of_pages():,} words of pages"
    )


if __name__ == "__main__":
    from test_reached import PACKAGE, described, exported, unreached

    print(*table(), sep="\n")
    print("\nreached by no command and no public name:")
    print(*described(unreached(PACKAGE, exported()), PACKAGE), sep="\n")
