"""Servers whose shards, shard set or model change: right answers or typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from client.questions import ask, assert_equal, queries_to, random_queries, submit
from client.scripted import Clients, Network, free
from cluster import WAIT_S, Cluster, ModelFiles, build, until
from dlm.client import Client, Utterance
from dlm.client.cluster_file import Endpoint, write_cluster_file
from dlm.client.lane import MAX_REROUTES
from dlm.client.router import Snapshot
from dlm.client.table import LOOK_AGAIN_S, take_census
from dlm.errors import (
    DeadlineExceeded,
    DlmError,
    ModelMismatch,
    StaleShardSet,
    UnavailableError,
)
from dlm.wire.status import Reason, error_from_refusal
from models import random_model


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model in two shards."""
    model = random_model(50, order=4, words=40, per_order=300)
    return build(model, tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="module")
def another_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Another model, larger, in three shards."""
    model = random_model(51, order=4, words=50, per_order=300)
    return build(model, tmp_path_factory.mktemp("another"), 3)


@pytest.fixture(scope="module")
def old(two: ModelFiles) -> Iterator[Cluster]:
    """The servers at first."""
    with Cluster(two) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def new(two: ModelFiles) -> Iterator[Cluster]:
    """The same model in three shards, slots elsewhere."""
    with Cluster(two.again(3, seed=9)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def foreign(another_model: ModelFiles) -> Iterator[Cluster]:
    """Servers of the other model."""
    with Cluster(another_model) as cluster:
        yield cluster


@dataclass
class Site:
    """A client of `old`, whose addresses come to lead elsewhere."""

    old: Cluster
    path: Path
    network: Network
    client: Client
    utterance: Utterance

    def becomes(self, cluster: Cluster) -> None:
        """From now on the addresses of `old`, and more where needed, lead to `cluster`."""
        here = self.old.addresses
        there = cluster.addresses
        listed = [*here, *there[len(here) :]]
        endpoints = [Endpoint(address, shard) for shard, address in enumerate(listed)]
        write_cluster_file(self.path, endpoints)
        self.network.moved = dict(zip(here, there, strict=False))

    def again(self) -> None:
        """As at first."""
        self.old.write(self.path)
        self.network.moved = {}


@pytest.fixture
def site(old: Cluster, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Site]:
    """A connected client with an utterance begun; it has asked every shard once."""
    path = old.write(tmp_path / "cluster.toml")
    network = Network()
    with Clients(tmp_path_factory.getbasetemp() / "low-orders") as connect:
        client = connect(path, network)
        utterance = client.utterance()
        ask(utterance, old.files.oracle, random_queries(old.files.oracle, 1, 50))
        yield Site(old, path, network, client, utterance)


@pytest.mark.promise("stale_tables")
def test_another_sharding_is_taken_up_within_the_call(site: Site, old, new) -> None:
    """One refusal a shard, one fresh table, right answers; the utterance and its states go on."""
    oracle = old.files.oracle
    state = site.utterance.extend([site.utterance.begin()], [3]).states[0, 0]
    model_info = site.utterance.model_info
    site.becomes(new)
    ask(site.utterance, oracle, random_queries(oracle, 2, 200))
    assert site.client.stats.refreshes == 1
    assert site.client.manifest.shards == 3
    assert site.utterance.model_info == model_info
    extension = site.utterance.extend([state], [4, 5])
    for w, word in enumerate((4, 5)):
        expected = oracle.score([oracle.vocabulary.begin_id, 3], word)
        assert extension.log10_prob[0, w].tobytes() == expected.log10_prob.tobytes()
    site.again()
    ask(site.utterance, oracle, random_queries(oracle, 3, 200))
    assert site.client.stats.refreshes == 2
    assert site.client.manifest.shards == 2


def test_shards_that_changed_places_are_found(site: Site, old) -> None:
    """The same shard set, each server where the other was."""
    a, b = old.addresses
    site.network.moved = {a: b, b: a}
    ask(site.utterance, old.files.oracle, random_queries(old.files.oracle, 4, 200))
    assert site.client.stats.refreshes == 1


def test_what_waits_while_the_table_changes_is_routed_anew_without_a_refusal(
    site: Site, old, new
) -> None:
    """A window of 1: the message in flight is refused; what waits behind it never is."""
    oracle = old.files.oracle
    with Clients(site.client._core.config.cache_dir) as connect:
        client = connect(site.path, site.network, window=1)
        utterance = client.utterance()
        queries = queries_to(old.files, 0)[:60]
        with site.network.held():
            futures = [submit(utterance, [query]) for query in queries]
            site.becomes(new)
        for future, (context, word) in zip(futures, queries, strict=True):
            assert_equal(future.result(WAIT_S), [oracle.score(context, word)])
        assert (client.stats.failed, client.stats.refreshes) == (1, 1)
        until(lambda: free(client))


def test_what_waits_for_servers_that_are_rolled_is_routed_anew_when_its_pause_is_over(
    site: Site, old, new
) -> None:
    """All of them refuse, and come back with the model in another sharding."""
    oracle = old.files.oracle
    queries = random_queries(oracle, 5, 200)
    site.network.instant = error_from_refusal(Reason.NOT_READY, "ask a replica", where="here")
    call = submit(site.utterance, queries, WAIT_S)
    until(lambda: site.client.stats.failed >= 2)
    site.becomes(new)
    until(lambda: site.client.manifest.shards == 3)
    assert not call.done()
    site.network.instant = None
    assert_equal(call.result(WAIT_S), [oracle.score(c, w) for c, w in queries])


def test_another_model_never_answers_an_old_utterance(site: Site, old, foreign) -> None:
    """StaleShardSet from the first call on, low orders included; a new utterance works."""
    queries = random_queries(old.files.oracle, 8, 100)
    state = site.utterance.begin()
    site.becomes(foreign)
    for _ in range(3):
        with pytest.raises(StaleShardSet, match=old.files.manifest.model):
            ask(site.utterance, old.files.oracle, queries)
    with pytest.raises(StaleShardSet):
        site.utterance.score([[]], [1])
    fresh = site.client.utterance()
    oracle = foreign.files.oracle
    ask(fresh, oracle, random_queries(oracle, 9, 100))
    with pytest.raises(ModelMismatch):
        fresh.extend([state], [1])
    assert site.client.vocabulary == oracle.vocabulary
    # One look finds it gone, one takes the next into use; perhaps one more waited for that.
    assert site.client.stats.refreshes <= 3


def lose_model(site: Site, foreign: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers go over to another model, whose low orders cannot be fetched for now."""

    tried = Event()

    def none_come(*_: object, **__: object) -> None:
        tried.set()
        raise DeadlineExceeded("no byte came")

    with monkeypatch.context() as patch:
        patch.setattr("dlm.client.table.fetch", none_come)
        site.becomes(foreign)
        with pytest.raises(StaleShardSet):
            ask(site.utterance, site.old.files.oracle, queries_to(site.old.files, 0)[:5])
        assert tried.wait(WAIT_S)


