"""Sentences that are drawn or given: their visits are those of the source's distributions."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from distill.oracle import Ngram
from distill.plain import PlainSource, a_source, by_definition, restricted_values, sentences_of
from dlm.distill.counts.count import NgramCounts, Visit
from dlm.distill.counts.sampling import GivenText, Sampling
from dlm.distill.counts.visits import visits_of
from dlm.distill.fitting.topology import closed, restricted
from dlm.distill.sampled import SampledSource, collect_sentences, count_source
from dlm.distill.sources.backoff import BackoffSource, exact_counts
from dlm.distill.sources.source import SourceReader
from dlm.errors import ConfigError, SourceError
from dlm.estimate.columns import ModelColumns
from dlm.ngram.vocab import Vocabulary

SENTENCES = 8_000  # drawn of a model


def arrays(counts: NgramCounts) -> list[np.ndarray]:
    """All of the counts."""
    return [*counts.ngrams, *counts.contexts]


def topology_of(seed: int, columns: ModelColumns, folder: Path, **options: int) -> ModelColumns:
    """Another model's n-grams, in the words of the first."""
    _, other, _ = a_source(seed, folder, **options)
    return closed(restricted(other, columns.vocabulary).model)


def the_text(lines: list[str]) -> GivenText:
    """Lines as a text, in blocks of 7."""
    blocks = ["\n".join(lines[i : i + 7]).encode() for i in range(0, len(lines), 7)]
    return GivenText("text", "0" * 64, lambda: blocks)


