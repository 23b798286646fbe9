"""Rescoring, against every path scored one by one by the recursion."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asr.plain import all_paths, random_lattice, words_of
from cluster import Cluster, ModelFiles, build
from dlm.asr.rescoring.lattice import Lattice, LatticeDraft, Scales
from dlm.asr.rescoring.nbest import Hypothesis, NbestList, best_paths
from dlm.asr.rescoring.rescore import PositionBatch, Search, positions, rescore, rescore_nbest
from dlm.asr.rescoring.slf import read_slf, slf_text
from dlm.client import Client, ClientConfig, Phrases
from dlm.errors import ConfigError, QueryError
from dlm.ngram.backoff import DictModel
from dlm.units import LN_10
from models import random_model

WORDS = ["w0", "w1", "w2", "w3", "not in the model"]
SEARCH = Search(Scales(0.5, 3.0, -0.75), beam=math.inf)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model that lacks suffixes, in two shards."""
    return build(random_model(3, words=4, per_order=40), tmp_path_factory.mktemp("rescore"), 2)


@pytest.fixture(scope="module")
def client(files: ModelFiles) -> Iterator[Client]:
    """Of the shards, in this process."""
    with Client.local(files.directory) as client:
        yield client


def scored(
    lattice: Lattice, oracle: DictModel, search: Search
) -> list[tuple[float, tuple[str, ...]]]:
    """Every path: its score, arc after arc from the start, and its words. The best first."""
    scales, out = search.scales_of(lattice), []
    for path in all_paths(lattice):
        words = words_of(lattice, path)
        new = [LN_10 * float(one.log10_prob) for one in oracle.score_sentence(words)]
        total = 0.0
        for arc in path:
            asked = lattice.is_word[arc] or lattice.targets[arc] == lattice.end
            lm = search.old_weight * lattice.lm[arc]
            if asked:
                lm = search.new_weight * new.pop(0) + lm
            penalty = scales.word_penalty * lattice.is_word[arc]
            total += scales.acoustic * lattice.acoustic[arc] + scales.lm * lm + penalty
        assert not new
        out.append((float(total), words))
    return sorted(out, key=lambda one: (-one[0], one[1]))


def summed(lattice: Lattice) -> list[tuple[float, tuple[str, ...]]]:
    """The same of a lattice by the scores that it has."""
    each = lattice.totals()
    out = []
    for path in all_paths(lattice):
        total = 0.0
        for arc in path:
            total += each[arc]
        out.append((float(total), words_of(lattice, path)))
    return sorted(out, key=lambda one: (-one[0], one[1]))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.75, 0.25), (-1.0, 1.0)])
def test_every_path_has_the_oracles_score(
    files: ModelFiles, client: Client, seed: int, weights: tuple[float, float]
) -> None:
    """To the last bit, in the expanded lattice, and the best of them are its n-best list."""
    lattice = random_lattice(seed, words=WORDS)
    new, old = weights
    search = Search(SEARCH.scales, new_weight=new, old_weight=old, beam=math.inf)
    expected = scored(lattice, files.oracle, search)
    found = rescore(lattice, client.utterance(), search)
    assert summed(found.lattice) == expected
    assert (found.bigram_fallback, found.local_fallback) == (0, 0)
    best = best_paths(found.lattice, 10**6)
    by_words: dict[tuple[str, ...], float] = {}
    for total, words in expected:
        by_words.setdefault(words, total)
    assert {one.words for one in best.hypotheses} == by_words.keys()
    assert len(best.hypotheses) == len(by_words)
    scales = search.scales
    assert scales is not None
    for one, total in zip(best.hypotheses, by_words.values(), strict=True):
        assert one.total(scales) == pytest.approx(total, abs=1e-9)
    assert best.hypotheses[0].words == expected[0][1]


@pytest.mark.parametrize("seed", range(5))
def test_paths_with_equal_states_go_on_as_one(files: ModelFiles, client: Client, seed: int) -> None:
    """A node for each pair of node and state, as the oracle minimises states; none twice."""
    lattice, oracle = random_lattice(seed, words=WORDS), files.oracle
    pairs: set[tuple[int, tuple[int, ...]]] = set()
    for path in all_paths(lattice):
        words = [oracle.vocabulary.begin_id]
        for arc in path:
            pairs.add((int(lattice.sources[arc]), oracle.state(words)))
            if lattice.is_word[arc]:
                words.append(oracle.vocabulary.id_of(lattice.labels[arc]))
    found = rescore(lattice, client.utterance(), SEARCH)
    assert found.lattice.nodes == len(pairs) + 1


