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

import pytest

from certificates import Authority
from client.questions import ask, assert_equal, queries_to, random_queries
from client.scripted import settle
from cluster import WAIT_S, ModelFiles, ProcessServer, ThreadServer, free_ports, until
from dlm.client import AsyncClient, Client, ClientConfig, Mixture
from dlm.client.cluster_file import Rollout, edited
from dlm.errors import ConfigError, DlmError, ModelMismatch, QueryError, StaleShardSet
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
    queries = random_queries(files.oracle, 3, 200)
    answers = client.utterance().score([c for c, _ in queries], [w for _, w in queries])
    assert_equal(answers, [files.oracle.score(c, w) for c, w in queries])


def answers_again(client: Client, files: ModelFiles) -> bool:
    """Whether all servers are found again; what they say is checked."""
    try:
        check(client, files)
    except DlmError:
        return False
    return True


def test_each_client_asks_the_model_that_it_was_given(files, other_files, both, config) -> None:
    """Side by side, on the same servers; a copy by pickle asks the same."""
    for one in (files, other_files):
        with Client.connect(both, config, model=one.manifest.model[:8]) as client:
            check(client, one)
            with pickle.loads(pickle.dumps(client)) as copied:
                check(copied, one)


def test_without_a_name_the_servers_default_is_asked(other_files, both, config) -> None:
    """Two shards against three: all servers that hold the two name that set first."""
    with Client.connect(both, config) as client:
        check(client, other_files)


def test_states_of_one_model_are_refused_by_the_other(files, other_files, both, config) -> None:
    """Though the same servers would answer both."""
    with (
        Client.connect(both, config, model=files.manifest.model) as one,
        Client.connect(both, config, model=other_files.manifest.model) as other,
    ):
        state = one.utterance().begin()
        with pytest.raises(ModelMismatch):
            other.utterance().extend([state], [1])


@pytest.mark.parametrize("model", ["000000", "no model"])
def test_a_model_that_is_not_there_is_told_at_once(both, config, model) -> None:
    """Not at the first query."""
    with pytest.raises(ConfigError):
        Client.connect(both, config, model=model)


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
        roll(0.6)
        until(lambda: len(on_new(client)) > len(some))
        assert on_new(client) > some
        rewrite(path, listed)
        until(lambda: not on_new(client))
        ask(pinned, new.oracle, random_queries(new.oracle, 2, 100))


@pytest.mark.parametrize(
    "table",
    [
        "rollout = 1",
        "[rollout]\nshare = 0.1",
        '[rollout]\nmodel = "abcdef"\nreplaces = "abcdef"\nshare = 5',
        '[rollout]\nmodel = "abcdef"\nreplaces = "abcdef"\nshare = true',
        '[rollout]\nmodel = "new"\nreplaces = "abcdef"\nshare = 0.5',
        '[rollout]\nmodel = "abcdef"\nreplaces = "abcdef"\nshares = 0.5',
    ],
)
def test_a_roll_out_of_another_form_is_refused(both, config, tmp_path, table) -> None:
    """By a client that starts; one that runs keeps what it has."""
    path, listed = cluster_file(tmp_path, both)
    path.write_text(f"{table}\n{listed}")
    with pytest.raises(ConfigError, match=r"rollout|not an id"):
        Client.connect(path, config)


