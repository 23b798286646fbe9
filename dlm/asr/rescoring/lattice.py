"""A word lattice: a graph whose paths are the sentences that a decoder found likely.

Readers build lattices with `LatticeDraft`, which checks and normalises them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, LatticeError

MAX_SCORE = 1e30  # limit of an arc's score, so that sums stay finite
# Labels that are not words: epsilons, sentence marks and silences.
NON_WORDS = frozenset(
    {"", "<eps>", "<s>", "</s>", "<sil>", "!NULL", "!SENT_START", "!SENT_END", "!SIL"}
)


@dataclass(frozen=True, slots=True)
class Scales:
    """How the scores of a path are combined, in natural logarithms.

    total = acoustic * (acoustic scores) + lm * (language model scores) + word_penalty * (words)

    Raises  ConfigError  a scale is not a finite number
    """

    acoustic: float = 1.0
    lm: float = 1.0
    word_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("acoustic", "lm", "word_penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ConfigError(
                    f"{name} is {value!r}; expected a finite number, as for all fields of Scales"
                )


@dataclass(frozen=True, eq=False)
class Lattice:
    """A graph whose arcs are words between points in time, with scores.

    Shapes
        sources   (A,)  int32    node that an arc leaves; ascending
        targets   (A,)  int32    node that the arc reaches; above its source
        labels    A     str      label of the arc; "" for none
        is_word   (A,)  bool     whether the label is a word, not a mark or silence
        acoustic  (A,)  float64  acoustic log-likelihood, natural logarithm, not scaled
        lm        (A,)  float64  language-model log-probability; all zero if not known
        times     (N,)  float64  seconds from the start of the utterance; nan if not known
        details   A     str      other fields of the arc in the file, kept for writing; usually ""
    Guarantees
        nodes are in topological order; every path leads from node 0 to the last node, and every
        node is on a path. No arc into the last node has a word: these arcs are the ends of
        sentences, and a rescored lattice has log P(</s>) in their `lm`.
    """

    id: str
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    labels: tuple[str, ...]
    is_word: NDArray[np.bool_]
    acoustic: NDArray[np.float64]
    lm: NDArray[np.float64]
    times: NDArray[np.float64]
    details: tuple[str, ...]
    scales: Scales = field(default_factory=Scales)

    @property
    def nodes(self) -> int:
        return len(self.times)

    @property
    def arcs(self) -> int:
        return len(self.sources)

    @property
    def end(self) -> int:
        return len(self.times) - 1

    @property
    def duration_s(self) -> float:
        """The largest known time of a node, in seconds; 0 if no time is known."""
        return float(np.nanmax(self.times)) if not np.isnan(self.times).all() else 0.0

    def __repr__(self) -> str:
        return f"Lattice(id={self.id!r}, nodes={self.nodes}, arcs={self.arcs})"  # hides the words

    @cached_property
    def out_begin(self) -> NDArray[np.int64]:
        """(N + 1,): arcs `out_begin[n]` to `out_begin[n + 1] - 1` are those that leave node n."""
        return np.searchsorted(self.sources, np.arange(self.nodes + 1))

    def totals(self, scales: Scales | None = None) -> NDArray[np.float64]:
        """Returns what each arc adds to a path score, (A,); `scales` defaults to the lattice's."""
        by = self.scales if scales is None else scales
        return by.acoustic * self.acoustic + by.lm * self.lm + by.word_penalty * self.is_word

    def best_to_end(self, arc_scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the best score of a path from each node to the end, (N,); `arc_scores`: (A,)."""
        best = np.full(self.nodes, -math.inf)
        best[self.end] = 0.0
        begin, targets = self.out_begin.tolist(), self.targets
        for node in range(self.end - 1, -1, -1):
            part = slice(begin[node], begin[node + 1])
            best[node] = (arc_scores[part] + best[targets[part]]).max()
        return best


@dataclass
class LatticeDraft:
    """A lattice being read from a file, arc by arc; `finish` checks it."""

    id: str
    path: str | None = None
    non_words: Collection[str] = NON_WORDS
    _arcs: list[tuple[int, int, str, float, float, str]] = field(default_factory=list)
    _lines: list[int] = field(default_factory=list)
    _times: dict[int, float] = field(default_factory=dict)

    def error(self, message: str, line: int | None = None) -> LatticeError:
        return LatticeError(f"{message} (utterance {self.id!r})", path=self.path, line=line)

    def time(self, node: int, time_s: float) -> None:
        self._times[node] = time_s

    def arc(
        self,
        source: int,
        target: int,
        label: str,
        acoustic: float = 0.0,
        lm: float = 0.0,
        *,
        detail: str = "",
        line: int | None = None,
    ) -> None:
        """Adds an arc between two nodes, given by the file's numbers. Raises LatticeError if a
        score is not a finite number, or the arc ends where it begins."""
        if not (abs(acoustic) < MAX_SCORE and abs(lm) < MAX_SCORE):  # also catches nan
            raise self.error(
                f"the scores of an arc are {acoustic:g} and {lm:g}; expected finite logarithms. "
                "Remove impossible arcs",
                line,
            )
        if source == target:
            raise self.error(
                f"an arc leads from node {source} to itself; a lattice must not have cycles", line
            )
        self._arcs.append((source, target, label, acoustic, lm, detail))
        self._lines.append(line or 0)

    def finish(
        self, start: int | None = None, end: int | None = None, scales: Scales | None = None
    ) -> Lattice:
        """Returns the lattice, without nodes that are not on a path.

        Args    start, end  default: the one node that no arc reaches; the one that no arc leaves
        Raises  LatticeError  no arcs, a cycle, no single start or end, or no path
        """
        if not self._arcs:
            raise self.error("the lattice has no arcs; expected a path from a start to an end")
        order = self._topological()
        start, end = self._ends(start, end)
        pairs = [(arc[0], arc[1]) for arc in self._arcs]
        onward = _linked(start, order, pairs)
        back = _linked(end, order[::-1], [(target, source) for source, target in pairs])
        kept = [node for node in order if node in onward and node in back]
        if not kept:
            raise self.error(
                f"no path leads from the start node {start} to the end node {end}; expected at "
                "least one. Rebuild the lattice"
            )
        arcs = [arc for arc in self._arcs if arc[0] in onward and arc[1] in back]
        times = [self._times.get(node, math.nan) for node in kept]
        if any(arc[1] == end and arc[2] not in self.non_words for arc in arcs):
            # Adds an end node after the last words: the arc into it has no word, and scores </s>.
            last = max(order) + 1
            arcs.append((end, last, "", 0.0, 0.0, ""))
            kept.append(last)
            times.append(times[-1])
        number = {node: i for i, node in enumerate(kept)}
        arcs.sort(key=lambda arc: number[arc[0]])
        return Lattice(
            self.id,
            np.array([number[arc[0]] for arc in arcs], np.int32),
            np.array([number[arc[1]] for arc in arcs], np.int32),
            tuple(arc[2] for arc in arcs),
            np.array([arc[2] not in self.non_words for arc in arcs], np.bool_),
            np.array([arc[3] for arc in arcs], np.float64),
            np.array([arc[4] for arc in arcs], np.float64),
            np.array(times, np.float64),
            tuple(arc[5] for arc in arcs),
            Scales() if scales is None else scales,
        )

    def _ends(self, start: int | None, end: int | None) -> tuple[int, int]:
        leaves, reached = {arc[0] for arc in self._arcs}, {arc[1] for arc in self._arcs}
        found = []
        for name, given, some, others in (
            ("start", start, leaves, reached),
            ("end", end, reached, leaves),
        ):
            ends = some - others if given is None else {given}
            if len(ends) != 1:
                raise self.error(
                    f"{len(ends)} nodes of the lattice could be its {name}; expected one, or a "
                    f"line that names it ({name}=NODE)"
                )
            (node,) = ends
            if node not in some:
                raise self.error(
                    f"node {node} is the {name}, but no arc {_JOINS[name]} it; add an arc, or "
                    "name another node"
                )
            found.append(node)
        return found[0], found[1]

    def _topological(self) -> list[int]:
        waiting: Counter[int] = Counter()
        out: dict[int, list[int]] = {}
        for source, target, *_ in self._arcs:
            out.setdefault(source, []).append(target)
            out.setdefault(target, [])
            waiting[target] += 1
        if all(source < target for source, target, *_ in self._arcs):
            return sorted(out)  # the file's numbers are already in order
        order = [node for node in sorted(out) if not waiting[node]]
        for node in order:  # the loop appends to `order`
            for target in out[node]:
                waiting[target] -= 1
                if not waiting[target]:
                    order.append(target)
        if len(order) < len(out):
            done = set(order)
            line, source, target = next(
                (line, arc[0], arc[1])
                for line, arc in zip(self._lines, self._arcs, strict=True)
                if arc[0] not in done and arc[1] not in done
            )
            raise self.error(
                f"the arc from node {source} to node {target} is on a cycle or after one; a "
                "lattice must not have cycles",
                line or None,
            )
        return order


def _linked(first: int, order: list[int], pairs: list[tuple[int, int]]) -> set[int]:
    out: dict[int, list[int]] = {}
    for node, other in pairs:
        out.setdefault(node, []).append(other)
    found = {first}
    for node in order:
        if node in found:
            found.update(out.get(node, ()))
    return found


_JOINS = {"start": "leaves", "end": "reaches"}