def test_low_orders_that_could_not_be_fetched_are_fetched_at_a_later_look(
    site: Site, foreign, monkeypatch
) -> None:
    """Without a new utterance: a client on its local fallback opens none on the servers."""
    core = site.client._core
    lose_model(site, foreign, monkeypatch)

    def is_found() -> bool:
        core.table.refresh_later()  # as heartbeats do while a shard has no server
        return site.client.manifest.model == foreign.manifest.model

    until(is_found)
    oracle = foreign.files.oracle
    ask(site.client.utterance(), oracle, random_queries(oracle, 9, 50))


def test_those_who_wait_for_the_next_model_share_a_look(site: Site, foreign, monkeypatch) -> None:
    """Many new utterances at once; each look asks every server."""
    lose_model(site, foreign, monkeypatch)
    core, came, goes_on = site.client._core, list[Any](), Event()
    current = core.current

    def count(*args: Any, **options: Any) -> Snapshot:
        came.append(args)
        return current(*args, **options)

    monkeypatch.setattr(core, "current", count)
    core._lanes.helper.submit(goes_on.wait, 60)
    looks = site.client.stats.refreshes
    with ThreadPoolExecutor(20) as pool:
        handles = [pool.submit(site.client.utterance) for _ in range(20)]
        until(lambda: len(came) == len(handles))
        goes_on.set()
        for handle in handles:
            assert handle.result(WAIT_S).model_info.model == foreign.manifest.model
    assert site.client.stats.refreshes - looks <= 5


