"""Schedules: the rate that was asked for, in the pattern that was asked for, the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from dlm.errors import ConfigError
from loadtest.cli.run import DEMO_TRACE
from loadtest.traces.schedule import (
    CONSTANT,
    POISSON,
    Load,
    Segment,
    arrivals,
    schedule,
    shuffled,
)
from loadtest.traces.trace import Trace, read_trace


@pytest.mark.parametrize(("pattern", "spread"), [(CONSTANT, 0.0), (POISSON, 1.0)])
def test_arrivals_have_the_rate_and_the_spread_of_their_pattern(
    pattern: str, spread: float
) -> None:
    """Of the times between utterances of ten requests, by the coefficient of variation."""
    load = Load((Segment(9000, 20.0),), pattern=pattern)
    found = np.diff(arrivals(load, 10.0, 1.0, np.random.default_rng(5)))
    assert found.mean() == pytest.approx(0.5, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(spread, abs=0.08)


def test_requests_come_at_their_audio_times_in_whole_utterances(trace: Trace) -> None:
    """Sorted, from the warm-up on, at the rate; and the shares of processes make up the whole."""
    load = Load((Segment(200, 50),), warmup_s=5)
    plan = schedule(trace, load, seed=1)
    assert (np.diff(plan.due_s) >= 0).all()
    assert plan.due_s[0] >= -5
    assert plan.due_s[-1] < 200
    measured = plan.due_s >= 0
    assert np.count_nonzero(measured) / 200 == pytest.approx(50, rel=0.1)
    first_seconds = np.count_nonzero((plan.due_s >= -5) & (plan.due_s < 15)) / 20
    assert first_seconds == pytest.approx(50, rel=0.35)  # stationary: no ramp of its own
    for stream in np.unique(plan.stream)[50:60]:
        mine = plan.stream == stream
        requests = plan.request[mine]
        (number,) = set(trace.utterance[requests].tolist())
        assert requests.tolist() == list(range(*trace.first_request[number : number + 2].tolist()))
        begins = plan.due_s[mine] - trace.at_s[requests]
        assert begins == pytest.approx(begins[0])
    parts = [plan.share(index, 3) for index in range(3)]
    assert sum(len(part) for part in parts) == len(plan)
    assert not set(parts[0].stream.tolist()) & set(parts[1].stream.tolist())
    again = schedule(trace, load, seed=1)
    assert (again.due_s == plan.due_s).all()
    assert (schedule(trace, load, seed=2).due_s[:50] != plan.due_s[:50]).any()


@pytest.mark.parametrize("pattern", [POISSON, CONSTANT])
def test_each_segment_of_a_short_run_has_the_mean_rate_that_was_asked_for(pattern: str) -> None:
    """Of the packaged trace, 30 s at 50 requests/s are 35 utterances: one draw of them can be off
    by a third."""
    trace = read_trace(DEMO_TRACE)
    for rates in ((50,), (50, 100, 200)):
        load = Load(tuple(Segment(30, rate) for rate in rates), pattern=pattern)
        for seed in range(3):
            due = schedule(trace, load, seed).due_s
            sent, _ = np.histogram(due, np.arange(len(rates) + 1) * 30.0)
            assert sent / 30 == pytest.approx(rates, rel=0.02)


def test_every_utterance_comes_before_any_comes_again() -> None:
    """So that averages over a run are those of the trace."""
    drawn = shuffled(5, 23, np.random.default_rng(0))
    assert [sorted(drawn[at : at + 5].tolist()) for at in (0, 5, 10, 15)] == [[*range(5)]] * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"segments": ()}, "segment"),
        ({"segments": (Segment(float("nan"), 1),)}, "numbers above 0"),
        ({"warmup_s": -1.0}, "warm-up is -1 s"),
    ],
)
def test_loads_that_cannot_be_are_refused(changed: dict[str, object], message: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigError, match=message):
        Load(**{"segments": (Segment(1, 1),), **changed})  # type: ignore[arg-type]


def test_what_cannot_be_planned_is_refused(trace: Trace) -> None:
    """A closed loop, and more than memory holds."""
    with pytest.raises(ConfigError, match="closed loop"):
        schedule(trace, Load((Segment(1, 1),), 2), 0)
    with pytest.raises(ConfigError, match="at most 50,000,000"):
        schedule(trace, Load((Segment(1e6, 100),)), 0)
