"""dlm.cluster.rollout: what a roll-out does next, whatever happens to it; and what is refused."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cluster import build
from dlm.client.cluster_file import ClusterToml, Endpoint, Rollout, edited, write_cluster_file
from dlm.client.config import ClientSecurity
from dlm.cluster.rolling import (
    Pair,
    Rolling,
    check_files_whole,
    compare,
    find_pair,
    manifests_of,
    not_needed,
    places_of,
    seen,
)
from dlm.cluster.rollout import (
    Compare,
    Compared,
    Comparison,
    End,
    Phase,
    Rules,
    Seen,
    TellClients,
    TellServers,
    Undo,
    lasting,
    resumed,
    step,
)
from dlm.cluster.status import ID_DIGITS, ClusterSnapshot, Row
from dlm.errors import ConfigError
from dlm.server.sets import read_sets, write_sets
from models import random_model

OLD, NEW = "0" * 32, "1" * 32
RULES = Rules(share=0.1, watch_for=20, idle=5, longest=60, load_within=30, compare=8)
GOOD = Comparison(32, 0, 0, 0, 1.0, 1.2, (1.2,) * 384, 0.1, 0.5)
BAD = [
    replace(GOOD, failed=1),
    replace(GOOD, failed=32, old_failed=32),
    replace(GOOD, wrong=1),
    replace(GOOD, new_ms=2.0, ratios=(2.0,) * 384),
]


class Spoken:
    """An utterance whose sentences take so many milliseconds."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def score_sentences(self, sentences):
        time.sleep(self.ms / 1e3)
        return [SimpleNamespace(token_log10_prob=np.zeros(2, np.float32))]


class World:
    """Servers that follow a list with a delay, clients that follow cluster.toml, and a roll-out
    that a test kills and starts again.

    Attributes  open  shard set -> when the last utterance on it ends
    """

    def __init__(self, rng: random.Random, found: Comparison = GOOD, lag: int = 3) -> None:
        self.rng, self.found, self.lag, self.now = rng, found, lag, 0.0
        self.listed = (OLD,)
        self.held: set[str] = {OLD}
        self.model, self.rollout = OLD, None
        self.open = {OLD: 0.0, NEW: -1.0}
        self.end: End | None = None
        self.shares: list[float] = []

    def start(self, *, undo: bool) -> None:
        self.end = None
        self.state, actions = resumed(OLD, NEW, self.rollout, RULES, self.now)
        if undo:
            self.state, actions = step(self.state, Undo(), RULES, self.now)
        self.do(actions)

    def do(self, actions) -> None:
        for action in actions:
            if isinstance(action, TellServers):
                self.listed = action.sets
            elif isinstance(action, TellClients):
                self.model, self.rollout = action.model, action.rollout
                assert self.model in self.held
                if self.rollout is not None:
                    self.shares.append(self.rollout.share)
                    assert self.rollout.share == 0.0 or NEW in self.held
            elif isinstance(action, Compare):
                assert {OLD, NEW} <= self.held
                self.state, more = step(self.state, Compared(self.found), RULES, self.now)
                self.do(more)
            else:
                self.end = action

    def tick(self) -> None:
        """A second passes: clients begin utterances, servers load or unload."""
        self.now += 1.0
        share = self.rollout.share if self.rollout else 0.0
        for name in {self.model, NEW} if share > 0 else {self.model}:
            assert name in self.held, "a new utterance would fail"
            self.open[name] = max(self.open[name], self.now + self.rng.choice([1.0, 2.0, 4.0]))
        if self.rng.random() < 1 / self.lag:
            gone = self.held - set(self.listed)
            assert not any(self.open[name] > self.now for name in gone), "an open utterance fails"
            self.held = set(self.listed)

    def look(self) -> None:
        lacking = {name: () if name in self.held else ("host:1",) for name in (OLD, NEW)}
        holding = {name: ("host:1",) if name in self.held else () for name in (OLD, NEW)}
        busy = frozenset(name for name in self.held if self.open[name] >= self.now)
        self.state, actions = step(self.state, Seen(lacking, holding, busy), RULES, self.now)
        self.do(actions)

    def run(self, seconds: int = 500) -> End:
        for _ in range(seconds):
            if self.end is not None:
                return self.end
            self.tick()
            self.look()
        raise AssertionError(f"it is still at {self.state}")


