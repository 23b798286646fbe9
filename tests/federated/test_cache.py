"""Optimised parameters on disk: found again, never half written, never believed when damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from dlm.federated.noise.cache import cached, folder
from dlm.files import SUFFIX

SETTINGS = {"mechanism": "blt", "rounds": 10, "gap": 3}


class Counted:
    """Something expensive, which counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return {"loss": 1.25, "rows": np.arange(6.0).reshape(2, 3) / 7, "decay": [0.5, 0.25]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, empty."""
    monkeypatch.delenv("DLM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "dlm" / "mechanisms"
    return folder()


def test_what_was_found_is_found_again_to_the_bit(place: Path) -> None:
    """Once per settings and version."""
    make = Counted()
    first = cached(SETTINGS, 1, make)
    again = cached(SETTINGS, 1, make)
    assert make.calls == 1
    np.testing.assert_array_equal(first["rows"], again["rows"])
    assert again["loss"] == 1.25
    cached({**SETTINGS, "gap": 4}, 1, make)
    cached(SETTINGS, 2, make)
    assert make.calls == 3
    assert not list(place.glob(f".*{SUFFIX}"))


def test_the_file_says_what_was_asked_and_the_loss_reached(place: Path) -> None:
    """For whoever looks into the folder."""
    cached(SETTINGS, 1, Counted())
    (file,) = place.iterdir()
    document = json.loads(file.read_text())
    assert document["settings"] == {**SETTINGS, "version": 1}
    assert document["found"]["loss"] == 1.25


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"settings": 1}', "flip", "other", "\xff"])
def test_a_damaged_file_is_made_again(place: Path, damage: str) -> None:
    """Cut, flipped, or of other settings: never believed."""
    make = Counted()
    cached(SETTINGS, 1, make)
    (file,) = place.iterdir()
    whole = file.read_text()
    if damage == "flip":
        text = whole.replace("1.25", "1.26")
    elif damage == "other":
        text = whole.replace('"gap": 3', '"gap": 4')
    else:
        text = damage
    assert text != whole
    file.write_bytes(text.encode("latin-1"))
    assert cached(SETTINGS, 1, make)["loss"] == 1.25
    assert make.calls == 2
    assert file.read_text() == whole


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without a home."""
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("DLM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make = Counted()
    assert cached(SETTINGS, 1, make)["loss"] == 1.25
    assert cached(SETTINGS, 1, make)["loss"] == 1.25
    assert make.calls == 2
