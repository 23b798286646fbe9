"""Programs in other languages, built as proto/examples/README.md says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cluster import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "proto" / "examples"


def need(*tools: object) -> None:
    """Skips the test if one is not installed."""
    for tool in map(str, tools):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


def run(*line: object, folder: Path = EXAMPLES) -> str:
    """What a program prints; skips where it is not installed."""
    need(line[0])
    command = [str(word) for word in line]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def built_cpp(source: Path, folder: Path) -> Path:
    """A program of C++, built in `folder` with the commands of the page."""
    need("grpc_cpp_plugin", "pkg-config", "g++")
    shutil.copytree(ROOT / "proto", folder / "proto")
    examples = folder / "proto" / "examples"
    shutil.copy(source, examples / "score.cc")
    page = (EXAMPLES / "README.md").read_text()
    for line in [line[2:] for line in page.splitlines() if line.startswith("$ ")][:2]:
        run("sh", "-c", line, folder=examples)
    return examples / "score"
