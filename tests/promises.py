"""The promises of `promises.toml`, and the tests that are marked with them."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from parsed import tree_of

TESTS = Path(__file__).resolve().parent


class Marked(NamedTuple):
    """A test that checks a promise; `slow`: the README's command leaves it out."""

    promise: str
    file: str
    test: str
    slow: bool


def promises() -> dict[str, dict[str, str]]:
    """Page -> name -> what it promises."""
    return tomllib.loads((TESTS / "promises.toml").read_text(encoding="utf-8"))


def marked(tests: Path = TESTS) -> Iterator[Marked]:
    """The tests with a mark, by file.

    One of which some parameters are slow runs without them too.
    """
    for file in sorted(tests.rglob("test_*.py")):
        if "mark.promise(" not in file.read_text(encoding="utf-8"):
            continue  # reading is quick, and parsing is not
        body = tree_of(file).body
        of_file = {
            ast.unparse(mark)
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
        }
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = of_file | {ast.unparse(mark) for mark in node.decorator_list}
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and (
                        ast.unparse(mark.func) == "pytest.mark.promise"
                    ):
                        yield Marked(
                            ast.literal_eval(mark.args[0]),
                            file.relative_to(tests).as_posix(),
                            node.name,
                            "pytest.mark.slow" in marks,
                        )
