"""Spellings of an uncased source's words: shares, visits, counts, and what stays to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from distill import oracle
from distill.oracle import Ngram
from distill.plain import Plain, a_source, ngrams_of, sampled_counts
from distill.test_fit import visits_of
from dlm.distill.counts.count import Visit, local_counts
from dlm.distill.fitting.topology import closed, restricted
from dlm.distill.sources.capitalize import CasedSource, Spellings, lower
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.ngram.vocab import Vocabulary
from dlm.record.provenance import Provenance
from estimate.merge_models import normalised_model, read

CASED = ["a", "A", "b", "B", "BB", "c", "d", "D", "E", "f", "xyz", "g"]
BEGIN = "<s>"


@pytest.fixture
def capital(tmp_path: Path) -> tuple[Plain, ModelColumns]:
    """A cased model for the oracle and in columns: words with two spellings, with one, which may
    be the other case, and words that the source lacks; the source's h it lacks."""
    plain = normalised_model(11, CASED, order=3)
    return Plain(plain), read(plain, tmp_path / "cap.arpa")[0]


def spelled(vocabulary: Vocabulary, words: Ngram) -> list[int]:
    return vocabulary.ids_of([word.encode() for word in words]).tolist()


def test_a_words_share_is_split_as_the_cased_model_says(
    tmp_path: Path, capital: tuple[Plain, ModelColumns]
) -> None:
    """By the formula of section 5, after histories of all lengths; what is split sums to what the
    word had; what has one spelling keeps its bits, whatever the model thinks of it."""
    model, columns = capital
    _, uncased, _ = a_source(1, tmp_path)
    known = uncased.vocabulary
    spellings = Spellings(known, columns)
    cased = spellings.vocabulary
    texts = [word.decode() for word in cased.words]
    assert set(texts) == {
        "<s>", "</s>", "<unk>", "a", "A", "b", "B", "c", "d", "D", "E", "f", "g", "h",
    }  # fmt: skip
    histories: list[Ngram] = [
        ("<s>",), ("<s>", "A"), ("b", "A"), ("B", "c"), ("d", "E"), ("f", "h"),
        ("<unk>", "a"), ("a",),
    ]  # fmt: skip
    table = np.full((len(histories), 2), 0xFFFFFFFF, np.uint32)
    for row, words in enumerate(histories):
        table[row, 2 - len(words) :] = spelled(cased, words)
    rng = np.random.default_rng(0)
    given = rng.dirichlet(np.full(len(known), 0.3), len(histories)).astype(np.float32)
    entropy = rng.random(len(histories)).astype(np.float32)
    out, more = spellings.split(table, given, entropy)
    for row, words in enumerate(histories):
        among = {
            u: [v for v in texts if lower(v.encode()).decode() == u]
            for u in (w.decode() for w in known.words)
        }
        extra = 0.0
        for word, variants in among.items():
            had = given[row, known.id_of(word)]
            if len(variants) == 1:
                assert out[row, cased.id_of(variants[0])] == had
                continue
            total = sum(model.prob(words, v) for v in variants)
            for variant in variants:
                share = model.prob(words, variant) / total
                assert out[row, cased.id_of(variant)] == pytest.approx(had * share, rel=1e-5)
                extra -= had * share * np.log(share)
        assert more[row] == pytest.approx(entropy[row] + extra, rel=1e-5)
    np.testing.assert_allclose(out.sum(axis=1), given.sum(axis=1), rtol=1e-5)
    # The same shares, asked for some words alone.
    rows, words_asked = np.array([1, 1, 3]), spelled(known, ("a", "c", "b"))
    places, found, share = spellings.split_words(table, rows, np.array(words_asked, np.uint32))
    assert places.tolist() == [0, 0, 1, 2, 2]
    for place, word, part in zip(places, found, share, strict=True):
        whole = given[rows[place], words_asked[place]]
        assert out[rows[place], word] == pytest.approx(whole * part, rel=1e-5)