def test_a_roll_out_goes_from_the_old_set_to_the_new():
    """By a share of the utterances; no utterance loses its model."""
    world = World(random.Random(1))
    world.start(undo=False)
    assert world.run() == End()
    assert (world.model, world.rollout, world.held) == (NEW, None, {NEW})
    assert world.shares == [0.0, 0.1, 1.0]


@pytest.mark.promise("rollout_rules")
@pytest.mark.parametrize(("slowdown", "least", "most"), [(1.0, 0, 0), (1.4, 0, 1), (1.6, 95, 100)])
def test_a_model_is_slow_if_most_calls_are(slowdown, least, most):
    """Of 100 comparisons on machines so busy that a tenth of all calls takes ten times as long;
    at the limit itself, hardly one errs."""
    rng = np.random.default_rng(1)

    def took() -> np.ndarray:
        return rng.lognormal(0.0, 0.2, 384) * np.where(rng.random(384) < 0.1, 10.0, 1.0)

    found = [replace(GOOD, ratios=tuple(slowdown * took() / took())) for _ in range(100)]
    assert least <= sum(map(RULES.is_slow, found)) <= most


@pytest.mark.parametrize("sentences", [1, 32, 1000])
def test_however_few_or_many_the_sentences_a_slow_model_is_found(sentences):
    """Each is asked as often as it takes."""
    old, new = (SimpleNamespace(utterance=partial(Spoken, ms)) for ms in (0.0, 1.0))
    found = compare(old, new, None, ["a"] * sentences)
    assert len(found.ratios) >= 384
    assert RULES.is_slow(found)
    assert not RULES.is_slow(replace(found, ratios=(1.0,) * len(found.ratios)))


@pytest.mark.promise("rollout_rules")
@pytest.mark.parametrize("found", BAD)
def test_a_new_model_that_fails_is_slow_or_wrong_gets_no_utterance(found):
    """The command says why; the files are as they were."""
    world = World(random.Random(2), found)
    world.start(undo=False)
    assert world.run().failure
    assert (world.model, world.rollout, world.held) == (OLD, None, {OLD})
    assert set(world.shares) == {0.0}


@pytest.mark.promise("rollout_rules")
def test_a_new_model_that_becomes_slow_is_taken_back():
    """Utterances that have it end on it."""
    world = World(random.Random(3))
    world.start(undo=False)
    while world.state.stage is not Phase.SHARE:
        world.tick()
        world.look()
    world.found = BAD[2]
    assert world.run().failure
    assert (world.model, world.held) == (OLD, {OLD})


def test_a_set_that_servers_do_not_load_is_given_up():
    """After `load`, with their addresses."""
    world = World(random.Random(4), lag=10**9)
    world.start(undo=False)
    for _ in range(int(RULES.load_within) + 2):
        world.tick()
        world.look()
    assert world.listed == (OLD,)
    assert "host:1" in world.run().failure


def test_a_set_that_is_asked_for_ever_is_unloaded_in_the_end():
    """An utterance may stay open for days."""
    state, _ = resumed(OLD, NEW, Rollout(NEW, OLD, 1.0), RULES, 0.0)
    for now in range(int(RULES.longest)):
        state, actions = step(state, Seen({}, {}, frozenset({OLD})), RULES, float(now))
        assert not actions
    state, actions = step(state, Seen({}, {}, frozenset({OLD})), RULES, RULES.longest)
    assert actions == (TellServers((NEW,)),)


@pytest.mark.promise("rollout")
@pytest.mark.parametrize("seed", range(60))
def test_a_roll_out_killed_anywhere_goes_on_or_is_undone(seed):
    """However often, and whichever the operator chooses next."""
    rng = random.Random(seed)
    world = World(rng, GOOD if seed % 3 else rng.choice(BAD))
    undo = False
    world.start(undo=False)
    for _ in range(rng.randrange(1, 6)):
        for _ in range(rng.randrange(40)):
            if world.end is None:
                world.tick()
                world.look()
        if world.end is not None:
            break
        undo = rng.random() < 0.5
        world.start(undo=undo)
    ended = world.run()
    assert world.rollout is None
    assert world.held == {world.model}
    assert ended.undone == (undo or bool(ended.failure))
    assert world.model == (OLD if ended.undone else NEW)


