"""N-best lists: the most probable sentences of an utterance, with scores, from a lattice or from
files of JSON lines or text.

JSON has one utterance per line; a missing score is 0:

    {"id": "a1", "hyps": [{"words": "the man", "acoustic": -12.5, "lm": -7.25}]}

Text has one hypothesis per line; an utterance's hypotheses are on consecutive lines:

    a1 -12.5 -7.25 the man

Scores are natural logarithms, not scaled; higher is better. As in the model, words end at spaces,
tabs and line ends, not at other Unicode spaces.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any, TypeAlias

from dlm.asr.lines import finite, read_lines, recovered
from dlm.asr.rescoring.lattice import Lattice, Scales
from dlm.client.phrases import SPACES, split_text
from dlm.errors import ConfigError, LatticeError


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A hypothesis for an utterance; `acoustic` and `lm` are natural logarithms, not scaled."""

    words: tuple[str, ...] = field(repr=False)  # speech must not appear in logs
    acoustic: float = 0.0
    lm: float = 0.0

    def total(self, scales: Scales) -> float:
        return (
            scales.acoustic * self.acoustic
            + scales.lm * self.lm
            + scales.word_penalty * len(self.words)
        )


@dataclass(frozen=True, slots=True)
class NbestList:
    """The hypotheses of an utterance, best first, and how many scores came from each fallback."""

    id: str
    hypotheses: tuple[Hypothesis, ...]
    bigram_fallback: int = 0
    local_fallback: int = 0
    scales: Scales = field(default_factory=Scales)


# The hypotheses for an utterance, as a lattice or a list.
Hypotheses: TypeAlias = Lattice | NbestList


def read_nbest(
    path: Path | str, *, skip: Callable[[LatticeError], None] | None = None
) -> Iterator[NbestList]:
    """Yields the lists in a file: JSON lines if the first line begins with `{`, otherwise text.
    `skip` is called with the error of each malformed list, which is then left out. Raises OSError,
    LatticeError."""
    lines = ((number, text) for number, text in read_lines(path) if text.strip(SPACES))
    for first in lines:
        every = chain([first], lines)
        if first[1].lstrip(SPACES)[0] == "{":
            for number, text in every:
                yield from recovered(partial(_json_list, number, text, str(path)), skip)
        else:
            seen: set[str] = set()
            for name, some in groupby(every, key=lambda line: split_text(line[1])[0]):
                rows = list(some)
                yield from recovered(partial(_text_list, name, rows, str(path), seen), skip)


def _json_list(number: int, text: str, path: str) -> NbestList:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise LatticeError(f"not JSON ({exc})", path=path, line=number) from exc
    try:
        return _list_of(found)
    except LatticeError as exc:
        raise LatticeError(str(exc), path=path, line=number) from None


def _list_of(found: Any) -> NbestList:
    if not isinstance(found, dict) or not isinstance(found.get("id"), str) or not found["id"]:
        raise LatticeError('found no id; expected an object {"id": "...", "hyps": [...]}')
    name, hyps = found["id"], found.get("hyps")
    if not isinstance(hyps, list) or not hyps:
        raise LatticeError(f'utterance {name!r} has no hypotheses; expected "hyps": [...]')
    return NbestList(
        name, tuple(_hypothesis(one, f"hyps[{at}] of {name!r}") for at, one in enumerate(hyps))
    )


def _hypothesis(found: Any, where: str) -> Hypothesis:
    if not isinstance(found, dict) or not isinstance(found.get("words"), str):
        raise LatticeError(
            f'{where} is not a hypothesis; expected {{"words": "...", "acoustic": 0}}'
        )
    scores = []
    for name in ("acoustic", "lm"):
        value = found.get(name, 0.0)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or finite(str(value)) is None
        ):
            raise LatticeError(
                f"{name} of {where} is {str(value)[:60]!r}; expected a finite number"
            )
        scores.append(float(value))
    return Hypothesis(tuple(split_text(found["words"])), *scores)


def _text_list(name: str, rows: list[tuple[int, str]], path: str, seen: set[str]) -> NbestList:
    if name in seen:
        raise LatticeError(
            f"utterance {name!r} appears again; expected all of its lines together",
            path=path,
            line=rows[0][0],
        )
    seen.add(name)
    hypotheses = []
    for number, text in rows:
        fields = split_text(text)[1:]
        acoustic, lm = [*map(finite, fields[:2]), None, None][:2]
        if acoustic is None or lm is None:
            raise LatticeError(
                "the id is not followed by two finite scores; expected ID ACOUSTIC LM WORDS...",
                path=path,
                line=number,
            )
        hypotheses.append(Hypothesis(tuple(fields[2:]), acoustic, lm))
    return NbestList(name, tuple(hypotheses))


