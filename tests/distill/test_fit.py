"""Counting and the KL step, beside their definitions."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from distill import oracle
from distill.oracle import Ngram
from distill.plain import (
    WORDS,
    Plain,
    a_source,
    by_definition,
    ngrams_of,
    restricted_values,
    sampled,
    sampled_counts,
)
from dlm.distill.counts.count import (
    NgramCounts,
    Visit,
    ln_likelihood,
    local_counts,
)
from dlm.distill.counts.sampling import GivenText, Sampling
from dlm.distill.fitting import fit as fit_module
from dlm.distill.fitting.fit import fit
from dlm.distill.fitting.mixture import merge_by_counts
from dlm.distill.fitting.topology import closed, restricted, united
from dlm.distill.sampled import distill_samples
from dlm.distill.sources.backoff import BackoffSource, distill_backoff, exact_counts
from dlm.errors import ConfigError, DlmError, SourceError
from dlm.estimate.columns import ModelColumns
from dlm.ngram.backoff import DictModel
from dlm.ngram.vocab import Vocabulary
from estimate.merge_models import read, worst_sum
from models import PlainModel


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_the_definition_and_add_up(tmp_path: Path, seed: int) -> None:
    """On the topology of another model, which lacks suffixes before it is closed."""
    source, columns, _ = a_source(seed, tmp_path)
    _, other, _ = a_source(seed + 100, tmp_path)
    topology = closed(restricted(other, columns.vocabulary).model)
    visits = sampled(source, 20, seed)
    expected, counts = by_definition(source, topology, visits)
    local = local_counts(topology, counts)
    for k, order in enumerate(ngrams_of(topology)):
        np.testing.assert_allclose(
            local.found[k], [expected.found[ngram] for ngram in order], atol=1e-12
        )
        if k + 1 < topology.order:
            back = [expected.backed[ngram] for ngram in order]
            np.testing.assert_allclose(local.backed[k + 1], back, atol=1e-12)
    # What reaches a context is found there or goes on; section 9 of no paper, plain conservation.
    for k in range(topology.order - 1):
        columns_k = topology.orders[k]
        arrives = local.direct[k + 1].copy()
        if k + 2 < topology.order:
            np.add.at(arrives, topology.orders[k + 1].suffix, local.backed[k + 2])
        leaves = local.backed[k + 1] + np.bincount(
            topology.orders[k + 1].prefix, local.found[k + 1], len(columns_k)
        )
        np.testing.assert_allclose(leaves, arrives, atol=1e-12)
    halves = [dict(list(visits.items())[i::2]) for i in range(2)]
    parts = [by_definition(source, topology, half)[1] for half in halves]
    both = parts[0] + parts[1]
    for a, b in zip(
        [*both.ngrams, *both.contexts], [*counts.ngrams, *counts.contexts], strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-12)


def visits_of(
    source: Plain, columns: ModelColumns, sentences: list[Ngram], batch: int
) -> Iterator[Visit]:
    """What a source that says these sentences would tell: `batch` at a time, a place each."""
    words = [word.decode() for word in columns.vocabulary.words]
    waiting = list(sentences)
    under_way: dict[int, list[str]] = {}
    histories: dict[int, list[str]] = {}
    while True:
        for place in range(batch):
            if place not in under_way and waiting:
                under_way[place] = ["<s>", *waiting.pop(0)]
        if not under_way:
            return
        places = sorted(under_way)
        said = {place: under_way[place].pop(0) for place in places}
        given = []
        for place in places:
            so_far = [] if said[place] == "<s>" else histories[place]
            histories[place] = [*so_far, said[place]]
            after = source.after(tuple(histories[place]))
            given.append([after.get(word, 0.0) for word in words])
        yield Visit(
            columns.vocabulary.ids_of([said[place].encode() for place in places]),
            np.array(places),
            np.array(given, np.float32),
            np.zeros(len(places), np.float32),
        )
        for place in places:
            if not under_way[place]:
                del under_way[place]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("order", [1, 2, 4])
def test_sampled_counts_are_those_of_the_definition(tmp_path: Path, seed: int, order: int) -> None:
    """Sentences of many lengths in one batch, whose places are taken up again."""
    source, columns, _ = a_source(seed, tmp_path)
    _, other, _ = a_source(seed + 100, tmp_path, order=order)
    topology = closed(restricted(other, columns.vocabulary).model)
    rng = random.Random(seed)
    sentences = [tuple(rng.choices(WORDS, k=rng.randint(0, 6))) for _ in range(12)]
    histories: dict[Ngram, float] = {}
    for sentence in sentences:
        for length in range(len(sentence) + 1):
            history = ("<s>", *sentence[:length])
            histories[history] = histories.get(history, 0) + 1
    _, expected = by_definition(source, topology, histories)
    counts = sampled_counts(topology, visits_of(source, columns, sentences, 5))
    assert counts.words == sum(histories.values())
    for a, b in zip(
        counts.ngrams + counts.contexts, expected.ngrams + expected.contexts, strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_exact_counts_are_those_of_the_linear_system(tmp_path: Path, seed: int, order: int) -> None:
    """Of a source on the union of its own n-grams and another model's."""
    source, columns, _ = a_source(seed, tmp_path, order=order)
    _, other, _ = a_source(seed + 100, tmp_path)
    other = restricted(other, columns.vocabulary).model
    topology = united([columns, other])
    counts = exact_counts(BackoffSource.of(columns, topology))
    # The oracle makes each distribution sum to 1, which those of a file do within rounding.
    names = ngrams_of(topology)
    states = [(), *(n for names_k in names[:-1] for n in names_k if n[-1] != "</s>")]
    visits = oracle.expected_visits(source.after, states, topology.order)
    _, expected = by_definition(source, topology, visits)
    for k in range(topology.order):
        np.testing.assert_allclose(counts.ngrams[k], expected.ngrams[k], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(counts.contexts[k], expected.contexts[k], rtol=1e-4, atol=1e-6)
    own = counts.of(topology, other)
    rows = [topology.rows_of(c.ids) for c in other.orders]
    for k, row in enumerate(rows):
        np.testing.assert_array_equal(own.ngrams[k], counts.ngrams[k][row])


def test_a_prior_keeps_words_that_only_longer_contexts_saw(tmp_path: Path) -> None:
    """Few samples leave probabilities of 0 without it, and none with it; contexts that were never
    visited take over what they back off to."""
    source, columns, _ = a_source(1, tmp_path)
    topology = closed(columns)
    _, counts = by_definition(source, topology, sampled(source, 2, 5))
    bare, careful = fit(topology, counts), fit(topology, counts, prior=0.01)
    assert bare.unvisited == careful.unvisited > 0
    predicted = np.flatnonzero(topology.orders[0].ids[:, 0] != columns.vocabulary.begin_id)
    for k, columns_k in enumerate(careful.model.orders):
        rows = predicted if k == 0 else np.arange(len(columns_k))
        assert (columns_k.log10_prob[rows] > -90).all()
    assert worst_sum(_plain(careful.model, tmp_path)) < 3e-6


def _plain(model: ModelColumns, folder: Path) -> DictModel:
    model.write(folder / "again.arpa")
    return DictModel.from_arpa(folder / "again.arpa")


def test_a_mixture_of_counts_is_the_fit_of_the_mixture(tmp_path: Path) -> None:
    """Nearer to both sources together than a linear mixture with the same weights (merging)."""
    _, one, _ = a_source(1, tmp_path, missing_suffixes=False)
    _, two, _ = a_source(2, tmp_path, missing_suffixes=False)
    two = restricted_values(two, one)
    topology = united([one, two])
    sources = [BackoffSource.of(model, topology) for model in (one, two)]
    counts = [exact_counts(source) for source in sources]
    mixed = counts[0].scaled(0.3) + counts[1].scaled(0.7)
    found = fit(topology, mixed, tolerance=1e-12)
    local = local_counts(topology, mixed)
    log10_prob = [
        np.log10(np.maximum(0.3 * a + 0.7 * b, 1e-99))
        for a, b in zip(sources[0].prob, sources[1].prob, strict=True)
    ]
    weights = []
    for k in range(1, topology.order):
        longer, size = topology.orders[k], len(topology.orders[k - 1])
        left = 1 - np.bincount(longer.prefix, 10.0 ** log10_prob[k], size)
        below = 1 - np.bincount(longer.prefix, 10.0 ** log10_prob[k - 1][longer.suffix], size)
        weights.append(np.log10(np.maximum(left, 1e-99) / np.maximum(below, 1e-99)))
    assert found.ln_likelihood > ln_likelihood(local, log10_prob, weights)


def test_what_cannot_be_distilled_is_refused_by_name(tmp_path: Path) -> None:
    """No words in common; sentences that never end; a model that was filtered; no counts; a prior
    below nothing."""
    _, columns, _ = a_source(1, tmp_path)
    _, other, _ = a_source(2, tmp_path)
    some = restricted(other, Vocabulary([b"<unk>", b"<s>", b"</s>", b"a", b"b"], unk_in_model=True))
    assert some.foreign_words == len(WORDS) - 2
    left = sum(map(len, some.model.orders[1:]))
    assert 0 < left == sum(map(len, other.orders[1:])) - some.dropped
    with pytest.raises(ConfigError, match="none of the topology's 8 words"):
        restricted(other, Vocabulary([b"<unk>", b"x", b"y"], unk_in_model=True))
    foreign = PlainModel(2, {
        ("<s>",): (-99.0, 0.0), ("</s>",): (-1.0, None), ("a",): (-1.0, 0.0), ("b",): (-1.0, 0.0),
        ("b", "b"): (-1.0, None),
    })  # fmt: skip
    strange, _ = read(foreign, tmp_path / "foreign.arpa")
    with pytest.raises(ConfigError, match="has a word that the source does not know"):
        restricted(strange, Vocabulary([b"<unk>", b"<s>", b"</s>", b"a"], unk_in_model=True))
    marks = {("<s>",): (-99.0, 0.0), ("</s>",): (0.0, None), ("<s>", "</s>"): (0.0, None)}
    nothing, _ = read(PlainModel(2, marks), tmp_path / "nothing.arpa")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the topology is empty"):
        restricted(nothing, columns.vocabulary)
    endless = PlainModel(2, {
        ("<s>",): (-99.0, 0.0), ("</s>",): (-99.0, None), ("a",): (0.0, 0.0),
        ("<s>", "a"): (0.0, None), ("a", "a"): (0.0, None),
    })  # fmt: skip
    forever, _ = read(endless, tmp_path / "endless.arpa")
    with pytest.raises(DlmError, match="do not end"):
        exact_counts(BackoffSource.of(forever, closed(forever)))
    half = PlainModel(2, {
        ("<s>",): (-99.0, 0.0), ("</s>",): (-0.5, None), ("a",): (-0.5, 0.0),
        ("a", "a"): (-0.5, None),
    })  # fmt: skip
    filtered, _ = read(half, tmp_path / "half.arpa")
    for ask in (
        lambda: distill_backoff(filtered, filtered),
        lambda: distill_samples(filtered, filtered, samples=9),
        lambda: merge_by_counts([columns, filtered], [0.5, 0.5]),
    ):
        with pytest.raises(SourceError, match=r"sum to 0.6.*dlm filter --renormalise"):
            ask()
    nothing = NgramCounts([np.zeros(len(columns.orders[0]))], [np.zeros(1)])
    with pytest.raises(ConfigError, match="no counts"):
        fit(columns, nothing)
    some = NgramCounts(nothing.ngrams, [np.ones(1)])
    with pytest.raises(ConfigError, match="prior"):
        fit(columns, some, prior=-1)


def test_a_topology_that_lists_all_that_is_said_leaves_rounding_alone(tmp_path: Path) -> None:
    """float32 distributions do not sum to 1 exactly; what is left is no word's."""
    source, columns, _ = a_source(2, tmp_path, unk=False)
    words = np.arange(len(columns.vocabulary), dtype=np.uint32)
    listed = words[(words != 0) & (words != columns.vocabulary.begin_id)]
    said = listed[listed != columns.vocabulary.end_id][:-2]  # others are said after one word
    pairs = np.array([(a, b) for a in (columns.vocabulary.begin_id, *said) for b in listed])
    sections = [
        (ids.astype(np.uint32), *np.zeros((2, len(ids)), np.float32))
        for ids in (words[:, None], pairs)
    ]
    topology = closed(ModelColumns.of(columns.vocabulary, sections))
    _, counts = by_definition(source, topology, sampled(source, 50, 1))
    for context in counts.contexts[1:]:
        context += 1e-7 * (context > 0)
    for prior in (0.0, 0.01):
        found = fit(topology, counts, prior=prior)
        assert found.residual < 1e-6
        assert worst_sum(_plain(found.model, tmp_path)) < 3e-6


class Rows:
    """A source of bigrams as a user's own object: what each word gives to the next."""

    vocabulary = ("</s>", "<unk>", "a", "b", "c", "<s>")

    def __init__(self, unk: float) -> None:
        rng = np.random.default_rng(0)
        self.after: dict[str, dict[str, float]] = {}
        for word in ("</s>", "<s>", "a", "b", "c"):
            given = (rng.dirichlet(np.ones(4)) * (1 - unk)).tolist()
            self.after[word] = dict(
                zip(("</s>", "a", "b", "c", "<unk>"), [*given, unk], strict=True)
            )

    def log_probs(self, prefixes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """As `Source` has it."""
        last = [self.vocabulary[p[n - 1]] for p, n in zip(prefixes, lengths, strict=True)]
        with np.errstate(divide="ignore"):
            return np.log([[self.after[w].get(x, 0.0) for x in self.vocabulary] for w in last])

    def model(self) -> PlainModel:
        """The same, with the four digits of a file."""
        ngrams: dict[Ngram, tuple[float, float | None]] = {("<s>",): (-99.0, 0.0)}
        for word, prob in self.after["</s>"].items():
            ngrams[word,] = round(math.log10(max(prob, 1e-99)), 4), 0.0
        for word in ("<s>", "a", "b", "c"):
            for after, prob in self.after[word].items():
                if after != "<unk>":
                    ngrams[word, after] = round(math.log10(prob), 4), None
        return PlainModel(2, ngrams)


@pytest.mark.promise("nearest")
@pytest.mark.parametrize("kind", ["asked", "walked"])
@pytest.mark.parametrize("unk", [0.0, 1e-12])
@pytest.mark.parametrize("prior", [None, 0.0])
@pytest.mark.parametrize("closes", ["some", "all"])
def test_a_word_of_almost_no_probability_leaves_the_others_at_the_optimum(
    tmp_path: Path, kind: str, unk: float, prior: float | None, closes: str
) -> None:
    """Contexts that list all words but that one back off by rounding alone: of float32 rows, or of
    a file's digits. The optimum is that of all histories, enumerated, by the paper's iteration."""
    rows, words = Rows(unk), ("</s>", "a", "b", "c")
    listed = dict.fromkeys(("<s>", "a", "b", "c"), words)
    if closes == "some":
        listed |= {"b": ("</s>", "a"), "c": ("b",)}
    shape: dict[Ngram, tuple[float, float | None]] = {
        (w,): (-1.0, 0.0) for w in ("<s>", "<unk>", *words)
    }
    shape |= {(h, w): (-1.0, None) for h, own in listed.items() for w in own}
    topology, _ = read(PlainModel(2, shape), tmp_path / "shape.arpa")
    source, _ = read(rows.model(), tmp_path / "source.arpa")
    lines = [line for length in range(7) for line in product("abc", repeat=length)]
    text = "\n".join(" ".join(line) for line in lines).encode()
    made = distill_samples(
        rows if kind == "asked" else source,
        topology,
        sampling=Sampling(text=GivenText("text", "0" * 64, lambda: [text])),
        prior=prior,
    )
    found = made.fit
    assert found.steps < 300
    assert 0 <= found.excess < 1e-4
    assert found.rounding < 1e-9

    if kind == "walked":
        ngrams = rows.model().ngrams
        rows.after = {h: {w: 10 ** ngrams[h, w][0] for w in words} for h in listed}
    visits = Counter(word for line in lines for word in ("<s>", *line))
    counts, given = oracle.Counts(set(shape), 2), {}
    for last, visited in visits.items():
        total = math.fsum(rows.after[last][w] for w in words)
        given[last] = {w: rows.after[last][w] / total for w in words}
        counts.add((last,), given[last], visited)
    prob, left = oracle.difference_of_convex(counts, words)

    def best(last: str, word: str) -> float:
        if (last, word) in shape:
            return prob[last, word]
        rest = 1 - sum(prob[w,] for w in listed[last])
        return float(left[last,] / rest * prob[word,])

    lost = -sum(
        visited * p * math.log(best(last, word))
        for last, visited in visits.items()
        for word, p in given[last].items()
    )
    assert found.perplexity == pytest.approx(math.exp(lost / visits.total()), rel=1e-5)


@pytest.mark.promise("nearest")
@pytest.mark.parametrize("seed", range(2))
def test_the_best_model_gains_at_most_the_excess(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the iteration is stopped."""
    source, columns, _ = a_source(seed, tmp_path)
    _, other, _ = a_source(seed + 100, tmp_path)
    topology = closed(restricted(other, columns.vocabulary).model)
    _, counts = by_definition(source, topology, sampled(source, 100, seed))
    best = fit(topology, counts, tolerance=1e-13)
    assert best.excess < 1e-8
    for steps in (0, 1, 5, 30):
        monkeypatch.setattr(fit_module, "MOST_STEPS", steps)
        found = fit(topology, counts, tolerance=1e-13)
        missed = (best.ln_likelihood - found.ln_likelihood) / found.words
        assert -1e-9 < missed <= found.excess + 1e-9


def test_n_grams_of_an_unknown_word_that_the_source_never_says_are_left_out(
    tmp_path: Path,
) -> None:
    """A source without <unk> has no n-grams of it."""
    _, columns, _ = a_source(1, tmp_path, unk=False)
    _, other, _ = a_source(2, tmp_path)
    with_unk = sum(int((o.ids == 0).any(axis=1).sum()) for o in other.orders[1:])
    assert with_unk > 0
    part = restricted(other, columns.vocabulary)
    assert (part.dropped, part.foreign_words) == (with_unk, 1)
    assert not any((o.ids == 0).any() for o in closed(part.model).orders[1:])