def test_an_undo_while_the_old_set_is_unloaded_loads_it_first():
    """Clients are sent to it once every server has it again."""
    state, _ = resumed(OLD, NEW, Rollout(NEW, OLD, 1.0), RULES, 0.0)
    state, actions = step(state, Undo(), RULES, 1.0)
    assert actions == (TellServers((NEW, OLD)),)
    assert step(state, Seen({OLD: ("host:1",)}, {}, frozenset()), RULES, 2.0)[1] == ()
    _, actions = step(state, Seen({}, {}, frozenset()), RULES, 3.0)
    assert actions == (TellClients(OLD, Rollout(NEW, OLD, 0.0)), TellServers((OLD, NEW)))


def test_nobody_waits_for_a_server_that_is_lost():
    """Another of its shard answers."""
    lacking, spared = {OLD: ("host:1",), NEW: ("host:1",)}, frozenset({"host:1"})
    seen_ = Seen(lacking, {}, frozenset(), spared=spared)
    state, _ = resumed(OLD, NEW, Rollout(NEW, OLD, 1.0), RULES, 0.0)
    state, _ = step(state, Undo(), RULES, 1.0)
    assert step(state, replace(seen_, spared=frozenset()), RULES, 2.0)[0].stage is Phase.RELOAD
    assert step(state, seen_, RULES, 2.0)[0].stage is Phase.RETREAT
    state, _ = resumed(OLD, NEW, None, RULES, 0.0)
    assert step(state, replace(seen_, spared=frozenset()), RULES, 20.0)[0].stage is Phase.LOAD
    assert step(state, seen_, RULES, 2.0)[0].stage is Phase.COMPARE


def test_a_server_is_lost_once_it_was_silent_for_longer_than_a_start_takes():
    """An answer in between begins the time anew."""
    answers = Seen({}, {}, frozenset())
    silent = replace(answers, spared=frozenset({"host:1"}))
    since: dict[str, float] = {}
    lost = []
    looks = [(0.0, silent), (9.0, silent), (10.0, silent), (11.0, answers), (12.0, silent)]
    for now, look in [*looks, (21.0, silent), (22.0, silent)]:
        found, since = lasting(look, since, now)
        lost.append(bool(found.spared))
    assert lost == [False, False, True, False, False, False, True]


def test_a_set_is_quiet_once_every_process_of_a_port_was_looked_at():
    """A look reaches one of them."""
    state, _ = resumed(OLD, NEW, Rollout(NEW, OLD, 1.0), RULES, 0.0)
    look = Seen({}, {}, frozenset(), processes=4)
    assert step(state, look, RULES, 4 * RULES.idle - 1)[0].stage is Phase.ALL
    assert step(state, look, RULES, 4 * RULES.idle)[0].stage is Phase.UNLOAD


@pytest.mark.parametrize("undo", [False, True])
def test_servers_that_did_not_answer_are_named_at_the_end(undo: bool):
    """They may still hold the set: nothing says that they have unloaded it. Also of a server of
    which one worker is silent."""
    rows = (
        *(Row("host:0", 0, "ready", shard_set=one[:ID_DIGITS]) for one in (OLD, NEW)),
        Row("host:1", 1, "ready", shard_set=OLD[:ID_DIGITS], error="1 of 2 workers answered"),
        Row("host:2", 0, error="no answer"),
    )
    pair = Pair(*(SimpleNamespace(shard_set=one, shards=2) for one in (OLD, NEW)))
    found = replace(seen(ClusterSnapshot(rows, (), ()), pair), holding={})
    state, _ = resumed(OLD, NEW, Rollout(NEW, OLD, 0.0 if undo else 1.0), RULES, 0.0)
    if undo:
        state, _ = step(state, Undo(), RULES, 1.0)
    for now in (100.0, 101.0):
        state, actions = step(state, found, RULES, now)
    assert actions[-1] == End(undone=undo, silent=("host:1", "host:2"))


def test_an_undo_that_cannot_load_the_old_set_again_is_not_one():
    """Clients stay on the new one; the failure names the server."""
    state, _ = resumed(OLD, NEW, Rollout(NEW, OLD, 1.0), RULES, 0.0)
    state, _ = step(state, Undo(), RULES, 1.0)
    lacking = Seen({OLD: ("host:1",)}, {}, frozenset())
    _, (end,) = step(state, lacking, RULES, 1.0 + RULES.load_within)
    assert not end.undone
    assert "host:1" in end.failure


