"""Percentiles of latencies, by HdrHistogram."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from dlm.errors import ConfigError


def test_percentiles_are_those_of_the_values() -> None:
    """Within the three digits, merged or not, encoded or not."""
    pytest.importorskip("hdrh")
    from loadtest.run.latency import Latencies

    seconds = np.random.default_rng(3).lognormal(-6, 1, 5000)
    found = Latencies(seconds[:2000].tolist())
    found.merge(Latencies.decode(Latencies(seconds[2000:].tolist()).encode()))
    facts = found.facts()
    assert facts["count"] == 5000
    for name, rank in (("p50_ms", 2500), ("p95_ms", 4750), ("p99_ms", 4950), ("p99.9_ms", 4995)):
        assert facts[name] == pytest.approx(np.sort(seconds)[rank - 1] * 1e3, rel=2e-3), name
    assert facts["max_ms"] == pytest.approx(seconds.max() * 1e3, rel=2e-3)
    curve = found.curve()
    assert curve[-1][0] == 100.0
    assert [value for _, value in curve] == sorted(value for _, value in curve)


def test_nothing_and_what_is_out_of_range() -> None:
    """Nothing has no percentile; what is longer than an hour counts as one."""
    pytest.importorskip("hdrh")
    from loadtest.run.latency import Latencies

    assert Latencies().facts()["p99_ms"] is None
    assert Latencies([0.0, 1e9]).facts()["max_ms"] == pytest.approx(3.6e6, rel=1e-3)


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is of the extra loadtest."""
    from loadtest.run.latency import check_installed

    real = builtins.__import__

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("hdrh"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="pip install"):
        check_installed()
