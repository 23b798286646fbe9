"""Makes a shard set from a model with Spark; its files are the local builder's, to the byte.

(file ->) parts -> suffix rows -> joined, order by order -> routed -> files
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ArpaError, ConfigError
from dlm.files import scratch_folder
from dlm.index import layout
from dlm.index.coding import coding_of
from dlm.index.layout import FileEntry, Manifest
from dlm.index.making import stages
from dlm.index.making.builder import (
    finish_words,
    low_columns,
    vocabulary_columns,
    write_file,
)
from dlm.index.making.pack import LevelValues
from dlm.index.making.shard_set import (
    BuildFolders,
    building,
    check_destination,
    explained,
    put_in_place,
)
from dlm.index.packed.tree import LevelCode
from dlm.index.settings import ShardSettings
from dlm.ngram.arpa import PARTS_INDEX, ArpaReader, parts_index
from dlm.ngram.arpa.writer import END, header, section_head
from dlm.ngram.partition import SLOTS, balanced_slot_table
from dlm.ngram.vocab import Vocabulary
from dlm.ngram.wordtable import WordTable
from dlm.progress import ProgressReporter
from dlm.spark import linking, sections
from dlm.spark.folder import ModelFolder, is_file, lines_of_source, literal, write_parts
from dlm.spark.jobs import (
    JobStages,
    as_bytes,
    between,
    checked,
    explained as explained_jobs,
    of_driver,
)

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

# N-grams per partition, which take about 600 bytes each while an order is joined.
PARTITION_NGRAMS = 1 << 20


def build_shard_set(
    spark: SparkSession,
    model: str,
    output: Path,
    shards: int,
    *,
    slots: NDArray[np.uint16] | None = None,
    partitions: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Makes a shard set, with exact encoding, from a model.

    Args
        model       an ARPA file, possibly compressed, or a folder of parts, at an address that
                    Spark reads
        output      folder to make; on a file system that the driver and all executors share
        slots       (4096,) the shard of each slot, instead of a balanced table
        partitions  number of partitions; None chooses it by the number of n-grams
    Raises
        ArpaError, ConfigError, EstimationError, OSError
    Guarantees
        The files, byte for byte, and the name of the set are those of the local builder. The folder
        appears whole or not at all
    Cost
        the driver holds the words and the 2-grams in memory, as every client does
    """
    ShardSettings(shards)
    check_destination(output)
    reporter = ProgressReporter(progress)
    told = JobStages(spark, reporter)
    with (
        building(output, None) as place,
        explained(place),
        explained_jobs(told, "the shard set"),
    ):
        place.begin(keep=False)
        job = _Sharding(spark, model, place, shards, slots, partitions, told)
        content = job.run()
        for left in place.folder.iterdir():  # files of killed attempts
            if left.is_dir() and left != place.spill:
                shutil.rmtree(left)
        return put_in_place(place, content, output)


