"""What Spark does with partitions, with shuffles done by hand: the local engine's text, anyhow cut.

No Java is needed here: batches go to the functions that partitions are given to, cut at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlm.errors import EstimationError
from dlm.estimate import pipeline
from dlm.estimate.adjust.kernels import KEPT
from dlm.estimate.interpolate.contexts import unigrams
from dlm.estimate.pipeline import estimate_discounts
from dlm.estimate.provenance import provenance
from dlm.estimate.settings import EstimationSettings, EstimationSummary
from dlm.estimate.text import Totals
from dlm.ngram.arpa.writer import END, WordBytes, header, section_head
from dlm.progress import ProgressReporter
from dlm.spark import text, tries
from dlm.spark.engine import bounds_of, statistics_of, table_of, take_facts
from estimate.corpora import Case, case


def split(lines: list[bytes], r: random.Random) -> list[list[pa.RecordBatch]]:
    """Lines of a file, in tasks that have parts of it in any order, in batches."""
    cuts = sorted({0, len(lines), *(r.randint(0, len(lines)) for _ in range(3))})
    parts = []
    for low, high in pairwise(cuts):
        parts.append(
            pa.record_batch(
                {
                    "value": pa.array(lines[low:high], pa.binary()),
                    "path": ["file:/text"] * (high - low),
                    "start": [low] * (high - low),
                }
            )
        )
    r.shuffle(parts)
    tables = (
        [pa.Table.from_batches(parts[k::2], parts[0].schema) for k in range(2)] if parts else []
    )
    # Parts that follow one another in a task may share a batch.
    return [table.combine_chunks().to_batches(max_chunksize=r.randint(1, 9)) for table in tables]


def shuffled(made: Iterable[tuple[int, Any]], partitions: int, r: random.Random) -> list[list[Any]]:
    """Values by the partition they are for, in any order."""
    out: list[list[Any]] = [[] for _ in range(partitions)]
    for part, value in made:
        out[part].append(value)
    for own in out:
        r.shuffle(own)
    return out


def made(one: Case, seed: int, skip: bool = False) -> bytes:
    """The text of the model, as the engine puts the stages together."""
    r = random.Random(seed)
    settings = EstimationSettings(one.order, one.prune, one.vocabulary, one.fallback, skip)
    order, parts = one.order, r.choice([1, 2, 7, 64])
    lines = split(list(one.lines), r)
    table = pa.Table.from_batches([b for own in lines for b in text.words_of_text(own, skip)])
    facts = table.filter(pc.is_valid(table.column("facts"))).sort_by("start")
    summary = EstimationSummary(Totals(1))
    take_facts(summary.totals, facts, skip)
    first: dict[bytes, tuple[int, int]] = {}
    occurrences: dict[bytes, int] = {}
    for row in table.filter(pc.is_valid(table.column("word"))).to_pylist():
        at, word = (row["start"], row["place"]), row["word"]
        first[word] = min(first.get(word, at), at)
        occurrences[word] = occurrences.get(word, 0) + row["count"]
    assert sum(occurrences.values()) == summary.totals.words
    in_order = sorted(first, key=first.__getitem__)
    words = table_of(pa.chunked_array([in_order], pa.binary()))
    known = None
    if one.vocabulary is not None:
        known = np.zeros(len(words), np.uint8)
        known[:3] = 1
        known[words.ids_of(sorted(one.vocabulary))] = 1
    ends = [0, summary.totals.lines, summary.totals.lines]
    bounds = bounds_of(np.array([*ends, *(occurrences[word] for word in in_order)]), parts)
    counted = [
        (part, block)
        for own in lines
        for b in text.counted(own, order, skip, words, bounds, 300)
        for part, block in zip(b.column("part").to_pylist(), b.column("value"), strict=True)
    ]
    adjusted = shuffled(
        [
            pair
            for part, own in enumerate(shuffled(counted, parts, r))
            for pair in tries.adjusted(
                part, [block.as_py() for block in own], order, len(words), settings.thresholds,
                known, bounds,
            )
        ],
        parts + 1,
        r,
    )  # fmt: skip
    statistics, counts = statistics_of(settings, adjusted.pop(), len(words), known)
    discounts = estimate_discounts(statistics, settings, summary, ProgressReporter(lambda _: None))
    probs = unigrams(counts, discounts[0], int(statistics[0, KEPT]))
    backoffs = np.ones(len(words), np.float32)
    sections: list[list[bytes]] = [[] for _ in range(order + 1)]
    if order > 1:
        weighed = shuffled(
            [
                pair
                for part, own in enumerate(adjusted)
                for pair in tries.weighed(part, own, order, discounts, bounds)
            ],
            parts + 1,
            r,
        )
        for found in weighed.pop():
            backoffs[found.words] = found.backoffs
        spelling = WordBytes.of(words)
        for own in weighed:
            for n, rows in tries.interpolated(own, order, discounts, probs, spelling, bounds):
                sections[n].append(rows + b"\n")
    ones = tries.unigram_text(words, counts, probs, backoffs if order > 1 else None)
    sections[1] = [bytes(rows) for rows in ones]
    out = [header(provenance(settings, summary, ["text"]), summary.counts)]
    for n in range(1, order + 1):
        out += [section_head(n), *sections[n]]
    return b"".join([*out, END])


def local(folder: Path, one: Case, skip: bool = False) -> bytes:
    """The text of the model by the local engine."""
    (folder / "text").write_bytes(one.text)
    settings = EstimationSettings(
        one.order, one.prune, one.vocabulary, one.fallback, skip, workspace_bytes=64 << 20
    )
    pipeline.estimate([str(folder / "text")], folder / "model.arpa", settings)
    return (folder / "model.arpa").read_bytes()


@pytest.mark.parametrize(
    "seeds",
    [range(10, 20), pytest.param(range(20, 80), marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_random_texts_give_the_local_engine_s_model_to_the_byte(
    seeds: range, tmp_path: Path
) -> None:
    """With pruning, vocabularies and fallback discounts, in groups of any size."""
    refused = 0
    for seed in seeds:
        one = case(seed)
        try:
            wanted = local(tmp_path, one)
        except EstimationError as exc:
            refused += 1
            with pytest.raises(EstimationError) as caught:
                made(one, seed)
            assert str(caught.value) == str(exc)
            continue
        assert made(one, seed) == wanted, seed
    assert 0 < refused < len(seeds) / 2


NO_BOUNDS = np.zeros(0, np.uint64)
FAULTY = [b"a b", b"a <s> b", b"", b"b\xff", b"a\0", b"c a b", b"x" * 100_001, b"a b"]


def test_faulty_lines_are_left_out_and_counted_as_by_the_local_engine(tmp_path: Path) -> None:
    """The provenance says the same of them."""
    one = Case((*FAULTY, *[b"a b c"] * 9, b"", *FAULTY), 3, (), None, (0.5, 1.0, 1.5))
    wanted = local(tmp_path, one, skip=True)
    for seed in range(5):
        assert made(one, seed, skip=True) == wanted
    assert b'"reserved word": 2' in wanted


@pytest.mark.parametrize("fault", [b"a <s> b", b"b\xff", b"a\0", b"x" * 100_001])
def test_a_faulty_line_is_refused_with_its_place(fault: bytes) -> None:
    """The file, its part, and the line in it."""
    one = Case((*[b"a b c"] * 9, fault, *[b"a"] * 9), 2, (), None, (0.5, 1.0, 1.5))
    with pytest.raises(EstimationError, match=r"file:/text, line \d+.*, or pass --skip") as caught:
        made(one, 7)
    place = [
        int(word.strip(",")) for word in str(caught.value).split() if word.strip(",").isdigit()
    ]
    line, start = (place[0], place[1]) if "begins at byte" in str(caught.value) else (place[0], 0)
    assert start + line == 10


def test_a_null_is_a_faulty_line() -> None:
    """As parquet may hold."""
    column = pa.array([b"a", None, b"b"], pa.binary())
    assert text.clean(column)[0] == b"a\nb\n"
    assert text.clean(column)[3] == ("null row", 1)


def test_text_that_changes_while_it_is_read_is_an_error() -> None:
    """A word that was not there when words were told is no other word."""
    table = table_of(pa.chunked_array([[b"a"]], pa.binary()))
    batch = pa.record_batch({"value": pa.array([b"a", b"b"], pa.binary())})
    with pytest.raises(EstimationError, match="text changed"):
        list(text.counted([batch], 2, False, table, NO_BOUNDS))


def test_a_line_longer_than_a_block_is_counted() -> None:
    """The room grows for it."""
    table = table_of(pa.chunked_array([[b"a"]], pa.binary()))
    batch = pa.record_batch({"value": pa.array([b"a " * 999], pa.binary())})
    (found,) = text.counted([batch], 2, False, table, NO_BOUNDS, 16)
    block = np.frombuffer(found.column("value")[0].as_py(), np.uint32)
    assert block.reshape(3, -1)[2].sum() == 1000


def test_a_line_of_many_new_words_is_read() -> None:
    """More than the table has room for at first."""
    line = b" ".join(b"n%d" % i for i in range(20_000))
    batch = pa.record_batch({"value": pa.array([line], pa.binary()), "path": ["f"], "start": [0]})
    rows = pa.Table.from_batches(text.words_of_text([batch], False))
    assert rows.column("word").to_pylist() == [*line.split(), None]
