"""No round of a run that is no simulation is done twice, and one process has its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm import checkpoint
from dlm.checkpoint import CHECKPOINT
from dlm.errors import ConfigError, PrivacyError
from dlm.federated.run.run_files import METRICS, check_history
from dlm.federated.run.run_folder import RunBinding, RunFolder, RunState
from dlm.record.ledger import ParticipationLedger

BINDING = RunBinding({"rounds": 9}, {"users": "these"}, b"alpha\nbeta\n")


def state(done: int) -> RunState:
    """A run of so many rounds, a user in each."""
    ledger = ParticipationLedger(10, salt=b"salt")
    for index in range(done):
        ledger.record(index, ["someone"])
    return RunState(done, [np.arange(done)], [np.array([0.5])], ledger, 60.0 * done)


def kept(folder: Path, rounds: int, *, released: bool) -> None:
    """A run that kept each of its rounds."""
    with RunFolder(folder) as run:
        run.save(state(0), BINDING, released=released)
        for done in range(1, rounds + 1):
            run.save(state(done), BINDING, [{"round": done - 1, "norm": 0.5}], released=released)


def loaded(folder: Path, binding: RunBinding = BINDING, *, released: bool) -> RunState | None:
    """What there is to go on from."""
    with RunFolder(folder) as run:
        return run.load(binding, released=released)


def rounds_of(folder: Path) -> list[int]:
    """Rounds that the journal is of."""
    return [json.loads(line)["round"] for line in (folder / METRICS).read_text().splitlines()]


def history(**found: Any) -> dict[str, Any]:
    """Of a folder with these."""
    return {"done": 2, "private": [2], "journal": [0, 1], "released": True, **found}


@pytest.mark.parametrize(
    "found",
    [
        history(),
        history(journal=[]),  # a stop came before its line was written
        history(private=[2, 3]),  # or before the next checkpoint
        history(done=None, private=[0], journal=[]),  # or before the first
        history(done=None, private=[], journal=[]),
        history(journal=[0, 1, 2], released=False),
        history(done=None, journal=[0, 1], released=False),
    ],
)
def test_a_stop_anywhere_and_a_simulation_go_on(found: dict[str, Any]) -> None:
    """Nothing is done twice that was released."""
    check_history(Path("run"), **found)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (history(journal=[0, 1, 2]), r"has round 2 .* checkpoint .*only 2 rounds"),
        (history(done=0, private=[0], journal=[0]), "so it is older"),
        (history(done=None, private=[], journal=[0]), "has a journal of earlier rounds"),
        (history(done=None, private=[3], journal=[]), r"has private-3\.state of earlier rounds"),
        (history(done=None, private=[], journal=[], ended=True), r"has ledger\.state of earlier"),
    ],
)
def test_rounds_that_no_checkpoint_has_stop_a_run(found: dict[str, Any], message: str) -> None:
    """An older checkpoint was put back, or none is left."""
    with pytest.raises(PrivacyError, match=message):
        check_history(Path("run"), **found)


def test_a_checkpoint_does_not_confirm_a_guess_of_the_noise(tmp_path: Path) -> None:
    """Its digest of the private part is another one for the same noise, ledger and settings."""
    digests = []
    for name in ("a", "b"):
        kept(tmp_path / name, 3, released=True)
        digests.append(checkpoint.read(tmp_path / name / CHECKPOINT).facts["private"])
    assert digests[0] != digests[1]


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    """Both parts, the ledger, the clock; the journal has the lines."""
    assert loaded(tmp_path, released=True) is None
    kept(tmp_path, 3, released=True)
    found = loaded(tmp_path, released=True)
    assert found is not None
    assert (found.done, found.now_s, found.ledger.rounds) == (3, 180.0, 3)
    assert found.public[0].tolist() == [0, 1, 2]
    assert found.private[0].tolist() == [0.5]
    assert rounds_of(tmp_path) == [0, 1, 2]
    assert [path.name for path in tmp_path.glob("private-*")] == ["private-3.state"]


@pytest.mark.parametrize("released", [True, False])
def test_a_journal_that_a_stop_cut_is_whole_again(tmp_path: Path, released: bool) -> None:
    """The checkpoint has the lines it brought; of a simulation, later ones go."""
    kept(tmp_path, 3, released=released)
    whole = (tmp_path / METRICS).read_text()
    *earlier, last = whole.splitlines(keepends=True)
    for cut in ("", last[:9]):
        (tmp_path / METRICS).write_text("".join(earlier) + cut)
        loaded(tmp_path, released=released)
        assert (tmp_path / METRICS).read_text() == whole
    if not released:
        (tmp_path / METRICS).write_text(whole + '{"round": 3}\n')
        loaded(tmp_path, released=released)
        assert (tmp_path / METRICS).read_text() == whole


def test_a_simulation_does_not_begin_over_releases(tmp_path: Path) -> None:
    """It would wipe the journal, over which the next real run could begin."""
    kept(tmp_path, 1, released=True)
    (tmp_path / "checkpoint.dlmfed").unlink()
    with pytest.raises(PrivacyError, match="of earlier rounds"):
        loaded(tmp_path, released=False)


def test_a_journal_without_lines_of_the_last_round_gets_them_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    """So a stop between the two loses none."""
    folder = tmp_path / "run"
    kept(folder, 4, released=True)
    lines = (folder / METRICS).read_text().splitlines(keepends=True)
    (folder / METRICS).write_text("".join(lines[:-1]))
    loaded(folder, released=True)
    assert rounds_of(folder) == [0, 1, 2, 3]


def test_a_folder_is_one_owners(tmp_path: Path) -> None:
    """Until it is closed; and closing it twice harms nobody."""
    with RunFolder(tmp_path) as first:
        with pytest.raises(ConfigError, match="another process"):
            RunFolder(tmp_path)
        first.close()
        with RunFolder(tmp_path):
            first.close()
            with pytest.raises(ConfigError, match="another process"):
                RunFolder(tmp_path)


def test_a_folder_in_which_nothing_began_leaves_nothing(tmp_path: Path) -> None:
    """No copy of users' text, no folder that was not there; what others put in it stays."""
    for name, theirs in (("new", False), ("old", True)):
        folder = tmp_path / name
        if theirs:
            folder.mkdir()
            (folder / "notes.txt").write_text("mine")
        with RunFolder(folder) as run:
            run.store.mkdir()
            (run.store / "users.arrow").write_bytes(b"what they wrote")
        assert not run.store.exists()
        assert folder.exists() == theirs
    assert (tmp_path / "old/notes.txt").read_text() == "mine"
    with RunFolder(folder) as run:
        run.save(state(0), BINDING, released=True)
        run.store.mkdir()
    assert run.store.exists()


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    """It is left as it was."""
    (tmp_path / "counts.tsv.work").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match=r"counts\.tsv\.work is a file"):
        RunFolder(tmp_path / "counts.tsv.work")
