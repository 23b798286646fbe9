"""What Spark does with partitions, with shuffles done by hand: the local engine's text, anyhow cut.

No Java is needed here: batches go to the functions that partitions are given to, cut at random.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlm.errors import EstimationError
from dlm.estimate import pipeline
from dlm.estimate.adjust.kernels import KEPT, PRUNED
from dlm.estimate.interpolate.contexts import unigrams
from dlm.estimate.pipeline import estimate_discounts
from dlm.estimate.provenance import provenance
from dlm.estimate.settings import EstimationSettings, EstimationSummary
from dlm.estimate.text import Totals
from dlm.ngram.arpa.writer import END, WordBytes, header, section_head
from dlm.progress import ProgressReporter
from dlm.spark import tasks
from dlm.spark.driver import statistics_of, table_of, take_facts
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


def shuffled(
    batches: Iterable[pa.RecordBatch], by: list[str], sort: list[str], r: random.Random
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Rows in partitions by the hash of some columns, sorted, in batches."""
    table = pa.Table.from_batches(list(batches))
    keys = np.column_stack([table.column(name).to_numpy() for name in by])
    part = np.array([zlib.crc32(key.tobytes()) % 3 for key in keys])
    for k in range(3):
        own = table.filter(pa.array(part == k)).sort_by([(name, "ascending") for name in sort])
        yield iter(own.combine_chunks().to_batches(max_chunksize=r.randint(1, 99)))


def made(one: Case, seed: int, skip: bool = False) -> bytes:
    """The text of the model, as the engine puts the stages together."""
    r = random.Random(seed)
    settings = EstimationSettings(one.order, one.prune, one.vocabulary, one.fallback, skip)
    order, keys, rows = one.order, tasks.names(one.order), r.choice([1, 20, 1000])
    text = split(list(one.lines), r)
    found = [b for own in text for b in tasks.words_of_text(own, skip)]
    table = pa.Table.from_batches(found)
    facts = table.filter(pc.is_valid(table.column("facts"))).sort_by("start")
    summary = EstimationSummary(Totals(1))
    take_facts(summary.totals, facts, skip)
    first: dict[bytes, tuple[int, int]] = {}
    for row in table.filter(pc.is_valid(table.column("word"))).to_pylist():
        at = (row["start"], row["place"])
        first[row["word"]] = min(first.get(row["word"], at), at)
    words = table_of(pa.chunked_array([sorted(first, key=first.__getitem__)], pa.binary()))
    known = None
    if one.vocabulary is not None:
        known = np.zeros(len(words), np.uint8)
        known[:3] = 1
        known[words.ids_of(sorted(one.vocabulary))] = 1
    counted = [b for own in text for b in tasks.counted(own, order, skip, words, 300)]
    adjusted = pa.Table.from_batches(
        b
        for own in shuffled(counted, keys[:2], keys, r)
        for b in tasks.adjusted(own, order, len(words), settings.thresholds, known, rows)
    )
    abouts = adjusted.column("about").drop_null().to_pylist()
    sums = (
        adjusted.filter(pc.field("order") == 1)
        .group_by("w0")
        .aggregate([("count", "sum"), ("actual", "sum")])
        .rename_columns(["w0", "left", "actual"])
    )
    statistics, counts = statistics_of(settings, abouts, sums, len(words), known)
    discounts = estimate_discounts(statistics, settings, summary, ProgressReporter(lambda _: None))
    probs = unigrams(counts, discounts[0], int(statistics[0, KEPT]))
    backoffs = np.ones(len(words), np.float32)
    sections: list[list[str]] = [[] for _ in range(order + 1)]
    if order > 1:
        higher = adjusted.filter(pc.field("order") >= 2).to_batches()
        context = ["order", *keys[1:]]
        weighed = [
            b
            for own in shuffled(higher, context, [*context, "w0"], r)
            for b in tasks.weighed(own, order, discounts, rows)
        ]
        ordered = pa.Table.from_batches(weighed)
        of_words = ordered.filter((pc.field("order") == 1) & (pc.field("kind") == tasks.CONTEXT))
        backoffs[of_words.column("w0").to_numpy()] = of_words.column("gamma").to_numpy()
        # One range, whatever groups it is looked at in: the order of the file is that of n-grams.
        higher = ordered.filter(pc.field("order") >= 2).sort_by(
            [(name, "ascending") for name in [*keys, "kind"]]
        )
        for b in tasks.interpolated(
            higher.combine_chunks().to_batches(max_chunksize=50),
            order,
            discounts,
            probs,
            words,
            rows,
        ):
            sections[b.column("order")[0].as_py()].append(b.column("value")[0].as_py())
    kept = np.flatnonzero(counts < PRUNED).astype(np.uint32)
    sections[1] = list(
        tasks.section_text(
            kept.reshape(-1, 1),
            probs[kept],
            backoffs[kept] if order > 1 else None,
            WordBytes.of(words),
        )
    )
    out = [header(provenance(settings, summary, ["text"]), summary.counts)]
    for n in range(1, order + 1):
        out += [section_head(n), *(f"{block}\n".encode() for block in sections[n])]
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
    "seeds", [range(25), pytest.param(range(25, 80), marks=pytest.mark.slow)], ids=["some", "more"]
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


