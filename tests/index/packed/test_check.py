"""What no kernel may follow is found when a file is opened, whatever its checksums say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.index.coding import BY_TABLE
from dlm.index.layout import LOW_ORDER_COLUMNS, SHARD_COLUMNS
from dlm.index.packed.check import check_low, check_tree
from dlm.index.packed.low import LOW_SHAPE, Arrays, LowPlain, key_bits_of, unpack_low
from dlm.index.packed.tree import LEVEL_SHAPE, TREE_SHAPE
from dlm.index.search.shard import ShardSet
from index.oracle import pack_low, pack_tree
from models import PlainModel, build, random_model

HERE = Path(__file__).parent
TESTS = HERE.parents[1]


def crafted(seed: int, rounds: int) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of `crafted.py`, and what it said."""
    done = subprocess.run(
        [sys.executable, str(HERE / "crafted.py"), str(seed), str(rounds)],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        stdout=subprocess.PIPE,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_crafted_columns_are_refused_or_answered_from_within() -> None:
    """Thousands of changes to any column; each ends where memory that can be read ends."""
    code, said = crafted(1, 1500)
    assert code == 0, said[-1:]
    outcomes = [line["outcome"] for line in said if "outcome" in line]
    assert len(outcomes) == 1500
    accepted = outcomes.count("accepted")  # flags and values, which verify must tell
    assert 100 < accepted < 400
    assert len(set(outcomes)) > 60


def test_a_read_beyond_a_column_would_have_been_seen() -> None:
    """The page after it ends the process."""
    code, said = crafted(1, -1)
    assert code == -signal.SIGSEGV
    assert said == []


@dataclass
class Opened:
    """What a shard set says, and its columns, to change."""

    order: int
    words: int
    nodes: int
    low: Arrays
    tree: Arrays

    def check(self) -> None:
        """As `LowOrders.open` and `Shard.open` do."""
        pairs = check_low(self.low, self.words, self.order)
        check_tree(self.tree, max(self.order - 2, 0), self.words, pairs, self.nodes)

    def refused(self) -> str:
        """The message with which it is refused."""
        with pytest.raises(ValueError) as caught:
            self.check()
        return str(caught.value)

    def copy(self) -> Opened:
        """Columns of its own."""
        low, tree = ({k: v.copy() for k, v in a.items()} for a in (self.low, self.tree))
        return replace(self, low=low, tree=tree)


def opened(folder: Path, order: int, **options: Any) -> Opened:
    """A model in two shards, opened."""
    found = ShardSet.open(
        build(random_model(8, words=30, per_order=300, order=order), folder, **options)
    )
    manifest = found.manifest
    mapped = found.low.arrays, found.shards[0].arrays
    low, tree = ({k: v.copy() for k, v in a.items()} for a in mapped)
    return Opened(order, manifest.vocabulary_size, manifest.files[2].nodes, low, tree)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Opened]:
    """A model with three levels of nodes, in both encodings."""
    return {
        name: opened(tmp_path_factory.mktemp(name), 5, encoding=name, bits=32)
        for name in ("exact", "compact")
    }


@pytest.mark.parametrize("encoding", ["exact", "compact"])
def test_columns_as_they_were_built_pass(encoding: str, sets: dict[str, Opened]) -> None:
    """So that the tests below tell the changes."""
    sets[encoding].copy().check()


@pytest.mark.parametrize("encoding", ["exact", "compact"])
@pytest.mark.parametrize(
    ("file", "column"),
    [("low", name) for name in LOW_ORDER_COLUMNS] + [("tree", name) for name in SHARD_COLUMNS],
)
def test_a_column_of_another_length_is_refused(
    file: str, column: str, encoding: str, sets: dict[str, Opened]
) -> None:
    """One value short, one more, or none; a table may be longer than its codes need."""
    whole = getattr(sets[encoding], file)[column]
    longer = np.append(whole, whole.dtype.type(0))
    for values in (whole[:-1], whole[:0], *([] if column.endswith("table") else [longer])):
        if len(values) != len(whole):  # else it is empty as it is
            bad = sets[encoding].copy()
            getattr(bad, file)[column] = values.copy()
            bad.refused()


def shape_at(name: str, depth: int | None = None) -> int:
    """Where a number stands in the column `shape` of a shard."""
    if depth is None:
        return TREE_SHAPE.index(name)
    return len(TREE_SHAPE) + depth * len(LEVEL_SHAPE) + LEVEL_SHAPE.index(name)


NUMBERS = (0, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1)


