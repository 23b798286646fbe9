"""The queue of experiments goes on where it stopped, and its tables say what its results say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fng import Plan
from benchmarks.fng_queue import Item, ResultFolder, run_queue
from benchmarks.fng_tables import plot, series, tables
from dlm.errors import ConfigError


class Experiments:
    """Items that count how often they were done."""

    def __init__(self, folder: Path) -> None:
        self.results = ResultFolder(folder)
        self.done: list[str] = []
        self.told: list[str] = []

    def item(self, name: str, *needs: str, fails: Exception | None = None) -> Item:
        """One that is noted when it is done."""

        def make() -> dict[str, Any]:
            self.done.append(name)
            if fails is not None:
                raise fails
            return {"place": len(self.done)}

        return Item(name, make, needs)

    def run(self, *items: Item, minutes: float = 1.0) -> list[str]:
        """Those that failed."""
        return run_queue(items, self.results, minutes=minutes, tell=self.told.append)


@pytest.fixture
def experiments(tmp_path: Path) -> Experiments:
    """None done yet."""
    return Experiments(tmp_path / "results")


def test_what_has_a_result_is_not_done_again(experiments: Experiments) -> None:
    """Also by another process: results are files."""
    items = [experiments.item("en/one"), experiments.item("en/two", "en/one")]
    assert experiments.run(*items) == []
    assert experiments.run(*items, experiments.item("en/three", "en/two")) == []
    assert experiments.done == ["en/one", "en/two", "en/three"]
    found = ResultFolder(experiments.results.folder).read("en/two")
    assert found is not None
    assert (found["item"], found["place"]) == ("en/two", 2)
    assert found["cpu_seconds"] >= 0


def test_a_queue_that_is_killed_goes_on_with_the_item_that_was_under_way(
    experiments: Experiments,
) -> None:
    """Of which nothing is kept."""
    one, two = experiments.item("one"), experiments.item("two", fails=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        experiments.run(one, two)
    assert experiments.results.read("two") is None
    assert experiments.run(one, experiments.item("two")) == []
    assert experiments.done == ["one", "two", "two"]


def test_one_that_fails_does_not_stop_the_others_but_what_needs_it(
    experiments: Experiments,
) -> None:
    """And is tried again the next time."""
    bad = experiments.item("bad", fails=ConfigError("too few users"))
    rest = [experiments.item("after", "bad"), experiments.item("other")]
    assert experiments.run(bad, *rest) == ["bad"]
    assert experiments.done == ["bad", "other"]
    assert "after waits for bad" in experiments.told
    assert "bad failed: too few users" in experiments.told
    assert experiments.run(experiments.item("bad"), *rest) == []
    assert experiments.done == ["bad", "other", "bad", "after"]


def test_names_that_differ_have_results_that_differ(experiments: Experiments) -> None:
    """A round of a network, and the network itself."""
    names = ["en/judge/words", "en/judge/words@25", "en/judge/words-e-40000", "pt/judge/words"]
    experiments.run(*map(experiments.item, names))
    assert [experiments.results.read(name)["place"] for name in names] == [1, 2, 3, 4]  # type: ignore[index]


def test_every_need_of_the_plan_is_an_item_before_it(tmp_path: Path) -> None:
    """Or it would wait forever; and each name is given once."""
    before: set[str] = set()
    for item in Plan(tmp_path).items():
        assert set(item.needs) <= before, item.name
        assert item.name not in before
        before.add(item.name)
    assert {"en/judge/words-r-40000", "pt/judge/pieces-dp-r-40000"} <= before


Write = Callable[..., None]


@pytest.fixture
def write(experiments: Experiments) -> Write:
    """Keeps what a model was judged to be."""

    def write(model: str, sll: float, top1: float | None, less: float) -> None:
        found = {
            "sll_without_oovs": [sll, sll - 1, sll + 1],
            "sll_without_oovs_difference": [less, less - 0.25, less + 0.25],
            "top1": [top1, top1, top1],
            "top1_difference": [None, None, None] if top1 is None else [0.01, 0.005, 0.015],
            "perplexity_without_oovs": [100.0, 90.0, 110.0],
            "perplexity_without_oovs_difference": [-5.0, -6.0, -4.0],
        }
        experiments.results.write(f"en/judge/{model}", {"figures": {"kn-40000": found}})

    return write


def test_the_comparison_says_what_was_judged(experiments: Experiments, write: Write) -> None:
    """Differences with their intervals; no accuracy where a model has none; only what is done."""
    write("kn-40000", -80.0, 0.2, 0.0)
    write("pieces", -78.5, None, 1.5)
    write("words-r-40000", -79.0, 0.21, 1.0)
    lines = tables(experiments.results).splitlines()
    assert "| Kneser-Ney of the users' text | -80.00 |  | 20.00 |  | 100.0 |" in lines
    assert "| network, wordpieces | -78.50 | 1.50 (1.25, 1.75) |  |  | 100.0 |" in lines
    row = "| words, A_r | -79.00 | 1.00 (0.75, 1.25) | 21.00 | 1.00 (0.50, 1.50) | 100.0 |"
    assert row in lines
    assert not any("Portuguese" in line or "Witten-Bell" in line for line in lines)


def test_the_plot_has_a_line_for_each_network_that_was_judged_twice(
    experiments: Experiments, write: Write
) -> None:
    """Higher is better, and drawn higher."""
    with pytest.raises(ConfigError, match="no network was judged"):
        plot(experiments.results)
    for rounds, sll in ((25, -100.0), (50, -90.0), (100, -85.0)):
        write(f"words@{rounds}", sll, 0.1, 0.0)
    write("words", -80.0, 0.1, 0.0)
    write("pieces", -80.0, None, 0.0)
    points = [(25, -100.0), (50, -90.0), (100, -85.0), (200, -80.0)]
    assert series(experiments.results, "en") == {"words": points}
    drawn = ElementTree.fromstring(plot(experiments.results))
    (line,) = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == len(points)