FAULTY = [b"a b", b"a <s> b", b"", b"b\xff", b"a\0", b"c a b", b"x" * 100_001, b"a b"]


def test_faulty_lines_are_left_out_and_counted_as_by_the_local_engine(tmp_path: Path) -> None:
    """The provenance says the same of them."""
    one = Case((*FAULTY, *[b"a b c"] * 9, b"", *FAULTY), 3, (), None, (0.5, 1.0, 1.5))
    text = local(tmp_path, one, skip=True)
    for seed in range(5):
        assert made(one, seed, skip=True) == text
    assert b'"reserved word": 2' in text


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
    assert tasks.clean(column)[0] == b"a\nb\n"
    assert tasks.clean(column)[3] == ("null row", 1)


def test_text_that_changes_while_it_is_read_is_an_error() -> None:
    """A word that was not there when words were told is no other word."""
    table = table_of(pa.chunked_array([[b"a"]], pa.binary()))
    batch = pa.record_batch({"value": pa.array([b"a", b"b"], pa.binary())})
    with pytest.raises(EstimationError, match="text changed"):
        list(tasks.counted([batch], 2, False, table))


def test_a_line_longer_than_a_block_is_counted() -> None:
    """The room grows for it."""
    table = table_of(pa.chunked_array([[b"a"]], pa.binary()))
    batch = pa.record_batch({"value": pa.array([b"a " * 999], pa.binary())})
    rows = pa.Table.from_batches(tasks.counted([batch], 2, False, table, 16))
    assert pc.sum(rows.column("count")).as_py() == 1000


def test_a_line_of_many_new_words_is_read() -> None:
    """More than the table has room for at first."""
    line = b" ".join(b"n%d" % i for i in range(20_000))
    batch = pa.record_batch({"value": pa.array([line], pa.binary()), "path": ["f"], "start": [0]})
    rows = pa.Table.from_batches(tasks.words_of_text([batch], False))
    assert rows.column("word").to_pylist() == [*line.split(), None]


def test_a_group_is_never_cut() -> None:
    """Whatever the batches; and all rows come once, in order."""
    keys = np.sort(np.random.default_rng(1).integers(0, 40, 900))
    for size in (1, 7, 1000):
        batches = pa.table({"k": keys, "at": np.arange(900)}).to_batches(max_chunksize=size)
        pieces = list(tasks.whole_groups(batches, ["k"], 50))
        assert np.array_equal(
            np.concatenate([p.column("at").to_numpy() for p in pieces]), range(900)
        )
        found = [set(p.column("k").to_pylist()) for p in pieces]
        assert sum(map(len, found)) == len(set(keys.tolist()))
        if size < 50:
            assert len(pieces) > 5
