"""Opens the Spark session of a job, or says what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dlm.errors import ConfigError
from dlm.extras import packages_of, pip_install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def missing() -> str | None:
    """Says what this machine lacks for Spark, and what to do about that; None if nothing."""
    try:
        import pyspark  # noqa: F401, I001 (a missing pyspark is named first)
        import pandas  # noqa: F401 (pyspark asks for it where a job first needs it)
    except ImportError as exc:
        return (
            f"Spark cannot be used here: {exc.name} is not installed; use --engine local, or run\n"
            f"  {pip_install(packages_of('spark'))}"
        )
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin/java" if home else shutil.which("java")
    if java is None or not Path(java).exists():
        return (
            "Spark cannot be used here: it needs Java 17 or later, and "
            + (f"JAVA_HOME ({home}) has no bin/java" if home else "there is no java in PATH")
            + "; install Java (apt-get install openjdk-17-jre-headless), or use --engine local"
        )
    return None


@contextmanager
def session() -> Iterator[SparkSession]:
    """Yields the existing session or a new one, which has the environment's settings and is stopped
    at the end. ConfigError if pyspark or Java is missing, or Spark does not start."""
    if (lacking := missing()) is not None:
        raise ConfigError(lacking)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    # Otherwise executors use "python3", which may lack dlm. spark-submit sets this beforehand.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    is_there = SparkSession.getActiveSession() is not None
    try:
        spark = SparkSession.builder.appName("dlm estimate").getOrCreate()
    except (PySparkException, RuntimeError) as exc:
        raise ConfigError(f"Spark did not start: {exc}; see its output above") from exc
    try:
        yield spark
    finally:
        if not is_there:
            spark.stop()
