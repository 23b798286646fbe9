"""A run that is killed leaves no partial model, and the next one succeeds and cleans up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forked

# Forks a process for each line that is told, which kills itself there; then runs to the end.
CHILD = """
import json, os, signal, sys
from pathlib import Path
from dlm.estimate.pipeline import estimate
from dlm.estimate.settings import EstimationSettings
from dlm.progress import ProgressReporter

folder = Path(sys.argv[1])
settings = EstimationSettings(
    order=4, fallback=(0.5, 1.0, 1.5), workspace_bytes=4 << 20, block_tokens=4000
)

def make(name, kill_at):
    told = [0]
    def tell(line):
        told[0] += 1
        if told[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    # Stages alone, so that every run tells as many lines, however long it takes.
    progress = ProgressReporter(tell, interval_s=float("inf"))
    estimate([str(folder / "text")], folder / name, settings, progress=progress)
    return told[0]

lines = make("whole.arpa", 0)
seen = []
for kill_at in range(1, lines + 1):
    child = os.fork()
    if child == 0:
        make("model.arpa", kill_at)
        os._exit(3)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    seen.append([killed, (folder / "model.arpa").exists(), sorted(os.listdir(folder))])
make("model.arpa", 0)
print(json.dumps([lines, seen, sorted(os.listdir(folder))]))
"""


@pytest.mark.slow
def test_a_run_killed_at_any_stage_leaves_no_model_and_a_rerun_succeeds(tmp_path: Path) -> None:
    """Each line of progress is a place to die at; what lay beside goes with the next run."""
    text = b"".join(b"w%d w%d w%d\n" % (i % 7, i % 11, i % 13) for i in range(3000))
    (tmp_path / "text").write_bytes(text)
    done = forked.script(CHILD, tmp_path)
    assert done.returncode == 0, done.stderr
    lines, seen, left = json.loads(done.stdout)
    assert lines > 15
    assert len(seen) == lines
    for killed, there, files in seen:
        assert killed
        assert not there
        beside = [name for name in files if name not in ("text", "whole.arpa")]
        assert len(beside) <= 1, "of all runs, at most the last has something left"
        assert all(name.startswith(".model.arpa.") for name in beside)
    assert any(len(files) == 3 for _, _, files in seen), "no run died while it wrote"
    assert left == ["model.arpa", "text", "whole.arpa"]
    assert (tmp_path / "model.arpa").read_bytes() == (tmp_path / "whole.arpa").read_bytes()
