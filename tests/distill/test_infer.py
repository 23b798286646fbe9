"""Topologies that a source infers itself, and with another model."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from distill.plain import a_source, restricted_values, sentences_of
from dlm.distill.counts.sampling import GivenText, Sampling
from dlm.distill.fitting.infer import infer_topology, interpolate
from dlm.distill.fitting.topology import closed, united
from dlm.distill.sampled import Inference, SampledSource, collect_sentences, distill_inferred
from dlm.distill.sources.backoff import BackoffSource, distill_backoff, exact_counts
from dlm.errors import ConfigError
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.ngram.vocab import Vocabulary


def names(model: ModelColumns) -> set[tuple[bytes, ...]]:
    """All n-grams, spelled."""
    words = model.vocabulary.words
    return {tuple(words[i] for i in row) for order in model.orders for row in order.ids}


def is_closed(model: ModelColumns) -> bool:
    """Whether each prefix and suffix is an n-gram."""
    return all(
        not (model.rows_of(part) == MISSING).any()
        for columns in model.orders[1:]
        for part in (columns.ids[:, :-1].copy(), columns.ids[:, 1:].copy())
    )


@pytest.mark.parametrize(
    "order", [1, 3, *(pytest.param(order, marks=pytest.mark.slow) for order in (2, 5))]
)
def test_without_a_size_it_has_all_that_was_said(tmp_path: Path, order: int) -> None:
    """Sentence marks and <unk> among it, and no more but all words."""
    _, columns, _ = a_source(1, tmp_path)
    vocabulary = columns.vocabulary
    said = collect_sentences(SampledSource(columns), Sampling(200, seed=1))
    wanted = {(word,) for word in vocabulary.words}
    for ids in sentences_of(said, vocabulary.end_id):
        line = [b"<s>", *(vocabulary.words[i] for i in ids), b"</s>"]
        for k in range(1, order + 1):
            wanted |= {tuple(line[i : i + k]) for i in range(len(line) - k + 1)}
    assert any(b"<unk>" in ngram for ngram in wanted if len(ngram) > 1) == (order > 1)
    found = infer_topology(said, vocabulary, order, scratch=tmp_path)
    assert names(found) == wanted
    assert found.vocabulary == vocabulary
    assert is_closed(found)
    assert not list(tmp_path.glob(".inferred*"))


@pytest.mark.slow
def test_of_a_size_it_has_what_is_said_often(tmp_path: Path) -> None:
    """As many as asked for, the more frequent ones on average."""
    _, columns, _ = a_source(1, tmp_path)
    said = collect_sentences(SampledSource(columns), Sampling(2000, seed=1))
    everything = infer_topology(said, columns.vocabulary, 3)
    ids = [line.tolist() for line in sentences_of(said, columns.vocabulary.end_id)]
    seen: Counter[tuple[int, ...]] = Counter()
    for line in ids:
        seen.update(pairwise(line))
    sizes = (60, 100, sum(everything.counts))
    rates = []
    for size in sizes:
        found = infer_topology(said, columns.vocabulary, 3, ngrams=size)
        assert sum(found.counts) == size
        assert is_closed(found)
        assert names(found) <= names(everything)
        pairs = [tuple(row) for row in found.orders[1].ids.tolist()]
        rates.append(np.mean([seen[pair] for pair in pairs]))
    assert rates[0] > rates[1] > rates[2]


def test_words_of_any_bytes_are_counted(tmp_path: Path) -> None:
    """No text is written that could not be read again; a number is a word like others."""
    odd = [b"<unk>", b"<s>", b"</s>", b"\xff\xfe", "\u00a0".encode(), b"7", b"<UNKNOWN>"]
    vocabulary = Vocabulary(odd, unk_in_model=True)
    said = np.array([3, 4, 5, 2, 6, 0, 3, 2, 2, 5, 5, 2], np.uint32)
    found = names(infer_topology(said, vocabulary, 2, scratch=tmp_path))
    assert {(b"\xff\xfe", odd[4]), (odd[4], b"7"), (b"<unk>", b"\xff\xfe"), (b"7", b"7")} < found
    assert (b"<s>", b"</s>") in found
    for options, said_of in (
        ({"order": 0}, "expected 1 to 5"),
        ({"order": 6}, "expected 1 to 5"),
        ({"order": 2, "ngrams": 6}, "the source alone has 7 words"),
    ):
        with pytest.raises(ConfigError, match=said_of):
            infer_topology(said, vocabulary, **options)  # type: ignore[arg-type]


def test_another_models_n_grams_supplement_them(tmp_path: Path) -> None:
    """Both are approximated (A_e, A_i) and interpolated (A_m); on the n-grams of that, made anew
    (A_r), it is nearer. All are of the same counts."""
    _, columns, _ = a_source(4, tmp_path, contexts=0.9)
    _, other, _ = a_source(5, tmp_path, contexts=0.5)
    source, sampling = SampledSource(columns), Sampling(8000, seed=1)
    inner = distill_inferred(source, Inference(3, 70), sampling)
    outer = distill_backoff(columns, other)
    mixed, again = (
        distill_inferred(source, Inference(3, 90, interpolated), sampling, external=other)
        for interpolated in (True, False)
    )
    assert names(mixed.fit.model) == names(again.fit.model)
    assert sum(again.fit.model.counts) == 90
    assert is_closed(again.fit.model)
    assert again.relative_entropy < mixed.relative_entropy
    assert again.relative_entropy < inner.relative_entropy
    whole = distill_inferred(source, Inference(3), sampling, external=other)
    assert names(whole.fit.model) > names(outer.fit.model)
    assert whole.relative_entropy < outer.relative_entropy
    with_text = Sampling(text=GivenText("text", "0", lambda: [b"a"]))
    for wrong in (with_text, Sampling(9, part=(1, 2))):
        with pytest.raises(ConfigError, match="all samples in one process"):
            distill_inferred(source, Inference(), wrong)


def test_what_cannot_be_inferred_is_refused_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling takes hours; a wrong order, size or topology is known at once."""
    _, columns, _ = a_source(4, tmp_path)
    _, foreign, _ = a_source(5, tmp_path, words="xyz")
    source = SampledSource(columns)
    monkeypatch.setattr(source, "sentences", lambda: pytest.fail("sampled"))
    for inference, external, said in (
        (Inference(6), None, "order 6"),
        (Inference(3, 2), None, "request at least that many"),
        (Inference(3), foreign, "none of the topology's 3 words"),
    ):
        with pytest.raises(ConfigError, match=said):
            distill_inferred(source, inference, Sampling(9), external=external)