@pytest.mark.parametrize("encoding", ["exact", "compact"])
@pytest.mark.parametrize(
    ("file", "at", "name"),
    [("low", at, name) for at, name in enumerate(LOW_SHAPE)]
    + [("tree", at, name) for at, name in enumerate(TREE_SHAPE)]
    + [
        ("tree", shape_at(name, depth), f"{name} {depth}")
        for depth in range(3)
        for name in LEVEL_SHAPE
    ],
)
def test_a_number_of_the_shape_that_is_wrong_is_refused(
    file: str, at: int, name: str, encoding: str, sets: dict[str, Opened]
) -> None:
    """One more, one fewer, and numbers that no machine could hold as many of; a base is a value,
    which verify tells by the model, if it can be one."""
    found = int(getattr(sets[encoding], file)["shape"][at])
    wrong = {found + 1, found - 1, *NUMBERS} - {found, -1}
    if "prob_base" in name and found < BY_TABLE:
        wrong = {value for value in NUMBERS if value >= BY_TABLE}
    for value in sorted(wrong):
        bad = sets[encoding].copy()
        getattr(bad, file)["shape"][at] = value
        bad.refused()


def test_the_last_record_may_be_the_shortest(tmp_path: Path) -> None:
    """One child, whose probability is that of its level: few bits."""
    words = [f"w{i}" for i in range(40)]
    ngrams: dict[tuple[str, ...], Any] = {(w,): (-1.0, None) for w in ("<unk>", "<s>", "</s>")}
    ngrams |= {(word,): (-1.0, None) for word in words}
    for word in words[3:30]:
        ngrams |= {("<s>", word): (-1.0, None), ("<s>", word, "w1"): (-1.0, -0.5)}
        ngrams |= {("<s>", word, "w1", "w2"): (-1.0, None)}
    assert ShardSet.open(build(PlainModel(4, ngrams), tmp_path, 1)).shards


MANY = 1 << 40


@pytest.mark.parametrize(("depth", "says"), [(0, "each root"), (1, "level 1: ")])
def test_more_nodes_than_a_machine_could_hold_are_refused(
    depth: int, says: str, sets: dict[str, Opened]
) -> None:
    """The shape and the manifest agree on them; the records do not."""
    bad = sets["exact"].copy()
    shape = bad.tree["shape"]
    bad.nodes += MANY - int(shape[shape_at("nodes", depth)])
    shape[shape_at("nodes", depth)] = MANY
    assert says in bad.refused()


def test_a_word_that_begins_more_pairs_than_there_are_words_is_refused(tmp_path: Path) -> None:
    """The bits left of their keys would be fewer than none."""
    bad = opened(tmp_path, 2)
    low = unpack_low(bad.low)
    pairs = 2 * bad.words
    begin = np.full(bad.words + 1, pairs)
    begin[0] = 0
    many = replace(
        low,
        begin=begin,
        key=np.zeros(pairs, np.uint32),
        pair_log10_prob=np.zeros(pairs, np.float32),
        pair_flags=np.zeros(pairs, np.uint8),
    )
    bad.low = pack_low(many, 0)
    assert "begin: " in bad.refused()


def test_words_that_are_extended_otherwise_than_one_flag_says_are_refused() -> None:
    """The demo's 2-grams have one flag."""
    found = ShardSet.open(Path(__file__).parents[3] / "dlm/data/books20k")
    low = {name: column.copy() for name, column in found.low.arrays.items()}
    low["word_value"][0] ^= np.uint64(1 << 49)
    with pytest.raises(ValueError, match="EXTENDED"):
        check_low(low, found.manifest.vocabulary_size, 5)


def test_keys_wider_than_any_id_are_refused(sets: dict[str, Opened]) -> None:
    """Those who take them for keys of the model's width would read other words."""
    bad = sets["exact"].copy()
    shape = dict(zip(LOW_SHAPE, bad.low["shape"].tolist(), strict=True))
    at = shape["begin_bits"] + shape["place_bits"]
    bad.low["word_entry"][at // 64] |= np.uint64(31 << at % 64 & (1 << 64) - 1)
    assert "widths" in bad.refused()


def raw_level(values: list[float]) -> Opened:
    """Low orders whose values are kept as they are, with these for the weights of the words."""
    count = len(values)
    low = LowPlain(
        np.zeros(count, np.float32),
        np.array(values, np.float32),
        np.zeros(count, np.bool_),
        np.zeros(count + 1, np.int64),
        np.zeros(0, np.uint32),
        np.zeros(0, np.float32),
        np.zeros(0, np.uint8),
    )
    arrays = pack_low(low, 0)
    assert len(arrays["word_backoff_table"]) == 0
    return Opened(2, count, 0, arrays, pack_tree([], 0, key_bits_of(count), []))


def test_weights_without_a_table_are_looked_at_one_by_one() -> None:
    """Finite, and no zero with a sign."""
    fine = [1e-45, -1e-45, 3e38, -3e38, -0.5, 0.5]
    raw_level(fine).check()
    for value in (np.nan, -np.nan, np.inf, -np.inf, -0.0):
        assert "backoff of word 3" in raw_level([*fine[:3], value, *fine[3:]]).refused()
