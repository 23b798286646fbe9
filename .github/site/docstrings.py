"""Docstrings as this project writes them, in reStructuredText.

A heading such as `Raises` begins a list: names and texts, two spaces apart. Text that is indented
is code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

HEADINGS = (
    *("Args", "Cost", "Edge cases", "Examples", "Fields", "Guarantees", "Paper", "Raises"),
    *("Returns", "Shapes", "Source", "Trusts", "Yields"),
)
HEADING = re.compile(rf"({'|'.join(HEADINGS)})(?::\s|\s\s+|\s*$)(.*)")
ENTRY = re.compile(r"(\S.*?)\s\s+(.*)")


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each; the name is empty where there is only text."""
    name, text, least = "", "", min(map(indent_of, filter(None, lines)), default=0)
    for line in filter(None, lines):
        starts = indent_of(line) == least and ENTRY.fullmatch(line.strip())
        if starts:
            if name or text:
                yield name, text
            name, text = starts[1], starts[2]
        else:
            text = f"{text} {line.strip()}".strip()
    if name or text:
        yield name, text


def blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Paragraphs, and code; a heading takes the indented lines below it along."""
    found: list[str] = []
    for line in lines:
        listed = found and HEADING.fullmatch(found[0])
        if not line:
            ends = not listed
        elif not indent_of(line):
            ends = bool(found) and (
                bool(listed or HEADING.fullmatch(line)) or indent_of(found[0]) > 0
            )
        else:
            ends = bool(found) and not listed and not indent_of(found[0])
        if ends and found:
            yield found
            found = []
        if line:
            found.append(line)
    if found:
        yield found


def converted(lines: Sequence[str]) -> list[str]:
    """A docstring's lines as reStructuredText."""
    out: list[str] = []
    for block in blocks(lines):
        if head := HEADING.fullmatch(block[0]):
            # Text beside the heading is at the place where it stands.
            first = [" " * head.start(2) + head[2]] if head[2] else []
            named = list(entries([*first, *block[1:]]))
            out += [f":{head[1]}:"]
            mark = "* " if len(named) > 1 or (named[:1] and named[0][0]) else ""
            out += [f"    {mark}{f'``{name}``: ' if name else ''}{text}" for name, text in named]
        elif all(map(indent_of, block)):
            if block[0].strip() != "::":
                out += ["::", "", *(f"    {line}" for line in block)]
        elif block != ["::"]:
            out += [line.strip() for line in block]
        out.append("")
    return out


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What autodoc calls with each docstring."""
    lines[:] = converted(lines)


def signature(app: Any, what: str, name: str, *more: Any) -> tuple[str, None] | None:
    """None for what other calls make: its arguments are nobody's business."""
    made = name.startswith("dlm.client.") and not name.endswith(("Mixture", "Phrases"))
    return ("", None) if what == "class" and made else None


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True}