def test_an_interpolation_lies_between_its_models(tmp_path: Path) -> None:
    """Each n-gram of either has the mean of both probabilities."""
    _, one, _ = a_source(6, tmp_path, missing_suffixes=False)
    _, two, _ = a_source(7, tmp_path, missing_suffixes=False)
    two = restricted_values(two, one)
    mixed = interpolate([one, two])
    union = united([one, two])
    assert names(mixed) == names(union)
    sources = [BackoffSource.of(model, closed(mixed)) for model in (one, two)]
    for k, columns in enumerate(mixed.orders):
        mean = (sources[0].prob[k] + sources[1].prob[k]) / 2
        rows = columns.ids[:, -1] != one.vocabulary.begin_id
        np.testing.assert_allclose(10.0 ** columns.log10_prob[rows], mean[rows], rtol=1e-4)
    assert exact_counts(BackoffSource.of(mixed, closed(mixed))).words > 0


def test_a_process_that_is_large_already_infers_as_well(tmp_path: Path) -> None:
    """Memory is that of estimation: a network, and what compiled it, may take more."""
    held = np.ones((320 << 20) // 8)
    _, columns, _ = a_source(1, tmp_path)
    said = collect_sentences(SampledSource(columns), Sampling(200, seed=1))
    found = infer_topology(said, columns.vocabulary, 2, scratch=tmp_path, memory_bytes=1)
    assert found.order == 2
    assert held.sum() == len(held)
