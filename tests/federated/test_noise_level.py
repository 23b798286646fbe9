"""A run whose noise is larger than what its users contribute is told so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")

from dlm.federated.report.noise_level import noise_over_signal, noise_warning
from dlm.federated.training.settings import TrainingSettings

SETTINGS = """
[run]
rounds = 12
[data]
vocabulary = "words.txt"
public = "the tests"
[privacy]
clip_norm = 0.5
mechanism = "blt"
noise_multiplier = 4.0
[sampling]
report_goal = 300
"""


def rounds(norm: float | None, count: int = 12) -> list[dict[str, float | None]]:
    """A journal."""
    return [{"round": n, "clip_norm": 0.5, "released_norm": norm} for n in range(count)]


def test_users_that_all_pull_the_same_way_are_the_most_there_is() -> None:
    """Correlated noise cancels; independent noise adds up as the root of the rounds."""
    assert noise_over_signal(rounds(44.0), mechanism="blt") == pytest.approx(44 / 6)
    assert noise_over_signal(rounds(3.0), mechanism="blt") == pytest.approx(0.5)
    assert noise_over_signal(rounds(3.0), mechanism="gaussian") == pytest.approx(3**0.5)
    doubled = noise_over_signal(rounds(44.0), mechanism="blt", users_over_denominator=2)
    assert doubled == pytest.approx(44 / 12)
    assert noise_over_signal(rounds(44.0), mechanism="none") == 0
    assert noise_over_signal([], mechanism="blt") == 0


def test_the_journal_of_a_run_gives_the_warning(tmp_path: Path) -> None:
    """A line that a stop cut, and a norm that overflowed, are left out."""
    (tmp_path / "run.toml").write_text(SETTINGS)
    settings = TrainingSettings.read(tmp_path / "run.toml")
    journal = tmp_path / "metrics.jsonl"
    assert noise_warning(journal, settings) is None
    lines = [json.dumps(line) for line in (*rounds(44.0), *rounds(None, 1))]
    journal.write_text("\n".join([*lines, '{"round": 12, "cl']))
    said = noise_warning(journal, settings)
    assert said is not None
    assert "norm of 44, of which its users contribute at most 0.5" in said
    journal.write_text("\n".join(json.dumps(line) for line in rounds(2.0)))
    assert noise_warning(journal, settings) is None
    journal.write_text("\n".join(json.dumps(line) for line in rounds(44.0)))
    fewer = dataclasses.replace(settings.privacy, denominator=3000.0)
    said = noise_warning(journal, dataclasses.replace(settings, privacy=fewer))
    assert said is not None
    assert "contribute at most 0.05" in said
