"""One Spark session for all tests that need one, as cheap as it can be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlm.spark.session import missing
from spark.settings import SETTINGS


@pytest.fixture(scope="session")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is viewfs://lm/mounted to Spark: a file system that is not the machine's own."""
    return tmp_path_factory.mktemp("mounted")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, mounted: Path) -> Iterator[Any]:
    """The session, of two threads; skipped where pyspark or Java is missing."""
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        from pyspark.sql import SparkSession

        builder = SparkSession.builder
        mount = {"spark.hadoop.fs.viewfs.mounttable.lm.link./mounted": mounted.as_uri()}
        local = {"spark.local.dir": str(tmp_path_factory.mktemp("spark"))}
        for name, value in (SETTINGS | mount | local).items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()
