"""Estimates an ARPA model in parts from text, as Spark jobs.

words -> counted -> adjusted -> discounts -> weighed -> interpolated -> parts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm.errors import ConfigError, EstimationError
from dlm.estimate.adjust.kernels import KEPT, PRUNED
from dlm.estimate.interpolate.contexts import unigrams
from dlm.estimate.pipeline import estimate_discounts
from dlm.estimate.provenance import provenance
from dlm.estimate.settings import EstimationSettings, EstimationSummary
from dlm.estimate.text import Totals
from dlm.ngram.arpa import parts_index
from dlm.ngram.arpa.writer import WordBytes
from dlm.ngram.wordtable import WordTable
from dlm.progress import ProgressReporter
from dlm.spark import tasks
from dlm.spark.driver import statistics_of, table_of, take_facts
from dlm.spark.folder import ModelFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Compressed text that Spark takes for plain text, or for Hadoop's own format of that name: it may
# then silently find nothing in it.
_UNREADABLE = {".lz4", ".snappy", ".xz"}


def estimate(
    spark: SparkSession,
    sources: Sequence[str],
    output: str,
    settings: EstimationSettings,
    *,
    progress: ProgressReporter | None = None,
    group_rows: int = tasks.GROUP_ROWS,
    block_tokens: int = tasks.BLOCK_TOKENS,
) -> EstimationSummary:
    """Estimates an ARPA model in parts from text, by interpolated modified Kneser-Ney.

    Args
        sources     files, folders or patterns that Spark reads: text, compressed as Hadoop reads
                    it, or parquet. Files of one source follow one another by their paths
        output      folder, on any file system that Spark writes to
        settings    as of the local engine; memory and threads do not apply
        group_rows, block_tokens  how much a task does at once; for tests
    Raises
        ConfigError      invalid sources, output or settings
        EstimationError  text with a fault, or too little of it; a job that failed
    Guarantees
        the text of the model is that of the local engine, to the byte, however it is partitioned
        (except byte order marks at the start of files, which Spark skips). The output is written
        whole, or stays as it was
    """
    with _explained():
        job = _Estimation(
            spark, sources, output, settings,
            progress or ProgressReporter(lambda _: None), group_rows, block_tokens,
        )  # fmt: skip
        try:
            return job.run()
        finally:
            job.close()


class _Estimation:
    def __init__(
        self,
        spark: SparkSession,
        sources: Sequence[str],
        output: str,
        settings: EstimationSettings,
        progress: ProgressReporter,
        group_rows: int,
        block_tokens: int,
    ) -> None:
        self._spark = spark
        self._sources = sources
        self._settings = settings
        self._progress = progress
        self._group_rows = group_rows
        self._block_tokens = block_tokens
        self._folder = ModelFolder(spark, output)
        self._lines = [_lines(spark, source, settings.column) for source in sources]
        if not self._lines:
            raise ConfigError("give at least one text")
        self._summary = EstimationSummary(Totals(sources=len(sources)), output=output)
        self._partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 200)
        self._kept: list[DataFrame] = []
        self._broadcasts: list[Any] = []
        self._committed = False

    def run(self) -> EstimationSummary:
        settings, progress, summary = self._settings, self._progress, self._summary
        order = settings.order
        progress.stage("reading words")
        table = self._words()
        known = None
        if settings.vocabulary is not None:
            known = np.zeros(len(table), np.uint8)
            known[:3] = 1
            known[table.ids_of(sorted(settings.vocabulary))] = 1
        progress.stage("counting n-grams and adjusting counts")
        shared = self._share(table)
        adjusted = self._adjusted(shared, len(table), known)
        statistics, counts = self._statistics(adjusted, len(table), known)
        discounts = estimate_discounts(statistics, settings, summary, progress)
        probs = unigrams(counts, discounts[0], int(statistics[0, KEPT]))
        backoffs = np.ones(len(table), np.float32)
        if order > 1:
            progress.stage("adding up what follows each context")
            weighed = self._weighed(adjusted, discounts)
            found = _arrow(
                weighed.filter(f"order = 1 AND kind = {tasks.CONTEXT}").select("w0", "gamma")
            )
            backoffs[found.column("w0").to_numpy()] = found.column("gamma").to_numpy()
            adjusted.unpersist()
            progress.stage("interpolating and writing")
            self._write_ngrams(weighed, discounts, probs, shared)
        self._write_words(table, counts, probs, backoffs)
        parts = [self._folder.parts(n) for n in range(1, order + 1)]
        summary.arpa_bytes = sum(size for own in parts for _, size in own)
        progress.stage("writing the index of the parts")
        self._folder.commit(
            parts_index(provenance(settings, summary, self._sources), summary.counts, parts)
        )
        self._committed = True
        return summary

    def close(self) -> None:
        for frame in self._kept:
            frame.unpersist()
        for one in self._broadcasts:
            one.destroy()
        if not self._committed:
            self._folder.discard()

    # ------------------------------------------------------------------------------ stages

    def _words(self) -> WordTable:
        from pyspark.sql import functions as F

        skip = self._settings.skip
        found: DataFrame | None = None
        for number, lines in enumerate(self._lines):
            words = lines.mapInArrow(
                lambda batches: tasks.words_of_text(batches, skip), tasks.WORDS_SCHEMA
            ).withColumn("source", F.lit(number))
            found = words if found is None else found.union(words)
        assert found is not None
        place = F.struct("source", "path", "start", "place")
        # Facts are of one part each, though those of another may be the same.
        part = F.when(F.col("facts").isNotNull(), place).alias("part")
        rows = _arrow(
            found.groupBy("word", "facts", part)
            .agg(F.min(place).alias("at"))
            .select("word", "facts", "at.*")
        ).sort_by([(name, "ascending") for name in ("source", "path", "start", "place")])
        facts = rows.filter(pa.compute.is_valid(rows.column("facts")))
        take_facts(self._summary.totals, facts, skip)
        words = rows.column("word").drop_null()
        totals = self._summary.totals
        self._progress.tell(f"read {totals.summary(skip)}; {len(words):,} different words")
        if totals.lines == 0:
            raise EstimationError("the text has no line that can be counted; is it the right file?")
        return table_of(words)

    def _adjusted(self, shared: Any, words: int, known: NDArray[np.uint8] | None) -> DataFrame:
        settings, block_tokens, group_rows = self._settings, self._block_tokens, self._group_rows
        order, skip, thresholds = settings.order, settings.skip, settings.thresholds
        known_words = self._share(known)
        lines = self._lines[0]
        for more in self._lines[1:]:
            lines = lines.union(more)
        keys = tasks.names(order)
        counted = lines.select("value").mapInArrow(
            lambda batches: tasks.counted(batches, order, skip, shared.value, block_tokens),
            tasks.counts_schema(order),
        )
        return self._keep(
            counted.repartition(self._partitions, *keys[:2])
            .sortWithinPartitions(*keys)
            .mapInArrow(
                lambda batches: tasks.adjusted(
                    batches, order, words, thresholds, known_words.value, group_rows
                ),
                tasks.adjusted_schema(order),
            )
        )

    def _statistics(
        self, adjusted: DataFrame, words: int, known: NDArray[np.uint8] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        from pyspark.sql import functions as F

        abouts = _arrow(adjusted.filter("order = 0").select("about")).column(0).to_pylist()
        sums = _arrow(
            adjusted.filter("order = 1")
            .groupBy("w0")
            .agg(F.sum("count").alias("left"), F.sum("actual").alias("actual"))
        )
        return statistics_of(self._settings, abouts, sums, words, known)

    def _weighed(self, adjusted: DataFrame, discounts: list[NDArray[np.float32]]) -> DataFrame:
        order, group_rows = self._settings.order, self._group_rows
        keys = tasks.names(order)
        context = ["order", *keys[1:]]
        return self._keep(
            adjusted.filter("order >= 2")
            .select("order", *keys, "count")
            .repartition(self._partitions, *context)
            .sortWithinPartitions(*context, keys[0])
            .mapInArrow(
                lambda batches: tasks.weighed(batches, order, discounts, group_rows),
                tasks.weighed_schema(order),
            )
        )

    def _write_ngrams(
        self,
        weighed: DataFrame,
        discounts: list[NDArray[np.float32]],
        probs: NDArray[np.float32],
        shared: Any,
    ) -> None:
        """Parts of orders 2 and above: by ranges, so that one after another they are sorted."""
        order, group_rows = self._settings.order, self._group_rows
        keys = tasks.names(order)
        words = self._share(probs)
        self._write(
            weighed.filter("order >= 2")
            .repartitionByRange(self._partitions, *keys[:2])
            .sortWithinPartitions(*keys, "kind")
            .mapInArrow(
                lambda batches: tasks.interpolated(
                    batches, order, discounts, words.value, shared.value, group_rows
                ),
                tasks.TEXT_SCHEMA,
            )
        )

    def _write_words(
        self,
        table: WordTable,
        counts: NDArray[np.uint32],
        probs: NDArray[np.float32],
        backoffs: NDArray[np.float32],
    ) -> None:
        kept = np.flatnonzero(counts < PRUNED)
        texts = list(
            tasks.section_text(
                kept.astype(np.uint32).reshape(-1, 1),
                probs[kept],
                backoffs[kept] if self._settings.order > 1 else None,
                WordBytes.of(table),
            )
        )
        rows = pa.table(
            {
                "order": np.ones(len(texts), np.int32),
                "place": np.arange(len(texts)),
                "value": texts,
            }
        )
        self._write(self._spark.createDataFrame(rows).coalesce(1))

    def _write(self, texts: DataFrame) -> None:
        """Of tasks.TEXT_SCHEMA: a part for each partition and order."""
        (
            texts.sortWithinPartitions("order", "place")
            .select("order", "value")
            .write.mode("append")
            .partitionBy("order")
            .option("compression", "gzip")
            .option("lineSep", "\n")
            .text(self._folder.run_path)
        )

    def _keep(self, frame: DataFrame) -> DataFrame:
        from pyspark import StorageLevel

        self._kept.append(frame.persist(StorageLevel.DISK_ONLY))
        return self._kept[-1]

    def _share(self, value: Any) -> Any:
        self._broadcasts.append(self._spark.sparkContext.broadcast(value))
        return self._broadcasts[-1]


def _lines(spark: SparkSession, source: str, column: str) -> DataFrame:
    """value binary, path string, start bigint: of each line or row, with its place."""
    from pyspark.sql import functions as F

    if source == "-":
        raise ConfigError("Spark does not read standard input; give a path, or use --engine local")
    # The session's settings for damaged files are ignored: nothing is skipped silently.
    read = spark.read.options(ignoreCorruptFiles=False, ignoreMissingFiles=False)
    frame = read.option("lineSep", "\n").text(source)
    files = frame.inputFiles()
    if not files:
        raise ConfigError(
            f"{source} matches no file that Spark reads; Spark skips names that begin with _ or ."
        )
    suffixes = {PurePosixPath(file).suffix for file in files}
    for suffix in sorted(suffixes & _UNREADABLE):
        raise ConfigError(
            f"{source}: Spark cannot read standard {suffix[1:]} files; compress "
            "the text with bzip2, gzip or zstd"
        )
    name = "value"
    if ".parquet" in suffixes:
        frame, name = read.parquet(source), column
        kinds = dict(frame.dtypes)
        if column not in kinds:
            raise ConfigError(
                f"{source} has no column {column!r}; it has {', '.join(kinds)}; name one with "
                "--text-column"
            )
        if kinds[column] not in ("string", "binary"):
            raise ConfigError(f"{source}: column {column!r} is {kinds[column]}, not text")
    return frame.select(
        F.col(name).cast("binary").alias("value"),
        F.col("_metadata.file_path").alias("path"),
        F.col("_metadata.file_block_start").alias("start"),
    )


def _arrow(frame: DataFrame) -> pa.Table:
    collect = cast(Callable[[], pa.Table], frame.toArrow)
    return collect().combine_chunks()


@contextmanager
def _explained() -> Iterator[None]:
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException as exc:
        raise ConfigError(f"Spark cannot read or write this: {_reason(exc)}") from exc
    except (PySparkException, Py4JError) as exc:
        text = str(exc)
        _, mark, ours = text.partition("dlm.errors.EstimationError: ")
        if mark:
            raise EstimationError(ours.split("\n")[0]) from exc
        raise EstimationError(
            f"a Spark job failed: {_reason(exc)}; see its log. The model was not written"
        ) from exc


def _reason(exc: BaseException) -> str:
    """The error's message, without Python's traceback and Java's stack."""
    lines = str(exc).strip().split("\n")
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if causes:
        return ", because of ".join(causes[-2:])
    if lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        return lines[1].lstrip(": ")
    return lines[0]