class _Sharding:
    def __init__(
        self,
        spark: SparkSession,
        model: str,
        place: BuildFolders,
        shards: int,
        slots: NDArray[np.uint16] | None,
        partitions: int | None,
        told: JobStages,
    ) -> None:
        # Use a separate session, whose settings are independent of the caller's.
        self._spark = spark.newSession()
        self._model, self._folder = model.rstrip("/"), place.folder
        self._shards, self._slots, self._told = shards, slots, told
        self._partitions = partitions
        self._parts = self._model
        if is_file(spark, model):
            self._parts = f"file://{place.spill.absolute()}/parts"
            self._cut()
        self._index = self._read_index()

    def run(self) -> dict[str, Any]:
        counts: list[int] = self._index["counts"]
        order = len(counts)
        self._told.begin("reading words")
        c, table, unk = self._words()
        work, info = c.work, c.work.info
        info["counts"] = counts
        bounds = self._bounds(table, unk)
        model = linking.ModelFacts(order, c.words, unk, c.coding, bounds)
        shared = self._told.share(table)
        pairs: dict[int, NDArray[np.uint32]] = {}
        sizes, load = np.zeros(c.words, np.int64), np.zeros(SLOTS, np.int64)
        first_pair = np.zeros(len(bounds) + 2, np.int64)
        linked: RDD[Any] | None = None
        values: dict[int, LevelValues] = {}
        for k in range(order, 0 if order > 1 else 1, -1):
            self._told.begin(f"linking n-grams of order {k + 1}" if k < order else "reading rows")
            linked = self._linked(linked, k, model, shared)
            for found in of_driver(linked):
                if isinstance(found, linking.Linked):
                    info["blanks"][found.order - 1] += found.blanks
                    info["faults"] += found.faults
                elif isinstance(found, linking.PairRows):
                    pairs[found.part], load = found.pairs, load + found.load
                    first_pair[found.part + 1] = len(found.pairs)
                    sizes[found.words] += found.sizes
                elif isinstance(found, linking.ValuesFound):
                    before = values.setdefault(found.length, found.values)
                    if before is not found.values:
                        before.join(found.values)
                else:
                    mine = np.array(info["sums"][found.order - 1], np.uint64) + found.sums
                    info["sums"][found.order - 1] = mine.tolist()
            if info["faults"]:
                n, kind, count = min(info["faults"])
                raise ArpaError(stages.fault_message(n, kind, count), path=self._model, order=n)
        if order > 1:
            work.keep("pairs", np.concatenate([pairs[part] for part in sorted(pairs)]))
            work.keep("pair-sizes", sizes)
        finish_words(c)
        files = []
        for kind, make, numbers in (
            ("vocabulary", vocabulary_columns, (0, 0, 0)),
            ("low_orders", low_columns, (sum(counts[:2]), sum(info["blanks"][:2]), 0)),
        ):
            name = layout.file_name(kind, None)
            self._told.begin(f"writing {name}")
            size, digest = write_file(self._folder / name, kind, make(c), work)
            files.append(asdict(FileEntry(kind, None, name, size, digest, *numbers)))
        slots = self._slots
        if slots is None:
            slots = balanced_slot_table(load, self._shards)
        self._told.begin("writing shards")
        files += self._files(
            linked,
            model,
            stages.codes_of_model(c, [values[k] for k in range(2, order)]),
            np.cumsum(first_pair),
            slots,
            sum(map(len, pairs.values())),
        )
        return {
            "format": layout.FORMAT_NAME,
            "format_version": layout.FORMAT_VERSION,
            "features": [],
            "model": info["model"],
            "order": order,
            "counts": list(counts),
            "blanks": list(info["blanks"]),
            "unk_in_model": unk,
            "encoding": c.coding.name,
            "slots": slots.tolist(),
            "files": files,
            "provenance": {
                "source": Path(self._model).name,
                "comments": list(self._index["comments"]),
                "builder": f"dlm {__version__}",
                "repaired": False,
            },
        }

    # ------------------------------------------------------------------------------ stages

    def _cut(self) -> None:
        self._told.begin("finding the sections of the file")
        lines = lines_of_source(self._spark, literal(self._model), "value")
        found = lines.mapInArrow(checked(sections.marks), sections.MARKS_SCHEMA).toArrow()
        whole = sections.Sections(found, self._model)
        begins = whole.begins
        self._told.begin("cutting the file into parts")
        parts = ModelFolder(self._spark, self._parts)
        rows = lines.mapInArrow(
            checked(lambda batches: sections.rows(batches, begins)), sections.ROWS_SCHEMA
        )
        write_parts(rows, parts)
        names = [parts.parts(k) for k in range(1, len(whole.counts) + 1)]
        parts.commit(parts_index(whole.comments, whole.counts, names))

    def _read_index(self) -> dict[str, Any]:
        from pyspark.errors import PySparkException

        path = f"{self._parts}/{PARTS_INDEX}"
        try:
            text = "\n".join(row.value for row in self._spark.read.text(literal(path)).collect())
            return dict(json.loads(text))
        except (PySparkException, ValueError) as exc:
            raise ConfigError(
                f"{self._model} is not a model that Spark can read: it is not a file, and has no "
                f"{PARTS_INDEX}. Give an ARPA file, or a folder that dlm estimate --engine spark "
                "wrote"
            ) from exc

    def _paths(self, k: int) -> list[str]:
        return [f"{self._parts}/{part['name']}" for part in self._index["parts"][k - 1]]

    def _lines(self, paths: list[str]) -> DataFrame:
        read = self._spark.read.options(ignoreCorruptFiles=False, ignoreMissingFiles=False)
        text = read.option("lineSep", "\n").text([literal(path) for path in paths])
        return text.selectExpr("cast(value as binary) value")

    def _words(self) -> tuple[stages.Context, WordTable, bool]:
        paths = self._paths(1)
        rows = [bytes(row.value) for path in paths for row in self._lines([path]).collect()]
        order = len(self._index["counts"])
        with scratch_folder(None, "dlm-spark-words") as folder:
            alone = folder / "words.arpa"
            counts = [len(rows), *[0] * (order - 1)]
            text = [
                header([], counts),
                section_head(1),
                *(row + b"\n" for row in rows),
                END,
            ]
            alone.write_bytes(b"".join(text))
            with ArpaReader(alone) as reader:
                stages.check_header(reader)
                c = linking.ModelFacts(
                    order, 0, True, coding_of("exact", None), np.zeros(0, np.int64)
                ).context([])
                c.work.info.pop("faults")
                stages.read(reader, counts, c)
        if len(rows) != self._index["counts"][0]:
            raise ArpaError(
                f"{len(rows)} 1-grams were found, but the index says {self._index['counts'][0]}",
                path=self._model,
                advice="Copy the model again, or estimate it again",
            )
        unk = bool(c.work.info["unk_in_model"])
        words = c.work.array("words").tobytes().split(b"\n")[:-1]
        return c, WordTable.from_vocabulary(Vocabulary(words, unk_in_model=unk)), unk

    def _bounds(self, table: WordTable, unk: bool) -> NDArray[np.int64]:
        total = sum(self._index["counts"])
        count = self._partitions or max(-(-total // PARTITION_NGRAMS), 1)
        paths = self._paths(2) if len(self._index["counts"]) > 1 else []
        if not paths or count == 1:
            return np.zeros(0, np.int64)
        shared, words = self._told.share(table), len(table)
        top = len(self._index["counts"]) == 2

        def begun(batches: Any) -> Iterator[pa.RecordBatch]:
            out = np.zeros(words, np.int64)
            for ids, _, _ in linking.read_rows(batches, 2, top, shared.value, unk):
                out += np.bincount(ids[:, 0], minlength=words)
            found = np.flatnonzero(out)
            yield pa.record_batch({"word": found, "count": out[found]})

        rows = self._lines(paths).mapInArrow(checked(begun), "word bigint, count bigint").toArrow()
        load = np.bincount(
            rows.column("word").to_numpy(),
            rows.column("count").to_numpy(),
            minlength=words,
        )
        before = np.cumsum(load)
        wanted = np.arange(1, count) * (before[-1] / count)
        bounds: NDArray[np.int64] = np.searchsorted(before, wanted, "right").astype(np.int64)
        return bounds

    def _linked(
        self, above: RDD[Any] | None, k: int, model: linking.ModelFacts, shared: Any
    ) -> RDD[Any]:
        parts = len(model.bounds) + 2
        # The join of order 3 also needs the 2-grams, and passes them on.
        orders = {3: (3, 2), 2: (2,) if model.order == 2 else ()}.get(k, (k,) if k > 3 else ())
        sections = ((n, self._paths(n)) for n in orders)
        given = [_rows(self._lines(paths), n, model, shared) for n, paths in sections if paths]
        if above is not None:

            def joined(part: int, values: Iterator[Any]) -> Iterator[tuple[int, Any]]:
                if part + 1 == parts:
                    return iter(())
                return linking.joined(part, values, k + 1, model)

            given.append(above.mapPartitionsWithIndex(checked(joined)))
        context = self._spark.sparkContext
        return context.union(given or [context.parallelize([], 1)]).partitionBy(parts, int).values()

    def _files(
        self,
        linked: RDD[Any] | None,
        model: linking.ModelFacts,
        codes: list[LevelCode],
        first_pair: NDArray[np.int64],
        slots: NDArray[np.uint16],
        pairs: int,
    ) -> list[dict[str, Any]]:
        shards, folder = self._shards, str(self._folder.absolute())
        last, order = len(model.bounds) + 1, model.order

        def rows(part: int, values: Iterator[Any]) -> Iterator[tuple[int, Any]]:
            if part == last or order < 3:
                return iter(())
            return linking.routed(part, values, model, first_pair, slots, shards)

        context = self._spark.sparkContext
        routed = between(context.parallelize([], 1) if linked is None else linked, shards, rows)
        written = routed.mapPartitionsWithIndex(
            checked(
                lambda shard, values: iter(
                    [linking.packed_shard(shard, values, model, codes, pairs, folder)]
                )
            )
        )
        return sorted(written.collect(), key=lambda entry: int(entry["index"]))


def _rows(lines: DataFrame, n: int, model: linking.ModelFacts, shared: Any) -> RDD[Any]:
    def packed(batches: Any) -> Iterator[pa.RecordBatch]:
        for part, value in linking.suffix_rows(batches, n, model, shared.value):
            yield pa.record_batch({"value": [pickle.dumps((part, value))]})

    return as_bytes(lines.mapInArrow(checked(packed), "value binary")).map(pickle.loads)
