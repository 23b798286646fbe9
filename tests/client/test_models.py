"""A client chooses among the models of the servers; and servers of several processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from client.questions import answers_to, ask, events, queries_to, random_queries
from client.scripted import settle
from cluster import WAIT_S, ModelFiles, ProcessServer, ThreadServer, free_ports, until
from dlm.client import AsyncClient, Client, ClientConfig, Mixture
from dlm.client.cluster_file import Rollout, edited
from dlm.errors import ConfigError, DlmError, QueryError, StaleShardSet
from dlm.index.search.shard import Shard


@pytest.fixture(scope="module")
def both(files: ModelFiles, other_files: ModelFiles) -> Iterator[list[str]]:
    """Addresses of servers that hold two models: three shards of the first, two of the second."""
    servers = [
        ThreadServer(
            [
                Shard.open(one.directory, index)
                for one in (other_files, files)
                if index < one.manifest.shards
            ]
        )
        for index in range(3)
    ]
    try:
        yield [server.ready().address for server in servers]
    finally:
        for server in servers:
            server.end()


@pytest.fixture
def config(cache_dir) -> ClientConfig:
    """With time for a busy machine."""
    return ClientConfig(deadline_s=30.0, cache_dir=cache_dir)


def check(client: Client, files: ModelFiles) -> None:
    """Fails unless the client's answers are those of the model."""
    assert client.manifest.shard_set == files.manifest.shard_set
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 3, 200))


def test_each_client_asks_the_model_that_it_was_given(files, other_files, both, config) -> None:
    """Side by side, on the same servers; a copy by pickle asks the same. Without a name it is the
    servers' default: two shards against three, but all that hold the two name that set first. One
    that is not there is told at once."""
    for name, one in (
        (files.manifest.model[:8], files),
        (other_files.manifest.model[:8], other_files),
        (None, other_files),
    ):
        with Client.connect(both, config, model=name) as client:
            check(client, one)
            with pickle.loads(pickle.dumps(client)) as copied:
                check(copied, one)
    for name in ("000000", "no model"):
        with pytest.raises(ConfigError):
            Client.connect(both, config, model=name)


class Rolled:
    """Two servers of every shard that several models have, started anew with others in place."""

    def __init__(self, *models: ModelFiles) -> None:
        self.servers: list[ThreadServer] = []
        self.ports = [0] * 4
        self.roll(*models)
        self.ports = [server.port for server in self.servers]

    def start(self, number: int, *models: ModelFiles) -> ThreadServer:
        """One server, its default first."""
        shards = [Shard.open(one.directory, number % 2) for one in models]
        return ThreadServer(shards, self.ports[number], drain_grace_s=0.0).ready()

    def roll(self, *models: ModelFiles) -> None:
        """Each server in turn holds these from then on."""
        for number in range(4):
            if self.servers[number:]:
                self.servers[number].end()
            self.servers[number : number + 1] = [self.start(number, *models)]

    @property
    def addresses(self) -> list[str]:
        """host:port of each."""
        return [server.address for server in self.servers]

    def end(self) -> None:
        """Ends them all."""
        for server in self.servers:
            server.end()


@pytest.fixture
def rolled(files: ModelFiles, other_files: ModelFiles) -> Iterator[Rolled]:
    """Servers of two models in two shards each; the first is the default."""
    servers = Rolled(files.again(2), other_files)
    yield servers
    servers.end()


def is_on(client: Client, files: ModelFiles) -> bool:
    """Whether a new utterance of a client is on this model."""
    return client.utterance().model_info.model == files.manifest.model


@pytest.mark.promise("default_model")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("heartbeats", marks=pytest.mark.slow),
        pytest.param("no heartbeats", marks=pytest.mark.slow),
        "cluster.toml",
    ],
)
def test_running_clients_follow_the_default_and_open_handles_stay(
    files, other_files, rolled, config, tmp_path, monkeypatch, how
) -> None:
    """The servers put the new model first, or cluster.toml names it: new utterances get it within
    moments, an open one is answered by its own for as long as that is served."""
    old, new = files.again(2), other_files
    listed = "".join(f'\n[[server]]\naddress = "{a}"\n' for a in rolled.addresses)
    path = tmp_path / "cluster.toml"
    path.write_text(listed)
    monkeypatch.setattr("dlm.client.table.FOLLOW_S", 0.05)
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    settings = replace(config, heartbeats=how != "no heartbeats")
    with Client.connect(path, settings) as client:
        check(client, old)
        pinned = client.utterance()
        state = pinned.begin()
        ask(pinned, old.oracle, random_queries(old.oracle, 1, 100))
        if how == "cluster.toml":
            path.write_text(f'model = "{new.manifest.model[:12]}"\n{listed}')
        else:
            rolled.roll(new, old)
        until(lambda: is_on(client, new))
        check(client, new)
        ask(pinned, old.oracle, random_queries(old.oracle, 2, 100))
        pinned.extend([state], ["a"])
        if how == "cluster.toml":
            path.write_text(listed)
        else:
            rolled.roll(old, new)  # and back again
        until(lambda: is_on(client, old))
        check(client, old)


