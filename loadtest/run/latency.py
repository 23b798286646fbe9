"""Counts latencies in HdrHistograms, from 1 microsecond to 1 hour, with three digits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlm.errors import ConfigError
from dlm.extras import packages_of, pip_install

LOWEST_US, HIGHEST_US, DIGITS = 1, 3_600_000_000, 3
PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}


def _histogram_class() -> Any:
    try:
        from hdrh.histogram import HdrHistogram
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "percentiles need the package hdrhistogram, which is not installed; run\n  "
            + pip_install(packages_of("loadtest"))
        ) from exc
    return HdrHistogram


def check_installed() -> None:
    _histogram_class()


class Latencies:
    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._counts = _histogram_class()(LOWEST_US, HIGHEST_US, DIGITS)
        for one in seconds:
            self.add(one)

    @classmethod
    def decode(cls, text: str) -> Latencies:
        made = cls.__new__(cls)
        made._counts = _histogram_class().decode(text.encode())
        return made

    def encode(self) -> str:
        """Returns HdrHistogram's compressed form in base64, which all implementations read."""
        encoded: bytes = self._counts.encode()
        return encoded.decode()

    def add(self, seconds: float) -> None:
        """Counts a latency; values outside the range count as its nearest end."""
        micros = min(max(round(seconds * 1e6), LOWEST_US), HIGHEST_US)
        self._counts.record_value(micros)

    def merge(self, other: Latencies) -> None:
        self._counts.add(other._counts)

    @property
    def count(self) -> int:
        return int(self._counts.get_total_count())

    def at_ms(self, percentile: float) -> float | None:
        """Milliseconds that this percentage of values does not exceed; None without values."""
        if not self.count:
            return None
        return float(self._counts.get_value_at_percentile(percentile)) / 1e3

    def facts(self) -> dict[str, float | int | None]:
        """Count, percentiles and maximum in milliseconds; a mean would take a second to compute."""
        shown: dict[str, float | int | None] = {"count": self.count}
        shown |= {f"{name}_ms": self.at_ms(place) for name, place in PERCENTILES.items()}
        shown["max_ms"] = self._counts.get_max_value() / 1e3 if self.count else None
        return shown

    def curve(self) -> list[tuple[float, float]]:
        """(percentile, milliseconds) at each value that occurs, for a plot."""
        seen, total = 0, self.count
        out = []
        for item in self._counts.get_recorded_iterator():
            seen += item.count_at_value_iterated_to
            out.append((100.0 * seen / total, item.value_iterated_to / 1e3))
        return out