def test_spellings_are_drawn_as_often_as_their_shares(
    tmp_path: Path, capital: tuple[Plain, ModelColumns]
) -> None:
    """Of words with one spelling that one, marks themselves."""
    _, columns = capital
    known = a_source(1, tmp_path)[1].vocabulary
    spellings = Spellings(known, columns)
    words = np.array(spelled(known, ("a", "e", "<s>", "a")) * 5000, np.uint32)
    history = np.array([spelled(spellings.vocabulary, ("<s>", "b"))], np.uint32)
    drawn = spellings.draw(
        np.repeat(history, len(words), axis=0), words, np.random.default_rng(3)
    ).reshape(-1, 4)
    assert (drawn[:, 1] == spellings.vocabulary.id_of("E")).all()
    assert (drawn[:, 2] == spellings.vocabulary.begin_id).all()
    _, found, share = spellings.split_words(history, np.zeros(1, np.int64), words[:1])
    for word, part in zip(found, share, strict=True):
        seen = (drawn[:, [0, 3]] == word).mean()
        assert seen == pytest.approx(part, abs=5 * np.sqrt(part * (1 - part) / 10_000))
    values = np.arange(len(known), dtype=np.float64)
    spread = spellings.spread(values)
    np.testing.assert_allclose(np.bincount(spellings.uncased_of, spread), values)


class Told:
    """A source that says given sentences."""

    def __init__(self, source: Plain, columns: ModelColumns, sentences: list[Ngram]) -> None:
        self._told = source, columns, sentences
        self.vocabulary = columns.vocabulary
        self.record = Provenance.none("a test")

    def visits(self, samples: int, seed: int) -> Iterator[Visit]:
        """All of them."""
        assert samples > 0 and seed >= 0
        return visits_of(*self._told, 5)


def sentences(seed: int, count: int = 20) -> list[Ngram]:
    """Of the source's words, of many lengths."""
    rng = random.Random(seed)
    return [tuple(rng.choices("abcdefgh", k=rng.randint(0, 6))) for _ in range(count)]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_counts_are_those_of_the_definition(
    tmp_path: Path, capital: tuple[Plain, ModelColumns], seed: int
) -> None:
    """States follow the drawn spellings; where a context lists all spellings of a word, their
    counts are those of the word."""
    model, columns = capital
    source, uncased, _ = a_source(seed, tmp_path)
    cased = CasedSource(Told(source, uncased, sentences(seed)), columns)
    texts = [word.decode() for word in cased.vocabulary.words]
    topology = closed(restricted(columns, cased.vocabulary).model)
    counts = sampled_counts(topology, cased.visits(1, seed))
    names = ngrams_of(topology)
    plain = oracle.Counts({ngram for order in names for ngram in order}, topology.order)
    said: dict[int, list[str]] = {}
    for visit in cased.visits(1, seed):
        for place, word in zip(visit.places.tolist(), visit.words.tolist(), strict=True):
            history = [] if texts[word] == BEGIN else said[place]
            said[place] = [*history, texts[word]]
            now = tuple(said[place])
            given = source.after(tuple(w if w == BEGIN else w.lower() for w in now))
            spread = {}
            for u, prob in given.items():
                variants = [v for v in texts if lower(v.encode()).decode() == u]
                if len(variants) == 1:
                    spread[variants[0]] = prob
                    continue
                total = sum(model.prob(now, v) for v in variants)
                spread |= {v: prob * model.prob(now, v) / total for v in variants}
            plain.add(now, spread)
    local = local_counts(topology, counts)
    for k, order in enumerate(names):
        np.testing.assert_allclose(local.found[k], [plain.found[n] for n in order], atol=2e-5)
        if k + 1 < topology.order:
            back = [plain.backed[n] for n in order]
            np.testing.assert_allclose(local.backed[k + 1], back, atol=2e-5)
    bare = sampled_counts(
        closed(restricted(uncased, uncased.vocabulary).model),
        visits_of(source, uncased, sentences(seed), 5),
    )
    uncased_ids = cased.spellings.uncased_of
    together = np.bincount(uncased_ids, counts.ngrams[0], len(uncased.vocabulary))
    np.testing.assert_allclose(together, bare.ngrams[0], rtol=1e-5)


def test_a_source_of_cased_words_is_refused(tmp_path: Path) -> None:
    """Which spelling is whose would not be known."""
    cap, _ = read(normalised_model(5, ["a", "A"], order=2), tmp_path / "one.arpa")
    with pytest.raises(ConfigError, match="'New', which is not lower case"):
        Spellings(Vocabulary([b"<unk>", b"<s>", b"</s>", b"New"], unk_in_model=True), cap)
    assert lower(b"\xff") == b"\xff"
