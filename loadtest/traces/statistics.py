"""What a trace holds, in numbers: for reports, and to compare a synthetic trace with its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.traces.trace import CALLS, KINDS, Trace


def describe(trace: Trace, name: str) -> dict[str, Any]:
    """What a trace holds, in numbers that a synthetic one is compared by."""
    asks = trace.asks
    gaps = np.diff(trace.at_s)[np.diff(trace.utterance) == 0]
    lengths = np.diff(trace.context_word_begin)
    kinds, calls = trace.kind[asks], trace.call[asks]
    requests = int(asks.sum())
    return {
        "name": name,
        "made_by": trace.about.get("made_by"),
        "utterances": len(trace.names),
        "speakers": len(set(trace.speakers)),
        "audio_s": trace.audio_s,
        "utterance_s": float(trace.seconds.mean()),
        "requests": requests,
        "kinds": _counts(kinds, KINDS),
        "calls": _counts(calls, CALLS),
        "requests_per_audio_s": requests / trace.audio_s,
        "queries_per_audio_s": float(trace.queries.sum()) / trace.audio_s,
        "contexts_per_request": _mean(trace.context_counts[asks]),
        "words_per_context": _mean(trace.word_counts[trace.queries > 0]),
        "context_words": _mean(lengths),
        "gap_s": _mean(gaps),
        "distinct_words": len(trace.table),
    }


def _counts(places: Any, names: Sequence[str]) -> dict[str, int]:
    counts = np.bincount(places, minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def _mean(values: Any) -> float:
    return float(values.mean()) if len(values) else 0.0
