"""A larger trace from a recorded one: more utterances and speakers, longer, wider; from a seed.

What is not asked to change keeps its statistics, since everything is drawn from the recorded
requests: utterances in turn, further contexts and words as often as they were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlm.errors import ConfigError
from loadtest.traces.schedule import shuffled
from loadtest.traces.statistics import describe
from loadtest.traces.trace import Request, Spoken, Trace, Words

TRIES = 20  # draws for each further context or word; those that are there already do not count
KEPT = 0.05  # a statistic that differs by less than this share was kept
COMPARED = (
    *("utterances", "speakers", "audio_s", "utterance_s", "requests_per_audio_s"),
    *("queries_per_audio_s", "contexts_per_request", "words_per_context"),
    *("context_words", "gap_s", "distinct_words"),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """What becomes of a trace; 0 utterances or speakers: as many as there are.

    length    times the seconds of an utterance;  contexts  times the contexts of a request
    words     times the words asked of a context; requests for one word stay so
    """

    utterances: int = 0
    speakers: int = 0
    length: float = 1.0
    contexts: float = 1.0
    words: float = 1.0

    def __post_init__(self) -> None:
        if self.utterances < 0 or self.speakers < 0:
            raise ConfigError(
                f"{self.utterances} utterances of {self.speakers} speakers; "
                "expected numbers of at least 0"
            )
        for name in ("length", "contexts", "words"):
            if not 0.01 <= getattr(self, name) <= 100:
                raise ConfigError(f"--{name} is {getattr(self, name):g}; expected 0.01 to 100")


@dataclass(frozen=True, slots=True)
class Statistic:
    name: str
    recorded: float
    synthetic: float

    @property
    def is_kept(self) -> bool:
        return abs(self.synthetic - self.recorded) <= KEPT * abs(self.recorded)


def synthesise(trace: Trace, scale: Scale, seed: int) -> list[Spoken]:
    """The utterances of a scaled trace; the same for the same trace, scale and seed."""
    return _Synthesis(trace, scale, seed).run()


def compare(recorded: Trace, synthetic: Trace) -> list[Statistic]:
    first, second = describe(recorded, ""), describe(synthetic, "")
    return [Statistic(name, float(first[name]), float(second[name])) for name in COMPARED]


def about(trace: Trace, scale: Scale, seed: int, statistics: Sequence[Statistic]) -> dict[str, Any]:
    inherited = {name: value for name, value in trace.about.items() if name != "version"}
    return {
        **inherited,
        "made_by": "python -m loadtest synth",
        "synthetic": {
            "seed": seed,
            "utterances": scale.utterances,
            "speakers": scale.speakers,
            "times": {n: getattr(scale, n) for n in ("length", "contexts", "words")},
            "kept": [one.name for one in statistics if one.is_kept],
            "changed": [one.name for one in statistics if not one.is_kept],
        },
    }


class _Synthesis:
    def __init__(self, trace: Trace, scale: Scale, seed: int) -> None:
        self._trace = trace
        self._scale = scale
        self._rng = np.random.default_rng(seed)
        self._recorded = list(trace.utterances())
        requests = [request for one in self._recorded for request in one.requests]
        self._contexts = [context for request in requests for context in request.contexts]
        self._words = [word for request in requests for row in request.words for word in row]
        speakers = sorted({one.speaker for one in self._recorded})
        self._place = {speaker: at for at, speaker in enumerate(speakers)}
        self._of_speaker = {
            speaker: [one for one in self._recorded if one.speaker == speaker]
            for speaker in speakers
        }

    def run(self) -> list[Spoken]:
        count = self._scale.utterances or len(self._recorded)
        order = shuffled(len(self._recorded), count, self._rng)
        return [self._one(self._recorded[at], n) for n, at in enumerate(order.tolist())]

    def _one(self, source: Spoken, number: int) -> Spoken:
        seconds = source.seconds * self._scale.length
        requests = [self._scaled(one) for one in self._laid_out(source, seconds)]
        name = f"{source.name}#{number}"
        return Spoken(name, self._speaker(source.speaker), seconds, tuple(requests))

    def _speaker(self, recorded: str) -> str:
        """Each recorded speaker becomes as many as each other, or several become one."""
        wanted, known = self._scale.speakers, len(self._place)
        if wanted in (0, known):
            return recorded
        place = self._place[recorded]
        if wanted < known:
            return f"speaker-{place % wanted}"
        variants = wanted // known + (place < wanted % known)
        return f"{recorded}.{int(self._rng.integers(variants))}"

    def _laid_out(self, source: Spoken, seconds: float) -> list[Request]:
        """Requests until the new length is full: the utterance's, then others' of its speaker."""
        out: list[Request] = []
        begin, one = 0.0, source
        others = self._of_speaker[source.speaker]
        while begin < seconds:
            out += [
                replace(request, at_s=begin + request.at_s)
                for request in one.requests
                if begin + request.at_s <= seconds
            ]
            begin += one.seconds
            one = others[int(self._rng.integers(len(others)))]
        return out or [Request(0.0, source.requests[0].kind, (), ())]

    def _scaled(self, request: Request) -> Request:
        if not request.contexts:
            return request
        per_state = len(request.words) > 1
        contexts, rows = list(request.contexts), list(request.words)
        wanted = max(round(len(contexts) * self._scale.contexts), 1)
        if wanted < len(contexts):
            kept = self._some(len(contexts), wanted)
            contexts = [contexts[at] for at in kept]
            rows = [rows[at] for at in kept] if per_state else rows
        else:
            more = self._drawn(self._contexts, contexts, wanted - len(contexts))
            contexts += more
            if per_state:
                rows += [rows[int(self._rng.integers(len(rows)))] for _ in more]
        if rows and len(rows[0]) > 1 and self._scale.words != 1.0:
            rows = self._widened(rows)
        return replace(request, contexts=tuple(contexts), words=tuple(rows))

    def _widened(self, rows: list[Words]) -> list[Words]:
        wanted = max(round(len(rows[0]) * self._scale.words), 1)
        if wanted <= len(rows[0]):
            kept = self._some(len(rows[0]), wanted)
            return [tuple(row[at] for at in kept) for row in rows]
        wide = [(*row, *self._drawn(self._words, row, wanted - len(row))) for row in rows]
        width = min(map(len, wide))
        return [row[:width] for row in wide]

    def _some(self, of: int, wanted: int) -> list[int]:
        """Places that are kept: drawn, since the first ones are the best, with longer contexts."""
        drawn: list[int] = np.sort(self._rng.permutation(of)[:wanted]).tolist()
        return drawn

    def _drawn(self, recorded: Sequence[Any], there: Sequence[Any], count: int) -> list[Any]:
        """`count` of the recorded, as often as they were, and none that is there already; fewer
        where there are not so many different ones."""
        found: dict[Any, None] = {}
        for _ in range(TRIES * count):
            if len(found) == count:
                break
            one = recorded[int(self._rng.integers(len(recorded)))]
            if one not in there:
                found[one] = None
        return list(found)
