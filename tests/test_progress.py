"""How far a job is, on a clock that the test moves."""

from __future__ import annotations

from dlm.progress import ProgressReporter


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_tells_rate_share_and_time_left_every_few_seconds() -> None:
    """Of the stage that is under way: the next begins from nothing."""
    said: list[str] = []
    clock = Clock()
    progress = ProgressReporter(said.append, interval_s=5, clock=clock)
    progress.stage("sorting", 200, "n-grams")
    clock.now += 4
    progress.step(20)
    assert said == ["sorting"]
    clock.now += 1
    progress.step(30)
    assert said[1:] == ["sorting: 50 n-grams, 10 n-grams/s, 25 %, 15 s left"]
    progress.stage("joining", 10, "n-grams")
    clock.now += 10
    progress.step(20)  # more than was expected
    assert said[2:] == ["joining", "joining: 20 n-grams, 2 n-grams/s, 100 %, 0 s left"]


def test_slow_units_have_a_rate() -> None:
    """As rounds of training, which take seconds or minutes."""
    said: list[str] = []
    clock = Clock()
    progress = ProgressReporter(said.append, interval_s=5, clock=clock)
    progress.stage("training", 10, "rounds")
    clock.now += 8
    progress.step(2)
    assert said[1:] == ["training: 2 rounds, 0.25 rounds/s, 20 %, 32 s left"]


def test_without_a_total_no_share_is_told() -> None:
    """As for text from a pipe; the measure of the share need not be the unit."""
    said: list[str] = []
    clock = Clock()
    progress = ProgressReporter(said.append, interval_s=5, clock=clock)
    progress.stage("counting")
    clock.now += 8
    progress.at(0, 0, 4_000, "words")
    clock.now += 8
    progress.at(512, 1024, 8_000, "words")
    assert said[1:] == [
        "counting: 4,000 words, 500 words/s",
        "counting: 8,000 words, 500 words/s, 50 %, 16 s left",
    ]
