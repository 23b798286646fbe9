"""The command, in processes that share what they compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from cluster import WAIT_S, command
from pipeline.runs import DRIVER, Run


@pytest.fixture(scope="session")
def dlm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the command in a folder, to its end or to where it is killed."""
    kept = tmp_path_factory.mktemp("kept")
    environ = {
        **os.environ,
        "DLM_CACHE_DIR": str(kept / "cache"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }

    def call(
        folder: Path, *arguments: object, killed: tuple[str, int, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        given = command(*arguments)
        if killed is not None:
            given = [sys.executable, "-c", DRIVER, *map(str, killed), *map(str, arguments)]
        return forked.run(
            given, cwd=folder, env=environ, capture_output=True, text=True, timeout=WAIT_S
        )

    return call
