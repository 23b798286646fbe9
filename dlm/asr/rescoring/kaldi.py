"""Reads and writes Kaldi lattices as text (`lattice-copy ark:- ark,t:-`).

    utt-1
    0 1 5 3.25,10.5,1_2_3
    1 0.5,0.0,

An arc has a source, a target, a word and a weight, `graph cost,acoustic cost,transition-ids` (in a
CompactLattice). A line with only a state and a weight makes the state final. Transition-ids may
also be in a separate column; they are written as in CompactLattices. A cost is a negated natural
logarithm. Final states lead to an extra node, so every lattice has a single end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from dlm.asr.lines import described, finite, read_lines, recovered, whole
from dlm.asr.rescoring.lattice import NON_WORDS, Lattice, LatticeDraft
from dlm.client.phrases import SPACES, split_text
from dlm.errors import ConfigError, LatticeError

_NOT_FINAL = "infinity,infinity"


@dataclass(frozen=True, slots=True)
class SymbolTable:
    words: Mapping[str, str]  # word by number; the number is a string
    numbers: Mapping[str, str]

    @classmethod
    def read(cls, path: Path | str) -> SymbolTable:
        words: dict[str, str] = {}
        for line, text in read_lines(path):
            fields = split_text(text)
            if not fields:
                continue
            if len(fields) != 2 or whole(fields[1]) is None:
                raise LatticeError(
                    f"{text.strip()[:80]!r} is not a word and its number; expected WORD NUMBER",
                    path=str(path),
                    line=line,
                )
            if fields[1] in words:
                raise LatticeError(
                    f"number {fields[1]} appears twice; expected one word per number",
                    path=str(path),
                    line=line,
                )
            words[fields[1]] = fields[0]
        return cls(words, {word: number for number, word in words.items()})


def read_kaldi(
    path: Path | str,
    table: SymbolTable | None = None,
    *,
    non_words: Collection[str] = NON_WORDS,
    skip: Callable[[LatticeError], None] | None = None,
) -> Iterator[Lattice]:
    """Yields the lattices of an archive, one at a time.

    Args    path   plain or compressed; `-` is standard input
            table  words by number; without it, labels are words (`int2sym.pl -f 3`)
            skip   called with the error of each malformed lattice, which is then left out
    Raises  OSError, LatticeError;  ConfigError  labels are numbers, but there is no table
    """
    for block in _blocks(read_lines(path)):
        yield from recovered(partial(_read_block, str(path), block, table, non_words), skip)


def _blocks(lines: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    for is_empty, some in groupby(lines, key=lambda line: not line[1].strip(SPACES)):
        if not is_empty:
            yield list(some)


def _read_block(
    path: str,
    block: list[tuple[int, str]],
    table: SymbolTable | None,
    non_words: Collection[str],
) -> Lattice:
    return _Reader(path, block[0], table, non_words).read(block[1:])


class _Reader:
    def __init__(
        self,
        path: str,
        head: tuple[int, str],
        table: SymbolTable | None,
        non_words: Collection[str],
    ) -> None:
        line, text = head
        if len(split_text(text)) != 1:
            raise LatticeError(
                f"the line has several fields ({described(text)}); expected a line with only "
                "the id of an utterance, before its arcs",
                path=path,
                line=line,
            )
        self._draft = LatticeDraft(text.strip(SPACES), path, non_words)
        self._table = table
        self._line = line

    def read(self, lines: Iterable[tuple[int, str]]) -> Lattice:
        start: int | None = None
        finals: list[tuple[int, int, tuple[float, float, str]]] = []
        last = 0
        for line, text in lines:
            self._line = line
            fields = split_text(text)
            source = self._state(fields[0])
            start = source if start is None else start
            last = max(last, source)
            if len(fields) <= 2:
                weight = fields[1] if len(fields) == 2 else ""
                if not weight.lower().startswith(_NOT_FINAL):
                    finals.append((self._line, source, self._weight(weight)))
                continue
            target = self._state(fields[1])
            last = max(last, target)
            self._arc(source, target, fields)
        if start is None:
            raise self._draft.error(
                "the lattice is empty; expected arcs and a final state", self._line
            )
        if not finals:
            raise self._draft.error(
                "no state is final; expected a line with only a state and its weight"
            )
        for line, state, (lm, acoustic, detail) in finals:
            self._draft.arc(state, last + 1, "", acoustic, lm, detail=detail, line=line)
        return self._draft.finish(start, last + 1)

    def _error(self, message: str) -> LatticeError:
        return self._draft.error(message, self._line)

    def _state(self, text: str) -> int:
        number = whole(text)
        if number is None:
            raise self._error(f"a state is {described(text)}; expected 0, 1, 2, ...")
        return number

    def _arc(self, source: int, target: int, fields: list[str]) -> None:
        label, rest = fields[2], fields[3:]
        transition = ""
        if len(rest) == 2 or (rest and "," not in rest[0]):  # transition-ids have a separate column
            transition, label = ("" if label == "0" else label), rest[0]
            rest = rest[1:]
        if len(rest) > 1:
            raise self._error(
                f"an arc has {len(fields)} fields; expected 4, or 5 with transition-ids"
            )
        lm, acoustic, detail = self._weight(rest[0] if rest else "")
        self._draft.arc(
            source,
            target,
            self._word(label),
            acoustic,
            lm,
            detail=detail or transition,
            line=self._line,
        )

    def _weight(self, text: str) -> tuple[float, float, str]:
        if not text:
            return 0.0, 0.0, ""
        graph, _, rest = text.partition(",")
        acoustic, _, detail = rest.partition(",")
        costs = finite(graph), finite(acoustic)
        if costs[0] is None or costs[1] is None:
            raise self._error(
                f"a weight has graph cost {described(graph)} and acoustic cost "
                f"{described(acoustic)}; expected finite numbers in GRAPH,ACOUSTIC,TRANSITION_IDS"
            )
        return 0.0 - costs[0], 0.0 - costs[1], detail

    def _word(self, label: str) -> str:
        if self._table is not None:
            word = self._table.words.get(label)
            if word is None:
                raise self._error(
                    f"an arc's label ({described(label)}) is not in the symbol table; give the "
                    "words.txt that the lattice was made with"
                )
            return word
        if whole(label) is not None:
            if label == "0":
                return ""
            raise ConfigError(
                f"{self._draft.path}, line {self._line}: the labels of arcs are numbers, not "
                "words; give the words.txt that the lattice was made with"
            )
        return label


def kaldi_text(lattice: Lattice, table: SymbolTable | None = None) -> str:
    """Formats a lattice as the text of a CompactLattice; reading it gives the same bits. Raises
    ConfigError if the symbol table lacks a word of the lattice."""
    lines = [lattice.id]
    into_end = Counter(lattice.sources[lattice.targets == lattice.end].tolist())
    has_end = False
    rows = zip(
        lattice.sources.tolist(),
        lattice.targets.tolist(),
        lattice.labels,
        lattice.acoustic.tolist(),
        lattice.lm.tolist(),
        lattice.details,
        strict=True,
    )
    for source, target, label, acoustic, lm, detail in rows:
        weight = f"{0.0 - lm!r},{0.0 - acoustic!r},{detail}"
        if target == lattice.end and into_end[source] == 1:
            lines.append(f"{source} {weight}")
        else:
            has_end |= target == lattice.end
            lines.append(f"{source} {target} {_label(label, table, lattice.id)} {weight}")
    if has_end:
        lines.append(str(lattice.end))
    return "\n".join([*lines, "", ""])


def _label(label: str, table: SymbolTable | None, name: str) -> str:
    if table is None:
        return label or "<eps>"
    number = table.numbers.get(label) if label else "0"
    if number is None:
        raise ConfigError(
            f"words.txt lacks a word of utterance {name!r}; give the words.txt that the lattice "
            "was made with"
        )
    return number
