"""Nothing in dlm/ is reached by tests alone: each module, function and class serves the product."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import dlm
import dlm.client
from dlm.cli.main import COMMANDS
from parsed import tree_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dlm"


def public_names(path: Path) -> set[str]:
    """What a module lists in `__all__`, and the methods of its classes; the module is not run,
    since what it imports may not be here."""
    body = tree_of(path).body
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


# The modules that decoders import, each with an `__all__`.
DECODERS = [path for path in sorted((PACKAGE / "asr").rglob("*.py")) if public_names(path)]


def dotted(path: Path) -> str:
    """The name of the module in a file."""
    names = ("dlm", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


# Where the product begins: what users import, the command and what stands for each of its
# subcommands, and what is run as a program of its own.
ENTRIES = [
    "dlm",
    "dlm.__main__",
    "dlm.asr",
    *map(dotted, DECODERS),
    "dlm.asr.kenlm.__main__",
    "dlm.cli.main",
    *(f"dlm.cli.{module}" for module, _ in COMMANDS.values()),
    "dlm.cli.submit",  # what spark-submit is given
    "dlm.wire.generate",  # `python -m dlm.wire.generate`
]


@dataclass(frozen=True, eq=False)
class Piece:
    """A statement of a module, or a method: what it defines, and every name that it uses."""

    path: Path
    defines: frozenset[str]
    uses: frozenset[str]
    kind: type[ast.AST]
    is_root: bool = False  # it is run when its module is imported, or called by the interpreter


def used(nodes: Iterable[ast.AST]) -> set[str]:
    """Names, attributes, and texts that may be names (of `getattr`, of a table of attributes)."""
    found = set()
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                found.add(part.id)
            elif isinstance(part, ast.Attribute):
                found.add(part.attr)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.update(part.value.split(":"))  # also module:NAME
    return found


def is_registered(node: ast.stmt) -> bool:
    """Whether a decorator hands a function to somebody who calls it: `@app.command()`."""
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
        for one in node.decorator_list
    )


def pieces(path: Path) -> list[Piece]:
    """Those of one file."""
    out = []
    for node in tree_of(path).body:
        if isinstance(node, ast.Import | ast.ImportFrom):  # to import a name is not to use it
            out += [
                Piece(path, frozenset({alias.asname}), frozenset({alias.name}), type(node))
                for alias in node.names
                if alias.asname
            ]
            continue
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
            out += [
                Piece(path, frozenset({m.name}), frozenset(used([m])), ast.Attribute)
                for m in methods
            ]
        root = not defines or is_registered(node) or any(name[:2] == "__" for name in defines)
        uses = frozenset(used(own) - defines)
        out.append(Piece(path, frozenset(defines), uses, type(node), root))
    return out


def unreached(package: Path, public: Iterable[str]) -> list[Piece]:
    """What a package defines and no path of names leads to from `public` and from what is run at
    import. By name alone: of two with one name, that one is reached is taken for both."""
    files = [path for path in sorted(package.rglob("*.py")) if "_pb" not in path.parts]
    every = [piece for path in files for piece in pieces(path)]
    known = set(public)
    waiting = [piece for piece in every if piece.is_root]
    rest = [piece for piece in every if not piece.is_root]
    while waiting:
        for piece in waiting:
            known |= piece.uses
        waiting = [piece for piece in rest if piece.defines & known]
        rest = [piece for piece in rest if not piece.defines & known]
    return rest


def described(found: Iterable[Piece], package: Path) -> list[str]:
    """A line each."""
    return [f"{p.path.relative_to(package)}: {' '.join(sorted(p.defines))}" for p in found]


def exported() -> set[str]:
    """What users import, and the methods of it."""
    names = {"main", "app"}.union(*(public_names(path) for path in DECODERS))
    for module in (dlm, dlm.client):
        for name in module.__all__:
            one = getattr(module, name)
            names |= {name} | {each for each in dir(one) if inspect.isclass(one)}
    return names


def test_no_function_or_class_is_reached_by_tests_alone() -> None:
    """Public ones at the top of a module, by name, from what users import and run; in dlm/index
    also constants, private functions and methods."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [
        piece
        for piece in unreached(PACKAGE, exported())
        if "index" in piece.path.parts
        or (piece.kind in kinds and not any(name[0] == "_" for name in piece.defines))
    ]
    assert described(found, PACKAGE) == []


def test_what_nobody_reaches_is_found(tmp_path: Path) -> None:
    """A function, a method, and a pair that knows only of each other."""
    (tmp_path / "a.py").write_text(
        "def one():\n    return two()\ndef two():\n    return 2\n"
        "def lost():\n    return gone()\ndef gone():\n    return lost()\n"
        "class Held:\n    def asked(self):\n        pass\n    def never(self):\n        pass\n"
        "@app.command()\ndef registered():\n    return called()\ndef called():\n    pass\n"
    )
    (tmp_path / "b.py").write_text("from a import Held, gone, one\none()\nHeld().asked()\n")
    found = described(unreached(tmp_path, set()), tmp_path)
    assert found == ["a.py: lost", "a.py: gone", "a.py: never"]


# -- modules -----------------------------------------------------------------------------------


def modules(package: Path) -> dict[str, Path]:
    """The files below the folder `package`, which stands for dlm/, by dotted name."""
    found = {}
    for file in package.rglob("*.py"):
        names = ["dlm", *file.relative_to(package).with_suffix("").parts]
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return found


def imported(module: str, files: dict[str, Path]) -> set[str]:
    """The modules of dlm that one imports, inside of functions too, and the packages that they are
    in; those too that it names in a text, for `import_module` or `python -m`."""
    found: set[str] = set()
    for node in ast.walk(tree_of(files[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value.partition(":")[0]} & files.keys()
    found |= {name[: dot.start()] for name in found for dot in re.finditer(r"\.", name)}
    return found & files.keys()


def modules_unreached(package: Path, entries: Iterable[str]) -> list[str]:
    """Modules that no import leads to from `entries`."""
    files = modules(package)
    reached: set[str] = set()
    waiting = set(entries)
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting |= imported(module, files) - reached
    return sorted(files.keys() - reached)


def test_imports_lead_to_every_module() -> None:
    """From the entries of the product."""
    assert modules_unreached(PACKAGE, ENTRIES) == []


def test_a_module_that_only_tests_import_is_found(tmp_path: Path) -> None:
    """One that is imported inside of a function is reached."""
    (tmp_path / "part").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "part/__init__.py").write_text("")
    (tmp_path / "part/a.py").write_text("def f():\n    from dlm.part import b\n")
    (tmp_path / "part/b.py").write_text("import numpy")
    (tmp_path / "part/c.py").write_text("from dlm.part import a")
    assert modules_unreached(tmp_path, ["dlm.part.a"]) == ["dlm.part.c"]
