"""Synthetic traces: as large as asked, and in the rest as the recorded one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm.errors import ConfigError
from loadtest.traces.synth import Scale, about, compare, synthesise
from loadtest.traces.trace import Trace, read_trace, trace_of

# The beginning of an utterance, where a rescorer asks all unigrams, is not like its middle.
FOR_ANY_LENGTH = ("utterances", "speakers")
PACKAGED = Path(__file__).parents[2] / "loadtest/traces/rescoring.parquet"


@pytest.fixture(scope="module")
def packaged() -> Trace:
    """The trace that comes along."""
    return read_trace(PACKAGED)


def made(trace: Trace, scale: Scale) -> Trace:
    """The scaled trace."""
    return trace_of(synthesise(trace, scale, 1))


@pytest.mark.parametrize(
    ("scale", "ratios"),
    [
        (Scale(utterances=33), {"utterances": 3.0, "audio_s": 3.0}),
        (Scale(contexts=2.0), {"contexts_per_request": 2.0, "queries_per_audio_s": 2.0}),
        (Scale(contexts=0.5), {"contexts_per_request": 0.5, "queries_per_audio_s": 0.5}),
        (Scale(length=0.5), {"utterance_s": 0.5, "audio_s": 0.5}),
    ],
)
def test_what_was_asked_changes_and_the_rest_is_kept(
    packaged: Trace, scale: Scale, ratios: dict[str, float]
) -> None:
    """By the numbers that the command prints; of the trace that comes along."""
    for one in compare(packaged, made(packaged, scale)):
        if one.name in ratios:
            expected = pytest.approx(ratios[one.name], rel=0.12)
            assert one.synthetic / one.recorded == expected, one.name
        elif one.name != "distinct_words" and (scale.length == 1.0 or one.name in FOR_ANY_LENGTH):
            assert one.synthetic == pytest.approx(one.recorded, rel=0.08), one.name


@pytest.mark.parametrize("times", [1.5, 0.5])
def test_requests_for_several_words_ask_more_or_fewer(trace: Trace, times: float) -> None:
    """Those for one word, as for the sentence end, still ask one."""
    synthetic = made(trace, Scale(words=times))
    expected = [max(round(n * times), 1) if n > 1 else n for n in trace.word_counts.tolist()]
    assert sorted(synthetic.word_counts.tolist()) == sorted(expected)
    assert sorted(synthetic.context_counts) == sorted(trace.context_counts)


def test_the_same_seed_makes_the_same_trace(trace: Trace) -> None:
    """Another one another."""
    scale = Scale(utterances=9, contexts=2.0, words=2.0)
    first = synthesise(trace, scale, 4)
    assert synthesise(trace, scale, 4) == first
    assert synthesise(trace, scale, 5) != first


def test_further_words_and_contexts_are_new_and_recorded(trace: Trace) -> None:
    """None stands twice in a request, and all were asked somewhere."""
    known = set(trace.table)
    for one in synthesise(trace, Scale(contexts=2.0, words=2.0), 1):
        for request in one.requests:
            assert len(set(request.contexts)) == len(request.contexts)
            for row in request.words:
                assert len(set(row)) == len(row)
                assert known.issuperset(row)


@pytest.mark.parametrize(("wanted", "found"), [(0, 2), (2, 2), (1, 1), (7, 7)])
def test_speakers_are_split_or_merged(trace: Trace, wanted: int, found: int) -> None:
    """From the two that were recorded."""
    speakers = {one.speaker for one in synthesise(trace, Scale(200, wanted), 1)}
    assert len(speakers) == found


def test_a_synthetic_trace_says_what_it_is(trace: Trace) -> None:
    """Its seed, what was kept and what was changed."""
    scale = Scale(utterances=8, contexts=2.0)
    statistics = compare(trace, made(trace, scale))
    told = about(trace, scale, 3, statistics)
    assert told["model"] == trace.about["model"]
    assert "contexts_per_request" in told["synthetic"]["changed"]
    assert "utterance_s" in told["synthetic"]["kept"]


@pytest.mark.parametrize("wrong", [{"length": 0.0}, {"words": 1000.0}, {"utterances": -1}])
def test_scales_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    """Before anything is made."""
    with pytest.raises(ConfigError, match="expected"):
        Scale(**wrong)  # type: ignore[arg-type]