@pytest.mark.parametrize("seed", range(4))
def test_a_rescored_lattice_scored_again_is_itself(
    client: Client, tmp_path: Path, seed: int
) -> None:
    """Written to a file and read in between: </s> is not scored twice, states have no copies."""
    once = rescore(random_lattice(seed, words=WORDS), client.utterance(), SEARCH).lattice
    path = tmp_path / "a.slf"
    path.write_text(slf_text(once))
    assert slf_text(read_slf(path)) == slf_text(once)
    again = rescore(read_slf(path), client.utterance(), Search(beam=math.inf)).lattice
    assert summed(again) == summed(once)
    assert (again.nodes, again.arcs) == (once.nodes, once.arcs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "limits",
    [(4.0, None), (math.inf, 2), (2.0, 1), (2.0, None, -1.0, 1.0)],
)
@pytest.mark.parametrize("silences", [True, False])
def test_a_narrow_search_leaves_paths_with_their_own_scores(
    files: ModelFiles,
    client: Client,
    seed: int,
    limits: tuple[Any, ...],
    silences: bool,
) -> None:
    """Each that is left has the oracle's score, from start to end, and there is always one; with LM
    scores on silences, as Kaldi has them, or without."""
    lattice = random_lattice(seed, nodes=8, words=WORDS)
    if not silences:
        lattice = replace(lattice, lm=np.where(lattice.is_word, lattice.lm, 0.0))
    beam, hypotheses, *weights = limits
    new, old = weights or (1.0, 0.0)
    search = Search(SEARCH.scales, beam=beam, hypotheses=hypotheses, new_weight=new, old_weight=old)
    left = summed(rescore(lattice, client.utterance(), search).lattice)
    assert left
    assert set(left) <= set(scored(lattice, files.oracle, search))


def test_a_narrower_beam_leaves_less(client: Client) -> None:
    """Over many lattices, judged by the scores that they have, or by unigrams."""
    for old in (True, False):
        arcs = {math.inf: 0, 8.0: 0, 1.0: 0}
        for seed in range(10):
            lattice = random_lattice(seed, nodes=9, words=WORDS)
            if not old:
                lattice = Lattice(**{**vars_of(lattice), "lm": np.zeros(lattice.arcs)})
            for beam in arcs:
                found = rescore(lattice, client.utterance(), Search(beam=beam))
                arcs[beam] += found.lattice.arcs
        assert arcs[math.inf] > arcs[8.0] > arcs[1.0]


def vars_of(lattice: Lattice) -> dict[str, object]:
    """Its fields by name."""
    return {name: getattr(lattice, name) for name in lattice.__dataclass_fields__}


@pytest.mark.parametrize("seed", range(4))
def test_an_nbest_list_has_the_scores_of_its_sentences(
    files: ModelFiles, client: Client, seed: int
) -> None:
    """Each as if scored alone; sorted by the scales; all in one call."""
    rng = random.Random(seed)
    lines = [tuple(rng.choice(WORDS) for _ in range(rng.randrange(5))) for _ in range(8)]
    given = NbestList("a", tuple(Hypothesis(w, rng.uniform(-9, 0), -1.0) for w in lines))
    utterance, search = client.utterance(), Search(SEARCH.scales, new_weight=0.5, old_weight=0.25)
    found, queries = rescore_nbest(given, utterance, search)
    assert queries == sum(len(words) + 1 for words in lines)
    for one in found.hypotheses:
        tokens = files.oracle.score_sentence(one.words)
        alone = sum(np.float64(token.log10_prob) for token in tokens)
        (score,) = utterance.score_sentences([one.words])
        assert one.lm == 0.5 * (score.log10_prob * LN_10) + 0.25 * -1.0
        assert score.log10_prob == pytest.approx(alone, abs=1e-9)
    totals = [one.total(SEARCH.scales or Scales()) for one in found.hypotheses]
    assert totals == sorted(totals, reverse=True)
    assert {(one.words, one.acoustic) for one in found.hypotheses} == {
        (one.words, one.acoustic) for one in given.hypotheses
    }


@pytest.mark.promise("rescoring_messages")
def test_a_position_costs_at_most_a_message_per_shard(files: ModelFiles, tmp_path: Path) -> None:
    """Counted by the servers; the unigrams of a beam need none. What was asked is seen as it goes
    out, whoever carries it there."""
    seen: list[PositionBatch] = []
    config = ClientConfig(cache_dir=tmp_path, deadline_s=60.0)
    with Cluster(files) as cluster, Client.connect(cluster.addresses, config) as client:
        for seed in range(10):
            lattice = random_lattice(seed, nodes=12, words=WORDS)
            before, calls = cluster.messages(), len(seen)
            found = rescore(lattice, client.utterance(), Search(), watch=seen.append)
            assert cluster.messages() - before <= found.positions * files.manifest.shards
            asked = [batch for batch in seen[calls:] if not math.isnan(batch.time_s)]
            assert len(asked) == found.positions
            assert {batch.time_s for batch in asked} <= {*lattice.times.tolist()}
            assert found.queries == sum(batch.words.size for batch in seen[calls:])
            # The same, driven by hand.
            utterance = client.utterance()
            steps = positions(lattice, utterance)
            batch = next(steps)
            with pytest.raises(StopIteration) as end:
                while True:
                    batch = steps.send(utterance.extend(batch.states, batch.words))
            assert summed(end.value.value.lattice) == summed(found.lattice)
        # Every word at every position: some states by five words, in a message per shard.
        draft = LatticeDraft("a")
        for node in range(6):
            for word in WORDS:
                draft.arc(node, node + 1, word)
        before = cluster.messages()
        found = rescore(draft.finish(), client.utterance(), SEARCH)
        assert 0 < cluster.messages() - before <= 2 * found.positions <= found.queries / 5


