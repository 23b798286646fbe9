"""One list of expectations over every way to ask: dictionary, shards, client and servers.

The numbers are summed by hand from the models in `models.py`; all are exact in float32. On random
models all must agree with each other bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from client.questions import random_queries
from cluster import WAIT_S, Cluster, ModelFiles
from dlm.client import Client, ClientConfig
from dlm.index.check.decode import export_arpa
from dlm.index.making import build_shard_set
from dlm.index.search.local import LocalModel
from dlm.ngram.backoff import DictModel, Score
from dlm.ngram.query import Answers
from models import HAND_MADE, PlainModel, random_model

Query = tuple[tuple[int, ...], int]
Way = Callable[[Sequence[Query]], list[Score]]

# Model -> (context, word, log10 probability, order of the longest n-gram found).
EXPECTATIONS: dict[str, list[tuple[str, str, float, int]]] = {
    "weight_without_continuation": [
        ("a b c", "d", -0.1875, 4),
        ("a b c", "a", -0.75 + 0 - 0.0625 - 1.0, 1),
        ("a b c", "never-seen", -0.75 + 0 - 0.0625 - 2.0, 1),
        ("a b", "c", -0.25, 3),
        ("a b", "d", -0.125 - 0.375 - 1.375, 1),
        ("b c", "d", 0 - 0.6875, 2),
        ("d", "a", 0 - 1.0, 1),
        ("a b c d", "</s>", 0 + 0 - 1.5, 1),
        ("d d a b c", "d", -0.1875, 4),
        ("", "<unk>", -2.0, 1),
    ],
    "blank_pair_with_weight": [
        ("a b c", "d", -0.1875, 4),
        ("a b c", "a", -0.75 - 0.0625 - 1.0, 1),
        ("b c", "d", -0.0625 - 1.375, 1),
        ("a", "b", -0.5, 2),
        ("b", "c", -0.375 - 1.25, 1),
    ],
    "weight_only_at_the_end": [
        ("a b c", "d", -0.75 + 0 - 0.0625 - 1.375, 1),
        ("a b", "c", -0.25, 3),
        ("d b", "c", -0.625, 2),
    ],
    "missing_suffixes": [
        ("a b c", "d", -0.1875, 4),
        ("d a b", "c", 0 - 0.25, 3),
        ("d a", "c", -0.03125 - 0.5 - 1.25, 1),
        ("c d", "a", -0.875, 2),
        ("b c", "d", -0.0625 - 1.375, 1),
        ("a b c", "a", -0.75 - 0.0625 - 1.0, 1),
    ],
    "five_grams_deep_suffixes_missing": [
        ("a b c d", "a", -0.0625, 5),
        ("a b c d", "b", -0.125 + 0 - 1.125, 1),
        ("<s> a b", "c", -0.0625 - 0.25, 3),
        ("<s> a", "b", -0.28125, 3),
        ("<s>", "b", -0.25 - 1.125, 1),
        ("c d", "a", -0.3125, 2),
        ("a b c", "a", 0 - 0.0625 - 1.0, 1),
    ],
    "empty_top_orders": [
        ("c a b", "d", -0.25 - 0.375 - 1.375, 1),
        ("d a", "b", -0.5, 2),
    ],
    "empty_order_two_and_up": [("a b", "c", -0.375 - 1.25, 1), ("<s>", "</s>", -0.25 - 1.5, 1)],
    "unigrams_only": [("a b", "c", -1.25, 1), ("", "</s>", -1.5, 1), ("a", "never-seen", -2.0, 1)],
    "bigrams_only": [
        ("c a", "b", -0.5, 2),
        ("<s>", "a", -0.25, 2),
        ("<s>", "b", -0.25 - 1.125, 1),
        ("a", "d", -0.5 - 1.375, 1),
    ],
    "no_unknown_word": [
        ("a b", "c", -0.125, 3),
        ("a b", "d", -0.25 - 0.375 - 1.375, 1),
        ("a b", "never-seen", -0.25 - 0.375 - 100.0, 1),
        ("never-seen", "a", -1.0, 1),
        ("a never-seen", "b", -1.125, 1),
    ],
    "unknown_word_in_longer_ngrams": [
        ("a", "never-seen", -0.5, 2),
        ("a never-seen", "b", -0.125, 3),
        ("never-seen", "b", -0.4375, 2),
        ("a never-seen", "c", -0.25 - 0.875 - 1.25, 1),
        ("never-seen never-seen", "b", -0.4375, 2),
        ("never-seen b", "d", -0.5 - 0.375 - 1.375, 1),
    ],
}


def scores(answers: Answers) -> list[Score]:
    """One score an answer."""
    return [
        Score(np.float32(p), int(m), int(n), int(s))
        for p, m, n, s in zip(
            answers.log10_prob,
            answers.matched_order,
            answers.ngram_length,
            answers.state_length,
            strict=True,
        )
    ]


def by_dictionary(oracle: DictModel) -> Way:
    """The plain recursion."""
    return lambda queries: [oracle.score(context, word) for context, word in queries]


def by_shards(directory: Path) -> Way:
    """The kernels, over the files, in this process."""
    model = LocalModel.open(directory)

    def ask(queries: Sequence[Query]) -> list[Score]:
        width = max(model.order - 1, 0)
        contexts = np.zeros((len(queries), width), np.uint32)
        lengths = np.zeros(len(queries), np.uint8)
        for row, (context, _) in enumerate(queries):
            kept = context[max(len(context) - width, 0) :] if width else ()
            lengths[row] = len(kept)
            contexts[row, width - len(kept) :] = kept
        return scores(model.score(contexts, lengths, np.array([w for _, w in queries], np.uint32)))

    return ask


@contextmanager
def by_client(cluster: Cluster, cache_dir: Path) -> Iterator[Way]:
    """Low orders from the client's cache, the rest from the servers."""
    config = ClientConfig(deadline_s=WAIT_S, cache_dir=cache_dir)
    with Client.connect(cluster.addresses, config) as client:
        utterance = client.utterance()
        yield lambda queries: scores(
            utterance.score([c for c, _ in queries], [w for _, w in queries])
        )


