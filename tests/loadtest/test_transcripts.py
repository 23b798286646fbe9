"""The transcripts of the recorded traces are those of the data set that they were recorded from.

The data lies outside the project: DLM_SHARED_DATA, by default ../shared/data beside the checkout.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

import loadtest

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
REFERENCES = DATA / "speech/transcripts.tsv"
LONGER_S = 0.11  # what follows the last whole frame of a recording, at most


@pytest.mark.skipif(
    not REFERENCES.exists(),
    reason=f"no {REFERENCES}; name the folder of the shared data in DLM_SHARED_DATA",
)
def test_the_transcripts_are_those_of_the_recordings() -> None:
    """To the letter; and the seconds are the recordings', to a few frames."""
    with REFERENCES.open(encoding="utf-8", newline="") as file:
        references = {Path(r["file"]).stem: r for r in csv.DictReader(file, delimiter="\t")}
    path = Path(loadtest.__file__).parent / "traces/transcripts.tsv"
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert rows
    for name, seconds, _, text in rows:
        assert text == references[name]["text"]
        assert 0 <= float(references[name]["seconds"]) - float(seconds) < LONGER_S