def test_a_roll_out_gives_the_next_model_to_a_share_of_the_keys(
    files, other_files, rolled, config, tmp_path, monkeypatch
) -> None:
    """A key that has the next model keeps it while the share grows, on every client; open
    utterances stay on theirs when the roll-out is undone; without a key, both are drawn, and each
    can be named."""
    old, new = files.again(2), other_files
    path, listed = cluster_file(tmp_path, rolled.addresses)
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.01)
    keys = [f"speaker-{number}" for number in range(200)]

    def roll(share: float) -> None:
        rollout = Rollout(new.manifest.model[:12], old.manifest.model[:12], share)
        rewrite(path, edited(listed, old.manifest.model[:12], rollout))

    def on_new(client: Client) -> set[str]:
        found = {key: client.utterance(key=key).model_info.model for key in keys}
        assert set(found.values()) <= {old.manifest.model, new.manifest.model}
        return {key for key, model in found.items() if model == new.manifest.model}

    roll(0.0)
    with Client.connect(path, config) as client, Client.connect(path, config) as second:
        assert on_new(client) == set()
        roll(0.3)
        until(lambda: on_new(client))
        until(lambda: on_new(second))
        some = on_new(client)
        assert some == on_new(second)
        assert 30 < len(some) < 90
        pinned = client.utterance(key=min(some))
        ask(pinned, new.oracle, random_queries(new.oracle, 1, 100))
        ask(client.utterance(key=min(set(keys) - some)), old.oracle, [((), 1)])
        drawn = {client.utterance().model_info.model for _ in range(200)}
        assert len(drawn) == 2
        for one in (old, new):
            named = client.utterance(model=one.manifest.model[:16])
            ask(named, one.oracle, random_queries(one.oracle, 2, 100))
        with pytest.raises(StaleShardSet):
            client.utterance(model="0" * 16)
        with pytest.raises(ConfigError):
            client.utterance(model="")
        with pytest.raises(QueryError):  # a number would be hashed differently by another language
            client.utterance(key=7)  # type: ignore[arg-type]
        roll(0.6)
        until(lambda: len(on_new(client)) > len(some))
        assert on_new(client) > some
        rewrite(path, listed)
        until(lambda: not on_new(client))
        ask(pinned, new.oracle, random_queries(new.oracle, 2, 100))


def cluster_file(folder: Path, addresses: list[str]) -> tuple[Path, str]:
    """A cluster.toml of these servers, and its text."""
    path = folder / "cluster.toml"
    listed = "".join(f'[[server]]\naddress = "{address}"\n' for address in addresses)
    path.write_text(listed)
    return path, listed


