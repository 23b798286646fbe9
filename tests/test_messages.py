"""Every sentence of the product's errors stands in `messages.txt`: a reworded one shows there, and
other tests check an error's type and facts.

After a change: `DLM_REWRITE_MESSAGES=1 pytest tests/test_messages.py`.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Iterator
from pathlib import Path

from parsed import tree_of

ROOT = Path(__file__).parents[1]
MESSAGES = Path(__file__).with_name("messages.txt")
FILES = [
    file
    for package in ("dlm", "loadtest")
    for file in sorted((ROOT / package).rglob("*.py"))
    if "_pb" not in file.parts
]
# Calls that are handed a sentence of an error, besides the constructors of errors.
HELPERS = {
    *("_abort", "check_sequence", "_error", "_fault", "_require", "_too_little", "_unwritable"),
    *("abort", "add_note", "bad", "check_disk", "error", "error_at", "fail", "needed"),
    *("Refusal", "RowFault", "Unread", "UnknownCall"),
}
SENTENCE = 3  # spaces, at least


def error_classes() -> set[str]:
    """Names of exceptions: Python's, and those that derive from one in the product."""
    found = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    bases = {
        node.name: {last_name(base) for base in node.bases}
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef)
    }
    while new := {name for name, of in bases.items() if of & found} - found:
        found |= new
    return found | {"BadParameter", "Exit"}


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`; empty for what has no name."""
    return getattr(node, "attr", getattr(node, "id", ""))


def template(node: ast.AST) -> str:
    """A text as its code has it, on one line, values in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        conversion = f"!{chr(node.conversion)}" if node.conversion >= 0 else ""
        spec = f":{template(node.format_spec)}" if node.format_spec else ""
        return f"{{{ast.unparse(node.value)}{conversion}{spec}}}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.encode("unicode_escape").decode() if "\n" in node.value else node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return f"{{{ast.unparse(node)}}}"


def sentences(node: ast.AST | None) -> Iterator[str]:
    """The templates of its texts that are sentences."""
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        if sum(part.count(" ") for part in parts if isinstance(part, str)) >= SENTENCE:
            yield template(node)
    elif node is not None:
        for part in ast.iter_child_nodes(node):
            yield from sentences(part)


def messages(tree: ast.Module, errors: set[str]) -> Iterator[str]:
    """An error's name, a colon, and its sentence; `text` for one that is assigned or returned, as
    parts of errors and reports are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in errors or name in HELPERS:
                yield from (f"{name}: {text}" for text in sentences(node))
        elif isinstance(node, ast.ClassDef) and node.name in errors:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and last_name(call.func) == "__init__":
                    yield from (f"{node.name}: {text}" for text in sentences(call))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return) and (
            not isinstance(node.value, ast.Call | ast.Subscript)
        ):
            yield from (f"text: {text}" for text in sentences(node.value))


def snapshot() -> str:
    """All of them: file by file, sorted within one."""
    errors = error_classes()
    lines = [
        f"{file.relative_to(ROOT)}: {message}"
        for file in FILES
        for message in sorted(set(messages(tree_of(file), errors)))
        if file.is_relative_to(ROOT / "dlm") or not message.startswith("text: ")  # loadtest's pages
    ]
    return "".join(f"{line}\n" for line in lines)


def test_messages_are_those_of_the_snapshot() -> None:
    """The difference is a reworded message: read it as a user, then rewrite the file."""
    now = snapshot()
    if os.environ.get("DLM_REWRITE_MESSAGES"):
        MESSAGES.write_text(now, encoding="utf-8")
    assert now.splitlines() == MESSAGES.read_text(encoding="utf-8").splitlines()
