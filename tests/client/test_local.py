"""A decoder's handles without servers, and what a developer's first slips are answered with."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlm
from client.questions import ask, assert_equal, assert_sentence, random_queries, random_sentences
from cluster import Cluster, ModelFiles, build
from dlm import AsyncClient, Client, LocalModel
from dlm.client import States
from dlm.errors import (
    ConfigError,
    DlmError,
    ModelMismatch,
    QueryError,
    ShardDown,
    ShardFormatError,
)
from models import random_model


def test_the_package_itself_has_what_a_decoder_needs() -> None:
    """Each by its name, and nothing that is not there."""
    assert {"AsyncClient", "Client", "ClientConfig", "LocalModel"} < set(dir(dlm))
    assert LocalModel.__module__ == "dlm.index.search.local"
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        dlm.Cleint  # noqa: B018


@pytest.mark.promise("local_as_client")
def test_a_local_client_gives_the_bits_of_the_oracle_and_of_servers(
    files: ModelFiles, local: Client, client: Client
) -> None:
    """Every method of the utterance, the servers' client beside it."""
    queries = random_queries(files.oracle, 1, 300)
    ask(local.utterance(), files.oracle, queries)
    ours, theirs = local.utterance(deadline_s=60), client.utterance(deadline_s=60)
    assert ours.model_info == theirs.model_info
    assert (ours.order, ours.vocabulary) == (theirs.order, theirs.vocabulary)
    sentences = [" ".join(words) for words in random_sentences(files.oracle, 2, 12)]
    for mine, other in zip(
        ours.score_sentences(sentences), theirs.score_sentences(sentences), strict=True
    ):
        assert np.array_equal(mine.token_log10_prob, other.token_log10_prob)
        assert np.array_equal(mine.token_source, other.token_source)
    states: Any = [ours.begin(), ours.null()]
    for word in range(3, 8):
        found, expected = (one.extend(states, [word, word + 1]) for one in (ours, theirs))
        assert np.array_equal(found.log10_prob, expected.log10_prob)
        assert list(found.states.reshape(-1)) == list(expected.states.reshape(-1))
        states = found.states.reshape(-1)
    # A state goes from one to the other: they are of one family.
    assert ours.next_words(states[0], 5) == theirs.next_words(states[0], 5)
    assert local.manifest.shard_set == client.manifest.shard_set
    assert local.vocabulary == client.vocabulary
    assert local.stats.queries > 300
    assert local.stats.messages == 0


def test_a_local_client_pickles_closes_and_has_no_cascade(files: ModelFiles) -> None:
    """A copy opens the same folder; what is closed no longer answers."""
    with Client.local(files.directory, verify=False) as one:
        copy = pickle.loads(pickle.dumps(one))
        with pytest.raises(ConfigError, match="in its own process"):
            one.cascade  # noqa: B018
        assert next(iter(one.metrics.collect())).name
    with pytest.raises(ShardDown, match="closed"):
        one.utterance()
    ask(copy.utterance(), files.oracle, random_queries(files.oracle, 3, 20))
    copy.close()


async def test_an_async_client_is_opened_by_await_and_by_async_with(
    files: ModelFiles, cluster: Cluster, cache_dir: Path
) -> None:
    """Of servers and local alike; as a coroutine, too, which tasks take; closed at the end."""
    config = dlm.ClientConfig(deadline_s=60.0, cache_dir=cache_dir)
    queries = random_queries(files.oracle, 4, 30)
    expected = [files.oracle.score(c, w) for c, w in queries]

    async def asked(client: AsyncClient) -> None:
        answers = await client.utterance().score([c for c, _ in queries], [w for _, w in queries])
        assert_equal(answers, expected)

    for opening in (
        lambda: AsyncClient.connect(cluster.addresses, config),
        lambda: AsyncClient.local(files.directory),
    ):
        async with opening() as client:
            await asked(client)
        with pytest.raises(ShardDown, match="closed"):
            client.utterance()
        for client in (await opening(), await asyncio.create_task(opening())):
            async with client:
                await asked(client)
        opening().close()  # never awaited: nothing was begun