EXACT: dict[str, Any] = {}
LOSSLESS: dict[str, Any] = {"encoding": "compact", "bits": 32}
# Shards and encoding of a set.
SETS: dict[str, tuple[int, dict[str, Any]]] = {
    "exact": (2, EXACT),
    "compact": (5, LOSSLESS),
    "alone": (1, LOSSLESS),
}


@contextmanager
def every_way(
    model: PlainModel, folder: Path, shards: int, options: dict[str, Any]
) -> Iterator[tuple[DictModel, dict[str, Way]]]:
    """The model's oracle, and all ways to ask it; a server for each shard.

    Where values are quantised, the oracle is that of what the shard set exports, and one way more
    asks the export sharded again, exactly.
    """
    arpa, directory = model.write(folder / "model.arpa"), folder / "set"
    build_shard_set(arpa, directory, shards, **options)
    ways: dict[str, Way] = {}
    if options.get("bits", 32) != 32:
        arpa = folder / "export.arpa"
        export_arpa(directory, arpa)
        build_shard_set(arpa, folder / "again", 3)
        ways["export"] = by_shards(folder / "again")
    files = ModelFiles(directory, DictModel.from_arpa(arpa))
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(files))
        ways |= {
            "dict": by_dictionary(files.oracle),
            "shard": by_shards(files.directory),
            "client": stack.enter_context(by_client(cluster, folder / "cache")),
        }
        yield files.oracle, ways


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, kind), marks=pytest.mark.slow if kind == "alone" else ())
        for name in sorted(HAND_MADE)
        for kind in SETS
    ],
)
def hand_made(request, tmp_path_factory):
    """Each model made by hand, served from each kind of set."""
    name, kind = request.param
    folder = tmp_path_factory.mktemp("hand")
    with every_way(HAND_MADE[name], folder, *SETS[kind]) as (oracle, ways):
        yield name, oracle, ways


def test_every_model_made_by_hand_has_expectations() -> None:
    """A model added to models.py is added here."""
    assert sorted(EXPECTATIONS) == sorted(HAND_MADE)


@pytest.mark.promise("exact")
def test_every_way_gives_the_scores_summed_by_hand(hand_made) -> None:
    """Exactly."""
    name, oracle, ways = hand_made
    ids = oracle.vocabulary.id_of
    expected = EXPECTATIONS[name]
    queries = [(tuple(map(ids, context.split())), ids(word)) for context, word, _, _ in expected]
    for way, ask in ways.items():
        for (context, word, log10_prob, order), score in zip(expected, ask(queries), strict=True):
            found = score.log10_prob, score.matched_order
            assert found == (np.float32(log10_prob), order), f"{way}: {word} after {context!r}"


def assert_all_agree(ways: dict[str, Way], queries: Sequence[Query]) -> None:
    """Every field of every answer, log10 probabilities as bits."""
    expected = ways["dict"](queries)
    for name, way in ways.items():
        for query, score, other in zip(queries, way(queries), expected, strict=True):
            assert score.log10_prob.tobytes() == other.log10_prob.tobytes(), (name, query)
            assert score == other, (name, query)


def test_every_way_agrees_on_all_short_queries(hand_made) -> None:
    """Every context of up to two words, and the model's own n-grams, with every word."""
    _, oracle, ways = hand_made
    size = len(oracle.vocabulary)
    contexts = (
        {()} | {(u,) for u in range(size)} | {(u, v) for u in range(size) for v in range(size)}
    )
    contexts |= set(oracle.ngrams)
    assert_all_agree(ways, [(c, w) for c in sorted(contexts) for w in range(size)])


@pytest.mark.promise("exact")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    order=st.integers(2, 6),
    words=st.integers(2, 12),
    per_order=st.integers(5, 80),
    missing_suffixes=st.booleans(),
    unk=st.booleans(),
    shards=st.sampled_from([1, 2, 5]),
    options=st.sampled_from(
        [EXACT, LOSSLESS, *({"encoding": "compact", "bits": bits} for bits in (3, 8))]
    ),
)
def test_every_way_agrees_on_random_models(
    seed: int,
    order: int,
    words: int,
    per_order: int,
    missing_suffixes: bool,
    unk: bool,
    shards: int,
    options: dict[str, Any],
) -> None:
    """Suffixes missing, weights zero, no unknown word: whatever the model, the same bits."""
    model = random_model(
        seed,
        order=order,
        words=words,
        per_order=per_order,
        missing_suffixes=missing_suffixes,
        unk=unk,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        every_way(model, Path(folder), shards, options) as (oracle, ways),
    ):
        assert_all_agree(ways, random_queries(oracle, seed, 300))


@pytest.mark.promise("compact")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "deep" in name else pytest.mark.slow)
        for name in sorted(HAND_MADE)
    ],
)
def test_every_way_agrees_on_quantised_models(name: str, tmp_path: Path) -> None:
    """With the dictionary of what the set exports, and with that sharded again as it is."""
    options = {"encoding": "compact", "bits": 3}
    with every_way(HAND_MADE[name], tmp_path, 2, options) as (oracle, ways):
        assert_all_agree(ways, random_queries(oracle, 3, 200))