@pytest.mark.parametrize("order", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_drawn_sentences_are_those_of_the_model(tmp_path: Path, order: int) -> None:
    """How often each word follows each state, within seven standard deviations of its share."""
    plain, columns, _ = a_source(0, tmp_path, order=order)
    said = collect_sentences(SampledSource(columns), Sampling(SENTENCES, seed=0))
    words = [word.decode() for word in columns.vocabulary.words]
    follow: dict[Ngram, Counter[str]] = {}
    for sentence in sentences_of(said, columns.vocabulary.end_id):
        line = ["<s>", *(words[i] for i in sentence)]
        for at, word in enumerate([*line[1:], *(["</s>"] if len(line) <= 200 else [])], 1):
            history = tuple(line[max(0, at - order + 1) : at]) if order > 1 else ()
            follow.setdefault(history, Counter())[word] += 1
    assert len(list(sentences_of(said, columns.vocabulary.end_id))) == SENTENCES
    worst = 0.0
    for history, seen in follow.items():
        total = seen.total()
        for word, share in plain.after(history).items():
            spread = math.sqrt(max(total * share * (1 - share), 1.0))
            worst = max(worst, abs(seen[word] - total * share) / spread)
    assert worst < 7


@pytest.mark.parametrize("seed", range(2))
def test_a_walked_model_and_one_that_is_asked_for_distributions_count_alike(
    tmp_path: Path, seed: int
) -> None:
    """Along the same text: its contexts, the model's distributions; as the definition has it."""
    plain, columns, _ = a_source(seed, tmp_path)
    target = topology_of(seed + 100, columns, tmp_path)
    rng = random.Random(seed)
    lines = [" ".join(rng.choices("abcdefgh", k=rng.randint(0, 9))) for _ in range(30)]
    histories: dict[Ngram, float] = {}
    for line in lines:
        for length in range(len(line.split()) + 1):
            history = ("<s>", *line.split()[:length])
            histories[history] = histories.get(history, 0) + 1
    _, expected = by_definition(plain, target, histories)
    text = Sampling(text=the_text(lines))
    walked, walked_entropy = count_source(SampledSource(columns), target, text)
    source = SampledSource(PlainSource(plain))
    theirs = topology_of(seed + 100, ModelColumns(source.vocabulary, []), tmp_path)
    asked, entropy = count_source(source, theirs, text)
    assert walked.words == asked.words == sum(histories.values())
    for a, b in zip(arrays(walked), arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    rows = [
        theirs.rows_of(source.vocabulary.ids_of(columns.vocabulary.words)[order.ids])
        for order in target.orders
    ]
    for k, row in enumerate(rows):
        np.testing.assert_allclose(asked.ngrams[k][row], walked.ngrams[k], atol=1e-4)
        if k + 1 < target.order:
            np.testing.assert_array_equal(asked.contexts[k + 1][row], walked.contexts[k + 1])
    by_hand = sum(
        weight * -sum(p * math.log(p) for p in plain.after(history).values() if p > 0)
        for history, weight in histories.items()
    )
    assert walked_entropy == pytest.approx(by_hand, rel=1e-4)
    assert entropy == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("kind", ["walked", "asked", "its own samples"])
def test_counts_of_samples_come_near_the_expected_ones(tmp_path: Path, kind: str) -> None:
    """Of each kind of source; a context's counts by its visits are exact for a short history."""
    plain, columns, _ = a_source(4, tmp_path)
    samples = 50_000 if kind == "walked" else 1_000
    source = SampledSource(columns)
    if kind != "walked":
        own = PlainSource(plain)
        if kind == "its own samples":
            own.sample = lambda seed, n: _said(own, seed, n)  # type: ignore[attr-defined]
        source = SampledSource(own)
        columns = restricted_values(
            columns, ModelColumns(source.vocabulary, [])
        )  # the source's own ids
    whole = closed(columns)
    expected = exact_counts(BackoffSource.of(columns, whole))
    counts, entropy = count_source(source, whole, Sampling(samples, seed=3))
    tolerance = 8 / math.sqrt(samples)
    for a, b in zip(arrays(counts.scaled(1 / samples)), arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1.0, float(b.max())))
    again, same = count_source(source, whole, Sampling(samples, seed=3))
    assert same == entropy
    for a, b in zip(arrays(counts), arrays(again), strict=True):
        np.testing.assert_array_equal(a, b)
    other, _ = count_source(source, whole, Sampling(samples, seed=4))
    assert other.words != counts.words


def _said(source: PlainSource, seed: int, n: int) -> list[list[int]]:
    """Sentences of a source, in its own ids and without marks."""
    rng = np.random.default_rng(seed)
    end, out = source.vocabulary.index("</s>"), []
    for _ in range(n):
        line = [source.vocabulary.index("<s>")]
        while len(line) < 60:
            given = np.exp(source.log_probs(np.array([line]), np.array([len(line)]))[0])
            word = int(rng.choice(len(given), p=given / given.sum()))
            if word == end:
                break
            line.append(word)
        out.append(line[1:])
    return out


def test_a_source_may_make_its_visits_itself(tmp_path: Path) -> None:
    """The counts are those of its visits; along a text it cannot be led."""
    plain, _, _ = a_source(3, tmp_path)
    source = PlainSource(plain)
    reader = SampledSource(source)
    target = topology_of(3, ModelColumns(reader.vocabulary, []), tmp_path)
    text = the_text(["a b c", "d"])
    (block,) = visits_of(SourceReader(source, "it"), Sampling(text=text))
    visits = list(block)
    expected, entropy = count_source(reader, target, Sampling(text=text))

    class Maker:
        vocabulary = reader.vocabulary

        def visits(self, samples: int, seed: int) -> Iterator[Visit]:
            assert samples == 5
            return iter(visits)

    made = SampledSource(Maker(), "mine")  # type: ignore[arg-type]
    counts, same = count_source(made, target, Sampling(5), folder=tmp_path)
    assert same == entropy
    for a, b in zip(arrays(counts), arrays(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="mine makes its own sentences"):
        count_source(made, target, Sampling(text=text))
    with pytest.raises(ConfigError, match="mine yields visits, not sentences"):
        collect_sentences(made, Sampling(5))


def test_what_cannot_be_sampled_is_refused(tmp_path: Path) -> None:
    """No sentences, both kinds, parts that are none, words without a place, bad samples."""
    plain, _, _ = a_source(6, tmp_path, unk=False)
    text = the_text(["a b", "a z"])
    for options, said in (
        ({}, "0 samples .*at least 1"),
        ({"samples": 5, "text": text}, "both samples and a text"),
        ({"samples": 5, "part": (3, 2)}, "part 3/2 .*1/2 to 2/2"),
        ({"samples": 1, "part": (2, 2)}, "1 samples .* at least 1 per part"),
        ({"samples": 5, "seed": -1}, "seed .*-1"),
    ):
        with pytest.raises(ConfigError, match=said):
            Sampling(**options)  # type: ignore[arg-type]
    own = PlainSource(plain)
    own.vocabulary = [word for word in own.vocabulary if word != "<unk>"]
    source = SampledSource(own, "mine")
    target = topology_of(6, ModelColumns(source.vocabulary, []), tmp_path, unk=False)
    with pytest.raises(ConfigError, match="text has words that mine does not know"):
        count_source(source, target, Sampling(text=text))
    for sentences, said in (
        ([[0]], "with end_id"),
        ([[99]], "ids from 99 to 99"),
        ([], "0 sentences"),
    ):
        own.sample = lambda seed, n, s=sentences: s  # type: ignore[attr-defined]
        with pytest.raises(SourceError, match=said):
            count_source(source, target, Sampling(1))
    _, without_end, _ = a_source(7, tmp_path)
    words = [w if w != b"</s>" else b"x" for w in without_end.vocabulary.words]
    endless = ModelColumns(Vocabulary(words, unk_in_model=True), without_end.orders)
    with pytest.raises(ConfigError, match="no </s>"):
        SampledSource(endless)