# -------------------------------------------------------------------------- cluster.toml


@pytest.mark.parametrize(
    "text",
    [
        '[[server]]\naddress = "a:1"\n',
        '# mine\n# lines\nmodel = "abcdef"\ntoken_file = "t"\n\n[[server]]\naddress = "a:1"\n',
        '# one\n\n[rollout]\nmodel = "x"\n\n[[server]]\naddress = "a:1"\n[tls]\nca = "c"\n',
        'model="abcdef"\n[tls]\nca = "c"\n[[server]]\naddress = "a:1"\n[rollout] # now\nshare=1\n',
        'token_file = "t"\n[rollout]\nshare=1\n# no more\n\n# rack 2\n[[server]]\naddress="a:1"\n',
    ],
)
def test_editing_cluster_toml_leaves_the_rest_as_it_was(tmp_path: Path, text: str):
    """Whatever it held, and again and again."""
    path = tmp_path / "cluster.toml"
    rollout = Rollout(NEW, OLD, 0.25)
    path.write_text(edited(edited(text, NEW, None), OLD, rollout))
    toml = ClusterToml(path)
    assert (toml.model(), toml.rollout()) == (OLD, rollout)
    assert [one.address for one in toml.servers()] == ["a:1"]
    once = path.read_text()
    assert edited(once, OLD, rollout) == once
    kept = [line for line in text.splitlines() if line.startswith(("#", "token", "ca", "[tls"))]
    assert [line for line in once.splitlines() if line in kept] == kept
    assert "rollout" not in edited(once, None, None)


@pytest.mark.parametrize(
    "text",
    [
        f'"model" = "{OLD}"\n[[server]]\naddress = "a:1"\n',
        'rollout = { model = "a", replaces = "b", share = 1 }\n[[server]]\naddress = "a:1"\n',
        'rollout.share = 1\nrollout.model = "a"\n[[server]]\naddress = "a:1"\n',
        '[[server]]\naddress = "a:1"\n[ rollout ]\nshare = 1\n',
        f'token_file = """\n[x]\nmodel = 3"""\nmodel = "{OLD}"\n[[server]]\naddress = "a:1"\n',
    ],
)
def test_a_cluster_toml_of_a_form_that_is_not_edited_is_refused(text: str):
    """What it says is never lost."""
    with pytest.raises(ConfigError, match=r"model = \"ID\""):
        edited(text, NEW, Rollout(NEW, OLD, 0.25))


# ------------------------------------------------------------------ servers and their list


def test_a_server_that_only_one_set_needs_is_not_waited_for_and_told():
    """From four shards to three, the fourth has nothing to load, and nothing else to serve."""
    old, new = SimpleNamespace(shard_set=OLD, shards=4), SimpleNamespace(shard_set=NEW, shards=3)
    rows = [
        Row(f"host:{shard}", shard, "ready", shard_set=name[:ID_DIGITS], messages_per_s=0.0)
        for shard, names in enumerate([[OLD, NEW], [OLD, NEW], [NEW], [OLD]])
        for name in names
    ]
    found = seen(ClusterSnapshot(tuple(rows), (), ()), Pair(old, new))
    assert found.lacking == {OLD: ("host:2",), NEW: ()}
    assert found.holding[OLD] == ("host:0", "host:1")
    servers = [Endpoint(f"host:{shard}", shard) for shard in range(4)]
    assert not_needed([*servers, Endpoint("host:9")], new) == ("host:3",)


@pytest.mark.parametrize(("shards", "spared"), [(1, {"host:9"}), (2, set())])
def test_a_lost_server_without_a_shard_in_cluster_toml_is_spared_if_no_shard_lacks_one(
    shards, spared
):
    """It may be a server of any shard."""
    pair = Pair(*(SimpleNamespace(shard_set=one, shards=shards) for one in (OLD, NEW)))
    rows = Row("host:0", 0, "ready", shard_set=OLD[:ID_DIGITS]), Row("host:9", None)
    assert seen(ClusterSnapshot(rows, (), ()), pair).spared == spared


