"""What stands in dlm/index is there for dlm, and there is one of each."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import dlm

PACKAGE = Path(dlm.__file__).parent
INDEX = PACKAGE / "index"


@dataclass(frozen=True, eq=False)
class Piece:
    """A statement of a module, or a method: what it defines, and every name that it uses."""

    path: Path
    defines: frozenset[str]
    uses: frozenset[str]


def used(nodes: list[ast.AST]) -> set[str]:
    """Names, attributes, and texts that may be names (of `getattr`, of a table of attributes)."""
    found = set()
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                found.add(part.id)
            elif isinstance(part, ast.Attribute):
                found.add(part.attr)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.add(part.value)
    return found


def pieces(path: Path) -> list[Piece]:
    """Those of one file."""
    out = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue  # to import a name is not to use it
        defines: set[str] = set()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defines = {node.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part for target in targets for part in ast.walk(target)]
            defines = {part.id for part in names if isinstance(part, ast.Name)}
        own: list[ast.AST] = [node]
        if isinstance(node, ast.ClassDef):
            methods = [
                part
                for part in node.body
                if isinstance(part, ast.FunctionDef) and not part.name.startswith("__")
            ]
            rest = [part for part in node.body if part not in methods]
            own = [*rest, *node.bases, *node.decorator_list]
            out += [Piece(path, frozenset({m.name}), frozenset(used([m]))) for m in methods]
        out.append(Piece(path, frozenset(defines), frozenset(used(own) - defines)))
    return out


def unreached(package: Path, room: Path, public: set[str]) -> list[str]:
    """What `room` defines and no path of names leads to from the rest of the package."""
    every = [piece for path in sorted(package.rglob("*.py")) for piece in pieces(path)]
    waiting = [p for p in every if not p.path.is_relative_to(room) or not p.defines]
    rest = [p for p in every if p.path.is_relative_to(room) and p.defines]
    known = set(public)
    while waiting:
        for piece in waiting:
            known |= piece.uses
        waiting = [piece for piece in rest if piece.defines & known]
        rest = [piece for piece in rest if not piece.defines & known]
    return [f"{p.path.relative_to(package)}: {' '.join(sorted(p.defines))}" for p in rest]


def test_nothing_in_index_is_reached_by_tests_alone() -> None:
    """By name, from what the rest of dlm uses and from the methods of what users import."""
    public = {name for name in dir(dlm.LocalModel) if not name.startswith("_")}
    assert unreached(PACKAGE, INDEX, public) == []


def test_what_nobody_reaches_is_found(tmp_path: Path) -> None:
    """A function, a method, and a pair that knows only of each other."""
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "a.py").write_text(
        "def one():\n    return two()\ndef two():\n    return 2\n"
        "def lost():\n    return left()\ndef left():\n    return lost()\n"
        "class Kept:\n    def asked(self):\n        pass\n    def never(self):\n        pass\n"
    )
    (tmp_path / "b.py").write_text("from index.a import Kept, left, one\none()\nKept().asked()\n")
    found = unreached(tmp_path, tmp_path / "index", set())
    assert found == ["index/a.py: lost", "index/a.py: left", "index/a.py: never"]


def callers(name: str) -> list[str]:
    """The functions of dlm/index that use a name, by file; a list of kernels calls none."""
    return sorted(
        {
            str(piece.path.relative_to(INDEX))
            for path in INDEX.rglob("*.py")
            for piece in pieces(path)
            if name in piece.uses and "KERNELS" not in piece.defines
        }
    )


def test_there_is_one_builder() -> None:
    """One place makes a manifest, one writes columns, and one puts bits in lists of words."""
    assert callers("make_manifest") == ["build/shard_set.py"]
    assert callers("new_file") == ["build/files.py"]  # Arrow's writer
    assert callers("write_parts") == ["build/builder.py"]
    assert callers("put_rank_lists") == ["build/pack.py"]
    assert callers("put_key_lists") == ["build/builder.py"]
