"""Reads the text before the sections of an ARPA file: comments, and a count for each order."""

from __future__ import annotations

import io
import json
import re
from typing import Any, NamedTuple

from dlm import __version__
from dlm.errors import ArpaError
from dlm.ngram.arpa import source
from dlm.ngram.arpa.lines import Line, LineReader
from dlm.ngram.arpa.rows import shown

# The maximum size of the text before the first section.
MAX_HEADER_BYTES = 16 << 20
# How much of a file `comments_at_head` reads: the longest header, and a margin.
HEAD_BYTES = MAX_HEADER_BYTES + (1 << 20)
# The largest count the header may promise for an order.
MAX_COUNT = 1 << 40
# The largest count for order 1: ids are uint32, and id 0 may have no row.
MAX_WORDS = (1 << 32) - 2

_COUNT_LINE = re.compile(rb"ngram[ \t]+(-?\d+)[ \t]*=[ \t]*(-?\d+)\Z")
_BEGIN = re.compile(rb"^\\data\\\s+ngram 1\s*=", re.MULTILINE)
_SECTION_LINE = re.compile(rb"\\(\d{1,9})-grams:")
AT_END = -1
_PREFIX = "provenance: "  # shard sets keep a comment that begins with this


class Header(NamedTuple):
    """The header of a model. `comments` lack `#` and the space after it; `after` is the first
    line after the counts, which begins a section, or None at the end of the text."""

    comments: list[str]
    counts: tuple[int, ...]
    after: Line | None


def holds_header(head: bytes) -> bool:
    return _BEGIN.search(head) is not None


def order_begun(line: bytes) -> int:
    """The order of the section that a line begins; 0 if none, AT_END if the line ends the model."""
    if line.rstrip() == b"\\end\\":
        return AT_END
    found = _SECTION_LINE.fullmatch(line.rstrip())
    return 0 if found is None else int(found[1])


def read_header(text: LineReader) -> Header:
    """Reads the header of a newly opened text; if it is not ARPA, the ArpaError says what it is."""
    head = text.head()
    if not head:
        text.fail_if_damaged(None)
        raise ArpaError(
            "the file is empty",
            path=text.path,
            advice="The program that wrote it did not finish; rebuild the file",
        )
    known = source.recognise(head, text.path, text.compression)
    if known is not None:
        text.fail(known[0], None, None, known[1])
    comments: list[str] = []
    while True:
        line = _next_line(text)
        if line is None:
            text.fail("no \\data\\ line in the file", None, None, "Give an ARPA file")
        if line.text.startswith(b"#"):
            comments.append(_comment(line.text))
        elif line.text == b"\\data\\":
            break
        elif line.text:
            what, advice = source.guess(head) or (
                f"expected \\data\\ as the first line, found {shown(line.text)}",
                "This is not an ARPA file. Commands that take a model and a text expect the model "
                "first; to make a model from text, use `dlm estimate`",
            )
            text.fail(what, line, None, advice)
    counts: list[int] = []
    while True:
        line = _next_line(text)
        if line is None or line.text.startswith(b"\\"):
            break
        if not line.text:
            continue
        match = _COUNT_LINE.match(line.text)
        if match is None:
            text.fail(
                f"expected a line `ngram {len(counts) + 1}=COUNT`, found {shown(line.text)}",
                line,
                None,
            )
        if len(match[1]) > 9 or int(match[1]) != len(counts) + 1:
            text.fail(
                f"expected the count of order {len(counts) + 1}, found {shown(line.text)}",
                line,
                None,
                "Give one count for each order, from 1 up",
            )
        most = MAX_COUNT if counts else MAX_WORDS
        if match[2].startswith(b"-") or len(match[2]) > 19 or int(match[2]) > most:
            text.fail(
                f"the count of order {len(counts) + 1} is not credible: {shown(line.text)}",
                line,
                len(counts) + 1,
                f"Expected a number from 0 to {most}",
            )
        counts.append(int(match[2]))
    if not counts:
        text.fail(
            "no count follows \\data\\",
            line,
            None,
            "Expected a line `ngram K=COUNT` for each order",
        )
    return Header(comments, tuple(counts), line)


def _next_line(text: LineReader) -> Line | None:
    line = text.next_line(None)
    if line is not None and line.offset > MAX_HEADER_BYTES:
        text.fail(
            f"no section begins within the first {MAX_HEADER_BYTES} bytes",
            line,
            None,
            "Give an ARPA file",
        )
    return line


def comments_at_head(path: str, head: bytes) -> list[tuple[int, str]]:
    """Returns (line number, text) of each comment before the counts, as `read_header` reads it, or
    nothing if the file is not ARPA. `head` is the first HEAD_BYTES of the file, which may be
    compressed. Raises ArpaError if the comments are longer than a header may be."""
    text = source.TextSource(path, file=io.BytesIO(head))
    found: list[tuple[int, str]] = []
    number, read, rest, step = 0, 0, b"", b"first"
    while step and read < MAX_HEADER_BYTES:
        try:
            step = text.read(1 << 16)
        except source.DamagedStream:  # `head` ends within the stream, or the file is cut short
            step = b""
        read += len(step)
        lines = (rest + step).split(b"\n")
        rest = lines.pop() if step else b""
        for line in lines:
            number += 1
            line = line.rstrip(b"\r").rstrip(b" \t")
            if line == b"\\data\\":
                return found
            if line.startswith(b"#"):
                found.append((number, _comment(line)))
            elif line:
                return []
        if rest.strip() and not rest.startswith((b"#", b"\\")):
            return []
    if step:
        raise ArpaError(
            f"the comments before \\data\\ are longer than {MAX_HEADER_BYTES} bytes",
            path=path,
            advice="Rebuild the file with fewer comments",
        )
    return []


def _comment(line: bytes) -> str:
    return line[1:].removeprefix(b" ").decode("utf-8", "surrogateescape")


def provenance_line(command: str, **facts: Any) -> str:
    """The comment, without `#`, that a dlm command puts in its models: `facts` as a JSON object."""
    return f"{_PREFIX}{json.dumps({'made_by': f'dlm {__version__} {command}', **facts})}"


def provenance_facts(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line.removeprefix(_PREFIX)) if line.startswith(_PREFIX) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
