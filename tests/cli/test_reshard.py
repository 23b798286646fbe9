"""`dlm reshard`: the plan that it prints, pages of load, what is refused; and sets like others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.cluster.load import slot_load
from dlm.errors import ConfigError
from dlm.index.layout import Manifest, read_manifest
from dlm.index.making import build_shard_set
from dlm.ngram.partition import SLOTS
from models import random_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.arpa and its four shards."""
    home = tmp_path_factory.mktemp("reshard")
    arpa = random_model(2, order=4, words=40, per_order=400).write(home / "model.arpa")
    build_shard_set(arpa, home / "set", 4)
    return home


def page(place: Path, manifest: Manifest, shard: int, load: np.ndarray, **changes: Any) -> str:
    """The path of a server's page: the load of its own slots."""
    slots = np.where(manifest.slots == shard, load, 0).tolist()
    one = {"model": manifest.model, "shard_set": manifest.shard_set, "shard": shard}
    place.write_text(json.dumps({"models": [{**one, "queries": 1, "slots": slots, **changes}]}))
    return str(place)


def dlm(*arguments: object) -> str:
    """What `dlm` prints."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_a_plan_makes_nothing_and_the_command_makes_what_was_planned(
    home: Path, tmp_path: Path
) -> None:
    """As JSON and as text; the set differs from the plan in nothing."""
    options = [home / "set", "--shards", 3, "--remove", 1]
    planned = json.loads(dlm("reshard", *options, "--plan", "--json"))
    assert planned["renumbered"] == {"3": 1}
    assert planned["slots_moved"] == sum(move["slots"] for move in planned["moves"]) > 0
    text = dlm("reshard", *options, "--plan", "--quiet")
    assert "4 shards -> 3" in text
    assert "shard 3 becomes shard 1" in text
    made = json.loads(dlm("reshard", *options, "--output", tmp_path / "new", "--json", "--quiet"))
    assert made.items() >= planned.items()
    found = read_manifest(tmp_path / "new")
    assert made["shard_set"] == found.shard_set
    names = made["files"]["made"] + made["files"]["linked"]
    assert sorted(names) == sorted(entry.name for entry in found.files)
    # The same model, built like that set, is that set.
    like = ["--slots-of", tmp_path / "new", "--output", tmp_path / "again", "--quiet"]
    dlm("shard", home / "model.arpa", *like)
    assert read_manifest(tmp_path / "again").shard_set == found.shard_set


def test_slots_are_balanced_by_the_load_of_servers_and_a_hot_shard_gets_replicas(
    home: Path, tmp_path: Path
) -> None:
    """Half of all queries are for one slot: its shard keeps it, and should have three servers."""
    manifest = read_manifest(home / "set")
    load = np.ones(SLOTS, np.int64)
    load[17] = SLOTS
    hot = int(manifest.slots[17])
    pages = [page(tmp_path / f"{n}.json", manifest, n, load) for n in range(4)]
    options = [word for one in pages for word in ("--load", one)]
    found = json.loads(dlm("reshard", home / "set", *options, "--plan", "--json"))
    before, after, shared = found["imbalance_queries"]
    assert before > 2.4 > 2.01 > after > 1.99 > 1.05 > shared
    assert found["replicas"] == {str(hot): 3}
    assert f"shard {hot} stays hotter" in dlm("reshard", home / "set", *options, "--plan")


def test_pages_of_replicas_are_added_and_those_of_other_sets_left_out(
    home: Path, tmp_path: Path
) -> None:
    """A server may serve several models, and a shard may have several servers."""
    manifest = read_manifest(home / "set")
    load = np.arange(SLOTS)
    pages = [page(tmp_path / f"{n}.json", manifest, n, load) for n in range(4)]
    other = page(tmp_path / "other.json", manifest, 2, load, shard_set="0" * 32)
    again = page(tmp_path / "again.json", manifest, 2, load)
    found = slot_load([*pages, other, again], manifest)
    assert (found == np.where(manifest.slots == 2, 2 * load, load)).all()


@pytest.mark.parametrize(
    ("changes", "pages", "said"),
    [
        ({"shard_set": "0" * 32}, [0, 1, 2, 3], "0" * 32),
        ({}, [0, 2, 3], "shard 1"),
        ({"slots": [1, 2]}, [0, 1, 2, 3], "4096 counts"),
        ({"slots": [-1] * SLOTS}, [0, 1, 2, 3], "4096 counts"),
        ({"slots": [1 << 60] * SLOTS}, [0, 1, 2, 3], "4096 counts"),
        ({"slots": None}, [0, 1, 2, 3], "not a page"),
    ],
)
def test_pages_that_are_not_the_load_of_this_set_are_refused(
    home: Path, tmp_path: Path, changes: dict[str, Any], pages: list[int], said: str
) -> None:
    """Another set, a shard that nobody answers for, and counts that no server sends."""
    manifest, load = read_manifest(home / "set"), np.ones(SLOTS, np.int64)
    places = [page(tmp_path / f"{n}.json", manifest, n, load, **changes) for n in pages]
    with pytest.raises(ConfigError, match=said):
        slot_load(places, manifest)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff", b"<html>"])
def test_what_is_no_page_is_refused_by_its_name(
    home: Path, tmp_path: Path, content: bytes | None
) -> None:
    """A file that is missing, and files of other kinds."""
    place = tmp_path / "page.json"
    if content is not None:
        place.write_bytes(content)
    with pytest.raises(ConfigError, match=r"page\.json"):
        slot_load([str(place)], read_manifest(home / "set"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--output"),
        (["--plan", "--shards", 5000], "4,096"),
        (["--plan", "--bound", 0.5], "1 or more"),
        (["--output", "."], "exists"),
    ],
)
def test_options_that_cannot_be_are_refused(
    home: Path, options: list[object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read."""
    monkeypatch.chdir(home)
    done = CliRunner().invoke(app, ["reshard", "set", *map(str, options)])
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


def test_a_build_like_a_set_has_its_number_of_shards(home: Path, tmp_path: Path) -> None:
    """Another one is a mistake."""
    options = ["--slots-of", str(home / "set"), "--shards", "3", "-o", str(tmp_path / "x")]
    done = CliRunner().invoke(app, ["shard", str(home / "model.arpa"), *options])
    assert isinstance(done.exception, ConfigError)
    assert "4 shards" in str(done.exception)
