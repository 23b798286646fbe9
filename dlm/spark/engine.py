"""Estimates a multi-part ARPA model from text, as Spark jobs.

words -> counted -> adjusted -> discounts -> weighed -> interpolated -> parts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlm.errors import ConfigError, EstimationError
from dlm.estimate.adjust.kernels import (
    ALL,
    BOS,
    COUNT_BITS,
    EOS,
    KEPT,
    PRUNED,
    STATISTICS,
)
from dlm.estimate.adjust.trie import TOO_OFTEN
from dlm.estimate.interpolate.contexts import unigrams
from dlm.estimate.pipeline import estimate_discounts, known_words
from dlm.estimate.provenance import provenance
from dlm.estimate.settings import EstimationSettings, EstimationSummary
from dlm.estimate.text import LineFault, Totals, complaint
from dlm.ngram.arpa import parts_index
from dlm.ngram.arpa.writer import WordBytes
from dlm.ngram.wordtable import WordTable
from dlm.progress import ProgressReporter
from dlm.spark import text, tries
from dlm.spark.folder import ModelFolder, lines_of_source, write_parts
from dlm.spark.jobs import JobStages, as_bytes, between, checked, explained, of_driver
from dlm.spark.text import pairs_of
from dlm.spark.tries import About

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession


MAX_WORDS = (1 << 31) - 1  # ids are `int` in Spark
# Words of the text, including `</s>`, per partition; each takes about 150 bytes of memory.
PARTITION_TOKENS = 1 << 21
# A smaller partition takes longer to start than to process.
LEAST_TOKENS = 1 << 17


def estimate(
    spark: SparkSession,
    sources: Sequence[str],
    output: str,
    settings: EstimationSettings,
    *,
    progress: ProgressReporter | None = None,
    block_tokens: int = text.BLOCK_TOKENS,
) -> EstimationSummary:
    """Estimates a multi-part ARPA model from text, by interpolated modified Kneser-Ney.

    Args
        sources     files, folders or patterns that Spark reads: text, compressed as Hadoop reads
                    it, or parquet. Files of one source are taken in the order of their paths
        output      folder, on any file system that Spark writes to
        settings    those of the local engine; memory and threads do not apply
        block_tokens  number of tokens counted at once; for tests
    Raises
        ConfigError      invalid sources, output or settings
        EstimationError  text with a fault, or too little text; a job failed
    Guarantees
        the text of the model is that of the local engine, to the byte, however it is partitioned
        (except byte order marks at the start of files, which Spark skips). The output is written
        whole, or stays as it was
    """
    stages = JobStages(spark, progress or ProgressReporter(lambda _: None))
    with explained(stages, "the model"):
        job = _Estimation(spark, sources, output, settings, stages, block_tokens)
        try:
            return job.run()
        finally:
            job.folder.discard()


class _Estimation:
    def __init__(
        self,
        spark: SparkSession,
        sources: Sequence[str],
        output: str,
        settings: EstimationSettings,
        stages: JobStages,
        block_tokens: int,
    ) -> None:
        # Use a separate session, whose settings are independent of the caller's.
        self._spark = spark.newSession()
        self._sources = sources
        self._settings = settings
        self._stages = stages
        self._progress = stages.progress
        self._block_tokens = block_tokens
        self.folder = ModelFolder(spark, output)
        self._lines = [lines_of_source(self._spark, source, settings.column) for source in sources]
        if not self._lines:
            raise ConfigError("no text was given; give at least one source")
        self._summary = EstimationSummary(Totals(sources=len(sources)), output=output)

    def run(self) -> EstimationSummary:
        settings, stages, summary = self._settings, self._stages, self._summary
        order = settings.order
        stages.begin("reading words")
        table, occurrences = self._words()
        known = known_words(settings, table)
        bounds = bounds_of(occurrences, self._partitions(int(occurrences.sum())))
        stages.begin("counting n-grams and adjusting counts")
        shared = self._stages.share(table)
        adjusted = self._adjusted(shared, len(table), known, bounds)
        statistics, counts = statistics_of(settings, of_driver(adjusted), len(table), known)
        discounts = estimate_discounts(statistics, settings, summary, stages.progress)
        probs = unigrams(counts, discounts[0], int(statistics[0, KEPT]))
        backoffs = np.ones(len(table), np.float32)
        if order > 1:
            stages.begin("adding up what follows each context")
            weighed = between(
                adjusted,
                len(bounds) + 2,
                lambda part, values: tries.weighed(part, values, order, discounts, bounds),
            )
            for found in of_driver(weighed):
                backoffs[found.words] = found.backoffs
            stages.begin("interpolating and writing")
            self._write_ngrams(weighed, discounts, probs, shared, bounds)
        unigram_rows = tries.unigram_text(table, counts, probs, backoffs if order > 1 else None)
        ones = [(1, bytes(rows[:-1])) for rows in unigram_rows]
        self._write(self._spark.sparkContext.parallelize(ones, 1))
        parts = [self.folder.parts(n) for n in range(1, order + 1)]
        summary.arpa_bytes = sum(size for own in parts for _, size in own)
        stages.begin("writing the index of the parts")
        self.folder.commit(
            parts_index(provenance(settings, summary, self._sources), summary.counts, parts)
        )
        return summary

    # ------------------------------------------------------------------------------ stages

    def _words(self) -> tuple[WordTable, NDArray[np.int64]]:
        from pyspark.sql import functions as F

        skip = self._settings.skip
        found: DataFrame | None = None
        for number, lines in enumerate(self._lines):
            words = lines.mapInArrow(
                checked(lambda batches: text.words_of_text(batches, skip)), text.WORDS_SCHEMA
            ).withColumn("source", F.lit(number))
            found = words if found is None else found.union(words)
        assert found is not None
        place = F.struct("source", "path", "start", "place")
        # Equal facts of different parts must not be merged.
        part = F.when(F.col("facts").isNotNull(), place).alias("part")
        rows = _arrow(
            found.groupBy("word", "facts", part)
            .agg(F.min(place).alias("at"), F.sum("count").alias("count"))
            .select("word", "count", "facts", "at.*")
        ).sort_by([(name, "ascending") for name in ("source", "path", "start", "place")])
        facts = rows.filter(pa.compute.is_valid(rows.column("facts")))
        take_facts(self._summary.totals, facts, skip)
        rows = rows.filter(pa.compute.is_valid(rows.column("word")))
        words, totals = rows.column("word"), self._summary.totals
        self._progress.tell(f"read {totals.summary(skip)}; {len(words):,} different words")
        if totals.lines == 0:
            raise EstimationError("the text is empty, or all lines were skipped; give other text")
        lines = [0, totals.lines, totals.lines]  # counts of <unk>, <s> and </s>
        return table_of(words), np.append(lines, rows.column("count").to_numpy())

    def _partitions(self, tokens: int) -> int:
        given = self._spark.sparkContext.getConf().get("spark.sql.shuffle.partitions")
        if given is not None:
            return int(given)
        cores = int(self._spark.sparkContext.defaultParallelism)
        return max(-(-tokens // PARTITION_TOKENS), min(cores, tokens // LEAST_TOKENS), 1)

    def _adjusted(
        self,
        shared: Any,
        words: int,
        known: NDArray[np.uint8] | None,
        bounds: NDArray[np.uint64],
    ) -> RDD[Any]:
        settings, block_tokens = self._settings, self._block_tokens
        order, skip, thresholds = settings.order, settings.skip, settings.thresholds
        known_words = self._stages.share(known)
        lines = self._lines[0]
        for more in self._lines[1:]:
            lines = lines.union(more)
        counted = lines.select("value").mapInArrow(
            lambda batches: text.counted(batches, order, skip, shared.value, bounds, block_tokens),
            text.COUNTS_SCHEMA,
        )
        return between(
            as_bytes(counted.repartitionById(len(bounds) + 1, "part")),
            len(bounds) + 2,
            lambda part, blocks: tries.adjusted(
                part, blocks, order, words, thresholds, known_words.value, bounds
            ),
        )

    def _write_ngrams(
        self,
        weighed: RDD[Any],
        discounts: list[NDArray[np.float32]],
        probs: NDArray[np.float32],
        shared: Any,
        bounds: NDArray[np.uint64],
    ) -> None:
        """Writes the parts of orders 2 and above, in sorted order, since partitions are ranges."""
        order, last = self._settings.order, len(bounds) + 1
        words = self._stages.share(probs)

        def texts(part: int, values: Iterator[Any]) -> Iterator[tuple[int, bytes]]:
            if part == last:
                return iter(())
            spelling = WordBytes.of(shared.value)
            return tries.interpolated(values, order, discounts, words.value, spelling, bounds)

        self._write(weighed.mapPartitionsWithIndex(texts))

    def _write(self, texts: RDD[Any]) -> None:
        frame = self._spark.createDataFrame(texts, "order int, value binary", verifySchema=False)
        write_parts(frame, self.folder)


def _arrow(frame: DataFrame) -> pa.Table:
    collect = cast(Callable[[], pa.Table], frame.toArrow)
    return collect().combine_chunks()


def take_facts(totals: Totals, rows: pa.Table, skip: bool) -> None:
    """Adds up the facts that `text.words_of_text` found, in the order of the text; EstimationError
    for a line with a fault, unless `skip` is true."""
    for facts, path, start in zip(
        *(rows.column(name).to_pylist() for name in ("facts", "path", "start")), strict=True
    ):
        own = json.loads(facts)
        if own["fault"] is not None and not skip:
            fault, line = own["fault"]
            where = f"{path}, line {line:,}"
            if start:
                where += f" of the part that begins at byte {start:,}"
            raise EstimationError(complaint(LineFault(fault), where))
        totals.bytes += own["bytes"]
        totals.lines += own["lines"] - (own["empty"] if skip else 0)
        totals.empty += own["empty"]
        totals.words += own["words"]
        for name, count in own["skipped"].items():
            totals.skipped[LineFault(name)] = totals.skipped.get(LineFault(name), 0) + count


def table_of(words: pa.ChunkedArray) -> WordTable:
    """Makes the table of a text's words from distinct words in the order in which they first occur;
    EstimationError for too many words."""
    if len(words) + 3 > MAX_WORDS:
        raise EstimationError(
            f"{len(words):,} different words are too many; expected at most {MAX_WORDS:,}. Give "
            "less text, or a tokenizer with fewer words"
        )
    lengths = pc.binary_length(words).to_numpy()
    begin = np.concatenate(([0, 5, 8, 12], 12 + np.cumsum(lengths, dtype=np.int64)))
    text = b"".join([b"<unk><s></s>", *map(_bytes_of, words.chunks)])
    return WordTable.from_arrays(np.frombuffer(text, np.uint8), begin)


def _bytes_of(column: pa.Array) -> bytes:
    if not len(column):
        return b""
    values = column.cast(pa.large_binary())
    ends = np.frombuffer(values.buffers()[1], np.int64)[
        values.offset : values.offset + len(values) + 1
    ]
    return bytes(values.buffers()[2].slice(int(ends[0]), int(ends[-1] - ends[0])).to_pybytes())


def bounds_of(counts: NDArray[np.int64], partitions: int) -> NDArray[np.uint64]:
    """Finds where partitions with similar amounts of text begin, as numbers of `text.pairs_of`.

    Args  counts  (words,)  how often each word occurs, `<s>` as often as `</s>`
    A word in several partitions is split as if the words before it had their overall frequencies.
    """
    last = np.cumsum(np.where(np.arange(len(counts)) == BOS, 0, counts))
    before = np.cumsum(np.where(np.arange(len(counts)) == EOS, 0, counts))
    wanted = np.arange(1, partitions) * (int(last[-1]) / partitions)
    word = np.searchsorted(last, wanted, "right")
    share = (wanted - (last[word] - counts[word])) / np.maximum(counts[word], 1)
    return pairs_of(word, np.searchsorted(before, np.clip(share, 0, 1) * int(before[-1])))


def statistics_of(
    settings: EstimationSettings,
    abouts: Sequence[About],
    words: int,
    known: NDArray[np.uint8] | None,
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Computes `statistics` of all orders, and `counts[0]` with the PRUNED bit, both as in a Trie,
    from the `abouts` of the partitions."""
    order = settings.order
    statistics = np.zeros((order, STATISTICS), np.int64)
    left, actual = np.zeros(words, np.int64), np.zeros(words, np.int64)
    for about in abouts:
        statistics[1:] += about.statistics[1:]
        left[about.left[0]] += about.left[1]
        np.add.at(actual, *about.actual)
    last = max(abouts, key=lambda about: about.key)
    counts = actual if order == 1 else left
    if int(counts.max()) > COUNT_BITS:
        raise EstimationError(TOO_OFTEN)
    pruned = actual <= settings.thresholds[0]
    if known is not None:
        pruned |= known == 0
    pruned[: EOS + 1] = False
    statistics[0, :4] = np.bincount(np.minimum(counts, 5), minlength=6)[1:5]
    statistics[0, ALL] = words
    statistics[0, KEPT] = words - int(pruned.sum())
    # As in `TrieBuilder.finish`, count n-grams that end the last key by their occurrences instead.
    nodes = [(int(counts[last.key[0]]), int(actual[last.key[0]])), *last.nodes[1:]]
    for n, (adjusted, often) in enumerate(nodes[: order - 1]):
        if 1 <= adjusted <= 4:
            statistics[n, adjusted - 1] -= 1
        if 1 <= often <= 4:
            statistics[n, often - 1] += 1
    return statistics, counts.astype(np.uint32) | np.where(pruned, PRUNED, 0).astype(np.uint32)
