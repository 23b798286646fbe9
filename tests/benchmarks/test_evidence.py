"""The queue of runs goes on where it was killed, and its figures say what its rows say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from benchmarks.evidence import ROWS, cost, do, is_done, read, work_through
from benchmarks.evidence_plan import Arm, Item, plan, result
from benchmarks.evidence_tables import drawn, figures
from benchmarks.fng_data import LanguageFiles
from dlm.errors import ConfigError

PICTURE = Path(__file__).parent / "evidence.svg"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Users who say the same few words, as `prepared` would leave them."""
    files = LanguageFiles(tmp_path / "mixed")
    files.folder.mkdir()
    words = [f"w{n}" for n in range(20)]
    files.words.write_text("".join(f"{word}\n" for word in words))
    draw = random.Random(0)
    for file, users in ((files.train, 12), (files.held_out, 3)):
        said = (f"u{n}\t{' '.join(draw.choices(words, k=9))}\n" for n in range(users))
        file.write_text("user_id\tutterance\n" + "".join(said))
    files.facts.write_text(json.dumps({"digest": "abc"}))
    return tmp_path


def item(name: str, seed: int = 0, **settings: Any) -> Item:
    """Eight rounds of three users."""
    tables = {"data": {"vocabulary_size": 0}, "privacy": {"gap": 2, "max_participations": 4}}
    return Item(
        "mixed", name, seed, Arm(tables | settings | {"sampling": {"report_goal": 3}}, 3, 8)
    )


@pytest.mark.slow
def test_a_run_that_is_killed_five_times_has_the_row_of_one_that_is_not(work: Path) -> None:
    """Rounds, noise, and what was judged before; a row is added once."""
    noisy = {"privacy": {"gap": 2, "max_participations": 4, "mechanism": "blt", "buffers": 2,
                         "noise_multiplier": 0.1}}  # fmt: skip
    left = 5

    def killed(one: Item, files: LanguageFiles, tick: Callable[[], Any]) -> dict[str, Any]:
        def then_killed() -> None:
            nonlocal left
            tick()
            if left:
                left -= 1
                raise KeyboardInterrupt

        return result(one, files, then_killed)

    rows = work / "rows.csv"
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            do(item("killed", **noisy), work, rows, killed)
    assert read(rows) == []
    for name in ("killed", "not killed", "killed"):
        assert do(item(name, **noisy), work, rows)
    one, other = read(rows)
    assert one["results"]["round"] == 8 and len(one["results"]["by_round"]) == 7
    same = ("settings", "data", "rounds", "results")
    assert [one[name] for name in same] == [other[name] for name in same]


def test_one_that_fails_does_not_stop_the_others(work: Path) -> None:
    """It is tried again the next time; a row with other settings is not that of an item."""
    done: list[str] = []

    def make(one: Item, *_: Any) -> dict[str, Any]:
        done.append(one.name)
        if one.name == "bad" and done.count("bad") == 1:
            raise ConfigError("too few users")
        return {"top1": 0.5}

    rows, items = work / "rows.csv", [item("bad"), item("good")]
    assert work_through(items, work, rows, make) == items[:1]
    assert work_through([*items, item("good", model={"hidden_size": 8})], work, rows, make) == []
    assert done == ["bad", "good", "bad", "good"]
    assert [row["arm"] for row in read(rows)] == ["bad", "good", "good"]


def test_two_processes_do_not_do_the_same(work: Path) -> None:
    """One that is under way elsewhere is left out, and looked at again."""
    rows = work / "rows.csv"

    def make(one: Item, *_: Any) -> dict[str, Any]:
        assert not do(one, work, rows, make)
        return {}

    assert do(item("one"), work, rows, make)
    assert len(read(rows)) == 1


def test_the_cost_of_an_arm_is_that_of_its_rows() -> None:
    """Or guessed from its users and rounds."""
    rows = [{"experiment": "mixed", "arm": "a", "cpu_seconds": n} for n in ("10", "20")]
    assert cost([item("a", 2), item("b")], rows) == pytest.approx(15 + 0.012 * 3 * 8)


@pytest.mark.slow
def test_the_rows_are_of_runs_of_the_plan() -> None:
    """Which has each run once, and each table seed by seed."""
    items = list(plan())
    assert len({one.key for one in items}) == len(items)
    rows = read(ROWS)
    assert sum(is_done(one, rows) for one in items) == len(rows)


def learnt(name: str, seed: int, top1: float) -> dict[str, Any]:
    """A row of a network of `mixed`."""
    said = {"top1": top1, "perplexity": 100.0, "heads": {"50": [0] * 10 + [1]}}
    return {"experiment": "mixed", "arm": name, "seed": seed, "results": {**said, "by_round": []}}


def test_differences_are_taken_seed_by_seed() -> None:
    """So that what seeds have in common does not widen the interval; beside the paper's."""
    rows = [learnt("BandMF, eps 2", seed, 0.1 * seed) for seed in range(3)]
    rows += [learnt("BLT*, 2 buffers, eps 2", n, 0.1 * n + d) for n, d in ((0, 0.01), (1, 0.03))]
    (line,) = dict(figures(rows))["BLT Table 3, eps 2: top-1 less that of BandMF"]
    assert line.text == "2.00 ± 12.71"  # mean of 1 and 3; t is 12.71, the error 1
    assert (line.name, line.told) == ("BLT*, 2 buffers", "-0.12: runs left")
    assert line._replace(values=[1, 1, 1]).told == "-0.12: does not"
    assert line._replace(values=[-1, -1, -1]).told == "-0.12: agrees"
    assert line._replace(values=[-1, 1, 1]).told == "-0.12: too small to tell"
    assert line._replace(values=[-0.1, 0.1, 0.1], paper=0).told == "0.00: agrees"
    points = ElementTree.fromstring(drawn(rows)).iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(points)) == sum(len(lines) for _, lines in figures(rows))


def test_the_picture_is_that_of_the_rows() -> None:
    """Otherwise run python tests/benchmarks/evidence.py --draw tests/benchmarks/evidence.svg."""
    assert PICTURE.read_text(encoding="utf-8") == drawn(read(ROWS))