def test_a_look_that_is_to_come_is_not_asked_for_again_when_another_ends(
    site: Site, monkeypatch
) -> None:
    """All of them wait for the same thread."""
    table, helper = site.client._core.table, site.client._core._lanes.helper
    looks, goes_on, look = list[object](), Event(), table._refresh_once
    monkeypatch.setattr(table, "_refresh_once", lambda known: (looks.append(known), look(known)))
    helper.submit(goes_on.wait, WAIT_S)
    table.look_quietly(table.snapshot())
    helper.submit(table.refresh_later)
    table.refresh_later()
    goes_on.set()
    for _ in range(2):
        helper.submit(int).result(WAIT_S)
    assert len(looks) == 1


def test_a_look_that_fails_in_this_process_is_an_error_of_dlm(
    site: Site, foreign, monkeypatch
) -> None:
    """For whoever opens an utterance, whatever was raised."""
    lose_model(site, foreign, monkeypatch)

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dlm.client.table.take_census", no_memory)
    with pytest.raises(DlmError, match="MemoryError"):
        site.client.utterance()


def test_a_list_that_changes_during_a_look_is_read_again(site: Site, foreign, monkeypatch) -> None:
    """An utterance that is opened meanwhile sees the change, and finds that a look is under way."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.0)
    monkeypatch.setattr("dlm.client.table.FOLLOW_S", 1e9)
    looks = 0

    def take_census_as_it_changes(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        census = take_census(*args)
        if looks == 1:
            foreign.write(site.path)
            site.client.utterance()
        return census

    monkeypatch.setattr("dlm.client.table.take_census", take_census_as_it_changes)
    site.client._core.table.refresh_later()
    until(lambda: site.client.utterance().model_info.model == foreign.manifest.model)


def test_a_model_is_followed_whose_last_server_starts_after_it_was_listed(
    site: Site, old, foreign, tmp_path_factory, monkeypatch
) -> None:
    """At an address of its own, to which no heartbeat goes yet."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    monkeypatch.setattr("dlm.client.table.FOLLOW_S", 0.05)
    with Clients(tmp_path_factory.getbasetemp() / "low-orders") as connect:
        client = connect(site.path, site.network, heartbeats=True)
        ask(client.utterance(), old.files.oracle, random_queries(old.files.oracle, 1, 50))
        last = foreign.addresses[-1]
        site.network.moved[last] = "127.0.0.1:1"  # nobody is there
        both = [*old.addresses, *foreign.addresses]
        listed = "".join(f'\n[[server]]\naddress = "{address}"\n' for address in both)
        site.path.write_text(f'model = "{foreign.manifest.model}"\n{listed}')
        looks = client.stats.refreshes
        until(lambda: client.utterance() and client.stats.refreshes > looks)
        assert client.utterance().model_info.model == old.manifest.model
        del site.network.moved[last]
        until(lambda: client.utterance().model_info.model == foreign.manifest.model)
        ask(client.utterance(), foreign.files.oracle, random_queries(foreign.files.oracle, 2, 50))