@pytest.mark.parametrize("face", [Client, AsyncClient])
def test_what_is_no_way_to_open_a_client_says_what_to_write(
    face: Any, files: ModelFiles, tmp_path: Path
) -> None:
    """The slips of a first minute."""
    name = face.__name__

    def refused(write: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            opened = write()
            if face is AsyncClient:
                asyncio.run(opened)
        return str(caught.value)

    with pytest.raises(TypeError, match=rf"use {name}\.connect\('cluster.toml'\)"):
        face("cluster.toml")
    assert "Write connect(['ten:50061'])" in refused(lambda: face.connect("ten:50061"))
    assert "Client.local(DIR)" in refused(lambda: face.connect(files.directory))
    assert "ten is not a server" not in refused(lambda: face.connect("ten"))
    assert "'ten' is not a server address" in refused(lambda: face.connect(["ten"]))
    for nothing in (None, 5, b"ten:50061", [b"ten:50061"], [50061]):
        found = repr(nothing).strip("[]")
        assert found in refused(lambda nothing=nothing: face.connect(nothing))
    assert str(tmp_path / "none") in refused(lambda: face.local(tmp_path / "none"))
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is a file" in refused(lambda: face.local(tmp_path / "file"))
    with pytest.raises(ShardFormatError, match=r"manifest\.json"):
        Client.local(tmp_path)


def test_keys_of_states_are_equal_where_the_states_are(
    files: ModelFiles, local: Client, client: Client
) -> None:
    """Of arrays of any shape, joined and indexed, from another client too; another model's are no
    part of them."""
    utterance = local.utterance()
    states = utterance.states([utterance.begin(), utterance.null()])
    words = np.arange(utterance.vocabulary_size)
    found = [
        utterance.extend(states, words).states,
        client.utterance().extend(states, words).states,
    ]
    again = utterance.extend(found[0].reshape(-1)[::7], words[::5]).states
    joined = States.joined([states, *found, again[1:, ::-1]])
    keys, each = joined.keys(), list(joined)
    assert len(keys) == len(each) == joined.shape[0]
    assert (
        len(dict(zip(keys, each, strict=True)))
        == len(set(each))
        == len(set(zip(keys, each, strict=True)))
    )
    assert [joined[i] for i in (0, 1)] == [utterance.begin(), utterance.null()]
    with pytest.raises(QueryError, match="at least one"):
        States.joined([])
    other = dataclasses.replace(
        states, model_info=dataclasses.replace(states.model_info, model="other")
    )
    with pytest.raises(ModelMismatch, match="other"):
        States.joined([states, other])
    with pytest.raises(ModelMismatch, match="other"):
        utterance.states([other[0]])


def test_sentences_may_be_ids_or_strings_as_everywhere(files: ModelFiles, local: Client) -> None:
    """Lists, tuples, arrays, and ids among words. They split at spaces, tabs and line ends only:
    U+00A0 and U+3000 are part of a word."""
    words = [w.decode() for w in files.oracle.vocabulary.words]
    utterance = local.utterance()
    asked = [
        [5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint8), [np.int64(5), words[6]],
        [words[5], words[6].encode()], f"{words[5]} {words[6]}", np.array([words[5], words[6]]),
        f" {words[5]}\t {words[6]}\r\n", f"{words[5]} {words[6]}".encode(),
    ]  # fmt: skip
    scores = utterance.score_sentences(asked)
    for score in [*scores, *utterance.score_sentences(np.array([[5, 6], [5, 6]]))]:
        assert_sentence(score, files.oracle, [words[5], words[6]])
    (odd,) = utterance.score_sentences([f"{words[5]}\u00a0{words[6]}\u3000{words[7]}"])
    assert (odd.tokens, odd.oovs) == (2, 1)
    assert utterance.score_sentences([]) == []
    (empty,) = utterance.score_sentences([""], bos=False, eos=False)
    assert (empty.tokens, empty.log10_prob) == (0, 0.0)


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        ("u.score_sentences(None)", "sentences is None"),
        ("u.score_sentences('a b')", "sequence of sentences"),
        ("u.score_sentences(5)", "sentences is of type int"),
        ("u.score_sentences(x for x in 'ab')", "sentences is of type generator"),
        ("u.score_sentences({'a': 1})", "sentences is of type dict"),
        ("u.score_sentences([None])", "sentences[0] is None"),
        ("u.score_sentences(['a', 5])", "sentences[1] is of type int"),
        ("u.score_sentences([[1, None]])", "of type NoneType"),
        ("u.score_sentences([[1.5]])", "of type float"),
        ("u.score_sentences([[10**9]])", "word id 1000000000 "),
        ("u.score_sentences([np.array([-1])])", "from -1 "),
        ("u.score_sentences([np.float32(1)])", "sentences[0] is of type float32"),
        ("u.score_sentences(np.array(5))", "sentences is an array without dimensions"),
        ("u.score(None, [1])", "contexts is None"),
        ("u.score([None], [1])", "contexts[0] is None"),
        ("u.score([['a'], 'b'], [1, 2])", "contexts[1] is "),
        ("u.score([7], [1])", "contexts[0] is of type int"),
        ("u.score([[1]], None)", "words is None"),
        ("u.score([[1]], 'a')", "words is one string"),
        ("u.score([[1]], [None])", "of type NoneType"),
        ("u.score([[None]], [1])", "of type NoneType"),
        ("u.score([[1]], [b'a', 2])", "1 context and 2 words"),
        ("u.extend(None, [1])", "states is None"),
        ("u.extend(5, [1])", "states is of type int"),
        ("u.extend(u.begin(), [1])", "pass [state]"),
        ("u.context_blocks(u.begin())", "pass [state]"),
        ("u.context_blocks([u.begin()]).extend([10**6])", "word id 1000000 "),
        ("u.context_blocks([u.begin()]).extend([-1])", "word id -1 "),
        ("u.context_blocks([u.begin()]).extend('a')", "words is one string"),
        ("u.context_blocks([u.begin()]).score(0, 10**6)", "word id 1000000 "),
        ("u.extend([u.begin()], None)", "words is None"),
        ("u.extend([u.begin()], 5)", "words is of type int"),
        ("u.extend([u.begin()], 'a')", "words is one string"),
        ("u.extend([u.begin()], [None])", "of type NoneType"),
        ("u.extend([u.begin()], [[1], None])", "words[1] is None"),
        ("u.extend([u.begin()], iter([1]))", "words is of type list_iterator"),
        ("u.extend([None], [1])", "expected a State, found NoneType"),
        ("u.next_words(None, 1)", "expected a State, found NoneType"),
        ("u.next_words(u.begin(), None)", "k is None"),
        ("u.next_words(u.begin(), 1.5)", "k is 1.5"),
        ("u.next_words(u.begin(), 0)", "k is 0"),
        ("u.score([[1]], [1], deadline_s='1')", "the deadline is '1'"),
        ("c.utterance(deadline_s=-1)", "the deadline is -1"),  # not at its first call
        ("c.utterance(deadline_s=0)", "the deadline is 0"),
        ("c.utterance(deadline_s='x')", "the deadline is 'x'"),
        ("c.utterance(deadline_s=float('nan'))", "the deadline is nan"),
        ("u.score([[1]], [u.vocabulary_size])", "word id"),
        ("u.score([[1]], [-1])", "-1"),
        ("u.score([[u.vocabulary_size]], [1])", "word id"),
        ("u.score([[1, 1]], np.array([-1]))", "-1"),
        ("u.score([np.array([1 << 40])], [1])", "1099511627776"),
        ("u.score([[1], [1]], np.array([[1, 2], [3, 4]]))", "words"),
        ("u.extend([u.begin()], [[1], [2]])", "words"),
        ("u.extend([u.begin()] * 2, [[1, 2], [1]])", "words"),
        ("u.extend([u.begin()], np.zeros((1, 1, 1), np.int64))", "words"),
        ("u.score_sentences(b'a b')", "sequence of sentences"),
    ],
)
def test_what_has_no_answer_is_refused_by_its_name(local: Client, ask: str, complaint: str) -> None:
    """As an error of dlm that says what was found where; never a TypeError of Python's own."""
    with pytest.raises(DlmError) as caught:
        eval(ask, {"c": local, "u": local.utterance(), "np": np})
    assert complaint in str(caught.value)
    assert isinstance(caught.value, QueryError)


