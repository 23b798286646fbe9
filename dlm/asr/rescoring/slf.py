"""Reads and writes HTK's Standard Lattice Format (SLF).

Words are on links or on nodes; pocketsphinx, HTK, SRILM and Kaldi's converters write such files.
Files written here have words on links, natural logarithms, and all digits of the scores.

Paper  The HTK Book 3.4, chapter 20 (HTK Standard Lattice Format). Differences: sub-lattices and
       likelihoods that are not logarithms (base=0) are rejected; `r` (pronunciations) and `n`
       (n-grams), times `prscale` and `ngscale`, add to `a` and `l`; `p` (posteriors) is dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from dlm.asr.lines import described, finite, read_lines, whole
from dlm.asr.rescoring.lattice import NON_WORDS, Lattice, LatticeDraft, Scales
from dlm.errors import LatticeError

_FIELD = re.compile(
    r"""(?P<name>[A-Za-z_]\w*)\s*=\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"(?!\S)|"""
    r"""'(?P<single>(?:[^'\\]|\\.)*)'(?!\S)|(?P<bare>\S*))(?:\s+|$)"""
)
_NEEDS_QUOTES = re.compile(r"""[\s"'\\]""")
_ESCAPE = re.compile(r"\\([0-7]{3}|.)")
# Long names of fields that also have a short name.
_SHORT = {
    "VERSION": "V", "UTTERANCE": "U", "SUBLAT": "S", "NODES": "N", "LINKS": "L", "time": "t",
    "WORD": "W", "var": "v", "START": "S", "END": "E", "div": "d", "acoustic": "a", "ngram": "n",
    "language": "l",
}  # fmt: skip
_KEPT = ("v", "d")  # written back as they were read
_SUBLATTICES = "sub-lattices are not supported; expand them first (HTK: HLRescore)"


def read_slf(path: Path | str, *, non_words: Collection[str] = NON_WORDS) -> Lattice:
    """Reads a lattice from a file, plain or compressed; `-` is standard input. The lattice's id is
    the UTTERANCE field or else the file's name, each without folders and suffixes.
    Raises OSError, LatticeError."""
    return _Reader(str(path), non_words).read(read_lines(path))


def utterance_id(name: str) -> str:
    """Returns the id in a file's name, such as `a1` in `lattices/a1.slf.gz`."""
    base = name.replace("\\", "/").rpartition("/")[2]
    return re.sub(r"(\.(slf|lat|htk|gz|zst|xz|bz2|mfc|wav|flac))+$", "", base) or base


