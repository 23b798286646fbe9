"""The syntax trees of source files, for tests that read code; each is parsed once."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    """The tree of a file as it stands now."""
    return _parsed(path.read_text(encoding="utf-8"))


@cache
def _parsed(text: str) -> ast.Module:
    """Without the garbage collector, which would look at all trees again and again: four fifths of
    the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_on:
            gc.enable()
