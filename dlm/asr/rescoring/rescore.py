"""On-the-fly rescoring of a lattice or an n-best list with a model of any size.

    found = rescore(read_slf("a.slf"), client.utterance(), Search(Scales(lm=12.0)))
    best_paths(found.lattice).hypotheses[0]

Each node keeps distinct model states, and paths with equal states are merged. All queries at a
position (the words that may come next, after every remaining state) go out in one call, which is
one message per shard.

Paper  DLM section 3.3: K hypotheses by W words at each position, batched by server. Where we
       differ: positions are those of a lattice (words from its start), hypotheses with equal states
       are merged, and a hypothesis is ranked by its best completion, since hypotheses at one
       position end at different times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from dlm.asr.rescoring.lattice import Lattice, Scales
from dlm.asr.rescoring.nbest import Hypotheses, NbestList, best_paths
from dlm.asr.settings import MIN_WEIGHT, SearchSettings
from dlm.client import AsyncUtterance, Client, Extension, Phrases, States, Utterance
from dlm.client.phrases import Weights, prepared
from dlm.errors import DlmError, QueryError
from dlm.ngram.query import BIGRAM_FALLBACK, LOCAL_FALLBACK
from dlm.units import LN_10


class StateTable:
    """Numbers a model's distinct states in order of occurrence, those of `first` (1-D) first."""

    def __init__(self, first: States) -> None:
        self._numbers: dict[bytes, int] = {}
        self._states = first[:0]
        self.add(first)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, states: States) -> list[int]:
        """Returns the number of each state, in a flat list; new states get the next numbers."""
        numbers, known = self._numbers, len(self._numbers)
        found: list[int] = []
        fresh: list[int] = []
        for place, key in enumerate(states.keys()):
            number = numbers.setdefault(key, len(numbers))
            if number == known + len(fresh):
                fresh.append(place)
            found.append(number)
        if fresh:
            self._states = States.joined([self._states, states.reshape(-1)[fresh]])
        return found

    def take(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> States:
        return cast(States, self._states[np.asarray(numbers, np.int64)])


@dataclass(frozen=True)
class Search(SearchSettings):
    """How to search a lattice and combine its scores, by default with the lattice's own scales."""

    scales: Scales | None = None

    def scales_of(self, given: Hypotheses) -> Scales:
        return given.scales if self.scales is None else self.scales


@dataclass(frozen=True, eq=False)
class PositionBatch:
    """The queries at a position, as `Utterance.extend` takes them; `time_s` is nan if unknown.

    Shapes  states (K,);  words (K, W), the ids to score after each state
    """

    time_s: float
    states: States
    words: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Rescored:
    """A lattice with a model's scores.

    lattice    has a node per (node, state) pair reached; `lm` has the new scores, with those of
               </s> on the arcs into the end
    bonus      (A,) what phrases add to each arc, a natural logarithm; None without phrases. `lm`
               includes bonus / (scale of `lm`), so other programs find the same best path
    positions  number of positions with queries
    queries    number of scores requested; the last two fields count those from each fallback
    """

    lattice: Lattice
    bonus: NDArray[np.float64] | None
    positions: int
    queries: int
    bigram_fallback: int
    local_fallback: int


Positions: TypeAlias = Generator[PositionBatch, Extension, Rescored]


def rescore(
    lattice: Lattice,
    utterance: Utterance,
    search: Search | None = None,
    watch: Callable[[PositionBatch], None] | None = None,
) -> Rescored:
    """Returns the lattice with the scores of the utterance's model; `watch` is called with each
    batch before it is sent. Raises UnavailableError, ProtocolError; see `Utterance.extend`."""
    steps = positions(lattice, utterance, search)
    try:
        batch = next(steps)
        while True:
            if watch is not None:
                watch(batch)
            batch = steps.send(utterance.extend(batch.states, batch.words))
    except StopIteration as end:
        return cast(Rescored, end.value)


def positions(
    lattice: Lattice, utterance: Utterance | AsyncUtterance, search: Search | None = None
) -> Positions:
    """Yields the queries at each position, takes the answers, and returns the lattice. Serves
    callers that send or record queries themselves; `utterance` only supplies ids and states."""
    search = search or Search()
    return (yield from _Expansion(lattice, utterance, search).run())


def rescore_nbest(
    found: NbestList, utterance: Utterance, search: Search | None = None
) -> tuple[NbestList, int]:
    """Returns the list with the scores of the utterance's model, best first, and the number of
    queries, all made in one call. Raises what `Utterance.score_sentences` raises."""
    search = search or Search()
    scales = search.scales_of(found)
    per_bonus = _lm_per_bonus(utterance, scales)
    scores = utterance.score_sentences([one.words for one in found.hypotheses])
    made = [
        replace(
            one,
            lm=search.new_weight * (score.log10_prob * LN_10)
            + search.old_weight * one.lm
            + per_bonus * score.bonus,
        )
        for one, score in zip(found.hypotheses, scores, strict=True)
    ]
    made.sort(key=lambda one: -one.total(scales))
    partial = sum(int((score.token_source == BIGRAM_FALLBACK).sum()) for score in scores)
    small = sum(int((score.token_source == LOCAL_FALLBACK).sum()) for score in scores)
    return (
        NbestList(found.id, tuple(made), partial, small, scales),
        sum(score.tokens for score in scores),
    )


def _lm_per_bonus(utterance: Utterance | AsyncUtterance, scales: Scales) -> float:
    """Returns what a log10 bonus of 1 adds to an LM score that is later multiplied by its scale."""
    if utterance.phrases is None:
        return 0.0
    if not abs(scales.lm) >= MIN_WEIGHT:
        raise QueryError(
            f"the scale of LM scores is {scales.lm:g}, but phrase bonuses are divided by it before "
            f"they are added to these scores; expected an absolute value of at least {MIN_WEIGHT:g}"
        )
    return LN_10 / scales.lm


# An arrival at a node: state, score, previous hypothesis (-1: none), arc, and the arc's lm score.
_Arrival: TypeAlias = tuple[int, float, int, int, float]
# An arc: its number, target, word id, scaled acoustic score, weighted old lm score, word penalty.
_Arc: TypeAlias = tuple[int, int, int, float, float, float]
_SILENT = -1  # the word id of an arc without a query


class _Expansion:
    """Expands one lattice, position by position. A hypothesis is a pair of node and state."""

    def __init__(
        self, lattice: Lattice, utterance: Utterance | AsyncUtterance, search: Search
    ) -> None:
        self._lattice, self._utterance, self._search = lattice, utterance, search
        self._scales = search.scales_of(lattice)
        self._phrases = utterance.phrases
        self._per_bonus = _lm_per_bonus(utterance, self._scales)
        word_ids = utterance.ids_of(lattice.labels).astype(np.int64)
        word_ids[~lattice.is_word] = _SILENT
        word_ids[lattice.targets == lattice.end] = utterance.vocabulary.end_id
        self._words = max(int(word_ids.max(initial=0)) + 1, 1)
        self._word_ids = word_ids
        self._out = self._arcs_of_nodes()
        self._asks = [any(word != _SILENT for _, _, word, *_ in arcs) for arcs in self._out]
        self._states = StateTable(utterance.states([utterance.begin()]))
        # state * words + word -> new lm, next state, and the lm score of the phrases' bonus
        self._memo: dict[int, tuple[float, int, float]] = {}
        # The node, state and score of each hypothesis.
        self._node: list[int] = []
        self._state: list[int] = []
        self._score: list[float] = []
        # Arcs between hypotheses: from, to, arc of the lattice, lm score.
        self._links: list[tuple[int, int, int, float]] = []
        self._positions = self._queries = self._partial = self._small = 0

    def run(self) -> Positions:
        lattice, search = self._lattice, self._search
        to_end = by_word = [0.0] * lattice.nodes
        if not search.exact:
            to_end, by_word = yield from self._best_to_end()
        beam = search.beam * (abs(self._scales.lm) or 1.0)
        arrivals: list[list[_Arrival]] = [[] for _ in range(lattice.nodes)]
        arrivals[0] = [(0, 0.0, -1, -1, 0.0)]
        for nodes in self._by_position():
            best = max(
                (one[1] + to_end[node] for node in nodes for one in arrivals[node]),
                default=-math.inf,
            )
            left: list[int] = []
            for node in nodes:
                for number in self._merge(node, arrivals[node]):
                    if self._score[number] + to_end[node] >= best - beam:
                        self._go_on_silently(number, arrivals)
                        if self._asks[node]:
                            left.append(number)
                arrivals[node] = []
            if search.hypotheses is not None and len(left) > search.hypotheses:
                left.sort(key=lambda one: -(self._score[one] + by_word[self._node[one]]))
                del left[search.hypotheses :]
            yield from self._ask(left)
            for number in left:
                self._go_on(number, arrivals)
        # After </s>, states no longer matter: all hypotheses at the end are merged.
        self._merge(lattice.end, [(0, *one[1:]) for one in arrivals[lattice.end]])
        return Rescored(
            *self._expanded(), self._positions, self._queries, self._partial, self._small
        )

    def _arcs_of_nodes(self) -> list[list[_Arc]]:
        lattice, scales = self._lattice, self._scales
        rows = zip(
            range(lattice.arcs),
            lattice.targets.tolist(),
            self._word_ids.tolist(),
            (scales.acoustic * lattice.acoustic).tolist(),
            (self._search.old_weight * lattice.lm).tolist(),
            (scales.word_penalty * lattice.is_word).tolist(),
            strict=True,
        )
        out: list[list[_Arc]] = [[] for _ in range(lattice.nodes)]
        for source, row in zip(lattice.sources.tolist(), rows, strict=True):
            out[source].append(row)
        return out

    def _by_position(self) -> list[list[int]]:
        """Groups nodes, except the end, by the largest number of words before them. A position is
        reached from earlier positions or, without a word, from its own earlier nodes."""
        depth = [0] * self._lattice.nodes
        for node, arcs in enumerate(self._out):
            for _, target, word, *_ in arcs:
                depth[target] = max(depth[target], depth[node] + (word != _SILENT))
        out: list[list[int]] = [[] for _ in range(max(depth[:-1]) + 1)]
        for node in range(self._lattice.end):
            out[depth[node]].append(node)
        return out

    def _best_to_end(self) -> Generator[PositionBatch, Extension, tuple[list[float], list[float]]]:
        """Estimates the score of the best path from each node to the end, before paths are scored:
        from the lattice's own LM scores or, if it has none, from the model's unigrams. Returns the
        estimates, and those for paths that begin with a word.

        Scores of arcs without a word are not estimated, so the best hypothesis at a position stays
        the best along such arcs, and a hypothesis always reaches the end.
        """
        lattice, search = self._lattice, self._search
        asked = self._word_ids != _SILENT
        if lattice.lm.any():
            lm = (search.new_weight * asked + search.old_weight) * lattice.lm
        else:
            words, places = np.unique(self._word_ids[asked], return_inverse=True)
            null = self._utterance.states([self._utterance.null()])
            found = yield PositionBatch(math.nan, null, words.astype(np.uint32)[None, :])
            self._count(found)
            lm = np.zeros(lattice.arcs)
            lm[asked] = search.new_weight * LN_10 * found.log10_prob[0].astype(np.float64)[places]
        guessed = replace(lattice, lm=lm).totals(self._scales)
        if self._phrases is not None:  # or new words would be dropped before their bonus counts
            guessed[asked] += LN_10 * self._phrases.lookahead(self._word_ids[asked])
        best = lattice.best_to_end(guessed)
        by_word = np.full(lattice.nodes, -math.inf)
        completed = guessed[asked] + best[lattice.targets[asked]]
        np.maximum.at(by_word, lattice.sources[asked], completed)
        return best.tolist(), by_word.tolist()

    def _merge(self, node: int, arrivals: list[_Arrival]) -> list[int]:
        known: dict[int, int] = {}
        for state, score, before, arc, lm in arrivals:
            number = known.get(state)
            if number is None:
                number = known[state] = len(self._node)
                self._node.append(node)
                self._state.append(state)
                self._score.append(score)
            elif score > self._score[number]:
                self._score[number] = score
            if before >= 0:
                self._links.append((before, number, arc, lm))
        return list(known.values())

    def _go_on_silently(self, number: int, arrivals: list[list[_Arrival]]) -> None:
        state, score, scale = self._state[number], self._score[number], self._scales.lm
        for arc, target, word, acoustic, old, penalty in self._out[self._node[number]]:
            if word == _SILENT:
                total = score + ((acoustic + scale * old) + penalty)
                arrivals[target].append((state, total, number, arc, old))

    def _go_on(self, number: int, arrivals: list[list[_Arrival]]) -> None:
        state, score, scale = self._state[number], self._score[number], self._scales.lm
        weight = self._search.new_weight
        for arc, target, word, acoustic, old, penalty in self._out[self._node[number]]:
            if word != _SILENT:
                new, after, extra = self._memo[state * self._words + word]
                lm = weight * new + old + extra
                total = score + ((acoustic + scale * lm) + penalty)
                arrivals[target].append((after, total, number, arc, lm))

    def _ask(self, left: list[int]) -> Generator[PositionBatch, Extension, None]:
        fresh = {
            self._state[number] * self._words + word: None
            for number in left
            for _, _, word, *_ in self._out[self._node[number]]
            if word != _SILENT
        }
        asked = [key for key in fresh if key not in self._memo]
        if not asked:
            return
        states, words = np.divmod(np.array(asked, np.int64), self._words)
        time_s = max(self._lattice.times[self._node[number]] for number in left)
        batch = PositionBatch(
            float(time_s), self._states.take(states), words.astype(np.uint32)[:, None]
        )
        found = yield batch
        self._positions += 1
        self._count(found)
        new = (LN_10 * found.log10_prob[:, 0].astype(np.float64)).tolist()
        extra = [0.0] * len(asked)
        if found.bonus is not None:
            extra = (self._per_bonus * found.bonus[:, 0].astype(np.float64)).tolist()
        rows = zip(new, self._states.add(found.states), extra, strict=True)
        self._memo.update(zip(asked, rows, strict=True))

    def _count(self, found: Extension) -> None:
        self._queries += found.source.size
        self._partial += int((found.source == BIGRAM_FALLBACK).sum())
        self._small += int((found.source == LOCAL_FALLBACK).sum())

    def _bonuses(
        self, before: NDArray[np.int64], after: NDArray[np.int64], arcs: NDArray[np.int64]
    ) -> NDArray[np.float64] | None:
        """Returns what phrases add to the links from `before` to `after`, as natural logarithms."""
        if self._phrases is None:
            return None
        nodes = self._states.take(self._state)._nodes
        assert nodes is not None
        bonus = LN_10 * self._phrases.bonus(nodes[before], nodes[after])
        return np.where(self._word_ids[arcs] == _SILENT, 0.0, bonus)

    def _expanded(self) -> tuple[Lattice, NDArray[np.float64] | None]:
        old, end = self._lattice, len(self._node) - 1
        links = sorted(self._links)
        kept = np.zeros(end + 1, np.bool_)
        kept[end] = True
        for link in reversed(links):  # links lead to higher numbers
            kept[link[0]] |= kept[link[1]]
        links = [link for link in links if kept[link[0]] and kept[link[1]]]
        renumbered = np.cumsum(kept) - 1
        before, after, arcs = (np.array([link[i] for link in links], np.int64) for i in range(3))
        nodes = np.array(self._node)[kept]
        lattice = Lattice(
            old.id,
            renumbered[before].astype(np.int32),
            renumbered[after].astype(np.int32),
            tuple(old.labels[arc] for arc in arcs),
            old.is_word[arcs],
            old.acoustic[arcs],
            np.array([link[3] for link in links], np.float64),
            old.times[nodes],
            tuple(old.details[arc] for arc in arcs),
            self._scales,
        )
        return lattice, self._bonuses(before, after, arcs)


# ------------------------------------------------- many utterances, whose queries share messages


@dataclass(frozen=True, slots=True)
class RescoredUtterance:
    """An utterance with a model's scores; for counts, see `Rescored`. `audio_s` is 0 if unknown."""

    found: Hypotheses
    audio_s: float
    positions: int
    queries: int
    bigram_fallback: int
    local_fallback: int


def rescore_one(
    client: Client,
    given: Hypotheses,
    search: Search,
    nbest: int | None = None,
    phrases: Phrases | None = None,
) -> RescoredUtterance:
    """Rescores one utterance on its own; with `nbest`, a lattice becomes a list of that length."""
    utterance = client.utterance(phrases=phrases)
    if not isinstance(given, Lattice):
        listed, queries = rescore_nbest(given, utterance, search)
        if nbest is not None:
            listed = replace(listed, hypotheses=listed.hypotheses[:nbest])
        return RescoredUtterance(
            listed, 0.0, 1, queries, listed.bigram_fallback, listed.local_fallback
        )
    done = rescore(given, utterance, search)
    found: Hypotheses = done.lattice
    if nbest is not None:
        found = replace(
            best_paths(done.lattice, nbest),
            bigram_fallback=done.bigram_fallback,
            local_fallback=done.local_fallback,
        )
    counts = (done.positions, done.queries, done.bigram_fallback, done.local_fallback)
    return RescoredUtterance(found, given.duration_s, *counts)


def rescore_many(
    client: Client,
    given: Iterable[Hypotheses],
    search: Search,
    *,
    nbest: int | None = None,
    jobs: int = 8,
    phrases: Phrases | Weights | None = None,
) -> Iterator[RescoredUtterance]:
    """Rescores all utterances, `jobs` at a time, and yields them in order; reads each one only when
    needed. Utterances before an error are still yielded. Raises what reading `given` raises, and
    UnavailableError, ProtocolError, QueryError.
    """
    listed = prepared(phrases)
    waiting: deque[Future[RescoredUtterance]] = deque()
    with ThreadPoolExecutor(jobs, thread_name_prefix="dlm-rescore") as pool:
        try:
            try:
                for one in given:
                    waiting.append(pool.submit(rescore_one, client, one, search, nbest, listed))
                    if len(waiting) > jobs:
                        yield waiting.popleft().result()
            except DlmError:
                while waiting:
                    yield waiting.popleft().result()
                raise
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