@pytest.mark.promise("errors")
@pytest.mark.parametrize("heartbeats", [True, False])
def test_a_call_whose_last_server_died_looks_for_another_before_it_fails(
    site: Site, old, tmp_path_factory, monkeypatch, heartbeats: bool
) -> None:
    """One that was listed earlier, and has started since the client last looked."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    monkeypatch.setattr("dlm.client.table.FOLLOW_S", 1e9)
    nowhere, later = "127.0.0.1:1", "127.0.0.1:2"
    first, queries = old.addresses[0], queries_to(old.files, 0)[:5]
    with Clients(tmp_path_factory.getbasetemp() / "low-orders") as connect:
        client = connect(site.path, site.network, heartbeats=heartbeats)
        ask(client.utterance(), old.files.oracle, queries)
        site.network.moved[later] = nowhere
        both = [*old.addresses, later]
        site.path.write_text("".join(f'[[server]]\naddress = "{one}"\n' for one in both))
        looks = client.stats.refreshes
        until(lambda: client.utterance() and client.stats.refreshes > looks)
        client._core.table._looked -= LOOK_AGAIN_S  # a second passes
        site.network.moved.update({later: first, first: nowhere})
        ask(client.utterance(), old.files.oracle, queries)


@pytest.mark.promise("one_model_per_utterance")
def test_threads_never_get_scores_of_the_model_that_came(site: Site, old, foreign) -> None:
    """Utterances of both models ask while the servers change for good."""
    first, second = old.files.oracle, foreign.files.oracle

    def work(seed: int) -> list[bool]:
        ended = []
        for turn in range(40):
            try:
                ask(site.utterance, first, random_queries(first, 100 * seed + turn, 20))
                ended.append(True)
            except UnavailableError:
                ended.append(False)
        return ended

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, seed) for seed in range(4)]
        until(lambda: len(site.network.requests) > 20)
        site.becomes(foreign)
        for worker in workers:
            ended = worker.result()
            assert ended == sorted(ended, reverse=True)  # right up to a point, then never again
    ask(site.client.utterance(), second, random_queries(second, 10, 50))
    until(lambda: free(site.client))


def test_a_cluster_half_old_half_new_answers_what_it_can(site: Site, old, new) -> None:
    """Typed errors for the shards that are gone, no wrong score, and no endless asking."""
    oracle = old.files.oracle
    kept, gone = queries_to(old.files, 0), queries_to(old.files, 1)
    site.network.moved = {old.addresses[1]: new.addresses[1]}
    described = site.network.described
    for _ in range(6):
        ask(site.utterance, oracle, kept)
        with pytest.raises(UnavailableError):
            ask(site.utterance, oracle, gone, deadline_s=5.0)
    assert site.network.described - described <= 2 * (MAX_REROUTES + 2)
    with Clients(site.client._core.config.cache_dir) as connect:
        late = connect(site.path, site.network)
        for queries in (kept, gone):
            try:
                ask(late.utterance(), oracle, queries)
            except UnavailableError:
                continue
    site.again()
    until(lambda: _answers(site.utterance, oracle, kept + gone))
    until(lambda: free(site.client))


def _answers(utterance: Utterance, oracle, queries) -> bool:
    try:
        ask(utterance, oracle, queries)
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize("reason", [Reason.WRONG_SHARD_SET, Reason.SLOT_NOT_OWNED, None])
def test_servers_that_refuse_for_ever_are_asked_a_few_times_only(
    site: Site, old, reason: Reason | None
) -> None:
    """They describe what they then refuse: the call ends as StaleShardSet; later calls work."""

    def refuse(_: bytes) -> DlmError:
        error = StaleShardSet("refused")
        error.reason = reason  # type: ignore[attr-defined]
        return error

    queries = queries_to(old.files, 0)[:5]
    site.network.change = refuse
    sent = len(site.network.requests)
    with pytest.raises(StaleShardSet, match="refused"):
        ask(site.utterance, old.files.oracle, queries)
    assert len(site.network.requests) - sent == MAX_REROUTES + 1
    site.network.change = None
    ask(site.utterance, old.files.oracle, queries)
    until(lambda: free(site.client))


def test_a_table_that_cannot_be_read_again_is_noted_in_the_error(site: Site, old, new) -> None:
    """The servers refuse and the cluster file is gone: the refusal, and why it stayed."""
    site.becomes(new)
    site.path.unlink()
    queries = queries_to(old.files, 0)[:5]
    with pytest.raises(StaleShardSet) as caught:
        ask(site.utterance, old.files.oracle, queries)
    assert any("cluster.toml" in note for note in caught.value.__notes__)
    old.write(site.path)
    site.becomes(new)
    ask(site.utterance, old.files.oracle, queries)