class _Reader:
    def __init__(self, path: str, non_words: Collection[str]) -> None:
        self._draft = LatticeDraft(utterance_id(path), path, non_words)
        self._header: dict[str, str] = {}
        self._nodes: dict[int, str] = {}  # words of the nodes
        self._links: list[tuple[int, dict[str, str]]] = []
        self._line: int | None = None

    def read(self, lines: Iterable[tuple[int, str]]) -> Lattice:
        for line, text in lines:
            self._line = line
            if text.startswith("#") or not text.strip():
                continue
            fields = dict(self._fields(text))
            if "I" in fields:
                self._node(fields)
            elif "J" in fields:
                self._links.append((self._line, fields))
            elif "S" in fields:
                raise self._error(_SUBLATTICES)
            else:
                self._header |= fields
        self._line = None
        self._check_counts()
        base = self._header_number("base", math.e)
        if base <= 0.0 or base == 1.0:
            raise self._error(
                f"base is {base:g}; expected a logarithm base above 1 (plain probabilities are not "
                "supported)"
            )
        factor = math.log(base)
        start, end = (self._header_node(name) for name in ("start", "end"))
        for line, fields in self._links:
            self._line = line
            self._link(fields, factor)
        self._line = None
        if "U" in self._header:
            self._draft.id = utterance_id(self._header["U"]) or self._draft.id
        return self._draft.finish(
            self._word_of_start(start),
            end,
            Scales(
                self._header_number("acscale", 1.0),
                self._header_number("lmscale", 1.0),
                self._header_number("wdpenalty", 0.0) * factor,
            ),
        )

    def _error(self, message: str) -> LatticeError:
        return self._draft.error(message, self._line)

    def _fields(self, text: str) -> Iterator[tuple[str, str]]:
        at, text = 0, text.strip()
        while at < len(text):
            match = _FIELD.match(text, at)
            if match is None:
                raise self._error(
                    f"the text at column {at + 1} is not a field; expected NAME=VALUE"
                )
            at, name = match.end(), match["name"]
            value = next(v for v in match.group("double", "single", "bare") if v is not None)
            yield _SHORT.get(name, name), _ESCAPE.sub(_unescaped, value)

    def _number(self, name: str, text: str) -> float:
        value = finite(text)
        if value is None:
            raise self._error(f"field {name} is {described(text)}; expected a finite number")
        return value

    def _whole(self, name: str, fields: dict[str, str]) -> int:
        text = fields.get(name)
        if text is None:
            raise self._error(f"field {name} is missing; expected {name}=NUMBER")
        number = whole(text)
        if number is None:
            raise self._error(f"field {name} is {described(text)}; expected 0, 1, 2, ...")
        return number

    def _header_number(self, name: str, default: float) -> float:
        return self._number(name, self._header[name]) if name in self._header else default

    def _header_node(self, name: str) -> int | None:
        if name not in self._header:
            return None
        node = self._whole(name, self._header)
        self._check_node(node, name)
        return node

    def _check_counts(self) -> None:
        for name, found, what in (("N", self._nodes, "nodes"), ("L", self._links, "links")):
            if name not in self._header:
                continue
            wanted = self._whole(name, self._header)
            if wanted != len(found) and (found or what == "links"):  # lines of nodes are optional
                raise self._error(
                    f"the header says {wanted} {what}, but the file has {len(found)}; "
                    "the file was cut off, or changed by hand. Copy it again"
                )

    def _check_node(self, node: int, name: str) -> None:
        if self._nodes:
            known = node in self._nodes
        else:
            known = "N" not in self._header or node < self._whole("N", self._header)
        if not known:
            raise self._error(
                f"field {name} names node {node}, which the file does not define; expected a line "
                f"I={node}"
            )

    def _node(self, fields: dict[str, str]) -> None:
        node = self._whole("I", fields)
        if node in self._nodes:
            raise self._error(f"node {node} is defined twice; expected one line I={node}")
        if "L" in fields:
            raise self._error(_SUBLATTICES)
        self._nodes[node] = fields.get("W", "")
        if "t" in fields:
            self._draft.time(node, self._number("t", fields["t"]))

    def _link(self, fields: dict[str, str], factor: float) -> None:
        source, target = self._whole("S", fields), self._whole("E", fields)
        for name, node in (("S", source), ("E", target)):
            self._check_node(node, name)
        score = {
            name: self._number(name, fields[name]) * factor for name in "alnr" if name in fields
        }
        acoustic, lm = score.get("a", 0.0), score.get("l", 0.0)
        if "r" in score:
            acoustic += self._header_number("prscale", 1.0) * score["r"]
        if "n" in score:
            lm += self._header_number("ngscale", 1.0) * score["n"]
        self._draft.arc(
            source,
            target,
            fields.get("W", self._nodes.get(target, "")),
            acoustic,
            lm,
            detail=" ".join(f"{name}={fields[name]}" for name in _KEPT if name in fields),
            line=self._line,
        )

    def _word_of_start(self, start: int | None) -> int | None:
        """Returns the start node or, if that node has a word, an extra node added before it."""
        if any("W" in fields for _, fields in self._links):
            return start
        if start is None:
            reached = {int(fields["E"]) for _, fields in self._links}
            sources = {int(fields["S"]) for _, fields in self._links} - reached
            if len(sources) != 1:
                return None  # `finish` reports this error
            (start,) = sources
        word = self._nodes.get(start, "")
        if word in self._draft.non_words:
            return start
        before = max(self._nodes) + 1
        self._draft.arc(before, start, word)
        return before


def _unescaped(match: re.Match[str]) -> str:
    found = match[1]
    return chr(int(found, 8)) if len(found) == 3 else found


def slf_text(lattice: Lattice, remark: str = "") -> str:
    """Formats a lattice as SLF, with `remark` as a comment; its scores read back exactly."""
    scales = lattice.scales
    lines = [
        *([f"# {remark}"] if remark else []),
        "VERSION=1.0",
        f"UTTERANCE={_quoted(lattice.id)}",
    ]
    if scales != Scales():
        lines.append(
            f"acscale={scales.acoustic!r} lmscale={scales.lm!r} wdpenalty={scales.word_penalty!r}"
        )
    lines += [f"start=0 end={lattice.end}", f"N={lattice.nodes} L={lattice.arcs}"]
    lines += [
        f"I={node}" if math.isnan(time) else f"I={node} t={time!r}"
        for node, time in enumerate(lattice.times.tolist())
    ]
    rows = zip(
        lattice.sources.tolist(),
        lattice.targets.tolist(),
        lattice.labels,
        lattice.details,
        lattice.acoustic.tolist(),
        lattice.lm.tolist(),
        strict=True,
    )
    for link, (source, target, label, detail, acoustic, lm) in enumerate(rows):
        word = _quoted(label or "!NULL")
        scores = f"a={acoustic!r} l={lm!r}"
        lines.append(
            " ".join(
                [f"J={link} S={source} E={target} W={word}", *([detail] * bool(detail)), scores]
            )
        )
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    if text and not _NEEDS_QUOTES.search(text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
