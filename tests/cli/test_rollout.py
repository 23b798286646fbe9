"""`dlm rollout` on a running cluster: under load, killed, and refused."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import forked
from cluster import WAIT_S, CommandServer, ModelFiles, build, command, until
from dlm.client import Client, ClientConfig
from dlm.client.cluster_file import Rollout, edited
from dlm.errors import DlmError
from dlm.files import locked, write_whole
from dlm.index.layout import read_manifest
from dlm.server.sets import read_sets, replaced_sets, write_sets
from models import random_model

QUICK = ("--watch-for", 1, "--idle", 2, "--longest", 20)


def content(folder: Path) -> tuple[str, str]:
    """cluster.toml and the servers' list."""
    return (folder / "cluster.toml").read_text(), (folder / "cluster.sets").read_text()


@pytest.mark.promise("rollout_refused")
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("same", "already"),
        ("other words", "other ids"),
        ("more shards", "shard 2"),
        ("half-copied", "bytes"),
        ("damaged", "manifest.json"),
        ("nothing to undo", "no roll-out"),
        ("another operator", "another dlm rollout"),
        ("no share", "--share"),
    ],
)
def test_what_cannot_be_rolled_out_is_refused_and_nothing_changes(
    run, cluster, folder, other, tmp_path, case, said
) -> None:
    """With what to do; before a file is written."""
    new, more = tmp_path / "new", [] if case == "other words" else ["--other-words"]
    shutil.copytree(other if case == "more shards" else folder / "shards", new)
    if case == "other words":
        small = random_model(seed=7, order=2, words=5, per_order=5)
        new = build(small, tmp_path / "small", 2).directory
    if case in ("half-copied", "damaged"):
        shutil.rmtree(new)
        done = run("shard", folder / "other.arpa", "--shards", 2, "--output", new)
        assert done.returncode == 0, done.stderr
        file = next(new.glob("shard-*1*.arrow")) if case == "half-copied" else new / "manifest.json"
        file.write_bytes(file.read_bytes()[:-8])
    if case == "no share":
        more = ["--share", "many"]
    arguments = ["--undo"] if case == "nothing to undo" else [new, *more]
    before = content(cluster.parent)
    if case == "another operator":
        with locked(cluster.with_name(f".{cluster.name}.rollout")):
            done = run("rollout", *arguments, "--cluster", cluster)
    else:
        done = run("rollout", *arguments, "--cluster", cluster)
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert content(cluster.parent) == before


@pytest.fixture
def two(run, cluster, folder, other, tmp_path) -> tuple[Path, Path, Path]:
    """The folders of the set that is served and of another one, and a cluster.toml to change."""
    old, new, mine = folder / "shards", tmp_path / "new", tmp_path / "cluster.toml"
    done = run("shard", folder / "other.arpa", "--shards", 2, "--output", new)
    assert done.returncode == 0, done.stderr
    mine.write_text(cluster.read_text())
    return old, new, mine


def test_a_list_that_cannot_be_replaced_stays_and_the_command_can_go_on(run, two, tmp_path) -> None:
    """A full disk, or here: a name to which nothing can be added."""
    old, new, mine = two
    sets = tmp_path / ("s" * 250)
    text = f"{old}\n"
    sets.write_text(text)
    done = run("rollout", new, "--cluster", mine, "--sets", sets, "--other-words")
    assert done.returncode == 1
    assert "--undo goes back" in done.stdout.decode()
    assert sets.read_text() == text
    assert "rollout" in mine.read_text()


@pytest.mark.slow
def test_servers_that_keep_the_old_set_are_named_and_an_undo_stays_possible(
    run, two, tmp_path
) -> None:
    """They follow another list. Theirs still says where the old set lies."""
    old, new, mine = two
    before, after = (read_manifest(one).shard_set for one in (old, new))
    mine.write_text(edited(mine.read_text(), before, Rollout(after, before, 1.0)))
    sets = tmp_path / "sets"
    write_sets(sets, [new, old])
    quick = ("--idle", 1, "--longest", 1, "--load-within", 1, "--other-words")
    done = run("rollout", new, "--cluster", mine, "--sets", sets, *quick)
    assert done.returncode == 1
    assert "had not unloaded" in done.stdout.decode()
    assert read_sets(sets) == [new]
    assert replaced_sets(sets) == [old]


