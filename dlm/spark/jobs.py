"""Runs stages as Spark jobs: moves data between stages, checks workers, and explains errors."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dlm import __version__
from dlm.errors import ConfigError, EstimationError
from dlm.jit import version
from dlm.progress import ProgressReporter

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession


class JobStages:
    """Reports which stage begins, shows its name on Spark's own page, and keeps it for errors; also
    holds what the jobs of all stages share."""

    def __init__(self, spark: SparkSession, progress: ProgressReporter) -> None:
        self.progress = progress
        self.name = "starting"
        self._context = spark.sparkContext
        self._shared: list[Any] = []

    def begin(self, name: str) -> None:
        self.name = name
        self._context.setJobDescription(f"dlm: {name}")
        self.progress.stage(name)

    def share(self, value: Any) -> Any:
        self._shared.append(self._context.broadcast(value))
        return self._shared[-1]

    def close(self) -> None:
        for one in self._shared:
            one.destroy()


def checked(run: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function fail on a worker whose dlm differs from the driver's."""
    wanted = _version()

    def on_worker(*arguments: Any) -> Any:
        check_version(wanted)
        return run(*arguments)

    return on_worker


def check_version(wanted: str) -> None:
    if (found := _version()) != wanted:
        raise EstimationError(
            f"the executor on {socket.gethostname()} has {found}; the driver has {wanted}. Give "
            "the driver and all executors the same environment"
        )


def _version() -> str:
    return f"dlm {__version__} with kernels {version()[:12]}"


def as_bytes(frame: DataFrame) -> RDD[bytes]:
    """Returns the column `value` (binary) unchanged; `frame.rdd` would turn bytes into text."""
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    context = frame.sparkSession.sparkContext
    rows: Any = frame.select("value")._jdf
    encoder = context._jvm.org.apache.spark.sql.Encoders.BINARY()
    return RDD(getattr(rows, "as")(encoder).toJavaRDD(), context, NoOpSerializer())


def between(values: RDD[Any], partitions: int, stage: Callable[..., Any]) -> RDD[Any]:
    """Runs a stage on each partition, and shuffles its output values to their partitions.

    Args  stage  (partition, values) -> (partition, value). If input and output have equally many
                 partitions, the last of the input is for the driver, and is left out
    """
    before = values.getNumPartitions()

    def run(part: int, own: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        return iter(()) if part + 1 == before == partitions else stage(part, own)

    return values.mapPartitionsWithIndex(checked(run)).partitionBy(partitions, int).values()


def of_driver(values: RDD[Any]) -> list[Any]:
    """Returns the values of the last partition. Those of the others are computed, too, and
    stay in files on the executors' disks for a later stage."""
    last = values.getNumPartitions() - 1
    return list(values.context.runJob(values, list, [last]))


@contextmanager
def explained(stages: JobStages, what: str) -> Iterator[None]:
    """Turns Spark's errors into dlm's, which say what was not written, at which stage, and why."""
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException as exc:
        raise ConfigError(
            f"Spark cannot read the input or write the output: {_reason(exc)}"
        ) from exc
    except (PySparkException, Py4JError) as exc:
        text = str(exc)
        ours = re.search(r"dlm\.errors\.\w+: (.*)", text)
        if ours is not None:
            raise EstimationError(ours[1]) from exc
        lacking = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", text)
        if lacking is not None:
            raise ConfigError(
                f"an executor's Python has no {lacking[1]}. Give all executors the driver's "
                "environment (dlm[spark]), and set PYSPARK_PYTHON to its Python"
            ) from exc
        advice = "see the job's log"
        if "No space left on device" in text:
            advice = (
                "free some space in spark.local.dir of the executors, or in the output's file "
                "system"
            )
        raise EstimationError(
            f"a Spark job failed while {stages.name}: {_reason(exc)}; {advice}. {what.capitalize()}"
            " was not written"
        ) from exc
    finally:
        stages.close()


def _reason(exc: BaseException) -> str:
    lines = str(exc).strip().split("\n")
    if pythons := [line for line in lines if re.match(r"[\w.]+Error: ", line)]:
        return pythons[0]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if causes:
        return ", because of ".join(causes[-2:])
    if lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        return lines[1].lstrip(": ")
    return lines[0]