def test_an_undo_knows_the_folder_that_servers_were_told_to_unload(tmp_path: Path):
    """From the list; without it, the command says so and does not wait for the servers."""
    old, new = (
        build(random_model(seed=seed, order=2, words=5, per_order=5), tmp_path / str(seed), 1)
        for seed in (7, 8)
    )
    pair = Pair(old.manifest, new.manifest)
    cluster, sets = tmp_path / "cluster.toml", tmp_path / "cluster.sets"
    rollout = Rollout(pair.new.shard_set, pair.old.shard_set, 1.0)
    listed = [Endpoint("127.0.0.1:9", 0)]
    write_cluster_file(cluster, listed, model=rollout.model, rollout=rollout)
    write_sets(sets, [new.directory], [old.directory])
    assert read_sets(sets) == [new.directory]
    places = places_of(cluster, sets, pair, None)
    assert places.folders == {
        pair.old.shard_set: old.directory,
        pair.new.shard_set: new.directory,
    }
    other = build(random_model(seed=9, order=2, words=5, per_order=5), tmp_path / "9", 1)
    write_sets(sets, [other.directory])
    with pytest.raises(ConfigError, match="another list"):
        places_of(cluster, sets, pair, new.directory)
    write_sets(sets, [new.directory])
    before = cluster.read_text()
    places = places_of(cluster, sets, pair, None)
    rolling = Rolling(pair, places, RULES, ClientSecurity(), lambda line: None)
    with pytest.raises(ConfigError, match="folder of shard set"):
        rolling.run(undo=True)
    assert (cluster.read_text(), read_sets(sets)) == (before, [new.directory])


@pytest.mark.parametrize("told", [True, False])
def test_an_undo_needs_no_server_that_holds_both_sets(tmp_path: Path, told: bool):
    """Killed once all had unloaded the old one, which the list has as replaced; or before any was
    told of the new one."""
    old, new = (
        build(random_model(seed=seed, order=2, words=5, per_order=5), tmp_path / str(seed), 1)
        for seed in (7, 8)
    )
    cluster, sets = tmp_path / "cluster.toml", tmp_path / "cluster.sets"
    default, share = (new, 1.0) if told else (old, 0.0)
    rollout = Rollout(new.manifest.shard_set, old.manifest.shard_set, share)
    listed = [Endpoint("127.0.0.1:9", 0)]
    name = default.manifest.shard_set
    write_cluster_file(cluster, listed, model=name, rollout=rollout)
    write_sets(sets, [default.directory], [old.directory] if told else [])
    pair = find_pair(ClusterToml(cluster), None, manifests_of(sets), name, undo=True)
    assert pair.old.text == old.manifest.text
    assert pair.new.shard_set == new.manifest.shard_set
    if told:
        write_sets(sets, [new.directory])
        with pytest.raises(ConfigError, match="cannot be undone"):
            find_pair(ClusterToml(cluster), None, manifests_of(sets), name, undo=True)


@pytest.mark.parametrize("named", ["model", "shard_set"])
def test_a_rollout_that_was_written_by_hand_may_name_models(tmp_path: Path, named: str):
    """As clients take it: the first digits of a model's id, or of its shard set's."""
    old, new = (
        build(random_model(seed=seed, order=2, words=5, per_order=5), tmp_path / str(seed), 1)
        for seed in (7, 8)
    )
    held = {one.manifest.shard_set: one.manifest for one in (old, new)}
    cluster = tmp_path / "cluster.toml"
    rollout = Rollout(getattr(new.manifest, named)[:12], getattr(old.manifest, named)[:12], 0.5)
    write_cluster_file(
        cluster, [Endpoint("127.0.0.1:9", 0)], model=rollout.replaces, rollout=rollout
    )
    for given in (None, new.manifest):
        undo = given is None
        pair = find_pair(ClusterToml(cluster), given, held, old.manifest.shard_set, undo=undo)
        assert (pair.old, pair.new) == (old.manifest, new.manifest)
    with pytest.raises(ConfigError, match="is under way"):
        find_pair(ClusterToml(cluster), old.manifest, held, old.manifest.shard_set, undo=False)


def test_two_models_that_do_not_fit_in_memory_are_refused(tmp_path: Path):
    """Before anything is written; with the bytes that are needed."""
    files = build(random_model(seed=7, order=2, words=5, per_order=5), tmp_path, 1)
    needed = sum(entry.bytes for entry in files.manifest.files)
    check_files_whole(files.directory, files.manifest, lambda: needed)
    with pytest.raises(ConfigError, match="MiB are free"):
        check_files_whole(files.directory, files.manifest, lambda: needed - 1)
