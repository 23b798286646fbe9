"""The command itself: what it says where a package is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

ACCOUNT = "account --mechanism tree --noise-multiplier 7 --rounds 9 --min-sep 2 --max-part 3"


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("scipy", f"privacy {ACCOUNT} --delta 1e-6"),
        ("jax", "federate users.tsv --config run.toml --output out"),
    ],
)
def test_a_missing_extra_is_told_in_a_line(missing: str, arguments: str) -> None:
    """As where `dlm` was installed without `train`: what is missing, and what to do."""
    start = "import sys; sys.modules[sys.argv.pop(1)] = None; from dlm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, missing, *arguments.split()], capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == f"dlm: this needs {missing}, which is not there: pip install 'dlm[train]'"