# Every kind of question, each twice, since messages that share a turn are merged; and the kernels
# that each phase was the first to compile (or to load from numba's cache).
SCRIPT = """
import gc, json, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from dlm.client import Client, ClientConfig

def compiled():
    return {
        f"{d.py_func.__module__}.{d.py_func.__qualname__}{s}"
        for d in gc.get_objects() if isinstance(d, Dispatcher) for s in d.signatures
    }

config = ClientConfig(cache_dir=sys.argv[1], bigram_fallback=True)
with Client.connect(sys.argv[2:], config) as client:
    before = compiled()
    utterance = client.utterance()
    words = [f"w{i}" for i in range(40)]
    for _ in range(2):
        utterance.score([words[i : i + 3] for i in range(30)], words[5:35])
        utterance.score_sentences([" ".join(words), " ".join(words[::-1])])
        states = [utterance.begin(), utterance.null()]
        for _ in range(3):
            extension = utterance.extend(states, words)
            states = extension.states[:, 3:9:2]
            states = utterance.extend(states[:, 1], words[0:3]).states.reshape(-1)
        utterance.extend(states, np.arange(20)[::2])
        utterance.next_words(states[1], 5)
        utterance.context_blocks(states).extend(words)
        utterance.context_blocks(states).score(0, words[0])
    after = compiled()
print(json.dumps([len(before), sorted(after - before)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_what_a_call_needs_is_compiled_when_the_client_has_connected(tmp_path, order: int) -> None:
    """Whatever the order of the model, and whatever is asked."""
    files = build(random_model(3, order=order, words=60, per_order=300), tmp_path / "m", 2)
    with Cluster(files) as cluster:
        line = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), *cluster.addresses]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, later = json.loads(done.stdout)
    assert before > 4
    assert later == []
