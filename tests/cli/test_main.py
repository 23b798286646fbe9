"""The command itself: what it says where a package is missing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ACCOUNT = (
    "account --mechanism tree --noise-multiplier 7 --rounds 9 --min-separation 2 "
    "--max-participations 3"
)


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("scipy", f"privacy {ACCOUNT} --delta 1e-6"),
        ("jax", f"federate {__file__} --config run.toml --output out"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    missing: str, arguments: str
) -> None:
    """As where `dlm` was installed without `train`, and its sources are not at hand."""
    start = "import sys; sys.modules[sys.argv.pop(1)] = None; from dlm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, missing, *arguments.split()], capture_output=True, text=True
    )
    assert done.returncode == 1
    *_, said, command = done.stderr.splitlines()  # after what it was doing
    assert said == f"dlm: this command needs {missing}, which is not installed; run"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = project["optional-dependencies"]["train"]
    assert shlex.split(command) == [sys.executable, "-m", "pip", "install", *packages]


def test_without_metadata_the_sources_are_named(tmp_path: Path) -> None:
    """As with a checkout on PYTHONPATH: `pip install` takes its folder, with the extra."""
    code = "from dlm.extras import packages_of; print(*packages_of('train'))"
    environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys._base_executable, "-S", "-c", code],
        capture_output=True, text=True, cwd=tmp_path, env=environ,
    )  # fmt: skip
    assert done.stdout == f"{ROOT}[train]\n", done.stderr


def test_a_command_imports_itself_alone(environ: dict[str, str]) -> None:
    """The others would take longer than many a text; help and mistakes still see all of them."""
    code = (
        "import sys; from dlm.cli import main\n"
        "try: main.main()\n"
        "finally: print(sorted(m for m in sys.modules if m.startswith('dlm.cli.')))"
    )

    def imported(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=environ, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    assert imported("score", "--help").endswith(
        "['dlm.cli.checks', 'dlm.cli.help', 'dlm.cli.main', 'dlm.cli.options', "
        "'dlm.cli.output', 'dlm.cli.score', 'dlm.cli.scoring']\n"
    )
    assert "dlm.cli.wer" in imported("--help")
    assert "No such command 'scroe'" in imported("scroe")


@pytest.mark.promise("exit_statuses")
@pytest.mark.parametrize("command", ["serve x --shard 0", "status"])
def test_a_low_limit_of_open_files_is_refused_with_what_to_do(command: str, tmp_path: Path) -> None:
    """gRPC ends a process that has too few by a signal, without a word."""
    line = f'ulimit -n 24; exec "$0" -m dlm.cli.main {command}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        [
            "dlm: this process can open only 24 files and connections; dlm needs at least 64. "
            "Allow more: ulimit -n 1024 in a shell, LimitNOFILE= in a systemd unit"
        ],
    )


def test_a_low_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """The command goes on to what it would say otherwise."""
    line = 'ulimit -S -n 24; exec "$0" -m dlm.cli.main status'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.startswith("dlm: cluster.toml does not exist")
