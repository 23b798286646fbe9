"""Imports point down the floors, and heavy packages stay where they belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsed import tree_of

ROOT = Path(__file__).parents[1]

# A part may import what stands on a lower floor, and itself. Parts on one floor know nothing of
# each other.
FLOORS = {
    part: floor
    for floor, parts in enumerate(
        [
            [
                *("errors", "families", "units", "histogram", "extras", "files", "logs"),
                *("progress", "signals"),
            ],
            ["jit", "pieces"],
            ["config", "resources", "tracing"],
            ["spill", "memory_options", "stores"],
            ["ngram"],
            ["checkpoint"],
            ["record"],
            ["kenlm"],
            ["index", "wire", "estimate", "federated"],
            ["server", "client", "distill"],
            ["spark", "cluster", "scoring", "pipeline", "asr"],
            ["gateway"],
            ["cli"],
            ["__init__"],  # what `from dlm import` gives, lazily
        ]
    )
    for part in parts
}


# What `distill` may import of `federated`: the trained network, its ids, words and pieces, and the
# accounting of records. What is stored lies below, in `record` and `checkpoint`.
TRAINING = {"training", "tokens", "words", "pieces", "account"}

CLIENT = (
    "config; cluster_file health kernels states; cascade router phrases; metrics inputs; loop; "
    "stream rules; server; census call runtime; table; lane; core; base_utterance; utterance; "
    "mixture client"
)
# The same inside of a part: what stands on no floor may import whatever does not import it.
ROOMS = {
    "client": [floor.split() for floor in CLIENT.split(";")],
    "index": [
        ["settings"],
        ["coding"],
        ["layout"],
        ["packed", "placed"],
        ["ngrams", "describe"],
        ["making", "search", "sizes"],
        ["check", "moving"],
    ],
    "loadtest": [
        ["traces", "children"],
        ["run", "baselines"],
        ["report"],
        ["capacity"],
        ["paper"],
        ["cli"],
        ["__main__"],
    ],
}


# Files that belong to a part which is no folder.
PART_OF = {"__main__": "cli"}


def part_of(name: str) -> str:
    """The part that a file or folder of dlm/ belongs to, by its name without a suffix."""
    return PART_OF.get(name, name)


def is_below(path: Path, *places: str) -> bool:
    """Whether a path relative to dlm/ is one of `places` or lies in one."""
    return any(path.is_relative_to(place) for place in places)


def may_import(package: str, path: Path) -> bool:
    """Whether the file at `path`, relative to dlm/, may import this package from outside."""
    if package in ("numba", "llvmlite"):
        return (
            path.name == "kernels.py" or path.name.endswith("_kernels.py") or path == Path("jit.py")
        )
    if package == "grpc_tools":
        return path == Path("wire/generate.py")
    if package.startswith("grpc"):
        return is_below(path, "server", "client", "gateway", "wire/status.py", "wire/pairs.py")
    if package == "prometheus_client":
        return is_below(path, "families.py", "server", "client/client.py", "gateway", "cli")
    if package == "obstore":
        return is_below(path, "stores")
    if package == "opentelemetry":
        return path == Path("tracing.py")
    if package in ("pyspark", "py4j", "pandas"):
        return is_below(path, "spark")
    if package in ("flashlight", "hama", "pocketsphinx", "soundfile", "soxr"):
        return is_below(path, "asr")
    if package in ("jax", "jaxlib", "flax", "optax"):
        return is_below(path, "federated", "distill")
    return True


def for_types_alone(test: ast.expr) -> bool:
    """Whether the test of an `if` is TYPE_CHECKING."""
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def is_main(node: ast.stmt) -> bool:
    """Whether a statement is what a module does when it is run as a program."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def imports(tree: ast.AST, path: Path, runtime: bool = True) -> list[tuple[int, str, bool]]:
    """(line, dotted name, whether it is imported at run time) of every import in a file."""
    found: list[tuple[int, str, bool]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, runtime) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["dlm", *path.parent.parts]
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from dlm import index` imports dlm.index; `from dlm.index import x` names enough.
            if module == "dlm":
                found += [(node.lineno, f"dlm.{alias.name}", runtime) for alias in node.names]
            else:
                found.append((node.lineno, module, runtime))
        elif isinstance(node, ast.If) and for_types_alone(node.test):
            for part in node.body:
                found += imports(ast.Module([part], []), path, False)
            for part in node.orelse:
                found += imports(ast.Module([part], []), path, runtime)
        else:
            found += imports(node, path, runtime)
    return found


def faults(package: Path) -> list[str]:
    """What is wrong below the folder `package`, which stands for dlm/: file, line and why."""
    out = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        if is_below(path, "wire/_pb"):
            continue
        tree = tree_of(file)
        part = part_of(path.parts[0].removesuffix(".py"))
        if part not in FLOORS:
            out.append(f"{path}: {part} stands on no floor; add it to FLOORS")
            continue
        below = sorted(name for name in FLOORS if FLOORS[name] < FLOORS[part])
        for line, name, runtime in imports(tree, path):
            top, _, rest = name.partition(".")
            if top == "dlm":
                other = part_of(rest.partition(".")[0])
                if other in FLOORS and other not in (part, *below):
                    out.append(f"{path}:{line} imports {name}; {part} may import {below}")
            elif runtime and not may_import(top, path):
                out.append(f"{path}:{line} imports {top}, which is confined to other files")
        if part != "cli":
            programs = [node for node in tree.body if is_main(node)]
            inside = {id(node) for program in programs for node in ast.walk(program)}
            out += [
                f"{path}:{node.lineno} prints; only dlm/cli does"
                for node in ast.walk(tree)
                if id(node) not in inside
                and isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ]
    return out


def test_imports_point_down_and_packages_stay_confined() -> None:
    """Over every file of dlm/."""
    assert faults(ROOT / "dlm") == []


def house() -> str:
    """The parts of dlm/ in rows, each above all that it imports; in brackets those that it stands
    on, without what these stand on."""
    graph: dict[str, set[str]] = {part: set() for part in FLOORS if part != "__init__"}
    for file in (ROOT / "dlm").rglob("*.py"):
        path = file.relative_to(ROOT / "dlm")
        part = part_of(path.parts[0].removesuffix(".py"))
        names = [name.split(".") for _, name, _ in imports(tree_of(file), path)]
        found = {part_of(name[1]) for name in names if name[0] == "dlm" and name[1:]}
        graph.get(part, set()).update(found & graph.keys() - {part})

    def below(part: str) -> set[str]:
        return graph[part].union(*map(below, graph[part]))

    def row(part: str) -> int:
        return 1 + max(map(row, graph[part]), default=-1)

    rows: dict[int, list[str]] = {}
    for part in sorted(graph):
        stands_on = " ".join(sorted(graph[part].difference(*map(below, graph[part]))))
        rows.setdefault(row(part), []).append(f"{part} [{stands_on}]" if stands_on else part)
    return "\n".join(" · ".join(rows[at]) for at in sorted(rows, reverse=True))


def test_the_page_draws_the_house_as_its_imports_do() -> None:
    """The picture of dlm/README.md."""
    page = (ROOT / "dlm/README.md").read_text(encoding="utf-8")
    assert house() in page, f"the picture is now\n{house()}"


def modules(package: Path, part: str) -> dict[str, Path]:
    """The files of a part of dlm/ by dotted name."""
    found = {}
    for file in (package / part).rglob("*.py"):
        above = [] if package == ROOT else ["dlm"]
        names = [*above, *file.relative_to(package).with_suffix("").parts]
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return found


def statements(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """All nodes below `tree`; without `types`, not those of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and for_types_alone(node.test) and not types:
            yield from statements(ast.Module(node.orelse, []), types)
        else:
            yield node
            yield from statements(node, types)


def imported(package: Path, part: str, types: bool = True) -> dict[str, set[str]]:
    """What each module of a part imports of the same part, in functions too."""
    files = modules(package, part)
    out = {}
    for module, file in files.items():
        out[module] = set()
        for node in statements(tree_of(file), types):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in files else str(node.module) for name in below]
            out[module] |= {name for name in names if name in files} - {module}
    return out


def circles(package: Path, part: str, types: bool = True) -> list[str]:
    """Modules of a part that import themselves by way of others."""
    graph = imported(package, part, types)
    found = []
    for module in sorted(graph):
        reached: set[str] = set()
        waiting = set(graph[module])
        while waiting:
            reached |= waiting
            waiting = {name for one in waiting for name in graph[one]} - reached
        if module in reached:
            found.append(module)
    return found


def upward(package: Path, part: str) -> list[str]:
    """Imports of a part that do not point down its rooms."""
    floor = {room: i for i, rooms in enumerate(ROOMS[part]) for room in rooms}
    found = []
    for module, names in imported(package, part).items():
        for name in names:
            room, other = (
                one.partition(f"{part}.")[2].split(".")[0] for one in (f"{module}.", f"{name}.")
            )
            if room and other and room != other and floor[room] <= floor[other]:
                found.append(f"{module} imports {name}")
    return sorted(found)


PARTS = sorted(path.name for path in (ROOT / "dlm").iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("part", PARTS)
def test_no_part_has_a_circle_inside(part: str) -> None:
    """Neither at the top of a module, nor in a function, nor for types alone."""
    assert circles(ROOT / "dlm", part) == []


@pytest.mark.parametrize(
    ("package", "part"), [(ROOT / "dlm", "client"), (ROOT / "dlm", "index"), (ROOT, "loadtest")]
)
def test_rooms_stand_on_floors(package: Path, part: str) -> None:
    """Each room imports those below it."""
    assert upward(package, part) == []


def beyond_training(package: Path) -> list[str]:
    """Imports by `distill` of parts of `federated` other than TRAINING."""
    found = []
    for file in sorted((package / "distill").rglob("*.py")):
        path = file.relative_to(package)
        for node in ast.walk(tree_of(file)):
            names = [alias.name for alias in getattr(node, "names", [])]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                parts = f"{name}.".split(".")
                if parts[:2] == ["dlm", "federated"] and parts[2] not in TRAINING:
                    found.append(f"{path} imports {name}")
    return found


def test_distill_imports_only_training_of_federated() -> None:
    """Records, counts and checkpoints come from their own floors."""
    assert beyond_training(ROOT / "dlm") == []


def test_a_planted_import_beyond_training_is_found(tmp_path: Path) -> None:
    """A module of storage, and the package as a whole."""
    (tmp_path / "distill").mkdir()
    lines = ["from dlm.federated import training, run", "import dlm.federated"]
    (tmp_path / "distill/a.py").write_text(
        "\n".join([*lines, "from dlm.federated.training import x"])
    )
    assert beyond_training(tmp_path) == [
        "distill/a.py imports dlm.federated.run",
        "distill/a.py imports dlm.federated",
    ]


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    """By way of a third, and for types alone; and an import that points up."""
    room = tmp_path / "index" / "packed"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text("")
    (room / "a.py").write_text("from dlm.index.packed import b")
    (room / "b.py").write_text("import dlm.index.packed.c\nimport numpy")
    (room / "c.py").write_text("if TYPE_CHECKING:\n    from dlm.index.packed.a import x")
    (tmp_path / "index" / "layout.py").write_text("def f():\n    from dlm.index.packed import d")
    assert circles(tmp_path, "index") == [f"dlm.index.packed.{x}" for x in "abc"]
    assert circles(tmp_path, "index", types=False) == []
    assert upward(tmp_path, "index") == ["dlm.index.layout imports dlm.index.packed"]


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("ngram/a.py", "from dlm.index.making import x", "ngram/a.py:1 imports dlm.index.making"),
        ("ngram/a.py", "from dlm import cli", "imports dlm.cli"),
        ("ngram/a.py", "from ..index import making", "imports dlm.index"),
        ("ngram/a.py", "def f():\n    import dlm.cli", "ngram/a.py:2"),
        ("errors.py", "import dlm.config", "errors may import []"),
        ("index/a.py", "from dlm.wire.codec import x", "imports dlm.wire"),
        (
            "index/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dlm.client",
            "index/a.py:3",
        ),
        ("index/a.py", "from numba import njit", "imports numba"),
        ("index/kernels_a.py", "from numba import njit", "imports numba"),
        ("config.py", "from dlm.spill import kernels", "imports dlm.spill"),
        ("index/a.py", "import grpc.aio", "imports grpc"),
        ("wire/codec.py", "import grpc", "imports grpc"),
        ("asr/a.py", "import grpc", "imports grpc"),
        ("client/a.py", "try:\n    import jax\nexcept ImportError:\n    pass", "imports jax"),
        ("cli/a.py", "def f():\n    import pyspark", "imports pyspark"),
        ("server/a.py", "def f():\n    print(1)", "server/a.py:2 prints"),
        ("unheard_of/a.py", "", "stands on no floor"),
    ],
)
def test_a_planted_violation_is_found(path: str, text: str, fault: str, tmp_path: Path) -> None:
    """So that the test above is known to look."""
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    found = faults(tmp_path)
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("index/a.py", "from dlm.ngram import vocab\nfrom dlm.index import making\nimport numpy"),
        ("index/a.py", "from . import build\nfrom .build import x\nfrom dlm import __version__"),
        ("index/kernels.py", "from numba import njit"),
        ("jit.py", "import numba"),
        ("index/a_kernels.py", "from numba import njit"),
        ("wire/status.py", "import grpc"),
        ("client/client.py", "from prometheus_client import Metric"),
        ("federated/training/rnn.py", "import jax"),
        ("spark/a.py", "from pyspark.sql import SparkSession\nfrom dlm.estimate import text"),
        ("cli/main.py", "from dlm.client import Client\nprint(1)"),
        ("wire/generate.py", "if __name__ == '__main__':\n    print(1)"),
        ("wire/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import grpc"),
    ],
)
def test_what_is_allowed_is_not_found(path: str, text: str, tmp_path: Path) -> None:
    """Down, sideways in the same part, and each package at home."""
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert faults(tmp_path) == []


# What stands in the text of an ARPA file around its rows.
MAY_MAKE_ARPA = re.compile(r"data\\|-grams:|end\\|put_rows")
ARPA_MARK = re.compile(r"\\data\\|(^|\\\S*)-grams:|\\end\\")


def arpa_makers(package: Path) -> list[str]:
    """Files below `package` that hold a mark of ARPA text, or the kernel that writes rows.

    Docstrings are not looked at, nor what reads: `ngram/arpa/reader.py` and `header.py`.
    """
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        if is_below(path, "ngram/arpa/reader.py", "ngram/arpa/header.py"):
            continue
        if not MAY_MAKE_ARPA.search(file.read_text(encoding="utf-8")):
            continue  # most files: reading is quick, and walking a tree is not
        tree = tree_of(file)
        said = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in said else ""
            text = text.decode("latin-1") if isinstance(text, bytes) else text
            names = [getattr(node, "attr", ""), getattr(node, "id", "")]
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            if "put_rows" in names or (isinstance(text, str) and ARPA_MARK.search(text)):
                found.append(str(path))
                break
    return found


def test_one_module_writes_arpa_text() -> None:
    """Whatever makes a model gives it to the one writer."""
    assert arpa_makers(ROOT / "dlm") == ["ngram/arpa/writer.py"]


@pytest.mark.parametrize(
    "text",
    [
        'x = b"\\n\\\\%d-grams:\\n" % order',
        'x = f"\\\\data\\\\\\nngram 1={n}"',
        'x = "\\n\\\\end\\\\\\n"',
        "from dlm.ngram.arpa.kernels import put_rows",
        "kernels.put_rows(ids)",
    ],
)
def test_a_second_writer_of_arpa_text_is_found(text: str, tmp_path: Path) -> None:
    """By what it would have to write, or by the kernel."""
    (tmp_path / "a.py").write_text(f'"""Reads `-grams:`."""\n{text}\n')
    (tmp_path / "b.py").write_text("def f():\n    r'''Writes `\\data\\`.'''\n")
    assert arpa_makers(tmp_path) == ["a.py"]
