"""A name means one thing in dlm."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from parsed import tree_of

PACKAGE = Path(__file__).parents[1] / "dlm"


def twice(package: Path) -> dict[str, list[str]]:
    """Public classes at the top of a module that have the name of another, and where they are."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        if "_pb" in file.parts:
            continue
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(package)))
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    """Who searches for one finds one."""
    assert twice(PACKAGE) == {}


@pytest.mark.parametrize(("other", "files"), [("One", ["a.py", "b.py"]), ("Two", []), ("_One", [])])
def test_a_name_that_stands_twice_is_found(tmp_path: Path, other: str, files: list[str]) -> None:
    """Private ones are nobody else's business."""
    (tmp_path / "a.py").write_text("class One:\n    pass\nclass _One:\n    pass\n")
    (tmp_path / "b.py").write_text(f"class {other}:\n    pass\n")
    assert twice(tmp_path).get("One", []) == files
