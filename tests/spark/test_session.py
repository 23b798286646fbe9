"""Where Spark cannot be used, it is said what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dlm.spark import session

PRETENCE = """
import sys
sys.modules["pyspark"] = None
from dlm.cli.main import main
sys.argv = ["dlm", "estimate", "text", "--output", "m", "--engine", "spark"]
main()
"""


def test_without_the_extra_the_command_names_it() -> None:
    """On standard error, and what installs it, with exit status 1."""
    done = subprocess.run(
        [sys.executable, "-c", PRETENCE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "dlm: Spark " in done.stderr
    assert f"{sys.executable} -m pip install 'pandas" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("home", [True, False])
def test_without_java_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: bool
) -> None:
    """Where JAVA_HOME is wrong, that."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install -e '.[spark]'")
    pytest.importorskip("pandas", reason="pandas is not installed: pip install -e '.[spark]'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if home:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    lacking = session.missing()
    assert lacking is not None
    assert ("JAVA_HOME" if home else "PATH") in lacking
    assert "--engine local" in lacking
