"""The syntax trees of source files, for tests that read code; each is parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    """The tree of a file as it stands now."""
    return _parsed(path.read_text(encoding="utf-8"))


_parsed = cache(ast.parse)
