"""Compares two reports: ratios of their figures, with intervals from their windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.report.report import Report

Window = dict[str, Any]
# Figures for which more is worse: name -> function of the results of a run or a window.
Figure = Callable[[Window], float | None]
FIGURES: dict[str, Figure] = {
    "messages per second of audio": lambda w: w["messages_per_audio_s"],
    "bytes per second of audio": lambda w: w["bytes_per_audio_s"],
    "query time per second of audio, s": lambda w: w["query_time_per_audio_s"],
    "latency p50, ms": lambda w: w["latency"]["p50_ms"],
    "latency p95, ms": lambda w: w["latency"]["p95_ms"],
    "latency p99, ms": lambda w: w["latency"]["p99_ms"],
    "latency p99.9, ms": lambda w: w["latency"]["p99.9_ms"],
    "client CPU per request, us": lambda w: w["client_cpu_us_per_request"],
    "failed share": lambda w: w["failed_share"],
}
# Two-sided 95 % quantiles of Student's distribution by degrees of freedom; above 30, 1.96 is used.
_T95 = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23),
    *(2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09),
    *(2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of two runs.

    ratio      after / before; None if a figure is missing or 0
    low, high  95 % interval of the ratio; None if a run has fewer than two windows
    """

    name: str
    before: float | None
    after: float | None
    ratio: float | None
    low: float | None
    high: float | None
    is_worse: bool


def compare(before: Report, after: Report, threshold: float) -> list[Ratio]:
    """Compares each figure of two reports; a figure may get worse by the share `threshold`.

    The interval is Welch's, for the difference between the runs' mean logarithms over their
    windows, around the ratio of the whole runs. Neighbouring windows are not independent, so the
    interval is too narrow if a run drifts.
    """
    return [_ratio(name, figure, before, after, threshold) for name, figure in FIGURES.items()]


def _ratio(name: str, figure: Figure, before: Report, after: Report, threshold: float) -> Ratio:
    first, second = figure(before["results"]), figure(after["results"])
    if first is None or second is None:
        return Ratio(name, first, second, None, None, None, is_worse=False)
    if first == 0 or second == 0:
        # 0 has no logarithm; new failures are worse, whatever the threshold.
        return Ratio(name, first, second, None, None, None, is_worse=second > first == 0)
    ratio = second / first
    spread = _spread([_logs(figure, one["windows"]) for one in (before, after)])
    if spread is None:
        return Ratio(name, first, second, ratio, None, None, is_worse=ratio > 1 + threshold)
    low, high = ratio * math.exp(-spread), ratio * math.exp(spread)
    return Ratio(name, first, second, ratio, low, high, is_worse=ratio > 1 + threshold and low > 1)


def _logs(figure: Figure, windows: Sequence[Window]) -> list[float]:
    return [math.log(value) for window in windows if (value := figure(window))]


def _spread(samples: Sequence[Sequence[float]]) -> float | None:
    """Half of the 95 % interval of the difference of two means (Welch); None for too few values."""
    if any(len(sample) < 2 for sample in samples):
        return None
    parts = []
    for sample in samples:
        mean = sum(sample) / len(sample)
        variance = sum((x - mean) ** 2 for x in sample) / (len(sample) - 1)
        parts.append((variance / len(sample), len(sample) - 1))
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / n for part, n in parts)
    t = _T95[int(freedom) - 1] if freedom < len(_T95) + 1 else 1.96
    return t * math.sqrt(total)


def differences(before: Report, after: Report) -> list[str]:
    """Differences between two runs, besides their figures, that may make the runs incomparable."""
    places = {
        "trace": ("trace", "name"),
        "requests of the trace": ("trace", "requests"),
        "load": ("load",),
        "model": ("target", "model"),
        "shard set": ("target", "shard_set"),
        "clients": ("clients",),
        "machine": ("provenance", "machine"),
    }
    found = []
    for name, path in places.items():
        one, other = before, after
        for part in path:
            one, other = one[part], other[part]
        if not isinstance(one, dict):
            one, other = {"": one}, {"": other}
        for part in [part for part in {**one, **other} if one.get(part) != other.get(part)]:
            place = f"{name}, {part.replace('_', ' ')}".removesuffix(", ")
            found.append(f"the runs differ in their {place}: {one.get(part)} and {other.get(part)}")
    for name, report in (("before", before), ("after", after)):
        if not report["complete"]:
            found.append(f"the run '{name}' is not complete: {report['ended']}")
    return found