def test_queries_are_asked_once_in_an_utterance(client: Client) -> None:
    """The same words after the same states at another position are known."""
    draft = LatticeDraft("a")
    for node in range(6):
        draft.arc(node, node + 1, "not in the model")
    found = rescore(draft.finish(), client.utterance(), SEARCH)
    assert found.queries < 7


def test_a_lattice_without_words_is_an_empty_sentence(files: ModelFiles, client: Client) -> None:
    """P(</s> | <s>)."""
    draft = LatticeDraft("a")
    draft.arc(0, 1, "<eps>", -2.0)
    found = rescore(draft.finish(), client.utterance(), SEARCH)
    (end,) = files.oracle.score_sentence([])
    assert found.lattice.lm.tolist() == [LN_10 * float(end.log10_prob)]
    assert best_paths(found.lattice, 3).hypotheses == (
        Hypothesis((), -2.0, float(found.lattice.lm[0])),
    )


@pytest.mark.parametrize(
    "settings",
    [{"beam": 0.0}, {"beam": math.nan}, {"hypotheses": 0}, {"old_weight": math.inf}],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    """At once."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Search(**settings)  # type: ignore[arg-type]


def test_phrases_choose_the_path_that_has_them(client: Client, files: ModelFiles) -> None:
    """As every path scored one by one, its phrases counted; also with words that the model lacks.
    Other programs find the same path in what is written."""
    phrases = {"w0": 1.4, "w1 new": 6.0, "new w1": 4.5, "new": 3.0, "w0 w1 w0": -5.0}
    changed = 0
    for seed in range(30):
        lattice = random_lattice(seed, words=("w0", "w1", "new"))
        expected = sorted(
            (
                (score + LN_10 * Phrases(phrases).bound(files.oracle.vocabulary).of_words(words))
                for score, words in scored(lattice, files.oracle, SEARCH)
            ),
            reverse=True,
        )
        utterance = client.utterance(phrases=phrases)
        found = rescore(lattice, utterance, SEARCH)
        assert summed(found.lattice)[0][0] == pytest.approx(expected[0], rel=1e-9)
        plain = rescore(lattice, client.utterance(), SEARCH)
        assert plain.bonus is None and found.bonus is not None
        for path in all_paths(found.lattice):
            bonus = utterance.phrases.of_words(words_of(found.lattice, path))
            assert math.fsum(found.bonus[path]) == pytest.approx(LN_10 * bonus, abs=1e-9)
        best, before = (best_paths(one.lattice).hypotheses[0].words for one in (found, plain))
        changed += best != before
        pruned = rescore(lattice, utterance, Search(SEARCH.scales, beam=5.0, hypotheses=3))
        assert best_paths(pruned.lattice).hypotheses[0].words == best
    assert changed > 3


def test_phrases_choose_a_hypothesis_of_a_list(client: Client) -> None:
    """Outside of the scale of scores; with a scale of 0 there is nowhere to write them."""
    utterance = client.utterance(phrases={"new w1": 30.0})
    hypotheses = tuple(Hypothesis(("w0", word, "w1")) for word in ("w0", "new"))
    given = NbestList("a", hypotheses)
    plain, _ = rescore_nbest(given, client.utterance(), SEARCH)
    found, _ = rescore_nbest(given, utterance, SEARCH)
    before = {one.words: one.lm for one in plain.hypotheses}
    assert found.hypotheses[0].words[1] == "new"
    added = [one.lm - before[one.words] for one in found.hypotheses]
    assert added == pytest.approx([30.0 * LN_10 / SEARCH.scales.lm, 0.0])
    for ask, scale in product((rescore, rescore_nbest), (0.0, 1e-320)):
        with pytest.raises(QueryError, match="scale"):
            ask(random_lattice(1) if ask is rescore else given, utterance, Search(Scales(lm=scale)))


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
@pytest.mark.parametrize("name", ["acoustic", "lm", "word_penalty"])
def test_scales_that_are_no_numbers_are_refused(name: str, value: Any) -> None:
    """They would make every score one that is not a number, and a lattice an empty one."""
    with pytest.raises(ConfigError, match=name):
        Scales(**{name: value})