def rewrite(path: Path, text: str) -> None:
    """At once, so that a client that reads it meanwhile finds one text or the other."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.parametrize(
    ("named", "event", "how"),
    [
        ("ffffff", "client.model.kept", "new utterances"),
        ("NEW", "client.cluster_file.rejected", "new utterances"),
        ("NEW", "client.cluster_file.rejected", "calls"),
        ("NEW", "client.cluster_file.rejected", "heartbeats"),
    ],
)
def test_a_default_that_nobody_serves_changes_nothing_and_is_told(
    other_files, both, config, tmp_path, caplog, monkeypatch, named: str, event: str, how: str
) -> None:
    """An operator's slip: running clients stay where they are, and their log says so, once. A
    service keeps one utterance for days: heartbeats, or else its calls, read cluster.toml."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    monkeypatch.setattr("dlm.client.table.FOLLOW_S", 0.05)
    path, listed = cluster_file(tmp_path, both)
    queries = random_queries(other_files.oracle, 3, 50)
    with Client.connect(path, replace(config, heartbeats=how != "calls")) as client:
        handle = client.utterance()

        def told() -> list[Any]:
            if how == "new utterances":
                check(client, other_files)
            elif how == "calls":
                ask(handle, other_files.oracle, queries)
            return events(caplog, event)

        rewrite(path, f'model = "{named}"\n{listed}')
        until(told)
        for _ in range(20):  # however often it looks again
            (line,) = told()
        assert named in str(vars(line))
        check(client, other_files)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ('{}[tls]\ncaa = "x"\n', "caa (did you mean ca?)"),
        ('{}[tls]\nca = "missing.crt"\n', "missing.crt"),
        ('{}[tls]\nserver_name = "n"\n', "server_name"),
        ('token_file = "missing.token"\n{}', "missing.token"),
        ('local_fallback = "missing"\n{}', "missing"),
        ('{}[[server]]\naddress = "127.0.0.1:99999"\n', "127.0.0.1:99999"),
    ],
)
def test_a_running_client_refuses_what_a_new_one_refuses(
    other_files, both, config, tmp_path, caplog, monkeypatch, changed: str, reason: str
) -> None:
    """It stays with what it has and logs why, and reads the file again once that is mended."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    caplog.set_level(logging.INFO, "dlm.client")
    path, listed = cluster_file(tmp_path, both)
    settings = replace(config, bigram_fallback=True)
    with Client.connect(path, settings) as client:

        def seen(event: str) -> list[Any]:
            check(client, other_files)
            return events(caplog, f"client.{event}")

        caplog.clear()
        rewrite(path, changed.format(listed))
        with pytest.raises(ConfigError, match=re.escape(reason)):
            Client.connect(path, settings)
        until(lambda: seen("cluster_file.rejected"))
        for _ in range(20):  # however often it looks again
            (rejected,) = seen("cluster_file.rejected")
        assert reason in rejected.error and str(path.parent) in rejected.error
        assert not seen("cluster_file.read")
        rewrite(path, listed + "\n")
        until(lambda: seen("cluster_file.read"))
        assert not seen("setting.needs_restart")


def test_a_setting_that_a_running_client_does_not_follow_is_logged_once(
    files, other_files, both, config, tmp_path, caplog, monkeypatch
) -> None:
    """By its name, never by its content; what the file says besides is followed."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    path, listed = cluster_file(tmp_path, both)
    token = tmp_path / "decoder.token"
    token.write_text("t" * 43 + "\n")
    token.chmod(0o600)
    authority = Authority(tmp_path)
    with Client.connect(path, replace(config, bigram_fallback=True)) as client:

        def kept() -> list[str]:
            return [r.setting for r in events(caplog, "client.setting.needs_restart")]

        model = f'model = "{files.manifest.model[:12]}"\n'
        small = f'local_fallback = "{other_files.directory}"\n'
        names = f'token_file = "{token.name}"\n{small}{model}'
        rewrite(path, f'{names}{listed}[tls]\nca = "{authority.ca}"\n')
        until(lambda: is_on(client, files))
        check(client, files)
        assert kept() == ["local_fallback", "token_file", "tls.ca"]
        assert all(str(token) not in r.getMessage() for r in caplog.records)
        rewrite(path, f'{names}{listed}[tls]\nca = "{authority.ca}"\nserver_name = "n"\n')
        until(lambda: len(kept()) > 3)
        rewrite(path, listed)  # and back: nothing differs
        until(lambda: is_on(client, other_files))
        assert kept() == ["local_fallback", "token_file", "tls.ca", "tls.server_name"]


