"""Schedules a run before its first request, from a trace, a load and a seed.

Utterances arrive by a pattern. Within an utterance, requests are due at their audio times. So the
schedule never waits for an answer, and a stalled server gets the load that its users would cause.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from loadtest.traces.trace import Trace

CONSTANT, POISSON = "constant", "poisson"
PATTERNS = (CONSTANT, POISSON)
RATE_ERROR = 0.01
TRIES_PER_DRAW = 10
MAX_TRIES = 100
MAX_PLANNED = 50_000_000  # requests in one run: 0.8 GB of schedule


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time with one rate: requests per second of all client processes together."""

    seconds: float
    per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """The offered load.

    segments     one after another, from time 0; in a closed loop their rates mean nothing
    concurrency  decoders of a closed loop; 0 for an open loop
    pattern      how utterances arrive: constant or poisson
    warmup_s     seconds before time 0, at the first rate, that are not measured
    """

    segments: tuple[Segment, ...]
    concurrency: int = 0
    pattern: str = POISSON
    warmup_s: float = 10.0

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ConfigError(
                f"the arrival pattern is {self.pattern!r}; expected one of {PATTERNS}"
            )
        if not self.segments:
            raise ConfigError("the load has no duration; expected at least one segment")
        for one in self.segments:
            if not (0 < one.seconds < 1e7 and 0 < one.per_s < 1e7):
                raise ConfigError(
                    f"the load has {one.per_s:g} requests per second for {one.seconds:g} s; "
                    "expected numbers above 0 and below 10 million"
                )
        if not 0 <= self.warmup_s < 1e6 or self.concurrency < 0:
            raise ConfigError(
                f"the warm-up is {self.warmup_s:g} s and the concurrency {self.concurrency}; "
                "expected 0 or more for both, and a warm-up below a million seconds"
            )

    @property
    def is_open(self) -> bool:
        return self.concurrency == 0

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.segments)

    @property
    def requests(self) -> float:
        """The expected number of requests of an open loop, including the warm-up."""
        measured = sum(one.seconds * one.per_s for one in self.segments)
        return measured + self.warmup_s * self.segments[0].per_s

    def facts(self) -> dict[str, Any]:
        return {
            "loop": "open" if self.is_open else "closed",
            "concurrency": self.concurrency,
            "segments": [asdict(one) for one in self.segments if self.is_open],
            "arrival_pattern": self.pattern if self.is_open else None,
            "warmup_s": self.warmup_s,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, eq=False)
class Schedule:
    """Every request of a run, in order of time.

    due_s    (P,)  due times, below 0 in the warm-up;  request  (P,)  numbers in the trace
    stream   (P,)  the arrival that each request belongs to
    """

    due_s: NDArray[np.float64]
    request: NDArray[np.int32]
    stream: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.due_s)

    def share(self, index: int, of: int) -> Schedule:
        """Returns one process's requests: those of streams with `number % of == index`."""
        mine = self.stream % of == index
        return Schedule(self.due_s[mine], self.request[mine], self.stream[mine])


def schedule(trace: Trace, load: Load, seed: int) -> Schedule:
    """The schedule of an open loop, stationary from the start.

    A draw of few utterances can miss the rate by a third, and a new rate takes effect late, by the
    length of an utterance. So the rates of arrivals are corrected, with the same draw, until each
    segment has the requested mean rate within `RATE_ERROR`. The best of `MAX_TRIES` draws is taken.

    Raises  ConfigError  the load is a closed loop, or has more than `MAX_PLANNED` requests
    """
    if not load.is_open:
        raise ConfigError(
            "a closed loop has no schedule, since each request waits for the previous one"
        )
    if load.requests > MAX_PLANNED:
        raise ConfigError(
            f"the run would have {load.requests:,.0f} requests; expected at most {MAX_PLANNED:,}. "
            "Lower the rate, or run several tests one after another"
        )
    if not trace.asks.any():
        raise ConfigError("the trace has no requests; record a trace with requests")
    asked = np.array([one.seconds * one.per_s for one in load.segments])
    ends = np.cumsum([0.0, *(one.seconds for one in load.segments)])
    best, least = None, np.inf
    for number in range(MAX_TRIES):
        if number % TRIES_PER_DRAW == 0:
            times = np.ones(len(asked))
        pairs = zip(load.segments, times, strict=True)
        scaled = tuple(Segment(s.seconds, s.per_s * by) for s, by in pairs)
        seeds = [seed, number // TRIES_PER_DRAW]
        plan = _drawn(trace, replace(load, segments=scaled), seeds)
        sent = np.diff(np.searchsorted(plan.due_s, ends))
        error = float(np.abs(sent / asked - 1).max())
        if best is None or error < least:
            best, least = plan, error
        if error <= RATE_ERROR:
            break
        times = np.clip(times * asked / np.maximum(sent, 1), 0.1, 10.0)
    assert best is not None
    return best


def _drawn(trace: Trace, load: Load, seeds: list[int]) -> Schedule:
    """Draws a schedule whose rate is right on average over seeds."""
    rng = np.random.default_rng(seeds)
    mixing = np.random.default_rng([*seeds, 1])  # utterances keep their order at each rate
    asks = trace.asks
    first, last = trace.first_request[:-1], trace.first_request[1:]
    asked = np.concatenate([[0], np.cumsum(asks)])
    per_arrival = float((asked[last] - asked[first]).mean())
    lead_s = load.warmup_s + float(trace.seconds.max())
    starts = arrivals(load, per_arrival, lead_s, rng)
    spoken = shuffled(len(trace.names), len(starts), mixing)
    counts = (last - first)[spoken]
    stream = np.repeat(np.arange(len(starts), dtype=np.int32), counts)
    within = np.arange(len(stream)) - np.repeat(np.cumsum(counts) - counts, counts)
    request = (np.repeat(first[spoken], counts) + within).astype(np.int32)
    due = starts[stream] + trace.at_s[request]
    kept = asks[request] & (due >= -load.warmup_s) & (due < load.seconds)
    order = np.argsort(due[kept], kind="stable")
    return Schedule(due[kept][order], request[kept][order], stream[kept][order])


def shuffled(utterances: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """(count,) utterances: all of them in a random order, then all of them in another, ..."""
    rounds = -(-count // utterances)
    return np.concatenate(
        [np.zeros(0, np.int64), *(rng.permutation(utterances) for _ in range(rounds))]
    )[:count]


def arrivals(
    load: Load, requests: float, lead_s: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draws ascending times, from -lead_s on, at which utterances of `requests` requests on average
    begin: a renewal process with mean interval 1, whose clock runs in proportion to the rate."""
    segments = (Segment(lead_s, load.segments[0].per_s), *load.segments)
    expected = [one.seconds * one.per_s / requests for one in segments]
    total = sum(expected)
    ends = _intervals(load, int(total + 6 * total**0.5 + 10), rng).cumsum()
    while ends[-1] < total:
        ends = np.concatenate([ends, ends[-1] + _intervals(load, len(ends), rng).cumsum()])
    out, before, begin_s = [], 0.0, -lead_s
    for one, mass in zip(segments, expected, strict=True):
        inside = ends[(ends >= before) & (ends < before + mass)] - before
        out.append(begin_s + inside * requests / one.per_s)
        before += mass
        begin_s += one.seconds
    return np.concatenate(out)


def _intervals(load: Load, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if load.pattern == CONSTANT:
        return np.ones(count)
    return rng.exponential(1.0, count)