def nbest_json(found: NbestList) -> str:
    facts: dict[str, Any] = {"id": found.id}
    facts |= {
        name: n
        for name, n in (
            ("bigram_fallback", found.bigram_fallback),
            ("local_fallback", found.local_fallback),
        )
        if n
    }
    facts["hyps"] = [
        {"words": " ".join(one.words), "acoustic": one.acoustic, "lm": one.lm}
        for one in found.hypotheses
    ]
    return json.dumps(facts) + "\n"


def nbest_text(found: NbestList) -> str:
    """Formats a list as lines of text. Raises ConfigError if the id contains white space."""
    if split_text(found.id) != [found.id]:
        raise ConfigError(
            f"the id {found.id!r} contains white space, which ends an id in this format; write to "
            "a .jsonl file (JSON lines)"
        )
    return "".join(
        " ".join([found.id, repr(one.acoustic), repr(one.lm), *one.words]) + "\n"
        for one in found.hypotheses
    )


# ------------------------------------------------------------------- the best paths of a lattice

# The best path to a node: its score, and the sums of its acoustic and language-model scores.
_Way = tuple[float, float, float]


def best_paths(lattice: Lattice, limit: int = 1, scales: Scales | None = None) -> NbestList:
    """Returns the `limit` most probable sentences, best first; fewer if the lattice has fewer.

    Paths that differ only in times or silences count as one sentence: the best of them.

    Args   scales  the lattice's own by default
    Cost   time and memory grow with the words of the found sentences times the arcs tried per word
    Paper  A* over prefixes of sentences, with the exact best completion (`Lattice.best_to_end`).
           The nodes that a prefix leads to are searched together, as in Mohri and Riley, An
           Efficient Algorithm for the n-Best-Strings Problem, 2002.
    """
    scales = lattice.scales if scales is None else scales
    each = lattice.totals(scales)
    search = _Search(lattice, each.tolist(), lattice.best_to_end(each).tolist())
    found: list[tuple[float, Hypothesis]] = []
    while len(found) < limit and (one := search.next()) is not None:
        found.append(one)
    found.sort(key=lambda one: -one[0])  # estimates may differ from scores in the last bits
    return NbestList(lattice.id, tuple(one for _, one in found), scales=scales)


class _Search:
    """A search over prefixes of sentences, in the order of their best completions' scores."""

    def __init__(self, lattice: Lattice, each: list[float], to_end: list[float]) -> None:
        self._each, self._to_end = each, to_end
        self._begin = lattice.out_begin.tolist()
        self._targets = lattice.targets.tolist()
        self._labels, self._is_word = lattice.labels, lattice.is_word.tolist()
        self._acoustic, self._lm = lattice.acoustic.tolist(), lattice.lm.tolist()
        self._end = lattice.end
        self._number = count()  # breaks ties in favour of the earlier prefix
        self._heap: list[tuple[float, int, tuple[str, ...], dict[int, _Way]]] = []
        self._push((), {0: (0.0, 0.0, 0.0)})

    def _push(self, words: tuple[str, ...], ways: dict[int, _Way]) -> None:
        best = max(way[0] + self._to_end[node] for node, way in ways.items())
        heapq.heappush(self._heap, (-best, next(self._number), words, ways))

    def next(self) -> tuple[float, Hypothesis] | None:
        while self._heap:
            _, _, words, ways = heapq.heappop(self._heap)
            if self._end in ways:
                score, acoustic, lm = ways[self._end]
                return score, Hypothesis(words, acoustic, lm)
            self._extend(words, ways)
        return None

    def _extend(self, words: tuple[str, ...], ways: dict[int, _Way]) -> None:
        after: dict[str, dict[int, _Way]] = {}
        waiting = list(ways)
        heapq.heapify(waiting)
        while waiting:
            node = heapq.heappop(waiting)
            way = ways[node]
            for arc in range(self._begin[node], self._begin[node + 1]):
                target = self._targets[arc]
                if self._is_word[arc]:
                    reached = after.setdefault(self._labels[arc], {})
                else:
                    reached = ways
                score = way[0] + self._each[arc]
                known = reached.get(target)
                if known is None and reached is ways:
                    heapq.heappush(waiting, target)
                if known is None or score > known[0]:
                    reached[target] = (
                        score,
                        way[1] + self._acoustic[arc],
                        way[2] + self._lm[arc],
                    )
        if self._end in ways:
            self._push(words, {self._end: ways[self._end]})
        for word, reached in after.items():
            self._push((*words, word), reached)
