"""Synthetic traces: as large as asked, and in the rest as the recorded one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm.errors import ConfigError
from loadtest.cli.run import DEMO_TRACE
from loadtest.traces.synth import synthesise, write_synthetic
from loadtest.traces.trace import Trace, describe, read_trace, trace_of


@pytest.mark.parametrize(
    ("utterances", "contexts", "ratios"),
    [
        (33, 1.0, {"utterances": 3.0, "audio_s": 3.0, "requests": 3.0}),
        (0, 2.0, {"contexts_per_request": 2.0, "queries_per_audio_s": 2.0}),
        (0, 0.5, {"contexts_per_request": 0.5, "queries_per_audio_s": 0.5}),
    ],
)
def test_what_was_asked_changes_and_the_rest_is_kept(
    utterances: int, contexts: float, ratios: dict[str, float]
) -> None:
    """By the numbers that `show` prints; of the trace that comes along."""
    packaged = read_trace(DEMO_TRACE)
    first = describe(packaged, "")
    second = describe(trace_of(synthesise(packaged, utterances, contexts, 1)), "")
    for name in first.keys() - {"name", "made_by", "kinds", "calls", "distinct_words"}:
        expected = pytest.approx(ratios.get(name, 1.0), rel=0.12)
        assert second[name] / first[name] == expected, name


def test_a_seed_makes_one_trace_and_further_contexts_are_new(trace: Trace) -> None:
    """None stands twice in a request, and all were recorded somewhere."""
    first = synthesise(trace, 9, 2.0, 4)
    assert synthesise(trace, 9, 2.0, 4) == first
    assert synthesise(trace, 9, 2.0, 5) != first
    known = {c for one in trace.utterances() for r in one.requests for c in r.contexts}
    for request in (request for one in first for request in one.requests):
        assert len(set(request.contexts)) == len(request.contexts)
        assert known.issuperset(request.contexts)


def test_a_synthetic_trace_says_what_it_is(trace: Trace, tmp_path: Path) -> None:
    """Beside what its source says."""
    write_synthetic(tmp_path / "t.parquet", trace, 8, 2.0, 3)
    about = read_trace(tmp_path / "t.parquet").about
    assert about["model"] == trace.about["model"]
    assert about["synthetic"] == {"seed": 3, "utterances": 8, "contexts": 2.0}


@pytest.mark.parametrize(("utterances", "contexts"), [(-1, 1.0), (0, 0.0), (0, 1000.0)])
def test_scales_that_cannot_be_are_refused(trace: Trace, utterances: int, contexts: float) -> None:
    """Before anything is made."""
    with pytest.raises(ConfigError, match="expected"):
        synthesise(trace, utterances, contexts, 1)
