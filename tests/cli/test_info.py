"""`dlm info --helm`: what a pod of each shard needs, from the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.conftest import MODEL
from dlm.cli.main import app
from dlm.errors import ConfigError
from dlm.index.build.shard_set import build_shard_set
from dlm.index.describe import PROCESS_MIB
from dlm.index.layout import read_manifest

TINY = Path(__file__).parents[2] / "shards/tiny/exact-2"


@pytest.mark.parametrize(
    ("workers", "memory_mib", "limit_mib"),
    [(1, 1 + PROCESS_MIB, 322), (2, 1 + 3 * PROCESS_MIB, 962), (4, 1 + 5 * PROCESS_MIB, 1602)],
)
def test_helm_values_count_files_once_and_every_process(
    workers: int, memory_mib: int, limit_mib: int
) -> None:
    """The files of this set are below a MiB; one process stands above several workers."""
    done = CliRunner().invoke(app, ["info", str(TINY), "--helm", "--workers", str(workers)])
    assert done.exit_code == 0, done.output
    manifest = read_manifest(TINY)
    assert done.output == (
        f"# Shard set {manifest.shard_set} of model {manifest.model}, workers: {workers}.\n"
        "shards: 2\n"
        f"workers: {workers}\n"
        "resources:\n"
        "  requests:\n"
        f'    cpu: "{workers}"\n'
        f"    memory: {memory_mib}Mi\n"
        "  limits:\n"
        f"    memory: {limit_mib}Mi\n"
    )


@pytest.mark.parametrize(
    ("comment", "shown"),
    [
        ("privacy: none (public text)", "privacy: none (public text) (not a record)"),
        ('privacy: {"format": "dlm privacy', "privacy: WRONG, nothing can be claimed: "),
        ("privacy:  {}", "privacy: WRONG, nothing can be claimed: "),
    ],
)
def test_a_privacy_comment_is_shown_as_words_unless_it_begins_as_a_record(
    tmp_path: Path, comment: str, shown: str
) -> None:
    """Words claim nothing; a record that does not parse may have claimed something."""
    arpa = tmp_path / "model.arpa"
    MODEL.write(arpa)
    arpa.write_bytes(f"# {comment}\n".encode() + arpa.read_bytes())
    build_shard_set(arpa, tmp_path / "shards", shards=1)
    done = CliRunner().invoke(app, ["info", str(tmp_path / "shards")])
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.output.splitlines() if "privacy: " in line)
    assert shown in line
    assert ("WRONG" in line) == ("WRONG" in shown)


def test_one_form_is_printed_at_a_time() -> None:
    """--json and --helm together are refused, with what is expected."""
    done = CliRunner().invoke(app, ["info", str(TINY), "--json", "--helm"])
    assert isinstance(done.exception, ConfigError)
    assert "--json and --helm" in str(done.exception)
