"""Each documented promise names a page and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests/PROMISES.md"
# The pages that promise something to a user.
PAGES = {
    "README.md",
    "deploy/README.md",
    "dlm/asr/README.md",
    "dlm/cli/README.md",
    "dlm/client/README.md",
    "dlm/distill/README.md",
    "dlm/estimate/README.md",
    "dlm/federated/README.md",
    "dlm/gateway/README.md",
    "dlm/index/README.md",
    "dlm/kenlm/README.md",
    "dlm/pipeline/README.md",
    "dlm/server/README.md",
    "loadtest/README.md",
    "proto/README.md",
    "shards/FORMAT.md",
}
MOST_ROWS = 87


def rows(text: str) -> list[tuple[str, str, str]]:
    """(page, promise, tests) of each row; the page is that of the heading above."""
    found, page = [], ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"## \[.*\]\(\.\./(.*)\)", line):
            page = heading[1]
        elif row := re.fullmatch(r"\| (.+?) \| (.+) \|", line):
            found.append((page, row[1], row[2]))
    return [row for row in found if row[1] not in ("promise", "---")]


@cache
def parsed(source: str) -> ast.Module:
    """Its syntax tree; a file is named in many rows."""
    return ast.parse(source)


def marks_of(source: str) -> dict[str, bool]:
    """The tests of a file, and whether each runs with `slow` tests only.

    One of which some parameters are slow runs without them too.
    """
    tree = parsed(source)
    marks = {
        ast.unparse(mark)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
    }
    return {
        node.name: "pytest.mark.slow" in marks | {ast.unparse(mark) for mark in node.decorator_list}
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def problems(text: str, tests: Path) -> list[str]:
    """What rows say that is not so."""
    out = []
    for _, promise, cell in rows(text):
        named = re.findall(r"`([\w/]+\.py)::(\w+)(?:\[.*?\])?`( \*slow\*)?", cell)
        if not named or len(named) != cell.count("::"):
            out.append(f"{promise}: tests are `FILE::TEST`, each perhaps followed by *slow*")
        for file, name, mark in named:
            path = tests / file
            there = marks_of(path.read_text(encoding="utf-8")) if path.exists() else {}
            if name not in there:
                out.append(f"{promise}: no test {file}::{name}")
            elif there[name] != bool(mark):
                is_slow = "marked slow" if there[name] else "not marked slow"
                out.append(f"{promise}: {file}::{name} is {is_slow}, the row says otherwise")
    return out


def test_every_promise_names_tests_that_exist() -> None:
    """And says which of them the README's command leaves out."""
    assert problems(PAGE.read_text(encoding="utf-8"), ROOT / "tests") == []


def test_every_page_for_users_has_its_promises() -> None:
    """Each once, in a table that can be read."""
    found = rows(PAGE.read_text(encoding="utf-8"))
    assert {page for page, _, _ in found} == PAGES
    assert all((ROOT / page).exists() for page in PAGES)
    promises = [promise for _, promise, _ in found]
    assert len(set(promises)) == len(promises) <= MOST_ROWS


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("`test_a.py::test_one`", ""),
        ("`test_a.py::test_one[x]`, `test_a.py::test_two` *slow*", ""),
        ("`test_b.py::test_three` *slow*", ""),
        ("`test_a.py::test_none`", "no test test_a.py::test_none"),
        ("`test_c.py::test_one`", "no test test_c.py::test_one"),
        ("`test_a.py::test_two`", "test_a.py::test_two is marked slow"),
        ("`test_a.py::test_one` *slow*", "test_a.py::test_one is not marked slow"),
        ("test_a.py::test_one", "tests are `FILE::TEST`"),
        ("nothing", "tests are `FILE::TEST`"),
    ],
)
def test_a_planted_row_is_judged(tmp_path: Path, cell: str, says: str) -> None:
    """A name that is gone, a mark that is wrong, and no test at all."""
    (tmp_path / "test_a.py").write_text(
        "def test_one(): ...\n@pytest.mark.slow\nasync def test_two(): ...\n"
    )
    (tmp_path / "test_b.py").write_text("pytestmark = [pytest.mark.slow]\ndef test_three(): ...\n")
    found = problems(f"| promise | tests |\n| --- | --- |\n| It works. | {cell} |\n", tmp_path)
    assert len(found) == bool(says), found
    assert all(says in problem for problem in found)
