"""Many utterances at once: their order, what is lost when servers die, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asr.plain import random_lattice
from asr.test_rescore import SEARCH, WORDS, summed
from cluster import Cluster, ModelFiles, build
from dlm.asr.rescoring.lattice import Lattice
from dlm.asr.rescoring.nbest import Hypotheses, Hypothesis, NbestList
from dlm.asr.rescoring.rescore import rescore_many
from dlm.client import Client, ClientConfig
from dlm.errors import LatticeError, UnavailableError
from models import random_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model that lacks suffixes, in two shards."""
    return build(random_model(3, words=4, per_order=40), tmp_path_factory.mktemp("many"), 2)


def lattices(count: int) -> Iterator[Lattice]:
    """Small ones."""
    return (random_lattice(seed, nodes=8, words=WORDS) for seed in range(count))


def test_utterances_come_back_in_their_order_and_share_messages(
    files: ModelFiles, tmp_path: Path
) -> None:
    """The scores are those of a shard set in this process; some positions go out together."""
    with Client.local(files.directory) as local:
        expected = [one.found for one in rescore_many(local, lattices(30), SEARCH, jobs=1)]
    config = ClientConfig(cache_dir=tmp_path, deadline_s=60.0, window=1)
    with Cluster(files) as cluster, Client.connect(cluster.addresses, config) as client:
        found = list(rescore_many(client, lattices(30), SEARCH, jobs=16))
        positions = sum(one.positions for one in found)
        assert 0 < client.stats.messages <= positions * 2
    assert [one.found.id for one in found] == [f"utt-{seed}" for seed in range(30)]
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one.found, Lattice)
        assert isinstance(other, Lattice)
        assert summed(one.found) == summed(other)
        assert one.bigram_fallback == one.local_fallback == 0
        assert one.audio_s == 1.75


@pytest.mark.promise("no_utterance_lost")
def test_when_a_shard_dies_in_the_middle_no_utterance_is_lost(
    files: ModelFiles, tmp_path: Path
) -> None:
    """Each says how many of its scores are partial; those before are the model's own."""
    config = ClientConfig(cache_dir=tmp_path, deadline_s=20.0, bigram_fallback=True)
    with Client.local(files.directory) as local:
        whole = [one.found for one in rescore_many(local, lattices(10), SEARCH, jobs=1)]
    with Cluster(files) as cluster, Client.connect(cluster.addresses, config) as client:

        def given() -> Iterator[Hypotheses]:
            for number, lattice in enumerate(lattices(30)):
                if number == 10:
                    for server in cluster.servers:
                        server.end(at_once=True)
                yield lattice
            yield NbestList("list", (Hypothesis(tuple(WORDS)), Hypothesis(("w0", "w1", "w2"))))

        found = list(rescore_many(client, given(), SEARCH, jobs=1))
    assert len(found) == 31
    # One is under way when the servers end.
    assert [one.bigram_fallback for one in found[:9]] == [0] * 9
    for one, other in zip(found[:9], whole, strict=False):
        assert isinstance(one.found, Lattice)
        assert isinstance(other, Lattice)
        assert summed(one.found) == summed(other)
    assert sum(one.bigram_fallback > 0 for one in found[10:]) > 15
    assert found[-1].bigram_fallback == found[-1].found.bigram_fallback > 0  # type: ignore[union-attr]


def test_without_a_partial_model_a_dead_shard_is_an_error(
    files: ModelFiles, tmp_path: Path
) -> None:
    """After what was done before it."""
    config = ClientConfig(cache_dir=tmp_path, deadline_s=20.0)
    with Cluster(files) as cluster, Client.connect(cluster.addresses, config) as client:
        for server in cluster.servers:
            server.end(at_once=True)
        with pytest.raises(UnavailableError):
            list(rescore_many(client, lattices(30), SEARCH))


def test_what_comes_before_a_malformed_utterance_is_handed_on(files: ModelFiles) -> None:
    """Then the error."""

    def given() -> Iterator[Hypotheses]:
        yield from lattices(5)
        raise LatticeError("broken", path="a", line=3)

    found: list[str] = []
    with Client.local(files.directory) as client, pytest.raises(LatticeError, match="line 3"):
        found.extend(one.found.id for one in rescore_many(client, given(), SEARCH, jobs=3))
    assert found == [f"utt-{seed}" for seed in range(5)]


def test_lists_of_sentences_are_cut_and_say_what_is_partial(files: ModelFiles) -> None:
    """Of lattices and of n-best lists alike."""
    listed = NbestList("a", tuple(Hypothesis((word,), -1.0) for word in WORDS))
    with Client.local(files.directory) as client:
        one, other = rescore_many(client, [next(lattices(1)), listed], SEARCH, nbest=2)
    for found in (one.found, other.found):
        assert isinstance(found, NbestList)
        assert 1 <= len(found.hypotheses) <= 2
        assert found.scales == SEARCH.scales