def test_a_key_that_is_no_text_is_refused(both, config) -> None:
    """A number would be hashed differently by another language."""
    with Client.connect(both, config) as client, pytest.raises(QueryError):
        client.utterance(key=7)  # type: ignore[arg-type]


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
    ("named", "event"), [("ffffff", "client.model.kept"), ("NEW", "client.cluster_file.rejected")]
)
def test_a_default_that_nobody_serves_changes_nothing_and_is_told(
    other_files, both, config, tmp_path, caplog, monkeypatch, named: str, event: str
) -> None:
    """An operator's slip: running clients stay where they are, and their log says so, once."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    monkeypatch.setattr("dlm.client.table.FOLLOW_S", 0.05)
    path, listed = cluster_file(tmp_path, both)
    with Client.connect(path, config) as client:

        def told() -> list[str]:
            check(client, other_files)
            return [str(vars(r)) for r in caplog.records if r.message.startswith(event)]

        rewrite(path, f'model = "{named}"\n{listed}')
        until(told)
        for _ in range(20):  # however often it looks again
            (line,) = told()
        assert named in line


@pytest.mark.parametrize("heartbeats", [True, False])
def test_a_client_that_opens_no_new_handle_logs_a_wrong_default(
    other_files, both, config, tmp_path, caplog, monkeypatch, heartbeats: bool
) -> None:
    """A service keeps one utterance for days: heartbeats, or else its calls, read cluster.toml."""
    monkeypatch.setattr("dlm.client.table.STAMP_S", 0.05)
    path, listed = cluster_file(tmp_path, both)
    queries = random_queries(other_files.oracle, 3, 50)
    with Client.connect(path, replace(config, heartbeats=heartbeats)) as client:
        handle = client.utterance()
        rewrite(path, f'model = "NEW"\n{listed}')

        def logged() -> bool:
            if not heartbeats:
                ask(handle, other_files.oracle, queries)
            lines = [r.getMessage() for r in caplog.records]
            return any(
                one.startswith("client.cluster_file.rejected") and "NEW" in one for one in lines
            )

        until(logged)


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

        def events() -> list[str]:
            check(client, other_files)
            return [str(r.getMessage()) for r in caplog.records]

        def unread() -> list[str]:
            return [one for one in events() if one.startswith("client.cluster_file.rejected")]

        caplog.clear()
        rewrite(path, changed.format(listed))
        with pytest.raises(ConfigError, match=re.escape(reason)):
            Client.connect(path, settings)
        until(unread)
        for _ in range(20):  # however often it looks again
            (line,) = unread()
        assert reason in line and str(path.parent) in line
        assert not any(one.startswith("client.cluster_file.read ") for one in events())
        rewrite(path, listed + "\n")
        until(lambda: any(one.startswith("client.cluster_file.read ") for one in events()))
        assert not any(one.startswith("client.setting.needs_restart") for one in events())


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
            return [
                r.setting
                for r in caplog.records
                if "client.setting.needs_restart" in r.getMessage()
            ]

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
    2-grams for good, no call fails, and the log says which model it is and what to do."""
    old = files.again(2)
    settings = replace(config, heartbeats=False, bigram_fallback=True, deadline_s=2.0)
    queries = [query for shard in (0, 1) for query in queries_to(old, shard)[:3]]
    asked = [c for c, _ in queries], [w for _, w in queries]
    addresses = rolled.addresses[:2]  # one server of each shard

    def told(begin: str) -> list[dict[str, object]]:
        found = (vars(r) for r in caplog.records)
        return [one for one in found if one.get("event", "").startswith(begin)]

    with Client.connect(addresses, settings) as client:
        handle = client.utterance()
        assert handle.score(*asked, deadline_s=WAIT_S).source is None
        rolled.servers[0].end()
        until(lambda: handle.score(*asked).source is not None)
        settle(client)
        (began,) = told("client.bigram_fallback.")
        assert (began["event"], began["error"]) == ("client.bigram_fallback.started", "ShardDown")
        assert not told("client.model.gone")
        rolled.roll(other_files)
        until(lambda: handle.score(*asked).source is not None and told("client.model.gone"))
        for _ in range(20):
            assert handle.score(*asked).source is not None
        settle(client)
        (gone,) = told("client.model.gone")
        assert gone["model"] == old.manifest.model and gone["levelname"] == "WARNING"
        assert old.manifest.model in str(gone["error"])
        _, changed = told("client.bigram_fallback.")
        assert (changed["event"], changed["before"]) == (
            "client.bigram_fallback.changed",
            "ShardDown",
        )
        assert changed["error"] == "StaleShardSet"


def test_killed_processes_of_a_port_cost_answers_but_make_none_wrong(files, config) -> None:
    """kill -9, one after the other, while a client asks: an answer is the oracle's or a
    `DlmError`, and in the end all are there again."""
    queries = random_queries(files.oracle, 4, 100)
    expected = [files.oracle.score(c, w) for c, w in queries]
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
            try:
                answers = client.utterance().score([c for c, _ in queries], [w for _, w in queries])
            except DlmError:
                continue
            assert_equal(answers, expected)
            answered += 1
        assert kills == 5
        until(lambda: answers_again(client, files))