@dataclass
class Load:
    """Decoders that open utterances and check every score against the model that it names."""

    cluster: Path
    models: dict[str, ModelFiles]
    cache: Path
    utterances: int = 0
    on: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._decode, args=(n,)) for n in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _decode(self, seed: int) -> None:
        rng = random.Random(seed)
        config = ClientConfig(cache_dir=self.cache, deadline_s=30.0)
        with Client.connect(self.cluster, config) as client:
            while not self._stop.is_set():
                try:
                    self._utter(client, rng)
                except DlmError as exc:
                    self.faults.append(repr(exc))

    def _utter(self, client: Client, rng: random.Random) -> None:
        utterance = client.utterance(key=str(rng.random()))
        name = utterance.model_info.model
        oracle = self.models[name].oracle
        grams = [n for n in oracle.ngrams if len(n) == oracle.order]
        for _ in range(rng.choice([1, 5, 20])):
            asked = [rng.choice(grams) for _ in range(10)]
            found = utterance.score([n[:-1] for n in asked], [n[-1] for n in asked])
            told = np.array([oracle.score(n[:-1], n[-1]).log10_prob for n in asked], np.float32)
            if not np.array_equal(told, found.log10_prob):
                self.faults.append(f"wrong scores of {name}")
            self._stop.wait(0.02)
        self.utterances += 1
        self.on[name] = self.on.get(name, 0) + 1


@pytest.fixture
def pair(tmp_path) -> list[ModelFiles]:
    """Two models of the same order in three shards."""
    return [
        build(random_model(seed=seed, order=4, words=60, per_order=400), tmp_path / str(seed), 3)
        for seed in (7, 8)
    ]


def start(environ, tmp_path, *arguments) -> subprocess.Popen:
    """`dlm rollout`, running."""
    line = command("rollout", *QUICK, "--other-words", *arguments)
    return forked.Popen(line, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)


@pytest.mark.promise("rollout")
@pytest.mark.slow
def test_no_utterance_fails_through_a_roll_out_and_an_undo(tmp_path, environ, run, pair) -> None:
    """Three shards, two replicas; every score is that of the model that its utterance names; the
    servers hold one set before and after."""
    old, new = pair
    named = {one.manifest.model: one for one in pair}
    with (
        CommandServer("cluster", old.directory, "--replicas", 2, cwd=tmp_path, env=environ).ready(),
        Load(tmp_path / "cluster.toml", named, tmp_path / "cache") as load,
    ):
        until(lambda: load.utterances > 5)
        going = start(environ, tmp_path, new.directory, "--share", "50%")
        until(lambda: len(load.on) == 2)
        status = run("status", "--json", cwd=tmp_path)
        assert json.loads(status.stdout)["rollout"]["model"] == new.manifest.shard_set
        assert going.wait(WAIT_S) == 0
        assert read_sets(tmp_path / "cluster.sets") == [new.directory]
        before = load.on[new.manifest.model]
        until(lambda: load.on[new.manifest.model] > before + 5)
        going = start(environ, tmp_path, old.directory, "--share", "50%", "--watch-for", 60)
        until(lambda: "share = 0.5" in content(tmp_path)[0])
        going.kill()
        going.wait(WAIT_S)
        done = run("rollout", "--undo", *QUICK, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert read_sets(tmp_path / "cluster.sets") == [new.directory]
        assert "rollout" not in content(tmp_path)[0]
    assert load.faults == []
    assert not (tmp_path / "cluster.toml").exists()
    assert not (tmp_path / "cluster.sets").exists()


@pytest.mark.slow
def test_a_token_that_names_one_of_the_models_rolls_nothing_out(
    tmp_path, environ, run, pair
) -> None:
    """The command refuses before anything changes; with both in the tokens file, it goes on."""
    old, new = pair
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    named = ("--models", old.manifest.model)
    assert run("token", "me", "--tokens", tokens, "--token-file", mine, *named).returncode == 0
    line = ("cluster", old.directory, "--tokens", tokens, "--token-file", mine)
    with CommandServer(*line, cwd=tmp_path, env=environ).ready():
        before = content(tmp_path)
        rolling = ("rollout", new.directory, "--other-words", *QUICK)
        done = run(*rolling, cwd=tmp_path)
        assert (done.returncode, content(tmp_path)) == (1, before)
        assert new.manifest.model in done.stderr.decode()
        text = tokens.read_text()
        write_whole(tokens, f"{text.rstrip()},{new.manifest.model}\n".encode(), mode=0o600)
        rolled = lambda: run(*rolling, cwd=tmp_path).returncode == 0  # noqa: E731
        until(rolled)  # once all servers have read the file
        assert read_sets(tmp_path / "cluster.sets") == [new.directory]
