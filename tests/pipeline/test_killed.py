"""`dlm pipeline` killed and stopped: it goes on, and ends as if nothing had happened.

What a real run draws cannot be had again to the bit, so that what is killed while users take part
is compared in a simulation.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

from cluster import WAIT_S
from pipeline.runs import (
    DRIVER,
    STAGES,
    Run,
    done_stages,
    people,
    results,
)

# Where, and how many stages the journal then has as done.
KILLED = [
    ("dlm.ngram.arpa.writer:ArpaWriter.section", 2, "after", 0),
    ("dlm.pipeline.journal:PipelineJournal.write", 2, "before", 0),  # estimated, and not noted
    ("dlm.federated.counting.collect:apply", 3, "before", 1),
    ("dlm.federated.run.run_folder:RunFolder.remove", 1, "before", 1),  # counted, and not noted
    ("dlm.federated.run.run_folder:RunFolder.save", 2, "after", 2),
    ("dlm.federated.run.run_folder:RunFolder.remove_text", 1, "after", 2),  # trained, and not noted
    ("dlm.distill.counts.work:_save", 1, "before", 3),  # all sentences were counted, none kept
    ("dlm.estimate.prune:prune", 1, "after", 4),
    ("dlm.estimate.prune:measure", 1, "before", 5),
    ("dlm.index.making.shard_set:move", 1, "after", 6),
    ("dlm.pipeline.run:write_report", 1, "before", 7),
]


@pytest.mark.promise("pipeline_resumes")
def test_killed_anywhere_it_ends_in_the_same_bytes(tmp_path: Path, dlm: Run) -> None:
    """A simulation, killed eleven times, and then done anew as a whole, which only a simulation may
    be: model, manifest and report are the same, and nobody takes them for private."""
    folder = people(tmp_path / "run")
    for where, count, when, done in KILLED:
        stopped = dlm(folder, "pipeline", "p.toml", killed=(where, count, when))
        assert stopped.returncode == -signal.SIGKILL, (where, stopped.stderr)
        assert done_stages(folder) == STAGES[:done], where
        assert stopped.stderr.count("already done, skipped") <= done
        assert not (folder / "out/privacy.md").exists()
        # Users' text goes as soon as no stage is left that reads it.
        assert done < 3 or not (folder / "out/users.store").exists(), where
    last = dlm(folder, "pipeline", "p.toml")
    assert last.returncode == 0, last.stderr
    assert last.stderr.count("already done, skipped") == len(STAGES)
    assert not (folder / "out/users.store").exists()
    assert not (folder / "out/counts.tsv.work").exists()
    assert not (folder / "out/distilled.work").exists()
    assert not [path for path in (folder / "out").rglob(".*") if path.name != ".lock"]
    found = results(folder)
    anew = ("--redo", "estimate", "--redo", "unigrams")
    whole = dlm(folder, "pipeline", "p.toml", *anew)
    assert whole.returncode == 0, whole.stderr
    assert "done before" not in whole.stderr
    assert "NO GUARANTEE: run.seed is set" in whole.stderr
    assert whole.stdout.startswith("NO GUARANTEE: keys were made from a configured seed")
    assert results(folder) == found


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """With the command."""
    folder = people(tmp_path / "run")
    driver = DRIVER.replace("signal.SIGKILL", "signal.SIGINT")
    at = ("dlm.estimate.pipeline:estimate", "1", "before")
    stopped = subprocess.run(
        [sys.executable, "-c", driver, *at, "pipeline", "p.toml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert stopped.returncode == 130, stopped.stderr
    assert "To resume, run: dlm pipeline p.toml" in stopped.stderr
    assert done_stages(folder) == []
