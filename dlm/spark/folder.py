"""Reads lines of text and writes multi-part models, for Spark, on any file system."""

from __future__ import annotations

import re
import secrets
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from dlm.errors import ConfigError
from dlm.index.layout import MAX_ORDER
from dlm.ngram.arpa import PARTS_INDEX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RUN = "run-"

# Suffixes of compressed text that Spark takes for plain text, or for Hadoop's own format of that
# name: Spark may then silently find nothing in the file.
_UNREADABLE = {".lz4", ".snappy", ".xz"}

# Object stores have this capability: a closed file is whole or absent, and renaming copies a file.
# Other file systems rename a file in one step.
_APPEARS_WHOLE = "fs.capability.outputstream.abortable"


def lines_of_source(spark: SparkSession, source: str, column: str) -> DataFrame:
    """Returns a frame of rows (value binary, path string, start bigint), one per line or row."""
    from pyspark.sql import functions as F

    if source == "-":
        raise ConfigError("Spark does not read standard input; give a path, or use --engine local")
    # The session's settings for damaged files are ignored: nothing is skipped silently.
    read = spark.read.options(ignoreCorruptFiles=False, ignoreMissingFiles=False)
    frame = read.option("lineSep", "\n").text(source)
    files = frame.inputFiles()
    if not files:
        raise ConfigError(
            f"{source} matches no file that Spark reads; Spark skips names that begin with _ or .; "
            "rename such files, or give another path"
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
                f"{source} has no column {column!r}; its columns are {', '.join(kinds)}; give "
                "the one with the text as --text-column"
            )
        if kinds[column] not in ("string", "binary"):
            raise ConfigError(
                f"{source}: column {column!r} is {kinds[column]}, not text; name another with "
                "--text-column"
            )
    return frame.select(
        F.col(name).cast("binary").alias("value"),
        F.col("_metadata.file_path").alias("path"),
        F.col("_metadata.file_block_start").alias("start"),
    )


def literal(path: str) -> str:
    """Escapes a path for Spark, which would otherwise treat *, ?, [ and { as patterns."""
    return re.sub(r"([*?{}\[\]\\])", r"\\\1", path)


def is_file(spark: SparkSession, path: str) -> bool:
    jvm: Any = spark._jvm
    place = jvm.org.apache.hadoop.fs.Path(path)
    files = place.getFileSystem(spark._jsc.hadoopConfiguration())
    return bool(files.exists(place) and files.getFileStatus(place).isFile())


def write_parts(frame: DataFrame, folder: ModelFolder) -> None:
    """Writes a frame of blocks of rows (order, value): one part for each partition and order."""
    # Rows of all orders are written as they come: to sort them, Spark would have to hold them all.
    frame.sparkSession.conf.set("spark.sql.maxConcurrentOutputFileWriters", MAX_ORDER)
    rows = frame.select("order", frame.value.cast("string"))
    rows.write.mode("append").partitionBy("order").option("lineSep", "\n").text(folder.run_path)


class ModelFolder:
    """The folder where a run writes its parts, beside the previous run's parts until `commit`.

    Args        path         for Spark: hdfs://, s3a://, file:// or on the default file system
    Raises      ConfigError  the path has other contents
    Guarantees  the path has the previous model before `commit`, and the new model after it; the
                next commit removes what a killed run left
    Trusts      one run at a time writes to it
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        if path == "-":
            raise ConfigError(
                "Spark cannot write to standard output; give a folder as --output, or use "
                "--engine local"
            )
        jvm: Any = spark._jvm
        self._gateway: Any = spark.sparkContext._gateway
        self._new_path = jvm.org.apache.hadoop.fs.Path
        self._root = self._new_path(path)
        configuration = spark._jsc.hadoopConfiguration()
        self._files = self._root.getFileSystem(configuration)
        self._run = f"{_RUN}{secrets.token_hex(8)}"
        self._is_model = False
        self._jvm = jvm
        self._configuration = configuration
        if not self._files.exists(self._root):
            return
        if self._files.getFileStatus(self._root).isFile():
            raise ConfigError(
                f"{path} is a file; Spark writes a folder of parts: remove it, or name another "
                "--output"
            )
        others = [
            name
            for name in self._names(self._root)
            if not name.startswith((_RUN, ".")) and name != PARTS_INDEX
        ]
        if others:
            raise ConfigError(
                f"{path} has unexpected files ({', '.join(sorted(others)[:3])}); expected --output "
                "to be a new folder, an empty one, or one with a multi-part model"
            )

    @property
    def run_path(self) -> str:
        """The path of the parts, in folders `order=K`."""
        return str(self._new_path(self._root, self._run).toString())

    def parts(self, order: int) -> list[tuple[str, int]]:
        """The parts of an order, sorted: path relative to the folder, and size in bytes."""
        folder = self._new_path(self._new_path(self._root, self._run), f"order={order}")
        if not self._files.exists(folder):
            return []  # no n-gram of the order is in the model
        found = {
            str(status.getPath().getName()): int(status.getLen())
            for status in self._files.listStatus(folder)
        }
        names = [name for name in found if name.startswith("part-")]
        return [
            (f"{self._run}/order={order}/{name}", found[name]) for name in sorted(names, key=_place)
        ]

    def commit(self, index: bytes) -> None:
        """Publishes this run's parts as the model, and removes the parts of other runs."""
        place = self._new_path(self._root, PARTS_INDEX)
        context = self._renaming_context()
        if context is None:
            self._is_model = True
            self._write(place, index)
        else:
            written = self._new_path(self._root, f".{PARTS_INDEX}.{self._run}")
            self._write(written, index)
            rename = self._jvm.org.apache.hadoop.fs.Options.Rename
            how = self._gateway.new_array(rename, 1)
            how[0] = rename.OVERWRITE
            self._is_model = True
            context.rename(
                self._files.makeQualified(written), self._files.makeQualified(place), how
            )
        for name in self._names(self._root):
            if name.startswith((_RUN, f".{PARTS_INDEX}.{_RUN}")) and name != self._run:
                self._files.delete(self._new_path(self._root, name), True)

    def discard(self) -> None:
        """Removes this run's parts, unless they are, or may be, the model."""
        if not self._is_model:
            self._files.delete(self._new_path(self._root, self._run), True)

    def _write(self, path: Any, text: bytes) -> None:
        stream = self._files.create(path, True)
        try:
            stream.write(bytearray(text))
        finally:
            stream.close()

    def _renaming_context(self) -> Any:
        """Returns a context that can rename a file over another; None means to write in place."""
        from py4j.protocol import Py4JJavaError

        if self._files.hasPathCapability(self._root, _APPEARS_WHOLE):
            return None
        root = self._files.makeQualified(self._root).toUri()
        contexts = self._jvm.org.apache.hadoop.fs.FileContext
        try:
            return contexts.getFileContext(root, self._configuration)
        except Py4JJavaError as exc:
            if "UnsupportedFileSystem" in str(exc.java_exception.getClass().getName()):
                return None
            raise

    def _names(self, path: Any) -> list[str]:
        return [str(status.getPath().getName()) for status in self._files.listStatus(path)]


def _place(name: str) -> tuple[int, str]:
    return int(name.split("-")[1]), name