@pytest.mark.parametrize("bigram_fallback", [False, True])
def test_a_new_handle_whose_model_was_taken_away_is_answered_by_the_next(
    files, other_files, rolled, config, bigram_fallback
) -> None:
    """All at once, without any warning: whatever it is asked by words, on both faces. What was
    asked by id, looked up, or asked of a named model, is of the old model alone."""
    settings = replace(config, heartbeats=False, bigram_fallback=bigram_fallback)
    context, word = queries_to(files.again(2), 0)[0]
    *words, last = (files.words()[i] for i in (*context, word))
    local = Client.local(other_files.directory)
    phrases = {"w1 w2": 2.0, "never-seen": 1.0}
    expected = local.utterance()
    with_phrases = local.utterance(phrases=phrases)

    async def asyncio_face() -> None:
        async with await AsyncClient.connect(rolled.addresses, settings) as other:
            handle = other.utterance()
            await asyncio.to_thread(rolled.roll, other_files)
            answers = await handle.score([words], [last])
            assert answers.log10_prob == expected.score([words], [last]).log10_prob
            assert answers.source is None

    with Client.connect(rolled.addresses, settings) as client:
        handles = [client.utterance() for _ in range(5)]
        scored, begun, by_id, looked_up, numbered = handles
        named = client.utterance(model=client.manifest.model[:6].upper())
        biased = client.utterance(phrases=phrases)
        mixture = Mixture([(client.utterance(), 1.0)])
        mixed = mixture.begin()
        state, null, biased_state = begun.begin(), begun.null(), biased.begin()
        assert looked_up.vocabulary.words and len(numbered.ids_of(words))
        asyncio.run(asyncio_face())
        answers = scored.score([words], [last])
        assert answers.log10_prob == expected.score([words], [last]).log10_prob
        assert answers.source is None
        [score] = begun.score_sentences([[*words, last]])
        wanted = expected.score_sentences([[*words, last]])[0]
        assert (score.log10_prob, score.token_source.any()) == (wanted.log10_prob, False)
        after = begun.extend([state, null], words)  # of the model that it left
        same = expected.extend([expected.begin(), expected.null()], words)
        assert after.log10_prob.tobytes() == same.log10_prob.tobytes()
        assert begun.model_info == client.utterance().model_info == after.states.model_info
        whole = mixture.extend([mixed], words)
        assert whole.log10_prob.tolist() == [pytest.approx(after.log10_prob[0].tolist())]
        after = biased.extend([biased_state], ["w1", "never-seen"])
        same = with_phrases.extend([with_phrases.begin()], ["w1", "never-seen"])
        assert after.bonus.tolist() == same.bonus.tolist() == [[1.0, 1.0]]
        assert biased.bonus(biased_state, after.states[0, 0]) == after.bonus[0, 0]
        for handle, asked, word_ in (
            (by_id, context, word), (looked_up, words, last), (numbered, words, last),
            (named, words, last),
        ):  # fmt: skip
            if bigram_fallback:
                assert handle.score([asked], [word_]).source == [1]
            else:
                with pytest.raises(StaleShardSet):
                    handle.score([asked], [word_])


def test_a_handle_whose_model_is_gone_is_logged_once_and_by_its_true_reason(
    files, other_files, rolled, config, caplog
) -> None:
    """One server is stopped, then all come back without the model: the utterance is answered by its
    2-grams for good, no call fails unless it would rather be told, and the log says which model it
    is and what to do."""
    old = files.again(2)
    settings = replace(config, heartbeats=False, bigram_fallback=True, deadline_s=2.0)
    queries = [query for shard in (0, 1) for query in queries_to(old, shard)[:3]]
    addresses = rolled.addresses[:2]  # one server of each shard

    with Client.connect(addresses, settings) as client:
        handle, wary = client.utterance(), client.utterance(on_switch="rescore")
        for one in (handle, wary):
            assert answers_to(one, queries, deadline_s=WAIT_S).source is None
        rolled.servers[0].end()
        until(lambda: answers_to(handle, queries).source is not None)
        settle()
        (began,) = events(caplog, "client.bigram_fallback.")
        assert (began.event, began.error) == ("client.bigram_fallback.started", "ShardDown")
        assert not events(caplog, "client.model.gone")
        rolled.roll(other_files)
        until(
            lambda: (
                answers_to(handle, queries).source is not None
                and events(caplog, "client.model.gone")
            )
        )
        for _ in range(20):
            assert answers_to(handle, queries).source is not None
        with pytest.raises(StaleShardSet):
            answers_to(wary, queries)
        settle()
        (gone,) = events(caplog, "client.model.gone")
        assert gone.model == old.manifest.model and gone.levelname == "WARNING"
        assert old.manifest.model in str(gone.error)
        _, changed = events(caplog, "client.bigram_fallback.")
        assert changed.event == "client.bigram_fallback.changed"
        assert (changed.before, changed.error) == ("ShardDown", "StaleShardSet")


def test_killed_processes_of_a_port_cost_answers_but_make_none_wrong(files, config) -> None:
    """kill -9, one after the other, while a client asks: an answer is the oracle's or a
    `DlmError`, and in the end all are there again."""
    queries = random_queries(files.oracle, 4, 100)
    ports = free_ports(3)

    def started(at: int) -> ProcessServer:
        return ProcessServer(files.directory, at % 3, ports[at % 3], share_port=True)

    with contextlib.ExitStack() as stack:
        servers = [started(at) for at in range(6)]
        for server in servers:
            stack.callback(lambda one=server: one.end())
            server.ready()
        addresses = [f"127.0.0.1:{port}" for port in ports]
        client = stack.enter_context(Client.connect(addresses, config))
        answered = kills = 0
        end = time.monotonic() + WAIT_S
        while answered < 25:
            assert time.monotonic() < end
            if answered == 5 * kills + 2:
                servers[kills].kill()
                servers.append(started(kills))
                stack.callback(servers[-1].end)
                kills += 1
            with contextlib.suppress(DlmError):
                ask(client.utterance(), files.oracle, queries)
                answered += 1
        assert kills == 5
