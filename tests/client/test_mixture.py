"""Mixtures of utterances, beside the weighted sum of what their models' oracles say."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from client.scripted import Clients, Network, free
from cluster import Cluster, ModelFiles, build, until
from dlm.client import AsyncClient, AsyncMixture, Client, Mixture
from dlm.errors import (
    ConfigError,
    DeadlineExceeded,
    EstimationError,
    ModelMismatch,
    ModelSwitched,
    QueryError,
    ShardDown,
)
from dlm.ngram.query import BIGRAM_FALLBACK
from models import Ngram, PlainModel
from normalised import BEGIN, END, UNK, log10_prob, normalised_model, vocabulary_of

WEIGHTS = (0.7, 0.3)
RULES = ("zero", "shared", "whole")


def renamed(model: PlainModel, by: int) -> PlainModel:
    """The model with other words: w0 is w4, say."""
    name = {w: f"w{int(w[1:]) + by}" for w in vocabulary_of(model) if w not in (END, UNK)}
    ngrams = {tuple(name.get(w, w) for w in n): value for n, value in model.ngrams.items()}
    return PlainModel(model.order, ngrams)


MODELS = (normalised_model(1, words=9), renamed(normalised_model(2, words=9, order=2), 4))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[ModelFiles]:
    """Two models that share some words; a trigram and a bigram model."""
    folder = tmp_path_factory.mktemp("mixed")
    return [build(model, folder / str(at), 2) for at, model in enumerate(MODELS)]


@pytest.fixture(scope="module")
def clients(built: list[ModelFiles]) -> Iterator[list[Client]]:
    """Of both, in this process."""
    opened = [Client.local(files.directory) for files in built]
    yield opened
    for client in opened:
        client.close()


@pytest.fixture(scope="module")
def clusters(built: list[ModelFiles]) -> Iterator[list[Cluster]]:
    """Servers of both."""
    with Cluster(built[0]) as first, Cluster(built[1]) as second:
        yield [first, second]


def mixed(clients: list[Client], **options: Any) -> Mixture:
    """The mixture of these tests."""
    pairs = zip((client.utterance() for client in clients), WEIGHTS, strict=True)
    return Mixture(list(pairs), **options)


def mixed_async(clients: list[Client], **options: Any) -> AsyncMixture:
    """The same on an event loop."""
    utterances = (AsyncClient(client._core).utterance(**options) for client in clients)
    return AsyncMixture(list(zip(utterances, WEIGHTS, strict=True)))


def oracle(context: Ngram, word: str, rule: str, weights: tuple[float, ...] = WEIGHTS) -> float:
    """P(word) by each model, its own unknown words read as such, in the weighted sum."""
    vocabularies = [set(vocabulary_of(model)) for model in MODELS]
    union = set.union(*vocabularies)
    known = [word in vocabulary and word != UNK for vocabulary in vocabularies]
    total = 0.0
    for model, vocabulary, has, weight in zip(MODELS, vocabularies, known, weights, strict=True):
        own = tuple(w if w in {*vocabulary, BEGIN} else UNK for w in context)
        own = own[max(len(own) - model.order + 1, 0) :]
        prob = 10.0 ** log10_prob(model, own, word if has else UNK)
        if not has and rule == "zero" and any(known):
            prob = 0.0
        elif not has and rule == "shared":
            prob /= 1 + len(union - vocabulary)
        total += weight * prob
    return total


@pytest.mark.promise("mixture")
@pytest.mark.parametrize("rule", RULES)
def test_a_mixture_is_the_weighted_sum_of_its_members(clients: list[Client], rule: str) -> None:
    """After random paths, of words that both, one or none knows; all words together have 1."""
    mixture = mixed(clients, unknown=rule)
    words = [word.decode() for word in mixture.words]
    said = [*(w for w in words if w not in (BEGIN, END, UNK)), "never-seen"]
    rng = np.random.default_rng(3)
    states: Any = [mixture.begin(), mixture.null()]
    paths: list[Ngram] = [(BEGIN,), ()]
    for _ in range(4):
        found = mixture.extend(states, [*said, END])
        expected = [[oracle(path, word, rule) for word in [*said, END]] for path in paths]
        assert found.log10_prob == pytest.approx(np.log10(expected), abs=2e-6)
        assert found.oov.tolist() == [[w == "never-seen" for w in [*said, END]]] * len(paths)
        whole = 10.0 ** mixture.next_distribution(states[0]).astype(np.float64)
        whole = math.fsum(whole[[w not in (BEGIN,) for w in words]])
        assert (whole > 1.05) if rule == "whole" else whole == pytest.approx(1.0, abs=1e-6)
        kept = rng.choice(found.oov.size, 6, replace=False)
        paths = [(*path, word) for path in paths for word in [*said, END]]
        paths = [paths[at] for at in kept if paths[at][-1] != END]
        states = found.states.reshape(-1)[[at for at in kept if (at + 1) % (len(said) + 1)]]
        assert [len(states), len(states.keys())] == [len(paths)] * 2
    best = mixture.next_words(states[0], 5)
    expected_best = sorted(
        ((oracle(paths[0], w, rule), w) for w in words if w != BEGIN), key=lambda one: -one[0]
    )
    assert [w for w, _ in best] == [w for _, w in expected_best[:5]]
    values = [10.0 ** float(p) for _, p in best]
    assert values == pytest.approx([p for p, _ in expected_best[:5]], rel=1e-5)


def test_sentences_are_scored_as_their_words(clients: list[Client]) -> None:
    """Each word after those before it; one that all models lack is unknown."""
    mixture = mixed(clients)
    sentence = ("w5", "w1", "w12", "never-seen", "w6")
    (found,) = mixture.score_sentences([" ".join(sentence)])
    path = (BEGIN, *sentence)
    each = [oracle(path[: at + 1], w, "zero") for at, w in enumerate([*sentence, END])]
    assert found.token_log10_prob == pytest.approx(np.log10(each), abs=2e-6)
    assert found.log10_prob == pytest.approx(math.log10(math.prod(each)), abs=1e-5)
    assert (found.tokens, found.oovs, found.token_oov.tolist().index(True)) == (6, 1, 3)
    assert found.log10_oovs == pytest.approx(math.log10(each[3]), abs=2e-6)
    (open_end,) = mixture.score_sentences([sentence], bos=False, eos=False)
    assert open_end.tokens == 5
    assert mixture.score_sentences([]) == []


def test_one_members_phrases_count_for_the_mixture(clients: list[Client]) -> None:
    """Once; in states as well."""
    first, second = clients
    phrases = {"w1 w5": 2.0, "blade w5": 1.5}
    mixture = Mixture([(first.utterance(phrases=phrases), 0.7), (second.utterance(), 0.3)])
    found = mixture.extend([mixture.begin()], ["w1", "blade"])
    assert found.bonus is not None and found.bonus.tolist() == [[1.0, 0.75]]
    assert np.array_equal(found.biased, found.log10_prob.astype(np.float64) + found.bonus)
    assert mixture.finish(found.states[0, 0]) == -1.0
    for state in (found.states[0, 0][:1], found.states[0, 0][::-1], None):
        with pytest.raises(ModelMismatch):
            mixture.finish(state)
    assert mixture.score_sentences(["w1 w5 w1 w5"])[0].bonus == 4.0
    both = [(client.utterance(phrases=phrases), 0.5) for client in clients]
    with pytest.raises(QueryError, match="2 members"):
        Mixture(both)


@pytest.mark.promise("mixture")
def test_all_members_are_asked_before_any_is_waited_for(
    clusters: list[Cluster], connect: Clients
) -> None:
    """So a call costs what its slowest member costs; and answers as without servers."""
    networks = [Network(), Network()]
    opened = [connect(clusters[0].addresses, network) for network in networks]
    mixture = mixed(opened)
    sentences = [" ".join(["w5", "w6", "w5"] * 4)]
    with ThreadPoolExecutor(1) as pool:
        with networks[0].held(), networks[1].held():
            asked = pool.submit(mixture.score_sentences, sentences)
            until(lambda: all(network.requests for network in networks))
            assert not asked.done()
        (found,) = asked.result()
    assert np.array_equal(found.token_source, np.zeros(found.tokens))


@pytest.mark.promise("mixture")
def test_the_mixture_for_asyncio_gives_the_same_bits(
    clusters: list[Cluster], connect: Clients
) -> None:
    """In every call; its states are those of the other."""
    opened = [connect(cluster) for cluster in clusters]
    plain, later = mixed(opened), mixed_async(opened)
    words, text = ["w5", "w1", "w12", "never-seen"], ["w5 w1 w12", "w6 never-seen"]

    async def ask() -> tuple[Any, ...]:
        first = await later.extend([later.begin()], words)
        return (
            first,
            await later.extend(first.states.reshape(-1), words),
            await later.score_sentences(text),
            await later.next_words(first.states[0, 0], 5),
            await later.next_distribution(first.states[0, 1]),
            (await AsyncMixture.tuned(later.members, text)).weights,
        )

    first, second, scores, likeliest, distribution, weights = asyncio.run(ask())
    expected = plain.extend([plain.begin()], words)
    after = plain.extend(expected.states.reshape(-1), words)
    for found, other in ((first, expected), (second, after)):
        assert np.array_equal(found.log10_prob, other.log10_prob)
        assert found.states.keys() == other.states.keys()
        assert [list(one.reshape(-1)) for one in found.states.parts] == [
            list(one.reshape(-1)) for one in other.states.parts
        ]
    for found, other in zip(scores, plain.score_sentences(text), strict=True):
        assert np.array_equal(found.token_log10_prob, other.token_log10_prob)
    assert likeliest == plain.next_words(expected.states[0, 0], 5)
    assert np.array_equal(distribution, plain.next_distribution(expected.states[0, 1]))
    assert weights == Mixture.tuned(plain.members, text).weights
    with pytest.raises(QueryError, match="AsyncUtterance"):
        AsyncMixture([(plain.members[0], 1.0)])  # type: ignore[list-item]
    with pytest.raises(QueryError, match="an Utterance"):
        Mixture([(later.members[0], 1.0)])  # type: ignore[list-item]


@pytest.mark.promise("mixture")
def test_members_that_were_cancelled_or_too_late_leave_nothing(
    clusters: list[Cluster], connect: Clients
) -> None:
    """On an event loop all members are asked before any is waited for, too; a call that its caller
    no longer awaits, or that is late, is over for every member, and the next is answered."""
    networks = [Network(), Network()]
    opened = [connect(clusters[0].addresses, network, window=1) for network in networks]
    sentences = [" ".join(["w5", "w6", "w5"] * 4)]

    async def run() -> Any:
        with pytest.raises(ConfigError, match="await"):
            mixed_async(opened)
        for client in opened:
            await AsyncClient(client._core).utterance()
        mixture = mixed_async(opened)
        with networks[0].held(), networks[1].held():
            asked = [asyncio.create_task(mixture.score_sentences(sentences)) for _ in range(3)]
            sent = asyncio.to_thread(until, lambda: all(network.requests for network in networks))
            await sent
            late = asyncio.create_task(mixture.score_sentences(sentences, deadline_s=0.01))
            with pytest.raises(DeadlineExceeded):
                await late
            for task in asked:
                task.cancel()
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(one) for one in ended] == [asyncio.CancelledError] * 3
        for client in opened:
            await asyncio.to_thread(until, lambda client=client: free(client))
        return await mixture.score_sentences(sentences)

    (found,) = asyncio.run(run())
    (expected,) = mixed(opened).score_sentences(sentences)
    assert np.array_equal(found.token_log10_prob, expected.token_log10_prob)


@pytest.mark.promise("mixture")
def test_a_member_that_fails_is_an_error_and_no_score(
    built: list[ModelFiles], clusters: list[Cluster], connect: Clients, network: Network
) -> None:
    """Unless it may fall back, which the sources say."""
    first = connect(clusters[0].addresses, network, deadline_s=5.0)
    second = connect(clusters[1])
    mixture = mixed([first, second])
    sentences = [" ".join(["w5", "w6", "w5"] * 4)]
    mixture.score_sentences(sentences)
    network.instant = ShardDown("gone")
    with pytest.raises(ShardDown):
        mixture.score_sentences(sentences)
    lenient = connect(
        clusters[0].addresses, network, deadline_s=0.5, bigram_fallback=True, heartbeats=False
    )
    (score,) = mixed([lenient, second]).score_sentences(sentences)
    assert (score.token_source == BIGRAM_FALLBACK).any()


def test_members_fall_back_together_or_not_at_all(
    built: list[ModelFiles], clients: list[Client], connect: Clients
) -> None:
    """The weights are those of the full models."""
    nobody = connect(["127.0.0.1:9"], local_fallback=built[1].directory, connect_s=0.5)
    fallen = nobody.utterance()
    with pytest.raises(ModelSwitched):
        Mixture([(clients[0].utterance(), 0.5), (fallen, 0.5)])
    Mixture([(fallen, 0.5), (fallen, 0.5)])


def test_weights_are_tuned_on_text(clients: list[Client]) -> None:
    """No others make it more probable."""
    rng = np.random.default_rng(5)
    text = [" ".join(rng.choice(["w1", "w5", "w6", "w11", "w12"], 6)) for _ in range(40)]
    members = [client.utterance() for client in clients]
    tuned = Mixture.tuned(members, text)

    def total(weights: tuple[float, ...]) -> float:
        scores = Mixture(list(zip(members, weights, strict=True))).score_sentences(text)
        return sum(score.log10_prob for score in scores)

    others = [(share / 20, 1 - share / 20) for share in range(1, 20)]
    assert total(tuned.weights) >= max(map(total, others)) - 1e-3
    with pytest.raises(EstimationError):
        Mixture.tuned(members, ["never-seen"])


@pytest.mark.parametrize(
    ("change", "error", "fact"),
    [
        ({"weights": (0.7, 0.7)}, ConfigError, "1.4"),
        ({"weights": (1.5, -0.5)}, ConfigError, "-0.5"),
        ({"weights": (math.nan, 1.0)}, ConfigError, "nan"),
        ({"unknown": "none"}, QueryError, "'none'"),
        ({"weights": (None, 1.0)}, ConfigError, "None"),
        ({"weights": (10**400, 1.0)}, ConfigError, "very large"),
        ({"weights": (False, True)}, ConfigError, "False"),
        ({"members": []}, QueryError, "no members"),
        ({"members": [1.0]}, QueryError, "pair"),
        ({"members": None}, QueryError, "None"),
        ({"words": [3]}, QueryError, "word id 3"),
        ({"words": [["w1"], [3]]}, QueryError, "word id 3"),
        ({"words": "w1"}, QueryError, "one string"),
        ({"states": ()}, QueryError, "one state"),
        ({"states": [3]}, ModelMismatch, "int"),
        ({"k": 0}, QueryError, "k is 0"),
    ],
)
def test_what_is_no_mixture_is_refused(
    clients: list[Client], change: Mapping[str, Any], error: type[Exception], fact: str
) -> None:
    """With what was found."""
    weights = change.get("weights", WEIGHTS)
    members = list(zip((client.utterance() for client in clients), weights, strict=True))
    with pytest.raises(error) as caught:
        mixture = Mixture(change.get("members", members), unknown=change.get("unknown", "zero"))
        begin = mixture.begin()
        states = begin if change.get("states") == () else change.get("states", [begin])
        mixture.extend(states, change.get("words", ["w1"]))
        mixture.next_words(begin, change.get("k", 1))
    assert fact in str(caught.value)
