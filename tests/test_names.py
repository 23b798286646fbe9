"""A name means one thing in dlm."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parsed import tree_of

Twice = defaultdict[str, list[str]]
PACKAGE = Path(__file__).parents[1] / "dlm"


def twice(package: Path, parts: Sequence[str] = (".",), kinds: Any = ast.ClassDef) -> Twice:
    """Public names of some kinds at the top of modules that stand twice, and where they are."""
    found = Twice(list)
    for file in sorted(file for part in parts for file in (package / part).rglob("*.py")):
        if "_pb" in file.parts or (len(parts) > 1 and file.stem == "kernels"):
            continue
        for node in tree_of(file).body:
            name = getattr(getattr(node, "target", node), "id", getattr(node, "name", "_"))
            if isinstance(node, kinds) and not name.startswith("_"):
                found[name].append(str(file.relative_to(package)))
    return Twice(list, {name: files for name, files in found.items() if len(files) > 1})


def test_no_two_public_classes_share_a_name() -> None:
    """Who searches for one finds one."""
    assert twice(PACKAGE) == {}


def test_nor_do_functions_and_types_of_the_client() -> None:
    """Nor of what it shares with the server; a kernel may have the name of what calls it."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AnnAssign
    assert twice(PACKAGE, ("client", "wire"), kinds) == {}


@pytest.mark.parametrize(("other", "files"), [("One", ["a.py", "b.py"]), ("Two", []), ("_One", [])])
def test_a_name_that_stands_twice_is_found(tmp_path: Path, other: str, files: list[str]) -> None:
    """Private ones are nobody else's business."""
    (tmp_path / "a.py").write_text("class One:\n    pass\nclass _One:\n    pass\n")
    (tmp_path / "b.py").write_text(f"class {other}:\n    pass\n")
    assert twice(tmp_path).get("One", []) == files
