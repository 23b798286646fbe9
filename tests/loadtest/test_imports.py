"""The load tester stands on dlm's public names, and dlm knows nothing of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from parsed import tree_of

ROOT = Path(__file__).parents[2]


def names_of(tree: ast.AST) -> list[str]:
    """Dotted names of all that is imported, in functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> list[str]:
    """Names of dlm that begin with an underscore: imports, and attributes that the file does not
    give its own objects."""
    dlm = [name for name in names_of(tree) if name.split(".")[0] == "dlm"]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node.attr for node in found if ast.unparse(node.value) in ("self", "cls")}
    return [name for name in dlm if any(map(is_private, name.split(".")))] + [
        ast.unparse(node)
        for node in found
        if is_private(node.attr) and node.attr not in own and ast.unparse(node.value) != "os"
    ]


def test_loadtest_uses_public_names_of_dlm_alone() -> None:
    """In every file."""
    for file in (ROOT / "loadtest").rglob("*.py"):
        assert private_names(tree_of(file)) == [], file


@pytest.mark.slow
def test_dlm_does_not_import_loadtest() -> None:
    """So that the wheel, which leaves it out, is whole."""
    for file in (ROOT / "dlm").rglob("*.py"):
        assert not [one for one in names_of(tree_of(file)) if one.split(".")[0] == "loadtest"], file


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("from dlm.wire._pb import x", True),
        ("from dlm.client.core import _a", True),
        ("import dlm._b", True),
        ("client._core.x", True),
        ("from dlm import __version__", False),
    ],
)
def test_a_planted_name_is_found(text: str, is_found: bool) -> None:
    """So that the first test is known to look."""
    assert bool(private_names(ast.parse(text))) == is_found
