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


def private_imports(text: str) -> list[str]:
    """Names of dlm with a part that begins with an underscore."""
    parts = [name.split(".") for name in names_of(ast.parse(text))]
    return [
        ".".join(one)
        for one in parts
        if one[0] == "dlm" and any(p[:1] == "_" and p[:2] != "__" for p in one)
    ]


def private_attributes(text: str) -> list[str]:
    """Attributes with an underscore that the file does not give its own objects."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    own = {node.attr for node in found if ast.unparse(node.value) in ("self", "cls")}
    return [
        ast.unparse(node)
        for node in found
        if node.attr[:1] == "_"
        and node.attr[:2] != "__"
        and node.attr not in own
        and ast.unparse(node.value) != "os"
    ]


def test_loadtest_uses_public_names_of_dlm_alone() -> None:
    """In every file."""
    for file in (ROOT / "loadtest").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert private_imports(text) == [], file
        assert private_attributes(text) == [], file


@pytest.mark.slow
def test_dlm_does_not_import_loadtest() -> None:
    """So that the wheel, which leaves it out, is whole."""
    for file in (ROOT / "dlm").rglob("*.py"):
        names = names_of(tree_of(file))
        assert not [name for name in names if name.split(".")[0] == "loadtest"], file


@pytest.mark.parametrize(
    "text", ["from dlm.wire._pb import x", "from dlm.client.core import _a", "import dlm._b"]
)
def test_a_planted_import_is_found(text: str) -> None:
    """So that the first test is known to look; attributes too."""
    assert private_imports(text)
    assert private_attributes("client._core.x")
    assert not private_imports("from dlm import __version__")
